"""What `atoll top` shows of a run, and the sentence about who is slow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from harness.telemetry_samples import NAMES, NOW, SLOW, rows, status

from atoll.peer.telemetry.overview import RunGoal, overview, who_is_slow
from atoll.peer.telemetry.top_screen import plain_screen

GOLDEN = Path(__file__).parents[3] / "golden" / "top.txt"


def by_peer(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: each for name in NAMES if (each := [r for r in found if r["peer"] == name])}


def test_the_screen_at_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests/golden/top.txt has it; no line is longer."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    text = plain_screen(overview(status(), rows(), NOW, RunGoal(rounds=200, tokens=1e9)), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert text == GOLDEN.read_text("utf-8").rstrip("\n")


def test_all_wait_for_the_slow_one_and_it_is_said_why() -> None:
    assert who_is_slow(by_peer(rows())) == (
        f"{NAMES[0]} and {NAMES[1]} wait for {SLOW}, 1.5 s in each round: its training takes"
        " 3.5 s, that of the others 2 s"
    )


def test_nobody_is_waited_for() -> None:
    assert who_is_slow(by_peer(rows(slow_s=2.0))) == (
        "nobody is waited for: training takes 50% of the time, exchange 10%"
    )
    assert who_is_slow({}) == "no round with a trainer was committed yet"


def changed(of: str, **fields: Any) -> dict[str, list[dict[str, Any]]]:
    return by_peer([row | fields if row["peer"] == of else row for row in rows()])


def test_other_reasons_for_being_slow() -> None:
    assert who_is_slow(changed(SLOW, counted=False)).endswith("its training has been in no round")
    assert who_is_slow(changed(SLOW, compute_s=2.0, up=1_250_000)).endswith(
        "its links carry 10 Mbit/s up, those of the others 100 Mbit/s"
    )
    assert who_is_slow(changed(SLOW, compute_s=2.0)).endswith("no slower in the mean")
    alone = {name: each for name, each in by_peer(rows()).items() if name != SLOW}
    assert who_is_slow(alone).endswith("it has told nothing of any round")


def test_who_has_no_trainer_is_no_measure_of_the_others_and_waits_for_nobody() -> None:
    idle = {"counted": False, "compute_s": 0.0, "wait_s": 3.6, "waited_for": [SLOW]}
    found = [row | idle if row["peer"] == NAMES[1] else row for row in rows()]
    assert who_is_slow(by_peer(found)) == (
        f"{NAMES[0]} waits for {SLOW}, 1.5 s in each round: its training takes 3.5 s, that of the"
        " others 2 s"
    )
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


def test_when_it_is_done() -> None:
    def done(goal: RunGoal, found: list[dict[str, Any]]) -> str:
        return overview(status(), found, NOW, goal).eta.partition(", ")[0]

    assert done(RunGoal(rounds=141), rows()) == "round 141 in 6.7 min"
    assert done(RunGoal(rounds=41), rows()) == "round 41: reached"
    assert done(RunGoal(rounds=141), []) == "round 141: nobody knows"
    assert done(RunGoal(tokens=1e6), rows()).endswith("tokens: reached")
    silent = [{k: v for k, v in row.items() if k != "tokens"} for row in rows()]
    assert "no trainer tells its tokens" in overview(status(), silent, NOW, RunGoal(tokens=1e9)).eta


def test_a_peer_outside_any_view_has_a_screen_too() -> None:
    outside = status(
        members=[], coordinator="", round=0, spec=None, layout="", last_commit_unix_s=0.0
    )
    text = plain_screen(overview(outside, [], NOW), 80)
    assert "no round with a trainer was committed yet" in text
