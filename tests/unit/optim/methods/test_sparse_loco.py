"""SparseLoCo in a swarm: acceptance tests 7 and 14, and the method told slowly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll.collectives.chunks import grid_for
from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.errors import ConfigError, IncompatibleRunError
from atoll.optim import DiLoCo, SparseLoCo, Swarm
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import RunSpec
from atoll.optim.swarm_state import SwarmState, SwarmSubmission

ELEMENTS = 9000
TOPK = get_codec("topk")


def start() -> torch.Tensor:
    return torch.linspace(-1, 1, ELEMENTS)


def gradient(values: torch.Tensor, worker: int, step: int) -> torch.Tensor:
    return (1 + worker) * torch.cos(values * (3 * step + 1)) + 0.3 * worker


def train(
    session: Any,
    method: Callable[..., Any],
    rounds: int = 4,
    sync_every: int = 2,
    alike: bool = False,
    **options: Any,
) -> torch.Tensor:
    parameter = nn.Parameter(start())
    inner = torch.optim.SGD([parameter], lr=0.05)
    outer = method(nn.ParameterList([parameter]), inner, sync_every, session, **options)
    worker = 0 if alike else session.number
    for step in range(rounds * sync_every):
        outer.count(1 + worker)
        parameter.grad = gradient(parameter.detach(), worker, step)
        inner.step()
    return parameter.detach().clone()


def by_hand(
    workers: int,
    decay: float,
    aggregate: str,
    outer_lr: float,
    rounds: int = 4,
    sync_every: int = 2,
) -> F32:
    """The method, peer by peer, with dense vectors."""
    grid, theta = grid_for(ELEMENTS), start().numpy().copy()
    kept = np.zeros((workers, ELEMENTS), np.float32)
    weights = np.arange(1, workers + 1, dtype=np.float64)
    factors = (weights / weights.sum()).astype(np.float32)
    for number in range(rounds):
        above, below = np.zeros_like(theta), np.zeros_like(theta)
        for worker in range(workers):
            local = torch.from_numpy(theta.copy())
            for step in range(number * sync_every, (number + 1) * sync_every):
                local -= 0.05 * gradient(local, worker, step)
            message = np.float32(decay) * kept[worker] + (theta - local.numpy())
            for chunk in range(grid.count):
                part = slice(*grid.bounds(chunk))
                data = np.empty(TOPK.encoded_bytes(part.stop - part.start), np.uint8)
                TOPK.encode(message[part], data)
                sent = np.empty(part.stop - part.start, np.float32)
                TOPK.decode(data, sent)
                kept[worker, part] = message[part] - sent
                above[part] += factors[worker] * sent
                below[part] += np.where(sent != 0, factors[worker], np.float32(0))
        if aggregate == "senders":
            above = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
        theta = theta - np.float32(outer_lr) * above
    return theta


@pytest.mark.parametrize("aggregate", ["all", "senders"])
def test_it_is_the_method_told_slowly(aggregate: str) -> None:
    found = Swarm(3).run(
        lambda session: train(session, SparseLoCo, outer_lr=0.9, aggregate=aggregate, decay=0.95)
    )
    expected = by_hand(3, 0.95, aggregate, 0.9)
    for each in found:
        np.testing.assert_allclose(each.numpy(), expected, rtol=0, atol=1e-6)
    moved = np.count_nonzero(expected != start().numpy())
    assert ELEMENTS / 64 < moved < ELEMENTS / 2


@pytest.mark.parametrize("peers", [1, 3])
def test_7_sending_everything_without_feedback_is_outer_sgd(peers: int) -> None:
    """k = C, no quantization, decay 0. Bit for bit, where the sum is the same one."""
    exact = {"codec": "float32", "outer_lr": 0.8}
    sgd = Swarm(peers).run(partial(train, method=DiLoCo, outer_momentum=0.0, **exact))
    found = {
        aggregate: Swarm(peers).run(
            partial(train, method=SparseLoCo, decay=0.0, aggregate=aggregate, **exact)
        )
        for aggregate in ("all", "senders", "mean")
    }
    assert torch.equal(found["mean"][0], sgd[0])
    assert torch.equal(found["all"][0], sgd[0])
    torch.testing.assert_close(found["senders"][0], sgd[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("peers", [2, 3, 4])
def test_7_of_identical_peers_both_rules_are_one(peers: int) -> None:
    senders, everybody, alone = (
        Swarm(count).run(partial(train, method=SparseLoCo, alike=True, aggregate=aggregate))[0]
        for count, aggregate in ((peers, "senders"), (peers, "all"), (1, "senders"))
    )
    torch.testing.assert_close(senders, everybody, rtol=0, atol=1e-6)
    torch.testing.assert_close(senders, alone, rtol=0, atol=1e-6)
    if peers in (2, 4):
        assert torch.equal(senders, everybody)


def test_7_nothing_is_lost_over_rounds() -> None:
    """Without decay: what all have sent, and what they keep, is all that they had to say."""
    manifest = Manifest.of([Parameter("w", (ELEMENTS,))])
    spec = RunSpec(
        method="sparse_loco",
        sync_every=1,
        outer="sgd",
        outer_lr=1.0,
        codec="topk",
        aggregate="all",
        error_feedback=1.0,
    )
    state = SwarmState(spec, manifest, lambda flat: flat.fill(0))
    random, came = np.random.default_rng(5), np.zeros(ELEMENTS)
    for _ in range(20):
        given = [random.standard_normal(ELEMENTS).astype(np.float32) for _ in range(2)]
        came += (given[0].astype(np.float64) + given[1]) / 2
        values = [state.theta - delta for delta in given]
        for v, delta in zip(values, given, strict=True):  # what rounding has made of it
            came += ((state.theta - v).astype(np.float64) - delta) / 2
        state.commit([SwarmSubmission(number, v, 1.0) for number, v in enumerate(values)])
    kept = sum(f.arrays["residual"].astype(np.float64) for f in state._feedback.values()) / 2
    np.testing.assert_allclose(-state.theta.astype(np.float64) + kept, came, atol=1e-4)


def test_14_bytes_are_those_of_theory() -> None:
    """14 bits for each of 64 in 4096, within 2 %; and what travels in a round."""
    elements, peers = 4 << 20, 4
    spec = RunSpec(sync_every=1, codec="topk", aggregate="senders", error_feedback=0.95)
    state = SwarmState(spec, Manifest.of([Parameter("w", (elements,))]), lambda flat: flat.fill(0))
    ones = np.ones(elements, np.float32)
    part_bytes, result_bytes = state.commit([SwarmSubmission(n, ones, 1.0) for n in range(peers)])
    assert 8 * part_bytes / elements == pytest.approx(14 * 64 / 4096, rel=0.02)
    assert result_bytes == peers * part_bytes

    swarm = Swarm(peers)
    swarm.run(partial(train, method=SparseLoCo, rounds=3))
    grid = grid_for(ELEMENTS)
    c = sum(TOPK.encoded_bytes(grid.size(chunk)) for chunk in range(grid.count))
    per_peer = (peers - 1) / peers * c + (peers - 1) * c
    assert swarm.encoded_bytes == pytest.approx(3 * peers * per_peer)


def test_who_has_no_weight_keeps_what_it_had() -> None:
    spec = RunSpec(sync_every=1, codec="topk", aggregate="senders", error_feedback=0.95)
    manifest = Manifest.of([Parameter("w", (ELEMENTS,))])
    state = SwarmState(spec, manifest, lambda flat: flat.fill(0))
    values = np.random.default_rng(1).standard_normal(ELEMENTS).astype(np.float32)
    state.commit([SwarmSubmission(0, values, 1.0), SwarmSubmission(1, -values, 1.0)])
    before = state._feedback[1].arrays["residual"].copy()
    state.commit([SwarmSubmission(0, values, 1.0), SwarmSubmission(1, values, 0.0)])
    assert state._feedback[1].arrays["residual"].tobytes() == before.tobytes()
    assert before.any()


def test_fragments_have_their_own_parts_of_the_memory() -> None:
    spec = RunSpec(sync_every=1, codec="topk", aggregate="senders", error_feedback=0.9, fragments=2)
    state = SwarmState(spec, Manifest.of([Parameter("w", (3 * 4096,))]), lambda flat: flat.fill(0))
    values = np.random.default_rng(1).standard_normal(3 * 4096).astype(np.float32)
    state.commit([SwarmSubmission(0, values, 1.0)], fragment=1)
    kept = state._feedback[0].arrays["residual"]
    assert not kept[:4096].any()
    assert np.count_nonzero(kept[4096:]) > 8000


def test_it_learns_all_of_what_it_sends_so_little_of() -> None:
    """Parameters with a target each, of which a round sends one in 64. Steps are small: what is
    kept adds up until it is sent, so large ones would overshoot."""
    target = torch.sin(torch.arange(ELEMENTS) / 7.0)

    def loss(**options: Any) -> float:
        def each(session: Any) -> float:
            parameter = nn.Parameter(torch.zeros(ELEMENTS))
            inner = torch.optim.SGD([parameter], lr=0.01)
            random = torch.Generator().manual_seed(session.number)
            with SparseLoCo(nn.ParameterList([parameter]), inner, 2, session, **options):
                for _ in range(200 * 2):
                    noise = torch.randn(ELEMENTS, generator=random)
                    parameter.grad = parameter.detach() - target + 0.2 * noise
                    inner.step()
                return float((parameter.detach() - target).square().mean())

        return Swarm(4).run(each)[0]

    first = float(target.square().mean())
    assert loss() < 0.1 * first
    assert loss(codec="int4", decay=1.0) < 0.01 * first


def test_the_method_and_its_numbers_are_compared() -> None:
    def each(session: Any, **options: Any) -> None:
        train(session, SparseLoCo, **options)

    for name, values in (("error_feedback", (0.95, 0.9)), ("aggregate", ("senders", "all"))):
        argument = "decay" if name == "error_feedback" else name
        with pytest.raises(IncompatibleRunError, match=f"{name}: yours {values[1]}"):
            Swarm(2).run(lambda s, a=argument, v=values: each(s, **{a: v[s.number]}))
    with pytest.raises(ConfigError, match="needs error_feedback"):
        Swarm(1).run(partial(each, decay=0.0))
    with pytest.raises(ConfigError, match="aggregate"):
        Swarm(1).run(partial(each, aggregate="mean"))
    with pytest.raises(ConfigError, match="aggregate is none of"):
        Swarm(1).run(partial(each, aggregate="median"))
