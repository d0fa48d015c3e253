"""One simulated process: a machine, its data plane, its trainer, and what may be wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.peer.membership import events as ev
from atoll.peer.membership.durable_records import Recovered
from atoll.peer.membership.messages import Begin
from atoll.peer.membership.node import Node
from atoll.peer.membership.phase import Phase
from atoll.peer.membership.view import WITNESS
from harness.disks import Disk
from harness.values import Entry, Job, State

__all__ = ["FOREVER_S", "Host", "Trap"]

FOREVER_S = float("inf")


@dataclass(eq=False)
class Trap:
    """A failpoint: the process dies right before or after its next effects of a kind."""

    kind: str
    left: int  # of these effects, until it springs
    side: str  # before or after
    away_s: float = 0.0  # how long the process is gone then


@dataclass(eq=False)
class Host:
    """One process: a machine, its simulated data plane and its trainer."""

    name: str
    node: Node
    life: int = 1  # processes of this name so far
    alive: bool = True
    paused: bool = False  # SIGSTOP: what arrives waits in the socket
    relayed: ev.Relayed = field(default_factory=ev.Relayed)  # as its machine was told last
    off: bool = False  # the whole machine is down: nobody answers, nothing is reset
    trains: bool = False  # submits whenever it can
    hangs: bool = False  # the trainer does not come to an end of its inner phase
    inner_s: float = 0.05
    phases: dict[int, int] = field(default_factory=dict)  # fragment -> its inner phase
    weight: float = 1.0
    slow: float = 1.0  # its data streams take so many times longer
    digest_s: float = 0.001  # from a commit until the digest of its new state is known
    submitted: int = 0  # submissions so far, each with its own number
    regions: dict[int, ev.Submitted] = field(default_factory=dict)  # by its number
    state: State = field(default_factory=State)
    before: State | None = None  # what Undo goes back to
    log: list[Entry] = field(default_factory=list)
    digests: dict[int, bytes] = field(default_factory=dict)
    is_configured: bool = False  # it knows the run's specification
    flipped: bytes = b""  # not empty: memory errors have changed this state
    tainted: bool = False  # ... as far as is known to nobody but the checker
    garbles: bool = False  # its results come out wrong
    reducing: Begin | None = None  # the latest attempt in progress
    jobs: dict[int, Job] = field(default_factory=dict)
    loads: int = 0
    moved_bytes: int = 0
    told_progress_s: float = 0.0
    told: list[tuple[str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    backlog: list[ev.Event] = field(default_factory=list)
    tick_s: float = FOREVER_S
    rate: float = 1.0  # its clock's seconds per second
    skew_s: float = 0.0
    traps: list[Trap] = field(default_factory=list)  # several hosts may share one
    disk: Disk | None = None  # of a durable home ...
    promised: Recovered | None = None  # ... what its ledger and the names of its files say
    peer: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.peer = self.node.me.peer

    def region(self, fragment: int) -> int:
        """The submission that the machine would contribute now, 0 for none."""
        waiting = self.node.follower.submissions.get(fragment)
        found = [number for number, event in self.regions.items() if event is waiting]
        return found[-1] if found else 0

    @property
    def memory(self) -> object:
        """Name who has promised: this incarnation, with a durable home over several processes."""
        return self.disk.memory if self.disk is not None else self, self.node.me.inc

    @property
    def is_replica(self) -> bool:
        return self.node.me.role != WITNESS

    @property
    def round(self) -> int:
        return self.node.follower.round

    @property
    def leads(self) -> bool:
        return self.node.phase is Phase.COORDINATOR
