"""AtollCallback in a Lightning trainer: loggers, validation, checkpoints, ends and errors."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import atoll

pytest.importorskip("lightning", reason="run by `make test-integrations`")
import lightning
from integrations.loops import LIBRARIES, Module, trained
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.optim.lr_scheduler import LambdaLR

from atoll.collectives.errors import ConfigError
from atoll.integrations.lightning import AtollCallback

pytestmark = pytest.mark.filterwarnings(f"ignore:::{LIBRARIES}")
SYNC_EVERY, STEPS = 3, 6


class Same(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """The same batch at each step: where a loop is in its data does not matter."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, number: int) -> Tensor:
        return torch.linspace(-1, 1, 24).reshape(4, 6)


class Watched(Module):
    """Keep what the model is like where it is validated, and the learning rates."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[Tensor] = []
        self.local: list[Tensor] = []
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        inner = super().configure_optimizers()
        falls = LambdaLR(inner, lambda step: 1 / (1 + step))
        return {"optimizer": inner, "lr_scheduler": {"scheduler": falls, "interval": "step"}}

    def validation_step(self, batch: Tensor, _number: int) -> None:
        self.validated.append(trained(self).clone())

    def on_train_batch_start(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, *_: Any) -> None:
        self.local.append(trained(self).clone())


def loader() -> Any:
    return torch.utils.data.DataLoader(Same(), batch_size=None)


def fit(session: Any, folder: Path, *callbacks: Any, ckpt_path: Any = None, **more: Any) -> Any:
    ours = AtollCallback("DiLoCo", sync_every=SYNC_EVERY, peer=session, buffers=False)
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": STEPS,
        "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "default_root_dir": folder,
    }
    trainer = lightning.Trainer(callbacks=[ours, *callbacks], **(settings | more))
    module = Watched()
    try:
        trainer.fit(module, loader(), loader(), ckpt_path=ckpt_path)
    finally:
        assert ours.outer is None  # closed, however it ends
    return module


def test_the_logger_gets_the_methods_metrics(tmp_path: Path) -> None:
    atoll.Swarm(1).run(
        lambda session: fit(session, tmp_path, logger=CSVLogger(tmp_path, name="log", version=0))
    )
    with (tmp_path / "log" / "version_0" / "metrics.csv").open() as file:
        rounds = [float(row["atoll/round"]) for row in csv.DictReader(file) if row["atoll/round"]]
    assert rounds == [1, 1, 2, 2, 2, 3]


def test_validation_sees_the_runs_parameters_and_training_does_not(tmp_path: Path) -> None:
    swarm = atoll.Swarm(1)

    def work(session: Any) -> None:
        first = trained(Watched()).clone()
        module = fit(session, tmp_path, val_check_interval=2, limit_val_batches=1)
        sanity, *validated = module.validated
        assert torch.equal(sanity, first)
        run = [first, module.local[SYNC_EVERY - 1], module.local[STEPS - 1]]
        assert len(validated) == 3
        for found, expected in zip(validated, run, strict=True):
            assert torch.equal(found, expected)
        assert not torch.equal(module.local[3], run[1])
        assert torch.equal(trained(module), torch.from_numpy(swarm.state.theta))

    swarm.run(work)


class ByHand(Watched):
    """Step by hand, as a method of every step needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, number: int) -> None:
        inner = self.optimizers(use_pl_optimizer=False)  # Lightning's own gives step() a closure
        inner.zero_grad()
        self.manual_backward(self.net(batch))
        inner.step()


@pytest.mark.parametrize("method", ["GradientAverage", atoll.GradientAverage])
def test_a_method_of_every_step_needs_manual_optimization(method: Any, tmp_path: Path) -> None:
    swarm = atoll.Swarm(1)

    def work(session: Any) -> None:
        def trained_by(module: Any) -> None:
            trainer = lightning.Trainer(
                callbacks=[AtollCallback(method, peer=session)],
                accelerator="cpu",
                max_steps=2,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=tmp_path,
            )
            trainer.fit(module, loader())

        with pytest.raises(ConfigError, match="automatic optimization") as raised:
            trained_by(Watched())
        assert "self.automatic_optimization = False" in raised.value.fix
        assert not swarm.round
        module = ByHand()
        first = trained(module).clone()
        trained_by(module)
        assert not torch.equal(trained(module), first)

    swarm.run(work)


class Breaks(lightning.Callback):
    def on_train_batch_start(self, _trainer: Any, _module: Any, _batch: Any, number: int) -> None:
        if number == 4:
            raise OSError("out of order")


def test_a_trainer_goes_on_with_the_same_bits_from_its_checkpoint(tmp_path: Path) -> None:
    """In the middle of a round; and the checkpoint's own parameters are the run's."""
    found: list[Any] = []

    def in_two(session: Any) -> None:
        saving = ModelCheckpoint(
            tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1, save_on_train_epoch_end=False
        )
        with pytest.raises(OSError, match="out of order"):
            fit(session, tmp_path, saving, Breaks())
        there = tmp_path / "step=4.ckpt"
        saved = torch.load(there, weights_only=True)
        module = Watched()
        module.load_state_dict(saved["state_dict"])
        assert torch.equal(trained(module), found[0].local[SYNC_EVERY - 1])
        found.append(fit(session, tmp_path, ckpt_path=there))

    atoll.Swarm(1).run(lambda session: found.append(fit(session, tmp_path)))
    atoll.Swarm(1).run(in_two)
    whole, two = found
    assert torch.equal(two.local[-1], whole.local[-1])
    assert two.rates == whole.rates[4:]


class SavesInside(lightning.Callback):
    """Save while validation goes on, as where a module finds that it is the best so far."""

    def __init__(self, there: Path) -> None:
        self.there = there

    def on_validation_epoch_end(self, trainer: Any, _module: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.there)


def test_what_is_saved_inside_a_validation_is_the_runs(tmp_path: Path) -> None:
    """Save in the middle of a round: training goes on from it with the run's parameters."""
    there = tmp_path / "inside.ckpt"
    found: list[Any] = []

    def work(session: Any) -> None:
        found.append(fit(session, tmp_path, SavesInside(there), val_check_interval=4))

    def again(session: Any) -> None:
        module = fit(session, tmp_path, ckpt_path=there)  # of a new run, which begins with it
        assert module.rates[0] == found[0].rates[0]
        found.append(module)

    atoll.Swarm(1).run(work)
    first = found[0]
    run = first.local[SYNC_EVERY - 1]
    saved = torch.load(there, weights_only=True)
    assert "atoll" not in saved  # whose parameters of this trainer's own would be the run's
    module = Watched()
    module.load_state_dict(saved["state_dict"])
    assert torch.equal(trained(module), run)
    assert not torch.equal(first.local[3], run)
    assert len(first.local) == STEPS
    atoll.Swarm(1).run(again)
    assert torch.equal(found[1].validated[0], run)


def test_a_late_joiner_has_the_runs_learning_rate_and_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(session: Any) -> None:
        first = fit(session, tmp_path)
        second = fit(session, tmp_path, max_steps=STEPS + 2)
        assert second.rates == pytest.approx([first.rates[0] / (1 + step) for step in (6, 7)])

    atoll.Swarm(1).run(work)
    assert "the run has its 8 steps: training ends" in capsys.readouterr().err
