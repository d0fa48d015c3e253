"""Signatures that cost little, for machines that do not forge."""

from __future__ import annotations

import hashlib

__all__ = ["Seal"]


class Seal:
    """A signer that costs little: everybody could forge it, and nobody here does."""

    def __init__(self, peer: bytes) -> None:
        self._peer = peer

    def sign(self, text: bytes) -> bytes:
        return hashlib.sha256(self._peer + text).digest()

    def verify(self, peer: bytes, text: bytes, signature: bytes) -> bool:
        return hashlib.sha256(peer + text).digest() == signature
