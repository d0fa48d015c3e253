"""Make a TorchTitan trainer a peer of a run; it stays TorchTitan's own.

    trainer = config.build()          # as torchtitan.train does
    join(trainer, sync_every=100)
    trainer.train()

The ranks of this machine are one trainer of the run (FSDP2, and parallelism within a layer as far
as its parameters are sharded by rows); start torchrun on each machine by itself. ``join`` stands
before methods of this trainer's parts:

* the method is made when TorchTitan has loaded its checkpoint, or the weights to begin with, and
  schedules follow the run's step;
* a checkpoint has where the method is, and training goes on in the middle of a round if the run is
  where it was; else the run's parameters win. State is read between steps alone;
* validation sees the run's parameters, the metrics processor logs ``atoll/...``, and `atoll status`
  has the loss;
* training ends where the run has its steps; what no round has yet is handed in then.

Not run on a GPU so far: tests use the optimizers, schedules and checkpoints of TorchTitan on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.collectives.errors import ConfigError
from atoll.integrations.dcp import KEY, MethodState
from atoll.integrations.methods import Kind, evaluating, figures, follow, make_method
from atoll.optim.method import Method
from atoll.optim.model_io import trainable
from atoll.optim.sessions import AnySession
from atoll.peer.client.console import say


def join(
    trainer: Any,
    method: Kind = "DiLoCo",
    *,
    peer: AnySession | None = None,
    home: str | Path | None = None,
    **options: Any,
) -> Joined:
    """Let a ``torchtitan.trainer.Trainer`` take part in the run; all ranks call it before train().

    ``method``: a method's class, its name, or a function that is called with model, optimizers and
    ``peer``; ``options`` are handed on to it. ``peer``: the session; by default
    ``atoll.attach(home)``. ConfigError for pipeline stages: a rank has but a part of the model.
    """
    if len(trainer.model_parts) != 1:
        raise ConfigError(
            f"the model is in {len(trainer.model_parts)} pipeline stages, and a trainer of a run "
            "has it whole or sharded by rows",
            fix="set parallelism.pipeline_parallel_degree to 1",
        )
    return Joined(
        trainer,
        lambda model, optimizers: make_method(
            model, optimizers, method, peer=peer, home=home, **options
        ),
    )


class Joined:
    """Keep a TorchTitan trainer and its method together; ``outer`` is there once it trains."""

    def __init__(self, trainer: Any, make: Callable[..., Method]) -> None:
        self.outer: Method | None = None
        self._trainer, self._make = trainer, make
        self._state = MethodState()
        checkpointer, metrics = trainer.checkpointer, trainer.metrics_processor
        if (states := getattr(checkpointer, "states", None)) is not None:  # it is enabled
            states[KEY] = self._state
        checkpointer.load = self._then_begin(checkpointer.load)
        metrics.log = self._with_figures(metrics.log)
        if (validator := getattr(trainer, "validator", None)) is not None:
            validator.validate = self._with_run(validator.validate)
        trainer.should_continue_training = self._until_done(trainer.should_continue_training)
        trainer.train = self._closing(trainer.train)

    def close(self) -> None:
        """Close the method and its session, if there are any; training ends with it by itself."""
        outer, self.outer, self._state.method = self.outer, None, None
        if outer is not None:
            outer.close()

    # ------------------------------------------------------------ methods of the trainer's parts

    def _then_begin(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def then_begin(*given: Any, **named: Any) -> Any:
            loaded = load(*given, **named)
            self._begin()
            return loaded

        return then_begin

    def _begin(self) -> None:
        """Make the method; go on from the checkpoint that was loaded, if there was one of it."""
        self.close()
        trainer = self._trainer
        (model,) = trainer.model_parts
        saved = self._state.take()
        own = {} if saved is None else {n: _here(p).clone() for n, p in trainable(model).items()}
        self.outer = self._state.method = self._make(model, list(trainer.optimizers.optimizers))
        if saved is not None:
            with torch.no_grad():
                for name, parameter in trainable(model).items():
                    _here(parameter).copy_(own[name])
            self.outer.load_state_dict(saved)
        for scheduler in trainer.lr_schedulers.schedulers:
            follow(self.outer, scheduler)

    def _with_figures(self, log: Callable[..., Any]) -> Callable[..., Any]:
        """Add the method's metrics to what TorchTitan logs, and report the loss."""

        @functools.wraps(log)
        def with_figures(
            step: int,
            global_avg_loss: float,
            *given: Any,
            extra_metrics: dict[str, Any] | None = None,
            **named: Any,
        ) -> Any:
            extra = dict(extra_metrics or {})
            if self.outer is not None:
                self.outer.report(loss=global_avg_loss)
                extra |= figures(self.outer)
            return log(step, global_avg_loss, *given, extra_metrics=extra, **named)

        return with_figures

    def _with_run(self, validate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(validate)
        def with_run(*given: Any, **named: Any) -> Any:
            with evaluating(self.outer):
                return validate(*given, **named)

        return with_run

    def _until_done(self, goes_on: Callable[[], bool]) -> Callable[[], bool]:
        @functools.wraps(goes_on)
        def until_done() -> bool:
            outer, steps = self.outer, self._trainer.config.training.steps
            if outer is not None and (outer.has_left or outer.global_step >= steps):
                if goes_on():
                    say(f"the run is at step {outer.global_step} of {steps}: training ends")
                return False
            return goes_on()

        return until_done

    def _closing(self, train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def closing(*given: Any, **named: Any) -> Any:
            try:
                found = train(*given, **named)
                if self.outer is not None:
                    self.outer.finish()
                return found
            finally:
                self.close()

        return closing


def _here(parameter: Tensor) -> Tensor:
    """Return the rows of a parameter that are in this process."""
    there: Any = parameter.detach()
    local: Tensor = there.to_local() if hasattr(there, "to_local") else there
    return local
