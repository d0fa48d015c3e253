"""Sign with the identity key as this peer, and verify as anybody, for the membership machine."""

from __future__ import annotations

from atoll.peer.membership.signatures import verifies
from atoll.peer.net.identity import Home


class HomeSigner:
    """Implement signing.Signer with Ed25519: 0.03 ms to sign, 0.1 ms to verify."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def sign(self, text: bytes) -> bytes:
        return self._home.sign(text)

    def verify(self, peer: bytes, text: bytes, signature: bytes) -> bool:
        return verifies(peer, text, signature)
