"""Threads that come and go leave no memory behind in arenas of their own; large blocks go back."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from atoll.peer.daemon import process

HAS_GLIBC = (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")

# Eight threads at once allocate; how many arenas does malloc_info tell of?
COUNT_ARENAS = """
import ctypes, os, tempfile, threading
from atoll.peer.daemon.process import cap_arenas
print(cap_arenas())
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
barrier = threading.Barrier(8)
def allocate():
    barrier.wait()
    for _ in range(1000):
        libc.malloc(1000)
    barrier.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
libc.fopen.restype = ctypes.c_void_p
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(file.read().count(b"<heap nr="))
"""

# One block of a small model's parameters is freed, then a round's chunks with smaller blocks
# between them: how many KiB more are there than before?
KEEP_CHUNKS = """
import ctypes
from atoll.peer.daemon.process import give_back_large
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def take(size):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    return block
def resident_kib():
    return int(open("/proc/self/statm").read().split()[1]) * 4
print(give_back_large())
before = resident_kib()
libc.free(take(20 << 20))
chunks = [(take(1 << 20), take(64 << 10)) for _ in range(32)]
for chunk, _ in chunks:
    libc.free(chunk)
print(resident_kib() - before)
"""


def arenas(**environment: str) -> tuple[str, int]:
    """What was said, and how many arenas eight threads got."""
    return answers(COUNT_ARENAS, **environment)


def answers(script: str, **environment: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    said, count = done.stdout.splitlines()
    return said, int(count)


@pytest.mark.skipif(not HAS_GLIBC, reason="another allocator than glibc's")
def test_threads_share_two_arenas() -> None:
    said, count = arenas()
    assert said.endswith("at most 2 memory arenas")
    assert count == process.ARENAS_MAX


@pytest.mark.skipif(not HAS_GLIBC, reason="another allocator than glibc's")
def test_who_has_chosen_a_number_keeps_it() -> None:
    said, count = arenas(MALLOC_ARENA_MAX="5")
    assert said == "memory arenas as the environment says"
    assert count == 5
    said, _ = arenas(GLIBC_TUNABLES="glibc.malloc.arena_max=3")
    assert said == "memory arenas as the environment says"


@pytest.mark.skipif(not HAS_GLIBC, reason="another allocator than glibc's")
def test_chunks_go_back_whatever_was_freed_before() -> None:
    said, kept_kib = answers(KEEP_CHUNKS)
    assert said == "blocks of 128 KiB go back when they are freed"
    assert kept_kib < 8 << 10


@pytest.mark.skipif(not HAS_GLIBC, reason="another allocator than glibc's")
def test_who_has_chosen_what_is_large_keeps_it() -> None:
    said, kept_kib = answers(KEEP_CHUNKS, MALLOC_MMAP_THRESHOLD_=str(32 << 20))
    assert said == "large blocks as the environment says"
    assert kept_kib > 16 << 10


def test_another_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)

    def unknown(name: str) -> str:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "confstr", unknown)
    monkeypatch.setattr(ctypes, "CDLL", None)  # nothing may be called
    assert process.cap_arenas() == "memory arenas as this system has them"
    assert process.give_back_large() == "large blocks as this system has them"
