"""The messages of the control links, as frozen dataclasses (design/membership.md's table).

Fields are only ever appended, with defaults, so that neighbouring versions understand each other.
``lineage`` and ``view`` stand first in every message that acts inside a view: a receiver drops
other lineages, answers older views with INSTALL and asks newer ones by PROBE.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.peer.views import Ballot, Member, View
from atoll.peer.wire import message

__all__ = [
    "INIT",
    "MEMBERSHIP",
    "STEP",
    "WEIGHT_MAX",
    "Accept",
    "Accepted",
    "Begin",
    "Commit",
    "CoordinatorBeat",
    "FetchResult",
    "FetchState",
    "Heartbeat",
    "InView",
    "Install",
    "Join",
    "JoinRefused",
    "Learn",
    "Leave",
    "Miss",
    "Offer",
    "Prepare",
    "ProbeView",
    "Promise",
    "Ready",
    "Redirect",
    "Repair",
    "Report",
    "ResultHead",
    "Resync",
    "StateHead",
]

WEIGHT_MAX = 1e15  # tokens in one round; sums of a thousand of them are exact in float64
INIT = "init"  # log entry 1: specification, manifest and raw parameters of the first trainer
STEP = "step"  # every other entry: an averaged pseudo-gradient


@dataclass(frozen=True, slots=True)
class InView:
    """What every message inside a view begins with."""

    lineage: bytes
    view: int


@message
@dataclass(frozen=True, slots=True)
class Heartbeat(InView):
    """Member (or learner) to coordinator: liveness, barrier, and repair of lost messages."""

    inc: int
    round: int
    chain: bytes
    digest: bytes  # of the state after `digest_round`
    digest_round: int
    attached: bool
    arrived: bool  # a submission for round + 1 waits
    weight: float
    frozen: bool
    promised: int  # highest ballot number promised: the coordinator must outbid it
    unsynced: bool
    progress_bytes: int
    run_round: int  # the attempt that this member knows of
    run_attempt: int
    ready_chain: bytes  # not empty: "I hold its result", repeats READY
    epoch: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= WEIGHT_MAX:  # refuses NaN too
            raise ValueError(f"a weight is 0 to {WEIGHT_MAX:g}, not {self.weight}")
        if not 0 <= self.promised < 1 << 62:
            raise ValueError("an impossible ballot number")


@message
@dataclass(frozen=True, slots=True)
class CoordinatorBeat(InView):
    """Coordinator to all: liveness, and the last commit in case COMMIT was lost."""

    round: int
    chain: bytes
    waiting: tuple[bytes, ...] = ()  # whom the next commit waits for ...
    waiting_s: float = 0.0  # ... and since when, for people who ask


@message
@dataclass(frozen=True, slots=True)
class Offer(InView):
    """Member to coordinator of a void run: "my trainer can initialise it", with what."""

    blob: bytes


@message
@dataclass(frozen=True, slots=True)
class Miss(InView):
    """A participant's broken or stalled data edges."""

    round: int
    attempt: int
    peers: tuple[bytes, ...]


@message
@dataclass(frozen=True, slots=True)
class Begin(InView):
    """Start an attempt. ``participants`` are sorted peer ids with their ``weights``."""

    round: int
    attempt: int
    kind: str
    participants: tuple[bytes, ...]
    weights: tuple[float, ...]
    blob: bytes = b""  # INIT only

    def __post_init__(self) -> None:
        if self.kind not in (INIT, STEP) or len(self.participants) != len(self.weights):
            raise ValueError("BEGIN has a known kind and one weight per participant")
        if list(self.participants) != sorted(set(self.participants)) or not self.participants:
            raise ValueError("BEGIN names its participants once each, in order")
        if not all(0 <= weight <= WEIGHT_MAX for weight in self.weights) or not any(self.weights):
            raise ValueError(f"weights are 0 to {WEIGHT_MAX:g} and not all zero")


@message
@dataclass(frozen=True, slots=True)
class Ready(InView):
    """ "I hold the whole result of this attempt"."""

    round: int
    attempt: int
    chain: bytes


@message
@dataclass(frozen=True, slots=True)
class Repair(InView):
    """Coordinator to member: fetch the result from a holder instead of reducing it again."""

    round: int
    attempt: int
    holder: bytes


@message
@dataclass(frozen=True, slots=True)
class Commit(InView):
    round: int
    attempt: int
    chain: bytes


@message
@dataclass(frozen=True, slots=True)
class Resync(InView):
    """Coordinator to a member whose digest is in the minority: take the state again."""

    round: int
    digest: bytes


@message
@dataclass(frozen=True, slots=True)
class Prepare(InView):
    ballot: Ballot


@message
@dataclass(frozen=True, slots=True)
class Report:
    """What a voter holds, so that nothing that may have been committed is lost."""

    round: int
    chain: bytes
    ready_round: int = 0
    ready_attempt: int = 0
    ready_chain: bytes = b""


@message
@dataclass(frozen=True, slots=True)
class Promise(InView):
    ballot: Ballot
    report: Report
    accepted_ballot: Ballot | None = None
    accepted_view: View | None = None


@message
@dataclass(frozen=True, slots=True)
class Accept(InView):
    ballot: Ballot
    proposal: View


@message
@dataclass(frozen=True, slots=True)
class Accepted(InView):
    """To all voters: every acceptor learns the decision itself."""

    ballot: Ballot
    proposal: View


@message
@dataclass(frozen=True, slots=True)
class Install:
    """A decided view. ``leave`` of an older one has ended with it."""

    decided: View


@message
@dataclass(frozen=True, slots=True)
class ProbeView(InView):
    """ "You seem to be ahead of me": answered with INSTALL."""


@message
@dataclass(frozen=True, slots=True)
class Join:
    """A process outside the view asks to come in. Anyone may be asked."""

    member: Member
    round: int = 0
    chain: bytes = b""
    spec: str = ""  # its run specification, if it has one, to be compared


@message
@dataclass(frozen=True, slots=True)
class Redirect:
    """Answer of a member that is not the coordinator: whom to connect to."""

    decided: View


@message
@dataclass(frozen=True, slots=True)
class JoinRefused:
    code: str
    what: str


@message
@dataclass(frozen=True, slots=True)
class Learn(InView):
    """Coordinator to learner or laggard: bring yourself to this state, from this donor."""

    round: int
    chain: bytes
    digest: bytes
    donor: Member


@message
@dataclass(frozen=True, slots=True)
class Leave(InView):
    inc: int


@message
@dataclass(frozen=True, slots=True)
class FetchResult(InView):
    """Peer to holder: send me the result of this attempt. Answer: RESULT_HEAD and data frames."""

    round: int
    attempt: int


@message
@dataclass(frozen=True, slots=True)
class ResultHead:
    """``found`` false: ask somebody else."""

    round: int
    attempt: int
    found: bool


@message
@dataclass(frozen=True, slots=True)
class FetchState:
    """Learner to donor: send me the state after this round."""

    round: int


@message
@dataclass(frozen=True, slots=True)
class StateHead:
    """Donor's answer before the data frames: specification blob and the leaf digests."""

    round: int
    found: bool
    blob: bytes = b""
    leaves: bytes = b""  # 32 bytes for each chunk


# What the membership machine hears; the other messages belong to transfers.
MEMBERSHIP = InView | Install | Join | Redirect | JoinRefused
