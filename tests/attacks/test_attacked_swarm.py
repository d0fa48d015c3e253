"""Runs in one process some of whose workers attack: what is trained, and who is left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from atoll.collectives.errors import CodecError, ConfigError
from atoll.collectives.robust.coordinate import Rows
from atoll.optim import DiLoCo, SparseLoCo, Swarm
from atoll.optim.swarm import SwarmSession
from attacks.base import Attack, Seen
from attacks.catalogue import ATTACKS
from attacks.crude import SignFlip
from attacks.hidden import LabelFlip
from attacks.swarm import AttackedSwarm

WORKERS, ATTACKERS, ROUNDS = 10, (0, 1, 2), 6


def train(session: SwarmSession, rule: str = "mean", moves: float = 1.0) -> None:
    """Every parameter goes by ``moves`` in a step, and a little more with a larger number."""
    model = nn.Linear(30, 20, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    outer = DiLoCo(
        model, inner, 1, session, aggregate=rule, outer_lr=1.0, outer_momentum=0.0, codec="float32"
    )
    for _ in range(ROUNDS):
        model.weight.grad = torch.full_like(model.weight, -moves - session.number / 100)
        inner.step()
    outer.close()


def trained(rule: str, attack: Attack, after: int = 0) -> AttackedSwarm:
    swarm = AttackedSwarm(WORKERS, attack, ATTACKERS, after, seed=1)
    swarm.run(lambda session: train(session, rule))
    return swarm


class Watcher(Attack):
    """Honest, and remembers what it has seen."""

    def __init__(self) -> None:
        self.watched: list[Seen] = []
        self.attacked: list[Seen] = []

    def watch(self, seen: Seen) -> None:
        self.watched.append(seen)

    def send(self, seen: Seen) -> Rows:
        self.attacked.append(seen)
        return seen.own.copy()


@pytest.mark.parametrize("rule", ["mean", "nnm+trimmed(f=3)"])
def test_attackers_that_send_what_is_honest_change_no_bit(rule: str) -> None:
    honest = Swarm(WORKERS)
    honest.run(lambda session: train(session, rule))
    attack = Watcher()
    attacked = trained(rule, attack, after=2)
    assert np.array_equal(attacked.state.theta, honest.state.theta)
    assert (len(attack.watched), len(attack.attacked)) == (2, ROUNDS - 2)


def test_attackers_see_pseudo_gradients_and_the_rule() -> None:
    attack = Watcher()
    trained("trimmed(f=3)", attack)
    for seen in attack.attacked:
        assert np.allclose(seen.own[:, 0], [-1.0, -1.01, -1.02])
        assert np.allclose(seen.honest[:, 0], -1 - np.arange(3, 10) / 100)
        assert seen.rule is not None
        assert seen.rule.text == "trimmed(f=3)"
        assert seen.places == ATTACKERS
    assert len({seen.key for seen in attack.attacked}) == ROUNDS


def test_what_they_foresee_is_what_the_round_comes_to() -> None:
    """The rule that a search asks is the one that the run applies."""
    rule = "bucketing(s=2)+median(f=2)"
    steps: list[Rows] = []

    class Foreseeing(SignFlip):
        def send(self, seen: Seen) -> Rows:
            sent = super().send(seen)
            steps.append(seen.aggregated(sent))
            return sent

    swarm = AttackedSwarm(WORKERS, Foreseeing(2.0), (0, 1))
    swarm.run(lambda session: train(session, rule))
    assert len(steps) == ROUNDS
    assert np.allclose(swarm.state.theta, -np.sum(steps, axis=0), atol=1e-4)


def test_a_sign_flip_takes_the_mean_back_and_not_a_rule() -> None:
    away = [float(trained(rule, SignFlip(10.0)).state.theta.mean()) for rule in RULES]
    assert away[0] < -ROUNDS
    assert all(ROUNDS * 0.99 < each < ROUNDS * 1.1 for each in away[1:])


RULES = ["mean", "trimmed(f=3)", "gm(f=3)", "nnm+trimmed(f=3)"]


@pytest.mark.parametrize("name", ["nan", "infinity"])
@pytest.mark.parametrize("rule", RULES[1:])
def test_what_is_not_finite_is_left_out_and_its_sender_named(rule: str, name: str) -> None:
    swarm = trained(rule, ATTACKS[name](), after=1)
    assert ROUNDS * 1.03 < float(swarm.state.theta.mean()) < ROUNDS * 1.1
    named = {(n, worker) for n, worker, _ in swarm.state.excluded}
    rounds = range(3, ROUNDS + 2)  # the first gave the parameters, and in the next all are honest
    assert named == {(n, worker) for n in rounds for worker in ATTACKERS}


def test_what_is_not_finite_ends_a_run_with_the_mean() -> None:
    with pytest.raises(CodecError):
        trained("mean", ATTACKS["nan"]())


def test_a_rule_that_needs_more_peers_than_are_left_stops() -> None:
    with pytest.raises(ConfigError, match="at least 9 peers"):
        trained("multi_krum(f=3)", ATTACKS["nan"]())


def test_an_absurd_length_is_left_out_as_well() -> None:
    swarm = trained("nnm+trimmed(f=3)", SignFlip(1e9))
    assert {worker for _, worker, _ in swarm.state.excluded} == {*ATTACKERS}
    assert "times as long as the others'" in swarm.state.excluded[0][2]


def test_methods_that_submit_differences_are_attacked_too() -> None:
    def sparse(session: SwarmSession) -> None:
        model = nn.Linear(64, 64, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        outer = SparseLoCo(model, inner, 1, session, outer_lr=1.0)
        model.weight.grad = torch.full_like(model.weight, -1.0)
        inner.step()
        outer.close()

    honest = AttackedSwarm(WORKERS, LabelFlip(), ATTACKERS)
    honest.run(sparse)
    flipped = AttackedSwarm(WORKERS, SignFlip(10.0), ATTACKERS)
    flipped.run(sparse)
    assert float(honest.state.theta.sum()) > 0 > float(flipped.state.theta.sum())
