"""Keep as a result what every participant sent, not one mean that is encoded once more.

The encoding of a chunk is one *slot* for each participant of positive weight, in the order of peer
ids: the bytes that it sent, as it encoded them. Decoding gives what every replica computes of them,
with f = weight / sum of weights, rounded to float32, and the slots' values x in this order::

    all       sum of f x                  of each element             SparseLoCo, arXiv 2508.15706
    senders   sum of f x / sum of f       over those that sent it     its code, and Templar's

Each step is rounded to float32; what nobody sent is 0, and what is beyond float32's largest number
is clamped to it. Of codecs that send every element both are the weighted mean.

Slots grow with the participants. Where they would take more than the aggregate as float32 does
(more than 128 of topk, 3 of int8, one of float32) the owner of a chunk computes that, and its
float32 is the encoding. So a result never has more than 4 bytes per element, but in short chunks
of sparse codecs, by their headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np

from atoll.collectives.codecs.base import F32, U8, Codec, Decoder, scratch
from atoll.collectives.codecs.plain import Float32Codec

RULES: Final = ("all", "senders")
# Slots and float32 are compared for the shortest chunks of usual size (chunks.py), in which the
# headers of a codec weigh most. All chunks of a result are then encoded alike.
COMPARED_ELEMENTS: Final = 4_096
FLOAT32: Final = Float32Codec()
FLOAT32_MAX: Final = np.finfo(np.float32).max
# Rounds under way, and logs that are replayed: participants seldom change from one to the next.
KNOWN: Final = 64


@dataclass(frozen=True)
class Gathered(Decoder):
    """Decode a result that consists of what every participant sent.

    ``inner`` is the codec of the parts, ``weights`` are those of all participants, ``rule`` is one
    of RULES. Equal ones have equal layouts and decode alike.
    """

    inner: Codec
    weights: tuple[float, ...]
    rule: str

    @cached_property
    def name(self) -> str:  # type: ignore[override]  # of a codec it is a constant
        return f"{self.inner.name} of {len(self._places)}"

    @property
    def part_codec(self) -> Codec:
        return self.inner

    @cached_property
    def factors(self) -> tuple[float, ...]:
        return factors_of(self.weights)

    @cached_property
    def _places(self) -> dict[int, int]:
        """Return the slot of each participant that has one."""
        counted = (index for index, weight in enumerate(self.weights) if weight > 0)
        return {participant: slot for slot, participant in enumerate(counted)}

    @cached_property
    def has_slots(self) -> bool:
        """Return whether the encoding consists of slots; else it is the aggregate, as float32."""
        slots_bytes = len(self._places) * self.inner.encoded_bytes(COMPARED_ELEMENTS)
        return slots_bytes <= FLOAT32.encoded_bytes(COMPARED_ELEMENTS)

    def encoded_bytes(self, count: int) -> int:
        if not self.has_slots:
            return FLOAT32.encoded_bytes(count)
        return len(self._places) * self.inner.encoded_bytes(count)

    def part(self, data: U8, participant: int) -> U8 | None:
        slot = self._places.get(participant)
        if slot is None or not self.has_slots:
            return None
        size = data.size // len(self._places)
        return data[slot * size : (slot + 1) * size]

    def check(self, data: U8, count: int) -> None:
        self._check_length(data, count)
        if not self.has_slots:
            FLOAT32.check(data, count)
            return
        for slot in np.split(data, len(self._places)):
            self.inner.check(slot, count)

    def decode(self, data: U8, out: F32) -> None:
        self._check_length(data, out.size)
        if not self.has_slots:
            FLOAT32.decode(data, out)
            return
        total: F32 = scratch("aggregate", np.float32, out.size)
        weights: F32 = scratch("senders", np.float32, out.size)
        total.fill(0)
        weights.fill(0)
        for participant, slot in zip(self._places, np.split(data, len(self._places)), strict=True):
            self.add(participant, slot, total, weights)
        self.finish(total, weights)
        np.copyto(out, total)

    def add(self, participant: int, part: U8, total: F32, weights: F32) -> None:
        """Add a participant's part to what those before it have given.

        ``total`` and ``weights`` begin as zeros. Raises CodecError, and then nothing is added.
        """
        factor = self.factors[participant]
        with np.errstate(over="ignore"):  # ``finish`` clamps it
            if self.rule == "all":
                self.inner.decode_add(part, factor, total)
            else:
                self.inner.decode_weigh(part, factor, total, weights)

    def finish(self, total: F32, weights: F32) -> None:
        """Make the aggregate of ``total``, when all parts are added."""
        if self.rule == "senders":
            sent = scratch("sent", np.bool_, total.size)
            np.greater(weights, 0, out=sent)
            with np.errstate(over="ignore"):
                np.divide(total, weights, out=total, where=sent)
        np.clip(total, -FLOAT32_MAX, FLOAT32_MAX, out=total)


@lru_cache(KNOWN)
def gathered_codec(inner: Codec, weights: tuple[float, ...], rule: str) -> Gathered:
    """Return the same codec object for the same arguments.

    What it knows of a thousand weights is found once.
    """
    return Gathered(inner, weights, rule)


def factors_of(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the factors of parts in a mean: ``weight / sum(weights)``, rounded to float32."""
    total = sum(weights)
    return tuple(float(np.float32(weight / total)) for weight in weights)
