"""Read how fast a daemon may go at which hour: ``50,22:00-06:00=unlimited``. No clock.

A limit is a rate for the whole day, in Mbit/s or ``unlimited``, and after it, with commas, windows
of local time that have a rate of their own::

    LIMIT  = RATE {"," WINDOW}
    WINDOW = HH:MM "-" HH:MM "=" RATE
    RATE   = a number of Mbit/s | "unlimited"

A window begins with its first minute and ends before its last; it may pass midnight. Windows may
not overlap, so their order says nothing.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from atoll.collectives.errors import ConfigError
from atoll.collectives.units import rate

UNLIMITED: Final = "unlimited"
DAY_MINUTES: Final = 24 * 60
# What members tell each other, heartbeats of dozens and votes, fits into half of it; with less, the
# caps would be broken by what has to be sent in any case.
MBIT_MIN: Final = 1.0
MBIT_MAX: Final = 1e6  # a terabit: more is a slip of the pen
WINDOWS_MAX: Final = DAY_MINUTES  # one a minute
BYTES_PER_MBIT: Final = 125_000.0
EXAMPLE: Final = "50,22:00-06:00=unlimited"

_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(?=,|$)|unlimited(?=,|$)", re.ASCII)
_TIME = re.compile(r"(\d\d):(\d\d)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Window:
    """Say how fast a daemon may go from one minute of the day to another, in bytes per second."""

    begin: int
    end: int
    bytes_per_s: float

    def has(self, minute: int) -> bool:
        """Return whether it is in force in this minute of the day."""
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """Say how fast a daemon may go in one direction, by the minute of the day."""

    usual_bytes_per_s: float = math.inf
    windows: tuple[Window, ...] = ()

    def at(self, minute: int) -> float:
        """Return the rate in this minute of the local day, in bytes per second; may be infinite."""
        for window in self.windows:
            if window.has(minute):
                return window.bytes_per_s
        return self.usual_bytes_per_s


ALWAYS_UNLIMITED: Final = RateSchedule()


def describe_rate(bytes_per_s: float) -> str:
    """Return a rate for people: "20 Mbit/s" or "unlimited"."""
    return UNLIMITED if math.isinf(bytes_per_s) else rate(bytes_per_s)


def parse_schedule(text: str, option: str) -> RateSchedule:
    """Return the schedule that ``text`` asks for.

    Raises ConfigError that names the ``option`` and the place of the first mistake.
    """
    scanner = _Scanner(text, option)
    usual, windows = scanner.rate(), list[Window]()
    while not scanner.at_end:
        scanner.expect(",")
        began = scanner.place
        begin = scanner.time()
        scanner.expect("-")
        end = scanner.time() % DAY_MINUTES
        scanner.expect("=")
        window = Window(begin % DAY_MINUTES, end, scanner.rate())
        if window.begin == window.end:
            raise scanner.mistake("a window that is not empty", began)
        if len(windows) >= WINDOWS_MAX or any(_overlap(window, other) for other in windows):
            raise scanner.mistake("a window that does not overlap one before it", began)
        windows.append(window)
    return RateSchedule(usual, tuple(windows))


def _overlap(one: Window, other: Window) -> bool:
    return one.has(other.begin) or other.has(one.begin)


class _Scanner:
    """Read a text from left to right, and say where it is wrong."""

    def __init__(self, text: str, option: str) -> None:
        self._text, self._option = text, option
        self.place = 0

    @property
    def at_end(self) -> bool:
        return self.place == len(self._text)

    def expect(self, mark: str) -> None:
        if not self._text.startswith(mark, self.place):
            raise self.mistake(f'"{mark}"')
        self.place += len(mark)

    def rate(self) -> float:
        """Read a rate in Mbit/s; return bytes per second."""
        found = _RATE.match(self._text, self.place)
        what = f'a number of Mbit/s from {MBIT_MIN:g} to {MBIT_MAX:,.0f}, or "{UNLIMITED}"'
        if found is None:
            raise self.mistake(what)
        mbit = float(found[1]) if found[1] else math.inf
        if found[1] and not MBIT_MIN <= mbit <= MBIT_MAX:
            raise self.mistake(what)
        self.place = found.end()
        return mbit * BYTES_PER_MBIT

    def time(self) -> int:
        """Read a time of day; return its minute, DAY_MINUTES for 24:00."""
        found = _TIME.match(self._text, self.place)
        minute = 60 * int(found[1]) + int(found[2]) if found else math.inf
        if found is None or int(found[2]) >= 60 or minute > DAY_MINUTES:
            raise self.mistake("a time from 00:00 to 24:00, such as 06:30")
        self.place = found.end()
        return int(minute)

    def mistake(self, expected: str, place: int | None = None) -> ConfigError:
        """Return the error that says what was expected at a place, else where the reading is."""
        place = self.place if place is None else place
        rest = self._text[place:]
        found = f'"{rest}"' if rest else "nothing"
        return ConfigError(
            f"{self._option} {self._text}: {expected} is expected at character {place + 1},"
            f" and there is {found}",
            fix=f"write it like {self._option} {EXAMPLE} (Mbit/s, then windows of local time)",
        )
