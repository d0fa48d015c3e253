"""Send a part of each gradient, and what it leaves out with the next: plain error feedback.

Trainer i keeps a residual e_i for its matrices; C is a contractive codec, d the decay::

    m_i = d e_i + x_i        send C(m_i)        e_i = m_i - C(m_i)        mean = sum_i C(m_i) / n

Nothing is lost for good, it only comes later, so codecs that leave out nearly all of a gradient can
be used (Seide et al. 2014 for one bit, 1809.07599 for the largest elements). With a low rank in
place of a codec it is ``PowerSGD``, which keeps a residual of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from atoll.collectives.codecs import F32, Codec, get_codec
from atoll.collectives.errors import CodecError
from atoll.collectives.feedback import ResidualFeedback
from atoll.optim.compressors.base import check
from atoll.optim.compressors.layer_codec import LayerCodec
from atoll.optim.compressors.layers import Layer
from atoll.optim.every_step.exchange import Given
from atoll.optim.manifest import Manifest


@dataclass(kw_only=True)
class ErrorFeedback(LayerCodec):
    """Send what a coarse codec makes of each matrix, and the rest of it with the next step.

    ``codec``: "topk" (0.22 bit for each element), "sign", "int2" or any other that is contractive
    and takes no key. ``decay``: how much of what was left out stays; 1, all of it, is the plain
    one.
    """

    wire: ClassVar[str] = "ErrorFeedback"
    codec: str = "topk"
    decay: float = 1.0

    def __post_init__(self) -> None:
        check(0 <= self.decay <= 1, self, "a decay in [0, 1]")
        try:
            contract = self.encoding.contract
        except CodecError:
            check(False, self, "a codec that there is")
        check(
            contract.alpha > 0 and not contract.keyed,
            self,
            "a contractive codec without a key: topk, sign or int2",
        )

    @property
    def encoding(self) -> Codec:
        return get_codec(self.codec)

    def _allocate(self, manifest: Manifest) -> None:
        super()._allocate(manifest)
        self._memory = ResidualFeedback(self.encoding, manifest.elements, self.decay)
        largest = max((layer.size for layer in self._layers.matrices), default=0)
        self._largest_share = largest / max(1, manifest.elements)

    @property
    def trainer_bytes(self) -> float:
        # The residual; and of one matrix at a time what is encoded, and what was sent.
        return super().trainer_bytes + 4.0 + 8.0 * self._largest_share

    def forget(self) -> None:
        self._memory.reset()

    def kept(self) -> dict[str, Any]:
        return dict(self._memory.arrays)

    def restore(self, kept: Mapping[str, Any]) -> None:
        for name, array in self._memory.arrays.items():
            np.copyto(array, kept[name])

    def _message(self, gradient: F32, layer: Layer) -> F32:
        return self._memory.message(layer.lo, gradient[layer.lo : layer.hi])

    def _was_sent(self, gradient: F32, given: list[Given]) -> None:
        own = next(one for one in given if one.name == self._name)
        for layer, part in zip(self._layers.matrices, self._split(own.data), strict=True):
            self._memory.commit(layer.lo, gradient[layer.lo : layer.hi], part)
