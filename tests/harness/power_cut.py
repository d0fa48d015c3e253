"""Power cuts for real daemons: a home loses what was not synced.

SIGKILL alone is none: what a killed process has written is in the kernel's memory, and its next
life reads it there. So a small library is loaded before all others (power_cut.c, compiled when it
is needed), which journals what a process does to files below its home: writes, sizes, names, syncs.
After all processes are dead, :meth:`PowerSupply.cut` feeds the journal to the model of a disk
(harness/lossy_disk.py), lets a part survive by a seed, and puts the home into that state.

A file keeps its inode and its birth time, for a ledger knows its own file by them: everything that
is made below the home has a second name aside, on the same file system.

What is journalled is what Python calls: open, pwrite, write, writev, ftruncate, posix_fallocate,
fsync, fdatasync, rename, link, unlink, mkdir, rmdir. What cannot be followed (memory that is mapped
shared, copies inside the kernel, vectors at an offset) is noted, and then the cut raises
``NotFollowed``. What the C library does for itself (fopen) is not seen: such a file is lost.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

from harness.lossy_disk import FileNode, FolderNode, Model
from harness.netns import Net
from harness.processes import Fleet, Peer

__all__ = ["NotFollowed", "PowerSupply", "PoweredFleet", "with_preloads"]

SOURCE = Path(__file__).with_suffix(".c")
ENTRY = struct.Struct("=QQQIIIIQ")  # struct entry of power_cut.c
(
    MADE,
    WRITTEN,
    RESIZED,
    SYNC_BEGUN,
    SYNCED,
    FOLDER_MADE,
    LINKED,
    RENAMED,
    REMOVED,
    FOLDER_SYNCED,
    ALL_SYNCED,
    REFUSED,
) = range(1, 13)
# (time, kind, inode, offset, first, second, data)
Entry = tuple[int, int, int, int, PurePath, PurePath, bytes]


class NotFollowed(Exception):
    """A process has changed files in a way that no journal can follow."""


class PowerSupply:
    """Of one home. ``environment`` is for the processes that use it; ``aside`` is an empty folder
    on the same file system, outside the home."""

    def __init__(self, home: Path, aside: Path) -> None:
        self.home, self._aside = home.resolve(), aside.resolve()
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("inodes", "journal"):
            (self._aside / name).mkdir(parents=True)
        assert self.home.stat().st_dev == self._aside.stat().st_dev, "two file systems"
        self._model = self._as_it_is()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": os.fspath(library(self._aside)),
            "ATOLL_TEST_POWER_CUT": os.fspath(self.home),
            "ATOLL_TEST_POWER_CUT_ASIDE": os.fspath(self._aside),
        }

    def cut(self, seed: int) -> None:
        """The power fails. All processes of this home are dead when this is called."""
        rng = random.Random(seed)
        history = _History(self._model)
        for entry in self._entries():
            history.take(entry)
        self._model = self._model.after_cut(rng)
        self._restore()
        shutil.rmtree(self._aside / "journal")
        (self._aside / "journal").mkdir()

    def _as_it_is(self) -> Model:
        """Everything that is in the home now is on the disk."""
        model = Model()
        for folder, names, files in os.walk(self.home):
            at = Path(folder).relative_to(self.home)
            for name in names:
                model.make_folder(at / name)
            for name in files:
                path = self.home / at / name
                if path.is_file() and not path.is_symlink():
                    node = model.create(at / name, path.stat().st_ino)
                    node.write(0, path.read_bytes())
                    os.link(path, self._aside / "inodes" / str(node.number))
        model.sync_all()
        return model

    def _entries(self) -> list[Entry]:
        journals = sorted((self._aside / "journal").iterdir())
        found = [entry for path in journals for entry in _parsed(path.read_bytes())]
        return sorted(found, key=lambda entry: entry[0])

    def _restore(self) -> None:
        """Make the home what the model says. Sockets in folders that stay are left alone."""
        for folder, _, files in os.walk(self.home, topdown=False):
            at = Path(folder).relative_to(self.home)
            if not isinstance(self._model.find(at), FolderNode):
                shutil.rmtree(folder)
                continue
            for name in files:
                if (Path(folder) / name).is_file():
                    (Path(folder) / name).unlink()
        left = {"": self._model.root}
        while left:
            at, node = left.popitem()
            for name, child in node.entries.items():
                if isinstance(child, FolderNode):
                    (self.home / at / name).mkdir(mode=0o700, exist_ok=True)
                    left[f"{at}/{name}".lstrip("/")] = child
        numbers = set()
        for inside, file in self._model.files():
            kept = self._aside / "inodes" / str(file.number)
            if file.number not in numbers:
                with kept.open("r+b") as contents:
                    contents.write(file.data)
                    contents.truncate()
            numbers.add(file.number)
            os.link(kept, self.home / inside)
        for kept in (self._aside / "inodes").iterdir():
            if int(kept.name) not in numbers:
                kept.unlink()


class PoweredFleet(Fleet):
    """A fleet of which the power can be cut; see ``harness.processes.fleet``, which ends it."""

    def __init__(self, folder: Path, net: Net | None = None) -> None:
        super().__init__(folder, net)
        self._supplies: dict[str, PowerSupply] = {}

    def start(self, name: str, *arguments: str, port: int | None = None) -> Peer:
        if name not in self._supplies:
            supply = PowerSupply(self.folder / name, self.folder / f"{name}.aside")
            self._supplies[name] = supply
        usual = self.environment
        self.environment = with_preloads(usual, self._supplies[name].environment)
        try:
            return super().start(name, *arguments, port=port)
        finally:
            self.environment = usual

    def cut(self, names: str, seed: int) -> dict[str, int]:
        """All of these die at once, and lose what they had not synced; the daemons' ports."""
        ports = self.power_cut(names)
        self.lose(names, seed)
        return ports

    def lose(self, names: str, seed: int) -> None:
        """The homes of these, which are dead, lose what they had not synced."""
        for name in names:
            self._supplies[name].cut(seed * len(names) + names.index(name))


class _History:
    """Do in a model what the processes have done."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._files = {node.number: node for _, node in model.files()}
        self._done: dict[FileNode, int] = {}  # changes that are on the disk
        self._begun: dict[tuple[int, int], int] = {}  # (inode, thread) -> changes before the sync

    def take(self, entry: Entry) -> None:
        _, kind, inode, offset, first, second, data = entry
        model = self._model
        if kind == REFUSED:
            raise NotFollowed(str(first))
        if kind == MADE:
            self._made(first, inode)
        elif kind in (WRITTEN, RESIZED, SYNC_BEGUN, SYNCED):
            self._contents(kind, inode, offset, data)
        elif kind == FOLDER_MADE:
            model.make_folder(first)
        elif kind == LINKED:
            model.link(first, second)
        elif kind == RENAMED:
            model.rename(first, second)
        elif kind == REMOVED and model.find(first) is not None:  # else a socket
            model.remove(first)
        elif kind == FOLDER_SYNCED:
            model.sync_folder(first)
        elif kind == ALL_SYNCED:
            model.sync_all()

    def _made(self, path: PurePath, inode: int) -> None:
        there = self._model.find(path)
        if there is None or there is not self._files.get(inode):
            self._files[inode] = self._model.create(path, inode)

    def _contents(self, kind: int, inode: int, offset: int, data: bytes) -> None:
        file = self._files.get(inode)
        if file is None:
            if kind in (WRITTEN, RESIZED):
                raise NotFollowed(f"inode {inode} was made unseen")
            return  # the beginning of a folder's sync
        done = self._done.get(file, 0)
        if kind == WRITTEN:
            file.write(offset, data)
        elif kind == RESIZED and offset != len(file.data):
            file.resize(offset)
        elif kind == SYNC_BEGUN:
            self._begun[inode, offset] = done + len(file.pending)
        elif kind == SYNCED:
            count = max(0, self._begun[inode, offset] - done)
            file.sync(count)
            self._done[file] = done + count


def _parsed(journal: bytes) -> Iterator[Entry]:
    """The entries of one journal; the last may be cut short, by SIGKILL."""
    at = 0
    while at + ENTRY.size <= len(journal):
        time_ns, inode, offset, kind, one, two, _, nbytes = ENTRY.unpack_from(journal, at)
        at += ENTRY.size
        stop = at + one + two + nbytes
        if stop > len(journal):
            return
        first, second = journal[at : at + one], journal[at + one : at + one + two]
        data = journal[at + one + two : stop]
        paths = PurePath(os.fsdecode(first)), PurePath(os.fsdecode(second))
        yield time_ns, kind, inode, offset, *paths, data
        at = stop


def library(folder: Path) -> Path:
    """The compiled library, below this folder."""
    path = folder / "power_cut.so"
    if not path.exists():
        compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
        if compiler is None:
            raise RuntimeError("power cuts need a C compiler: apt-get install gcc libc6-dev")
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(path), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
    return path


def with_preloads(*environments: Mapping[str, str]) -> dict[str, str]:
    """One environment of several, all of whose libraries are loaded."""
    merged = {name: value for found in environments for name, value in found.items()}
    preloads = [found["LD_PRELOAD"] for found in environments if "LD_PRELOAD" in found]
    return merged | {"LD_PRELOAD": ":".join(preloads)} if preloads else merged
