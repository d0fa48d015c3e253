"""A process that appends to a ledger and says after each sync what is on the disk; see
tests/processes/test_power_cut.py. ``python -m harness.ledger_process HOME SEED [no-sync]``."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from atoll.peer.durable.disk import RealDisk
from atoll.peer.durable.ledger import open_ledger
from atoll.peer.durable.round_files import RoundFiles, RoundName

HALF_BYTES = 32 * 4096


def main(home: Path, seed: int) -> None:
    rng = random.Random(seed)
    disk = RealDisk()
    opened = open_ledger(disk, home / "votes", half_bytes=HALF_BYTES)
    print("opened", opened.verdict.value, opened.position, flush=True)
    ledger, files = opened.ledger, RoundFiles(disk, home / "rounds")
    for number in range(1, 1 << 20):
        name = RoundName(opened.position + number, 1, 1)
        data = rng.randbytes(rng.randint(1, 50_000))
        writer = files.write(name, len(data))
        for at in range(0, len(data), 10_000):
            writer.put(at, data[at : at + 10_000])
        writer.seal()
        ledger.append(1, name.file.encode() + b" " + data[:20])
        print("ready", ledger.sync(), name.file, data.hex(), flush=True)
        if number % 7 == 0:
            ledger.append(2, b"late")
            ledger.compact([(3, b"state")], ledger.position - 1)
            print("compacted", ledger.synced, flush=True)


if __name__ == "__main__":
    if "no-sync" in sys.argv:
        os.fsync = os.fdatasync = lambda fd: None  # type: ignore[assignment]
    main(Path(sys.argv[1]), int(sys.argv[2]))
