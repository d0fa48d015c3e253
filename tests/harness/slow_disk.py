"""A disk of a given speed and time of a sync, for the files of real daemons, on any machine.

The files lie where they lie, on a file system in memory for instance. A small library
(slow_disk.c, compiled when it is needed) makes whoever syncs wait as long as the disk would take,
and counts what is written.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

__all__ = ["SlowDisk"]

SOURCE = Path(__file__).with_suffix(".c")
COUNTERS = struct.Struct("=QQ")


class SlowDisk:
    """``environment`` is for the processes whose files below ``folder`` lie on this disk.

    Each process has the disk for itself.
    """

    def __init__(self, folder: Path, aside: Path, bytes_per_s: float, sync_s: float) -> None:
        compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
        if compiler is None:
            raise RuntimeError("a slow disk needs a C compiler: apt-get install gcc libc6-dev")
        aside.mkdir(parents=True, exist_ok=True)
        library, counters = aside / "slow_disk.so", aside / "counters"
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        counters.write_bytes(bytes(COUNTERS.size))
        with counters.open("r+b") as file:
            self._counters = mmap.mmap(file.fileno(), COUNTERS.size)
        self.environment = {
            "LD_PRELOAD": os.fspath(library),
            "ATOLL_TEST_SLOW_DISK": os.fspath(folder.resolve()),
            "ATOLL_TEST_SLOW_DISK_COUNTERS": os.fspath(counters),
            "ATOLL_TEST_SLOW_DISK_SPEED": str(bytes_per_s),
            "ATOLL_TEST_SLOW_DISK_SYNC_S": str(sync_s),
        }

    @property
    def written_bytes(self) -> int:
        return int(COUNTERS.unpack(self._counters[:])[0])

    @property
    def syncs(self) -> int:
        return int(COUNTERS.unpack(self._counters[:])[1])
