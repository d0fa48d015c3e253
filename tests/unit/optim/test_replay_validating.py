"""What a trainer makes of the segments of others, with a session that hands them over at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from atoll.collectives.codecs import F32
from atoll.collectives.errors import CodecError, ConfigError, RemoteProtocolError, StateError
from atoll.optim.model_io import ModelVector
from atoll.optim.replay.checkpoint import WorkCheckpoint
from atoll.optim.replay.recorder import Recorder, Replay
from atoll.optim.replay.replaying import ReplayTask, TrainingState
from atoll.optim.replay.validating import (
    RIGHT,
    WITHHELD,
    WRONG,
    Validator,
    as_bytes,
    as_floats,
)
from atoll.peer.client.trainer_channel import Outcome, Validation

STEPS, SEGMENT = 6, 2
LR = 1e-2


class Trainer:
    """Local steps of a small model, recorded, with what a run would tell of them."""

    def __init__(self, lr: float = LR, first_step: int = 0) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(5, 3)
        self.inner = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.vector = ModelVector(self.model)
        self.replay = Replay(segment_steps=SEGMENT, task=lambda: task(lr))
        self.recorder = Recorder(self.replay, TrainingState(self.model, self.inner, {}), STEPS)
        self.round = 1
        self.first_step = first_step

    def flat(self) -> F32:
        values: F32 = np.zeros(self.vector.manifest.elements, np.float32)
        self.vector.write(values)
        return values

    def take_round(self) -> None:
        self.recorder.begin(self.round, self.first_step)
        self.round += 1
        for number in range(STEPS):
            self.recorder.note([100 * self.round + number])
            step(self.model, self.inner, 100 * self.round + number)
            self.recorder.stepped(number == STEPS - 1)
        self.recorder.committed(self.round)

    def work(self) -> bytes:
        commitment = self.recorder.commitment(self.round)
        assert commitment is not None
        return commitment.digest


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """With a number among its values that can be found in the encoded state."""
    model = nn.Linear(5, 3)
    inner = torch.optim.SGD(model.parameters(), lr=0.123456, momentum=0.9)
    inner.state[model.bias]["trust"] = 0.123456
    return model, inner


def step(model: nn.Module, inner: torch.optim.Optimizer, index: int) -> None:
    inner.zero_grad()
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(index))
    torch.Tensor.backward(model(inputs).square().sum())
    inner.step()


def task(lr: float) -> ReplayTask:
    model = nn.Linear(5, 3)
    inner = torch.optim.Adam(model.parameters(), lr=lr)

    def train(batches: Iterator[NDArray[np.int64]], _: int) -> None:
        for indices in batches:
            step(model, inner, int(indices[0]))

    return ReplayTask(model, inner, train)


@dataclass
class Session:
    """``other``: whose steps are drawn; what is published here it has."""

    open: list[Validation] = field(default_factory=list)
    vectors: dict[tuple[str, int], F32] = field(default_factory=dict)
    begin: F32 | None = None  # the run's parameters before the round
    submitted: F32 | None = None
    judgements: list[tuple[int | None, str]] = field(default_factory=list)
    steps: list[tuple[float, bytes]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    error: CodecError | None = None
    state: str = "here"

    def submit(self, fill: object, weight: float, fragment: int = 0, steps: bytes = b"") -> None:
        self.steps.append((weight, steps))

    def validations(self) -> list[Validation]:
        return list(self.open)

    def shown(self, validation: Validation) -> None:
        self.open.remove(validation)

    def fits(self, validation: Validation, fill: Callable[[F32], None], *, start: bool) -> bool:
        if self.error is not None:
            raise self.error
        wanted = self.begin if start else self.submitted
        assert wanted is not None
        found = np.empty_like(wanted)
        fill(found)
        return np.array_equal(found, wanted)

    def judged(self, validation: Validation, judgement: int | None, why: str) -> None:
        self.judgements.append((judgement, why))
        self.open.remove(validation)

    def publish(self, name: str, number: int, values: F32, codec: str) -> None:
        self.vectors[name, number] = values.copy()

    def ask_vector(self, peer: str, name: str, number: int, elements: int, codec: str) -> Asked:
        return Asked(self, name, number, elements)


@dataclass
class Asked:
    session: Session
    name: str
    number: int
    elements: int

    def wait(self, timeout_s: float) -> None:
        assert self.look(timeout_s)

    def look(self, timeout_s: float) -> str:
        values = self.session.vectors.get((self.name, self.number))
        if values is not None and values.size != self.elements:
            raise StateError(f"{values.size} elements")
        return "asked" if values is None else self.session.state

    def read(self) -> F32:
        return self.session.vectors[self.name, self.number]

    def drop(self) -> None:
        self.session.dropped.append(self.name)


def drawn(trainer: Trainer, number: int, *, own: bool = False, before: bytes = b"") -> Validation:
    return Validation(
        b"t" * 32, trainer.round, b"p" * 32, "70707070", own, number, trainer.work(), before
    )


def validator(trainer: Trainer, session: Session) -> Validator:
    found = Validator(session, trainer.recorder, trainer.replay, trainer.vector.manifest, True)
    found.round_over(Outcome("committed", trainer.round, 0.0))
    return found


def judge(
    number: int,
    *,
    other: Trainer | None = None,
    spoil: Callable[[Session], None] = lambda session: None,
    change: Callable[[Validation], Validation] = lambda validation: validation,
    prepare: Callable[[Validator], None] = lambda validator: None,
) -> tuple[int | None, str]:
    """What an honest trainer says of a segment of ``other``, which shows it itself."""
    other, session = other or Trainer(), Session()
    session.begin = other.flat()
    other.take_round()
    session.submitted = other.flat()
    theirs = validator(other, session)
    session.open = [drawn(other, number, own=True)]
    theirs.round_over(Outcome("committed", other.round, 0.0))
    assert not session.open
    spoil(session)
    mine = Trainer()
    mine.take_round()
    judging = validator(mine, session)
    prepare(judging)
    session.open = [change(drawn(other, number))]
    for _ in range(20):
        if session.open:
            judging.round_over(Outcome("missed", other.round, 0.0))
    judging.round_over(Outcome("missed", other.round, 0.0))
    assert session.dropped[0] == "replay.size"
    (found,) = session.judgements
    return found


@pytest.mark.parametrize("number", [0, 1, 2, 3 * 1000 + 2])
def test_honest_steps_are_right(number: int) -> None:
    assert judge(number) == (RIGHT, "")


@pytest.mark.parametrize("number", range(3))
def test_another_rate_is_wrong(number: int) -> None:
    judgement, why = judge(number, other=Trainer(lr=1.1 * LR))
    assert judgement == WRONG
    assert "differ" in why


@pytest.mark.parametrize(("lr", "expected"), [(1.0012, None), (1.0001, RIGHT), (1.01, WRONG)])
def test_between_right_and_wrong_nothing_is_said(lr: float, expected: int | None) -> None:
    """Another machine may find that it differs by more, or by less."""
    assert judge(0, other=Trainer(lr=lr * LR))[0] == expected


def test_what_cannot_be_sent_or_read_is_wrong_and_ends_no_trainer() -> None:
    def refuse(session: Session) -> None:
        session.error = CodecError("chunk 0 is not finite")

    assert judge(2, spoil=refuse) == (WRONG, "chunk 0 is not finite")


def test_a_validator_whose_own_steps_differ_now_says_nothing() -> None:
    def tired(validating: Validator) -> None:
        validating._task = task(3 * LR)  # as one that has no memory left, say

    assert judge(0, prepare=tired)[0] is None


def test_a_hostile_checkpoint_is_no_checkpoint() -> None:
    checkpoint = TrainingState(*made(), {}).capture()
    encoded = bytes(checkpoint.encode())
    assert WorkCheckpoint.decode(encoded)
    assert b"0.123456" in encoded
    for value in (b"NaN     ", b"1e999   ", b"Infinity"):
        with pytest.raises(RemoteProtocolError):
            WorkCheckpoint.decode(encoded.replace(b"0.123456", value))


def shifted(name: str) -> Callable[[Session], None]:
    def shift(session: Session) -> None:
        setattr(session, name, getattr(session, name) + np.float32(1e-3))

    return shift


def test_its_two_ends_have_to_be_those_of_the_round() -> None:
    assert judge(0, spoil=shifted("begin"))[0] == WRONG
    assert judge(1, spoil=shifted("begin"))[0] == RIGHT  # which is not at the beginning
    assert judge(2, spoil=shifted("submitted"))[0] == WRONG
    assert judge(1, spoil=shifted("submitted"))[0] == RIGHT


def test_it_has_to_stand_where_all_stand() -> None:
    judgement, why = judge(1, other=Trainer(first_step=500))
    assert judgement == WITHHELD  # or a clock is wrong, here or there
    assert "stands at step 500" in why


def test_who_has_counted_in_the_round_before_begins_there() -> None:
    counted = replace(drawn(taken(), 1), before=b"b" * 32)
    assert judge(1, change=lambda v: replace(v, before=b"b" * 32))[0] == RIGHT
    judgement, why = judge(1, change=lambda v: replace(v, before=counted.before, round=v.round + 7))
    assert judgement == WITHHELD  # nothing was published of that round
    assert "nothing came" in why


def taken() -> Trainer:
    trainer = Trainer()
    trainer.take_round()
    return trainer


def test_inner_optimizers_have_to_go_on() -> None:
    trainer, session = Trainer(), Session()
    trainer.take_round()
    first = trainer.work()
    session.begin = trainer.flat()
    trainer.take_round()
    session.submitted = trainer.flat()
    shows = validator(trainer, session)
    session.open = [drawn(trainer, 0, own=True)]
    shows.round_over(Outcome("committed", trainer.round, 0.0))
    for before, expected in ((first, RIGHT), (b"x" * 32, WITHHELD)):
        session.open = [drawn(trainer, 0, before=before)]
        judging = validator(taken(), session)
        judging.round_over(Outcome("missed", trainer.round, 0.0))
        assert session.judgements.pop()[0] == expected


def garbage(session: Session) -> None:
    (key,) = (key for key in session.vectors if key[0] == "replay.segment")
    session.vectors[key][5] += 1


def too_long(session: Session) -> None:
    (key,) = (key for key in session.vectors if key[0] == "replay.size")
    session.vectors[key][0] = 1e6


def not_bytes(session: Session) -> None:
    (key,) = (key for key in session.vectors if key[0] == "replay.segment")
    session.vectors[key][7] = np.inf


@pytest.mark.parametrize("spoil", [garbage, too_long, not_bytes, lambda s: s.vectors.clear()])
def test_what_proves_nothing_is_withheld_and_not_wrong(spoil: Callable[[Session], None]) -> None:
    """It may have been shown to this one alone."""
    assert judge(1, spoil=spoil)[0] == WITHHELD


def test_what_comes_too_slowly_is_withheld() -> None:
    def slow(session: Session) -> None:
        session.state = "arriving"

    judgement, why = judge(1, spoil=slow)
    assert judgement == WITHHELD
    assert "nothing came, or not all of it" in why


def test_another_segment_than_the_drawn_one_is_withheld() -> None:
    assert judge(1, change=lambda v: replace(v, number=2))[0] == WITHHELD


def test_a_task_that_does_not_do_the_own_steps_judges_nobody() -> None:
    trainer, session = Trainer(), Session()
    trainer.replay = Replay(segment_steps=SEGMENT, task=lambda: task(2 * LR))
    trainer.take_round()
    with pytest.raises(ConfigError, match="task does not lead"):
        validator(trainer, session)


def test_steps_that_are_not_kept_do_not_count_and_are_not_shown() -> None:
    trainer, session = Trainer(), Session()
    trainer.take_round()
    found = validator(trainer, session)
    found.submit(lambda out, lo: None, 3.0)
    assert session.steps == [(3.0, trainer.work())]
    trainer.recorder.begin(trainer.round, 0)
    found.submit(lambda out, lo: None, 3.0)
    assert session.steps[1:] == [(0.0, b"")]
    session.open = [replace(drawn(trainer, 0, own=True), work=b"w" * 32)]
    found.round_over(Outcome("missed", trainer.round, 0.0))
    assert not session.open
    assert not session.vectors


@given(data=st.binary(max_size=200))
def test_bytes_travel_as_floats(data: bytes) -> None:
    floats = as_floats(data)
    assert floats.dtype == np.float32
    assert as_bytes(floats, len(data)) == data


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 2.0**24])
def test_floats_that_are_no_bytes_are_refused(value: float) -> None:
    with pytest.raises(RemoteProtocolError):
        as_bytes(np.array([1.0, value], np.float32), 6)


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        f"{n}.{key}": value.clone()
        for n, state in enumerate(trainer.inner.state.values())
        for key, value in state.items()
    }


def test_dropped_steps_leave_nothing_in_the_inner_optimizer() -> None:
    trainer = taken()
    before = state_of(trainer)
    trainer.recorder.begin(trainer.round, 0)
    for number in range(3):
        trainer.recorder.note([number])
        step(trainer.model, trainer.inner, number)
        trainer.recorder.stepped(False)
    after = state_of(trainer)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    trainer.recorder.rewind()
    again = state_of(trainer)
    assert all(torch.equal(before[name], again[name]) for name in before)
    trainer.recorder.forget()
    trainer.recorder.rewind()  # nothing to go back to
    assert all(torch.equal(value, state_of(trainer)[name]) for name, value in again.items())
