"""Define what goes into the membership machine, and what comes out.

The shell (peer/daemon/daemon.py) turns sockets, threads and timers into *events* and carries
*effects* out, in order; the simulator does the same with a virtual clock and network.

``trace`` is what the traces of the simulator call an effect (tests/harness/tracing.py), whatever
its class is called: renaming one must not look like another protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from atoll.peer.membership.bans import BansBelieved
from atoll.peer.membership.durable_records import Record
from atoll.peer.membership.layout import Advised
from atoll.peer.membership.messages import NO_TERMS, Begin, BootstrapConfig, Operation, Terms
from atoll.peer.membership.view import DEFAULT_RULES, Member, Rules, View

# ---------------------------------------------------------------- events


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
class HomeRead:
    """Report that the files of a home are read, of which the machine knows from the ledger.

    They give the state after ``round``. Unless it ``is_whole``, that is less than the ledger and
    the names of the files had promised: ``missing`` are results that are bad.
    """

    round: int
    chain: bytes
    digest: bytes
    is_whole: bool = True
    missing: frozenset[int] = frozenset()


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
    life: int = 0  # which process of the peer this is; 0 where that is not known


@dataclass(frozen=True, slots=True)
class LinkDown:
    peer: bytes
    why: str


@dataclass(frozen=True, slots=True)
class Reach:
    """Report whether this peer is known to be one that nobody can dial: it can only dial out.

    It is reported whenever that changes; until the first report a peer counts as one that can be
    dialled.
    """

    outbound: bool


@dataclass(frozen=True, slots=True)
class Relayed:
    """Report to whom links lead through a relay, whenever that changes; to all others directly.

    ``control_only``: those to whom no relay carries data; ``data``: those to whom one does.
    """

    control_only: frozenset[bytes] = frozenset()
    data: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class Probed:
    """Answer Probe with what a connection to the peer's address has shown.

    ``refused`` counts only for an address that has accepted us before.
    """

    peer: bytes
    answer: str  # "up", "refused" or "silent"


@dataclass(frozen=True, slots=True)
class KernelAnswered:
    """Answer AskKernel: when a peer's kernel has acknowledged something last.

    ``at_s`` is on the clock of ``Node.handle``. Of a peer without a link nothing is known, and no
    event comes.
    """

    peer: bytes
    at_s: float


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
class Durable:
    """Report that every record up to this position is synced, R of each READY with it."""

    position: int


@dataclass(frozen=True, slots=True)
class RoundsKept:
    """Hear whether results of rounds go to this peer's disk: not where it is full.

    With a ledger they do, until something else is said. What is said of a READY comes before
    Durable.
    """

    keeps: bool


@dataclass(frozen=True, slots=True)
class LedgerFailed:
    """Report that the ledger cannot be written any more: what is said now is not remembered."""

    why: str


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    pass


Event = (
    Tick
    | Found
    | Received
    | LinkUp
    | LinkDown
    | Reach
    | Relayed
    | Probed
    | KernelAnswered
    | Attached
    | BansBelieved
    | Detached
    | BootstrapConfig
    | Restored
    | HomeRead
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
    | Durable
    | LedgerFailed
    | RoundsKept
    | LeaveAsked
)


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Send:
    trace: ClassVar[str] = "Send"
    peer: bytes
    message: object


@dataclass(frozen=True, slots=True)
class Connect:
    """Have a control link to this peer."""

    trace: ClassVar[str] = "Connect"
    peer: bytes
    address: str


@dataclass(frozen=True, slots=True)
class ProbePeer:
    trace: ClassVar[str] = "Probe"
    peer: bytes
    address: str


@dataclass(frozen=True, slots=True)
class AskKernel:
    """Look when the other end of the link to a peer has acknowledged something last."""

    trace: ClassVar[str] = "AskKernel"
    peer: bytes


@dataclass(frozen=True, slots=True)
class Reduce:
    """Take part in this attempt."""

    trace: ClassVar[str] = "Reduce"
    begin: Begin


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the result of this attempt from ``holder``."""

    trace: ClassVar[str] = "Fetch"
    begin: Begin
    holder: bytes


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop the attempt: its frames no longer count."""

    trace: ClassVar[str] = "Abort"
    round: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the result of a round that is committed.

    Its inputs are free again afterwards.
    """

    trace: ClassVar[str] = "Apply"
    begin: Begin
    chain: bytes
    root: bytes = b""  # of the result; operations may be applied by who does not hold it


@dataclass(frozen=True, slots=True)
class ListFinal:
    """List the chunks of this attempt's result that are final here; the attempt has ended."""

    trace: ClassVar[str] = "ListFinal"
    round: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Goal:
    """Name the state that a peer should reach, and from whom.

    ``donors`` are members of the view and archives, the coordinator among them. ``suspect``: our
    own bytes may be wrong although the chain agrees, so they count only where a donor confirms.
    """

    trace: ClassVar[str] = "Goal"
    round: int
    chain: bytes
    coordinator: bytes
    donors: tuple[Member, ...]
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class StartSync:
    """Bring the state to the goal: by log entries, or by chunks and entries.

    A newer goal takes the place of the one under way, which keeps what it has received.
    """

    trace: ClassVar[str] = "CatchUp"
    goal: Goal


@dataclass(frozen=True, slots=True)
class Undo:
    """Take back the last commit: the view builds on the round before.

    It is answered like StartSync.
    """

    trace: ClassVar[str] = "Undo"
    round: int  # the one to go back to
    chain: bytes


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Take back operations, which have changed no state: it stays, and has an earlier round.

    It is answered by Applied.
    """

    trace: ClassVar[str] = "TakeBack"
    round: int  # the one to go back to
    chain: bytes


@dataclass(frozen=True, slots=True)
class Installed:
    """Announce that a view is in force from now on: data streams to its members are wanted."""

    trace: ClassVar[str] = "Installed"
    view: View


@dataclass(frozen=True, slots=True)
class TellTrainer:
    """Tell the trainer what became of a submission.

    ``begin`` is of the operation that was committed; ``text`` says why an operation was not.
    """

    trace: ClassVar[str] = "TellTrainer"
    # "committed", "missed" or "reload"; of operations also "mismatch", "failed" and "lost"
    kind: str
    round: int
    epoch: int
    fragment: int = 0
    begin: Begin | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Renew:
    """Store a new number and answer with Incarnated: this incarnation is out of the run."""

    trace: ClassVar[str] = "Renew"


@dataclass(frozen=True, slots=True)
class Persist:
    """Write a record at the end of the ledger, as number ``position``.

    If it is to be ``synced``, the answer is Durable. Before a READY is, R of its attempt is too; an
    operation changes no state and needs neither.
    """

    trace: ClassVar[str] = "Persist"
    record: Record
    synced: bool
    position: int = 0


@dataclass(frozen=True, slots=True)
class Left:
    """Let the daemon end: the others have agreed to our leave, or need not."""

    trace: ClassVar[str] = "Left"


@dataclass(frozen=True, slots=True)
class Note:
    """Write one line for the event log: an automatic decision and its reason."""

    trace: ClassVar[str] = "Note"
    kind: str
    text: str
    peer: bytes = b""
    fields: dict[str, object] = field(default_factory=dict)


Effect = (
    Send
    | Connect
    | ProbePeer
    | AskKernel
    | Reduce
    | Fetch
    | Abort
    | Apply
    | ListFinal
    | StartSync
    | Undo
    | TakeBack
    | Installed
    | TellTrainer
    | Renew
    | Persist
    | Left
    | Note
)
