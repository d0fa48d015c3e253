"""Tell systemd how the daemon is: ready, stopping, alive (the protocol of ``sd_notify``).

A unit with ``Type=notify`` starts what depends on it when this peer answers commands, and one with
``WatchdogSec=`` kills and restarts a daemon whose event loop stands still.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping

READY = "READY=1"
STOPPING = "STOPPING=1"
ALIVE = "WATCHDOG=1"
SAID_ONCE_S = 1.0  # a manager that is busy takes it by then, and nothing repeats it
BEATS = 3  # signs of life in the time of the watchdog; sd_watchdog_enabled(3) advises two or more


class ServiceManager:
    """Speak to whoever listens at NOTIFY_SOCKET; to nobody where that is not set."""

    def __init__(self, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        # An @ stands for the zero byte of an abstract address.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._say = say
        self._pause_s = _watchdog_s(environ) / BEATS

    def ready(self) -> None:
        """Say that the daemon is ready, and from now on that it is alive. Needs a running loop."""
        self._tell(READY, SAID_ONCE_S)
        if self._address and self._pause_s:
            self._beat()

    def stopping(self) -> None:
        self._tell(STOPPING, SAID_ONCE_S)

    def _beat(self) -> None:
        self._tell(ALIVE)
        asyncio.get_running_loop().call_later(self._pause_s, self._beat)

    def _tell(self, state: str, patience_s: float = 0.0) -> None:
        """Send a state. Where nobody takes it any more, say so once, and stay silent."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(patience_s)
                sender.connect(self._address)  # else a full queue would be tried without a pause
                sender.send(state.encode())
        except (BlockingIOError, TimeoutError):
            return  # the manager is busy; the next sign of life follows
        except OSError as error:
            self._address = ""
            self._say(f"systemd is not told {state}: NOTIFY_SOCKET: {error.strerror or error}")


def _watchdog_s(environ: Mapping[str, str]) -> float:
    """Return the time of the watchdog of this process, or 0."""
    text, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not (text.isascii() and text.isdigit()) or pid not in ("", str(os.getpid())):
        return 0.0
    return int(text[:18]) / 1e6
