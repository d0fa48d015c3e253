"""What the daemon's side of a trainer lets go of, and what it tells apart."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from harness.checkpoints import SMALL
from harness.tinyrun import TinyRun

from atoll.collectives.errors import IncompatibleRunError
from atoll.optim.manifest import Manifest, Parameter
from atoll.peer.client.shared_memory import Region
from atoll.peer.daemon.event_log import EventLog
from atoll.peer.daemon.ipc_server import IpcServer
from atoll.peer.daemon.trainer_service import AttachedTrainer, TrainerService
from atoll.peer.membership import events as ev

CLIENT = b"client"


@pytest.fixture
def run() -> Iterator[TinyRun]:
    run = TinyRun(b"p" * 32, parameters=SMALL)
    yield run
    run.close()


def service_of(run: TinyRun, fed: list[ev.Event], log: EventLog | None = None) -> TrainerService:
    follower = SimpleNamespace(unsynced=False, loading=False, round=run.state.round)
    node: Any = SimpleNamespace(view=run.view, follower=follower)
    executor: Any = SimpleNamespace(state=run.state)
    log = log or EventLog(lambda line: None)
    return TrainerService("demo", node, executor, cast(IpcServer, None), fed.append, log)


def test_a_loss_is_shown_once(run: TinyRun) -> None:
    trainers = service_of(run, [])
    trainers.trainer = AttachedTrainer(CLIENT, run.spec, run.manifest, 1)
    trainers.note_figures(trainers.trainer, {"loss": 2.5, "accuracy": 0.5})
    trainers.note_figures(trainers.trainer, {"accuracy": 0.6})
    assert [trainers.new_loss(), trainers.new_loss()] == [2.5, None]
    assert trainers.trainer.metrics == {"loss": 2.5, "accuracy": 0.6}


@pytest.mark.parametrize("loss", [math.nan, math.inf, -1e30])
def test_a_loss_that_is_no_number_is_in_the_line_of_the_round_alone(
    run: TinyRun, loss: float
) -> None:
    """Rows and JSON cannot carry it."""
    trainers = service_of(run, [])
    trainers.trainer = AttachedTrainer(CLIENT, run.spec, run.manifest, 1)
    trainers.note_figures(trainers.trainer, {"loss": 2.5, "accuracy": 0.5})
    trainers.note_figures(trainers.trainer, {"loss": loss})
    assert trainers.trainer.metrics == {"accuracy": 0.5}
    assert str(trainers.new_loss()) == str(loss)


def test_parameters_of_a_state_that_was_replaced_are_not_valid(run: TinyRun) -> None:
    """Another state may well have come to the same generation."""
    valid = service_of(run, []).handlers()["valid"]
    _, buffer, generation = run.state.position
    now = {"serial": run.state.serial, "buffer": buffer, "generation": generation}
    assert asyncio.run(valid(CLIENT, now))
    assert not asyncio.run(valid(CLIENT, now | {"serial": run.state.serial - 1}))
    assert not asyncio.run(valid(CLIENT, now | {"generation": generation - 1}))


def test_a_trainer_of_another_model_is_let_go_of_entirely(run: TinyRun) -> None:
    fed: list[ev.Event] = []
    trainers = service_of(run, fed)
    other = Manifest.of([Parameter("other", (7,), "float32")])
    region = Region("submission", other.elements)
    trainer = trainers.trainer = AttachedTrainer(CLIENT, run.spec, other, 1, region=region)
    with pytest.raises(IncompatibleRunError):
        trainers._readiness(trainer)
    assert trainers.trainer is None
    assert fed == [ev.Detached()]
    assert region.fd == -1


def test_a_trainer_that_comes_and_goes_is_said_once_each(run: TinyRun) -> None:
    """With its process; not of one that was never let in."""
    lines: list[str] = []
    trainers = service_of(run, [], EventLog(lines.append))
    trainers.trainer = AttachedTrainer(CLIENT, run.spec, run.manifest, 4711)
    for _ in range(2):
        assert trainers._readiness(trainers.trainer)["state"] == "ready"
    trainers.gone(CLIENT)
    assert [line.split(maxsplit=1)[1] for line in lines] == [
        "trainer    process 4711 trains from now on",
        "trainer    process 4711 trains no more",
    ]
