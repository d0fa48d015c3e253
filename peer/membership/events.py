"""Define what goes into the membership machine.

What comes out (effects.py) can be had here too.

The shell (peer/daemon/daemon.py) turns sockets, threads and timers into events and carries effects
out; the simulator does the same with a virtual clock and network.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.peer.membership.bans import BansBelieved
from atoll.peer.membership.effects import (
    Abort,
    Apply,
    Connect,
    Effect,
    Fetch,
    Goal,
    Installed,
    Left,
    ListFinal,
    Note,
    ProbePeer,
    Reduce,
    Renew,
    Send,
    StartSync,
    TellTrainer,
    Undo,
)
from atoll.peer.membership.layout import Advised
from atoll.peer.membership.messages import Cradle, Operation
from atoll.peer.membership.probation import NO_TERMS, Terms
from atoll.peer.membership.view import DEFAULT_RULES, Rules

__all__ = [
    "Abort",
    "Advised",
    "Applied",
    "Apply",
    "Attached",
    "AttemptReduced",
    "BansBelieved",
    "CatchUpFailed",
    "CaughtUp",
    "Configured",
    "Connect",
    "Cradle",
    "Detached",
    "Effect",
    "Event",
    "Fetch",
    "FinalChunks",
    "Found",
    "Goal",
    "HandOver",
    "Incarnated",
    "Installed",
    "LeaveAsked",
    "Left",
    "LinkDown",
    "LinkUp",
    "ListFinal",
    "Note",
    "Offered",
    "ProbePeer",
    "Probed",
    "Progressed",
    "Received",
    "Reduce",
    "ReduceFailed",
    "Renew",
    "Restored",
    "Send",
    "StartSync",
    "Submitted",
    "TellTrainer",
    "Tick",
    "TrainersAsked",
    "Undo",
]


@dataclass(frozen=True, slots=True)
class Tick:
    """Report that time has passed."""


@dataclass(frozen=True, slots=True)
class Found:
    """Found a new run with this (random) lineage; or go on alone from a checkpoint's state."""

    lineage: bytes
    rules: Rules = DEFAULT_RULES
    ancestors: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Restored:
    """Report that the state of a checkpoint is here, before anything else happens."""

    round: int
    chain: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class Configured:
    """Tell the machine what the run's specification asks of it.

    That is known with the first state.
    """

    spec: str  # shown to whoever joins with another one
    fragments: int
    rounds_in_flight: int
    terms: Terms = NO_TERMS


@dataclass(frozen=True, slots=True)
class HandOver:
    """Let this member (empty: the first that can) be the coordinator from the next view on."""

    peer: bytes = b""


@dataclass(frozen=True, slots=True)
class TrainersAsked:
    """Ask, for somebody here, that rounds need so many trainers from now on."""

    min_trainers: int


@dataclass(frozen=True, slots=True)
class Received:
    source: bytes
    message: object


@dataclass(frozen=True, slots=True)
class LinkUp:
    peer: bytes
    address: str = ""  # what it advertises
    srtt_s: float = 0.0  # a round trip, as measured while connecting


@dataclass(frozen=True, slots=True)
class LinkDown:
    peer: bytes
    why: str


@dataclass(frozen=True, slots=True)
class Probed:
    """Answer Probe with what a connection to the peer's address has shown.

    ``refused`` counts only for an address that has accepted us before.
    """

    peer: bytes
    answer: str  # "up", "refused" or "silent"


@dataclass(frozen=True, slots=True)
class Attached:
    """Report that a trainer is attached and in step with the state.

    ``waits`` says whether rounds wait for it; in an asynchronous run not while it computes.
    """

    waits: bool = True


@dataclass(frozen=True, slots=True)
class Detached:
    """Report that the trainer is gone.

    What it submitted to an attempt in progress still counts.
    """


@dataclass(frozen=True, slots=True)
class Offered:
    """Report that the trainer can initialise a void run.

    ``blob`` is its specification and manifest.
    """

    blob: bytes


@dataclass(frozen=True, slots=True)
class Submitted:
    """Report that the trainer's parameters for the next round lie in its region.

    For an ``operation``, its vector does. ``given`` is the object of a GATHER.
    """

    base_round: int  # the last round that the trainer was told of, or the peer's own
    epoch: int
    weight: float
    fragment: int = 0
    operation: Operation | None = None
    given: bytes = b""


@dataclass(frozen=True, slots=True)
class AttemptReduced:
    """Report that the whole result of the attempt is here, reduced or fetched.

    ``root`` covers its bytes.
    """

    round: int
    attempt: int
    root: bytes


@dataclass(frozen=True, slots=True)
class ReduceFailed:
    """Report that data edges to ``peers`` broke or made no progress.

    Without any peer: we cannot take part ourselves.
    """

    round: int
    attempt: int
    peers: tuple[bytes, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Applied:
    """Report the digest of the state after ``round``."""

    round: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Progressed:
    """Report the bytes that streams and reductions have moved since the start.

    They are for the stall detectors.
    """

    total_bytes: int


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Report that the state here is now the one after ``round``.

    It is reported after every entry on the way.
    """

    round: int
    chain: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class CatchUpFailed:
    """Report that nothing is under way any more; the machine asks again."""

    why: str


@dataclass(frozen=True, slots=True)
class FinalChunks:
    """Answer ListFinal: 32 bytes per chunk of the fragment, zeros where it is not final."""

    round: int
    attempt: int
    digests: bytes
    missing: tuple[bytes, ...] = ()  # participants whose data was waited for


@dataclass(frozen=True, slots=True)
class Incarnated:
    """Answer Renew: the stored and synced number of this process's new life."""

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
    | BansBelieved
    | Detached
    | Cradle
    | Restored
    | Configured
    | HandOver
    | TrainersAsked
    | Advised
    | Offered
    | Submitted
    | AttemptReduced
    | ReduceFailed
    | Applied
    | Progressed
    | CaughtUp
    | CatchUpFailed
    | FinalChunks
    | Incarnated
    | LeaveAsked
)
