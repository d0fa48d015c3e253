"""The machines that ship, under a virtual clock: what scripts (Cluster) and seeds (Arena) share.

A world owns the queue of things to come, the processes, their trainers and their data plane. How
messages travel is its subclasses' business. Nothing here is random: equal scripts, equal runs.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from itertools import compress
from typing import Any

from atoll.peer.membership import events as ev
from atoll.peer.membership.durable_records import ReadyRecord, Recovered
from atoll.peer.membership.messages import GATHER, Begin, Install, Meet, SyncTarget
from atoll.peer.membership.node import Node
from atoll.peer.membership.operations import Call
from atoll.peer.membership.phase import Phase
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import REPLICA, Member
from atoll.peer.net.wire import name_of
from harness.bounded import BoundedNode
from harness.checks import Checker
from harness.disks import Disk
from harness.host import FOREVER_S, Host, Trap
from harness.outlaws import Outlaws
from harness.plane import DataPlane
from harness.tracing import Recorder, trace_name
from harness.values import object_of

__all__ = ["DIAL_AGAIN_S", "LINEAGE", "World", "brief", "peer_id"]

LINEAGE = b"L" * 32
DIAL_AGAIN_S = 0.5  # a shell that was asked for a link goes on dialling
CALL_AGAIN_S = 0.05  # a session asks its daemon again whether a call can be made
TICK_MIN_S = 1e-4  # a machine that asks for the past would stop time
# A run of a seed has some two thousand, the longest ones fifty times as many. More than this are
# peers that answer each other without end.
EVENTS_MAX = 1_000_000
QUEUE_MAX = (
    50_000  # the same, where each answers with several: what waits to happen, usually hundreds
)
REGIONS_KEPT = 16  # of one trainer and of those before it on the same daemon
# Nobody here lies, and no identity runs twice: these notes accuse somebody wrongly.
ALARMS = frozenset({"conflict", "forged", "equivocation", "rejected"})


def peer_id(name: str) -> bytes:
    return name.encode().ljust(32, b".")


class World(ABC):
    """Subclasses say how messages, dials and probes travel and what an open data path is."""

    def __init__(self, timing: Timing | None = None) -> None:
        self.now_s = 0.0
        self.hosts: dict[bytes, Host] = {}
        self.tracing = False
        self.trace: list[str] = []
        self.recorder: Recorder | None = None  # of effects, for tests/golden/traces.txt
        self.committed = 0  # the highest round that anybody has applied
        self.events = 0
        # When it was found last that a kernel acknowledges what a peer sends, by (the peer, its).
        self._answered_s: dict[tuple[bytes, bytes], float] = {}
        self.hold_renewal = False  # the disk hangs: no new incarnation number
        self.rounds_wait = True  # for trainers that compute; not so in an asynchronous run
        self.unusable = ""  # a host whose contribution cannot be read
        self.outbound: set[str] = set()  # names of those that can only dial out
        self.unlinkable: set[frozenset[bytes]] = set()  # pairs that have no common protocol
        # Names of those that carry control links of others who cannot dial each other, and whether
        # they carry their data, too.
        self.relays: dict[str, bool] = {}
        self.load_s = 0.05  # to fetch the whole state from one donor
        self.chunk_s = 0.0025  # to reduce one chunk
        self.broken_s = 0.5  # a data path that stays cut is reported after this time
        self.chunks = 4
        self.fragments = 1
        self.log_rounds = 8  # entries that a donor's log keeps
        self.is_durable = False  # every home has a ledger, rounds and checkpoints
        self.moves = False  # a process with a home listens somewhere else than the one before
        self.save_every = 5  # rounds between two checkpoints of a durable home
        self.read_s = 0.0  # to read one when its process begins
        self.homes: dict[str, Disk] = {}
        self.first_event: ev.Event = ev.Tick()  # of a process that finds a home
        self.configured: ev.Configured | None = None  # what a state says of its run
        self.disk_dice = random.Random(0)  # what a power cut takes
        self.stuck: Callable[[Host, Host], bool] = lambda host, donor: False  # loads that hang
        self.alarms = ALARMS
        self.call_of: Callable[[Host], Call] = lambda host: None  # what a trainer does next: a step
        self.may_die: Callable[[Host], bool] = lambda host: True
        self.sprung: Callable[[Host, Trap], None] = lambda host, trap: None  # it has just died
        self.checker = Checker()
        self.plane = DataPlane(self)
        self.outlaws = Outlaws(self)
        self.checker.decisions.believers = self.outlaws.believers
        self.checker.decisions.lives = self._lives
        self.checker.decisions.name_of = lambda peer: self.hosts[peer].name
        self.timing = timing or Timing()
        self._first: Host | None = None  # whose machine is due first, if that is known
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._incs: dict[str, int] = {}
        self._carry = self._carriers()

    # ------------------------------------------------------------ how things travel

    @abstractmethod
    def send(self, host: Host, peer: bytes, message: object) -> None:
        """To whoever listens at that peer's address."""

    @abstractmethod
    def dial(self, host: Host, peer: bytes) -> None:
        """Until it has the link, as the shell does."""

    @abstractmethod
    def probe(self, host: Host, peer: bytes) -> None:
        """Up, refused or silent, after a round trip."""

    def ask_kernel(self, host: Host, peer: bytes) -> None:
        """The kernel of a stopped process goes on acknowledging what comes, if there is a way."""
        target = self.hosts.get(peer)
        lives = target is not None and target.alive and not target.off
        if target is not None and lives and self._has_ways(host, target):
            self._answered_s[host.peer, peer] = self.now_s
        if (answered_s := self._answered_s.get((host.peer, peer))) is not None:
            event = ev.KernelAnswered(peer, host.skew_s + answered_s * host.rate)
            self.after(0.0, lambda: self.deliver(host, event))

    def _has_ways(self, host: Host, target: Host) -> bool:
        return self.has_way(host, target) and self.has_way(target, host)

    @abstractmethod
    def is_open(self, source: Host, target: Host) -> bool:
        """Whether bulk data of a living process passes in this direction now."""

    def has_way(self, source: Host, target: Host) -> bool:
        """Whether packets pass at all, those of data or of links."""
        return self.is_open(source, target)

    @abstractmethod
    def hear_of_death(self, host: Host) -> None:
        """Tell those linked to it, as far as their kernels can know."""

    # ------------------------------------------------------------ processes

    def add(self, name: str, role: str = REPLICA) -> Host:
        peer = peer_id(name)
        before = self.hosts.get(peer)
        life = before.life + 1 if before is not None else 1
        if self.is_durable:
            host = self._with_home(name, role, life)
        else:
            self._incs[name] = self._incs.get(name, 0) + 1
            member = Member(peer, self._incs[name], role, f"{name}:1")
            host = Host(name, self.make_node(member))
        host.life = life
        self.hosts[peer] = host
        if self.is_durable:
            if host.state.round:
                self.configure(host)
            self.deliver(host, self.first_event)
            self._read_home(host)
            if host.disk is not None and not host.disk.keeps_rounds:
                self.deliver(host, ev.RoundsKept(keeps=False))
        if name in self.outbound:
            self.deliver(host, ev.Reach(outbound=True))
        self.look_at_relays()
        return host

    def address(self, name: str, life: int) -> str:
        """Return where that process of a name listens."""
        return f"{name}:{life if self.moves else 1}"

    def configure(self, host: Host) -> None:
        """Tell a replica of the run's specification, once: it comes with the first state.

        A witness never has one.
        """
        if self.configured is not None and host.is_replica and not host.is_configured:
            host.is_configured = True
            self.deliver(host, self.configured)

    def make_node(self, member: Member, life: int = 0, found: Recovered | None = None) -> Node:
        return BoundedNode(member, self.timing, life=life, recovered=found)

    def _with_home(self, name: str, role: str, life: int) -> Host:
        """A process that reads its home first. One with an empty ledger is a new incarnation."""
        disk = self.homes.setdefault(name, Disk())
        found = disk.open(holds_state=role == REPLICA)
        inc = found.inc
        if not inc:
            self._incs[name] = inc = self._incs.get(name, 0) + 1
            disk.memory = object()
        member = Member(peer_id(name), inc, role, self.address(name, life))
        host = Host(name, self.make_node(member, life, found), disk=disk)
        if role == REPLICA:
            host.promised = found
            host.state, host.log = disk.state(found, self.chunks)
            at = (host.state.round, host.state.chain)
            assert at == found.state or not found.state[0], f"{name} replays to {at}"
            for entry in host.log:  # it may have died between the commit and its consequences
                if entry.chain not in self.checker.truth and found.view is not None:
                    self.checker.committed(entry, found.view.lineage, name, found.view.number)
            host.log = host.log[-self.log_rounds :]
            host.digests[host.state.round] = host.state.digest
            for head in found.ready:
                stored = disk.rounds.get(head.place)
                if stored is not None:
                    host.jobs[head.run.round] = stored.job()
        return host

    def _read_home(self, host: Host) -> None:
        """Its files take a while to be read; then it says what they give."""
        if host.promised is None or not host.promised.has_files:
            return
        disk = self.homes[host.name]
        if self.read_s:
            self.after(self.read_s, lambda: self._home_is_read(host, disk))
        else:
            self._home_is_read(host, disk)

    def _home_is_read(self, host: Host, disk: Disk) -> None:
        promised = host.promised
        if not host.alive or self.hosts[host.peer] is not host or promised is None:
            return
        found = disk.read()
        is_whole = (found.state, found.missing) == (promised.state, promised.missing)
        digest = disk.state(found, self.chunks)[0].digest if is_whole else b""
        if not is_whole:
            host.state, entries = disk.state(found, self.chunks)
            host.log, digest = entries[-self.log_rounds :], host.state.digest
            for number in [n for n in host.jobs if n in found.missing]:
                del host.jobs[number]
        self.deliver(host, ev.HomeRead(*found.state, digest, is_whole, found.missing))

    def _persist(self, host: Host, effect: ev.Persist) -> None:
        disk, record = host.disk, effect.record
        assert disk is not None
        is_ready = isinstance(record, ReadyRecord) and record.begin is not None
        disk.write(effect.position, record, self.plane.stored(host, record) if is_ready else None)
        if effect.synced:
            self.after(disk.sync_s, lambda: self._synced(host, effect.position))

    def _synced(self, host: Host, position: int) -> None:
        """The kernel goes on while the process is stopped, and ends with its machine."""
        disk = host.disk
        if disk is None or not host.alive or self.hosts[host.peer] is not host:
            return
        if disk.fails:
            disk.fails = False
            self.homes[host.name] = host.disk = Disk(disk.sync_s)
            self.deliver(host, ev.LedgerFailed("no space left"))
            return
        disk.sync(position)
        self.deliver(host, ev.Durable(position))

    def saved(self, host: Host) -> None:
        """A checkpoint of the state is on the disk."""
        if host.disk is not None and not host.tainted and not host.flipped:
            host.disk.save(host.state)

    def keeps_rounds(self, name: str, keeps: bool) -> None:
        """There is room on a disk for results of rounds, or none any more."""
        self.homes[name].keeps_rounds = keeps
        self.deliver(self.host(name), ev.RoundsKept(keeps))

    def host(self, name: str) -> Host:
        return self.hosts[peer_id(name)]

    def are_apart(self, one: bytes, other: bytes) -> bool:
        """Return whether there can be no link between two: none of their own, and no relay's."""
        return self.need_relay(one, other) and not self.has_relay(one, other)

    def has_relay(self, one: bytes, other: bytes, *, data: bool = False) -> bool:
        """Return whether one lives that relays, and that both ends have links of their own to."""
        for name, carries_data in self.relays.items():
            host = self.hosts.get(peer_id(name))
            if host is None or not host.alive or host.peer in (one, other):
                continue
            between = not any(self.need_relay(host.peer, end) for end in (one, other))
            if between and carries_data >= data:
                return True
        return False

    def has_data_path(self, one: bytes, other: bytes) -> bool:
        """Return whether data have a way between two: a direct one, or a relay's that carries."""
        return not self.need_relay(one, other) or self.has_relay(one, other, data=True)

    def look_at_relays(self) -> None:
        """End the links whose last relay has gone, make those that one allows, and tell all."""
        if not self.relays:
            return
        for host in self.living():
            for other in self.living():
                if host.peer >= other.peer or not self.need_relay(host.peer, other.peer):
                    continue
                linked = other.peer in host.node.linked or host.peer in other.node.linked
                if linked and self.are_apart(host.peer, other.peer):
                    self.unlink(host, other)
                elif not linked and not self.are_apart(host.peer, other.peer):
                    self.dial(host, other.peer)
            self._tell_relayed(host)

    def unlink(self, one: Host, other: Host) -> None:
        """The link between two has ended."""
        for here, there in ((one, other), (other, one)):
            if there.peer in here.node.linked:
                self.deliver(here, ev.LinkDown(there.peer, "reset"))

    def _tell_relayed(self, host: Host) -> None:
        """As the daemon does: to whom links lead through a relay, and data."""
        far = [p for p in self.hosts if p != host.peer and self.need_relay(host.peer, p)]
        data = frozenset(p for p in far if self.has_relay(host.peer, p, data=True))
        relayed = ev.Relayed(frozenset(far) - data, data)
        if relayed != host.relayed:
            host.relayed = relayed
            self.deliver(host, relayed)

    def need_relay(self, one: bytes, other: bytes) -> bool:
        """Return whether neither of two can dial the other, ever."""
        if self.outbound and one != other:
            here, there = self.hosts.get(one), self.hosts.get(other)
            if here and there and {here.name, there.name} <= self.outbound:
                return True
        return bool(self.unlinkable) and frozenset((one, other)) in self.unlinkable

    def living(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.alive]

    def kill(self, name: str) -> None:
        host = self.host(name)
        host.alive = False
        self.log("{} killed", name)
        self.hear_of_death(host)
        self.look_at_relays()

    def restart(self, name: str, begin: Callable[[Host], None] | None = None) -> Host:
        """The process is back, with the next incarnation and nothing in memory. ``begin``: how it
        comes into the run, if it does not just ask to come in."""
        before = self.host(name)
        assert not before.alive
        if before.off and name in self.homes:
            self.homes[name].lose_power(self.disk_dice)
        host = self.add(name, before.node.me.role)
        host.trains, host.inner_s = before.trains, before.inner_s
        host.weight, host.rate, host.skew_s = before.weight, before.rate, before.skew_s
        host.traps = before.traps
        self.log("{} restarted", name)
        if begin is not None:
            begin(host)
        self.deliver(host, ev.Tick())
        for other in self.living():
            if other is not host:
                self.dial(host, other.peer)
        if host.trains:
            self.train(name)
        return host

    def pause(self, name: str) -> None:
        self.host(name).paused = True
        self.log("{} stopped", name)

    def resume(self, name: str) -> None:
        host = self.host(name)
        host.paused, self._first = False, None
        self.log("{} goes on", name)
        backlog, host.backlog = host.backlog, []
        for event in backlog:
            self.deliver(host, event)

    def part(self, a: Host, b: Host) -> None:
        """One of them does not want the other any more."""
        for here, there in ((a, b), (b, a)):
            if there.peer in here.node.linked:
                self.deliver(here, ev.LinkDown(there.peer, "banned"))

    def leave(self, name: str) -> None:
        self.log("{} asked to leave", name)
        self.give(name, ev.LeaveAsked())

    def _lives(self, here: bytes, member: Member) -> bool:
        """Return whether that very incarnation runs, and neither keeps the other out."""
        host = self.hosts[member.peer]
        runs = host.alive and host.node.me.inc == member.inc
        return runs and not self.outlaws.refuses(here, member.peer)

    # ------------------------------------------------------------ trainers

    def train(self, name: str) -> None:
        host = self.host(name)
        host.trains = True
        if host.round == 0:
            self.give(name, ev.Offered(b"spec"))
        else:
            self._attach(host, range(self.fragments))

    def detach(self, name: str) -> None:
        """The trainer ends."""
        host = self.host(name)
        host.trains = False
        host.phases.clear()
        self.give(name, ev.Detached())

    def _attach(self, host: Host, fragments: Iterable[int]) -> None:
        """Go through an inner phase and submit; a new one takes the place of one under way."""
        if not host.node.follower.attached or not self.rounds_wait:
            self.deliver(host, ev.Attached(waits=self.rounds_wait))
        for fragment in fragments:
            self._order += 1
            host.phases[fragment] = phase = self._order
            wait_s = host.inner_s * (1 + fragment / self.fragments)
            self.after(wait_s, lambda f=fragment, p=phase: self._submit(host, f, p))

    def _submit(self, host: Host, fragment: int, phase: int) -> None:
        if phase != host.phases.get(fragment) or not host.alive:
            return
        if host.hangs:
            self.after(host.inner_s, lambda: self._submit(host, fragment, phase))
            return
        own, call = host.node.follower, self.call_of(host)
        away = own.unsynced or host.node.view is None or own.contributes
        if call is not None and away:  # as peer/daemon/trainer_service.py says
            self.after(CALL_AGAIN_S, lambda: self._submit(host, fragment, phase))
            return
        host.submitted += 1
        weight = host.weight if call is None else 1.0
        me = (host.peer, host.life, host.submitted)
        given = object_of(me) if call is not None and call.kind == GATHER else b""
        event = ev.Submitted(own.round, own.epoch, weight, fragment, call, given)
        host.regions[host.submitted] = event
        self.checker.submissions[me] = weight
        if not self.rounds_wait:
            self.deliver(host, ev.Attached())
        self.deliver(host, event)

    def _tell(self, host: Host, effect: ev.TellTrainer) -> None:
        host.told.append((effect.kind, effect.round))
        if effect.begin is not None:
            self.checker.operated(host, effect.begin)
        for number in list(host.regions)[:-REGIONS_KEPT]:
            del host.regions[number]
        self.log("{} trainer: {} {}", host.name, effect.kind, effect.round)
        if host.trains:
            everything = effect.kind == "reload"
            self._attach(host, range(self.fragments) if everything else (effect.fragment,))

    # ------------------------------------------------------------ time

    def at(self, when_s: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (when_s, self._order, act))

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._order, act))

    def run(self, duration_s: float) -> None:
        end_s = self.now_s + duration_s
        self.at(end_s, lambda: None)
        while self.now_s < end_s:
            self.advance()

    def advance(self) -> None:
        """To whatever is due next: a machine's deadline or something in the queue."""
        due_s = self._queue[0][0] if self._queue else FOREVER_S
        first = self._first
        if first is None or not first.alive or first.paused:
            first = self._first = self._find_first()
        if first is not None and first.tick_s < due_s:
            if first.tick_s > self.now_s:
                self.now_s = first.tick_s
            self.deliver(first, _TICK)
        elif self._queue:
            when_s, _, act = heapq.heappop(self._queue)
            if when_s > self.now_s:
                self.now_s = when_s
            act()
        else:
            raise AssertionError("nothing will ever happen")
        waiting = len(self._queue)
        assert waiting < QUEUE_MAX, f"a storm: {waiting} things to happen at {self.now_s:.3f} s"

    def _find_first(self) -> Host | None:
        """Return whose machine is due first; of several, the one that was added first."""
        first: Host | None = None
        for host in self.hosts.values():
            if host.alive and not host.paused and (first is None or host.tick_s < first.tick_s):
                first = host
        return first

    # ------------------------------------------------------------ events in, effects out

    def give(self, name: str, event: ev.Event) -> None:
        if type(event) is ev.Found:
            self.checker.decisions.rules = event.rules
        if type(event) is ev.TrainersAsked:
            self.checker.decisions.asked.add(event.min_trainers)
        self.deliver(self.host(name), event)

    def deliver(self, host: Host, event: ev.Event) -> None:
        """To that very process: what was meant for a former incarnation is lost with it."""
        if not host.alive or self.hosts[host.peer] is not host:
            return
        if host.paused:
            if type(event) is not ev.Tick:
                host.backlog.append(event)
            return
        self.events += 1
        assert self.events < EVENTS_MAX, f"a storm: {EVENTS_MAX} events by {self.now_s:.3f} s"
        node = host.node
        if type(event) is ev.Received:
            self.checker.decisions.heard(host, event.source)
        elif type(event) is ev.LinkUp:
            self._answered_s[host.peer, event.peer] = self.now_s
        effects = node.handle(event, host.skew_s + self.now_s * host.rate)
        deadline_s = node.next_deadline_s()
        if deadline_s is None:
            host.tick_s = FOREVER_S
        else:
            host.tick_s = max((deadline_s - host.skew_s) / host.rate, self.now_s + TICK_MIN_S)
        if self._first is not None and (host is self._first or host.tick_s <= self._first.tick_s):
            self._first = None  # to be found anew
        if effects:
            if self.recorder is not None:
                self.recorder.record(self.now_s, host.name, effects)
            self.checker.watch(host, event, effects)
            if host.traps:
                effects = self._spring(host, effects)
            for effect in effects:
                if type(effect) is ev.Send:  # most are
                    self.send(host, effect.peer, effect.message)
                else:
                    self._carry[type(effect)](host, effect)

    def _spring(self, host: Host, effects: list[ev.Effect]) -> list[ev.Effect]:
        """A failpoint: the process dies right before or after its n-th effect of a kind."""
        for i, effect in enumerate(effects):
            name = effect_name(effect)
            for trap in host.traps:
                if trap.kind != name:
                    continue
                trap.left -= 1
                if trap.left > 0 or not self.may_die(host):
                    continue
                host.traps.remove(trap)
                self.log("{} dies {} {}", host.name, trap.side, name)
                for last in effects[: i + (trap.side == "after")]:
                    self._carry[type(last)](host, last)
                if host.alive:
                    self.kill(host.name)
                self.sprung(host, trap)
                return []
        return effects

    def log(self, text: str, *parts: object) -> None:
        if self.tracing:
            self.trace.append(f"{self.now_s:9.4f} {text.format(*parts)}")

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.trace[-lines:])

    def _carriers(self) -> dict[type, Callable[[Host, Any], None]]:
        plane = self.plane
        return {
            ev.Send: lambda host, effect: self.send(host, effect.peer, effect.message),
            ev.Connect: lambda host, effect: self.dial(host, effect.peer),
            ev.AskKernel: lambda host, effect: self.ask_kernel(host, effect.peer),
            ev.ProbePeer: lambda host, effect: self.probe(host, effect.peer),
            ev.Reduce: plane.reduce,
            ev.Fetch: plane.fetch,
            ev.Abort: plane.abort,
            ev.Apply: plane.apply,
            ev.StartSync: plane.copies.sync,
            ev.ListFinal: plane.list_final,
            ev.Undo: plane.undo,
            ev.TakeBack: plane.take_back,
            ev.TellTrainer: self._tell,
            ev.Renew: self._renew,
            ev.Persist: self._persist,
            ev.Installed: self._installed,
            ev.Note: self._note,
            ev.Left: self._left,
        }

    def _renew(self, host: Host, effect: ev.Renew) -> None:
        if self.hold_renewal:
            return
        self._incs[host.name] += 1
        inc = self._incs[host.name]
        self.after(0.0, lambda: self.deliver(host, ev.Incarnated(inc)))

    def _installed(self, host: Host, effect: ev.Installed) -> None:
        self.checker.installed(host, effect.view)
        if self.tracing:
            self.log("{} installed {}", host.name, effect.view.describe())
        for peer in effect.view.peers:
            if peer != host.peer and peer not in host.node.linked:
                self.dial(host, peer)

    def _note(self, host: Host, effect: ev.Note) -> None:
        assert effect.kind not in self.alarms, f"alarm: {effect.kind}: {effect.text}"
        host.notes.append(effect.kind)
        self.log("{} note {}: {}", host.name, effect.kind, effect.text)

    def _left(self, host: Host, effect: ev.Left) -> None:
        assert host.node.phase is Phase.LEFT
        self.log("{} left", host.name)
        self.kill(host.name)


_TICK = ev.Tick()


def effect_name(effect: object) -> str:
    """Return what failpoints and traces call an effect: a message that is sent by its own name."""
    return trace_name(type(effect.message if isinstance(effect, ev.Send) else effect))


def brief(message: object) -> str:
    """A message in a few words, for traces."""
    name = name_of(message)
    if isinstance(message, Install):
        return f"Install {message.decided.number}"
    if isinstance(message, Meet):
        return f"Meet round {message.round}"
    if isinstance(message, Begin):
        names = "".join(chr(p[0]) for p in message.participants)
        shares = message.layout.shares if message.layout is not None else ()
        owning = message.helpers or compress(message.participants, shares)
        owners = "".join(chr(p[0]) for p in owning)
        text = f"Begin {message.round}.{message.attempt} {message.kind} {names}"
        return f"{text}, {owners} own" if owners and owners != names else text
    if isinstance(message, SyncTarget) and message.decided is not None:
        name = f"{name} view {message.decided.number} and"
    number = getattr(message, "round", None)
    return name if number is None else f"{name} {number}"
