"""What the soak does to its daemons: each function begins one kind of fault and returns its end.

``Kind.broken`` is how many members it takes from the quorum until they are seen to be well again.
The soak never has more of them than the group can lose. *Wide* kinds take as many as they like, one
at a time: restarts of any number, and partitions. What they leave of a majority is reckoned while
they last (soak_stalls.py), from the processes that are down or stopped and the paths that are cut.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from atoll.peer.daemon.process import KEPT_FOR_LOCAL
from harness.bad_path import BadPath, flip_state
from harness.health import usage
from harness.netns import Net
from harness.processes import NET_PORT, Fleet
from harness.slow_disk import SlowDisk
from harness.wrong_clock import WrongClock

__all__ = ["GUEST", "KINDS", "MARRED", "Kind", "NotYet", "Stage"]

GUEST = "guest"  # a host whose daemon joins and leaves
MARRED = "g"  # the others reach it over a path that can flip bits and stop taking them
HOUR_S = 3600.0
BURN = (sys.executable, "-c", "while True: pass")
BURNERS = 4  # for each core: a daemon gets a processor a fifth of the time, or less
FLIPPED_MAX = 8  # bits
SYNC_S_MAX = 0.5  # an SD card with a write under way
Undo = Callable[[], None]


class NotYet(Exception):
    """A fault cannot be undone yet: on a busy machine processes take long to end."""


class Stage(Protocol):
    """What a fault may use of the soak."""

    run: Fleet
    net: Net
    clocks: dict[str, WrongClock]
    disks: dict[str, SlowDisk]
    path: BadPath
    dice: random.Random
    slow_bps: float  # of a slow link, in which a round still takes a few seconds

    def expect_end(self, name: str) -> None:
        """This daemon and its trainer are about to end; they are to be left alone until undone."""

    def start_again(self, name: str) -> None:
        """... and here the daemon begins another life."""

    def keep_off(self, name: str, *, off: bool) -> None:
        """Ask this daemon nothing meanwhile."""

    def distrust(self, name: str) -> None:
        """Its state is about to be damaged: what it says of its digests does not count."""

    def forgets(self, name: str) -> None:
        """Its home is damaged: it has no vote until it is well again."""

    def part(self, pairs: Iterable[tuple[str, str]]) -> Undo:
        """Note that these have no path to each other, until undone."""

    def starve(self, *, on: bool) -> None:
        """Note that the CPUs are starved from now on, or not any more."""


@dataclass(frozen=True)
class Kind:
    name: str
    begin: Callable[..., Undo]  # (stage, *names): one name, or as many as it breaks
    longest_s: float  # it lasts up to that long
    broken: int = 1
    weight: float = 1.0
    victim: str = "any"  # or "coordinator", or a name
    fatal: bool = False  # ends the process: the oldest daemon is spared, so that leaks show
    single: bool = False  # one at a time
    wide: tuple[int, int] = (0, 0)  # so many victims, from and to


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
        if daemon.popen.poll() is None:
            raise NotYet
        assert daemon.ends() == 0, f"{name} did not leave cleanly"
        stage.start_again(name)

    return undo


def kill_many(stage: Stage, *names: str) -> Undo:
    """Any number of them at one instant, with their trainers; back in any order."""
    for name in names:
        stage.expect_end(name)
    for name in names:
        stage.run.peers[name].kill()
        stage.run.trainers[name].kill()
    order = stage.dice.sample(names, len(names))
    return lambda: [stage.start_again(name) for name in order].clear()


def take_port(stage: Stage, name: str) -> Undo:
    """While its daemon is dead, another program listens where it did."""
    end = kill(stage, name)
    stage.run.peers[name].ends()
    address = stage.net.address(name), NET_PORT
    squatter = stage.net.inside(name, lambda: socket.create_server(address))
    refused = stage.run.start(name, "up", "--run", "demo")

    def undo() -> None:
        refused.kill(signal.SIGCONT)  # it may be among those that are paused just now
        if refused.popen.poll() is None:
            raise NotYet
        assert refused.ends() == 2, f"{name} did not refuse a port that is in use"
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


def others_than(stage: Stage, name: str) -> list[str]:
    return [other for other in sorted(stage.run.peers) if other not in (name, GUEST)]


def both(first: Undo, second: Undo) -> Undo:
    return lambda: (first(), second())[-1]


def cut_one_way(stage: Stage, name: str) -> Undo:
    other = stage.dice.choice(others_than(stage, name))
    ends = stage.dice.choice([(name, other), (other, name)])
    return both(stage.net.cut(*ends).undo, stage.part([ends]))


def isolate(stage: Stage, name: str) -> Undo:
    parted = stage.part((name, other) for other in others_than(stage, name))
    return both(stage.net.silence(name).undo, parted)


def partition(stage: Stage, *names: str) -> Undo:
    """These on one side, all others on the other."""
    others = sorted(set(stage.run.peers) - {GUEST, *names})
    parted = stage.part(itertools.product(names, others))
    return both(stage.net.split(names, others).undo, parted)


def bridge(stage: Stage, *names: str) -> Undo:
    """The first of these hears everybody; the others, and the rest, do not hear each other."""
    _hub, *here = names
    there = sorted(set(stage.run.peers) - {GUEST, *names})
    parted = stage.part(itertools.product(here, there))
    return both(stage.net.split(here, there).undo, parted)


def half_open(stage: Stage, name: str) -> Undo:
    return stage.net.half_open(name, stage.dice.choice(others_than(stage, name))).undo


def slow_link(stage: Stage, name: str) -> Undo:
    stage.net.rate(name, stage.slow_bps)
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


def slow_disk(stage: Stage, name: str) -> Undo:
    stage.disks[name].slow_down(stage.dice.uniform(0.02, SYNC_S_MAX))
    return lambda: stage.disks[name].slow_down(0.0)


def flip_home(stage: Stage, name: str) -> Undo:
    """Some bits of what its process has written are others when the next one reads them."""
    end = kill(stage, name)
    stage.run.peers[name].ends()
    home = stage.run.peers[name].home
    found = [home / "ledger", *home.glob("rounds/*"), *home.glob("checkpoints/**/*")]
    files = [path for path in found if path.is_file() and path.stat().st_size]
    path = stage.dice.choice(sorted(files)) if files else None
    for _ in range(stage.dice.randint(1, FLIPPED_MAX) if path else 0):
        assert path is not None
        with path.open("r+b") as file:
            at = file.seek(stage.dice.randrange(path.stat().st_size))
            byte = file.read(1)[0] ^ 1 << stage.dice.randrange(8)
            file.seek(at)
            file.write(bytes([byte]))
    stage.forgets(name)
    return end


def lose_home(stage: Stage, name: str) -> Undo:
    """All of it is gone, its key too: whoever comes back from there is a new peer."""
    end = kill(stage, name)
    stage.run.peers[name].ends()
    for path in stage.run.peers[name].home.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    stage.forgets(name)
    return end


def starve_cpus(stage: Stage, name: str) -> Undo:
    """Processes that do nothing but count, each in a session of its own."""
    count = BURNERS * len(os.sched_getaffinity(0))
    burners = [subprocess.Popen(BURN, start_new_session=True) for _ in range(count)]
    stage.starve(on=True)

    def undo() -> None:
        for burner in burners:
            burner.kill()
        for burner in burners:
            burner.wait()
        stage.starve(on=False)

    return undo


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
    Kind("pause a majority", pause_majority, 4.0, broken=0, weight=0.2, single=True),
    Kind("kill several at once", kill_many, 8.0, weight=0.4, fatal=True, wide=(2, 7)),
    Kind("kill all at once", kill_many, 8.0, weight=0.1, wide=(8, 8)),
    Kind("kill a trainer", kill_trainer, 1.0, broken=0),
    Kind("hang a trainer", hang_trainer, 5.0, broken=0),
    Kind("one-way cut", cut_one_way, 6.0),
    Kind("isolated host", isolate, 6.0),
    Kind("partition", partition, 6.0, broken=2),
    Kind("partition of any size", partition, 12.0, weight=0.3, wide=(1, 4)),
    Kind("bridge partition", bridge, 20.0, weight=0.3, wide=(2, 5)),
    Kind("half-open connections", half_open, 6.0),
    Kind("slow link", slow_link, 4.0, broken=0),
    Kind("no descriptors", starve_descriptors, 3.0),
    Kind("full disk", fill_disk, 5.0, broken=0),
    Kind("slow disk", slow_disk, 10.0, broken=0),
    Kind("flipped bits in a home", flip_home, 2.0, weight=0.3, fatal=True, single=True),
    Kind("lost home", lose_home, 2.0, weight=0.15, fatal=True, single=True),
    Kind("starved CPUs", starve_cpus, 20.0, broken=0, weight=0.2, single=True),
    Kind("wall-clock jump", jump_clock, 5.0, broken=0, weight=2.0),
    Kind("strangers", strangers, 5.0, broken=0),
    Kind("flipped memory", flip_memory, 0.1, weight=0.5, single=True),
    Kind("flipped frames", flip_frames, 2.0, victim=MARRED, weight=2.0),
    Kind("stopped reader", stop_reading, 6.0, victim=MARRED, weight=2.0),
    Kind("port in use", take_port, 3.0, weight=0.5, fatal=True),
    Kind("a guest", visit, 6.0, broken=0, single=True),
)
