"""Several streams to one destination: which of them sends what. Sans-I/O."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from atoll.collectives.arrivals import PIECE_BYTES
from atoll.collectives.buffers import BufferPool
from atoll.collectives.codecs import U8
from atoll.collectives.schedule import Idle, Schedule, Send

__all__ = ["LATE_S_MIN", "Lanes", "Sending"]

# A frame that takes so many times what is usual, and so long, is sent on another stream as well:
# TCP waits for 0.2 s at least before it sends again what got lost last.
LATE_FACTOR: Final = 4
LATE_S_MIN: Final = 0.25
USUAL_OF: Final = 8  # frames that the usual time is an average of


@dataclass(slots=True, eq=False)
class Loaded:
    """A chunk whose pieces several streams send."""

    buffer: U8
    left: int  # pieces, and copies of pieces, that have not ended


@dataclass(slots=True, eq=False)
class Sending:
    """A frame that a stream has taken. ``payload``: None before it is loaded."""

    send: Send
    payload: U8 | None = None
    offset: int = 0  # bytes, of the payload in its chunk
    loaded: Loaded | None = None
    since_s: float = 0.0
    copied: bool = False  # another stream sends it too


class Lanes:
    """The streams to each destination, and what they are at. Calls never overlap.

    Where there are several, the one that takes a chunk loads it, and all send its pieces: whichever
    has room takes the next one. What one of them breaks off, or does not get rid of, another sends
    again.
    """

    def __init__(self, schedule: Schedule, buffers: BufferPool[np.uint8]) -> None:
        self._schedule, self._buffers = schedule, buffers
        self._open: Counter[int] = Counter()
        self._under_way: defaultdict[int, list[Sending]] = defaultdict(list)
        self._ready: defaultdict[int, deque[Sending]] = defaultdict(deque)
        self._usual_s = 0.0  # what a frame takes, lately

    def opened(self, dest: int) -> None:
        self._open[dest] += 1

    def several(self, dest: int) -> bool:
        return self._open[dest] > 1

    def take(self, dest: int, now_s: float) -> Sending | Idle:
        """What one of its streams sends next: a piece that no stream has taken, or what one that
        broke has not sent; a chunk; or a copy of what stands still on another."""
        found: Sending | Idle
        if self._ready[dest]:
            found = self._ready[dest].popleft()
        else:
            # One chunk at a time is loaded, which bounds the memory: there will be pieces soon.
            send = Idle.WAIT if self._is_loading(dest) else self._schedule.next_send(dest)
            found = Sending(send) if isinstance(send, Send) else self._late(dest, now_s) or send
        if isinstance(found, Sending):
            found.since_s = now_s
            self._under_way[dest].append(found)
        return found

    def _is_loading(self, dest: int) -> bool:
        loading = any(sending.payload is None for sending in self._under_way[dest])
        return loading and self.several(dest)

    def loaded(self, dest: int, sending: Sending, payload: U8, buffer: U8) -> bool:
        """The chunk can be sent. True: in pieces, so ``buffer`` belongs to these."""
        sending.payload = payload
        if not self.several(dest) or payload.nbytes <= PIECE_BYTES:
            return False
        offsets = range(0, payload.nbytes, PIECE_BYTES)
        sending.loaded = Loaded(buffer, len(offsets))
        sending.payload = payload[:PIECE_BYTES]
        for at in offsets[1:]:
            piece = payload[at : at + PIECE_BYTES]
            self._ready[dest].append(Sending(sending.send, piece, at, sending.loaded))
        return True

    def is_sending(self, dest: int) -> bool:
        """Whether a frame is under way that no other stream has brought."""
        return any(not sending.copied for sending in self._under_way[dest])

    def ended(self, dest: int, sending: Sending, now_s: float) -> None:
        """It is sent."""
        self._under_way[dest].remove(sending)
        self._release(sending)
        took_s = now_s - sending.since_s
        self._usual_s += (took_s - self._usual_s) / USUAL_OF if self._usual_s else took_s

    def broke(self, dest: int, sending: Sending) -> bool:
        """Its stream broke. True: another one will send the same bytes, which nobody may change."""
        self._under_way[dest].remove(sending)
        self._open[dest] -= 1
        if self._open[dest] and not sending.copied:
            self._ready[dest].appendleft(self._copy(sending))
        self._release(sending)
        return self._open[dest] > 0

    def _late(self, dest: int, now_s: float) -> Sending | None:
        limit_s = max(LATE_S_MIN, LATE_FACTOR * self._usual_s)
        for sending in self._under_way[dest]:
            is_late = now_s - sending.since_s > limit_s
            if is_late and not sending.copied and sending.payload is not None:
                sending.copied = True
                return self._copy(sending)
        return None

    def _copy(self, sending: Sending) -> Sending:
        if sending.loaded is not None:
            sending.loaded.left += 1
        return Sending(sending.send, sending.payload, sending.offset, sending.loaded)

    def _release(self, sending: Sending) -> None:
        if sending.loaded is not None:
            sending.loaded.left -= 1
            if not sending.loaded.left:
                self._buffers.give(sending.loaded.buffer)
