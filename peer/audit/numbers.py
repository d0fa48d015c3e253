"""The numbers that a participant computes in an attempt, each of them once and as soon as it can.

Distances and the bounds of encoding need no draw: there is time for them while others still say
what their results are. Projections need the draw; but nobody has to have told anything for those
of the results and of the parts that are held here, so they are done by the time all have.

A chunk is decoded into the same memory again and again: fresh pages cost more than the arithmetic
on them. Any thread may ask; whoever comes first computes, and the others wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from atoll.collectives.audit.bounds import error_bounds
from atoll.collectives.audit.sketch import F64, distance, sign_bits, sketch
from atoll.collectives.codecs import F32, U8
from atoll.collectives.errors import CodecError
from atoll.peer.audit.statements import Check
from atoll.peer.audit.terms import Work

__all__ = ["Numbers", "Parts", "Seen"]

Parts = Mapping[tuple[int, int], U8]  # (sender, chunk): encoded


class Seen(NamedTuple):
    """Of the result of a chunk: its sketch, how far encoding may have moved it in each bucket, and
    its length."""

    sketch: F32
    bounds: F64
    length: float


class Numbers:
    """``own``: the encoded own parts, one for each chunk, or none. ``held``: those of others, of
    the chunks that this peer owns. ``results``: all chunks, which have been checked."""

    def __init__(self, work: Work, own: Sequence[U8], held: Parts, results: Sequence[U8]) -> None:
        self._work, self._own, self._held, self._results = work, own, held, results
        self._lock = threading.RLock()
        self._bounds: list[tuple[F64, float]] = []  # and lengths, of results
        self._own_norms: list[bytes] = []
        self._norms: dict[tuple[int, int], bytes] = {}  # of what is held; b"": it does not decode
        self._bits: list[U8] = []
        self._check: Check | None = None
        self._seen: list[Seen] = []
        self._told: dict[tuple[int, int], bytes] = {}

    def prepare(self) -> None:
        """What needs no draw."""
        with self._lock:
            if self._bounds:
                return
            work, zeros = self._work, np.zeros(self._work.grid.size(0), np.float32)
            for chunk, values, whole in self._chunks():
                work.codec.decode(self._results[chunk], whole)
                length = float(distance(whole, zeros[: whole.size]))
                bounds = error_bounds(work.codec, self._results[chunk], whole.size, whole)
                self._bounds.append((bounds, length))
                if self._own:
                    work.part_codec.decode(self._own[chunk], values)
                    self._own_norms.append(distance(values, whole).tobytes())
                for place in self._places(chunk):
                    norm = b""
                    if self._decodes(self._held[place], values):
                        norm = distance(values, whole).tobytes()
                    self._norms[place] = norm

    def check(self, seed: bytes) -> Check:
        """What this participant has to say of its own parts."""
        with self._lock:
            if self._check is None:
                self.prepare()
                grid = self._work.grid
                self._bits = [sign_bits(seed, c, grid.size(c)) for c in range(grid.count)]
                told = []
                for chunk, values, _ in self._chunks() if self._own else ():
                    self._work.part_codec.decode(self._own[chunk], values)
                    told.append(sketch(values, self._bits[chunk]).tobytes())
                self._check = Check(seed, b"".join(told), b"".join(self._own_norms))
            return self._check

    def look(self, seed: bytes) -> tuple[Mapping[tuple[int, int], bytes], Sequence[Seen]]:
        """What senders should have told of the parts that are held here, b"" for those that do not
        decode; and what all results look like."""
        with self._lock:
            if not self._seen:
                self.check(seed)
                for chunk, values, whole in self._chunks():
                    bits = self._bits[chunk]
                    self._work.codec.decode(self._results[chunk], whole)
                    self._seen.append(Seen(sketch(whole, bits), *self._bounds[chunk]))
                    for place in self._places(chunk):
                        numbers = self._norms[place]
                        if numbers and self._decodes(self._held[place], values):
                            numbers = sketch(values, bits).tobytes() + numbers
                        self._told[place] = numbers
            return self._told, self._seen

    def _chunks(self) -> Iterator[tuple[int, F32, F32]]:
        """Each with memory for a part and for a result."""
        grid = self._work.grid
        values, whole = (np.empty(grid.size(0), np.float32) for _ in range(2))
        for chunk in range(grid.count):
            size = grid.size(chunk)
            yield chunk, values[:size], whole[:size]

    def _places(self, chunk: int) -> list[tuple[int, int]]:
        places = ((sender, chunk) for sender in self._work.counted)
        return [place for place in places if place in self._held]

    def _decodes(self, part: U8, out: F32) -> bool:
        try:
            self._work.part_codec.decode(part, out)
        except CodecError:
            return False
        return True
