"""Make the method that a script asks for, and give what every library wants of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from atoll import optim
from atoll.collectives.errors import ConfigError
from atoll.optim.inner import Inner
from atoll.optim.method import Method
from atoll.optim.sessions import AnySession
from atoll.peer.client.console import say

# A class of atoll, its name, or a function that is called as one.
Kind: TypeAlias = str | Callable[..., Method]


def make_method(
    model: nn.Module,
    optimizer: Inner,
    method: Kind = "DiLoCo",
    *,
    peer: AnySession | None = None,
    home: str | Path | None = None,
    **options: Any,
) -> Method:
    """Return ``method(model, optimizer, peer=..., **options)``.

    ``method``: a method with an inner optimizer, its name, or a function that returns one.
    ``peer``: its session; by default ``atoll.attach(home)``, one of all ranks of this machine.
    ConfigError for another name, and for a method that follows no optimizer.
    """
    kind: Any = getattr(optim, method, None) if isinstance(method, str) else method
    if kind is None or (isinstance(kind, type) and not issubclass(kind, Method)):
        raise ConfigError(
            f"atoll has no method {method!r}",
            fix='give its name, "DiLoCo" for example, or the class of an experimental one',
        )
    if isinstance(kind, type) and "inner" not in inspect.signature(kind).parameters:
        raise ConfigError(
            f"{kind.__name__} follows no optimizer, and here one steps the model",
            fix="take a method with rounds, such as DiLoCo, or write the loop by hand",
        )
    session = optim.attach(home) if peer is None else peer
    try:
        made: Method = kind(model, optimizer, peer=session, **options)
        return made
    except BaseException:
        session.close()
        raise


def evaluating(method: Method | None) -> AbstractContextManager[None]:
    """Put into the model what is to be evaluated and published, for as long as it lasts.

    That is the run's parameters; of replicas their mean; of methods of every step the model has it
    already. So it has inside another ``evaluating``, as where a validation saves the model.
    """
    if method is None or method.is_showing:
        return nullcontext()
    for name in ("consensus", "outer_parameters"):
        if (shown := getattr(method, name, None)) is not None:
            context: AbstractContextManager[None] = shown()
            return context
    return nullcontext()


def figures(method: Method) -> dict[str, float]:
    """Return the method's metrics and the run's step, by names that a library's loggers show."""
    found = {**method.metrics(), "global_step": method.global_step}
    return {f"atoll/{name}": float(value) for name, value in found.items()}


def follow(method: Method, scheduler: Any) -> None:
    """Let a scheduler that is stepped after each optimizer step follow the run; say if it cannot.

    A checkpoint may have brought it further than the run is: then it is taken back first.
    """
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        say(f"a {type(scheduler).__name__} does not follow the run: its rates are its own")
        return
    if scheduler.last_epoch > method.global_step and isinstance(scheduler, LambdaLR):
        _take_back(scheduler)
    method.follow(scheduler)


def _take_back(scheduler: LambdaLR) -> None:
    """Take a scheduler and its rates back to where it was made."""
    pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    rates = [rate * each(0) for rate, each in pairs]
    first = {"last_epoch": 0, "_step_count": 1, "_last_lr": rates}
    scheduler.load_state_dict({**scheduler.state_dict(), **first})
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
