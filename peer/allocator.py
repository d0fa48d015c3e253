"""glibc's allocator, told to keep its pools few.

Every new thread may get an arena of its own, up to eight for each core, and memory that is free in
one is not given to another: a daemon whose threads come and go with its rounds would grow for days.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["cap_arenas"]

# What malloc.h calls it.
M_ARENA_MAX = -8
# One for the loop and one that the round's threads share: they allocate little and hardly contend.
ARENAS_MAX = 2


def cap_arenas() -> str:
    """Before the first thread starts; what came of it, for the log."""
    if "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", ""):
        return "memory arenas as the environment says"
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):  # macOS, musl
        libc = ""
    if not libc.startswith("glibc"):
        return "memory arenas as this system has them"
    if ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS_MAX) != 1:
        return f"{libc} would not limit its memory arenas"
    return f"{libc} with at most {ARENAS_MAX} memory arenas"
