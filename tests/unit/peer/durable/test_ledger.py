"""The ledger: what was synced is there, what is damaged is said."""

from __future__ import annotations

from pathlib import Path

from harness.lossy_disk import MemoryDisk

from atoll.peer.durable.disk import RealDisk
from atoll.peer.durable.ledger import OpenedLedger, open_ledger
from atoll.peer.durable.ledger_format import BLOCK_BYTES, LedgerVerdict

HOME = Path("/home/votes")
HALF_BYTES = 16 * BLOCK_BYTES


def opened(disk: MemoryDisk) -> OpenedLedger:
    return open_ledger(disk, HOME, half_bytes=HALF_BYTES)


def payloads(found: OpenedLedger) -> list[bytes]:
    return [record.payload for record in found.records]


def written(disk: MemoryDisk, *texts: bytes) -> None:
    """A ledger with these records, each synced, whose process is dead."""
    ledger = opened(disk).ledger
    for text in texts:
        ledger.append(1, text)
        ledger.sync()


def test_what_was_appended_is_read_after_a_restart(tmp_path: Path) -> None:
    disk = RealDisk()
    first = open_ledger(disk, tmp_path / "home")
    assert first.verdict is LedgerVerdict.NEW
    assert first.ledger.append(3, b"a promise") == 1
    assert first.ledger.append(4, b"y" * 9000) == 2
    assert first.ledger.synced == 0
    assert first.ledger.sync() == 2 == first.ledger.synced
    assert first.ledger.append(5, b"") == 3  # not synced: a killed process loses nothing
    first.ledger.close()
    second = open_ledger(disk, tmp_path / "home")
    assert second.verdict is LedgerVerdict.WHOLE
    assert second.records == ((1, 3, b"a promise"), (2, 4, b"y" * 9000), (3, 5, b""))
    assert second.ledger.append(1, b"more") == 4
