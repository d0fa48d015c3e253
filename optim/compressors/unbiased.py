"""Round at random, which is right in expectation and keeps nothing: TernGrad and QSDP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from atoll.collectives.codecs import U8, Codec, get_codec
from atoll.collectives.counter_rng import derive_key
from atoll.optim.compressors.base import check, malformed
from atoll.optim.compressors.layer_codec import LayerCodec
from atoll.optim.every_step.exchange import Given


@dataclass(kw_only=True)
class TernGrad(LayerCodec):
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
class QSDP(LayerCodec):
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
