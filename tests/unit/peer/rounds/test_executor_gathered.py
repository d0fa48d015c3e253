"""Gathered rounds and error feedback over real TLS links, against the arithmetic of a swarm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness.runner_sites import (
    LINEAGE,
    Site,
    begin_of,
    eventually,
    prepare,
    scenario,
)

from atoll.collectives.codecs import F32
from atoll.optim.swarm_state import SwarmState, SwarmSubmission
from atoll.peer.membership import events as ev
from atoll.peer.membership.kept_chunks import Kept, pack_kept
from atoll.peer.membership.layout import Layout
from atoll.peer.membership.messages import STEP, Begin, EntryOrigin

ELEMENTS = 60_000
CHAIN = b"c" * 32
SPARSE = {"codec": "topk", "aggregate": "senders", "error_feedback": 0.95}


class Truth:
    """The same rounds in one process. Workers are the sites, in order of peer id."""

    def __init__(self, sites: list[Site]) -> None:
        self.sites, state = sites, sites[0].state
        self.state = SwarmState(
            state.spec, state.manifest, lambda flat: np.copyto(flat, state.theta)
        )

    def commit(self, weights: dict[int, float], fragment: int = 0) -> None:
        """Of the sites that are named by their numbers."""
        given = [
            SwarmSubmission(n, self.sites[n].inputs.copy(), w) for n, w in sorted(weights.items())
        ]
        self.state.commit(given, fragment)

    def kept(self, number: int) -> F32:
        feedback = self.state._feedback.get(number)
        return feedback.arrays["residual"] if feedback else np.zeros(ELEMENTS, np.float32)

    def check(self, sites: list[Site]) -> None:
        for site in sites:
            assert site.state.theta.tobytes() == self.state.theta.tobytes()
            assert kept_of(site).tobytes() == self.kept(self.sites.index(site)).tobytes()


def kept_of(site: Site) -> F32:
    feedback = site.executor.replica.residual.feedback
    if feedback is None:
        return np.zeros(site.state.grid.total, np.float32)
    assert np.isfinite(feedback.arrays["residual"]).all()
    return feedback.arrays["residual"]


def submit(sites: list[Site], seed: int) -> None:
    """What trainers hand in next: some way from where the run is."""
    for number, site in enumerate(sites):
        random = np.random.default_rng(100 * seed + number)
        away = random.standard_normal(site.state.grid.total).astype(np.float32)
        site.executor.replica.inputs = site.state.theta - away


def weighted(sites: list[Site], attempt: int, number: int, weights: tuple[float, ...]) -> Begin:
    return replace(begin_of(sites, attempt, number), weights=weights)


async def reduce(sites: list[Site], begin: Begin) -> None:
    for site in sites:
        site.carry_out(ev.Reduce(begin))
    await eventually(lambda: all(site.reduced(begin.attempt, begin.round) for site in sites))
    assert len({site.reduced(begin.attempt, begin.round) for site in sites}) == 1


async def whole_round(sites: list[Site], begin: Begin) -> None:
    await reduce(sites, begin)
    await apply(sites, begin)


async def apply(sites: list[Site], begin: Begin) -> None:
    for site in sites:
        site.carry_out(ev.Apply(begin, CHAIN))
    await eventually(lambda: all(site.applied(begin.round) for site in sites))
    assert len({site.state.digest for site in sites}) == 1


@pytest.mark.parametrize(
    "options",
    [
        SPARSE,
        SPARSE | {"aggregate": "all"},
        {"codec": "int4", "aggregate": "mean", "error_feedback": 0.9},
        {"codec": "int8", "aggregate": "all"},  # of four, the aggregate is sent as float32
    ],
    ids=["senders", "all", "mean", "float32"],
)
def test_rounds_give_the_bits_of_a_swarm(tmp_path: Path, options: dict[str, str | float]) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, **options)  # type: ignore[arg-type]
        truth = Truth(sites)
        for number, weights in (
            (2, (1.0, 2.0, 1.0, 3.0)),
            (3, (1.0, 0.0, 1.0, 2.0)),
            (4, (1.0,) * 4),
        ):
            submit(sites, number)
            truth.commit(dict(enumerate(weights)))
            begin = weighted(sites, 1, number, weights)
            await whole_round(sites, begin)
            truth.check(sites)
        assert kept_of(sites[0]).any() == ("error_feedback" in options)

    scenario(tmp_path, "abcd", play)


def test_a_death_in_the_middle_begins_the_round_anew(tmp_path: Path) -> None:
    """Nothing is kept of the broken attempt: the next one has other slots. Who is not in it keeps
    its memory as it was."""

    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, **SPARSE)  # type: ignore[arg-type]
        truth = Truth(sites)
        submit(sites, 1)
        truth.commit(dict.fromkeys(range(4), 1.0))
        await whole_round(sites, begin_of(sites, 1))
        before = kept_of(sites[3]).copy()

        submit(sites, 2)
        *left, gone = sites
        broken = begin_of(sites, 1, 3)
        for site in left:  # the last one never begins
            site.carry_out(ev.Reduce(broken))
        await eventually(lambda: all(site.executor.attempts.at(3, 1) for site in left))
        for site in left:
            site.carry_out(ev.ListFinal(3, 1))
        await eventually(lambda: all(site.finals(1) is not None for site in left))
        assert {site.finals(1) for site in left} == {b""}
        truth.check(left)
        again = begin_of(left, 2, 3)
        truth.commit(dict.fromkeys(range(3), 1.0))
        await reduce(left, again)
        gone.carry_out(ev.Fetch(again, left[0].me))
        await eventually(lambda: gone.reduced(2, 3))
        await apply(sites, again)
        truth.check(sites)
        assert kept_of(gone).tobytes() == before.tobytes()
        assert before.any()

    scenario(tmp_path, "abcd", play)


def test_who_fetches_what_it_took_part_in_keeps_what_it_left_out(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, **SPARSE)  # type: ignore[arg-type]
        truth = Truth(sites)
        submit(sites, 1)
        truth.commit(dict.fromkeys(range(3), 1.0))
        begin = begin_of(sites, 1)
        await reduce(sites, begin)
        repaired = sites[1].executor.attempts
        run = repaired.get(2)
        assert run is not None
        run.root = b""  # as if its last chunk had not come
        run.result.digests[-1] = b""
        sites[1].fed.clear()
        sites[1].carry_out(ev.Fetch(begin, sites[0].me))
        await eventually(lambda: sites[1].reduced(1))
        assert repaired.get(2) is not run
        await apply(sites, begin)
        truth.check(sites)
        assert kept_of(sites[1]).any()

    scenario(tmp_path, "abc", play)


def test_rounds_of_two_fragments_in_flight_move_their_own_parts(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, fragments=2, **SPARSE)  # type: ignore[arg-type]
        truth = Truth(sites)
        for first in (2, 4, 6):
            submit(sites, first)
            begins = [replace(begin_of(sites, 1, first + f), fragment=f) for f in (0, 1)]
            for site in sites:
                for begin in begins:
                    site.carry_out(ev.Reduce(begin))
            for begin in begins:
                number = begin.round
                await eventually(lambda n=number: all(site.reduced(1, n) for site in sites))
            for begin in begins:
                truth.commit({0: 1.0, 1: 1.0}, begin.fragment)
                await apply(sites, begin)
            truth.check(sites)

    scenario(tmp_path, "ab", play)


def test_a_mean_moves_only_the_chunks_that_have_our_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where results are means, chunks of a broken attempt are kept. Who joins the next one is not
    in them; who drops out of it counts as missed, and leaves its memory alone."""
    monkeypatch.setattr("atoll.collectives.schedule.tree.SPREAD_CHUNKS", 1_000_000)
    monkeypatch.setattr("atoll.collectives.schedule.schedule.LEAD_CHUNKS_MIN", 1_000_000)

    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, "int4", aggregate="mean", error_feedback=0.9)
        submit(sites, 1)
        first, second, absent, late = sites
        begin = weighted(sites[:3], 1, 2, (1.0, 1.0, 0.0))
        for site in (first, second):
            site.carry_out(ev.Reduce(begin))
        grid = first.state.grid
        owned = {c for c in range(grid.count) if c * 3 // grid.count < 2}
        tables = (first.executor.attempts, second.executor.attempts)
        await eventually(lambda: all(table.get(2) for table in tables))
        results = [run.result for table in tables if (run := table.get(2)) is not None]
        await eventually(lambda: all(r.digests[c] for r in results for c in owned))
        for site in (first, second):
            site.carry_out(ev.ListFinal(2, 1))
        await eventually(lambda: first.finals(1) and second.finals(1))
        kept = [Kept(c, 1, results[0].digests[c], (0, 1)) for c in sorted(owned)]
        again = Begin(
            LINEAGE,
            1,
            2,
            2,
            STEP,
            (first.me, late.me),
            (1.0, 1.0),
            past=(EntryOrigin(begin.participants, begin.weights),),
            kept=pack_kept(kept),
        )
        await reduce([first, late], again)
        for site in (second, absent):
            site.carry_out(ev.Fetch(again, first.me))
        await eventually(lambda: second.reduced(2) and absent.reduced(2))
        await apply(sites, again)
        moved = {
            site: {c for c in range(grid.count) if kept_of(site)[slice(*grid.bounds(c))].any()}
            for site in sites
        }
        everything = set(range(grid.count))
        assert moved == {first: everything, late: everything - owned, second: set(), absent: set()}

    scenario(tmp_path, "abcd", play)


def test_who_loads_another_state_begins_without_memory_and_says_so_once(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, **SPARSE)  # type: ignore[arg-type]
        [site] = sites
        for number in (2, 3):
            submit(sites, number)
            await whole_round(sites, begin_of(sites, 1, number))
        assert kept_of(site).any()
        for _ in range(2):
            site.executor.adopt(site.state, 3, CHAIN)
            await eventually(lambda: isinstance(site.fed[-1], ev.CaughtUp))
        assert not kept_of(site).any()
        said = [line for line in site.logs if "error feedback forgets" in line]
        assert len(said) == 1
        assert "2 rounds" in said[0]
        submit(sites, 9)
        truth = Truth(sites)
        truth.commit({0: 1.0})
        site.fed.clear()
        await whole_round(sites, begin_of(sites, 1, site.state.round + 1))
        truth.check(sites)

    scenario(tmp_path, "a", play)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_fails_here_and_leaves_the_memory_alone(
    tmp_path: Path, bad: float
) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, **SPARSE)  # type: ignore[arg-type]
        truth = Truth(sites)
        submit(sites, 1)
        truth.commit({0: 1.0, 1: 1.0})
        await whole_round(sites, begin_of(sites, 1))
        submit(sites, 2)
        sites[1].inputs[17] = bad
        for site in sites:
            site.fed.clear()
            site.carry_out(ev.Reduce(begin_of(sites, 1, 3)))
        await eventually(lambda: sites[1].fed)
        failed = sites[1].fed[0]
        assert isinstance(failed, ev.ReduceFailed)
        assert failed.peers == ()
        for site in sites:
            site.carry_out(ev.Abort(3, 1))
        truth.check(sites)
        truth.commit({0: 1.0})
        await whole_round(sites[:1], begin_of(sites[:1], 2, 3))
        truth.check(sites[:1])

    scenario(tmp_path, "ab", play)


RING = Layout("ring", (1, 1, 1), (0, 1, 2))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (SPARSE, "kept"),
        (SPARSE, "layout"),
        ({"codec": "int8", "aggregate": "all"}, "layout"),
        ({"codec": "int4", "error_feedback": 0.9}, "layout"),  # not all parts are sent as encoded
    ],
)
def test_a_begin_that_cannot_be_of_such_a_round_is_refused(
    tmp_path: Path, options: dict[str, str | float], what: str
) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, **options)  # type: ignore[arg-type]
        begin = begin_of(sites, 1)
        if what == "layout":
            begin = replace(begin, layout=RING)
        else:
            past = (EntryOrigin(begin.participants, begin.weights),)
            begin = replace(begin, past=past, kept=pack_kept([Kept(0, 1, b"d" * 32, (0,))]))
        for site in sites:
            site.carry_out(ev.Reduce(begin))
        await eventually(lambda: all(site.fed for site in sites))
        for site in sites:
            assert isinstance(site.fed[0], ev.ReduceFailed)
            assert site.fed[0].peers == ()
            assert ("butterfly" if what == "layout" else "other slots") in site.fed[0].why

    scenario(tmp_path, "abc", play)
