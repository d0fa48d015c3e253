"""Share memory between a daemon and its trainer: anonymous files, handed over by descriptor.

A region belongs to the daemon. It has no name in any file system (``/dev/shm`` is 64 MB in many
containers, and a client's exit must not unlink it), so it vanishes with its last user. Clients get
a descriptor over a unix socket; the outer state is handed out read-only.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import ConfigError, DaemonLostError
from atoll.collectives.units import memory

_LENGTH_BYTES = 8
# Of memory that is asked for at once: the system clears it in some 10 ms of a processor's time.
SLICE_BYTES = 16 << 20


class Region:
    """Hold ``count`` float32 values in memory that can be shared; zero at first.

    ``progress``: is told how many bytes the system has just given. On a starved machine those of a
    large model take many seconds, in which nothing else shows that this process gets on.
    """

    fd = -1

    def __init__(
        self, name: str, count: int, progress: Callable[[int], None] | None = None
    ) -> None:
        self.count = count
        size_bytes = max(1, count) * 4
        _check_available(name, size_bytes)
        self.fd = _anonymous_file(name)
        try:
            # An overfull tmpfs would kill the process with SIGBUS at the first touch: ask now.
            for start in range(0, size_bytes, SLICE_BYTES):
                length = min(SLICE_BYTES, size_bytes - start)
                os.posix_fallocate(self.fd, start, length)
                if progress is not None:
                    progress(length)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"no memory for {name}: {memory(size_bytes)}: {error.strerror}",
                fix="free memory or train a smaller model on this machine",
            ) from error
        self.floats = map_floats(self.fd, count, writable=True)

    def close(self) -> None:
        """Give up the descriptor; the memory lives as long as somebody maps it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def map_floats(fd: int, count: int, *, writable: bool) -> NDArray[np.float32]:
    """Map the region behind ``fd`` as float32[count]; the array keeps the mapping alive."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapped = mmap.mmap(fd, max(1, count) * 4, prot=protection)
    return np.frombuffer(mapped, dtype=np.float32, count=count)


def send_region(sock: socket.socket, region: Region, *, writable: bool) -> None:
    """Hand ``region`` to the process at the other end of a unix socket."""
    fd = region.fd if writable else os.open(f"/proc/self/fd/{region.fd}", os.O_RDONLY)
    try:
        socket.send_fds(sock, [region.count.to_bytes(_LENGTH_BYTES, "big")], [fd])
    finally:
        if not writable:
            os.close(fd)


def receive_region(sock: socket.socket, *, writable: bool) -> NDArray[np.float32]:
    """Map the region that the daemon sends next. Raise DaemonLostError if it sends none."""
    head, fds, _, _ = socket.recv_fds(sock, _LENGTH_BYTES, 1)
    try:
        if len(head) != _LENGTH_BYTES or len(fds) != 1:
            raise DaemonLostError(
                "the daemon ended while it handed over memory", fix="start it again: atoll up"
            )
        return map_floats(fds[0], int.from_bytes(head, "big"), writable=writable)
    finally:
        for fd in fds:
            os.close(fd)


def _check_available(name: str, size_bytes: int) -> None:
    """Raise ConfigError if so much memory is not free.

    Linux would rather kill a process than refuse it memory: so ask first.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return  # another system
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    if available is not None and size_bytes > int(available) * 1024:
        raise ConfigError(
            f"no memory for {name}: it takes {memory(size_bytes)},"
            f" {memory(1024 * int(available))} are free",
            fix="free memory or train a smaller model on this machine",
        )


def _anonymous_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"atoll-{name}", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # other systems: a file without a name
        return os.dup(file.fileno())
