"""Segments taken again: the same machine, others, and trainers that did not take their steps.

``benchmarks/replay.py`` prints how far each is; docs/log.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.grids import rest_is_slow
from harness.replay_elsewhere import replayed_elsewhere
from harness.replay_ways import CHEATS, MIXED, MIXED_WAYS, WAYS, Change, segment, segments
from harness.replaying import OPTIMIZERS, Loop, adamw, biased_model, sgd, text_model
from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.optim.replay.checkpoint import Array
from atoll.optim.replay.difference import MIXED_PRECISION, ReplayVerdict, Tolerance
from atoll.optim.replay.replaying import ReplayTask, TrainingState, replay
from atoll.optim.replay.step_disclosure import Batch, Extent, Opened

MARGIN = 5  # honest differences are at least so many times smaller than tolerances, cheats larger
CHEAP = [way for way in WAYS if way != "compiled"]
# Of one step the gradients are not stale yet. With AdamW that is all there is to a scaled gradient.
HARMLESS = {("stale gradients", 1)}


def again(
    opened: Opened, optimizer: Any, way: Change, tolerance: Tolerance | None = None
) -> ReplayVerdict:
    model = text_model()
    loop = Loop(model, optimizer(model))
    way(loop)
    return replay(opened, loop.task(), tolerance)


def scaled(factor: float, own: float = 0.0) -> Tolerance:
    """The default."""
    return Tolerance(factor * Tolerance.group, factor * Tolerance.tensor, own)


@pytest.mark.parametrize("steps", [1, 5, 20])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_on_the_same_machine_it_is_the_same_bits(optimizer: str, steps: int) -> None:
    opened = segment(OPTIMIZERS[optimizer], steps)
    verdict = again(opened, OPTIMIZERS[optimizer], WAYS["the same machine"])
    assert verdict.passed
    assert set(verdict.differences.values()) == {0.0}
    assert verdict.worst_difference == 0.0
    only_digests = replace(opened, end=None)
    assert again(only_digests, OPTIMIZERS[optimizer], WAYS["the same machine"]).passed


@pytest.mark.parametrize("steps", [1, 5, 20])
@pytest.mark.parametrize("way", CHEAP)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_other_machines_are_borne_with_a_margin(optimizer: str, way: str, steps: int) -> None:
    opened = segment(OPTIMIZERS[optimizer], steps)
    verdict = again(opened, OPTIMIZERS[optimizer], WAYS[way], scaled(1 / MARGIN))
    assert verdict.passed, verdict


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_segment_of_a_run_is_borne_with_a_margin(optimizer: str) -> None:
    make, tolerance = OPTIMIZERS[optimizer], scaled(1 / MARGIN)
    for opened in segments(make, 20, 200):
        verdict = again(opened, make, WAYS["batch reversed"], tolerance)
        assert verdict.passed, (opened.extent, verdict)


@pytest.mark.parametrize("way", ["batch reversed", "float64"])
def test_other_machines_really_compute_otherwise(way: str) -> None:
    """Else the test above would say nothing: then digests alone do not do."""
    opened = segment(adamw, 5)
    assert again(opened, adamw, WAYS[way]).difference > 0
    verdict = again(replace(opened, end=None), adamw, WAYS[way])
    assert "was not sent" in verdict.why


@pytest.mark.parametrize("optimizer", rest_is_slow(OPTIMIZERS, 1))
def test_an_old_processor_is_borne_as_well(optimizer: str, tmp_path: Path) -> None:
    """In another process: none of the instructions that made the steps are used."""
    verdict = replayed_elsewhere(segment(OPTIMIZERS[optimizer], 5), optimizer, tmp_path)
    assert verdict.passed
    assert verdict.difference < Tolerance().group / MARGIN
    assert verdict.worst_difference < Tolerance().tensor / MARGIN


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, when it compiles
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_compiled_model_is_borne_as_well(optimizer: str) -> None:
    opened = segment(OPTIMIZERS[optimizer], 5)
    tolerance = scaled(1 / MARGIN)
    verdict = again(opened, OPTIMIZERS[optimizer], WAYS["compiled"], tolerance)
    assert verdict.passed, verdict


@pytest.mark.parametrize("way", [way for way in MIXED_WAYS if "float32" not in way])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_mixed_precision_has_tolerances_of_its_own(optimizer: str, way: str) -> None:
    for steps in (1, 5):
        opened = segment(OPTIMIZERS[optimizer], steps, way=MIXED)
        verdict = again(opened, OPTIMIZERS[optimizer], MIXED_WAYS[way], MIXED_PRECISION)
        assert verdict.passed, (steps, verdict)


@pytest.mark.parametrize("steps", [1, 5, 20])
@pytest.mark.parametrize("cheat", CHEATS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_cheats_are_found_with_a_margin(optimizer: str, cheat: str, steps: int) -> None:
    opened = segment(OPTIMIZERS[optimizer], steps, cheat=CHEATS[cheat])
    tolerance = scaled(MARGIN, Tolerance.own)
    verdict = again(opened, OPTIMIZERS[optimizer], WAYS["the same machine"], tolerance)
    assert verdict.passed == ((cheat, steps) in HARMLESS), verdict


@pytest.mark.parametrize("cheat", ["no steps", "one step skipped", "rate + 10 %", "labels flipped"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gross_cheats_are_found_in_mixed_precision_too(optimizer: str, cheat: str) -> None:
    for steps in (1, 5):
        opened = segment(OPTIMIZERS[optimizer], steps, way=MIXED, cheat=CHEATS[cheat])
        way = MIXED_WAYS["... halves of the batch"]
        verdict = again(opened, OPTIMIZERS[optimizer], way, MIXED_PRECISION)
        assert not verdict.passed, (steps, verdict)


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_gradients_of_nothing_but_rounding_are_no_cheat(steps: int) -> None:
    """Adam makes whole steps of them, in some direction. Others of that trainer's are found."""
    model = biased_model()
    loop = Loop(model, adamw(model))
    WAYS["batch reversed"](loop)
    found = []
    for warm in (20, 50):
        opened = segment(adamw, steps, warm=warm, make=biased_model)
        found.append(replay(opened, loop.task(), Tolerance(own=0.0)))
        assert replay(opened, loop.task()).passed
        for cheat in ("rate + 1 %", "momentum x 1.05", "one sample is another"):
            lie = segment(adamw, steps, warm=warm, make=biased_model, cheat=CHEATS[cheat])
            verdict = replay(lie, loop.task())
            assert not verdict.passed
            assert verdict.decided
    assert all("in_proj_bias" in verdict.worst for verdict in found if not verdict.passed)
    if steps == 20:  # else nothing would have been borne here
        assert max(verdict.worst_difference for verdict in found) > Tolerance.tensor / 3


def test_other_samples_than_were_noted_are_found() -> None:
    opened = segment(adamw, 5)
    steps = list(opened.steps)
    steps[3] = (Batch(steps[3][0].indices + 1),)
    assert not again(replace(opened, steps=steps), adamw, WAYS["the same machine"]).passed


# ------------------------------------------------------------ tasks that go wrong


def task_of(train: Any) -> ReplayTask:
    model = text_model()
    return ReplayTask(model, adamw(model), train)


def test_a_loop_that_fails_is_a_verdict() -> None:
    """The start comes from anyone, and may be what makes it fail."""
    opened = segment(adamw, 3)

    def fails(batches: Iterator[Any], step: int) -> None:
        raise RuntimeError(f"shapes differ at step {step}, {next(batches).size}")

    verdict = replay(opened, task_of(fails))
    assert "RuntimeError: shapes differ at step 10, 8" in verdict.why


def test_a_loop_that_takes_other_steps_is_a_verdict() -> None:
    opened = segment(adamw, 3)
    verdict = replay(opened, task_of(lambda batches, step: next(batches)))
    assert "2 are left over after 0 steps; it claims 3" in verdict.why
    twice = Loop(text_model(), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    twice.model = model = text_model()
    twice.inner = adamw(model)

    def train(batches: Iterator[Any], step: int) -> None:
        for batch in batches:
            twice([batch])
            twice.inner.step()

    assert (
        "0 are left over after 6 steps" in replay(opened, ReplayTask(model, twice.inner, train)).why
    )


@pytest.mark.parametrize(
    "change",
    [
        {"parameters": {}},
        {"buffers": {"more": Array("float32", (), np.zeros(4, np.uint8))}},
        {"inner": {"0.0.exp_avg": Array("float32", (10**5,), np.zeros(4 * 10**5, np.uint8))}},
        {"inner": {"0.999.exp_avg": Array("float32", (), np.zeros(4, np.uint8))}},
        {"inner": {"5": Array("float32", (), np.zeros(4, np.uint8))}},
        {"values": {}},
        {"values": {"inner": {"0.0.step": "x"}, "stateful": {}}},
        {"values": {"inner": {"0.77.step": 1}, "stateful": {}}},
        {"values": {"inner": {}, "stateful": {"scaler": {}}}},
        {"values": {"inner": {}, "stateful": {"scaler": 1}}},
    ],
)
def test_a_start_of_another_model_or_optimizer_is_a_verdict(change: dict[str, Any]) -> None:
    opened = segment(adamw, 1)
    lie = replace(opened, start=replace(opened.start, **change))
    verdict = again(lie, adamw, WAYS["the same machine"])
    assert "its steps cannot be taken: RemoteProtocolError" in verdict.why


def test_a_start_whose_tensors_do_not_fit_is_a_verdict() -> None:
    opened = segment(adamw, 1)
    name, array = next(iter(opened.start.parameters.items()))
    wrong = Array("int32", array.shape, array.data)
    for kept in ({**opened.start.parameters, name: wrong},):
        lie = replace(opened, start=replace(opened.start, parameters=kept))
        assert "cannot be taken" in again(lie, adamw, WAYS["the same machine"]).why
    inner = dict(opened.start.inner)
    inner["0.1.exp_avg"] = Array("float32", (3,), np.zeros(12, np.uint8))
    lie = replace(opened, start=replace(opened.start, inner=inner))
    assert "cannot be taken: RuntimeError" in again(lie, adamw, WAYS["the same machine"]).why


def test_more_batches_than_a_task_takes_are_a_verdict() -> None:
    opened = segment(adamw, 2)
    steps = [opened.steps[0], opened.steps[1] * 4]
    task = Loop(model := text_model(), adamw(model)).task()
    task.batches_max = 3
    assert "4 batches of one step; at most 3" in replay(replace(opened, steps=steps), task).why


def test_random_numbers_of_the_validator_are_its_own() -> None:
    opened = segment(adamw, 2)
    rng = TrainingState(model := text_model(), adamw(model), {}).random_states()
    torch.manual_seed(5)
    steps = [tuple(Batch(b.indices, rng) for b in step) for step in opened.steps]
    before = torch.get_rng_state()
    assert again(replace(opened, steps=steps), sgd, WAYS["the same machine"]).why
    torch.manual_seed(5)
    task = Loop(model := text_model(), adamw(model)).task()
    torch.manual_seed(5)
    assert replay(replace(opened, steps=steps), task).passed
    assert torch.equal(torch.get_rng_state(), before)
    bad = [tuple(Batch(b.indices, (b"no state", b"")) for b in step) for step in opened.steps]
    assert "no state of random numbers" in replay(replace(opened, steps=bad), task).why


def test_an_optimizer_that_keeps_lists_is_refused() -> None:
    model = nn.Linear(2, 1)
    inner = torch.optim.LBFGS(model.parameters())
    state = TrainingState(model, inner, {})

    def closure() -> torch.Tensor:
        inner.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    inner.step(closure)
    with pytest.raises(ConfigError, match="cannot be kept"):
        state.capture()


def test_numbers_are_not_compared_at_a_rounds_end() -> None:
    opened = segment(adamw, 2)
    ended = replace(opened.end, values={"other": 1})
    lie = replace(opened, end=ended, end_digests=ended.digests())
    assert lie.is_last
    assert again(lie, adamw, WAYS["the same machine"]).passed
    assert again(replace(lie, end=None), adamw, WAYS["the same machine"]).passed
    before = replace(lie, extent=Extent(1, 10, 9, 2))
    assert "and here" in again(before, adamw, WAYS["the same machine"]).why
    assert not again(replace(before, end=None), adamw, WAYS["the same machine"]).passed
