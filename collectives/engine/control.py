"""Keep what all threads of one reduction share: its lock, whether it goes on, and whom it tells.

One lock guards the schedule and all shared state. It is held for look-ups and copies of a finished
chunk or piece, never while a codec, a stream or a callback runs. Who sends to a destination waits
for the turn of that destination; a change wakes one of its threads, and that one the others.

Nothing here leads back to the reduction: one that is over would otherwise keep its buffers until
the next collection of cycles.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from atoll.collectives.errors import AtollError


class Control:
    """Hold the lock of a reduction, wake its threads, and tell its owner what has happened.

    ``changed`` is the lock, and what waits for any change. ``progress_bytes``: see ``Reduction``.
    """

    def __init__(
        self,
        on_done: Callable[[list[bytes]], None],
        on_failed: Callable[[int, str], None],
    ) -> None:
        self.on_done, self._on_failed = on_done, on_failed
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self.aborted = False
        self.progress_bytes = 0
        self._turns: dict[int, threading.Condition] = {}
        self._failed: set[int] = set()

    def turn(self, dest: int) -> threading.Condition:
        """Return what waits for the turn of a destination; it has the same lock, which is held."""
        if dest not in self._turns:
            self._turns[dest] = threading.Condition(self._lock)
        return self._turns[dest]

    def wake(self) -> None:
        """Wake who waits, under the lock: the schedule may allow more."""
        self.changed.notify_all()
        for turn in self._turns.values():
            turn.notify()

    def abort(self) -> None:
        """End the reduction, and wake everyone who waits."""
        with self.changed:
            self.aborted = True
            for turn in (self.changed, *self._turns.values()):
                turn.notify_all()

    def fail(self, participant: int, why: str) -> None:
        """Tell that a participant has failed, once each, unless the reduction has ended."""
        with self.changed:
            if self.aborted or participant in self._failed:
                return
            self._failed.add(participant)
        self._on_failed(participant, why)


def reason_of(error: Exception) -> str:
    """Return what an error says, for the reason of a failure."""
    return error.what if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
