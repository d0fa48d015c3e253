"""Choose events of a file by time and kind, and write each as a line for people. No clock."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from atoll.collectives.errors import ConfigError
from atoll.collectives.units import listed, size
from atoll.peer.membership.view import plain

ROW = "row"  # the kind of the rows of all peers, of which there is one each second
KIND_CHARACTERS = 10
SHOWN_MIN_S = 0.05  # what is less would be shown as nothing
AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
CLOCKS = ("%H:%M", "%H:%M:%S")
DATES = ("%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d")


def moment(text: str, now_unix_s: float) -> float:
    """Return the time that a person means: "10m" ago, "14:03" last, or "2026-11-26T14:03".

    A time of the day is of this machine's zone, and of yesterday where it is not over today.
    Raises ConfigError for anything else.
    """
    if ago := AGO.fullmatch(text.strip()):
        return now_unix_s - float(ago[1]) * UNITS_S[ago[2]]
    for pattern in CLOCKS:
        if (clock := _parsed(text, pattern)) is not None:
            today = time.localtime(now_unix_s)
            same = (clock.tm_hour, clock.tm_min, clock.tm_sec)
            day = (today.tm_year, today.tm_mon, today.tm_mday)
            found = time.mktime((*day, *same, 0, 0, -1))
            if found <= now_unix_s:
                return found
            return time.mktime((*day[:2], day[2] - 1, *same, 0, 0, -1))
    for pattern in DATES:
        if (date := _parsed(text, pattern)) is not None:
            return time.mktime((*date[:6], 0, 0, -1))
    fix = "say 10m, 2h or 1d for a time ago, 14:03, or 2026-11-26T14:03"
    raise ConfigError(f"{text!r} is no time", fix=fix)


def _parsed(text: str, pattern: str) -> time.struct_time | None:
    try:
        return time.strptime(text.strip(), pattern)
    except ValueError:
        return None


def chosen(
    events: Iterable[dict[str, Any]],
    kinds: Collection[str] = (),
    since_unix_s: float = 0.0,
    until_unix_s: float = float("inf"),
) -> Iterator[dict[str, Any]]:
    """Return an iterator over the events of these times, and kinds or types.

    Without kinds: all but rows.
    """
    for event in events:
        if not since_unix_s <= event["unix_s"] <= until_unix_s:
            continue
        if event["kind"] in kinds or (event.get("type") in kinds if kinds else not is_row(event)):
            yield event


def is_row(event: dict[str, Any]) -> bool:
    return bool(event["kind"] == ROW)


def event_line(event: dict[str, Any]) -> str:
    """Return an event as a line: when it was, its kind, and what happened."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["unix_s"]))
    kind = plain(event["kind"])
    text = row_text(event) if is_row(event) else plain(str(event.get("text", "")))
    return f"{when}  {kind:<{KIND_CHARACTERS}}  {text.removeprefix(f'{kind} ')}"


def row_text(row: dict[str, Any]) -> str:
    """Return what a peer has told of a round, in one line."""
    first, last = row.get("first", 0), row.get("last", 0)
    rounds = f"round {last}" if first == last else f"rounds {first} to {last}"
    spent = ((name, _of(row, f"{name}_s")) for name in ("compute", "exchange", "wait"))
    parts = [f"{name} {time_s:.1f}" for name, time_s in spent if time_s >= SHOWN_MIN_S]
    if parts and parts[-1].startswith("wait") and (late := row.get("waited_for")):
        parts[-1] += f" for {listed([plain(str(name)) for name in late])}"
    text = f"{plain(str(row.get('peer', '?')))}  {rounds}  {_of(row, 'took_s'):.1f} s"
    text += f" ({', '.join(parts)})  {size(sum(row.get('sent', ())))} sent"
    text += f"  loss {row['loss']:.4g}" if "loss" in row else ""
    return f"{text}  held-out {row['heldout_loss']:.4g}" if "heldout_loss" in row else text


def _of(row: dict[str, Any], name: str) -> float:
    return float(row.get(name, 0.0))
