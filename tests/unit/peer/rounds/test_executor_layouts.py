"""Rounds along every shape that a BEGIN may ask for, over real streams: the same mean everywhere,
and a broken attempt goes on as a butterfly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness.runner_sites import Site, begin_of, eventually, prepare, scenario

from atoll.peer.membership import events as ev
from atoll.peer.membership.kept_chunks import Kept, pack_kept
from atoll.peer.membership.layout import Layout
from atoll.peer.membership.messages import Begin
from atoll.peer.rounds.entries import EntryOrigin

ELEMENTS = 400_000
LAYOUTS = [
    Layout("butterfly", (3, 0, 1, 2)),
    Layout("ring", (1, 1, 1, 1), (2, 0, 3, 1)),
    Layout("tree", (0, 1, 0, 0), arity=2),
    Layout("tree", (1, 1, 1, 1), arity=1),
    Layout("hierarchical", (1, 2, 1, 2), (0, 1, 1, 0)),
]


def mean_of(sites: list[Site]) -> np.ndarray:
    """What the submissions make of the state, in float32 and any order of adding."""
    return np.mean([site.inputs for site in sites], axis=0, dtype=np.float64)


async def reduce(sites: list[Site], begin: Begin) -> None:
    for site in sites:
        site.carry_out(ev.Reduce(begin))
    await eventually(lambda: all(site.reduced(begin.attempt, begin.round) for site in sites))
    assert len({site.reduced(begin.attempt, begin.round) for site in sites}) == 1


async def apply(sites: list[Site], begin: Begin) -> None:
    for site in sites:
        site.carry_out(ev.Apply(begin, b"c" * 32))
    await eventually(lambda: all(site.applied(begin.round) for site in sites))
    assert len({site.state.digest for site in sites}) == 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.kind} {layout.arity}")
def test_every_shape_gives_all_the_same_mean(layout: Layout, tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, "float32")
        expected = mean_of(sites)
        begin = replace(begin_of(sites, 1), layout=layout)
        await reduce(sites, begin)
        await apply(sites, begin)
        np.testing.assert_allclose(sites[0].state.theta, expected, rtol=0, atol=2e-6)
        assert all(site.executor.layout == layout for site in sites)
        sends_to = {
            site.me: sum(not stream.closed for _, stream in site.executor.streams.outgoing())
            for site in sites
        }
        if layout.kind == "ring":  # each has one neighbour that it sends to
            assert set(sends_to.values()) == {1}

    scenario(tmp_path, "abcd", play)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.kind} {layout.arity}")
def test_a_broken_attempt_goes_on_as_a_butterfly_with_what_was_finished(
    layout: Layout, tmp_path: Path
) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, "float32")
        *left, gone = sites
        first = replace(begin_of(sites, 1), layout=layout)
        for site in left:  # the last one never begins: nothing that it takes part in gets final
            site.carry_out(ev.Reduce(first))
        await eventually(lambda: all(site.executor.attempts.at(2, 1) for site in left))
        for site in left:
            site.carry_out(ev.ListFinal(2, 1))
        await eventually(lambda: all(site.finals(1) is not None for site in left))
        again = replace(begin_of(left, 2), past=(), layout=Layout("butterfly", layout.shares[:3]))
        await reduce(left, again)
        await apply(left, again)
        np.testing.assert_allclose(left[0].state.theta, mean_of(left), rtol=0, atol=2e-6)
        assert gone.state.round == 1

    scenario(tmp_path, "abcd", play)


def test_chunks_of_a_ring_are_kept_by_a_butterfly(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, "float32")
        before = mean_of(sites)
        ring = replace(begin_of(sites, 1), layout=LAYOUTS[1])
        await reduce(sites, ring)
        for site in sites:
            site.carry_out(ev.ListFinal(2, 1))
        await eventually(lambda: all(site.finals(1) for site in sites))
        digests = sites[0].finals(1)
        assert digests is not None
        kept = [Kept(chunk, 1, digests[32 * chunk :][:32], (0, 1, 2)) for chunk in range(0, 9, 2)]
        left = sites[:3]
        again = replace(
            begin_of(left, 2),
            past=(EntryOrigin(ring.participants, ring.weights),),
            kept=pack_kept(kept),
            layout=Layout("butterfly", (2, 0, 1)),
        )
        await reduce(left, again)
        await apply(left, again)
        grid, after = left[0].state.grid, mean_of(left)
        for chunk in range(grid.count):
            lo, hi = grid.bounds(chunk)
            expected = before if chunk % 2 == 0 and chunk < 9 else after
            np.testing.assert_allclose(
                left[0].state.theta[lo:hi], expected[lo:hi], rtol=0, atol=2e-6
            )

    scenario(tmp_path, "abcd", play)


def test_a_layout_of_another_number_fails_the_attempt_and_nothing_else(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, "float32")
        begin = begin_of(sites, 1)
        wrong = replace(begin)
        object.__setattr__(wrong, "layout", Layout("butterfly", (1, 1, 1)))  # no decoder lets it in
        sites[0].carry_out(ev.Reduce(wrong))
        await eventually(lambda: any(isinstance(e, ev.ReduceFailed) for e in sites[0].fed))
        await reduce(sites, replace(begin, attempt=2))

    scenario(tmp_path, "ab", play)


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_two_that_exchange_everything_find_what_a_butterfly_finds(
    codec: str, tmp_path: Path
) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, codec)
        roots = []
        for attempt, layout in enumerate((None, Layout("pairwise", (1, 1))), 1):
            begin = replace(begin_of(sites, attempt), layout=layout)
            await reduce(sites, begin)
            roots.append(sites[0].reduced(attempt, begin.round))
        assert roots[0] == roots[1]
        await apply(sites, begin)

    scenario(tmp_path, "ab", play)


def test_what_was_finished_pairwise_is_kept_when_the_other_is_gone(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, "float32")
        a, b = sites
        both = mean_of(sites)
        await reduce(sites, replace(begin_of(sites, 1), layout=Layout("pairwise", (1, 1))))
        a.carry_out(ev.ListFinal(2, 1))
        await eventually(lambda: a.finals(1) is not None)
        digests = a.finals(1)
        assert digests is not None
        kept = [Kept(chunk, 1, digests[32 * chunk :][:32], (0,)) for chunk in (0, 1)]
        begin = replace(
            begin_of([a], 2),
            past=(EntryOrigin((a.me, b.me), (1.0, 1.0)),),
            kept=pack_kept(kept),
        )
        await reduce([a], begin)
        await apply([a], begin)
        edge = a.state.grid.bounds(1)[1]
        np.testing.assert_allclose(a.state.theta[:edge], both[:edge], rtol=0, atol=2e-6)
        np.testing.assert_allclose(a.state.theta[edge:], a.inputs[edge:], rtol=0, atol=2e-6)

    scenario(tmp_path, "ab", play)
