"""Local steps by a peer's own speed (DyLU, arXiv 2401.09135), under clocks of the tests' own."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.optim import QSR, AsyncDiLoCo, DiLoCo, LocalSGD, NoLoCo, SparseLoCo, Swarm
from atoll.optim.experimental import CO2
from atoll.optim.local_steps import StepsBySpeed
from atoll.optim.swarm import SwarmSession


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def rounds(seconds: Sequence[float], round_s: float, sync_every: int = 10) -> list[int]:
    """How many steps rounds have, the first of which begins before ``seconds[0]`` a step."""
    clock = Clock()
    by_speed = StepsBySpeed(round_s, sync_every, clock)
    found = []
    for step_s in seconds:
        steps = by_speed.next_sync_every(by_speed.step_s)
        by_speed.begin()
        for _ in range(steps):
            clock.now_s += step_s
            by_speed.step()
        by_speed.end()
        found.append(steps)
    return found


@pytest.mark.parametrize(
    ("step_s", "steps"), [(0.5, 40), (0.3, 66), (19.0, 1), (21.0, 1), (0.01, 100), (2.0, 10)]
)
def test_as_many_steps_as_fit_but_one_at_least_and_ten_times_as_many_at_most(
    step_s: float, steps: int
) -> None:
    assert rounds([step_s] * 4, 20.0) == [10, steps, steps, steps]


@pytest.mark.parametrize("speeds", [[4.0, 2.0, 1.0], [3.0, 2.9, 0.1]])
def test_it_is_dylu_where_the_fastest_takes_sync_every_steps(speeds: list[float]) -> None:
    """``floor(v_w / max v * H)``, up to what is too small a change; and one at least."""
    h = 64
    for speed in speeds:
        *_, steps = rounds([1 / speed] * 3, h / max(speeds) * (1 + 1e-9), h)
        wanted = max(1, math.floor(speed / max(speeds) * h + 1e-6))
        assert steps == (wanted if h - wanted > h / 10 else h)


def test_small_changes_are_noise_and_large_ones_are_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a step that takes 1 s, then a little more or less, and then twice as long."""
    found = rounds([1.0, 1.05, 0.95, 1.08, 0.93] + [2.0] * 7, 30.0)
    assert found == [10, 30, 30, 30, 30, 30, 30, 30, 15, 15, 15, 15]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "rounds have 30 local steps here from now on, after 10: a step takes 1 s" in said[0]
    assert "rounds have 15 local steps here from now on, after 30: a step takes 2 s" in said[1]


def test_one_round_with_a_pause_in_it_changes_nothing() -> None:
    assert rounds([1.0, 1.0, 1.0, 50.0, 1.0, 1.0], 10.0) == [10] * 6


def test_a_first_step_that_compiles_is_left_out() -> None:
    clock = Clock()
    by_speed = StepsBySpeed(20.0, 3, clock)
    assert by_speed.step_s == 0.0
    for step_s in (600.0, 2.0, 2.0):
        clock.now_s += step_s
        by_speed.step()
    by_speed.end()
    assert by_speed.step_s == 2.0
    assert by_speed.next_sync_every(by_speed.step_s) == 10


def test_rounds_of_one_step_are_measured_from_the_second_on() -> None:
    assert rounds([7.0, 0.5, 0.5], 1.0, sync_every=1) == [1, 1, 2]


def test_a_clock_that_stands_still_decides_nothing() -> None:
    assert rounds([0.0] * 3, 20.0) == [10] * 3


@pytest.mark.parametrize("round_s", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_are_refused(round_s: float) -> None:
    with pytest.raises(ConfigError, match="round_s"):
        StepsBySpeed(round_s, 10, Clock())


# ---------------------------------------------------------------- in the methods


def linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def step(model: nn.Module, inner: torch.optim.Optimizer) -> None:
    inner.zero_grad()
    model(torch.ones(4, 3)).square().mean().backward()
    inner.step()


def test_what_is_decided_when_a_round_begins_stays_until_its_end(local_run: Any) -> None:
    """The time that a trainer waits for its round is no time of steps."""
    run, clock = local_run(), Clock()
    model, inner = linear()
    session, wait = run.sessions[0], run.sessions[0].wait

    def waits_long(fragment: int = 0) -> Any:
        clock.now_s += 1000.0
        return wait(fragment)

    session.wait = waits_long
    ends = []
    with DiLoCo(model, inner, 4, session, round_s=8.0, clock=clock) as outer:
        for taken in range(1, 41):
            clock.now_s += 1.0 if taken <= 14 else 4.0  # it slows down in the middle of a round
            before = run.round
            step(model, inner)
            if run.round > before:
                ends.append(taken)
        assert outer.metrics()["rounds"] == len(ends)
    # Rounds of 1 s, 1 s and 2.5 s a step have a median of 1; then of 2.5, and of 4 after that.
    assert ends[:3] == [4, 12, 20]
    lengths = [later - earlier for earlier, later in itertools.pairwise(ends)]
    assert lengths[:2] == [8, 8]
    assert lengths[-1] == 2
    weights = [counted[0] for counted in run.weights]
    assert weights == [4, *lengths]  # its steps, if nothing else is counted


def test_peers_of_different_speed_come_together() -> None:
    """In the first round each has ``sync_every`` steps; from then on all rounds take two seconds,
    so the fast one waits for nobody and the slow one's work is not older than the others'."""
    swarm = Swarm(3, [4.0, 2.0, 1.0])
    met: list[list[float]] = [[], [], []]

    def train(session: Any) -> None:
        model, inner = linear()
        options = {"outer_delay": 3, "round_s": 2.0, "clock": session.clock, "codec": "float32"}
        with AsyncDiLoCo(model, inner, 8, session, **options) as outer:
            while session.clock() < 20:
                before = outer.metrics()["rounds"]
                step(model, inner)
                if outer.metrics()["rounds"] > before:
                    met[session.number].append(session.clock())

    swarm.run(train)
    assert met == [
        [2.0 * n for n in range(1, 11)],
        [2.0 * n for n in range(2, 11)],
        [2.0 * n for n in range(4, 11)],
    ]
    assert swarm.state.round == 1 + 10


@pytest.mark.parametrize("method", [DiLoCo, LocalSGD, SparseLoCo])
def test_every_blocking_method_takes_it(method: Any) -> None:
    def train(session: Any) -> list[int]:
        model, inner = linear()
        ends = []
        with method(model, inner, 4, session, round_s=6.0, clock=session.clock) as outer:
            for taken in range(1, 4 + 5 * (3 if session.number else 6)):
                before = outer.metrics()["rounds"]
                step(model, inner)
                if outer.metrics()["rounds"] > before:
                    ends.append(taken)
        return ends

    fast, slow = Swarm(2, [1.0, 0.5]).run(train)
    assert fast == [4, 10, 16, 22, 28]
    assert slow == [4, 7, 10, 13, 16]


@pytest.mark.parametrize("method", [CO2, NoLoCo])
def test_methods_that_do_not_wait_for_all_take_it_too(method: Any) -> None:
    """Of two trainers one is twice as fast; the first round has ``sync_every`` of both."""

    def train(session: Any) -> list[int]:
        model, inner = linear()
        ends, clock = [], Clock()
        with method(model, inner, 4, session, round_s=6.0, clock=clock) as outer:
            session.barrier()
            begun = rounds_of(outer)
            for taken in range(1, 4 + 5 * (3 if session.number else 6)):
                clock.now_s += 2.0 if session.number else 1.0
                step(model, inner)
                if rounds_of(outer) > begun:
                    begun = rounds_of(outer)
                    ends.append(taken)
        return ends

    def rounds_of(outer: Any) -> int:
        return outer._number if isinstance(outer, NoLoCo) else outer.peer.sent

    class Sends(SwarmSession):
        sent = 0

        def submit(self, *arguments: Any) -> None:
            self.sent += 1
            super().submit(*arguments)

    swarm = Swarm(2)
    swarm.sessions = [Sends(swarm, number) for number in range(2)]
    fast, slow = swarm.run(train)
    assert fast == [4, 10, 16, 22, 28]
    assert slow == [4, 7, 10, 13, 16]


@pytest.mark.parametrize("method", [DiLoCo, CO2, NoLoCo])
def test_who_comes_back_knows_its_speed(method: Any) -> None:
    """Where the run is as it was, and where it has gone on meanwhile."""

    def lengths(outer: Any, model: nn.Module, inner: Any, clock: Clock, steps: int) -> list[int]:
        found = []
        for _ in range(steps):
            clock.now_s += 2.0
            step(model, inner)
            found.append(outer._local.wanted)
        return found

    def train(session: Any, later: int) -> list[int]:
        model, inner = linear()
        clock = Clock()
        outer = method(model, inner, 4, session, round_s=24.0, clock=clock)
        assert lengths(outer, model, inner, clock, 6) == [4, 4, 4, 12, 12, 12]
        saved = [x.state_dict() for x in (model, inner, outer)]
        saved = [copy.deepcopy(state) for state in saved]
        lengths(outer, model, inner, clock, later)
        outer.close()
        model, inner = linear()
        clock = Clock()
        outer = method(model, inner, 4, session, round_s=24.0, clock=clock)
        for thing, state in zip((model, inner, outer), saved, strict=True):
            thing.load_state_dict(state)
        clock.now_s += 100.0
        # What has passed before its first step is no time of steps.
        return lengths(outer, model, inner, clock, 24)

    for later in (0, 20):
        assert Swarm(1).run(lambda session, later=later: train(session, later)) == [[12] * 24]


def test_a_schedule_of_steps_decides_alone() -> None:
    def train(session: Any) -> None:
        LocalSGD(*linear(), QSR(a=0.1, peak_lr=0.1), session, round_s=1.0)

    with pytest.raises(ConfigError, match="both decide"):
        Swarm(1).run(train)
