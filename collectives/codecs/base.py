"""Define what a codec is, what it promises, and the scratch memory that all of them use."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.counter_rng import KEY_BITS
from atoll.collectives.errors import CodecError

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

# Codecs with one pass or two work in tiles of this size: small enough to stay in cache and to keep
# one per thread, large enough that the fixed cost of a numpy call (about 1 us, and one GIL
# hand-over) is small.
TILE_ELEMENTS: Final = 131_072
# Codecs with many passes need several buffers of a tile at once: some 2 MB for each thread.
WORK_ELEMENTS: Final = 65_536


class Errors(NamedTuple):
    """Hold the expected relative squared error of long vectors of three distributions.

    It is ``|decode(encode(x)) - x|^2 / |x|^2``.
    """

    gauss: float
    laplace: float
    student_t3: float


NO_ERRORS: Final = Errors(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Contract:
    """Say what a codec promises about its error, and what it costs.

    ``exact``: decode(encode(x)) is x. ``unbiased``: right in expectation over keys.
    ``contractive``: the error is smaller than the value, but biased. ``bits_per_element`` includes
    the scales; ``header_bytes`` come on top, once in each encoded vector. ``error_max`` bounds the
    relative squared error of every vector (in expectation over keys), but for values so small or so
    large that the codec flushes or clamps them: it names those. ``keyed``: encoding needs a key of
    its own for each vector. ``idempotent``: encoding what was decoded gives the same bytes.
    """

    kind: Literal["exact", "unbiased", "contractive"]
    bits_per_element: float
    block: int
    error_max: float = 0.0
    errors: Errors = NO_ERRORS
    header_bytes: int = 0
    keyed: bool = False
    idempotent: bool = True

    @property
    def alpha(self) -> float:
        """Return alpha of E|C(x) - x|^2 <= (1 - alpha) |x|^2.

        Error feedback needs it to be positive.
        """
        return 1.0 - self.error_max

    @property
    def omega(self) -> float:
        """Return omega of E|Q(x) - x|^2 <= omega |x|^2."""
        return self.error_max


class Decoder(ABC):
    """Say what encoded bytes are: how many, whether they are right, which values they stand for.

    Stateless, and safe to use from any number of threads. Arrays are one-dimensional and
    C-contiguous. ``decode`` and what is like it check the bytes before they write, so a refused
    input leaves the output alone.
    """

    name: str

    @property
    @abstractmethod
    def part_codec(self) -> Codec:
        """Return the codec by which participants encode what such a result is made of."""

    def part(self, data: U8, participant: int) -> U8 | None:
        """Return what a participant sent of a result; None if the bytes no longer have it."""
        return None

    @abstractmethod
    def encoded_bytes(self, count: int) -> int:
        """Return the exact number of bytes that ``count`` elements take."""

    @abstractmethod
    def check(self, data: U8, count: int) -> None:
        """Raise CodecError unless ``data`` encodes ``count`` finite elements."""

    @abstractmethod
    def decode(self, data: U8, out: F32) -> None:
        """Decode uint8[encoded_bytes(n)] into float32[n]; CodecError on malformed bytes."""

    def _check_length(self, data: U8, count: int) -> None:
        if data.size != self.encoded_bytes(count):
            raise CodecError(
                f"{count} elements take {self.encoded_bytes(count)} bytes in {self.name}, "
                f"not {data.size}"
            )


class Codec(Decoder):
    """Turn values into bytes and back, by a pair of functions.

    Nothing of the size of the input is allocated. The mean of parts is encoded as they are, but for
    coarse ones (``mean_codec``).
    """

    contract: Contract

    @property
    def part_codec(self) -> Codec:
        return self

    @abstractmethod
    def encode(self, values: F32, out: U8, key: int = 0) -> None:
        """Encode float32[n] into uint8[encoded_bytes(n)]; CodecError on NaN or infinity.

        ``key`` has 64 bits. Codecs that are not keyed ignore it. Where decoding needs it, the bytes
        contain it.
        """

    @abstractmethod
    def decode_add(self, data: U8, factor: float, into: F32) -> None:
        """Add ``float32(factor) * decode(data)`` to ``into``, each step rounded to float32.

        Sparse codecs leave alone what they do not contain. Raises CodecError on malformed bytes.
        """

    def decode_columns(self, parts: Sequence[U8], count: int, lo: int, out: F32) -> bool:
        """Decode some columns of several parts into float32[n, c].

        The n parts of ``count`` elements each have passed ``check``; of each the elements from
        ``lo`` on are decoded. They begin with a PIECE (native.py), and end with one or with the
        part. Return False if this codec decodes whole parts only.
        """
        return False

    def decode_weigh(self, data: U8, factor: float, into: F32, weights: F32) -> None:
        """Add as ``decode_add`` does, and add up the factors of each element.

        ``weights += float32(factor)`` for the elements that the bytes contain.
        """
        self.decode_add(data, factor, into)
        np.add(weights, np.float32(factor), out=weights)


class TiledCodec(Codec):
    """Decode any tile by itself: a base of codecs that can."""

    tile_elements: ClassVar[int] = WORK_ELEMENTS

    @abstractmethod
    def _decode_tile(self, data: U8, count: int, lo: int, out: F32) -> None:
        """Decode elements from ``lo`` on, of checked bytes; a tile as ``_tiles`` cuts them."""

    def decode(self, data: U8, out: F32) -> None:
        self.check(data, out.size)
        for lo, hi, _ in self._tiles(out.size):
            self._decode_tile(data, out.size, lo, out[lo:hi])

    def decode_add(self, data: U8, factor: float, into: F32) -> None:
        self.check(data, into.size)
        for lo, hi, _ in self._tiles(into.size):
            values: F32 = scratch("decoded", np.float32, hi - lo)
            self._decode_tile(data, into.size, lo, values)
            np.multiply(values, np.float32(factor), out=values)
            np.add(into[lo:hi], values, out=into[lo:hi])

    def _tiles(self, count: int) -> Iterator[tuple[int, int, int]]:
        return tiles(count, self.contract.block, self.tile_elements)


def tiles(count: int, block: int, tile: int) -> Iterator[tuple[int, int, int]]:
    """Yield (lo, hi, row width) of tiles of whole blocks, then of the short last block."""
    whole = count - count % block
    for lo in range(0, whole, tile):
        yield lo, min(lo + tile, whole), block
    if whole < count:
        yield whole, count, count - whole


def key_bytes(key: int, size: int) -> U8:
    """Return the first ``size`` bytes of a key, little-endian.

    Raises CodecError unless the key has 64 bits.
    """
    if not 0 <= key < 1 << KEY_BITS:
        raise CodecError(f"a codec's key lies in [0, 2^{KEY_BITS}), not {key}")
    return np.frombuffer(key.to_bytes(KEY_BITS // 8, "little"), np.uint8)[:size]


def check_finite(values: F32) -> None:
    """Raise CodecError on NaN or infinity, without a mask of the size of the input."""
    # min and max hand on NaN.
    if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):
        raise CodecError("NaN or infinity in float32 values")


class _Scratch(threading.local):
    """Hold the buffers of one thread; they go when it ends."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, type], NDArray[Any]] = {}


_scratch = _Scratch()


def scratch(use: str, dtype: type, count: int) -> NDArray[Any]:
    """Return this thread's buffer for one use, with any contents.

    It is the caller's until it is asked for that use again.
    """
    buffer = _scratch.buffers.get((use, dtype))
    if buffer is None or buffer.size < count:
        buffer = _scratch.buffers[use, dtype] = np.empty(max(count, WORK_ELEMENTS), dtype)
    return buffer[:count]
