"""Send the largest thousandth of a gradient, with momentum that waits (arXiv 1712.01887).

This is deep gradient compression (DGC). Each trainer keeps u and v for every element of its
matrices. g is its gradient, clipped to the norm ``clip / sqrt(n)`` for n trainers, so that n of
them together have that of one::

    u = m u + g                    v = v + u                  send the largest |v| of each layer
    u = m (u + g), v = v + u + g   (nesterov)                 where sent: u = v = 0

Momentum comes before the choice, so that what is sent late is as large as it would have become; and
what was sent is forgotten (factor masking), or stale momentum would push on. So the optimizer that
applies the mean must have none. Vectors travel whole, with the same momentum after the mean.

Warm-up: 1/4 of all elements, then 1/16, 1/64, 1/256, ``warm_up`` steps each. The largest elements
are found exactly, where the authors' code looks for a threshold in a sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.codecs import F32
from atoll.optim.compressors.base import Compressor, check, malformed, mean_of
from atoll.optim.compressors.layers import Layer, Layers
from atoll.optim.every_step.exchange import Exchange, Given
from atoll.optim.manifest import Manifest

WARM_UP_STAGES: Final = 4  # the paper's: 75, 93.75, 98.4 and 99.6 % are left out


@dataclass(kw_only=True)
class DGC(Compressor):
    """Send the largest elements of each layer's accumulated gradient.

    ``density``: the part of each layer that is sent after the warm-up, in which it is a quarter of
    all elements, then a 16th, a 64th and a 256th, for ``warm_up`` steps each.

    Each element that is sent takes eight bytes of an all-gather. ``momentum``, ``nesterov``: what
    the inner SGD would have; it keeps its weight decay. ``clip``: the norm to which one trainer's
    whole gradient would be clipped, 0 for no clipping. ``dense``: the beginnings of names of
    parameters that travel whole, as all vectors do.
    """

    wire: ClassVar[str] = "DGC"
    density: float = 0.001
    momentum: float = 0.9
    nesterov: bool = False
    clip: float = 0.0
    warm_up: int = 0
    dense: tuple[str, ...] = ()

    has_momentum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(
            0 < self.density <= 1
            and 0 <= self.momentum < 1
            and self.clip >= 0
            and self.warm_up >= 0,
            self,
            "a density in (0, 1], a momentum in [0, 1), a clip and a warm_up of 0 or more",
        )

    def _allocate(self, manifest: Manifest) -> None:
        self._layers = Layers(manifest, self.dense)
        self._u: F32 = np.zeros(manifest.elements, np.float32)
        self._v: F32 = np.zeros(manifest.elements, np.float32)
        self._velocity: F32 = np.zeros(self._layers.rest_elements, np.float32)
        self._peers = 1  # that were in the last step

    @property
    def trainer_bytes(self) -> float:
        return 20.0 + (4.0 if self.clip else 0.0)  # u and v, the next ones, the mean; clipped

    @property
    def shared(self) -> list[F32]:
        return [self._velocity]

    def forget(self) -> None:
        self._u.fill(0)
        self._v.fill(0)

    def kept(self) -> dict[str, Any]:
        return {"u": self._u, "v": self._v, "peers": self._peers}

    def restore(self, kept: Mapping[str, Any]) -> None:
        np.copyto(self._u, kept["u"])
        np.copyto(self._v, kept["v"])
        self._peers = int(kept["peers"])

    def density_at(self, step: int) -> float:
        if step >= WARM_UP_STAGES * self.warm_up:
            return self.density
        return max(self.density, 0.25 ** (1 + step // self.warm_up))

    def average(self, gradient: F32, step: int, exchange: Exchange) -> F32 | None:
        density = self.density_at(step)
        gradient = self._clipped(gradient)
        u, v = self._accumulated(gradient)
        places = [_largest(layer.of(v).reshape(-1), density) for layer in self._layers.matrices]
        given = exchange.gather(self._packed(v, places) if exchange.counts else b"")
        mean: F32 = np.zeros_like(gradient)
        counted = [one for one in given if one.counts]
        for one in counted:
            self._add(one, density, mean)
        rest = mean_of(exchange.total(self._layers.rest_of(gradient), self._codec))
        if not counted or rest is None:
            return None
        np.divide(mean, np.float32(len(counted)), out=mean)
        self._layers.put_rest(self._moved(rest), mean)
        self._peers = len(counted)
        if exchange.counts:
            for layer, sent in zip(self._layers.matrices, places, strict=True):
                u[layer.lo + sent] = v[layer.lo + sent] = 0
            self._u, self._v = u, v
        return mean

    # ------------------------------------------------------------ inside

    def _clipped(self, gradient: F32) -> F32:
        norm = float(np.linalg.norm(gradient))
        limit = self.clip / math.sqrt(self._peers)
        if not self.clip or norm <= limit:
            return gradient
        return gradient * np.float32(limit / norm)

    def _accumulated(self, g: F32) -> tuple[F32, F32]:
        m = np.float32(self.momentum)
        if self.nesterov:
            u = m * (self._u + g)
            return u, self._v + u + g
        u = m * self._u + g
        return u, self._v + u

    def _moved(self, mean: F32) -> F32:
        """Return the rest after momentum; it is equal on all peers."""
        m = np.float32(self.momentum)
        if self.nesterov:
            self._velocity[:] = m * (self._velocity + mean)
            return self._velocity + mean
        self._velocity[:] = m * self._velocity + mean
        return self._velocity

    def _packed(self, v: F32, places: list[NDArray[np.intp]]) -> bytes:
        """Pack for each layer the places, uint32 and ascending, then the values, float32."""
        parts = []
        for layer, sent in zip(self._layers.matrices, places, strict=True):
            parts += [sent.astype("<u4").tobytes(), v[layer.lo + sent].astype("<f4").tobytes()]
        return b"".join(parts)

    def _add(self, given: Given, density: float, total: F32) -> None:
        """Add what a trainer gave to ``total``.

        RemoteProtocolError for what ``_packed`` does not give.
        """
        data, at = np.frombuffer(given.data, np.uint8), 0
        wanted = 8 * sum(_kept(layer, density) for layer in self._layers.matrices)
        if data.size != wanted:
            raise malformed(given, f"{data.size:,} bytes instead of {wanted:,}")
        for layer in self._layers.matrices:
            kept = _kept(layer, density)
            places = data[at : at + 4 * kept].view("<u4").astype(np.intp)
            values = data[at + 4 * kept : at + 8 * kept].view("<f4")
            if (np.diff(places) <= 0).any() or places[-1] >= layer.size:
                raise malformed(given, f"places in {layer.name} that are repeated or not there")
            if not np.isfinite(values).all():
                raise malformed(given, f"NaN or infinity in {layer.name}")
            total[layer.lo + places] += values
            at += 8 * kept


def _kept(layer: Layer, density: float) -> int:
    return max(1, round(density * layer.size))


def _largest(values: F32, density: float) -> NDArray[np.intp]:
    """Return the places of the largest magnitudes, ascending."""
    kept = max(1, round(density * values.size))
    magnitudes = np.abs(values)
    return np.sort(np.argpartition(magnitudes, values.size - kept)[values.size - kept :])
