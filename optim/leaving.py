"""End a trainer in order when its machine is to go: what a signal says, kept until a step is over.

A handler only notes that the signal has come. The method looks after each local step, hands in the
steps since the last round, waits for that round, and ends the script or lets its loop do so. The
handlers that were there before are called too, and are put back when the method is closed, and in
forked children: a DataLoader's worker takes no steps, and a signal is to end it as it always did.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import weakref
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

from atoll.collectives.errors import ConfigError
from atoll.peer.client.supervised import is_supervised

LEAVE_WAIT_S = 20.0  # of the 30 s that Kubernetes, Slurm and the clouds give at least
USUAL = (signal.SIGTERM, signal.SIGINT)
Handler = Callable[[int, FrameType | None], Any]


class Leaving:
    """Note that a signal asks this trainer to leave.

    ``wait_s``: how long it then waits for rounds; ``exits``: whether the script ends after that.
    ``asked``: the name of the signal that has come, or "". ``end_within`` hears in the handler how
    long a daemon that has ended is still worth waiting for: not at all within `atoll run`, which
    starts none while it ends.
    """

    def __init__(
        self,
        numbers: Collection[int],
        wait_s: float,
        end_within: Callable[[float], None],
        *,
        exits: bool,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "signals reach the main thread alone, and this is another one",
                fix="call leave_on_signal() in the main thread",
            )
        self.wait_s, self.exits, self.asked = wait_s, exits, ""
        self._end_within, self._daemon_wait_s = end_within, 0.0 if is_supervised() else wait_s
        self._is_closed = False
        self._before: dict[int, Handler | int | None] = {}
        for number in numbers:
            self._before[number] = signal.signal(number, self._on_signal)
        _OPEN.add(self)

    def close(self) -> None:
        """Put the handlers back that were there before, unless others have come since.

        In another thread than the main one, which alone may, the next signal does it.
        """
        self._is_closed = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_closed and signal.getsignal(number) == self._on_signal:
            self.close()
            signal.raise_signal(number)
            return
        is_first, self.asked = not self.asked, self.asked or signal.Signals(number).name
        self._end_within(self._daemon_wait_s)
        before = self._before[number]
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
        if number == signal.SIGINT and is_first:  # the second Ctrl+C does what it always did
            signal.signal(number, signal.SIG_DFL if before is None else before)


_OPEN: weakref.WeakSet[Leaving] = weakref.WeakSet()


def _after_fork() -> None:
    for leaving in _OPEN:
        leaving.close()


os.register_at_fork(after_in_child=_after_fork)


def supervised_leaving(end_within: Callable[[float], None]) -> Leaving | None:
    """Return what `atoll run` expects of its script; None without it.

    A script with handlers of its own, or one that trains in another thread, is left alone.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_supervised() or not is_main:
        return None
    own = (signal.SIG_DFL, signal.default_int_handler)
    numbers = [number for number in USUAL if signal.getsignal(number) in own]
    if signal.SIGTERM not in numbers:
        return None
    return Leaving(numbers, math.inf, end_within, exits=True)
