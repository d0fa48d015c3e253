"""Write down what the machine wants remembered, and report what is on the disk.

Theory. What must be on the disk before which message leaves is the machine's to say
(durable_records.py); it hands out records in order and waits to hear how far they are synced. Here
one task appends and syncs them, one sync for all that came meanwhile. R of a round is on the disk
before its READY is appended, not only before it is synced: after a power cut any part of what was
not synced may be there, and a READY without R would be a round that nobody holds.

A ledger that cannot be written ends this peer's vote. R that cannot be written does not: the peer
says so, holds its rounds in memory as before, and tries again with the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection

from atoll.collectives.codecs import U8
from atoll.collectives.errors import DiskError
from atoll.collectives.units import count, duration
from atoll.peer.daemon.ports import DurabilityPort
from atoll.peer.durable.disk import reason
from atoll.peer.durable.ledger import DurableLedger
from atoll.peer.durable.round_files import RoundFiles, RoundName, older_checkpoint
from atoll.peer.membership import events as ev
from atoll.peer.membership.durable_records import ReadyRecord, Record, compacted
from atoll.peer.rounds.recovery import name_of, packed

SLICE_BYTES = 4 << 20  # of R that is handed to its writer at a time


class Durability:
    """Keep a daemon's ledger and rounds. Lives in the event loop; disks are for worker threads."""

    def __init__(
        self,
        records: list[Record],
        ledger: DurableLedger,
        rounds: RoundFiles | None,
        port: DurabilityPort,
    ) -> None:
        """Go on after the ``records`` that were read. ``rounds`` None: only votes are kept."""
        self._records = records
        self._ledger, self._rounds, self._port = ledger, rounds, port
        # A READY whose R is not on the disk yet, and what came after it.
        self._waiting: deque[ev.Persist] = deque()
        self._due = asyncio.Event()
        self._wants_compaction = True  # what an earlier life has left behind goes
        self._failed = False
        self._said_full = False
        self._took_s = 0.0  # from a READY's record until it and its R were on the disk

    @property
    def keeps_rounds(self) -> bool:
        return self._rounds is not None

    def keep_votes_only(self) -> None:
        """Write no rounds any more."""
        self._rounds = None

    def describe(self) -> str:
        """Say for people what a restart would find, and what the disk costs a round."""
        if self._failed:
            return "nothing: the ledger cannot be written; a restart comes back without a vote"
        what = "votes and rounds" if self.keeps_rounds else "votes"
        waits = self._ledger.position - self._ledger.synced + len(self._waiting)
        text = f"{what}; record {self._ledger.synced} is on the disk"
        text += f", {count(waits, 'record')} to come" if waits else ""
        return f"{text}; the last READY took it {duration(self._took_s)}"

    def checkpointed(self) -> None:
        """Hear that a checkpoint is on the disk: rounds before the older one may go."""
        self._wants_compaction = True
        self._due.set()

    def close(self) -> None:
        self._ledger.close()

    def persist(self, effect: ev.Persist) -> None:
        """Write a record; tell the machine when it is synced, if it is to be."""
        if self._failed:
            return
        kind, payload = packed(effect.record)
        if self._waiting or _has_result(effect) or not self._ledger.has_room(payload):
            self._waiting.append(effect)
            self._due.set()
        else:
            self._append(effect, kind, payload)
        if effect.synced or self._ledger.wants_compaction:
            self._due.set()

    def _append(self, effect: ev.Persist, kind: int, payload: bytes) -> None:
        try:
            position = self._ledger.append(kind, payload)
        except DiskError as error:
            self._fail(error)
            return
        assert position == effect.position, f"record {effect.position} is number {position} here"
        self._records.append(effect.record)

    def _fail(self, error: DiskError) -> None:
        self._failed = True
        self._port.note("disk", f"{error.what}: {error.fix}")
        asyncio.get_running_loop().call_soon(self._port.feed, ev.LedgerFailed(error.what))

    # ------------------------------------------------------------ the task

    async def run(self) -> None:
        """Bring to the disk whatever is due, until cancelled or until the ledger fails."""
        while not self._failed:
            await self._due.wait()
            self._due.clear()
            try:
                began_s = time.monotonic()
                saves = await self._append_waiting()
                position = await asyncio.to_thread(self._ledger.sync)
                self._took_s = time.monotonic() - began_s if saves else self._took_s
                self._port.feed(ev.Durable(position))
                if self._wants_compaction or self._ledger.wants_compaction:
                    await self._compact()
            except DiskError as error:
                self._fail(error)

    async def _append_waiting(self) -> int:
        """Append what waits, each READY after its R; return how many of these there were."""
        saves = 0
        while self._waiting and not self._failed:
            if _has_result(self._waiting[0]):
                await self._save(self._waiting[0].record)
                saves += 1
            kind, payload = packed(self._waiting[0].record)
            if not self._ledger.has_room(payload):
                await self._compact()
            self._append(self._waiting.popleft(), kind, payload)
        return saves

    async def _save(self, ready: Record) -> None:
        """Write R of a round to its file, unless none are kept or it is gone by now."""
        if self._rounds is None or not isinstance(ready, ReadyRecord):
            return
        with self._port.lend_result(ready) as array:
            if array is None:
                return
            try:
                await asyncio.to_thread(save_result, self._rounds, name_of(ready.place), array)
                self._said_full = False
            except DiskError as error:
                if not self._said_full:
                    self._said_full = True
                    self._port.note("disk", f"{error.what}: {error.fix}")

    async def _compact(self) -> None:
        """Let the checkpoints stand for what is before the older one of them."""
        self._wants_compaction = False
        since = older_checkpoint(self._port.checkpoint_rounds())
        before, position = len(self._records), self._ledger.position
        kept = list(compacted(self._records, since))
        try:
            await asyncio.to_thread(self._ledger.compact, [packed(r) for r in kept], position)
        except DiskError:
            raise
        except OSError as error:
            self._port.note("disk", f"the ledger was not compacted: {reason(error)}; make room")
            return
        self._records = [*kept, *self._records[before:]]
        if self._rounds is not None:
            needed = {name_of(r.place) for r in self._records if isinstance(r, ReadyRecord)}
            await asyncio.to_thread(remove_others, self._rounds, needed)


def _has_result(effect: ev.Persist) -> bool:
    """Return whether R has to be on the disk before this record."""
    record = effect.record
    return effect.synced and isinstance(record, ReadyRecord) and record.begin is not None


def save_result(rounds: RoundFiles, name: RoundName, array: U8) -> None:
    """Write R to its file and return when it is on the disk. In a worker thread. DiskError."""
    writer = rounds.write(name, array.nbytes)
    data = memoryview(array)  # type: ignore[arg-type]  # an array is a buffer
    for start in range(0, array.nbytes, SLICE_BYTES):
        writer.put(start, data[start : start + SLICE_BYTES])
    writer.seal()


def remove_others(rounds: RoundFiles, needed: Collection[RoundName]) -> None:
    """Remove the files that no record speaks of."""
    rounds.remove(name for name in rounds.names() if name not in needed)
