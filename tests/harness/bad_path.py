"""What damages: a TCP proxy in front of a daemon that flips bits or stops taking bytes; and a
machine's bad memory, where a bit of a daemon's state turns.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

__all__ = ["BadPath", "flip_state", "listening_port"]

READ_BYTES = 256 << 10


class BadPath:
    """Whoever connects to ``address`` is connected to ``host``'s ``target_port``, by threads of
    this process: one for each connection and direction. ``there`` makes its sockets, on another
    host's network if need be (Net.inside)."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        there: Callable[[Callable[[], socket.socket]], socket.socket] = lambda make: make(),
    ) -> None:
        self.target_port = 0
        self.flipped = 0
        self._host, self._there = host, there
        self._listener = there(lambda: socket.create_server((host, 0)))
        self._lock = threading.Lock()
        self._flips = 0
        self._reads = threading.Event()  # what goes towards the daemon
        self._reads.set()
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._dice = random.Random(1)
        self._threads[0].start()

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    @property
    def is_used(self) -> bool:
        """Return whether there are connections: two daemons may have met on the other's path."""
        return bool(self._open)

    def flip(self) -> None:
        """One bit of the next block that passes, in either direction."""
        with self._lock:
            self._flips += 1

    def stop_reading(self) -> None:
        """Take nothing more of what is sent to the daemon: its callers' windows fill up. What the
        daemon itself sends on these connections still passes."""
        self._reads.clear()

    def read_again(self) -> None:
        self._reads.set()

    def close(self) -> None:
        self._reads.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept; close alone would not
        self._threads[0].join(10)
        self._listener.close()
        for sock in tuple(self._open):
            self._end(sock)
        for thread in self._threads:
            thread.join(10)

    # ------------------------------------------------------------ in the threads

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                daemon = self._there(self._dial)
            except OSError:  # the daemon is gone: end the call, as its own address would
                caller.close()
                continue
            daemon.settimeout(None)
            self._open |= {caller, daemon}
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            for source, target in ((caller, daemon), (daemon, caller)):
                arguments = (source, target, source is caller)
                thread = threading.Thread(target=self._pass_on, args=arguments, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _dial(self) -> socket.socket:
        return socket.create_connection((self._host, self.target_port), timeout=5)

    def _pass_on(self, source: socket.socket, target: socket.socket, to_daemon: bool) -> None:
        with contextlib.suppress(OSError):  # an end was reset: so is the other
            while data := source.recv(READ_BYTES):
                target.sendall(self._damaged(data))
                if to_daemon:
                    self._reads.wait()
        self._end(source)
        self._end(target)

    def _damaged(self, data: bytes) -> bytes:
        with self._lock:
            if not self._flips:
                return data
            self._flips -= 1
            self.flipped += 1
        damaged = bytearray(data)
        damaged[self._dice.randrange(len(data))] ^= 1 << self._dice.randrange(8)
        return bytes(damaged)

    def _end(self, sock: socket.socket) -> None:
        """Twice is harmless. Shut down first: that wakes the thread that reads it."""
        with self._lock:
            if sock not in self._open:
                return
            self._open.discard(sock)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


def listening_port(pid: int) -> int:
    """The port at which this process takes TCP connections; 0 if it does not yet."""
    connections = psutil.Process(pid).net_connections(kind="tcp")
    return next((c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN), 0)


def flip_state(pid: int, element: int, parameters: int) -> None:
    """Turn a bit in one parameter of a daemon's state, behind its back: in both of its buffers,
    since one of them is about to be written. The process should be stopped meanwhile.

    The shared region holds θ, θ of the other buffer, and both momenta
    (peer/client/shared_memory.py, state.py).
    """
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "atoll-state" in os.readlink(link):
                break
    else:
        raise AssertionError(f"process {pid} holds no state")
    with link.open("r+b", buffering=0) as memory:
        for buffer in (0, 1):
            offset = 4 * (buffer * parameters + element) + 2  # in the mantissa's highest bits
            memory.seek(offset)
            byte = memory.read(1)[0]
            memory.seek(offset)
            memory.write(bytes([byte ^ 0x20]))
