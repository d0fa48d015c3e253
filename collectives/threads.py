"""Run threads beside an event loop; they come after it where processors are short.

Theory. The event loop sends the heartbeats, and a peer whose heartbeats are late counts as dead.
Its own threads encode, add, hash and make the outer step for seconds on end, and on a busy machine
each of them would get as much of a processor as the loop. Linux keeps a nice value for each thread,
and to lower one's own priority takes no privilege; elsewhere nothing is done. A few steps are
enough: a thread that gets next to nothing could hold the interpreter's lock for long, and the loop
would wait for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

NICER = 5  # than the main thread: a third of its share of a processor


def lower_priority() -> None:
    """Let the calling thread come after the main thread of this process."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may not let us; then all are alike
            nice = os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICER
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def worker(work: Callable[[], None], name: str) -> threading.Thread:
    """Return a thread that has not begun, and does not keep the process from ending."""

    def run() -> None:
        lower_priority()
        work()

    return threading.Thread(target=run, name=name, daemon=True)


def workers(most: int, name: str) -> ThreadPoolExecutor:
    """Return so many threads at most, each begun when there is work for it."""
    return ThreadPoolExecutor(most, name, initializer=lower_priority)
