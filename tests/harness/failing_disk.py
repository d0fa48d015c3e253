"""Disks that fail: ``os`` as a checkpoint's writer and reader see it, failing or dying at a chosen
call; and a real one that is small."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.peer.checkpoint import reader as reading
from atoll.peer.checkpoint import writer as writing


class Killed(BaseException):
    """The process is dead: nothing that it would do has an effect."""


class Disk:
    """Stands before ``os``: fails or dies at call number ``at`` of those that change or sync.

    A dead process takes with it what it had not synced: contents of files, names in folders.
    """

    CALLS = ("open", "mkdir", "posix_fallocate", "pwrite", "preadv", "fsync", "rename", "unlink")
    COUNTED = frozenset((*CALLS, "rmdir", "listdir", "posix_fadvise"))

    def __init__(self, at: int, error: OSError | None) -> None:
        self.calls, self._at, self._error = 0, at, error
        self._paths: dict[int, Path] = {}
        self._unsynced: set[Path] = set()  # files whose contents, folders whose names may be lost
        self._names: dict[Path, set[Path]] = {}  # of each folder, those that are not synced
        self._renamed: list[tuple[Path, Path]] = []  # old and new name, not synced

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.COUNTED:
            return real

        def call(*arguments: Any) -> Any:
            self.calls += 1
            if self._error is not None and self.calls == self._at:
                raise self._error
            if self._error is None and self.calls >= self._at:
                raise Killed
            result = real(*arguments)
            self._remember(name, arguments, result)
            return result

        return call

    def _remember(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        if name == "open":
            path = self._paths[result] = Path(arguments[0])
            if arguments[1] & os.O_CREAT:
                self._names.setdefault(path.parent, set()).add(path)
        elif name == "pwrite":
            self._unsynced.add(self._paths[arguments[0]])
        elif name == "fsync":
            path = self._paths[arguments[0]]
            self._unsynced.discard(path)
            self._names.pop(path, None)
            self._renamed = [names for names in self._renamed if names[1].parent != path]
        elif name == "rename":
            old, new = map(Path, arguments)
            self._renamed.append((old, new))
            self._unsynced = {moved(path, old, new) for path in self._unsynced}
            self._names = {
                moved(at, old, new): {moved(path, old, new) for path in paths}
                for at, paths in self._names.items()
            }

    def lose_what_was_not_synced(self) -> None:
        for path in self._unsynced:
            if path.exists():
                os.truncate(path, path.stat().st_size // 2)
        for paths in self._names.values():
            for path in paths:
                path.unlink(missing_ok=True)
        for old, new in reversed(self._renamed):
            if new.exists() and not old.exists():
                new.rename(old)


def moved(path: Path, old: Path, new: Path) -> Path:
    return new / path.relative_to(old) if path.is_relative_to(old) else path


@contextmanager
def disk(at: int, error: OSError | None) -> Iterator[Disk]:
    made = Disk(at, error)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "os", made)
        patch.setattr(reading, "os", made)
        yield made


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """Mount a file system of this size there; needs root, as networks of tests do."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=755", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
