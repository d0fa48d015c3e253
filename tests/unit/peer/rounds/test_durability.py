"""Test what is written down, on a real disk, by the task that writes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

from atoll.collectives.codecs import U8
from atoll.peer.durable.disk import RealDisk
from atoll.peer.durable.ledger import open_ledger
from atoll.peer.membership import events as ev
from atoll.peer.membership.durable_records import CommitRecord, IncarnationRecord, ReadyRecord
from atoll.peer.membership.messages import Run
from atoll.peer.rounds.durability import Durability
from atoll.peer.rounds.recovery import parsed

HALF_BYTES = 64 << 10
LINEAGE = bytes(32)


class Daemon:
    """The rest of a daemon, as far as its ledger knows it. ``checkpoints`` grow as rounds do."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []
        self.notes: list[str] = []
        self.checkpoints: list[int] = []
        self.heard = asyncio.Event()

    def note(self, kind: str, text: str, **fields: object) -> None:
        self.notes.append(text)

    def feed(self, event: ev.Event) -> None:
        self.events.append(event)
        if isinstance(event, ev.LedgerFailed) or event == ev.Durable(8001):
            self.heard.set()

    @contextlib.contextmanager
    def lend_result(self, ready: ReadyRecord) -> Iterator[U8 | None]:
        yield None

    def checkpoint_rounds(self) -> list[int]:
        return self.checkpoints


def operation(number: int) -> tuple[ReadyRecord, CommitRecord]:
    """The head of a round that changes no state, and its commit."""
    ready = ReadyRecord(LINEAGE, 1, Run(number, 1, 0, number.to_bytes(32, "big")), bytes(32))
    return ready, CommitRecord(number, ready.after)


def test_records_that_are_never_synced_do_not_fill_a_ledger(tmp_path: Path) -> None:
    """Write many times what the file holds: of collectives of a session nothing is synced."""

    async def scenario() -> None:
        ledger = open_ledger(RealDisk(), tmp_path, half_bytes=HALF_BYTES).ledger
        daemon = Daemon()
        durability = Durability([], ledger, None, daemon)
        task = asyncio.create_task(durability.run())
        position = 0
        for number in range(1, 4001):
            daemon.checkpoints[:] = [max(0, number - 20), max(0, number - 10)]
            for record in operation(number):
                position += 1
                durability.persist(ev.Persist(record, synced=False, position=position))
            if number % 50 == 0:
                await asyncio.sleep(0.001)
        durability.persist(ev.Persist(IncarnationRecord(7), synced=True, position=position + 1))
        async with asyncio.timeout(30):
            await daemon.heard.wait()
        assert not daemon.notes
        assert daemon.events[-1] == ev.Durable(position + 1)
        task.cancel()
        durability.close()

    asyncio.run(scenario())
    opened = open_ledger(RealDisk(), tmp_path, half_bytes=HALF_BYTES)
    records = [parsed(entry) for entry in opened.records]
    assert IncarnationRecord(7) in records
    assert CommitRecord(4000, operation(4000)[0].after) in records
    opened.ledger.close()
    assert (tmp_path / "ledger").stat().st_size <= 8 * HALF_BYTES
