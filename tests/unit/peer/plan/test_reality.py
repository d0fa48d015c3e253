"""What a round should take beside what it takes, from the rows of all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.optim.run_spec import RunSpec
from atoll.peer.plan.model import DISK_PARAMETER_S, DISK_S, OUTER_STEP_S
from atoll.peer.plan.reality import ROWS_COMPARED, RoundTime, round_time
from atoll.peer.telemetry.rows import LinkSeen, RoundRow, RowTable, brief

A, B, C = (name * 32 for name in (b"a", b"b", b"c"))
SPEC = RunSpec(sync_every=30)
N = 1_000_000
ROW = RoundRow(5, 5, 1e9, 6.2, 4.0, 0.9, 1.3, sent=(0, 0, 0, 0), counted=True)
APPLY_S = (OUTER_STEP_S + DISK_PARAMETER_S) * N + DISK_S


def table(**rows: RoundRow) -> RowTable:
    """A table with rows of the peers a, b, c: twelve of each, the rounds 5 to 16."""
    found = RowTable()
    for number in range(12):
        for name, row in rows.items():
            moved = replace(row, first=row.first + number, last=row.last + number)
            found.add(name.encode() * 32, moved, 10.0 * number)
    return found


def links(*peers: bytes, rtt_s: float) -> tuple[LinkSeen, ...]:
    return tuple(LinkSeen(brief(peer), rtt_s, 12.5e6, 0.0) for peer in peers)


def test_it_is_the_slowest_training_and_what_the_plan_promises() -> None:
    rows = table(
        a=replace(ROW, predicted_s=1.2, links=links(B, C, rtt_s=0.05)),
        b=replace(ROW, compute_s=5.0, wait_s=0.0),
        c=ROW,
    )
    found = round_time(rows, (A, B, C), A, SPEC, N)
    assert found is not None
    assert found.predicted_s == pytest.approx(5.0 + 1.2 + 2 * 0.05 + APPLY_S)
    assert found.measured_s == pytest.approx(6.2)
    assert found == round_time(rows, (C, B, A), A, SPEC, N)


def test_streams_that_were_idle_begin_slowly() -> None:
    """18 MB in a round to two others: over 200 ms they double their windows for some trips."""
    sent = (18_000_000, 0, 0, 0)
    rows = table(
        a=replace(ROW, predicted_s=1.2, sent=sent, links=links(B, C, rtt_s=0.2)), b=ROW, c=ROW
    )
    found = round_time(rows, (A, B, C), A, SPEC, N)
    assert found is not None
    begins_s = found.predicted_s - (4.0 + 1.2 + 2 * 0.2 + APPLY_S)
    assert 0.5 < begins_s < 1.5


def test_rows_of_several_rounds_are_shared_out() -> None:
    several = replace(ROW, last=6, took_s=12.4, compute_s=8.0)
    found = round_time(table(a=replace(several, predicted_s=1.0), b=several), (A, B), A, SPEC, N)
    assert found is not None
    assert found.measured_s == pytest.approx(6.2)
    assert found.predicted_s == pytest.approx(4.0 + 1.0 + APPLY_S)


def test_only_the_last_rows_count() -> None:
    rows = table(a=replace(ROW, predicted_s=1.0), b=replace(ROW, predicted_s=0.0))
    for number in range(ROWS_COMPARED):
        fast = replace(ROW, took_s=3.0, first=50 + number, last=50 + number, predicted_s=1.0)
        for peer in (A, B):
            rows.add(peer, fast, 1000.0 + 10.0 * number)
    found = round_time(rows, (A, B), A, SPEC, N)
    assert found is not None
    assert found.measured_s == pytest.approx(3.0)


def test_what_is_not_known_is_not_predicted() -> None:
    known = {"a": replace(ROW, predicted_s=1.2), "b": ROW}
    assert round_time(table(**known), (A, B), A, SPEC, N) is not None
    assert round_time(table(a=ROW, b=ROW), (A, B), A, SPEC, N) is None  # no plan yet
    assert round_time(table(**known), (A, B), C, SPEC, N) is None  # another one coordinates now
    assert round_time(table(**known), (A,), A, SPEC, N) is None
    idle = {name: replace(row, counted=False) for name, row in known.items()}
    assert round_time(table(**idle), (A, B), A, SPEC, N) is None
    streaming = replace(SPEC, method="streaming_diloco", fragments=2, rounds_in_flight=2)
    for spec in (streaming, replace(SPEC, method="co2")):
        assert round_time(table(**known), (A, B), A, spec, N) is None


def test_how_it_is_said() -> None:
    assert RoundTime(21.0, 23.0).text == "predicted 21 s, measured 23 s (+10%)"
    assert RoundTime(0.5, 0.45).text == "predicted 500 ms, measured 450 ms (-10%)"
