"""Capture and load a trainer's model, inner optimizers and whatever else its steps depend on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim.inner import Inner, inners_of
from atoll.optim.model_io import persistent, trainable
from atoll.optim.replay.checkpoint import Plain, WorkCheckpoint, plain
from atoll.optim.replay.tensors import DTYPE_BYTES, Array, Tensors

DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}
SEED = 1  # for a start that is rounded otherwise; any number would do
FACTOR_MAX = 4  # elements of a tensor of an optimizer's state for each of its parameter; usual is 1


class Stateful(Protocol):
    """Describe an object with a state, as a GradScaler is."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class TrainingState:
    """Capture and load what the local steps of a trainer depend on.

    Rates and other settings of optimizers are no part of it: whoever takes the steps again has its
    own, or a trainer could choose them.
    """

    def __init__(self, model: nn.Module, inner: Inner, stateful: Mapping[str, Stateful]) -> None:
        self._model, self._stateful = model, dict(stateful)
        self._parameters = trainable(model)
        if any(hasattr(p, "to_local") for p in self._parameters.values()):
            raise ConfigError(
                "the model is sharded over several processes, whose steps cannot be replayed",
                fix="leave replay out, or train in one process",
            )
        self.inners = inners_of(inner, self._parameters.values())
        self.device = next(iter(self._parameters.values())).device

    def capture(self) -> WorkCheckpoint:
        """Return the state as it is now.

        On the host its tensors are those of the model, so encode it at once. ConfigError for a
        state that is not of tensors and numbers.
        """
        inner, numbers = {}, {}
        for place, p, state in self._kept():
            for key, value in state.get(p, {}).items():
                if isinstance(value, Tensor):
                    inner[f"{place}.{key}"] = _array(value, f"{place}.{key}")
                elif isinstance(value, int | float):
                    numbers[f"{place}.{key}"] = value
                elif value is not None:  # SGD without momentum keeps a None
                    raise ConfigError(
                        f"the inner optimizer keeps {key!r}, a {type(value).__name__}, which "
                        "cannot be kept for a replay",
                        fix="use an optimizer that keeps tensors and numbers, as those of "
                        "torch.optim do",
                    )
        others = {name: one.state_dict() for name, one in self._stateful.items()}
        return WorkCheckpoint(
            {name: _array(p, name) for name, p in self._parameters.items()},
            {name: _array(tensor, name) for name, tensor in self._buffers()},
            inner,
            plain({"inner": numbers, "stateful": others}),
        )

    @torch.no_grad()
    def load(self, checkpoint: WorkCheckpoint) -> None:
        """Load a checkpoint of anyone.

        RemoteProtocolError if it is not of such a model, and such optimizers.
        """
        _copy(checkpoint.parameters, self._parameters, "parameters")
        _copy(checkpoint.buffers, dict(self._buffers()), "buffers")
        numbers, others = _halves(checkpoint.values)
        if others.keys() != self._stateful.keys():
            raise RemoteProtocolError(
                f"the state of {sorted(others)}, not {sorted(self._stateful)}"
            )
        taken: set[str] = set()
        groups = [group for o in self.inners for group in o.param_groups for _ in group["params"]]
        for group, (place, p, state) in zip(groups, self._kept(), strict=True):
            fresh: dict[str, Any] = {}
            for name in _below(place, checkpoint.inner):
                fresh[name[len(place) + 1 :]] = _value(checkpoint.inner[name], p, group, name)
            for name in _below(place, numbers):
                fresh[name[len(place) + 1 :]] = numbers[name]
            taken |= {f"{place}.{key}" for key in fresh}
            state.pop(p, None)
            if fresh:
                state[p] = fresh
            p.grad = None
        if taken != checkpoint.inner.keys() | numbers.keys():
            raise RemoteProtocolError("the state of other inner optimizers")
        for name, one in self._stateful.items():
            if not _alike(plain(one.state_dict()), others[name]):
                raise RemoteProtocolError(f"the state of another {name}")
            one.load_state_dict(dict(others[name]))

    @torch.no_grad()
    def perturb(self) -> None:
        """Change each parameter by a rounding error, up or down, always the same ones."""
        random = torch.Generator().manual_seed(SEED)
        for p in self._parameters.values():
            signs = torch.randint(2, p.shape, generator=random).mul_(2).sub_(1)
            p.mul_(1 + torch.finfo(p.dtype).eps * signs.to(p))

    def random_states(self) -> tuple[bytes, bytes]:
        """Return the states of the random numbers of the host and the model's device.

        The latter is empty if the model is on the host.
        """
        device = b""
        if self.device.type != "cpu":
            device = _module_of(self.device).get_rng_state(self.device).numpy().tobytes()
        return torch.get_rng_state().numpy().tobytes(), device

    def set_random_states(self, states: tuple[bytes, bytes]) -> None:
        """Set states of random numbers of anyone; those that are not kept stay.

        RemoteProtocolError for bytes that are no state.
        """
        host, device = (torch.frombuffer(bytearray(s or b"\0"), dtype=torch.uint8) for s in states)
        try:
            if states[0]:
                torch.set_rng_state(host)
            if states[1] and self.device.type != "cpu":
                _module_of(self.device).set_rng_state(device, self.device)
        except RuntimeError as error:
            raise RemoteProtocolError(f"no state of random numbers: {error}") from error

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of now: code may put another tensor into a buffer's place."""
        for name, (module, key) in persistent(self._model).items():
            tensor = module._buffers[key]
            assert tensor is not None
            yield name, tensor

    def _kept(self) -> Iterator[tuple[str, nn.Parameter, dict[Any, Any]]]:
        """Yield name and parameter for all that optimizers hold, and the state of the optimizer."""
        for number, optimizer in enumerate(self.inners):
            held = [p for group in optimizer.param_groups for p in group["params"]]
            for n, p in enumerate(held):
                yield f"{number}.{n}", p, optimizer.state


def _array(tensor: Tensor, name: str) -> Array:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(f"{name} is of {dtype}, which cannot be kept for a replay")
    there = tensor.detach().cpu().contiguous()
    return Array(dtype, tuple(tensor.shape), there.reshape(-1).view(torch.uint8).numpy())


def _tensor(array: Array) -> Tensor:
    """Return a copy as a tensor."""
    return torch.from_numpy(array.data.copy()).view(DTYPES[array.dtype]).view(array.shape)


def _copy(tensors: Tensors, into: Mapping[str, Tensor], what: str) -> None:
    if tensors.keys() != into.keys():
        raise RemoteProtocolError(f"the {what} of another model")
    for name, tensor in into.items():
        array = tensors[name]
        if (DTYPES[array.dtype], array.shape) != (tensor.dtype, tuple(tensor.shape)):
            raise RemoteProtocolError(f"{name} is {array.shape} {array.dtype}")
        tensor.copy_(_tensor(array))


def _below(place: str, names: Mapping[str, object]) -> list[str]:
    return [name for name in names if name.startswith(f"{place}.")]


def _value(array: Array, p: nn.Parameter, group: dict[str, Any], name: str) -> Tensor:
    """Return a tensor where the optimizer keeps it.

    Scalars are on the host, unless it takes them to the device. RemoteProtocolError for one that is
    much larger than its parameter.
    """
    tensor = _tensor(array)
    if tensor.numel() > FACTOR_MAX * max(1, p.numel()):
        raise RemoteProtocolError(f"{name[:80]} is much larger than its parameter")
    on_host = not array.shape and not (group.get("fused") or group.get("capturable"))
    return tensor if on_host else tensor.to(p.device)


def _halves(values: Mapping[str, Plain]) -> tuple[dict[str, float], dict[str, dict[str, Plain]]]:
    """Return the numbers that optimizers keep, and the states of others.

    RemoteProtocolError for values of other types.
    """
    numbers, others = values.get("inner"), values.get("stateful")
    if not isinstance(numbers, dict) or not isinstance(others, dict):
        raise RemoteProtocolError("a checkpoint without the values of its trainer")
    if not all(isinstance(n, int | float) for n in numbers.values()):
        raise RemoteProtocolError("the state of an inner optimizer has values that are no numbers")
    if not all(isinstance(state, dict) for state in others.values()):
        raise RemoteProtocolError("a state that has no names")
    return numbers, others


def _alike(mine: Plain, theirs: Plain) -> bool:
    """Return whether both have the same names, with values of the same types."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(_alike(mine[k], theirs[k]) for k in mine)
    return type(mine) is type(theirs)


def _module_of(device: torch.device) -> Any:
    """Return the module of a device: torch.cuda and its like."""
    return torch.get_device_module(device)
