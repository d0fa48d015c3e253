"""What the soak relies on: a daemon that is not watched any more is a failure, and so is a fork,
memory or a home that grows, memory that nobody has looked at, and a stall that nothing explains."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from harness import soak_watch
from harness.processes import Fleet, until
from harness.soak_stalls import LIMIT_S, STARVED_LIMIT_S, Stalls, has_majority
from harness.soak_watch import Flatness, Homes, Sample, Watch

STATUS = {
    "lineage": "l",
    "round": 3,
    "digests": {"3": "d"},
    "fork": False,
    "uptime_s": 0.0,
}


def watch(monkeypatch: pytest.MonkeyPatch, status: Callable[[], dict[str, Any]]) -> str:
    """What is wrong after a few looks at a daemon with such a status."""
    monkeypatch.setattr(soak_watch, "LOOK_S", 0.01)
    looks = []

    def look() -> dict[str, Any]:
        looks.append(time.monotonic())
        return status()

    peers = {"a": SimpleNamespace(try_status=look, pid=0)}
    watched = Watch(cast(Fleet, SimpleNamespace(peers=peers)), "a")  # type: ignore[arg-type]
    try:
        until(lambda: watched.failure or len(looks) > 5, "it looks")
    finally:
        watched.close()
    return watched.failure


def test_equal_digests_are_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not watch(monkeypatch, lambda: STATUS)


def test_a_digest_that_changes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter("abcdefghij")
    changing = lambda: STATUS | {"digests": {"3": next(digests)}}  # noqa: E731
    assert "bits differ" in watch(monkeypatch, changing)


def test_a_fork_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "a is in a fork" in watch(monkeypatch, lambda: STATUS | {"fork": True})


def test_a_watch_that_ends_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nobody watches a any more" in watch(monkeypatch, lambda: {"lineage": "l"})


# ---------------------------------------------------------------- memory

MIB = 1 << 20


def flat(count: int, over_s: float, *, grows: float = 0.0, descriptors: int = 0) -> Flatness:
    """``count`` samples within ``over_s`` seconds, from 100 MiB and 40 descriptors on."""
    parts = [at / max(1, count - 1) for at in range(count)]
    return Flatness(
        [
            Sample(over_s * p, int((1 + grows * p) * 100 * MIB), 40 + int(descriptors * p))
            for p in parts
        ]
    )


@pytest.mark.parametrize(
    ("series", "watched_s"),
    [
        (flat(80, 170.0), 180.0),
        (flat(9, 175.0), 180.0),  # busy daemons answer late
        (flat(3000, 7100.0), 7200.0),
        (flat(8, 20.0), 30.0),  # too short for a judgement
        (flat(0, 0.0), 30.0),
        (flat(80, 170.0, grows=0.05), 180.0),
    ],
    ids=["short", "few", "long", "a moment", "nothing yet", "settles"],
)
def test_flat_memory_is_well(series: Flatness, watched_s: float) -> None:
    assert not series.problem(watched_s)


@pytest.mark.parametrize(
    ("series", "watched_s", "problem"),
    [
        (flat(0, 0.0), 180.0, "0 times"),
        (flat(8, 170.0), 180.0, "8 times"),
        (flat(9, 7000.0), 7200.0, "9 times"),
        (flat(3000, 3000.0), 7200.0, "within 3000 s"),
        (flat(80, 170.0, grows=0.4), 180.0, "memory grew"),
        (flat(20, 20.0, grows=0.4), 30.0, "memory grew"),
        (flat(80, 170.0, descriptors=40), 180.0, "descriptors grew"),
    ],
    ids=["none", "too few", "few for hours", "half of it", "leak", "soon", "descriptors"],
)
def test_memory_that_grows_or_was_not_seen_fails(
    series: Flatness, watched_s: float, problem: str
) -> None:
    assert problem in series.problem(watched_s)


def taken_once(count: int, over_s: float, grows: float) -> Flatness:
    """Return a series that has grown by this part when a third of it is over, and stays so."""
    series = flat(count, over_s)
    for sample in series.samples[count // 3 + 1 :]:
        sample.rss_bytes = int((1 + grows) * sample.rss_bytes)
    return series


@pytest.mark.parametrize("grows", [0.17, 0.4])
def test_what_a_daemon_takes_once_is_no_leak_in_a_short_soak(grows: float) -> None:
    assert not taken_once(80, 170.0, grows).problem(180.0)
    assert "memory grew" in taken_once(900, 1700.0, grows).problem(1800.0), "it has had its time"
    assert "memory grew" in flat(80, 170.0, grows=1.5 * grows).problem(180.0), "it goes on"


def test_what_others_had_from_the_first_is_no_leak_in_a_short_soak() -> None:
    late = flat(80, 170.0, grows=0.3)
    others = [flat(80, 170.0), flat(8, 16.0)]
    for other in others:
        for sample in other.samples:
            sample.rss_bytes = 115 * MIB
    assert "memory grew" in late.problem(180.0)
    assert not late.problem(180.0, [late, *others])
    assert "memory grew" in late.problem(180.0, [late, others[1]]), "that one was there too shortly"
    assert "memory grew" in flat(80, 170.0, grows=0.4).problem(180.0, [late, *others])
    whole = flat(900, 1700.0, grows=0.3)
    assert "memory grew" in whole.problem(1800.0, [whole, *others]), "it has had its time"
    together = [flat(80, 170.0, grows=0.3) for _ in range(3)]
    assert "memory grew" in together[0].problem(180.0, together), "all of them grow"


def test_homes_that_grow_fail() -> None:
    flat_homes = Homes([100 * MIB, 140 * MIB, 90 * MIB] * 4, [50, 70, 60] * 4)
    assert not flat_homes.problem
    assert "homes grew" in Homes([(100 + 20 * n) * MIB for n in range(12)], [50] * 12).problem
    assert "files" in Homes([100 * MIB] * 12, [50 + 20 * n for n in range(12)]).problem


# ---------------------------------------------------------------- stalls


def pairs(*names: str) -> set[frozenset[str]]:
    return {frozenset(pair) for pair in names}


def test_a_majority_is_linked_to_somebody() -> None:
    assert has_majority("abcde", "abc", set())
    assert not has_majority("abcde", "ab", set())
    assert not has_majority("abcd", "ab", set()), "a half may be one, and is not waited for"
    assert has_majority("abcde", "abcde", pairs("ac", "ad", "bc", "bd")), "e is a bridge"
    split = pairs("ac", "ad", "ae", "bc", "bd", "be")
    assert has_majority("abcde", "abcde", split), "c, d and e"
    assert not has_majority("abcde", "abcd", split)
    assert not has_majority("abcde", "fgh", set()), "they are no members"


def stalled(until_s: int, *, unfit: range = range(0), starved: range = range(0)) -> Stalls:
    """Nothing commits until then."""
    stalls = Stalls(0.0)
    for now_s in range(1, until_s + 1):
        fit, busy = now_s not in unfit, now_s in starved
        stalls.look(float(now_s), [], ["kill"], is_fit=fit, is_starved=busy)
    return stalls


def test_a_stall_is_a_miss_where_nothing_explains_it() -> None:
    assert not stalled(int(LIMIT_S)).misses
    assert [stall.length_s for stall in stalled(12).misses] == [12.0]
    assert not stalled(18, unfit=range(5, 10)).misses, "it begins anew at 9 s"
    assert stalled(20, unfit=range(5, 10)).misses
    assert stalled(20, unfit=range(5, 10)).excused_s == 5.0
    assert not stalled(int(STARVED_LIMIT_S), starved=range(3)).misses
    assert stalled(int(STARVED_LIMIT_S) + 1, starved=range(3)).misses
    assert stalled(12).longest_s == {"kill": 12.0}


def test_a_commit_ends_a_stall_and_a_long_one_is_told() -> None:
    stalls = stalled(12)
    told = stalls.look(20.0, [12.4, 12.9, 17.0, 19.9], [], is_fit=True, is_starved=False)
    assert [round(stall.length_s, 3) for stall in told] == [12.4, 4.1]
    assert told[0].faults == ["kill"]
    assert told == stalls.noted
    assert stalls.misses == told[:1]
    assert stalls.look(21.0, [20.5], [], is_fit=True, is_starved=False) == []
