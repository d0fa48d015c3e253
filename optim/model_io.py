"""Read and write a model: its trainable parameters, and its buffers, as flat float32 vectors.

Parameters are in the order of the run's manifest (``ModelVector``). A vector of buffers
(``ModelBuffers``) has the weight, the float buffers end to end, then each integer in three pieces
that float32 holds exactly.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim.manifest import Manifest, Parameter


@dataclass(frozen=True)
class ParameterPlace:
    """Describe where the values of a parameter lie in the vector: [lo, hi).

    They are those that are in this process: all of them, or the rows of an FSDP2 shard.
    """

    name: str
    parameter: nn.Parameter
    fragment: int
    lo: int
    hi: int
    ranks: int = 1  # over which it is sharded

    @property
    def values(self) -> Tensor:
        """Return the values that are in this process; they are not a copy."""
        return _local(self.parameter.detach())

    @property
    def gradient(self) -> Tensor | None:
        grad = self.parameter.grad
        return None if grad is None else _local(grad)

    def part(self, flat: F32) -> Tensor:
        """Return the part of the vector where they lie, in their shape; it is not a copy."""
        return torch.from_numpy(flat[self.lo : self.hi]).view(self.values.shape)

    def take(self, flat: F32) -> None:
        """Set the values to those of the vector, which may be read-only."""
        values, part = self.values, flat[self.lo : self.hi]
        if values.device.type == "cpu" and values.dtype == torch.float32:
            np.copyto(values.numpy(), part.reshape(values.shape))
        else:  # by a copy, because torch has no word for memory that is read-only
            values.copy_(torch.from_numpy(part.copy()).view(values.shape))

    @property
    def is_finite(self) -> bool:
        """Return whether no value is NaN or Inf. (``isfinite().all()`` takes 20 times as long.)"""
        if not self.values.numel():
            return True
        low, high = torch.aminmax(self.values)  # both hand on NaN
        return bool(low.isfinite() & high.isfinite())  # a device is waited for once


class ModelVector:
    """Read and write the parameters of ``model`` as a vector, in place.

    So ties, views and compiled code stay valid. ``arrange`` may put the parameters into another
    order, with fragments.

    Of a model that FSDP2 has sharded it is the rows of this rank that are read and written. Raise
    ConfigError for a model that no manifest can describe. The ``buffers`` are apart from them.
    """

    def __init__(
        self, model: nn.Module, arrange: Callable[[Manifest], Manifest] = lambda plain: plain
    ) -> None:
        self._sharded = [module for module in model.modules() if _is_fsdp2(module)]
        self.reshard()
        named = trainable(model)
        for name, p in named.items():
            _check_values(name, p)
        self.model, self.buffers = model, ModelBuffers(model)
        self.manifest = arrange(
            Manifest.of(
                Parameter(name, tuple(p.shape), str(p.dtype).removeprefix("torch."))
                for name, p in named.items()
            )
        )
        self._places = [
            _place(entry, named[entry.name], self.manifest.offsets[entry.name][0])
            for entry in self.manifest.parameters
            if not entry.is_padding
        ]
        self._ends = [place.hi for place in self._places]  # ascending

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [place.parameter for place in self._places]

    @property
    def ranks(self) -> int:
        """Return over how many processes the model is sharded; 1: this one has all of it."""
        return max((place.ranks for place in self._places), default=1)

    def write(self, flat: F32) -> None:
        """Write the model's parameters to float32[elements]."""
        for place in self._places:
            place.part(flat).copy_(place.values)

    def read(self, flat: F32) -> None:
        """Read the model's parameters from float32[elements], which may be read-only."""
        for place in self._places:
            place.take(flat)
        self.reshard()

    def write_fragment(self, fragment: int, flat: F32) -> None:
        """Write one fragment of the model to its place in float32[elements]."""
        for place in self._of(fragment):
            place.part(flat).copy_(place.values)

    def write_piece(self, out: F32, lo: int) -> None:
        """Write the elements from ``lo`` on to float32[n].

        Rows that are in other processes stay as they are.
        """
        for values, where in self._pieces(lo, lo + out.size):
            torch.from_numpy(out[where]).copy_(values)

    def write_delta(self, base: F32, out: F32, lo: int) -> None:
        """Write a pseudo-gradient, ``base`` minus the model, from ``lo`` on to float32[n].

        ``base``: float32[elements].
        """
        for values, where in self._pieces(lo, lo + out.size):
            # Ranks of DDP all write the same to shared memory: so nothing else is ever in it.
            old = torch.from_numpy(base[lo + where.start : lo + where.stop])
            torch.sub(old, values.to("cpu", torch.float32), out=torch.from_numpy(out[where]))

    def _pieces(self, lo: int, hi: int) -> Iterator[tuple[Tensor, slice]]:
        """Yield the values of each parameter in [lo, hi), flat, and their slice of that range."""
        first = bisect_right(self._ends, lo)
        for place in self._places[first:]:
            if place.lo >= hi:
                return
            start, end = max(lo, place.lo), min(hi, place.hi)
            flat = place.values.reshape(-1)
            yield flat[start - place.lo : end - place.lo], slice(start - lo, end - lo)

    def mix_fragment(self, fragment: int, flat: F32, local: float) -> None:
        """Mix a fragment of ``flat`` into the model, in the dtype of each parameter.

        That is ``p = local * p + (1 - local) * flat``.
        """
        for place in self._of(fragment):
            if local:
                values = place.values
                run = torch.from_numpy(flat[place.lo : place.hi].copy()).view(values.shape)
                values.lerp_(run.to(values), 1.0 - local)
            else:
                place.take(flat)
        self.reshard()

    def write_gradients(self, flat: F32) -> None:
        """Write the gradients to float32[elements]; zero where a parameter has none."""
        for place in self._places:
            gradient = place.gradient
            if gradient is None:
                place.part(flat).zero_()
            else:
                place.part(flat).copy_(gradient)

    def read_gradients(self, flat: F32, only: Iterable[nn.Parameter] | None = None) -> None:
        """Read the gradients from float32[elements], in place where there are any.

        If ``only`` is given, they are those of some parameters.
        """
        some = None if only is None else set(map(id, only))
        for place in self._places:
            if some is not None and id(place.parameter) not in some:
                continue
            if place.parameter.grad is None:
                place.parameter.grad = torch.empty_like(place.parameter)
            gradient = place.gradient
            assert gradient is not None
            gradient.copy_(place.part(flat))

    def digest(self) -> str:
        """Return the SHA-256, in hex, of the model's values as float32.

        Of a sharded model it is that of the rows that are in this process.
        """
        text = hashlib.sha256()
        for place in self._places:
            values = place.values.float().cpu().contiguous()
            text.update(values.numpy().data)
        return text.hexdigest()

    def zero_gradients(self) -> None:
        """Set all gradients to zero, in place.

        DDP buckets and CUDA graphs keep views of them.
        """
        for place in self._places:
            gradient = place.gradient
            if gradient is not None:
                gradient.zero_()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Save the model's values, and restore them at the end.

        So others may be read into it meanwhile. Costs a second copy of the parameters on the device
        meanwhile.
        """
        kept = [place.values.clone() for place in self._places]
        try:
            yield
        finally:
            for place, values in zip(self._places, kept, strict=True):
                place.values.copy_(values)
            self.reshard()

    def not_finite(self, fragment: int | None = None) -> list[str]:
        """Return the names of the fragment's parameters, or of all, with NaN or Inf.

        Only the values that are in this process are looked at.
        """
        places = self._places if fragment is None else self._of(fragment)
        return [place.name for place in places if not place.is_finite]

    def _of(self, fragment: int) -> Iterator[ParameterPlace]:
        return (place for place in self._places if place.fragment == fragment)

    def reshard(self) -> None:
        """Drop the whole copies that FSDP2 keeps, since shards have been written.

        After a forward pass without a backward pass it keeps some, of the root at least, and would
        go on with those.
        """
        for module in self._sharded:
            cast(Any, module).reshard()


def _check_values(name: str, p: Any) -> None:
    """Raise ConfigError for a parameter that has no values yet, or no memory for each of them."""
    if is_lazy(p):
        why, fix = "has no shape yet", "give the model one batch before the method is made"
    elif p.is_meta:
        why, fix = "is on the meta device", "load its values before the method is made"
    elif any(n > 1 and not step for n, step in zip(p.shape, p.stride(), strict=True)):
        why = "is expanded: several of its elements are one in memory"
        fix = "make it from a copy: nn.Parameter(tensor.contiguous())"
    else:
        return
    raise ConfigError(f"parameter {name} {why}", fix=fix)


def _place(entry: Parameter, p: nn.Parameter, lo: int) -> ParameterPlace:
    """Return where a parameter lies; raise ConfigError for a shard that is no stretch of rows."""
    if not _is_sharded(p):
        return ParameterPlace(entry.name, p, entry.fragment, lo, lo + entry.size)
    sharded: Any = p
    mesh = sharded.device_mesh
    shards = [
        (mesh.size(axis), mesh.get_local_rank(axis), placement)
        for axis, placement in enumerate(sharded.placements)
        if not placement.is_replicate()
    ]
    if len(shards) > 1 or not all(placement.is_shard(dim=0) for *_, placement in shards):
        raise ConfigError(
            f"parameter {entry.name} is placed as {sharded.placements}",
            fix="shard it in its first dimension, once, as fully_shard() does",
        )
    rows = entry.shape[0] if entry.shape else 1
    first, last = 0, rows
    for ranks, rank, _ in shards:
        each = -(-rows // ranks)
        first, last = min(rank * each, rows), min((rank + 1) * each, rows)
    width = entry.size // max(1, rows)
    lo, hi = lo + first * width, lo + last * width
    return ParameterPlace(
        entry.name, p, entry.fragment, lo, hi, math.prod(ranks for ranks, *_ in shards)
    )


def _is_sharded(tensor: Tensor) -> bool:
    """Return whether the tensor is a DTensor.

    To ask by type would load a second's worth of modules.
    """
    return hasattr(tensor, "to_local")


def _is_fsdp2(module: nn.Module) -> bool:
    """Return whether FSDP2 has sharded the module; this is not asked by type either."""
    return hasattr(type(module), "set_reshard_after_backward")


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if _is_sharded(tensor) else tensor
    return local


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by canonical name, in order of name.

    A tied parameter appears once.
    """
    return {n: p for n, p in canonical(model.named_parameters()).items() if p.requires_grad}


Place = tuple[nn.Module, str]  # where a buffer is; code may put another tensor there


class ModelBuffers:
    """Read and write the persistent buffers of a model as one vector.

    ``outline``: how many and which, as peers compare it; empty for a model without persistent float
    buffers, of which nothing is exchanged: tables, masks and the like are made alike. So are float
    buffers with infinities, as the -inf of an attention mask: ``constants``, which are left out.
    Statistics of normalization are none, however bad: whoever comes back with them is to be healed.

    ``elements`` of a vector, of which ``floats`` are float buffers, after the weight.
    """

    def __init__(self, model: nn.Module) -> None:
        places = persistent(model)
        of_floats = {n: p for n, p in places.items() if _tensor(p).is_floating_point()}
        of_integers = {n: p for n, p in places.items() if n not in of_floats}
        self.constants = [n for n, p in of_floats.items() if _is_constant(p)]
        for name in self.constants:
            del of_floats[name]
        if not of_floats:
            of_integers = {}
        self._float_names = list(of_floats)
        self._floats, self._integers = list(of_floats.values()), list(of_integers.values())
        self.floats = sum(_tensor(p).numel() for p in self._floats)
        self._whole = sum(_tensor(p).numel() for p in self._integers)
        self.elements = 1 + self.floats + PIECES * self._whole
        shared = of_floats | of_integers
        self._shapes = [(n, p, tuple(_tensor(p).shape)) for n, p in shared.items()]
        lines = [
            f"{name}\t{_tensor(p).is_floating_point()}\t{shape}" for name, p, shape in self._shapes
        ]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
        self.outline = f"{len(lines)} of {self.floats + self._whole} values, {digest}"
        if not lines:
            self.outline = ""

    def vector(self, weight: float = 1.0) -> F32:
        """Return the buffers as they are now, and ``weight``, as float32[elements].

        Raise ConfigError if one has changed its shape.
        """
        self._check_shapes()
        flat: F32 = np.empty(self.elements, np.float32)
        flat[0] = weight
        lo = 1
        for place in self._floats:
            tensor = _tensor(place)
            part = torch.from_numpy(flat[lo : lo + tensor.numel()])
            part.view(tensor.shape).copy_(tensor)
            lo += tensor.numel()
        whole = [_tensor(place).cpu().long().flatten().numpy() for place in self._integers]
        flat[lo:] = split(np.concatenate([np.zeros(0, np.int64), *whole]))
        return flat

    def read(self, flat: F32) -> None:
        """Read the buffers from such a vector, in place.

        A buffer of float64 that has these values already, as float32, keeps its further digits.
        Raise RemoteProtocolError for what is no such vector, ConfigError as ``vector`` does.
        """
        self._check_shapes()
        whole = torch.from_numpy(join(flat[1 + self.floats :]))
        values = torch.from_numpy(flat[1 : 1 + self.floats].copy())
        for places, source in ((self._floats, values), (self._integers, whole)):
            lo = 0
            for place in places:
                tensor = _tensor(place)
                new = source[lo : lo + tensor.numel()].view(tensor.shape)
                if tensor.dtype != torch.float64 or not _are_same_bits(tensor, new):
                    tensor.copy_(new)
                lo += tensor.numel()

    def float_parts(self, flat: F32) -> list[F32]:
        """Return the part of each float buffer in such a vector; they are no copies."""
        ends = np.cumsum([_tensor(place).numel() for place in self._floats], dtype=np.int64)
        return np.split(flat[1 : 1 + self.floats], ends[:-1])

    def _check_shapes(self) -> None:
        for name, (module, key), shape in self._shapes:
            now = module._buffers.get(key)
            if now is None or now.shape != shape:
                what = "is gone" if now is None else f"has the shape {tuple(now.shape)} now"
                raise ConfigError(
                    f"buffer {name} {what}; it had {shape} when the method was made, and peers "
                    "share buffers of one shape",
                    fix="register it with persistent=False, or give the method buffers=False",
                )

    def not_finite(self) -> list[str]:
        """Return the names of the float buffers in the vector with NaN or Inf."""
        named = zip(self._float_names, self._floats, strict=True)
        return [name for name, place in named if not _is_finite(place)]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Save the buffers' values, and restore them at the end, whatever becomes of them."""
        places = [*self._floats, *self._integers]
        kept = [_tensor(place).clone() for place in places]
        try:
            yield
        finally:
            for place, values in zip(places, kept, strict=True):
                _tensor(place).copy_(values)


def persistent(model: nn.Module) -> dict[str, Place]:
    """Return where the buffers are that a state_dict has too, in order of name.

    Each is there once, under the first of its names.
    """
    found, seen = [], set()
    for path, module in model.named_modules():
        for name, tensor in module._buffers.items():
            if tensor is None or tensor.is_complex() or id(tensor) in seen:
                continue
            if name not in module._non_persistent_buffers_set:
                seen.add(id(tensor))
                found.append((f"{path}.{name}" if path else name, (module, name)))
    return canonical(found)


def _tensor(place: Place) -> Tensor:
    module, name = place
    tensor = module._buffers[name]
    assert tensor is not None
    return tensor.detach()


def _are_same_bits(tensor: Tensor, values: Tensor) -> bool:
    """Return whether a tensor, once it is rounded to float32, is these values bit by bit."""
    rounded = tensor.to("cpu", torch.float32)
    return torch.equal(rounded.view(torch.int32), values.view(torch.int32))


def _is_finite(place: Place) -> bool:
    """Return whether a buffer has values that float32 holds, without NaN and Inf."""
    return bool(_tensor(place).float().isfinite().all())


def _is_constant(place: Place) -> bool:
    """Return whether a buffer is a table with infinities in it, as an attention mask is.

    Peers compare which buffers are shared, so what training changes must not decide it: statistics
    go wrong, and observers of quantization begin at infinity.
    """
    values, module = _tensor(place).float(), place[0]
    # By name: to import what quantizes would take a second.
    observes = any(kind.__name__ == "ObserverBase" for kind in type(module).__mro__)
    changes = observes or isinstance(module, _NormBase)
    return not changes and bool(values.isinf().any()) and not bool(values.isnan().any())


I64 = NDArray[np.int64]


PIECES = 3


BITS = 22  # of a piece: float32 holds whole numbers of up to 24; three make 64 with the sign


PIECE = 1 << BITS


def split(whole: I64) -> F32:
    """Split int64[n] into float32[3 n], which holds every number exactly.

    The highest pieces come first; only those have a sign.
    """
    high, middle = whole >> (2 * BITS), whole >> BITS & (PIECE - 1)
    return np.concatenate([high, middle, whole & (PIECE - 1)]).astype(np.float32)


def join(pieces: F32) -> I64:
    """Join the pieces that ``split`` made; raise RemoteProtocolError for anything else."""
    high, middle, low = pieces.reshape(PIECES, -1)
    limit = 1 << (63 - 2 * BITS)
    in_range = np.abs(high + 0.5) <= limit
    in_range &= (middle >= 0) & (middle < PIECE) & (low >= 0) & (low < PIECE)
    if not in_range.all() or not (np.trunc(pieces) == pieces).all():
        raise RemoteProtocolError("what came of buffers are no whole numbers")
    whole = [piece.astype(np.int64) for piece in (high, middle, low)]
    found: I64 = (whole[0] << (2 * BITS)) + (whole[1] << BITS) + whole[2]
    return found


# Wrappers put their name into the names of what they wrap: torch.compile, FSDP, checkpointing.
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


T = TypeVar("T")


def canonical(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return all values by their canonical names, in order of name.

    DDP's ``module.`` is dropped when all names have it, other wrappers' parts wherever they are, so
    that a compiled replica under DDP and a bare one have the same names.
    """
    paths = [([part for part in name.split(".") if part not in WRAPPERS], v) for name, v in named]
    while paths and all(path[0] == "module" and len(path) > 1 for path, _ in paths):
        paths = [(path[1:], value) for path, value in paths]
    return dict(sorted((".".join(path), value) for path, value in paths))
