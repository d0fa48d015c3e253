"""Newcomers, rounds that went on without somebody, and trainers that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from harness.gradients import flat, loss_of, model, state_of
from harness.troubled_swarm import TroubledSession, TroubledSwarm
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import (
    ConfigError,
    IncompatibleRunError,
    StateError,
)
from atoll.optim import (
    DGC,
    QSDP,
    DeMo,
    ErrorFeedback,
    GradientAverage,
    LayerBits,
    LGreCo,
    PowerSGD,
    Swarm,
    TernGrad,
    ZerothOrder,
)
from atoll.optim.compressors import Compressor
from atoll.optim.experimental import EF21, EControl

MAKERS: dict[str, Callable[[], Compressor | None]] = {
    "none": lambda: None,
    "power_sgd": lambda: PowerSGD(rank=1, start=3),
    "ranks": lambda: PowerSGD(rank=2, start=2, choice=LGreCo(every=4)),
    "bits": lambda: LayerBits(choice=LGreCo(every=4)),
    "dgc": lambda: DGC(density=0.05, momentum=0.5, warm_up=2),
    "terngrad": TernGrad,
    "qsdp": lambda: QSDP(bits=4),
    "ef21": EF21,
    "econtrol": EControl,
    "error_feedback": ErrorFeedback,
}
each = pytest.mark.parametrize("name", MAKERS)
Found = tuple[torch.Tensor, torch.Tensor, float]


def train(
    session: Any,
    name: str,
    until: int,
    changed: Callable[[int, torch.nn.Module], None] = lambda step, net: None,
    **options: Any,
) -> Found:
    """Parameters, inner state and rounds missed, after step ``until`` of the run."""
    net = model(seed=session.number)  # all but the first take over another's parameters
    momentum = 0.0 if name == "dgc" else 0.9  # which has its own
    inner = torch.optim.AdamW(net.parameters(), lr=0.01, betas=(momentum, 0.999))
    with GradientAverage(net, inner, session, compressor=MAKERS[name](), **options) as outer:
        while outer.steps < until:
            inner.zero_grad()
            loss_of(net, session.number, outer.steps).backward()
            changed(outer.steps, net)
            inner.step()
        return flat(net), state_of(inner), outer.metrics()["missed"]


def all_equal(found: Sequence[Found]) -> bool:
    return all(torch.equal(found[0][k], other[k]) for other in found for k in (0, 1))


# ---------------------------------------------------------------- coming late


@each
def test_who_comes_late_has_what_the_others_have(name: str) -> None:
    swarm = TroubledSwarm(3)

    def work(session: TroubledSession) -> Found:
        if session.number == 2:
            session.away(until=25)
        return train(session, name, 20)

    found = swarm.run(work)
    assert all_equal(found)
    assert all(found[n][2] == 0 for n in range(2))


@each
def test_who_dies_and_comes_back_does_too(name: str) -> None:
    """The first worker, whose calls are those of most where two differ."""
    swarm = TroubledSwarm(2)

    def work(session: TroubledSession) -> Found:
        if session.number == 0:
            train(session, name, 6)
            session.away(until=swarm.round + 3)
        return train(session, name, 20)

    found = swarm.run(work)
    assert all_equal(found)


@each
@pytest.mark.parametrize("worker", [0, 2])
def test_rounds_that_went_on_without_somebody(name: str, worker: int) -> None:
    missed = (11, 15, 21, 22, 23, 31)
    swarm = TroubledSwarm(3, missed=[(worker, number) for number in missed])
    found = swarm.run(lambda session: train(session, name, 26))
    assert all_equal(found)
    assert found[worker][2] >= len(missed)
    assert all(found[n][2] == 0 for n in range(3) if n != worker)


@each
def test_rounds_of_which_nobody_told(name: str) -> None:
    """As behind a network that was cut: their numbers show it."""
    swarm = TroubledSwarm(3)

    def work(session: TroubledSession) -> Found:
        def changed(step: int, net: torch.nn.Module) -> None:
            if session.number == 1 and step == 8 and not gone:
                gone.append(step)
                session.away(until=swarm.round + 4)

        gone: list[int] = []
        return train(session, name, 18, changed)

    found = swarm.run(work)
    assert all_equal(found)
    assert found[1][2] >= 1


@settings(max_examples=40)
@given(
    name=st.sampled_from(["none", "power_sgd", "dgc", "ef21"]),
    missed=st.sets(st.tuples(st.integers(0, 2), st.integers(2, 40)), max_size=25),
    late=st.tuples(st.just(0), st.integers(0, 30), st.integers(0, 30)),
)
def test_whatever_is_missed_all_end_alike(
    name: str, missed: set[tuple[int, int]], late: tuple[int, ...]
) -> None:
    swarm = TroubledSwarm(3, missed)

    def work(session: TroubledSession) -> Found:
        session.away(until=late[session.number])
        return train(session, name, 45)

    found = swarm.run(work)
    assert all_equal(found)
    assert swarm.round < 45 * 4 + 150


def test_the_state_with_the_most_steps_wins() -> None:
    """Not that of a newcomer who was alone for a moment, though it has no flag any more."""
    swarm = TroubledSwarm(2)

    def work(session: TroubledSession) -> list[int]:
        net = model(seed=session.number)
        inner = torch.optim.SGD(net.parameters(), lr=0.01)
        seen = []
        if session.number == 0:
            session.away(until=14)
        with GradientAverage(net, inner, session) as outer:
            while outer.steps < 20:
                if session.number == 1 and outer.steps == 7 and 7 not in seen:
                    session.away(until=25)  # meanwhile worker 0 comes, and is alone
                seen.append(outer.steps)
                inner.zero_grad()
                loss_of(net, session.number, outer.steps).backward()
                inner.step()
        return seen

    first, second = swarm.run(work)
    assert second == list(range(20))
    assert first[0] == 0
    assert 1 < first.index(8) < 9  # some steps alone, then on from the seventh


def test_a_state_from_a_file_goes_on() -> None:
    def work(session: Any) -> dict[str, Any]:
        net = model()
        inner = torch.optim.SGD(net.parameters(), lr=0.01)
        with GradientAverage(net, inner, session, compressor=PowerSGD(start=0)) as outer:
            if session.number == 1:
                outer.load_state_dict(saved)
            loss_of(net, 0, 0).backward()
            inner.step()
            return outer.state_dict()

    saved: dict[str, Any] = {}
    swarm = Swarm(1)
    saved = {**swarm.run(work)[0], "steps": 100}
    found = Swarm(2).run(work)
    assert [state["steps"] for state in found] == [101, 101]
    assert torch.equal(found[0]["shared"][0], found[1]["shared"][0])
    for wrong in [{}, {**saved, "version": 99}, {**saved, "shared": saved["shared"][:1]}]:
        saved = wrong
        with pytest.raises(ConfigError, match="not the state"):
            Swarm(2).run(work)


def test_a_donor_that_goes_is_replaced() -> None:
    """Worker 0 misses the rounds in which it would hand over its state."""
    for number in range(6, 14):
        swarm = TroubledSwarm(3, missed=[(0, number)])
        found = swarm.run(lambda session: train(session, "none", 10))
        assert all_equal(found), number


# ---------------------------------------------------------------- differences


def test_who_differs_takes_what_most_have() -> None:
    def work(session: Any) -> Found:
        def changed(step: int, net: torch.nn.Module) -> None:
            if session.number == 2 and step == 7:
                with torch.no_grad():
                    next(net.parameters()).flatten()[3] += 1e-6

        return train(session, "ef21", 20, changed, check_every=5)

    found = Swarm(3).run(work)
    assert all_equal(found)
    alone = Swarm(3).run(lambda session: train(session, "ef21", 20, check_every=5))
    assert not torch.equal(alone[0][0], found[0][0])  # there was one step with less


def test_another_model_ends_this_trainer_and_no_other() -> None:
    """Of the same number of elements, so that only the names show it."""
    swarm = TroubledSwarm(3)

    def work(session: TroubledSession) -> Any:
        if session.number == 2:
            session.away(until=20)
            net = torch.nn.Linear(13, 1)
        else:
            net = torch.nn.Linear(6, 2)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        with GradientAverage(net, inner, session) as outer:
            try:
                while outer.steps < 20:
                    inner.zero_grad()
                    net(torch.ones(1, net.in_features)).sum().backward()
                    inner.step()
            except IncompatibleRunError as error:
                return str(error)
            return flat(net)

    first, second, third = swarm.run(work)
    assert torch.equal(first, second)
    assert "differs from that of worker-0" in third


def test_a_model_of_another_size_ends_with_the_reason() -> None:
    swarm = TroubledSwarm(2)

    def work(session: TroubledSession) -> None:
        net = torch.nn.Linear(6, 2 + session.number)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        with GradientAverage(net, inner, session):
            for _ in range(80):
                net(torch.ones(1, 6)).sum().backward()
                inner.step()

    with pytest.raises(StateError, match=r"in 50 tries.*all_reduce\(\) of 32 elements"):
        swarm.run(work)


@pytest.mark.parametrize("method", [GradientAverage, DeMo, ZerothOrder])
def test_comparing_after_other_numbers_of_steps_is_refused(method: Any) -> None:
    """They would make other calls at some steps."""

    def work(session: Any) -> None:
        net = model()
        options = {"check_every": 2 + session.number}
        if method is GradientAverage:
            method(net, torch.optim.SGD(net.parameters(), lr=0.1), session, **options)
        elif method is DeMo:
            method(net, session, **options)
        else:
            method(net, session, 0.1, **options)

    with pytest.raises(IncompatibleRunError, match="check_every: yours 3, run 2"):
        Swarm(2).run(work)


@pytest.mark.parametrize("wrong", [0, -1, 10**7])
def test_comparing_never_is_refused(wrong: int) -> None:
    with pytest.raises(ConfigError, match="check_every"):
        Swarm(1).run(lambda session: train(session, "none", 1, check_every=wrong))


def test_other_numbers_of_a_compressor_are_refused() -> None:
    def work(session: Any) -> None:
        net = model()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        GradientAverage(net, inner, session, compressor=PowerSGD(rank=1 + session.number))

    with pytest.raises(IncompatibleRunError, match=r"schedule: yours PowerSGD\(rank=2"):
        Swarm(2).run(work)
