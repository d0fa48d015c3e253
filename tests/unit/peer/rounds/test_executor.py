"""The round runner over real TLS links: attempts, retries, aborts, several rounds at once."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness.runner_sites import (
    LINEAGE,
    PATIENCE_S,
    Site,
    begin_of,
    by_hand,
    eventually,
    prepare,
    run_blob,
    scenario,
)

from atoll.collectives import RoundResult, get_codec, grid_for
from atoll.collectives.errors import DivergedError, RemoteProtocolError, StateError
from atoll.peer.membership import events as ev
from atoll.peer.membership.messages import INIT, STEP, Begin
from atoll.peer.state_sync.incoming import ResultCopy
from atoll.peer.streams.frames import DataHeader


def test_init_is_reduced_by_one_and_copied_by_the_others(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        elements, packed = 50_000, run_blob(50_000)
        first, second = sites
        begin = Begin(LINEAGE, 1, 1, 1, INIT, (first.me,), (1.0,), packed)
        first.executor.replica.inputs = np.arange(elements, dtype=np.float32)
        first.carry_out(ev.Reduce(begin))
        await eventually(lambda: first.reduced(1))
        assert first.executor.streams.moved_bytes == 0
        assert first.executor.progress_bytes >= 4 * elements  # or it would count as stalled
        second.carry_out(ev.Fetch(begin, first.me))
        await eventually(lambda: second.reduced(1))
        assert first.reduced(1) == second.reduced(1)
        for site in sites:
            site.carry_out(ev.Apply(begin, b"c" * 32))
        await eventually(lambda: all(isinstance(s.fed[-1], ev.Applied) for s in sites))
        states = [site.executor.state for site in sites]
        assert states[0] is not None
        assert states[1] is not None
        assert states[0].digest == states[1].digest
        np.testing.assert_array_equal(states[1].theta, np.arange(elements, dtype=np.float32))

    scenario(tmp_path, "ab", play)


def test_a_round_gives_the_mean_and_equal_bytes_everywhere(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, 100_000, codec="float32")
        begin = begin_of(sites, 1)
        before = sites[0].executor.state.theta.copy()  # type: ignore[union-attr]  # set by prepare
        for site in sites:
            site.carry_out(ev.Reduce(begin))
        await eventually(lambda: all(site.reduced(1) for site in sites))
        assert len({site.reduced(1) for site in sites}) == 1
        for site in sites:
            site.carry_out(ev.Apply(begin, b"c" * 32))
        await eventually(lambda: all(isinstance(s.fed[-1], ev.Applied) for s in sites))
        digests = {site.executor.state.digest for site in sites}  # type: ignore[union-attr]
        assert len(digests) == 1
        # Outer SGD with rate 1 replaces θ by the mean of what was submitted: θ + 1, 2, 3.
        np.testing.assert_allclose(sites[0].executor.state.theta, before + 2, atol=1e-6)  # type: ignore[union-attr]

    scenario(tmp_path, "abc", play)


def test_three_hundred_aborted_rounds_leave_memory_flat(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, 1_000_000)
        attempt = 0

        async def abort_some(count: int) -> None:
            nonlocal attempt
            for _ in range(count):
                attempt += 1
                begin = begin_of(sites, attempt)
                for site in sites:
                    site.carry_out(ev.Reduce(begin))
                # Anywhere from before the first frame to shortly before the end.
                await asyncio.sleep(0.001 * (attempt % 12))
                for site in sites:
                    site.carry_out(ev.Abort(begin.round, attempt))
                    site.fed.clear()

        await abort_some(60)
        before_bytes, before_fds = resident_bytes(), open_files()
        await abort_some(300)
        grown_bytes = resident_bytes() - before_bytes
        assert grown_bytes < 16 << 20, f"{grown_bytes / 2**20:.1f} MiB more after 300 aborts"
        assert open_files() <= before_fds + 2
        attempt += 1
        begin = begin_of(sites, attempt)  # and the next one works
        for site in sites:
            site.carry_out(ev.Reduce(begin))
        await eventually(lambda: all(site.reduced(attempt) for site in sites))
        for site in sites:
            site.carry_out(ev.Abort(begin.round, attempt))
        await eventually(
            lambda: not [t for t in threading.enumerate() if t.name.startswith("reduce-")]
        )

    scenario(tmp_path, "abc", play)


def resident_bytes() -> int:
    """Without what is free: how much of that glibc keeps is not the runner's doing."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_holder_without_the_result_says_so(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, 10_000)
        one, other = sites
        begin = begin_of(sites, 1)
        state = one.executor.state
        assert state is not None
        result = RoundResult(get_codec(state.spec.codec), state.grid)
        with pytest.raises(StateError, match="does not hold the result"):
            await one.executor.fetcher.fetch(begin, other.me, result)

    scenario(tmp_path, "ab", play)


def test_a_submission_that_is_not_finite_is_reported_as_our_own_failure(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, 10_000)
        one = sites[0]
        assert one.executor.replica.inputs is not None
        one.executor.replica.inputs[17] = np.nan
        begin = begin_of(sites, 1)
        for site in sites:
            site.carry_out(ev.Reduce(begin))
        await eventually(lambda: one.fed)
        failed = one.fed[0]
        assert isinstance(failed, ev.ReduceFailed)
        assert failed.peers == ()
        for site in sites:
            site.carry_out(ev.Abort(2, 1))

    scenario(tmp_path, "ab", play)


def test_the_result_equals_the_codec_arithmetic_done_by_hand(tmp_path: Path) -> None:
    """What travels is Σ w_i Q(Δ_i) / Σ w_i, quantized once more, in order of peer ids."""

    async def play(sites: list[Site]) -> None:
        prepare(sites, 30_000)
        state = sites[0].executor.state
        assert state is not None
        begin = Begin(LINEAGE, 1, 2, 1, STEP, tuple(s.me for s in sites), (1.0, 2.0, 5.0))
        expected = by_hand(sites, begin, state)
        for site in sites:
            site.carry_out(ev.Reduce(begin))
        await eventually(lambda: all(site.reduced(1) for site in sites))
        for site in sites:
            site.carry_out(ev.Apply(begin, b"c" * 32))
        await eventually(lambda: all(isinstance(s.fed[-1], ev.Applied) for s in sites))
        for site in sites:
            assert site.executor.state is not None
            np.testing.assert_array_equal(site.executor.state.theta, expected)

    scenario(tmp_path, "abc", play)


def frame_of(copy: ResultCopy, result: RoundResult, chunk: int) -> DataHeader:
    return DataHeader(int(copy.kind), 0, 0, result.layout.size(chunk), b"", 0, 2, 1, chunk)


def take(
    copy: ResultCopy,
    result: RoundResult,
    chunk: int,
    value: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """A frame with a chunk of this value arrives."""
    header = frame_of(copy, result, chunk)
    target = copy.reserve(header)
    assert target is not None
    values = np.full(result.grid.size(chunk), value, np.float32)
    result.codec.encode(values, np.frombuffer(target, np.uint8))
    meanwhile()
    copy.received(header)


@pytest.fixture
def result() -> RoundResult:
    found = RoundResult(get_codec("int8"), grid_for(10_000))
    found.array.fill(0)
    return found


COPIED = Begin(LINEAGE, 1, 2, 1, STEP, (b"p" * 32,), (1.0,))


def test_an_aborted_copy_writes_no_more(result: RoundResult) -> None:
    """A reader thread may be in the middle of a frame when the copy is given up."""
    done: list[object] = []
    copy = ResultCopy(b"p" * 32, COPIED, result, done.append, done.append)
    take(copy, result, 0, 1.0)
    take(copy, result, 1, 1.0, meanwhile=copy.close)
    assert result.view(0).any()
    assert not result.array[result.layout.slice(1)[0] :].any()
    assert not done


def test_a_copy_takes_nothing_that_does_not_decode(result: RoundResult) -> None:
    """It would be committed, and then nobody could apply it."""
    done: list[object] = []
    copy = ResultCopy(b"p" * 32, COPIED, result, done.append, done.append)
    for chunk in range(result.grid.count - 1):
        take(copy, result, chunk, 1.0)
    header = frame_of(copy, result, result.grid.count - 1)
    target = copy.reserve(header)
    assert target is not None
    target[:] = b"\xff" * len(target)  # a scale that is no number
    with pytest.raises(RemoteProtocolError, match="int8 scale"):
        copy.received(header)
    assert not done
    take(copy, result, result.grid.count - 1, 2.0)
    assert len(done) == 1


def test_two_streams_of_one_source_do_not_share_a_buffer(result: RoundResult) -> None:
    """A stream that broke may still be read when the next one brings the same chunk."""
    done: list[object] = []
    copy = ResultCopy(b"p" * 32, COPIED, result, done.append, done.append)
    header = frame_of(copy, result, 0)
    old = copy.reserve(header)
    assert old is not None
    other = threading.Thread(target=take, args=(copy, result, 0, 1.0))
    other.start()
    other.join()
    before = result.view(0).tobytes()
    old[:] = bytes(len(old))  # decodes, and is not the same
    copy.received(header)
    assert result.view(0).tobytes() == before
    assert any(before)


def test_a_result_that_cannot_be_applied_ends_the_peer_with_advice(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        (site,) = sites
        prepare(sites, 10_000)
        begin = begin_of(sites, 1)
        site.carry_out(ev.Reduce(begin))
        await eventually(lambda: site.reduced(1))
        run = site.executor.attempts.get(2)
        assert run is not None
        run.result.array.fill(0xFF)
        before = site.state.digest
        site.carry_out(ev.Apply(begin, b"c" * 32))
        with pytest.raises(DivergedError, match="round 2 cannot be applied here") as caught:
            await asyncio.wait_for(site.task, PATIENCE_S)
        assert "fetches the state" in caught.value.fix
        assert (site.state.round, site.state.digest) == (1, before)

    scenario(tmp_path, "a", play)


def test_what_is_said_late_of_an_aborted_attempt_is_not_heard(tmp_path: Path) -> None:
    """Its thread was at the root when the view changed: attempt 1 of the next view is another."""

    async def play(sites: list[Site]) -> None:
        prepare(sites, 50_000)
        begin = begin_of(sites, 1)
        attempts = sites[0].executor.attempts
        sites[0].carry_out(ev.Reduce(begin))
        await eventually(lambda: attempts.get(begin.round) is not None)
        run = attempts.get(begin.round)
        assert run is not None
        sites[0].carry_out(ev.Abort(begin.round, 1))
        run.reduced(b"r" * 32)
        assert not run.root
        assert not sites[0].reduced(1)

    scenario(tmp_path, "ab", play)
