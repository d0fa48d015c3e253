"""What goes into the membership machine and what comes out of it.

The shell (peer/daemon.py) turns sockets, threads and timers into events and carries effects out;
the simulator does the same with a virtual clock and network.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.peer.messages import Begin, Learn
from atoll.peer.views import View

__all__ = [
    "Abort",
    "Applied",
    "Apply",
    "Attached",
    "Connect",
    "Detached",
    "Effect",
    "Event",
    "Fetch",
    "Found",
    "Incarnated",
    "Installed",
    "LeaveAsked",
    "Left",
    "LinkDown",
    "LinkUp",
    "LoadState",
    "Note",
    "Offered",
    "Probe",
    "Probed",
    "Progressed",
    "Received",
    "Reduce",
    "ReduceFailed",
    "Reduced",
    "Renew",
    "Send",
    "StateFailed",
    "StateLoaded",
    "Submitted",
    "TellTrainer",
    "Tick",
]

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Found:
    """Found a new run with this (random) lineage."""

    lineage: bytes


@dataclass(frozen=True, slots=True)
class Received:
    source: bytes
    message: object


@dataclass(frozen=True, slots=True)
class LinkUp:
    peer: bytes


@dataclass(frozen=True, slots=True)
class LinkDown:
    peer: bytes
    why: str


@dataclass(frozen=True, slots=True)
class Probed:
    """Answer to Probe. ``refused`` counts only for an address that has accepted us before."""

    peer: bytes
    answer: str  # "up", "refused" or "silent"


@dataclass(frozen=True, slots=True)
class Attached:
    """A trainer is attached and in step with the state."""


@dataclass(frozen=True, slots=True)
class Detached:
    """The trainer is gone; what it submitted to an attempt in progress still counts."""


@dataclass(frozen=True, slots=True)
class Offered:
    """The trainer can initialise a void run; ``blob`` is its specification and manifest."""

    blob: bytes


@dataclass(frozen=True, slots=True)
class Submitted:
    """The trainer's parameters for the next round lie in its region."""

    base_round: int  # the last round that the trainer was told of, or the peer's own
    epoch: int
    weight: float


@dataclass(frozen=True, slots=True)
class Reduced:
    """The whole result of the attempt is here, reduced or fetched; ``root`` covers its bytes."""

    round: int
    attempt: int
    root: bytes


@dataclass(frozen=True, slots=True)
class ReduceFailed:
    """Data edges to ``peers`` broke or made no progress; empty: we cannot take part ourselves."""

    round: int
    attempt: int
    peers: tuple[bytes, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Applied:
    """The state after ``round`` has this digest."""

    round: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Progressed:
    """Bytes that data streams have moved since the start, for the stall detectors."""

    total_bytes: int


@dataclass(frozen=True, slots=True)
class StateLoaded:
    round: int
    chain: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class StateFailed:
    why: str


@dataclass(frozen=True, slots=True)
class Incarnated:
    """Answer to Renew: the stored and synced number of this process's new life."""

    inc: int


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    pass


Event = (
    Tick
    | Found
    | Received
    | LinkUp
    | LinkDown
    | Probed
    | Attached
    | Detached
    | Offered
    | Submitted
    | Reduced
    | ReduceFailed
    | Applied
    | Progressed
    | StateLoaded
    | StateFailed
    | Incarnated
    | LeaveAsked
)

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Send:
    peer: bytes
    message: object


@dataclass(frozen=True, slots=True)
class Connect:
    """Have a control link to this peer."""

    peer: bytes
    address: str


@dataclass(frozen=True, slots=True)
class Probe:
    peer: bytes
    address: str


@dataclass(frozen=True, slots=True)
class Reduce:
    """Take part in this attempt."""

    begin: Begin


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the result of this attempt from ``holder``."""

    begin: Begin
    holder: bytes


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop the attempt: its frames no longer count."""

    round: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Apply:
    """The round is committed: apply its result. Inputs are free again afterwards."""

    begin: Begin
    chain: bytes


@dataclass(frozen=True, slots=True)
class LoadState:
    learn: Learn


@dataclass(frozen=True, slots=True)
class Installed:
    """A view is in force from now on: data streams to its members are wanted."""

    view: View


@dataclass(frozen=True, slots=True)
class TellTrainer:
    kind: str  # "committed", "missed" or "reload"
    round: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Renew:
    """This incarnation is out of the run: store a new number and answer with Incarnated."""


@dataclass(frozen=True, slots=True)
class Left:
    """The others have agreed to our leave, or need not: the daemon may end."""


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the event log: an automatic decision and its reason."""

    kind: str
    text: str
    peer: bytes = b""
    fields: dict[str, object] = field(default_factory=dict)


Effect = (
    Send
    | Connect
    | Probe
    | Reduce
    | Fetch
    | Abort
    | Apply
    | LoadState
    | Installed
    | TellTrainer
    | Renew
    | Left
    | Note
)
