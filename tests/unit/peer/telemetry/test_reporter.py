"""What a daemon takes of the rows of others."""

from __future__ import annotations

from typing import Any, cast

from atoll.peer.net.byte_counts import ByteCounts
from atoll.peer.telemetry.reporter import ROUNDS_AHEAD_MAX, RowReporter
from atoll.peer.telemetry.rows import RoundRow

A, B, ME = b"a" * 32, b"b" * 32, b"m" * 32


class Daemon:
    """As much of one as is asked when a row comes."""

    known: int | None = 100

    def last_round(self) -> int | None:
        return self.known


def test_a_row_far_ahead_of_the_run_is_dropped_unless_this_peer_is_behind() -> None:
    daemon, recorded = Daemon(), list[dict[str, Any]]()
    reporter = RowReporter(ME, cast(Any, daemon), ByteCounts(), recorded.append)
    reporter.on_message(A, RoundRow(2**60, 2**60, 1e9, 1.0))
    assert (recorded, reporter.table.peers()) == ([], [])
    reporter.on_message(A, RoundRow(101, 100 + ROUNDS_AHEAD_MAX, 1e9, 1.0))
    daemon.known = None  # it joins: the others are ahead by as much as there is
    reporter.on_message(B, RoundRow(2**20, 2**20, 1e9, 1.0))
    assert [row["last"] for row in recorded] == [100 + ROUNDS_AHEAD_MAX, 2**20]
