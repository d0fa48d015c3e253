"""Test a run that begins with short rounds of a mean: same bits and steps, whoever comes when."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
import torch
from harness.troubled_swarm import TroubledSwarm
from torch import nn

from atoll.collectives import get_codec
from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, IncompatibleRunError
from atoll.optim import DiLoCo, LocalSGD, Swarm
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.outer_step import OuterStep
from atoll.optim.replay.recorder import Replay
from atoll.optim.run_spec import RunSpec, blob, check_same, parse_blob
from atoll.peer.client.trainer_channel import Outcome

SPEC = RunSpec(sync_every=5, codec="float32", warm_rounds=3, warm_every=2)
COUNT = 300


def moved(spec: RunSpec, first: int, last: int) -> tuple[F32, F32]:
    """Return parameters and momentum after rounds ``first`` to ``last``, each with a delta of 1."""
    steps, theta = OuterStep(spec, COUNT), np.zeros(COUNT, np.float32)
    kept = np.zeros(COUNT, np.float32)
    delta = np.ones(COUNT, np.float32).view(np.uint8)
    for number in range(first, last + 1):
        bytes_ = kept.view(np.uint8)
        steps(get_codec("float32"), delta, theta, bytes_, round_number=number, contributors=2)
    return theta, kept


def test_warm_rounds_take_the_mean_and_then_momentum_begins() -> None:
    theta, momentum = moved(SPEC, 2, 4)
    assert theta.tolist() == [-3.0] * COUNT
    assert not momentum.any()
    theta, momentum = moved(SPEC, 2, 6)
    after, after_momentum = moved(RunSpec(sync_every=5, codec="float32"), 5, 6)
    np.testing.assert_allclose(theta, after - 3.0, rtol=1e-6)
    assert momentum.tobytes() == after_momentum.tobytes()


def test_steps_follow_from_the_number_of_the_round() -> None:
    assert [SPEC.steps_of(number) for number in range(1, 8)] == [5, 2, 2, 2, 5, 5, 5]
    assert [SPEC.steps_until(number) for number in range(1, 8)] == [0, 2, 4, 6, 11, 16, 21]


def test_older_versions_can_join_a_run_without_it() -> None:
    manifest = Manifest.of([Parameter("w", (COUNT,))])
    assert not {"warm_rounds", "warm_every"} & RunSpec(sync_every=1).to_wire().keys()
    assert parse_blob(blob(SPEC, manifest))[0] == SPEC
    plain = RunSpec(sync_every=5, codec="float32")
    with pytest.raises(IncompatibleRunError, match="warm_rounds: yours 0, run 3"):
        check_same((plain, manifest), (SPEC, manifest), "demo")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"method": "local_sgd", "warm_rounds": 1}, "0 to 0 rounds in a run of local_sgd"),
        ({"warm_rounds": 3, "warm_every": 6}, "1 to 5 steps"),
        ({"warm_every": 2}, "1 to 1 steps"),
        ({"warm_rounds": -1}, "0 to 1,000,000 rounds"),
    ],
)
def test_numbers_out_of_range_are_named(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        RunSpec(**{"sync_every": 5, **options})


# ---------------------------------------------------------------- in a loop


def trained(
    workers: int, steps: int, make: Any, missed: Collection[tuple[int, int]] = ()
) -> tuple[Swarm, list[list[int]]]:
    """Return a swarm after so many steps of each, and ``global_step`` after each of them.

    ``missed``: pairs of a worker and a round that goes on without it.
    """
    seen: list[list[int]] = [[] for _ in range(workers)]

    def train(session: Any) -> None:
        wait = session.wait

        def waited(fragment: int = 0) -> Outcome:
            """Leave the number of the round after a miss, as a daemon's channel does."""
            number, outcome = session.round, wait(fragment)
            session.round = number if outcome.kind == "missed" else session.round
            return outcome

        session.wait = waited
        torch.manual_seed(0)
        model = nn.Linear(6, 5)
        outer = make(model, torch.optim.SGD(model.parameters(), lr=0.1), session)
        torch.manual_seed(session.number)
        for _ in range(steps):
            model(torch.randn(4, 6)).square().mean().backward()
            for inner in outer._inners:
                inner.step()
                inner.zero_grad()
            seen[session.number].append(outer.global_step)

    swarm = TroubledSwarm(workers, missed)
    swarm.run(train)
    return swarm, seen


def test_a_loop_takes_short_rounds_first() -> None:
    swarm, seen = trained(
        2, 16, lambda m, i, s: DiLoCo(m, i, 5, s, warm_start=6, warm_every=2, codec="float32")
    )
    assert swarm.state.round == 1 + 3 + 2
    assert seen == [list(range(1, 17))] * 2


@pytest.mark.parametrize("number", [2, 3, 4])
def test_who_misses_a_warm_round_takes_as_many_steps_as_the_others_in_the_next(
    number: int,
) -> None:
    make = lambda m, i, s: DiLoCo(m, i, 5, s, warm_start=6, warm_every=2)  # noqa: E731
    swarm, seen = trained(2, 16, make, missed=[(1, number)])
    assert swarm.state.round == 1 + 3 + 2
    assert seen == [list(range(1, 17))] * 2


def test_the_warm_phase_is_local_sgd() -> None:
    """Compare to the bit: it has the same rounds and the same rule."""
    warm, _ = trained(3, 6, lambda m, i, s: DiLoCo(m, i, 50, s, warm_start=6, codec="int8"))
    local, _ = trained(3, 6, lambda m, i, s: LocalSGD(m, i, 2, s, codec="int8"))
    assert warm.state.theta.tobytes() == local.state.theta.tobytes()
    assert not warm.state.momentum.any()


def test_a_start_that_is_no_multiple_of_its_rounds_is_a_little_longer() -> None:
    swarm, _ = trained(1, 8, lambda m, i, s: DiLoCo(m, i, 50, s, warm_start=7, warm_every=2))
    assert swarm.state.round == 1 + 4


@pytest.mark.parametrize("options", [{"round_s": 10.0}, {"replay": Replay()}])
def test_what_needs_rounds_of_one_length_is_refused(options: dict[str, Any]) -> None:
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="warm_start=4"):
        Swarm(1).run(lambda session: DiLoCo(model, inner, 5, session, warm_start=4, **options))
