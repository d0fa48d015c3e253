"""The acceptance tests of the algorithms that need no network (test 3 is in test_outer_step.py).

Test 13's other half, a peer that dies in the middle of a reduce, is shown with real processes.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from atoll.optim import DiLoCo
from atoll.optim import outer_step as pure


def model(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(peer: int, step: int, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1000 * peer + step)
    return (
        torch.randn(5, 6, generator=random, dtype=dtype),
        torch.randn(5, 3, generator=random, dtype=dtype),
    )


def train_step(net, inner, peer, step, dtype=torch.float32):
    x, y = batch(peer, step, dtype)
    inner.zero_grad()
    (net(x) - y).square().mean().backward()
    inner.step()


def flat(net) -> np.ndarray:
    """In order of name, as the run's θ."""
    return torch.cat([p.detach().flatten() for _, p in sorted(net.named_parameters())]).numpy()


def load(net, values: np.ndarray) -> None:
    lo = 0
    with torch.no_grad():
        for _, p in sorted(net.named_parameters()):
            p.copy_(torch.from_numpy(values[lo : lo + p.numel()]).view(p.shape))
            lo += p.numel()


def outer_step(theta, momentum, delta, lr, mu):
    pure.outer_step(
        "nesterov",
        theta,
        momentum,
        delta,
        lr=lr,
        mu=mu,
        out_theta=theta,
        out_momentum=momentum,
        scratch=np.empty_like(theta),
    )


def diloco(net, inner, session, sync_every, lr, mu, codec="float32") -> DiLoCo:
    return DiLoCo(net, inner, sync_every, session, outer_lr=lr, outer_momentum=mu, codec=codec)


INNERS = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.05),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
}


@pytest.mark.parametrize("inner_name", INNERS)
def test_1_one_peer_and_plain_outer_sgd_is_plain_training(local_run, inner_name):
    ours, plain = model(), model()
    inner, reference = INNERS[inner_name](ours), INNERS[inner_name](plain)
    diloco(ours, inner, local_run().sessions[0], sync_every=4, lr=1.0, mu=0.0)
    for step in range(20):
        train_step(ours, inner, 0, step)
        train_step(plain, reference, 0, step)
        np.testing.assert_allclose(flat(ours), flat(plain), rtol=0, atol=2e-6)


@pytest.mark.parametrize("inner_name", INNERS)
def test_1_in_float64(inner_name):
    ours, plain = model(torch.float64), model(torch.float64)
    inner, reference = INNERS[inner_name](ours), INNERS[inner_name](plain)
    theta, momentum = flat(ours).copy(), np.zeros_like(flat(ours))
    for step in range(20):
        train_step(ours, inner, 0, step, torch.float64)
        train_step(plain, reference, 0, step, torch.float64)
        if step % 4 == 3:
            outer_step(theta, momentum, theta - flat(ours), 1.0, 0.0)
            load(ours, theta)
    np.testing.assert_allclose(flat(ours), flat(plain), rtol=0, atol=1e-12)


def data_parallel(peers: int, steps: int, weights, inner_name="sgd", dtype=torch.float32):
    """Plain data-parallel training: one step on the weighted mean gradient of all peers."""
    net = model(dtype)
    inner = INNERS[inner_name](net)
    for step in range(steps):
        inner.zero_grad()
        for peer in range(peers):
            x, y = batch(peer, step, dtype)
            (weights[peer] / sum(weights) * (net(x) - y).square().mean()).backward()
        inner.step()
    return flat(net)


def train_peers(local_run, in_threads, peers, steps, *, inner_name="sgd", counts=None, **kwargs):
    """``peers`` trainers of one run, each in its thread, on their own batches."""
    run = local_run(peers=peers, late=kwargs.pop("late", ()))
    nets = [model() for _ in range(peers)]
    inners = [INNERS[inner_name](net) for net in nets]
    outers = [
        diloco(net, inner, session, **kwargs)
        for net, inner, session in zip(nets, inners, run.sessions, strict=True)
    ]

    def loop(peer):
        for step in range(steps):
            if counts:
                outers[peer].count(counts[peer])
            train_step(nets[peer], inners[peer], peer, step)

    in_threads([lambda peer=peer: loop(peer) for peer in range(peers)])
    return run, nets, outers


@pytest.mark.parametrize("counts", [None, (10, 10, 10), (10, 30, 5)])
def test_2_one_step_rounds_of_sgd_are_data_parallel_sgd(local_run, in_threads, counts):
    run, nets, _ = train_peers(
        local_run, in_threads, 3, 15, counts=counts, sync_every=1, lr=1.0, mu=0.0
    )
    assert run.round == 15
    expected = data_parallel(3, 15, counts or (1, 1, 1))
    for net in nets:
        np.testing.assert_allclose(flat(net), expected, rtol=0, atol=3e-6)


def test_2_in_float64():
    peers, nets = range(3), [model(torch.float64) for _ in range(3)]
    inners = [INNERS["sgd"](net) for net in nets]
    theta, momentum = flat(nets[0]).copy(), np.zeros_like(flat(nets[0]))
    for step in range(15):
        for peer in peers:
            train_step(nets[peer], inners[peer], peer, step, torch.float64)
        outer_step(theta, momentum, sum(theta - flat(net) for net in nets) / 3, 1.0, 0.0)
        for net in nets:
            load(net, theta)
    expected = data_parallel(3, 15, (1, 1, 1), dtype=torch.float64)
    np.testing.assert_allclose(theta, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("inner_name", "mu"), [("adamw", 0.0), ("sgd", 0.9)])
def test_2_does_not_hold_for_adam_or_outer_momentum(local_run, in_threads, inner_name, mu):
    """So the test above is able to fail."""
    run, _, _ = train_peers(
        local_run, in_threads, 3, 15, inner_name=inner_name, sync_every=1, lr=1.0, mu=mu
    )
    expected = data_parallel(3, 15, (1, 1, 1), inner_name)
    assert np.abs(run.theta - expected).max() > 1e-3


@pytest.mark.parametrize(("codec", "tolerance"), [("float32", 3e-6), ("int8", 2e-2)])
def test_three_peers_equal_diloco_as_published(local_run, in_threads, codec, tolerance):
    """Several steps per round, AdamW inside, Nesterov outside, against the paper's lines."""
    run, nets, _ = train_peers(
        local_run,
        in_threads,
        3,
        20,
        inner_name="adamw",
        sync_every=5,
        lr=0.7,
        mu=0.9,
        codec=codec,
    )
    replicas = [model() for _ in range(3)]
    inners = [INNERS["adamw"](net) for net in replicas]
    master = copy.deepcopy(replicas[0])
    outer = torch.optim.SGD(master.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for first in range(0, 20, 5):
        for peer in range(3):
            replicas[peer].load_state_dict(master.state_dict())
            for step in range(first, first + 5):
                train_step(replicas[peer], inners[peer], peer, step)
        for p, *theirs in zip(
            master.parameters(), *(net.parameters() for net in replicas), strict=True
        ):
            p.grad = sum(p.detach() - q.detach() for q in theirs) / 3
        outer.step()
    np.testing.assert_allclose(run.theta, flat(master), rtol=0, atol=tolerance)
    for net in nets:
        np.testing.assert_array_equal(flat(net), run.theta)


def test_13_dropping_k_of_m_is_the_mean_over_the_others(local_run, in_threads):
    """Peer 1 is too late for round 2 of 3: it keeps θ_m, and its tokens count in round 3."""
    run, nets, outers = train_peers(
        local_run,
        in_threads,
        3,
        6,
        counts=(10, 20, 30),
        late=[(1, 2)],
        sync_every=2,
        lr=1.0,
        mu=0.0,
    )
    assert run.weights == [
        {0: 20.0, 1: 40.0, 2: 60.0},
        {0: 20.0, 2: 60.0},
        {0: 20.0, 1: 80.0, 2: 60.0},
    ]
    assert [outer.metrics()["missed"] for outer in outers] == [0, 1, 0]
    assert [outer.metrics()["rounds"] for outer in outers] == [3, 2, 3]

    replicas = [model() for _ in range(3)]
    inners = [INNERS["sgd"](net) for net in replicas]
    theta = flat(replicas[0]).astype(np.float64)
    for k, weights in enumerate([(20, 40, 60), (20, 0, 60), (20, 80, 60)]):
        for peer in range(3):
            if not (peer == 1 and k == 2):  # the dropped peer goes on from its own parameters
                load(replicas[peer], theta.astype(np.float32))
            for step in (2 * k, 2 * k + 1):
                train_step(replicas[peer], inners[peer], peer, step)
        theta = sum(w / sum(weights) * flat(r) for w, r in zip(weights, replicas, strict=True))
    np.testing.assert_allclose(run.theta, theta, rtol=0, atol=3e-6)
    for net in nets:
        np.testing.assert_array_equal(flat(net), run.theta)


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_13_a_missed_peer_keeps_its_parameters_bit_for_bit(local_run, in_threads, dropped):
    run, nets, outers = train_peers(
        local_run, in_threads, 3, 2, late=[(dropped, 1)], sync_every=2, lr=0.7, mu=0.9
    )
    alone = model()
    inner = INNERS["sgd"](alone)
    for step in range(2):
        train_step(alone, inner, dropped, step)
    np.testing.assert_array_equal(flat(nets[dropped]), flat(alone))
    with outers[dropped].outer_parameters():
        np.testing.assert_array_equal(flat(nets[dropped]), run.theta)
    for peer in {0, 1, 2} - {dropped}:
        np.testing.assert_array_equal(flat(nets[peer]), run.theta)
