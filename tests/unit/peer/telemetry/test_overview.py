"""What `atoll top` shows of a run."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from harness.telemetry_samples import NAMES, NOW, SLOW, rows, status

from atoll.peer.cli import top
from atoll.peer.telemetry.event_file import EVENTS_FILE
from atoll.peer.telemetry.overview import RunGoal, overview
from atoll.peer.telemetry.page.history import History
from atoll.peer.telemetry.top_screen import plain_screen

GOLDEN = Path(__file__).parents[3] / "golden" / "top.txt"


def test_the_screen_at_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests/golden/top.txt has it; no line is longer."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    text = plain_screen(overview(status(), rows(), NOW, RunGoal(rounds=200, tokens=1e9)), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert text == GOLDEN.read_text("utf-8").rstrip("\n")


def test_top_and_page_name_the_same_peer(tmp_path: Path) -> None:
    """Also where rows name several: of the rows of a daemon's table, and of its file."""
    late = [
        row | {"waited_for": [NAMES[1], SLOW]} if row.get("waited_for") else row for row in rows()
    ]
    (tmp_path / EVENTS_FILE).write_text("".join(f"{json.dumps(row)}\n" for row in late))
    history = History(tmp_path)
    slow = history.summary(0.0, 0)["slow"]
    history.close()
    assert (slow["peer"], slow["text"]) == (SLOW, overview(status(), late, NOW).slow)


def test_who_has_no_trainer_waits_for_nobody() -> None:
    idle = {"counted": False, "compute_s": 0.0, "wait_s": 3.6, "waited_for": [SLOW]}
    found = [row | idle if row["peer"] == NAMES[1] else row for row in rows()]
    assert overview(status(), found, NOW).peers[1].wait is None


def test_an_error_that_several_have_is_one_line() -> None:
    found = [row | {"error": "no room"} for row in rows()]
    shown = overview(status(last_error="no room"), found, NOW)
    assert shown.errors == (f"{NAMES[0]}, {NAMES[1]} and {NAMES[2]}: no room",)


def test_figures_of_a_peer() -> None:
    """Rates are of the time between rows, shares of the time that they are of."""
    shown = overview(status(), rows(), NOW)
    line = shown.peers[0]
    assert (line.role, line.reach, line.round) == ("coord", "you", 41)
    assert line.steps_per_s == pytest.approx(20 / 4)
    assert (line.compute, line.exchange, line.wait) == pytest.approx((0.5, 0.1, 0.375))
    assert line.up == pytest.approx(4_010_000 / 4)
    assert shown.peers[1].error == "cannot reach 9a08e6f1"
    assert shown.peers[3].steps_per_s is None
    told = [row | {"steps": 7.0 * row["last"]} for row in rows()]
    assert overview(status(), told, NOW).peers[0].steps_per_s == pytest.approx(7 / 4)


@pytest.mark.parametrize("restart", [1, 2, 4, 7])
def test_steps_of_a_trainer_that_was_started_again_go_on(restart: int) -> None:
    """Count from 0 again: none of its 7 steps in each row is missing, and there are no others."""
    found = [row for row in rows() if row["peer"] == NAMES[0]]
    for place, row in enumerate(found):
        row["steps"] = 7.0 * (place + 1 - restart if place >= restart else 100 + place)
    assert overview(status(), found, NOW).peers[0].steps_per_s == pytest.approx(7 / 4)


def test_when_it_is_done() -> None:
    def done(goal: RunGoal, found: list[dict[str, Any]]) -> str:
        return overview(status(), found, NOW, goal).eta.partition(", ")[0]

    assert done(RunGoal(rounds=141), rows()) == "round 141 in 6.7 min"
    assert done(RunGoal(rounds=41), rows()) == "round 41: reached"
    assert done(RunGoal(rounds=141), []) == "round 141: nobody knows"
    assert done(RunGoal(tokens=1e6), rows()).endswith("tokens: reached")
    silent = [{k: v for k, v in row.items() if k != "tokens"} for row in rows()]
    assert "no trainer tells its tokens" in overview(status(), silent, NOW, RunGoal(tokens=1e9)).eta


def test_tokens_of_a_trainer_that_was_started_again_go_on() -> None:
    """It counts from 0 then; what it had counted before stays counted."""
    found = rows(5)[::3]  # of one trainer
    for row, total in zip(found, (8e8, 9e8, 0.0, 1e8, 2e8), strict=True):
        row["tokens"] = total
    del found[2]["tokens"]  # rows do not tell a total of 0
    assert overview(status(), found, NOW, RunGoal(tokens=1.1e9)).eta.endswith("tokens: reached")
    # 1.1e9 are seen, of which 3e8 in the 16 s of these rows.
    said = overview(status(), found, NOW, RunGoal(tokens=1.4e9)).eta
    assert said.startswith("1,400,000,000 tokens in 16 s")


def test_a_screen_is_printed_whatever_the_encoding_of_the_output_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = overview(status(), rows(), NOW)
    monkeypatch.setattr(top, "_look", lambda home, goal: shown)
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, "latin-1", write_through=True))
    assert top.print_once(None, RunGoal()) == 0
    assert b"run demo, round 41" in output.getvalue()
    assert NAMES[3].encode() in output.getvalue()


@pytest.mark.parametrize(("since_s", "stands"), [(11, False), (13, True), (90, True)])
def test_it_is_said_that_rounds_do_not_come(since_s: float, stands: bool) -> None:
    """Those of the rows took four seconds each."""
    late = status(last_commit_unix_s=NOW - since_s)
    said = overview(late, rows(), NOW, RunGoal(rounds=141)).eta
    assert ("but no round has come for" in said) == stands
    assert overview(late, rows(), NOW).eta == ""


def test_a_peer_outside_any_view_has_a_screen_too() -> None:
    outside = status(
        members=[], coordinator="", round=0, spec=None, layout="", last_commit_unix_s=0.0
    )
    text = plain_screen(overview(outside, [], NOW), 80)
    assert "no round with a trainer was committed yet" in text


@pytest.mark.parametrize(
    ("via", "reach"), [("", "outbound"), ("punched", "punched"), ("5263b63e", "relayed")]
)
def test_how_a_peer_is_linked_that_cannot_be_dialled(via: str, reach: str) -> None:
    found = status()
    found["members"][1] |= {"outbound": True, "via": via}
    assert overview(found, rows(), NOW).peers[1].reach == reach
