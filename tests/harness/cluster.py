"""A world for scripts: instant control over every message, link and process, all of it traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from atoll.peer.membership import events as ev
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import DEFAULT_RULES, REPLICA, short
from harness.host import Host
from harness.world import DIAL_AGAIN_S, LINEAGE, World, brief, peer_id

__all__ = ["LINEAGE", "Cluster", "Host", "peer_id", "short"]

STEPS_MAX = 200_000  # a scenario that needs more does not end


class Perturbation(Protocol):
    """Make clusters differ from what their script says, where that is wanted."""

    def begins(self, cluster: Cluster) -> None: ...

    def factor(self, source: bytes, target: bytes) -> float: ...


perturbed: Perturbation | None = None  # for seeds that begin as a test does


class Cluster(World):
    """Messages take ``delay_s`` and arrive in order unless a script says otherwise."""

    def __init__(self, names: str, timing: Timing | None = None, delay_s: float = 0.001) -> None:
        super().__init__(timing)
        self.tracing = True
        self.delay_s = delay_s
        self.rules = DEFAULT_RULES  # of runs that are founded from now on
        self.cut: set[frozenset[bytes]] = set()
        self.one_way: set[tuple[bytes, bytes]] = set()  # nothing passes from first to second
        self.data_cut: set[frozenset[bytes]] = set()  # data links only
        self.hold: Callable[[bytes, bytes, object], bool] = lambda source, peer, message: False
        self.copies: Callable[[object], int] = lambda message: 1
        self.late_s: Callable[[object], float] = lambda message: 0.0
        if perturbed is not None:
            perturbed.begins(self)
        for name in names:
            self.add(name)

    # ------------------------------------------------------------ script verbs

    def found(self, name: str) -> None:
        self.give(name, ev.Found(LINEAGE, self.rules))

    def link(self, a: str, b: str) -> None:
        if self.are_apart(peer_id(a), peer_id(b)):
            return
        for here, there in ((a, b), (b, a)):
            self.give(here, ev.LinkUp(peer_id(there), life=self.host(there).life))

    def isolate(self, names: Iterable[str]) -> None:
        """Cut these from all others, silently."""
        inside = {peer_id(name) for name in names}
        for a in inside:
            self.cut |= {frozenset((a, b)) for b in self.hosts if b not in inside}

    def heal(self) -> None:
        """No fault lasts; whoever had no link gets one, and links to the dead break."""
        self.cut.clear()
        self.one_way.clear()
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
            if self.host(name).node.me.role == REPLICA:
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
            self.advance()
        raise AssertionError(f"not reached in {self.now_s - started_s:.1f} s:\n{self.tail()}")

    def until_round(self, names: str, more: int = 2, limit_s: float = 60.0) -> float:
        """Until all of these are in and have so many rounds more than anybody had."""
        goal = self.committed + more
        hosts = [self.host(name) for name in names]
        return self.until(lambda: all(h.node.view and h.round >= goal for h in hosts), limit_s)

    def in_one_view(self, names: str) -> bool:
        views = {self.host(n).node.view for n in names}
        view = next(iter(views))
        wanted = {peer_id(n) for n in names}
        return len(views) == 1 and view is not None and set(view.peers) == wanted

    def noted(self, kind: str) -> list[str]:
        """Who has noted such an event, once for each time."""
        return [host.name for host in self.hosts.values() for note in host.notes if note == kind]

    # ------------------------------------------------------------ how things travel

    def is_cut(self, a: Host, b: Host) -> bool:
        cut = frozenset((a.peer, b.peer)) in self.cut or (a.peer, b.peer) in self.one_way
        cut = cut or self.outlaws.refuses(a.peer, b.peer)
        return cut or self.are_apart(a.peer, b.peer)

    def is_open(self, source: Host, target: Host) -> bool:
        pair = frozenset((source.peer, target.peer))
        cut = self.is_cut(source, target) or pair in self.data_cut
        return not cut and self.has_data_path(source.peer, target.peer)

    def send(self, host: Host, peer: bytes, message: object) -> None:
        source, target = host.peer, self.hosts[peer]
        if self.are_apart(source, peer):
            return  # no link: the daemon drops it
        if self.is_cut(host, target) or self.hold(source, peer, message):
            self.log("{}->{} {} LOST", host.name, target.name, brief(message))
            return
        self.log("{}->{} {}", host.name, target.name, brief(message))
        for _ in range(self.copies(message)):
            factor = 1.0 if perturbed is None else perturbed.factor(source, peer)
            delay_s = self.delay_s * factor + self.late_s(message)
            self.after(delay_s, lambda: self.deliver(target, ev.Received(source, message)))

    def dial(self, host: Host, peer: bytes) -> None:
        """As the shell does: until it has the link."""
        target = self.hosts.get(peer)
        if target is None or not host.alive or self.hosts[host.peer] is not host:
            return
        cut = self.is_cut(host, target) or self.is_cut(target, host)
        if target.alive and not target.paused and not cut:
            self.after(0.0, lambda: self.link(host.name, target.name))
        elif peer not in host.node.linked and not self.are_apart(host.peer, peer):
            self.after(DIAL_AGAIN_S, lambda: self.dial(host, peer))

    def probe(self, host: Host, peer: bytes) -> None:
        target = self.hosts[peer]
        cut = self.is_cut(host, target) or self.is_cut(target, host) or target.name in self.outbound
        answer = "silent" if cut or target.off else "up" if target.alive else "refused"
        answer = "refused" if self.outlaws.refuses(host.peer, peer) else answer
        self.after(self.delay_s, lambda: self.deliver(host, ev.Probed(peer, answer)))

    def hear_of_death(self, host: Host) -> None:
        for other in self.living():
            if host.peer in other.node.linked and not self.is_cut(host, other):
                self.deliver(other, ev.LinkDown(host.peer, "eof"))
