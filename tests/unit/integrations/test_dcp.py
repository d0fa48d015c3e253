"""Methods in checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor, nn

import atoll
from atoll.collectives.errors import CheckpointError, ConfigError
from atoll.integrations import dcp

SYNC_EVERY = 3
pytestmark = pytest.mark.usefixtures("alone")


class Parts:
    """A loop whose data is always the same: where it is in them does not matter."""

    def __init__(self, session: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(4, 3)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.outer = atoll.SparseLoCo(self.model, self.inner, SYNC_EVERY, session)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.ones(2, 4)).square().mean().backward()
            self.inner.step()
            self.inner.zero_grad()

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optim": self.inner.state_dict(),
            dcp.KEY: dcp.MethodState(self.outer),
        }

    def load(self, folder: Path) -> None:
        state = self.state
        torch_dcp.load(state, checkpoint_id=folder)
        self.inner.load_state_dict(state["optim"])

    @property
    def flat(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).clone()


def test_training_goes_on_with_the_same_bits_in_the_middle_of_a_round(tmp_path: Path) -> None:
    def work(session: Any) -> None:
        parts = Parts(session)
        parts.train(SYNC_EVERY + 1)
        saved = parts.flat
        torch_dcp.save(parts.state, checkpoint_id=tmp_path / "a")
        parts.train(1)
        after = parts.flat
        parts.load(tmp_path / "a")
        assert torch.equal(parts.flat, saved)
        assert parts.outer.global_step == SYNC_EVERY + 1
        parts.train(1)
        assert torch.equal(parts.flat, after)
        parts.train(1)  # ends the round
        assert parts.outer.metrics()["rounds"] == 2

    atoll.Swarm(1).run(work)


def test_a_run_that_has_gone_on_wins(tmp_path: Path) -> None:
    swarm = atoll.Swarm(1)

    def work(session: Any) -> None:
        parts = Parts(session)
        parts.train(SYNC_EVERY + 1)
        torch_dcp.save(parts.state, checkpoint_id=tmp_path / "a")
        parts.train(SYNC_EVERY)
        parts.load(tmp_path / "a")
        theta = torch.from_numpy(swarm.state.theta)
        names = sorted(dict(parts.model.named_parameters()))
        assert torch.equal(
            torch.cat([parts.model.get_parameter(n).detach().flatten() for n in names]), theta
        )

    swarm.run(work)


def test_what_is_loaded_before_the_method_is_made_is_kept_for_it() -> None:
    states = []

    def work(session: Any) -> None:
        parts = Parts(session)
        parts.train(1)
        states.append(parts.outer.state_dict())

    atoll.Swarm(1).run(work)
    early = dcp.MethodState()
    assert early.state_dict() == {"rank-0": b""}
    assert early.take() is None
    early.load_state_dict({"rank-0": dcp.pack(states[0])})
    found = early.take()
    assert found is not None
    assert found.keys() == states[0].keys()
    assert found["run"] == states[0]["run"]
    assert early.take() is None


def test_what_is_not_a_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rank-0 of atoll"):
        dcp.MethodState().load_state_dict({"rank-1": b""})
    with pytest.raises(CheckpointError):
        dcp.unpack(b"garbage")
    with pytest.raises(CheckpointError):
        dcp.unpack(dcp.pack({"a": 1})[:-1])
