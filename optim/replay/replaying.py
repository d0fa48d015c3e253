"""Take a segment of another trainer's local steps again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from atoll.optim.inner import Inner
from atoll.optim.replay.batches import Steps
from atoll.optim.replay.checkpoint import VALUES_AT, WorkCheckpoint
from atoll.optim.replay.difference import (
    ReplayVerdict,
    Tolerance,
    compare,
    differences,
    differing_values,
)
from atoll.optim.replay.state import Stateful, TrainingState
from atoll.optim.replay.step_disclosure import Opened
from atoll.optim.schedules import Schedules

I64 = NDArray[np.int64]
BATCHES_MAX = 64  # of a step, unless a task says otherwise: those of accumulation, and some skipped


class ReplayTask:
    """Hold how local steps are taken, as whoever audits knows it.

    Its model and inner optimizers are made as every trainer of the run makes them; they are its own
    and not those that it trains.

    ``train(batches, step)`` is the training loop over ``batches``, each int64[n] as ``note_batch``
    got it, from the ``global_step`` that is ``step``. It takes them one by one, because random
    numbers are put back with each; where gradients are accumulated or a GradScaler skips steps,
    there are more of them than steps. ``schedulers``, given as they were made, are brought to
    ``step`` before; ``train`` steps them as usual. ``stateful``: as ``Replay`` has it.
    ``batches_max``: of a step; who claims more is not heard, or it could make others work.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Inner,
        train: Callable[[Iterator[I64], int], None],
        *,
        schedulers: Sequence[LRScheduler] = (),
        stateful: Mapping[str, Stateful] | None = None,
        batches_max: int = BATCHES_MAX,
    ) -> None:
        self.state = TrainingState(model, inner, stateful or {})
        self.train, self.batches_max = train, batches_max
        self._schedules = Schedules()
        for scheduler in schedulers:
            self._schedules.add(scheduler, 0)

    def go_to(self, step: int) -> None:
        self._schedules.set_step(step)


def replay(opened: Opened, task: ReplayTask, tolerance: Tolerance | None = None) -> ReplayVerdict:
    """Take the steps of a segment again and compare with where they should end.

    If only the digests of the end are there, nothing but the same bits will do.

    Whatever goes wrong in ``task`` is a verdict too, because its start comes from the other
    trainer: so try a task on a round of your own before it judges others.
    """
    tolerance = tolerance or Tolerance()
    mine = _end(opened, task)
    if isinstance(mine, ReplayVerdict):
        return mine
    if opened.end is None:
        # At a round's end a GradScaler has not been updated yet when the checkpoint is taken.
        end = VALUES_AT if opened.is_last else None
        same = mine.digests()[:end] == opened.end_digests[:end]
        return ReplayVerdict(
            "" if same else "its end has other bits, and was not sent to be compared"
        )
    found = differences(opened.start, mine, opened.end)
    values = "" if opened.is_last else differing_values(mine, opened.end, tolerance)
    verdict = compare(found, tolerance, values=values)
    if verdict.passed or found.why or not tolerance.own:
        return verdict
    other = _end(opened, task, rounded=True)
    if isinstance(other, ReplayVerdict):
        return verdict
    return compare(found, tolerance, differences(opened.start, other, mine), values)


def _end(
    opened: Opened, task: ReplayTask, *, rounded: bool = False
) -> WorkCheckpoint | ReplayVerdict:
    """Return where its steps lead here, or why they lead nowhere.

    They are taken from its start or one that is ``rounded`` otherwise.
    """
    state, steps = task.state, opened.steps
    before = state.random_states()
    most = max(map(len, steps), default=0)
    if most > task.batches_max:
        return ReplayVerdict(
            f"{most} batches of one step; at most {task.batches_max} are taken again"
        )
    try:
        state.load(opened.start)
        if rounded:
            state.perturb()
        task.go_to(opened.extent.step_of(opened.segment))
        taken = _Taken()
        hook = state.inners[-1].register_step_post_hook(taken)
        try:
            batches = _batches(state, steps)
            task.train(batches, opened.extent.step_of(opened.segment))
        finally:
            hook.remove()
        left = sum(1 for _ in batches)
        mine = WorkCheckpoint.decode(state.capture().encode())
    except Exception as error:
        return ReplayVerdict(f"its steps cannot be taken: {type(error).__name__}: {error}"[:400])
    finally:
        state.set_random_states(before)
    if taken.count != len(steps) or left:
        return ReplayVerdict(
            f"of its batches {left} are left over after {taken.count} steps; it claims {len(steps)}"
        )
    return mine


class _Taken:
    """Count steps as a trainer does (method.py).

    Fused optimizers call hooks when they skip one.
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None or not found_inf.item() > 0:
            self.count += 1


def _batches(state: TrainingState, steps: Steps) -> Iterator[I64]:
    for step in steps:
        for batch in step:
            state.set_random_states(batch.rng)
            yield batch.indices
