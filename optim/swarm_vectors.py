"""Hand vectors of workers of a swarm to each other, with the arithmetic of daemons.

A worker that waits for a vector waits in the meetings of all, and stays there while others still
get further. When nobody does, it is told that the vector comes too late: so time goes by in a
swarm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from atoll.collectives.chunks import grid_for
from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.errors import ConnectError, RoundTimeoutError, StateError
from atoll.optim.swarm_calls import SwarmCall
from atoll.peer.client.session_vectors import Members

KEPT = 2  # numbers of one name, as daemons keep them
Who = tuple[str, str]  # a worker, and a name


class SwarmVectors:
    """Keep what all workers have published, as codecs have left it.

    ``names``: of all workers; ``working``: those whose loops have not ended.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.begin()

    def begin(self) -> None:
        self.working = set(self.names)
        self._kept: dict[Who, dict[int, F32]] = {}
        self._encoded_bytes: dict[Who, int] = {}

    def ended(self, name: str) -> None:
        """Note that the loop of this worker has ended."""
        self.working.discard(name)

    def publish(self, who: Who, number: int, values: F32, codec_name: str) -> None:
        """Publish float32[n], which then is what others get; CodecError if it is not encodable."""
        codec, grid = get_codec(codec_name), grid_for(values.size)
        nbytes = 0
        for chunk in range(grid.count):
            part = values[slice(*grid.bounds(chunk))]
            encoded = np.empty(codec.encoded_bytes(part.size), np.uint8)
            codec.encode(part, encoded)
            codec.decode(encoded, part)
            nbytes += encoded.nbytes
        before = self._kept.get(who, {})
        kept = sorted(n for n in before if n < number)[-(KEPT - 1) :]
        self._kept[who] = {n: before[n] for n in kept} | {number: values.copy()}
        self._encoded_bytes[who] = nbytes

    def newest(self, who: Who) -> int:
        return max(self._kept.get(who, ()), default=0)

    def find(self, who: Who, number: int) -> F32 | None:
        return self._kept.get(who, {}).get(number)

    def encoded_bytes(self, who: Who) -> int:
        """Return how many bytes each vector of this worker and name has, encoded."""
        return self._encoded_bytes.get(who, 0)


class SeenVector(NamedTuple):
    """Hold what a look at a vector has found: its state, the newest number and perhaps its values.

    ``state``: here, with ``values`` unless only the newest number was asked for; late: it has not
    come; gone: it cannot come any more.
    """

    state: str
    newest: int
    values: F32 | None = None


@dataclass
class Look(SwarmCall):
    """Look at what a worker has published.

    ``number`` 0: only which is the newest. ``is_new``: the worker that looks has none of this name,
    so this is what it begins with, which is no traffic of the training.
    """

    vectors: SwarmVectors
    who: Who
    number: int
    is_new: bool
    alike = "for vectors"

    def answers(self, calls: Sequence[Look]) -> tuple[list[SeenVector | None], int]:
        """Return what each call sees, or None while it may still come; and the bytes sent.

        When it may still come for all of them, all are told that it comes too late.
        """
        seen = [call.seen() for call in calls]
        if not any(seen):
            late = [SeenVector("late", call.vectors.newest(call.who)) for call in calls]
            return [*late], 0
        pairs = zip(calls, seen, strict=True)
        sent = [c.who for c, s in pairs if s and s.values is not None and not c.is_new]
        return seen, sum(map(self.vectors.encoded_bytes, sent))

    def seen(self) -> SeenVector | None:
        newest, values = self.vectors.newest(self.who), self.vectors.find(self.who, self.number)
        if not self.number or values is not None:
            return SeenVector("here", newest, values)
        may_come = self.number > newest and self.who[0] in self.vectors.working
        return None if may_come else SeenVector("gone", newest)


class SwarmGossip(ABC):
    """Offer the part of a session that ``atoll.peer.client.session_vectors`` has for a daemon's."""

    peer_name: str
    vectors: SwarmVectors

    def members(self) -> Members:
        """Return all workers: those whose loops have ended too, like peers whose trainers have."""
        return Members(1, self.vectors.names)

    def publish(self, name: str, number: int, values: F32, codec: str = "float32") -> None:
        self.vectors.publish((self.peer_name, name), number, values, codec)

    def newest(self, peer: str, name: str) -> int:
        return self._look(peer, name, 0).newest

    def ask_vector(
        self, peer: str, name: str, number: int, elements: int, codec: str = "float32"
    ) -> SwarmAsked:
        return SwarmAsked(self, peer, name, number)

    def _look(self, peer: str, name: str, number: int) -> SeenVector:
        if peer not in self.vectors.names:
            raise ConnectError(f"{peer} is not in the swarm")
        is_new = not self.vectors.newest((self.peer_name, name))
        look = Look(self.vectors, (peer, name), number, is_new)
        own = look.seen() if peer == self.peer_name else None
        return own or self._meet(look)

    @abstractmethod
    def _meet(self, call: SwarmCall) -> Any:
        """Return the call's answer, in a meeting of all workers that have not ended."""


class SwarmAsked:
    """Wait for a vector; ``atoll.peer.client.session.AskedVector`` says what each call does."""

    def __init__(self, session: SwarmGossip, peer: str, name: str, number: int) -> None:
        self._session, self._place = session, (peer, name, number)
        self._values: F32 | None = None

    def __str__(self) -> str:
        return "{1} {2} of {0}".format(*self._place)

    def wait(self, timeout_s: float) -> None:
        seen = self._session._look(*self._place)
        if seen.state == "gone":
            raise StateError(f"{self} cannot be had: the newest is {seen.newest}")
        if seen.state == "late":
            raise RoundTimeoutError(f"{self} has not been published: all wait", phase="gossip")
        self._values = seen.values

    def read(self) -> F32:
        if self._values is None:
            raise StateError(f"{self} was not waited for")
        shown = self._values.view()
        shown.flags.writeable = False
        return shown

    def drop(self) -> None:
        self._values = None
