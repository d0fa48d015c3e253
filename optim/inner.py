"""Take inner optimizers as people give them: one or several, wrapped by other libraries or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from atoll.collectives.errors import ConfigError
from atoll.collectives.units import count
from atoll.peer.client.console import say

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


class Strangers:
    """Say which trainable parameters of inner optimizers are not in the model.

    No error, since a trainer may want some of its own; but who has not meant it hears of it.
    """

    def __init__(self, inners: Sequence[Optimizer], parameters: Iterable[nn.Parameter]) -> None:
        self._ours = set(map(id, parameters))
        self._inners, self._held = inners, [0] * len(inners)

    def look(self) -> None:
        """Look at optimizers that hold another number of parameters than when this looked last."""
        for number, inner in enumerate(self._inners):
            held = sum(len(group["params"]) for group in inner.param_groups)
            if held != self._held[number]:
                self._held[number] = held
                self._tell(inner)

    def _tell(self, inner: Optimizer) -> None:
        held = [p for group in inner.param_groups for p in group["params"]]
        strange = sum(p.requires_grad and id(p) not in self._ours for p in held)
        if strange:
            say(
                f"the inner {type(inner).__name__} also trains {count(strange, 'parameter')} "
                f"outside of the model (of {len(held)}): this trainer trains them alone, and "
                "save() leaves them out; to share them, put them into one module with the model, "
                "and give the method that module"
            )
