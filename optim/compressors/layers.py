"""Divide the vector of a model into matrices, which are compressed, and the rest.

Vectors (biases, the scales of norms) have a thousandth of a model's elements and suffer most, so
that no method of this package compresses them; nor what the user names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError
from atoll.optim.manifest import Manifest, Parameter


@dataclass(frozen=True, slots=True)
class Layer:
    """Describe elements [lo, hi) of the vector as a matrix: the first dimension, and all others."""

    name: str
    lo: int
    hi: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.hi - self.lo

    def of(self, flat: F32) -> F32:
        """Return the layer as a view of float32[n]: (rows, columns)."""
        return flat[self.lo : self.hi].reshape(self.rows, self.columns)


class Layers:
    """Hold the matrices of a model and the places of the rest.

    ``matrices`` are in the order of the vector; the rest are ``rest_elements``, end to end.

    ``dense``: the beginnings of names of parameters that belong to the rest. ``wanted`` may send
    more matrices there.
    """

    def __init__(
        self,
        manifest: Manifest,
        dense: Sequence[str] = (),
        wanted: Callable[[Layer], bool] = lambda layer: True,
    ) -> None:
        unknown = [d for d in dense if not any(p.name.startswith(d) for p in manifest.parameters)]
        if unknown:
            raise ConfigError(
                f"no parameter's name begins with {', '.join(unknown)}",
                fix=f"name some like {manifest.parameters[0].name!r}",
            )
        self.matrices: list[Layer] = []
        self._rest: list[tuple[int, int]] = []
        for parameter in manifest.parameters:
            layer = _layer(parameter, *manifest.offsets[parameter.name])
            is_matrix = len(parameter.shape) > 1 and layer.size > 0
            if is_matrix and not parameter.name.startswith(tuple(dense)) and wanted(layer):
                self.matrices.append(layer)
            else:
                self._rest.append((layer.lo, layer.hi))
        self.rest_elements = sum(hi - lo for lo, hi in self._rest)

    def rest_of(self, flat: F32) -> F32:
        """Return a copy of the rest, float32[rest_elements]."""
        parts = [flat[lo:hi] for lo, hi in self._rest]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def put_rest(self, rest: F32, flat: F32) -> None:
        """Write the rest into ``flat``: the inverse of ``rest_of``."""
        at = 0
        for lo, hi in self._rest:
            flat[lo:hi] = rest[at : at + hi - lo]
            at += hi - lo


def _layer(parameter: Parameter, lo: int, hi: int) -> Layer:
    rows = parameter.shape[0] if parameter.shape else 1
    return Layer(parameter.name, lo, hi, rows, (hi - lo) // max(1, rows))
