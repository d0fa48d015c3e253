"""R on disk: at its place, whole or said chunk by chunk, and kept as long as it is needed."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from pathlib import Path

import pytest
from harness.failing_disk import small_disk

from atoll.collectives.digests import strong_digest
from atoll.collectives.errors import DiskError
from atoll.peer.durable.disk import Bytes, DiskFile, RealDisk
from atoll.peer.durable.ledger import open_ledger
from atoll.peer.durable.round_files import RoundFiles, RoundName, RoundReader, unneeded

CHUNK = 300_000
R = random.Random(0).randbytes(40 * CHUNK + 17)  # more than is given to the disk at a time
PLACES = [(start, min(len(R), start + CHUNK)) for start in range(0, len(R), CHUNK)]
DIGESTS = [strong_digest(R[start:stop]) for start, stop in PLACES]
NAME = RoundName(7, 2, 1)


def write(files: RoundFiles, name: RoundName = NAME) -> RoundReader:
    writer = files.write(name, len(R))
    for start, stop in random.Random(1).sample(PLACES, len(PLACES)):
        writer.put(start, memoryview(R)[start:stop])
    writer.seal()
    return files.open(name)


def test_chunks_come_in_any_order(tmp_path: Path) -> None:
    files = RoundFiles(RealDisk(), tmp_path / "rounds")
    reader = write(files)
    assert reader.bad_chunks(PLACES, DIGESTS) == []
    assert (tmp_path / "rounds" / "7-2-1").read_bytes() == R
    reader.close()
    assert files.names() == [NAME]
    files.remove([NAME, NAME])
    assert files.names() == []


def test_bad_chunks_are_named_one_by_one(tmp_path: Path) -> None:
    reader = write(RoundFiles(RealDisk(), tmp_path / "rounds"))
    with (tmp_path / "rounds" / "7-2-1").open("r+b") as file:
        file.seek(PLACES[3][0] + 5)
        file.write(b"other bytes")
        file.truncate(PLACES[-2][0] + 1)
    count = len(PLACES)
    assert reader.bad_chunks(PLACES, DIGESTS) == [3, count - 2, count - 1]
    reader.close()


def test_a_new_attempt_has_a_file_of_its_own(tmp_path: Path) -> None:
    files = RoundFiles(RealDisk(), tmp_path / "rounds")
    first = write(files)
    later = NAME._replace(attempt=2)
    writer = files.write(later, len(R))
    writer.keep(first, PLACES[:5])
    for start, stop in PLACES[5:]:
        writer.put(start, R[start:stop][::-1])
    writer.seal()
    second = files.open(later)
    assert second.bad_chunks(PLACES, DIGESTS) == list(range(5, len(PLACES)))
    assert first.bad_chunks(PLACES, DIGESTS) == []
    first.close()
    second.close()


def test_what_is_begun_again_under_its_name_is_not_taken_away(tmp_path: Path) -> None:
    """The thread of the first try still waits for the disk when the second begins."""
    goes_on = threading.Event()

    class SlowOnce(RealDisk):
        waits = True

        def sync_folder(self, path: Path) -> None:
            if threading.current_thread().name.startswith("write-") and self.waits:
                self.waits = False
                goes_on.wait(30)
            super().sync_folder(path)

    files = RoundFiles(SlowOnce(), tmp_path / "rounds")
    first = files.write(NAME, len(R))
    first.drop()
    threading.Timer(0.2, goes_on.set).start()
    reader = write(files)
    goes_on.wait()
    first.abandon()  # which waits until its thread has ended
    assert reader.bad_chunks(PLACES, DIGESTS) == []
    reader.close()
    assert files.names() == [NAME]


def test_what_is_being_written_is_not_removed(tmp_path: Path) -> None:
    files = RoundFiles(RealDisk(), tmp_path / "rounds")
    writer = files.write(NAME, len(R))
    files.remove([NAME])
    writer.fill(R)
    writer.seal()
    assert files.names() == [NAME]
    files.remove([NAME])
    assert files.names() == []


def test_a_write_that_failed_leaves_nothing_once_it_is_dropped(tmp_path: Path) -> None:
    class Failing(RealDisk):
        def open(self, path: Path, *, create: bool = False) -> DiskFile:
            file = super().open(path, create=create)

            def write(data: Bytes, offset: int) -> None:
                raise OSError(errno.EIO, "I/O error")

            file.write = write  # type: ignore[method-assign]
            return file

    files = RoundFiles(Failing(), tmp_path / "rounds")
    open_before = len(os.listdir("/proc/self/fd"))
    writers = [files.write(NAME._replace(attempt=number), len(R)) for number in range(1, 9)]
    for writer in writers:
        writer.fill(R)
    time.sleep(0.1)  # all have failed
    for writer in writers:
        writer.abandon()
    assert files.names() == []
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_an_attempt_that_has_ended_leaves_nothing(tmp_path: Path) -> None:
    files = RoundFiles(RealDisk(), tmp_path / "rounds")
    writer = files.write(NAME, len(R))
    writer.put(0, R[:CHUNK])
    with pytest.raises(ValueError, match="outside R"):
        writer.put(len(R) - 1, b"xx")
    writer.abandon()
    assert files.names() == []


def test_what_was_not_put_early_is_filled_in(tmp_path: Path) -> None:
    """In whatever order chunks have become final, twice perhaps."""
    files = RoundFiles(RealDisk(), tmp_path / "rounds")
    writer = files.write(NAME, len(R))
    for start, stop in (PLACES[3], PLACES[1], PLACES[3], PLACES[-1]):
        writer.put(start, R[start:stop])
    writer.fill(R)
    writer.seal()
    reader = files.open(NAME)
    assert reader.bad_chunks(PLACES, DIGESTS) == []
    reader.close()


def test_only_what_no_start_could_need_is_deleted() -> None:
    old, committed, loser, ready, older, partial = (
        RoundName(3, 1, 1),
        RoundName(5, 1, 2),
        RoundName(5, 1, 3),
        RoundName(6, 2, 2),
        RoundName(6, 2, 1),
        RoundName(6, 2, 3),
    )
    present = {old, committed, loser, ready, older, partial}
    named = {
        "ready": {old, committed, loser, ready, older},
        "committed": {3: old, 5: committed},
    }
    assert unneeded(present, **named, checkpoints=[]) == {loser, older, partial}
    assert unneeded(present, **named, checkpoints=[4]) == {loser, older, partial}
    assert unneeded(present, **named, checkpoints=[4, 5]) == {old, loser, older, partial}
    assert unneeded(present, **named, checkpoints=[3, 5, 6]) == present - {ready}
    assert unneeded(present, **named, checkpoints=[], writing={partial}) == {loser, older}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_a_full_disk_is_said_and_the_ledger_goes_on(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 16 << 20) as folder:
        ledger = open_ledger(RealDisk(), folder / "votes").ledger
        files = RoundFiles(RealDisk(), folder / "rounds")
        with pytest.raises(DiskError, match=r"round 7 needs 12 MB in .*: the disk is full"):
            files.write(NAME, len(R))
        assert files.names() == []
        (folder / "others").write_bytes(bytes(7 << 20))
        for _ in range(1000):
            ledger.append(1, bytes(1000))
            ledger.sync()
            if ledger.wants_compaction:
                ledger.compact([(2, b"all")], ledger.position)
        ledger.close()
