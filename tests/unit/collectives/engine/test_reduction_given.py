"""Hand on what one participant alone gives, and see whether it comes back as it was."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.collectives import ChunkGrid, Contribution, Reduction, RoundResult, get_codec
from atoll.collectives.schedule.plan import ReducePlan
from atoll.collectives.schedule.schedule import Frame, FrameKind

CHUNK = 256
PLAN = ReducePlan((b"a", b"b", b"c"), (1.0, 0.0, 0.0), (1, 2))  # b and c own a chunk each
GIVEN = np.arange(1, 2 * CHUNK + 1, dtype=np.float32)


def given_by_a(failed: list[tuple[int, str]]) -> tuple[Reduction, RoundResult]:
    grid = ChunkGrid(2 * CHUNK, CHUNK)

    def own(chunk: int) -> np.ndarray:
        lo, hi = grid.bounds(chunk)
        return GIVEN[lo:hi]

    def copy(chunk: int, out: np.ndarray) -> None:
        np.copyto(out, own(chunk))

    result = RoundResult(get_codec("float32"), grid)
    reduction = Reduction(
        plan=PLAN,
        me=0,
        contribution=Contribution(copy, own),
        result=result,
        on_done=lambda digests: None,
        on_failed=lambda index, why: failed.append((index, why)),
    )
    return reduction, result


@pytest.mark.parametrize("wrong", [False, True])
def test_a_part_that_comes_back_changed_is_seen_where_it_came_from(*, wrong: bool) -> None:
    failed: list[tuple[int, str]] = []
    reduction, result = given_by_a(failed)
    handed = GIVEN[CHUNK:].copy()
    handed[3] += float(wrong)
    frame = Frame(2, FrameKind.RESULT, 1)
    buffer = reduction.reserve(frame, handed.nbytes, 1.0)
    assert buffer is not None
    buffer[:] = handed.view(np.uint8).data
    reduction.received(frame)
    assert bool(result.digests[1]) is not wrong
    assert failed == ([(2, "its result of chunk 1 is not what was given")] if wrong else [])
    reduction.abort()
    assert reduction.join(1.0)
