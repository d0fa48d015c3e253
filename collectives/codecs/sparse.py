"""Send one element of 64: the largest ones, or random ones.

topk of ``n`` elements, K of them kept: the 64 of largest magnitude of each 4096 consecutive ones
(of the short last block one for each 64, rounded up; of equal ones the first)::

    lookup    4 * float32
    indices   ceil(12 K / 8) bytes: K places within the block, ascending, 12 bits each
    codes     ceil(2 K / 8) bytes: K codes, value = lookup[code]

With the mean m and the standard deviation s of all K values (the sum of squares divided by K, so
that two opposite values never share a bin), ``code = clamp(rint((x - m) / (6 s / 4) + 2), 0, 3)``:
four bins over six standard deviations, as in SparseLoCo (arXiv 2508.15706). Where s is 0 the code
is 2. An entry of ``lookup`` is the mean of the values with its code, or 0 where there is none. All
in float64, sums from the first to the last.

randk, one element of each 64 consecutive ones (a stratum), so also 64 of 4096::

    header    the key, 8 bytes
    values    ceil(n / 64) * bfloat16

Word j of the key's stream chooses in stratum j, of ``length`` elements: the place is
``word * length >> 32``. The value is multiplied by ``length``, so that it is unbiased, and rounded
to bfloat16 at random: ``(bits + (word & 0xFFFF)) >> 16`` of the float32's bits, which is unbiased
too. Products beyond the largest finite bfloat16 are clamped.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.codecs.base import (
    F32,
    U8,
    WORK_ELEMENTS,
    Codec,
    Contract,
    Errors,
    check_finite,
    key_bytes,
    scratch,
    tiles,
)
from atoll.collectives.codecs.packing import (
    check_padding,
    pack,
    pack12,
    packed_bytes,
    unpack,
    unpack12,
)
from atoll.collectives.codecs.plain import BFLOAT16_MAX
from atoll.collectives.codecs.scales import SCALE_MIN, absmax_of, magnitudes_of
from atoll.collectives.counter_rng import random_words
from atoll.collectives.errors import CodecError

TOP_BLOCK: Final = 4_096  # what a 12-bit index reaches
ONE_OF: Final = 64
LOOKUP_BYTES: Final = 16
KEY_BYTES: Final = 8


class _Kept(NamedTuple):
    """Hold what topk has kept.

    ``lookup``: float32[4]; ``places`` in the vector, intp[K]; ``codes``, uint8[K].
    """

    lookup: F32
    places: NDArray[np.intp]
    codes: U8


class TopKCodec(Codec):
    """Send the 64 largest of 4096, two bits for each value. Made for error feedback.

    A bin may hold very different values, so the bound is weak and holds up to 4,096 of them, those
    of a chunk of 262,144 elements; each bin keeps its sum.
    """

    name = "topk"
    contract = Contract(
        "contractive",
        (12 + 2) / ONE_OF,
        TOP_BLOCK,
        1 - 2**-14,
        Errors(0.882, 0.793, 0.744),
        LOOKUP_BYTES,
        idempotent=False,
    )

    def encoded_bytes(self, count: int) -> int:
        kept = self._kept(count)
        return LOOKUP_BYTES + packed_bytes(kept, 12) + packed_bytes(kept, 2)

    def encode(self, values: F32, out: U8, key: int = 0) -> None:
        self._check_length(out, values.size)
        kept = self._kept(values.size)
        places: NDArray[np.intp] = np.empty(kept, np.intp)
        for lo, hi, width in tiles(values.size, TOP_BLOCK, WORK_ELEMENTS):
            found = _largest(values[lo:hi].reshape(-1, width), -(-width // ONE_OF))
            np.add(found, lo, out=places[lo // ONE_OF :][: found.size])
        lookup, codes = _quantize(values[places])
        indices_at = LOOKUP_BYTES + packed_bytes(kept, 12)
        np.copyto(out[:LOOKUP_BYTES].view("<f4"), lookup)
        pack12((places % TOP_BLOCK).astype(np.uint16), out[LOOKUP_BYTES:indices_at])
        pack(codes, 2, out[indices_at:])

    def check(self, data: U8, count: int) -> None:
        self._parse(data, count)

    def decode(self, data: U8, out: F32) -> None:
        kept = self._parse(data, out.size)
        out.fill(0)
        out[kept.places] = kept.lookup[kept.codes]

    def decode_add(self, data: U8, factor: float, into: F32) -> None:
        kept = self._parse(data, into.size)
        into[kept.places] += (kept.lookup * np.float32(factor))[kept.codes]

    def decode_weigh(self, data: U8, factor: float, into: F32, weights: F32) -> None:
        self.decode_add(data, factor, into)
        ones = scratch("ones", np.uint8, data.size)  # the same places with 1 in all of them
        np.copyto(ones, data)
        ones[:LOOKUP_BYTES].view("<f4").fill(1)
        self.decode_add(ones, factor, weights)

    def _kept(self, count: int) -> int:
        return -(-count // ONE_OF)

    def _parse(self, data: U8, count: int) -> _Kept:
        self._check_length(data, count)
        kept = self._kept(count)
        indices_at = LOOKUP_BYTES + packed_bytes(kept, 12)
        lookup = data[:LOOKUP_BYTES].view("<f4")
        magnitudes = np.abs(lookup)
        allowed = (magnitudes >= SCALE_MIN) & np.isfinite(lookup) | (lookup.view("<u4") == 0)
        if not allowed.all():
            raise CodecError(f"a topk value is not allowed: {lookup[int(np.argmin(allowed))]!r}")
        check_padding(data[indices_at:], 2, kept, self.name)
        indices = unpack12(data[LOOKUP_BYTES:indices_at], kept)
        places = indices + np.arange(kept) // ONE_OF * TOP_BLOCK
        # 12 bits cannot leave a whole block, so only the last block's indices can be too large.
        if (places[1:] <= places[:-1]).any() or (kept and places[-1] >= count):
            raise CodecError("topk indices are out of order, repeated or too large")
        return _Kept(lookup, places, unpack(data[indices_at:], 2, kept))


def _largest(rows: F32, keep: int) -> NDArray[np.intp]:
    """Return the places, in the flat rows, of the largest magnitudes of each row; ascending.

    ``keep`` of each row; of equal ones the first. Raises CodecError on NaN or infinity.
    """
    absmax_of(rows)  # refuses what is not finite
    magnitudes = magnitudes_of(rows)
    sorted_out = scratch("partition", np.int32, rows.size).reshape(rows.shape)
    np.copyto(sorted_out, magnitudes)
    sorted_out.partition(rows.shape[1] - keep, axis=1)
    lowest = sorted_out[:, rows.shape[1] - keep, None]
    chosen = scratch("chosen", np.bool_, rows.size).reshape(rows.shape)
    np.greater_equal(magnitudes, lowest, out=chosen)
    found = np.flatnonzero(chosen)
    if found.size > keep * len(rows):
        # Several equal the smallest that is kept: the first of them are.
        for row in np.flatnonzero(np.count_nonzero(chosen, axis=1) > keep):
            ties = np.flatnonzero(magnitudes[row] == lowest[row])
            surplus = np.count_nonzero(chosen[row]) - keep
            chosen[row, ties[ties.size - surplus :]] = False
        found = np.flatnonzero(chosen)
    return found


def _quantize(values: F32) -> tuple[F32, U8]:
    """Return the lookup and the codes of the values that are kept."""
    lookup: F32 = np.zeros(4, np.float32)
    if not values.size:
        return lookup, np.empty(0, np.uint8)
    exact = values.astype(np.float64)
    # np.add.accumulate adds one after the other, which np.sum does not.
    mean = np.add.accumulate(exact)[-1] / exact.size
    centred = exact - mean
    variance = np.add.accumulate(centred * centred)[-1] / exact.size
    step = 6 * np.sqrt(variance) / 4
    scaled = centred / (step if step > 0 else 1)
    codes = np.clip(np.rint(scaled + 2), 0, 3).astype(np.uint8)
    for code in range(4):
        members = exact[codes == code]
        if members.size:
            lookup[code] = np.add.accumulate(members)[-1] / members.size
    lookup[np.abs(lookup) < SCALE_MIN] = 0  # also makes -0.0 the only zero
    return lookup, codes


class RandKCodec(Codec):
    """Send one random element of each 64, times 64.

    That is unbiased, with an error of 63 times the values.
    """

    name = "randk"
    contract = Contract(
        "unbiased",
        16 / ONE_OF,
        ONE_OF,
        ONE_OF - 1 + 0.001,
        Errors(63, 63, 63),
        KEY_BYTES,
        keyed=True,
        idempotent=False,
    )

    def encoded_bytes(self, count: int) -> int:
        return KEY_BYTES + 2 * -(-count // ONE_OF)

    def encode(self, values: F32, out: U8, key: int = 0) -> None:
        self._check_length(out, values.size)
        check_finite(values)
        out[:KEY_BYTES] = key_bytes(key, KEY_BYTES)
        words, places, lengths = _choice(key, values.size)
        kept = values[places]
        with np.errstate(over="ignore"):
            np.multiply(kept, lengths, out=kept)
        np.clip(kept, -BFLOAT16_MAX, BFLOAT16_MAX, out=kept)
        bits = kept.view(np.uint32)
        bits += words & 0xFFFF
        np.copyto(out[KEY_BYTES:].view("<u2"), bits >> 16, casting="unsafe")

    def check(self, data: U8, count: int) -> None:
        self._check_length(data, count)
        magnitudes = data[KEY_BYTES:].view("<u2") & 0x7FFF
        if magnitudes.size and magnitudes.max() >= 0x7F80:
            raise CodecError("NaN or infinity in randk values")

    def decode(self, data: U8, out: F32) -> None:
        self.check(data, out.size)
        out.fill(0)
        places, kept = self._read(data, out.size)
        out[places] = kept

    def decode_add(self, data: U8, factor: float, into: F32) -> None:
        self.check(data, into.size)
        places, kept = self._read(data, into.size)
        into[places] += kept * np.float32(factor)

    def decode_weigh(self, data: U8, factor: float, into: F32, weights: F32) -> None:
        self.check(data, into.size)
        places, kept = self._read(data, into.size)
        into[places] += kept * np.float32(factor)
        weights[places] += np.float32(factor)

    def _read(self, data: U8, count: int) -> tuple[NDArray[np.intp], F32]:
        key = int.from_bytes(data[:KEY_BYTES].tobytes(), "little")
        bits = data[KEY_BYTES:].view("<u2").astype(np.uint32) << 16
        return _choice(key, count)[1], bits.view(np.float32)


def _choice(key: int, count: int) -> tuple[NDArray[np.uint32], NDArray[np.intp], F32]:
    """Return for each stratum its random word, the place that is sent, and its length."""
    strata = -(-count // ONE_OF)
    words = np.empty(strata, np.uint32)
    random_words(key, 0, words)
    lengths = np.full(strata, ONE_OF, np.uint64)
    if count % ONE_OF:
        lengths[-1] = count % ONE_OF
    places = np.arange(strata) * ONE_OF + (words * lengths >> np.uint64(32)).astype(np.intp)
    return words, places, lengths.astype(np.float32)
