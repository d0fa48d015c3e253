"""Keep a trainer's checkpoints until they cannot be asked for any more."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

from atoll.collectives.errors import CheckpointError, ConfigError


class WorkStore(Protocol):
    """Keep encoded checkpoints of works, by their numbers."""

    def put(self, work: int, number: int, data: bytearray, /) -> None: ...

    def get(self, work: int, number: int, /) -> bytes | bytearray: ...

    def drop(self, work: int, number: int | None = None, /) -> None:
        """Drop one checkpoint, or all of a work, if they are there."""
        ...


class MemoryStore:
    """Keep checkpoints in memory; ``used_bytes`` never exceed ``bytes_max``."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max, self.used_bytes = bytes_max, 0
        self._kept: dict[tuple[int, int], bytearray] = {}

    def put(self, work: int, number: int, data: bytearray) -> None:
        """Keep a checkpoint; ConfigError if there is no room for it."""
        if self.used_bytes + len(data) > self.bytes_max:
            raise ConfigError(
                f"checkpoints for replays take more than {self.bytes_max:,} bytes of memory",
                fix="give Replay a folder, a larger memory_bytes, or larger segment_steps",
            )
        self._kept[work, number] = data
        self.used_bytes += len(data)

    def get(self, work: int, number: int) -> bytearray:
        return self._kept[work, number]

    def drop(self, work: int, number: int | None = None) -> None:
        for key in [k for k in self._kept if k[0] == work and number in (None, k[1])]:
            self.used_bytes -= len(self._kept.pop(key))


class FolderStore:
    """Keep checkpoints in files like ``folder/work-000012/003.safetensors``.

    The folder belongs to one trainer: what an earlier one has left there is removed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for old in folder.glob("work-*"):
                shutil.rmtree(old)
        except OSError as error:
            raise ConfigError(
                f"the folder for replays, {folder}, cannot be used: {error}",
                fix="give one that this trainer alone may write to",
            ) from error

    def put(self, work: int, number: int, data: bytearray) -> None:
        """Write a checkpoint; CheckpointError if it cannot be written."""
        path = self._path(work, number)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)  # they are the model: for its user alone
            path.write_bytes(data)
        except OSError as error:
            raise CheckpointError(
                f"a checkpoint for replays cannot be written: {error}",
                fix="free some space there, or give Replay another folder",
            ) from error

    def get(self, work: int, number: int) -> bytes:
        """Read a checkpoint; CheckpointError if it cannot be read."""
        try:
            return self._path(work, number).read_bytes()
        except OSError as error:
            raise CheckpointError(f"a checkpoint for replays cannot be read: {error}") from error

    def drop(self, work: int, number: int | None = None) -> None:
        if number is None:
            shutil.rmtree(self._path(work, 0).parent, ignore_errors=True)
        else:
            self._path(work, number).unlink(missing_ok=True)

    def _path(self, work: int, number: int) -> Path:
        return self._folder / f"work-{work:06d}" / f"{number:03d}.safetensors"
