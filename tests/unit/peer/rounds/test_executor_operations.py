"""All-reduces of trainers' own vectors in the round runner, over real TLS links."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from harness.runner_sites import LINEAGE, Site, begin_of, eventually, prepare, scenario

from atoll.collectives.errors import ConfigError
from atoll.peer.membership import events as ev
from atoll.peer.membership.messages import REDUCE, Begin
from atoll.peer.membership.operations import Operation
from atoll.peer.rounds.outputs import SETTLE_S, TrainerOutputs

ELEMENTS = 150_000  # another vector than the run's, of more chunks


def reduce_of(
    sites: list[Site], attempt: int = 1, number: int = 2, op: str = "sum", codec: str = "float32"
) -> Begin:
    peers = tuple(site.me for site in sites)
    operation = Operation(REDUCE, ELEMENTS, op, codec)
    weights = (1.0,) * len(peers)
    return Begin(LINEAGE, 1, number, attempt, REDUCE, peers, weights, operation=operation)


def give(sites: list[Site]) -> list[np.ndarray]:
    """A vector of each, and memory for what comes out."""
    vectors = []
    for index, site in enumerate(sites):
        made = np.random.default_rng(index).standard_normal(ELEMENTS).astype(np.float32)
        vectors.append(made)
        site.executor.replica.inputs = made
        site.executor.replica.outputs.expect(np.full(ELEMENTS, np.nan, np.float32))
    return vectors


def outputs(site: Site) -> np.ndarray:
    found = site.executor.replica.outputs.floats
    assert found is not None
    return found


@pytest.mark.parametrize(("op", "codec"), [("sum", "float32"), ("max", "int8"), ("mean", "int4")])
def test_everyone_gets_it_and_the_state_stays(tmp_path: Path, op: str, codec: str) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, 50_000)
        vectors = give(sites)
        *members, outsider = sites
        begin = reduce_of(members, op=op, codec=codec)
        digest = sites[0].state.digest
        for site in members:
            site.carry_out(ev.Reduce(begin))
        await eventually(lambda: all(site.reduced(1) for site in members))
        root = members[0].reduced(1)
        assert root
        assert members[1].reduced(1) == root
        for site in sites:
            site.carry_out(ev.Apply(begin, b"c" * 32, root))
        await eventually(lambda: all(site.applied(2) for site in sites))
        by_hand = {"sum": np.sum, "max": np.max, "mean": np.mean}[op](vectors[:2], axis=0)
        allowed = {"float32": 1e-5, "int8": 0.1, "int4": 1.5}[codec]
        assert np.abs(outputs(sites[0]) - by_hand).max() < allowed
        assert outputs(sites[0]).tobytes() == outputs(sites[1]).tobytes()
        assert np.isnan(outputs(outsider)).all()  # its trainer took no part
        assert outsider.executor.streams.received_bytes == 0
        for site in sites:
            assert (site.state.round, site.state.digest) == (2, digest)
            head, encoded = site.executor.replica.log.head(2), site.executor.replica.log.encoded(2)
            assert head is not None
            assert encoded is not None
            assert (head.kind, head.root, encoded.nbytes) == (REDUCE, root, 0)

    scenario(tmp_path, "abc", play)


def test_memory_of_results_is_used_again(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, 5000)
        give(sites)
        seen = []
        for number in range(2, 7):
            begin = reduce_of(sites, number, number)
            for site in sites:
                site.carry_out(ev.Reduce(begin))
            await eventually(lambda n=number: all(site.reduced(n) for site in sites))
            run = sites[0].executor.attempts.get(number)
            assert run is not None
            seen.append(run.result.array.ctypes.data)
            for site in sites:
                site.carry_out(ev.Apply(begin, b"c" * 32))
            await eventually(lambda n=number: all(site.applied(n) for site in sites))
        assert len(set(seen)) < len(seen)
        step = begin_of(sites, 9, 7)  # and a step of the run comes as if nothing had been
        for i, site in enumerate(sites):
            site.executor.replica.inputs = site.state.theta + np.float32(i + 1)
            site.carry_out(ev.Reduce(step))
        await eventually(lambda: all(site.reduced(9) for site in sites))
        for site in sites:
            site.carry_out(ev.Apply(step, b"d" * 32))
        await eventually(lambda: all(site.applied(7) for site in sites))
        assert sites[0].state.digest == sites[1].state.digest

    scenario(tmp_path, "ab", play)


def test_a_retry_without_somebody_is_of_the_others_alone(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, 5000)
        vectors = give(sites)
        first = reduce_of(sites)
        for site in sites:
            site.carry_out(ev.Reduce(first))
        await eventually(lambda: any(site.reduced(1) for site in sites))
        staying = sites[:2]
        again = reduce_of(staying, attempt=2)
        for site in staying:  # finished chunks of the first attempt do not count
            site.carry_out(ev.Abort(2, 1))
            site.carry_out(ev.Reduce(again))
        await eventually(lambda: all(site.reduced(2) for site in staying))
        for site in staying:
            site.carry_out(ev.Apply(again, b"c" * 32))
        await eventually(lambda: all(site.applied(2) for site in staying))
        expected = vectors[0] + vectors[1]
        np.testing.assert_allclose(outputs(sites[0]), expected, rtol=1e-5, atol=1e-5)
        assert outputs(sites[0]).tobytes() == outputs(sites[1]).tobytes()

    scenario(tmp_path, "abc", play)


def test_a_vector_of_another_size_is_no_contribution(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, 5000)
        give(sites)
        sites[0].executor.replica.inputs = np.zeros(7, np.float32)
        sites[0].carry_out(ev.Reduce(reduce_of(sites)))
        await eventually(lambda: any(isinstance(e, ev.ReduceFailed) for e in sites[0].fed))
        failed = next(e for e in sites[0].fed if isinstance(e, ev.ReduceFailed))
        assert (failed.peers, failed.why) == ((), "this peer's submission is gone")

    scenario(tmp_path, "ab", play)


async def reduced(sites: list[Site], attempt: int = 1) -> Begin:
    """Carry out an attempt at round 2 until all have its result."""
    begin = reduce_of(sites, attempt)
    for site in sites:
        site.carry_out(ev.Reduce(begin))
    await eventually(lambda: all(site.reduced(attempt) for site in sites))
    return begin


async def committed(sites: list[Site], begin: Begin) -> None:
    for site in sites:
        site.carry_out(ev.Apply(begin, b"c" * 32))
    await eventually(lambda: all(site.applied(2) for site in sites))


def hang(site: Site) -> np.ndarray:
    """Have a thread of the attempt hang in a stream; return the memory that it may touch."""
    run = site.executor.attempts.get(2)
    assert run is not None
    assert run.reduction is not None
    run.reduction._senders.reading += 1
    return outputs(site)


def moved_from(site: Site, before: np.ndarray) -> None:
    """Assert that the result was handed over in other memory; spoil what the thread may touch."""
    moved = site.executor.replica.outputs.take_moved()
    assert moved is not None
    moved.close()
    assert outputs(site).ctypes.data != before.ctypes.data
    before.fill(0)


def assert_summed(sites: list[Site], vectors: list[np.ndarray]) -> None:
    for site in sites:
        np.testing.assert_allclose(outputs(site), vectors[0] + vectors[1], rtol=1e-5, atol=1e-5)


def test_an_exact_result_grows_where_the_trainer_expects_it(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, 5000)
        vectors = give(sites)
        places = [outputs(site).ctypes.data for site in sites]
        begin = await reduced(sites)
        runs = [site.executor.attempts.get(2) for site in sites]
        assert [run.result.array.ctypes.data for run in runs if run is not None] == places
        await committed(sites, begin)
        assert [outputs(site).ctypes.data for site in sites] == places
        assert_summed(sites, vectors)
        for site, place in zip(sites, places, strict=True):
            assert site.executor.replica.outputs.moved is None
            assert site.executor.replica.log.spare(4 * ELEMENTS).ctypes.data != place

    scenario(tmp_path, "ab", play)


def test_who_copies_a_result_reads_other_memory_than_the_trainers(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, 5000)
        vectors = give(sites)
        begin = await reduced(sites)
        lent = sites[0].executor.complete_result(2, 1)
        assert lent is not None
        assert lent[0].ctypes.data != outputs(sites[0]).ctypes.data
        await committed(sites, begin)
        assert_summed(sites, vectors)
        outputs(sites[0]).fill(0)  # the trainer's next result
        read = lent[0].view(np.float32)
        np.testing.assert_allclose(read, vectors[0] + vectors[1], rtol=1e-5, atol=1e-5)

    scenario(tmp_path, "ab", play)


def test_a_result_that_is_still_being_sent_is_handed_over_in_other_memory(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, 5000)
        vectors = give(sites)
        begin = await reduced(sites)
        before = hang(sites[0])
        await committed(sites, begin)
        assert sites[1].executor.replica.outputs.moved is None
        moved_from(sites[0], before)
        assert_summed(sites, vectors)

    scenario(tmp_path, "ab", play)


def test_a_retry_goes_on_elsewhere_while_the_attempt_before_is_read(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, 5000)
        vectors = give(sites)
        await reduced(sites)
        before = hang(sites[0])
        for site in sites:
            site.carry_out(ev.Abort(2, 1))
        await committed(sites, await reduced(sites, attempt=2))
        moved_from(sites[0], before)
        assert_summed(sites, vectors)

    scenario(tmp_path, "ab", play)


def test_without_memory_for_another_place_the_commit_waits_for_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(name: str, count: int) -> None:
        raise ConfigError(f"no memory for {name}")

    async def play(sites: list[Site]) -> None:
        prepare(sites, 5000)
        vectors = give(sites)
        begin = await reduced(sites)
        before, run = hang(sites[0]), sites[0].executor.attempts.get(2)
        assert run is not None
        assert run.reduction is not None
        senders = run.reduction._senders
        monkeypatch.setattr("atoll.peer.rounds.outputs.Region", full)
        applied = asyncio.ensure_future(committed(sites, begin))
        await asyncio.sleep(3 * SETTLE_S)
        assert not sites[0].applied(2)
        senders.reading -= 1
        await applied
        assert outputs(sites[0]).ctypes.data == before.ctypes.data
        assert_summed(sites, vectors)

    scenario(tmp_path, "ab", play)


def test_memory_that_nobody_came_for_is_closed_with_the_next_call() -> None:
    outputs = TrainerOutputs()
    outputs.expect(np.zeros(10, np.float32))
    outputs.move()
    moved = outputs.moved
    assert moved is not None
    assert outputs.is_at(moved.floats.view(np.uint8))
    outputs.expect(np.zeros(10, np.float32))
    assert outputs.moved is None
    assert moved.fd == -1
