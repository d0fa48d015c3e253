"""Follow steps of inner optimizers through a hook, so that a training loop stays as it was.

A GradScaler that skips a step does not call the hook, nor do accumulation micro-steps, and
closures and schedulers keep working.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from atoll.collectives.errors import CodecError, ConfigError
from atoll.optim.model_io import ModelVector
from atoll.optim.side_channel import every_rank
from atoll.optim.trainer import Trainer

Inner: TypeAlias = Optimizer | Sequence[Optimizer]
# Packages whose optimizers stand before one of torch, and where they keep it. Theirs have no hooks
# of their own, or are of another class than what they stand for.
_WRAPPERS = {
    "accelerate": "optimizer",
    "lightning": "_optimizer",
    "lightning_fabric": "_optimizer",
    "pytorch_lightning": "_optimizer",
}
_FIX = (
    "give the torch.optim.Optimizer whose step() changes the parameters, often "
    "`wrapper.optimizer`; wrappers of accelerate and Lightning are taken as they are"
)


class InnerSteps(Trainer):
    """Train with steps of inner optimizers, which are seen through a hook.

    ``inner`` may be a sequence, whose last member's step completes a local step.
    """

    def __init__(self, vector: ModelVector, inner: Inner) -> None:
        super().__init__()
        self._vector, self.manifest = vector, vector.manifest
        self._inners = inners_of(inner, vector.parameters)
        self._steps = 0
        self._loss: Any = None  # that the closure of the step at hand has returned first
        self._in_step = False  # of the last inner optimizer: its scheduler is a step behind
        self._shown = ""  # by which call other parameters are in the model

    @property
    @abstractmethod
    def global_step(self) -> int:
        """Return the local steps that the run has behind it.

        Those of this trainer since the last round are among them. It is the same for all trainers
        at a round's end, and for one that comes later.
        """

    @property
    def trainer_bytes(self) -> float:
        """Return the bytes of host memory that this trainer takes for each parameter, at most.

        They come beside its model: what the method keeps, and what it makes for a moment. Copies of
        a parameter or a chunk at a time come on top, and what other trainers give in a gather.
        """
        return 0.0

    def _follow(self) -> None:
        """Bring learning rates to ``global_step``, which may have jumped."""
        self._schedules.go_to(max(0, self.global_step - self._in_step))

    def close(self) -> None:
        self._hook.remove()
        self._closure_hook.remove()
        super().close()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Count steps from now on, unless what is done inside fails.

        Inside it the trainer attaches, last of all, so that a script that cannot train has not
        founded a run.
        """
        # torch.compile must not trace the hook; torch leaves this function untyped
        hook = torch.compiler.disable(self._after_step)  # type: ignore[no-untyped-call]
        self._hook = self._inners[-1].register_step_post_hook(hook)
        before = torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]
        self._closure_hook = self._inners[-1].register_step_pre_hook(before)
        try:
            yield
        except BaseException:
            self._hook.remove()
            self._closure_hook.remove()
            raise

    @abstractmethod
    def _step_done(self) -> None:
        """Act on a local step that is complete; ``_steps`` counts it."""

    @contextmanager
    def _showing(self, what: str) -> Iterator[None]:
        """Save the model's parameters and buffers, and restore them at the end.

        Others may be read into it meanwhile. ``what``: the call that people know. Raise ConfigError
        for one inside another.
        """
        if self._shown:
            raise ConfigError(f"{what} inside {self._shown}")
        self._shown = what
        try:
            with self._vector.put_back(), self._vector.buffers.put_back():
                yield
        finally:
            self._shown = ""

    def _check_finite(self, so: str, fragment: int = 0) -> None:
        """Raise CodecError, in all ranks, if parameters of the fragment are not finite.

        ``so``: what therefore is not done.
        """
        bad = self._vector.not_finite(fragment)
        if not every_rank(self.peer, not bad):
            names = ", ".join(bad[:5]) or "rows of another rank"
            raise CodecError(
                f"NaN or Inf in {names} ({len(bad)} of {len(self._vector.parameters)} "
                f"parameters here) after step {self._steps}: {so}",
                fix="lower the inner learning rate or clip gradients, and start this trainer again",
            )

    def _before_step(self, _optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Watch what a closure returns: hooks do not see it."""
        self._loss = None
        by_name = kwargs.get("closure")
        closure = by_name if by_name is not None else args[1] if len(args) > 1 else None
        if not callable(closure):
            return None

        def seen(*given: Any, **named: Any) -> Any:
            loss = closure(*given, **named)
            is_number = isinstance(loss, int | float)
            if is_number or (isinstance(loss, torch.Tensor) and loss.numel() == 1):
                self._loss = loss if self._loss is None else self._loss
            return loss

        if by_name is not None:
            return args, {**kwargs, "closure": seen}
        return (args[0], seen, *args[2:]), kwargs

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # A fused optimizer skips a step by itself and then still calls its hooks; the GradScaler
        # leaves the reason on it for the time of the step.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and found_inf.item() > 0:
            return
        self._vector.frozen.check(optimizer if len(self._inners) > 1 else None)
        if self._shown:
            raise ConfigError(
                f"optimizer.step() inside {self._shown}: the step would be thrown away",
                fix=f"only evaluate or save inside {self._shown}",
            )
        self._steps += 1
        if self._loss is not None:
            self.report(loss=self._loss)
            self._loss = None
        self._in_step = True
        try:
            self._step_done()
        finally:
            self._in_step = False


def unwrapped(inner: Inner) -> tuple[Optimizer, ...]:
    """Return one or several optimizers as a tuple, without wrappers.

    These are those of accelerate (so of HF Trainer) and Lightning. Raise ConfigError for what is no
    optimizer of torch.
    """
    if isinstance(inner, Optimizer) or not isinstance(inner, Iterable):
        inner = (inner,)
    found = tuple(map(_unwrapped, inner))
    for one in found:
        if not isinstance(one, Optimizer):
            raise ConfigError(
                f"inner is a {type(one).__name__}, not a torch.optim.Optimizer", fix=_FIX
            )
    return found


def _unwrapped(inner: Any) -> Any:
    packages = (kind.__module__.partition(".")[0] for kind in type(inner).__mro__)
    name = next((_WRAPPERS[package] for package in packages if package in _WRAPPERS), "")
    inside = getattr(inner, name, None) if name else None
    return inner if inside is None else _unwrapped(inside)


def _check_hooks(inner: Optimizer) -> None:
    """Raise ConfigError for an optimizer whose steps cannot be seen."""
    try:
        inner.register_step_pre_hook(_nothing).remove()
        inner.register_step_post_hook(_nothing).remove()
    except AttributeError as error:
        raise ConfigError(
            f"the inner {type(inner).__name__} takes no step hooks: it is a torch.optim.Optimizer "
            "by name only",
            fix=_FIX,
        ) from error


def _nothing(*_: Any) -> None:
    """Stand in for a hook."""


def inners_of(inner: Inner, parameters: Iterable[nn.Parameter]) -> tuple[Optimizer, ...]:
    """Return one or several optimizers as a tuple, ``unwrapped``.

    Raise ConfigError for optimizers that hold none of ``parameters``, or take no hooks.
    """
    inners = unwrapped(inner)
    ours = set(map(id, parameters))
    for inner in inners:
        _check_hooks(inner)
        if not any(id(p) in ours for group in inner.param_groups for p in group["params"]):
            raise ConfigError(
                f"the inner {type(inner).__name__} holds no trainable parameter of the model",
                fix="make it from the parameters of the model that is given to the method",
            )
    if not inners:
        raise ConfigError("no inner optimizer", fix="give one that trains the model's parameters")
    return inners
