"""A wall clock that jumps, for one process: the functions that tell the time of day are replaced.

A time namespace would be the kernel's own way, but it has no wall clock (time_namespaces(7): only
CLOCK_MONOTONIC and CLOCK_BOOTTIME). So a small library is compiled and loaded before all others.
Whatever asks the C library gets the wrong time: Python, OpenSSL, ZeroMQ.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

__all__ = ["WrongClock"]

SOURCE = Path(__file__).with_suffix(".c")


class WrongClock:
    """``environment`` is for the process; :meth:`jump` works at once, whenever it runs."""

    def __init__(self, folder: Path) -> None:
        compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
        if compiler is None:
            raise RuntimeError("a wrong clock needs a C compiler: apt-get install gcc libc6-dev")
        folder.mkdir(parents=True, exist_ok=True)
        library, offset = folder / "wrong_clock.so", folder / "offset"
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        offset.write_bytes(bytes(8))
        with offset.open("r+b") as file:
            self._offset_ns = mmap.mmap(file.fileno(), 8)
        self.environment = {"LD_PRELOAD": os.fspath(library), "ATOLL_TEST_CLOCK": os.fspath(offset)}

    def jump(self, offset_s: float) -> None:
        """The clock is wrong by that much from now on (not: by that much more)."""
        self._offset_ns[:] = struct.pack("=q", int(offset_s * 1e9))

    def close(self) -> None:
        self._offset_ns.close()
