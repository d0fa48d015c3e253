"""A SOCKS5 proxy on real sockets: in a thread of a test, or as a program on a host of a lab.

It can be one that wants a password, says no, is slow, is silent, or is none at all.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Asked", "SocksServer"]

PIECE_BYTES = 1 << 16
IDLE_S = 60.0  # an answer takes no longer in any test
KINDS = {1: socket.AF_INET, 4: socket.AF_INET6}
SIZES = {1: 4, 4: 16}


class Asked(NamedTuple):
    """Hold what a client has asked for: the type of address (3: a name), and where to."""

    kind: int
    host: str
    port: int


@dataclass
class SocksServer:
    """Serve until closed. ``login``: the user and the password that it wants.

    ``names``: what it resolves, beside the system. ``reply``: what it answers in place of
    connecting. ``instead``: bytes that it sends in place of its first answer, b"" to hang up.
    ``pause_s``: before each answer.
    """

    host: str = "127.0.0.1"
    port: int = 0
    login: tuple[str, str] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    reply: int = 0
    instead: bytes | None = None
    pause_s: float = 0.0
    asked: list[Asked] = field(default_factory=list)
    logins: list[tuple[str, str]] = field(default_factory=list)
    carried_bytes: int = 0

    def __enter__(self) -> SocksServer:
        self._socket = socket.create_server((self.host, self.port), backlog=128)
        self.port = self._socket.getsockname()[1]
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.cut()

    def cut(self) -> None:
        """End every connection that it carries."""
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        return f"socks5://{self.host}:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        self._open.add(sock)
        try:
            sock.settimeout(IDLE_S)
            self._talk(sock)
        except OSError:
            pass
        finally:
            self._open.discard(sock)
            sock.close()

    def _talk(self, sock: socket.socket) -> None:
        methods = _read(sock, _read(sock, 2)[1])
        time.sleep(self.pause_s)
        if self.instead is not None:
            sock.sendall(self.instead)
            return
        wanted = 2 if self.login is not None else 0
        sock.sendall(bytes((5, wanted if wanted in methods else 0xFF)))
        if wanted not in methods or (wanted and not self._log_in(sock)):
            return
        _, command, _, kind = _read(sock, 4)
        assert command == 1
        if kind == 3:
            host = _read(sock, _read(sock, 1)[0]).decode()
        else:
            host = socket.inet_ntop(KINDS[kind], _read(sock, SIZES[kind]))
        port = int.from_bytes(_read(sock, 2), "big")
        self.asked.append(Asked(kind, host, port))
        time.sleep(self.pause_s)
        target, reply = None, self.reply
        if not reply:
            try:
                target = socket.create_connection((self.names.get(host, host), port), IDLE_S)
            except ConnectionRefusedError:
                reply = 5
            except OSError:
                reply = 4
        try:
            sock.sendall(bytes((5, reply, 0, 1)) + bytes(6))
            if target is not None:
                self._carry(sock, target)
        finally:
            if target is not None:
                target.close()

    def _log_in(self, sock: socket.socket) -> bool:
        user = _read(sock, _read(sock, 2)[1]).decode()
        password = _read(sock, _read(sock, 1)[0]).decode()
        self.logins.append((user, password))
        time.sleep(self.pause_s)
        sock.sendall(bytes((1, (user, password) != self.login)))
        return (user, password) == self.login

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        self._open.add(other)
        for sock in (one, other):
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=self._pump, args=(other, one), daemon=True)
        back.start()
        self._pump(one, other)
        back.join()
        self._open.discard(other)
        other.close()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                target.sendall(data)
                self.carried_bytes += len(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionResetError
        data += piece
    return data


def main(host: str, port: str) -> None:
    """Serve on a host of a lab, until killed; say each thing that is asked for."""
    with SocksServer(host, int(port)) as server:
        print("ready", flush=True)
        said = 0
        while True:
            time.sleep(0.1)
            for one in server.asked[said:]:
                print(f"asked {one.kind} {one.host}:{one.port}", flush=True)
                said += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
