"""Write what happens to a file of JSON lines in the home, and read such files: ``events.jsonl``.

Each line is one event of this daemon's log, or one row of some peer (rows.py): a JSON object with
``unix_s`` and ``kind``. The file is bounded: when it has FILE_BYTES_MAX it is renamed to
``events.1.jsonl``, and of the older ones FILES_KEPT - 1 stay. A line is written at once and never
synced: a killed process loses nothing, a power cut the last seconds. What cannot be read of a line
is skipped, so a file that was cut off anywhere is still of use, also one of another machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

EVENTS_FILE = "events.jsonl"
FILE_BYTES_MAX = 16 << 20
FILES_KEPT = 6  # 80 MiB and more: eight hours of twenty peers, with a round every five seconds
FREE_BYTES_MIN = 64 << 20  # on the disk: what is left is for rounds and checkpoints
LOOK_EVERY_BYTES = 1 << 20  # how much is written between two looks at the disk
LOOK_EVERY_S = 10.0  # while nothing is written: soon after there is room, and a look costs little
UNIX_S_MAX = 253_402_300_799.0  # the end of the year 9999: calendars of Python go no further
LINE_BYTES_MAX = 64 << 10
FOLLOW_PAUSE_S = 0.2
ENCODE = json.JSONEncoder(
    separators=(",", ":"), default=str
).encode  # made once: it is slow to make


class EventFile:
    """Append events to the file in a home. It never raises for the disk's sake: it says so once."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path = path
        self._say = say
        self._file: int | None = None
        self._bytes = self._until_look = 0
        self._is_silent = False  # it was said that nothing is written
        self._look_s = 0.0  # while silent: when the disk is looked at again
        self._open()

    def append(self, event: dict[str, Any]) -> None:
        """Write one event; drop it where that cannot be."""
        line = ENCODE(event).encode() + b"\n"
        if len(line) > LINE_BYTES_MAX or not self._has_room(len(line)):
            return
        try:
            if self._bytes + len(line) > FILE_BYTES_MAX:
                self._rotate()
            if self._file is None:
                self._open()
            if self._file is not None:
                self._bytes += os.write(self._file, line)
                self._is_silent = False
        except OSError as error:
            self._fail(f"cannot write events to {self.path}: {error.strerror}")

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _open(self) -> None:
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(self.path, flags, 0o600)
            self._bytes = os.fstat(self._file).st_size
            if self._bytes and not _ends_a_line(self.path):
                self._bytes += os.write(self._file, b"\n")  # the line before was cut off
        except OSError as error:
            self.close()
            self._fail(f"cannot write events to {self.path}: {error.strerror}")

    def _rotate(self) -> None:
        self.close()
        for number in range(FILES_KEPT - 1, 0, -1):
            older = numbered(self.path, number)
            newer = numbered(self.path, number - 1)
            if newer.exists():
                newer.replace(older)
        self._open()

    def _has_room(self, nbytes: int) -> bool:
        """Return whether the disk has enough for others, too; looked at now and then.

        While nothing is written, that is by time: what is dropped says little about the disk.
        """
        self._until_look -= nbytes
        if self._is_silent and time.monotonic() < self._look_s:
            return False
        if not self._is_silent and self._until_look > 0:
            return True
        self._until_look = LOOK_EVERY_BYTES
        try:
            disk = os.statvfs(self.path.parent)
        except OSError as error:
            self._fail(f"cannot write events to {self.path}: {error.strerror}")
            return False
        free_bytes = disk.f_bavail * disk.f_frsize
        if free_bytes < FREE_BYTES_MIN:
            self._fail(
                f"the disk under {self.path} has {free_bytes / 1e6:.0f} MB free; events are written"
                f" from {FREE_BYTES_MIN / 1e6:.0f} MB: the rest is for rounds and checkpoints"
            )
            return False
        return True

    def _fail(self, text: str) -> None:
        self._look_s = time.monotonic() + LOOK_EVERY_S
        if not self._is_silent:
            self._is_silent = True
            self._say(text)


def numbered(path: Path, number: int) -> Path:
    """Return the name of the file that was rotated so many times; 0: of the one that is written."""
    return path if number == 0 else path.with_name(f"{path.stem}.{number}{path.suffix}")


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


# ---------------------------------------------------------------- reading


def is_time(value: Any) -> bool:
    """Return whether a value is a time that every program which reads events can show."""
    return isinstance(value, int | float) and 0 <= value <= UNIX_S_MAX


def files_of(path: Path) -> list[Path]:
    """Return the files of events, the oldest first: of a home, a folder of them, or one file."""
    if path.is_dir():
        path = path / EVENTS_FILE
    names = [numbered(path, number) for number in range(FILES_KEPT - 1, -1, -1)]
    return [name for name in names if name.exists()]


def read(path: Path, since_unix_s: float = 0.0) -> Iterator[dict[str, Any]]:
    """Return an iterator over the events since then, the oldest first.

    A file that ends before ``since_unix_s`` is not read. Raises OSError for one that cannot be.
    """
    for name in files_of(path):
        if name.stat().st_mtime < since_unix_s:
            continue
        with name.open("rb") as file:
            for line in file:
                event = _parsed(line)
                if event is not None and event["unix_s"] >= since_unix_s:
                    yield event


def follow(path: Path, pause_s: float = FOLLOW_PAUSE_S) -> Iterator[dict[str, Any] | None]:
    """Return an endless iterator over what is appended from now on; None after each look at it.

    It goes on in the new file when one is begun.
    """
    path = path / EVENTS_FILE if path.is_dir() else path
    file, rest = path.open("rb"), b""
    try:
        file.seek(0, os.SEEK_END)
        while True:
            data = file.read()
            *lines, rest = (rest + data).split(b"\n")
            yield from (event for event in map(_parsed, lines) if event is not None)
            rest = rest[-LINE_BYTES_MAX:]
            if not data and not _is_same(file.fileno(), path):
                file.close()
                file, rest = path.open("rb"), b""
                continue
            yield None
            if not data:
                time.sleep(pause_s)
    finally:
        file.close()


def _is_same(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return True  # between two renames


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line; None for what is none."""
    try:
        event = json.loads(line) if len(line) <= LINE_BYTES_MAX else None
    except (ValueError, RecursionError):  # the second: of lists in lists, without an end
        return None
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
        return None
    return event if is_time(event.get("unix_s")) else None
