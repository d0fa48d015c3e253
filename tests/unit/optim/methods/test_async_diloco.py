"""AsyncDiLoCo in swarms of workers of different speed, against the same thing told slowly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.optim import AsyncDiLoCo, DiLoCo, Swarm

H, INNER_LR, LR, MU = 4, 0.1, 0.7, 0.9


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    return net, torch.optim.SGD(net.parameters(), lr=INNER_LR, momentum=0.5)


def gradient_step(net: nn.Module, inner: torch.optim.Optimizer, worker: int, step: int) -> None:
    random = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(8, 5, generator=random)
    inner.zero_grad()
    (net(x) - x[:, :2].sin()).square().mean().backward()
    inner.step()


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def load(net: nn.Module, values: torch.Tensor) -> None:
    nn.utils.vector_to_parameters(values.clone(), net.parameters())


def train(session: Any, steps: int, delay: int, **options: Any) -> torch.Tensor:
    net, inner = fresh()
    options = {"codec": "float32", "outer_delay": delay, "outer_momentum": MU} | options
    with AsyncDiLoCo(net, inner, H, session, **options) as outer:
        for step in range(steps):
            gradient_step(net, inner, session.number, step)
        assert outer.metrics()["rounds"] == steps // H
    return flat(net)


def told_slowly(
    speeds: list[float], steps: int, delay: int
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Who was in each round, and the workers' parameters: the last one's are the run's."""
    workers = [fresh() for _ in speeds]
    theta = flat(workers[0][0])
    anchors, taken = [theta] * len(speeds), [0] * len(speeds)
    m, buffer, rounds = torch.zeros_like(theta), torch.zeros_like(theta), []
    while any(count < steps for count in taken):
        due = {w: (taken[w] + H) / speeds[w] for w in range(len(speeds)) if taken[w] < steps}
        coming = [w for w in due if due[w] == min(due.values())]
        for w in coming:
            for step in range(taken[w], taken[w] + H):
                gradient_step(*workers[w], w, step)
            taken[w] += H
        g = sum(anchors[w] - flat(workers[w][0]) for w in coming) / len(coming)
        buffer = buffer + g
        theta = theta - LR * g / delay
        rounds.append(coming)
        if len(rounds) % delay == 0:
            m, buffer = MU * m + buffer / delay, torch.zeros_like(theta)
            theta = theta - LR * MU * m
        for w in coming:
            anchors[w] = theta
            load(workers[w][0], theta)
    return rounds, [flat(net) for net, _ in workers]


@pytest.mark.parametrize(
    ("speeds", "delay"), [([1, 1, 0.25], 3), ([3, 2, 1], 2), ([1, 0.9, 0.8], 3), ([1, 2, 2], 1)]
)
def test_it_is_the_paper_with_arrivals_in_order_of_time(speeds: list[float], delay: int) -> None:
    steps = 6 * H
    rounds, workers = told_slowly(speeds, steps, delay)
    swarm = Swarm(len(speeds), speeds)
    found = swarm.run(lambda session: train(session, steps, delay))
    assert swarm.state.round == 1 + len(rounds)
    assert len(rounds) > 6  # nobody has waited for the slowest
    for mine, other in zip(found, workers, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-6)


def test_peers_that_always_come_together_are_diloco() -> None:
    def diloco(session: Any) -> torch.Tensor:
        net, inner = fresh()
        with DiLoCo(net, inner, H, session, codec="int8"):
            for step in range(5 * H):
                gradient_step(net, inner, session.number, step)
        return flat(net)

    found = Swarm(3).run(lambda session: train(session, 5 * H, 1, codec="int8"))
    assert all(map(torch.equal, found, Swarm(3).run(diloco)))


def test_the_next_swarm_ends_with_the_same_bits() -> None:
    def once() -> list[torch.Tensor]:
        return Swarm(3, [1.0, 0.7, 0.3]).run(lambda session: train(session, 8 * H, 3))

    assert all(map(torch.equal, once(), once()))


def test_11_of_peers_that_come_one_after_the_other_the_first_steps_are_one_of_diloco() -> None:
    """They all begin with the first parameters, so N = M makes one synchronous step of them."""

    def diloco(session: Any) -> None:
        net, inner = fresh()
        with DiLoCo(net, inner, H, session, codec="float32"):
            for step in range(H):
                gradient_step(net, inner, session.number, step)

    together, apart = Swarm(3), Swarm(3, [1.0, 0.9, 0.8])
    together.run(diloco)
    apart.run(lambda session: train(session, H, 3))
    assert (together.state.round, apart.state.round) == (2, 4)
    for name in ("theta", "momentum"):
        both = (getattr(swarm.state, name).view("f4") for swarm in (apart, together))
        mine, other = map(torch.from_numpy, both)
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-7)


def test_one_peer_alone_sends_its_result_to_all() -> None:
    swarm = Swarm(3, [1.0, 0.9, 0.8])
    swarm.run(lambda session: train(session, H, 3))
    assert swarm.encoded_bytes == 3 * 2 * 4 * swarm.state.theta.size


def test_what_a_round_could_not_use_is_in_the_next_submission(
    local_run: Any, in_threads: Any
) -> None:
    """Beside a peer that does not move: the mean is two thirds of all that this one has done."""
    run, nets = local_run(2, late=[(0, 1)]), [fresh(), fresh()]
    start = flat(nets[0][0])
    nets[1][1].param_groups[0]["lr"] = 0.0

    def each(worker: int) -> None:
        net, inner = nets[worker]
        options = {"codec": "float32", "outer_delay": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
        with AsyncDiLoCo(net, inner, H, run.sessions[worker], **options) as outer:
            for step in range(2 * H):
                gradient_step(net, inner, worker, step)
            assert outer.metrics()["missed"] == (worker == 0)

    in_threads([lambda: each(0), lambda: each(1)])
    assert run.weights == [{1: 1.0 * H}, {0: 2.0 * H, 1: 1.0 * H}]
    alone, inner = fresh()
    for step in range(2 * H):
        gradient_step(alone, inner, 0, step)
    expected = start + (flat(alone) - start) * 2 / 3
    for net, _ in nets:
        torch.testing.assert_close(flat(net), expected, rtol=0, atol=1e-6)


def test_evaluating_drops_no_work_when_rounds_were_undone(local_run: Any) -> None:
    run = local_run()
    net, inner = fresh()
    with AsyncDiLoCo(net, inner, H, run.sessions[0], codec="float32", outer_delay=1) as outer:
        gradient_step(net, inner, 0, 0)
        before = flat(net)
        run.epoch += 1
        with outer.outer_parameters():
            assert not torch.equal(flat(net), before)
        assert torch.equal(flat(net), before)


def test_loading_takes_the_runs_parameters_as_the_anchor(local_run: Any) -> None:
    """Steps that move nothing are a pseudo-gradient of zero then."""
    run = local_run()
    net, inner = fresh()
    inner.param_groups[0]["lr"] = 0.0
    with AsyncDiLoCo(net, inner, H, run.sessions[0], codec="float32", outer_delay=1) as outer:
        run.theta += 1
        outer.load_state_dict(outer.state_dict())
        before = run.theta.copy()
        for step in range(H):
            gradient_step(net, inner, 0, step)
    assert run.round == 1
    assert (run.theta == before).all()


def test_a_saved_state_has_the_anchor_which_may_be_older_than_the_run(local_run: Any) -> None:
    run = local_run()
    net, inner = fresh()
    with AsyncDiLoCo(net, inner, H, run.sessions[0], codec="float32", outer_delay=1) as outer:
        run.theta += 1  # by the rounds of others
        gradient_step(net, inner, 0, 0)
        saved, parameters = outer.state_dict(), flat(net)
        anchor = outer._anchor.copy()
        with torch.no_grad():
            net[0].weight.zero_()
        outer.load_state_dict(outer.state_dict() | {"model": "of others"})
        assert not (outer._anchor == anchor).any()
        load(net, parameters)
        outer.load_state_dict(saved)
        assert (outer._anchor == anchor).all()


def test_wrong_use_is_an_error() -> None:
    with pytest.raises(ConfigError, match="outer_delay is 0"):
        Swarm(1).run(lambda session: train(session, H, 0))
    for speeds in ([1.0], [1.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]):
        with pytest.raises(ConfigError, match="speeds"):
            Swarm(2, speeds)

    def gathers(session: Any) -> None:
        net, inner = fresh()
        with AsyncDiLoCo(net, inner, H, session, outer_delay=2):
            session.all_gather(b"")

    with pytest.raises(ConfigError, match="nobody waits"):
        Swarm(2).run(gathers)
