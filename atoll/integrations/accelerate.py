"""Make a loop that uses accelerate a peer of a run.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    outer = attach(accelerator, model, optimizer, sync_every=100)
    ...                      # the loop as it was
    outer.finish()           # the steps since the last round, and the run's parameters
    outer.close()

``accelerator.log()`` then sends the method's metrics along, as ``atoll/...``, and reports a
``loss`` to `atoll status`; ``accelerator.save_state()`` saves where the method is, and
``load_state()`` loads it last of all. Evaluate ``with outer.outer_parameters():``, as in any loop
by hand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.integrations import missing
from atoll.integrations.methods import Kind, figures, follow, make_method
from atoll.optim.inner import Inner
from atoll.optim.method import Method
from atoll.optim.sessions import AnySession

try:
    from accelerate import Accelerator
    from accelerate.scheduler import AcceleratedScheduler
except ImportError as error:
    raise missing("accelerate", error) from error


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Inner,
    scheduler: Any = None,
    *,
    method: Kind = "DiLoCo",
    peer: AnySession | None = None,
    home: str | Path | None = None,
    **options: Any,
) -> Method:
    """Return the method for what ``accelerator.prepare`` has returned; all processes call it.

    ``scheduler``: one that is stepped after each step of the optimizer; it then follows the run.
    ``method``: a method's class, its name, or a function that is called with model, optimizer and
    ``peer``; ``options`` are handed on to it. ``peer``: the session; by default
    ``atoll.attach(home)``. ConfigError for a scheduler that takes several steps at a time.
    """
    followed = _followed(accelerator, scheduler)
    outer = make_method(model, optimizer, method, peer=peer, home=home, **options)
    if followed is not None:
        follow(outer, followed)
    accelerator.register_for_checkpointing(outer)
    accelerator.log = _with_figures(accelerator.log, outer)
    return outer


def _followed(accelerator: Accelerator, scheduler: Any) -> Any:
    """Return the scheduler inside that of accelerate."""
    if not isinstance(scheduler, AcceleratedScheduler):
        return scheduler
    steps = 1 if scheduler.split_batches else accelerator.num_processes
    if scheduler.step_with_optimizer and steps > 1:
        raise ConfigError(
            f"accelerate steps this scheduler {steps} times for each step of the optimizer",
            fix="make the Accelerator with step_scheduler_with_optimizer=False, or leave it out",
        )
    return scheduler.scheduler


def _with_figures(log: Callable[..., Any], outer: Method) -> Callable[..., Any]:
    @functools.wraps(log)
    def with_figures(values: dict[str, Any], *given: Any, **named: Any) -> Any:
        if "loss" in values:
            outer.report(loss=values["loss"])
        return log({**values, **figures(outer)}, *given, **named)

    return with_figures
