"""Define what peers send each other about measuring: messages and the frames of probes. Sans-I/O.

Messages go over control links. A probe is frames of a data stream that nobody wants, so whoever
receives one drains it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.schedule.plan import STREAMS_MAX
from atoll.peer.membership.view import MEMBERS_MAX, PeerId, View
from atoll.peer.net.wire import Within, message
from atoll.peer.streams.frames import DataHeader

# Whoever coordinates must not be able to bring a peer to a standstill; slower links are no use.
PACE_MIN_BYTES_PER_S = 100.0
MEASURED_MAX = 1e15  # seconds, or bytes per second: no link has more, and status can write it
# One value for each peer, None where nothing is known.
Values = Annotated[tuple[float | None, ...], Within(0, MEMBERS_MAX)]
PROBE = 7  # frame kind, beside those of attempts and transfers (see streams/transfers.py)
# Small, because a frame of a round waits for the one at hand: 13 ms at 10 Mbit/s. Every reader
# keeps so much memory to drain them into.
PROBE_FRAME_BYTES = 16 << 10


@message(wire="LinkRow")
@dataclass(frozen=True, slots=True)
class LinkRow:
    """Tell the coordinator what a member has measured. Of a full view this takes 104 KiB.

    ``up``, ``down``: what it has seen its own links carry; ``out``: to each of ``peers``; bytes per
    second of the wire. ``rtt_s``: the least round trip to each. ``loss``: fraction of the bytes to
    each that were sent again. ``bbr``: losses need not slow what it sends. ``up_cap``,
    ``down_cap``: what it may send and receive, in bytes per second, whatever its links carry.
    ``bounds``: to these it can send what ``out`` says, and nobody has seen what limits that.
    """

    peers: Annotated[tuple[PeerId, ...], Within(0, MEMBERS_MAX)]
    rtt_s: Values
    out: Values
    loss: Values
    up: float | None = None
    down: float | None = None
    bbr: bool = False
    up_cap: float | None = None
    down_cap: float | None = None
    bounds: Annotated[tuple[PeerId, ...], Within(0, MEMBERS_MAX)] = ()

    def __post_init__(self) -> None:
        if {len(self.rtt_s), len(self.out), len(self.loss)} != {len(self.peers)}:
            raise ValueError("one value of each kind for each peer")
        if len(set(self.peers)) != len(self.peers):
            raise ValueError("a peer is in a row once")
        totals = self.up, self.down, self.up_cap, self.down_cap
        for value in (*totals, *self.rtt_s, *self.out, *self.loss):
            _check(value)


@message(wire="AskProbe")
@dataclass(frozen=True, slots=True)
class AskProbe:
    """Ask whether the sender may send a probe to the receiver now."""


@message(wire="MayProbe")
@dataclass(frozen=True, slots=True)
class MayProbe:
    """Answer an AskProbe.

    Who may probe ends with ProbeOver, and in time even without it. ``never``: whoever answers takes
    no probes (`--probes off`).
    """

    granted: bool
    never: bool = False


@message(wire="ProbeOver")
@dataclass(frozen=True, slots=True)
class ProbeOver:
    """Say that others may probe the receiver, as far as the sender is concerned.

    ``out``: what the sender can send to it, in bytes per second, as far as it is known now.
    """

    out: float | None = None

    def __post_init__(self) -> None:
        _check(self.out)


@message(wire="StreamPlan")
@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Tell a member how to send to the others in the coming rounds; the coordinator's message.

    ``streams``: over how many to each of ``peers``. ``pace``: how fast, all streams to one
    together: bytes per second of the wire; 0: as fast as it goes. ``lossy``: the way there loses so
    much that loss must not slow a stream, so these use BBR, where the sender's kernel has it.
    """

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
        """Return an iterator over (peer, streams, pace, lossy) of each peer."""
        return zip(self.peers, self.streams, self.pace, self.lossy, strict=True)


AboutLinks = LinkRow | AskProbe | MayProbe | ProbeOver


def _check(value: float | None) -> None:
    if value is not None and not 0 <= value <= MEASURED_MAX:  # refuses NaN too
        raise ValueError(f"a measurement is a number from 0 to {MEASURED_MAX:g}, not {value}")


def probe_header(view: View) -> DataHeader:
    return DataHeader(PROBE, 0, 0, PROBE_FRAME_BYTES, view.lineage[:8], view.number, 0, 0, 0)


def check_probe(header: DataHeader) -> None:
    """Raise RemoteProtocolError for a probe that takes more memory than a probe may."""
    if header.length > PROBE_FRAME_BYTES:
        raise RemoteProtocolError(
            f"a probe of {header.length:,} bytes; at most {PROBE_FRAME_BYTES:,} are allowed"
        )
