"""Compute the numbers that a participant needs in an attempt, each once and as soon as it can.

Distances and the bounds of encoding need no draw: who brings a chunk of the result computes them,
while others are still on their way; one thread at a time, in the same memory, for fresh pages cost
more than the arithmetic on them. Projections need the draw; but nobody has to have told anything
for those of the results and of the parts that are held here, so they are done by the time all have.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from atoll.collectives.audit.bounds import error_bounds
from atoll.collectives.audit.sketch import F64, distance, sign_bits, sketch
from atoll.collectives.codecs import F32, U8
from atoll.collectives.errors import CodecError
from atoll.peer.verify.statements import Check
from atoll.peer.verify.terms import ReductionTerms

# Chunks that a thread looks at for one that it brings: more than come, so that none are left over
# for long, and few, as its stream waits meanwhile.
EACH_TIME: Final = 2
Parts = Mapping[tuple[int, int], U8]  # (sender, chunk): encoded


class ResultNumbers(NamedTuple):
    """Describe the result of a chunk.

    Its sketch, how far encoding may have moved it in each bucket, and its length.
    """

    sketch: F32
    bounds: F64
    length: float


class _Undrawn(NamedTuple):
    """Hold what needs no draw of a chunk.

    Norms are float32 as bytes, b"" of a part that does not decode.
    """

    bounds: F64
    length: float
    own_norm: bytes
    norms: dict[int, bytes]  # of what is held, by sender


class Numbers:
    """Compute sketches, norms and bounds of own parts, of held parts and of results.

    ``own``: the encoded own parts, one for each chunk, or none. ``held``: those of others, of the
    chunks that this peer owns; all of a chunk are there when its result is.
    """

    def __init__(self, work: ReductionTerms, own: Sequence[U8], held: Parts) -> None:
        self._work, self._own, self._held = work, own, held
        size = work.grid.size(0)
        self._lock = threading.Lock()  # held by whoever computes, with this memory
        self._part: F32 = np.empty(size, np.float32)
        self._whole: F32 = np.empty(size, np.float32)
        self._zeros: F32 = np.zeros(size, np.float32)
        self._came: deque[tuple[int, U8]] = deque()  # chunks of the result that nobody looked at
        self._undrawn: dict[int, _Undrawn] = {}
        self._bits: list[U8] = []
        self._check: Check | None = None
        self._told: dict[tuple[int, int], bytes] = {}
        self._seen: list[ResultNumbers] = []

    def came(self, chunk: int, result: U8) -> None:
        """Take a chunk of the result, which has been checked.

        Safe in any thread, and none has to wait.
        """
        self._came.append((chunk, result))
        if self._lock.acquire(blocking=False):
            try:
                self._catch_up(EACH_TIME)
            finally:
                self._lock.release()

    def check(self, seed: bytes, results: Sequence[U8]) -> Check:
        """Return what this participant has to say of its own parts."""
        with self._lock:
            return self._checked(seed, results)

    def look(
        self, seed: bytes, results: Sequence[U8]
    ) -> tuple[Mapping[tuple[int, int], bytes], Sequence[ResultNumbers]]:
        """Return what senders should have told of the parts held here, and how results look.

        The first is by (sender, chunk): sketch and norm as bytes, b"" for parts that do not decode.
        """
        with self._lock:
            self._checked(seed, results)
            for chunk in range(len(self._seen), len(results)):
                values, whole = self._memory(chunk)
                self._work.codec.decode(results[chunk], whole)
                undrawn, bits = self._undrawn[chunk], self._bits[chunk]
                self._seen.append(
                    ResultNumbers(sketch(whole, bits), undrawn.bounds, undrawn.length)
                )
                for sender, norm in undrawn.norms.items():
                    decodes = norm and self._decodes(self._held[sender, chunk], values)
                    numbers = sketch(values, bits).tobytes() + norm if decodes else b""
                    self._told[sender, chunk] = numbers
            return self._told, self._seen

    def _checked(self, seed: bytes, results: Sequence[U8]) -> Check:
        if self._check is None:
            self._came.extend((c, data) for c, data in enumerate(results) if c not in self._undrawn)
            self._catch_up(len(self._came))
            sketches = []
            for chunk in range(len(results)):
                bits = sign_bits(seed, chunk, self._work.grid.size(chunk))
                self._bits.append(bits)
                if self._own:
                    values, _ = self._memory(chunk)
                    self._work.part_codec.decode(self._own[chunk], values)
                    sketches.append(sketch(values, bits).tobytes())
            norms = (self._undrawn[chunk].own_norm for chunk in range(len(results)))
            self._check = Check(seed, b"".join(sketches), b"".join(norms))
        return self._check

    def _catch_up(self, most: int) -> None:
        for _ in range(min(most, len(self._came))):
            chunk, result = self._came.popleft()
            if chunk not in self._undrawn:
                self._undrawn[chunk] = self._undrawn_of(chunk, result)

    def _undrawn_of(self, chunk: int, result: U8) -> _Undrawn:
        work, own_norm, norms = self._work, b"", dict[int, bytes]()
        values, whole = self._memory(chunk)
        work.codec.decode(result, whole)
        if self._own:
            work.part_codec.decode(self._own[chunk], values)
            own_norm = distance(values, whole).tobytes()
        for sender in work.counted:
            part = self._held.get((sender, chunk))
            if part is not None:
                decodes = self._decodes(part, values)
                norms[sender] = distance(values, whole).tobytes() if decodes else b""
        length = float(distance(whole, self._zeros[: whole.size]))
        bounds = error_bounds(work.codec, result, whole.size, whole)
        return _Undrawn(bounds, length, own_norm, norms)

    def _memory(self, chunk: int) -> tuple[F32, F32]:
        """Return memory for a part of a chunk, and for its result."""
        size = self._work.grid.size(chunk)
        return self._part[:size], self._whole[:size]

    def _decodes(self, part: U8, out: F32) -> bool:
        try:
            self._work.part_codec.decode(part, out)
        except CodecError:
            return False
        return True
