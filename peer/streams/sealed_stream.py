"""Carry bulk frames in sealed records over bare TCP, for one thread.

A part that is sent is enciphered from where it lies into a buffer of this stream and handed to the
kernel. A record that arrives is collected in another buffer and deciphered from there to where its
reader wants it. Nothing else copies payload, unless a reader takes a record in smaller pieces.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from atoll.peer.streams.keys import CIPHER_AES
from atoll.peer.streams.sealed import (
    EPOCHS_WORN,
    RECORD_BYTES_MAX,
    RECORD_HEADER_BYTES,
    RECORD_OVERHEAD_BYTES,
    Opener,
    RecordKind,
    Sealer,
    direction_secrets,
)
from atoll.peer.streams.stream import DataStream

# Small records (headers of frames) that travel in one call with a full one, in either direction.
AHEAD_BYTES = 4 << 10
# Both buffers begin empty and grow to what passes through them, and no further than this.
BUFFER_BYTES_MAX = RECORD_BYTES_MAX + RECORD_OVERHEAD_BYTES + AHEAD_BYTES

_NOTHING = memoryview(b"")


class SealedStream(DataStream):
    """Carry frames encrypted and authenticated with AES-256-GCM.

    ``secret``: 32 bytes of which the two sides have agreed, for this connection alone; ``dialled``:
    whether this side is the dialler. What arrives is given to the reader when it is authenticated.
    """

    cipher = CIPHER_AES

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        secret: bytes,
        *,
        dialled: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(sock, peer)
        ours, theirs = direction_secrets(secret)
        if not dialled:
            ours, theirs = theirs, ours
        self._clock = clock
        self._sealer, self._opener = Sealer(ours, clock()), Opener(theirs)
        self._out = _NOTHING
        self._out_end = 0  # sealed, and not yet sent
        self._in = _NOTHING
        self._in_end = 0  # how far the present record has arrived
        self._opened = _NOTHING  # what is left of a record that its reader takes in pieces
        self._opened_buffer = _NOTHING

    @property
    def worn(self) -> bool:
        """Return whether the keys were renewed so often that a new stream should replace this."""
        return max(self._sealer.epoch, self._opener.epoch) >= EPOCHS_WORN

    # ------------------------------------------------------------ sending

    def _send(self, views: list[memoryview]) -> None:
        for view in views:
            for start in range(0, len(view), RECORD_BYTES_MAX):
                piece = view[start : start + RECORD_BYTES_MAX]
                self._seal(RecordKind.DATA, piece)
                self.sent_bytes += len(piece)
        self._flush()

    def _seal(self, kind: RecordKind, plain: memoryview) -> None:
        now_s = self._clock()
        if self._sealer.is_due(len(plain), now_s):
            self._out_end += self._sealer.rekey(self._room(RECORD_OVERHEAD_BYTES), now_s)
        room = self._room(len(plain) + RECORD_OVERHEAD_BYTES)
        self._out_end += self._sealer.seal(kind, plain, room)

    def _room(self, count: int) -> memoryview:
        """Return where to seal the next ``count`` bytes: behind what waits there already."""
        if self._out_end + count > BUFFER_BYTES_MAX:
            self._flush()
        if self._out_end + count > len(self._out):
            self._out = _grown(self._out[: self._out_end], self._out_end + count)
        return self._out[self._out_end :]

    def _flush(self, *, wait: bool = True) -> None:
        if self._out_end:
            waiting, self._out_end = self._out[: self._out_end], 0
            self._put([waiting], wait=wait)

    def _goodbye(self) -> None:
        self._seal(RecordKind.END, _NOTHING)
        self._flush(wait=False)

    # ------------------------------------------------------------ receiving

    def _receive(self, view: memoryview, idle: bool) -> None:
        filled = 0
        while filled < len(view):
            if not self._opened:
                filled += self._open_into(view[filled:], idle=idle and filled == 0)
                continue
            count = min(len(self._opened), len(view) - filled)
            view[filled : filled + count] = self._opened[:count]
            self._opened = self._opened[count:]
            filled += count

    def _open_into(self, view: memoryview, *, idle: bool) -> int:
        """Open the next record into ``view``, or beside it if it is longer.

        Return how many bytes are in ``view`` now.
        """
        self._in_end = 0
        kind, length = self._opener.expect(self._await(RECORD_HEADER_BYTES, idle=idle))
        record = self._await(length + RECORD_OVERHEAD_BYTES)
        target = view[:length] if length <= len(view) else self._beside(length)
        self._opener.open(record, target)
        if kind is RecordKind.END:
            raise ConnectionResetError("the other side closed it")
        if length <= len(view):
            return length
        self._opened = target
        return 0

    def _beside(self, length: int) -> memoryview:
        if length > len(self._opened_buffer):
            self._opened_buffer = memoryview(bytearray(length))
        return self._opened_buffer[:length]

    def _await(self, count: int, *, idle: bool = False) -> memoryview:
        """Return the first ``count`` bytes of a record, some of which may be here already."""
        if count > len(self._in):
            self._in = _grown(self._in[: self._in_end], count)
        have, self._in_end = self._in_end, count
        self._get(self._in[have:count], forever=idle and not have)
        return self._in[:count]

    def _cut_off(self) -> str:
        return "it was cut off: no goodbye came before its end"


def _grown(kept: memoryview, count: int) -> memoryview:
    """Return a larger buffer that begins with ``kept`` and holds ``count`` bytes.

    At least doubled, up to BUFFER_BYTES_MAX.
    """
    size = min(BUFFER_BYTES_MAX, max(count, 2 * len(kept)))
    buffer = memoryview(bytearray(size))
    buffer[: len(kept)] = kept
    return buffer
