"""A model's trainable parameters as one flat float32 vector, in the order of the run's manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from atoll.optim.manifest import Manifest, Parameter

__all__ = ["ModelVector", "trainable"]

# Wrappers put their name into the names of what they wrap: torch.compile, FSDP, checkpointing.
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


class ModelVector:
    """Reads and writes the parameters of ``model`` in place, so that ties, views and compiled code
    stay valid. ConfigError for a model that no manifest can describe."""

    def __init__(self, model: nn.Module) -> None:
        named = trainable(model)
        self.manifest = Manifest.of(
            Parameter(name, tuple(p.shape), str(p.dtype).removeprefix("torch."))
            for name, p in named.items()
        )
        offsets = self.manifest.offsets
        self._parameters = [(p, *offsets[name]) for name, p in named.items()]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p, _, _ in self._parameters]

    def write(self, flat: NDArray[np.float32]) -> None:
        """Model -> float32[elements]."""
        for p, lo, hi in self._parameters:
            torch.from_numpy(flat[lo:hi]).view(p.shape).copy_(p.detach())

    def read(self, flat: NDArray[np.float32]) -> None:
        """float32[elements], which may be read-only -> model."""
        with torch.no_grad():
            for p, lo, hi in self._parameters:
                # A copy, because the run's memory is read-only, which torch has no word for.
                p.copy_(torch.from_numpy(flat[lo:hi].copy()).view(p.shape))

    def write_gradients(self, flat: NDArray[np.float32]) -> None:
        """Gradients -> float32[elements]; zero where a parameter has none."""
        for p, lo, hi in self._parameters:
            if p.grad is None:
                flat[lo:hi] = 0
            else:
                torch.from_numpy(flat[lo:hi]).view(p.shape).copy_(p.grad)

    def read_gradients(
        self, flat: NDArray[np.float32], only: Iterable[nn.Parameter] | None = None
    ) -> None:
        """float32[elements] -> gradients, of some parameters if ``only`` is given; in place where
        there are any."""
        some = None if only is None else set(map(id, only))
        for p, lo, hi in self._parameters:
            if some is not None and id(p) not in some:
                continue
            values = torch.from_numpy(flat[lo:hi]).view(p.shape)
            if p.grad is None:
                p.grad = torch.empty_like(p)
            p.grad.copy_(values)

    def zero_gradients(self) -> None:
        """In place: DDP buckets and CUDA graphs keep views of gradients."""
        for p, _, _ in self._parameters:
            if p.grad is not None:
                p.grad.zero_()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Whatever is read into the model meanwhile, its values of now come back afterwards. Costs
        a second copy of the parameters on the device meanwhile."""
        local = [p.detach().clone() for p, _, _ in self._parameters]
        try:
            yield
        finally:
            with torch.no_grad():
                for (p, _, _), values in zip(self._parameters, local, strict=True):
                    p.copy_(values)

    def not_finite(self) -> list[str]:
        """The names of the parameters with NaN or Inf in them."""
        return [
            name
            for name, (p, _, _) in zip(self.manifest.offsets, self._parameters, strict=True)
            if not bool(p.detach().isfinite().all())
        ]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Canonical name -> trainable parameter, in order of name; a tied parameter appears once.

    DDP's ``module.`` is dropped when all names have it, other wrappers' parts wherever they are,
    so that a compiled replica under DDP and a bare one have the same manifest.
    """
    paths = [
        ([part for part in name.split(".") if part not in WRAPPERS], p)
        for name, p in model.named_parameters()
    ]
    while paths and all(path[0] == "module" and len(path) > 1 for path, _ in paths):
        paths = [(path[1:], p) for path, p in paths]
    return dict(sorted((".".join(path), p) for path, p in paths if p.requires_grad))
