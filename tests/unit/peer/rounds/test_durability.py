"""Test what is written down, on a real disk, by the task that writes it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator
from pathlib import Path

import numpy as np
import pytest

from atoll.collectives import ChunkGrid, RoundResult
from atoll.collectives.codecs import U8, get_codec
from atoll.peer.durable.disk import RealDisk
from atoll.peer.durable.ledger import open_ledger
from atoll.peer.durable.round_files import RoundFiles, RoundName
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
from atoll.peer.rounds import durability as durability_module
from atoll.peer.rounds.durability import Durability
from atoll.peer.rounds.entries import REDUCE, STEP
from atoll.peer.rounds.log import RoundLog
from atoll.peer.rounds.recovery import packed, parsed

HALF_BYTES = 64 << 10
LINEAGE = bytes(32)


class Daemon:
    """The rest of a daemon, as far as its ledger knows it. ``checkpoints`` grow as rounds do."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []
        self.notes: list[str] = []
        self.checkpoints: list[int] = []
        self.wanted_checkpoints = 0
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

    def want_checkpoint(self) -> None:
        self.wanted_checkpoints += 1

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


# ---------------------------------------------------------------- results that are written early

CHUNKS, CHUNK = 5, 1024  # of so many elements, as float32
R = b"".join(bytes([number]) * 4 * CHUNK for number in range(CHUNKS))


class Attempt:
    """What the rest of a daemon knows of an attempt."""

    def __init__(self, number: int = 3, attempt: int = 1) -> None:
        self.name = RoundName(number, 1, attempt)
        self.result = RoundResult(get_codec("float32"), ChunkGrid(CHUNKS * CHUNK, CHUNK))
        self.saving = self.ended = False

    def finish(self, *chunks: int) -> None:
        for chunk in chunks:
            start, stop = self.result.layout.slice(chunk)
            self.result.array[start:stop] = np.frombuffer(R[start:stop], np.uint8)
            self.result.finish(chunk, b"d" * 32)

    @property
    def ready(self) -> ReadyRecord:
        begin = Begin(LINEAGE, 1, self.name.round, self.name.attempt, STEP, (PEER,), (1.0,))
        run = Run(self.name.round, self.name.attempt, 0, b"r" * 32)
        return ReadyRecord(LINEAGE, 1, run, bytes(32), begin)


class Home:
    """A disk, and the task that writes to it, as long as the scenario takes."""

    def __init__(self, folder: Path) -> None:
        self.daemon = Daemon()
        self.daemon.lend_result = self.lend  # type: ignore[method-assign]
        self.files = RoundFiles(RealDisk(), folder / "rounds")
        self.ledger = open_ledger(RealDisk(), folder, half_bytes=HALF_BYTES).ledger
        self.log = RoundLog(1 << 20, self.files)
        self.durability = Durability(self.ledger, self.files, self.log, self.daemon)
        self.attempt = Attempt()

    @contextlib.contextmanager
    def lend(self, ready: ReadyRecord) -> Iterator[U8 | None]:
        yield self.attempt.result.array if ready.run.attempt == self.attempt.name.attempt else None

    def play(self, scenario: Callable[[Home], Awaitable[None]]) -> None:
        async def whole() -> None:
            task = asyncio.create_task(self.durability.run())
            self.durability.persist(ev.Persist(ViewRecord(VIEW), synced=False, position=1))
            async with asyncio.timeout(30):
                await scenario(self)
            task.cancel()
            self.durability.close()

        asyncio.run(whole())

    async def says_ready(self, position: int = 2) -> None:
        effect = ev.Persist(self.attempt.ready, synced=True, position=position)
        self.durability.persist(effect)
        await self.until(lambda: ev.Durable(position) in self.daemon.events)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110  # what is waited for comes from threads
            await asyncio.sleep(0.005)

    def stored(self) -> bytes:
        reader = self.files.open(self.attempt.name)
        try:
            return reader.read(0, len(R) + 1)
        finally:
            reader.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setattr(durability_module, "EARLY_BYTES_MIN", 1)
    return Home(tmp_path)


@pytest.mark.parametrize("early", [0, 2, CHUNKS])
def test_chunks_go_to_the_disk_as_they_become_final(home: Home, early: int) -> None:
    async def scenario(home: Home) -> None:
        home.attempt.finish(1)  # kept of the attempt before
        await home.durability.write_early(home.attempt)
        assert home.attempt.saving
        home.attempt.finish(*range(early))
        await home.until(lambda: early < CHUNKS or home.stored() == R)
        home.attempt.finish(*range(CHUNKS))
        home.attempt.ended = True
        await home.says_ready()
        home.durability.ended(home.attempt)
        assert home.stored() == R

    home.play(scenario)
    assert home.files.names() == [home.attempt.name]


def test_who_is_ready_while_the_file_is_made_waits_for_it(home: Home) -> None:
    """Else the one who makes it would remove what the other has sealed."""

    async def scenario(home: Home) -> None:
        home.attempt.finish(*range(CHUNKS))
        opening = asyncio.create_task(home.durability.write_early(home.attempt))
        await asyncio.sleep(0)
        await home.says_ready()
        await opening
        assert home.stored() == R

    home.play(scenario)


def test_an_attempt_that_is_over_leaves_no_file(home: Home) -> None:
    async def scenario(home: Home) -> None:
        await home.durability.write_early(home.attempt)
        home.attempt.finish(0)
        home.attempt.ended = True
        home.durability.ended(home.attempt)
        assert not home.attempt.saving
        await home.until(lambda: not home.files.names())
        over = Attempt(attempt=2)
        over.ended = True  # while its file was made
        await home.durability.write_early(over)
        await home.until(lambda: not home.files.names())
        home.attempt = Attempt(attempt=3)
        home.attempt.finish(*range(CHUNKS))
        await home.says_ready()
        assert home.stored() == R

    home.play(scenario)


def test_a_compaction_leaves_files_alone_that_are_written(home: Home) -> None:
    async def scenario(home: Home) -> None:
        await home.durability.write_early(home.attempt)
        home.durability.checkpointed(2)
        before = len(home.daemon.events)
        await home.until(lambda: len(home.daemon.events) > before)
        await asyncio.sleep(0.1)
        home.attempt.finish(*range(CHUNKS))
        await home.says_ready()
        assert home.stored() == R

    home.play(scenario)


def test_an_attempt_that_is_opened_again_under_its_name_keeps_its_file(home: Home) -> None:
    """A REPAIR opens it again to copy the rest, while the first file is being dropped."""

    async def scenario(home: Home) -> None:
        first = home.attempt
        first.finish(0, 1)
        await home.durability.write_early(first)
        first.ended = True
        home.durability.ended(first)
        home.attempt = Attempt()
        await home.durability.write_early(home.attempt)
        home.attempt.finish(*range(CHUNKS))
        await home.says_ready()
        assert home.stored() == R

    home.play(scenario)
    assert home.files.names() == [home.attempt.name]


def test_a_compaction_leaves_a_file_alone_that_is_begun_meanwhile(home: Home) -> None:
    begun, listed = threading.Event(), threading.Event()
    removes: list[bool] = []
    kept, names = home.log.kept, home.files.names

    def keep(needed: Collection[RoundName]) -> None:
        kept(needed)
        removes.append(True)

    def slow_names() -> list[RoundName]:
        if removes and not listed.is_set():
            listed.set()
            begun.wait(10)
        return names()

    home.log.kept = keep  # type: ignore[method-assign]
    home.files.names = slow_names  # type: ignore[method-assign]

    async def scenario(home: Home) -> None:
        home.durability.checkpointed(2)
        await home.until(listed.is_set)
        await home.durability.write_early(home.attempt)
        begun.set()
        home.attempt.finish(*range(CHUNKS))
        await home.says_ready()
        home.durability.checkpointed(3)
        await asyncio.sleep(0.1)
        assert home.stored() == R

    home.play(scenario)


def test_a_result_that_is_damaged_on_the_disk_makes_a_checkpoint_due(home: Home) -> None:
    """No replay gets past it: until then the others are told not to count on this copy."""

    async def scenario(home: Home) -> None:
        events = home.daemon.events
        home.durability.damaged(3)
        await home.until(lambda: ev.RoundsKept(False) in events)
        home.durability.moved_to(3, applied=True)
        home.durability.moved_to(4, applied=True)
        assert home.daemon.wanted_checkpoints == 1
        home.durability.checkpointed(4)
        await home.until(lambda: events[-2:-1] == [ev.RoundsKept(True)])

    home.play(scenario)


def test_the_compaction_that_makes_room_for_a_ready_leaves_its_result(home: Home) -> None:
    """It is on the disk already then, and no record speaks of it yet."""

    async def scenario(home: Home) -> None:
        home.attempt.finish(*range(CHUNKS))
        position, commit = 1, CommitRecord(1, bytes(32))
        _, payload = packed(home.attempt.ready)
        while home.ledger.has_room(payload):
            position += 1
            home.durability.persist(ev.Persist(commit, synced=False, position=position))
        await home.says_ready(position + 1)
        await home.until(lambda: home.ledger.has_room(payload))
        assert home.stored() == R

    home.play(scenario)
