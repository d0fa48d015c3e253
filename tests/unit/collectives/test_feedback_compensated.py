"""A part with error feedback: what it gives the engine, and what its commit keeps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from harness.roundtrip import decoded, draw, encoded
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives import ChunkGrid, RoundResult
from atoll.collectives.codecs import F32, Decoder, gathered_codec, get_codec, mean_codec
from atoll.collectives.engine.reference import reduce_together
from atoll.collectives.feedback import Compensated, ResidualFeedback

TOPK, INT4 = get_codec("topk"), get_codec("int4")
GRID = ChunkGrid(2500, 1024)
DECAY = 0.95


def source_of(values: F32) -> Callable[[int, F32], None]:
    def fill(chunk: int, out: F32) -> None:
        out[:] = values[slice(*GRID.bounds(chunk))]

    return fill


class Peers:
    """Some peers with error feedback, over a vector of which GRID is the part from ``first`` on."""

    def __init__(self, count: int, name: str, decay: float = DECAY, first: int = 0) -> None:
        self.codec, self.first = get_codec(name), first
        total = first + GRID.total + 100
        self.feedback = [ResidualFeedback(self.codec, total, decay) for _ in range(count)]

    def sources(self, values: list[F32]) -> list[Compensated]:
        pairs = zip(values, self.feedback, strict=True)
        return [Compensated(source_of(v), f, GRID, self.first) for v, f in pairs]

    def kept(self, peer: int) -> F32:
        return self.feedback[peer].arrays["residual"]


def values_of(count: int, seed: int) -> list[F32]:
    return [draw("student_t3", GRID.total, 100 * seed + p) for p in range(count)]


def result_codec(name: str, weights: tuple[float, ...], aggregate: str) -> Decoder:
    if aggregate == "mean":
        return mean_codec(name)
    return gathered_codec(get_codec(name), weights, aggregate)


def sent(name: str, message: F32) -> F32:
    """What the others decode, chunk by chunk."""
    codec, parts = get_codec(name), []
    for chunk in range(GRID.count):
        part = message[slice(*GRID.bounds(chunk))]
        parts.append(decoded(codec, encoded(codec, part), part.size))
    return np.concatenate(parts)


@pytest.mark.parametrize("aggregate", ["mean", "all", "senders"])
@pytest.mark.parametrize(
    ("name", "peers"),
    [("topk", 3), ("int4", 3), ("int4", 9), ("int2", 3), ("sign", 2), ("float32", 2)],
)
def test_what_was_sent_plus_what_is_kept_is_what_came_in(
    name: str, peers: int, aggregate: str
) -> None:
    """Invariant 8, and acceptance test 7; in slots and out of them."""
    weights = (1.0,) * peers
    group = Peers(peers, name, first=300)
    whole = slice(300, 300 + GRID.total)
    for number in range(6):
        values = values_of(peers, number)
        messages = [np.float32(DECAY) * group.kept(p)[whole] + values[p] for p in range(peers)]
        sources = group.sources(values)
        codec = result_codec(name, weights, aggregate)
        result = reduce_together(codec, GRID, weights, sources)
        for peer, source in enumerate(sources):
            source.commit(result, peer, range(GRID.count))
            expected = messages[peer] - sent(name, messages[peer])
            assert group.kept(peer)[whole].tobytes() == expected.tobytes()
            assert not group.kept(peer)[:300].any()
            assert not group.kept(peer)[whole.stop :].any()
    if name == "float32":
        assert not any(group.kept(peer).any() for peer in range(peers))


def test_only_chunks_that_contain_the_part_move() -> None:
    group, values = Peers(2, "topk"), values_of(2, 1)
    [mine, _] = sources = group.sources(values)
    result = reduce_together(gathered_codec(TOPK, (1.0, 1.0), "all"), GRID, [1.0, 1.0], sources)
    mine.commit(result, 0, [1])
    lo, hi = GRID.bounds(1)
    assert group.kept(0)[lo:hi].any()
    assert not group.kept(0)[:lo].any()
    assert not group.kept(0)[hi:].any()
    assert not group.kept(1).any()


def test_an_attempt_that_breaks_changes_nothing_and_the_next_gives_the_same() -> None:
    group, values = Peers(2, "topk"), values_of(2, 1)
    weights = [1.0, 2.0]
    whole = gathered_codec(TOPK, (1.0, 2.0), "senders")
    first = reduce_together(whole, GRID, weights, group.sources(values))
    assert not any(group.kept(peer).any() for peer in range(2))
    again = reduce_together(whole, GRID, weights, group.sources(values))
    assert again.array.tobytes() == first.array.tobytes()


def test_slots_and_encoding_again_keep_the_same() -> None:
    """The bytes that a result has of us are those that we would encode again."""
    kept = []
    for aggregate in ("mean", "all"):
        group = Peers(2, "int4")
        for number in range(3):
            sources = group.sources(values_of(2, number))
            codec = result_codec("int4", (1.0, 1.0), aggregate)
            result = reduce_together(codec, GRID, [1.0, 1.0], sources)
            for peer, source in enumerate(sources):
                source.commit(result, peer, range(GRID.count))
        kept.append([group.kept(peer).tobytes() for peer in range(2)])
    assert kept[0] == kept[1]


def test_what_the_result_has_of_us_counts() -> None:
    """An owner that changed it has changed what everybody applied."""
    group, values = Peers(1, "int4"), values_of(1, 3)
    [source] = group.sources(values)
    whole = gathered_codec(INT4, (1.0,), "all")
    result = reduce_together(whole, GRID, [1.0], [source])
    zeros = encoded(INT4, np.zeros(GRID.size(0), np.float32))
    result.view(0)[:] = zeros
    source.commit(result, 0, range(GRID.count))
    lo, hi = GRID.bounds(0)
    assert group.kept(0)[lo:hi].tobytes() == values[0][lo:hi].tobytes()


def test_nothing_that_is_not_finite_is_kept() -> None:
    group = Peers(1, "topk")
    largest = float(np.finfo(np.float32).max)
    values = np.zeros(GRID.total, np.float32)
    values[:3] = largest, -largest, np.nan
    feedback = group.feedback[0]
    lo, hi = GRID.bounds(0)
    data = encoded(TOPK, np.zeros(hi - lo, np.float32))
    feedback.commit(0, values[lo:hi], data)
    assert not group.kept(0).any()
    opposite = encoded(TOPK, np.full(hi - lo, -largest, np.float32))
    feedback.commit(0, np.full(hi - lo, largest, np.float32), opposite)
    assert np.isfinite(group.kept(0)).all()


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(0, 50))
def test_memory_is_that_of_the_committed_rounds(committed: list[bool], seed: int) -> None:
    tried, clean = Peers(1, "topk"), Peers(1, "topk")
    whole = gathered_codec(TOPK, (1.0,), "senders")
    for number, commits in enumerate(committed):
        values = values_of(1, seed + number)
        [source] = tried.sources(values)
        result: RoundResult = reduce_together(whole, GRID, [1.0], [source])
        if commits:
            source.commit(result, 0, range(GRID.count))
            [other] = clean.sources(values)
            other.commit(reduce_together(whole, GRID, [1.0], [other]), 0, range(GRID.count))
    assert tried.kept(0).tobytes() == clean.kept(0).tobytes()
