"""Sign and verify what decides: PROMISE, ACCEPTED, INSTALL's proof and COMMIT.

Links are authenticated already; signatures make these statements transferable. A view comes with
the votes that decided it, so that whoever is told of it need not trust the messenger, and two
contradicting statements of one peer are evidence that anybody can check: *equivocation* is reported
loudly and the second statement is dropped. Statements name the incarnation, so that a restart does
not look like one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from atoll.peer.membership.events import Effect, Note
from atoll.peer.membership.messages import (
    Accepted,
    Commit,
    Install,
    Promise,
    Proof,
    Remembered,
)
from atoll.peer.membership.view import View, is_quorum, short
from atoll.peer.net.wire import encode, name_of

Signed = Promise | Accepted | Commit
# Remembered of one view, with their signatures: a few of each of its members, of about 200 bytes.
STATEMENTS_MAX = 4096


class Signer(Protocol):
    """Sign as one peer, verify as anybody; pure functions of their arguments."""

    def sign(self, text: bytes) -> bytes: ...

    def verify(self, peer: bytes, text: bytes, signature: bytes) -> bool: ...


class Signatures:
    """Sign and verify for one node, and notice who contradicts itself.

    Without a signer nothing is signed and everything passes (tests only).
    """

    def __init__(self, me: bytes, signer: Signer | None, emit: Callable[[Effect], None]) -> None:
        self._me = me
        self._signer = signer
        self._emit = emit
        self._said: dict[tuple[bytes, int, str, object], tuple[bytes, bytes]] = {}
        self._position: Remembered | None = None  # ours, the last that was signed

    def new_view(self) -> None:
        self._said.clear()

    def signed(self, message: Any, inc: int) -> Any:
        """Return a Signed message with our incarnation and signature."""
        named = replace(message, inc=inc, sig=b"")
        if self._signer is None:
            return named
        return replace(named, sig=self._signer.sign(_statement(named)))

    def signed_position(self, told: Remembered) -> Remembered:
        """Return what we say of our own ledger, with our signature."""
        if self._signer is None:
            return told
        known = self._position
        if known is None or replace(known, sig=b"") != told:
            self._position = known = replace(told, sig=self._signer.sign(_position(told)))
        return known

    def has_signed(self, told: Remembered) -> bool:
        """Return whether a peer has itself said that its ledger had this position.

        So of ourselves: an earlier process may have said it.
        """
        return self._signer is None or self._signer.verify(told.peer, _position(told), told.sig)

    def genuine(self, source: bytes, message: Signed) -> bool:
        """Return whether ``source`` has signed it and has not said the contrary before."""
        if self._signer is None or source == self._me:
            return True
        text = _statement(message)
        if not self._signer.verify(source, text, message.sig):
            kind = name_of(message)
            self._emit(Note("forged", f"{kind} of {short(source)} is not signed by it", source))
            return False
        return self._consistent(source, message, text)

    def _consistent(self, source: bytes, message: Signed, text: bytes) -> bool:
        if isinstance(message, Promise):
            return True  # a repeated promise may report a commit that came meanwhile
        key: object = message.round if isinstance(message, Commit) else message.ballot
        place = (source, message.inc, name_of(message), key)
        before = self._said.get(place)
        if before is None:
            self._said[place] = (text, message.sig)
            if len(self._said) > STATEMENTS_MAX:
                del self._said[next(iter(self._said))]
            return True
        if before[0] == text:
            return True
        pair = (before, (text, message.sig))
        shown = " and ".join(hashlib.sha256(said).hexdigest()[:16] for said, _ in pair)
        what = f"{short(source)} signed two different {name_of(message)} at {key}: {shown}"
        evidence = [{"statement": said.hex(), "signature": sig.hex()} for said, sig in pair]
        fields: dict[str, object] = {"signer": source.hex(), "evidence": evidence}
        self._emit(Note("equivocation", what, source, fields))
        return False

    def proven(self, install: Install, view: View | None) -> bool:
        """Return whether the votes with a view decide it, as far as we can tell.

        A peer in the deciding view knows its voters and counts them. One that has missed views
        between knows that some voter is of its own view; one that is outside, only that those who
        vote for it are who they claim to be.
        """
        proof = install.proof
        if self._signer is None:
            return True
        if proof is None:  # of a run's first view, which its founder makes alone
            return view is None and install.decided.number <= 1
        votes = self._voters(install.decided, proof, self._signer)
        if view is None or (proof.lineage, proof.view) != (view.lineage, view.number):
            known = votes if view is None else votes.intersection(view.peers)
            return bool(known) and len(votes) == len(proof.votes)
        lone = install.decided.fork and view.may_fork and set(install.decided.peers) <= votes
        return lone or is_quorum(view, votes)

    def strange(self, install: Install, view: View) -> bool:
        """Return whether its votes are genuine, but of nobody that we know.

        That is no proof, and no forgery. A fork that left our lineage before our view was formed
        looks like that.
        """
        proof = install.proof
        if proof is None or any(vote.peer in view.peers for vote in proof.votes):
            return False
        return self.proven(install, None)

    def _voters(self, decided: View, proof: Proof, signer: Signer) -> set[bytes]:
        """Return whose votes are genuine. What they have signed differs by their incarnations."""
        place = (proof.lineage, proof.view, proof.ballot)
        incs = {vote.inc for vote in proof.votes}
        signed = {inc: _statement(Accepted(*place, decided.digest, inc)) for inc in incs}
        return {v.peer for v in proof.votes if signer.verify(v.peer, signed[v.inc], v.sig)}


def _position(told: Remembered) -> bytes:
    return b"atoll-position" + encode(replace(told, sig=b""))


def _statement(message: Signed) -> bytes:
    return b"atoll-signed" + encode(replace(message, sig=b"") if message.sig else message)
