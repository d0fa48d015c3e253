"""An authority and those whom it lets in, for tests."""

from __future__ import annotations

import hashlib

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.peer.authority.grants import Credential, Grant
from atoll.peer.membership.view import REPLICA

__all__ = ["AUTHORITY", "PUBLIC", "RUN", "key_of", "passed", "peer_of", "token", "tokened"]

RUN = "demo"


def key_of(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


def peer_of(name: str) -> bytes:
    return key_of(name).public_key().public_bytes_raw()


AUTHORITY = key_of("the authority")
PUBLIC = AUTHORITY.public_key().public_bytes_raw()


def token(
    name: str, uses: int = 1, not_after_s: int = 0, role: str = REPLICA, run: str = RUN
) -> Grant:
    """The seed of its key is that of ``key_of(name)``."""
    return Grant(run, peer_of(name), role, uses, not_after_s).signed(AUTHORITY)


def tokened(peer: str, grant: Grant, name: str) -> Credential:
    """What ``peer`` shows who has the invite with the token ``name``."""
    return Credential.bind(grant, PUBLIC, key_of(peer), key_of(name).private_bytes_raw())


def passed(peer: str, not_after_s: int = 0, role: str = REPLICA, run: str = RUN) -> Credential:
    """What ``peer`` shows who is on the list of those allowed."""
    grant = Grant(run, peer_of(peer), role, 0, not_after_s).signed(AUTHORITY)
    return Credential.bind(grant, PUBLIC, key_of(peer))
