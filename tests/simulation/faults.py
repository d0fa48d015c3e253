"""How each fault of a script is done to an arena, and undone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from harness.host import Host, Trap
from harness.world import peer_id

from atoll.peer.membership import events as ev
from atoll.peer.membership.layout import Advised, Layout
from simulation.arena import Arena
from simulation.fault import Fault
from simulation.losses import Loss

__all__ = ["Faults"]

LOOK_AGAIN_S = 0.02  # for whoever is in a phase that may last a moment only


class Faults:
    """Carries a script out in an arena, and ends all faults at once when asked."""

    def __init__(self, arena: Arena, script: list[Fault]) -> None:
        self.arena = arena
        self.left: set[str] = set()  # who was asked to leave: it does not come back
        self.flips = 0
        self.over = False
        self.drain_s = 0.0
        self._base_s = arena.now_s
        arena.may_die, arena.sprung = self._can_die, self._sprung
        for fault in script:
            arena.at(self._base_s + fault.at_s, self._doing(fault))

    def _doing(self, fault: Fault) -> Callable[[], None]:
        act = getattr(self, f"_{fault.kind}")

        def do() -> None:
            if not self.over:
                if self.arena.tracing:
                    self.arena.log("FAULT {}", fault)
                act(fault)

        return do

    def _undo(self, fault: Fault, act: Callable[[], None]) -> None:
        def unless_over() -> None:
            if not self.over:
                act()

        self.arena.after(fault.lasts_s, unless_over)

    def _hosts(self, fault: Fault) -> list[Host]:
        found = [self.arena.hosts.get(peer_id(name)) for name in fault.who]
        return [host for host in found if host is not None]

    def heal(self) -> None:
        """No fault lasts any longer; the dead stay dead until :meth:`revive`."""
        arena = self.arena
        self.over = True
        for peer in arena.outlaws.believers:
            self._stop(arena.hosts[peer].name)
        # What a clogged link holds arrives when it was going to, also from those who are dead.
        self.drain_s = max(0.0, arena.latest_s - arena.now_s)
        arena.clogs.clear()
        arena.losses.clear()
        arena.corrupt.clear()
        arena.unusable = ""
        arena.mutes.clear()
        arena.ballots_later.clear()
        arena.out_of_step.clear()
        arena.load_s = arena.options.load_s
        self._unstuck()
        arena.loss = arena.double = arena.late = 0.0
        arena.mend()
        for host in list(arena.hosts.values()):
            host.traps.clear()
            host.hangs = host.garbles = False
            host.slow = 1.0
            if host.alive and host.paused:
                arena.resume(host.name)
        for host in arena.living():
            if not host.trains and host.node.me.role == "replica":
                arena.train(host.name)
            for other in arena.living():
                if other is not host and not arena.is_linked(host, other):
                    arena.dial(host, other.peer)

    def revive(self) -> None:
        for host in list(self.arena.hosts.values()):
            if not host.alive and host.name not in self.left:
                self._restart(host)

    def _restart(self, host: Host, how: str = "up") -> None:
        arena = self.arena
        if not host.alive and arena.hosts[host.peer] is host and host.name not in self.left:
            arena.back(host.name, how)

    # ------------------------------------------------------------ processes

    def _can_die(self, host: Host) -> bool:
        """The last replica only where checkpoints are left."""
        living = [h for h in self.arena.living() if h.node.me.role == "replica"]
        return host.alive and (living != [host] or bool(self.arena.disks))

    def _kill(self, fault: Fault, off: bool = False) -> None:
        for host in self._hosts(fault):
            if self._can_die(host):
                host.off = off
                self.arena.kill(host.name)
                self._undo(fault, lambda h=host: self._restart(h))

    def _off(self, fault: Fault) -> None:
        """The machine loses its power: no kernel answers for it."""
        self._kill(fault, off=True)

    def _power(self, fault: Fault) -> None:
        """Nothing runs any more, anywhere, but who stays; each comes back in its own time and way,
        or not."""
        arena = self.arena
        if not arena.disks:
            return  # nothing would be left of the run
        stay = {word.split(":")[0] for word in fault.detail.split() if ":stays:" in word}
        hosts = [host for host in arena.living() if host.name not in stay]
        for host in hosts:
            host.off = True
            arena.kill(host.name)
        arena.seen["power cut"] += 1
        for name, how, after_s in (word.split(":") for word in fault.detail.split()):
            host = arena.hosts.get(peer_id(name))
            if host is not None and how != "gone" and not host.alive:
                wait = Fault(0.0, "back", name, float(after_s))
                self._undo(wait, partial(self._restart, host, how))

    def _failpoint(self, fault: Fault) -> None:
        """Armed until it springs or the faults end, also in the processes that follow."""
        kind, count, side = fault.detail.split()
        trap = Trap(kind, int(count), side, fault.lasts_s)
        self.arena.seen["failpoints"] += 1
        for host in self._hosts(fault):
            host.traps.append(trap)

    def _sprung(self, host: Host, trap: Trap) -> None:
        self.arena.seen[f"sprung {trap.kind}"] += 1
        for other in self.arena.hosts.values():
            if trap in other.traps:
                other.traps.remove(trap)
        back = Fault(0.0, "back", host.name, trap.away_s)
        self._undo(back, lambda: self._restart(host))

    def _lead(self) -> str:
        """Whoever coordinates now, in one lineage if there are several."""
        return "".join(host.name for host in self.arena.living() if host.leads)[:1]

    def _kill_lead(self, fault: Fault) -> None:
        self._kill(replace(fault, who=self._lead()))

    def _pause_lead(self, fault: Fault) -> None:
        self._pause(replace(fault, who=self._lead()))

    def _kill_hit(self, fault: Fault) -> None:
        """Whoever a loss has hit last, as the sender of what was lost or comes late."""
        self._kill(replace(fault, who=self.arena.last_hit))

    def _pause(self, fault: Fault) -> None:
        for host in self._hosts(fault):
            if host.alive and not host.paused:
                self.arena.pause(host.name)

                def again(host: Host = host) -> None:
                    if host.alive and host.paused:
                        self.arena.resume(host.name)

                self._undo(fault, again)

    def _starve(self, fault: Fault) -> None:
        """The process gets a processor for moments only, each after another wait."""
        arena, dice = self.arena, random.Random(str(fault))
        end_s = arena.now_s + fault.lasts_s

        def turn(host: Host) -> None:
            if not host.alive or host.paused or arena.now_s >= end_s:
                return
            away_s = dice.uniform(0.1, 1.0) * float(fault.detail)
            self._pause(Fault(0.0, "pause", host.name, away_s))
            again = Fault(0.0, "starve", host.name, away_s + dice.uniform(0.01, 0.1))
            self._undo(again, lambda: turn(host))

        for host in self._hosts(fault):
            turn(host)

    def _leave(self, fault: Fault) -> None:
        for host in self._hosts(fault):
            if self._can_die(host) and len(self.arena.living()) > 2:
                self.left.add(host.name)
                self.arena.leave(host.name)

    _mass_leave = _leave

    def _leave_as(self, fault: Fault) -> None:
        """The first that is in this phase leaves; nobody takes over from it before it is gone."""
        arena = self.arena
        found = [h for h in self._hosts(fault) if h.alive and h.node.phase.value == fault.detail]
        for host in found[:1]:
            self._leave(replace(fault, who=host.name))
            if host.name in self.left and host.alive:
                arena.isolate(host, arena.timing.leave_s + 1.0)
        if not self.left:
            self._undo(replace(fault, lasts_s=LOOK_AGAIN_S), lambda: self._leave_as(fault))

    def _ban(self, fault: Fault, outside: bool = False) -> None:
        """It is found out, and stops when it hears of it, or goes on for as long as it can."""
        arena, (kind, *names) = self.arena, fault.detail.split()
        finders = [peer_id(name) for name in "".join(names)]
        for host in self._hosts(fault):
            if self._can_die(host) and (outside or arena.host(host.name).node.view is not None):
                arena.seen["banned"] += 1
                self.left.add(host.name)
                arena.outlaws.convict(host.peer, finders, stands_alone=kind == "alone")
                self._undo(fault, partial(self._stop, host.name))

    def _ban_outside(self, fault: Fault) -> None:
        """Ban somebody, also one that is asking to come in."""
        self._ban(fault, outside=True)

    def _stop(self, name: str) -> None:
        """The last that holds anything goes on: nobody is there who could have banned it."""
        host = self.arena.host(name)
        if host.alive and self._can_die(host):
            self.arena.kill(name)

    def _hand_over(self, fault: Fault) -> None:
        """To the one named, or, if that coordinates already, to whoever can."""
        for host in self.arena.living():
            if host.leads and not host.paused:
                peer = peer_id(fault.who)
                self.arena.deliver(host, ev.HandOver(b"" if peer == host.peer else peer))

    def _ask(self, fault: Fault) -> None:
        """Somebody types `atoll min-trainers N` there."""
        for host in self._hosts(fault):
            if host.alive and host.node.view is not None:
                self.arena.seen["asked"] += 1
                self.arena.give(host.name, ev.TrainersAsked(int(fault.detail)))

    def _stranger(self, fault: Fault) -> None:
        """Somebody with another specification asks to come in, again and again, and never is."""
        arena = self.arena
        if peer_id(fault.who) in arena.hosts:
            return
        host = arena.add_host(fault.who)
        self.left.add(host.name)
        arena.deliver(host, replace(arena.options.configured, spec="another"))
        for other in arena.living():
            if other is not host:
                arena.dial(host, other.peer)

    def _advise(self, fault: Fault) -> None:
        """Advise what measurements say of all or some members, as every peer's planner does."""
        for host in self.arena.living():
            view, dice = host.node.view, random.Random(fault.detail)
            if view is not None and view.number > 0:
                peers = sorted(view.replicas)
                self.arena.deliver(host, _advice(peers, dice))

    def _advise_owners(self, fault: Fault) -> None:
        """Advise of all members that these of them own everything."""
        for host in self.arena.living():
            view = host.node.view
            if view is not None and view.number > 0:
                peers = tuple(sorted(view.replicas))
                shares = tuple(int(chr(peer[0]) in fault.who) for peer in peers)
                if any(shares):
                    advice = Advised(peers, Layout("butterfly", shares, ()))
                    self.arena.deliver(host, advice)

    def _join(self, fault: Fault) -> None:
        arena = self.arena
        for name in fault.who:
            host = arena.add_host(name)
            arena.deliver(host, ev.Tick())
            for other in arena.living():
                if other is not host:
                    arena.dial(host, other.peer)
            arena.train(name)

    _mass_join = _join

    # ------------------------------------------------------------ the network

    def _cut_ways(self, fault: Fault, ways: set[tuple[bytes, bytes]]) -> None:
        new = ways - self.arena.cuts
        self.arena.cuts |= new
        self._undo(fault, lambda: self.arena.mend(new))

    def _cut(self, fault: Fault) -> None:
        a, b = peer_id(fault.who[0]), peer_id(fault.who[-1])
        self._cut_ways(fault, {(a, b), (b, a)} if a != b else set())

    def _one_way(self, fault: Fault) -> None:
        if len(fault.who) == 2:
            self._cut_ways(fault, {(peer_id(fault.who[0]), peer_id(fault.who[1]))})

    def _split(self, fault: Fault, bridge: str = "") -> None:
        """Two groups that do not hear each other, but for the bridge."""
        inside = set(map(peer_id, fault.who)) - {peer_id(bridge)}
        outside = self.arena.hosts.keys() - inside - {peer_id(bridge)}
        self._cut_ways(fault, {w for a in inside for b in outside for w in ((a, b), (b, a))})

    def _bridge(self, fault: Fault) -> None:
        self._split(fault, bridge=fault.who[0])

    def _mute(self, fault: Fault) -> None:
        """Nothing passes but what is said on links; nobody notices, but for what does not come."""
        arena, first = self.arena, peer_id(fault.who[0])
        others = arena.hosts.keys() - {first}
        last = peer_id(fault.who[-1])
        ways = {
            "pair": {(first, last), (last, first)},
            "way": {(first, last)},
            "deaf": {(other, first) for other in others},
            "dumb": {(first, other) for other in others},
        }.get(fault.detail)
        if ways is None:  # the first is the bridge
            inside = set(map(peer_id, fault.who[1:]))
            ways = {w for a in inside for b in others - inside for w in ((a, b), (b, a))}
        arena.mutes |= ways
        self._undo(fault, lambda: arena.mutes.difference_update(ways))

    def _heavy(self, fault: Fault) -> None:
        """A state takes so long, from anybody."""
        arena = self.arena
        arena.load_s = float(fault.detail)
        self._undo(fault, lambda: setattr(arena, "load_s", arena.options.load_s))

    def _stuck(self, fault: Fault) -> None:
        """Whoever has this name gets nothing of any state."""
        arena = self.arena
        arena.stuck = lambda host, donor: host.name == fault.who
        self._undo(fault, self._unstuck)

    def _unstuck(self) -> None:
        self.arena.stuck = lambda host, donor: False

    def _isolate(self, fault: Fault) -> None:
        """Nobody of these hears anybody: three and more parts."""
        inside = set(map(peer_id, fault.who))
        everyone = self.arena.hosts.keys()
        self._cut_ways(
            fault, {w for a in inside for b in everyone if a != b for w in ((a, b), (b, a))}
        )

    def _clog(self, fault: Fault) -> None:
        if len(fault.who) == 2:
            way = (peer_id(fault.who[0]), peer_id(fault.who[1]))
            self.arena.clogs[way] = self.arena.now_s + fault.lasts_s

    def _swizzle(self, fault: Fault) -> None:
        """Clog these one after the other, and let go in another order."""
        arena = self.arena
        for i, name in enumerate(fault.who):
            peer = peer_id(name)
            start_s = fault.lasts_s * 0.3 * i / len(fault.who)
            end_s = arena.now_s + fault.lasts_s * (1 - 0.3 * ((i * 7 + 3) % len(fault.who)) / 9)

            def clog(peer: bytes = peer, end_s: float = end_s) -> None:
                if not self.over:
                    for other in arena.hosts:
                        arena.clogs[peer, other] = arena.clogs[other, peer] = end_s

            arena.after(start_s, clog)

    def _break(self, fault: Fault) -> None:
        hosts = self._hosts(fault)
        if len(hosts) == 2:
            self.arena.break_link(*hosts)

    def _burst(self, fault: Fault) -> None:
        arena, before = self.arena, self.arena.options
        arena.loss, arena.double, arena.late = map(float, fault.detail.split())

        def calm() -> None:
            arena.loss, arena.double, arena.late = before.loss, before.double, 0.0

        self._undo(fault, calm)

    def _corrupt(self, fault: Fault) -> None:
        if len(fault.who) == 2:
            self.arena.corrupt.add((peer_id(fault.who[0]), peer_id(fault.who[1])))

    def _lose(self, fault: Fault) -> None:
        kind, act, count, way = fault.detail.split()
        loss = Loss(kind, int(count), way, fault.who, act, fault.lasts_s)
        self.arena.losses.append(loss)

    # ------------------------------------------------------------ trainers and bytes

    def _hang(self, fault: Fault) -> None:
        for host in self._hosts(fault):
            host.hangs = True
            self._undo(fault, lambda h=host: setattr(h, "hangs", False))

    def _other_call(self, fault: Fault) -> None:
        """Its trainer calls something of its own."""
        names = {*fault.who}
        self.arena.out_of_step |= names
        self._undo(fault, lambda: self.arena.out_of_step.difference_update(names))

    def _detach(self, fault: Fault) -> None:
        arena = self.arena
        for host in self._hosts(fault):
            if host.alive and host.trains and not host.paused:
                arena.detach(host.name)

                def again(name: str = host.name) -> None:
                    host = arena.host(name)  # which may have died since, or be another process
                    if host.alive and not host.trains and name not in self.left:
                        arena.train(name)
                    host.trains |= name not in self.left

                self._undo(fault, again)

    def _slow(self, fault: Fault) -> None:
        for host in self._hosts(fault):
            host.slow = 10.0
            self._undo(fault, lambda h=host: setattr(h, "slow", 1.0))

    def _flip(self, fault: Fault) -> None:
        """One memory at a time, and never where there is no majority against it."""
        hosts = [h for h in self.arena.living() if h.node.view is not None]
        if len(hosts) >= 3 and not any(h.flipped or h.tainted for h in hosts):
            for host in self._hosts(fault):
                if host.alive and host.state.values:
                    self.flips += 1
                    host.flipped = bytes([self.flips])

    def _flip_lead(self, fault: Fault) -> None:
        self._flip(replace(fault, who=self._lead()))

    def _garble(self, fault: Fault) -> None:
        if len(self.arena.living()) >= 3 and not any(h.garbles for h in self.arena.living()):
            for host in self._hosts(fault):
                host.garbles = True
                self._undo(fault, lambda h=host: setattr(h, "garbles", False))

    def _unreadable(self, fault: Fault) -> None:
        arena = self.arena
        arena.unusable = fault.who[0]
        self._undo(fault, lambda: setattr(arena, "unusable", ""))


def _advice(peers: list[bytes], dice: random.Random) -> Advised:
    """Any advice that a planner could give: of whom, along which trees, and who owns how much."""
    chosen = sorted(dice.sample(peers, dice.randint(max(1, len(peers) - 1), len(peers))))
    count = len(chosen)
    shares = tuple(dice.randint(0, 3) for _ in chosen)
    shares = shares if any(shares) else (1,) * count
    kind = dice.choice(("butterfly", "ring", "tree", "hierarchical"))
    orders = {
        "ring": dice.sample(range(count), count),
        "hierarchical": dice.choices((0, 1), k=count),
    }
    return Advised(tuple(chosen), Layout(kind, shares, tuple(orders.get(kind, ()))))
