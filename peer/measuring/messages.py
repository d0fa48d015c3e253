"""What peers say about measuring, over their control links."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from atoll.collectives.plan import STREAMS_MAX
from atoll.peer.group.views import MEMBERS_MAX, PeerId
from atoll.peer.net.wire import Within, message

__all__ = ["ABOUT_LINKS", "AskProbe", "LinkRow", "MayProbe", "ProbeOver", "StreamPlan"]

# Whoever coordinates must not be able to bring a peer to a standstill; slower links are no use.
PACE_MIN_BYTES_PER_S = 100.0
# One value for each peer, None where nothing is known.
Values = Annotated[tuple[float | None, ...], Within(0, MEMBERS_MAX)]


@message(wire="LinkRow")
@dataclass(frozen=True, slots=True)
class LinkRow:
    """Member to coordinator: what it has measured. Of a full view this takes 72 KiB.

    ``up``, ``down``: what it has seen its own links carry; ``out``: to each of ``peers``; bytes per
    second of the wire. ``rtt_s``: the least round trip to each. ``loss``: fraction of the bytes to
    each that were sent again. ``bbr``: losses need not slow what it sends.
    """

    peers: Annotated[tuple[PeerId, ...], Within(0, MEMBERS_MAX)]
    rtt_s: Values
    out: Values
    loss: Values
    up: float | None = None
    down: float | None = None
    bbr: bool = False

    def __post_init__(self) -> None:
        if {len(self.rtt_s), len(self.out), len(self.loss)} != {len(self.peers)}:
            raise ValueError("one value of each kind for each peer")
        if len(set(self.peers)) != len(self.peers):
            raise ValueError("a peer is in a row once")
        for value in (self.up, self.down, *self.rtt_s, *self.out, *self.loss):
            _check(value)


@message(wire="AskProbe")
@dataclass(frozen=True, slots=True)
class AskProbe:
    """May I send a probe to you now?"""


@message(wire="MayProbe")
@dataclass(frozen=True, slots=True)
class MayProbe:
    """The answer. Who may ends with ProbeOver, and in time even without it. ``never``: whoever
    answers takes no probes (`--probes off`)."""

    granted: bool
    never: bool = False


@message(wire="ProbeOver")
@dataclass(frozen=True, slots=True)
class ProbeOver:
    """Others may probe you, as far as I am concerned. ``out``: what I can send to you, in bytes per
    second, as far as I know it now."""

    out: float | None = None

    def __post_init__(self) -> None:
        _check(self.out)


@message(wire="StreamPlan")
@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Coordinator to a member: over how many ``streams`` to send to each of ``peers`` in the coming
    rounds, and at which ``pace``, all streams to one together: bytes per second of the wire; 0: as
    fast as it goes. ``lossy``: the way there loses so much that loss must not slow a stream, so
    these use BBR, where the sender's kernel has it."""

    peers: Annotated[tuple[PeerId, ...], Within(0, MEMBERS_MAX)]
    streams: Annotated[tuple[Annotated[int, Within(1, STREAMS_MAX)], ...], Within(0, MEMBERS_MAX)]
    pace: Annotated[tuple[float, ...], Within(0, MEMBERS_MAX)]
    lossy: Annotated[tuple[bool, ...], Within(0, MEMBERS_MAX)]

    def __post_init__(self) -> None:
        if {len(self.streams), len(self.pace), len(self.lossy)} != {len(self.peers)}:
            raise ValueError("one number of streams, one pace and one mark for each peer")
        for value in self.pace:
            _check(value)
            if 0 < value < PACE_MIN_BYTES_PER_S:
                raise ValueError(f"a pace of {value} bytes per second is none")

    def rows(self) -> Iterator[tuple[bytes, int, float, bool]]:
        """(peer, streams, pace, lossy) of each."""
        return zip(self.peers, self.streams, self.pace, self.lossy, strict=True)


ABOUT_LINKS = (LinkRow, AskProbe, MayProbe, ProbeOver)


def _check(value: float | None) -> None:
    if value is not None and not 0 <= value < math.inf:  # refuses NaN too
        raise ValueError(f"a measurement is a number from 0 on, not {value}")
