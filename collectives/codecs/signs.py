"""Encode in one bit and in three values: sign and ternary.

    sign       code = sign bit, scale = mean |x| of 256                    value = +scale, -scale
    ternary    code = 0, 1 (plus), 2 (minus), scale of 4096                value = 0, +scale, -scale

ternary is TernGrad (arXiv 1705.07878): values are clipped at 2.5 times the root mean square of the
block, ``scale`` is the largest magnitude that remains, and an element is sent as its sign with the
probability |x| / scale: where u < |x| / scale, u a random multiple of 2**-24 in [0, 1). So it is
unbiased but for what is clipped. Sums are in float64 and in the order of ``scales.fold``.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from atoll.collectives.codecs.base import F32, U8, Contract, Errors, scratch
from atoll.collectives.codecs.blocks import BlockCodec
from atoll.collectives.codecs.packing import byte_table, check_codes, expand, pack
from atoll.collectives.codecs.scales import FloatScales, absmax_of, fold
from atoll.collectives.counter_rng import random_words, unit_floats

_SIGNS: Final = byte_table([1, -1], 1)
_TERNARY: Final = byte_table([0, 1, -1, np.nan], 2)
_CLIP: Final = 2.5


class SignCodec(BlockCodec):
    """Encode as the sign of each element, times the mean magnitude of its block."""

    name = "sign"
    bits = 1
    scales = FloatScales(1, 1, 1)
    contract = Contract("contractive", 1.125, 256, 1 - 1 / 256, Errors(0.362, 0.498, 0.606))

    def _encode_rows(self, rows: F32, scales: U8, codes: U8, lo: int, key: int) -> None:
        self.scales.fit(rows, scales)  # refuses what is not finite
        magnitudes = scratch("doubles", np.float64, rows.size).reshape(rows.shape)
        np.copyto(magnitudes, rows)
        np.absolute(magnitudes, out=magnitudes)
        mean: F32 = (fold(magnitudes) / rows.shape[1]).astype(np.float32)
        self.scales.settle(mean, scales)
        whole: U8 = scratch("codes", np.uint8, rows.size)
        np.signbit(rows.reshape(-1), out=whole.view(np.bool_))
        pack(whole, 1, codes)

    def _check_codes(self, codes: U8) -> None:
        """Do nothing: every code stands for a value."""

    def _decode_codes(self, codes: U8, lo: int, key: int, out: F32) -> None:
        expand(codes, _SIGNS, out)


class TernaryCodec(BlockCodec):
    """Encode as TernGrad does, in three values.

    Its error is as large as the values: use it where many peers' errors cancel out.
    """

    name = "ternary"
    bits = 2
    scales = FloatScales(1, 1, 1)
    # With t = |x| / rms, at most 2.5 after clipping, an element adds at most 1 + 2.5 t - 2 t^2.
    contract = Contract(
        "unbiased",
        2 + 32 / 4096,
        4096,
        1.79,
        Errors(1.01, 0.88, 1.0),
        keyed=True,
        idempotent=False,
    )

    def _encode_rows(self, rows: F32, scales: U8, codes: U8, lo: int, key: int) -> None:
        absmax = absmax_of(rows)
        squares = scratch("doubles", np.float64, rows.size).reshape(rows.shape)
        np.copyto(squares, rows)
        np.multiply(squares, squares, out=squares)
        clip = _CLIP * np.sqrt(fold(squares) / rows.shape[1])
        largest: F32 = np.minimum(clip, absmax).astype(np.float32)
        divisors = self.scales.settle(largest, scales)
        tile: F32 = scratch("tile", np.float32, rows.size).reshape(rows.shape)
        np.absolute(rows, out=tile)
        np.divide(tile, divisors[:, None], out=tile)
        words = scratch("words", np.uint32, rows.size)
        random_words(key, lo, words)
        whole: U8 = scratch("codes", np.uint8, rows.size)
        sent = scratch("sent", np.bool_, rows.size)
        np.less(unit_floats(words), tile.reshape(-1), out=sent)
        np.signbit(rows.reshape(-1), out=whole.view(np.bool_))
        np.left_shift(sent.view(np.uint8), whole, out=whole)  # 1 << sign where sent, else 0
        pack(whole, 2, codes)

    def _check_codes(self, codes: U8) -> None:
        check_codes(codes, _TERNARY, self.name)

    def _decode_codes(self, codes: U8, lo: int, key: int, out: F32) -> None:
        expand(codes, _TERNARY, out)
