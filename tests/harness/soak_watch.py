"""Watch a soak: statuses, equal digests, commits, memory, homes."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.health import Ledger, usage
from harness.processes import Fleet

__all__ = ["Flatness", "Homes", "Sample", "Watch"]

LOOK_S = 0.3  # between two questions to one daemon
YOUNG_S = 10.0  # a process that has just started does not count: it still takes what it needs
SAMPLE_S = 2.0
# A series is judged from this many samples on; a run shorter than SHORT_S may have fewer. In a
# longer one, too few are a failure of their own: fewer than this part of what could be taken, or
# none in half of the time. Daemons that are paused or busy cost samples, but not nine of ten.
SAMPLES_MIN = 9
SHORT_S = 60.0
SAMPLES_SHARE_MIN = 0.1
SPAN_SHARE_MIN = 0.5
ROUNDS_KEPT = 2000
# Of the median of the last third over that of the first.
GROWTH_MAX = 1.15
# In a soak of minutes a daemon meets much for the first time (donors, repairs, elections) and takes
# some 10 MiB for it, once. That is no leak if it has ended: if the last third itself does not grow,
# or if others, which do the same, had as much as that from their first third on.
YOUNG_RUN_S = 600.0
STILL_GROWTH_MAX = 1.02
GROWTH_DESCRIPTORS_MAX = 16
GROWTH_HOME_MAX = 1.5  # a ledger, and rounds between two checkpoints, grow and shrink all the time
GROWTH_HOME_BYTES = 4 << 20  # ... and a ledger that was refused stays


@dataclass
class Sample:
    at_s: float
    rss_bytes: int
    descriptors: int


@dataclass
class Flatness:
    """Medians of the first and last third of a series."""

    samples: list[Sample] = field(default_factory=list)
    pid: int = 0  # of the life that it is of

    @property
    def span_s(self) -> float:
        return self.samples[-1].at_s - self.samples[0].at_s if self.samples else 0.0

    @property
    def slope_mib_per_h(self) -> float:
        """From the middle of the first third to that of the last one."""
        if self.span_s <= 0 or len(self.samples) < SAMPLES_MIN:
            return 0.0
        first, last = self.medians("rss_bytes")
        return (last - first) / 2**20 / (self.span_s * 2 / 3 / 3600)

    def medians(self, what: str) -> tuple[float, float]:
        third = max(1, len(self.samples) // 3)
        values = [float(getattr(sample, what)) for sample in self.samples]
        return statistics.median(values[:third]), statistics.median(values[-third:])

    def _has_settled(self) -> bool:
        """Return whether the memory is the same in both halves of the last third."""
        last = [float(sample.rss_bytes) for sample in self.samples[-(len(self.samples) // 3) :]]
        half = len(last) // 2
        before, after = statistics.median(last[:half]), statistics.median(last[-half:])
        return after <= STILL_GROWTH_MAX * before

    def problem(self, watched_s: float, others: Iterable[Flatness] = ()) -> str:
        """Return what is wrong after ``watched_s`` seconds, or "". Too little seen is wrong too.

        ``others``: the daemons beside it, which take once what it takes once.
        """
        count = len(self.samples)
        if watched_s >= SHORT_S:
            wanted = max(SAMPLES_MIN, SAMPLES_SHARE_MIN * watched_s / SAMPLE_S)
            span_s = self.span_s
            if count < wanted or span_s < SPAN_SHARE_MIN * watched_s:
                return (
                    f"memory was looked at {count} times within {span_s:.0f} s of"
                    f" {watched_s:.0f} s: too few to tell"
                )
        elif count < SAMPLES_MIN:
            return ""
        first, last = self.medians("rss_bytes")
        if last > GROWTH_MAX * first and not (
            watched_s < YOUNG_RUN_S and (self._has_settled() or last <= _usual_bytes(others))
        ):
            return f"memory grew from {first / 2**20:.1f} to {last / 2**20:.1f} MiB"
        first, last = self.medians("descriptors")
        if last > first + GROWTH_DESCRIPTORS_MAX:
            return f"descriptors grew from {first:.0f} to {last:.0f}"
        return ""


def _usual_bytes(daemons: Iterable[Flatness]) -> float:
    """Return the memory up to which one may grow that has less than these had at first."""
    seen = [each for each in daemons if len(each.samples) >= SAMPLES_MIN]
    return GROWTH_MAX * max((each.medians("rss_bytes")[0] for each in seen), default=0.0)


@dataclass
class Homes:
    """Measure what lies in all homes together, over time."""

    bytes_: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def look(self, homes: Iterable[Path]) -> None:
        """Without what a fault has put there, and events, which are bounded by themselves.

        Files may vanish meanwhile.
        """
        sizes = []
        for path in itertools.chain.from_iterable(home.glob("**/*") for home in homes):
            with contextlib.suppress(OSError):
                if path.is_file() and not path.name.startswith(("ballast", "events.")):
                    sizes.append(path.stat().st_size)
        self.bytes_.append(sum(sizes))
        self.files.append(len(sizes))

    def thirds(self, what: list[int]) -> tuple[float, float]:
        third = max(1, len(what) // 3)
        return statistics.median(what[:third]), statistics.median(what[-third:])

    @property
    def problem(self) -> str:
        if len(self.bytes_) < SAMPLES_MIN:
            return ""
        first, last = self.thirds(self.bytes_)
        if last > GROWTH_HOME_MAX * first + GROWTH_HOME_BYTES:
            return f"homes grew from {first / 2**20:.1f} to {last / 2**20:.1f} MiB"
        first, last = self.thirds(self.files)
        if last > 2 * first + SAMPLES_MIN:
            return f"homes have {last:.0f} files, {first:.0f} at first"
        return ""


class Watch:
    """One thread per daemon asks for its status; the soak's own loop only looks at the answers."""

    def __init__(self, run: Fleet, names: str) -> None:
        self.run, self.names = run, names
        self.statuses: dict[str, tuple[float, dict[str, Any]]] = {}
        self.ledger = Ledger()
        self.locks = {name: threading.Lock() for name in names}  # held while a daemon is asked
        self.off: set[str] = set()
        self.distrusted: dict[str, int] = {}  # digests up to this round do not count
        self.failure = ""
        self.round = 0
        self.compared = 0  # rounds that at least two daemons have shown, of those forgotten
        self.committed_s = time.monotonic()
        self._commits_s: list[float] = []
        self.flat = {name: Flatness() for name in names}  # of each daemon's longest life
        self._lives = {name: Flatness() for name in names}  # ... and of its present one
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._look, args=(n,)) for n in names]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def fresh(self, name: str, since_s: float) -> dict[str, Any]:
        """The last status if it is newer than that moment, else {}."""
        at_s, status = self.statuses.get(name, (0.0, {}))
        return status if at_s > since_s else {}

    def take_commits(self) -> list[float]:
        """Return when rounds were committed since this was asked last, as far as it was seen."""
        with self._lock:
            taken, self._commits_s = self._commits_s, []
        return taken

    # ------------------------------------------------------------ in the threads

    def _look(self, name: str) -> None:
        """A daemon that nobody looks at any more would pass for one that is well."""
        try:
            self._look_on(name)
        except Exception:
            problem = f"nobody watches {name} any more: {traceback.format_exc()}"
            self.failure = self.failure or problem

    def _look_on(self, name: str) -> None:
        sampled_s = 0.0
        while not self._ended.wait(LOOK_S):
            with self.locks[name]:
                if name in self.off:
                    continue
                asked_s = time.monotonic()
                peer = self.run.peers[name]
                status = peer.try_status()
            if not status:
                continue
            with self._lock:
                self.statuses[name] = (asked_s, status)
                self._note(name, status)
            if asked_s - sampled_s > SAMPLE_S and status["uptime_s"] > YOUNG_S:
                sampled_s = asked_s
                self._sample(name, peer.pid)

    def _note(self, name: str, status: dict[str, Any]) -> None:
        if name not in self.distrusted or self.distrusted[name] >= 0:
            try:
                self.ledger.note(name, status, self.distrusted.get(name, -1))
            except AssertionError as error:
                self.failure = self.failure or f"bits differ: {error}"
        if len(self.ledger.digests) > ROUNDS_KEPT:
            self.compared += self.ledger.forget(status["round"] - ROUNDS_KEPT // 2)
        if status["fork"]:
            self.failure = self.failure or f"{name} is in a fork"
        now_s = time.monotonic()
        if status["round"] > self.round:
            self.round, self.committed_s = status["round"], now_s
            self._commits_s.append(now_s)

    def _sample(self, name: str, pid: int) -> None:
        try:
            found = usage(pid)
        except OSError:  # it has just been killed
            return
        life = self._lives[name]
        if life.pid != pid:
            life = self._lives[name] = Flatness(pid=pid)
        life.samples.append(Sample(time.monotonic(), found.rss_bytes, found.descriptors))
        if life.span_s >= self.flat[name].span_s:
            self.flat[name] = life
