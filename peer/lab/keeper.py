"""Clear a lab away when its owner ends, where no forwarder does: ``keeper.py PREFIX``.

Standard input is a pipe that only the owner holds. At its end, however the owner ended, whatever
runs in the lab's namespaces is killed and they are removed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from atoll.peer.lab.spaces import remove, spaces_of

KILL_ROUNDS = 100  # until nothing runs there any more
STEP_S = 0.01


def kill_residents(prefix: str) -> int:
    """Send SIGKILL to every process in a lab's namespaces; return how many there were.

    Whatever runs there runs because of the lab.
    """
    ours = set()
    for path in spaces_of(prefix):
        with contextlib.suppress(OSError):
            ours.add(path.stat().st_ino)
    found = 0
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        if pid in (os.getpid(), os.getppid()):
            continue
        with contextlib.suppress(OSError):  # it ended by itself
            handle = os.pidfd_open(pid)  # before the look: the id may pass on
            try:
                if (entry / "ns" / "net").stat().st_ino in ours:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    found += 1
            finally:
                os.close(handle)
    return found


def main(prefix: str) -> None:
    """Wait for the end of standard input, then clear away."""
    sys.stdin.buffer.read()
    for _ in range(KILL_ROUNDS):
        if not kill_residents(prefix):
            break
        time.sleep(STEP_S)
    remove(prefix)


if __name__ == "__main__":
    main(sys.argv[1])
