"""Define the messages of the control links, as frozen dataclasses.

Fields are only ever appended, with defaults, so that neighbouring versions understand each other.
``lineage`` and ``view`` stand first in every message that acts inside a view: a receiver drops
other lineages, answers older views with INSTALL and asks newer ones by PROBE. What decides
(promises, votes, commits) is signed (signing.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from atoll.collectives.robust.rule import RULE_CHARACTERS_MAX
from atoll.optim.manifest import FRAGMENTS_MAX
from atoll.optim.run_spec import PROBATION_MAX, SPEC_BYTES_MAX
from atoll.peer.membership.kept_chunks import DIGEST_BYTES, KEPT_BYTES_MAX, KEPT_MAX
from atoll.peer.membership.layout import Index, Layout
from atoll.peer.membership.operations import OBJECT_BYTES_MAX, Operation, object_sizes
from atoll.peer.membership.view import (
    ANCESTORS_MAX,
    DEFAULT_RULES,
    MEMBERS_MAX,
    Attempts,
    Ballot,
    Ballots,
    Digest,
    Incarnation,
    Lineage,
    Lives,
    Member,
    PeerId,
    Positions,
    Rounds,
    Rules,
    View,
    Views,
)
from atoll.peer.membership.witness_owners import Owners, Work
from atoll.peer.net.wire import CONTROL_FRAME_BYTES_MAX, Within, message
from atoll.peer.rounds.entries import (
    GATHER,
    INIT,
    KINDS,
    ORIGINS_MAX,
    REDUCE,
    ROUNDS_IN_FLIGHT_MAX,
    STEP,
    WEIGHT_MAX,
    Blob,
    EntryOrigin,
    Fragment,
)

__all__ = [
    "ARCHIVES_TOLD_MAX",
    "CALLERS_MAX",
    "GATHER",
    "HALTED_CHARS_MAX",
    "INIT",
    "MEMBERSHIP",
    "NO_TERMS",
    "REDUCE",
    "STEP",
    "WEIGHT_MAX",
    "Accept",
    "Accepted",
    "AskFinals",
    "AskTrainers",
    "Begin",
    "BootstrapConfig",
    "BootstrapHello",
    "Commit",
    "CoordinatorBeat",
    "Finals",
    "Heartbeat",
    "InView",
    "Install",
    "Join",
    "JoinRefused",
    "Leave",
    "Meet",
    "Miss",
    "Notice",
    "ObjectIs",
    "Offer",
    "Operation",
    "Packed",
    "Prepare",
    "ProbeView",
    "Promise",
    "Proof",
    "Ready",
    "Redirect",
    "Remembered",
    "Repair",
    "Report",
    "Resync",
    "Run",
    "SameBeat",
    "SyncTarget",
    "Terms",
    "Vote",
    "Yield",
]

HALTED_CHARS_MAX = 2000  # a sentence; with every member and its digest it could be much longer
CALLERS_MAX = 8  # that ask in vain to come in: one is enough to hand over for (callers.py)
MARK_BYTES = 8  # of a heartbeat that is not sent again: links are sealed, nobody can forge one
ARCHIVES_TOLD_MAX = 4  # donors beside the view's: to help, not to depend on

Peers = Annotated[tuple[PeerId, ...], Within(0, MEMBERS_MAX)]
Spec = Annotated[str, Within(0, SPEC_BYTES_MAX)]
Text = Annotated[str, Within(0, 3 * SPEC_BYTES_MAX)]  # quotes two specifications
Bytes = Annotated[int, Within(0, (1 << 62) - 1)]  # moved since the start
Signature = Annotated[bytes, Within(0, 64)]  # Ed25519; empty before it is signed


@dataclass(frozen=True, slots=True)
class InView:
    """Hold the fields with which every message inside a view begins."""

    lineage: Lineage
    view: Views


# ---------------------------------------------------------------- elections, views and commits


@message(wire="Run")
@dataclass(frozen=True, slots=True)
class Run:
    """Describe an attempt that a peer knows of.

    It has the root of its result if the peer holds or attests it.
    """

    round: Rounds
    attempt: Attempts
    fragment: Fragment = 0
    root: Digest = b""


Runs = Annotated[tuple[Run, ...], Within(0, ROUNDS_IN_FLIGHT_MAX)]


@message(wire="Prepare")
@dataclass(frozen=True, slots=True)
class Prepare(InView):
    ballot: Ballot


@message(wire="Report")
@dataclass(frozen=True, slots=True)
class Report:
    """Report what a voter holds, so that nothing that may have been committed is lost.

    ``holds``: it has the state after ``round``; witnesses and peers in doubt have not. A peer whose
    files are damaged may know of a later commit than its state, and of results that it is READY
    for and does not have any more.
    """

    round: Rounds
    chain: Digest
    holds: bool
    runs: Runs = ()  # the results beyond what it knows to be committed that it is READY for
    known_round: Rounds = 0  # the last commit that it knows of, if that is later than `round` ...
    known_chain: Digest = b""  # ... with its chain
    missing: Annotated[tuple[Rounds, ...], Within(0, ROUNDS_IN_FLIGHT_MAX)] = ()  # of `runs`
    unchanged: Rounds = 0  # so many rounds, up to the last that it knows of, have changed no state


@message(wire="Remembered")
@dataclass(frozen=True, slots=True)
class Remembered:
    """Tell the latest position that somebody's ledger is known to have had (amnesia.py).

    ``life`` is the process that has said so, and signed it: nobody else can take a vote away by
    remembering more of it than there was.
    """

    peer: PeerId
    inc: Incarnation
    life: Lives
    position: Positions
    sig: Signature = b""


@message(wire="Promise")
@dataclass(frozen=True, slots=True)
class Promise(InView):
    ballot: Ballot
    report: Report
    accepted_ballot: Ballot | None = None
    accepted_view: View | None = None
    inc: Incarnation = 0
    sig: Signature = b""
    life: Lives = 0
    began: Positions = 0  # how long the sender's ledger was when its process began
    remembered: Annotated[tuple[Remembered, ...], Within(0, MEMBERS_MAX)] = ()


@message(wire="Accept")
@dataclass(frozen=True, slots=True)
class Accept(InView):
    ballot: Ballot
    proposal: View


@message(wire="Accepted")
@dataclass(frozen=True, slots=True)
class Accepted(InView):
    """Tell all voters of our vote for a proposal: every acceptor learns the decision itself.

    ``digest`` names the proposal, which its ACCEPT has brought: everybody hears this of everybody,
    and a view is as large as it has members.
    """

    ballot: Ballot
    digest: Digest
    inc: Incarnation = 0
    sig: Signature = b""


@message(wire="Vote")
@dataclass(frozen=True, slots=True)
class Vote:
    """Say whose ACCEPTED it was, with its signature."""

    peer: PeerId
    inc: Incarnation
    sig: Signature


@message(wire="Proof")
@dataclass(frozen=True, slots=True)
class Proof:
    """Show why a view is decided.

    These voters of the view before it have accepted it at one ballot.
    """

    lineage: Lineage
    view: Views
    ballot: Ballot
    votes: Annotated[tuple[Vote, ...], Within(0, MEMBERS_MAX)]


@message(wire="Install")
@dataclass(frozen=True, slots=True)
class Install:
    """Announce a decided view, with its proof; founding views have none.

    ``leave`` of an older one has ended with it.
    """

    decided: View
    proof: Proof | None = None


@message(wire="Commit")
@dataclass(frozen=True, slots=True)
class Commit(InView):
    """Order members to apply the round; signed by the view's coordinator (signing.py)."""

    round: Rounds
    attempt: Attempts
    chain: Digest
    inc: Incarnation = 0
    sig: Signature = b""
    unchanged: Rounds = 0  # so many rounds, up to this one, have changed no state


# ---------------------------------------------------------------- heartbeats


@message(wire="Terms")
@dataclass(frozen=True, slots=True)
class Terms:
    """Hold what the run's specification says of who counts in a round.

    ``least`` is how many have to count; ``rule`` is the robust rule that needs them, if it bears
    anybody.
    """

    probation: Annotated[int, Within(0, PROBATION_MAX)] = 0
    least: Annotated[int, Within(1, MEMBERS_MAX)] = 1
    rule: Annotated[str, Within(0, RULE_CHARACTERS_MAX)] = ""
    audited: bool = False  # nobody's result is believed before most participants have the same
    min_trainers: Annotated[int, Within(1, MEMBERS_MAX)] = 1  # unless the view has a number itself
    asynchronous: bool = False  # a round is of those who have submitted, whoever else computes
    work: Work | None = None

    def __post_init__(self) -> None:
        if not self.rule.isprintable():
            raise ValueError("the name of a rule is printable")

    @property
    def keeps_nothing(self) -> bool:
        """Return whether no step keeps chunks of a broken attempt.

        Under a robust rule or an audit nobody's word is enough for that a chunk was made well, and
        nobody else may have it.
        """
        return self.audited or bool(self.rule)

    @property
    def no_witness_owns(self) -> str:
        """Return why no witness may own parts of a step; "" if it may.

        It is not trained with, so nobody has seen what it does, and it could send what it likes.
        """
        if self.audited:
            return "an audited run trusts no owner that cannot be verified, and a witness cannot"
        if self.rule:
            return f"{self.rule} is to bear liars, and a witness that owns would have to be trusted"
        if self.probation:
            return "who is on probation owns nothing, and a witness never serves one"
        return "" if self.work is not None else "its parts are more than averaged"


NO_TERMS = Terms()  # who joins counts at once, and one peer is enough


@message(wire="Heartbeat")
@dataclass(frozen=True, slots=True)
class Heartbeat(InView):
    """Tell the coordinator that a member (or joiner) lives, and what waits there.

    It serves liveness, the barrier, and the repair of lost messages.
    """

    inc: Incarnation
    round: Rounds
    chain: Digest
    digest: Digest  # of the state after `digest_round`
    digest_round: Annotated[int, Within(-1, (1 << 62) - 1)]
    attached: bool
    arrived: Annotated[tuple[Fragment, ...], Within(0, FRAGMENTS_MAX)]  # submissions that wait ...
    weights: Annotated[tuple[float, ...], Within(0, FRAGMENTS_MAX)]  # ... and their weights
    frozen: bool
    promised: Ballots  # highest ballot number promised: the coordinator must outbid it
    unsynced: bool
    progress_bytes: Bytes
    runs: Runs = ()  # repeats READY
    epoch: Rounds = 0
    fragments: Annotated[int, Within(1, FRAGMENTS_MAX)] = 1  # of the run's specification ...
    in_flight: Annotated[int, Within(1, ROUNDS_IN_FLIGHT_MAX)] = 1  # ... for a witness that leads
    operation: Operation | None = None  # what waits is this and no step ...
    given: Digest = b""  # ... with this object (operations.object_digest)
    terms: Terms | None = None  # of the specification again: of who counts
    # The round at which the trainer came that is there; -1 without one. Of an asynchronous run it
    # is there while it computes too, when `attached` is false.
    since: Annotated[int, Within(-1, (1 << 62) - 1)] = -1
    outbound: bool = False  # nobody can dial it
    # Members to whom it has no link, as positions in the view, ascending (link_graph.py).
    unlinked: Annotated[tuple[Index, ...], Within(0, MEMBERS_MAX)] = ()
    callers: Annotated[tuple[PeerId, ...], Within(0, CALLERS_MAX)] = ()  # see callers.py
    life: Lives = 0  # of the process
    began: Positions = 0  # how long its ledger was when that began ...
    position: Positions = 0  # ... and is now, all of it synced
    pending: bool = False  # the result with a root in `runs` is not on its disk yet
    resigned: bool = False  # it coordinated the view in an earlier life, and does no more
    lag_s: float = 0.0  # how late its event loop was lately (failure_detector.py)
    keeps_rounds: bool = False  # the result with a root in `runs` goes to its disk, or is there
    position_sig: Signature = b""  # of the position, as Remembered has it
    loading: bool = False  # it reads the state of `round` from its disk, and is unsynced until then
    # Members to whom its link leads through a relay, as `unlinked` has them: those to whom nothing
    # else gets, as no relay carries data, and those to whom data get, at the relay's rate.
    control_only: Annotated[tuple[Index, ...], Within(0, MEMBERS_MAX)] = ()
    relayed: Annotated[tuple[Index, ...], Within(0, MEMBERS_MAX)] = ()

    def __post_init__(self) -> None:
        if len(self.arrived) != len(self.weights):
            raise ValueError("one weight per waiting submission")
        for named in (self.unlinked, self.control_only, self.relayed):
            if any(here >= after for here, after in pairwise(named)):
                raise ValueError(f"members without a link are named in order, not {named}")
        if not all(0 <= weight <= WEIGHT_MAX for weight in self.weights):  # refuses NaN too
            raise ValueError(f"weights are 0 to {WEIGHT_MAX:g}, not {self.weights}")


@message(wire="CoordinatorBeat")
@dataclass(frozen=True, slots=True)
class CoordinatorBeat(InView):
    """Tell all that the coordinator lives, and the last commit in case COMMIT was lost."""

    round: Rounds
    chain: Digest
    commit: Commit | None = None  # of this view; none before its first
    waiting: Peers = ()  # whom the next commit waits for ...
    waiting_s: float = 0.0  # ... and since when, for people who ask
    halted: Annotated[str, Within(0, HALTED_CHARS_MAX)] = ""  # why there will be none ...
    held: Annotated[str, Within(0, HALTED_CHARS_MAX)] = ""  # ... or none yet
    left_out: Annotated[str, Within(0, HALTED_CHARS_MAX)] = ""  # who takes no part, and why
    remembered: Annotated[tuple[Remembered, ...], Within(0, MEMBERS_MAX)] = ()
    lag_s: float = 0.0  # as of Heartbeat
    lacks_quorum: bool = False  # too few voters are heard for anything to be committed
    unchanged: Rounds = 0  # so many rounds, up to `round`, have changed no state


@message(wire="SameBeat")
@dataclass(frozen=True, slots=True)
class SameBeat:
    """Say that our last whole heartbeat still holds, word for word, by its mark (heartbeats.py).

    The mark covers lineage and view as well.
    """

    mark: Annotated[bytes, Within(MARK_BYTES, MARK_BYTES)]


@message(wire="Offer")
@dataclass(frozen=True, slots=True)
class Offer(InView):
    """Tell the coordinator of a void run, as a member, that our trainer can initialise it.

    ``blob`` says with what.
    """

    blob: Blob


@message(wire="ObjectIs")
@dataclass(frozen=True, slots=True)
class ObjectIs(InView):
    """Give the coordinator the object that our trainer gives to the GATHER that it waits for."""

    data: Annotated[bytes, Within(1, OBJECT_BYTES_MAX)]


# ---------------------------------------------------------------- rounds


@message(wire="Miss")
@dataclass(frozen=True, slots=True)
class Miss(InView):
    """Report a participant's broken or stalled data edges."""

    round: Rounds
    attempt: Attempts
    peers: Peers


@message(wire="Begin")
@dataclass(frozen=True, slots=True)
class Begin(InView):
    """Start an attempt; ``participants`` are sorted peer ids with their ``weights``.

    In INIT one alone has a weight, whose parameters become the run's; the others hand them on.
    ``kept`` (kept_chunks.py) names chunks that earlier attempts of this round have finished; their
    origins are ``past``, counted from 1: origin 0 is this attempt's own. Without a ``layout`` it is
    a butterfly of equal shares. ``without`` are peers whose trainers were heard of and do not take
    part: late ones, and those that called another operation; these are ``aside`` as well. Of a
    participant only the process takes part that ``lives`` names: a later one has other submissions.
    """

    round: Rounds
    attempt: Attempts
    kind: str
    participants: Peers
    weights: tuple[float, ...]
    blob: Blob = b""  # INIT: the specification; GATHER: the objects
    fragment: Fragment = 0
    past: Annotated[tuple[EntryOrigin, ...], Within(0, ORIGINS_MAX - 1)] = ()
    kept: Annotated[bytes, Within(0, KEPT_BYTES_MAX)] = b""
    layout: Layout | None = None
    operation: Operation | None = None  # GATHER and REDUCE
    without: Peers = ()
    aside: Peers = ()
    lives: Annotated[tuple[Lives, ...], Within(0, MEMBERS_MAX)] = ()  # of the participants
    owners: Owners | None = None  # instead of a layout

    def __post_init__(self) -> None:
        operation = self.operation
        kinds = (INIT, STEP) if operation is None else (operation.kind,)
        if self.kind not in KINDS or self.kind not in kinds:
            raise ValueError("BEGIN has a known kind, and the operation that belongs to it")
        if self.layout is not None and len(self.layout.shares) != len(self.participants):
            raise ValueError("a layout has a share for each participant")
        if self.lives and len(self.lives) != len(self.participants):
            raise ValueError("each participant has a life")
        if self.owners is not None and not {*self.owners.peers}.isdisjoint(self.participants):
            raise ValueError("a witness that owns parts is no participant")
        EntryOrigin(self.participants, self.weights)  # ValueError if these make no sense
        if self.kind == GATHER:
            object_sizes(self.blob, len(self.participants))  # ValueError likewise

    @property
    def origins(self) -> tuple[EntryOrigin, ...]:
        return (EntryOrigin(self.participants, self.weights), *self.past)

    @property
    def helpers(self) -> tuple[bytes, ...]:
        """Return the witnesses that own all parts, if any do."""
        return self.owners.peers if self.owners is not None else ()

    @property
    def exchange(self) -> tuple[bytes, ...]:
        """Return all who exchange data: the participants and the witnesses that own, in order."""
        if self.owners is None:
            return self.participants
        return tuple(sorted((*self.participants, *self.owners.peers)))

    @property
    def counted(self) -> tuple[bytes, ...]:
        """Return the participants whose submissions count: all that weigh anything."""
        return EntryOrigin(self.participants, self.weights).counted


@message(wire="Ready")
@dataclass(frozen=True, slots=True)
class Ready(InView):
    """Say "I hold the whole result of this attempt".

    Of a witness it says "I know that others hold it". It is a vote once it is not ``pending`` any
    more: then its sender's disk has it, and the result.
    """

    round: Rounds
    attempt: Attempts
    root: Digest
    pending: bool = False  # not on its disk yet: no vote
    life: Lives = 0
    keeps_rounds: bool = False  # with the vote its sender's disk has the result, not the vote alone


@message(wire="Notice")
@dataclass(frozen=True, slots=True)
class Notice(InView):
    """Ask one who need not hold a result for its vote: enough copies of it exist.

    It goes from the coordinator to witnesses; of a REDUCE also to replicas that take no part.
    """

    round: Rounds
    attempt: Attempts
    fragment: Fragment
    root: Digest


@message(wire="AskFinals")
@dataclass(frozen=True, slots=True)
class AskFinals(InView):
    """Ask, as coordinator, which chunks of an attempt that has ended are final.

    It goes to participants; to all members where the attempt is given up.
    """

    round: Rounds
    attempt: Attempts


@message(wire="Finals")
@dataclass(frozen=True, slots=True)
class Finals(InView):
    """Answer AskFinals: 32 bytes per chunk of the fragment, zeros where it is not final here."""

    round: Rounds
    attempt: Attempts
    digests: Annotated[bytes, Within(0, DIGEST_BYTES * KEPT_MAX)]
    missing: Peers = ()  # participants whose data was waited for


@message(wire="Repair")
@dataclass(frozen=True, slots=True)
class Repair(InView):
    """Order a member to fetch the result from a holder instead of reducing it again.

    It comes from the coordinator.
    """

    round: Rounds
    attempt: Attempts
    holder: PeerId


@message(wire="Resync")
@dataclass(frozen=True, slots=True)
class Resync(InView):
    """Order a member whose digest is in the minority to take the state again.

    It comes from the coordinator.
    """

    round: Rounds
    digest: Digest


@message(wire="Packed")
@dataclass(frozen=True, slots=True)
class Packed(InView):
    """Carry a long message of the view, compressed by what both ends know (packing.py)."""

    data: Annotated[bytes, Within(1, CONTROL_FRAME_BYTES_MAX)]


# ---------------------------------------------------------------- outside the view


@message(wire="ProbeView")
@dataclass(frozen=True, slots=True)
class ProbeView(InView):
    """Say "You seem to be ahead of me"; the answer is INSTALL."""


@message(wire="Join")
@dataclass(frozen=True, slots=True)
class Join:
    """Ask to come in, as a process outside the view; anyone may be asked."""

    member: Member
    round: Rounds = 0
    chain: Digest = b""
    spec: Spec = ""  # its run specification, if it has one, to be compared


@message(wire="Redirect")
@dataclass(frozen=True, slots=True)
class Redirect:
    """Answer, as a member that is not the coordinator, whom to connect to."""

    decided: View


@message(wire="JoinRefused")
@dataclass(frozen=True, slots=True)
class JoinRefused:
    code: Text
    what: Text


@message(wire="Learn")
@dataclass(frozen=True, slots=True)
class SyncTarget(InView):
    """Tell a joiner, as coordinator, the last commit and who has the state.

    That is the view (its donors) if the joiner lacks it, and archives, which are donors too.
    ``digest``: of the coordinator's state there, if that is where it stands. A joiner that has
    other bytes takes the state anew.
    """

    round: Rounds
    chain: Digest
    decided: View | None = None
    archives: Annotated[tuple[Member, ...], Within(0, ARCHIVES_TOLD_MAX)] = ()
    digest: Digest = b""


@message(wire="Meet")
@dataclass(frozen=True, slots=True)
class Meet:
    """Tell anyone of another lineage, as a coordinator with a quorum, where our own stands."""

    lineage: Lineage
    round: Rounds
    coordinator: Member
    ancestors: Annotated[tuple[Lineage, ...], Within(0, ANCESTORS_MAX)] = ()


@message(wire="Yield")
@dataclass(frozen=True, slots=True)
class Yield(InView):
    """Tell members, as coordinator, that this lineage ends and to join the other one."""

    winner: Meet


@message(wire="Cradle")
@dataclass(frozen=True, slots=True)
class BootstrapConfig:
    """Name those whom founders wait for.

    They are all ``founders`` (addresses), where a run begins; or a majority of ``voters``, the
    members of view ``number`` of ``lineage``, where only checkpoints are left.
    """

    founders: Annotated[tuple[str, ...], Within(0, MEMBERS_MAX)] = ()
    voters: Peers = ()
    lineage: Digest = b""
    number: Views = 0
    ancestors: Annotated[tuple[Lineage, ...], Within(0, ANCESTORS_MAX)] = ()
    rules: Rules = DEFAULT_RULES


@message(wire="Hail")
@dataclass(frozen=True, slots=True)
class BootstrapHello:
    """Call others, to found or resume a run with them.

    It says who waits for them, what it holds, and the lineages since in which it
    has got that.
    """

    member: Member
    cradle: BootstrapConfig  # what it is called on the wire
    round: Rounds = 0
    chain: Digest = b""
    since: Annotated[tuple[Lineage, ...], Within(0, ANCESTORS_MAX)] = ()


@message(wire="Leave")
@dataclass(frozen=True, slots=True)
class Leave(InView):
    inc: Incarnation
    life: Lives = 0


@message(wire="AskTrainers")
@dataclass(frozen=True, slots=True)
class AskTrainers(InView):
    """Ask the coordinator, for somebody here, that rounds need so many trainers.

    It holds from the next view on. Members repeat it with heartbeats.
    """

    min_trainers: Annotated[int, Within(1, MEMBERS_MAX)]


# What the membership machine hears; the other messages belong to transfers.
MEMBERSHIP = InView | SameBeat | Install | Join | Redirect | JoinRefused | Meet | BootstrapHello
