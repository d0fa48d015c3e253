"""attach() in a loop of accelerate: logs, saving, loading, schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import atoll
from atoll.collectives.errors import ConfigError

pytest.importorskip("accelerate", reason="run by `make test-integrations`")
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from integrations.loops import LIBRARIES, Net, adamw, trained

from atoll.integrations.accelerate import attach

pytestmark = pytest.mark.filterwarnings(f"ignore:::{LIBRARIES}")
SYNC_EVERY = 3


class Tracker(GeneralTracker):
    name = "kept"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []

    @property
    def tracker(self) -> list[dict[str, Any]]:
        return self.rows

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep no configuration."""

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.rows.append({"step": step, **values})


class Loop:
    """The same batch at each step."""

    def __init__(self, session: Any) -> None:
        self.tracker = Tracker()
        self.accelerator = Accelerator(cpu=True, log_with=self.tracker)
        self.accelerator.init_trackers("test")
        model = Net()
        inner = adamw(model)
        falls = LambdaLR(inner, lambda step: 1 / (1 + step))
        self.model, self.inner, self.falls = self.accelerator.prepare(model, inner, falls)
        self.outer = attach(
            self.accelerator,
            self.model,
            self.inner,
            self.falls,
            sync_every=SYNC_EVERY,
            peer=session,
            buffers=False,
        )

    def train(self, steps: int) -> Tensor:
        for _ in range(steps):
            loss = self.model(torch.linspace(-1, 1, 24).reshape(4, 6))
            self.accelerator.backward(loss)
            self.inner.step()
            self.falls.step()
            self.inner.zero_grad()
            self.accelerator.log({"loss": loss.item()}, step=int(self.outer.metrics()["steps"]))
        return trained(self.model).clone()


def test_trackers_get_the_methods_metrics() -> None:
    def work(session: Any) -> None:
        loop = Loop(session)
        loop.train(2 * SYNC_EVERY)
        assert [row["atoll/round"] for row in loop.tracker.rows] == [1, 1, 2, 2, 2, 3]
        assert [row["step"] for row in loop.tracker.rows] == [1, 2, 3, 4, 5, 6]

    atoll.Swarm(1).run(work)


def test_a_loop_goes_on_with_the_same_bits_in_the_middle_of_a_round(tmp_path: Path) -> None:
    def work(session: Any) -> None:
        loop = Loop(session)
        loop.train(SYNC_EVERY + 1)
        loop.accelerator.save_state(str(tmp_path / "saved"))
        after = loop.train(1)
        again = Loop(session)
        again.accelerator.load_state(str(tmp_path / "saved"))
        assert again.outer.global_step == SYNC_EVERY + 1
        assert again.inner.param_groups[0]["lr"] == pytest.approx(0.01 / (2 + SYNC_EVERY))
        assert torch.equal(again.train(1), after)
        again.train(1)
        assert again.outer.metrics()["rounds"] == 2

    atoll.Swarm(1).run(work)


def test_a_late_joiner_has_the_runs_learning_rate() -> None:
    def work(session: Any) -> None:
        Loop(session).train(2 * SYNC_EVERY)
        late = Loop(session)
        assert late.inner.param_groups[0]["lr"] == pytest.approx(0.01 / (1 + 2 * SYNC_EVERY))

    atoll.Swarm(1).run(work)


def test_a_scheduler_of_several_steps_at_a_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    model = Net()
    inner = adamw(model)
    model, inner, falls = accelerator.prepare(model, inner, LambdaLR(inner, lambda step: 1.0))
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(ConfigError, match="2 times for each step"):
        attach(accelerator, model, inner, falls, sync_every=SYNC_EVERY, home="nowhere")
