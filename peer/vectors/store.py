"""Store the bytes of published vectors, encoded; threads write and read a chunk at a time.

Memory, of each name: the numbers that can be had, and one more while somebody is still in the
middle of it. What cannot be had any more is written over.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from atoll.collectives import RoundResult, get_codec, grid_for
from atoll.collectives.errors import CodecError, StateError

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


class Stored:
    """Hold a vector in the store; its bytes may be another one's as soon as it is ``gone``."""

    def __init__(self, encoded: RoundResult) -> None:
        self.encoded = encoded
        self.readers = 0
        self.gone = False


class VectorStore:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stored: dict[tuple[str, int], Stored] = {}
        self._pinned: dict[str, Stored] = {}  # by name: it cannot be had any more, but is read
        self._spares: dict[str, RoundResult] = {}

    def put(self, name: str, number: int, values: F32, codec_name: str) -> None:
        """Keep float32[n]; afterwards ``values`` are what others will decode.

        CodecError if they cannot be encoded; MemoryError.
        """
        codec, encoded = get_codec(codec_name), self._memory(name, values.size, codec_name)
        for chunk in range(encoded.grid.count):
            part = values[slice(*encoded.grid.bounds(chunk))]
            try:
                codec.encode(part, encoded.view(chunk))
            except CodecError as error:
                raise CodecError(f"{name} {number}: {error.what}", fix=error.fix) from error
            codec.decode(encoded.view(chunk), part)
        with self._lock:
            self._stored[name, number] = Stored(encoded)

    def drop(self, name: str, numbers: Iterable[int]) -> None:
        """Make these numbers unavailable; one of them may still be read to its end."""
        with self._lock:
            for number in numbers:
                stored = self._stored.pop((name, number), None)
                if stored is None:
                    continue
                if stored.readers and name not in self._pinned:
                    self._pinned[name] = stored
                else:
                    self._give_up(name, stored)

    def open(self, name: str, number: int) -> Stored:
        """Return a vector, to be read until ``close``; StateError if it is not here."""
        with self._lock:
            stored = self._stored.get((name, number))
            if stored is None:
                raise StateError(f"{name} {number} is not kept any more")
            stored.readers += 1
            return stored

    def read(self, stored: Stored, chunk: int) -> U8:
        """Return a chunk's bytes, copied; StateError if they are gone: the reader was too slow."""
        with self._lock:
            if stored.gone:
                raise StateError("newer ones have taken its place meanwhile")
            return stored.encoded.view(chunk).copy()

    def close(self, name: str, stored: Stored) -> None:
        with self._lock:
            stored.readers -= 1
            if not stored.readers and self._pinned.get(name) is stored:
                del self._pinned[name]
                self._give_up(name, stored)

    def _give_up(self, name: str, stored: Stored) -> None:
        stored.gone = True
        self._spares[name] = stored.encoded

    def _memory(self, name: str, elements: int, codec: str) -> RoundResult:
        with self._lock:
            spare = self._spares.pop(name, None)
        if spare is not None and (spare.grid.total, spare.codec.name) == (elements, codec):
            return spare
        return encoded_vector(elements, codec)


def encoded_vector(elements: int, codec: str) -> RoundResult:
    """Return memory for a vector in this codec. CodecError, ConfigError, MemoryError."""
    return RoundResult(get_codec(codec), grid_for(elements))
