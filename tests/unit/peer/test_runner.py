"""The round runner over real TLS links: attempts, retries, aborts, several rounds at once."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from harness.runner_sites import (
    LINEAGE,
    Site,
    begin_of,
    by_hand,
    eventually,
    prepare,
    run_blob,
    scenario,
)

from atoll.collectives import RoundResult, encoded_layout, get_codec, grid_for
from atoll.collectives.errors import StateError
from atoll.peer import events as ev
from atoll.peer.copies import ResultCopy
from atoll.peer.dataframes import DataHeader
from atoll.peer.messages import INIT, STEP, Begin


def test_init_is_reduced_by_one_and_copied_by_the_others(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        elements, packed = 50_000, run_blob(50_000)
        first, second = sites
        begin = Begin(LINEAGE, 1, 1, 1, INIT, (first.me,), (1.0,), packed)
        first.runner.inputs = np.arange(elements, dtype=np.float32)
        first.runner.carry_out(ev.Reduce(begin))
        await eventually(lambda: first.reduced(1))
        assert first.runner.streams.moved_bytes == 0
        assert first.runner.progress_bytes >= 4 * elements  # or it would count as stalled
        second.runner.carry_out(ev.Fetch(begin, first.me))
        await eventually(lambda: second.reduced(1))
        assert first.reduced(1) == second.reduced(1)
        for site in sites:
            site.runner.carry_out(ev.Apply(begin, b"c" * 32))
        await eventually(lambda: all(isinstance(s.fed[-1], ev.Applied) for s in sites))
        states = [site.runner.state for site in sites]
        assert states[0] is not None
        assert states[1] is not None
        assert states[0].digest == states[1].digest
        np.testing.assert_array_equal(states[1].theta, np.arange(elements, dtype=np.float32))

    scenario(tmp_path, "ab", play)


def test_a_round_gives_the_mean_and_equal_bytes_everywhere(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, 100_000, codec="float32")
        begin = begin_of(sites, 1)
        before = sites[0].runner.state.theta.copy()  # type: ignore[union-attr]  # set by prepare
        for site in sites:
            site.runner.carry_out(ev.Reduce(begin))
        await eventually(lambda: all(site.reduced(1) for site in sites))
        assert len({site.reduced(1) for site in sites}) == 1
        for site in sites:
            site.runner.carry_out(ev.Apply(begin, b"c" * 32))
        await eventually(lambda: all(isinstance(s.fed[-1], ev.Applied) for s in sites))
        digests = {site.runner.state.digest for site in sites}  # type: ignore[union-attr]
        assert len(digests) == 1
        # Outer SGD with rate 1 replaces θ by the mean of what was submitted: θ + 1, 2, 3.
        np.testing.assert_allclose(sites[0].runner.state.theta, before + 2, atol=1e-6)  # type: ignore[union-attr]

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
                    site.runner.carry_out(ev.Reduce(begin))
                # Anywhere from before the first frame to shortly before the end.
                await asyncio.sleep(0.001 * (attempt % 12))
                for site in sites:
                    site.runner.carry_out(ev.Abort(begin.round, attempt))
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
            site.runner.carry_out(ev.Reduce(begin))
        await eventually(lambda: all(site.reduced(attempt) for site in sites))
        for site in sites:
            site.runner.carry_out(ev.Abort(begin.round, attempt))
        await eventually(
            lambda: not [t for t in threading.enumerate() if t.name.startswith("reduce-")]
        )

    scenario(tmp_path, "abc", play)


def resident_bytes() -> int:
    """Without what is free: every new thread may get another arena of glibc's to allocate from."""
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
        state = one.runner.state
        assert state is not None
        result = RoundResult(state.codec, state.grid)
        with pytest.raises(StateError, match="does not hold the result"):
            await one.runner.reducer.fetcher.fetch(begin, other.me, result)

    scenario(tmp_path, "ab", play)


def test_a_submission_that_is_not_finite_is_reported_as_our_own_failure(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, 10_000)
        one = sites[0]
        assert one.runner.inputs is not None
        one.runner.inputs[17] = np.nan
        begin = begin_of(sites, 1)
        for site in sites:
            site.runner.carry_out(ev.Reduce(begin))
        await eventually(lambda: one.fed)
        failed = one.fed[0]
        assert isinstance(failed, ev.ReduceFailed)
        assert failed.peers == ()
        for site in sites:
            site.runner.carry_out(ev.Abort(2, 1))

    scenario(tmp_path, "ab", play)


def test_the_result_equals_the_codec_arithmetic_done_by_hand(tmp_path: Path) -> None:
    """What travels is Σ w_i Q(Δ_i) / Σ w_i, quantized once more, in order of peer ids."""

    async def play(sites: list[Site]) -> None:
        prepare(sites, 30_000)
        state = sites[0].runner.state
        assert state is not None
        begin = Begin(LINEAGE, 1, 2, 1, STEP, tuple(s.me for s in sites), (1.0, 2.0, 5.0))
        expected = by_hand(sites, begin, state)
        for site in sites:
            site.runner.carry_out(ev.Reduce(begin))
        await eventually(lambda: all(site.reduced(1) for site in sites))
        for site in sites:
            site.runner.carry_out(ev.Apply(begin, b"c" * 32))
        await eventually(lambda: all(isinstance(s.fed[-1], ev.Applied) for s in sites))
        for site in sites:
            assert site.runner.state is not None
            np.testing.assert_array_equal(site.runner.state.theta, expected)

    scenario(tmp_path, "abc", play)


def test_an_aborted_copy_writes_no_more() -> None:
    """A reader thread may be in the middle of a frame when the copy is given up."""
    grid = grid_for(10_000)
    layout = encoded_layout(grid, get_codec("int8"))
    result = RoundResult(get_codec("int8"), grid)
    result.array.fill(0)
    begin = Begin(LINEAGE, 1, 2, 1, STEP, (b"p" * 32,), (1.0,))
    done: list[bytes] = []
    copy = ResultCopy(b"p" * 32, begin, result, done.append, done.append)
    for chunk in range(grid.count):
        lo, hi = layout.slice(chunk)
        header = DataHeader(int(copy.kind), 0, 0, hi - lo, b"", 0, 2, 1, chunk)
        target = copy.reserve(header)
        assert target is not None
        if chunk == 1:
            copy.close()
        target[:] = bytes([chunk + 1]) * (hi - lo)
        copy.received(header)
    first, _ = layout.slice(1)
    assert set(result.array[:first]) == {1}
    assert not result.array[first:].any()
    assert not done
