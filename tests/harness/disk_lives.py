"""Lives of a ledger and of round files on a disk that fails, and what must hold after each.

Everything is drawn from one ``Random``: what is written, when the power fails, what survives of it.
``planted`` gives the modules with a fault in them, so that these checks are themselves checked.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import atoll.peer.durable
from atoll.collectives.digests import strong_digest
from atoll.collectives.errors import DiskError
from harness.lossy_disk import Faults, MemoryDisk

__all__ = ["DURABLE", "HOME", "ledger_lives", "planted", "round_lives"]

HOME = Path("/home/votes")
FOLDER = Path(next(iter(atoll.peer.durable.__path__)))
MODULES = ("file_identity", "disk", "ledger_format", "ledger", "round_files")
HALF_BYTES = 32 * 4096
LEDGER = "ledger"
LIVES_MAX, STEPS_MAX, CALLS_MAX = 4, 12, 90
RECORD_BYTES_MAX = 3 * 4096


def planted(module: str = "", before: str = "", after: str = "") -> Any:
    """The modules of peer/durable, made anew, with a few words of one changed."""
    made = SimpleNamespace()
    names = {name: f"atoll.peer.durable.{name}" for name in MODULES}
    originals = {name: sys.modules.pop(full, None) for name, full in names.items()}
    try:
        for name, full in names.items():
            loader = _Loader(full, str(FOLDER / f"{name}.py"))
            loader.change = (before, after) if name == module else ("", "")
            spec = importlib.util.spec_from_loader(full, loader)
            assert spec is not None
            made.__dict__[name] = sys.modules[full] = importlib.util.module_from_spec(spec)
            loader.exec_module(sys.modules[full])
    finally:
        for name, original in originals.items():
            sys.modules.pop(names[name], None)
            if original is not None:
                sys.modules[names[name]] = original
    made.round_files.worker = _AtTheEnd
    return made


class _Loader(importlib.machinery.SourceFileLoader):
    change: tuple[str, str]

    def get_code(self, fullname: str) -> CodeType:
        source, (before, after) = Path(self.path).read_text("utf-8"), self.change
        if before:
            assert source.count(before) == 1, f"{before!r} is not once in {self.path}"
            source = source.replace(before, after)
        return compile(source, self.path, "exec")


class _AtTheEnd:
    """In place of a thread: everything happens when it is waited for, in one order."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work, self._is_over = work, False

    def start(self) -> None:
        """Do nothing yet."""

    def is_alive(self) -> bool:
        return not self._is_over

    def join(self) -> None:
        if not self._is_over:
            self._work()
        self._is_over = True


DURABLE = planted()


# ---------------------------------------------------------------- a ledger


@dataclass
class Memory:
    """What a reader may find: one of ``ways``, each the records in order and how many of them
    must be there. More than one only while it is not known whether a compaction got through."""

    ways: list[tuple[list[bytes], int]] = field(default_factory=lambda: [([], 0)])
    is_flipped: bool = False  # since the last opening
    told: int = 0  # the highest position that others have heard of

    @property
    def records(self) -> list[bytes]:
        return self.ways[0][0]

    def synced(self, count: int) -> None:
        self.ways = [(self.records, count)]

    def found(self, payloads: list[bytes]) -> None:
        """Take what a reader has found, if it may be so."""
        assert any(
            need <= len(payloads) and records[: len(payloads)] == payloads
            for records, need in self.ways
        ), f"found {len(payloads)} records: none of {[(len(r), n) for r, n in self.ways]}"
        self.ways = [(list(payloads), len(payloads))]


def ledger_lives(durable: Any, rng: random.Random) -> MemoryDisk:
    """Several lives, each ended by a power cut at any call; return the disk at the end."""
    disk, memory = MemoryDisk(), Memory()
    for _ in range(rng.randint(1, LIVES_MAX)):
        disk.faults = _faults(rng)
        disk.calls = disk.syncs = disk.writes = 0
        try:
            _ledger_life(durable, disk, memory, rng)
        except (OSError, DiskError):
            assert disk.is_off or disk.has_failed
        if disk.is_off or rng.random() < 0.5:
            disk = disk.restarted(rng.randrange(1 << 32))
        else:
            disk = disk.again()
        if LEDGER in disk.names(HOME) and rng.random() < 0.3:  # one copy of something goes bad
            disk.flip(HOME / LEDGER, rng.randrange(2 * HALF_BYTES))
            memory.is_flipped = True
    check_ledger(durable, disk, memory)
    return disk


def _faults(rng: random.Random) -> Faults:
    faults = Faults(cut_at=rng.randint(1, CALLS_MAX))
    if rng.random() < 0.2:
        faults.fail_sync_at = rng.randint(1, 12)
    if rng.random() < 0.1:
        faults.fail_write_at = rng.randint(1, 40)
    return faults


def check_ledger(durable: Any, disk: MemoryDisk, memory: Memory) -> Any:
    """Open the ledger and compare; return what was opened."""
    found = durable.ledger.open_ledger(disk, HOME, half_bytes=HALF_BYTES)
    assert not found.verdict.forgot, found.text
    assert memory.is_flipped or found.verdict.value != "mended", found.text
    memory.is_flipped = False
    memory.found([record.payload for record in found.records])
    assert found.position >= memory.told, f"position {found.position} after {memory.told}"
    assert found.position == found.ledger.position == found.ledger.synced
    return found


def _ledger_life(durable: Any, disk: MemoryDisk, memory: Memory, rng: random.Random) -> None:
    ledger = check_ledger(durable, disk, memory).ledger

    def append() -> None:
        payload = rng.randbytes(rng.choice((0, 20, 300, 4000, RECORD_BYTES_MAX)))
        for records, _ in memory.ways:
            records.append(payload)
        ledger.append(1, payload)

    def compact() -> None:
        upto = ledger.position
        covered = len(memory.records)
        for _ in range(rng.randint(0, 2)):
            append()  # the trainer goes on before the worker begins
        kept = hashlib.sha256(b"".join(memory.records[:covered])).digest()
        compacted = [kept, *memory.records[covered:]]
        memory.ways.append((compacted, len(compacted)))  # all are synced before the rename
        ledger.compact([(2, kept)], upto)
        memory.told = ledger.synced
        memory.ways = [(compacted, 1 + memory.told - upto)]

    for _ in range(rng.randint(1, STEPS_MAX)):
        disk.faults.during_sync = append if rng.random() < 0.3 else None
        step = rng.choice(("append", "append", "sync", "sync", "compact"))
        if ledger.wants_compaction:
            step = "compact"
        if step == "append":
            append()
        elif step == "sync":
            count = len(memory.records)
            memory.told = ledger.sync()
            memory.synced(count)
        else:
            compact()


# ---------------------------------------------------------------- round files

READY, COMMIT, CHECKPOINT = 1, 2, 3


@dataclass
class Kept:
    """What a home must hold: of each round the attempt that was READY last, bytes and all."""

    chunks: dict[Any, list[bytes]] = field(default_factory=dict)
    newest: dict[int, Any] = field(default_factory=dict)
    committed: set[int] = field(default_factory=set)
    checkpoints: list[int] = field(default_factory=list)


def round_lives(durable: Any, rng: random.Random) -> None:
    """Several lives of round files and their ledger, each ended by a power cut at any call."""
    disk, kept = MemoryDisk(), Kept()
    for _ in range(rng.randint(1, LIVES_MAX)):
        disk.faults = _faults(rng)
        if rng.random() < 0.2:
            disk.faults.capacity = disk.used_bytes() + rng.randint(0, 200_000)
        disk.calls = disk.syncs = disk.writes = 0
        try:
            _round_life(durable, disk, kept, rng)
        except (OSError, DiskError):
            assert disk.is_off or disk.has_failed or disk.faults.capacity
        disk = disk.restarted(rng.randrange(1 << 32))
    _started(durable, disk, kept)


def _started(durable: Any, disk: MemoryDisk, kept: Kept) -> tuple[Any, Any]:
    """Do what a start does, and look for what must be there."""
    found = durable.ledger.open_ledger(disk, HOME, half_bytes=HALF_BYTES)
    assert not found.verdict.forgot, found.text
    parse = durable.round_files.RoundName.parse
    ready = {parse(r.payload.decode()) for r in found.records if r.kind == READY}
    committed = {
        n.round: n for r in found.records if r.kind == COMMIT for n in [parse(r.payload.decode())]
    }
    for name in sorted(ready):  # one that was under way when the power failed may be there
        kept.newest[name.round] = max(name, kept.newest.get(name.round, name))
    checkpoints = [int(r.payload) for r in found.records if r.kind == CHECKPOINT]
    files = durable.round_files.RoundFiles(disk, HOME / "rounds")
    files.remove(
        durable.round_files.unneeded(
            files.names(), ready=ready, committed=committed, checkpoints=checkpoints
        )
    )
    since = sorted(kept.checkpoints)[-2] if len(kept.checkpoints) > 1 else 0
    for name in kept.newest.values():
        if name.round > since:
            assert bad_chunks(files, name, kept.chunks[name]) == []
    return files, found.ledger


def bad_chunks(files: Any, name: Any, chunks: list[bytes]) -> list[int]:
    reader = files.open(name)
    digests = [strong_digest(chunk) for chunk in chunks]
    bad: list[int] = reader.bad_chunks(places(chunks), digests)
    return bad


def places(chunks: list[bytes]) -> list[tuple[int, int]]:
    ends = list(itertools.accumulate(map(len, chunks)))
    return [(end - len(chunk), end) for chunk, end in zip(chunks, ends, strict=True)]


def _round_life(durable: Any, disk: MemoryDisk, kept: Kept, rng: random.Random) -> None:
    files, ledger = _started(durable, disk, kept)
    for _ in range(rng.randint(1, 6)):
        last = max(kept.newest, default=0)
        number = last + (last in kept.committed or rng.random() < 0.5) or 1
        before = kept.newest.get(number)
        attempt = before.attempt + 1 if before else 1
        name = durable.round_files.RoundName(number, 1, attempt)
        if not _attempt(files, name, kept, before, rng):
            continue
        ledger.append(READY, name.file.encode())
        ledger.sync()
        kept.newest[number] = name
        if rng.random() < 0.7:
            kept.committed.add(number)
            ledger.append(COMMIT, name.file.encode())
            if rng.random() < 0.5:
                kept.checkpoints.append(number)
                ledger.append(CHECKPOINT, b"%d" % number)
                ledger.sync()


def _attempt(files: Any, name: Any, kept: Kept, before: Any, rng: random.Random) -> bool:
    """Write R of an attempt; return whether it is whole. A later one keeps a chunk as it was."""
    chunks = [rng.randbytes(rng.randint(1, 9000)) for _ in range(rng.randint(1, 5))]
    older = None
    if before is not None and rng.random() < 0.5:
        chunks[0], older = kept.chunks[before][0], files.open(before)
    writer = files.write(name, sum(map(len, chunks)))
    order = list(enumerate(places(chunks)))
    rng.shuffle(order)
    for chunk, (start, stop) in order:
        if chunk == 0 and older is not None:
            writer.keep(older, [(start, stop)])
        else:
            writer.put(start, chunks[chunk])
    kept.chunks[name] = chunks
    if rng.random() < 0.3:
        writer.abandon()
        return False
    writer.seal()
    return True
