"""What the soak relies on: a daemon that is not watched any more is a failure, and so is a fork."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from harness import soak_watch
from harness.processes import Fleet, until
from harness.soak_watch import Watch

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
    watched = Watch(cast(Fleet, SimpleNamespace(peers=peers)), "a", "a")  # type: ignore[arg-type]
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
