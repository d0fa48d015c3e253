"""Acceptance tests of reference/algorithms.md section 13 through real daemons and real torch."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
from harness.processes import fleet
from torch import nn

import atoll
from atoll.optim import DiLoCo

STEPS = 12


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    dice = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 6, generator=dice), torch.randn(8, 3, generator=dice)) for _ in range(STEPS)
    ]


def step(model: nn.Module, inner: torch.optim.Optimizer, batch: tuple[torch.Tensor, ...]) -> None:
    inner.zero_grad()
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    inner.step()


def assert_same(one: nn.Module, other: nn.Module, atol: float) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=0)


def test_1_one_peer_with_outer_sgd_is_plain_training(tmp_path: Path) -> None:
    plain = make_model()
    ours = copy.deepcopy(plain)
    with fleet(tmp_path) as run:
        home = run.up("a").home
        plain_inner = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        inner = torch.optim.AdamW(ours.parameters(), lr=1e-2)
        with DiLoCo(
            ours, inner, 3, atoll.connect(home), outer_lr=1.0, outer_momentum=0.0, codec="float32"
        ) as outer:
            for batch in batches(1):
                step(plain, plain_inner, batch)
                step(ours, inner, batch)
            assert outer.metrics()["rounds"] == STEPS / 3
        assert_same(plain, ours, atol=2e-6)


def test_2_every_step_with_sgd_is_data_parallel_sgd(tmp_path: Path) -> None:
    plain = make_model()
    data = [batches(1), batches(2)]
    inner = torch.optim.SGD(plain.parameters(), lr=0.1)
    for one, other in zip(*data, strict=True):
        inner.zero_grad()
        loss = sum(nn.functional.mse_loss(plain(x), y) for x, y in (one, other)) / 2
        loss.backward()
        inner.step()

    ours = [make_model(), make_model(seed=9)]  # the second starts elsewhere: the run's win
    with fleet(tmp_path) as run:
        run.form("ab")
        homes = [run.peers[name].home for name in "ab"]
        ready, failures = threading.Barrier(2), []

        def train(which: int) -> None:
            try:
                model = ours[which]
                sgd = torch.optim.SGD(model.parameters(), lr=0.1)
                with DiLoCo(
                    model,
                    sgd,
                    1,
                    atoll.connect(homes[which]),
                    outer_lr=1.0,
                    outer_momentum=0.0,
                    codec="float32",
                ) as outer:
                    ready.wait(30)
                    for batch in data[which]:
                        step(model, sgd, batch)
                    assert outer.metrics()["missed"] == 0
            except BaseException as error:  # to be raised in the test's own thread
                failures.append(error)
                ready.abort()

        # The first to attach initialises the run; it must be the one that the reference started as.
        first = threading.Thread(target=train, args=(0,))
        first.start()
        run.peers["a"].reaches(1)
        second = threading.Thread(target=train, args=(1,))
        second.start()
        for thread in (first, second):
            thread.join(60)
            assert not thread.is_alive()
        if failures:
            raise failures[0]
    for model in ours:
        assert_same(plain, model, atol=5e-6)


def test_a_restarted_trainer_goes_on_from_the_runs_parameters(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        home = run.up("a").home
        model = make_model()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with DiLoCo(model, inner, 4, atoll.connect(home)) as outer:
            for batch in batches(3):
                step(model, inner, batch)
            saved = outer.state_dict()
        fresh = make_model(seed=5)
        inner = torch.optim.AdamW(fresh.parameters(), lr=1e-2)
        with DiLoCo(fresh, inner, 4, atoll.connect(home)) as outer:
            outer.load_state_dict(saved)
            assert outer.metrics()["steps"] == STEPS
            assert_same(model, fresh, atol=0)


def test_the_trainer_learns_at_once_that_its_daemon_died(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        peer = run.up("a")
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        peer_session = atoll.connect(peer.home, reconnect_s=0)
        outer = DiLoCo(model, inner, 1000, peer_session)  # far from the next round
        peer.kill()
        peer.ends()
        with pytest.raises(atoll.AtollError, match=r"ATOLL-E82 the daemon at .* died"):
            step(model, inner, batches(4)[0])
        outer.close()
