"""Faults at random, overlapping, for hours: does the run go on, and are all its bits equal?

    python tests/chaos/soak.py [--hours 8 | --minutes 3] [--seed 1] [--mean-s 1.0]

Eight daemons on hosts of their own (network namespaces) with numpy trainers. About once a second a
fault begins, of a kind and for a time that the seed chooses; several are under way at any moment,
but never more than the group can bear (BROKEN_MAX of its members, see soak_faults.Kind). It fails
when two daemons show different digests of a round, when nothing commits for 30 s, when a daemon
ends by itself or is not back in time, and when memory or descriptors grow. Exit code 1 then.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.bad_path import BadPath
from harness.health import assert_healthy
from harness.netns import Net
from harness.processes import NET_PORT, Fleet
from harness.soak_faults import GUEST, KINDS, MARRED, Kind, Undo
from harness.soak_watch import Watch
from harness.wrong_clock import WrongClock

from atoll.peer.checkpoint.reader import candidates, open_latest

NAMES = "abcdefgh"
ELDER = "h"  # never killed: a leak shows in the process that lives longest
BROKEN_MAX = 3  # of eight: five are a quorum
BACK_S = 90.0  # a victim must be well again that long after its fault, under fire all the while
PARAMETERS = 2e5
INNER_S = 0.15
LOG_BYTES = 200_000
TIDY_S = 10.0
HOME_BYTES = 8 << 20  # its checkpoints fit, while it is not filled up
EVERY = 20  # rounds between two checkpoints of a daemon
# How a daemon may end while it comes back: its home's disk is full, nobody answers, not admitted.
DAEMON_MAY_END = {2, 10, 11}
# ... and a trainer: its daemon does not answer, has died, or no round has committed.
TRAINER_MAY_END = {14, 15, 24}
RETRY_S = 1.0


@dataclass
class Active:
    kind: Kind
    names: tuple[str, ...]
    undo: Undo
    end_s: float


class Failed(Exception):
    """What the soak is there to find."""


class Soak:
    """See soak_faults.Stage for what a fault may use."""

    def __init__(self, folder: Path, seed: int, mean_s: float) -> None:
        self.dice = random.Random(seed)
        self.mean_s = mean_s
        self.net = Net([*NAMES, GUEST])
        host = self.net.address(MARRED)
        self.path = BadPath(host, lambda make: self.net.inside(MARRED, make))
        self.path.target_port = NET_PORT
        self.run = Fleet(folder, self.net)
        self.run.options = self.options
        self.clocks = {name: WrongClock(folder / f"clock-{name}") for name in NAMES}
        self.mounted: list[Path] = []
        self.active: list[Active] = []
        self.down: set[str] = set()  # killed or leaving, by a fault
        self.recovering: dict[str, float] = {}  # since when
        self.retry_s: dict[str, float] = {}
        self.flipped: dict[str, int] = {}  # the round in which its memory was damaged
        self.counts: Counter[str] = Counter()
        self.story: deque[str] = deque(maxlen=40)
        self.began_s = time.monotonic()
        self.next_s = self.tidy_s = 0.0
        self.slowest_back = (0.0, "")
        self.checkpointed = 0
        self.watch: Watch

    def form(self) -> None:
        for name in NAMES:
            home = self.run.folder / name
            home.mkdir()
            options = f"size={HOME_BYTES},mode=700"
            command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(home)]
            subprocess.run(command, check=True)
            self.mounted.append(home)
            self.run.environment = self.clocks[name].environment
            if self.run.invite:
                self.run.join(name)
            else:
                self.run.up(name)
        for name in NAMES:
            self.run.sees(name, len(NAMES))
            self.run.train(name, PARAMETERS, inner_s=INNER_S)
        assert_healthy(self.run)
        self.watch = Watch(self.run, NAMES, ELDER)
        self.began_s = time.monotonic()

    def options(self, name: str) -> tuple[str, ...]:
        """Checkpoints lie on the disk that is filled up now and then."""
        if name == GUEST:
            return ()
        folder = self.run.folder / name / "checkpoints"
        advertised = ("--advertise", self.path.address) if name == MARRED else ()
        return ("--checkpoint", str(folder), "--every", str(EVERY), *advertised)

    def close(self) -> None:
        if hasattr(self, "watch"):
            self.watch.close()
        self.path.close()
        self.run.close()  # the network with it
        for home in self.mounted:
            subprocess.run(["umount", "--lazy", str(home)], check=True)

    # ------------------------------------------------------------ one turn

    def turn(self, now_s: float) -> None:
        for fault in [a for a in self.active if a.end_s <= now_s]:
            self.end(fault)
        self.look_after(now_s)
        self.welcome_back(now_s)
        if now_s >= self.next_s:
            self.next_s = now_s + self.dice.expovariate(1 / self.mean_s)
            self.begin_one(now_s)
        if now_s - self.tidy_s > TIDY_S:
            self.tidy_s = now_s
            self.run.tidy(LOG_BYTES)
        under_way = ", ".join(f"{a.kind.name} {''.join(a.names)}" for a in self.active)
        if problem := self.watch.failure or self.watch.stall(under_way):
            raise Failed(problem)

    def begin_one(self, now_s: float) -> None:
        """A kind that is possible now; there is always one that breaks nobody."""
        kinds = list(KINDS)
        while kinds:
            kind = self.dice.choices(kinds, [k.weight for k in kinds])[0]
            if names := self.victims(kind):
                break
            kinds.remove(kind)
        else:
            return
        self.counts[kind.name] += 1
        self.note(f"{kind.name}: {', '.join(names)}")
        undo = kind.begin(self, *names)
        lasts_s = kind.longest_s * self.dice.uniform(0.1, 1.0)
        self.active.append(Active(kind, names, undo, now_s + lasts_s))

    def victims(self, kind: Kind) -> tuple[str, ...]:
        """Names for it, () if it must not be now."""
        broken = {n for a in self.active if a.kind.broken for n in a.names} | set(self.recovering)
        if len(broken) + kind.broken > BROKEN_MAX:
            return ()
        same = {n for a in self.active if a.kind.name == kind.name for n in a.names}
        if same and kind.name in ("pause a majority", "a guest", "flipped memory"):
            return ()  # one at a time
        possible = [n for n in NAMES if n not in broken | same and not (kind.fatal and n == ELDER)]
        if kind.name == "flipped memory":  # it has to say how much it has
            possible = [n for n in possible if n not in self.watch.off]
        if kind.victim == "coordinator":
            statuses = {n: self.watch.fresh(n, time.monotonic() - 1.0) for n in possible}
            possible = [n for n in possible if statuses[n].get("phase") == "coordinator"]
        elif kind.victim != "any":
            possible = [n for n in possible if n == kind.victim]
        many = max(1, kind.broken)
        return tuple(self.dice.sample(possible, many)) if len(possible) >= many else ()

    def end(self, fault: Active) -> None:
        self.active.remove(fault)
        fault.undo()
        self.note(f"end of {fault.kind.name}: {', '.join(fault.names)}")
        if fault.kind.broken:  # from now on: what a daemon said before it was ended is not its life
            self.recovering |= dict.fromkeys(fault.names, time.monotonic())

    # ------------------------------------------------------------ the victims

    def look_after(self, now_s: float) -> None:
        """Start again what has ended, as a supervisor would; it must have had a reason."""
        full = {n for a in self.active if a.kind.name == "full disk" for n in a.names}
        for name in NAMES:
            daemon, trainer = self.run.peers[name], self.run.trainers[name]
            if name in self.down or self.retry_s.get(name, 0.0) > now_s:
                continue
            code = daemon.popen.poll()
            if code is not None:
                if code not in DAEMON_MAY_END or not (name in self.recovering or name in full):
                    raise Failed(f"{name} has ended with {code}: see {daemon.log}")
                self.retry_s[name] = now_s + RETRY_S
                self.start_again(name)
                self.recovering.setdefault(name, now_s)
            elif (code := trainer.popen.poll()) is not None:
                if code not in {*TRAINER_MAY_END, -9}:
                    raise Failed(f"{name}'s trainer has ended with {code}: see {trainer.log}")
                if self.watch.fresh(name, now_s - 1.0):
                    self.retry_s[name] = now_s + RETRY_S
                    self.run.train(name, PARAMETERS, inner_s=INNER_S)

    def welcome_back(self, now_s: float) -> None:
        for name, since_s in list(self.recovering.items()):
            if self.is_well(name, since_s):
                del self.recovering[name]
                took_s = now_s - since_s
                self.slowest_back = max(self.slowest_back, (took_s, name))
            elif now_s - since_s > BACK_S:
                raise Failed(f"{name} is not back after {BACK_S:.0f} s: see its log")

    def is_well(self, name: str, since_s: float) -> bool:
        status = self.watch.fresh(name, since_s)
        if not status or status["phase"] not in ("member", "coordinator") or not status["synced"]:
            return False
        if name in self.flipped:
            return self.is_repaired(name, status)
        return status["round"] >= self.watch.round - 3

    def is_repaired(self, name: str, status: dict[str, object]) -> bool:
        """Its digest of a round well after the damage is the others'."""
        number = status["round"]
        assert isinstance(number, int)
        key = (str(status["lineage"]), number)
        others = self.watch.ledger.digests.get(key)
        if number < self.flipped[name] + 3 or others is None or others[0] != status["digest"]:
            return False
        del self.flipped[name]
        self.watch.distrusted[name] = number
        return True

    # ------------------------------------------------------------ what faults use

    def expect_end(self, name: str) -> None:
        self.down.add(name)

    def start_again(self, name: str) -> None:
        self.run.peers[name].ends()
        self.run.environment = self.clocks[name].environment
        self.run.restart(name)
        self.down.discard(name)

    def keep_off(self, name: str, *, off: bool) -> None:
        with self.watch.locks[name]:
            (self.watch.off.add if off else self.watch.off.discard)(name)

    def distrust(self, name: str) -> None:
        self.flipped[name] = self.watch.round
        self.watch.distrusted[name] = -1

    # ------------------------------------------------------------ the end

    def note(self, text: str) -> None:
        self.story.append(f"{time.monotonic() - self.began_s:8.1f} s  {text}")

    def calm(self) -> None:
        """No more faults: everybody comes back and the next rounds commit everywhere."""
        for fault in list(self.active):
            self.end(fault)
        self.net.heal()
        while self.recovering:
            self.next_s = float("inf")
            self.turn(time.monotonic())
            time.sleep(0.05)
        self.next_s = float("inf")
        until_s = time.monotonic() + 5.0  # trainers that ended meanwhile start again
        while time.monotonic() < until_s:
            self.turn(time.monotonic())
            time.sleep(0.05)
        assert_healthy(self.run, NAMES, diverged=True)
        self.check_checkpoints()
        watched_s = time.monotonic() - self.began_s
        if problem := self.watch.flat[ELDER].problem(watched_s):
            raise Failed(f"{ELDER}: {problem}")

    def check_checkpoints(self) -> None:
        """Whatever is there under a final name is whole, and somebody's is of late."""
        rounds = []
        for name in NAMES:
            folder = self.run.folder / name / "checkpoints"
            for path in candidates(folder):
                with open_latest(path) as checkpoint:  # every byte is checked
                    rounds.append(checkpoint.manifest.round)
        self.checkpointed = len(rounds)
        last = max(rounds, default=0)
        if last < self.watch.round - 10 * EVERY:
            raise Failed(f"the latest checkpoint is of round {last}, the run at {self.watch.round}")

    def summary(self) -> str:
        hours = (time.monotonic() - self.began_s) / 3600
        lines = [f"{count:7d}  {kind}" for kind, count in self.counts.most_common()]
        watch = self.watch
        compared = watch.compared + sum(len(by) > 1 for by in watch.ledger.seen_by.values())
        lines += [
            f"{self.counts.total():7d}  faults of {len(self.counts)} kinds in {hours:.2f} h",
            f"{watch.round:7d}  rounds committed; digests of {compared} compared",
            f"{self.checkpointed:7d}  checkpoints at the end, all of them whole",
            f"{watch.worst_stall_s:7.1f}  s worst stall, during: {watch.worst_stall_note or '-'}",
            f"{self.slowest_back[0]:7.1f}  s until the slowest victim ({self.slowest_back[1]})"
            " was well again",
        ]
        for name, flat in watch.flat.items():
            if flat.samples:
                first, last = flat.medians("rss_bytes")
                fds = flat.medians("descriptors")
                lines.append(
                    f"{last / 2**20:7.1f}  MiB in {name} (first third {first / 2**20:.1f}),"
                    f" {fds[1]:.0f} descriptors ({fds[0]:.0f})"
                )
        return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--minutes", type=float, default=0.0, help="instead of --hours")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--mean-s", type=float, default=1.0, help="between two faults")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="atoll-soak-"))
    print(f"soak with seed {arguments.seed}, logs in {folder}", flush=True)
    soak = Soak(folder, arguments.seed, arguments.mean_s)
    failure = ""
    try:
        soak.form()
        until_s = soak.began_s + (60 * arguments.minutes or 3600 * arguments.hours)
        while (now_s := time.monotonic()) < until_s:
            soak.turn(now_s)
            time.sleep(0.02)
        soak.calm()
    except (Failed, AssertionError) as error:
        failure = str(error)
    except Exception:  # a fault that could not be made or undone
        failure = traceback.format_exc()
    except KeyboardInterrupt:
        failure = "interrupted"
    finally:
        with contextlib.suppress(AttributeError):  # it never formed
            print(soak.summary(), flush=True)
        if failure:
            print("the last faults:", *soak.story, sep="\n")
            print(f"FAILED with seed {arguments.seed}: {failure[:4000]}\nlogs: {folder}")
        else:
            print(f"passed with seed {arguments.seed}")
        soak.close()
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
