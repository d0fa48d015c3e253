"""Received chunks on disk: what comes back, and what a disk may do to them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.collectives.digests import strong_digest
from atoll.peer.state_sync.chunk_cache import RECORD, WAITING_MAX, ChunkCache

BLOB = b"b" * 32
SIZES = [1000, 1000, 600]


class Bench:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "received"
        self.logs: list[str] = []
        self.cache = ChunkCache(self.path, self.logs.append)

    def begin(self, blob: bytes = BLOB) -> list[tuple[int, int, bytes, bytes]]:
        self.cache.begin(blob, sum(SIZES))
        return [(c, n, d, data) for c, n, d, _, data in self.cache.chunks(SIZES)]

    def add(self, chunk: int, number: int, fill: int = 7) -> tuple[int, int, bytes, bytes]:
        data, digest = bytes([fill]) * SIZES[chunk], bytes([number]) * 32
        self.cache.add(chunk, number, digest, strong_digest(data), memoryview(data))
        return chunk, number, digest, data

    def close(self) -> None:
        self.cache.close()
        self.cache.settle()

    def clear(self) -> None:
        self.cache.clear()
        self.cache.settle()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def test_what_was_added_is_there_in_the_next_life_and_can_be_added_to(bench: Bench) -> None:
    assert bench.begin() == []
    added = [bench.add(0, 1), bench.add(2, 1)]
    bench.close()
    assert bench.begin() == added
    added.append(bench.add(0, 2, fill=9))
    bench.close()
    assert bench.begin() == added
    assert not bench.logs
    assert bench.path.stat().st_mode & 0o777 == 0o600


def test_chunks_of_another_run_are_dropped(bench: Bench) -> None:
    bench.begin()
    bench.add(0, 1)
    assert bench.begin(b"o" * 32) == []
    assert bench.begin() == []


@pytest.mark.parametrize("at", [0, 20, 48 + 3, 48 + RECORD.size + 5])
def test_a_flipped_bit_ends_what_is_believed(bench: Bench, at: int) -> None:
    bench.begin()
    first = bench.add(0, 1)
    bench.add(1, 1)
    bench.close()
    at += (RECORD.size + SIZES[0]) * (at >= 48)  # in the second record, if in any
    data = bytearray(bench.path.read_bytes())
    data[at] ^= 1
    bench.path.write_bytes(data)
    assert bench.begin() == ([first] if at >= 48 else [])
    again = bench.add(1, 3)
    assert bench.begin() == ([first, again] if at >= 48 else [again])


def test_a_record_that_was_cut_short_is_overwritten(bench: Bench) -> None:
    bench.begin()
    first = bench.add(0, 1)
    bench.add(1, 1)
    bench.close()
    os.truncate(bench.path, bench.path.stat().st_size - 1)
    assert bench.begin() == [first]
    again = bench.add(2, 1)
    assert bench.begin() == [first, again]


def test_it_grows_to_twice_the_state_and_no_further(bench: Bench) -> None:
    bench.begin()
    for number in range(20):
        bench.add(0, number)
    bench.close()
    assert bench.path.stat().st_size < 2 * sum(SIZES) + 100
    assert not bench.logs


def test_a_full_disk_is_said_once_and_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    bench.begin()

    def full(fd: int, parts: list[bytes]) -> int:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "writev", full)
        bench.add(0, 1)
        bench.add(1, 1)
        bench.close()
    assert len(bench.logs) == 1
    assert "No space left" in bench.logs[0]
    assert not bench.path.exists()


def test_a_state_too_large_for_the_disk_is_not_kept(bench: Bench) -> None:
    bench.cache.begin(BLOB, 1 << 60)
    assert "the state takes" in bench.logs[0]
    bench.add(0, 1)
    bench.close()
    assert not bench.path.exists()


def test_no_link_is_followed(bench: Bench, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    bench.path.symlink_to(target)
    assert bench.begin() == []
    assert len(bench.logs) == 1
    assert target.read_text() == "precious"


def test_a_state_that_is_in_place_needs_nothing_kept(bench: Bench) -> None:
    bench.begin()
    bench.add(0, 1)
    bench.clear()
    assert not bench.path.exists()
    bench.add(1, 1)
    bench.clear()


def test_what_is_closed_while_it_is_read_ends_there(bench: Bench) -> None:
    """A newer task, or the end of the daemon, does not wait for a gigabyte to be read."""
    bench.begin()
    bench.add(0, 1)
    bench.add(1, 1)
    bench.cache.begin(BLOB, sum(SIZES))
    chunks = bench.cache.chunks(SIZES)
    assert next(chunks)[0] == 0
    bench.close()
    assert list(chunks) == []
    assert not bench.logs
    assert [chunk for chunk, *_ in bench.begin()] == [0, 1]


def test_a_file_that_cannot_be_removed_is_said_and_ends_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.begin()

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        bench.clear()
    assert "cannot be removed" in bench.logs[0]


class SlowDisk:
    """Write nothing until ``goes_on`` is set; give up where that does not come."""

    def __init__(self) -> None:
        self.goes_on, self.is_asked = threading.Event(), threading.Event()
        self._writev = os.writev

    def __call__(self, fd: int, parts: tuple[bytes, bytes]) -> int:
        self.is_asked.set()
        if not self.goes_on.wait(10):
            raise OSError("whoever adds waits for the disk")
        return self._writev(fd, parts)


def test_nobody_waits_for_a_disk_that_is_slow(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop closes it, and the threads that add hold a lock that the loop takes."""
    disk = SlowDisk()
    bench.begin()
    monkeypatch.setattr(os, "writev", disk)
    added = [bench.add(0, number) for number in range(3)]
    bench.cache.close()
    disk.goes_on.set()
    bench.cache.settle()
    assert bench.begin() == added


def test_what_comes_faster_than_the_disk_writes_is_not_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk()
    bench.cache.begin(BLOB, 1000 * sum(SIZES))
    monkeypatch.setattr(os, "writev", disk)
    bench.add(0, 0)
    assert disk.is_asked.wait(10)  # for the first: the others wait
    for number in range(1, 3 * WAITING_MAX):
        bench.add(0, number)
    disk.goes_on.set()
    bench.close()
    assert [number for _, number, *_ in bench.begin()] == [*range(WAITING_MAX + 1)]


def test_what_an_earlier_process_has_left_is_removed_too(bench: Bench) -> None:
    bench.begin()
    bench.add(0, 1)
    bench.close()
    bench.clear()
    assert not bench.path.exists()


def test_two_that_begin_at_once_leave_no_thread(bench: Bench) -> None:
    begins = [threading.Thread(target=bench.begin) for _ in range(8)]
    for begin in begins:
        begin.start()
    for begin in begins:
        begin.join()
    bench.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "chunk-cache"]
