"""Let learning rate schedulers follow the run: a late joiner's is where those of the others are.

A scheduler of torch knows one way only, a step ahead, and some multiply what they find. So to
follow means to take the same steps again, and then rates are those of the others bit for bit. To
go back, one begins again with what was kept.
"""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from atoll.collectives.errors import ConfigError
from atoll.peer.client.console import say

CHANGED = ("lr", "momentum", "betas")  # what schedulers of torch write into groups of parameters

KEEP_EVERY = 1000  # steps: to take so many again costs some 10 ms


class Schedules:
    """Let the schedulers of one trainer follow the run."""

    def __init__(self) -> None:
        self._followed: list[_Followed] = []
        self._were_loaded = False  # the inner optimizers, with rates of another step

    def add(self, scheduler: LRScheduler, step: int) -> None:
        """Follow a scheduler, first to this step.

        ConfigError for one that depends on more than the step, and for one that is further already.
        """
        followed = _Followed(scheduler)
        followed.set_step(step)
        self._followed.append(followed)

    def loaded(self) -> None:
        """Hear that the inner optimizers were loaded: their rates are those of the file."""
        self._were_loaded = True

    def set_step(self, step: int) -> None:
        """Bring each scheduler to the learning rates of this step, counted from 0."""
        for followed in self._followed:
            followed.set_step(step, loaded=self._were_loaded)
        self._were_loaded = False


class _Followed:
    def __init__(self, scheduler: LRScheduler) -> None:
        if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
            raise ConfigError(
                f"a {type(scheduler).__name__} cannot be followed: what its rates are is no "
                "function of the step",
                fix="follow a scheduler of torch.optim.lr_scheduler whose step() takes nothing",
            )
        self._scheduler = scheduler
        # As it was when it was given, and as it was when it last stood where it should.
        self._first = self._latest = self._kept()
        self._last = sys.maxsize  # the step at which it stays, once it has refused a later one

    def set_step(self, step: int, *, loaded: bool = False) -> None:
        step = min(step, self._last)
        epoch, (kept, _, groups) = _epoch(self._scheduler), self._latest
        if epoch == step < kept + KEEP_EVERY and not loaded:
            return  # what is in the groups may be as the user wants it
        if epoch == step == kept:
            self._write(groups)
            return
        if epoch > step:
            self._go_back(step)
        for group, rate in zip(
            _groups(self._scheduler), self._scheduler.get_last_lr(), strict=True
        ):
            _set(group, "lr", rate)  # the optimizer may have loaded others meanwhile
        if not self._reach(step):
            self.set_step(step, loaded=loaded)
            return
        self._latest = self._kept()

    def _reach(self, step: int) -> bool:
        """Step the scheduler up to ``step``; return whether it has taken all of these steps.

        A OneCycleLR refuses those after its ``total_steps``, which others of the run may take.
        """
        epoch = _epoch(self._scheduler)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch: no optimizer.step() between two of these
                while (epoch := _epoch(self._scheduler)) < step:
                    self._scheduler.step()
        except ValueError as error:
            # One before the last step that it takes: the loop still calls its step() once.
            self._last = max(self._first[0], epoch - 1)
            say(
                f"the {type(self._scheduler).__name__} ends, and the run goes on: learning rates "
                f"stay those of step {self._last} ({error}); give it as many steps as the run has, "
                "and end the loop by global_step"
            )
            return False
        return True

    def _go_back(self, step: int) -> None:
        for epoch, state, groups in (self._latest, self._first):
            if epoch <= step:
                self._scheduler.load_state_dict(copy.deepcopy(state))
                self._write(groups)
                return
        raise ConfigError(
            f"the {type(self._scheduler).__name__} is at step {_epoch(self._scheduler)}, the run at"
            f" {step}",
            fix="let it be followed as it was made: it is brought to the step of the run, and its "
            "state need not be loaded",
        )

    def _write(self, groups: list[dict[str, Any]]) -> None:
        """Write what was kept of the groups back."""
        for group, values in zip(_groups(self._scheduler), groups, strict=True):
            for key, value in values.items():
                _set(group, key, value)

    def _kept(self) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
        groups = _groups(self._scheduler)
        values = [{key: g[key] for key in CHANGED if key in g} for g in groups]
        state = self._scheduler.state_dict()
        return _epoch(self._scheduler), copy.deepcopy(state), copy.deepcopy(values)


def _epoch(scheduler: LRScheduler) -> int:
    """Return how many steps a scheduler has taken.

    A ChainedScheduler does not say; all in it take each one.
    """
    while not hasattr(scheduler, "last_epoch"):
        scheduler = scheduler._schedulers[0]  # type: ignore[attr-defined]
    return scheduler.last_epoch


def _groups(scheduler: LRScheduler) -> list[dict[str, Any]]:
    return scheduler.optimizer.param_groups


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group[key], torch.Tensor):  # a capturable optimizer keeps the tensor
        group[key].fill_(value)
    else:
        group[key] = copy.copy(value)
