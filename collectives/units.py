"""Format sizes, rates and durations for people: in log lines, `atoll status` and the demo."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")
_MEMORY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_BITS = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")
_LONG_S = 120.0  # from here on minutes say more than seconds
_HOURS_S = 2 * 3600.0
_DAYS_S = 48 * 3600.0


def size(nbytes: float) -> str:
    """Return bytes on a network or a disk in decimal units: "950 B", "4.5 MB", "1.2 GB"."""
    return _scaled(nbytes, 1000.0, _BYTES, 2)


def memory(nbytes: float) -> str:
    """Return bytes of memory in binary units, nothing as a bare 0: "0", "10 MiB", "1.5 GiB"."""
    return _scaled(nbytes, 1024.0, _MEMORY, 2) if nbytes else "0"


def rate(bytes_per_s: float) -> str:
    """Return a rate in bits, as links are sold: "940 kbit/s", "74.9 Gbit/s"."""
    return _scaled(8 * bytes_per_s, 1000.0, _BITS, 3)


def duration(seconds: float, digits: int = 2) -> str:
    """Return a time with at least ``digits`` digits: "0.004 ms", "50 ms", "1.5 s", "3.4 days"."""
    if seconds < 1.0 and _rounded(seconds, digits) != "1":
        return f"{_rounded(1e3 * seconds, digits)} ms"
    if seconds < _LONG_S:
        return f"{_rounded(seconds, digits)} s"
    if seconds < _HOURS_S:
        return f"{_rounded(seconds / 60, digits)} min"
    if seconds < _DAYS_S:
        return f"{_rounded(seconds / 3600, digits)} h"
    return f"{_rounded(seconds / 86400, digits)} days"


def span(texts: Sequence[str]) -> str:
    """Return the least and the most of quantities that are sorted already: "20 to 40 Mbit/s"."""
    least, most = texts[0], texts[-1]
    if least == most:
        return most
    number, _, unit = least.partition(" ")
    return f"{number if unit == most.partition(' ')[2] else least} to {most}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if need be: "1 round" or "3 rounds"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(names: Sequence[str]) -> str:
    """Return names as they are listed in a sentence: "a", "a and b" or "a, b and c"."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def _scaled(value: float, step: float, units: Sequence[str], digits: int) -> str:
    place = 0
    while place < len(units) - 1 and float(_rounded(value, digits)) >= step:
        value /= step
        place += 1
    return f"{_rounded(value, digits if place else 1)} {units[place]}"


def _rounded(value: float, digits: int) -> str:
    """Return a number with at least ``digits`` digits, and never fewer than its integer has."""
    if value <= 0 or not math.isfinite(value):
        return f"{value:.0f}"
    decimals = max(0, digits - 1 - math.floor(math.log10(value)))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text
