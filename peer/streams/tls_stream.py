"""Carry bulk frames inside TLS, for peers with which no sealed stream comes about."""

from __future__ import annotations

import contextlib
import math
import ssl
import time
from collections.abc import Callable
from typing import cast

from atoll.peer.net.tls import READ_BYTES, TlsSocket
from atoll.peer.streams.keys import CIPHER_TLS
from atoll.peer.streams.stream import DataStream

# RFC 8446 5.5: AES-GCM keys wear out after 2^24.5 full records, about 388 GB. `ssl` cannot rekey.
KEY_BYTES_MAX = 256 << 30


class TlsStream(DataStream):
    """Carry frames inside TLS, slower than a ``SealedStream``.

    OpenSSL makes and takes records of 16 KiB, one per call.
    """

    cipher = CIPHER_TLS

    def __init__(self, connection: TlsSocket, peer: str, until_s: float = math.inf) -> None:
        """Take over a connection.

        ``until_s``, of the monotonic clock: then a better one may be had in its place.
        """
        super().__init__(connection.sock, peer)
        self._until_s = until_s
        self._tls = connection.tls
        self._incoming, self._outgoing = connection.incoming, connection.outgoing
        # With a buffer, read() returns a count; typeshed knows only the form that returns bytes.
        self._read_into = cast(Callable[[int, memoryview], int], self._tls.read)
        self._scratch = memoryview(b"")  # made when the first bytes are awaited: senders need none

    @property
    def worn(self) -> bool:
        is_old = time.monotonic() >= self._until_s
        return is_old or self.sent_bytes + self.received_bytes > KEY_BYTES_MAX

    def _send(self, views: list[memoryview]) -> None:
        for view in views:
            start = 0
            while start < len(view):
                count = self._tls.write(view[start : start + self._unsent_bytes_max])
                start += count
                self.sent_bytes += count
                if self._outgoing.pending >= self._unsent_bytes_max:
                    self._flush()
        self._flush()

    def _goodbye(self) -> None:
        with contextlib.suppress(ssl.SSLError):  # "want read": the other's goodbye is to come
            self._tls.unwrap()
        self._flush(wait=False)

    def _flush(self, *, wait: bool = True) -> None:
        if self._outgoing.pending:
            self._put([memoryview(self._outgoing.read())], wait=wait)

    def _receive(self, view: memoryview, idle: bool) -> None:
        filled = 0
        while filled < len(view):
            try:
                count = self._read_into(len(view) - filled, view[filled:])
            except ssl.SSLWantReadError:
                self._fill(forever=idle and filled == 0)
                continue
            if count == 0:
                raise ConnectionResetError(self._cut_off())
            filled += count

    def _fill(self, *, forever: bool) -> None:
        self._flush()  # TLS may have had to answer the other side
        if not self._scratch:
            self._scratch = memoryview(bytearray(READ_BYTES))
        self._incoming.write(self._scratch[: self._get_some(self._scratch, forever=forever)])
