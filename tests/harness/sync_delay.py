"""A disk that is slow for a while, for one process: the functions that sync are replaced.

A kernel slows a device down (cgroups' io.max), but the homes of tests are in memory. So a small
library is compiled and loaded before all others, as for a wrong clock.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

__all__ = ["SyncDelay"]

SOURCE = Path(__file__).with_suffix(".c")


class SyncDelay:
    """``environment`` is for the process; :meth:`delay` works at once, whenever it runs."""

    def __init__(self, folder: Path) -> None:
        compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
        if compiler is None:
            raise RuntimeError("a slow disk needs a C compiler: apt-get install gcc libc6-dev")
        folder.mkdir(parents=True, exist_ok=True)
        library, delay = folder / "sync_delay.so", folder / "delay"
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        delay.write_bytes(bytes(8))
        with delay.open("r+b") as file:
            self._delay_ms = mmap.mmap(file.fileno(), 8)
        self.environment = {"LD_PRELOAD": os.fspath(library), "ATOLL_TEST_DISK": os.fspath(delay)}

    def delay(self, each_s: float) -> None:
        """Make each sync take so much longer from now on."""
        self._delay_ms[:] = struct.pack("=q", int(each_s * 1e3))

    def close(self) -> None:
        self._delay_ms.close()
