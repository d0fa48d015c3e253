"""Several membership machines under a virtual clock and network, with reductions simulated.

The machines are the ones that ship. Nothing here is random: equal scripts give equal runs, and
``trace`` is the whole run as text.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from atoll.peer import events as ev
from atoll.peer.membership import Node
from atoll.peer.messages import Begin, Install
from atoll.peer.phases import Phase
from atoll.peer.timing import Timing
from atoll.peer.views import REPLICA, Member, short
from harness.checks import Checker
from harness.plane import LOAD_S, DataPlane

__all__ = ["LINEAGE", "Cluster", "Host", "peer_id", "short"]

LINEAGE = b"L" * 32
STEPS_MAX = 200_000  # a scenario that needs more does not end
DIAL_AGAIN_S = 0.5  # a shell that was asked for a link goes on dialling


def peer_id(name: str) -> bytes:
    return name.encode().ljust(32, b".")


@dataclass(eq=False)
class Host:
    """One process: a machine, its simulated data plane and its trainer."""

    name: str
    node: Node
    alive: bool = True
    paused: bool = False  # SIGSTOP: what arrives waits in the socket
    trains: bool = False  # submits whenever it can
    inner_s: float = 0.05
    inner_phase: int = 0
    state: dict[int, bytes] = field(default_factory=dict)  # round -> digest
    flipped: bytes = b""  # not empty: memory errors have changed this state
    reducing: Begin | None = None
    garbles: bool = False  # its results come out wrong
    held: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    loads: int = 0
    told: list[tuple[str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    backlog: list[ev.Event] = field(default_factory=list)
    tick_s: float = float("inf")

    @property
    def peer(self) -> bytes:
        return self.node.me.peer

    @property
    def round(self) -> int:
        return self.node.follower.round

    @property
    def leads(self) -> bool:
        return self.node.phase is Phase.COORDINATOR


class Cluster:
    def __init__(self, names: str, timing: Timing | None = None, delay_s: float = 0.001) -> None:
        self.now_s = 0.0
        self.delay_s = delay_s
        self.load_s = LOAD_S
        self.hosts: dict[bytes, Host] = {}
        self.trace: list[str] = []
        self.cut: set[frozenset[bytes]] = set()
        self.data_cut: set[frozenset[bytes]] = set()  # data links only
        self.hold_renewal = False  # the disk hangs: no new incarnation number
        self.spoilt = ""  # a host whose contribution cannot be read
        self.hold: Callable[[bytes, bytes, object], bool] = lambda source, peer, message: False
        self.stuck: Callable[[Host, Host], bool] = lambda host, donor: False  # loads that hang
        self.copies: Callable[[object], int] = lambda message: 1
        self.late_s: Callable[[object], float] = lambda message: 0.0
        self.committed = 0  # the highest round that anybody has applied
        self.checker = Checker()
        self.plane = DataPlane(self)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._timing = timing or Timing()
        self._incs: dict[str, int] = {}
        self._carry = self._carriers()
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
        if host.round == 0:
            self.give(name, ev.Offered(b"spec"))
        else:
            self._attach(host)

    def detach(self, name: str) -> None:
        """The trainer ends."""
        host = self.host(name)
        host.trains = False
        host.inner_phase += 1
        self.give(name, ev.Detached())

    def kill(self, name: str) -> None:
        host = self.host(name)
        host.alive = False
        self.log(f"{name} killed")
        for other in self.living():
            if host.peer in other.node.linked and not self.is_cut(host, other):
                self.give(other.name, ev.LinkDown(host.peer, "eof"))

    def restart(self, name: str) -> Host:
        """The process is back, with the next incarnation and nothing in memory."""
        before = self.host(name)
        assert not before.alive
        host = self.add(name)
        host.trains, host.inner_s = before.trains, before.inner_s
        self.log(f"{name} restarted")
        self.deliver(host, ev.Tick())
        for other in self.living():
            if other is not host:
                self._dial(host, other.peer)
        if host.trains:
            self.give(name, ev.Offered(b"spec"))
        return host

    def pause(self, name: str) -> None:
        self.host(name).paused = True
        self.log(f"{name} stopped")

    def resume(self, name: str) -> None:
        host = self.host(name)
        host.paused = False
        self.log(f"{name} goes on")
        backlog, host.backlog = host.backlog, []
        for event in backlog:
            self.deliver(host, event)

    def leave(self, name: str) -> None:
        self.log(f"{name} asked to leave")
        self.give(name, ev.LeaveAsked())

    def isolate(self, names: Iterable[str]) -> None:
        """Cut these from all others, silently."""
        inside = {peer_id(name) for name in names}
        for a in inside:
            self.cut |= {frozenset((a, b)) for b in self.hosts if b not in inside}

    def heal(self) -> None:
        """No fault lasts; whoever had no link gets one, and links to the dead break."""
        self.cut.clear()
        self.data_cut.clear()
        self.hold = lambda source, peer, message: False
        for host in self.living():
            if host.paused:
                self.resume(host.name)
        for host in self.living():
            for peer in sorted(host.node.linked):
                if not self.hosts[peer].alive:
                    self.deliver(host, ev.LinkDown(peer, "reset"))
            for other in self.living():
                if host.peer < other.peer and host.peer not in other.node.linked:
                    self.link(host.name, other.name)

    def form(self, names: str, rounds: int = 2) -> None:
        """Found with the first, join the others, attach all trainers, run some rounds."""
        self.found(names[0])
        for i, name in enumerate(names):
            for other in names[:i]:
                self.link(name, other)
        self.until(lambda: self.in_one_view(names))
        for name in names:
            self.train(name)
        self.until(lambda: all(self.host(n).round >= rounds for n in names))

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
        raise AssertionError(f"not reached in {self.now_s - started_s:.1f} s:\n{self.tail()}")

    def until_round(self, names: str, more: int = 2, limit_s: float = 60.0) -> float:
        """Until all of these are in and have so many rounds more than anybody had."""
        goal = self.committed + more
        hosts = [self.host(name) for name in names]
        return self.until(lambda: all(h.node.view and h.round >= goal for h in hosts), limit_s)

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

    def noted(self, kind: str) -> list[str]:
        """Who has noted such an event, once for each time."""
        return [host.name for host in self.hosts.values() for note in host.notes if note == kind]

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.trace[-lines:])

    def at(self, when_s: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (when_s, self._order, act))

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, act)

    def give(self, name: str, event: ev.Event) -> None:
        self.deliver(self.host(name), event)

    def deliver(self, host: Host, event: ev.Event) -> None:
        """To that very process: what was meant for a former incarnation is lost with it."""
        if not host.alive or self.hosts[host.peer] is not host:
            return
        if host.paused:
            if not isinstance(event, ev.Tick):
                host.backlog.append(event)
            return
        effects = host.node.handle(event, self.now_s)
        deadline_s = host.node.next_deadline_s()
        # A machine that asks for the past would stop time.
        host.tick_s = float("inf") if deadline_s is None else max(deadline_s, self.now_s + 1e-4)
        for effect in effects:
            self._carry[type(effect)](host, effect)

    def log(self, text: str) -> None:
        self.trace.append(f"{self.now_s:9.4f} {text}")

    def is_cut(self, a: Host, b: Host) -> bool:
        return frozenset((a.peer, b.peer)) in self.cut

    def is_data_cut(self, a: Host, b: Host) -> bool:
        return self.is_cut(a, b) or frozenset((a.peer, b.peer)) in self.data_cut

    def _advance(self) -> None:
        ready = [host for host in self.hosts.values() if host.alive and not host.paused]
        due = min(ready, key=lambda h: h.tick_s, default=None)
        if due is not None and (not self._queue or due.tick_s < self._queue[0][0]):
            self.now_s = max(self.now_s, due.tick_s)
            self.deliver(due, ev.Tick())
        elif self._queue:
            when_s, _, act = heapq.heappop(self._queue)
            self.now_s = max(self.now_s, when_s)
            act()
        else:
            raise AssertionError("nothing will ever happen")

    # ------------------------------------------------------------ effects

    def _carriers(self) -> dict[type, Callable[[Host, Any], None]]:
        return {
            ev.Send: self._send,
            ev.Connect: lambda host, effect: self._dial(host, effect.peer),
            ev.Probe: self._probe,
            ev.Reduce: self.plane.reduce,
            ev.Fetch: self.plane.fetch,
            ev.Abort: self.plane.abort,
            ev.Apply: self.plane.apply,
            ev.LoadState: self.plane.load,
            ev.TellTrainer: self._tell,
            ev.Renew: self._renew,
            ev.Installed: self._installed,
            ev.Note: self._note,
            ev.Left: self._left,
        }

    def _send(self, host: Host, effect: ev.Send) -> None:
        source, peer, message = host.peer, effect.peer, effect.message
        target = self.hosts[peer]
        text = f"{host.name}->{target.name} {_short_text(message)}"
        if self.is_cut(host, target) or self.hold(source, peer, message):
            self.log(f"{text} LOST")
            return
        self.log(text)
        for _ in range(self.copies(message)):
            delay_s = self.delay_s + self.late_s(message)
            self.after(delay_s, lambda: self.deliver(target, ev.Received(source, message)))

    def _dial(self, host: Host, peer: bytes) -> None:
        """As the shell does: until it has the link."""
        target = self.hosts.get(peer)
        if target is None or not host.alive or self.hosts[host.peer] is not host:
            return
        if target.alive and not target.paused and not self.is_cut(host, target):
            self.after(0.0, lambda: self.link(host.name, target.name))
        elif peer not in host.node.linked:
            self.after(DIAL_AGAIN_S, lambda: self._dial(host, peer))

    def _probe(self, host: Host, effect: ev.Probe) -> None:
        target = self.hosts[effect.peer]
        answer = "silent" if self.is_cut(host, target) else "up" if target.alive else "refused"
        self.after(self.delay_s, lambda: self.deliver(host, ev.Probed(effect.peer, answer)))

    def _tell(self, host: Host, effect: ev.TellTrainer) -> None:
        host.told.append((effect.kind, effect.round))
        self.log(f"{host.name} trainer: {effect.kind} {effect.round}")
        if host.trains:
            self._attach(host)

    def _attach(self, host: Host) -> None:
        """Go through an inner phase and submit; a new one takes the place of one under way."""
        host.inner_phase += 1
        phase = host.inner_phase

        def submit() -> None:
            own = host.node.follower
            if phase == host.inner_phase:
                self.deliver(host, ev.Submitted(own.round, own.epoch, 1.0))

        if not host.node.follower.attached:
            self.deliver(host, ev.Attached())
        self.after(host.inner_s, submit)

    def _renew(self, host: Host, effect: ev.Renew) -> None:
        if self.hold_renewal:
            return
        self._incs[host.name] += 1
        inc = self._incs[host.name]
        self.after(0.0, lambda: self.deliver(host, ev.Incarnated(inc)))

    def _installed(self, host: Host, effect: ev.Installed) -> None:
        self.checker.installed(effect.view)
        self.log(f"{host.name} installed {effect.view.describe()}")
        for peer in effect.view.peers:
            if peer != host.peer and peer not in host.node.linked:
                self._dial(host, peer)

    def _note(self, host: Host, effect: ev.Note) -> None:
        assert effect.kind != "conflict", effect.text  # no identity runs twice here
        host.notes.append(effect.kind)
        self.log(f"{host.name} note {effect.kind}: {effect.text}")

    def _left(self, host: Host, effect: ev.Left) -> None:
        assert host.node.phase is Phase.LEFT
        self.log(f"{host.name} left")
        self.kill(host.name)


def _short_text(message: object) -> str:
    name = type(message).__name__
    if isinstance(message, Install):
        return f"Install {message.decided.number}"
    if isinstance(message, Begin):
        names = "".join(chr(p[0]) for p in message.participants)
        return f"Begin {message.round}.{message.attempt} {message.kind} {names}"
    number = getattr(message, "round", None)
    return name if number is None else f"{name} {number}"
