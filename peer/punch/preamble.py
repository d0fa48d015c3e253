"""Prove on a punched connection that it is the one that was agreed on. Sans-I/O.

An address may lead to somebody else: to another machine behind the same router, or to whoever has
the port now. So each end begins with::

    0xAA | HMAC-SHA256 under both nonces of: the role, the asker's id, the other's id

The nonces came over the control link, and serve one connection. Nobody's identity depends on this:
what follows is TLS, or the opening of a data stream, as on any connection.
"""

from __future__ import annotations

import hmac
from typing import Final, Literal

from atoll.collectives.errors import LocalProtocolError, RemoteProtocolError
from atoll.peer.punch.messages import NONCE_BYTES

PUNCH_FIRST_BYTE: Final = 0xAA
PREAMBLE_BYTES: Final = 1 + 32

Role = Literal["asker", "answerer"]


class Preamble:
    """Make the first bytes of one end, and check those of the other.

    ``nonces`` and ``peers``: of the asker and of the answerer, in this order.
    """

    def __init__(self, role: Role, nonces: tuple[bytes, bytes], peers: tuple[bytes, bytes]) -> None:
        if any(len(nonce) != NONCE_BYTES for nonce in nonces):
            raise LocalProtocolError(f"a nonce has {NONCE_BYTES} bytes")
        self._key, self._peers = b"".join(nonces), b"".join(peers)
        self.own = self._of(role)
        self._expected = self._of("answerer" if role == "asker" else "asker")

    def check(self, received: bytes) -> None:
        """Raise RemoteProtocolError unless these are the other end's first bytes."""
        if not hmac.compare_digest(received, self._expected):
            raise RemoteProtocolError("somebody else is at the address that was agreed on")

    def _of(self, role: Role) -> bytes:
        proof = hmac.digest(self._key, b"atoll punch " + role.encode() + self._peers, "sha256")
        return bytes((PUNCH_FIRST_BYTE,)) + proof
