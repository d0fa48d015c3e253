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

from atoll.collectives.codecs import get_codec
from atoll.collectives.errors import CodecError, ConfigError

Floats = NDArray[np.float32]
DTYPES = ("float32", "float16", "bfloat16")  # float32 holds all their values
# What is looked at right after it was copied is still in the processor's cache.
TILE_ELEMENTS = 1 << 16
_FLOAT32 = get_codec("float32")


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

    def write_finite(self, flat: Floats, most: float = math.inf) -> bool:
        """Write the values as ``write`` does, and return whether they are finite.

        And none is of a larger magnitude than ``most``. Else ``flat`` may hold anything. Values
        that lie in ``flat`` are only looked at.
        """
        plain = self._plain()
        if plain is None:
            self.write(flat)
        elif plain.ctypes.data == flat.ctypes.data:
            plain = None
        for lo in range(0, self.elements, TILE_ELEMENTS):
            tile = flat[lo : lo + TILE_ELEMENTS]
            try:
                if plain is None:
                    _FLOAT32.check(tile.view(np.uint8), tile.size)
                else:
                    _FLOAT32.encode(plain[lo : lo + TILE_ELEMENTS], tile.view(np.uint8))
            except CodecError:
                return False
            if most < math.inf and max(float(tile.max()), -float(tile.min())) > most:
                return False
        return True

    @property
    def address(self) -> int:
        """Return where the values lie, if they lie as they are to be written; else 0."""
        plain = self._plain()
        return int(plain.ctypes.data) if plain is not None else 0

    def over(self, flat: Floats) -> Any:
        """Return one of the same kind, of float32, that lies in ``flat``."""
        return flat.reshape(self._tensor.shape)

    def _plain(self) -> Floats | None:
        """Return the values where they lie, if they lie as they are to be written."""
        tensor = self._tensor
        fits = tensor.dtype == np.float32 and tensor.flags.c_contiguous and tensor.flags.aligned
        return tensor.reshape(-1) if fits else None

    def read(self, flat: Floats) -> Any:
        """Return a new one of the same kind with these finite values, rounded to its dtype.

        Raise CodecError if one of them is too large for that.
        """
        with np.errstate(over="ignore"):
            found = flat.reshape(self._tensor.shape).astype(self._tensor.dtype)
        if found.dtype != np.float32 and np.isinf(found).any():
            raise self._too_large()
        return found

    def _too_large(self) -> CodecError:
        return CodecError(
            f"all_reduce() of a {self} has come to values that its dtype cannot hold",
            fix='convert it to float32 first, or use op="mean"',
        )


class _TorchVector(Vector):
    """Copy a torch tensor on any device: values are converted and copied in one go."""

    def __init__(self, tensor: Any) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        super().__init__(tensor.detach(), "torch tensor", tensor.shape, dtype)
        if str(tensor.layout) != "torch.strided":
            raise ConfigError(f"all_reduce() of a {self} that is sparse", fix="make it dense first")

    def over(self, flat: Floats) -> Any:
        return sys.modules["torch"].from_numpy(flat).view(self._tensor.shape)

    def write(self, flat: Floats) -> None:
        self.over(flat).copy_(self._tensor)

    def _plain(self) -> Floats | None:
        tensor = self._tensor
        fits = str(tensor.dtype) == "torch.float32" and tensor.device.type == "cpu"
        if not fits or not tensor.is_contiguous() or tensor.is_neg():
            return None
        found: Floats = tensor.reshape(-1).numpy()
        return found

    def read(self, flat: Floats) -> Any:
        if self._plain() is not None:
            # numpy asks the kernel for large pages, torch does not: a third of the time.
            return self.over(flat.copy())
        found = sys.modules["torch"].empty_like(self._tensor).copy_(self.over(flat))
        if str(found.dtype) != "torch.float32" and found.isinf().any():
            raise self._too_large()
        return found


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
