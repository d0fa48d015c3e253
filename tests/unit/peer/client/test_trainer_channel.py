"""How long a trainer waits that is to leave, without a daemon."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.collectives.errors import AtollError, RoundTimeoutError
from atoll.peer.client import trainer_channel
from atoll.peer.client.trainer_channel import ANSWER_S, AskedVector, TrainerChannel

USUAL_S = 600.0


class Clock:
    """A daemon that lets time pass, and never says what became of a round."""

    events: list[tuple[str, dict[str, Any]]]

    def __init__(self) -> None:
        self.now_s, self.events, self.patience_s = 100.0, [], list[float]()

    def monotonic(self) -> float:
        return self.now_s

    def receive(self, timeout_s: float, _lifeline: object) -> None:
        self.now_s += max(0.001, timeout_s)

    def ask(self, command: str, arguments: dict[str, Any], _: object, patience_s: float) -> Any:
        self.patience_s.append(patience_s)
        if command == "look_for_vector":
            self.now_s += arguments["timeout_s"]
            return "asked"
        return {"code": "E31", "text": "round 7 waits"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    fake = SimpleNamespace(monotonic=clock.monotonic, sleep=time.sleep)
    monkeypatch.setattr(trainer_channel, "time", fake)
    return clock


@pytest.fixture
def channel(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> TrainerChannel:
    channel = TrainerChannel.__new__(TrainerChannel)
    monkeypatch.setattr(channel, "_check_process", lambda: None)
    channel.deadline_s, channel._reconnect_s, channel._hurries_until_s = USUAL_S, 60.0, math.inf
    channel._figures, channel._lifeline, channel.connection = {}, Any, 0
    channel._client = clock  # type: ignore[assignment]
    return channel


def test_who_hurries_waits_no_longer_in_all_and_as_before_when_that_is_over(
    clock: Clock, channel: TrainerChannel
) -> None:
    with channel.hurry(30.0):
        assert channel.limited(USUAL_S) == 30.0
        with channel.hurry(40.0):
            assert channel.limited(USUAL_S) == 30.0
        clock.now_s += 20.0
        assert channel.limited(USUAL_S) == 10.0
        assert channel.limited(0.0) == 0.0  # it waits for no daemon at all
        clock.now_s += 20.0
        assert channel.limited(USUAL_S) == 0.0
    assert channel.limited(USUAL_S) == USUAL_S


def test_several_waits_of_who_hurries_are_over_together(
    clock: Clock, channel: TrainerChannel
) -> None:
    """For rounds and for vectors; what a daemon answers at once is still heard when time is up."""
    began_s, found = clock.now_s, list[float]()

    def fails(error: type[AtollError], act: Any) -> None:
        with pytest.raises(error):
            act()
        found.append(clock.now_s - began_s)

    with channel.hurry(20.0):
        clock.now_s += 12.0  # for a round that was over
        fails(RoundTimeoutError, lambda: channel._outcome(1))
        fails(RoundTimeoutError, lambda: channel._outcome(2))
        fails(RoundTimeoutError, lambda: AskedVector(channel, "it", 1, 4).wait(60.0))
    assert found == pytest.approx([20.0] * 3, abs=1.1)
    assert min(clock.patience_s) == ANSWER_S
    fails(RoundTimeoutError, lambda: channel._outcome(3))
    assert found[-1] - found[-2] == pytest.approx(USUAL_S, abs=1.1)
