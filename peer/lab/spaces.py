"""Name a lab's network namespaces, enter one, and remove what was left behind.

The forwarder makes and removes them. A name carries the process id of the lab's owner, so that a
later lab can tell what is left of one whose owner and forwarder were both killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from atoll.collectives.errors import ConfigError

NAMESPACES = Path("/run/netns")
TUN = Path("/dev/net/tun")
PREFIX = "atoll-lab"
CLONE_NEWNET = 0x40000000
MNT_DETACH = 2

_serial = itertools.count()


def new_prefix() -> str:
    """Return how the names of a new lab's namespaces begin.

    ``h3`` of host 3 follows, ``r3`` of the router before it, ``c3`` of its provider's.
    """
    return f"{PREFIX}-{os.getpid()}-{next(_serial)}"


def space_name(prefix: str, host: int) -> str:
    """Return the name of a host's namespace, as ``ip netns`` shows it."""
    return f"{prefix}-h{host}"


def check_possible(*, need_tun: bool = True) -> None:
    """Raise ConfigError, with what is missing, where no lab can be."""
    if os.geteuid() != 0:
        raise ConfigError(
            "a lab needs root, because it makes network namespaces",
            fix="run it as root: on this machine with sudo, or in a privileged container",
        )
    if need_tun and not os.access(TUN, os.R_OK | os.W_OK):
        raise ConfigError(
            f"a lab needs {TUN}, which this machine does not have",
            fix="modprobe tun; in a container: --device /dev/net/tun --cap-add ALL",
        )
    if shutil.which("nsenter") is None:
        raise ConfigError("a lab needs the command nsenter", fix="apt-get install util-linux")


def enter_command(space: str, arguments: list[str]) -> list[str]:
    """Return a command that runs the given one inside the namespace.

    It replaces nsenter: the process id is its own.
    """
    return ["nsenter", f"--net={NAMESPACES / space}", "--", *arguments]


def open_socket(space: str, family: int, kind: int, protocol: int) -> socket.socket:
    """Return a socket that lives in the namespace, whoever uses it. Raises OSError."""

    def inside() -> socket.socket:
        with (NAMESPACES / space).open() as file:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(file.fileno(), CLONE_NEWNET):  # of this thread alone
                raise OSError(ctypes.get_errno(), "cannot enter the namespace", space)
        return socket.socket(family, kind, protocol)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(inside).result()


def remove(prefix: str) -> None:
    """Take the names of a lab's namespaces away; harmless where the forwarder has done it."""
    for path in spaces_of(prefix):
        ctypes.CDLL(None).umount2(os.fsencode(path), MNT_DETACH)
        with contextlib.suppress(OSError):  # gone meanwhile, or still being removed
            path.unlink()


def spaces_of(prefix: str) -> list[Path]:
    """Return the paths of the namespaces of a lab that there are."""
    with contextlib.suppress(FileNotFoundError):
        pattern = re.compile(rf"{re.escape(prefix)}-[hrc]\d+")
        return [path for path in NAMESPACES.iterdir() if pattern.fullmatch(path.name)]
    return []


def sweep() -> None:
    """Remove what labs left behind whose owner and forwarder were killed together."""
    with contextlib.suppress(FileNotFoundError):
        for path in NAMESPACES.iterdir():
            match = re.fullmatch(rf"({PREFIX}-(\d+)-\d+)-[hrc]\d+", path.name)
            if match and not Path(f"/proc/{match.group(2)}").exists():
                remove(match.group(1))
