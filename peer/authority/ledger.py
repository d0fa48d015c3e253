"""Record what a member knows about passes: who came with which, and who is revoked. Sans-I/O.

*Judging.* A peer that shows a credential is let in if it is genuine, of this run, permits the role,
is not revoked, and either was recorded before or is neither expired nor used up. So expiry is about
coming in: whoever is recorded may come back later, as long as its home has the same identity.

*Records* only grow. A token of N uses has at most N: if members that could not talk to each other
have let in more, the N peers with the smallest hash stay, whatever the order in which anybody hears
of them. So all members come to the same N, and nobody can fill a member's memory with them.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from atoll.collectives.errors import (
    AdmissionError,
    PassExpiredError,
    PassForgedError,
    PassMissingError,
    PassRevokedError,
    PassRoleError,
    PassUsedUpError,
)
from atoll.peer.authority.grants import (
    CREDENTIAL_BYTES_MAX,
    REVOCATIONS_BYTES_MAX,
    Credential,
    Revocations,
    date_of,
)
from atoll.peer.membership.view import short
from atoll.peer.net.wire import Within, message

# Peers that a run may have (reliability_and_security.md 3.2); 1.6 MiB, in memory and in the home.
RECORDS_MAX = 4096


class Ledger:
    """Keep the records and revocations of one run, as one member knows them."""

    def __init__(self, authority: bytes, run: str) -> None:
        self.authority, self.run = authority, run
        self.revocations = Revocations()
        self._records: dict[bytes, dict[bytes, Credential]] = {}  # digest of the grant -> peer
        self._known: set[bytes] = set()  # encoded credentials, to verify each once

    def __len__(self) -> int:
        return len(self._known)

    def records(self) -> list[Credential]:
        """Return all records, those of each grant together, the first heard of first."""
        return [found for peers in self._records.values() for found in peers.values()]

    @property
    def digest(self) -> bytes:
        """Return a SHA-256 that is equal where the records are.

        Takes 2 ms for the most that there can be.
        """
        pairs = sorted(grant + peer for grant, peers in self._records.items() for peer in peers)
        return hashlib.sha256(b"".join(pairs)).digest()

    def judge(self, peer: bytes, data: bytes, role: str, now_s: float | None) -> Credential:
        """Return the credential of a peer that may come in; else AdmissionError, with the reason.

        ``now_s``: seconds since 1970; None if others judge whether the peer is in already, because
        it is them that this peer wants to come to.
        """
        if not data:
            raise PassMissingError(
                f"run {self.run} has an authority ({self.authority.hex()[:16]}), and"
                " there is no pass of it"
            )
        found = Credential.parse(data, self.authority, self.run)
        if found.peer != peer:
            raise PassForgedError("this pass was given to another peer")
        if why := self.revoked(found):
            raise PassRevokedError(why)
        if not found.grant.permits(role):
            raise PassRoleError(
                f"this pass is for the role {found.grant.role}, not for {role[:16]!r}"
            )
        if now_s is not None and not self.has(found):
            self._check_new(found, now_s)
        return found

    def _check_new(self, found: Credential, now_s: float) -> None:
        grant = found.grant
        if grant.expired(now_s):
            kind, since = "token" if grant.is_token else "pass", date_of(grant.not_after_s)
            what = f"this {kind} expired {since}, and its holder was not in the run before"
            raise PassExpiredError(what)
        used = self.used(found)
        if used >= grant.peers_max:
            raise PassUsedUpError(f"this token was for {grant.peers_max}, and {used} came with it")
        if len(self) >= RECORDS_MAX:
            raise AdmissionError(f"{RECORDS_MAX} admissions are recorded, which is all that fit")

    def revoked(self, found: Credential) -> str:
        """Return why this credential is no good any more; "" if it is still good."""
        number, ids = self.revocations.number, self.revocations.ids
        if found.peer in ids:
            return f"the authority has revoked this peer (list {number})"
        if found.grant.subject in ids:
            return f"the authority has revoked the token that this peer came with (list {number})"
        return ""

    def is_out(self, peer: bytes) -> bool:
        """Return whether a peer is revoked, with all that it ever showed."""
        if peer in self.revocations.ids:
            return True
        shown = [peers[peer] for peers in self._records.values() if peer in peers]
        return bool(shown) and all(self.revoked(found) for found in shown)

    def has(self, found: Credential) -> bool:
        """Return whether its peer was let in with this grant."""
        return found.peer in self._records.get(found.grant.digest, ())

    def used(self, found: Credential) -> int:
        """Return how many peers are recorded with the same grant."""
        return len(self._records.get(found.grant.digest, ()))

    def learn(self, data: bytes) -> tuple[Credential | None, Credential | None]:
        """Record what another member says; return what is new, and whom it displaces.

        PassForgedError or PassRunError for what no honest member would say.
        """
        if data in self._known:
            return None, None
        return self.record(Credential.parse(data, self.authority, self.run))

    def record(self, found: Credential) -> tuple[Credential | None, Credential | None]:
        """Record a credential known to be genuine; return what is new, and whom it displaces."""
        digest, room = found.grant.digest, found.grant.peers_max
        peers = self._records.get(digest, {})
        if found.peer in peers or (len(peers) < room and len(self) >= RECORDS_MAX):
            return None, None
        displaced = None
        if len(peers) >= room:
            displaced = max(peers.values(), key=_rank)
            if _rank(found) > _rank(displaced):
                return None, None
            self._known.discard(displaced.encode())
            del peers[displaced.peer]
        self._records.setdefault(digest, peers)[found.peer] = found
        self._known.add(found.encode())
        return found, displaced

    def revoke(self, data: bytes) -> bool:
        """Take a revocation list; return whether it is newer than ours. PassForgedError."""
        latest = Revocations.parse(data, self.authority)
        if latest.number <= self.revocations.number:
            return False
        self.revocations = latest
        return True


def _rank(found: Credential) -> bytes:
    return hashlib.sha256(found.grant.digest + found.peer).digest()


# ---------------------------------------------------------------- messages
#
# What is told is signed by others than who tells it, so it does not matter of whom one hears it.


# Verifying one takes 0.3 ms: 20 ms of the event loop, and 21 KiB.
RECORDS_PER_MESSAGE_MAX = 64

_Credential = Annotated[bytes, Within(1, CREDENTIAL_BYTES_MAX)]


@message(wire="Known")
class Known:
    """Tell what the sender knows, on a new link: who knows more tells it."""

    number: Annotated[int, Within(0, (1 << 64) - 1)]  # of its revocation list
    digest: Annotated[bytes, Within(32, 32)]  # of its records


@message(wire="Admitted")
class Admitted:
    """Carry credentials of peers that were let in."""

    credentials: Annotated[tuple[_Credential, ...], Within(1, RECORDS_PER_MESSAGE_MAX)]


@message(wire="Revoked")
class Revoked:
    """Carry the newest revocation list that the sender has."""

    signed: Annotated[bytes, Within(1, REVOCATIONS_BYTES_MAX)]


@message(wire="AdmissionFile")
class AdmissionFile:
    """Hold credentials and the revocation list as the home keeps them; never sent."""

    revocations: Annotated[bytes, Within(0, REVOCATIONS_BYTES_MAX)]  # none yet: empty
    credentials: Annotated[tuple[_Credential, ...], Within(0, RECORDS_MAX)]


AboutPasses = Known | Admitted | Revoked


# ---------------------------------------------------------------- for people

SHOWN_MAX = 100  # peers, and tokens: an answer to a command has room for many more


def standing(ledger: Ledger, own: Credential, now_s: float) -> dict[str, Any]:
    """Return what is known of admission in plain types: this travels over the local socket.

    ``now_s``: seconds since 1970.
    """
    records = ledger.records()
    peers = [
        {
            "peer": short(found.peer),
            "id": found.peer.hex(),
            "token": found.grant.subject.hex() if found.grant.is_token else "",
            "role": found.grant.role,
            "not_after_unix_s": found.grant.not_after_s,
            "expired": found.grant.expired(now_s),
            "revoked": bool(ledger.revoked(found)),
        }
        for found in records[:SHOWN_MAX]
    ]
    tokens = {found.grant.digest: found for found in records if found.grant.is_token}
    return {
        "mode": "authority",
        "authority": ledger.authority.hex(),
        "own": own.grant.describe(),
        "list": ledger.revocations.number,
        "revoked": len(ledger.revocations.ids),
        "admitted": len(records),
        "peers": peers,
        "tokens": [
            {
                "id": found.grant.subject.hex(),
                "uses": found.grant.uses,
                "used": ledger.used(found),
                "not_after_unix_s": found.grant.not_after_s,
                "expired": found.grant.expired(now_s),
                "revoked": found.grant.subject in ledger.revocations.ids,
            }
            for found in list(tokens.values())[:SHOWN_MAX]
        ],
    }


def describe(admission: dict[str, Any]) -> list[str]:
    """Return the lines of `atoll status` about admission by an authority."""
    revoked = f"list {admission['list']} revokes {admission['revoked']}"
    lines = [
        f"admission  by the authority {admission['authority'][:16]}; this peer has a"
        f" {admission['own']}; {admission['admitted']} admitted;"
        f" {revoked if admission['list'] else 'nobody is revoked'}"
    ]
    for token in admission["tokens"]:
        text = f"{token['used']} of {token['uses']} used, {_until(token)}"
        lines.append(f"  token {token['id']}  {text}")
    for peer in admission["peers"]:
        by = f"token {peer['token'][:16]}" if peer["token"] else "pass"
        by += "" if peer["token"] and not peer["revoked"] else f", {_until(peer)}"
        lines.append(f"  peer {peer['peer']} is {peer['id']}  {peer['role']}, {by}")
    return lines


def _until(granted: dict[str, Any]) -> str:
    if granted["revoked"]:
        return "REVOKED"
    if not granted["not_after_unix_s"]:
        return "never expires"
    until = date_of(granted["not_after_unix_s"])
    return (
        f"expired {until}: good for those who are in" if granted["expired"] else f"expires {until}"
    )
