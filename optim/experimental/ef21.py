"""Send only what differs from an estimate that all have: EF21, weighted EF21 and EControl.

Trainer i keeps an estimate g_i of its gradient x_i; C is a contractive codec, w_i a weight::

    EF21       send c_i = C(x_i / (n w_i) - g_i)       g_i <- g_i + c_i
    EControl   send c_i = C(eta e_i + x_i - g_i)       e_i <- e_i + x_i - g_i - c_i, g_i as above
    all        mean <- mean + sum_i w_i c_i            which is sum_i w_i g_i

What is sent is gathered and not summed up on the way, where a codec would lose something that no
memory keeps. Equal weights are 1 / n; weighted ones are L_i / sum_j L_j for the smoothness L_i of a
trainer's own loss, and depend on their mean where EF21's step size depends on that of their squares
(2402.10774). Sources: EF21 2106.05203, with momentum for noisy gradients 2305.15155; EControl
2311.05645; both memories in collectives/feedback.py.

That the mean is one of estimates holds as long as the same trainers take part. When somebody comes,
goes or has lost its memory, all begin anew from exact gradients, in one dense exchange more.
"""

from __future__ import annotations

import math
import struct
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np

from atoll.collectives import feedback
from atoll.collectives.chunks import grid_for
from atoll.collectives.codecs import F32, U8, get_codec
from atoll.collectives.errors import CodecError
from atoll.optim.compressors.base import Compressor, check, malformed, mean_of
from atoll.optim.every_step.exchange import Exchange, Given
from atoll.optim.manifest import Manifest

# Before what is encoded: whether the estimate is part of the mean, and the smoothness.
_HEAD: Final = struct.Struct("<?f")
SMOOTHNESS_MIN, SMOOTHNESS_MAX = 1e-20, 1e20  # so that no quotient of two leaves float32


@dataclass(frozen=True, slots=True)
class _Part:
    given: Given
    inside: bool
    smoothness: float
    encoded: U8


@dataclass(kw_only=True)
class Estimates(Compressor):
    """Estimate gradients, and send what differs from the estimates.

    ``codec`` of what is sent; "topk" takes 0.22 bit for each element.
    """

    codec: str = "topk"

    @property
    def smoothness(self) -> float:
        """Return this trainer's share of the mean, in any unit."""
        return 1.0

    @abstractmethod
    def _feedback(self, elements: int) -> feedback.Feedback:
        """Return the memory of this trainer."""

    def _values(self, gradient: F32) -> F32:
        """Return what is estimated in this step."""
        return gradient

    def _keep(self, values: F32) -> None:
        """Note that ``values`` of this step have been sent."""

    def _allocate(self, manifest: Manifest) -> None:
        self._memory = self._feedback(manifest.elements)
        self._running = feedback.RunningMean(manifest.elements)
        self._members: F32 = np.zeros(1, np.float32)  # whose estimates are in the running mean
        self._inside = False  # whether this trainer is one of them
        self._factor = np.float32(1)  # 1 / (n w_i), of this trainer
        grid = grid_for(manifest.elements)
        self._chunks = [grid.bounds(chunk) for chunk in range(grid.count)]
        self._sizes = [self._memory.codec.encoded_bytes(hi - lo) for lo, hi in self._chunks]

    @property
    def trainer_bytes(self) -> float:
        # The mean and the estimate; and then its change and a copy, or a sum to begin anew.
        return 16.0

    @property
    def shared(self) -> list[F32]:
        return [self._running.mean, self._members]

    def forget(self) -> None:
        self._memory.reset()
        self._inside = False

    def kept(self) -> dict[str, Any]:
        arrays = {f"memory {name}": array for name, array in self._memory.arrays.items()}
        return arrays | {"inside": self._inside, "factor": float(self._factor)}

    def restore(self, kept: Mapping[str, Any]) -> None:
        for name, array in self._memory.arrays.items():
            np.copyto(array, kept[f"memory {name}"])
        self._inside, self._factor = bool(kept["inside"]), np.float32(kept["factor"])

    def average(self, gradient: F32, step: int, exchange: Exchange) -> F32 | None:
        values = self._values(gradient)
        sent = self._encoded(values) if exchange.counts and self._inside else []
        head = _HEAD.pack(self._inside, self.smoothness)
        given = exchange.gather(head + b"".join(part.tobytes() for part in sent))
        parts = [self._parsed(one) for one in given]
        inside = [part for part in parts if part.inside]
        strangers = [part for part in parts if part.given.counts and not part.inside]
        if strangers or len(inside) != self._members[0]:
            return self._begin_anew(values, parts, exchange)
        if not any(part.given.counts for part in parts):
            return None
        weights = _weights(inside)
        change: F32 = np.zeros_like(gradient)
        for part, weight in zip(inside, weights, strict=True):
            self._add(part, weight, change)
        self._running.commit(0, change)
        if sent:
            for (lo, hi), data in zip(self._chunks, sent, strict=True):
                self._memory.commit(lo, values[lo:hi] * self._factor, data)
            self._keep(values)
        return self._running.mean.copy()

    # ------------------------------------------------------------ inside

    def _begin_anew(self, values: F32, parts: list[_Part], exchange: Exchange) -> F32 | None:
        counted = [part for part in parts if part.given.counts]
        found = exchange.total(values)
        count = found.count
        mean = mean_of(found)
        if mean is None:
            return None
        self._running.mean[:] = mean
        # If somebody has gone meanwhile, its weight has to go too: anew in the next step.
        self._members[0] = count if count == len(counted) else 0
        self.forget()
        if exchange.counts:
            weights = dict(zip([p.given.name for p in counted], _weights(counted), strict=True))
            self._factor = np.float32(1 / (len(counted) * weights[self._name]))
            np.multiply(values, self._factor, out=self._memory.arrays["estimate"])
            self._inside = True
            self._keep(values)
        return mean

    def _encoded(self, values: F32) -> list[U8]:
        parts = []
        for (lo, hi), size in zip(self._chunks, self._sizes, strict=True):
            part = np.empty(size, np.uint8)
            self._memory.encode(lo, values[lo:hi] * self._factor, part)
            parts.append(part)
        return parts

    def _parsed(self, given: Given) -> _Part:
        """Read what a trainer gave; RemoteProtocolError if it is malformed."""
        size = len(given.data) - _HEAD.size
        if size < 0 or given.data[0] > 1:
            raise malformed(given, "it has no head")
        inside, smoothness = _HEAD.unpack_from(given.data)
        if size != (sum(self._sizes) if inside and given.counts else 0):
            raise malformed(given, f"{size:,} bytes")
        if not SMOOTHNESS_MIN <= smoothness <= SMOOTHNESS_MAX:
            raise malformed(given, f"a smoothness of {smoothness}")
        encoded = np.frombuffer(given.data, np.uint8, offset=_HEAD.size)
        return _Part(given, inside, smoothness, encoded)

    def _add(self, part: _Part, weight: float, change: F32) -> None:
        """Add a part to the change of the mean; RemoteProtocolError if it is malformed.

        Nothing is added for one that has nothing to give in this step: its estimate stays.
        """
        at = 0
        try:
            for (lo, hi), size in zip(self._chunks, self._sizes, strict=True):
                if part.given.counts:
                    data = part.encoded[at : at + size]
                    self._memory.codec.decode_add(data, weight, change[lo:hi])
                at += size
        except CodecError as error:
            raise malformed(part.given, error.what) from error


@dataclass(kw_only=True)
class EF21(Estimates):
    """Send by EF21, or weighted EF21, what differs from an estimate.

    ``smoothness``: of this trainer's loss, for weighted EF21; 1 at all trainers is EF21.

    ``eta`` below 1: the estimate is of an average of gradients, which forgets (1 - eta) of itself
    in each step. Gradients of small batches need it: without, EF21 may diverge.

    With ``eta`` 0.1 and top-k it ended 88 % above data-parallel on the convergence bench, far worse
    than one worker alone: its estimate follows gradients of small batches too slowly. Use
    ``ErrorFeedback``, which sends about the same bytes.
    """

    wire: ClassVar[str] = "EF21"
    eta: float = 1.0
    smoothness: float = field(default=1.0, repr=False)  # each trainer's own

    def __post_init__(self) -> None:
        check(
            0 < self.eta <= 1 and SMOOTHNESS_MIN <= self.smoothness <= SMOOTHNESS_MAX,
            self,
            f"an eta in (0, 1] and a smoothness of {SMOOTHNESS_MIN:g} to {SMOOTHNESS_MAX:g}",
        )

    def _feedback(self, elements: int) -> feedback.Feedback:
        self._average: F32 | None = None
        return feedback.EF21Feedback(get_codec(self.codec), elements)

    @property
    def trainer_bytes(self) -> float:
        return super().trainer_bytes + (8.0 if self.eta < 1 else 0.0)  # the average, and the next

    def _values(self, gradient: F32) -> F32:
        if self.eta == 1 or self._average is None:
            return gradient
        eta = np.float32(self.eta)
        return (1 - eta) * self._average + eta * gradient

    def _keep(self, values: F32) -> None:
        self._average = None if self.eta == 1 else values.copy()

    def forget(self) -> None:
        super().forget()
        self._average = None

    def kept(self) -> dict[str, Any]:
        average = np.zeros(0, np.float32) if self._average is None else self._average
        return super().kept() | {"average": average}

    def restore(self, kept: Mapping[str, Any]) -> None:
        super().restore(kept)
        self._average = kept["average"].copy() if kept["average"].size else None


@dataclass(kw_only=True)
class EControl(Estimates):
    """Send by EControl what differs from an estimate, with some of the error.

    ``eta``: how much of the error is sent with the next step; 0.001 to 0.1 in practice.

    With top-k it ended 70 % above data-parallel on the convergence bench, far worse than one worker
    alone: use ``ErrorFeedback``.
    """

    wire: ClassVar[str] = "EControl"
    eta: float = 0.01

    @property
    def trainer_bytes(self) -> float:
        return super().trainer_bytes + 4.0  # the error

    def _feedback(self, elements: int) -> feedback.Feedback:
        return feedback.EControlFeedback(get_codec(self.codec), elements, self.eta)


def _weights(parts: list[_Part]) -> list[float]:
    """Return w_i of each part, in float64 and in one order everywhere."""
    total = math.fsum(part.smoothness for part in parts)
    return [part.smoothness / total for part in parts]
