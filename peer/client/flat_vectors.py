"""Turn numpy arrays and torch tensors into flat float32 vectors, without loading torch.

Whoever hands over a tensor has loaded torch; it is found among the loaded modules.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import ConfigError

Floats = NDArray[np.float32]
DTYPES = ("float32", "float16", "bfloat16")  # float32 holds all their values


class Vector:
    """Copy an array or tensor into float32[elements], and out of it again."""

    def __init__(self, tensor: Any, kind: str, shape: Sequence[int], dtype: str) -> None:
        self._tensor = tensor
        self._text = f"{kind} of shape {tuple(shape)} and dtype {dtype}"
        self.elements = math.prod(shape)
        if dtype not in DTYPES:
            raise ConfigError(
                f"all_reduce() of a {self._text}",
                fix=f"convert it first, to {' or '.join(DTYPES)}; float32 holds integers up to "
                "16,777,216 exactly",
            )
        if not self.elements:
            raise ConfigError(f"all_reduce() of a {self._text}", fix="leave it out: it is empty")

    def __str__(self) -> str:
        return self._text

    def write(self, flat: Floats) -> None:
        """Write the values into ``flat``, in C order."""
        np.copyto(flat.reshape(self._tensor.shape), self._tensor)

    def read(self, flat: Floats) -> Any:
        """Return a new one of the same kind with these values, rounded to its dtype."""
        return flat.reshape(self._tensor.shape).astype(self._tensor.dtype)


class _TorchVector(Vector):
    """Copy a torch tensor on any device: values are converted and copied in one go."""

    def __init__(self, tensor: Any) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        super().__init__(tensor.detach(), "torch tensor", tensor.shape, dtype)
        if str(tensor.layout) != "torch.strided":
            raise ConfigError(f"all_reduce() of a {self} that is sparse", fix="make it dense first")

    def _flat(self, flat: Floats) -> Any:
        return sys.modules["torch"].from_numpy(flat).view(self._tensor.shape)

    def write(self, flat: Floats) -> None:
        self._flat(flat).copy_(self._tensor)

    def read(self, flat: Floats) -> Any:
        return sys.modules["torch"].empty_like(self._tensor).copy_(self._flat(flat))


def vector_of(tensor: Any) -> Vector:
    """Return an array or tensor as a vector.

    Raises ConfigError for what is no array or tensor, or of another dtype.
    """
    if isinstance(tensor, np.ndarray):
        return Vector(tensor, "numpy array", tensor.shape, str(tensor.dtype))
    if any(kind.__module__.split(".")[0] == "torch" for kind in type(tensor).__mro__):
        return _TorchVector(tensor)
    raise ConfigError(
        f"all_reduce() of a {type(tensor).__name__}", fix="give it a numpy array or a torch tensor"
    )
