"""Pack parameters, inner optimizers and a method's arrays into one float32 vector for a newcomer.

A trainer that has the state knows its shape, so a description travels ahead of the vector: which
tensors and numbers each inner optimizer keeps for which parameter.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim.model_io import ModelVector

PACKED_BYTES_MAX = 60_000  # it travels as an object of `all_gather`, which takes 64 KiB
TEXT_BYTES_MAX = 16 * 1024 * 1024  # Adam's state of 65,536 parameters takes 7 MiB
ENTRIES_MAX = 16  # for one parameter; Adam keeps three, Shampoo has four
FACTOR_MAX = 4  # elements of a tensor of state for each of its parameter; usual is 1
DIMENSIONS_MAX = 16  # tensors of real models have at most 6
STEPS_MAX = 2**53
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16)}
DTYPES |= {"float64": torch.float64, "int64": torch.int64, "int32": torch.int32}


class Snapshot:
    """Write and read the state that a newcomer takes over.

    ``shared``: arrays of the method that are equal on all peers; they are written in place.
    ``buffers``: the model's go along (model_io.py), as far as they are saved with it.

    Tensors are handed over as float32, so of a float64 the first 24 bits.
    """

    def __init__(
        self,
        vector: ModelVector,
        inner: Sequence[Optimizer],
        shared: Sequence[F32] = (),
        *,
        buffers: bool = True,
    ) -> None:
        self._vector, self._shared = vector, tuple(shared)
        self._buffers = vector.buffers if buffers and vector.buffers.outline else None
        # An optimizer that loads a state has other dictionaries afterwards, but these parameters.
        self._owners = [o for o in inner for group in o.param_groups for _ in group["params"]]
        self._parameters = [p for o in inner for g in o.param_groups for p in g["params"]]
        self._inner = tuple(inner)

    def describe(self, steps: int) -> bytes:
        """Return the shape of the state as it is now, for ``elements`` and ``read``.

        ConfigError for a state that cannot be described, or takes too many bytes to describe.
        """
        kept = [[_entry(p, *item) for item in _kept(state, p)] for state, p in self._each()]
        text = json.dumps([steps, kept], separators=(",", ":")).encode()
        packed = zlib.compress(text)
        if len(packed) > PACKED_BYTES_MAX or len(text) > TEXT_BYTES_MAX:
            raise ConfigError(
                f"the state of {len(kept)} parameters takes {len(packed):,} bytes to describe, and "
                f"at most {PACKED_BYTES_MAX:,} fit",
                fix="use parameter tensors that are fewer and larger",
            )
        return packed

    def elements(self, description: bytes) -> int:
        """Return how long the vector is; RemoteProtocolError for what no peer would send."""
        _, kept = self._parsed(description)
        tensors = sum(entry.size for entries in kept for entry in entries)
        buffers = self._buffers.elements if self._buffers is not None else 0
        return (
            self._vector.manifest.elements + sum(a.size for a in self._shared) + tensors + buffers
        )

    def write(self, flat: F32) -> None:
        """Write the state as ``describe`` has described it."""
        lo = self._vector.manifest.elements
        self._vector.write(flat[:lo])
        for array in self._shared:
            flat[lo : lo + array.size] = array
            lo += array.size
        for state, p in self._each():
            for _, value in _kept(state, p):
                if isinstance(value, Tensor):
                    part = flat[lo : lo + value.numel()]
                    torch.from_numpy(part).view(value.shape).copy_(value)
                    lo += part.size
        if self._buffers is not None:
            flat[lo:] = self._buffers.vector()

    def not_finite(self, flat: F32) -> str:
        """Return what has NaN or Inf in a vector that ``write`` has written, or ""."""
        if np.isfinite(flat).all():
            return ""
        names = self._vector.not_finite()
        names += self._buffers.not_finite() if self._buffers is not None else []
        return ", ".join(names[:5]) or "what the inner optimizers or the method keep"

    def read(self, description: bytes, flat: F32) -> int:
        """Take over a state; return how many steps of the run it comes from."""
        steps, kept = self._parsed(description)
        lo = self._vector.manifest.elements
        self._vector.read(flat[:lo])
        for array in self._shared:
            array[:] = flat[lo : lo + array.size]
            lo += array.size
        for (state, p), there, entries in zip(self._each(), self._scalars(), kept, strict=True):
            before, fresh = state.get(p, {}), {}
            for entry in entries:
                device = "cpu" if entry.on_host and not there else p.device
                part = flat[lo : lo + entry.size]
                fresh[entry.name] = entry.value(part, device, before.get(entry.name))
                lo += entry.size
            if fresh:
                state[p] = fresh
            else:
                state.pop(p, None)
        if self._buffers is not None:
            self._buffers.read(flat[lo : lo + self._buffers.elements])
        return steps

    def equal_but_for_buffers(self, one: F32, other: F32) -> bool:
        """Return whether two states of one description are equal, buffers aside.

        Every trainer has buffers of its own.
        """
        end = one.size - (self._buffers.elements if self._buffers is not None else 0)
        return np.array_equal(one[:end], other[:end])

    def _each(self) -> Iterator[tuple[dict[Any, Any], nn.Parameter]]:
        return ((o.state, p) for o, p in zip(self._owners, self._parameters, strict=True))

    def _scalars(self) -> Iterator[bool]:
        """Return for each parameter whether its optimizer keeps scalars with it, or on the host."""
        groups = (group for o in self._inner for group in o.param_groups)
        return (bool(g.get("fused") or g.get("capturable")) for g in groups for _ in g["params"])

    def _parsed(self, description: bytes) -> tuple[int, list[list[_StateTensor]]]:
        unpacker = zlib.decompressobj()
        try:
            steps, kept = json.loads(unpacker.decompress(description, TEXT_BYTES_MAX))
            if not unpacker.eof or type(steps) is not int or not 0 <= steps <= STEPS_MAX:
                raise ValueError("it is cut off, or counts no steps")
            most = max(map(len, kept), default=0)
            if len(kept) != len(self._parameters) or most > ENTRIES_MAX:
                raise ValueError(f"the state of {len(kept)} parameters, or too much for one")
            entries = [
                [_StateTensor.of(p, *item) for item in items]
                for p, items in zip(self._parameters, kept, strict=True)
            ]
        except (zlib.error, ValueError, TypeError, RecursionError) as error:
            raise RemoteProtocolError(
                f"the state of inner optimizers cannot be read: {str(error)[:200]}",
                fix="give all trainers the same inner optimizer",
            ) from error
        return steps, entries


@dataclass(frozen=True, slots=True)
class _StateTensor:
    """Describe a tensor of an optimizer's state, or a number: then there is no ``dtype``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    number: float
    on_host: bool

    @classmethod
    def of(
        cls,
        p: nn.Parameter,
        name: str,
        dtype: str,
        shape: Sequence[int] | None,
        number: float,
        on_host: bool,
    ) -> _StateTensor:
        """Read what ``_entry`` made; ValueError or TypeError for anything else."""
        shape = tuple(p.shape if shape is None else shape)
        if type(name) is not str or (dtype and dtype not in DTYPES):
            raise ValueError(f"no entry of a state: {name!r:.40} {dtype!r:.40}")
        most = FACTOR_MAX * max(1, p.numel())
        if len(shape) > DIMENSIONS_MAX or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"no shape: {shape!r:.40}")
        if max(math.prod(shape), *shape, 0) > most:
            raise ValueError(f"a tensor that is much larger than its parameter: {shape!r:.40}")
        if type(number) not in (int, float, bool):
            raise ValueError(f"no number: {number!r:.40}")
        return cls(name, dtype, shape, number, bool(on_host))

    @property
    def size(self) -> int:
        """Return how many elements of the vector it takes."""
        return math.prod(self.shape) if self.dtype else 0

    def value(self, part: F32, device: torch.device | str, before: object) -> Any:
        """Return its value, in the tensor that was there if there was one like it."""
        if not self.dtype:
            return self.number
        tensor = before
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != self.shape:
            tensor = torch.empty(self.shape, dtype=DTYPES[self.dtype], device=device)
        return tensor.copy_(torch.from_numpy(part.copy()).view(self.shape))


def _kept(state: dict[Any, Any], p: nn.Parameter) -> Iterator[tuple[str, object]]:
    """Return what is kept for a parameter; SGD without momentum keeps a None, which is left out."""
    return ((name, value) for name, value in state.get(p, {}).items() if value is not None)


def _entry(p: nn.Parameter, name: str, value: object) -> list[object]:
    """Return a value of a state as ``_StateTensor.of`` reads it.

    ConfigError for what is neither tensor nor number.

    A shape like the parameter's is left out: then all lines are alike, and pack well. Scalars of
    parameters on the host lie there as well, but need not where others hold the parameter.
    """
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        shape = None if value.shape == p.shape and value.ndim else list(value.shape)
        on_host = value.device.type == "cpu" and (p.device.type != "cpu" or not value.ndim)
        if dtype in DTYPES:
            return [name, dtype, shape, 0, int(on_host)]
    elif isinstance(value, int | float):
        return [name, "", [], value, 1]
    kind = f"{dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
    raise ConfigError(
        f"the inner optimizer keeps {name!r}, a {kind}, which cannot be handed to newcomers",
        fix=f"use an optimizer that keeps numbers, and tensors of {', '.join(DTYPES)}; or DiLoCo, "
        "which hands no state over",
    )
