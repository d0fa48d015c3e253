"""Population based training in a swarm: exploit, explore, and nothing in between."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness.losing import Losing
from harness.members import Trainer, same

from atoll.collectives.errors import ConfigError
from atoll.optim import Population, Swarm
from atoll.optim.swarm import SwarmSession


def test_the_worst_goes_on_from_the_best():
    """Weights, moments, step count and learning rate; the others are left alone."""

    def each(session: SwarmSession) -> tuple[dict[str, torch.Tensor], Trainer]:
        trainer = Trainer(session, 0.1 * (1 + session.number), interval=4)
        trainer.step(3)
        before = trainer.state()
        trainer.step()
        if session.number != 2:
            alone = Trainer(Swarm(3).sessions[session.number], trainer.lr, interval=10**6)
            alone.step(4)
            assert same(trainer.state(), alone.state())
        assert not same(before, trainer.state())
        assert trainer.weight.grad is not None
        if session.number == 2:
            assert not trainer.weight.grad.any()
        return trainer.state(), trainer

    found = Swarm(3).run(each)
    (best, first), (middle, second), (worst, third) = found
    assert same(best, worst)
    assert not same(best, middle)
    assert (first.lr, second.lr) == (0.1, 0.2)
    assert third.lr in (pytest.approx(0.08), pytest.approx(0.12))
    copied = [trainer.member.metrics()["copied"] for _, trainer in found]
    assert copied == [0, 0, 1]
    assert third.member.metrics() == {
        "steps": 4,
        "turn": 1,
        "copied": 1,
        "missed": 0,
        "score": 2.0,
        "peers": 3,
        "rounds_alone": 0,
    }


def test_a_population_finds_a_learning_rate():
    """Ten members from 0.0001 to 1: the quadratic wants something in between."""
    rates = [10 ** (-4 + 4 * number / 9) for number in range(10)]

    def each(session: SwarmSession) -> float:
        trainer = Trainer(session, rates[session.number], interval=5, bounds={"lr": (1e-5, 1.0)})
        with torch.no_grad():
            trainer.weight.fill_(-20.0)
        for _ in range(12):
            trainer.score = float("nan")
            trainer.step(4)
            trainer.score = float((trainer.weight.detach() - 3).square().sum())
            trainer.step()
        return float((trainer.weight.detach() - 3).square().sum())

    found = sorted(Swarm(10).run(each))

    def alone(session: SwarmSession) -> float:
        trainer = Trainer(session, rates[session.number], interval=10**6, bounds={"lr": (1e-5, 1)})
        with torch.no_grad():
            trainer.weight.fill_(-20.0)
        trainer.step(60)
        return float((trainer.weight.detach() - 3).square().sum())

    apart = sorted(Swarm(10).run(alone))
    assert max(found) < 0.05 * apart[5]  # the median of those who keep the rate they began with


def test_runs_are_repeated_bit_for_bit():
    def each(session: SwarmSession) -> tuple[list[float], float]:
        trainer = Trainer(session, 0.1 * (1 + session.number), interval=2)
        for _ in range(6):
            trainer.score = float((trainer.weight.detach() - 3).square().sum())
            trainer.step(2)
        return trainer.weight.detach().flatten().tolist(), trainer.lr

    assert Swarm(4).run(each) == Swarm(4).run(each)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_small_populations_do_something_sensible(workers):
    def each(session: SwarmSession) -> float:
        trainer = Trainer(session)
        trainer.step(2)
        return trainer.member.metrics()["copied"]

    # at every turn the last one copies the first, whatever it has become
    assert Swarm(workers).run(each) == [0] * (workers - 1) + [2 if workers > 1 else 0]


def test_equals_leave_each_other_alone_and_nothing_is_sent():
    swarm = Swarm(3)

    def each(session: SwarmSession) -> None:
        trainer = Trainer(session)
        trainer.score = 1.0
        trainer.step(5)
        assert trainer.member.metrics()["copied"] == 0
        assert trainer.member.metrics()["turn"] == 5

    swarm.run(each)
    assert swarm.encoded_bytes < 5 * 6 * 250


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, torch.tensor(math.nan)])
def test_a_score_that_is_no_number_is_worst(wrong):
    def each(session: SwarmSession) -> float:
        trainer = Trainer(session)
        trainer.score = wrong if session.number == 0 else 1e30 * session.number
        trainer.step()
        return trainer.member.metrics()["copied"]

    assert Swarm(3).run(each) == [1, 0, 0]


def test_a_score_may_be_a_tensor_with_a_gradient():
    def each(session: SwarmSession) -> float:
        trainer = Trainer(session)
        trainer.score = (trainer.weight * session.number).sum()
        trainer.step()
        return trainer.member.metrics()["copied"]

    assert Swarm(2).run(each) == [0, 1]


def test_weights_that_are_not_finite_are_worst():
    def each(session: SwarmSession) -> bool:
        trainer = Trainer(session)
        trainer.step()
        if session.number == 0:  # with the best score
            with torch.no_grad():
                trainer.weight[0, 0] = math.nan
            trainer.inner.state.clear()
        trainer.step()
        return bool(trainer.weight.isfinite().all())

    assert Swarm(3).run(each) == [True] * 3


def test_nobody_copies_moments_that_are_not_finite(capsys):
    def each(session: SwarmSession) -> float:
        trainer = Trainer(session, interval=2)
        trainer.step()
        if session.number == 0:
            trainer.inner.state[trainer.weight]["exp_avg_sq"].fill_(math.inf)
        trainer.step()
        return trainer.member.metrics()["copied"]

    assert Swarm(3).run(each) == [0] * 3
    assert "not finite at step 2; nobody copies it" in capsys.readouterr().err


def test_a_state_that_cannot_be_handed_over_is_refused_before_others_ask_for_it():
    calls = []

    def each(session: SwarmSession) -> None:
        net = torch.nn.Linear(2, 1)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        state = {"quantized": torch.zeros(4, dtype=torch.uint8)}
        inner.register_step_post_hook(lambda *_: inner.state.update({net.weight: state}))
        real = session.all_gather
        session.all_gather = lambda data: calls.append(data) or real(data)  # type: ignore[method-assign]
        Population(net, inner, session, lambda: 1.0, 2, {"lr": (0.0, 1.0)})
        for _ in range(2):
            net(torch.ones(1, 2)).sum().backward()
            inner.step()

    with pytest.raises(ConfigError, match="keeps 'quantized', a uint8 tensor"):
        Swarm(1).run(each)
    assert not calls


# ---------------------------------------------------------------- members come and go


@pytest.mark.parametrize(("start", "copied"), [("own", 0), ("best", 1)])
def test_a_joiner_begins_as_it_wants_to(start, copied):
    def each(session: SwarmSession) -> tuple[dict[str, torch.Tensor], float]:
        trainer = Trainer(session, interval=2)
        trainer.step(4)
        if session.number == 1:  # in the middle: neither best nor worst
            trainer = Trainer(session, interval=2, start=start)
        trainer.score = [1.0, 2.0, 3.0][session.number]
        trainer.step(2)
        state, before = trainer.state(), trainer.member.metrics()["copied"]
        assert trainer.member.metrics()["turn"] == 3
        trainer.step(2)
        assert trainer.member.metrics()["copied"] == before + (session.number == 2)
        return state, before

    (best, _), (joined, count), _ = Swarm(3).run(each)
    assert count == copied
    assert same(best, joined) == (start == "best")


def test_a_run_in_which_all_want_the_best_begins_with_their_own():
    def each(session: SwarmSession) -> float:
        trainer = Trainer(session, start="best")
        trainer.step(2)
        return trainer.member.metrics()["copied"]

    assert Swarm(2).run(each) == [0, 0]


def test_who_leaves_is_not_waited_for():
    def each(session: SwarmSession) -> float:
        trainer = Trainer(session)
        trainer.step(5 if session.number else 2)
        return trainer.member.metrics()["copied"]

    assert Swarm(3).run(each) == [0, 0, 5]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_who_misses_a_turn_trains_on(lost):
    """Worker 1 loses the scores, the description or the weights of the first turn."""

    def each(session: SwarmSession) -> tuple[float, float]:
        lossy: Any = Losing(session, {lost} if session.number == 1 else ())
        trainer = Trainer(lossy, interval=3)
        trainer.step(3)
        if lost == 0 and session.number == 1:  # the others are still at it
            session.all_gather(b"q\x000000")
            session.all_reduce(torch.zeros(19), "sum")
        if lost == 1 and session.number == 1:
            session.all_reduce(torch.zeros(19), "sum")
        trainer.step(3)
        metrics = trainer.member.metrics()
        return metrics["copied"], metrics["missed"]

    assert Swarm(3).run(each) == [(0, 0), (0, 1), (2, 0)]
