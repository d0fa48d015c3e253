"""The identity key as the membership machine uses it: signs as this peer, verifies as anybody."""

from __future__ import annotations

import functools

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from atoll.peer.identity import Home

__all__ = ["HomeSigner"]

KEYS_KEPT = 1024  # as many as a view may have members: making one takes as long as verifying


class HomeSigner:
    """signing.Signer with Ed25519: 0.03 ms to sign, 0.1 ms to verify."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def sign(self, text: bytes) -> bytes:
        return self._home.sign(text)

    def verify(self, peer: bytes, text: bytes, signature: bytes) -> bool:
        try:
            _public_key(peer).verify(signature, text)
        except (InvalidSignature, ValueError):
            return False
        return True


@functools.lru_cache(KEYS_KEPT)
def _public_key(peer: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(peer)
