"""What the soak does to its daemons: each function begins one kind of fault and returns its end.

``Kind.broken`` is how many members it takes from the quorum until they are seen to be well again.
The soak never has more of them than the group can lose, but for the kind that is named for it.
"""

from __future__ import annotations

import contextlib
import random
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from atoll.peer.daemon.process import KEPT_FOR_LOCAL
from harness.bad_path import BadPath, flip_state
from harness.health import usage
from harness.netns import Net
from harness.processes import NET_PORT, Fleet
from harness.wrong_clock import WrongClock

__all__ = ["GUEST", "KINDS", "MARRED", "Kind", "Stage"]

GUEST = "guest"  # a host whose daemon joins and leaves
MARRED = "g"  # the others reach it over a path that can flip bits and stop taking them
HOUR_S = 3600.0
Undo = Callable[[], None]


class Stage(Protocol):
    """What a fault may use of the soak."""

    run: Fleet
    net: Net
    clocks: dict[str, WrongClock]
    path: BadPath
    dice: random.Random

    def expect_end(self, name: str) -> None:
        """This daemon and its trainer are about to end; they are to be left alone until undone."""

    def start_again(self, name: str) -> None:
        """... and here the daemon begins another life."""

    def keep_off(self, name: str, *, off: bool) -> None:
        """Ask this daemon nothing meanwhile."""

    def distrust(self, name: str) -> None:
        """Its state is about to be damaged: what it says of its digests does not count."""


@dataclass(frozen=True)
class Kind:
    name: str
    begin: Callable[..., Undo]  # (stage, *names): one name, or as many as it breaks
    longest_s: float  # it lasts up to that long
    broken: int = 1
    weight: float = 1.0
    victim: str = "any"  # or "coordinator", or a name
    fatal: bool = False  # ends the process: the oldest daemon is spared, so that leaks show


def kill(stage: Stage, name: str) -> Undo:
    stage.expect_end(name)
    stage.run.peers[name].kill()
    return lambda: stage.start_again(name)


def terminate(stage: Stage, name: str) -> Undo:
    stage.expect_end(name)
    daemon = stage.run.peers[name]
    daemon.kill(signal.SIGTERM)

    def undo() -> None:
        daemon.kill(signal.SIGCONT)  # it may be among those that are paused just now
        assert daemon.ends(30) == 0, f"{name} did not leave cleanly"
        stage.start_again(name)

    return undo


def take_port(stage: Stage, name: str) -> Undo:
    """While its daemon is dead, another program listens where it did."""
    end = kill(stage, name)
    stage.run.peers[name].ends()
    address = stage.net.address(name), NET_PORT
    squatter = stage.net.inside(name, lambda: socket.create_server(address))
    refused = stage.run.start(name, "up", "--run", "demo")

    def undo() -> None:
        refused.kill(signal.SIGCONT)  # it may be among those that are paused just now
        assert refused.ends(30) == 2, f"{name} did not refuse a port that is in use"
        squatter.close()
        end()

    return undo


def die_silently(stage: Stage, name: str) -> Undo:
    cut = stage.net.silence(name)
    end = kill(stage, name)
    return lambda: (cut.undo(), end())[-1]


def pause(stage: Stage, name: str) -> Undo:
    daemon = stage.run.peers[name]
    stage.keep_off(name, off=True)
    daemon.kill(signal.SIGSTOP)

    def undo() -> None:
        daemon.kill(signal.SIGCONT)
        stage.keep_off(name, off=False)

    return undo


def pause_majority(stage: Stage, name: str) -> Undo:
    names = stage.dice.sample(sorted(set(stage.run.peers) - {GUEST}), 5)
    undos = [pause(stage, name) for name in names]
    return lambda: [undo() for undo in undos].clear()


def kill_trainer(stage: Stage, name: str) -> Undo:
    stage.run.trainers[name].kill()
    return lambda: None  # the soak starts it again, as it does with any that ends


def hang_trainer(stage: Stage, name: str) -> Undo:
    trainer = stage.run.trainers[name]
    trainer.kill(signal.SIGSTOP)
    return lambda: trainer.kill(signal.SIGCONT)


def cut_one_way(stage: Stage, name: str) -> Undo:
    other = stage.dice.choice([n for n in stage.run.peers if n not in (name, GUEST)])
    ends = stage.dice.choice([(name, other), (other, name)])
    return stage.net.cut(*ends).undo


def isolate(stage: Stage, name: str) -> Undo:
    return stage.net.silence(name).undo


def partition(stage: Stage, *names: str) -> Undo:
    others = set(stage.run.peers) - {GUEST, *names}
    return stage.net.split(names, sorted(others)).undo


def half_open(stage: Stage, name: str) -> Undo:
    other = stage.dice.choice([n for n in stage.run.peers if n not in (name, GUEST)])
    return stage.net.half_open(name, other).undo


def slow_link(stage: Stage, name: str) -> Undo:
    stage.net.rate(name, 8e6)
    return lambda: stage.net.rate(name, 0)


STARTED_DESCRIPTORS = 30  # of some 45 that a daemon of the soak has open


def starve_descriptors(stage: Stage, name: str) -> Undo:
    daemon = stage.run.peers[name]
    if usage(daemon.pid).descriptors < STARTED_DESCRIPTORS:
        return lambda: None  # it may refuse to start with none: that is no fault of a running one
    stage.keep_off(name, off=True)
    pid, soft_hard = daemon.pid, resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    left = usage(pid).descriptors + KEPT_FOR_LOCAL // 2
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (left, soft_hard[1]))

    def undo() -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, soft_hard)
        stage.keep_off(name, off=False)

    return undo


def fill_disk(stage: Stage, name: str) -> Undo:
    """The home is on a tiny file system of its own."""
    ballast: Path = stage.run.peers[name].home / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return lambda: ballast.unlink(missing_ok=True)


def jump_clock(stage: Stage, name: str) -> Undo:
    stage.clocks[name].jump(stage.dice.uniform(-48, 48) * HOUR_S)
    return lambda: stage.clocks[name].jump(0)


def strangers(stage: Stage, name: str) -> Undo:
    """Connections that send noise, or nothing, and stay."""
    held = []
    for _ in range(20):
        with contextlib.suppress(OSError):
            caller = stage.net.connect(name, NET_PORT, 0.5)
            caller.sendall(stage.dice.randbytes(stage.dice.choice([0, 1, 5, 2000])))
            held.append(caller)
    return lambda: [caller.close() for caller in held].clear()


def flip_memory(stage: Stage, name: str) -> Undo:
    daemon = stage.run.peers[name]
    parameters = daemon.status()["parameters"]
    stage.distrust(name)
    daemon.kill(signal.SIGSTOP)
    flip_state(daemon.pid, stage.dice.randrange(parameters), parameters)
    daemon.kill(signal.SIGCONT)
    return lambda: None


def flip_frames(stage: Stage, name: str) -> Undo:
    for _ in range(stage.dice.randint(1, 4)):
        stage.path.flip()
    return lambda: None


def stop_reading(stage: Stage, name: str) -> Undo:
    stage.path.stop_reading()
    return stage.path.read_again


def visit(stage: Stage, name: str) -> Undo:
    """A guest joins; it leaves, or is killed, whether it is in by then or not."""
    host = stage.run.join(GUEST)
    number = stage.dice.choice([signal.SIGTERM, signal.SIGKILL])

    def undo() -> None:
        host.kill(number)
        stage.run.forget(GUEST)

    return undo


KINDS = (
    Kind("kill", kill, 2.0, fatal=True),
    Kind("kill the coordinator", kill, 2.0, victim="coordinator", fatal=True),
    Kind("kill the first peer", kill, 2.0, victim="a", weight=0.5, fatal=True),
    Kind("silent death", die_silently, 4.0, fatal=True),
    Kind("leave (SIGTERM)", terminate, 2.0, fatal=True),
    Kind("pause", pause, 2.0, weight=2.0),
    Kind("long pause", pause, 30.0, weight=0.3),
    Kind("pause a majority", pause_majority, 4.0, broken=0, weight=0.2),
    Kind("kill a trainer", kill_trainer, 1.0, broken=0),
    Kind("hang a trainer", hang_trainer, 5.0, broken=0),
    Kind("one-way cut", cut_one_way, 6.0),
    Kind("isolated host", isolate, 6.0),
    Kind("partition", partition, 6.0, broken=2),
    Kind("half-open connections", half_open, 6.0),
    Kind("slow link", slow_link, 4.0, broken=0),
    Kind("no descriptors", starve_descriptors, 3.0),
    Kind("full disk", fill_disk, 5.0, broken=0),
    Kind("wall-clock jump", jump_clock, 5.0, broken=0, weight=2.0),
    Kind("strangers", strangers, 5.0, broken=0),
    Kind("flipped memory", flip_memory, 0.1, weight=0.5),
    Kind("flipped frames", flip_frames, 2.0, victim=MARRED, weight=2.0),
    Kind("stopped reader", stop_reading, 6.0, victim=MARRED, weight=2.0),
    Kind("port in use", take_port, 3.0, weight=0.5, fatal=True),
    Kind("a guest", visit, 6.0, broken=0),
)
