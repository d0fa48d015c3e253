from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.optim.footprint import LOG_BYTES_DEFAULT, LOG_ENTRIES_MAX, LOG_ENTRIES_MIN, PINNED_FACTOR
from atoll.peer.durable.disk import RealDisk
from atoll.peer.durable.round_files import RoundFiles, RoundName
from atoll.peer.rounds.entries import INIT, STEP, EntryHead, EntryOrigin
from atoll.peer.rounds.log import DIGESTS_MAX, RoundLog

SIZE = 1000
ENTRY = SIZE + 40  # with its one participant
ORIGIN = EntryOrigin((b"p" * 32,), (1.0,))


def head(number: int) -> EntryHead:
    return EntryHead(number, STEP, 0, (ORIGIN,), b"", b"r" * 32, number.to_bytes(32, "big"))


def digest(number: int) -> bytes:
    return number.to_bytes(32, "little")


def append(log: RoundLog, number: int, size: int = SIZE, *, lent: bool = False) -> np.ndarray:
    array = np.full(size, number % 256, np.uint8)
    log.append(head(number), array, digest(number), lent=lent)
    return array


def filled(rounds: int, cap_entries: int) -> RoundLog:
    log = RoundLog(cap_entries * ENTRY)
    for number in range(1, rounds + 1):
        append(log, number)
    return log


def check(log: RoundLog, first: int, last: int) -> None:
    assert (log.first, log.last) == (first, last)
    for number in range(first - 2, last + 3):
        held = first <= number <= last
        assert log.head(number) == (head(number) if held else None)
        encoded = log.encoded(number)
        if held:
            assert encoded is not None
            assert set(encoded) == {number % 256}
        else:
            assert encoded is None


def test_an_empty_log_has_no_range():
    check(RoundLog(), 1, 0)
    assert RoundLog().cap_bytes == LOG_BYTES_DEFAULT == 256 << 20


def test_the_oldest_go_at_the_cap():
    check(filled(5, 5), 1, 5)
    log = filled(6, 5)
    check(log, 2, 6)
    assert log.nbytes == 5 * ENTRY


@pytest.mark.parametrize("cap", [0, 1])
def test_two_stay_even_above_the_cap(cap):
    assert LOG_ENTRIES_MIN == 2
    check(filled(5, cap), 4, 5)


def test_small_entries_are_capped_by_number():
    log = RoundLog()
    for number in range(1, LOG_ENTRIES_MAX + 11):
        append(log, number, 1)
    assert (log.first, log.last) == (11, LOG_ENTRIES_MAX + 10)


def test_pinned_entries_stay_up_to_twice_the_cap():
    log = filled(4, 4)
    assert log.pin(3)
    for number in range(5, 9):
        append(log, number)
    check(log, 3, 8)
    for number in range(9, 13):
        append(log, number)
    check(log, 13 - PINNED_FACTOR * 4, 12)
    log.unpin(3)
    check(log, 9, 12)


def test_every_pin_counts():
    log = filled(2, 2)
    assert log.pin(2)
    assert log.pin(2)
    log.unpin(2)
    append(log, 3)
    append(log, 4)
    check(log, 2, 4)
    log.unpin(2)
    check(log, 3, 4)


def test_a_pin_says_whether_it_came_in_time():
    log = filled(6, 4)
    assert [log.pin(number) for number in (2, 3, 6, 7, 8)] == [False, True, True, True, False]


def test_a_pin_of_what_comes_next_keeps_that_and_not_what_was():
    log = filled(3, 3)
    assert log.pin(4)
    for number in (4, 5, 6, 7, 8):
        append(log, number)
    check(log, 4, 8)


def test_cut_after_forgets_what_was_undone():
    log = filled(6, 10)
    log.cut_after(4)
    check(log, 1, 4)
    assert log.nbytes == 4 * ENTRY
    assert [log.digest_after(n) for n in (4, 5)] == [digest(4), None]
    append(log, 5)
    check(log, 1, 5)
    log.cut_after(9)
    check(log, 1, 5)
    log.cut_after(0)
    check(log, 1, 0)


@pytest.mark.parametrize("number", [9, 4, 6])
def test_an_entry_that_does_not_continue_begins_the_log_anew(number):
    log = filled(6, 10)
    append(log, number)
    check(log, number, number)
    assert log.nbytes == ENTRY
    assert log.digest_after(3) is None


def test_a_loaded_state_leaves_no_entries():
    log = filled(3, 10)
    log.restart(20, digest(20))
    check(log, 21, 20)
    assert log.digest_after(20) == digest(20)
    assert log.digest_after(3) is None
    append(log, 21)
    check(log, 21, 21)
    assert log.digest_after(20) == digest(20)


def test_digests_outlive_their_entries():
    log = filled(DIGESTS_MAX + 5, 2)
    assert log.digest_after(5) is None
    assert log.digest_after(6) == digest(6)
    assert log.digest_after(DIGESTS_MAX + 5) == digest(DIGESTS_MAX + 5)


def test_memory_of_a_dropped_entry_is_used_again():
    log = RoundLog(2 * ENTRY)
    arrays = [append(log, number) for number in (1, 2, 3)]
    assert log.spare(SIZE - 1) is not arrays[0]
    assert log.spare(SIZE) is arrays[0]
    another = log.spare(SIZE)
    assert all(another is not array for array in arrays)
    assert (another.dtype, another.shape) == (np.uint8, (SIZE,))


def test_memory_of_the_first_parameters_is_given_up():
    """No result fits it, so it would stay as long as the run."""
    log = RoundLog(2 * ENTRY)
    array = np.zeros(4 * SIZE, np.uint8)
    log.append(replace(head(1), kind=INIT), array, digest(1))
    held = weakref.ref(array)
    del array
    for number in (2, 3, 4):
        append(log, number)
    assert held() is None


def test_memory_that_somebody_reads_is_not_used_again():
    log = filled(2, 2)
    read = log.encoded(1)
    append(log, 3)
    assert log.first == 2
    assert log.spare(SIZE) is not read


def test_undone_memory_is_not_used_again():
    """The runner may still hold the result of a round that it is about to apply again."""
    log = RoundLog()
    array = append(log, 1)
    log.cut_after(0)
    assert log.spare(SIZE) is not array


ops = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 3 * SIZE)),
    st.tuples(st.sampled_from(["pin", "unpin", "cut"]), st.integers(0, 8)),
)


@given(st.lists(ops, max_size=60))
def test_the_log_stays_contiguous_and_within_its_cap(steps):
    log = RoundLog(4 * ENTRY)
    pins: list[int] = []
    for what, value in steps:
        if what == "append":
            append(log, log.last + 1, value)
        elif what == "pin":
            pins.append(max(0, log.last - value))
            log.pin(pins[-1])
        elif what == "unpin" and pins:
            log.unpin(pins.pop(value % len(pins)))
        elif what == "cut":
            log.cut_after(max(0, log.last - value // 2))
        heads = [log.head(number) for number in range(log.first, log.last + 1)]
        assert all(found is not None for found in heads)
        assert log.head(log.first - 1) is None
        limit = log.cap_bytes * (PINNED_FACTOR if pins else 1)
        assert len(heads) <= LOG_ENTRIES_MIN or log.nbytes <= limit
        encoded = [log.encoded(number) for number in range(log.first, log.last + 1)]
        assert log.nbytes == sum(array.nbytes + 40 for array in encoded if array is not None)


# ---------------------------------------------------------------- rounds on the disk


class DiskLog:
    """A log whose rounds go to a disk, each attempt under a name of its own."""

    def __init__(self, folder: Path, cap_entries: int) -> None:
        self.files = RoundFiles(RealDisk(), folder)
        self.log = RoundLog(cap_entries * ENTRY, self.files)

    def save(self, number: int) -> RoundName:
        name = RoundName(number, 1, 1)
        writer = self.files.write(name, SIZE)
        writer.put(0, bytes([number % 256]) * SIZE)
        writer.seal()
        self.log.stored(name, head(number).root)
        return name

    def parts(self) -> list[int]:
        """Of which rounds, the last fifty, the bytes can be had, and are right."""
        numbers = range(max(1, self.log.last - 49), self.log.last + 1)
        found = {number: self.log.part(number, 1, SIZE) for number in numbers}
        return [n for n, part in found.items() if part == bytes([n % 256]) * (SIZE - 1)]


@pytest.mark.parametrize("is_late", [False, True])
def test_what_is_on_the_disk_is_read_from_there(tmp_path: Path, is_late: bool) -> None:
    """Also where a slow disk has it only when the round is long committed."""
    disk = DiskLog(tmp_path, 6)
    for number in range(1, 31):
        if not is_late:
            disk.save(number)
        append(disk.log, number)
        if is_late and number > 2:
            disk.save(number - 2)
    assert disk.log.first == 1
    assert disk.parts() == [*range(1, 31)]
    in_memory = [number for number in range(1, 31) if disk.log.encoded(number) is not None]
    assert in_memory == ([29, 30] if is_late else [])
    assert disk.log.nbytes < (5 if is_late else 3) * ENTRY


def test_what_no_file_has_any_more_goes_with_all_before_it(tmp_path: Path) -> None:
    disk = DiskLog(tmp_path, 4)
    names = []
    for number in range(1, 11):
        names.append(disk.save(number))
        append(disk.log, number)
    disk.log.kept(names[4:])
    assert (disk.log.first, disk.parts()) == (5, [*range(5, 11)])
    assert disk.log.chain_after(4) == head(4).chain
    disk.log.lost(6)
    assert (disk.log.first, disk.parts()) == (7, [*range(7, 11)])
    disk.log.lost(10)
    assert (disk.log.first, disk.parts()) == (11, [])


def test_a_round_that_was_not_written_stays_in_memory(tmp_path: Path) -> None:
    disk = DiskLog(tmp_path, 8)
    for number in range(1, 9):
        if number != 3:
            disk.save(number)
        append(disk.log, number)
    assert disk.parts() == [*range(1, 9)]
    assert disk.log.encoded(3) is not None


def test_a_log_goes_on_from_what_the_disk_has(tmp_path: Path) -> None:
    disk = DiskLog(tmp_path, 4)
    names = {number: disk.save(number) for number in range(3, 6)}
    disk.log.restart(2, digest(2), head(2).chain)
    for number, name in names.items():
        disk.log.append_stored(head(number), name, digest(number))
    assert (disk.log.first, disk.log.last, disk.parts()) == (3, 5, [3, 4, 5])
    assert disk.log.part(4, 0, SIZE + 1) is None  # more than the file has
    (tmp_path / names[4].file).unlink()
    assert disk.log.part(4, 0, SIZE) is None


def test_memory_of_what_is_on_the_disk_is_used_again_unless_somebody_reads_it(
    tmp_path: Path,
) -> None:
    disk = DiskLog(tmp_path, 4)
    disk.save(1)
    array = append(disk.log, 1)
    assert disk.log.spare(SIZE) is array
    array = append(disk.log, 2)
    assert disk.log.part(2, 0, 1) is not None
    disk.save(2)
    assert disk.log.spare(SIZE) is not array
    disk.save(3)
    array = append(disk.log, 3, lent=True)
    assert disk.log.spare(SIZE) is not array
