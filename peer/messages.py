"""The messages of the control links, as frozen dataclasses (design/membership.md's table).

Fields are only ever appended, with defaults, so that neighbouring versions understand each other.
``lineage`` and ``view`` stand first in every message that acts inside a view: a receiver drops
other lineages, answers older views with INSTALL and asks newer ones by PROBE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from atoll.optim.spec import BLOB_BYTES_MAX, SPEC_BYTES_MAX
from atoll.peer.views import (
    MEMBERS_MAX,
    Attempts,
    Ballot,
    Ballots,
    Digest,
    Incarnation,
    Lineage,
    Member,
    PeerId,
    Rounds,
    View,
    Views,
)
from atoll.peer.wire import Within, message

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

Blob = Annotated[bytes, Within(0, BLOB_BYTES_MAX)]
Peers = Annotated[tuple[PeerId, ...], Within(0, MEMBERS_MAX)]
Spec = Annotated[str, Within(0, SPEC_BYTES_MAX)]
Text = Annotated[str, Within(0, 3 * SPEC_BYTES_MAX)]  # quotes two specifications
Bytes = Annotated[int, Within(0, (1 << 62) - 1)]  # moved since the start


@dataclass(frozen=True, slots=True)
class InView:
    """What every message inside a view begins with."""

    lineage: Lineage
    view: Views


@message
@dataclass(frozen=True, slots=True)
class Heartbeat(InView):
    """Member (or learner) to coordinator: liveness, barrier, and repair of lost messages."""

    inc: Incarnation
    round: Rounds
    chain: Digest
    digest: Digest  # of the state after `digest_round`
    digest_round: Annotated[int, Within(-1, (1 << 62) - 1)]
    attached: bool
    arrived: bool  # a submission for round + 1 waits
    weight: float
    frozen: bool
    promised: Ballots  # highest ballot number promised: the coordinator must outbid it
    unsynced: bool
    progress_bytes: Bytes
    run_round: Rounds  # the attempt that this member knows of
    run_attempt: Attempts
    ready_chain: Digest  # not empty: "I hold its result", repeats READY
    epoch: Rounds = 0

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= WEIGHT_MAX:  # refuses NaN too
            raise ValueError(f"a weight is 0 to {WEIGHT_MAX:g}, not {self.weight}")


@message
@dataclass(frozen=True, slots=True)
class CoordinatorBeat(InView):
    """Coordinator to all: liveness, and the last commit in case COMMIT was lost."""

    round: Rounds
    chain: Digest
    waiting: Peers = ()  # whom the next commit waits for ...
    waiting_s: float = 0.0  # ... and since when, for people who ask


@message
@dataclass(frozen=True, slots=True)
class Offer(InView):
    """Member to coordinator of a void run: "my trainer can initialise it", with what."""

    blob: Blob


@message
@dataclass(frozen=True, slots=True)
class Miss(InView):
    """A participant's broken or stalled data edges."""

    round: Rounds
    attempt: Attempts
    peers: Peers


@message
@dataclass(frozen=True, slots=True)
class Begin(InView):
    """Start an attempt. ``participants`` are sorted peer ids with their ``weights``."""

    round: Rounds
    attempt: Attempts
    kind: str
    participants: Peers
    weights: tuple[float, ...]
    blob: Blob = b""  # INIT only

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

    round: Rounds
    attempt: Attempts
    chain: Digest


@message
@dataclass(frozen=True, slots=True)
class Repair(InView):
    """Coordinator to member: fetch the result from a holder instead of reducing it again."""

    round: Rounds
    attempt: Attempts
    holder: PeerId


@message
@dataclass(frozen=True, slots=True)
class Commit(InView):
    round: Rounds
    attempt: Attempts
    chain: Digest


@message
@dataclass(frozen=True, slots=True)
class Resync(InView):
    """Coordinator to a member whose digest is in the minority: take the state again."""

    round: Rounds
    digest: Digest


@message
@dataclass(frozen=True, slots=True)
class Prepare(InView):
    ballot: Ballot


@message
@dataclass(frozen=True, slots=True)
class Report:
    """What a voter holds, so that nothing that may have been committed is lost."""

    round: Rounds
    chain: Digest
    ready_round: Rounds = 0
    ready_attempt: Attempts = 0
    ready_chain: Digest = b""


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
    round: Rounds = 0
    chain: Digest = b""
    spec: Spec = ""  # its run specification, if it has one, to be compared


@message
@dataclass(frozen=True, slots=True)
class Redirect:
    """Answer of a member that is not the coordinator: whom to connect to."""

    decided: View


@message
@dataclass(frozen=True, slots=True)
class JoinRefused:
    code: Text
    what: Text


@message
@dataclass(frozen=True, slots=True)
class Learn(InView):
    """Coordinator to learner or laggard: bring yourself to this state, from this donor."""

    round: Rounds
    chain: Digest
    digest: Digest
    donor: Member


@message
@dataclass(frozen=True, slots=True)
class Leave(InView):
    inc: Incarnation


@message
@dataclass(frozen=True, slots=True)
class FetchResult(InView):
    """Peer to holder: send me the result of this attempt. Answer: RESULT_HEAD and data frames."""

    round: Rounds
    attempt: Attempts


@message
@dataclass(frozen=True, slots=True)
class ResultHead:
    """``found`` false: ask somebody else."""

    round: Rounds
    attempt: Attempts
    found: bool


@message
@dataclass(frozen=True, slots=True)
class FetchState:
    """Learner to donor: send me the state after this round."""

    round: Rounds


@message
@dataclass(frozen=True, slots=True)
class StateHead:
    """Donor's answer before the data frames: specification blob and the leaf digests."""

    round: Rounds
    found: bool
    blob: Blob = b""
    leaves: bytes = b""  # 32 bytes for each chunk


# What the membership machine hears; the other messages belong to transfers.
MEMBERSHIP = InView | Install | Join | Redirect | JoinRefused
