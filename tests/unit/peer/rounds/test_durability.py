"""Test what is written down, on a real disk, by the task that writes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.collectives.codecs import U8
from atoll.peer.durable.disk import RealDisk
from atoll.peer.durable.ledger import open_ledger
from atoll.peer.durable.round_files import RoundFiles
from atoll.peer.membership import durable_records
from atoll.peer.membership import events as ev
from atoll.peer.membership.durable_records import (
    CommitRecord,
    IncarnationRecord,
    ReadyRecord,
    ViewRecord,
    recovered,
)
from atoll.peer.membership.messages import Begin, Run
from atoll.peer.membership.operations import Operation
from atoll.peer.membership.view import Member, View
from atoll.peer.rounds.durability import Durability
from atoll.peer.rounds.entries import REDUCE
from atoll.peer.rounds.log import RoundLog
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
        if isinstance(event, ev.LedgerFailed) or event == ev.Durable(2 * ROUNDS + 2):
            self.heard.set()

    @contextlib.contextmanager
    def lend_result(self, ready: ReadyRecord) -> Iterator[U8 | None]:
        yield None

    def checkpoint_rounds(self) -> list[int]:
        return self.checkpoints

    def writing_since(self) -> None:
        return None


ROUNDS = 4000
PEER = b"p" * 32
VIEW = View(LINEAGE, 1, (Member(PEER, 1),), PEER, 0, bytes(32))


def operations(before: bytes) -> Iterator[tuple[ReadyRecord, CommitRecord]]:
    """Heads of rounds that change no state, and their commits, from round 2 on."""
    for number in range(2, ROUNDS + 1):
        called = Operation(REDUCE, 10, "sum", "float32")
        begin = Begin(LINEAGE, 1, number, 1, REDUCE, (PEER,), (1.0,), operation=called)
        run = Run(number, 1, 0, number.to_bytes(32, "big"))
        ready = ReadyRecord(LINEAGE, 1, run, before, begin)
        before = ready.after
        yield ready, CommitRecord(number, before)


def test_records_that_are_never_synced_do_not_fill_a_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write many times what the file holds: of collectives of a session nothing is synced.

    No checkpoint is written meanwhile, since they change nothing.
    """
    monkeypatch.setattr(durable_records, "OPERATIONS_KEPT", 16)
    step = ReadyRecord(LINEAGE, 1, Run(1, 1, 0, b"r" * 32), bytes(32))

    async def scenario() -> None:
        ledger = open_ledger(RealDisk(), tmp_path, half_bytes=HALF_BYTES).ledger
        daemon, files = Daemon(), RoundFiles(RealDisk(), tmp_path / "rounds")
        durability = Durability(ledger, files, RoundLog(), daemon)
        task = asyncio.create_task(durability.run())
        daemon.checkpoints[:] = [1]
        durability.persist(ev.Persist(ViewRecord(VIEW), synced=False, position=1))
        position = 1
        for pair in ((step, CommitRecord(1, step.after)), *operations(step.after)):
            for record in pair:
                position += 1
                durability.persist(ev.Persist(record, synced=False, position=position))
            if position % 100 == 0:
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
    last = [*operations(step.after)][-1][1]
    assert last in records
    found = recovered(records, opened.position, [(1, step.after)])
    assert found.state == found.known == (last.round, last.chain)
    assert len(records) < ROUNDS / 2
    opened.ledger.close()
    assert (tmp_path / "ledger").stat().st_size <= 8 * HALF_BYTES
