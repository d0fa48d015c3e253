"""NoLoCo in swarms (acceptance test 6), against the paper's lines in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness.noloco import STEPS, H, flat, fresh, local_step, train
from torch import nn

from atoll.collectives.codecs import get_codec
from atoll.collectives.errors import ConfigError
from atoll.optim import NoLoCo, Swarm
from atoll.optim.methods.gossip import groups
from atoll.optim.swarm import SwarmSession

ALPHA, BETA = 0.5, 0.7


def load(net: nn.Module, values: torch.Tensor) -> None:
    lo = 0
    with torch.no_grad():
        for _, p in sorted(net.named_parameters()):
            p.copy_(values[lo : lo + p.numel()].view(p.shape))
            lo += p.numel()


def by_hand(
    workers: int, gamma: float, size: int, coded: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """All begin with what worker 0 has. ``coded``: what a codec makes of a vector."""
    nets = [fresh(worker) for worker in range(workers)]
    phis = [coded(flat(nets[0][0])) for _ in nets]
    momenta = [torch.zeros_like(phi) for phi in phis]
    for number in range(STEPS):
        for worker, (net, inner) in enumerate(nets):
            load(net, phis[worker])
            for step in range(H):
                local_step(net, inner, worker, number * H + step)
        deltas = [coded(flat(net) - phi) for (net, _), phi in zip(nets, phis, strict=True)]
        seen = [coded(phi) for phi in phis]
        for group in groups(workers, size, number + 1):
            delta = sum(deltas[i] for i in group) / len(group)
            mean = sum(seen[i] for i in group) / len(group)
            for i in group:
                momenta[i] = ALPHA * momenta[i] + BETA * delta - gamma * (seen[i] - mean)
                phis[i] = phis[i] + momenta[i]
    return phis


def through(codec_name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def coded(vector: torch.Tensor) -> torch.Tensor:
        codec = get_codec(codec_name)
        data = np.empty(codec.encoded_bytes(vector.numel()), np.uint8)
        codec.encode(vector.numpy(), data)
        out = np.empty(vector.numel(), np.float32)
        codec.decode(data, out)
        return torch.from_numpy(out)

    return coded


@pytest.mark.parametrize(
    ("workers", "size", "codec"),
    [(4, 2, "float32"), (5, 2, "float32"), (5, 3, "float32"), (4, 2, "int8"), (3, 2, "bfloat16")],
)
def test_a_swarm_does_what_the_paper_says(workers: int, size: int, codec: str) -> None:
    options = {"gossip": 0.6, "group": size, "codec": codec}
    found = Swarm(workers).run(lambda session: train(session, **options))
    expected = by_hand(workers, 0.6, size, through(codec))
    for mine, other in zip(found, expected, strict=True):
        # A value between two of a codec's may come to lie on the other side.
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-6 if codec == "float32" else 2e-3)
    assert not torch.equal(found[0], found[1])
    again = Swarm(workers).run(lambda session: train(session, **options))
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize("gossip", [0.1, 0.7, 2.3])
def test_6_a_group_of_all_is_heavy_ball_diloco(gossip: float) -> None:
    """Against torch's SGD with momentum, on the mean of old minus new."""
    workers = 3
    found = Swarm(workers).run(lambda s: train(s, gossip=gossip, group=workers + 5))
    nets = [fresh(worker) for worker in range(workers)]
    master, _ = fresh(0)
    outer = torch.optim.SGD(master.parameters(), lr=BETA, momentum=ALPHA)
    for number in range(STEPS):
        for worker, (net, inner) in enumerate(nets):
            net.load_state_dict(master.state_dict())
            for step in range(H):
                local_step(net, inner, worker, number * H + step)
        for p, *theirs in zip(
            master.parameters(), *(net.parameters() for net, _ in nets), strict=True
        ):
            p.grad = sum(p.detach() - q.detach() for q in theirs) / workers
        outer.step()
    for mine in found:
        assert torch.equal(mine, found[0])
        torch.testing.assert_close(mine, flat(master), rtol=0, atol=3e-6)


def test_6_groups_of_one_are_independent_heavy_balls() -> None:
    found = Swarm(3).run(lambda session: train(session, group=1, gossip=0.0))
    expected = by_hand(3, 0.0, 1, lambda vector: vector)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-6)


def test_6_the_mean_of_all_does_not_depend_on_gossip_nor_on_the_codec() -> None:
    """Nothing is learnt here: what is learnt depends on where a replica is."""

    def run(gossip: float, codec: str) -> torch.Tensor:
        def one(session: SwarmSession) -> torch.Tensor:
            net, inner = fresh(session.number)
            with NoLoCo(net, inner, 1, session, gossip=gossip, codec=codec) as outer:
                state = outer.state_dict()
                state["phi"] += 0.3 * torch.randn(state["phi"].shape)  # replicas that differ
                outer.load_state_dict(state)
                session.barrier()
                for _ in range(8):
                    outer._after_step(inner, (), {})
                with outer.outer_parameters():
                    return flat(net)

        return torch.stack(Swarm(4).run(one))

    for codec in ("float32", "int8"):
        weak, strong = run(0.05, codec), run(0.7, codec)
        torch.testing.assert_close(weak.mean(0), strong.mean(0), rtol=0, atol=1e-6)
        assert strong.std(0).mean() < 0.3 * weak.std(0).mean()


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
def test_coarse_codecs_keep_replicas_apart_by_no_more_than_their_steps(codec: str) -> None:
    """While nothing is learnt they come as near to each other as the codec can tell."""

    def one(session: SwarmSession) -> torch.Tensor:
        net, inner = fresh(session.number)
        with NoLoCo(net, inner, 1, session, codec=codec) as outer:
            state = outer.state_dict()
            state["phi"] += 0.1 * torch.randn(state["phi"].shape)
            outer.load_state_dict(state)
            for _ in range(60):
                outer._after_step(inner, (), {})
            with outer.outer_parameters():
                return flat(net)

    replicas = torch.stack(Swarm(4).run(one))
    apart = (replicas - replicas.mean(0)).square().mean().sqrt()
    assert apart < 0.012 * replicas.square().mean().sqrt()


def test_replicas_learn_and_stay_near_each_other_with_int8() -> None:
    def one(session: SwarmSession) -> tuple[float, float, dict[str, float]]:
        net, inner = fresh(session.number)
        x = torch.randn(200, 5, generator=torch.Generator().manual_seed(99))

        def loss() -> float:
            with torch.no_grad():
                return float((net(x) - x[:, :2].sin()).square().mean())

        with NoLoCo(net, inner, 5, session, codec="int8") as outer:
            before = loss()
            for step in range(200):
                local_step(net, inner, session.number, step)
            with outer.consensus():
                after = loss()
            return before, after, outer.metrics()

    for before, after, metrics in Swarm(4).run(one):
        assert after < 0.1 * before
        assert 0 < metrics["replica_std"] < 0.1
        assert metrics["solo"] == 0
        assert metrics["outer_steps"] == 40
        assert metrics["outer_step"] == 41


def test_the_consensus_is_the_mean_and_the_model_gets_its_own_back() -> None:
    def one(session: SwarmSession) -> dict[str, Any]:
        net, inner = fresh(session.number)
        with NoLoCo(net, inner, H, session, codec="float32") as outer:
            for step in range(2 * H + 1):
                local_step(net, inner, session.number, step)
            session.barrier()  # who was alone in a step is ahead
            local = flat(net)
            found: dict[str, Any] = {"losses": outer.replica_losses(lambda: float(flat(net).sum()))}
            with outer.outer_parameters():
                found["own"] = flat(net)
            with outer.consensus():
                found["mean"] = flat(net)
                with pytest.raises(ConfigError, match=r"step\(\) inside consensus\(\)"):
                    inner.step()
                with pytest.raises(ConfigError, match=r"inside consensus"):
                    outer.replica_losses(lambda: 0.0)
            assert torch.equal(flat(net), local)
            return found

    found = Swarm(3).run(one)
    own = torch.stack([each["own"] for each in found])
    for each in found:
        torch.testing.assert_close(each["mean"], own.mean(0), rtol=0, atol=1e-6)
        assert list(each["losses"]) == ["worker-0", "worker-1", "worker-2"]
        expected = own.sum(1)
        torch.testing.assert_close(torch.tensor(list(each["losses"].values())), expected)
