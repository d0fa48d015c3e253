"""Faults at random, overlapping, for hours: does the run go on, and are all its bits equal?

    python tests/chaos/soak.py [--hours 1 | --minutes 3] [--seed 1] [--mean-s 1.0]
        [--parameters 2e5] [--only KIND ...] [--keep FOLDER]

Eight daemons on hosts of their own (network namespaces) with numpy trainers. About once a second a
fault begins, of a kind and for a time that the seed chooses; several are under way at any moment.
Kinds that break one member or two never break more than the group can bear (BROKEN_MAX); the wide
ones, restarts of any number at once and partitions of any shape, break as many as they like.

A *miss* is a stall above LIMIT_S (STARVED_LIMIT_S while CPUs are starved) in which a majority was
up and linked (soak_stalls.py). It fails at once when two daemons show different digests of a round,
when a committed round is gone, in a fork, when a daemon ends by itself or is not back in time, and
when the run is dead; at its end for each miss, and when memory, descriptors or homes have grown.
Exit code 1 then. Everything that happened is in ``events.log`` in the folder of the daemons' logs,
with the time of day, so that each stall can be looked up there.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.bad_path import BadPath
from harness.health import assert_healthy
from harness.netns import Net
from harness.power_cut import with_preloads
from harness.processes import NET_PORT, Fleet
from harness.slow_disk import SlowDisk
from harness.soak_faults import GUEST, KINDS, MARRED, Kind, NotYet, Undo
from harness.soak_stalls import DEAD_S, Stall, Stalls, has_majority, names_of
from harness.soak_watch import SHORT_S, Homes, Watch
from harness.wrong_clock import WrongClock

from atoll.collectives.errors import AtollError
from atoll.peer.checkpoint.reader import candidates, open_latest
from atoll.peer.client.ipc_client import ask

NAMES = "abcdefgh"
ELDER = "h"  # killed with all others only: a leak shows in the process that lives longest
BROKEN_MAX = 3  # of eight: five are a quorum
BACK_S = 120.0  # a victim must be well again that long after its fault, under fire all the while
PARAMETERS = 2e5
INNER_S = 0.15
LOG_BYTES = 200_000  # of each daemon's life, at least
TIDY_S = 10.0
SETTLED_S = 10.0  # after the last fault all have what one has shown
FRESH_S = 1.0  # who has answered so long ago may be asked
EVERY = 20  # rounds between two checkpoints of a daemon ...
EVERY_LARGE = 5  # ... whose rounds are so large that twice as many must fit beside two checkpoints
LARGE = 1e6  # parameters
HOME_BYTES = 24 << 20  # beside them: two ledgers, one that was refused
SLOW_BITS = 40  # of each parameter, in a second over a slow link
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

    def __init__(
        self, folder: Path, seed: int, mean_s: float, parameters: float, only: list[str]
    ) -> None:
        self.dice = random.Random(seed)
        self.mean_s, self.parameters = mean_s, parameters
        self.kinds = [kind for kind in KINDS if not only or kind.name in only]
        self.every = EVERY if parameters < LARGE else EVERY_LARGE
        self.slow_bps = SLOW_BITS * parameters
        self.net = Net([*NAMES, GUEST])
        self.names = {self.net.address(name): name for name in [*NAMES, GUEST]}
        host = self.net.address(MARRED)
        self.path = BadPath(host, lambda make: self.net.inside(MARRED, make))
        self.path.target_port = NET_PORT
        self.run = Fleet(folder, self.net)
        self.run.options = self.options
        self.clocks = {name: WrongClock(folder / f"clock-{name}") for name in NAMES}
        self.disks = {name: SlowDisk(folder / name, folder / f"disk-{name}") for name in NAMES}
        self.events = (folder / "events.log").open("w")
        self.mounted: list[Path] = []
        self.active: list[Active] = []
        self.down: set[str] = set()  # killed or leaving, by a fault
        self.recovering: dict[str, float] = {}  # since when
        self.started_s = dict.fromkeys(NAMES, 0.0)  # when each daemon's process was started last
        self.retry_s: dict[str, float] = {}
        self.flipped: dict[str, int] = {}  # the round in which its memory was damaged
        self.forgetful: set[str] = set()  # whose home is damaged, until they are well again
        self.cut: Counter[frozenset[str]] = Counter()  # paths that are cut, once for each fault
        self.starved = False
        self.counts: Counter[str] = Counter()
        self.began_s = time.monotonic()
        self.next_s = self.tidy_s = 0.0
        self.slowest_back = (0.0, "")
        self.checkpointed = self.lost = 0
        self.homes = Homes()
        self.watch: Watch
        self.stalls: Stalls

    def form(self) -> None:
        large = 8 * self.parameters
        room = HOME_BYTES + int(3 * large + 3 * self.every * self.parameters)
        for name in NAMES:
            home = self.run.folder / name
            home.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={room},mode=700", "tmpfs", str(home)]
            subprocess.run(command, check=True)
            self.mounted.append(home)
            self._set_environment(name)
            if self.run.invite:
                self.run.join(name)
            else:
                self.run.up(name, "--policy", "majority")  # a view may shrink to two: no fork then
        for name in NAMES:
            self.run.sees(name, len(NAMES))
            self.run.train(name, self.parameters, inner_s=INNER_S)
        assert_healthy(self.run)
        self.watch = Watch(self.run, NAMES)
        self.began_s = time.monotonic()
        self.stalls = Stalls(self.began_s)

    def options(self, name: str) -> tuple[str, ...]:
        """Checkpoints lie on the disk that is filled up now and then."""
        if name == GUEST:
            return ()
        folder = self.run.folder / name / "checkpoints"
        advertised = ("--advertise", self.path.address) if name == MARRED else ()
        return ("--checkpoint", str(folder), "--every", str(self.every), *advertised)

    def _set_environment(self, name: str) -> None:
        clock, disk = self.clocks[name].environment, self.disks[name].environment
        self.run.environment = with_preloads(clock, disk)

    def close(self) -> None:
        if hasattr(self, "watch"):
            self.watch.close()
        for fault in self.active:  # burners would outlive us
            with contextlib.suppress(Exception):
                fault.undo()
        self.path.close()
        self.run.close()  # the network with it
        for home in self.mounted:
            subprocess.run(["umount", "--lazy", str(home)], check=True)
        self.events.close()

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
            self.homes.look(self.mounted)
        if self.watch.failure:
            raise Failed(self.watch.failure)
        self.look_at_stalls()

    def look_at_stalls(self) -> None:
        """With the time of now: beginning a fault may have taken a while."""
        now_s = time.monotonic()
        ended = self.stalls.look(
            now_s,
            self.watch.take_commits(),
            [a.kind.name for a in self.active],
            is_fit=self.is_fit(),
            is_starved=self.starved,
        )
        for stall in ended:
            self.note(f"{'MISS: ' if stall.is_miss else ''}{self.told(stall)}")
        if now_s - self.watch.committed_s > DEAD_S:
            raise Failed(f"nothing has committed for {DEAD_S:.0f} s: see the logs")

    def told(self, stall: Stall) -> str:
        at_s = stall.began_s - self.began_s
        return f"stall of {stall.length_s:.1f} s from {at_s:.1f} s on: {names_of(stall.faults)}"

    def is_fit(self) -> bool:
        """Return whether a majority of the view is up and linked, and one has a trainer."""
        view = max(
            (status for _, status in self.watch.statuses.values()),
            key=lambda status: (status["view"], status["round"]),
            default=None,
        )
        if view is None:
            return True
        members = [self.names.get(m["address"].partition(":")[0], "") for m in view["members"]]
        fit = {
            name
            for name in NAMES
            if name not in self.down | self.watch.off | self.forgetful
            and self.run.peers[name].popen.poll() is None
            and self.watch.fresh(name, self.started_s[name])
        }
        trains = any(self.watch.statuses[name][1]["trainer"] for name in fit)
        return trains and has_majority(members, fit, +self.cut)

    def begin_one(self, now_s: float) -> None:
        """A kind that is possible now; there is always one that breaks nobody."""
        kinds = list(self.kinds)
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
        breaking = [a for a in self.active if a.kind.broken or a.kind.wide[1]]
        broken = {n for a in breaking for n in a.names} | set(self.recovering)
        if not kind.wide[1] and len(broken) + kind.broken > BROKEN_MAX:
            return ()
        same = {n for a in self.active if a.kind.name == kind.name for n in a.names}
        if same and (kind.single or kind.wide[1]):
            return ()
        # One after the other would leave nobody the time to come back.
        if kind.wide[1] and (any(a.kind.wide[1] for a in self.active) or len(broken) > BROKEN_MAX):
            return ()
        if kind.name in ("flipped bits in a home", "lost home") and self.forgetful:
            return ()  # what one has forgotten the others hold
        spared = {ELDER} if kind.fatal else set()
        possible = [n for n in NAMES if n not in broken | same | spared]
        if kind.name == "flipped memory":  # it has to say how much it has
            possible = [n for n in possible if n not in self.watch.off]
        if kind.victim == "coordinator":
            statuses = {n: self.watch.fresh(n, time.monotonic() - 1.0) for n in possible}
            possible = [n for n in possible if statuses[n].get("phase") == "coordinator"]
        elif kind.victim != "any":
            possible = [n for n in possible if n == kind.victim]
        many = max(1, kind.broken)
        if kind.wide[1]:
            many = min(self.dice.randint(*kind.wide), max(len(possible), kind.wide[0]))
        return tuple(self.dice.sample(possible, many)) if len(possible) >= many else ()

    def end(self, fault: Active) -> None:
        try:
            fault.undo()
        except NotYet:
            if time.monotonic() - fault.end_s > BACK_S:
                raise Failed(
                    f"{fault.kind.name}: {fault.names[0]}'s process does not end"
                ) from None
            return
        self.active.remove(fault)
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
                self.note(f"{name} has ended with {code} and is started again")
                self.start_again(name)
                self.recovering.setdefault(name, now_s)
            elif (code := trainer.popen.poll()) is not None:
                if code not in {*TRAINER_MAY_END, -9}:
                    raise Failed(f"{name}'s trainer has ended with {code}: see {trainer.log}")
                if self.watch.fresh(name, now_s - 1.0):
                    self.retry_s[name] = now_s + RETRY_S
                    self.run.train(name, self.parameters, inner_s=INNER_S)

    def welcome_back(self, now_s: float) -> None:
        for name, since_s in list(self.recovering.items()):
            if self.is_well(name, since_s):
                del self.recovering[name]
                self.forgetful.discard(name)
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
        """With its own line; from an empty home by the invite of somebody who is there."""
        self.run.peers[name].ends()
        self._set_environment(name)
        self.started_s[name] = time.monotonic()
        if (self.run.peers[name].home / "run.json").exists():
            self.run.again(name)
        else:
            self.run.invite = self.invite_of_others(name) or self.run.invite
            self.run.join(name)
            self.run.trainers[name].kill()
            self.run.trainers[name].ends()
            self.run.train(name, self.parameters, inner_s=INNER_S)
        self.down.discard(name)

    def invite_of_others(self, name: str) -> str:
        """Return the invite of another who has answered a moment ago; "" if nobody gives one."""
        for other in NAMES:
            if other != name and self.watch.fresh(other, time.monotonic() - FRESH_S):
                with contextlib.suppress(AtollError):  # it has been stopped since
                    return str(ask(self.run.peers[other].home, "invite"))
        return ""

    def keep_off(self, name: str, *, off: bool) -> None:
        with self.watch.locks[name]:
            (self.watch.off.add if off else self.watch.off.discard)(name)

    def distrust(self, name: str) -> None:
        self.flipped[name] = self.watch.round
        self.watch.distrusted[name] = -1

    def forgets(self, name: str) -> None:
        self.forgetful.add(name)

    def part(self, pairs: Iterable[tuple[str, str]]) -> Undo:
        cut = Counter(frozenset(pair) for pair in pairs)
        self.cut += cut
        return lambda: self.cut.subtract(cut)

    def starve(self, *, on: bool) -> None:
        self.starved = on

    # ------------------------------------------------------------ the end

    def note(self, text: str) -> None:
        now_s = time.monotonic() - self.began_s
        print(f"{time.strftime('%H:%M:%S')} {now_s:9.2f} s  {text}", file=self.events, flush=True)

    def calm(self) -> None:
        """No more faults: everybody comes back and the next rounds commit everywhere."""
        while self.active:
            for fault in list(self.active):
                self.end(fault)
            time.sleep(0.05)
        self.net.heal()
        self.note("no more faults")
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
        self.check_rounds()
        self.check_checkpoints()

    def check_rounds(self) -> None:
        """Whatever anybody has shown as committed is soon under what all have.

        Rounds go on meanwhile, and one of them is known to its coordinator first.
        """
        committed, until_s = self.watch.round, time.monotonic() + SETTLED_S
        while True:
            now = min(self.run.peers[name].status()["round"] for name in NAMES)
            self.lost = max(0, committed - now)
            if not self.lost:
                return
            if time.monotonic() > until_s:
                raise Failed(f"{self.lost} rounds are lost: {committed} was committed")
            time.sleep(0.1)

    def check_checkpoints(self) -> None:
        """Whatever has a final name is whole, but for what was flipped; somebody's is of late."""
        rounds = []
        for path in itertools.chain.from_iterable(
            candidates(self.run.folder / name / "checkpoints") for name in NAMES
        ):
            try:
                with open_latest(path) as checkpoint:  # every byte is checked
                    rounds.append(checkpoint.manifest.round)
            except Exception as error:
                if not self.counts["flipped bits in a home"]:
                    raise Failed(f"{path} is not whole: {error}") from error
        self.checkpointed = len(rounds)
        last = max(rounds, default=0)
        if last < self.watch.round - 10 * self.every:
            raise Failed(f"the latest checkpoint is of round {last}, the run at {self.watch.round}")

    @property
    def problems(self) -> list[str]:
        """Return what the whole time has shown."""
        found = [self.told(stall) for stall in self.stalls.misses]
        elder, everybody = self.watch.flat[ELDER], self.watch.flat.values()
        if elder.span_s >= SHORT_S and (problem := elder.problem(elder.span_s, everybody)):
            found.append(f"{ELDER}: {problem}")
        return found + ([self.homes.problem] if self.homes.problem else [])

    def summary(self) -> str:
        hours = (time.monotonic() - self.began_s) / 3600
        watch, stalls = self.watch, self.stalls
        lines = ["  count  longest stall  fault"]
        for kind, count in self.counts.most_common():
            lines.append(f"{count:7d}  {stalls.longest_s.get(kind, 0.0):11.1f} s  {kind}")
        compared = watch.compared + sum(len(by) > 1 for by in watch.ledger.seen_by.values())
        elder, (first, last) = watch.flat[ELDER], self.homes.thirds(self.homes.bytes_ or [0])
        lines += [
            f"{self.counts.total():7d}  faults of {len(self.counts)} kinds in {hours:.2f} h",
            f"{watch.round:7d}  rounds committed; digests of {compared} compared",
            f"{self.lost:7d}  rounds lost",
            f"{self.checkpointed:7d}  checkpoints at the end that are whole",
            f"{len(stalls.noted):7d}  stalls above 3 s, {len(stalls.misses)} of them misses",
            f"{stalls.longest.length_s:7.1f}  s, the longest: {names_of(stalls.longest.faults)}",
            f"{stalls.excused_s:7.1f}  s without a majority that was up and linked",
            f"{self.slowest_back[0]:7.1f}  s until the slowest victim ({self.slowest_back[1]})"
            " was well again",
            f"{elder.slope_mib_per_h:7.1f}  MiB per hour more memory in {ELDER},"
            f" which lived for {elder.span_s:.0f} s",
            f"{last / 2**20:7.1f}  MiB in all homes, {first / 2**20:.1f} in the first third",
        ]
        for name, flat in watch.flat.items():
            if flat.samples:
                first, last = flat.medians("rss_bytes")
                fds = flat.medians("descriptors")
                lines.append(
                    f"{last / 2**20:7.1f}  MiB in {name} (first third {first / 2**20:.1f}),"
                    f" {fds[1]:.0f} descriptors ({fds[0]:.0f}), in {flat.span_s:.0f} s"
                )
        return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--minutes", type=float, default=0.0, help="instead of --hours")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--mean-s", type=float, default=1.0, help="between two faults")
    parser.add_argument("--parameters", type=float, default=PARAMETERS)
    parser.add_argument("--only", nargs="+", default=[], choices=[kind.name for kind in KINDS])
    parser.add_argument("--keep", type=Path, help="a new folder for the logs")
    chosen = parser.parse_args()
    folder = chosen.keep or Path(tempfile.mkdtemp(prefix="atoll-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"soak with seed {chosen.seed}, logs in {folder}", flush=True)
    soak = Soak(folder, chosen.seed, chosen.mean_s, chosen.parameters, chosen.only)
    problems = []
    try:
        soak.form()
        until_s = soak.began_s + (60 * chosen.minutes or 3600 * chosen.hours)
        while (now_s := time.monotonic()) < until_s:
            soak.turn(now_s)
            time.sleep(0.02)
        soak.calm()
    except (Failed, AssertionError) as error:
        problems = [str(error)]
    except Exception:  # a fault that could not be made or undone
        problems = [traceback.format_exc()]
    except KeyboardInterrupt:
        problems = ["interrupted"]
    finally:
        with contextlib.suppress(AttributeError):  # it never formed
            problems += soak.problems
            print(soak.summary(), flush=True)
        for problem in problems:
            soak.note(f"FAILED: {problem}")
            print(f"FAILED with seed {chosen.seed}: {problem[:4000]}")
        print(f"logs, and events.log: {folder}" if problems else f"passed with seed {chosen.seed}")
        soak.close()
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
