"""Write a daemon's lines to a file that stays small: ``--log FILE``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from atoll.peer.net.invite import without_token

LOG_BYTES_MAX: Final = 10 << 20  # of one file: weeks of a quiet run, and any editor opens it
LOG_FILES: Final = 5  # FILE and FILE.1 to FILE.4, so 50 MiB at most


class LogFile:
    """Append lines to a file; when it is full, it is renamed to FILE.1, and FILE.1 to FILE.2.

    Each line gets the day in front. An invite is written without its secret, and the file is for
    its user alone.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, which goes on where it ended. Raises OSError."""
        self._path = path
        self._fd = -1
        self._bytes = 0
        self._open()

    def write(self, line: str) -> None:
        """Write a line. Raises OSError, and tries again with the next one."""
        day = time.strftime("%Y-%m-%d")
        data = f"{day} {without_token(line)}\n".encode(errors="replace")
        if self._bytes and self._bytes + len(data) > LOG_BYTES_MAX:
            self._rotate()
        self._bytes += os.write(self._fd, data)

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o600)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._bytes = fd, os.fstat(fd).st_size

    def _rotate(self) -> None:
        for number in range(LOG_FILES - 1, 0, -1):
            older = self._numbered(number - 1)
            if older.exists():
                os.replace(older, self._numbered(number))
        self._open()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path
