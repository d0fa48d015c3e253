"""Write down what the machine wants remembered, and report what is on the disk.

Theory. What must be on the disk before which message leaves is the machine's to say
(durable_records.py); it hands out records in order and waits to hear how far they are synced. Here
one task appends and syncs them, one sync for all that came meanwhile. R of a round is on the disk
before its READY is appended, not only before it is synced: after a power cut any part of what was
not synced may be there, and a READY without R would be a round that nobody holds.

A ledger that cannot be written ends this peer's vote. A disk that has no room for R does not: the
peer then remembers its votes only, as if it had been started with ``--durable votes``, says so
once, and goes on training with R in memory. For a vote the ledger has its space already. Where
there is room again, the next READY finds it.

What is on the disk has a *hole* then: no rounds lead from the checkpoint to the state. So has a
disk whose peer has fetched the state from others. A checkpoint closes it, so one is due at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection
from typing import NamedTuple, Protocol

from atoll.collectives import RoundResult
from atoll.collectives.codecs import U8
from atoll.collectives.errors import DiskError
from atoll.collectives.units import count, duration, size
from atoll.peer.daemon.ports import DurabilityPort
from atoll.peer.durable.disk import DISK_FULL, Room, reason
from atoll.peer.durable.ledger import DurableLedger
from atoll.peer.durable.round_files import RoundFiles, RoundName, RoundWriter, older_checkpoint
from atoll.peer.membership import events as ev
from atoll.peer.membership.durable_records import ReadyRecord, Record, compacted
from atoll.peer.rounds.log import RoundLog
from atoll.peer.rounds.recovery import name_of, packed, parsed

# Smaller results are written at once when their READY is due: that takes as long as a thread does.
EARLY_BYTES_MIN = 8 << 20


class WrittenAttempt(Protocol):
    """Be an attempt whose result is written while it comes."""

    result: RoundResult
    saving: bool  # its memory is being read
    ended: bool

    @property
    def name(self) -> RoundName:
        """Return the name of its file."""


class Durability:
    """Keep a daemon's ledger and rounds. Lives in the event loop; disks are for worker threads."""

    def __init__(
        self,
        ledger: DurableLedger,
        rounds: RoundFiles | None,
        log: RoundLog,
        port: DurabilityPort,
        round_number: int = 0,
    ) -> None:
        """Go on after what was read, from the round of the state.

        ``rounds`` None: only votes are kept. The ``log`` hears which rounds are on the disk.
        """
        self._round = round_number  # that this peer's state is of
        self._lacking = ""  # why no rounds are written at the moment; empty if they are
        self._is_broken = False  # a disk that fails is not tried again: room would not mend it
        self._has_asked = False  # for a checkpoint that closes the hole
        self._hole = 0  # the last round that no checkpoint has, and that cannot be replayed
        self._ledger, self._rounds, self._log, self._port = ledger, rounds, log, port
        # A READY whose R is not on the disk yet, and what came after it.
        self._waiting: deque[ev.Persist] = deque()
        # Files of attempts under way: their chunks go to the disk as they become final.
        self._writers: dict[RoundName, RoundWriter] = {}
        self._opening: dict[RoundName, asyncio.Future[RoundWriter]] = {}
        self._due = asyncio.Event()
        self._wants_compaction = True  # what an earlier life has left behind goes
        self._failed = False
        self._said_keeps = True  # what the machine takes for granted: results go to the disk
        self._took_s = 0.0  # from a READY's record until it and its R were on the disk

    @property
    def keeps_rounds(self) -> bool:
        """Return whether the rounds that this peer is READY for go to its disk now."""
        return self._rounds is not None and not self._lacking

    def describe(self) -> str:
        """Say for people what a restart would find, and what the disk costs a round."""
        if self._failed:
            return "nothing: the ledger cannot be written; a restart comes back without a vote"
        what = "votes and rounds" if self._rounds is not None else "votes"
        if self._lacking:
            what = f"votes only, because {self._lacking}"
        elif self._hole:
            what = f"votes, and rounds from the next checkpoint on (after round {self._hole})"
        waits = self._ledger.position - self._ledger.synced + len(self._waiting)
        text = f"{what}; record {self._ledger.synced} is on the disk"
        text += f", {count(waits, 'record')} to come" if waits else ""
        return f"{text}; the last READY took it {duration(self._took_s)}"

    def checkpointed(self, round_number: int) -> None:
        """Hear that a checkpoint is on the disk: rounds before the older one may go."""
        self._hole = 0 if round_number >= self._hole else self._hole
        self._has_asked = False
        self._compact_soon()

    def moved_to(self, round_number: int, *, applied: bool) -> None:
        """Hear which round the state is of now: it was ``applied`` here, or fetched from others."""
        if not applied and round_number > self._round:
            self._hole = max(self._hole, round_number)
        self._round = round_number
        # Once in a hole; not while this peer still catches up, one hole after the other.
        if applied and self._hole and self.keeps_rounds and not self._has_asked:
            self._has_asked = True
            self._port.want_checkpoint()

    def damaged(self, round_number: int) -> None:
        """Hear that R of this round is damaged on the disk: no replay gets past it."""
        self._hole = max(self._hole, round_number)
        self._due.set()

    async def look_for_room(self) -> None:
        """Keep votes only where the disk is too small for rounds; find out before one fails."""
        if self.keeps_rounds:
            room = await self._room()
            if room is not None and room.has_bytes < room.needs_bytes:
                has, needs = size(room.has_bytes), size(room.needs_bytes)
                self._lack(f"the disk has {has} of room, and rounds that survive take {needs}")

    def _tell_keeps(self) -> None:
        """Tell the machine whether a restart would have the results of rounds: others count on it.

        Behind a hole it would not: what they are to be applied to is not on this disk.
        """
        keeps = self.keeps_rounds and not self._hole
        if keeps != self._said_keeps:
            self._said_keeps = keeps
            self._port.feed(ev.RoundsKept(keeps))

    def _compact_soon(self) -> None:
        self._wants_compaction = True
        self._due.set()

    def _lack(self, why: str) -> None:
        """Write no rounds until there is room. What is on the disk makes room for votes."""
        self._lacking = why
        for writer in self._writers.values():
            writer.drop()
        self._writers.clear()
        self._port.note(
            "disk",
            f"{why}: this peer remembers its votes only, and fetches the state from others when it"
            " is started again, until there is room; make some, or give it another --home",
        )
        self._compact_soon()

    async def _room(self) -> Room | None:
        """Return the room that there is; None if the file system does not say."""
        try:
            return await asyncio.to_thread(self._port.room)
        except OSError:
            return None

    async def _find_room(self) -> None:
        """Go on writing rounds, if there is room for all that they take."""
        room = await self._room() if not self._is_broken else None
        if room is not None and room.has_bytes >= room.needs_bytes:
            self._lacking = ""
            self._port.note(
                "disk",
                f"the disk has room again ({size(room.has_bytes)}): this peer remembers its rounds"
                " too, from the next checkpoint on",
            )

    def close(self) -> None:
        for writer in self._writers.values():
            writer.drop()
        self._ledger.close()

    # ------------------------------------------------------------ R while it comes

    async def write_early(self, attempt: WrittenAttempt) -> None:
        """Begin the file of an attempt, so that the sync of its READY finds little to write.

        What goes wrong is found again, and said, when that is due.
        """
        name, array = attempt.name, attempt.result.array
        is_small = array.nbytes < EARLY_BYTES_MIN
        if self._rounds is None or self._lacking or is_small or name in self._opening:
            return
        attempt.saving = True
        opening = asyncio.ensure_future(asyncio.to_thread(self._rounds.write, name, array.nbytes))
        self._opening[name] = opening
        try:
            writer = await opening
        except (OSError, DiskError):
            attempt.saving = False
            return
        finally:
            del self._opening[name]
        self._writers[name] = writer
        if attempt.ended:
            self.ended(attempt)
            return
        layout, data = attempt.result.layout, memoryview(array)  # type: ignore[arg-type]  # a buffer

        def put(chunk: int) -> None:
            start, stop = layout.slice(chunk)
            writer.put(start, data[start:stop])

        attempt.result.watch(put)

    async def _begun(self, name: RoundName) -> RoundWriter | None:
        """Return who has begun to write this result, if anybody has."""
        if name in self._opening:
            await asyncio.wait([self._opening[name]])
            await asyncio.sleep(0)  # whoever has opened it comes first
        return self._writers.pop(name, None)

    def ended(self, attempt: WrittenAttempt) -> None:
        """Hear that an attempt is over: without a READY its file goes."""
        name = attempt.name
        if any(name_of(record.place) == name for record in self._waiting_results()):
            return
        writer = self._writers.pop(name, None)
        if writer is not None:
            attempt.result.watch(None)
            attempt.saving = False
            writer.drop()

    def _waiting_results(self) -> list[ReadyRecord]:
        """Return the records that are to be appended after their results, or are just about to."""
        ready = (effect.record for effect in self._waiting if _has_result(effect))
        return [record for record in ready if isinstance(record, ReadyRecord)]

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
                self._tell_keeps()
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
        if self._lacking:
            await self._find_room()
        name = name_of(ready.place)
        writer = await self._begun(name)
        if self._lacking:
            self._hole = max(self._hole, ready.run.round)
            if writer is not None:
                writer.drop()
            return
        with self._port.lend_result(ready) as array:
            if array is None:
                if writer is not None:
                    writer.drop()
                return
            try:
                await asyncio.to_thread(save_result, self._rounds, name, array, writer)
                self._log.stored(name, ready.run.root)
            except OSError as error:  # no descriptor, say: the next round tries again
                self._hole = max(self._hole, ready.run.round)
                self._lack(reason(error))
            except DiskError as error:
                cause = error.__cause__
                self._is_broken = not isinstance(cause, OSError) or cause.errno not in DISK_FULL
                self._hole = max(self._hole, ready.run.round)
                self._lack(error.what)

    async def _compact(self) -> None:
        """Let the checkpoints stand for what is before the older one of them.

        Without room, what is before the newer one goes too, and what no replay reaches: however
        long that lasts, the ledger does not grow.
        """
        self._wants_compaction = False
        try:
            rounds = self._port.checkpoint_rounds()
            present = await asyncio.to_thread(self._names)
            since = max(rounds, default=0) if self._lacking else older_checkpoint(rounds)
            until = _replayable(present, since) if self._lacking or self._rounds is None else None
            limits = _Limits(since, until, tuple(rounds), self._port.writing_since())
            needed = await asyncio.to_thread(compact_ledger, self._ledger, limits)
            # That of a READY whose record is what needs the room is on the disk already.
            needed |= {name_of(record.place) for record in self._waiting_results()}
            await asyncio.to_thread(self._remove_others, needed)
        except OSError as error:  # no room, or no descriptor: it goes on in the file that it has
            why = f"old records and rounds were not removed: {reason(error)}"
            self._port.note("disk", f"{why}; next try after the next checkpoint")

    def _names(self) -> Collection[RoundName]:
        return self._rounds.names() if self._rounds is not None else ()

    def _remove_others(self, needed: Collection[RoundName]) -> None:
        """Remove the files that no record speaks of and that nobody writes."""
        if self._rounds is not None:
            self._log.kept(needed)
            self._rounds.remove(name for name in self._rounds.names() if name not in needed)


class _Limits(NamedTuple):
    """Say which rounds a compaction keeps: see ``compacted``."""

    since: int
    until: int | None
    checkpoints: tuple[int, ...]
    writing: int | None


def compact_ledger(ledger: DurableLedger, limits: _Limits) -> set[RoundName]:
    """Write a ledger anew with what still counts; return the files that it speaks of.

    In a worker thread. OSError, DiskError.
    """
    entries, position = ledger.records()
    since, until, checkpoints, writing = limits
    records = [parsed(entry) for entry in entries]
    kept = compacted(records, since, until, checkpoints=checkpoints, writing=writing)
    ledger.compact([packed(record) for record in kept], position)
    now = (parsed(entry) for entry in ledger.records()[0])
    return {name_of(record.place) for record in now if isinstance(record, ReadyRecord)}


def _has_result(effect: ev.Persist) -> bool:
    """Return whether R has to be on the disk before this record."""
    record = effect.record
    return effect.synced and isinstance(record, ReadyRecord) and record.begin is not None


def _replayable(present: Collection[RoundName], since: int) -> int:
    """Return the last of the rounds that follow a checkpoint without a gap."""
    numbers = {name.round for name in present}
    while since + 1 in numbers:
        since += 1
    return since


def save_result(
    rounds: RoundFiles, name: RoundName, array: U8, begun: RoundWriter | None = None
) -> None:
    """Write R to its file and return when it is on the disk. In a worker thread. DiskError.

    ``begun``: who has written what became final early.
    """
    writer = begun or rounds.write(name, array.nbytes)
    writer.fill(memoryview(array))  # type: ignore[arg-type]  # an array is a buffer
    writer.seal()
