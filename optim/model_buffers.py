"""Read and write a model's buffers as one flat float32 vector (buffers.py).

They are those that a state_dict has too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from atoll.collectives.codecs import F32
from atoll.optim.buffers import PIECES, join, split
from atoll.optim.names import canonical

Place = tuple[nn.Module, str]  # where a buffer is; code may put another tensor there


class ModelBuffers:
    """Read and write the persistent buffers of a model as one vector.

    ``outline``: how many and which, as peers compare it; empty for a model without persistent float
    buffers, of which nothing is exchanged: tables, masks and the like are made alike.

    ``elements`` of a vector, of which ``floats`` are float buffers, after the weight.
    """

    def __init__(self, model: nn.Module) -> None:
        places = persistent(model)
        of_floats = {n: p for n, p in places.items() if _tensor(p).is_floating_point()}
        of_integers = {n: p for n, p in places.items() if n not in of_floats}
        if not of_floats:
            of_integers = {}
        self._floats, self._integers = list(of_floats.values()), list(of_integers.values())
        self.floats = sum(_tensor(p).numel() for p in self._floats)
        self._whole = sum(_tensor(p).numel() for p in self._integers)
        self.elements = 1 + self.floats + PIECES * self._whole
        lines = [
            f"{name}\t{_tensor(p).is_floating_point()}\t{tuple(_tensor(p).shape)}"
            for name, p in (of_floats | of_integers).items()
        ]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
        self.outline = f"{len(lines)} of {self.floats + self._whole} values, {digest}"
        if not lines:
            self.outline = ""

    def vector(self, weight: float = 1.0) -> F32:
        """Return the buffers as they are now, and ``weight``, as float32[elements]."""
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

        Raise RemoteProtocolError for what is no such vector.
        """
        whole = torch.from_numpy(join(flat[1 + self.floats :]))
        values = torch.from_numpy(flat[1 : 1 + self.floats].copy())
        for places, source in ((self._floats, values), (self._integers, whole)):
            lo = 0
            for place in places:
                tensor = _tensor(place)
                tensor.copy_(source[lo : lo + tensor.numel()].view(tensor.shape))
                lo += tensor.numel()

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
