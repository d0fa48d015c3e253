"""Write down what the machine wants remembered, and report what is on the disk.

Theory. What must be on the disk before which message leaves is the machine's to say
(durable_records.py); it hands out records in order and waits to hear how far they are synced. Here
they are appended at once and synced by one task, one sync for all that came meanwhile. Before a
READY counts as synced, R of its round is on the disk too, so what is reported never goes beyond the
first READY whose R is still being written.

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
        self._unsaved: deque[tuple[int, ReadyRecord]] = deque()  # whose R is not on the disk yet
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
        waits = self._ledger.position - self._ledger.synced
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
        record = effect.record
        try:
            position = self._ledger.append(*packed(record))
        except DiskError as error:
            self._fail(error)
            return
        assert position == effect.position, f"record {effect.position} is number {position} here"
        self._records.append(record)
        if not effect.synced:
            return
        if isinstance(record, ReadyRecord) and record.begin is not None:
            self._unsaved.append((position, record))
        self._due.set()

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
                began_s, saves = time.monotonic(), len(self._unsaved)
                for _ in range(saves):
                    await self._save(self._unsaved[0][1])
                    self._unsaved.popleft()
                position = await asyncio.to_thread(self._ledger.sync)
                if self._unsaved:  # its record came meanwhile, and is synced before its R
                    position = min(position, self._unsaved[0][0] - 1)
                self._took_s = time.monotonic() - began_s if saves else self._took_s
                self._port.feed(ev.Durable(position))
                if self._wants_compaction or self._ledger.wants_compaction:
                    await self._compact()
            except DiskError as error:
                self._fail(error)

    async def _save(self, ready: ReadyRecord) -> None:
        """Write R of a round to its file, unless none are kept or it is gone by now."""
        if self._rounds is None:
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
