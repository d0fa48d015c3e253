"""State, log, joiners: entries that consist of what their participants sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from harness.tinyrun import TinyRun
from harness.transfers import Site, eventually, goal_of, run_of, same, scenario

from atoll.collectives.codecs import get_codec
from atoll.collectives.errors import CodecError, StateError
from atoll.peer.rounds.entries import STEP, EntryHead, EntryOrigin
from atoll.peer.rounds.state import ReplicatedState, StateLoad

MakeRun = Callable[..., TinyRun]


@pytest.fixture
def make_run() -> Iterator[MakeRun]:
    runs: list[TinyRun] = []

    def make(rounds: int, **options: object) -> TinyRun:
        run = TinyRun(b"p" * 32, **({"codec": "topk", "aggregate": "senders"} | options))  # type: ignore[arg-type]
        runs.append(run)
        while run.state.round < rounds:
            run.commit()
        return run

    yield make
    for run in runs:
        run.close()


def slow_aggregate(run: TinyRun, head: EntryHead, encoded: np.ndarray) -> np.ndarray:
    """The fragment's pseudo-gradient, from the slots of the entry, in float32."""
    codec, origin = get_codec(run.spec.codec), head.origins[0]
    counted = [weight for weight in origin.weights if weight > 0]
    factors = [np.float32(weight / sum(counted)) for weight in counted]
    grid, parts, at = run.state.fragment_grid(head.fragment), [], 0
    for chunk in range(grid.count):
        count = grid.size(chunk)
        above, below = np.zeros(count, np.float32), np.zeros(count, np.float32)
        for factor in factors:
            size = codec.encoded_bytes(count)
            values, ones = np.zeros(count, np.float32), np.zeros(count, np.float32)
            codec.decode(encoded[at : at + size], values)
            codec.decode_weigh(encoded[at : at + size], 1.0, np.zeros_like(values), ones)
            above += factor * values
            below += factor * ones
            at += size
        if run.spec.aggregate == "senders":
            above = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
        parts.append(above)
    assert at == encoded.size
    return np.concatenate(parts)


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize(("codec", "aggregate"), [("topk", "senders"), ("int4", "all")])
def test_commits_apply_the_aggregate(
    make_run: MakeRun, fragments: int, codec: str, aggregate: str
) -> None:
    run = make_run(12, fragments=fragments, codec=codec, aggregate=aggregate)
    theta = np.frombuffer(run.after[1][0], np.float32).copy()
    momentum = np.zeros_like(theta)
    sizes = set()
    for number in range(2, 13):
        head, encoded = run.log.head(number), run.log.encoded(number)
        assert head is not None
        assert encoded is not None
        first, end = run.state.chunks_of(head.fragment)
        part = slice(run.state.grid.bounds(first)[0], run.state.grid.bounds(end - 1)[1])
        delta = slow_aggregate(run, head, encoded)
        momentum[part] = np.float32(0.9) * momentum[part] + delta
        theta[part] -= np.float32(0.7) * (delta + np.float32(0.9) * momentum[part])
        assert (theta.tobytes(), momentum.tobytes()) == run.after[number]
        assert run.state.layout(head).total_bytes == encoded.nbytes
        sizes.add(encoded.nbytes)
    assert len(sizes) > 1  # of other participants each time


def test_a_load_replays_entries_of_any_participants(make_run: MakeRun) -> None:
    run = make_run(9, fragments=2)
    state = ReplicatedState(run.state.blob)
    load = StateLoad(state)
    for number in range(1, 10):
        head, encoded = run.log.head(number), run.log.encoded(number)
        assert head is not None
        assert encoded is not None
        layout, chunks = state.layout(head), state.chunks_in(head)
        for chunk in chunks:
            lo, hi = layout.slice(chunk - chunks.start)
            assert load.replay(head, encoded[lo:hi], chunk)
    load.finish(9, run.state.digest)
    assert state.theta.tobytes() == run.state.theta.tobytes()
    state.close()


def head_of(number: int, weights: tuple[float, ...], origin_of: bytes = b"") -> EntryHead:
    origins = tuple(
        EntryOrigin(tuple(bytes([n]) * 32 for n in range(count)), weights[:count])
        for count in ((len(weights), 1) if origin_of else (len(weights),))
    )
    return EntryHead(number, STEP, 0, origins, origin_of, b"r" * 32, b"c" * 32)


def test_what_does_not_fit_its_participants_is_refused_and_nothing_lost(make_run: MakeRun) -> None:
    run = make_run(4)
    state, digest = run.state, run.state.digest
    two = run.spec.result_codec((1.0, 1.0))
    encoded = np.zeros(state.layout(head_of(5, (1.0, 1.0))).total_bytes, np.uint8)
    with pytest.raises(StateError, match="bytes"):
        state.apply(head_of(5, (1.0, 1.0, 1.0)), encoded)
    with pytest.raises(CodecError):
        state.apply(head_of(5, (1.0, 1.0)), np.full_like(encoded, 0xFF))
    assert (state.round, state.digest) == (4, digest)
    load = StateLoad(state)
    for chunk in range(state.grid.count):
        load.keep(chunk, 4)
    size = two.encoded_bytes(state.grid.size(0))
    with pytest.raises(StateError, match="encoded bytes"):
        load.replay(head_of(5, (1.0,)), encoded[:size], 0)


def test_an_entry_cannot_be_read_as_one_of_others(make_run: MakeRun) -> None:
    """An origin that no chunk is of may be named; the root says nothing of it."""
    state = make_run(2).state
    count = state.grid.count
    true, named = head_of(3, (1.0,)), head_of(3, (1.0, 1.0), b"\x01" * count)
    assert named.origin(0) == true.origin(0)
    assert state.layout(named) == state.layout(true)


# ---------------------------------------------------------------- joiners and laggards

GATHERED = {"codec": "topk", "aggregate": "senders"}


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_laggard_replays_what_others_sent(tmp_path: Path, fragments: int) -> None:
    async def play(sites: list[Site]) -> None:
        laggard = sites[2]
        before = laggard.state
        laggard.sync.aim(goal_of(truth, sites[:2]))
        await eventually(lambda: laggard.reached)
        assert laggard.state is before
        assert same(laggard.state, truth.state)
        # A state has 8 bytes per element, these entries together less than one.
        assert laggard.streams.received_bytes < 8 * truth.state.grid.total / 4

    runs = [run_of(rounds, fragments=fragments, **GATHERED) for rounds in (9, 9, 3)]
    truth = runs[0]
    scenario(tmp_path, list(runs), play)


def test_a_joiner_takes_part_while_rounds_go_on(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        donors, learner = sites[:2], sites[2]
        learner.sync.aim(goal_of(runs[0], donors))
        for i in range(4):
            await eventually(lambda i=i: learner.reached or sum(d.pieces for d in donors) > 8 * i)
            for run in runs:
                run.commit()
            learner.sync.aim(goal_of(runs[0], donors))
        await eventually(lambda: learner.reached and learner.reached[-1][0] == 8)
        assert same(learner.state, runs[0].state)

    runs = [run_of(4, **GATHERED) for _ in range(2)]
    scenario(tmp_path, [*runs, None], play)


def test_entries_larger_than_the_state_are_not_asked_for(tmp_path: Path) -> None:
    """Of two rounds of many participants the state is less."""

    async def play(sites: list[Site]) -> None:
        donor, laggard = sites
        laggard.sync.aim(goal_of(truth, [donor]))
        await eventually(lambda: laggard.reached)
        assert same(laggard.state, truth.state)
        assert laggard.streams.received_bytes < 1.3 * 8 * truth.state.grid.total

    options = {"codec": "int4", "aggregate": "senders"}
    truth, behind = run_of(40, **options), run_of(2, **options)
    entries = [truth.log.encoded(number) for number in range(3, 41)]
    assert sum(e.nbytes for e in entries if e is not None) > 4 * 8 * truth.state.grid.total
    scenario(tmp_path, [truth, behind], play)
