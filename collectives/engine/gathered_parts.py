"""Put parts beside each other, each into its slot: results of the codec ``Gathered``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from atoll.collectives.codecs import F32, U8, Codec, Gathered
from atoll.collectives.engine.mean_parts import Sums
from atoll.collectives.engine.parts import Parts
from atoll.collectives.engine.result import RoundResult
from atoll.collectives.engine.robust_parts import Stacks
from atoll.collectives.errors import ConfigError
from atoll.collectives.robust.gram import Matrix
from atoll.collectives.schedule.plan import ReducePlan


class Slots(Parts):
    """Put each participant's part into its slot, where the result lies.

    Where the result is the aggregate (see Gathered), parts are added to it, and the weights of
    those who sent each element take another float32 chunk.
    """

    def __init__(
        self,
        result: RoundResult,
        whole: Gathered,
        source: Callable[[int, F32], None],
        own: Callable[[int], F32] | None = None,
    ) -> None:
        super().__init__(result, whole.part_codec, source, own)
        self._whole = whole
        self._weights: dict[int, F32] = {}  # by chunk, while it is being aggregated

    def in_place(self, chunk: int) -> bool:
        return True

    def add(self, chunk: int, participant: int | None, buffer: U8) -> None:
        assert participant is not None  # there are no partial sums: see ``parts_for``
        self._put(chunk, participant, buffer[: self._layout.size(chunk)])
        self.encoded.give(buffer)

    def add_own(self, chunk: int, me: int, *, coded: bool) -> None:
        buffer = self.encoded.take()
        self._put(chunk, me, self._encode_own(chunk, buffer))
        self.encoded.give(buffer)

    def _put(self, chunk: int, participant: int, part: U8) -> None:
        where, size = self._result.view(chunk), self._grid.size(chunk)
        slot = self._whole.part(where, participant)
        if slot is not None:
            self._codec.check(part, size)
            np.copyto(slot, part)
            return
        total = where.view(np.float32)
        if chunk not in self._weights:
            self._weights[chunk] = self._floats.take()
            self._weights[chunk].fill(0)
            total.fill(0)
        self._whole.add(participant, part, total, self._weights[chunk][:size])

    def encode(self, chunk: int, out: U8) -> None:
        weights = self._weights.pop(chunk, None)
        if weights is not None:
            self._whole.finish(out.view(np.float32), weights[: self._grid.size(chunk)])
            self._floats.give(weights)


def parts_for(
    plan: ReducePlan,
    result: RoundResult,
    codec: Codec,
    is_root: Callable[[int], bool],
    source: Callable[[int, F32], None],
    own: Callable[[int], F32] | None = None,
    matrix: Matrix | None = None,
) -> Parts:
    """Return the kind of ``Parts`` that the plan's rule and the codec of the result ask for.

    ``codec`` is that of the parts. ``matrix``: what the rule gives, where it is known. Raises
    ConfigError if this plan cannot give it: gathered parts have to come to a chunk's owner as they
    are.
    """
    whole = result.codec
    if plan.rule is not None and not plan.rule.is_mean:
        return Stacks(plan, result, codec, is_root, source, own, matrix)
    if not isinstance(whole, Gathered):
        return Sums(result, codec, plan.factors(), is_root, source, own, plan.fold)
    if plan.shape is not None or plan.is_pairwise or plan.fold != "mean":
        raise ConfigError("gathered parts can only be reduced in a butterfly, to their mean")
    if plan.weights != whole.weights or codec is not whole.part_codec:
        raise ConfigError("this plan has other weights, or other parts, than its result")
    return Slots(result, whole, source, own)
