"""What validators change in a trainer's rounds: a missed round is as if it had not been."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness.diloco import flat, linear, theta, wrap

from atoll.collectives.errors import ConfigError
from atoll.optim import LocalSGD, Replay
from atoll.optim.replay.replaying import ReplayTask
from atoll.optim.replay.step_disclosure import Extent


class Drawing:
    """A session with validators, in which nobody is drawn; the other peer submits as well."""

    def __init__(self, session: Any, other: Any) -> None:
        self._session, self._other = session, other
        self.steps: list[tuple[float, bytes]] = []

    @property
    def channel(self) -> Drawing:
        """It is its own."""
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def submit(self, fill: Any, weight: float, fragment: int = 0, steps: bytes = b"") -> None:
        self.steps.append((weight, steps))
        self._other.submit(lambda out, lo: np.copyto(out, 0.5), 1.0)
        self._session.submit(fill, weight)

    def validations(self) -> list[Any]:
        return []

    def shown(self, validation: Any) -> None:
        pytest.fail("nothing is drawn")

    fits = judged = ask_vector = shown


def task() -> ReplayTask:
    model = linear()
    inner = torch.optim.Adam(model.parameters(), lr=0.1)

    def train(batches: Any, _: int) -> None:
        for indices in batches:
            step(model, inner, int(indices[0]))

    return ReplayTask(model, inner, train)


def step(model: Any, inner: Any, index: int) -> None:
    inner.zero_grad()
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(index))
    model(inputs).square().mean().backward()
    inner.step()


def moments(inner: torch.optim.Optimizer) -> torch.Tensor:
    return torch.cat([state["exp_avg"].flatten() for state in inner.state.values()])


def test_steps_of_a_missed_round_are_dropped(local_run: Any) -> None:
    run, model = local_run(peers=2, late=[(0, 2), (0, 3)]), linear()
    run.sessions[0] = session = Drawing(run.sessions[0], run.sessions[1])
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    kept = Replay(segment_steps=1, task=task)
    outer = wrap(model, run, inner=inner, sync_every=2, audit=True, validators=1, replay=kept)
    extents: list[Extent] = []
    after = []
    for number in range(8):  # rounds 1 and 4 count
        outer.note_batch([number])
        step(model, inner, number)
        if number % 2:
            after.append(moments(inner).clone())
            assert torch.equal(flat(model), theta(run))
        else:
            assert outer.recorder is not None
    assert outer.metrics()["missed"] == 2
    assert torch.equal(after[1], after[0])
    assert torch.equal(after[2], after[0])
    assert not torch.equal(after[3], after[0])
    assert outer.recorder is not None
    for round_number in (1, 4):
        if (commitment := outer.recorder.commitment(round_number)) is not None:
            extents.append(commitment.extent)
            assert session.steps[round_number - 1][1] == commitment.digest
    (extent,) = extents  # of the last one that counted
    assert (extent.base, extent.steps, extent.segment_steps) == (3, 2, 1)
    opening = outer.recorder.opening(4, 0)
    assert opening.before is not None
    assert opening.before.leads_to(session.steps[0][1])  # it goes on from the first one


def test_validators_take_a_task(local_run: Any) -> None:
    for replay in (None, Replay()):
        with pytest.raises(ConfigError, match="without a replay that has a task"):
            wrap(linear(), local_run(), audit=True, validators=1, replay=replay)
    model = linear()
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    outer = LocalSGD(
        model,
        inner,
        2,
        local_run().sessions[0],
        audit=True,
        validators=2,
        replay=Replay(segment_steps=3, task=task),
    )
    assert (outer.spec.validators, outer.spec.segment_steps) == (2, 3)
