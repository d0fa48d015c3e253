"""The hyper-parameters of a population, and what members refuse of each other."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from harness.members import BOUNDS, Trainer
from torch import nn

from atoll.collectives.errors import ConfigError, IncompatibleRunError, RemoteProtocolError
from atoll.optim import Population, Swarm
from atoll.optim.swarm import SwarmSession


def test_counters_and_hyperparameters_are_saved():
    def each(session: SwarmSession) -> None:
        trainer = Trainer(
            session, 0.1, values={"dropout": 0.5}, bounds={**BOUNDS, "dropout": (0, 1)}
        )
        trainer.step(3)
        saved = json.loads(json.dumps(trainer.member.state_dict()))
        again = Trainer(session, 0.7, values={"dropout": 0.1}, bounds={**BOUNDS, "dropout": (0, 1)})
        again.member.load_state_dict(saved)
        assert again.member.hyperparameters() == {"dropout": [0.5], "lr": [0.1]}
        assert (again.member.steps, again.member.turn) == (3, 3)
        with pytest.raises(ConfigError, match="not a Population state"):
            again.member.load_state_dict({"version": 1})
        again.member.close()
        again.step()
        assert again.member.steps == 3

    Swarm(1).run(each)


def test_each_group_has_a_value_of_its_own_and_other_numbers_are_read_by_their_owner():
    def each(session: SwarmSession) -> list[Any]:
        weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        k = 1 + session.number
        inner = torch.optim.SGD(
            [{"params": [weights[0]], "lr": 0.1 * k}, {"params": [weights[1]], "lr": 0.2 * k}]
        )
        values = {"dropout": 0.3}
        with Population(
            nn.ParameterList(weights),
            inner,
            session,
            lambda: float(session.number),
            1,
            {"lr": (0.09, 0.5), "dropout": (0.0, 0.33)},
            values=values,
        ):
            for p in weights:
                p.grad = torch.ones(2)
            inner.step()
        return [inner.param_groups[0]["lr"], inner.param_groups[1]["lr"], values["dropout"]]

    best, worst = Swarm(2).run(each)
    assert best == [0.1, 0.2, 0.3]
    assert (worst[0], worst[1]) in [(0.09, pytest.approx(0.16)), (0.12, pytest.approx(0.24))]
    assert worst[2] in (pytest.approx(0.24), 0.33)


def test_a_rate_may_be_a_tensor():
    def each(session: SwarmSession) -> float:
        weight = nn.Parameter(torch.ones(2))
        rate = torch.tensor(0.5 / (1 + session.number))
        inner = torch.optim.SGD([weight], lr=rate)
        Population(nn.ParameterList([weight]), inner, session, lambda: session.number, 1, BOUNDS)
        weight.grad = torch.ones(2)
        inner.step()
        assert inner.param_groups[0]["lr"] is rate
        return float(rate)

    best, worst = Swarm(2).run(each)
    assert best == 0.5
    assert worst in (pytest.approx(0.4), pytest.approx(0.6))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"bounds": {"momentum": (0, 1)}}, "no 'momentum'"),
        ({"bounds": {"lr": (1, 0)}}, "bounds of 'lr' are 1 and 0"),
        ({"bounds": {"lr": (0, math.inf)}}, "bounds of 'lr'"),
        ({"bounds": {"lr": (0.2, 0.3)}}, "begins with 0.1"),
        ({"bounds": {"betas": (0, 1)}}, "not a number"),
        ({"start": "worst"}, "start is 'worst'"),
        ({"seed": -1}, "seed is -1"),
        ({"interval": 0}, "sync_every is 0"),
    ],
)
def test_impossible_numbers_are_refused(options, why):
    with pytest.raises(ConfigError, match=why):
        Swarm(1).run(lambda session: Trainer(session, **options))


def test_inner_optimizers_of_another_model_are_refused():
    """They would be copied, and train something else."""
    weight = nn.Parameter(torch.ones(2))
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for inner, why in [(other, "holds no trainable parameter of the model"), ([], "no inner opt")]:

        def each(session: SwarmSession, inner: Any = inner) -> None:
            Population(nn.ParameterList([weight]), inner, session, lambda: 1.0, 1, BOUNDS)

        with pytest.raises(ConfigError, match=why):
            Swarm(1).run(each)


def test_other_intervals_are_refused():
    with pytest.raises(IncompatibleRunError, match="sync_every"):
        Swarm(2).run(lambda session: Trainer(session, interval=1 + session.number))


def test_members_must_be_alike():
    def other_names(session: SwarmSession) -> None:
        bounds = {"lr": (0, 1)} if session.number else {"weight_decay": (0, 1)}
        Trainer(session, bounds=bounds).step()

    with pytest.raises(RemoteProtocolError, match="hyper-parameters"):
        Swarm(2).run(other_names)

    def other_optimizer(session: SwarmSession) -> None:
        weight = nn.Parameter(torch.ones(2))
        kind = torch.optim.SGD if session.number else torch.optim.Adam
        inner = kind([weight], lr=0.1)
        Population(nn.ParameterList([weight]), inner, session, lambda: 1.0, 1, BOUNDS)
        weight.grad = torch.ones(2)
        inner.step()

    with pytest.raises(RemoteProtocolError, match="model or inner optimizer"):
        Swarm(2).run(other_optimizer)


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"\xff",
        b"[]",
        b"null",
        b"[" * 50_000,
        b'[-1, 1.0, false, {"lr": [0.1]}, "MODEL"]',
        b'[1.5, 1.0, false, {"lr": [0.1]}, "MODEL"]',
        b'[99999999999999999999, 1.0, false, {"lr": [0.1]}, "MODEL"]',
        b'[1, "x", false, {"lr": [0.1]}, "MODEL"]',
        b'[1, NaN, false, {"lr": [0.1]}, "MODEL"]',
        b'[1, 1.0, 0, {"lr": [0.1]}, "MODEL"]',
        b'[1, 1.0, false, {"lr": [Infinity]}, "MODEL"]',
        b'[1, 1.0, false, {"lr": ["0.1"]}, "MODEL"]',
        b'[1, 1.0, false, {"lr": [0.1, 0.1]}, "MODEL"]',
        b'[1, 1.0, false, {"lr": 0.1}, "MODEL"]',
        b'[1, 1.0, false, [["lr", [0.1]]], "MODEL"]',
        b'[1, 1.0, false, {"lr": [0.1]}, "other"]',
    ],
)
def test_malformed_bytes_are_refused_and_named(wrong):
    def each(session: Any) -> None:
        trainer = Trainer(session)
        if session.number:
            model = trainer.member._model.encode()
            session.all_gather(b"p\x000000" + wrong.replace(b"MODEL", model))
        else:
            trainer.step()

    with pytest.raises(RemoteProtocolError, match="what worker-1 says at turn 0"):
        Swarm(2).run(each)
