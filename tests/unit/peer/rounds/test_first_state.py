"""Bring the first parameters of a run from one peer to all, over real TLS links."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness.runner_sites import LINEAGE, PATIENCE_S, Site, eventually, run_blob, scenario

from atoll.peer.client.shared_memory import SLICE_BYTES, Region
from atoll.peer.membership import events as ev
from atoll.peer.membership.layout import handed_on
from atoll.peer.membership.messages import INIT, Begin
from atoll.peer.rounds import executor

ELEMENTS = 3_000_000  # twelve chunks of 1 MiB: four for each of three owners


def begin_for(sites: list[Site], giver: int) -> Begin:
    weights = tuple(float(index == giver) for index in range(len(sites)))
    layout = handed_on(weights, [True] * len(sites))
    peers = tuple(site.me for site in sites)
    packed = run_blob(ELEMENTS)
    return Begin(LINEAGE, 1, 1, 1, INIT, peers, weights, packed, layout=layout)


async def given_by_the_first(sites: list[Site]) -> Begin:
    """Have the first of them give its parameters, and return what was begun when all have them."""
    begin = begin_for(sites, giver=0)
    sites[0].executor.replica.inputs = np.arange(ELEMENTS, dtype=np.float32)
    for site in sites:
        site.carry_out(ev.Reduce(begin))
    await eventually(lambda: all(site.reduced(1) for site in sites))
    return begin


def test_memory_for_the_first_parameters_is_progress(tmp_path: Path) -> None:
    """On a starved machine that takes seconds, in which no byte comes: the attempt has not stalled.

    It is asked for in slices, and each of them counts.
    """

    async def play(sites: list[Site]) -> None:
        waiting = sites[1].executor
        before = waiting.progress_bytes
        sites[1].carry_out(ev.Reduce(begin_for(sites, giver=0)))  # nothing is sent to it
        await eventually(lambda: waiting.progress_bytes >= before + 8 * ELEMENTS)

    scenario(tmp_path, "ab", play)
    noted: list[int] = []
    region = Region("test", SLICE_BYTES, noted.append)  # of four bytes each
    assert noted == 4 * [SLICE_BYTES]
    region.close()


def test_every_host_sends_the_first_parameters_once(tmp_path: Path) -> None:
    """A star would have the first one send them three times, and the others nothing."""

    async def play(sites: list[Site]) -> None:
        begin = begin_for(sites, giver=1)
        vector = np.random.default_rng(1).standard_normal(ELEMENTS).astype(np.float32)
        sites[1].executor.replica.inputs = vector
        for site in sites:
            site.carry_out(ev.Reduce(begin))
        await eventually(lambda: all(site.reduced(1) for site in sites))
        assert len({site.reduced(1) for site in sites}) == 1
        runs = [site.executor.attempts.at(1, 1) for site in sites]
        assert all(run is not None for run in runs)
        sent = [run.sent.total_bytes for run in runs if run is not None]
        assert sum(sent) == len(sites) * vector.nbytes
        assert max(sent) - min(sent) <= 4 << 20  # whole chunks, and each goes to three
        for site in sites:
            site.carry_out(ev.Apply(begin, b"c" * 32))
        await eventually(lambda: all(isinstance(s.fed[-1], ev.Applied) for s in sites))
        assert len({site.state.digest for site in sites}) == 1
        np.testing.assert_array_equal(sites[0].state.theta, vector)

    scenario(tmp_path, "abcd", play)


def test_of_two_the_other_one_gets_them(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        await given_by_the_first(sites)
        assert sites[0].reduced(1) == sites[1].reduced(1)

    scenario(tmp_path, "ab", play)


@pytest.mark.parametrize("is_read", [False, True])
def test_they_are_received_where_they_belong_unless_somebody_still_reads_them(
    tmp_path: Path, is_read: bool
) -> None:
    """Keep what is read from changing with the next commit, and them out of the log else."""

    async def play(sites: list[Site]) -> None:
        begin = await given_by_the_first(sites)
        run = sites[1].executor.attempts.at(1, 1)
        assert run is not None
        assert run.settled(PATIENCE_S)
        run.lent = is_read
        received = run.result.array
        sites[1].carry_out(ev.Apply(begin, b"c" * 32))
        await eventually(lambda: isinstance(sites[1].fed[-1], ev.Applied))
        state, log = sites[1].state, sites[1].executor.replica.log
        assert np.may_share_memory(received, state.theta) == (not is_read)
        assert (log.encoded(1) is None) == (not is_read)
        np.testing.assert_array_equal(state.theta, np.arange(ELEMENTS, dtype=np.float32))
        assert not state.momentum.any()

    scenario(tmp_path, "ab", play)


@pytest.mark.parametrize("is_slow", [False, True])
def test_they_stay_where_they_are_while_they_are_written_to_the_disk(
    tmp_path: Path, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second state takes long on a busy machine, and the next round begins without this peer."""
    monkeypatch.setattr(executor, "SAVED_WAIT_S", 0.0 if is_slow else PATIENCE_S)

    async def play(sites: list[Site]) -> None:
        begin = await given_by_the_first(sites)
        site = sites[1]
        run = site.executor.attempts.at(1, 1)
        assert run is not None
        assert run.settled(PATIENCE_S)
        run.saving, run.begun_s = True, time.monotonic()
        received = run.result.array
        site.carry_out(ev.Apply(begin, b"c" * 32))
        if not is_slow:
            await asyncio.sleep(0.1)
            assert not site.applied(1)
            run.saving = False
        await eventually(lambda: site.applied(1))
        assert np.may_share_memory(received, site.state.theta) == (not is_slow)
        assert any("they are copied" in line for line in site.logs) == is_slow
        np.testing.assert_array_equal(site.state.theta, np.arange(ELEMENTS, dtype=np.float32))

    scenario(tmp_path, "ab", play)


def test_the_parameters_of_another_offer_begin_another_state(tmp_path: Path) -> None:
    """Begin with what the next one offers, with other settings, as the first has died."""

    async def play(sites: list[Site]) -> None:
        first = begin_for(sites, giver=1)
        sites[0].carry_out(ev.Reduce(first))
        await eventually(lambda: sites[0].executor.attempts.at(1, 1) is not None)
        packed = run_blob(ELEMENTS, "int4")
        second = replace(begin_for(sites, giver=0), attempt=2, blob=packed)
        for site in sites:
            site.executor.replica.inputs = np.arange(ELEMENTS, dtype=np.float32)
            site.carry_out(ev.Abort(1, 1))
            site.carry_out(ev.Reduce(second))
        await eventually(lambda: all(site.reduced(2) for site in sites))
        for site in sites:
            site.carry_out(ev.Apply(second, b"c" * 32))
        await eventually(lambda: all(isinstance(s.fed[-1], ev.Applied) for s in sites))
        assert [site.state.spec.codec for site in sites] == ["int4", "int4"]
        assert len({site.state.digest for site in sites}) == 1

    scenario(tmp_path, "ab", play)
