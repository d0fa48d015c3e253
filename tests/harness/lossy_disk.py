"""A model of a disk that loses at a power cut what was not synced, and a ``Disk`` in memory on it.

The model knows, of each file and each folder, what is on the disk, and what has been asked for
since and may be on it: contents, sizes and names. A *cut* lets a part of that survive, by a seed:

- of a file, any of its sectors, in any order; a block that was under way may hold anything;
- of names, changes of the same name in their order, those of others in any; a rename happens whole.

The same model is fed with what real daemons have done (harness/power_cut.py).
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from atoll.collectives.errors import DiskError
from atoll.peer.durable.disk import Bytes
from atoll.peer.durable.file_identity import FileIdentity

__all__ = ["Faults", "FileNode", "FolderNode", "MemoryDisk", "Model", "PowerCut"]

SECTOR_BYTES = 512  # what a disk writes whole or not at all, as long as it has power
BLOCK_BYTES = 4096
STYLES = ("nothing", "all", "prefix", "sectors", "garbage")


@dataclass(eq=False)
class FileNode:
    """``on_disk`` and then ``pending``: (offset, bytes), or (size, None), which gives ``data``."""

    number: int
    data: bytearray = field(default_factory=bytearray)
    on_disk: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        self.pending.append((offset, data))
        put(self.data, offset, data)

    def resize(self, nbytes: int) -> None:
        self.pending.append((nbytes, None))
        resize(self.data, nbytes)

    def sync(self, count: int | None = None) -> None:
        """What was asked for up to ``count`` is on the disk now, or all."""
        count = len(self.pending) if count is None else count
        done, self.pending = self.pending[:count], self.pending[count:]
        for change in done:
            apply(self.on_disk, change)

    def after_cut(self, rng: random.Random) -> bytes:
        style = rng.choice(STYLES)
        if style == "all":
            return bytes(self.data)
        contents = bytearray(self.on_disk)
        if style == "prefix":
            for change in self.pending[: rng.randint(0, len(self.pending))]:
                apply(contents, change)
        elif style != "nothing":
            odds = rng.random()
            for change in self.pending:
                for piece in pieces(change):
                    if rng.random() < odds:
                        apply(contents, piece)
        if style == "garbage":
            for block in sorted({b for change in self.pending for b in blocks(change)}):
                if rng.random() < 0.3:
                    size = min(BLOCK_BYTES, len(contents) - block)
                    put(contents, block, rng.randbytes(max(0, size)))
        return bytes(contents)


@dataclass(eq=False)
class FolderNode:
    entries: dict[str, FileNode | FolderNode] = field(default_factory=dict)
    on_disk: dict[str, FileNode | FolderNode] = field(default_factory=dict)


# (folder, name, what it names then): one change, or the two of a rename, which happen together.
Names = tuple[tuple[FolderNode, str, FileNode | FolderNode | None], ...]


def put(contents: bytearray, offset: int, data: bytes) -> None:
    if offset > len(contents):
        contents.extend(bytes(offset - len(contents)))
    contents[offset : offset + len(data)] = data


def resize(contents: bytearray, nbytes: int) -> None:
    del contents[nbytes:]
    contents.extend(bytes(nbytes - len(contents)))


def apply(contents: bytearray, change: tuple[int, bytes | None]) -> None:
    offset, data = change
    if data is None:
        resize(contents, offset)
    else:
        put(contents, offset, data)


def pieces(change: tuple[int, bytes | None]) -> Iterator[tuple[int, bytes | None]]:
    """The sectors of a write."""
    offset, data = change
    if data is None:
        yield change
        return
    start = 0
    while start < len(data):
        stop = min(len(data), start + SECTOR_BYTES - (offset + start) % SECTOR_BYTES)
        yield offset + start, data[start:stop]
        start = stop


def blocks(change: tuple[int, bytes | None]) -> Iterator[int]:
    offset, data = change
    if data:
        first = offset // BLOCK_BYTES * BLOCK_BYTES
        yield from range(first, offset + len(data), BLOCK_BYTES)


class Model:
    """A tree of folders and files. Paths are relative to its root."""

    def __init__(self) -> None:
        self.root = FolderNode()
        self._changes: list[Names] = []  # not on the disk, in order
        self._made = 0

    # ------------------------------------------------------------ looking

    def find(self, path: PurePath) -> FileNode | FolderNode | None:
        node: FileNode | FolderNode | None = self.root
        for part in path.parts:
            node = node.entries.get(part) if isinstance(node, FolderNode) else None
        return node

    def folder(self, path: PurePath) -> FolderNode:
        node = self.find(path)
        if not isinstance(node, FolderNode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return node

    def file(self, path: PurePath) -> FileNode:
        node = self.find(path)
        if not isinstance(node, FileNode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return node

    def files(self) -> Iterator[tuple[PurePath, FileNode]]:
        yield from _files(PurePath(), self.root)

    # ------------------------------------------------------------ changing

    def make_folder(self, path: PurePath) -> None:
        self._change(self._at(path, FolderNode()))

    def create(self, path: PurePath, number: int | None = None) -> FileNode:
        self._made += 1
        node = FileNode(self._made if number is None else number)
        self._change(self._at(path, node))
        return node

    def link(self, old: PurePath, new: PurePath) -> None:
        self._change(self._at(new, self.file(old)))

    def rename(self, old: PurePath, new: PurePath) -> None:
        node = self.find(old)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(old))
        if self.find(new) is not node:  # else both are names of one file, and nothing happens
            self._change(self._at(old, None), self._at(new, node))

    def remove(self, path: PurePath) -> None:
        if self.find(path) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self._change(self._at(path, None))

    def sync_folder(self, path: PurePath) -> None:
        folder = self.folder(path)
        left = []
        for names in self._changes:
            if any(at is folder for at, _, _ in names):
                _name(names, durable=True)
            else:
                left.append(names)
        self._changes = left

    def sync_all(self) -> None:
        for names in self._changes:
            _name(names, durable=True)
        self._changes.clear()
        for _, file in self.files():
            file.sync()

    def _at(
        self, path: PurePath, node: FileNode | FolderNode | None
    ) -> tuple[FolderNode, str, FileNode | FolderNode | None]:
        return self.folder(path.parent), path.name, node

    def _change(self, *names: tuple[FolderNode, str, FileNode | FolderNode | None]) -> None:
        _name(names, durable=False)
        self._changes.append(names)

    # ------------------------------------------------------------ losing

    def after_cut(self, rng: random.Random) -> Model:
        """What a new start finds. This model is of no use any more."""
        for group in self._groups():
            style = rng.choice(("nothing", "all", "prefix"))
            kept = {"nothing": 0, "all": len(group)}.get(style, rng.randint(0, len(group)))
            for names in group[:kept]:
                _name(names, durable=True)
        found, contents = Model(), dict[FileNode, FileNode]()
        found._made = self._made
        _copy(self.root, found.root, rng, contents)
        return found

    def _groups(self) -> list[list[Names]]:
        """Changes of names, those together that have a name in common, however many between."""
        groups: list[tuple[set[tuple[int, str]], list[Names]]] = []
        for names in self._changes:
            keys, group = {(id(folder), name) for folder, name, _ in names}, [names]
            for other in [found for found in groups if found[0] & keys]:
                groups.remove(other)
                keys, group = keys | other[0], [*other[1], *group]
            groups.append((keys, group))
        order = {id(names): i for i, names in enumerate(self._changes)}
        return [sorted(group, key=lambda names: order[id(names)]) for _, group in groups]


def _name(names: Names, *, durable: bool) -> None:
    for folder, name, node in names:
        entries = folder.on_disk if durable else folder.entries
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def _files(path: PurePath, folder: FolderNode) -> Iterator[tuple[PurePath, FileNode]]:
    for name, node in folder.entries.items():
        if isinstance(node, FolderNode):
            yield from _files(path / name, node)
        else:
            yield path / name, node


def _copy(
    old: FolderNode, new: FolderNode, rng: random.Random, copies: dict[FileNode, FileNode]
) -> None:
    for name, node in sorted(old.on_disk.items()):
        made: FileNode | FolderNode
        if isinstance(node, FolderNode):
            made = FolderNode()
            _copy(node, made, rng, copies)
        elif node in copies:
            made = copies[node]
        else:
            contents = node.after_cut(rng)
            made = copies[node] = FileNode(node.number, bytearray(contents), bytearray(contents))
        new.entries[name] = new.on_disk[name] = made


# ---------------------------------------------------------------- a Disk on it


class PowerCut(OSError):
    """The machine has no power: nothing has an effect any more."""


@dataclass
class Faults:
    """``cut_at``: the number of the call at which the power fails. ``fail_sync_at``: of the sync
    that fails, and takes with it what it was to sync, though readers of this life still see it, and
    the next sync succeeds: as a kernel does. ``fail_write_at``: of the write that fails.
    ``during_sync`` is called while one is under way: others write meanwhile. Sizes are in bytes.
    """

    cut_at: int | None = None
    fail_sync_at: int | None = None
    fail_write_at: int | None = None
    capacity: int | None = None
    during_sync: Callable[[], None] | None = None


class MemoryDisk:
    """A ``Disk``. After a power cut, :meth:`restarted` is what the next start finds."""

    def __init__(self, model: Model | None = None, faults: Faults | None = None) -> None:
        self.model, self.faults = model or Model(), faults or Faults()
        self.calls = self.syncs = self.writes = 0
        self.machine = b"the machine's id"
        self.filesystem = 7
        self.unreadable: set[tuple[int, int]] = set()  # (file, block)

    @property
    def is_off(self) -> bool:
        return self.faults.cut_at is not None and self.calls >= self.faults.cut_at

    @property
    def has_failed(self) -> bool:
        faults, never = self.faults, 1 << 60
        failed_sync = self.syncs >= (faults.fail_sync_at or never)
        return failed_sync or self.writes >= (faults.fail_write_at or never)

    def restarted(self, seed: int, faults: Faults | None = None) -> MemoryDisk:
        made = MemoryDisk(self.model.after_cut(random.Random(seed)), faults)
        made.machine, made.filesystem = self.machine, self.filesystem
        return made

    def again(self) -> MemoryDisk:
        """The process has died, the machine has not: everything that was written is there."""
        made = MemoryDisk(self.model)
        made.machine, made.filesystem = self.machine, self.filesystem
        return made

    def call(self) -> None:
        if self.is_off:
            raise PowerCut(errno.EIO, "the power is off")
        self.calls += 1

    def used_bytes(self) -> int:
        nodes = {id(node): node for _, node in self.model.files()}
        return sum(len(node.data) for node in nodes.values())

    def make_folder(self, folder: Path) -> None:
        self.call()
        if self.model.find(_inside(folder)) is None:
            for path in (*reversed(_inside(folder).parents), _inside(folder)):
                if self.model.find(path) is None:
                    self.model.make_folder(path)
                    self.model.sync_folder(path.parent)

    def open(self, path: Path, *, create: bool = False) -> MemoryFile:
        self.call()
        node = self.model.find(_inside(path))
        if create and node is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        if create:
            node = self.model.create(_inside(path))
        if not isinstance(node, FileNode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return MemoryFile(self, node)

    def names(self, folder: Path) -> list[str]:
        node = self.model.find(_inside(folder))
        return sorted(node.entries) if isinstance(node, FolderNode) else []

    def link(self, old: Path, new: Path) -> None:
        self.call()
        if self.model.find(_inside(new)) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        self.model.link(_inside(old), _inside(new))

    def rename(self, old: Path, new: Path) -> None:
        self.call()
        self.model.rename(_inside(old), _inside(new))

    def remove(self, path: Path) -> None:
        self.call()
        if self.model.find(_inside(path)) is not None:
            self.model.remove(_inside(path))

    def sync_folder(self, folder: Path) -> None:
        self.call()
        self.fail_sync()
        self.model.sync_folder(_inside(folder))

    def free_bytes(self, folder: Path) -> int:
        return (self.faults.capacity or 1 << 60) - self.used_bytes()

    def fail_sync(self) -> None:
        self.syncs += 1
        if self.syncs == self.faults.fail_sync_at:
            raise DiskError("a sync has failed")

    def flip(self, path: Path, at: int) -> None:
        """One bit of a file that lies on the disk is another now."""
        node = self.model.file(_inside(path))
        contents = bytearray(node.data)
        contents[at] ^= 1 << at % 8
        node.data, node.on_disk, node.pending = contents, bytearray(contents), []


class MemoryFile:
    """A ``DiskFile``."""

    def __init__(self, disk: MemoryDisk, node: FileNode) -> None:
        self.node = node
        self._disk = disk

    def read(self, nbytes: int, offset: int) -> bytes:
        first = offset // BLOCK_BYTES
        for block in range(first, -(-(offset + nbytes) // BLOCK_BYTES)):
            if (self.node.number, block) in self._disk.unreadable:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return bytes(self.node.data[offset : offset + nbytes])

    def write(self, data: Bytes, offset: int) -> None:
        self._disk.call()
        self._disk.writes += 1
        if self._disk.writes == self._disk.faults.fail_write_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._grow(offset + len(data))
        self.node.write(offset, bytes(data))

    def size(self) -> int:
        return len(self.node.data)

    def reserve(self, nbytes: int) -> None:
        self._disk.call()
        self._grow(nbytes)
        if nbytes > len(self.node.data):
            self.node.resize(nbytes)

    def write_back(self, offset: int, nbytes: int) -> None:
        """Has no effect that anybody may depend on."""

    def sync(self) -> None:
        self._disk.call()
        under_way = len(self.node.pending)
        if self._disk.faults.during_sync is not None:
            self._disk.faults.during_sync()
        try:
            self._disk.fail_sync()
        except DiskError:
            del self.node.pending[:under_way]
            raise
        self.node.sync(under_way)

    def identity(self) -> FileIdentity:
        number = self.node.number
        return FileIdentity(number, 1000 + number, self._disk.filesystem, self._disk.machine)

    def close(self) -> None:
        """Nothing to give back."""

    def _grow(self, nbytes: int) -> None:
        capacity = self._disk.faults.capacity
        more = max(0, nbytes - len(self.node.data))
        if capacity is not None and more > capacity - self._disk.used_bytes():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _inside(path: Path) -> PurePath:
    return path.relative_to(path.anchor)
