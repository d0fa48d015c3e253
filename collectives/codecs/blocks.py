"""Encode with one scale for each block of consecutive elements: what such codecs have in common.

Encoded layout of ``n`` elements, little-endian and without padding between the parts::

    header   the key, 8 bytes, where decoding needs it
    scales   ceil(n / block) of 1 or 4 bytes
    codes    ceil(n * bits / 8) bytes, packed as in packing.py
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from atoll.collectives.codecs.base import F32, U8, TiledCodec, key_bytes
from atoll.collectives.codecs.packing import check_padding, packed_bytes
from atoll.collectives.codecs.scales import Scales


class BlockCodec(TiledCodec):
    """Encode each element in ``bits`` bits of code, and each block with one scale.

    A block has ``contract.block`` elements; ``scales`` keeps their scales.
    """

    bits: int
    scales: Scales

    def encoded_bytes(self, count: int) -> int:
        return self._codes_at(count) + packed_bytes(count, self.bits)

    def encode(self, values: F32, out: U8, key: int = 0) -> None:
        self._check_length(out, values.size)
        header, scales, codes = self._parts(out, values.size)
        header[:] = key_bytes(key, header.size)
        for lo, hi, width in self._tiles(values.size):
            self._encode_rows(
                values[lo:hi].reshape(-1, width),
                self._scales_of(scales, lo, hi),
                codes[packed_bytes(lo, self.bits) : packed_bytes(hi, self.bits)],
                lo,
                key,
            )

    def check(self, data: U8, count: int) -> None:
        self._check_length(data, count)
        _, scales, codes = self._parts(data, count)
        self.scales.check(scales, self.name)
        self._check_codes(codes)
        check_padding(codes, self.bits, count, self.name)

    def block_scales(self, data: U8, count: int) -> F32:
        """Return the scales of checked bytes, float32[blocks].

        A scale is 0 where the values were so small that none is kept.
        """
        return self.scales.load(self._parts(data, count)[1])

    def _decode_tile(self, data: U8, count: int, lo: int, out: F32) -> None:
        header, scales, codes = self._parts(data, count)
        hi, block = lo + out.size, self.contract.block
        part = codes[packed_bytes(lo, self.bits) : packed_bytes(hi, self.bits)]
        self._decode_codes(part, lo, int.from_bytes(header.tobytes(), "little"), out)
        rows = out.reshape(-1, min(block, out.size))
        np.multiply(rows, self.scales.load(self._scales_of(scales, lo, hi))[:, None], out=rows)

    @abstractmethod
    def _encode_rows(self, rows: F32, scales: U8, codes: U8, lo: int, key: int) -> None:
        """Encode a tile that begins with element ``lo``, one block in each row."""

    @abstractmethod
    def _check_codes(self, codes: U8) -> None:
        """Raise CodecError if there is a code that encode never writes."""

    @abstractmethod
    def _decode_codes(self, codes: U8, lo: int, key: int, out: F32) -> None:
        """Decode what the scales are multiplied with, of a tile that begins with element ``lo``."""

    def _blocks(self, count: int) -> int:
        return -(-count // self.contract.block)

    def _codes_at(self, count: int) -> int:
        return self.contract.header_bytes + self.scales.size * self._blocks(count)

    def _parts(self, data: U8, count: int) -> tuple[U8, U8, U8]:
        header, codes_at = self.contract.header_bytes, self._codes_at(count)
        return data[:header], data[header:codes_at], data[codes_at:]

    def _scales_of(self, scales: U8, lo: int, hi: int) -> U8:
        return scales[self.scales.size * (lo // self.contract.block) :][
            : self.scales.size * self._blocks(hi - lo)
        ]


def absolute_block_error(block: int, error: float) -> float:
    """Return a bound on the relative squared error of a block.

    Its largest magnitude, 1, is kept and all of its other elements are off by ``error`` at most,
    and by no more than they are large.
    """
    others = (block - 1) * error**2
    return others / (1 + others)
