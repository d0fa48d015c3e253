"""Choose a codec for each layer, under a budget for the error of all: L-GreCo's bits.

Layers that have the same codec travel in one all-reduce. What each codec would lose of each layer
is measured by every trainer on its own gradient and summed up, so that all choose alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.codecs import F32, Codec, get_codec
from atoll.optim.compressors.base import Compressor, check, mean_of
from atoll.optim.compressors.l_greco import LGreCo
from atoll.optim.compressors.layers import Layers
from atoll.optim.every_step.exchange import Exchange
from atoll.optim.manifest import Manifest


@dataclass(kw_only=True)
class LayerBits(Compressor):
    """Average each layer in a codec of its own.

    ``codecs`` to choose from; ``uniform``: the one of all layers whose error is the budget;
    ``choice``: when and how they are chosen anew.

    Nothing is fed back, so the budget is what limits the error. Vectors, and parameters whose names
    begin with one of ``dense``, travel in the codec of the run.
    """

    wire: ClassVar[str] = "LayerBits"
    codecs: tuple[str, ...] = ("int2", "int4", "int8")
    uniform: str = "int4"
    choice: LGreCo = field(default_factory=LGreCo)
    dense: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(
            self.uniform in self.codecs
            and len(set(self.codecs)) == len(self.codecs)
            and not any(get_codec(name).contract.keyed for name in self.codecs),
            self,
            "different codecs without a key, the uniform one among them",
        )

    def _allocate(self, manifest: Manifest) -> None:
        self._layers = Layers(manifest, self.dense)
        start = self.codecs.index(self.uniform)
        self._chosen: F32 = np.full(len(self._layers.matrices), start, np.float32)

    @property
    def trainer_bytes(self) -> float:
        return 16.0  # layers that have one codec, end to end and summed up; and the mean

    @property
    def shared(self) -> list[F32]:
        return [self._chosen]

    def forget(self) -> None:
        """Forget nothing, because nothing is kept for this peer alone."""

    def average(self, gradient: F32, step: int, exchange: Exchange) -> F32 | None:
        rest = mean_of(exchange.total(self._layers.rest_of(gradient), self._codec))
        # Whatever a donor has given, it is one of the choices.
        chosen = np.clip(np.nan_to_num(self._chosen), 0, len(self.codecs) - 1).astype(np.intp)
        if self.choice.is_due(step):
            chosen = self._choose(gradient, exchange)
        done: F32 = np.zeros_like(gradient)
        for number, name in enumerate(self.codecs):
            layers = [x for x, c in zip(self._layers.matrices, chosen, strict=True) if c == number]
            if not layers:
                continue
            parts = [gradient[layer.lo : layer.hi] for layer in layers]
            mean = mean_of(exchange.total(np.concatenate(parts), name))
            if mean is None:
                rest = None
                continue
            for layer in layers:
                done[layer.lo : layer.hi], mean = mean[: layer.size], mean[layer.size :]
        if rest is None:
            return None
        self._layers.put_rest(rest, done)
        self._chosen[:] = chosen
        return done

    def _choose(self, gradient: F32, exchange: Exchange) -> NDArray[np.intp]:
        codecs = [get_codec(name) for name in self.codecs]
        layers = self._layers.matrices
        table = np.zeros((len(layers), len(codecs)), np.float32)
        sizes = np.zeros(table.shape, np.int64)
        for number, layer in enumerate(layers):
            values = gradient[layer.lo : layer.hi]
            table[number] = [_error(codec, values) for codec in codecs]
            sizes[number] = [codec.encoded_bytes(layer.size) for codec in codecs]
        errors = exchange.total(table.reshape(-1)).total.reshape(table.shape)
        uniform = np.full(len(layers), self.codecs.index(self.uniform), np.intp)
        return self.choice.choose(errors, sizes, uniform)


def _error(codec: Codec, values: F32) -> float:
    """Return the Frobenius norm of what a codec loses."""
    data = np.empty(codec.encoded_bytes(values.size), np.uint8)
    codec.encode(values, data)
    decoded: F32 = np.empty_like(values)
    codec.decode(data, decoded)
    return float(np.linalg.norm(values - decoded))
