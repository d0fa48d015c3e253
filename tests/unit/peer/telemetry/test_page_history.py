"""What the page knows of a run: read as the file grows, bounded, and what is said of it."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.long_history import write

from atoll.peer.telemetry import event_file
from atoll.peer.telemetry.event_file import EVENTS_FILE, EventFile
from atoll.peer.telemetry.page import history as history_module
from atoll.peer.telemetry.page.history import History

Look = Callable[[], History]
BEGUN_S = 1_700_000_000.0


@pytest.fixture
def look(tmp_path: Path) -> Iterator[Look]:
    """Histories of the file there, which are closed when the test is over."""
    made: list[History] = []

    def looked() -> History:
        made.append(History(tmp_path))
        return made[-1]

    yield looked
    for history in made:
        history.close()


def opened(folder: Path) -> EventFile:
    return EventFile(folder / EVENTS_FILE, print)


def row(peer: str, number: int, unix_s: float, **more: Any) -> dict[str, Any]:
    found = {"unix_s": unix_s, "kind": "row", "peer": peer, "first": number, "last": number}
    return found | {"took_s": 5.0, "sent": [100, 0, 1, 2], "received": [90, 0, 1, 2]} | more


def event(unix_s: float, kind: str = "view", text: str = "something") -> dict[str, Any]:
    return {"unix_s": unix_s, "kind": kind, "text": text}


def texts(history: History, **asked: Any) -> list[str]:
    filters = {"since_unix_s": 0.0, "until_unix_s": 1e12, "kinds": set(), "limit": 100} | asked
    return [found["text"] for found in history.events(**filters)["events"]]


def test_what_is_appended_is_seen_at_the_next_look_also_after_a_rotation(
    tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_file, "FILE_BYTES_MAX", 2000)
    history, file = look(), opened(tmp_path)
    assert texts(history) == []
    for number in range(300):  # fewer between two looks than the files hold
        file.append(event(BEGUN_S + number, text=str(number)))
        if number % 7 == 0:
            assert texts(history, limit=1000)[-1] == str(number)
    assert texts(history, limit=1000) == [str(number) for number in range(300)]
    # Who looks for the first time has what the files still have, and a restart continues them.
    file.close()
    again = opened(tmp_path)
    again.append(event(BEGUN_S + 300, text="300"))
    again.close()
    later = texts(look(), limit=1000)
    assert later == [str(number) for number in range(int(later[0]), 301)]
    assert 20 < len(later) < 300


def test_a_look_between_two_renames_counts_nothing_twice(
    tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that is read has a name that was passed by already, or is renamed on the way."""
    file, history = opened(tmp_path), look()
    for number in range(3):
        file.append(row("a", number, BEGUN_S + number))
        file._rotate()
    file.append(row("a", 3, BEGUN_S + 3))

    def rounds() -> list[int]:
        return [found["last"] for found in history.summary(0.0, 0)["rounds"]["a"]]

    assert rounds() == [0, 1, 2, 3]
    with monkeypatch.context() as meanwhile:
        for seen in (lambda found: found[:-1], lambda found: [tmp_path / "gone", *found]):
            meanwhile.setattr(
                history_module, "files_of", lambda path, seen=seen: seen(event_file.files_of(path))
            )
            assert rounds() == [0, 1, 2, 3]
    file.append(row("a", 4, BEGUN_S + 4))
    file._rotate()
    file.append(row("a", 5, BEGUN_S + 5))
    file.close()
    assert rounds() == [0, 1, 2, 3, 4, 5]
    assert history.summary(0.0, 0)["totals"]["a"]["sent"][0] == 600


def test_a_clock_that_was_ahead_does_not_stay_the_newest_time(tmp_path: Path, look: Look) -> None:
    file, history = opened(tmp_path), look()
    file.append(event(BEGUN_S + 86400))
    assert history.summary(0.0, 0)["newest_unix_s"] == BEGUN_S + 86400
    for number in range(10):
        file.append(event(BEGUN_S + number))
        file.append(row("a", number, BEGUN_S + number, loss=2.0))
    file.close()
    found = history.summary(BEGUN_S, 100)
    assert found["newest_unix_s"] == pytest.approx(BEGUN_S + 9, abs=history_module.SKEW_MAX_S)
    assert 2.0 in found["series"]["peers"]["a"]["loss"]


def test_half_a_line_waits_and_what_is_no_event_is_passed_over(tmp_path: Path, look: Look) -> None:
    path, history = tmp_path / EVENTS_FILE, look()
    line = json.dumps(event(BEGUN_S, text="whole")).encode()
    path.write_bytes(line[:20])
    assert texts(history) == []
    with path.open("ab") as file:
        file.write(line[20:] + b'\n[1]\nnull\n{"kind":"row","unix_s":1}\n{"kind":\xff\n7\n')
        file.write(b"[" * 60_000 + b"\n")
        file.write(json.dumps(row("a", 1, BEGUN_S) | {"first": None}).encode() + b"\n")
        file.write(json.dumps(event(BEGUN_S + 1, text="after")).encode() + b"\n")
    assert texts(history) == ["whole", "after"]


def test_events_of_a_time_and_of_kinds(tmp_path: Path, look: Look) -> None:
    file, history = opened(tmp_path), look()
    for second in range(100):
        file.append(event(BEGUN_S + second, ("round", "view", "link")[second % 3], str(second)))
    assert "0" not in texts(history), "lines of rounds only when asked for"
    assert texts(history, kinds={"round"})[:2] == ["0", "3"]
    around = texts(history, since_unix_s=BEGUN_S + 50, until_unix_s=BEGUN_S + 55)
    assert around == ["50", "52", "53", "55"]
    last = history.events(0, 1e12, {"link"}, 5)
    assert [found["text"] for found in last["events"]] == ["86", "89", "92", "95", "98"]
    assert (last["more"], last["kinds"]) == (28, ["link", "round", "view"])
    file.close()


def test_series_have_as_many_points_as_asked_and_add_up(tmp_path: Path, look: Look) -> None:
    file, history = opened(tmp_path), look()
    for number in range(1, 2001):
        moment = BEGUN_S + 5 * number
        file.append(row("a", number, moment, loss=4.0, compute_s=3.0, memory_bytes=number))
        file.append(row("b", number, moment, loss=2.0, exchange_s=2.0))
    file.close()
    found = history.summary(0.0, 50)
    series = found["series"]
    assert 25 <= len(series["unix_s"]) <= 50
    assert {len(values) for values in series["peers"]["a"].values()} == {len(series["unix_s"])}
    assert series["peers"]["a"]["loss"][3:5] == [4.0, 4.0]
    assert series["peers"]["a"]["compute_s"][3] == 3.0
    assert series["peers"]["a"]["memory_bytes"][-1] == 2000
    assert series["peers"]["b"]["exchange_s"][3] == 2.0
    assert sum(series["sent"][0]) == 2 * 2000 * 100
    assert found["totals"]["b"]["received"] == [2000 * 90, 0, 2000, 4000]
    # A part of it, finer.
    part = history.summary(BEGUN_S + 9000, 1000)["series"]
    assert part["width_s"] == 5.0
    assert part["unix_s"][0] == pytest.approx(BEGUN_S + 9000, abs=5)
    assert len(part["unix_s"]) == pytest.approx(200, abs=3)
    assert history.summary(0.0, 0)["series"] is None


def test_rows_that_come_late_and_looks_in_between_change_no_sum(tmp_path: Path, look: Look) -> None:
    file, history, draw = opened(tmp_path), look(), random.Random(7)
    sent, losses = [0, 0, 0, 0], []
    for number in range(1, 1500):
        moment = BEGUN_S + 4 * number - draw.choice((0, 0, 0, 9, 25))
        bytes_sent = [draw.randrange(1000), 0, draw.randrange(9), 1]
        sent = [a + b for a, b in zip(sent, bytes_sent, strict=True)]
        losses.append(float(draw.randrange(8)))
        file.append(row("ab"[number % 2], number, moment, sent=bytes_sent, loss=losses[-1]))
        if number % 100 == 0:
            for points in (10, 1000):  # of wide buckets and of narrow ones
                series = history.summary(0.0, points)["series"]
                assert [sum(values) for values in series["sent"]] == sent
    file.close()
    whole = history.summary(0.0, 1)["series"]["peers"]
    means = [sum(losses[n::2]) / len(losses[n::2]) for n in (1, 0)]
    assert [whole[name]["loss"] for name in "ab"] == [[pytest.approx(m, rel=1e-4)] for m in means]


def test_held_out_losses_are_points_and_the_last_one_stays_known(
    tmp_path: Path, look: Look
) -> None:
    file, history = opened(tmp_path), look()
    for number in range(40):
        held_out = {"heldout_loss": 5.0 - number / 10} if number % 10 == 9 else {}
        file.append(row("a", number, BEGUN_S + 5 * number, loss=2.0, **held_out))
        file.append(row("b", number, BEGUN_S + 5 * number, loss=2.0))
    file.append(row("a", 40, BEGUN_S + 200))
    file.close()
    found = history.summary(0.0, 100)
    series = found["series"]["peers"]
    points = [(i, v) for i, v in enumerate(series["a"]["heldout_loss"]) if v is not None]
    assert points == [(9, 4.1), (19, 3.1), (29, 2.1), (39, 1.1)]
    assert "heldout_loss" not in series["b"], "of who has told none there is no series"
    assert found["last"]["a"]["heldout_loss"] == 1.1
    assert "heldout_loss" not in found["last"]["b"]
    few = history.summary(0.0, 2)["series"]["peers"]["a"]["heldout_loss"]
    assert few[0] == pytest.approx((4.1 + 3.1) / 2), "of a wide point their mean"


def test_however_long_the_run_is_the_memory_is_bounded(
    tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "LEVELS", ((5.0, 10), (60.0, 10)))
    monkeypatch.setattr(history_module, "PEERS_KEPT", 3)
    monkeypatch.setattr(history_module, "KINDS_KEPT", 2)
    monkeypatch.setattr(history_module, "EVENTS_KEPT", 5)
    file, history = opened(tmp_path), look()
    for number in range(1, 1000):
        file.append(row("abcdef"[number % 6], number, BEGUN_S + 10 * number))
        file.append(event(BEGUN_S + 10 * number, kind="abcd"[number % 4], text=str(number)))
    file.close()
    found = history.summary(0.0, 1000)
    assert sorted(found["totals"]) == ["b", "c", "d"], "the last that were heard"
    assert len(found["series"]["unix_s"]) == 10
    assert max(map(len, found["rounds"].values())) <= history_module.ROUNDS_KEPT
    assert len(texts(history)) == 10


def test_who_has_a_wrong_clock_is_shown_at_the_time_of_this_daemon(
    tmp_path: Path, look: Look
) -> None:
    file, history = opened(tmp_path), look()
    file.append(event(BEGUN_S, kind="round"))
    file.append(row("a", 1, BEGUN_S + 1))
    file.append(row("b", 1, BEGUN_S + 86400, heard_unix_s=BEGUN_S + 2))
    file.append(row("c", 1, BEGUN_S - 86400, heard_unix_s=BEGUN_S + 3))
    file.close()
    found = history.summary(0.0, 10)
    assert (found["oldest_unix_s"], found["newest_unix_s"]) == (BEGUN_S, BEGUN_S + 3)
    assert [found["rounds"][peer][0]["unix_s"] - BEGUN_S for peer in "abc"] == [1, 2, 3]
    assert "heard_unix_s" not in found["last"]["b"]


@pytest.mark.parametrize("tells_heard", [True, False], ids=["of now", "of an earlier version"])
@pytest.mark.parametrize("has_own_lines", [True, False], ids=["a trainer", "an archive"])
def test_rounds_of_a_minute_are_shown_when_they_were(
    tmp_path: Path, look: Look, *, has_own_lines: bool, tells_heard: bool
) -> None:
    """Also where another's row comes before this daemon's own line, or it has none of rounds."""
    file, history = opened(tmp_path), look()
    file.append(event(BEGUN_S))
    for number in range(1, 8):
        moment = BEGUN_S + 60 * number
        heard = {"heard_unix_s": moment + 0.1} if tells_heard else {}
        file.append(row("a", number, moment, **heard))
        if has_own_lines:
            file.append(event(moment + 0.5, kind="round"))
    file.close()
    found = history.summary(0.0, 100)
    times = [known["unix_s"] - BEGUN_S for known in found["rounds"]["a"]]
    assert times == [60 * number for number in range(1, 8)]
    assert found["newest_unix_s"] == pytest.approx(BEGUN_S + 420, abs=1)
    assert sum(found["series"]["sent"][0]) == 700


def test_in_an_old_file_a_row_of_the_future_counts_as_of_the_event_before_it(
    tmp_path: Path, look: Look
) -> None:
    file, history = opened(tmp_path), look()
    file.append(event(BEGUN_S))
    file.append(row("a", 1, time.time() + 86400))
    file.append(row("b", 1, BEGUN_S - 86400))
    file.close()
    found = history.summary(0.0, 10)
    assert [found["rounds"][peer][0]["unix_s"] for peer in "ab"] == [BEGUN_S, BEGUN_S]
    assert found["newest_unix_s"] == BEGUN_S


def test_a_line_of_no_time_is_passed_over(tmp_path: Path, look: Look) -> None:
    file, history = opened(tmp_path), look()
    for unix_s in (1e18, -1.0, math.nan, math.inf):
        file.append(event(unix_s))
        file.append(row("a", 1, unix_s))
        file.append(row("a", 1, BEGUN_S, heard_unix_s=unix_s))
    file.append(row("b", 2, BEGUN_S + 1))
    file.close()
    found = history.summary(0.0, 10)
    assert list(found["rounds"]) == ["b"]
    assert found["newest_unix_s"] == BEGUN_S + 1


@pytest.mark.parametrize(
    "odd",
    [
        *({"waited_for": names} for names in (5, None, "b", {"b": 1}, [["b"]], [1])),
        *({"links": links} for links in (5, [1], [{}], {"b": 1}, [{"peer": []}])),
        {"links": [{"peer": "b", "out": "fast"}]},
        *({"first": figure, "last": figure} for figure in (math.nan, math.inf)),
        *({name: figure} for name in ("up", "loss", "tokens") for figure in ("x", [1], math.nan)),
    ],
    ids=str,
)
def test_a_row_of_another_shape_costs_itself_only(
    odd: dict[str, Any], tmp_path: Path, look: Look
) -> None:
    file, history = opened(tmp_path), look()
    for number, more in enumerate(({}, odd, {}), 1):
        for peer in "ab":
            file.append(row(peer, number, BEGUN_S + number, counted=True, up=1.0) | more)
    file.close()
    for _ in range(2):
        found = history.summary(0.0, 10)
        assert [told["last"] for told in found["rounds"]["a"]] == [1, 3]
        json.dumps(found, allow_nan=False)


def test_the_cost_of_all_reduces_follows_from_the_steps(tmp_path: Path, look: Look) -> None:
    file, history = opened(tmp_path), look()
    file.append(row("a", 1, BEGUN_S, peers=2, steps=100.0, tokens=1000.0))
    assert history.summary(0.0, 0)["all_reduce_bytes_per_parameter"] == 0.0
    for peer in "ab":  # b is seen first at 200 steps: nothing is known of what it did before
        file.append(row(peer, 2, BEGUN_S + 5, peers=2, steps=200.0, tokens=2000.0))
    file.append(row("a", 3, BEGUN_S + 10, peers=2, steps=30.0, tokens=300.0))  # began anew
    file.close()
    found = history.summary(0.0, 0)
    # Two peers: each sends half of the gradients twice, 4 bytes per parameter and step.
    assert found["all_reduce_bytes_per_parameter"] == 4 * (100 + 30)
    assert found["totals"]["a"]["tokens"] == 2300.0


def test_steps_done_alone_are_none_of_an_all_reduce(tmp_path: Path, look: Look) -> None:
    file = opened(tmp_path)
    told = ((2, 10.0), (2, 110.0), (1, 5000.0), (1, 10000.0), (2, 10100.0))
    for number, (peers, steps) in enumerate(told):
        file.append(row("a", number, BEGUN_S + number, peers=peers, steps=steps))
    file.close()
    assert look().summary(0.0, 0)["all_reduce_bytes_per_parameter"] == 4 * (100 + 100)


def test_a_long_history_names_its_slow_peer(tmp_path: Path, look: Look) -> None:
    names = write(tmp_path, peers=6, hours=0.2, round_s=5.0)
    found = look().summary(0.0, 100)
    assert found["slow"]["peer"] == names[3]
    assert f"{names[3]} is slow: the others wait" in found["slow"]["text"]
    assert "because it trains" in found["slow"]["text"]
    assert len(found["links"][names[0]]) == 5
    assert texts(look(), kinds={"link"}) == [
        f"connection to {names[2]} ended: the other side is gone"
    ]


def test_after_going_back_to_a_checkpoint_the_living_are_present(
    tmp_path: Path, look: Look
) -> None:
    file, history = opened(tmp_path), look()
    for number in range(900, 920):
        for peer in "ac":
            file.append(row(peer, number, BEGUN_S + 5 * number))
    for number in range(500, 540):
        moment = BEGUN_S + 5 * (number + 420)
        file.append(row("a", number, moment, counted=True, wait_s=1.0, waited_for=["b", "a"]))
        file.append(row("b", number, moment, counted=True))
    file.close()
    found = history.summary(0.0, 0)
    assert found["present"] == ["a", "b"]
    assert found["slow"]["peer"] == "b"
    assert found["rounds"]["a"][-1]["late"] == "b"


def test_a_request_that_outlives_the_page_opens_no_file(tmp_path: Path, look: Look) -> None:
    history, file = look(), opened(tmp_path)
    file.append(event(BEGUN_S, text="before"))
    assert texts(history) == ["before"]
    history.close()
    file.append(event(BEGUN_S + 1, text="after"))
    assert texts(history) == ["before"]
    assert history._file is None
