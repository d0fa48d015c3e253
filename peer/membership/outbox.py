"""Hold messages back until the records are synced that have to be first.

The table is ``SYNCED_FIRST`` (durable_records.py). A message to this peer itself waits like every
other: a candidate or coordinator counts its own vote only when its disk has it, while the disks of
others work on theirs.

Without a ledger nothing is written and nothing waits. Then a process that comes back has forgotten
everything, and is a new incarnation without a vote.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from atoll.peer.membership.durable_records import SYNCED_FIRST, Record
from atoll.peer.membership.events import Persist, Send

# Messages that wait for a disk that hangs. All are repeated, so that the oldest may be dropped.
WAITING_MAX = 4096


class Outbox:
    """Number the records of a ledger, and know which of them are synced."""

    def __init__(self, position: int | None = None) -> None:
        """Go on from the last record of a ledger; None: there is none."""
        self.is_on = position is not None
        self.began = position or 0  # what the ledger had when the process began
        self.position = self.began  # of the last record that was written ...
        self.durable = self.position  # ... and of the last one that is synced
        self._last: dict[type, int] = {}  # kind -> position of the last record that must be synced
        self._ready: dict[int, Record] = {}  # position -> record whose sync somebody waits for
        self._waiting: deque[tuple[int, Send]] = deque()

    def number(self, effect: Persist) -> Persist | None:
        """Return the effect with the position of its record; None without a ledger."""
        if not self.is_on:
            return None
        self.position += 1
        if effect.synced:
            self._last[type(effect.record)] = self.position
            self._ready[self.position] = effect.record
        return replace(effect, position=self.position)

    def holds_back(self, effect: Send) -> bool:
        """Return whether a message has to wait; then it is kept here until it need not."""
        if not self._last:
            return False  # nothing was written that has to be synced
        kinds = SYNCED_FIRST.get(type(effect.message), ())
        needed = max((self._last.get(kind, 0) for kind in kinds), default=0)
        if needed <= self.durable:
            return False
        self._waiting.append((needed, effect))
        if len(self._waiting) > WAITING_MAX:
            self._waiting.popleft()
        return True

    def synced(self, position: int) -> tuple[list[Record], list[Send]]:
        """Note how far the ledger is synced; return these records, and the messages that may go."""
        self.durable = max(self.durable, min(position, self.position))
        done = [number for number in self._ready if number <= self.durable]
        records = [self._ready.pop(number) for number in done]
        free = [effect for needed, effect in self._waiting if needed <= self.durable]
        self._waiting = deque((n, effect) for n, effect in self._waiting if n > self.durable)
        return records, free

    def fail(self) -> None:
        """Go on without a ledger: what waits for it never leaves."""
        self.is_on = False
        self.began = self.position = self.durable = 0
        self._last.clear()
        self._ready.clear()
        self._waiting.clear()
