"""AtollCallback in a Trainer: loggers, evaluation, saving, resuming, ends, errors; no daemons."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import atoll
from atoll.collectives.errors import ConfigError

pytest.importorskip("transformers", reason="run by `make test-integrations`")
from integrations.loops import LIBRARIES, llama, trained
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, TrainingArguments

from atoll.integrations.transformers import AtollCallback

pytestmark = pytest.mark.filterwarnings(f"ignore:::{LIBRARIES}")
SYNC_EVERY, STEPS = 3, 6


class Rows(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 32, (8,), generator=random)
        return {"input_ids": ids, "labels": ids}


class Seen(TrainerCallback):
    """What another callback hears, and what this trainer's model is like at each step."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.local: dict[int, Tensor] = {}
        self.rates: list[float] = []

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        self.logs.append(dict(logs))

    def on_step_begin(self, *_: Any, lr_scheduler: Any, **__: Any) -> None:
        self.rates.append(lr_scheduler.get_last_lr()[0])

    def on_step_end(self, _args: Any, state: Any, *_: Any, model: Any, **__: Any) -> None:
        self.local[state.global_step] = trained(model).clone()


def trainer_of(
    folder: Path, session: Any, *callbacks: Any, steps: int = STEPS, **more: Any
) -> tuple[Trainer, AtollCallback, Seen]:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": steps,
        "learning_rate": 0.01,
        "lr_scheduler_type": "linear",
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    seen, ours = Seen(), AtollCallback(sync_every=SYNC_EVERY, peer=session)
    trainer = Trainer(
        llama(),
        TrainingArguments(**(settings | more)),
        train_dataset=Rows(),
        eval_dataset=Rows(),
        callbacks=[*callbacks, seen, ours],
    )
    return trainer, ours, seen


def run_parameters(swarm: atoll.Swarm) -> Tensor:
    return torch.from_numpy(swarm.state.theta.copy())


def watch_evaluation(model: Any) -> list[Tensor]:
    """The parameters of each forward pass that is not for training."""
    found: list[Tensor] = []

    def look(module: Any, *_: Any) -> None:
        if not module.training:
            found.append(trained(module).clone())

    model.register_forward_pre_hook(look)
    return found


def test_every_logger_gets_the_methods_metrics(tmp_path: Path) -> None:
    """Those that are called before the callback, too, and the trainer's own history."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def work(session: Any) -> None:
        logs = str(tmp_path / "logs")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TENSORBOARD_LOGGING_DIR", logs)
            trainer, _, seen = trainer_of(tmp_path, session, report_to=["tensorboard"])
            trainer.train()
        rounds = [log["atoll/round"] for log in seen.logs if "loss" in log]
        assert rounds == [1, 1, 2, 2, 2, 3]
        assert [log["atoll/round"] for log in trainer.state.log_history if "loss" in log] == rounds
        written = accumulator.EventAccumulator(logs)
        written.Reload()
        assert [e.value for e in written.Scalars("train/atoll/round")] == rounds
        assert "train/atoll/peers" in written.Tags()["scalars"]

    atoll.Swarm(1).run(work)


def test_evaluations_see_the_runs_parameters_and_training_does_not(tmp_path: Path) -> None:
    """Those of the trainer, and by hand from another callback: evaluate, predict, save_model."""
    swarm = atoll.Swarm(1)

    class ByHand(TrainerCallback):
        trainer: Any = None

        def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 5:
                self.trainer.evaluate()
                self.trainer.predict(Rows())
                self.trainer.save_model(str(tmp_path / "by hand"))

    def work(session: Any) -> None:
        by_hand = ByHand()
        trainer, _, seen = trainer_of(
            tmp_path, session, by_hand, eval_strategy="steps", eval_steps=2
        )
        by_hand.trainer = trainer
        evaluated = watch_evaluation(trainer.model)
        first = trained(trainer.model).clone()
        trainer.train()
        second = seen.local[SYNC_EVERY]  # after a round the model is the run's
        third = seen.local[STEPS]
        distinct = [evaluated[0]]
        for one in evaluated[1:]:
            if not torch.equal(one, distinct[-1]):
                distinct.append(one)
        assert len(distinct) == 3
        for found, expected in zip(distinct, (first, second, third), strict=True):
            assert torch.equal(found, expected)
        saved = load_file(tmp_path / "by hand" / "model.safetensors")
        names = dict(trainer.model.named_parameters())
        assert torch.equal(
            torch.cat([saved[n].flatten() for n in sorted(names) if n in saved]),
            torch.cat([second_of(second, names, n) for n in sorted(names) if n in saved]),
        )
        assert not torch.equal(seen.local[4], second)
        assert torch.equal(trained(trainer.model), run_parameters(swarm))
        assert trainer.evaluate()["eval_loss"] > 0  # the method is closed by now

    swarm.run(work)


def second_of(flat: Tensor, names: dict[str, Any], name: str) -> Tensor:
    begin = sum(p.numel() for n, p in names.items() if n < name and p.requires_grad)
    return flat[begin : begin + names[name].numel()]


class Breaks(TrainerCallback):
    """As a machine that fails in the middle of step 5."""

    def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 4:
            raise OSError("out of order")


def test_a_trainer_goes_on_with_the_same_bits_from_its_checkpoint(tmp_path: Path) -> None:
    """In the middle of a round: it has begun at step 3, and the checkpoint is of step 4."""
    found: list[Tensor] = []

    def whole(session: Any) -> None:
        trainer, _, seen = trainer_of(tmp_path / "whole", session)
        trainer.train()
        found.append(seen.local[STEPS])
        rates.append(seen.rates)

    def in_two(session: Any) -> None:
        saving = {"save_strategy": "steps", "save_steps": 4}
        trainer, ours, seen = trainer_of(tmp_path / "two", session, Breaks(), **saving)
        with pytest.raises(OSError, match="out of order"):
            trainer.train()
        assert ours.outer is None
        there = tmp_path / "two" / "checkpoint-4"
        names = dict(trainer.model.named_parameters())
        saved = load_file(there / "model.safetensors")
        some = "model.norm.weight"
        assert torch.equal(saved[some], second_of(seen.local[SYNC_EVERY], names, some))
        trainer, _, seen = trainer_of(tmp_path / "two", session, **saving)
        trainer.train(resume_from_checkpoint=str(there))
        assert sorted(seen.local) == [5, 6]
        found.append(seen.local[STEPS])
        rates.append(seen.rates)

    rates: list[list[float]] = []
    atoll.Swarm(1).run(whole)
    atoll.Swarm(1).run(in_two)
    assert torch.equal(*found)
    assert rates[1] == rates[0][4:]


def test_a_checkpoint_of_a_run_that_has_gone_on(tmp_path: Path) -> None:
    """Its parameters win, its step too, and training ends where it was to end."""

    def work(session: Any) -> None:
        saving = {"save_strategy": "steps", "save_steps": 4}
        trainer, _, _ = trainer_of(tmp_path, session, Breaks(), steps=9, **saving)
        with pytest.raises(OSError, match="out of order"):
            trainer.train()
        other, _, _ = trainer_of(tmp_path / "other", session, steps=SYNC_EVERY)
        other.train()
        trainer, _, seen = trainer_of(tmp_path, session, steps=9, **saving)
        trainer.train(resume_from_checkpoint=True)
        assert seen.rates == pytest.approx([0.01 * (9 - step) / 9 for step in (6, 7, 8)])
        assert sorted(seen.local) == [5, 6, 7]

    atoll.Swarm(1).run(work)


def test_a_late_joiner_has_the_runs_learning_rate_and_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(session: Any) -> None:
        trainer_of(tmp_path, session, steps=STEPS)[0].train()
        trainer, _, seen = trainer_of(tmp_path, session, steps=STEPS + 2)
        trainer.train()
        assert seen.rates == pytest.approx([0.01 * 2 / 8, 0.01 * 1 / 8])

    atoll.Swarm(1).run(work)
    said = capsys.readouterr().err
    assert "the run has its 8 steps: training ends after 2" in said
    assert "its last 2 local steps counted in round 4" in said


def test_one_that_is_added_later_works_as_well(tmp_path: Path) -> None:
    def work(session: Any) -> None:
        trainer, ours, seen = trainer_of(tmp_path, session)
        trainer.remove_callback(ours)
        late = AtollCallback(sync_every=SYNC_EVERY, peer=session)
        trainer.add_callback(late)
        trainer.train()
        assert seen.logs[-2]["atoll/rounds"] == 2
        assert late.outer is None

    atoll.Swarm(1).run(work)


def test_an_error_closes_the_session_of_one_that_is_added_later(tmp_path: Path) -> None:
    def work(session: Any) -> None:
        trainer, ours, _ = trainer_of(tmp_path, session, Breaks())
        trainer.remove_callback(ours)
        late = AtollCallback(sync_every=SYNC_EVERY, peer=session)
        trainer.add_callback(late)
        with pytest.raises(OSError, match="out of order"):
            trainer.train()
        assert late.outer is None

    atoll.Swarm(1).run(work)


def test_what_is_saved_inside_an_evaluation_is_the_runs(tmp_path: Path) -> None:
    """Save as from compute_metrics, which is called with the run's parameters in the model."""

    def work(session: Any) -> None:
        evaluating = {"eval_strategy": "steps", "eval_steps": 4}
        trainer, _, seen = trainer_of(tmp_path, session, **evaluating)

        def metrics(_: Any) -> dict[str, float]:
            if trainer.state.global_step == 4:
                trainer.save_model(str(tmp_path / "inside"))
            return {}

        trainer.compute_metrics = metrics
        trainer.train()
        saved = load_file(tmp_path / "inside" / "model.safetensors")
        names, some = dict(trainer.model.named_parameters()), "model.norm.weight"
        assert torch.equal(saved[some], second_of(seen.local[SYNC_EVERY], names, some))
        assert not torch.equal(seen.local[4], seen.local[SYNC_EVERY])

    atoll.Swarm(1).run(work)


@pytest.mark.parametrize(("seeds", "warned"), [({}, True), ({"data_seed": 1}, False)])
def test_peers_that_would_draw_the_same_samples_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seeds: dict[str, int], warned: bool
) -> None:
    drawn = []

    def work(session: Any) -> None:
        trainer, _, _ = trainer_of(tmp_path, session, steps=1, **seeds)
        drawn.append(next(iter(trainer.get_train_dataloader()))["input_ids"])
        trainer.train()

    atoll.Swarm(1).run(work)
    atoll.Swarm(1).run(work)
    assert torch.equal(*drawn)
    assert ("give each a data_seed of its own" in capsys.readouterr().err) == warned


def test_without_a_trainer_it_says_so() -> None:
    with pytest.raises(ConfigError, match=r"no transformers\.Trainer is calling"):
        AtollCallback().on_init_end()
