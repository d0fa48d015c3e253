"""Round at random, which is right in expectation and keeps nothing: TernGrad and QSDP.

What each trainer has encoded is gathered, and all decode and add it in one order. A sum that is
encoded once more, as in an all-reduce, would lose as much again.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from atoll.collectives.codecs import F32, U8, Codec, get_codec
from atoll.collectives.counter_rng import derive_key
from atoll.collectives.errors import CodecError
from atoll.optim.compressors.base import Compressor, check, malformed, mean_of
from atoll.optim.compressors.layers import Layers
from atoll.optim.every_step.exchange import Exchange, Given
from atoll.optim.manifest import Manifest


@dataclass(kw_only=True)
class Unbiased(Compressor):
    """Send matrices through a codec with a key, layer by layer, and vectors as they are.

    ``dense``: the beginnings of names of parameters that travel as they are too.
    """

    dense: tuple[str, ...] = ()

    @property
    @abstractmethod
    def encoding(self) -> Codec:
        """Return the codec of matrices."""

    @abstractmethod
    def _key(self, step: int, layer: int) -> int:
        """Return the key with which this trainer rounds."""

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
        return mean

    def _encoded(self, gradient: F32, step: int) -> bytes:
        parts = []
        for number, (layer, size) in enumerate(
            zip(self._layers.matrices, self._sizes, strict=True)
        ):
            part = np.empty(size, np.uint8)
            self.encoding.encode(gradient[layer.lo : layer.hi], part, self._key(step, number))
            parts.append(part.tobytes())
        return b"".join(parts)

    def _add(self, given: Given, step: int, factor: float, total: F32) -> None:
        data = np.frombuffer(given.data, np.uint8)
        if data.size != sum(self._sizes):
            raise malformed(given, f"{data.size:,} bytes instead of {sum(self._sizes):,}")
        parts = np.split(data, np.cumsum(self._sizes)[:-1]) if self._sizes else []
        self._check(given, step, parts)
        try:
            for layer, part in zip(self._layers.matrices, parts, strict=True):
                self.encoding.decode_add(part, factor, total[layer.lo : layer.hi])
        except CodecError as error:
            raise malformed(given, error.what) from error


@dataclass(kw_only=True)
class TernGrad(Unbiased):
    """Send one of three values for each element (arXiv 1705.07878): a sign and a scale, or 0.

    Two bits for each element; the error is as large as the gradient itself, so use it with many
    trainers, and name the last layer in ``dense``. The authors share one scale among all trainers,
    so that ternary numbers can be summed up; here they are gathered, and each keeps its own scales,
    one for 4,096 elements, which errs less.
    """

    wire: ClassVar[str] = "TernGrad"

    @property
    def encoding(self) -> Codec:
        return get_codec("ternary")

    def _key(self, step: int, layer: int) -> int:
        # Each trainer rounds for itself, so that errors cancel out.
        return derive_key(b"atoll terngrad", step, layer, self._name.encode())


@dataclass(kw_only=True)
class QSDP(Unbiased):
    """Round to the nearest point of a grid that is shifted at random (arXiv 2302.02390).

    ``bits``: 8 or 4 for each element. One shift for each block of elements is the same for all
    trainers and known to all: it is a function of the step. That makes the rounding unbiased with
    half the error of stochastic rounding, and needs no random number for each element. The paper
    keeps the first and the last layer out of it: name them in ``dense``.
    """

    wire: ClassVar[str] = "QSDP"
    bits: int = 8

    def __post_init__(self) -> None:
        check(self.bits in (4, 8), self, "4 or 8 bits")

    @property
    def encoding(self) -> Codec:
        return get_codec(f"int{self.bits}_shift")

    def _key(self, step: int, layer: int) -> int:
        return derive_key(b"atoll qsdp", step, layer)

    def _check(self, given: Given, step: int, parts: list[U8]) -> None:
        head = self.encoding.contract.header_bytes  # which is the key
        for number, part in enumerate(parts):
            if int.from_bytes(part[:head].tobytes(), "little") != self._key(step, number):
                raise malformed(given, "it is rounded with another shift than that of the step")
