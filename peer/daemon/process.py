"""Set the limits of a daemon's process: how malloc keeps memory, and who gets descriptors.

*Memory.* Every new thread may get an arena of its own, up to eight for each core, and memory that
is free in one is not given to another: a daemon whose threads come and go with its rounds would
grow for days. And when a block of up to 32 MiB has been freed once, such as the parameters of a
small model, all smaller ones come from the arenas from then on, and each arena keeps twice as much
at its end: tens of MiB of chunks, which a round needs for a few seconds.

*Descriptors.* A flood of connections exhausts them first, so some are kept for the daemon itself:
without one it can neither dial a member, nor store an incarnation, nor answer `atoll leave`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
from collections.abc import Callable

# What malloc.h calls them.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
# One for the loop and one that the round's threads share: they allocate little and hardly contend.
ARENAS_MAX = 2
# What glibc begins with, and no longer changes once it is set. Chunks of large models are above it
# in every codec of 4 bits and more; they are taken from the kernel once in a round, and given back.
LARGE_BYTES = 128 << 10
# Free at the end of an arena: with glibc's own 128 KiB it would shrink and grow with every message.
KEPT_BYTES = 2 << 20
# Whoever connects gets descriptors with numbers below this share of the limit ...
SHARE_FOR_CONNECTIONS = 0.8
# ... and never these last: dials, files, and commands at the local socket.
KEPT_FOR_CONTROL = 32
# Nor do dials get the very last: libzmq ends the process when it cannot accept a local connection.
KEPT_FOR_LOCAL = 8


def prepare_process(note: Callable[[str, str], None], verbose: bool = False) -> None:
    """Set the limits of this process, before its first thread starts.

    ``note`` takes the kind and the text of a line; what is as usual is said only if ``verbose``.
    """
    memory = f"{cap_arenas()}; {give_back_large()}"
    limits = f"{raise_limit()}; {memory}"
    if verbose:
        note("limits", limits)


# ------------------------------------------------------------ memory


def cap_arenas() -> str:
    """Limit glibc's memory arenas; return what came of it, for the log.

    Call it before the first thread starts.
    """
    if _is_set("MALLOC_ARENA_MAX", "arena_max"):
        return "memory arenas as the environment says"
    libc = _glibc()
    if not libc:
        return "memory arenas as this system has them"
    if not _set(M_ARENA_MAX, ARENAS_MAX):
        return f"{libc} would not limit its memory arenas"
    return f"{libc} with at most {ARENAS_MAX} memory arenas"


def give_back_large() -> str:
    """Make glibc return large blocks to the kernel as soon as they are freed.

    Returns what came of it, for the log.
    """
    if _is_set("MALLOC_MMAP_THRESHOLD_", "mmap_threshold"):
        return "large blocks as the environment says"
    if not _glibc():
        return "large blocks as this system has them"
    if not (_set(M_MMAP_THRESHOLD, LARGE_BYTES) and _set(M_TRIM_THRESHOLD, KEPT_BYTES)):
        return "large blocks stay in the arenas"
    return f"blocks of {LARGE_BYTES >> 10} KiB go back when they are freed"


def _is_set(variable: str, tunable: str) -> bool:
    return variable in os.environ or tunable in os.environ.get("GLIBC_TUNABLES", "")


def _glibc() -> str:
    """Return glibc's name and version; "" for another library: macOS, musl."""
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""
    return libc if libc.startswith("glibc") else ""


def _set(option: int, value: int) -> bool:
    return bool(ctypes.CDLL(None).mallopt(option, value) == 1)


# ------------------------------------------------------------ descriptors


def raise_limit() -> str:
    """Let this process open as many descriptors as it may.

    Returns what came of it, for the log.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return f"up to {soft:,} descriptors"
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:  # macOS calls its limit infinite, and refuses that
        return f"up to {soft:,} descriptors; more are not allowed: {error}"
    return f"up to {hard:,} descriptors, raised from {soft:,}"


def is_scarce(accepted: socket.socket) -> bool:
    """Return whether this new connection must be turned away.

    A new descriptor has the lowest free number, so its number says how many are in use.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = min(int(SHARE_FOR_CONNECTIONS * soft), soft - KEPT_FOR_CONTROL)
    return soft != resource.RLIM_INFINITY and accepted.fileno() >= limit


def is_last(opened: socket.socket) -> bool:
    """Return whether this new socket must not be used to dial."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and opened.fileno() >= soft - KEPT_FOR_LOCAL
