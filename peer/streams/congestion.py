"""Choose which congestion control the data streams ask the kernel for.

Over a network whose losses are not known it is BBR, where the kernel has it: on paths with losses
that no queue has caused it keeps most of the rate, of which cubic keeps a tenth (docs/log.md). A
stream that keeps to a pace fills hardly any queue, so a loss there is the path's; where a plan has
found none it is cubic, which does not slow down to look for the shortest round trip as BBR does. If
there are losses after all, which hold it back, it is BBR again until the next plan (LossWatch of
peer/links/tcp_info.py).
Between processes of one machine there is nothing to find out: cubic again. Only the side that sends
has a control, so the other side is not asked.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from atoll.collectives.errors import ConfigError

AUTO: Final = "auto"
BBR, CUBIC = "bbr", "cubic"  # what "auto" chooses from
NAME_BYTES: Final = 16  # TCP_CA_NAME_MAX of linux/tcp.h, with a zero at the end
AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


class Sender(Protocol):
    """Send under a congestion control, as a data stream does (stream.py)."""

    is_local: bool  # both ends are on this machine

    @property
    def congestion(self) -> str:
        """Return the control in use; "" where the system does not tell."""

    def use_congestion(self, name: str, *, lasting: bool = False) -> str:
        """Use this control from now on; return "", or why not."""


class Congestion:
    """Set the congestion control of all data streams of a daemon. ``choice``: a name, or AUTO."""

    def __init__(self, choice: str, log: Callable[[str], None]) -> None:
        self._choice, self._log = choice, log
        self.bbr = _may_be_bbr(choice)  # where a way is lossy, losses will not slow what it sends
        self._missed: set[str] = set()  # what the log has a line about

    def apply(self, stream: Sender) -> None:
        """Set the congestion control of a stream on which this side is about to send.

        Where the kernel lacks what is wanted, the stream keeps what the system prefers, and the log
        says so once.
        """
        if self._choice != AUTO:
            why_not = stream.use_congestion(name := self._choice, lasting=True)
        else:
            why_not = stream.use_congestion(name := suited(stream))
        if why_not and name not in self._missed:
            self._missed.add(name)
            self._log(f"data streams use {stream.congestion or 'what there is'}: {why_not}")


def suited(stream: Sender, *, paced: bool = False, lossy: bool = True) -> str:
    """Return what "auto" means for a stream of this plan, or of none: CUBIC or BBR.

    ``paced``: the stream keeps to a pace of the plan; ``lossy``: its way has losses, or the losses
    are not known.
    """
    return CUBIC if stream.is_local or (paced and not lossy) else BBR


def _may_be_bbr(choice: str) -> bool:
    if choice != AUTO:
        return choice.startswith(BBR)  # newer ones have a number
    with socket.socket() as sock:
        return not ask(sock, BBR)


def ask(sock: socket.socket, name: str) -> str:
    """Set the socket's congestion control from now on; return "", or why that failed."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return f"this system does not let one choose {name}"
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as error:
        if error.errno == errno.ENOENT:
            return f"this kernel has no {name}"
        return f"the kernel refuses {name}: {os.strerror(error.errno or 0).lower()}"
    return ""


def in_use(sock: socket.socket) -> str:
    """Return the name of a socket's congestion control; "" where the system does not tell."""
    try:
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, NAME_BYTES)
    except (OSError, AttributeError):
        return ""
    return name.split(b"\0")[0].decode()


def check(choice: str) -> str:
    """Return ``choice``, as the user gave it, if a socket may have it; raise ConfigError if not."""
    if choice == AUTO:
        return choice
    with socket.socket() as sock:
        why_not = ask(sock, choice)
    if why_not:
        known = AVAILABLE.read_text().strip() if AVAILABLE.exists() else ""
        fix = f"it has {', '.join(known.split())}; or `--congestion {AUTO}`" if known else ""
        raise ConfigError(f"--congestion {choice}: {why_not}", fix=fix or "leave it out")
    return choice
