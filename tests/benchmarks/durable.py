"""What durable rounds cost on a disk: medians of waiting for it, and bytes.

    python tests/benchmarks/durable.py [FOLDER]

Chunks come here as fast as the memory gives them; in a round they come over a network, and the disk
has begun with most of R when the last one is there.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from atoll.peer.durable.disk import RealDisk
from atoll.peer.durable.ledger import open_ledger
from atoll.peer.durable.ledger_format import BLOCK_BYTES
from atoll.peer.durable.round_files import RoundFiles, RoundName

CHUNK_BYTES = 1 << 20
NETWORK_BYTES_PER_S = 125e6  # a gigabit


def median_ms(times: int, work: Callable[[], object], before: Callable[[], object]) -> str:
    took = []
    for _ in range(times):
        before()
        began = time.perf_counter()
        work()
        took.append(1e3 * (time.perf_counter() - began))
    took.sort()
    return f"{statistics.median(took):8.2f} ms median {took[0]:8.2f} least {took[-1]:8.2f} most"


def plain_appends(folder: Path) -> str:
    """What a log does that only grows: each sync writes the new size as well."""
    fd = os.open(folder / "plain", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    line = median_ms(200, lambda: os.fdatasync(fd), lambda: os.write(fd, bytes(300)))
    os.close(fd)
    return line


def ledger(folder: Path, nbytes: int) -> str:
    opened = open_ledger(RealDisk(), folder / "votes").ledger

    def append() -> None:
        if opened.wants_compaction:
            opened.compact([(1, bytes(3000))], opened.position)
        opened.append(1, bytes(nbytes))

    line = median_ms(200, opened.sync, append)
    opened.close()
    return line


def compaction(folder: Path) -> str:
    opened = open_ledger(RealDisk(), folder / "votes").ledger

    def rounds() -> None:
        for _ in range(10):
            opened.append(1, bytes(300))
            opened.sync()

    def compact() -> None:
        opened.compact([(1, bytes(30_000))], opened.position)

    line = median_ms(20, compact, rounds)
    opened.close()
    return line


def result(folder: Path, nbytes: int, *, paced: bool) -> str:
    """From the last chunk to R on the disk."""
    files = RoundFiles(RealDisk(), folder / "rounds")
    chunk = os.urandom(CHUNK_BYTES)
    name = RoundName(0, 1, 1)
    writer = None

    def write() -> None:
        nonlocal name, writer
        files.remove(files.names())
        name = name._replace(round=name.round + 1)
        writer = files.write(name, nbytes)
        began = time.perf_counter()
        for at in range(0, nbytes, CHUNK_BYTES):
            writer.put(at, chunk)
            if paced:
                late_s = (at + CHUNK_BYTES) / NETWORK_BYTES_PER_S - time.perf_counter() + began
                time.sleep(max(0, late_s))

    def seal() -> None:
        assert writer is not None
        writer.seal()

    return median_ms(15, seal, write)


def main(where: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=where) as made:
        folder = Path(made)
        print("300 B appended to a file, fdatasync   ", plain_appends(folder))
        print("300 B in the ledger: sync             ", ledger(folder, 300))
        print("12 KiB in the ledger: sync            ", ledger(folder, 12_000))
        print("compaction after 10 rounds            ", compaction(folder))
        for mib in (10, 100):
            for paced in (False, True):
                how = "at 1 Gbit/s" if paced else "at once    "
                line = result(folder, mib << 20, paced=paced)
                print(f"R of {mib:3} MiB, chunks {how}: seal   ", line)
        print(f"bytes of a round: R, and {2 * BLOCK_BYTES} in the ledger (READY of up to 4 KB)")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
