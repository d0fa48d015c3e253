"""The plan of a reduction: order, weights, owners."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.chunks import ChunkGrid
from atoll.collectives.errors import ConfigError
from atoll.collectives.schedule.plan import (
    EVERYONE,
    NOBODY,
    ReducePlan,
    butterfly_plan,
    pairwise_plan,
)

GOOD: dict[str, Any] = {"participants": (b"a", b"b"), "weights": (1.0, 2.0), "owners": (0, 1, 1)}


@given(
    peers=st.dictionaries(st.binary(min_size=32, max_size=32), st.floats(0, 1e6), min_size=1),
    chunks=st.integers(1, 200),
)
def test_shards_are_contiguous_and_near_equal(peers: dict[bytes, float], chunks: int) -> None:
    if not sum(peers.values()):
        peers[next(iter(peers))] = 1.0
    plan = butterfly_plan(list(peers), list(peers.values()), ChunkGrid(256 * chunks, 256))
    assert plan.participants == tuple(sorted(peers))
    assert plan.weights == tuple(peers[peer] for peer in sorted(peers))
    assert list(plan.owners) == sorted(plan.owners)
    sizes = np.bincount(plan.owners, minlength=len(peers))
    assert sizes.sum() == chunks
    assert sizes.max() - sizes.min() <= 1


@given(st.lists(st.floats(0, 1e30), min_size=1, max_size=20).filter(sum))
def test_factors_are_float32_and_sum_to_one(weights: list[float]) -> None:
    participants = tuple(bytes([index]) for index in range(len(weights)))
    factors = ReducePlan(participants, tuple(weights), (0,)).factors()
    assert math.fsum(factors) == pytest.approx(1, rel=1e-6)
    assert all(factor == np.float32(factor) for factor in factors)


def test_equal_weights_give_equal_factors_and_one_weight_gives_one() -> None:
    assert ReducePlan((b"a", b"b", b"c"), (7, 7, 7), ()).factors() == (np.float32(1 / 3),) * 3
    assert ReducePlan((b"a", b"b"), (0, 5), ()).factors() == (0, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"participants": ()},
        {"participants": (b"b", b"a")},
        {"participants": (b"a", b"a")},
        {"weights": (1.0,)},
        {"weights": (0.0, 0.0)},
        {"weights": (1.0, -1.0)},
        {"weights": (1.0, math.nan)},
        {"weights": (1e308, 1e308)},
        {"owners": (0, 2)},
        {"owners": (-3,)},
        {"owners": (EVERYONE, 0)},
        {"participants": (b"a", b"b", b"c"), "weights": (1.0,) * 3, "owners": (EVERYONE,)},
    ],
    ids=str,
)
def test_impossible_plans_are_refused(change: dict[str, Any]) -> None:
    ReducePlan(**GOOD)
    with pytest.raises(ConfigError):
        ReducePlan(**{**GOOD, **change})


def test_as_many_weights_as_participants() -> None:
    with pytest.raises(ConfigError, match="2 participants, but 1 weights"):
        butterfly_plan([b"a", b"b"], [1.0], ChunkGrid(256, 256))


@given(peers=st.integers(1, 9), chunks=st.integers(1, 60), data=st.data())
def test_kept_chunks_have_no_owner_and_the_others_are_shared_out(
    peers: int, chunks: int, data: st.DataObject
) -> None:
    kept = data.draw(st.sets(st.integers(0, chunks - 1)))
    ids = [bytes([index]) for index in range(peers)]
    plan = butterfly_plan(ids, [1.0] * peers, ChunkGrid(256 * chunks, 256), kept)
    assert {chunk for chunk, owner in enumerate(plan.owners) if owner == NOBODY} == kept
    owners = [owner for owner in plan.owners if owner != NOBODY]
    assert owners == sorted(owners)
    sizes = np.bincount(owners, minlength=peers) if owners else np.zeros(1)
    assert sizes.max() - sizes.min() <= 1


@given(peers=st.integers(1, 2), chunks=st.integers(1, 20), data=st.data())
def test_in_a_pairwise_plan_everyone_owns_what_is_not_kept(
    peers: int, chunks: int, data: st.DataObject
) -> None:
    kept = data.draw(st.sets(st.integers(0, chunks - 1)))
    ids = [bytes([index]) for index in reversed(range(peers))]
    plan = pairwise_plan(ids, [1.0, 2.0][:peers], ChunkGrid(256 * chunks, 256), kept)
    assert plan.participants == tuple(sorted(ids))
    assert plan.weights == (2.0, 1.0)[-peers:]
    assert {chunk for chunk, owner in enumerate(plan.owners) if owner == NOBODY} == kept
    assert plan.is_pairwise == (len(kept) < chunks)
    assert set(plan.owners) <= {NOBODY, EVERYONE}
