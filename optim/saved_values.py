"""Take a state apart into tensors and plain values, and put it together again.

A ``state_dict()`` is a tree of dictionaries, lists, numbers, texts and tensors. Tensors go into a
safetensors file, all else into JSON, and what JSON has no word for is an object with one key::

    {"map": [[key, value], ...]}   {"tuple": [...]}   {"float": "nan"}   {"tensor": name}
    {"counter": [[key, value], ...]}   {"ordered": [[key, value], ...]}   {"array": name}

Nothing is pickled. A tensor that is sharded over ranks is kept as the rows of this one.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from atoll.collectives.errors import CheckpointError, ConfigError
from atoll.optim.replay.checkpoint import DTYPE_BYTES, Array, Plain, Tensors, is_name

DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}
MAPS: dict[str, type[dict[Any, Any]]] = {"map": dict, "counter": Counter, "ordered": OrderedDict}
DEPTH_MAX = 32  # states of real optimizers and schedulers are five levels deep


class Stateful(Protocol):
    """Describe an object with a state, as a GradScaler or a loader of data is."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """Hold the rows of a sharded tensor that this rank has had."""

    rows: Tensor


def array_of(tensor: Tensor, name: str) -> Array:
    """Return the values of a tensor; on the host they are not a copy.

    ConfigError, with its name, for a dtype that files do not take.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(f"{name} is of {dtype}, which cannot be kept")
    there = tensor.detach().cpu().contiguous().reshape(-1)
    if not there.numel():  # strides of nothing may be zero, which no view takes
        return Array(dtype, tuple(tensor.shape), np.empty(0, np.uint8))
    return Array(dtype, tuple(tensor.shape), there.view(torch.uint8).numpy())


def tensor_of(array: Array) -> Tensor:
    """Return a copy as a tensor."""
    if not array.data.size:
        return torch.empty(array.shape, dtype=DTYPES[array.dtype])
    return torch.from_numpy(array.data.copy()).view(DTYPES[array.dtype]).view(array.shape)


def apart(value: Any, name: str, tensors: dict[str, Array]) -> Plain:
    """Return a state as JSON takes it, and add its tensors to ``tensors``, below ``name``.

    ConfigError, with the place in the state, for a value of another type.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, np.ndarray):
        return {"array": _added(_tensor_like(value, name), name, tensors)}
    if isinstance(value, Tensor):
        sharded: Any = value
        is_shard = hasattr(value, "to_local")
        own = sharded.to_local() if is_shard else value
        return {"shard" if is_shard else "tensor": _added(own, name, tensors)}
    if isinstance(value, list | tuple):
        parts = [apart(one, f"{name}.{n}", tensors) for n, one in enumerate(value)]
        return parts if isinstance(value, list) else {"tuple": parts}
    for kind, made in MAPS.items():
        if type(value) is made and all(isinstance(k, str | int) for k in value):
            return {kind: [[k, apart(v, f"{name}.{k}", tensors)] for k, v in value.items()]}
    raise _cannot(name, type(value).__name__)


def _cannot(name: str, kind: str) -> ConfigError:
    return ConfigError(
        f"{name} is a {kind}, which cannot be saved",
        fix="save objects whose state_dict() has tensors, arrays of numbers, numbers, texts, lists "
        "and plain dictionaries, dict(it) say",
    )


def _tensor_like(array: np.ndarray, name: str) -> Tensor:
    """Return a copy of a numpy array as a tensor; ConfigError for one that is not of numbers."""
    try:
        return torch.from_numpy(array.copy())  # torch refuses strides that are negative
    except TypeError as error:
        raise _cannot(name, f"numpy array of {array.dtype}") from error


def _added(tensor: Tensor, name: str, tensors: dict[str, Array]) -> str:
    """Add a tensor to ``tensors``; return the name that it has there."""
    if name in tensors or not is_name(name):
        name = f"tensor {len(tensors)}"
    tensors[name] = array_of(tensor, name)
    return name


def together(value: Plain, tensors: Tensors, depth: int = 0) -> Any:
    """Return the state that ``apart`` has taken apart; CheckpointError for anything else."""
    if depth > DEPTH_MAX:
        raise CheckpointError(f"a saved state has more than {DEPTH_MAX} levels")
    if isinstance(value, list):
        return [together(one, tensors, depth + 1) for one in value]
    if not isinstance(value, dict):
        return value
    try:
        ((kind, content),) = value.items()
        if kind in MAPS:
            pairs = {_key(k): together(one, tensors, depth + 1) for k, one in content}
            return pairs if kind == "map" else MAPS[kind](pairs)
        if kind == "tuple":
            return tuple(together(one, tensors, depth + 1) for one in content)
        if kind == "float":
            return float(content)
        if kind in ("tensor", "shard", "array"):
            tensor = tensor_of(tensors[content])
            if kind == "array":
                return tensor.numpy()
            return tensor if kind == "tensor" else Shard(tensor)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"a saved state cannot be read: {str(error)[:200]}") from error
    raise CheckpointError(f"a saved state has a {kind[:40]!r}, which this version does not know")


def _key(key: object) -> str | int:
    if not isinstance(key, str | int):
        raise TypeError(f"a key that is no text or number: {key!r:.40}")
    return key
