"""Tell glibc's allocator to keep few pools and to give back large blocks.

Every new thread may get an arena of its own, up to eight for each core, and memory that is free in
one is not given to another: a daemon whose threads come and go with its rounds would grow for days.
And when a block of up to 32 MiB has been freed once, such as the parameters of a small model, all
smaller ones come from the arenas from then on, and each arena keeps twice as much at its end: tens
of MiB of chunks, which a round needs for a few seconds.
"""

from __future__ import annotations

import ctypes
import os

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
