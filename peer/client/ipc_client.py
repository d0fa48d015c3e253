"""Send commands to a daemon and take its answers, for the command line and for sessions."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import time
import weakref
from pathlib import Path
from typing import Any

import msgpack
import zmq

from atoll.collectives.errors import (
    ERRORS_BY_CODE,
    AtollError,
    ConfigError,
    DaemonLostError,
    NoDaemonError,
)
from atoll.collectives.units import duration
from atoll.peer.client.console import say
from atoll.peer.daemon.ipc_server import CLIENT_ID_BYTES, COMMANDS, LIFELINE, unpack
from atoll.peer.net.identity import default_home, socket_path

COMMAND_TIMEOUT_S = 10.0  # the daemon's loop never stops for longer than 50 ms
PROGRESS_S = 10.0  # a wait longer than this says who is missing


class IpcClient:
    """Send numbered commands and take their answers; keep what was not asked for as events.

    One that nobody closes is closed as it is collected, its socket before its context: in any
    other order the process would wait for ever for the socket, as when a trainer ends by the error
    that says that its daemon has died.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        path = socket_path(home, COMMANDS)
        if not answers(socket_path(home, LIFELINE)):
            raise NoDaemonError(
                f"no daemon runs at {home}",
                fix="start one with `atoll up`, `atoll join` or `atoll run`, or give its folder:"
                " --home DIR, ATOLL_HOME",
            )
        # zmq reserves ids that begin with zero.
        self.identity = b"\1" + secrets.token_bytes(CLIENT_ID_BYTES - 1)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = context.socket(zmq.DEALER)
        self._closing = weakref.finalize(self, _close, self.socket, context)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IDENTITY, self.identity)
        self.socket.connect(f"ipc://{path}")
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._number = 0

    def ask(
        self,
        command: str,
        arguments: dict[str, Any],
        lifeline: socket.socket | None = None,
        patience_s: float = COMMAND_TIMEOUT_S,
    ) -> Any:
        """Return the daemon's answer to a command. Raise NoDaemonError after ``patience_s``.

        Raise ConfigError, and send nothing, for arguments that cannot travel.

        Who has a lifeline to it can be patient: a daemon that was stopped (a suspended laptop, a
        debugger) goes on where it was, and one that has ended is noticed at once.
        """
        self._number += 1
        try:
            packed = msgpack.packb([self._number, command, arguments])
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"`{command}` cannot be sent to the daemon: {error}",
                fix="give plain Python numbers: int(n) or float(x)",
            ) from error
        self.socket.send(packed)
        asked_s = said_s = time.monotonic()
        while (waited_s := time.monotonic() - asked_s) < patience_s:
            self.receive(min(patience_s - waited_s, 1.0), lifeline)
            for position, (kind, value) in enumerate(self.events):
                if kind == f"#{self._number}":
                    del self.events[position]
                    return _unwrap(value)
            if time.monotonic() - said_s > PROGRESS_S:
                said_s = time.monotonic()
                so_far = duration(said_s - asked_s)
                say(f"no answer from the daemon at {self.home} for {so_far}: is it stopped?")
        raise no_answer(self.home, f"`{command}`", patience_s)

    def receive(self, timeout_s: float, lifeline: socket.socket | None = None) -> None:
        """Take what arrives within the time. Raise DaemonLostError when the lifeline ends."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        if lifeline is not None:
            poller.register(lifeline.fileno(), zmq.POLLIN)
        for ready, _ in poller.poll(max(1, int(1000 * timeout_s))):
            if lifeline is not None and ready is not self.socket and has_ended(lifeline):
                raise lost(self.home)
        with contextlib.suppress(zmq.Again):
            while True:
                number, kind, value = unpack(self.socket.recv(zmq.NOBLOCK))
                if number:
                    self.events.append((f"#{number}", {"kind": kind, "value": value}))
                else:
                    self.events.append((kind, value))

    def close(self) -> None:
        self._closing()


def _close(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]) -> None:
    socket.close()
    context.term()


def ask(home: str | Path | None, command: str, **arguments: Any) -> Any:
    """Return the daemon's answer to one command, without a session: for the command line."""
    with contextlib.closing(IpcClient(default_home(home))) as dealer:
        return dealer.ask(command, arguments)


def answers(lifeline: Path) -> bool:
    """Return whether a daemon listens: a killed one leaves its sockets behind, but refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        # A stopped daemon accepts nobody: when its queue is full, a call that waits has no end.
        caller.setblocking(False)
        try:
            caller.connect(os.fspath(lifeline))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:
            return True  # somebody listens, or there would be no queue
    return True


def has_ended(lifeline: socket.socket) -> bool:
    """Return whether the lifeline has ended.

    It is readable when a descriptor has come, and at its end.
    """
    return is_readable(lifeline, 0.0) and not lifeline.recv(1, socket.MSG_PEEK)


def is_readable(lifeline: socket.socket, timeout_s: float) -> bool:
    """Wait until the lifeline is readable, and return whether it is, within the time."""
    poller = select.poll()  # select.select() takes no descriptor from 1024 on
    poller.register(lifeline, select.POLLIN)
    return bool(poller.poll(1000 * timeout_s))


def _unwrap(value: dict[str, Any]) -> Any:
    if value["kind"] == "ok":
        return value["value"]
    error = value["value"]
    kind = ERRORS_BY_CODE.get(error["code"], AtollError)
    raise kind(error["what"], fix=error["fix"])


def no_answer(home: Path, what: str, patience_s: float) -> NoDaemonError:
    return NoDaemonError(
        f"the daemon at {home} has not answered {what} for {duration(patience_s)}",
        fix="look at its terminal; end it and start it again if it hangs",
    )


def lost(home: Path) -> AtollError:
    return DaemonLostError(
        f"the daemon at {home} died or was stopped",
        fix="start it again (atoll up or atoll join), then this trainer: it takes the run's "
        "parameters and goes on",
    )
