"""Several membership machines under a virtual clock and network, with reductions simulated.

The machines are the ones that ship. Nothing here is random: equal scripts give equal runs, and
``trace`` is the whole run as text.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.peer import events as ev
from atoll.peer.membership import Node
from atoll.peer.messages import Begin, Install
from atoll.peer.phases import Phase
from atoll.peer.timing import Timing
from atoll.peer.views import REPLICA, Member, short

LINEAGE = b"L" * 32
STEPS_MAX = 200_000  # a scenario that needs more does not end


def peer_id(name: str) -> bytes:
    return name.encode().ljust(32, b".")


@dataclass
class Host:
    """One process: a machine, its simulated data plane and its trainer."""

    name: str
    node: Node
    alive: bool = True
    trains: bool = False  # submits whenever it can
    inner_s: float = 0.05
    state: dict[int, bytes] = field(default_factory=dict)  # round -> digest
    reducing: Begin | None = None
    held: dict[tuple[int, int], bytes] = field(default_factory=dict)
    told: list[tuple[str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tick_s: float = float("inf")


class Cluster:
    def __init__(self, names: str, timing: Timing | None = None, delay_s: float = 0.001) -> None:
        self.now_s = 0.0
        self.delay_s = delay_s
        self.reduce_s = 0.01
        self.hosts: dict[bytes, Host] = {}
        self.trace: list[str] = []
        self.cut: set[frozenset[bytes]] = set()
        self.hold: Callable[[bytes, bytes, object], bool] = lambda source, peer, message: False
        self.committed: dict[int, bytes] = {}  # round -> chain, over all hosts ever
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._timing = timing or Timing()
        self._incs: dict[str, int] = {}
        for name in names:
            self.add(name)

    # ------------------------------------------------------------ script verbs

    def add(self, name: str, role: str = REPLICA) -> Host:
        self._incs[name] = self._incs.get(name, 0) + 1
        peer = peer_id(name)
        member = Member(peer, self._incs[name], role, f"{name}:1")
        host = Host(name, Node(member, self._timing))
        self.hosts[peer] = host
        return host

    def host(self, name: str) -> Host:
        return self.hosts[peer_id(name)]

    def found(self, name: str) -> None:
        self.give(name, ev.Found(LINEAGE))

    def link(self, a: str, b: str) -> None:
        for here, there in ((a, b), (b, a)):
            self.give(here, ev.LinkUp(peer_id(there)))

    def train(self, name: str) -> None:
        host = self.host(name)
        host.trains = True
        if host.node.follower.round == 0:
            self.give(name, ev.Offered(b"spec"))
        else:
            self._attach(host)

    def kill(self, name: str) -> None:
        host = self.host(name)
        host.alive = False
        self.log(f"{name} killed")
        for other in self.living():
            if host.node.me.peer in other.node.linked:
                self.give(other.name, ev.LinkDown(host.node.me.peer, "eof"))

    def form(self, names: str) -> None:
        """Found with the first, join the others, attach all trainers, run two rounds."""
        self.found(names[0])
        for i, name in enumerate(names):
            for other in names[:i]:
                self.link(name, other)
        self.until(lambda: self.in_one_view(names))
        for name in names:
            self.train(name)
        self.until(lambda: all(self.host(n).node.follower.round >= 2 for n in names))

    # ------------------------------------------------------------ running

    def until(self, condition: Callable[[], bool], limit_s: float = 60.0) -> float:
        """Run until the condition holds; returns how long that took."""
        started_s = self.now_s
        for _ in range(STEPS_MAX):
            if condition():
                return self.now_s - started_s
            if self.now_s - started_s > limit_s:
                break
            self._advance()
        tail = "\n".join(self.trace[-60:])
        raise AssertionError(f"not reached in {self.now_s - started_s:.1f} virtual s:\n{tail}")

    def run(self, duration_s: float) -> None:
        end_s = self.now_s + duration_s
        self.at(end_s, lambda: None)
        while self.now_s < end_s:
            self._advance()

    def living(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.alive]

    def in_one_view(self, names: str) -> bool:
        views = {self.host(n).node.view for n in names}
        view = next(iter(views))
        wanted = {peer_id(n) for n in names}
        return len(views) == 1 and view is not None and set(view.peers) == wanted

    def at(self, when_s: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (when_s, self._order, act))

    def give(self, name: str, event: ev.Event) -> None:
        host = self.host(name)
        if host.alive:
            self._carry_out(host, host.node.handle(event, self.now_s))

    def log(self, text: str) -> None:
        self.trace.append(f"{self.now_s:9.4f} {text}")

    def _advance(self) -> None:
        due = min(self.living(), key=lambda h: h.tick_s, default=None)
        if due is not None and (not self._queue or due.tick_s < self._queue[0][0]):
            self.now_s = max(self.now_s, due.tick_s)
            self.give(due.name, ev.Tick())
        elif self._queue:
            when_s, _, act = heapq.heappop(self._queue)
            self.now_s = max(self.now_s, when_s)
            act()
        else:
            raise AssertionError("nothing will ever happen")

    # ------------------------------------------------------------ effects

    def _carry_out(self, host: Host, effects: list[ev.Effect]) -> None:
        deadline_s = host.node.next_deadline_s()
        # A machine that asks for the past would stop time.
        host.tick_s = float("inf") if deadline_s is None else max(deadline_s, self.now_s + 1e-4)
        for effect in effects:
            _CARRY[type(effect)](self, host, effect)

    def _send(self, host: Host, effect: ev.Send) -> None:
        source, peer = host.node.me.peer, effect.peer
        text = f"{host.name}->{self.hosts[peer].name} {_short_text(effect.message)}"
        if frozenset((source, peer)) in self.cut or self.hold(source, peer, effect.message):
            self.log(f"{text} LOST")
            return
        self.log(text)
        target = self.hosts[peer]

        def arrive() -> None:
            if self.hosts[peer] is target:
                self.give(target.name, ev.Received(source, effect.message))

        self.at(self.now_s + self.delay_s, arrive)

    def _connect(self, host: Host, effect: ev.Connect) -> None:
        if effect.peer in self.hosts and self.hosts[effect.peer].alive:
            self.at(self.now_s, lambda: self.link(host.name, self.hosts[effect.peer].name))

    def _probe(self, host: Host, effect: ev.Probe) -> None:
        target = self.hosts[effect.peer]
        blocked = frozenset((host.node.me.peer, effect.peer)) in self.cut
        answer = "silent" if blocked else "up" if target.alive else "refused"
        event = ev.Probed(effect.peer, answer)
        self.at(self.now_s + self.delay_s, lambda: self.give(host.name, event))

    def _reduce(self, host: Host, effect: ev.Reduce) -> None:
        host.reducing = effect.begin
        begin = effect.begin
        group = [self.hosts[p] for p in begin.participants]
        if all(h.reducing == begin for h in group):
            self.at(self.now_s + self.reduce_s, lambda: self._reduced(begin, group))

    def _reduced(self, begin: Begin, group: list[Host]) -> None:
        if not all(h.alive and h.reducing == begin for h in group):
            return
        root = hashlib.sha256(repr(begin).encode()).digest()
        for host in group:
            host.held[begin.round, begin.attempt] = root
            self.give(host.name, ev.Reduced(begin.round, begin.attempt, root))

    def _fetch(self, host: Host, effect: ev.Fetch) -> None:
        key = (effect.begin.round, effect.begin.attempt)
        root = self.hosts[effect.holder].held.get(key)

        def arrive() -> None:
            if root is not None and self.hosts[effect.holder].alive:
                host.held[key] = root
                self.give(host.name, ev.Reduced(*key, root))

        self.at(self.now_s + self.reduce_s, arrive)

    def _abort(self, host: Host, effect: ev.Abort) -> None:
        host.reducing = None

    def _apply(self, host: Host, effect: ev.Apply) -> None:
        number, chain = effect.begin.round, effect.chain
        known = self.committed.setdefault(number, chain)
        assert known == chain, f"invariant 2: two histories of round {number}"
        host.reducing = None
        host.state[number] = hashlib.sha256(chain).digest()
        self.log(f"{host.name} applied {number}")
        event = ev.Applied(number, host.state[number])
        self.at(self.now_s + 0.001, lambda: self.give(host.name, event))

    def _load(self, host: Host, effect: ev.LoadState) -> None:
        learn = effect.learn
        donor = self.hosts[learn.donor.peer]

        def arrive() -> None:
            digest = donor.state.get(learn.round)
            if donor.alive and digest == learn.digest:
                host.state[learn.round] = digest
                self.give(host.name, ev.StateLoaded(learn.round, learn.chain, digest))
            else:
                self.give(host.name, ev.StateFailed("donor gone"))

        self.at(self.now_s + 0.05, arrive)

    def _tell(self, host: Host, effect: ev.TellTrainer) -> None:
        host.told.append((effect.kind, effect.round))
        self.log(f"{host.name} trainer: {effect.kind} {effect.round}")
        if host.trains:
            self._attach(host)

    def _attach(self, host: Host) -> None:
        def submit() -> None:
            own = host.node.follower
            self.give(host.name, ev.Submitted(own.round, own.epoch, 1.0))

        self.give(host.name, ev.Attached())
        self.at(self.now_s + host.inner_s, submit)

    def _renew(self, host: Host, effect: ev.Renew) -> None:
        self._incs[host.name] += 1
        inc = self._incs[host.name]
        self.at(self.now_s, lambda: self.give(host.name, ev.Incarnated(inc)))

    def _installed(self, host: Host, effect: ev.Installed) -> None:
        self.log(f"{host.name} installed {effect.view.describe()}")
        for peer in effect.view.peers:
            known = self.hosts[peer]
            if known.alive and peer != host.node.me.peer and peer not in host.node.linked:
                self.at(self.now_s, lambda peer=peer: self.link(host.name, self.hosts[peer].name))

    def _note(self, host: Host, effect: ev.Note) -> None:
        host.notes.append(effect.kind)
        self.log(f"{host.name} note {effect.kind}: {effect.text}")

    def _left(self, host: Host, effect: ev.Left) -> None:
        assert host.node.phase is Phase.LEFT
        self.log(f"{host.name} left")
        self.kill(host.name)


_CARRY: dict[type, Callable[[Cluster, Host, object], None]] = {
    ev.Send: Cluster._send,
    ev.Connect: Cluster._connect,
    ev.Probe: Cluster._probe,
    ev.Reduce: Cluster._reduce,
    ev.Fetch: Cluster._fetch,
    ev.Abort: Cluster._abort,
    ev.Apply: Cluster._apply,
    ev.LoadState: Cluster._load,
    ev.TellTrainer: Cluster._tell,
    ev.Renew: Cluster._renew,
    ev.Installed: Cluster._installed,
    ev.Note: Cluster._note,
    ev.Left: Cluster._left,
}


def _short_text(message: object) -> str:
    name = type(message).__name__
    if isinstance(message, Install):
        return f"Install {message.decided.number}"
    if isinstance(message, Begin):
        names = "".join(chr(p[0]) for p in message.participants)
        return f"Begin {message.round}.{message.attempt} {message.kind} {names}"
    number = getattr(message, "round", None)
    return name if number is None else f"{name} {number}"


__all__ = ["LINEAGE", "Cluster", "Host", "peer_id", "short"]
