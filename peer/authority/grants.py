"""Define what an authority grants and revokes, and how a peer shows a grant. Sans-I/O.

A *grant* is signed by the authority's key::

    version u8 = 1 | kind u8 (1 token, 2 pass) | role u8 | uses u32 | not after u64, s since 1970
    | length of the run's name u8 | name | subject 32 bytes | signature 64 bytes

The subject of a *pass* is the id of the one peer that may use it. The subject of a *token* is a
public key whose private half is in the invite: whoever has the invite binds the token to its own id
with it. Members see only the bound form, so they cannot use a token that others have shown them.

A *credential* is what a hello carries: a grant, the peer's id, and over both the signatures of the
subject and of the peer; of a pass the two are one. TLS proves that the other side is this peer.

A *revocation list* names those who are no longer welcome, peers and tokens; with a token go all
peers that came with it. Each list is complete and has a higher number than the one before, so
whoever has the highest number knows everything, and a list that arrives late or twice changes
nothing::

    version u8 = 1 | number u64 | count u32 | ids, 32 bytes each, rising | signature 64 bytes
"""

from __future__ import annotations

import datetime
import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.collectives.errors import (
    ConfigError,
    PassForgedError,
    PassRunError,
)
from atoll.peer.membership.signatures import KEY_BYTES, SIGNATURE_BYTES, verifies
from atoll.peer.membership.view import ARCHIVE, REPLICA, WITNESS
from atoll.peer.net.invite import check_run_name

# Peers that one token may let in; as many as a run may have (reliability_and_security.md 3.2).
USES_MAX = 4096
# The year 9999, which is the last that can be shown.
NOT_AFTER_S_MAX = 253_402_300_799
ROLES = (REPLICA, WITNESS, ARCHIVE)

_VERSION = 1  # of grants and of lists
_TOKEN, _PASS = 1, 2
_HEAD = struct.Struct(">BBBIQB")
_RUN_BYTES_MAX = 64
_GRANT_BYTES_MAX = _HEAD.size + _RUN_BYTES_MAX + KEY_BYTES + SIGNATURE_BYTES
CREDENTIAL_BYTES_MAX = _GRANT_BYTES_MAX + KEY_BYTES + 2 * SIGNATURE_BYTES
# What is signed for one purpose is good for no other.
_GRANT_TEXT = b"atoll grant 1\0"
_HOLDER_TEXT = b"atoll holder 1\0"


@dataclass(frozen=True, slots=True)
class Grant:
    """Grant that peers may come into a run: a token or a pass, signed by the authority.

    ``uses`` is 0 for a pass; ``not_after_s`` is in seconds since 1970, and 0 if it never expires.
    """

    run: str
    subject: bytes
    role: str = REPLICA
    uses: int = 0
    not_after_s: int = 0
    signature: bytes = b""

    def signed(self, authority: Ed25519PrivateKey) -> Grant:
        """Return the same grant with the authority's signature.

        ConfigError for what nobody could read.
        """
        check_run_name(self.run)
        if not 0 <= self.uses <= USES_MAX:
            raise ConfigError(f"a token of {self.uses} uses", fix=f"give it 1 to {USES_MAX}")
        if not 0 <= self.not_after_s <= NOT_AFTER_S_MAX:
            raise ConfigError("it would expire after the year 9999", fix="give an earlier date")
        body = self._body()
        signature = authority.sign(_GRANT_TEXT + authority.public_key().public_bytes_raw() + body)
        return replace(self, signature=signature)

    @property
    def is_token(self) -> bool:
        return self.uses > 0

    @property
    def peers_max(self) -> int:
        """Return how many peers it lets in."""
        return self.uses or 1

    def permits(self, role: str) -> bool:
        """Return whether it is for this role.

        A replica votes and holds the state: whoever may do both may do either alone.
        """
        return role in ROLES and self.role in (role, REPLICA)

    def expired(self, now_s: float) -> bool:
        """Return whether it has expired. ``now_s``: seconds since 1970, by this machine's clock."""
        return 0 < self.not_after_s < now_s

    def describe(self) -> str:
        kind = f"token {self.subject.hex()[:16]}" if self.is_token else "pass"
        until = f"expires {date_of(self.not_after_s)}" if self.not_after_s else "never expires"
        return f"{kind} ({self.role}, {until})"

    def encode(self) -> bytes:
        return self._body() + self.signature

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.encode()).digest()

    def _body(self) -> bytes:
        name = self.run.encode("ascii")
        kind = _TOKEN if self.is_token else _PASS
        role = ROLES.index(self.role)
        head = _HEAD.pack(_VERSION, kind, role, self.uses, self.not_after_s, len(name))
        return head + name + self.subject

    @classmethod
    def parse(cls, data: bytes, authority: bytes) -> Self:
        """Return the grant that these bytes are.

        PassForgedError unless these are all bytes of a grant that ``authority`` has signed.
        """
        if not _HEAD.size <= len(data) <= _GRANT_BYTES_MAX:
            raise PassForgedError(f"a grant of {len(data)} bytes cannot be read")
        version, kind, role, uses, not_after_s, name_bytes = _HEAD.unpack_from(data)
        subject_at = _HEAD.size + name_bytes
        signature_at = subject_at + KEY_BYTES
        well_formed = (
            version == _VERSION
            and kind == (_TOKEN if uses else _PASS)
            and role < len(ROLES)
            and uses <= USES_MAX
            and not_after_s <= NOT_AFTER_S_MAX
            and len(data) == signature_at + SIGNATURE_BYTES
        )
        if not well_formed:
            raise PassForgedError("this is no grant that this version of atoll can read")
        if not verifies(
            authority, _GRANT_TEXT + authority + data[:signature_at], data[signature_at:]
        ):
            raise PassForgedError(
                f"the run's authority ({authority.hex()[:16]}) has not signed this grant"
            )
        try:
            run = check_run_name(data[_HEAD.size : subject_at].decode("ascii"))
        except (UnicodeDecodeError, ConfigError) as error:
            raise PassForgedError("this grant names no run") from error
        subject = data[subject_at:signature_at]
        return cls(run, subject, ROLES[role], uses, not_after_s, data[signature_at:])


@dataclass(frozen=True, slots=True)
class Credential:
    """Hold a grant bound to ``peer``, with the signatures of its subject and of the peer."""

    grant: Grant
    peer: bytes
    by_subject: bytes
    by_peer: bytes

    @classmethod
    def bind(
        cls, grant: Grant, authority: bytes, identity: Ed25519PrivateKey, seed: bytes = b""
    ) -> Self:
        """Bind a grant to the peer of this identity, by signing it.

        ``seed``: the token's private key, of the invite. PassForgedError if it does not fit.
        """
        peer = identity.public_key().public_bytes_raw()
        subject = Ed25519PrivateKey.from_private_bytes(seed) if grant.is_token else identity
        if subject.public_key().public_bytes_raw() != grant.subject:
            whose = "its invite is damaged" if grant.is_token else "it is for another peer"
            raise PassForgedError(
                f"this {grant.describe()} cannot be used by peer {peer.hex()}: {whose}",
                fix="ask the authority for a pass for this id",
            )
        text = _HOLDER_TEXT + authority + grant.encode() + peer
        return cls(grant, peer, subject.sign(text), identity.sign(text))

    def encode(self) -> bytes:
        return self.grant.encode() + self.peer + self.by_subject + self.by_peer

    @classmethod
    def parse(cls, data: bytes, authority: bytes, run: str) -> Self:
        """Return the credential that these bytes are.

        PassForgedError unless every byte is genuine; PassRunError for another run's.
        """
        end = len(data) - KEY_BYTES - 2 * SIGNATURE_BYTES
        if end <= 0 or len(data) > CREDENTIAL_BYTES_MAX:
            raise PassForgedError(f"a pass of {len(data)} bytes cannot be read")
        grant = Grant.parse(data[:end], authority)
        peer, signatures = data[end : end + KEY_BYTES], data[end + KEY_BYTES :]
        by_subject, by_peer = signatures[:SIGNATURE_BYTES], signatures[SIGNATURE_BYTES:]
        text = _HOLDER_TEXT + authority + data[: end + KEY_BYTES]
        if not (verifies(grant.subject, text, by_subject) and verifies(peer, text, by_peer)):
            raise PassForgedError("this pass was not given to this peer")
        if not grant.is_token and grant.subject != peer:
            raise PassForgedError("this pass was given to another peer")
        if grant.run != run:
            raise PassRunError(f"this pass is for run {grant.run}, not for {run}")
        return cls(grant, peer, by_subject, by_peer)


def date_of(unix_s: int) -> str:
    """Return a date and time for people, in UTC: members live in many time zones.

    ``unix_s``: seconds since 1970.
    """
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


# ---------------------------------------------------------------- revocations

# As many as a run may have peers; 128 KiB, well within a control frame.
REVOKED_MAX = 4096

_LIST_HEAD = struct.Struct(">BQI")
_LIST_TEXT = b"atoll revocations 1\0"
REVOCATIONS_BYTES_MAX = _LIST_HEAD.size + REVOKED_MAX * KEY_BYTES + SIGNATURE_BYTES


@dataclass(frozen=True, slots=True)
class Revocations:
    number: int = 0  # 0: none was ever made
    ids: frozenset[bytes] = frozenset()
    signature: bytes = b""

    def with_more(self, ids: Iterable[bytes], authority: Ed25519PrivateKey) -> Revocations:
        """Return the next list, signed, with more ids; ConfigError if it would be too long."""
        together, number = self.ids | frozenset(ids), self.number + 1
        if len(together) > REVOKED_MAX:
            raise ConfigError(
                f"a list of {len(together)} ids; {REVOKED_MAX} are the most",
                fix="make a new authority, and found the run again with it",
            )
        text = _LIST_TEXT + authority.public_key().public_bytes_raw() + _list_body(number, together)
        return Revocations(number, together, authority.sign(text))

    def encode(self) -> bytes:
        return _list_body(self.number, self.ids) + self.signature

    @classmethod
    def parse(cls, data: bytes, authority: bytes) -> Self:
        """Return the list that these bytes are.

        PassForgedError unless these are all bytes of a list that ``authority`` has signed.
        """
        end = len(data) - SIGNATURE_BYTES
        if not _LIST_HEAD.size <= end or len(data) > REVOCATIONS_BYTES_MAX:
            raise PassForgedError(f"a revocation list of {len(data)} bytes cannot be read")
        version, number, count = _LIST_HEAD.unpack_from(data)
        if version != _VERSION or number == 0 or end != _LIST_HEAD.size + count * KEY_BYTES:
            raise PassForgedError("this is no revocation list that this version of atoll can read")
        if not verifies(authority, _LIST_TEXT + authority + data[:end], data[end:]):
            raise PassForgedError(
                f"the run's authority ({authority.hex()[:16]}) has not signed this revocation list"
            )
        ids = [data[at : at + KEY_BYTES] for at in range(_LIST_HEAD.size, end, KEY_BYTES)]
        if any(former >= later for former, later in pairwise(ids)):
            raise PassForgedError("the ids of this revocation list are not in order")
        return cls(number, frozenset(ids), data[end:])


def _list_body(number: int, ids: frozenset[bytes]) -> bytes:
    return _LIST_HEAD.pack(_VERSION, number, len(ids)) + b"".join(sorted(ids))
