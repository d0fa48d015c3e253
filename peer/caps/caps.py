"""Keep a daemon to its caps: the shell around the buckets, with their clock, lock and file.

One ``Cap`` for each direction. Threads that carry bulk ask theirs before they move a piece, and
wait (``Cap.take``); everything else goes at once and is charged. Receivers that read no faster than
they may leave the rest to TCP: its window closes, and the sender waits.

Counted is what the operator's bill counts, packets with the headers of IP and TCP. Payload is
charged as it moves; headers, acknowledgements and what the kernel sends again follow a quarter of a
second later, from the kernel's own counters (``Caps.look``). Bytes between two daemons of one
machine count too, those between a daemon and its trainer do not.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

from atoll.collectives.units import rate, size
from atoll.peer.caps.budget import DayBudget, Step
from atoll.peer.caps.schedule import (
    ALWAYS_UNLIMITED,
    DAY_MINUTES,
    RateSchedule,
    describe_rate,
)
from atoll.peer.caps.token_bucket import TokenBucket
from atoll.peer.links.tcp_info import wire_overhead
from atoll.peer.net.identity import write_atomic

LOOK_S: Final = 0.25  # between two readings of the kernel's counters and of the clock
# Between two writings of the day's count: so much traffic a crash may forget.
SAVE_S: Final = 10.0
# A thread that waits for a turn looks this often whether its stream was closed, unless woken.
TURN_LOOK_S: Final = 0.25
# What heartbeats, votes and acknowledgements take of a cap, usually less: the plan of the rounds is
# not told of it, so that they need not wait for each other.
CONTROL_SHARE: Final = 0.03
# A clock that shows an earlier day was never set: this line is younger.
CLOCK_MIN: Final = date(2026, 1, 1)
BEHIND_MAX: Final = timedelta(days=1)  # of a clock that is wrong, and of who travels west
COUNT_FILE: Final = "traffic.json"
COUNT_FILE_BYTES_MAX: Final = 4096
NO_DAY: Final = date.min  # each is later
# What is said of a step, by direction; that others get no state saves nothing on the way down.
NO_PROBES_TEXT: Final = "no more probes are sent or taken today; rounds measure the links"
SPREAD_TEXT: Final = "what is left is spread over the rest of the day, so rounds are slower"
WORDS: Final = {
    ("up", Step.NO_PROBES): NO_PROBES_TEXT,
    ("up", Step.NO_STATE): "others get no state from this peer until midnight; rounds go on",
    ("up", Step.SPREAD): SPREAD_TEXT,
    ("down", Step.NO_PROBES): NO_PROBES_TEXT,
    ("down", Step.SPREAD): SPREAD_TEXT,
}


@dataclass(frozen=True, slots=True)
class Direction:
    """Say what an operator allows in one direction."""

    schedule: RateSchedule = ALWAYS_UNLIMITED
    budget: DayBudget | None = None

    @property
    def is_open(self) -> bool:
        """Return whether everything is allowed."""
        return self.budget is None and self.schedule == ALWAYS_UNLIMITED


ANYTHING: Final = Direction()


@dataclass(frozen=True, slots=True)
class CapOptions:
    """Say what an operator allows in both."""

    up: Direction = ANYTHING
    down: Direction = ANYTHING


UNCAPPED: Final = CapOptions()


class Measured(Protocol):
    """Be a connection of which the kernel counts something (a data stream, a control link)."""

    def tcp_info(self) -> bytes: ...


class Cap:
    """Hold one direction's bucket and count. Any thread may ask."""

    def __init__(self, asked: Direction, clock: Callable[[], float] = time.monotonic) -> None:
        self.asked = asked
        self.step = Step.OPEN
        self.moved_bytes = 0  # since the daemon began, headers included
        self.bytes_per_s = math.inf  # in force
        self._clock = clock
        self._bucket = TokenBucket(math.inf, clock())
        self._changed = threading.Condition()

    def take(self, wanted: int, urgency: int, is_over: Callable[[], bool]) -> int:
        """Wait for a turn; return how many of the bytes that are wanted may move.

        0 if ``is_over`` meanwhile. Charge back what does not move.
        """
        with self._changed:
            ticket = self._bucket.ask(urgency, self._clock())
            try:
                while not is_over():
                    granted = self._bucket.take(ticket, wanted, self._clock())
                    if granted:
                        self.moved_bytes += granted
                        return granted
                    wait_s = self._bucket.wait_s(ticket, wanted, self._clock())
                    self._changed.wait(min(wait_s, TURN_LOOK_S))
                return 0
            finally:
                self._bucket.drop(ticket)
                self._changed.notify_all()  # it is another's turn

    def charge(self, count: int) -> None:
        """Count bytes that did not ask; fewer than none for what was granted and did not move."""
        with self._changed:
            self.moved_bytes += count
            self._bucket.charge(count, self._clock())

    async def room(self) -> None:
        """Return when nothing is owed: for an event loop that is to move a piece and be charged."""
        while (owed_s := self._owed_s()) > 0:  # noqa: ASYNC110  # threads take it meanwhile
            await asyncio.sleep(owed_s)

    def _owed_s(self) -> float:
        with self._changed:
            return self._bucket.owed_s(self._clock())

    def wake(self) -> None:
        """Let all that wait look whether their stream was closed."""
        with self._changed:
            self._changed.notify_all()

    def set_rate(self, bytes_per_s: float) -> None:
        with self._changed:
            self.bytes_per_s = bytes_per_s
            self._bucket.set_rate(bytes_per_s, self._clock())
            self._changed.notify_all()

    @property
    def for_rounds(self) -> float | None:
        """Return what the plan of the rounds may count on, in bytes per second; None: anything."""
        return None if math.isinf(self.bytes_per_s) else (1 - CONTROL_SHARE) * self.bytes_per_s


class Caps:
    """Keep both caps, by the hour and by the day, in the event loop.

    ``home``: where the day's count is kept over restarts. ``note``: writes a line to the log.
    """

    def __init__(
        self,
        options: CapOptions,
        home: Path,
        note: Callable[[str], None],
        now: Callable[[], time.struct_time] = time.localtime,
    ) -> None:
        self.up, self.down = Cap(options.up), Cap(options.down)
        self._path, self._note, self._now = home / COUNT_FILE, note, now
        self._seen: WeakKeyDictionary[Measured, tuple[int, int]] = WeakKeyDictionary()
        self._day, self._before = self._read()  # what was moved today before self.up counted
        self._said: dict[str, tuple[float, Step]] = {}
        self._unwritten = ""  # why the count could not be written the last time
        self._keep_to_the_hour()

    # ------------------------------------------------------------ what is allowed

    @property
    def allows_probes(self) -> bool:
        """Return whether the budgets leave room for probes, both ways."""
        return max(self.up.step, self.down.step) < Step.NO_PROBES

    def refuses_state(self) -> str:
        """Return why others get no state from this peer now; "" if they do."""
        if self.up.step < Step.NO_STATE:
            return ""
        return "this donor's bytes for today are nearly spent (--up-gb-per-day)"

    def for_rounds(self) -> tuple[float | None, float | None]:
        """Return what rounds may send and receive, in bytes per second; None: anything."""
        return self.up.for_rounds, self.down.for_rounds

    def today(self) -> dict[str, int]:
        """Return the bytes of this day so far, by direction."""
        return {
            name: before + cap.moved_bytes
            for (name, cap), before in zip(self._named(), self._before, strict=True)
        }

    def status(self) -> dict[str, Any]:
        """Return what people see of the caps, in plain types."""
        today = self.today()
        return {
            name: {
                "bytes_per_s": None if math.isinf(cap.bytes_per_s) else round(cap.bytes_per_s),
                "today_bytes": today[name],
                "day_bytes_max": cap.asked.budget.bytes if cap.asked.budget else None,
                "step": cap.step.name.lower(),
            }
            for name, cap in self._named()
        }

    # ------------------------------------------------------------ as time goes by

    async def run(self, connections: Callable[[], Iterable[Measured]]) -> None:
        """Look at the counters of all ``connections``, and at the clock, until cancelled."""
        saved_s = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(connections())
            if time.monotonic() - saved_s >= SAVE_S:
                saved_s = time.monotonic()
                self._wrote(await asyncio.to_thread(self._write, self._count()))

    def look(self, connections: Iterable[Measured]) -> None:
        """Charge what the kernel has added to payload, and keep to the hour and the budget."""
        sent = received = 0
        for connection in connections:
            overhead = wire_overhead(connection.tcp_info())
            if overhead is not None:
                before = self._seen.get(connection, (0, 0))
                self._seen[connection] = overhead
                sent += max(0, overhead[0] - before[0])
                received += max(0, overhead[1] - before[1])
        self.up.charge(sent)
        self.down.charge(received)
        self._keep_to_the_hour()

    def save(self) -> None:
        """Write the day's count to the home. What cannot be written is said once, and kept here."""
        self._wrote(self._write(self._count()))

    # ------------------------------------------------------------ inside

    def _count(self) -> bytes:
        count = {f"{name}_bytes": moved for name, moved in self.today().items()}
        return json.dumps({"day": self._day.isoformat(), **count}).encode()

    def _write(self, count: bytes) -> str:
        """Write the day's count, in any thread; return why it cannot be, or ""."""
        try:
            write_atomic(self._path, count)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _wrote(self, why_not: str) -> None:
        if why_not and why_not != self._unwritten:
            self._note(f"the day's count cannot be written to {self._path}: {why_not}")
        self._unwritten = why_not

    def _named(self) -> tuple[tuple[str, Cap], tuple[str, Cap]]:
        return ("up", self.up), ("down", self.down)

    def _keep_to_the_hour(self) -> None:
        now = self._now()
        day = date(now.tm_year, now.tm_mon, now.tm_mday)
        if _begins(day, self._day):
            self._day = day
            self._before = (-self.up.moved_bytes, -self.down.moved_bytes)
        minute = 60 * now.tm_hour + now.tm_min
        left_s = 60 * (DAY_MINUTES - minute) - now.tm_sec
        today = self.today()
        for name, cap in self._named():
            budget, usual = cap.asked.budget, cap.asked.schedule.at(minute)
            cap.step = budget.step(today[name]) if budget else Step.OPEN
            slow = budget.bytes_per_s(today[name], left_s) if budget else math.inf
            if cap.bytes_per_s != (bytes_per_s := min(usual, slow)):
                cap.set_rate(bytes_per_s)
            self._say(name, cap, usual, today[name])

    def _say(self, name: str, cap: Cap, usual: float, spent: int) -> None:
        """Write to the log, once, that another hour or another step of the budget has begun."""
        usual_before, step_before = self._said.get(name, (math.inf, Step.OPEN))
        self._said[name] = usual, cap.step
        if usual != usual_before:
            self._note(f"{name}: {describe_rate(usual)} from now on, as --{name}-mbit says")
        budget = cap.asked.budget
        words = WORDS.get((name, cap.step), "")
        if budget and cap.step > step_before and words:
            used = f"{size(spent)} of {size(budget.bytes)} for today are used"
            slow = f" ({rate(cap.bytes_per_s)} now)" if cap.step is Step.SPREAD else ""
            self._note(f"{name}: {used}: {words}{slow}")
        elif cap.step < step_before:
            self._note(f"{name}: a new day: nothing is held back any more")

    def _read(self) -> tuple[date, tuple[int, int]]:
        """Return the day that the home has a count of, and the count; no day if it has none."""
        try:
            with self._path.open("rb") as file:
                document = json.loads(file.read(COUNT_FILE_BYTES_MAX))
            day, up, down = document["day"], document["up_bytes"], document["down_bytes"]
            if type(up) is not int or type(down) is not int:
                raise TypeError("a field has the wrong type")
            if min(up, down) < 0:
                raise ValueError("a count below zero")
            return date.fromisoformat(day), (up, down)
        except FileNotFoundError:
            return NO_DAY, (0, 0)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            why = f"{self._path} cannot be read ({type(error).__name__})"
            self._note(f"{why}: the day's count begins at nothing")
            return NO_DAY, (0, 0)


def _begins(day: date, counted: date) -> bool:
    """Return whether the count begins anew on ``day``, where it is that of the day ``counted``.

    A machine without a clock of its own begins in 1970 or a little behind, and is set minutes
    later: until then its day is the one that has a count. But a clock that can be right says that
    the count's was ahead, where that is further away: else a budget that is spent would remain so
    until that day comes.
    """
    return day > counted or (day >= CLOCK_MIN and counted - day > BEHIND_MAX)


def describe(status: dict[str, Any]) -> str:
    """Return the line of `atoll status` about caps; "" if there are none."""
    parts = []
    for name, cap in status.items():
        limit = math.inf if cap["bytes_per_s"] is None else cap["bytes_per_s"]
        most = f" of {size(cap['day_bytes_max'])}" if cap["day_bytes_max"] else ""
        parts.append(f"{name} {describe_rate(limit)}, {size(cap['today_bytes'])}{most} today")
    return "; ".join(parts)
