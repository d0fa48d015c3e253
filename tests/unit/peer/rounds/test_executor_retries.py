"""Retries that keep finished chunks, and several rounds at once, over real TLS links."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from harness.plainstate import head_of
from harness.runner_sites import (
    LINEAGE,
    Site,
    begin_of,
    eventually,
    mean_by_hand,
    prepare,
    scenario,
)

from atoll.collectives.digests import strong_digest
from atoll.optim.pseudo_gradient import encode_submission, submission_floats
from atoll.peer.membership import events as ev
from atoll.peer.membership.kept_chunks import Kept, pack_kept
from atoll.peer.membership.messages import STEP, Begin, EntryOrigin
from atoll.peer.rounds.entries import entry_chain, entry_root

CHAIN = b"c" * 32
ELEMENTS = 70_000
NOT_FINAL = bytes(32)


@pytest.fixture(autouse=True)
def contributions_wait_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules 2 and 3 of the schedule keep what a death costs small: they would stop the attempts
    here, in which somebody never takes part, with next to nothing final."""
    monkeypatch.setattr("atoll.collectives.schedule.tree.SPREAD_CHUNKS", 1_000_000)
    monkeypatch.setattr("atoll.collectives.schedule.schedule.LEAD_CHUNKS_MIN", 1_000_000)


async def first_attempt(sites: list[Site], absent: Site, weights: tuple[float, ...]) -> Begin:
    """An attempt of which ``absent``, with weight 0, never hears: what the others own is final."""
    begin = Begin(LINEAGE, 1, 2, 1, STEP, tuple(site.me for site in sites), weights)
    present = [site for site in sites if site is not absent]
    for site in present:
        site.carry_out(ev.Reduce(begin))
    owned = {
        chunk
        for chunk in range(absent.state.grid.count)
        if sites[chunk * len(sites) // absent.state.grid.count] is not absent
    }
    tables = [site.executor.attempts for site in present]
    await eventually(lambda: all(table.get(2) for table in tables))
    results = [run.result for table in tables if (run := table.get(2)) is not None]
    await eventually(lambda: all(r.digests[chunk] for r in results for chunk in owned))
    for site in present:
        site.carry_out(ev.ListFinal(2, 1))
    await eventually(lambda: all(site.finals(1) is not None for site in present))
    return begin


def finals_of(site: Site, attempt: int) -> dict[int, bytes]:
    digests = site.finals(attempt) or b""
    listed = [digests[i : i + 32] for i in range(0, len(digests), 32)]
    return {chunk: digest for chunk, digest in enumerate(listed) if digest != NOT_FINAL}


def retry_of(begin: Begin, sites: list[Site], keep: dict[int, bytes], holders: list[int]) -> Begin:
    """The next attempt, among ``sites``. ``holders`` are positions in the view."""
    kept = [Kept(chunk, 1, digest, tuple(holders)) for chunk, digest in keep.items()]
    return Begin(
        LINEAGE,
        1,
        begin.round,
        begin.attempt + 1,
        STEP,
        tuple(site.me for site in sites),
        (1.0,) * len(sites),
        past=(EntryOrigin(begin.participants, begin.weights),),
        kept=pack_kept(kept),
    )


def test_a_retry_keeps_what_is_final_and_fetches_what_it_lacks(tmp_path: Path) -> None:
    """The mean of each chunk is that of its origin; a participant that was not in the first
    attempt takes the kept chunks from holders, one of which has lost some."""

    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS)
        first, second, absent, late = sites
        weights = (1.0, 3.0, 0.0)
        begin = await first_attempt(sites[:3], absent, weights)
        keep = finals_of(first, 1)
        assert keep == finals_of(second, 1)
        chunks = range(first.state.grid.count)
        assert 0 < len(keep) < len(chunks)
        run = second.executor.attempts.get(2)
        assert run is not None
        lost = min(keep)
        run.result.digests[lost] = b""
        everyone = [first, second, late]
        again = retry_of(begin, everyone, keep, [0, 1])
        for site in everyone:
            site.carry_out(ev.Reduce(again))
        await eventually(lambda: all(site.reduced(2) for site in everyone))
        digests = []
        for chunk in chunks:
            kept = chunk in keep
            origin = (sites[:3], weights) if kept else (everyone, (1.0,) * 3)
            encoded, _ = mean_by_hand(*origin, chunk)
            digests.append(strong_digest(encoded))
            for site in everyone:
                run = site.executor.attempts.get(2)
                assert run is not None
                assert run.result.view(chunk).tobytes() == encoded
        origin_of = bytes(chunk in keep for chunk in chunks)
        root = entry_root(again.origins, origin_of, digests)
        assert {site.reduced(2) for site in everyone} == {root}
        for site in everyone:
            site.carry_out(ev.Apply(again, CHAIN))
        await eventually(lambda: all(site.applied(2) for site in everyone))
        head = late.executor.replica.log.head(2)
        assert head is not None
        assert (head.origins, head.origin_of, head.root) == (again.origins, origin_of, root)
        assert len({site.state.digest for site in everyone}) == 1

    scenario(tmp_path, "abcd", play)


@pytest.mark.parametrize("fault", ["bytes", "lost", "link"])
def test_a_holder_that_fails_is_replaced_and_the_last_one_named(tmp_path: Path, fault: str) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS)
        first, second, absent, late = sites
        begin = await first_attempt(sites[:3], absent, (1.0, 1.0, 0.0))
        keep = finals_of(first, 1)
        run = first.executor.attempts.get(2)
        assert run is not None
        for chunk in keep:
            if fault == "bytes":
                run.result.view(chunk)[7] ^= 1
            elif fault == "lost":
                run.result.digests[chunk] = b""
        if fault == "link":
            late.host.drop(first.me, "the test wants it")
        only_late = retry_of(begin, [late], keep, [0, 1])
        late.carry_out(ev.Reduce(only_late))  # the others are holders only
        await eventually(lambda: late.reduced(2))
        worse = retry_of(begin, [late], {**keep, min(keep): b"?" * 32}, [0, 1])
        worse = Begin(**{f: getattr(worse, f) for f in worse.__dataclass_fields__} | {"attempt": 3})
        late.carry_out(ev.Reduce(worse))
        await eventually(lambda: isinstance(late.fed[-1], ev.ReduceFailed))
        failed = late.fed[-1]
        assert isinstance(failed, ev.ReduceFailed)
        assert failed.attempt == 3
        assert failed.peers[0] in (first.me, second.me)
        assert "kept chunk 0" in failed.why

    scenario(tmp_path, "abcd", play)


def test_what_is_not_kept_is_reduced_again(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS)
        present = sites[:2]
        begin = await first_attempt(sites, sites[2], (1.0, 3.0, 0.0))
        again = retry_of(begin, present, {}, [])
        for site in present:
            site.carry_out(ev.Reduce(again))
        await eventually(lambda: all(site.reduced(2) for site in present))
        for chunk in range(sites[0].state.grid.count):
            encoded, _ = mean_by_hand(present, (1.0, 1.0), chunk)
            run = present[0].executor.attempts.get(2)
            assert run is not None
            assert run.result.view(chunk).tobytes() == encoded

    scenario(tmp_path, "abc", play)


def test_a_lent_result_is_not_written_to_by_the_retry(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS)
        begin = begin_of(sites, 1)
        for site in sites:
            site.carry_out(ev.Reduce(begin))
        await eventually(lambda: all(site.reduced(1) for site in sites))
        lent = sites[0].executor.complete_result(2, 1)
        assert lent is not None
        before = lent[0].copy()
        sites[0].inputs[:] += 1  # only so that the bytes differ
        again = retry_of(begin, sites, {}, [])
        for site in sites:
            site.carry_out(ev.Abort(2, 1))
            site.carry_out(ev.Reduce(again))
        await eventually(lambda: all(site.reduced(2) for site in sites))
        np.testing.assert_array_equal(lent[0], before)
        assert sites[0].reduced(1) != sites[0].reduced(2)
        assert sites[0].executor.complete_result(2, 1) is None

    scenario(tmp_path, "ab", play)


def test_a_copy_fetches_only_what_is_not_final_here(tmp_path: Path) -> None:
    """One has the whole result; the other has been told to take it from there."""

    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS)
        begin = begin_of(sites, 1)
        holder, other, outsider = sites
        for site in sites:
            site.carry_out(ev.Reduce(begin))
        await eventually(lambda: all(site.reduced(1) for site in sites))
        chunks = range(holder.state.grid.count)
        for site, forgotten in ((other, {2}), (outsider, chunks)):
            run = site.executor.attempts.get(2)
            assert run is not None
            run.root = b""
            for chunk in chunks:
                run.result.view(chunk)[:] = 0  # so that it shows what was written again
                if chunk in forgotten:
                    run.result.digests[chunk] = b""
            site.fed.clear()
        before = other.executor.streams.received_bytes
        for site in (other, outsider):
            site.carry_out(ev.Fetch(begin, holder.me))
        await eventually(lambda: other.reduced(1) and outsider.reduced(1))
        assert other.executor.streams.received_bytes - before < 2 * holder.state.layout(
            head_of(2)
        ).size(2)
        assert {site.reduced(1) for site in sites} == {holder.reduced(1)}
        lent = holder.executor.complete_result(2, 1)
        run, whole = (site.executor.attempts.get(2) for site in (other, outsider))
        assert lent is not None
        assert run is not None
        assert whole is not None
        np.testing.assert_array_equal(whole.result.array, lent[0])
        written = {c for c in chunks if run.result.view(c).any()}
        assert written == {2}

    scenario(tmp_path, "abc", play)


def fragment_begin(sites: list[Site], number: int, fragment: int, attempt: int = 1) -> Begin:
    peers = tuple(site.me for site in sites)
    weights = (1.0,) * len(peers)
    return Begin(LINEAGE, 1, number, attempt, STEP, peers, weights, fragment=fragment)


def test_two_rounds_of_different_fragments_reduce_at_once(tmp_path: Path) -> None:
    """The first waits for somebody who never comes, until it is begun again; the second does not
    wait for it."""

    async def play(everyone: list[Site]) -> None:
        sites = everyone[:3]
        prepare(sites, ELEMENTS, fragments=2)
        one, two = fragment_begin(sites, 2, 0, attempt=2), fragment_begin(sites, 3, 1)
        means = {c: mean_by_hand(sites, (1.0,) * 3, c)[1] for c in range(sites[0].state.grid.count)}
        expected = sites[0].state.theta.copy()
        for chunk, mean in means.items():
            lo, hi = sites[0].state.grid.bounds(chunk)
            expected[lo:hi] -= mean
        stuck = fragment_begin(everyone, 2, 0)
        for site in sites:
            site.carry_out(ev.Reduce(two))  # as the messages may come
            site.carry_out(ev.Reduce(stuck))
        await eventually(lambda: all(site.reduced(1, 3) for site in sites))
        assert not any(site.reduced(1, 2) for site in sites)
        for site in sites:
            site.carry_out(ev.Reduce(one))
        await eventually(lambda: all(site.reduced(2, 2) for site in sites))
        for begin in (one, two):
            for site in sites:
                site.carry_out(ev.Apply(begin, CHAIN))
        await eventually(lambda: all(site.applied(3) for site in sites))
        for site in sites:
            np.testing.assert_array_equal(site.state.theta, expected)
            assert [e.round for e in site.fed if isinstance(e, ev.Applied)] == [2, 3]
            assert site.executor.replica.log.last == 3
            head = site.executor.replica.log.head(3)
            assert head is not None
            assert (head.fragment, head.root) == (1, site.reduced(1, 3))
            assert len(entry_chain(CHAIN, head)) == 32
            assert not site.executor.attempts.all

    scenario(tmp_path, "abcd", play)


def test_the_end_of_one_round_leaves_the_others_alone(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, fragments=2)
        one, two = fragment_begin(sites, 2, 0), fragment_begin(sites, 3, 1)
        for site in sites[:2]:
            site.carry_out(ev.Reduce(one))
            site.carry_out(ev.Reduce(two))
            site.carry_out(ev.Abort(2, 1))
        sites[2].carry_out(ev.Reduce(two))
        await eventually(lambda: all(site.reduced(1, 3) for site in sites))
        again = fragment_begin(sites, 2, 0, attempt=2)
        for site in sites:
            site.carry_out(ev.Abort(2, 1))  # of an older attempt: harmless
            site.carry_out(ev.Reduce(again))
            site.carry_out(ev.Abort(2, 1))
        await eventually(lambda: all(site.reduced(2, 2) for site in sites))

    scenario(tmp_path, "abc", play)


@pytest.mark.parametrize("fragments", [1, 2])
def test_what_was_encoded_before_gives_the_same_bytes_in_every_attempt(
    tmp_path: Path, fragments: int
) -> None:
    """Compare the roots of butterflies, where even one's own part counts as others decode it."""

    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, fragments=fragments)
        begin = fragment_begin(sites, 2, 0)
        for site in sites:
            site.carry_out(ev.Reduce(begin))
        await eventually(lambda: all(site.reduced(1) for site in sites))
        expected = sites[0].reduced(1)
        for site in sites:
            spec, manifest, inputs = site.state.spec, site.state.manifest, site.inputs
            encoded = np.empty(4 * submission_floats(spec, manifest), np.uint8)

            def write(out: np.ndarray, lo: int, values: np.ndarray = inputs) -> None:
                np.copyto(out, values[lo : lo + out.size])

            encode_submission(spec, manifest, site.state.theta, write, 0, encoded)
            site.executor.replica.encoded, site.executor.replica.inputs = encoded, None
        for attempt in (2, 3):
            again = fragment_begin(sites, 2, 0, attempt=attempt)
            for site in sites:
                site.carry_out(ev.Abort(2, attempt - 1))
                site.carry_out(ev.Reduce(again))
            await eventually(lambda: all(site.reduced(attempt) for site in sites))  # noqa: B023
            roots = {site.reduced(attempt) for site in sites}
            assert roots == {expected}

    scenario(tmp_path, "abc", play)


def test_orders_that_were_overtaken_do_nothing(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS)
        old, new = begin_of(sites, 1), begin_of(sites, 2)
        for site in sites:
            site.carry_out(ev.Reduce(old))
            site.carry_out(ev.Fetch(old, sites[0].me))
            site.carry_out(ev.Reduce(new))
        await eventually(lambda: all(site.reduced(2) for site in sites))
        await asyncio.sleep(0)
        assert not any(site.reduced(1) for site in sites)
        for site in sites:
            site.carry_out(ev.ListFinal(2, 1))
        await eventually(lambda: all(site.finals(1) == b"" for site in sites))

    scenario(tmp_path, "ab", play)


@pytest.mark.parametrize("fault", ["fragment", "kept chunk", "kept bytes"])
def test_an_opening_that_makes_no_sense_is_our_own_failure(tmp_path: Path, fault: str) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS)
        [site] = sites
        beyond = pack_kept([Kept(site.state.grid.count, 1, b"d" * 32, (0,))])
        begin = Begin(
            LINEAGE,
            1,
            2,
            1,
            STEP,
            (site.me,),
            (1.0,),
            fragment=5 if fault == "fragment" else 0,
            past=(EntryOrigin((site.me,), (1.0,)),),
            kept={"fragment": b"", "kept chunk": beyond, "kept bytes": b"xyz"}[fault],
        )
        site.carry_out(ev.Reduce(begin))
        await eventually(lambda: site.fed)
        assert isinstance(site.fed[0], ev.ReduceFailed)
        assert site.fed[0].peers == ()

    scenario(tmp_path, "a", play)
