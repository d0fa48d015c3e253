"""Keep what a trainer has published: which numbers can be had, who waits for which, and the bytes.

Theory. Of each name the last KEPT numbers can be had: whoever is an outer step behind its partner
still finds what it needs. A question about a later number waits, because it will be published; one
about an earlier number never can be answered, and says so at once. Without a trainer nothing later
will come, and all that wait for it are told. Each question is answered once. So decides
``PublishedVectors``, which knows no clock and no bytes.

``VectorStore`` has the bytes, encoded; threads write and read a chunk at a time. Its memory, of
each name: the numbers that can be had, and one more while somebody is still in the middle of it.
What cannot be had any more is written over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.collectives import RoundResult, get_codec, grid_for
from atoll.collectives.codecs.base import check_finite
from atoll.collectives.digests import no_digest
from atoll.collectives.errors import CodecError, ConfigError, StateError

KEPT = 2  # numbers of one name
NAMES_MAX = 4  # a method needs two
REQUESTS_OF_ONE_MAX = 16  # of one peer, that wait or are being answered; a trainer's needs are four
WAIT_S = 3600.0  # a question that has waited so long was forgotten by whoever asked
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


class RequestKey(NamedTuple):
    """Name a question, as its answer does."""

    peer: bytes
    ticket: int


@dataclass(frozen=True, slots=True)
class VectorRequest:
    key: RequestKey
    name: str
    number: int
    asked_s: float


@dataclass(frozen=True, slots=True)
class VectorAnswer:
    """Decide to send a vector; or say ``why`` it cannot be had."""

    request: VectorRequest
    why: str = ""


class PublishedVectors:
    """Decide which questions can be answered now, and which wait.

    ``has_trainer``: whether anything more may be published.
    """

    def __init__(self, has_trainer: Callable[[], bool]) -> None:
        self._has_trainer = has_trainer
        self._numbers: dict[str, list[int]] = {}  # ascending, KEPT at most
        self._waiting: dict[RequestKey, VectorRequest] = {}
        self._sending: set[RequestKey] = set()

    # ------------------------------------------------------------ the trainer

    def begin(self, name: str, number: int) -> list[int]:
        """Return the numbers of this name that cannot be had any more, before a new one is stored.

        After a trainer that was further there may be later ones, which are none of the new one's.

        ConfigError for more names than there may be.
        """
        before = self._numbers.get(name, [])
        if name not in self._numbers and len(self._numbers) >= NAMES_MAX:
            raise ConfigError(f"{name!r} would be vector {NAMES_MAX + 1}; at most {NAMES_MAX}")
        kept = [n for n in before if n < number][-(KEPT - 1) :]
        self._numbers[name] = kept
        return [n for n in before if n not in kept]

    def done(self, name: str, number: int) -> list[VectorAnswer]:
        """Note that a vector is stored; return what can be answered now."""
        self._numbers[name].append(number)
        return self._answers(r for r in self._waiting.values() if r.name == name)

    def ended(self) -> list[VectorAnswer]:
        """Answer those who wait in vain, as the trainer has ended."""
        return self._answers(self._waiting.values())

    def newest(self, name: str) -> int:
        """Return the newest number of this name, 0 without any."""
        return max(self._numbers.get(name, ()), default=0)

    # ------------------------------------------------------------ who asks

    def ask(self, request: VectorRequest) -> VectorAnswer | None:
        """Take a question; return its answer, or None if it waits."""
        key = request.key
        if key in self._waiting or key in self._sending:
            return VectorAnswer(request, "this question was asked before")
        if sum(k.peer == key.peer for k in [*self._waiting, *self._sending]) >= REQUESTS_OF_ONE_MAX:
            return VectorAnswer(request, f"{REQUESTS_OF_ONE_MAX} vectors have been asked for")
        self._waiting[key] = request
        return next(iter(self._answers([request])), None)

    def late(self, now_s: float) -> list[VectorAnswer]:
        """Give up the questions that have waited for too long, and return their answers."""
        late = [r for r in self._waiting.values() if now_s - r.asked_s > WAIT_S]
        for request in late:
            del self._waiting[request.key]
        return [VectorAnswer(r, f"it was not published within {WAIT_S:.0f} s") for r in late]

    def wants(self, key: RequestKey) -> bool:
        """Return whether what is being sent is still wanted. Safe in any thread."""
        return key in self._sending

    def over(self, key: RequestKey) -> None:
        """Forget a question whose vector is sent, or not wanted any more."""
        self._waiting.pop(key, None)
        self._sending.discard(key)

    def lost(self, peer: bytes) -> None:
        for key in [k for k in [*self._waiting, *self._sending] if k.peer == peer]:
            self.over(key)

    def _answers(self, requests: Iterable[VectorRequest]) -> list[VectorAnswer]:
        """Return an answer to each of these questions that need not wait any longer."""
        answers = []
        for request in list(requests):
            why = self._verdict(request)
            if why is not None:
                del self._waiting[request.key]
                answers.append(VectorAnswer(request, why))
                if not why:
                    self._sending.add(request.key)
        return answers

    def _verdict(self, request: VectorRequest) -> str | None:
        """Return "" if the vector is here, None if it may come, else why it will not."""
        numbers = self._numbers.get(request.name, [])
        if request.number in numbers:
            return ""
        newest = self.newest(request.name)
        if request.number < newest:
            return f"it is not kept any more: the newest is {newest}"
        return None if self._has_trainer() else "its trainer has ended, or not begun"


# ---------------------------------------------------------------- the bytes


class StoredVector:
    """Hold a vector in the store; its bytes may be another one's as soon as it is ``gone``."""

    def __init__(self, encoded: RoundResult) -> None:
        self.encoded = encoded
        self.readers = 0
        self.gone = False


class VectorStore:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stored: dict[tuple[str, int], StoredVector] = {}
        self._pinned: dict[str, StoredVector] = {}  # by name: not to be had, but read
        self._spares: dict[str, RoundResult] = {}

    def check(self, name: str, number: int, values: F32, codec_name: str) -> None:
        """Raise CodecError for what ``put`` would not take, before older vectors go for it."""
        get_codec(codec_name)
        try:
            check_finite(values)
        except CodecError as error:
            raise CodecError(
                f"{name} {number}: {error.what}",
                fix="look for the step that made them; what was published before can still be had",
            ) from error

    def put(self, name: str, number: int, values: F32, codec_name: str) -> None:
        """Keep float32[n] that ``check`` takes; afterwards they are what others will decode.

        MemoryError.
        """
        codec, encoded = get_codec(codec_name), self._memory(name, values.size, codec_name)
        for chunk in range(encoded.grid.count):
            part = values[slice(*encoded.grid.bounds(chunk))]
            codec.encode(part, encoded.view(chunk))
            codec.decode(encoded.view(chunk), part)
        with self._lock:
            self._stored[name, number] = StoredVector(encoded)

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

    def open(self, name: str, number: int) -> StoredVector:
        """Return a vector, to be read until ``close``; StateError if it is not here."""
        with self._lock:
            stored = self._stored.get((name, number))
            if stored is None:
                raise StateError(f"{name} {number} is not kept any more")
            stored.readers += 1
            return stored

    def read(self, stored: StoredVector, chunk: int) -> U8:
        """Return a chunk's bytes, copied; StateError if they are gone: the reader was too slow."""
        with self._lock:
            if stored.gone:
                raise StateError("newer ones have taken its place meanwhile")
            return stored.encoded.view(chunk).copy()

    def close(self, name: str, stored: StoredVector) -> None:
        with self._lock:
            stored.readers -= 1
            if not stored.readers and self._pinned.get(name) is stored:
                del self._pinned[name]
                self._give_up(name, stored)

    def _give_up(self, name: str, stored: StoredVector) -> None:
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
    return RoundResult(get_codec(codec), grid_for(elements), digest=no_digest)
