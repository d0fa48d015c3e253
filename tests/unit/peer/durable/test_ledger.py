"""The ledger: what was synced is there, what is damaged is said."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from harness.lossy_disk import Faults, MemoryDisk, Model

from atoll.collectives.errors import ConfigError, DiskError
from atoll.peer.durable.disk import RealDisk
from atoll.peer.durable.ledger import BAD, LEDGER, SPARE, OpenedLedger, open_ledger
from atoll.peer.durable.ledger_format import BLOCK_BYTES, VERSION, LedgerVerdict

HOME = Path("/home/votes")
HALF_BYTES = 16 * BLOCK_BYTES
TEXTS = (b"a promise", b"x" * 5000, b"READY of round 7")
# Where each of them begins in a half: each was synced alone, after a mark of the one before.
BLOCKS = (1, 2, 4)


def opened(disk: MemoryDisk) -> OpenedLedger:
    return open_ledger(disk, HOME, half_bytes=HALF_BYTES)


def payloads(found: OpenedLedger) -> list[bytes]:
    return [record.payload for record in found.records]


def written() -> MemoryDisk:
    """A ledger with TEXTS, each synced, whose process has died."""
    disk = MemoryDisk()
    ledger = opened(disk).ledger
    for text in TEXTS:
        ledger.append(1, text)
        ledger.sync()
    return disk.again()


def flip(disk: MemoryDisk, *places: int) -> None:
    for place in places:
        disk.flip(HOME / LEDGER, place)


# ---------------------------------------------------------------- no damage


def test_what_was_appended_is_read_after_a_restart(tmp_path: Path) -> None:
    disk = RealDisk()
    first = open_ledger(disk, tmp_path / "home")
    assert first.verdict is LedgerVerdict.NEW
    assert first.ledger.append(3, b"a promise") == 1
    assert first.ledger.append(4, b"y" * 9000) == 2
    assert first.ledger.synced == 0
    assert not first.ledger.wants_compaction
    assert first.ledger.sync() == 2 == first.ledger.synced
    assert first.ledger.append(5, b"") == 3  # not synced: a killed process loses nothing
    first.ledger.close()
    second = open_ledger(disk, tmp_path / "home")
    assert second.verdict is LedgerVerdict.WHOLE
    assert second.records == ((1, 3, b"a promise"), (2, 4, b"y" * 9000), (3, 5, b""))
    assert second.ledger.append(1, b"more") == 4
    second.ledger.close()


def test_a_compaction_keeps_what_is_later_and_goes_on_counting() -> None:
    disk = written()
    ledger = opened(disk).ledger
    ledger.append(2, b"later")
    disk.faults.during_sync = lambda: ledger.append(3, b"meanwhile")
    ledger.compact([(9, b"all of it")], 3)
    disk.faults.during_sync = None
    assert ledger.sync() == ledger.position == 6
    found = opened(disk.again())
    assert found.verdict is LedgerVerdict.WHOLE
    assert found.records[:2] == ((3, 9, b"all of it"), (4, 2, b"later"))
    assert [record.position for record in found.records] == [3, 4, 5, 6]
    for number in range(3):
        found.ledger.append(4, bytes(1000 * number))
        found.ledger.compact([(9, b"again")], found.ledger.position)
    again = opened(disk.again())  # nothing of the files before shows in this one
    assert (again.verdict, again.records) == (LedgerVerdict.WHOLE, ((9, 9, b"again"),))
    for position in (8, 10):
        with pytest.raises(ValueError, match="cannot stand for all"):
            found.ledger.compact([], position)


def test_many_rounds_with_compactions_fill_no_disk(tmp_path: Path) -> None:
    disk = RealDisk()
    ledger = open_ledger(disk, tmp_path / "home", half_bytes=HALF_BYTES).ledger
    for number in range(100):
        ledger.append(1, b"%d" % number * 100)
        if ledger.wants_compaction:
            ledger.compact([(2, b"state after %d" % number)], ledger.position)
    ledger.sync()
    ledger.close()
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "home").iterdir()}
    assert sizes == {LEDGER: 2 * HALF_BYTES, SPARE: 2 * HALF_BYTES}
    assert open_ledger(disk, tmp_path / "home", half_bytes=HALF_BYTES).position == 100


def test_what_does_not_fit_into_a_quarter_gets_a_larger_file() -> None:
    disk = written()
    ledger = opened(disk).ledger
    large = [(1, bytes([i]) * 10_000) for i in range(20)]
    ledger.compact(large, 3)
    ledger.append(2, b"more")
    ledger.sync()
    found = opened(disk.again())
    assert payloads(found) == [payload for _, payload in large] + [b"more"]
    found.ledger.compact([], found.position)  # and it becomes small again
    assert payloads(opened(disk.again())) == []


def test_without_compactions_it_is_full_and_says_so() -> None:
    ledger = opened(MemoryDisk()).ledger
    for _ in range((HALF_BYTES - BLOCK_BYTES) // 4032):
        ledger.append(1, bytes(4000))
    with pytest.raises(DiskError, match="no room for 4,000 bytes"):
        ledger.append(1, bytes(4000))
    ledger.compact([(2, b"all")], ledger.position)
    ledger.append(1, bytes(4000))


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("record", range(len(TEXTS)))
def test_one_good_copy_of_two_is_enough(record: int) -> None:
    for half in (0, HALF_BYTES):
        disk = written()
        flip(disk, half + BLOCKS[record] * BLOCK_BYTES + 60)
        found = opened(disk)
        assert (found.verdict, payloads(found)) == (LedgerVerdict.MENDED, list(TEXTS))
        assert "lost one of two copies in 1 place" in found.text
        found.ledger.close()
        assert opened(disk).verdict is LedgerVerdict.WHOLE  # there are two again


@pytest.mark.parametrize("record", range(len(TEXTS)))
def test_a_synced_record_that_is_bad_twice_is_damage_also_the_last(record: int) -> None:
    disk = written()
    at = BLOCKS[record] * BLOCK_BYTES + 60
    flip(disk, at, HALF_BYTES + at)
    found = opened(disk)
    assert found.verdict is LedgerVerdict.DAMAGED
    assert f"records {record + 1} to 3 are bad in both copies" in found.text
    assert "does not know what it has promised" in found.text
    assert (found.records, found.position) == ((), 3)
    assert BAD in disk.names(HOME)
    found.ledger.append(1, b"a new life")
    found.ledger.sync()
    assert opened(disk.again()).records == ((4, 1, b"a new life"),)


def test_any_few_flipped_bits_are_mended_or_said() -> None:
    for seed in range(300):
        rng, disk = random.Random(seed), written()
        flip(disk, *(rng.randrange(2 * HALF_BYTES) % (6 * BLOCK_BYTES) for _ in range(2)))
        flip(disk, HALF_BYTES + rng.randrange(6 * BLOCK_BYTES))
        found = opened(disk)
        assert found.verdict.forgot or payloads(found) == list(TEXTS), seed


def test_a_block_that_cannot_be_read_is_a_bad_one() -> None:
    disk = written()
    number = disk.model.file(HOME.relative_to("/") / LEDGER).number
    disk.unreadable = {(number, BLOCKS[1])}
    found = opened(disk)
    assert (found.verdict, payloads(found)) == (LedgerVerdict.MENDED, list(TEXTS))


@pytest.mark.parametrize(
    ("nbytes", "verdict"),
    [
        (0, LedgerVerdict.DAMAGED),
        (BLOCK_BYTES + 10, LedgerVerdict.DAMAGED),
        (2 * BLOCK_BYTES, LedgerVerdict.DAMAGED),
        (HALF_BYTES, LedgerVerdict.MENDED),
        (HALF_BYTES + 2 * BLOCK_BYTES, LedgerVerdict.MENDED),
    ],
)
def test_a_file_that_is_too_short(nbytes: int, verdict: LedgerVerdict) -> None:
    disk = written()
    file = disk.model.file(HOME.relative_to("/") / LEDGER)
    file.resize(nbytes)
    file.sync()
    found = opened(disk)
    assert found.verdict is verdict, found.text
    assert payloads(found) == ([] if verdict.forgot else list(TEXTS))


def test_a_file_that_is_gone_is_not_a_new_home() -> None:
    disk = written()
    disk.remove(HOME / LEDGER)
    assert opened(disk).verdict is LedgerVerdict.DAMAGED


def test_a_header_is_there_twice() -> None:
    disk = written()
    flip(disk, 30)
    assert opened(disk).verdict is LedgerVerdict.MENDED
    disk = written()
    flip(disk, 30, HALF_BYTES + 30)
    assert "has no header that can be read" in opened(disk).text


def test_a_newer_atoll_has_written_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("atoll.peer.durable.ledger_format.VERSION", VERSION + 1)
        disk = written()
    with pytest.raises(ConfigError, match=f"has format {VERSION + 1}"):
        opened(disk)


# ---------------------------------------------------------------- copies


def test_a_copied_home_is_recognised(tmp_path: Path) -> None:
    disk = RealDisk()
    open_ledger(disk, tmp_path / "home").ledger.close()
    shutil.copytree(tmp_path / "home", tmp_path / "copy", copy_function=shutil.copy2)
    found = open_ledger(disk, tmp_path / "copy")
    assert found.verdict is LedgerVerdict.COPIED
    assert "is a copy, or was restored" in found.text
    found.ledger.close()
    open_ledger(disk, tmp_path / "home").ledger.close()
    shutil.move(tmp_path / "home", tmp_path / "moved")  # a rename: the same files
    assert open_ledger(disk, tmp_path / "moved").verdict is LedgerVerdict.WHOLE


def test_another_machine_is_recognised_and_another_number_of_the_device_is_none() -> None:
    disk = written()
    disk.filesystem += 1
    assert opened(disk).verdict is LedgerVerdict.WHOLE
    disk.machine = b"another machine."
    assert "made on another machine" in opened(disk).text


def test_a_block_of_another_ledger_is_no_record() -> None:
    """Also at the right place, with the right number."""
    disk, other = written(), MemoryDisk(Model())
    ledger = opened(other).ledger
    for text in TEXTS:
        ledger.append(1, text[::-1])
        ledger.sync()
    path = HOME.relative_to("/") / LEDGER
    block = other.model.file(path).data[BLOCK_BYTES : 2 * BLOCK_BYTES]
    disk.model.file(path).write(BLOCK_BYTES, bytes(block))
    assert payloads(opened(disk)) == list(TEXTS)


# ---------------------------------------------------------------- disks that fail


def test_nothing_is_taken_after_a_failed_sync() -> None:
    disk = written()
    ledger = opened(disk).ledger
    ledger.append(1, b"never sent")
    disk.faults.fail_sync_at = disk.syncs + 1
    for act in (ledger.sync, ledger.sync, lambda: ledger.append(1, b"more")):
        with pytest.raises(DiskError):
            act()
    assert ledger.synced == 3


def test_a_failed_sync_of_the_real_disk_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    file = RealDisk().open(tmp_path / "file", create=True)
    file.write(b"x", 0)
    with monkeypatch.context() as patch:
        patch.setattr("os.fdatasync", fail)
        with pytest.raises(DiskError, match="could not be synced to the disk: Input/output"):
            file.sync()
    for act in (file.sync, lambda: file.write(b"y", 0), lambda: file.reserve(9)):
        with pytest.raises(DiskError):
            act()
    file.close()


def test_a_full_disk_stops_neither_records_nor_compactions() -> None:
    disk = written()
    ledger = opened(disk).ledger
    disk.faults.capacity = disk.used_bytes()
    for number in range(100):
        ledger.append(1, bytes(1000))
        ledger.sync()
        if ledger.wants_compaction:
            ledger.compact([(2, b"%d" % number)], ledger.position)
    assert opened(disk.again()).position == 103


def test_a_full_disk_has_no_room_for_a_larger_one_and_the_old_one_goes_on() -> None:
    disk = written()
    ledger = opened(disk).ledger
    disk.faults.capacity = disk.used_bytes()
    with pytest.raises(OSError, match="No space left"):
        ledger.compact([(1, bytes(10_000))] * 20, 3)
    ledger.append(1, b"goes on")
    ledger.sync()
    ledger.compact([(1, b"small")], ledger.position)
    assert payloads(opened(disk.again())) == [b"small"]


def test_appending_waits_for_no_sync(tmp_path: Path) -> None:
    disk = MemoryDisk(faults=Faults())
    ledger = opened(disk).ledger
    ledger.append(1, b"first")
    disk.faults.during_sync = lambda: ledger.append(1, b"second")
    assert ledger.sync() == 1
    assert (ledger.position, ledger.synced) == (2, 1)
