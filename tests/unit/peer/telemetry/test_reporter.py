"""What a daemon tells in its rows, and what it takes of those of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from atoll.peer.net.byte_counts import ByteCounts
from atoll.peer.telemetry import reporter as reporter_module
from atoll.peer.telemetry.reporter import ROUNDS_AHEAD_MAX, RowReporter
from atoll.peer.telemetry.rows import RoundRow, RoundTimes

A, B, ME = b"a" * 32, b"b" * 32, b"m" * 32


class Daemon:
    """As much of one as is asked when a row comes."""

    known: int | None = 100

    def last_round(self) -> int | None:
        return self.known


class Reporting(Daemon):
    """As much of one as is asked when it makes its own rows, with one other peer."""

    def __init__(self) -> None:
        self.sent: list[RoundRow] = []
        self.heldout: list[float | None] = []

    def send(self, peer: bytes, row: RoundRow) -> None:
        self.sent.append(row)

    def new_heldout_loss(self) -> float | None:
        return self.heldout.pop(0)

    def __getattr__(self, name: str) -> Any:
        return {
            "link_peers": lambda: [A],
            "view": lambda: None,
            "trainer_figures": lambda: {"loss": 2.0, "heldout_loss": 9.0},  # of some earlier row
            "links_seen": lambda: (),
            "own_rates": lambda: (1, 2),
            "standing": lambda: ("member", ""),
            "predicted_s": lambda: 0.0,
        }[name]


def test_a_held_out_loss_is_in_the_row_after_it_was_measured_and_in_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reporter_module, "ROW_EVERY_S", 0.0)
    daemon, recorded = Reporting(), list[dict[str, Any]]()
    reporter = RowReporter(ME, cast(Any, daemon), ByteCounts(), recorded.append)
    daemon.heldout = [None, 2.5, None]
    for number in range(3):
        begin: Any = SimpleNamespace(round=number, participants=(A, ME))
        reporter.committed(begin, RoundTimes(1.0), 1, takes_part=True)
    assert [row.heldout_loss for row in daemon.sent] == [None, 2.5, None]
    assert [row.get("heldout_loss") for row in recorded] == [None, 2.5, None]
    assert [row.loss for row in daemon.sent] == [2.0, 2.0, 2.0]


def test_a_row_far_ahead_of_the_run_is_dropped_unless_this_peer_is_behind() -> None:
    daemon, recorded = Daemon(), list[dict[str, Any]]()
    reporter = RowReporter(ME, cast(Any, daemon), ByteCounts(), recorded.append)
    reporter.on_message(A, RoundRow(2**60, 2**60, 1e9, 1.0))
    assert (recorded, reporter.table.peers()) == ([], [])
    reporter.on_message(A, RoundRow(101, 100 + ROUNDS_AHEAD_MAX, 1e9, 1.0))
    daemon.known = None  # it joins: the others are ahead by as much as there is
    reporter.on_message(B, RoundRow(2**20, 2**20, 1e9, 1.0))
    assert [row["last"] for row in recorded] == [100 + ROUNDS_AHEAD_MAX, 2**20]


def test_rows_are_written_down_with_when_they_were_heard_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of others and this peer's own; on the wire and in what is told that is not said."""
    monkeypatch.setattr(reporter_module.time, "time", lambda: 2e9)
    daemon, recorded = Reporting(), list[dict[str, Any]]()
    reporter = RowReporter(ME, cast(Any, daemon), ByteCounts(), recorded.append)
    daemon.heldout = [None]
    begin: Any = SimpleNamespace(round=7, participants=(A, ME))
    reporter.committed(begin, RoundTimes(1.0), 1, takes_part=True)
    daemon.known = 7
    daemon.last_round = lambda: daemon.known  # type: ignore[method-assign]
    reporter.on_message(A, RoundRow(7, 7, 1e9, 1.0))
    assert [(row["unix_s"], row["heard_unix_s"]) for row in recorded] == [(2e9, 2e9), (1e9, 2e9)]
    assert not any("heard_unix_s" in row for row in reporter.table.told(1))
