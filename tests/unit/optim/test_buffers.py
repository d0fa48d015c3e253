"""Buffers: as vectors, and shared by the participants of each round."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness.troubled_swarm import TroubledSession, TroubledSwarm
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from atoll.collectives.errors import IncompatibleRunError, RemoteProtocolError
from atoll.optim import (
    CO2,
    AsyncDiLoCo,
    DiLoCo,
    GradientAverage,
    LocalSGD,
    Population,
    StreamingDiLoCo,
    Swarm,
)
from atoll.optim.buffers import PIECES, join, merged, moved, split
from atoll.optim.model_buffers import ModelBuffers
from atoll.optim.shared_buffers import STALE_ROUNDS
from atoll.optim.swarm import SwarmSession

H = 3
INT64 = st.integers(-(2**63), 2**63 - 1)

# ---------------------------------------------------------------- vectors


@given(st.lists(INT64, max_size=5))
def test_any_integers_come_back(whole: list[int]) -> None:
    pieces = split(np.array(whole, np.int64))
    assert pieces.dtype == np.float32
    assert pieces.size == PIECES * len(whole)
    assert join(pieces).tolist() == whole


@pytest.mark.parametrize(
    "pieces",
    [
        [0.5, 0, 0],
        [0, -1, 0],
        [0, 0, 2.0**22],
        [0, 2.0**22, 0],
        [2.0**19, 0, 0],
        [-(2.0**19) - 1, 0, 0],
        [np.nan, 0, 0],
        [0, np.inf, 0],
    ],
)
def test_pieces_that_are_none_are_refused(pieces: list[float]) -> None:
    with pytest.raises(RemoteProtocolError, match="no whole numbers"):
        join(np.array(pieces, np.float32))


def vector(weight: float, floats: list[float], whole: list[int]) -> np.ndarray:
    head = np.array([weight, *floats], np.float32)
    return np.concatenate([head, split(np.array(whole, np.int64))])


def test_the_weighted_mean_and_the_maximum() -> None:
    parts = [vector(1, [1, -8], [5, 2**40]), vector(3, [5, 8], [7, -1])]
    found = merged(parts, 2)
    assert found[:3].tolist() == [4, 4, 4]
    assert join(found[3:]).tolist() == [7, 2**40]
    changed = moved(vector(1, [1.5, -8], [5, 2**41]), parts[0], found, 2)
    assert changed[1:3].tolist() == [4.5, 4]
    assert join(changed[3:]).tolist() == [7, 2**41]


@pytest.mark.parametrize("weight", [0.0, -1.0, np.nan, np.inf])
def test_a_weight_that_cannot_be(weight: float) -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be"):
        merged([vector(1, [0], []), vector(weight, [0], [])], 1)


class Odd(nn.Module):
    """Buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("coarse", torch.tensor([0.5, 0.25], dtype=torch.bfloat16))
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("cache", torch.ones(4), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("wave", torch.ones(1, dtype=torch.complex64))
        self.tied = self.norm


def test_a_models_buffers_come_back_in_their_dtypes() -> None:
    model = Odd()
    model.norm.running_mean.copy_(torch.tensor([1.0, 2.0, 3.0]))  # type: ignore[union-attr]
    model.norm.num_batches_tracked.fill_(2**30 + 1)  # type: ignore[union-attr, operator]
    buffers = ModelBuffers(model)
    assert buffers.floats == 3 + 3 + 2
    assert buffers.elements == 1 + 8 + PIECES * (1 + 2)
    flat = buffers.vector(7.0)
    assert flat[0] == 7.0
    other = Odd()
    ModelBuffers(other).read(flat)
    for (name, mine), theirs in zip(model.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(mine, theirs), name
        assert mine.dtype == theirs.dtype
    assert ModelBuffers(nn.Sequential(model)).outline != buffers.outline
    wrapped = torch.nn.Module()
    wrapped.add_module("module", model)
    assert ModelBuffers(wrapped).outline == buffers.outline


def test_without_floats_that_are_saved_there_is_nothing_to_share() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("steps", torch.zeros(1, dtype=torch.long))
    model.register_buffer("mask", torch.ones(3), persistent=False)
    assert ModelBuffers(model).outline == ""


def test_a_buffer_that_was_replaced_is_found() -> None:
    model = nn.BatchNorm1d(2)
    buffers = ModelBuffers(model)
    model.running_mean = torch.tensor([3.0, 4.0])
    flat = buffers.vector()
    assert 3.0 in flat
    buffers.read(2 * flat - flat)
    assert model.running_mean.tolist() == [3.0, 4.0]


# ---------------------------------------------------------------- in rounds


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


Make = Callable[[nn.Module, torch.optim.Optimizer, Any], Any]
METHODS: dict[str, Make] = {
    "diloco": lambda m, i, s: DiLoCo(m, i, H, s),
    "local sgd": lambda m, i, s: LocalSGD(m, i, H, s),
    "co2": lambda m, i, s: CO2(m, i, H, s),
    "streaming": lambda m, i, s: StreamingDiLoCo(m, i, H, s, delay=1),
}
BLOCKING = ("diloco", "local sgd")
Stats = list[torch.Tensor]


def stats(model: nn.Module) -> Stats:
    return [b.detach().clone() for b in model.buffers()]


def step(model: nn.Module, inner: torch.optim.Optimizer, worker: int, number: int) -> None:
    random = torch.Generator().manual_seed(100 * worker + number)
    features = worker + torch.randn(16, 8, generator=random)
    model(features).square().mean().backward()
    inner.step()
    inner.zero_grad()


def test_after_a_round_all_have_the_mean_of_all() -> None:
    before: dict[int, list[Stats]] = {n: [] for n in range(3)}
    after: dict[int, list[Stats]] = {n: [] for n in range(3)}

    def each(session: SwarmSession) -> None:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        outer = DiLoCo(model, inner, H, session)
        for number in range(4 * H):
            outer.count(1 + session.number)
            if session.number == 2 and number == 4:  # a forward pass that is no step
                model(torch.randn(4, 8))
            hook = inner.register_step_pre_hook(
                lambda *_: before[session.number].append(stats(model))
            )
            step(model, inner, session.number, number)
            hook.remove()
            after[session.number].append(stats(model))

    Swarm(3).run(each)
    for number in range(H - 1, 4 * H, H):
        was = [before[n][number] for n in range(3)]
        for place in range(3):
            is_now = [after[n][number][place] for n in range(3)]
            assert all(torch.equal(one, is_now[0]) for one in is_now)
            if is_now[0].is_floating_point():
                mean = sum((n + 1) / 6 * was[n][place] for n in range(3))
                torch.testing.assert_close(is_now[0], mean, rtol=1e-5, atol=1e-6)
            else:
                assert int(is_now[0]) == max(int(one[place]) for one in was)
    assert int(after[0][-1][2]) == 4 * H + 1


@pytest.mark.parametrize("ends", [False, True])
def test_peers_that_come_in_turn_have_the_newest_mean_of_all(ends: bool) -> None:
    """Each after a round of its own; ``ends``: the last worker's loop does so, early."""
    newest: dict[int, Stats] = {}
    rounds: list[tuple[list[int], bool]] = []

    def each(session: SwarmSession) -> None:
        session._local_steps = session.number  # so nobody comes together with another one
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        outer = AsyncDiLoCo(model, inner, H, session, outer_delay=3)
        inner.register_step_pre_hook(lambda *_: before.__setitem__(slice(None), stats(model)))
        before: Stats = []
        for number in range((2 if ends and session.number == 2 else 16) * H):
            outer.count(1 + session.number)
            step(model, inner, session.number, number)
            if (number + 1) % H == 0:
                newest[session.number] = before.copy()
                mean = [
                    sum((n + 1) * values[place] for n, values in newest.items())
                    / sum(n + 1 for n in newest)
                    for place in range(2)
                ]
                is_mean = all(
                    torch.allclose(one, expected, rtol=1e-5, atol=1e-6)
                    for one, expected in zip(stats(model), mean, strict=False)
                )
                assert int(stats(model)[2]) == max(int(one[2]) for one in newest.values())
                rounds.append((sorted(newest), is_mean))

    swarm = Swarm(3)
    swarm.run(each)
    assert swarm.state.round == len(rounds) + 1
    assert [who for who, _ in rounds[:3]] == [[0], [0, 1], [0, 1, 2]]
    alike = [is_mean for _, is_mean in rounds]
    if not ends:
        assert len(alike) == 3 * 16
        assert all(alike)
    else:  # it is left out once eight rounds of three have passed since
        assert all(alike[: 6 + 3 * STALE_ROUNDS])
        assert not any(alike[6 + 3 * STALE_ROUNDS :])


@pytest.mark.parametrize("name", METHODS)
def test_buffers_stay_near_each_other(name: str) -> None:
    """Each worker has data of its own, so without it they would be three apart."""

    def each(session: SwarmSession, **options: Any) -> torch.Tensor:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        options_of = METHODS[name](model, inner, session)
        for number in range(12 * H):
            step(model, inner, session.number, number)
        assert options_of.metrics()["rounds"] >= 10
        running = model[1].running_mean
        assert isinstance(running, torch.Tensor)
        return running.clone()

    found = Swarm(3).run(each)
    spread = max(float((one - found[0]).abs().max()) for one in found)
    own = net()
    expected = torch.stack([own[0](torch.full((1, 8), float(n))).detach() for n in range(3)])
    apart = float((expected - expected[0]).abs().max())
    assert spread < 0.6 * apart
    if name in BLOCKING:
        assert spread == 0.0


def test_a_newcomer_begins_with_those_of_a_member() -> None:
    def each(session: TroubledSession) -> Stats:
        if session.number == 2:
            session.away(until=5)
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        outer = DiLoCo(model, inner, H, session)
        begun = stats(model)
        while outer.global_step < 8 * H:
            step(model, inner, session.number, outer.global_step)
        return begun if session.number == 2 else stats(model)

    found = TroubledSwarm(3).run(each)
    assert int(found[2][2]) >= 3 * H
    assert float(found[2][0].abs().max()) > 0.1
    assert all(map(torch.equal, found[0], found[1]))


def test_methods_of_every_step_share_them_now_and_then() -> None:
    """A newcomer takes them over with the state, and so does everybody then."""
    every = 5
    seen: dict[int, dict[int, Stats]] = {n: {} for n in range(3)}

    def each(session: TroubledSession) -> None:
        if session.number == 2:
            session.away(until=9)
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        outer = GradientAverage(model, inner, session, check_every=every)
        while outer.steps < 40:
            before = outer.steps
            random = torch.Generator().manual_seed(100 * session.number + before)
            model(session.number + torch.randn(16, 8, generator=random)).square().mean().backward()
            inner.step()
            inner.zero_grad()
            seen[session.number][outer.steps] = stats(model)

    TroubledSwarm(3).run(each)
    common = [s for s in sorted(seen[2]) if all(s in seen[n] for n in range(3))]
    alike = [s for s in common if torch.equal(seen[0][s][0], seen[2][s][0])]
    assert len(alike) >= (40 - common[0]) // every - 1
    assert alike[0] == common[0] > 2  # its first step, with all that it has taken over
    for number in alike:
        for place in range(3):
            assert torch.equal(seen[0][number][place], seen[1][number][place])
            assert torch.equal(seen[0][number][place], seen[2][number][place])
    assert int(seen[2][common[-1]][2]) > len(seen[2])


def test_members_of_a_population_copy_them() -> None:
    def each(session: SwarmSession) -> Stats:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        Population(model, inner, session, lambda: float(session.number), 4, {"lr": (1e-3, 1.0)})
        for number in range(4):
            step(model, inner, session.number, number)
        return stats(model)

    found = Swarm(2).run(each)
    assert all(map(torch.equal, found[0], found[1]))


@pytest.mark.parametrize("name", METHODS)
def test_who_comes_back_has_its_own(name: str) -> None:
    def each(session: SwarmSession, at: int) -> Stats:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        outer = METHODS[name](model, inner, session)
        for number in range(4 * H):
            if number == at and session.number == 1:
                saved = [copy.deepcopy(x.state_dict()) for x in (model, inner, outer)]
                outer.close()
                session = session._swarm.sessions[1] = SwarmSession(session._swarm, 1)
                inner = torch.optim.SGD((model := net()).parameters(), lr=0.01)
                outer = METHODS[name](model, inner, session)
                for thing, state in zip((model, inner, outer), saved, strict=True):
                    thing.load_state_dict(state)
            step(model, inner, session.number, number)
        return [*stats(model), *(p.detach().clone() for p in model.parameters())]

    expected, found = (Swarm(3).run(lambda s, at=at: each(s, at)) for at in (-1, H + 1))
    for one, other in zip(expected, found, strict=True):
        for mine, theirs in list(zip(one, other, strict=True))[0 if name in BLOCKING else 3 :]:
            assert torch.equal(mine, theirs)


def test_buffers_are_left_alone_if_that_is_wanted_and_all_must_want_it() -> None:
    def each(session: SwarmSession, *shares: bool) -> Stats:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        DiLoCo(model, inner, H, session, buffers=shares[session.number])
        for number in range(H):
            step(model, inner, session.number, number)
        return stats(model)

    first, second = Swarm(2).run(lambda session: each(session, False, False))
    assert not torch.equal(first[0], second[0])
    with pytest.raises(IncompatibleRunError, match="buffers: yours , run 3 of 13 values"):
        Swarm(2).run(lambda session: each(session, True, False))


def test_those_of_a_peer_that_have_gone_mad_are_left_out() -> None:
    def each(session: SwarmSession) -> Stats:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        DiLoCo(model, inner, H, session)
        for number in range(H):
            if session.number == 1 and number == H - 1:
                model.train(False)
                model[1].running_var.fill_(torch.inf)  # type: ignore[union-attr, operator]
            step(model, inner, session.number, number)
        return stats(model)

    found = Swarm(3).run(each)
    for one in found:
        assert all(bool(tensor.isfinite().all()) for tensor in one)
    assert all(map(torch.equal, found[0], found[2]))
