"""What peers say about measuring, over their control links."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from atoll.peer.group.views import MEMBERS_MAX, PeerId
from atoll.peer.net.wire import Within, message

__all__ = ["ABOUT_LINKS", "AskProbe", "LinkRow", "MayProbe", "ProbeOver"]

# One value for each peer, None where nothing is known.
Values = Annotated[tuple[float | None, ...], Within(0, MEMBERS_MAX)]


@message
@dataclass(frozen=True, slots=True)
class LinkRow:
    """Member to coordinator: what it has measured. Of a full view this takes 72 KiB.

    ``up``, ``down``: what it has seen its own links carry; ``out``: to each of ``peers``; bytes per
    second of the wire. ``rtt_s``: the least round trip to each. ``loss``: fraction of the bytes to
    each that were sent again.
    """

    peers: Annotated[tuple[PeerId, ...], Within(0, MEMBERS_MAX)]
    rtt_s: Values
    out: Values
    loss: Values
    up: float | None = None
    down: float | None = None

    def __post_init__(self) -> None:
        if {len(self.rtt_s), len(self.out), len(self.loss)} != {len(self.peers)}:
            raise ValueError("one value of each kind for each peer")
        if len(set(self.peers)) != len(self.peers):
            raise ValueError("a peer is in a row once")
        for value in (self.up, self.down, *self.rtt_s, *self.out, *self.loss):
            _check(value)


@message
@dataclass(frozen=True, slots=True)
class AskProbe:
    """May I send a probe to you now?"""


@message
@dataclass(frozen=True, slots=True)
class MayProbe:
    """The answer. Who may ends with ProbeOver, and in time even without it."""

    granted: bool


@message
@dataclass(frozen=True, slots=True)
class ProbeOver:
    """Others may probe you, as far as I am concerned. ``out``: what I can send to you, in bytes per
    second, as far as I know it now."""

    out: float | None = None

    def __post_init__(self) -> None:
        _check(self.out)


ABOUT_LINKS = (LinkRow, AskProbe, MayProbe, ProbeOver)


def _check(value: float | None) -> None:
    if value is not None and not 0 <= value < math.inf:  # refuses NaN too
        raise ValueError(f"a measurement is a number from 0 on, not {value}")
