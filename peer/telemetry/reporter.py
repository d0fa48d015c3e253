"""Make this daemon's row after each round, send it to all, and write down the rows of all."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from atoll.peer.daemon.ports import RowsPort
from atoll.peer.membership.messages import Begin
from atoll.peer.membership.view import plain
from atoll.peer.net.byte_counts import PURPOSES, ByteCounts
from atoll.peer.telemetry.rows import (
    LINKS_EVERY_S,
    ROW_EVERY_S,
    TEXT_CHARACTERS_MAX,
    RoundRow,
    RoundTimes,
    RowTable,
    brief,
    plain_row,
)

# In a view of more members than that, each sends fewer, so that nobody hears more.
ROWS_PER_S = 20
# By which a row may be ahead of this peer, whose own commit is a moment late: beyond it is
# nonsense, and would stand as the newest round wherever rounds are compared.
ROUNDS_AHEAD_MAX = 10_000
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class _Pending:
    """Add up the rounds that the next row is of."""

    first: int
    last: int
    unix_s: float = 0.0  # when the last of them was over
    peers: int = 0
    counted: bool = False
    times: RoundTimes = field(default_factory=lambda: RoundTimes(0.0))
    attempts: int = 0

    def add(self, begin: Begin, times: RoundTimes, attempts: int, *, counted: bool) -> None:
        known = self.times
        self.unix_s = time.time()
        self.last, self.peers, self.counted = begin.round, len(begin.participants), counted
        self.attempts = max(self.attempts, attempts)
        self.times = RoundTimes(
            known.took_s + times.took_s,
            known.compute_s + times.compute_s,
            known.wait_s + times.wait_s,
            known.exchange_s + times.exchange_s,
            times.waited_for or known.waited_for,
        )


class RowReporter:
    """Report rounds as rows: this peer's to all, those of all to its event file and its table."""

    def __init__(
        self,
        me: bytes,
        daemon: RowsPort,
        counts: ByteCounts,
        record: Callable[[dict[str, Any]], None],
    ) -> None:
        """Make a reporter of this peer's rounds; ``record`` takes each row in plain types."""
        self._me, self._daemon, self._counts, self._record = me, daemon, counts, record
        self.table = RowTable()
        self._pending: _Pending | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sent_s = self._links_s = float("-inf")
        self._memory_bytes = 0
        self._moved: tuple[dict[str, int], dict[str, int]] = (counts.sent, counts.received)

    def committed(
        self, begin: Begin, times: RoundTimes, attempts: int, *, takes_part: bool
    ) -> None:
        """Note that a round is over; its row follows at once, or when one may be sent again."""
        if self._pending is None:
            self._pending = _Pending(begin.round, begin.round)
        self._pending.add(begin, times, attempts, counted=takes_part)
        wait_s = self._sent_s + self._pause_s() - time.monotonic()
        if wait_s <= 0:
            self._report()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._report)

    def on_message(self, peer: bytes, row: RoundRow) -> None:
        """Take the row of another peer, whose text is made fit for terminals.

        One of a round that is far ahead of the run is dropped.
        """
        newest = self._daemon.last_round()
        if newest is not None and row.last > newest + ROUNDS_AHEAD_MAX:
            return
        phase, error = plain(row.phase), plain(row.error)
        is_clean = (phase, error) == (row.phase, row.error)
        clean = row if is_clean else replace(row, phase=phase, error=error)
        if self.table.add(peer, clean, time.monotonic()):
            self._write_down(peer, clean)

    def _write_down(self, peer: bytes, row: RoundRow) -> None:
        """Record a row with when it was heard here: ``unix_s`` is of the other peer's clock."""
        self._record(plain_row(peer, row) | {"heard_unix_s": round(time.time(), 3)})

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _pause_s(self) -> float:
        view = self._daemon.view()
        return max(ROW_EVERY_S, len(view.members) / ROWS_PER_S if view is not None else 0.0)

    def _report(self) -> None:
        self.close()
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self._sent_s = time.monotonic()
        row = self._row(pending)
        self.table.add(self._me, row, self._sent_s)
        self._write_down(self._me, row)
        for peer in self._daemon.link_peers():
            self._daemon.send(peer, row)

    def _row(self, pending: _Pending) -> RoundRow:
        daemon, times = self._daemon, pending.times
        figures = daemon.trainer_figures()
        moved = self._counts.sent, self._counts.received
        sent, received = (
            tuple(now[purpose] - before[purpose] for purpose in PURPOSES)
            for now, before in zip(moved, self._moved, strict=True)
        )
        self._moved = moved
        has_links = self._sent_s - self._links_s >= LINKS_EVERY_S
        if has_links:
            self._links_s = self._sent_s
            self._memory_bytes = resident_bytes()  # it changes slowly, too
        up, down = daemon.own_rates()
        phase, error = daemon.standing()
        return RoundRow(
            first=pending.first,
            last=pending.last,
            unix_s=pending.unix_s,
            took_s=times.took_s,
            compute_s=times.compute_s,
            wait_s=times.wait_s,
            exchange_s=times.exchange_s,
            waited_for=tuple(brief(peer) for peer in times.waited_for),
            attempts=pending.attempts,
            sent=sent,
            received=received,
            up=up,
            down=down,
            peers=pending.peers,
            counted=pending.counted,
            loss=figures.get("loss"),
            tokens=figures.get("tokens"),
            steps=figures.get("steps"),
            memory_bytes=self._memory_bytes,
            predicted_s=daemon.predicted_s(),
            phase=phase[:TEXT_CHARACTERS_MAX],
            error=error[:TEXT_CHARACTERS_MAX],
            links=daemon.links_seen() if has_links else (),
            heldout_loss=daemon.new_heldout_loss(),
        )


def resident_bytes() -> int:
    """Return the memory that this process has in RAM; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0
