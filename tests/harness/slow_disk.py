"""A disk of a given speed and time of a sync, for the files of real daemons, on any machine.

The files lie where they lie, on a file system in memory for instance. A small library
(slow_disk.c, compiled when it is needed) makes whoever syncs wait as long as the disk would take,
and counts what is written.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

__all__ = ["SlowDisk"]

SOURCE = Path(__file__).with_suffix(".c")
SHARED = struct.Struct("=QQd")  # bytes written, syncs, and how long a sync takes


class SlowDisk:
    """``environment`` is for the processes whose files below ``folder`` lie on this disk.

    Each process has the disk for itself.
    """

    def __init__(
        self, folder: Path, aside: Path, bytes_per_s: float = math.inf, sync_s: float = 0.0
    ) -> None:
        """Begin with a disk of this speed. ``aside``: a folder for the library."""
        compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
        if compiler is None:
            raise RuntimeError("a slow disk needs a C compiler: apt-get install gcc libc6-dev")
        aside.mkdir(parents=True, exist_ok=True)
        library, shared = aside / "slow_disk.so", aside / "shared"
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        shared.write_bytes(SHARED.pack(0, 0, sync_s))
        with shared.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), SHARED.size)
        self.environment = {
            "LD_PRELOAD": os.fspath(library),
            "ATOLL_TEST_SLOW_DISK": os.fspath(folder.resolve()),
            "ATOLL_TEST_SLOW_DISK_SHARED": os.fspath(shared),
            "ATOLL_TEST_SLOW_DISK_SPEED": str(bytes_per_s),
        }

    @property
    def written_bytes(self) -> int:
        return int(SHARED.unpack(self._shared[:])[0])

    @property
    def syncs(self) -> int:
        return int(SHARED.unpack(self._shared[:])[1])

    def slow_down(self, sync_s: float) -> None:
        """Make each sync take so long from now on, in processes that run, too."""
        self._shared[-8:] = struct.pack("=d", sync_s)
