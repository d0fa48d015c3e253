"""The simulated network of seeds: every directed pair has its own delay, cuts, clogs and luck.

Two truths. *Streams*: as TCP. Messages of one link arrive in order, loss only delays them, a cut
holds them, and a link that breaks loses what is under way and tells both ends as far as they can
notice. *Datagrams*: every message may be lost, doubled or late for itself, which the protocol
claims to bear.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256

from harness.bounded import BoundedNode
from harness.host import Host, Trap
from harness.tracing import trace_name
from harness.values import State
from harness.world import DIAL_AGAIN_S, LINEAGE, World, brief, peer_id

from atoll.collectives.errors import RemoteProtocolError
from atoll.peer.membership import events as ev
from atoll.peer.membership.durable_records import Recovered
from atoll.peer.membership.messages import (
    Accept,
    Accepted,
    Begin,
    BootstrapConfig,
    Finals,
    Install,
)
from atoll.peer.membership.operations import Call, Operation
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import (
    ANCESTORS_MAX,
    ARCHIVE,
    REPLICA,
    WITNESS,
    Member,
    View,
    new_lineage,
)
from atoll.peer.net import wire
from atoll.peer.rounds.entries import GATHER, REDUCE
from simulation.losses import Loss
from simulation.options import NAMES, Options
from simulation.seal import Seal

__all__ = ["NAMES", "Arena", "Checkpoint"]

RETRANSMIT_S = 0.2  # what a lost segment costs a stream
NO_PROGRESS_S = 10.0  # peer/net/link.py: a link without a byte for so long breaks
ORDER_S = 1e-6
NEVER_S = 1e6  # nobody reports a data path that carries nothing
BALLOTS = (Accept, Accepted, Install)
OUT_OF_STEP = 0.01  # of the calls are not those of the others
OUT_OF_STEP_OFTEN = 0.1  # ... in a situation of its own
# Where some pairs have no link: a minute is longer than the faults of a seed last.
SOON = Timing(better_s=4.0, cut_off_s=3.0, spare_s=9.0, callers_s=6.0)
# Where somebody cannot keep up: so do the seconds until it is waited for, or dropped.
IMPATIENT = Timing(behind_s=0.3, hold_s=0.4, joiner_stall_s=1.5)


@dataclass(frozen=True)
class Checkpoint:
    """What is on a disk: a state, and the view of who wrote it."""

    state: State
    view: View

    def bootstrap_view(self) -> BootstrapConfig:
        """As `atoll up` with a home and a checkpoint (peer/daemon/options.py): whoever lives asks
        us in, else a majority of that view goes on."""
        view = self.view
        return BootstrapConfig(
            (), view.peers, view.lineage, view.number, view.ancestors, view.rules
        )

    def found(self, mark: bytes) -> ev.Found:
        """As `atoll up --resume`: alone, in a lineage of its own."""
        view = self.view
        ancestors = (*view.ancestors, view.lineage)[-ANCESTORS_MAX:]
        return ev.Found(new_lineage(view.lineage, mark), view.rules, ancestors)


class Arena(World):
    def __init__(self, options: Options) -> None:
        has_pairs = bool(options.outbound or options.unlinkable)
        impatient = IMPATIENT if options.situation == "laggard" else None
        super().__init__(SOON if has_pairs else impatient)
        self.options = options
        self.outbound |= {*options.outbound}
        self.unlinkable |= {frozenset(map(peer_id, pair)) for pair in options.unlinkable}
        self.relays |= {name: name in options.carries for name in options.relays}
        self.dice = random.Random(options.seed ^ 0x5EED)
        self.chunks, self.fragments = options.chunks, options.fragments
        self.chunk_s, self.load_s = options.chunk_s, options.load_s
        self.log_rounds = options.log_rounds
        self.streams = options.network == "streams"
        self.loss, self.double, self.late = options.loss, options.double, 0.0
        self.cuts: set[tuple[bytes, bytes]] = set()
        self.mutes: set[tuple[bytes, bytes]] = set()  # ways that carry no data
        if options.mutes:
            self.broken_s = NEVER_S
        self.clogs: dict[tuple[bytes, bytes], float] = {}  # until when
        self.latest_s = 0.0  # when the last message that is under way arrives
        self.corrupt: set[tuple[bytes, bytes]] = set()  # the next message gets a wrong byte
        self.unreadable: set[bytes] = set()
        self.losses: list[Loss] = []  # that wait for their message
        self.last_hit = ""
        self.ballots_later: dict[bytes, float] = {}  # to whom; they are sent then
        self._delays: dict[tuple[bytes, bytes], float] = {}
        self._last_s: dict[tuple[bytes, bytes], float] = {}
        self._held: dict[tuple[bytes, bytes], list[Callable[[], None]]] = {}
        self._link: dict[frozenset[Host], int] = {}  # number of the link that is up
        self._links = 0
        self._dialling: set[tuple[Host, bytes]] = set()
        self.disks: dict[str, Checkpoint] = {}  # the latest checkpoint of each
        self.formed = False
        self.noted: Counter[str] = Counter()  # kinds, by anybody
        self.seen: Counter[str] = Counter()  # what this run has come to, for the summary
        self.checker.decisions.rules = options.rules
        self.checker.probation, self.checker.least = options.probation, options.least
        self.checker.min_trainers = options.min_trainers
        self.checker.asynchronous = options.asynchronous
        self.checker.statements.keeps_nothing = options.rule or options.audited
        self.rounds_wait = not options.asynchronous
        self.configured = options.configured
        self.call_of = self._call_of
        self._calls: dict[tuple[int, str], Call] = {}  # by round, and who is out of step
        self.out_of_step: set[str] = set()  # names of those that are for a while
        self._carry[ev.Connect] = self._connect
        if options.checkpoints:
            self._carry[ev.Apply] = self._apply_and_save

    def add_host(self, name: str, role: str = "replica") -> Host:
        host = self.add(name, role)
        host.inner_s = self.options.inner_s * self.dice.choice((0.8, 1.0, 1.3))
        host.weight = float(self.dice.choice((1, 2, 5)))
        host.rate = 1.0 + self.options.clock_drift * self.dice.uniform(-1, 1)
        host.skew_s = self.dice.choice((0.0, 1000.0))
        return host

    def _call_of(self, host: Host) -> Call:
        """The same at all trainers that stand at the same round, unless one is out of step."""
        if not self.options.calls:
            return None
        share = OUT_OF_STEP_OFTEN if self.options.situation == "calls" else OUT_OF_STEP
        out_of_step = self.dice.random() < share or host.name in self.out_of_step
        where = (host.round, host.name if out_of_step else "")
        if where not in self._calls:
            self._calls[where] = self._drawn_call(*where)
        return self._calls[where]

    def _drawn_call(self, number: int, name: str) -> Call:
        dice = random.Random(f"{self.options.seed} {number} {name}")
        if dice.random() >= self.options.calls:
            return None
        return dice.choice((Operation(GATHER), Operation(REDUCE, 1000, "sum", "float32")))

    def _note(self, host: Host, effect: ev.Note) -> None:
        self.noted[effect.kind] += 1
        super()._note(host, effect)

    def make_node(
        self, member: Member, life: int = 0, found: Recovered | None = None
    ) -> BoundedNode:
        options = self.options
        signer = Seal(member.peer) if options.signed else None
        return BoundedNode(member, self.timing, signer, life=life, recovered=found)

    # ------------------------------------------------------------ disks

    def _apply_and_save(self, host: Host, effect: ev.Apply) -> None:
        """Peers take turns with their checkpoints."""
        self.plane.apply(host, effect)
        view, turn = host.node.view, NAMES.index(host.name)
        due = (effect.begin.round + turn) % self.options.checkpoints == 0
        if due and view is not None and view.number > 0 and self.checker.is_true(host.state):
            self.disks[host.name] = Checkpoint(host.state, view)

    def back(self, name: str, how: str = "up") -> Host:
        """A dead process is back: ``up`` with the checkpoint that it has, if any; ``resume`` with
        it and alone; ``new`` with an empty disk."""
        if how == "new":
            self.disks.pop(name, None)
        saved = self.disks.get(name)
        if saved is None and self.formed:
            return self.restart(name)
        if saved is None:
            return self.restart(name, self._founds_again)

        def begin(host: Host) -> None:
            host.state = saved.state
            host.digests[saved.state.round] = saved.state.digest
            position = saved.state.round, saved.state.chain, saved.state.digest
            self.configure(host)
            self.deliver(host, ev.Restored(*position))
            self.log("{} has round {}, {}", name, saved.state.round, how)
            self.seen[how] += 1
            mark = f"{name} {host.life}".encode()
            self.deliver(host, saved.found(mark) if how == "resume" else saved.bootstrap_view())

        return self.restart(name, begin)

    def _founds_again(self, host: Host) -> None:
        """It does not know whether the others have founded the run meanwhile."""
        if self.options.bootstrap == "cradle":
            self.deliver(host, self._cradle())

    def _cradle(self) -> BootstrapConfig:
        founders = tuple(f"{name}:1" for name in NAMES[: self.options.hosts])
        return BootstrapConfig(founders, rules=self.options.rules)

    # ------------------------------------------------------------ messages

    def delay(self, way: tuple[bytes, bytes]) -> float:
        base_s = self._delays.get(way)
        if base_s is None:
            base_s = self._delays[way] = self.options.delay_s * self.dice.uniform(0.6, 1.6)
        return base_s * (1 + self.options.jitter * (2 * self.dice.random() - 1))

    def send(self, host: Host, peer: bytes, message: object) -> None:
        target = self.hosts.get(peer)
        if target is None or (self.outlaws.believers and self.outlaws.refuses(host.peer, peer)):
            return
        if (self.outbound or self.unlinkable) and self.are_apart(host.peer, peer):
            return
        if self.tracing:
            self.log("{}->{} {}", host.name, target.name, brief(message))
        way = (host.peer, peer)
        if way in self.corrupt:
            self.corrupt.discard(way)
            self._send_corrupt(host, target, message)
            return
        if self.losses and self._is_hit(host, target, message):
            return
        if self.checker.statements.keeps_nothing and type(message) is Finals:
            # All lie, and nobody believes it.
            made_up = sha256(host.peer).digest() * (self.chunks // self.fragments)
            message = replace(message, digests=made_up)
        event = ev.Received(host.peer, message)
        if self.streams:
            self._send_stream(host, target, way, event)
        elif self.ballots_later and type(message) in BALLOTS:
            later_s = max(0.0, self.ballots_later.get(peer, 0.0) - self.now_s)
            self.after(later_s, lambda: self._send_datagram(target, way, event))
        else:
            self._send_datagram(target, way, event)

    def _is_hit(self, host: Host, target: Host, message: object) -> bool:
        """Let the losses act that have waited for this message; return whether it is lost."""
        kind = trace_name(type(message))
        if type(message) is Begin and message.round in target.node.follower.begins:
            kind = "Retry"
        elif type(message) is Accept and (message.proposal.rollback or message.proposal.fork):
            kind = "Flagged"
        for loss in self.losses:
            one = host if loss.way == "from" else target
            if loss.kind == kind and one.name in loss.names:
                break
        else:
            return False
        loss.left -= 1
        if loss.left <= 0:
            self.losses.remove(loss)
        self.seen[f"{loss.act} {kind}"] += 1
        self.last_hit = host.name
        self.log("{}->{} {}: {}", host.name, target.name, kind, loss.act)
        if loss.act == "wake":
            self._wake(host, loss.for_s)
            return False
        if loss.act == "mislead":
            self._mislead(host, loss.for_s)
            return False
        if loss.act in ("doom", "doom-before") and not host.traps:
            side = "after" if loss.act == "doom" else "before"
            host.traps.append(Trap("Commit", 1, side, loss.for_s))
        if loss.act == "cut":
            self.isolate(one, loss.for_s)
        elif self.streams:  # of which nothing is lost, unless the link is
            self.break_link(host, target)
        elif loss.act == "late":
            event = ev.Received(host.peer, message)
            when_s = self.now_s + loss.for_s
            self.latest_s = max(self.latest_s, when_s)
            self.at(when_s, lambda: self.deliver(target, event))
        return True

    def _wake(self, host: Host, then_s: float) -> None:
        """Whoever was stopped or cut off is back right now; this one dies in a moment."""
        self.mend()
        for other in self.living():
            if other.paused:
                self.after(0.0, partial(self._resume, other))
        self.after(then_s, lambda: self.may_die(host) and self.kill(host.name))

    def _mislead(self, host: Host, then_s: float) -> None:
        """As they wake, one of the others does not hear of the election any more: it follows them
        to where the rest goes back from, and learns of that when this one is about to die."""
        others = [other for other in self.living() if other is not host and other.is_replica]
        followers = [other for other in others if not other.paused]
        for follower in followers[:1]:
            self.ballots_later[follower.peer] = self.now_s + then_s
        self._wake(host, then_s + 3 * self.options.delay_s)

    def _resume(self, host: Host) -> None:
        if host.alive and host.paused:
            self.resume(host.name)

    def isolate(self, host: Host, for_s: float) -> None:
        """It hears nobody and nobody hears it, for a while."""
        others = self.hosts.keys() - {host.peer}
        ways = {way for peer in others for way in ((host.peer, peer), (peer, host.peer))}
        new = ways - self.cuts
        self.cuts |= new
        self.after(for_s, lambda: self.mend(new))

    def _send_datagram(self, target: Host, way: tuple[bytes, bytes], event: ev.Event) -> None:
        dice = self.dice
        if way in self.cuts or dice.random() < self.loss:
            return
        for _ in range(1 + (self.double > 0 and dice.random() < self.double)):
            delay_s = self.delay(way)
            if self.late and dice.random() < self.late:
                delay_s += dice.random()
            when_s = self.now_s + delay_s
            if self.clogs:
                when_s = max(when_s, self.clogs.get(way, 0.0))
            if when_s > self.latest_s:
                self.latest_s = when_s
            self.at(when_s, lambda: self.deliver(target, event))

    def _send_stream(
        self, host: Host, target: Host, way: tuple[bytes, bytes], event: ev.Event
    ) -> None:
        pair = frozenset((host, target))
        number = self._link.get(pair)
        if number is None:
            return  # no link: the daemon drops it
        delay_s = self.delay(way)
        if self.loss and self.dice.random() < self.loss:
            delay_s += RETRANSMIT_S
        when_s = max(self.now_s + delay_s, self.clogs.get(way, 0.0), self._last_s.get(way, 0.0))
        self.latest_s = max(self.latest_s, when_s)
        self._last_s[way] = when_s = when_s + ORDER_S

        def arrive() -> None:
            if self._link.get(pair) != number:
                return  # lost with its link
            if way in self.cuts or way in self._held:
                self._hold(way, arrive, pair, number)
            else:
                self.deliver(target, event)

        self.at(when_s, arrive)

    def _hold(
        self, way: tuple[bytes, bytes], act: Callable[[], None], pair: frozenset[Host], number: int
    ) -> None:
        """In the sender's socket until the cut is mended or the link is given up."""
        if way not in self._held:
            self._held[way] = []

            def give_up() -> None:
                if way in self._held and self._link.get(pair) == number:
                    self._break(pair, "no progress")

            self.after(NO_PROGRESS_S, give_up)
        self._held[way].append(act)

    def _send_corrupt(self, host: Host, target: Host, message: object) -> None:
        """A wrong byte: refused by the stream's cipher; and decoding it must not do harm."""
        data = bytearray(wire.encode(message))
        data[self.dice.randrange(len(data))] ^= 1 << self.dice.randrange(8)
        with suppress(RemoteProtocolError):
            wire.decode(bytes(data))
        if self.streams:
            self._break(frozenset((host, target)), "corrupt")

    # ------------------------------------------------------------ links

    def connect(self, a: Host, b: Host) -> None:
        """A new link takes the place of an old one."""
        if self.are_apart(a.peer, b.peer):
            return
        self._links += 1
        self._link[frozenset((a, b))] = self._links
        for way in ((a.peer, b.peer), (b.peer, a.peer)):
            self._held.pop(way, None)
        srtt_s = self.delay((a.peer, b.peer)) + self.delay((b.peer, a.peer))
        self.deliver(a, ev.LinkUp(b.peer, self.address(b.name, b.life), srtt_s, b.life))
        self.deliver(b, ev.LinkUp(a.peer, self.address(a.name, a.life), srtt_s, a.life))

    def is_linked(self, a: Host, b: Host) -> bool:
        return frozenset((a, b)) in self._link

    def part(self, a: Host, b: Host) -> None:
        self._link.pop(frozenset((a, b)), None)
        super().part(a, b)

    def unlink(self, one: Host, other: Host) -> None:
        self._break(frozenset((one, other)), "eof")

    def break_link(self, a: Host, b: Host) -> None:
        self._break(frozenset((a, b)), "reset")

    def _break(self, pair: frozenset[Host], why: str) -> None:
        number = self._link.pop(pair, None)
        if number is None:
            return
        a, b = sorted(pair, key=lambda host: host.name)
        for way in ((a.peer, b.peer), (b.peer, a.peer)):
            self._held.pop(way, None)
        for here, there in ((a, b), (b, a)):
            if why == "reset" and (there.peer, here.peer) in self.cuts:
                wait_s = NO_PROGRESS_S
            else:
                wait_s = self.delay((there.peer, here.peer))
            self.after(wait_s, lambda h=here, t=there: self._notice(h, t, why))

    def _notice(self, here: Host, there: Host, why: str) -> None:
        if self.is_linked(here, there):
            return  # there is a new one already
        current = self.hosts[there.peer]
        if current is there or not self.is_linked(here, current):
            self.deliver(here, ev.LinkDown(there.peer, why))
        self.dial(here, there.peer)

    def _connect(self, host: Host, effect: ev.Connect) -> None:
        """To the address where that peer listens; "" is of a founder that has not called yet."""
        known = self.hosts.get(effect.peer)
        at = self.address(known.name, known.life) if known is not None else "of nobody"
        right = known is not None and (effect.address in (at, "") or self.moves)
        assert right, f"{host.name} dials {effect.peer!r} at {effect.address!r}, which is {at}"
        self.dial(host, effect.peer)

    def dial(self, host: Host, peer: bytes) -> None:
        """As the shell does: again and again, until it has the link or the process is gone."""
        if (host, peer) in self._dialling or not self._is_current(host):
            return
        self._dialling.add((host, peer))

        def attempt() -> None:
            target = self.hosts.get(peer)
            done = target is None or self.is_linked(host, target)
            if done or not self._is_current(host) or self.are_apart(host.peer, peer):
                self._dialling.discard((host, peer))
                return
            way, back = (host.peer, peer), (peer, host.peer)
            cut = way in self.cuts or back in self.cuts or self.outlaws.refuses(host.peer, peer)
            if target.alive and not target.paused and not host.paused and not cut:
                self._dialling.discard((host, peer))
                self.connect(host, target)
            elif target.alive or self.now_s < self.ends_s:
                self.after(DIAL_AGAIN_S, attempt)
            else:
                self._dialling.discard((host, peer))

        self.after(2 * self.delay((host.peer, peer)), attempt)

    ends_s = float("inf")  # the dead do not come back after that

    def _is_current(self, host: Host) -> bool:
        return host.alive and self.hosts[host.peer] is host

    def probe(self, host: Host, peer: bytes) -> None:
        way, back = (host.peer, peer), (peer, host.peer)
        wait_s = self.delay(way) + self.delay(back)

        def answer() -> None:
            target = self.hosts.get(peer)
            cut = way in self.cuts or back in self.cuts
            if target is None or cut or target.off:
                found = "silent"
            else:
                found = "up" if target.alive else "refused"
                if self.are_apart(host.peer, peer) or target.name in self.outbound:
                    found = "up" if self.is_linked(host, target) else "silent"
            if self.outlaws.refuses(host.peer, peer):
                found = "refused"
            self.deliver(host, ev.Probed(peer, found))

        self.after(wait_s, answer)

    def hear_of_death(self, host: Host) -> None:
        """The kernel closes its links after what was sent; a dead machine says nothing."""
        for pair in [pair for pair in self._link if host in pair]:
            number = self._link[pair]
            other = next(iter(pair - {host}))
            way = (host.peer, other.peer)
            silent = host.off or way in self.cuts
            wait_s = NO_PROGRESS_S if silent else self.delay(way)
            when_s = max(self.now_s + wait_s, self._last_s.get(way, 0.0) + ORDER_S)

            def end(
                pair: frozenset[Host] = pair, number: int = number, other: Host = other
            ) -> None:
                if self._link.get(pair) == number:
                    del self._link[pair]
                    self._notice(other, host, "eof")

            self.at(when_s, end)

    def is_open(self, source: Host, target: Host) -> bool:
        way = (source.peer, target.peer)
        return way not in self.mutes and self.has_way(source, target) and self.has_data_path(*way)

    def has_way(self, source: Host, target: Host) -> bool:
        way = (source.peer, target.peer)
        if way in self.cuts or self.clogs.get(way, 0.0) > self.now_s:
            return False
        return not self.are_apart(*way)

    def mend(self, ways: set[tuple[bytes, bytes]] | None = None) -> None:
        """What was cut passes again, and what was held goes on in order."""
        mended = self.cuts if ways is None else self.cuts & ways
        self.cuts = self.cuts - mended
        for way in sorted(mended):
            for act in self._held.pop(way, []):
                self.after(self.delay(way) * 0 + ORDER_S, act)

    # ------------------------------------------------------------ a beginning

    def begin(self) -> None:
        """All hosts found, join, attach and reach round 2 while nothing fails."""
        options = self.options
        names = NAMES[: options.hosts + options.archives]
        for i, name in enumerate(names):
            is_witness = 0 < i <= options.witnesses
            role = WITNESS if is_witness else REPLICA if i < options.hosts else ARCHIVE
            self.add_host(name, role)
        hosts = [self.host(name) for name in names]
        rules = options.rules
        if options.bootstrap == "found":
            self.deliver(hosts[0], ev.Found(LINEAGE, rules))
        else:
            for host in hosts[: options.hosts]:
                self.deliver(host, self._cradle())
        for i, host in enumerate(hosts):
            for other in hosts[:i]:
                self.connect(host, other)
        for host in hosts:
            if host.node.me.role == REPLICA and host.name not in options.idle:
                self.train(host.name)
