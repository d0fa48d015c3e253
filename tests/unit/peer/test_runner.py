"""The round runner over real TLS links: attempts, aborts, copies of results and state."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from atoll.collectives import butterfly_plan, encoded_layout, get_codec, grid_for
from atoll.collectives.errors import StateError
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.spec import RunSpec, blob
from atoll.peer import events as ev
from atoll.peer.certs import run_tls
from atoll.peer.dataframes import DataHeader
from atoll.peer.identity import Home
from atoll.peer.links import LinkHost
from atoll.peer.messages import INIT, STEP, Begin, FetchResult, FetchState, Learn
from atoll.peer.router import ResultCopy
from atoll.peer.runner import RoundRunner
from atoll.peer.state import ReplicatedState
from atoll.peer.views import Member

LINEAGE = b"L" * 32
PATIENCE_S = 30.0


class Site:
    """A link host with a runner, and the events that the runner fed."""

    def __init__(self, home: Home) -> None:
        self.fed: list[ev.Event] = []
        self.logs: list[str] = []
        self.host = LinkHost(
            peer_id=home.peer_id,
            tls=run_tls(home, b"s" * 32),
            run="demo",
            inc=lambda: 1,
            advertise=lambda: self.address,
            on_message=self._on_message,
            on_up=lambda peer, address, inc: self.runner.streams.know(peer, address),
            on_down=lambda peer, why: None,
            on_data=lambda peer, stream: self.runner.streams.accept(peer, stream),
            log=self.logs.append,
        )
        self.address = ""
        self.me = home.peer_id
        self.runner = RoundRunner(
            me=home.peer_id,
            host=self.host,
            feed=self.fed.append,
            tell_trainer=lambda effect: None,
            log=self.logs.append,
        )
        self.task = asyncio.get_running_loop().create_task(self.runner.run())

    def _on_message(self, peer: bytes, message: object) -> None:
        if isinstance(message, FetchState):
            self.runner.donor.on_fetch_state(peer, message)
        elif isinstance(message, FetchResult):
            self.runner.donor.on_fetch_result(peer, message)
        else:
            self.runner.learner.on_head(peer, message)  # type: ignore[arg-type]  # as the daemon

    async def close(self) -> None:
        self.task.cancel()
        self.runner.close()
        await self.host.close()

    def reduced(self, attempt: int) -> bytes | None:
        return next(
            (e.root for e in self.fed if isinstance(e, ev.Reduced) and e.attempt == attempt), None
        )


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # what is waited for comes from threads
            await asyncio.sleep(0.002)


def scenario(folder: Path, names: str, play: Callable[[list[Site]], object]) -> None:
    """Linked sites, in order of peer id."""

    async def whole() -> None:
        homes = [Home.open(folder / name) for name in names]
        sites = sorted((Site(home) for home in homes), key=lambda site: site.me)
        try:
            for site in sites:
                host, port = await site.host.listen("127.0.0.1", 0)
                site.address = f"{host}:{port}"
            for i, site in enumerate(sites):
                for other in sites[:i]:
                    await site.host.dial(other.address)
            await play(sites)  # type: ignore[misc]  # a coroutine function
        finally:
            for site in sites:
                await site.close()
            for home in homes:
                home.close()

    asyncio.run(whole())


def run_blob(elements: int, codec: str = "int8") -> bytes:
    spec = RunSpec(sync_every=1, codec=codec, outer_lr=1.0, outer_momentum=0.0)
    return blob(spec, Manifest.of([Parameter("w", (elements,))]))


def begin_of(sites: list[Site], attempt: int, number: int = 2) -> Begin:
    peers = tuple(site.me for site in sites)
    return Begin(LINEAGE, 1, number, attempt, STEP, peers, (1.0,) * len(peers))


def prepare(sites: list[Site], elements: int, codec: str = "int8") -> None:
    """State of round 1 on all, and a submission of its own on each."""
    packed = run_blob(elements, codec)
    theta = np.linspace(-1, 1, elements, dtype=np.float32)
    for i, site in enumerate(sites):
        state = ReplicatedState(packed)
        state.initialise(theta.view(np.uint8).copy())
        site.runner.state = site.runner.donor.state = state
        site.runner.inputs = theta + np.float32(i + 1)


def test_init_is_reduced_by_one_and_copied_by_the_others(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        elements, packed = 50_000, run_blob(50_000)
        first, second = sites
        begin = Begin(LINEAGE, 1, 1, 1, INIT, (first.me,), (1.0,), packed)
        first.runner.inputs = np.arange(elements, dtype=np.float32)
        first.runner.carry_out(ev.Reduce(begin))
        await eventually(lambda: first.reduced(1))
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
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_learner_gets_the_whole_state_and_checks_it(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        donor, learner = sites
        prepare([donor], 700_000)
        state = donor.runner.state
        assert state is not None
        member = Member(donor.me, 1, address=donor.address)
        good = Learn(LINEAGE, 1, 1, b"c" * 32, state.digest, member)
        learner.runner.carry_out(ev.LoadState(good))
        await eventually(lambda: learner.fed)
        assert learner.fed == [ev.StateLoaded(1, b"c" * 32, state.digest)]
        loaded = learner.runner.state
        assert loaded is not None
        np.testing.assert_array_equal(loaded.theta, state.theta)
        np.testing.assert_array_equal(loaded.momentum, state.momentum)

    scenario(tmp_path, "ab", play)


@pytest.mark.parametrize("fault", ["digest", "round", "bytes"])
def test_a_wrong_donor_is_found_out(tmp_path: Path, fault: str) -> None:
    async def play(sites: list[Site]) -> None:
        donor, learner = sites
        prepare([donor], 300_000)
        state = donor.runner.state
        assert state is not None
        digest, number = state.digest, 1
        if fault == "digest":
            digest = b"x" * 32
        elif fault == "round":
            number = 7
        else:
            state.theta[200_000] += 1  # one parameter of many
        learn = Learn(
            LINEAGE, 1, number, b"c" * 32, digest, Member(donor.me, 1, address=donor.address)
        )
        learner.runner.carry_out(ev.LoadState(learn))
        await eventually(lambda: learner.fed)
        assert isinstance(learner.fed[0], ev.StateFailed)
        assert learner.runner.state is None

    scenario(tmp_path, "ab", play)


def test_a_holder_without_the_result_says_so(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, 10_000)
        one, other = sites
        begin = begin_of(sites, 1)
        state = one.runner.state
        assert state is not None
        result = np.empty(state.layout.total_bytes, np.uint8)
        with pytest.raises(StateError, match="does not hold the result"):
            await one.runner.learner.fetch(begin, other.me, state.layout, result, state.grid.count)

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


def by_hand(sites: list[Site], begin: Begin, state: ReplicatedState) -> np.ndarray:
    codec, grid = get_codec("int8"), grid_for(30_000)
    plan = butterfly_plan(begin.participants, begin.weights, grid)
    expected = state.theta.copy()
    for chunk in range(grid.count):
        lo, hi = grid.bounds(chunk)
        total = np.zeros(hi - lo, np.float32)
        for site, factor in zip(sites, plan.factors(), strict=True):
            assert site.runner.inputs is not None
            data = np.empty(codec.encoded_bytes(hi - lo), np.uint8)
            codec.encode(state.theta[lo:hi] - site.runner.inputs[lo:hi], data)
            codec.decode_add(data, factor, total)
        codec.encode(total, data)
        codec.decode(data, total)
        expected[lo:hi] -= total
    return expected


def test_an_aborted_copy_writes_no_more() -> None:
    """A reader thread may be in the middle of a frame when the copy is given up."""
    grid = grid_for(10_000)
    layout = encoded_layout(grid, get_codec("int8"))
    result = np.zeros(layout.total_bytes, np.uint8)
    begin = Begin(LINEAGE, 1, 2, 1, STEP, (b"p" * 32,), (1.0,))
    done: list[bytes] = []
    copy = ResultCopy(b"p" * 32, begin, layout, result, grid.count, done.append, done.append)
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
    assert set(result[:first]) == {1}
    assert not result[first:].any()
    assert not done
