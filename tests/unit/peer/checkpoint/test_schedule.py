"""Checkpoints in the background: who writes when, what is kept, and events in place of errors."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

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
from harness.failing_disk import disk
from harness.tinyrun import TinyRun
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.peer.checkpoint import schedule
from atoll.peer.checkpoint.reader import STATE_FILE, candidates
from atoll.peer.checkpoint.schedule import Checkpointer, CheckpointFolder, is_due
from atoll.peer.net.identity import Home

PATIENCE_S = 30.0  # only a hang ever takes this long


# ---------------------------------------------------------------- when


@given(every=st.integers(1, 50), members=st.integers(1, 60), start=st.integers(0, 1000))
def test_peers_take_turns(every: int, members: int, start: int) -> None:
    due = {
        number: [r for r in range(members) if is_due(number, every, r, members, last=number - 1)]
        for number in range(start, start + every)
    }
    ranks = [rank for ranks in due.values() for rank in ranks]
    assert sorted(ranks) == list(range(members))  # everyone once
    sizes = [len(ranks) for ranks in due.values()]
    assert max(sizes) - min(sizes) <= 1  # and never many at the same time


def test_who_missed_a_turn_does_not_miss_two() -> None:
    assert not is_due(11, 4, 0, 1, last=4)
    assert is_due(12, 4, 0, 1, last=4)
    assert not is_due(13, 4, 0, 1, last=6)
    assert is_due(14, 4, 0, 1, last=6)


@given(
    every=st.integers(1, 20),
    members=st.integers(1, 5),
    jumps=st.lists(st.integers(1, 7), min_size=1, max_size=30),
)
def test_who_moves_in_jumps_writes_as_often(every: int, members: int, jumps: list[int]) -> None:
    rank, number, last, written = members - 1, 0, 0, 0
    for jump in jumps:
        number += jump
        if is_due(number, every, rank, members, last, jump):
            last, written = number, written + 1
    turns = sum(is_due(n, every, rank, members, last=n) for n in range(1, number + 1))
    assert written <= turns
    assert written >= turns // max(1, -(-max(jumps) // every)) - 1


# ---------------------------------------------------------------- in the daemon


class Daemon:
    """What of a daemon a Checkpointer sees."""

    def __init__(self, folder: Path, home: Home, run: TinyRun, *, every: int = 1) -> None:
        self.notes: list[tuple[str, str]] = []
        self.run = run
        self._noted = asyncio.Event()
        self.written = 0
        self.checkpointer = Checkpointer(
            folder,
            every,
            run=RUN,
            secret=SECRET,
            home=home,
            daemon=self,
        )

    def incarnation(self) -> int:
        return 9

    def note(self, kind: str, text: str, **_: object) -> None:
        self.notes.append((kind, text))
        self._noted.set()

    def checkpointed(self, round_number: int) -> None:
        self.written += 1

    def commit(self) -> int:
        """A round and what the daemon does after it; nobody waits for the disk."""
        number = self.run.commit()
        self.checkpointer.committed(number, self.run.view, self.run.state, self.run.log)
        return number

    async def noted(self) -> tuple[str, str]:
        """The next event."""
        async with asyncio.timeout(PATIENCE_S):
            await self._noted.wait()
        self._noted.clear()
        return self.notes[-1]

    async def checkpoint(self) -> tuple[str, str]:
        """A round and the event of its checkpoint."""
        self.commit()
        return await self.noted()


def test_a_new_process_knows_the_checkpoints_of_its_history(
    home: Home, run: TinyRun, folder: Path
) -> None:
    """The first compaction of its ledger comes before its first round."""

    async def scenario() -> None:
        before = Daemon(folder, home, run)
        for _ in range(3):
            await before.checkpoint()
        checkpointer = Daemon(folder, home, run).checkpointer
        assert sorted(checkpointer.rounds(run.view)) == [3, 4]
        assert checkpointer.rounds(replace(run.view, lineage=bytes(32))) == []
        assert checkpointer.rounds(None) == []

    asyncio.run(scenario())


def test_the_last_two_whole_ones_are_kept(home: Home, run: TinyRun, folder: Path) -> None:
    async def scenario() -> None:
        daemon = Daemon(folder, home, run)
        for number in (2, 3, 4, 5):
            kind, text = await daemon.checkpoint()
            assert kind == "checkpoint", text
            latest = daemon.checkpointer.latest
            assert latest is not None
            assert latest.round == number
            assert str(latest.path) in text
            assert not daemon.checkpointer.writing
        assert [load_round(path) for path in candidates(folder)] == [5, 4]
        # A damaged one does not count, also for a process that did not write it.
        os.truncate(candidates(folder)[0] / STATE_FILE, 100)
        again = Daemon(folder, home, run)
        await again.checkpoint()
        assert [path.name[5:17] for path in candidates(folder)] == [f"{n:012d}" for n in (6, 5, 4)]
        await again.checkpoint()
        assert [load_round(path) for path in candidates(folder)] == [7, 6]

    asyncio.run(scenario())


def test_what_is_not_of_this_run_is_never_deleted(home: Home, run: TinyRun, folder: Path) -> None:
    same_name = write(writer_for(folder, home, secret=b"x" * 32), run)
    unreadable = folder / f"{RUN}-{1:012d}-00000000"
    unreadable.mkdir()
    (folder / "notes").write_text("mine")

    async def scenario() -> None:
        daemon = Daemon(folder, home, run)
        for _ in range(4):
            assert (await daemon.checkpoint())[0] == "checkpoint"

    asyncio.run(scenario())
    assert len(candidates(folder)) == 4
    assert same_name.exists()
    assert unreadable.exists()
    assert (folder / "notes").read_text() == "mine"


def test_what_a_resumed_run_has_given_up_goes_although_its_rounds_are_higher(
    home: Home, run: TinyRun, folder: Path
) -> None:
    """And what it does not continue stays: it may be all that is left of another history."""
    writer = writer_for(folder, home)
    shelf = CheckpointFolder(writer)

    def save(of: TinyRun, rounds: int, *ancestors: bytes) -> Path:
        while of.state.round < rounds:
            of.commit()
        view = replace(of.view, ancestors=ancestors)
        return writer.write(of.state, of.log, lambda: view, 5).path

    given_up = [save(run, 8), save(run, 9)]
    unrelated = TinyRun(home.peer_id, parameters=SMALL, lineage=b"U" * 32)
    resumed = TinyRun(home.peer_id, parameters=SMALL, lineage=b"R" * 32)
    kept = [save(unrelated, 9), save(resumed, 2, run.lineage)]
    shelf.prune(kept[-1])
    assert all(path.exists() for path in given_up)  # so far there is only one in their place
    kept.append(save(resumed, 3, run.lineage))
    shelf.prune(kept[-1])
    assert set(candidates(folder)) == set(kept)
    for each in (unrelated, resumed):
        each.close()


def test_a_peer_writes_at_its_turn_and_one_at_a_time(
    home: Home, run: TinyRun, folder: Path
) -> None:
    async def scenario() -> None:
        daemon = Daemon(folder, home, run, every=3)
        assert daemon.commit() == 2
        assert not daemon.checkpointer.writing  # this peer is the first of three: 3, 6, 9
        daemon.commit()
        assert daemon.checkpointer.writing
        for _ in range(3):
            daemon.commit()  # 6 is due as well
        await daemon.noted()
        assert len(daemon.notes) == 1
        assert len(candidates(folder)) == 1
        check_is(folder, run, load_round(folder))

    asyncio.run(scenario())


def test_collectives_alone_write_no_checkpoints(home: Home, run: TinyRun, folder: Path) -> None:
    """They change nothing, and come many times a second; the next step's is due at once."""

    async def scenario() -> None:
        daemon = Daemon(folder, home, run)
        await daemon.checkpoint()
        for _ in range(5):
            daemon.checkpointer.committed(run.operate(), run.view, run.state, run.log)
            assert not daemon.checkpointer.writing
        await daemon.checkpoint()
        assert len(daemon.notes) == 2
        check_is(folder, run, run.state.round)

    asyncio.run(scenario())


def test_what_may_be_a_copy_of_wrong_bytes_is_taken_back(
    home: Home, run: TinyRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory has failed: most others have other bytes. Older checkpoints stay."""

    async def scenario() -> None:
        daemon = Daemon(folder, home, run)
        checkpointer = daemon.checkpointer
        await daemon.checkpoint()
        monkeypatch.setattr(schedule, "DOUBT_S", 0.0)  # that one was long ago
        checkpointer.doubt()
        assert len(candidates(folder)) == 1
        daemon.commit()
        assert not checkpointer.writing  # the state is still in doubt
        checkpointer.trust()
        daemon.commit()
        checkpointer.doubt()  # while it is written
        kind, text = await daemon.noted()
        assert (kind, len(candidates(folder))) == ("checkpoint", 1)
        assert text == f"round {run.state.round} is taken back: it may have a copy of wrong bytes"
        checkpointer.trust()
        await daemon.checkpoint()
        assert len(candidates(folder)) == 2
        monkeypatch.undo()
        checkpointer.doubt()  # just after
        assert await daemon.noted() == (kind, text.replace("round 4", "round 5"))
        assert [load_round(folder), daemon.written] == [2, 2]
        checkpointer.trust()
        await daemon.checkpoint()
        check_is(folder, run, run.state.round)

    asyncio.run(scenario())


def test_older_checkpoints_stay_where_the_newest_is_taken_back(
    home: Home, run: TinyRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        daemon = Daemon(folder, home, run)
        for _ in range(2):
            await daemon.checkpoint()
        before = {path.name for path in candidates(folder)}
        monkeypatch.setattr(schedule, "DOUBT_S", 0.0)  # those were long ago
        daemon.commit()
        daemon.checkpointer.doubt()
        await daemon.noted()
        assert {path.name for path in candidates(folder)} == before
        assert len(before) == 2

    asyncio.run(scenario())


def test_rounds_that_overtake_every_try_are_an_event(
    home: Home, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TinyRun(home.peer_id, parameters=SMALL, log_bytes=1)  # two entries, whatever happens
    tries = []

    def act(chunk: int) -> None:
        if chunk == 1:
            tries.append(chunk)
            for _ in range(5):
                run.commit()

    async def scenario() -> None:
        before_each_chunk(run, monkeypatch, act)
        daemon = Daemon(folder, home, run)
        kind, text = await daemon.checkpoint()
        assert kind == "checkpoint"
        assert "no checkpoint this time: round" in text
        assert "is not in the log any more" in text
        assert len(tries) == 3
        assert os.listdir(folder) == []
        monkeypatch.undo()
        await daemon.checkpoint()
        check_is(folder, run, run.state.round)

    asyncio.run(scenario())
    run.close()


def test_people_are_told_what_is_being_written_and_since_when(
    home: Home, run: TinyRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    async def scenario() -> None:
        daemon = Daemon(folder, home, run)
        describe = daemon.checkpointer.describe_writing
        assert describe() == ""
        before_each_chunk(run, monkeypatch, lambda chunk: said.append(describe()))
        await daemon.checkpoint()
        assert describe() == ""

    asyncio.run(scenario())
    assert len(said) == 3
    writing = r"one is being written \(\d.* so far\): copying the state, from round 2 on"
    assert all(re.fullmatch(writing, line) for line in said)


def test_a_second_try_may_succeed(
    home: Home, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TinyRun(home.peer_id, parameters=SMALL, log_bytes=1)
    bursts = iter([5, 0])
    before_each_chunk(
        run, monkeypatch, lambda c: [run.commit() for _ in range(next(bursts) if c == 1 else 0)]
    )

    async def scenario() -> None:
        daemon = Daemon(folder, home, run)
        assert (await daemon.checkpoint())[0] == "checkpoint"
        check_is(folder, run, 7)

    asyncio.run(scenario())
    run.close()


@contextmanager
def little_room(folder: Path, nbytes: int) -> Iterator[None]:
    """No file in ``folder`` can grow beyond ``nbytes``: a tiny disk if we may mount one."""
    size = f"size={nbytes},mode=700"
    command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)]
    if os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0:
        try:
            yield
        finally:
            subprocess.run(["umount", str(folder)], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_an_event_and_the_next_try_may_succeed(
    home: Home, run: TinyRun, folder: Path
) -> None:
    async def scenario() -> None:
        with little_room(folder, 40_000):  # the state takes 72,000
            daemon = Daemon(folder, home, run)
            kind, text = await daemon.checkpoint()
            assert kind == "disk"
            assert f"and {folder} has " in text or "File too large" in text
            assert os.listdir(folder) == []
            assert daemon.checkpointer.latest is None
        assert (await daemon.checkpoint())[0] == "checkpoint"
        check_is(folder, run, 3)

    asyncio.run(scenario())


@pytest.mark.parametrize("at", [1, 5, 12, 20, 30])
def test_a_disk_that_fails_is_an_event(home: Home, run: TinyRun, folder: Path, at: int) -> None:
    async def scenario() -> None:
        daemon = Daemon(folder, home, run)
        with disk(at, OSError(errno.EIO, "Input/output error")) as cut:
            kind, text = await daemon.checkpoint()
        assert cut.calls >= at
        assert kind == "disk"
        assert "Input/output error" in text or "cannot be read" in text
        assert (await daemon.checkpoint())[0] == "checkpoint"
        check_is(folder, run, 3)

    asyncio.run(scenario())


def test_a_folder_that_vanishes_is_an_event(home: Home, run: TinyRun, folder: Path) -> None:
    async def scenario() -> None:
        daemon = Daemon(folder, home, run)
        os.rmdir(folder)
        assert await daemon.checkpoint() == (
            "disk",
            "no checkpoint: No such file or directory; next try when it is due again",
        )

    asyncio.run(scenario())


def test_closing_ends_a_write_and_the_next_start_cleans_up(
    home: Home, run: TinyRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        daemon = Daemon(folder, home, run)
        loop, closing = asyncio.get_running_loop(), asyncio.Event()
        before_each_chunk(
            run,
            monkeypatch,
            lambda chunk: (
                loop.call_soon_threadsafe(closing.set),
                daemon.checkpointer._writer.stopped.wait(PATIENCE_S),
            )[0],
        )
        daemon.commit()
        await closing.wait()
        await daemon.checkpointer.close()
        await daemon.checkpointer.close()
        assert not daemon.checkpointer.writing
        assert daemon.notes == []
        assert os.listdir(folder) == []
        daemon.commit()
        assert not daemon.checkpointer.writing  # none after the end

        left = daemon.checkpointer._writer.temporary
        for path in (left, left.with_suffix(".old")):
            path.mkdir()
            (path / STATE_FILE).write_text("half")
        Daemon(folder, home, run)
        assert os.listdir(folder) == []

    asyncio.run(scenario())


def test_a_folder_that_cannot_be_made_is_refused_at_once(home: Home, run: TinyRun) -> None:
    async def scenario() -> None:
        (home.path / "file").write_text("")
        with pytest.raises(ConfigError, match="no checkpoints can be written to"):
            Daemon(home.path / "file" / "below", home, run)

    asyncio.run(scenario())
