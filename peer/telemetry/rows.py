"""Tell all peers what one of them has seen of a round: rows, and the table that each peer has.

Theory. The time from one commit to the next is split, at each peer by itself, by two moments that
its daemon knows: when its trainer has submitted, and when the round's first BEGIN has come. Before
the first the trainer computes, between the two the peer waits for others, after the second the
round is exchanged. Whoever was late then is known to all, because the coordinator says so. Each
daemon sends the others a *row* of that after a round, so every peer can show the whole run, and all
of them show the same.

Rows are for people: nothing is decided by them, they are not signed, and one that is lost is
missed. They are bounded on either side: a peer sends at most one in ROW_EVERY_S, which is of all
rounds since its last one, and hears no more than that of anybody.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from atoll.peer.membership.view import MEMBERS_MAX, short
from atoll.peer.net.byte_counts import PURPOSES
from atoll.peer.net.wire import Within, message
from atoll.peer.telemetry.event_file import is_time

# Some rounds take milliseconds, and a person reads no more. Where rounds take a second, and 0.1 s
# of a processor, a row for each is 1.3 % of that, and one for two of them 0.9 %.
ROW_EVERY_S = 2.0
LINKS_EVERY_S = 30.0  # between two rows that tell of links, which change slowly and take most bytes
WAITED_FOR_MAX = 4  # peers that a row names; the page has room for no more
TEXT_CHARACTERS_MAX = 160
ROWS_TOLD_MAX = 800  # in one answer, which has to fit into a local message of 1 MiB
ROWS_KEPT = 60  # of each peer in memory, for `atoll top`; the file has the rest
PEERS_KEPT = 2 * MEMBERS_MAX  # of whom there are rows: the members, and some that have gone
FIGURE_MAX = 1e18  # a time in seconds, a count of bytes: beyond it is nonsense, and NaN is beyond

BRIEF_BYTES = 4  # of the name by which people know a peer
Brief = Annotated[bytes, Within(BRIEF_BYTES, BRIEF_BYTES)]
Purposes = Annotated[tuple[int, ...], Within(len(PURPOSES), len(PURPOSES))]


def brief(peer: bytes) -> bytes:
    """Return a peer's name for people as bytes: so rows name it."""
    return bytes.fromhex(short(peer))


@message(wire="LinkSeen")
@dataclass(frozen=True, slots=True)
class LinkSeen:
    """Say what a peer has measured of its link to ``peer``; None where nothing is known.

    ``rtt_s``: the least round trip; ``out``: what can be sent, bytes per second; ``loss``: fraction
    of the bytes that were sent again.
    """

    peer: Brief
    rtt_s: float | None = None
    out: float | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        _check((self.rtt_s, self.out, self.loss))


@message(wire="RoundRow", sparse=("heldout_loss",))
@dataclass(frozen=True, slots=True)
class RoundRow:
    """Tell what the sender has seen of the rounds ``first`` to ``last``, which are usually one.

    Times are seconds: ``took_s`` since the commit before ``first``, and of that ``compute_s``,
    ``wait_s`` and ``exchange_s`` (all rounds together; they are less than ``took_s`` where the peer
    was idle, and more where training and exchange overlap); ``unix_s`` is when ``last`` was over,
    by the sender's clock. ``waited_for``: who was late last.
    ``sent``, ``received``: bytes since the row before, by byte_counts.PURPOSES. ``up``, ``down``:
    what the peer's own links have carried, bytes per second. ``peers``: how many took part in
    ``last``; ``counted``: whether this one did. ``loss``, ``tokens``, ``steps``: what its trainer
    has reported. ``predicted_s``: what the plan has promised for the exchange; 0: nothing.
    ``heldout_loss``: what the trainer has measured on held-out data since the row before, if it
    has: that comes seldom, so a row without it has no bytes for it.
    """

    first: int
    last: int
    unix_s: float
    took_s: float
    compute_s: float = 0.0
    wait_s: float = 0.0
    exchange_s: float = 0.0
    waited_for: Annotated[tuple[Brief, ...], Within(0, WAITED_FOR_MAX)] = ()
    attempts: int = 1
    sent: Purposes = (0,) * len(PURPOSES)
    received: Purposes = (0,) * len(PURPOSES)
    up: int = 0
    down: int = 0
    peers: int = 0
    counted: bool = False
    loss: float | None = None
    tokens: float | None = None
    steps: float | None = None
    memory_bytes: int = 0
    predicted_s: float = 0.0
    phase: Annotated[str, Within(0, TEXT_CHARACTERS_MAX)] = ""
    error: Annotated[str, Within(0, 4 * TEXT_CHARACTERS_MAX)] = ""
    links: Annotated[tuple[LinkSeen, ...], Within(0, MEMBERS_MAX)] = ()
    heldout_loss: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise ValueError("a row is of rounds in order")
        if not is_time(self.unix_s):
            raise ValueError(f"a row is of a time from 1970 to 9999, not {self.unix_s}")
        times = (self.took_s, self.compute_s, self.wait_s, self.exchange_s)
        counts = (*self.sent, *self.received, self.up, self.down, self.peers, self.attempts)
        _check((*times, self.predicted_s, self.memory_bytes, *counts))
        for figure in (self.loss, self.heldout_loss, self.tokens, self.steps):
            if figure is not None and not is_figure(figure):
                raise ValueError(f"a trainer's figure is a number, not {figure}")


PLAIN_FIELDS = tuple(
    field.name for field in fields(RoundRow) if field.name not in ("unix_s", "links", "waited_for")
)


def is_figure(value: float) -> bool:
    """Return whether a trainer's figure is one that rows and JSON can carry: finite, and no NaN."""
    return -FIGURE_MAX <= value <= FIGURE_MAX


def _check(values: Iterable[float | None]) -> None:
    for value in values:
        if value is not None and not 0 <= value <= FIGURE_MAX:
            raise ValueError(f"a figure of a row is a number from 0 on, not {value}")


def plain_row(peer: bytes, row: RoundRow) -> dict[str, Any]:
    """Return a row as people's programs read it, in plain types: with ``peer`` as its name.

    What is not known or zero is left out, so that a line of the event file stays short.
    """
    found: dict[str, Any] = {"unix_s": round(row.unix_s, 3), "kind": "row", "peer": short(peer)}
    for name in PLAIN_FIELDS:
        if value := getattr(row, name):
            found[name] = round(value, 4) if type(value) is float else value
    found |= {"first": row.first, "last": row.last, "took_s": round(row.took_s, 4)}
    for name in ("loss", "heldout_loss"):
        if (loss := getattr(row, name)) is not None:
            found[name] = float(f"{loss:.6g}")
    found["sent"], found["received"] = list(row.sent), list(row.received)
    if row.waited_for:
        found["waited_for"] = [name.hex() for name in row.waited_for]
    if row.links:
        found["links"] = [
            {
                "peer": link.peer.hex(),
                "rtt_s": _brief(link.rtt_s),
                "out": _brief(link.out),
                "loss": _brief(link.loss),
            }
            for link in row.links
        ]
    return found


def _brief(figure: float | None) -> float | None:
    """Return a figure with as many digits as measuring has: links are most of a row's bytes."""
    return float(f"{figure:.4g}") if figure is not None else None


# ---------------------------------------------------------------- what a daemon sees of a round


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Hold how the time from one commit to the next was spent, in seconds."""

    took_s: float
    compute_s: float = 0.0
    wait_s: float = 0.0
    exchange_s: float = 0.0
    waited_for: tuple[bytes, ...] = ()


Waiting = tuple[tuple[bytes, ...], float]  # for whom, and since how many seconds
RoundPhase = tuple[int, bool]  # a peer's last round, and whether the next one is exchanged


class RoundClock:
    """Split the time of each round; it knows when the last one was over.

    ``spent`` adds up the rounds so far, and their times.
    """

    def __init__(self, me: bytes = b"") -> None:
        self._me = me
        self._ended_s: float | None = None
        self._late: tuple[bytes, ...] = ()
        self.said: Waiting = ((), 0.0)
        self._said_in: RoundPhase = (-1, False)
        self.spent = dict.fromkeys(("rounds", "took_s", "compute_s", "wait_s", "exchange_s"), 0.0)

    def hears(self, said: Waiting, phase: RoundPhase, *, submitted: bool) -> None:
        """Note what the coordinator has said last of whom it waits for, and where this peer is.

        ``submitted``: this peer waits, too. The last to be late before an exchange counts.
        """
        if said is not self.said:
            self.said, self._said_in = said, phase
        if submitted and not phase[1] and (late := self.late(phase)):
            self._late = tuple(peer for peer in late if peer != self._me)[:WAITED_FOR_MAX]

    def late(self, phase: RoundPhase) -> tuple[bytes, ...]:
        """Return whom the coordinator waits for; nobody if its last word was of an earlier phase.

        It says so four times a second: until then nobody knows.
        """
        return self.said[0] if self._said_in == phase else ()

    def committed(
        self, now_s: float, exchange_s: float, submitted_s: float | None = None
    ) -> RoundTimes:
        """Return how the time since the last commit was spent, and begin anew.

        ``exchange_s``: since the round's first BEGIN here; ``submitted_s``: when the trainer had
        submitted, on the clock of ``now_s``; None if it has not.
        """
        begun_s = now_s - exchange_s
        since_s = self._ended_s if self._ended_s is not None else begun_s
        submitted_s = since_s if submitted_s is None else max(since_s, submitted_s)
        wait_s = max(0.0, begun_s - submitted_s)
        late = self._late if wait_s > 0 else ()
        times = RoundTimes(
            now_s - since_s, submitted_s - since_s, wait_s, min(exchange_s, now_s - since_s), late
        )
        self._ended_s, self._late = now_s, ()
        self.spent["rounds"] += 1
        for name in ("took_s", "compute_s", "wait_s", "exchange_s"):
            self.spent[name] += getattr(times, name)
        return times


# ---------------------------------------------------------------- what a peer knows of all


class RowTable:
    """Keep the last rows of each peer, in order; bounded. No clock.

    A row that tells of no held-out loss has that of the row before it here: the last that is known.
    """

    def __init__(self) -> None:
        self._rows: dict[bytes, deque[RoundRow]] = {}
        self._heard_s: dict[bytes, float] = {}
        self._links: dict[bytes, tuple[LinkSeen, ...]] = {}

    def add(self, peer: bytes, row: RoundRow, now_s: float) -> bool:
        """Keep a row; return False if it is not wanted: one came a moment ago, or it is an old one.

        A peer that sends more than it may is not heard more often, and nothing else.
        """
        if now_s - self._heard_s.get(peer, -math.inf) < ROW_EVERY_S / 2:
            return False
        kept = self._rows.pop(peer, None) or deque(maxlen=ROWS_KEPT)
        if kept and row.heldout_loss is None and kept[-1].heldout_loss is not None:
            row = replace(row, heldout_loss=kept[-1].heldout_loss)
        kept.append(row)
        self._rows[peer] = kept  # the last that was heard is the last to be forgotten
        self._heard_s[peer] = now_s
        if row.links:
            self._links[peer] = row.links
        while len(self._rows) > PEERS_KEPT:
            gone = next(iter(self._rows))
            for known in (self._rows, self._heard_s, self._links):
                known.pop(gone, None)
        return True

    def rows(self, peer: bytes) -> list[RoundRow]:
        """Return the last rows of a peer, the oldest first."""
        return list(self._rows.get(peer, ()))

    def peers(self) -> list[bytes]:
        return sorted(self._rows)

    def links(self, peer: bytes) -> tuple[LinkSeen, ...]:
        """Return what a peer has told last of its links."""
        return self._links.get(peer, ())

    def told(self, last: int) -> list[dict[str, Any]]:
        """Return the last rows of all peers in plain types, the oldest first, without links.

        Of each peer at most ``last``, and of all at most ROWS_TOLD_MAX. Links are for the event
        file: nobody asks a daemon for them, and they are most of a row.
        """
        found = [
            plain_row(peer, replace(row, links=()))
            for peer in self.peers()
            for row in self.rows(peer)[-last:]
        ]
        return sorted(found, key=lambda row: float(row["unix_s"]))[-ROWS_TOLD_MAX:]
