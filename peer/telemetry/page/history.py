"""Keep the history of a run in memory, as the status page shows it: read from the event file.

The file is read when somebody asks, from where it was read last; so a daemon whose page nobody
looks at reads nothing. What is kept is bounded, however long the run is: sums over buckets of time
in LEVELS of rising width, the last rows of each peer, the last events of each kind. A daemon that
was started again reads what the one before has written.

Rows bear the time of the peer that sent them, whose clock may be wrong. One that is further than
SKEW_MAX_S from when it was heard here counts as of then. Files of earlier versions do not say when
that was: it was after this daemon's event before it, and is over.
"""

from __future__ import annotations

import json
import math
import operator
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from atoll.peer.net.byte_counts import PURPOSES
from atoll.peer.telemetry.event_file import LINE_BYTES_MAX, files_of, is_time
from atoll.peer.telemetry.findings import last_of, present, who_is_slow

LEVELS = ((5.0, 720), (60.0, 1440), (900.0, 672))  # width_s, buckets kept: an hour, a day, a week
PEERS_KEPT = 64  # each takes 0.5 MB when all levels are full; the least heard goes first
ROUNDS_KEPT = 24  # of each peer: what the timeline has room for
EVENTS_KEPT = 4000  # of each kind, as the bytes of their lines: some 200 each
KINDS_KEPT = 64  # this program's own are fewer
READ_BYTES = 256 << 10  # of the file at once; between two reads others get the interpreter
SKEW_MAX_S = 30.0
POINTS_MAX = 1000
EVENTS_MAX = 1000  # that one answer has
# What a line raises that is no event, or one of another shape.
UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    RecursionError,
)
NO_BYTES = (0,) * len(PURPOSES)

# What a bucket of a peer adds up; one of the whole run: bytes sent and received, by purpose.
ROUNDS, TOOK, COMPUTE, WAIT, EXCHANGE, LOSS, LOSSES, HELDOUT, HELDOUTS, MEMORY = range(10)


class _Levels:
    """Add up figures in buckets of time, of several widths at once; the oldest are forgotten.

    Of each width one bucket is open, the one that was added to last. Only when another one opens is
    it added to the wider ones, because at the first look a whole file is added line by line.
    """

    def __init__(self, keep_last: int = -1) -> None:
        self._keep_last = keep_last  # a figure of which a bucket has the last value, not the sum
        self._levels: list[dict[int, array[float]]] = [{} for _ in LEVELS]
        self._open: list[tuple[int, array[float]] | None] = [None for _ in LEVELS]

    def add(self, unix_s: float, values: Sequence[float]) -> None:
        self._add(0, unix_s, array("d", values))

    def _add(self, level: int, unix_s: float, values: array[float]) -> None:
        index, known = int(unix_s // LEVELS[level][0]), self._open[level]
        if known is not None and known[0] == index:
            values = self._sum(known[1], values)
        elif known is not None:
            self._settle(level)
        self._open[level] = index, values

    def _settle(self, level: int) -> None:
        """Close the bucket of a width that is open, and add it to the next wider one."""
        known = self._open[level]
        if known is None:
            return
        index, values = known
        self._open[level] = None
        (width_s, kept), buckets = LEVELS[level], self._levels[level]
        earlier = buckets.get(index)
        buckets[index] = values if earlier is None else self._sum(earlier, values)
        if len(buckets) > kept:
            del buckets[next(iter(buckets))]  # they come nearly in order
        if level + 1 < len(LEVELS):
            self._add(level + 1, index * width_s, values)

    def _sum(self, earlier: array[float], later: array[float]) -> array[float]:
        both = array("d", map(operator.add, earlier, later))
        if self._keep_last >= 0:
            both[self._keep_last] = later[self._keep_last]
        return both

    def between(self, level: int, first: int, count: int, merged: int) -> list[array[float] | None]:
        """Return ``count`` buckets from the one that holds bucket ``first``, ``merged`` in each."""
        for narrower in range(level + 1):
            self._settle(narrower)
        found: list[array[float] | None] = [None] * count
        for index, bucket in self._levels[level].items():
            place = (index - first) // merged
            if not 0 <= place < count:
                continue
            known = found[place]
            found[place] = bucket if known is None else self._sum(known, bucket)
        return found


class _Peer:
    """Hold what rows have told of one peer."""

    def __init__(self) -> None:
        self.levels = _Levels(keep_last=MEMORY)
        self.rounds: deque[dict[str, Any]] = deque(maxlen=ROUNDS_KEPT)
        self.links: list[dict[str, Any]] = []
        self.sent, self.received = [0] * len(PURPOSES), [0] * len(PURPOSES)
        self.counted: dict[str, float] = {}  # tokens and steps, as its trainer told them last
        self.tokens = 0.0
        self.last: dict[str, Any] = {}

    def grown(self, row: dict[str, Any], name: str) -> float:
        """Return by how much a total of the trainer has grown; one that fell has begun anew.

        Of tokens the first figure counts in full, so that they are those of the whole run.
        """
        now = row.get(name)
        if not isinstance(now, int | float):
            return 0.0
        before, self.counted[name] = self.counted.get(name), float(now)
        if before is None:
            return float(now) if name == "tokens" else 0.0
        return float(now) - before if now >= before else float(now)


class _Window(NamedTuple):
    """Say which buckets an answer has: of a level, so many, so many merged into each."""

    level: int
    first: int
    places: int
    merged: int


class History:
    """Read the event file as far as it goes, and answer for the page. Any thread may ask."""

    def __init__(self, path: Path) -> None:
        """Make a history of the file at ``path``, or in the folder there, if there is one yet."""
        self._path = path
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._rest = b""
        self._own_s = 0.0  # of this daemon's clock, when the last line was written that tells it
        self._peers: dict[str, _Peer] = {}
        self._run = _Levels()
        self._events: dict[str, deque[tuple[float, bytes]]] = {}
        self._oldest_s = self._newest_s = 0.0
        self._per_parameter = 0.0  # bytes of all-reduces at every step so far; see _all_reduced
        self._has_steps = False
        self._is_closed = False

    def close(self) -> None:
        """Close the file: a request that is still being answered opens none any more."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file, self._is_closed = None, True

    # ------------------------------------------------------------ questions

    def summary(self, since_unix_s: float, points: int) -> dict[str, Any]:
        """Return the series since then in so many points at most, the last rounds and totals."""
        with self._lock:
            self._catch_up()
            names = sorted(self._peers)
            rounds = {name: [_shown(row) for row in self._peers[name].rounds] for name in names}
            links = {name: self._peers[name].links for name in names}
            # Rows of whoever has gone stay; they say nothing about the run of now.
            here = present({name: rounds[name] for name in self._peers})
            finding = who_is_slow(here, links)
            return {
                "oldest_unix_s": self._oldest_s,
                "newest_unix_s": self._newest_s,
                "purposes": list(PURPOSES),
                "series": self._series(since_unix_s, min(points, POINTS_MAX)) if points else None,
                "rounds": {name: _with_last(name, rounds) for name in names},
                "present": sorted(here),
                "last": {name: self._peers[name].last for name in names},
                "links": links,
                "totals": {
                    name: {"sent": peer.sent, "received": peer.received, "tokens": peer.tokens}
                    for name, peer in sorted(self._peers.items())
                },
                "all_reduce_bytes_per_parameter": self._per_parameter if self._has_steps else None,
                "slow": finding._asdict(),
                "kinds": sorted(self._events),
            }

    def events(
        self, since_unix_s: float, until_unix_s: float, kinds: set[str], limit: int
    ) -> dict[str, Any]:
        """Return the last ``limit`` events in this time, of these kinds or of all but "round"."""
        with self._lock:
            self._catch_up()
            chosen = [
                (moment, line)
                for kind, known in self._events.items()
                if (kind in kinds if kinds else kind != "round")
                for moment, line in known
                if since_unix_s <= moment <= until_unix_s
            ]
            known_kinds = sorted(self._events)
        chosen.sort(key=lambda event: event[0])
        limit = max(1, min(limit, EVENTS_MAX))
        return {
            "events": [json.loads(line) for _, line in chosen[-limit:]],
            "more": max(0, len(chosen) - limit),
            "kinds": known_kinds,
        }

    def _window(self, since_unix_s: float, points: int) -> _Window:
        since_s = max(since_unix_s, self._oldest_s)
        for level, (width_s, kept) in enumerate(LEVELS):
            first = int(since_s // width_s)
            count = int(self._newest_s // width_s) - first + 1
            if count <= kept or level == len(LEVELS) - 1:
                count = max(1, min(count, kept))
                first = max(first, int(self._newest_s // width_s) - count + 1)
                merged = math.ceil(count / points)
                return _Window(level, first, math.ceil(count / merged), merged)
        raise AssertionError("the last level has an answer for everything")

    def _series(self, since_unix_s: float, points: int) -> dict[str, Any]:
        window = self._window(since_unix_s, points)
        width_s = LEVELS[window.level][0]
        run = self._run.between(*window)
        return {
            "width_s": width_s * window.merged,
            "unix_s": [
                (window.first + place * window.merged) * width_s for place in range(window.places)
            ],
            "peers": {
                name: _drawn(self._peers[name].levels.between(*window)) for name in self._peers
            },
            "sent": [
                [int(bucket[place]) if bucket else 0 for bucket in run]
                for place in range(len(PURPOSES))
            ],
        }

    # ------------------------------------------------------------ reading

    def _catch_up(self) -> None:
        if self._is_closed:
            return
        decode = json.JSONDecoder().decode  # `json.loads` looks for the encoding of each line
        for line in self._new_lines():
            try:
                event = decode(line.decode())
                kind, moment = event["kind"], _time(event["unix_s"])
                if kind == "row":
                    self._add_row(event, moment)
                else:
                    self._add_event(str(kind), moment, line)
            except UNREADABLE:
                continue  # a line that was cut off, or of a later version

    def _new_lines(self) -> Iterator[bytes]:
        """Return an iterator over what was appended since the last time, in all files."""
        while True:
            # First which file is next, then the rest of this one: nothing is appended to it later.
            following = self._next_file()
            if self._file is not None:
                while data := self._file.read(READ_BYTES):
                    *lines, self._rest = (self._rest + data).split(b"\n")
                    yield from lines
                    self._rest = self._rest[-LINE_BYTES_MAX:]
            if following is None:
                return
            if self._file is not None:
                self._file.close()
            self._file, self._rest = following, b""

    def _next_file(self) -> BinaryIO | None:
        """Open the file after the one that is read; the oldest there is if that one is gone.

        Files may be renamed meanwhile; what is not seen for that reason, the next look finds.
        """
        files = files_of(self._path)
        try:
            if self._file is not None:
                own = os.fstat(self._file.fileno())
                same = [os.path.samestat(own, file.stat()) for file in files]
                if True not in same and own.st_nlink > 0:
                    return None  # it is there, and has another name by now
                files = files[same.index(True) + 1 :] if True in same else files
            return files[0].open("rb") if files else None
        except FileNotFoundError:
            return None

    def _add_event(self, kind: str, moment: float, line: bytes) -> None:
        self._note_own_time(moment)
        self._note_time(moment)
        known = self._events.get(kind)
        if known is None:
            if len(self._events) >= KINDS_KEPT:
                return
            known = self._events[kind] = deque(maxlen=EVENTS_KEPT)
        known.append((moment, line))

    def _add_row(self, row: dict[str, Any], moment: float) -> None:
        _check(row)
        latest_s = time.time()
        if "heard_unix_s" in row:
            latest_s = _time(row.pop("heard_unix_s"))
            self._note_own_time(latest_s)
        if self._own_s and not self._own_s - SKEW_MAX_S <= moment <= latest_s + SKEW_MAX_S:
            moment = self._own_s
        row["unix_s"] = moment
        sent, received = _byte_counts(row, "sent"), _byte_counts(row, "received")
        name = str(row["peer"])
        peer = self._peers.pop(name, None) or _Peer()
        self._peers[name] = peer  # the last that was heard is the last to be forgotten
        if len(self._peers) > PEERS_KEPT:
            del self._peers[next(iter(self._peers))]
        self._note_time(moment)
        peer.levels.add(moment, _figures(row))
        self._run.add(moment, (*sent, *received))
        peer.tokens += peer.grown(row, "tokens")
        peer.sent = list(map(operator.add, peer.sent, sent))
        peer.received = list(map(operator.add, peer.received, received))
        self._has_steps |= "steps" in row
        steps, peers = peer.grown(row, "steps"), int(row.get("peers", 0))
        if peers > 1:  # a ring: each sends all but its own share, twice, in float32
            self._per_parameter += steps * 4 * 2 * (peers - 1) / peers
        if row.get("links"):
            peer.links = row.pop("links")
        peer.rounds.append(row)
        if "heldout_loss" in peer.last:  # it comes seldom: the last that is known
            row.setdefault("heldout_loss", peer.last["heldout_loss"])
        peer.last = row

    def _note_own_time(self, own_s: float) -> None:
        """Note the time of this daemon's clock; the history goes no further than that and rows.

        So it comes back where a clock was ahead and is right again.
        """
        self._own_s = own_s
        self._newest_s = min(self._newest_s, own_s + SKEW_MAX_S)

    def _note_time(self, moment: float) -> None:
        self._oldest_s = min(self._oldest_s, moment) if self._oldest_s else moment
        self._newest_s = max(self._newest_s, moment)


SHOWN_OF_ROUNDS = (
    "first",
    "last",
    "unix_s",
    "took_s",
    "compute_s",
    "wait_s",
    "exchange_s",
    "waited_for",
    "attempts",
    "counted",
    "up",
    "down",
    "tokens",
    "steps",
)
# ... and what is reckoned with.
NUMBERS_OF_ROWS = (
    "first",
    "last",
    "took_s",
    "compute_s",
    "wait_s",
    "exchange_s",
    "up",
    "down",
    "loss",
    "heldout_loss",
    "memory_bytes",
    "tokens",
    "steps",
    "peers",
)


def _time(value: Any) -> float:
    """Return a time of a line; raise ValueError for what is none."""
    if not is_time(value):
        raise ValueError(f"{value} is no time")
    return float(value)


def _check(row: dict[str, Any]) -> None:
    """Raise ValueError for a row of which no answer can be made: each would fail from then on."""
    names, links = row.get("waited_for", []), row.get("links") or []
    numbers = [row.get(name) or 0 for name in NUMBERS_OF_ROWS]
    numbers += [link.get("out") or 0 for link in links]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise ValueError("a figure of a row that is no number")
    others = [*names, *(link["peer"] for link in links)]
    if not (isinstance(names, list) and all(isinstance(name, str) for name in others)):
        raise ValueError("a peer that is no name")


def _byte_counts(row: dict[str, Any], name: str) -> list[int]:
    """Return a row's bytes by purpose; raise ValueError where a version has other purposes."""
    counts = list(map(int, row.get(name) or NO_BYTES))
    if len(counts) != len(PURPOSES):
        raise ValueError(f"{len(counts)} purposes")
    return counts


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in SHOWN_OF_ROUNDS if name in row}


def _with_last(peer: str, rounds: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a peer's rounds, each with who of those that it has waited for was the last."""
    return [
        row | {"late": last_of(row, peer, rounds)} if row.get("waited_for") else row
        for row in rounds[peer]
    ]


def _figures(row: dict[str, Any]) -> list[float]:
    """Return what a row adds to a bucket of its peer, in the order of the figures."""
    times = [row.get(name, 0.0) for name in ("took_s", "compute_s", "wait_s", "exchange_s")]
    losses = []
    for name in ("loss", "heldout_loss"):
        loss = row.get(name)
        losses += [0.0, 0.0] if loss is None else [loss, 1.0]
    return [row["last"] - row["first"] + 1, *times, *losses, row.get("memory_bytes", 0)]


def _drawn(buckets: list[array[float] | None]) -> dict[str, list[float | None]]:
    """Return what is drawn of a peer's buckets; None where there is nothing.

    A held-out loss only of who has told one: of many peers it would be many empty series.
    """

    def each(figure: Callable[[array[float]], float | None]) -> list[float | None]:
        return [figure(bucket) if bucket is not None else None for bucket in buckets]

    def per_round(place: int) -> Callable[[array[float]], float | None]:
        return lambda b: float(f"{b[place] / b[ROUNDS]:.4g}") if b[ROUNDS] else None

    def mean(total: int, count: int) -> Callable[[array[float]], float | None]:
        return lambda b: float(f"{b[total] / b[count]:.5g}") if b[count] else None

    heldout = each(mean(HELDOUT, HELDOUTS))
    return {
        "loss": each(mean(LOSS, LOSSES)),
        **({"heldout_loss": heldout} if any(loss is not None for loss in heldout) else {}),
        "memory_bytes": each(lambda b: b[MEMORY] or None),
        "took_s": each(per_round(TOOK)),
        "compute_s": each(per_round(COMPUTE)),
        "wait_s": each(per_round(WAIT)),
        "exchange_s": each(per_round(EXCHANGE)),
    }
