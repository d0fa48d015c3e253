"""Rounds of a session's own collectives: the state moves on by a number, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from harness.plainstate import GRID, commit, head_of, initialise, run_blob
from harness.tinyrun import TinyRun

from atoll.collectives.errors import StateError
from atoll.peer.membership import events as ev
from atoll.peer.membership.messages import Begin
from atoll.peer.membership.operations import Operation, pack_objects
from atoll.peer.rounds.attempt_run import Replica
from atoll.peer.rounds.entries import GATHER, REDUCE, STEP, EntryHead, EntryOrigin, entry_root
from atoll.peer.rounds.executor import commit_operation
from atoll.peer.rounds.state import CHUNK_COPY_BYTES_MAX, ReplicatedState, StateLoad

NOTHING = np.empty(0, np.uint8)
A, B = b"a" * 32, b"b" * 32


@pytest.fixture
def state() -> Iterator[ReplicatedState]:
    state = ReplicatedState(run_blob())
    initialise(state, np.arange(GRID.total, dtype=np.float32))
    commit(state)
    yield state
    state.close()


def operate(state: ReplicatedState, kind: str = GATHER) -> None:
    state.apply(head_of(state.round + 1, kind=kind), NOTHING)


def bits(state: ReplicatedState) -> tuple[bytes, bytes, bytes]:
    return state.theta.tobytes(), state.momentum.tobytes(), state.digest


@pytest.mark.parametrize("kind", [GATHER, REDUCE])
def test_an_operation_changes_the_round_only(state: ReplicatedState, kind: str) -> None:
    before, number, generation = bits(state), state.round, state.generation
    operate(state, kind)
    assert bits(state) == before
    assert state.round == number + 1
    assert state.generation == generation  # a trainer that copies it need not begin anew
    out = memoryview(bytearray(CHUNK_COPY_BYTES_MAX))
    assert state.read_chunk(2, out).round == number + 1
    assert state.version(2) == number


def test_steps_after_operations_give_the_same_bits(state: ReplicatedState) -> None:
    other = ReplicatedState(run_blob())
    initialise(other, np.arange(GRID.total, dtype=np.float32))
    for seed in (1, 2, 3):
        commit(other, seed=seed)
    operate(state)
    commit(state, seed=2)
    operate(state)
    operate(state)
    commit(state, seed=3)
    assert bits(state) == bits(other)
    assert (state.round, other.round) == (7, 4)
    other.close()


def test_an_operation_is_taken_back_without_a_trace(state: ReplicatedState) -> None:
    before, place = bits(state), state.place
    operate(state)
    state.rename(state.round - 1)
    assert (bits(state), state.place) == (before, place)
    out = memoryview(bytearray(CHUNK_COPY_BYTES_MAX))
    assert place is not None
    assert state.read_chunk(0, out).round == place[0]


def test_an_operation_ends_a_load(state: ReplicatedState) -> None:
    load = StateLoad(state)
    load.keep(0, state.round)
    operate(state)
    assert not load.is_open
    with pytest.raises(StateError, match="given up"):
        load.keep(1, state.round)


def test_an_operation_out_of_turn_is_refused(state: ReplicatedState) -> None:
    for number in (state.round, state.round + 2):
        with pytest.raises(StateError, match="does not follow"):
            state.apply(head_of(number, kind=GATHER), NOTHING)
    void = ReplicatedState(run_blob())
    with pytest.raises(StateError, match="does not follow"):
        void.apply(head_of(1, kind=GATHER), NOTHING)
    void.close()


def test_heads_of_operations_carry_nothing() -> None:
    for kind, fragment, packed in [
        (GATHER, 1, b""),
        (REDUCE, 0, b"x"),
        (STEP, 0, b"x"),
        ("?", 0, b""),
    ]:
        with pytest.raises(ValueError):
            head_of(2, fragment, kind, packed)
    assert head_of(2, kind=REDUCE).kind == REDUCE


def test_a_root_covers_objects_and_who_gave_them() -> None:
    ours, theirs = (EntryOrigin((A,), (1.0,)),), (EntryOrigin((B,), (1.0,)),)
    roots = {
        entry_root(origins, b"", digests, packed)
        for origins in (ours, theirs)
        for digests in ((), (b"\0" * 32,))
        for packed in (b"", b"one", b"two")
    }
    assert len(roots) == 12


# ---------------------------------------------------------------- the commit


def test_a_gather_goes_into_the_log_without_its_objects() -> None:
    run = TinyRun(A)
    replica = Replica(run.log, run.state)
    blob = pack_objects([b"mine", b"yours"])
    begin = Begin(b"L" * 32, 1, 2, 1, GATHER, (A, B), (1.0, 1.0), blob, operation=Operation(GATHER))
    root = entry_root(begin.origins, b"", (), blob)
    assert commit_operation(replica, ev.Apply(begin, b"c" * 32, root), None) is run.state
    head = run.log.head(2)
    assert isinstance(head, EntryHead)
    assert (head.kind, head.blob, head.chain) == (GATHER, b"", b"c" * 32)
    assert head.root == root
    encoded = run.log.encoded(2)
    assert encoded is not None
    assert encoded.nbytes == 0
    assert run.log.digest_after(2) == run.state.digest == run.log.digest_after(1)
    run.close()


def test_the_log_gives_the_memory_of_steps_back_and_not_that_of_operations() -> None:
    run = TinyRun(A, log_bytes=1)
    for _ in range(3):
        run.commit()
        run.operate()
        run.operate()
    result = run.state.layout(head_of(2)).total_bytes
    spares = [array.nbytes for array in run.log._spares]
    assert spares
    assert set(spares) == {result}
    run.close()
