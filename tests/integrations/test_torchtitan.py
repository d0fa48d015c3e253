"""join() with TorchTitan's own optimizers, schedules and checkpoints, on a CPU and without daemons.

Its Trainer sets up a GPU when it is made: what it then does with these parts is repeated here, in
the order of its train().
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor, nn

import atoll
from atoll.collectives.errors import ConfigError
from atoll.integrations.torchtitan import join

SYNC_EVERY, STEPS = 3, 6
# TorchTitan's schedules ask torch's for their rates outside a step.
pytestmark = pytest.mark.filterwarnings("ignore:To get the last learning rate")


class Checkpointer:
    """Do with ``states`` what TorchTitan's does: one dictionary for DCP, the model's own in it."""

    def __init__(self, folder: Path, states: dict[str, Any]) -> None:
        self.folder, self.states = folder, states

    def save(self) -> None:
        torch_dcp.save(dict(self.states), checkpoint_id=self.folder)

    def load(self, step: int = -1) -> bool:
        if self.folder.exists():
            torch_dcp.load(dict(self.states), checkpoint_id=self.folder)
        return self.folder.exists()


class Wrapped:
    """A model as TorchTitan gives it to DCP."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)


class Titan:
    """The parts of a torchtitan.trainer.Trainer that join() uses, and its loop."""

    def __init__(self, folder: Path, steps: int = STEPS, breaks_after: int = 0) -> None:
        torch.manual_seed(5)
        self.model = nn.Linear(4, 3)
        self.model_parts = [self.model]
        self.optimizers, self.lr_schedulers = parts_of(self.model_parts, steps)
        self.config = SimpleNamespace(training=SimpleNamespace(steps=steps))
        self.step, self.breaks_after = 0, breaks_after
        self.local: dict[int, Tensor] = {}
        self.rates: list[float] = []
        self.logged: list[dict[str, Any]] = []
        self.validated: list[Tensor] = []
        self.metrics_processor = SimpleNamespace(log=self.keep)
        self.validator = SimpleNamespace(validate=self.look)
        self.checkpointer = Checkpointer(
            folder,
            {
                "model": Wrapped(self.model),
                "optimizer": self.optimizers,
                "lr_scheduler": self.lr_schedulers,
                "train_state": self,
            },
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def keep(self, step: int, loss: float, extra_metrics: Any = None) -> None:
        self.logged.append({"step": step, **extra_metrics})

    def look(self, parts: Any, step: int) -> None:
        self.validated.append(flat(parts[0]))

    def should_continue_training(self) -> bool:
        return self.step < self.config.training.steps

    def train(self) -> None:
        self.checkpointer.load(step=-1)
        while self.should_continue_training():
            self.step += 1
            self.optimizers.zero_grad()
            self.rates.append(self.lr_schedulers.schedulers[0].get_last_lr()[0])
            loss = self.model(torch.ones(2, 4)).square().mean()
            loss.backward()
            self.optimizers.step()
            self.lr_schedulers.step()
            self.local[self.step] = flat(self.model)
            self.metrics_processor.log(self.step, loss.item(), extra_metrics={"lr": 1.0})
            if self.step == self.breaks_after:
                self.checkpointer.save()
                raise OSError("out of order")
            self.validator.validate(self.model_parts, self.step)


def flat(model: nn.Module) -> Tensor:
    found = [p for _, p in sorted(model.named_parameters())]
    return torch.cat([p.detach().flatten() for p in found]).clone()


def parts_of(model_parts: list[nn.Module], steps: int) -> tuple[Any, Any]:
    """TorchTitan's containers."""
    found = pytest.importorskip("torchtitan.components.optimizer")
    adamw = {"lr": 0.01, "weight_decay": 0.0}
    groups = [
        found.ParamGroupConfig(pattern=name, optimizer_name=kind, optimizer_kwargs=adamw)
        for name, kind in (("bias", "Adam"), (".*", "AdamW"))
    ]  # so there are two optimizers
    kinds = found.OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    optimizers = kinds.build(model_parts=model_parts)
    settings = found.LRSchedulersContainer.Config(warmup_steps=1)
    return optimizers, settings.build(optimizers=optimizers, training_steps=steps)


@pytest.fixture(autouse=True)
def alone() -> Any:
    pytest.importorskip("torchtitan", reason="it is not among what `make test-integrations` has")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_it_trains_logs_and_validates_as_a_peer(tmp_path: Path) -> None:
    swarm = atoll.Swarm(1)

    def work(session: Any) -> None:
        titan = Titan(tmp_path / "none")
        first = flat(titan.model)
        joined = join(titan, sync_every=SYNC_EVERY, peer=session)
        titan.train()
        assert [row["atoll/round"] for row in titan.logged] == [1, 1, 2, 2, 2, 3]
        second = titan.local[SYNC_EVERY]
        assert torch.equal(titan.validated[1], first)
        assert torch.equal(titan.validated[4], second)
        assert not torch.equal(titan.local[5], second)
        assert torch.equal(flat(titan.model), torch.from_numpy(swarm.state.theta))
        assert joined.outer is None

    swarm.run(work)


def test_it_goes_on_with_the_same_bits_in_the_middle_of_a_round(tmp_path: Path) -> None:
    found: list[Titan] = []

    def whole(session: Any) -> None:
        found.append(Titan(tmp_path / "none"))
        join(found[-1], sync_every=SYNC_EVERY, peer=session)
        found[-1].train()

    def in_two(session: Any) -> None:
        titan = Titan(tmp_path / "saved", breaks_after=4)
        joined = join(titan, sync_every=SYNC_EVERY, peer=session)
        with pytest.raises(OSError, match="out of order"):
            titan.train()
        assert joined.outer is None
        found.append(Titan(tmp_path / "saved"))
        join(found[-1], sync_every=SYNC_EVERY, peer=session)
        found[-1].train()

    atoll.Swarm(1).run(whole)
    atoll.Swarm(1).run(in_two)
    first, second = found
    assert torch.equal(second.local[STEPS], first.local[STEPS])
    assert second.rates == first.rates[4:]


def test_a_late_joiner_has_the_runs_learning_rate_and_its_end(tmp_path: Path) -> None:
    def work(session: Any) -> None:
        early = Titan(tmp_path / "none")
        join(early, sync_every=SYNC_EVERY, peer=session)
        early.train()
        late = Titan(tmp_path / "none", steps=STEPS + 3)
        join(late, sync_every=SYNC_EVERY, peer=session)
        late.train()
        assert sorted(late.local) == [1, 2, 3]
        assert late.rates[0] < max(early.rates)

    atoll.Swarm(1).run(work)


def test_pipeline_stages_are_refused(tmp_path: Path) -> None:
    titan = Titan(tmp_path)
    titan.model_parts = [titan.model, titan.model]
    with pytest.raises(ConfigError, match="2 pipeline stages"):
        join(titan, sync_every=SYNC_EVERY, home="nowhere")
