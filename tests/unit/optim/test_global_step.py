"""The steps of a run, and learning rates that follow them: whoever comes late, or misses rounds, is
where the others are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.troubled_swarm import TroubledSession, TroubledSwarm
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from atoll.optim import (
    QSR,
    AsyncDiLoCo,
    DeMo,
    DiLoCo,
    GradientAverage,
    LocalSGD,
    NoLoCo,
    SparseLoCo,
    StreamingDiLoCo,
    Swarm,
)
from atoll.optim.experimental import CO2
from atoll.optim.run_clock import RunClock
from atoll.optim.swarm import SwarmSession

H, STEPS = 4, 60
PEAK = 0.1
RULE = QSR(a=0.16, peak_lr=PEAK, base=2, warmup_steps=6, most=9)


def schedule(inner: torch.optim.Optimizer) -> LRScheduler:
    parts = [LinearLR(inner, 0.1, 1.0, 6), CosineAnnealingLR(inner, STEPS, 0.02)]
    return SequentialLR(inner, parts, [6])


def expected() -> list[float]:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=PEAK)
    scheduler, rates = schedule(inner), []
    for _ in range(3 * STEPS):
        rates.append(inner.param_groups[0]["lr"])
        inner.step()
        scheduler.step()
    return rates


Make = Callable[[nn.Module, torch.optim.Optimizer, Any], Any]
LOCAL: dict[str, Make] = {
    "diloco": lambda m, i, s: DiLoCo(m, i, H, s),
    "warm": lambda m, i, s: DiLoCo(m, i, H, s, warm_start=15, warm_every=1),
    "local sgd": lambda m, i, s: LocalSGD(m, i, H, s),
    "qsr": lambda m, i, s: LocalSGD(m, i, RULE, s, codec="float32"),
    "sparse": lambda m, i, s: SparseLoCo(m, i, H, s),
    "streaming": lambda m, i, s: StreamingDiLoCo(m, i, H, s, blocks_per_fragment=1, delay=1),
    "eager": lambda m, i, s: StreamingDiLoCo(m, i, H, s, blocks_per_fragment=1, eager=True),
    "co2": lambda m, i, s: CO2(m, i, H, s),
}
OTHERS: dict[str, Make] = {
    "noloco": lambda m, i, s: NoLoCo(m, i, H, s),
    "gradients": lambda m, i, s: GradientAverage(m, i, s),
}


class Seen:
    """Of one worker: the rate of each step of the run, and at which step a round left it."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}
        self.steps: dict[int, int] = {}


def train(session: Any, make: Make, calls: int = 0) -> Seen:
    """``calls``: after each so many rounds the trainers call a collective of their own."""
    model = nn.Sequential(nn.Linear(40, 120), nn.Tanh(), nn.Linear(120, 4))
    inner = torch.optim.SGD(model.parameters(), lr=PEAK)
    scheduler = schedule(inner)
    outer = make(model, inner, session)
    outer.follow(scheduler)
    seen, rounds = Seen(), 0
    while outer.global_step < STEPS:
        model(torch.randn(4, 40)).square().mean().backward()
        inner.step()
        scheduler.step()
        done = outer.metrics().get("rounds", outer.global_step)
        if done != rounds:
            rounds = int(done)
            seen.steps[session.round] = outer.global_step
            if calls and outer._clock.rounds % calls == 0:
                session.barrier()
        seen.rates[outer.global_step] = scheduler.get_last_lr()[0]
        inner.zero_grad()
    return seen


def check(found: list[Seen], first: int = 0) -> None:
    rates, at = expected(), defaultdict(set)
    for seen in found:
        assert seen.rates
        for step, rate in seen.rates.items():
            assert rate == rates[step]
        for number, step in seen.steps.items():
            if number > first:
                at[number].add(step)
    assert all(len(steps) == 1 for steps in at.values()), at
    assert len(at) > 3


@pytest.mark.parametrize("name", LOCAL)
def test_who_comes_late_is_where_the_others_are(name: str) -> None:
    swarm = TroubledSwarm(3)

    def each(session: TroubledSession) -> Seen:
        if session.number == 2:
            session.away(until=5)
        return train(session, LOCAL[name])

    found = swarm.run(each)
    # CO2's first round of a newcomer is under way when others already wait for theirs; here they
    # wait for it, and so it is a round behind them for once.
    check(found, first=6 if name == "co2" else 0)
    assert min(found[0].rates) == 1
    assert min(found[2].rates) > 4


@pytest.mark.parametrize("name", ["diloco", "qsr", "co2"])
def test_who_misses_rounds_is_too(name: str) -> None:
    swarm = TroubledSwarm(3, missed={(1, 3), (1, 4), (2, 6)})
    found = swarm.run(lambda session: train(session, LOCAL[name]))
    check(found)


@pytest.mark.parametrize("name", ["diloco", "qsr"])
def test_collectives_of_the_trainers_are_no_steps(name: str) -> None:
    swarm = TroubledSwarm(3)

    def each(session: TroubledSession) -> Seen:
        if session.number == 2:
            session.away(until=8)  # rounds 4 and 7 are theirs
        return train(session, LOCAL[name], calls=2)

    check(swarm.run(each))
    assert swarm.round > swarm.state.round + 3


@pytest.mark.parametrize("name", OTHERS)
def test_of_methods_without_rounds_of_the_run(name: str) -> None:
    swarm = TroubledSwarm(3) if name == "gradients" else Swarm(3)

    def each(session: SwarmSession) -> Seen:
        if isinstance(session, TroubledSession) and session.number == 2:
            session.away(until=12)
        if name == "noloco" and session.number == 2:
            for _ in range(3):  # which all but this one make meanwhile
                session.newest("worker-0", "phi")
        return train(session, OTHERS[name])

    found = swarm.run(each)
    rates = expected()
    for seen in found:
        assert all(rate == rates[step] for step, rate in seen.rates.items())
    assert min(found[2].rates) > (3 if name == "gradients" else 0)


def test_demo_is_its_own_optimizer() -> None:
    def each(session: TroubledSession) -> dict[int, float]:
        if session.number == 2:
            session.away(until=12)
        model = nn.Linear(40, 30)
        outer = DeMo(model, session, lr=PEAK)
        scheduler, rates = schedule(outer), {}
        outer.follow(scheduler)
        while outer.steps < 20:
            model(torch.randn(4, 40)).square().mean().backward()
            outer.step()
            rates[outer.steps - 1] = outer.param_groups[0]["lr"]
            scheduler.step()
            outer.zero_grad()
        return rates

    rates = expected()
    found = TroubledSwarm(3).run(each)
    for seen in found:
        assert all(rate == rates[step] for step, rate in seen.items())
    assert min(found[2]) > 2


def test_where_peers_come_in_turn_the_run_advances_as_each_of_them() -> None:
    """Four rounds of one peer each are one round of all; and a joiner is told so."""
    peers, last, rates = 4, 48, expected()
    swarm = Swarm(peers)

    def each(session: SwarmSession) -> list[int]:
        session._local_steps = session.number  # so nobody comes together with another one
        model = nn.Linear(40, 4)
        inner = torch.optim.SGD(model.parameters(), lr=PEAK)
        scheduler = schedule(inner)
        outer = AsyncDiLoCo(model, inner, H, session, outer_delay=peers)
        outer.follow(scheduler)
        behind = []
        for taken in range(1, last + 1):
            model(torch.randn(4, 40)).square().mean().backward()
            inner.step()
            scheduler.step()
            assert scheduler.get_last_lr()[0] == rates[outer.global_step]
            behind.append(taken - outer.global_step)
            if session.number == 1 and taken == 5 * H:
                outer.close()
                there = session._local_steps
                session = swarm.sessions[1] = SwarmSession(swarm, 1)
                session._local_steps = there
                was = outer.global_step
                inner = torch.optim.SGD((model := nn.Linear(40, 4)).parameters(), lr=PEAK)
                scheduler = schedule(inner)
                outer = AsyncDiLoCo(model, inner, H, session, outer_delay=peers)
                outer.follow(scheduler)
                assert outer.global_step == was
                assert scheduler.get_last_lr()[0] == rates[was]
        return behind

    for behind in swarm.run(each):
        assert min(behind) >= 0
        assert max(behind) < H
    assert swarm.state.round == 1 + peers * last // H


def test_without_anybody_who_knows_every_round_counts() -> None:
    """As for the first trainer of a run that was resumed; its own saved counts are better."""
    swarm = Swarm(1)
    (session,) = swarm.sessions

    def first(session: SwarmSession) -> tuple[int, int, int]:
        inner = torch.optim.SGD((model := nn.Linear(2, 1)).parameters(), lr=0.1)
        outer = DiLoCo(model, inner, H, session)
        for _ in range(3 * H):
            session.barrier()
            inner.step()
        assert outer.global_step == 3 * H
        assert outer._clock.number == session.round == 1 + 3 * H + 3
        return outer._clock.number, outer._clock.rounds, outer._clock.steps

    counted = swarm.run(first)[0]
    assert counted[1:] == (3, 3 * H)

    def second(session: SwarmSession) -> None:
        clock = RunClock(session, swarm.state.spec)
        clock.find()
        assert clock.is_estimate
        assert clock.steps == (session.round - 1) * H
        clock.correct(*counted)
        assert (clock.rounds, clock.steps) == (3, 3 * H)
        clock.correct(2, 1, H)  # what is certain is not corrected
        assert clock.steps == 3 * H

    swarm.run(second)
    assert session.round == counted[0]
