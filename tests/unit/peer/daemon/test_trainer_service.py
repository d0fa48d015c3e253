"""What the daemon's side of a trainer lets go of, and what it tells apart."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from harness.checkpoints import SMALL
from harness.tinyrun import TinyRun

from atoll.collectives.errors import IncompatibleRunError
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.pseudo_gradient import submission_floats
from atoll.peer.client.shared_memory import Region
from atoll.peer.daemon.event_log import EventLog
from atoll.peer.daemon.ipc_server import IpcServer
from atoll.peer.daemon.trainer_service import AttachedTrainer, TrainerService
from atoll.peer.membership import events as ev
from atoll.peer.rounds.attempt_run import Replica
from atoll.peer.rounds.entries import STEP, EntryHead, EntryOrigin

CLIENT = b"client"


@pytest.fixture
def run() -> Iterator[TinyRun]:
    run = TinyRun(b"p" * 32, parameters=SMALL)
    yield run
    run.close()


def service_of(run: TinyRun, fed: list[ev.Event], log: EventLog | None = None) -> TrainerService:
    follower = SimpleNamespace(unsynced=False, loading=False, round=run.state.round)
    node: Any = SimpleNamespace(view=run.view, follower=follower, may_be_behind=lambda: False)
    executor: Any = SimpleNamespace(state=run.state, replica=Replica(run.log))
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


def test_a_held_out_loss_is_told_once_and_only_as_a_number(run: TinyRun) -> None:
    trainers = service_of(run, [])
    trainer = trainers.trainer = AttachedTrainer(CLIENT, run.spec, run.manifest, 1)
    trainers.note_figures(trainer, {"loss": 2.5, "heldout_loss": 2.75})
    trainers.note_figures(trainer, {"loss": 2.5})
    assert [trainers.new_heldout_loss(), trainers.new_heldout_loss()] == [2.75, None]
    trainers.note_figures(trainer, {"heldout_loss": math.nan})
    assert trainers.new_heldout_loss() is None


def test_rows_have_the_totals_of_the_method_where_a_script_reports_its_own_beside_them(
    run: TinyRun,
) -> None:
    trainers = service_of(run, [])
    trainer = trainers.trainer = AttachedTrainer(CLIENT, run.spec, run.manifest, 1)
    report = trainers.handlers()["report"]
    asyncio.run(report(CLIENT, {"metrics": {"steps": 5000.0, "tokens": 7.0}}))
    assert trainer.figures == {"steps": 5000.0, "tokens": 7.0}  # nobody else counts
    for number in (20.0, 40.0):
        trainers.note_figures(trainer, {"steps": number})
        asyncio.run(report(CLIENT, {"metrics": {"steps": 5000.0 + number}}))
        assert trainer.figures == {"steps": number, "tokens": 7.0}
    assert trainer.metrics["steps"] == 5040.0  # what `atoll status` shows of the script


def test_parameters_of_a_state_that_was_replaced_are_not_valid(run: TinyRun) -> None:
    """Another state may well have come to the same generation."""
    valid = service_of(run, []).handlers()["valid"]
    generation = run.state.generation
    now = {"serial": run.state.serial, "generation": generation}
    assert asyncio.run(valid(CLIENT, now))
    assert not asyncio.run(valid(CLIENT, now | {"serial": run.state.serial - 1}))
    assert not asyncio.run(valid(CLIENT, now | {"generation": generation - 1}))


def test_parameters_that_a_commit_is_changing_are_not_valid(run: TinyRun) -> None:
    valid = service_of(run, []).handlers()["valid"]
    run.state._begin_change()
    now = {"serial": run.state.serial, "generation": run.state.generation}
    assert not asyncio.run(valid(CLIENT, now))
    run.state._end_change()


def test_a_submission_waits_for_the_round_that_is_committed(run: TinyRun) -> None:
    """Compare it with what that round leaves, and not with what it finds."""
    trainers = service_of(run, [])
    trainers.trainer = AttachedTrainer(CLIENT, run.spec, run.manifest, 1)
    trainers._node.follower.round = run.state.round + 1

    async def applied_later() -> tuple[int, int]:
        asking = asyncio.create_task(trainers.handlers()["base"](CLIENT, {"fragment": 0}))
        await asyncio.sleep(0.02)
        assert not asking.done()
        run.commit()
        return cast(tuple[int, int], await asking)

    assert asyncio.run(applied_later()) == (run.state.serial, run.state.mark_of(0))


def test_a_submission_from_parameters_of_before_is_not_taken_in(run: TinyRun) -> None:
    """Have the trainer make it again: it is a difference from what the run has no more."""
    fed: list[ev.Event] = []
    trainers = service_of(run, fed)
    follower = trainers._node.follower
    follower.submissions, follower.epoch = {}, 3
    region = Region("submission", submission_floats(run.spec, run.manifest))
    trainer = AttachedTrainer(CLIENT, run.spec, run.manifest, 1, region=region, in_step=True)
    trainers.trainer = trainer
    trainer.initial = Region("initial", 4)
    submit, replica = trainers.handlers()["submit"], trainers._executor.replica
    base = asyncio.run(trainers.handlers()["base"](CLIENT, {"fragment": 0}))
    assert base == (run.state.serial, run.state.mark_of(0))
    said = {"weight": 1.0, "fragment": 0, "epoch": 3, "call": 1}
    run.commit()
    now = asyncio.run(submit(CLIENT, said | {"base": base}))
    assert now == (run.state.serial, run.state.mark_of(0)) != base
    assert (fed, replica.encoded) == ([], None)

    def take(event: ev.Event) -> None:
        fed.append(event)
        follower.submissions[0] = event

    trainers._feed = take
    assert asyncio.run(submit(CLIENT, said | {"base": now})) is None
    assert fed == [ev.Submitted(follower.round, 3, 1.0, 0)]
    assert replica.encoded is not None
    assert replica.encoded.nbytes == region.floats.nbytes
    assert trainer.initial is None  # the run has begun
    region.close()


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


# ------------------------------------------------------------ what counts once


ME = b"p" * 32


class Repeats:
    """In place of what submits again in asynchronous runs: what it heard, and was given."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, bool]] = []
        self.given: list[bool | None] = []

    def is_over(self, effect: ev.TellTrainer, *, is_logged: bool) -> bool:
        self.heard.append((effect.kind, is_logged))
        return is_logged

    def submit(self, weight: float, was_counted: Any) -> None:
        self.given.append(was_counted())


class Waiting:
    """A trainer whose submission waits, and a log with heads of the rounds 6 to ``last``."""

    def __init__(
        self, run: TinyRun, mine: int, *, now: int, last: int, deltas: bool = True
    ) -> None:
        self.fed: list[ev.Event] = []
        self.heard: list[dict[str, Any]] = []
        self.trainers = service_of(run, self.fed)
        self.follower: Any = self.trainers._node.follower
        self.follower.round, self.follower.epoch, self.follower.submissions = now, 1, {}
        self.trainers._node.me = SimpleNamespace(peer=ME)  # type: ignore[assignment]
        heads = {
            n: EntryHead(
                n, STEP, 0, (EntryOrigin((ME if n == mine else b"o" * 32,), (1.0,)),), *3 * [b""]
            )
            for n in range(6, last + 1)
        }
        self.log: Any = SimpleNamespace(head=heads.get, last=last)
        self.trainers._executor.replica = Replica(self.log)
        self.trainers.ipc_server = cast(
            IpcServer, SimpleNamespace(push=lambda *said: self.heard.append(said[2]))
        )
        spec = replace(run.spec, submits="deltas") if deltas else run.spec
        region = Region("submission", run.manifest.elements)
        self.trainer = AttachedTrainer(CLIENT, spec, run.manifest, 1, region=region, in_step=True)
        self.trainers.trainer = self.trainer

    def submit(self, since: int) -> None:
        said = {"weight": 1.0, "fragment": 0, "call": 7, "epoch": 1, "since": since}
        asyncio.run(self.trainers.handlers()["submit"](CLIENT, said))

    def kinds(self) -> list[str]:
        return [outcome["kind"] for outcome in self.heard]


@pytest.mark.parametrize(
    ("mine", "since", "kind", "is_logged"),
    [(6, 5, "committed", True), (0, 5, "reload", False), (0, 4, "reload", True)],
)
@pytest.mark.parametrize("told", ["missed", "reload"])
def test_an_asynchronous_run_repeats_only_what_the_log_shows_in_no_round(
    run: TinyRun, told: str, mine: int, since: int, kind: str, is_logged: bool
) -> None:
    """Of round 5 nothing is known here."""
    here = Waiting(run, mine, now=8, last=8)
    repeats = here.trainer.submissions = cast(Any, Repeats())
    here.trainer.awaiting[0], here.trainer.since[0] = 7, since
    here.trainers.tell(ev.TellTrainer(told, 8, 1), 7)
    assert repeats.heard == [(kind if is_logged else told, is_logged)]
    assert here.kinds() == ([kind] if is_logged else [])


def test_a_call_that_was_given_up_does_not_answer_the_next_one(run: TinyRun) -> None:
    """Its round is told of once it is applied, and the trainer may call again meanwhile."""
    here = Waiting(run, 7, now=7, last=7)
    here.trainer.awaiting[0] = 7
    told, call = ev.TellTrainer("committed", 7, 1), here.trainers.awaited_call(0)
    here.trainer.awaiting[0] = 8
    here.trainers.tell(told, call)
    assert (here.heard, here.trainer.awaiting) == ([], {0: 8})
    here.trainers.tell(told, here.trainers.awaited_call(0))
    assert [outcome["call"] for outcome in here.heard] == [8]


@pytest.mark.parametrize("deltas", [False, True])
def test_what_may_be_in_a_round_that_is_not_logged_yet_is_not_submitted(
    run: TinyRun, deltas: bool
) -> None:
    """Its trainer asks again a moment later, and no round reads it before."""
    here = Waiting(run, 7, now=7, last=6, deltas=deltas)
    here.submit(since=5)
    assert (here.kinds(), here.fed) == (["missed"], [])
    here = Waiting(run, 7, now=7, last=7, deltas=deltas)
    here.submit(since=5)
    assert (here.kinds(), here.fed) == (["committed"], [])
    here = Waiting(run, 0, now=7, last=7, deltas=deltas)  # it is in none
    here.submit(since=5)
    assert (here.kinds(), len(here.fed)) == ([], 1)


def test_what_may_be_in_a_round_that_is_not_logged_yet_waits_in_an_asynchronous_run(
    run: TinyRun,
) -> None:
    here = Waiting(run, 7, now=7, last=6)
    repeats = here.trainer.submissions = cast(Any, Repeats())
    here.submit(since=5)
    assert (repeats.given, here.kinds()) == ([None], [])
    here = Waiting(run, 7, now=7, last=7)
    here.trainer.submissions = repeats
    here.submit(since=5)
    assert (repeats.given, here.kinds()) == ([None], ["committed"])
