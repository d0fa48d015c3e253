"""Streaming DiLoCo (acceptance test 4)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.optim import DiLoCo, StreamingDiLoCo, Swarm
from atoll.optim.swarm import SwarmSession
from atoll.peer.client.trainer_channel import Outcome

WORKERS, H, LR = 2, 6, 0.05


class Net(nn.Module):
    """Four blocks; one per fragment, and the head as the fifth."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(blocks))
        self.head = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def gradient_step(net: nn.Module, inner: torch.optim.Optimizer, worker: int, step: int) -> None:
    random = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(8, 5, generator=random)
    inner.zero_grad()
    (net(x) - x[:, :2].sin()).square().mean().backward()
    inner.step()


def fresh() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), lr=LR, momentum=0.5)


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def train(session: Any, steps: int, **options: Any) -> torch.Tensor:
    net, inner = fresh()
    options = {"blocks_per_fragment": 1, "codec": "float32"} | options
    outer = StreamingDiLoCo(net, inner, H, session, **options)
    for step in range(steps):
        gradient_step(net, inner, session.number, step)
    outer.close()
    return flat(net)


def published(steps: int, delay: int, local: float, lr: float, mu: float) -> list[torch.Tensor]:
    """Algorithm 2 of the paper, for all workers, in plain torch."""
    workers = [fresh() for _ in range(WORKERS)]
    groups = [[f"blocks.{i}.{kind}" for kind in ("weight", "bias")] for i in range(4)]
    groups.append(["head.weight", "head.bias"])
    offsets = [(p + 1) * H // len(groups) for p in range(len(groups))]
    named = [dict(net.named_parameters()) for net, _ in workers]
    theta = {name: p.detach().clone() for name, p in named[0].items()}
    momentum = {name: torch.zeros_like(p) for name, p in theta.items()}
    travelling: dict[int, dict[str, torch.Tensor]] = {}
    for t in range(1, steps + 1):
        for worker, (net, inner) in enumerate(workers):
            gradient_step(net, inner, worker, t - 1)
        for p, names in enumerate(groups):
            if (t - offsets[p]) % H == 0:
                travelling[p] = {
                    name: sum(theta[name] - own[name].detach() for own in named) / WORKERS
                    for name in names
                }
        for p, names in enumerate(groups):
            if p in travelling and (t - offsets[p] - delay) % H == 0:
                delta = travelling.pop(p)
                for name in names:
                    momentum[name] = mu * momentum[name] + delta[name]
                    theta[name] = theta[name] - lr * (delta[name] + mu * momentum[name])
                    for own in named:
                        own[name].data.mul_(local).add_((1 - local) * theta[name])
    return [flat(net) for net, _ in workers]


@pytest.mark.parametrize(("delay", "local"), [(0, 0.0), (0, 0.5), (1, 0.5), (3, 0.0), (5, 0.25)])
def test_4_it_is_algorithm_2(delay: int, local: float) -> None:
    steps = 4 * H + 3
    options = {"delay": delay, "local": local, "outer_lr": 0.4, "outer_momentum": 0.9}
    found = Swarm(WORKERS).run(lambda session: train(session, steps, **options))
    expected = published(steps, delay, local, lr=0.4, mu=0.9)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=5e-6)


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_4_one_fragment_without_delay_is_diloco_bit_for_bit(codec: str) -> None:
    def diloco(session: SwarmSession) -> torch.Tensor:
        net, inner = fresh()
        DiLoCo(net, inner, H, session, outer_lr=0.4, codec=codec)
        for step in range(3 * H):
            gradient_step(net, inner, session.number, step)
        return flat(net)

    def streaming(session: SwarmSession) -> torch.Tensor:
        net, inner = fresh()
        block = nn.ModuleDict({"0": net})  # all of it is one block
        outer = StreamingDiLoCo(block, inner, H, session, delay=0, local=0.0, codec=codec)
        assert outer.spec.fragments == 1
        for step in range(3 * H):
            gradient_step(net, inner, session.number, step)
        return flat(net)

    for mine, other in zip(Swarm(2).run(diloco), Swarm(2).run(streaming), strict=True):
        assert torch.equal(mine, other)


def test_4_alpha_of_one_is_everybody_alone() -> None:
    found = Swarm(WORKERS).run(lambda session: train(session, 3 * H, delay=2, local=1.0))
    for worker, mine in enumerate(found):
        net, inner = fresh()
        for step in range(3 * H):
            gradient_step(net, inner, worker, step)
        assert torch.equal(mine, flat(net))


def test_4_alpha_of_zero_takes_the_runs_fragment_and_each_comes_every_h_steps() -> None:
    merges: dict[int, list[int]] = {}

    def watched(session: SwarmSession) -> None:
        net, inner = fresh()
        options = {"blocks_per_fragment": 1, "codec": "float32", "delay": 1, "local": 0.0}
        outer = StreamingDiLoCo(net, inner, H, session, **options)
        for step in range(4 * H):
            before = outer.metrics()["rounds"]
            gradient_step(net, inner, session.number, step)
            if outer.metrics()["rounds"] > before:
                fragment = int(before) % 5
                merges.setdefault(fragment, []).append(step + 1)
                theta = session._swarm.state.theta
                mine = np.empty_like(theta)
                outer._vector.write(mine)
                first, end = outer.manifest.chunks_of(fragment, 5)
                lo = outer.manifest.grid.bounds(first)[0]
                hi = outer.manifest.grid.bounds(end - 1)[1]
                used = [
                    outer.manifest.offsets[p.name]
                    for p in outer.manifest.parameters
                    if p.fragment == fragment and not p.is_padding
                ]
                for a, b in used:
                    assert lo <= a <= b <= hi
                    assert (mine[a:b] == theta[a:b]).all()

    Swarm(1).run(watched)
    assert sorted(merges) == [0, 1, 2, 3, 4]
    for steps in merges.values():
        assert len(steps) >= 3
        assert {b - a for a, b in pairwise(steps)} == {H}


# ---------------------------------------------------------------- eager updates


def eager_as_published(steps: int, lr: float, mu: float) -> list[torch.Tensor]:
    """Every worker with an outer state of its own, in plain torch."""
    workers = [fresh() for _ in range(WORKERS)]
    groups = [[f"blocks.{i}.{kind}" for kind in ("weight", "bias")] for i in range(4)]
    groups.append(["head.weight", "head.bias"])
    offsets = [(p + 1) * H // len(groups) for p in range(len(groups))]
    named = [dict(net.named_parameters()) for net, _ in workers]
    theta = [{n: p.detach().clone() for n, p in own.items()} for own in named]
    momentum = [{n: torch.zeros_like(p) for n, p in own.items()} for own in named]
    before = [{n: torch.zeros_like(p) for n, p in own.items()} for own in named]
    for t in range(1, steps + 1):
        for worker, (net, inner) in enumerate(workers):
            gradient_step(net, inner, worker, t - 1)
        for p, names in enumerate(groups):
            if (t - offsets[p]) % H:
                continue
            for name in names:
                mean = sum(own[name] for own in before) / WORKERS
                for m in range(WORKERS):
                    delta = theta[m][name] - named[m][name].detach()
                    eager = mean + (delta - before[m][name]) / WORKERS
                    momentum[m][name] = mu * momentum[m][name] + eager
                    theta[m][name] = theta[m][name] - lr * (eager + mu * momentum[m][name])
                    before[m][name] = delta
                    named[m][name].data.copy_(theta[m][name])
    return [flat(net) for net, _ in workers]


def test_eager_updates_are_those_of_the_paper() -> None:
    steps = 5 * H + 2
    found = Swarm(WORKERS).run(lambda session: train(session, steps, eager=True, outer_lr=0.4))
    expected = eager_as_published(steps, lr=0.4, mu=0.9)
    assert not torch.equal(found[0], found[1])
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


def test_5_eager_updates_of_one_peer_are_diloco() -> None:
    def both(session: SwarmSession, eager: bool) -> torch.Tensor:
        net, inner = fresh()
        block = nn.ModuleDict({"0": net})
        options: dict[str, Any] = {"outer_lr": 0.4, "codec": "float32"}
        if eager:
            StreamingDiLoCo(block, inner, H, session, eager=True, **options)
        else:
            DiLoCo(block, inner, H, session, **options)
        for step in range(5 * H):
            gradient_step(net, inner, session.number, step)
        return flat(net)

    (mine,) = Swarm(1).run(lambda session: both(session, True))
    (other,) = Swarm(1).run(lambda session: both(session, False))
    torch.testing.assert_close(mine, other, rtol=0, atol=2e-6)


def test_an_eager_newcomer_goes_ahead_with_nothing_that_will_not_count() -> None:
    """With a share of 0 its own part is in no mean, so it must not be in its correction."""

    def corrections(session: SwarmSession, share: float) -> list[bool]:
        waited = session.wait
        session.wait = lambda fragment=0: replace(waited(fragment), share=share)  # type: ignore[method-assign]
        net, inner = fresh()
        options: dict[str, Any] = {"outer_lr": 0.4, "codec": "float32", "probation": 9}
        outer = StreamingDiLoCo(net, inner, H, session, eager=True, **options)
        assert outer._eager is not None
        found = []
        for step in range(4 * H):
            gradient_step(net, inner, session.number, step)
            found.append(bool(outer._eager.arrays["correction"].any()))
        return found

    (newcomer,) = Swarm(1).run(lambda session: corrections(session, 0.0))
    (founder,) = Swarm(1).run(lambda session: corrections(session, 1.0))
    assert not any(newcomer)
    assert founder[-1]


def test_what_four_bits_lose_of_ones_own_part_is_not_lost_to_oneself() -> None:
    """D_m_prev is removed as the others have decoded it; so one peer alone is exact but for the
    parts that the run itself holds."""

    def each(session: SwarmSession, codec: str) -> torch.Tensor:
        net, inner = fresh()
        StreamingDiLoCo(net, inner, H, session, eager=True, codec=codec, outer_lr=0.4)
        for step in range(6 * H):
            gradient_step(net, inner, session.number, step)
        return flat(net)

    (exact,) = Swarm(1).run(lambda session: each(session, "float32"))
    (coarse,) = Swarm(1).run(lambda session: each(session, "fp4_e3m0"))
    torch.testing.assert_close(coarse, exact, rtol=0, atol=1e-5)


def test_all_see_the_same_run_with_four_bits() -> None:
    def each(session: SwarmSession) -> torch.Tensor:
        net, inner = fresh()
        outer = StreamingDiLoCo(net, inner, H, session, blocks_per_fragment=2)
        for step in range(5 * H):
            outer.count(8 + session.number)
            gradient_step(net, inner, session.number, step)
        with outer.outer_parameters():
            return flat(net)

    first, *others = Swarm(3).run(each)
    assert all(torch.equal(first, other) for other in others)


class Reloads(SwarmSession):
    """Says that the fragment which is under way is next, and that the run was reloaded since."""

    def __init__(self, swarm: Swarm) -> None:
        super().__init__(swarm, 0)
        self.asked: list[str] = []

    def next_fragment(self) -> int:
        return 0

    def submit(self, *arguments: Any) -> None:
        self.asked.append("submit")
        super().submit(*arguments)

    def wait(self, fragment: int = 0) -> Outcome:
        self.asked.append("wait")
        return replace(super().wait(fragment), kind="reload")


@pytest.mark.parametrize("eager", [False, True])
def test_after_a_reload_nothing_is_submitted_that_has_no_steps(eager: bool) -> None:
    swarm = Swarm(1)
    swarm.sessions[0] = session = Reloads(swarm)
    swarm.run(lambda session: train(session, 2, delay=H - 1, eager=eager))
    assert session.asked == ["submit", "wait"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": H}, "delay=6"),
        ({"delay": -1}, "delay=-1"),
        ({"local": 1.5}, "local=1.5"),
        ({"fragments": "random"}, "fragments='random'"),
        ({"blocks_per_fragment": 0}, "0 blocks"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Swarm(1).run(lambda session: train(session, 1, **options))


def test_more_fragments_than_steps_are_refused() -> None:
    def each(session: SwarmSession) -> None:
        net = Net(blocks=8)
        inner = torch.optim.SGD(net.parameters(), lr=LR)
        StreamingDiLoCo(net, inner, H, session, blocks_per_fragment=1)

    with pytest.raises(ConfigError, match="9 fragments"):
        Swarm(1).run(each)


def test_eager_updates_take_no_codec_that_draws_at_random() -> None:
    """A trainer encodes its part as the others do, to know what they have decoded of it."""

    def make(session: SwarmSession) -> None:
        model = Net()
        inner = torch.optim.SGD(model.parameters(), lr=LR)
        with pytest.raises(ConfigError, match="this codec draws at random"):
            StreamingDiLoCo(model, inner, H, session, eager=True, codec="int8_sr")

    Swarm(1).run(make)
