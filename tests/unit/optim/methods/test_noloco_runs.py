"""NoLoCo trainers that come, go, fall behind, save themselves, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.noloco import STEPS, H, flat, fresh, local_step, train
from torch import nn

from atoll.collectives.errors import CodecError, ConfigError, IncompatibleRunError
from atoll.optim import NoLoCo, Swarm
from atoll.optim.methods.gossip import groups
from atoll.optim.swarm import SwarmSession


def test_who_has_ended_is_missed_by_its_partners() -> None:
    """Of three, one has ended: the others exchange when they are together, and go on alone."""

    def one(session: SwarmSession) -> dict[str, float]:
        net, inner = fresh(session.number)
        with NoLoCo(net, inner, H, session, codec="float32") as outer:
            session.barrier()
            for step in range((2 if session.number == 1 else 12) * H):
                local_step(net, inner, session.number, step)
            return outer.metrics()

    found = Swarm(3).run(one)
    assert [metrics["outer_steps"] for metrics in found] == [12, 2, 12]
    together = sum((0, 2) in groups(3, 2, step) for step in range(3, 13))
    early = [[m for g in groups(3, 2, step) if len(g) == 2 for m in g] for step in (1, 2)]
    for worker in (0, 2):
        expected = together + sum(worker in members for members in early)
        assert 12 - found[worker]["solo"] == expected


def test_a_newcomer_takes_over_the_newest_parameters_and_the_number() -> None:
    seen: list[torch.Tensor] = []

    def one(session: SwarmSession) -> int:
        net, inner = fresh(session.number)
        if session.number == 2:
            for _ in range(40):
                session.newest("worker-0", "phi")  # lets the others go on
        with NoLoCo(net, inner, H, session, codec="float32") as outer:
            if session.number == 2:
                seen.append(flat(net))
            begun = outer.metrics()["outer_step"]
            for step in range(19 * H):
                if session.number != 2:
                    with outer.outer_parameters():
                        known.append(flat(net))
                local_step(net, inner, session.number, step)
            return int(begun)

    known: list[torch.Tensor] = []
    first, second, late = Swarm(3).run(one)
    assert (first, second) == (1, 1)
    assert late > 1
    assert any(torch.equal(seen[0], phi) for phi in known)
    assert not torch.equal(seen[0], flat(fresh(2)[0]))


def test_who_is_behind_goes_on_from_its_partners_number_or_begins_anew() -> None:
    """Worker 1 was away for some outer steps; as seen from it, the others are ahead."""

    def run(away: int) -> tuple[dict[str, float], torch.Tensor, torch.Tensor]:
        def one(session: SwarmSession) -> Any:
            net, inner = fresh(session.number)
            with NoLoCo(net, inner, 1, session, codec="float32") as outer:
                session.barrier()  # both have begun
                state = outer.state_dict()
                if session.number == 0:
                    state["outer_step"] += away
                    state["phi"] += 1.0
                outer.load_state_dict(state)
                session.barrier()
                local_step(net, inner, session.number, 0)
                return outer.metrics(), outer.state_dict()

        (_, _), (metrics, state) = Swarm(2).run(one)
        return metrics, state["phi"], state["momentum"]

    metrics, phi, momentum = run(away=5)
    assert (metrics["outer_step"], metrics["solo"]) == (6, 1)
    assert phi.mean() < 0.5  # its own
    assert momentum.any()
    metrics, phi, momentum = run(away=50)
    assert (metrics["outer_step"], metrics["solo"]) == (51, 0)
    assert phi.mean() > 0.5  # its partner's
    assert not momentum.any()


def test_a_state_is_saved_and_restored() -> None:
    def half(session: SwarmSession) -> tuple[dict[str, Any], dict[str, Any]]:
        net, inner = fresh(session.number)
        with NoLoCo(net, inner, H, session, codec="float32") as outer:
            for step in range(2 * H):
                local_step(net, inner, session.number, step)
            return outer.state_dict(), inner.state_dict()

    saved = Swarm(3).run(half)

    def rest(session: SwarmSession) -> torch.Tensor:
        net, inner = fresh(session.number)
        state, inner_state = saved[session.number]
        with NoLoCo(net, inner, H, session, codec="float32") as outer:
            with pytest.raises(ConfigError, match="not the state"):
                outer.load_state_dict({**state, "phi": state["phi"][1:]})
            outer.load_state_dict(state)
            inner.load_state_dict(inner_state)
            for step in range(2 * H, STEPS * H):
                local_step(net, inner, session.number, step)
            with outer.outer_parameters():
                return flat(net)

    whole = Swarm(3).run(train)
    for mine, other in zip(Swarm(3).run(rest), whole, strict=True):
        assert torch.equal(mine, other)


def test_working_parameters_of_bfloat16_lose_no_small_steps() -> None:
    """The difference is taken against φ as the model has rounded it."""

    def one(session: SwarmSession) -> torch.Tensor:
        net, inner = fresh(0, torch.bfloat16)
        with NoLoCo(net, inner, 1, session, group=1, gossip=0.0) as outer:
            before = outer.state_dict()["phi"]
            outer._after_step(inner, (), {})
            assert torch.equal(outer.state_dict()["phi"], before)
            local_step(net, torch.optim.SGD(net.parameters(), lr=0.1), 0, 0)
            outer._after_step(inner, (), {})
            phi: torch.Tensor = outer.state_dict()["phi"]
            with outer.outer_parameters():
                assert torch.equal(flat(net), phi.bfloat16().float())
            return phi - before

    (moved,) = Swarm(1).run(one)
    assert moved.abs().max() > 0


def test_what_cannot_be_is_refused() -> None:
    def other(**differs: Any) -> Callable[[SwarmSession], object]:
        return lambda session: train(session, 1, **(differs if session.number else {}))

    with pytest.raises(ConfigError, match=r"between 0 and 0.38"):
        Swarm(1).run(lambda session: train(session, outer_momentum=0.9, gossip=0.7))
    with pytest.raises(ConfigError, match="partner_wait_s"):
        Swarm(1).run(lambda session: train(session, partner_wait_s=-1.0))
    with pytest.raises(ConfigError, match="group"):
        Swarm(1).run(lambda session: train(session, group=33))
    for differs in ({"gossip": 0.6}, {"group": 3}, {"codec": "int8"}, {"outer_momentum": 0.4}):
        with pytest.raises(IncompatibleRunError, match=next(iter(differs))):
            Swarm(2).run(other(**differs))

    def other_model(session: SwarmSession) -> None:
        net = nn.Linear(5, 2 + session.number)
        NoLoCo(net, torch.optim.SGD(net.parameters(), lr=0.1), 1, session)

    with pytest.raises(IncompatibleRunError, match="weight: yours 0x3x5 float32, run 0x2x5"):
        Swarm(2).run(other_model)

    def diverges(session: SwarmSession) -> None:
        net, inner = fresh()
        with NoLoCo(net, inner, 1, session):
            for p in net.parameters():
                p.grad = torch.full_like(p, torch.inf)
            inner.step()

    with pytest.raises(CodecError, match=r"NaN or Inf in 0\.bias"):
        Swarm(1).run(diverges)


def test_it_says_when_failing_partners_could_drive_replicas_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Swarm(1).run(lambda session: train(session, 1, gossip=1.2))
    assert "seldom fail; below 1" in capsys.readouterr().err
    Swarm(1).run(lambda session: train(session, 1, gossip=0.9))
    assert "seldom" not in capsys.readouterr().err
