"""Reduce among participants that are all in this process: no frames, the same bytes.

What peers compute in a butterfly is fixed: every part goes through the codec, the parts are added
in the order of the participants, and the sum goes through a codec once more (schedule/tree.py).
Here it is a loop, for swarms (optim/swarm.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from atoll.collectives.chunks import ChunkGrid
from atoll.collectives.codecs import F32, Decoder
from atoll.collectives.engine.parts import Contribution, PartError, parts_for
from atoll.collectives.engine.result import RoundResult
from atoll.collectives.errors import CodecError, ConfigError
from atoll.collectives.robust import RobustRule
from atoll.collectives.schedule.plan import butterfly_plan


def reduce_together(
    codec: Decoder,
    grid: ChunkGrid,
    weights: Sequence[float],
    sources: Sequence[Callable[[int, F32], None]],
    fold: str = "mean",
    rule: RobustRule | None = None,
    key: int = 0,
) -> RoundResult:
    """Return the encoded result of a reduction whose participants are all in this process.

    It is the weighted mean, or another one of ``plan.FOLDS``, or what a robust ``rule`` makes of
    the parts (with ``key``: see ReducePlan); ``codec`` is that of the result.

    ``sources[i](chunk, out)`` fills in the part of participant i, which has ``weights[i]``; one of
    weight 0 is not asked. Raises ConfigError for weights that give no mean and for fewer
    participants than the rule needs, CodecError for values that are not finite; with a rule
    PartError for them, and for those that are absurd.
    """
    if len(sources) != len(weights):
        raise ConfigError(f"{len(sources)} parts and {len(weights)} weights")
    names = [number.to_bytes(4, "big") for number in range(len(weights))]
    plan = replace(butterfly_plan(names, weights, grid), fold=fold, rule=rule, key=key)
    result = RoundResult(codec, grid)
    adding = 0

    def source(chunk: int, out: F32) -> None:
        sources[adding](chunk, out)

    parts = parts_for(plan, result, codec.part_codec, lambda chunk: True, Contribution(source))
    counted = [number for number, weight in enumerate(plan.weights) if weight > 0]
    for chunk in range(grid.count):
        for adding in counted:
            try:
                parts.add_own(chunk, adding, coded=True)
            except CodecError as error:
                if rule is None:
                    raise
                raise PartError(
                    adding, f"its contribution to chunk {chunk}: {error.what}"
                ) from None
        for whole in parts.whole(chunk):
            parts.encode(whole, result.view(whole))
    return result
