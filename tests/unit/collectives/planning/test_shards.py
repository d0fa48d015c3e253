"""Shards by rate: against every split of a few chunks, and against what the theory says."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.collectives.planning.network_model import Network, measured
from atoll.collectives.planning.shards import butterfly_shards, equal_shards, water_level

rates = st.lists(st.integers(1, 50), min_size=3, max_size=5)


def network_of(up: list[float], down: list[float]) -> Network:
    return measured(len(up), up=up, down=down, sites=range(len(up)))


def times(network: Network, shards: tuple[int, ...]) -> list[float]:
    """Bytes over rates, counted as they cross: the slowest first."""
    n, found = network.count, []
    for peer in range(n):
        parts_out = sum(shards) - shards[peer]
        results_out = (n - 1) * shards[peer]
        parts_in = (n - 1) * shards[peer]
        results_in = sum(shards) - shards[peer]
        found.append((parts_out + results_out) / network.up[peer])
        found.append((parts_in + results_in) / network.down[peer])
    return sorted(map(float, found), reverse=True)


def splits(chunks: int, n: int) -> Iterator[tuple[int, ...]]:
    for bars in itertools.combinations(range(chunks + n - 1), n - 1):
        edges = (-1, *bars, chunks + n - 1)
        yield tuple(b - a - 1 for a, b in itertools.pairwise(edges))


@settings(max_examples=50)
@given(up=rates, data=st.data(), chunks=st.integers(0, 7))
def test_no_split_of_the_chunks_is_faster(up: list[int], data: st.DataObject, chunks: int) -> None:
    down = data.draw(st.lists(st.integers(1, 50), min_size=len(up), max_size=len(up)))
    network = network_of([rate * 1e5 for rate in up], [rate * 1e5 for rate in down])
    shards = butterfly_shards(network, chunks)
    assert sum(shards) == chunks
    assert min(shards) >= 0
    best = min(times(network, split)[0] for split in splits(chunks, len(up)))
    assert times(network, shards)[0] == pytest.approx(best)


def test_one_of_four_at_20_mbit_owns_nothing_and_no_split_is_faster() -> None:
    """The worked example of the module; rates in chunks per second."""
    network = network_of([1e8, 1e8, 1e8, 2e7], [1e8, 1e8, 1e8, 2e7])
    assert water_level([1e8, 1e8, 1e8, 2e7], 4) == pytest.approx(5 / 3e8)
    shards = butterfly_shards(network, 12)
    assert shards == (4, 4, 4, 0)
    every = {split: times(network, split) for split in splits(12, 4)}
    assert min(every.values()) == every[shards]  # also the second slowest and so on
    assert every[shards][0] == pytest.approx(12 / 2e7)  # what it has to send in any collective
    assert times(network, equal_shards(4, 12))[0] == pytest.approx(1.5 * 12 / 2e7)


def test_what_64_mib_take_there() -> None:
    network = network_of([12.5e6] * 3 + [2.5e6], [12.5e6] * 3 + [2.5e6])
    shards = butterfly_shards(network, 256)
    assert shards == (86, 85, 85, 0)
    seconds = times(network, shards)[0] * 2**18
    assert seconds == pytest.approx(64 * 2**20 * 8 / 20e6)
    assert seconds == pytest.approx(26.84, abs=0.01)


def test_a_slow_downlink_counts_like_a_slow_uplink() -> None:
    assert butterfly_shards(network_of([1e8] * 4, [1e8, 1e8, 1e8, 2e7]), 12) == (4, 4, 4, 0)
    assert butterfly_shards(network_of([1e8, 2e7, 1e8, 1e8], [1e8] * 4), 12) == (4, 0, 4, 4)


def test_a_little_slower_owns_a_little_less() -> None:
    fast, slow = 1e8, 8e7
    shards = butterfly_shards(network_of([fast] * 3 + [slow], [fast] * 3 + [slow]), 3800)
    # T = 6 / 380, so (T r - 1) / 2 of each: 0.28947 and 0.13158
    assert shards == (1100, 1100, 1100, 500)


@given(n=st.integers(1, 40), chunks=st.integers(0, 5000))
def test_equal_links_share_equally(n: int, chunks: int) -> None:
    shards = butterfly_shards(network_of([1e6] * n, [1e6] * n), chunks)
    assert sum(shards) == chunks
    assert max(shards) - min(shards) <= 1


def test_the_ends_of_a_slow_path_own_little() -> None:
    network = measured(6, up=[1e7] * 6, down=[1e7] * 6, pair={(1, 4): 1e5}, sites=range(6))
    shards = butterfly_shards(network, 120)
    assert shards[1] == shards[4]
    assert shards[1] < shards[0] / 10
    assert sum(shards) == 120


@given(st.lists(st.floats(1e3, 1e11), min_size=3, max_size=60))
def test_shares_under_the_water_add_up_to_one(found: list[float]) -> None:
    level, n = water_level(found, len(found)), len(found)
    assert math.fsum(max(0.0, (level * r - 1) / (n - 2)) for r in found) == pytest.approx(1)


def test_many_chunks_are_shared_out_at_once() -> None:
    up = [1e6 * (1 + i % 7) for i in range(96)]
    shards = butterfly_shards(network_of(up, up), 4_000_000)
    assert sum(shards) == 4_000_000
    assert [s == 0 for s in shards] == [
        s == 0 for s in butterfly_shards(network_of(up, up), 40_000)
    ]


def test_impossible_splits_are_refused() -> None:
    with pytest.raises(ConfigError):
        equal_shards(0, 3)
    with pytest.raises(ConfigError):
        butterfly_shards(network_of([1e6] * 3, [1e6] * 3), -1)


@settings(max_examples=50)
@given(rates=rates, data=st.data(), chunks=st.integers(1, 7))
def test_of_some_owners_no_split_is_faster(
    rates: list[int], data: st.DataObject, chunks: int
) -> None:
    n = len(rates)
    owners = data.draw(st.lists(st.integers(0, n - 1), min_size=1, unique=True).map(sorted))
    network = network_of([rate * 1e5 for rate in rates], [rate * 1e5 for rate in rates])
    shards = butterfly_shards(network, chunks, owners)
    assert sum(shards) == chunks
    assert all(not shards[peer] for peer in range(n) if peer not in owners)
    allowed = [s for s in splits(chunks, n) if not any(s[p] for p in range(n) if p not in owners)]
    best = min(times(network, split)[0] for split in allowed)
    assert times(network, shards)[0] == pytest.approx(best)
