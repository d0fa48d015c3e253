"""Send matrices through a codec, layer by layer, and add up what all have sent in one order.

What each trainer has encoded is gathered, and all decode and add it. A sum that is encoded once
more, as in an all-reduce, would lose as much again.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from atoll.collectives.codecs import F32, U8, Codec
from atoll.collectives.errors import CodecError
from atoll.optim.compressors.base import Compressor, malformed, mean_of
from atoll.optim.compressors.layers import Layer, Layers
from atoll.optim.every_step.exchange import Exchange, Given
from atoll.optim.manifest import Manifest


@dataclass(kw_only=True)
class LayerCodec(Compressor):
    """Send matrices through a codec, layer by layer, and vectors as they are.

    ``dense``: the beginnings of names of parameters that travel as they are too.
    """

    dense: tuple[str, ...] = ()

    @property
    @abstractmethod
    def encoding(self) -> Codec:
        """Return the codec of matrices."""

    def _key(self, step: int, layer: int) -> int:
        """Return the key with which this trainer rounds, where the codec has one."""
        return 0

    def _check(self, given: Given, step: int, parts: list[U8]) -> None:
        """Raise RemoteProtocolError for parts that could not have been made with these keys."""

    def _allocate(self, manifest: Manifest) -> None:
        self._layers = Layers(manifest, self.dense)
        self._sizes = [self.encoding.encoded_bytes(layer.size) for layer in self._layers.matrices]

    @property
    def trainer_bytes(self) -> float:
        return (
            4.0 + 3 * self.encoding.contract.bits_per_element / 8
        )  # the mean; and what is encoded, packed

    def forget(self) -> None:
        """Forget nothing, because nothing is kept."""

    def _message(self, gradient: F32, layer: Layer) -> F32:
        """Return what is encoded of a matrix."""
        return gradient[layer.lo : layer.hi]

    def _was_sent(self, gradient: F32, given: list[Given]) -> None:
        """Note that what was encoded of each matrix is in the mean, with what others gave."""

    def average(self, gradient: F32, step: int, exchange: Exchange) -> F32 | None:
        given = exchange.gather(self._encoded(gradient, step) if exchange.counts else b"")
        counted = [one for one in given if one.counts]
        mean: F32 = np.zeros_like(gradient)
        for one in counted:
            self._add(one, step, 1 / len(counted), mean)
        rest = mean_of(exchange.total(self._layers.rest_of(gradient), self._codec))
        if not counted or rest is None:
            return None
        self._layers.put_rest(rest, mean)
        if exchange.counts:
            self._was_sent(gradient, given)
        return mean

    def _encoded(self, gradient: F32, step: int) -> bytes:
        parts = []
        for number, (layer, size) in enumerate(
            zip(self._layers.matrices, self._sizes, strict=True)
        ):
            part = np.empty(size, np.uint8)
            self.encoding.encode(self._message(gradient, layer), part, self._key(step, number))
            parts.append(part.tobytes())
        return b"".join(parts)

    def _split(self, data: bytes) -> list[U8]:
        """Return what is of each matrix, without a copy."""
        packed = np.frombuffer(data, np.uint8)
        return np.split(packed, np.cumsum(self._sizes)[:-1]) if self._sizes else []

    def _add(self, given: Given, step: int, factor: float, total: F32) -> None:
        if len(given.data) != sum(self._sizes):
            raise malformed(given, f"{len(given.data):,} bytes instead of {sum(self._sizes):,}")
        parts = self._split(given.data)
        self._check(given, step, parts)
        try:
            for layer, part in zip(self._layers.matrices, parts, strict=True):
                self.encoding.decode_add(part, factor, total[layer.lo : layer.hi])
        except CodecError as error:
            raise malformed(given, error.what) from error
