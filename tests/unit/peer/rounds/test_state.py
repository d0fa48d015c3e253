"""Reading, loading and refusing; the bits are compared in test_state_replay.py."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from harness.plainstate import (
    GRID,
    check_proof,
    commit,
    encode,
    head_of,
    initialise,
    run_blob,
    vector,
)

from atoll.collectives.digests import strong_digest
from atoll.collectives.errors import CodecError, StateError
from atoll.peer.rounds import state as module
from atoll.peer.rounds.entries import GATHER, INIT, EntryHead
from atoll.peer.rounds.state import (
    CHUNK_COPY_BYTES_MAX,
    U8,
    ChunkCopy,
    ReplicatedState,
    StateLoad,
)

_made: list[ReplicatedState] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _made:
        _made.pop().close()


def void(fragments: int = 1) -> ReplicatedState:
    _made.append(ReplicatedState(run_blob(fragments)))
    return _made[-1]


def founded(fragments: int = 1) -> ReplicatedState:
    state = void(fragments)
    initialise(state, vector(0))
    return state


# ---------------------------------------------------------------- reading while commits happen


def test_a_reader_always_gets_a_chunk_of_the_round_that_it_names():
    state = founded(2)
    read: list[tuple[int, int, bytes, bytes]] = []
    failed: list[StateError] = []
    enough = threading.Event()

    def reader() -> None:
        out = memoryview(bytearray(CHUNK_COPY_BYTES_MAX))
        for turn in range(600):
            chunk = turn % GRID.count
            try:
                copy = state.read_chunk(chunk, out)
            except StateError as error:  # this thread got no time between several commits
                failed.append(error)
                continue
            leaf = strong_digest(out[: copy.nbytes])
            assert leaf == copy.leaf
            read.append((chunk, copy.round, leaf, copy.proof))
        enough.set()

    digests = {1: state.digest}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=reader)
    thread.start()
    try:
        while not enough.is_set() and thread.is_alive():
            commit(state, state.round % 2, seed=state.round % 3)
            digests[state.round] = state.digest
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert enough.is_set()
    assert len(read) > len(failed)
    for chunk, number, leaf, proof in read:
        check_proof(state.blob, chunk, leaf, proof, digests[number])


def torn(state: ReplicatedState, times: int) -> None:
    """The next ``times`` copies see the parameters before a commit, the momentum after it."""
    parts = state._buffers.parts
    left = times

    def interrupted(chunk: int) -> tuple[U8, U8]:
        nonlocal left
        if threading.current_thread() is not reading or left == 0:
            return parts(chunk)
        left -= 1
        theta = parts(chunk)[0].copy()
        other = threading.Thread(target=commit, args=(state,))
        other.start()
        other.join()
        return theta, parts(chunk)[1]

    reading = threading.current_thread()
    state._buffers.parts = interrupted  # type: ignore[method-assign]


def test_a_torn_copy_is_made_again():
    state = founded()
    commit(state)
    torn(state, 3)
    out = memoryview(bytearray(CHUNK_COPY_BYTES_MAX))
    copy = state.read_chunk(4, out)
    assert copy.round == 5
    assert strong_digest(out[: copy.nbytes]) == copy.leaf
    check_proof(state.blob, 4, copy.leaf, copy.proof, state.digest)


def test_a_reader_that_never_gets_a_whole_copy_is_told():
    state = founded()
    commit(state)
    torn(state, 100)
    with pytest.raises(StateError, match="overwritten in each of 8 reads"):
        state.read_chunk(0, memoryview(bytearray(CHUNK_COPY_BYTES_MAX)))


def test_a_reader_waits_for_the_commit_that_is_changing_its_chunk():
    state = founded(2)
    half, go_on = threading.Event(), threading.Event()

    def pause(nbytes: int) -> None:
        half.set()
        go_on.wait(10.0)

    first, other = state.chunks_of(0)[0], state.chunks_of(1)[0]
    before = state.generation
    encoded = encode("int8", vector(1), range(*state.chunks_of(0)))
    committing = threading.Thread(target=state.apply, args=(head_of(2), encoded, pause))
    committing.start()
    assert half.wait(10.0)
    assert state.is_changing
    assert state.generation == before + 1
    copies: list[ChunkCopy] = []
    out = memoryview(bytearray(CHUNK_COPY_BYTES_MAX))
    reading = threading.Thread(target=lambda: copies.append(state.read_chunk(first, out)))
    reading.start()
    untouched = state.read_chunk(other, memoryview(bytearray(CHUNK_COPY_BYTES_MAX)))
    assert untouched.round == 1  # of the other fragment, so nobody waits
    assert not copies
    go_on.set()
    committing.join()
    reading.join()
    assert copies[0].round == 2
    assert strong_digest(out[: copies[0].nbytes]) == copies[0].leaf == state.leaves[first]
    assert (state.is_changing, state.generation) == (False, before + 2)


def test_a_state_that_a_commit_has_torn_is_read_by_nobody(monkeypatch: pytest.MonkeyPatch):
    state = founded()
    encoded = encode("int8", vector(1), range(GRID.count))
    encoded[-4:] = 255
    encoded[-GRID.size(GRID.count - 1) - 4 :][:4] = 255  # a NaN as the last chunk's scale
    with pytest.raises(CodecError):
        state.apply(head_of(2), encoded)
    monkeypatch.setattr(module, "COMMIT_WAIT_S", 0.01)
    with pytest.raises(StateError, match="has not ended"):
        state.read_chunk(0, memoryview(bytearray(CHUNK_COPY_BYTES_MAX)))
    load = StateLoad(state)  # a load mends it
    other = founded()
    for chunk in range(GRID.count):
        load.put(chunk, 1, read_bytes(other, chunk))
    load.finish(1, other.digest)
    assert state.read_chunk(0, memoryview(bytearray(CHUNK_COPY_BYTES_MAX))).round == 1


def test_the_source_of_a_reduction_does_not_see_commits_of_other_fragments():
    state = founded(3)
    submission = vector(5)
    expected = (state.theta - submission)[slice(GRID.bounds(1)[0], GRID.bounds(2)[1])]
    assert state.chunks_of(1) == (1, 3)
    fill = state.delta_of(submission, 1)
    for fragment in (0, 2, 0):
        commit(state, fragment)
    out = np.empty(GRID.size(0), np.float32)
    for chunk in (0, 1):
        fill(chunk, out)
        np.testing.assert_array_equal(out, expected[chunk * out.size : (chunk + 1) * out.size])


# ---------------------------------------------------------------- what is refused


def test_a_void_state_cannot_be_read():
    state = void()
    assert (state.digest, state.root, state.leaves, state.round) == (b"", b"", (), 0)
    with pytest.raises(StateError, match="no state"):
        state.read_chunk(0, memoryview(bytearray(CHUNK_COPY_BYTES_MAX)))
    with pytest.raises(StateError, match="no state"):
        StateLoad(state).keep(0, 1)


@pytest.mark.parametrize("number", [1, 3])
def test_only_the_next_round_is_applied(number):
    state = founded()
    with pytest.raises(StateError, match="does not follow 1"):
        state.apply(head_of(number), encode("int8", vector(1), range(GRID.count)))
    with pytest.raises(StateError, match="does not follow 1"):
        initialise(state, vector(0))


def test_each_chunk_of_an_outer_step_counts_as_progress() -> None:
    state = void()
    done: list[int] = []
    values = vector(0).view(np.uint8).copy()
    state.apply(head_of(1, kind=INIT), values, done.append)
    assert done == [state.chunk_bytes(chunk) for chunk in range(GRID.count)]


def test_an_entry_of_another_size_is_refused_and_nothing_lost():
    state = founded(2)
    commit(state)
    with pytest.raises(StateError, match="bytes"):
        state.apply(head_of(3, 1), encode("int8", vector(1), range(GRID.count)))
    assert not state.is_changing
    commit(state, 1)


def test_too_little_memory_for_a_chunk_is_refused():
    with pytest.raises(StateError, match="memory"):
        founded().read_chunk(0, memoryview(bytearray(8 * 4096 - 1)))


def test_a_load_refuses_what_does_not_fit():
    state = founded(2)
    load = StateLoad(state)
    assert not load.has(0)
    with pytest.raises(StateError, match="bytes"):
        load.put(0, 1, bytes(7))
    encoded = encode("int8", vector(1), range(1))
    with pytest.raises(StateError, match="replayed"):
        load.replay(head_of(2), encoded, 0)  # the chunk is missing
    with pytest.raises(StateError, match="5 chunks are not of round 1"):
        load.finish(1)
    for chunk in range(GRID.count):
        load.keep(chunk, 1)
    with pytest.raises(StateError, match="replayed"):
        load.replay(head_of(2), encoded, 4)  # of the other fragment
    with pytest.raises(StateError, match="encoded bytes"):
        load.replay(head_of(2), encoded[1:], 0)
    assert load.replay(head_of(2), encoded, 0)
    with pytest.raises(StateError, match="1 chunks are not of round 1"):
        load.finish(1)
    load.finish(2)
    assert (state.round, state.version(0), state.version(1)) == (2, 2, 1)


def test_a_load_with_another_digest_is_not_taken_and_can_be_mended():
    state = founded()
    good = [bytes(read_bytes(state, chunk)) for chunk in range(GRID.count)]
    before = state.place, state.serial
    load = StateLoad(state)
    for chunk in range(GRID.count):
        load.put(chunk, 1, good[chunk] if chunk != 3 else bytes(len(good[chunk])))
    with pytest.raises(StateError, match=f"not {state.digest.hex()[:16]}"):
        load.finish(1, state.digest)
    assert (state.place, state.serial) == before
    load.put(3, 1, good[3])
    load.finish(1, state.digest)
    assert state.place == before[0]
    assert state.serial != before[1]  # a trainer has to map it anew


def read_bytes(state: ReplicatedState, chunk: int) -> memoryview:
    out = memoryview(bytearray(CHUNK_COPY_BYTES_MAX))
    return out[: state.read_chunk(chunk, out).nbytes]


def test_what_was_put_has_a_leaf_and_may_turn_out_to_be_of_another_round():
    state = founded()
    load = StateLoad(state)
    assert load.leaf(0) == state.leaves[0]
    with pytest.raises(StateError, match="missing"):
        load.confirm(0, 2)
    load.put(0, 1, bytes(state.chunk_bytes(0)))
    assert load.leaf(0) == strong_digest(bytes(state.chunk_bytes(0)))
    load.confirm(0, 2)
    assert load.version(0) == 2
    assert load.is_open
    commit(state)
    assert not load.is_open
    with pytest.raises(StateError, match="given up"):
        load.confirm(0, 3)
    assert StateLoad(void()).leaf(0) == b""


def test_a_commit_and_a_newer_load_end_a_load():
    state = founded()
    data = bytes(state.chunk_bytes(0))
    first = StateLoad(state)
    second = StateLoad(state)
    with pytest.raises(StateError, match="given up"):
        first.put(0, 1, data)
    second.put(0, 1, data)
    commit(state)
    digest = state.digest
    with pytest.raises(StateError, match="given up"):
        second.keep(0, 1)
    with pytest.raises(StateError, match="given up"):
        second.finish(1)
    assert state.digest == digest


def test_operations_are_taken_back_with_the_same_bytes():
    state = founded()
    commit(state)
    digest = state.digest
    place, generation = state.place, state.generation
    number = state.round
    for after in (number + 1, number + 2):
        head = EntryHead(after, GATHER, 0, (), b"", bytes(32), bytes(32), b"")
        state.apply(head, np.empty(0, np.uint8))
    state.rename(number)
    assert (state.place, state.generation) == (place, generation)
    assert state.digest == digest
    commit(state)
