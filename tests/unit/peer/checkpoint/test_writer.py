"""A checkpoint is one round's state whatever commits meanwhile; a crash at any step of writing it
leaves the checkpoints of before, or one more."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from harness.checkpoints import (
    RUN,
    SECRET,
    SMALL,
    before_each_chunk,
    check_is,
    load_round,
    write,
    writer_for,
)
from harness.failing_disk import Disk, Killed, disk
from harness.tinyrun import TinyRun

from atoll.collectives.errors import StateError
from atoll.peer.checkpoint.reader import STATE_FILE, candidates, load_checkpoint, read_manifest
from atoll.peer.checkpoint.schedule import CheckpointFolder
from atoll.peer.net.identity import Home
from atoll.peer.rounds.state import CHUNK_COPY_BYTES_MAX, ReplicatedState, StateLoad

# ---------------------------------------------------------------- the state after one round


@pytest.mark.parametrize("fragments", [1, 2, 3])
@pytest.mark.parametrize(
    ("codec", "aggregate"), [("int8", "mean"), ("float32", "mean"), ("topk", "senders")]
)
@pytest.mark.parametrize("busy", [(0,), (1,), (2,), (1, 1, 2), (0, 1, 2, 2, 2)])
def test_rounds_that_commit_meanwhile_are_brought_to_one(
    home: Home,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    fragments: int,
    codec: str,
    aggregate: str,
    busy: tuple[int, ...],
) -> None:
    options = {"fragments": fragments, "codec": codec, "aggregate": aggregate}
    run = TinyRun(home.peer_id, parameters=SMALL, **options)
    for _ in range(3):
        run.commit()
    before_each_chunk(run, monkeypatch, lambda chunk: [run.commit() for c in busy if c == chunk])
    path = write(writer_for(folder, home), run)
    check_is(path, run, 4 + len(busy))
    run.close()


def test_steps_that_depend_on_the_number_of_peers_are_taken_again(
    home: Home, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TinyRun(home.peer_id, parameters=SMALL, by_peers=True)
    before_each_chunk(run, monkeypatch, lambda chunk: [run.commit() for _ in range(chunk)])
    path = write(writer_for(folder, home), run)
    check_is(path, run, run.state.round)
    run.close()


@pytest.mark.parametrize("steps", ["os", "so", "sos", "oso", "ooo", "ssoos"])
def test_collectives_between_the_steps_move_the_round_only(
    home: Home, run: TinyRun, folder: Path, monkeypatch: pytest.MonkeyPatch, steps: str
) -> None:
    """s: a step, o: a collective of the trainers' own."""
    commits = {"s": run.commit, "o": run.operate}
    run.operate()
    before_each_chunk(run, monkeypatch, lambda c: [commits[s]() for s in steps if c == 1])
    path = write(writer_for(folder, home), run)
    check_is(path, run, 2 + len(steps))
    assert read_manifest(path).chain == run.chain


def test_a_state_that_was_loaded_needs_no_entries(home: Home, run: TinyRun, folder: Path) -> None:
    run.commit()
    run.log.restart(2, run.state.digest, run.chain)  # as after a catch-up, or from a checkpoint
    path = write(writer_for(folder, home), run)
    check_is(path, run, 2)
    assert read_manifest(path).chain == run.chain


def copied(state: ReplicatedState) -> ReplicatedState:
    """Return the same state in other memory, as it is read again to take back what comes next."""
    copy = ReplicatedState(state.blob)
    load, out = StateLoad(copy), memoryview(bytearray(CHUNK_COPY_BYTES_MAX))
    for chunk in range(state.grid.count):
        load.put(chunk, state.round, out[: state.read_chunk(chunk, out).nbytes])
    load.finish(state.round, state.digest)
    return copy


def test_a_round_that_is_taken_back_meanwhile_is_noticed(
    home: Home, run: TinyRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.commit()
    before = copied(run.state)

    def act(chunk: int) -> None:
        if chunk == 1:
            run.commit()
        elif chunk == 2:
            run.state = before
            run.log.cut_after(2)
            run.commit()  # another round 3 than the one that chunk 1 is of

    before_each_chunk(run, monkeypatch, act)
    with pytest.raises(StateError, match="round 3 was taken back"):
        write(writer_for(folder, home), run)
    assert os.listdir(folder) == []


def test_a_lineage_that_changes_meanwhile_is_noticed(
    home: Home, run: TinyRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork(chunk: int) -> None:
        run.lineage = b"F" * 32

    before_each_chunk(run, monkeypatch, fork)
    with pytest.raises(StateError, match="in another lineage"):
        write(writer_for(folder, home), run)
    assert read_manifest(write(writer_for(folder, home), run)).lineage == run.lineage


def test_entries_that_are_needed_stay_in_the_log(
    home: Home, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = TinyRun(home.peer_id, parameters=SMALL)
    probe.commit()
    encoded = probe.log.encoded(2)
    assert encoded is not None
    probe.close()
    # The cap is 3 entries, so 5 rounds fit while they are pinned and not otherwise.
    run = TinyRun(home.peer_id, parameters=SMALL, log_bytes=3 * (encoded.nbytes + 60))
    for _ in range(4):
        run.commit()
    before_each_chunk(run, monkeypatch, lambda c: [run.commit() for _ in range(5 * (c == 1))])
    check_is(write(writer_for(folder, home), run), run, 10)
    assert run.log.first > 6  # given back
    run.close()


def test_a_peer_that_ends_gives_up_its_checkpoint(
    home: Home, run: TinyRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_for(folder, home)
    before_each_chunk(run, monkeypatch, lambda chunk: writer.stopped.set())
    with pytest.raises(StateError, match="the peer is ending"):
        write(writer, run)
    assert os.listdir(folder) == []


def test_two_peers_may_share_a_folder(home: Home, run: TinyRun, folder: Path) -> None:
    with Home.open(folder.parent / "other") as other_home:
        first, second = writer_for(folder, home), writer_for(folder, other_home)
        path = write(first, run)
        manifest = (path / "manifest.json").read_bytes()
        assert write(second, run) == path
        assert (path / "manifest.json").read_bytes() == manifest  # the first one's stays
        os.truncate(path / STATE_FILE, 100)
        assert write(second, run) == path  # a damaged one is replaced
        check_is(path, run, 1)
        assert os.listdir(folder) == [path.name]


def test_what_an_earlier_attempt_has_left_is_no_obstacle(
    home: Home, run: TinyRun, folder: Path
) -> None:
    writer = writer_for(folder, home)
    writer.temporary.mkdir()
    (writer.temporary / STATE_FILE).write_text("half")
    check_is(write(writer, run), run, 1)


def test_the_last_two_are_those_of_one_lineage(home: Home, run: TinyRun, folder: Path) -> None:
    writer = writer_for(folder, home)
    fork = TinyRun(home.peer_id, parameters=SMALL, lineage=b"F" * 32, seed=1)
    for other, round_number in ((fork, 2), (run, 3), (fork, 4)):
        while other.state.round < round_number:
            other.commit()
        newest = write(writer, other)
    CheckpointFolder(writer).prune(newest)
    assert [load_round(path) for path in candidates(folder)] == [4, 3, 2]
    fork.commit()
    CheckpointFolder(writer).prune(write(writer, fork))
    assert [load_round(path) for path in candidates(folder)] == [5, 4]
    fork.close()


def test_a_round_that_is_late_in_the_log_is_named(
    home: Home, run: TinyRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, append = writer_for(folder, home), run.log.append
    named = threading.Event()

    def append_later(*entry: Any) -> None:
        def wait() -> None:
            while writer.doing != "waiting for round 2 to be in the log":
                time.sleep(0.001)
            named.set()
            append(*entry)

        threading.Thread(target=wait).start()

    monkeypatch.setattr(run.log, "append", append_later)
    before_each_chunk(run, monkeypatch, lambda chunk: chunk == 1 and run.commit())
    check_is(write(writer, run), run, 2)
    assert named.is_set()
    assert writer.doing == ""


# ---------------------------------------------------------------- a crash at every step


def cuts(home: Home, run: TinyRun, folder: Path, error: OSError | None) -> Iterator[Disk]:
    """Write the checkpoint of round 4, and prune, cut at call 1, 2, 3 ... until all of it is done.

    Before each there are the checkpoints of rounds 2 and 3.
    """
    store = folder.parent / "store"
    store.mkdir()
    for _ in range(2):
        run.commit()
        write(writer_for(store, home), run)
    run.commit()
    for at in range(1, 1000):
        shutil.rmtree(folder)
        shutil.copytree(store, folder)
        writer = writer_for(folder, home)
        with disk(at, error) as cut:
            with suppress(Killed, OSError, StateError):
                CheckpointFolder(writer).prune(write(writer, run))
        yield cut
        if cut.calls < at:
            return
    raise AssertionError("the write never came to its end")


@pytest.fixture
def _own_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stands before ``os`` remembers what was synced, so the machine's own disk need not wait
    for it some thousands of times."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.mark.usefixtures("_own_disk")
@pytest.mark.parametrize("power", ["stays", "fails"])
def test_a_crash_at_any_step_leaves_the_old_checkpoints_or_the_new_one(
    home: Home, run: TinyRun, folder: Path, power: str
) -> None:
    rounds = []
    for cut in cuts(home, run, folder, None):
        if power == "fails":
            cut.lose_what_was_not_synced()
        loaded = load_checkpoint(folder, run=RUN, secret=SECRET)
        rounds.append(loaded.round)
        assert loaded.passed_over == ()  # nothing half-done has a checkpoint's name
        loaded.state.close()
        check_is(folder, run, loaded.round)
        writer = writer_for(folder, home)
        writer.clean()
        names = [path.name for path in candidates(folder)]
        assert sorted(os.listdir(folder)) == sorted(names)  # nothing else is left
        assert len(names) >= 2
        CheckpointFolder(writer).prune(write(writer, run))  # and the next one succeeds
        assert [load_round(path) for path in candidates(folder)] == [4, 3]
    assert len(rounds) > 40
    assert rounds == sorted(rounds)
    assert set(rounds) == {3, 4}


def test_a_finished_checkpoint_outlives_a_power_failure(
    home: Home, run: TinyRun, folder: Path
) -> None:
    with disk(1000, None) as cut:
        path = write(writer_for(folder, home), run)
    assert cut.calls < 1000
    cut.lose_what_was_not_synced()
    check_is(path, run, 1)


@pytest.mark.usefixtures("_own_disk")
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_an_error_at_any_step_leaves_nothing_half_done(
    home: Home, run: TinyRun, folder: Path, number: int
) -> None:
    rounds = []
    for _ in cuts(home, run, folder, OSError(number, os.strerror(number))):
        loaded = load_checkpoint(folder, run=RUN, secret=SECRET)
        rounds.append(loaded.round)
        loaded.state.close()
        check_is(folder, run, rounds[-1])
        assert len(candidates(folder)) >= 2
    assert set(rounds) == {3, 4}
