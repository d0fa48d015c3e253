"""Describe evidence against a peer, as it is kept and sent. Pure.

What it proves is said by verifying.py.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Final

from atoll.collectives.audit.bounds import AUDITED_PEERS_MAX
from atoll.collectives.errors import EvidenceError, RemoteProtocolError
from atoll.peer.membership.view import PeerId
from atoll.peer.net.wire import Within, decode, encode, message
from atoll.peer.rounds.entries import CHUNKS_MAX
from atoll.peer.verify.statements import IN_ORDER, SignedStatement
from atoll.peer.verify.terms import AuditTerms

# All parts of one chunk, in float32 (1 MiB each), of as many as may take part, and their words.
EVIDENCE_BYTES_MAX: Final = 80 * 1024 * 1024
STATEMENTS_MAX: Final = len(IN_ORDER) * AUDITED_PEERS_MAX
PROOF_BYTES_MAX: Final = 32 * 24

_Index = Annotated[int, Within(0, AUDITED_PEERS_MAX - 1)]
_Chunk = Annotated[int, Within(0, CHUNKS_MAX - 1)]


@message(wire="Shown")
@dataclass(frozen=True, slots=True)
class Shown:
    """Hold an encoded part that was opened, with the proof that leads to its sender's commitment.

    Of the owner's result the ``sender`` is the owner, and there is no proof.
    """

    sender: _Index
    chunk: _Chunk
    data: Annotated[bytes, Within(1, 1 << 20)]
    proof: Annotated[bytes, Within(0, PROOF_BYTES_MAX)] = b""


@message(wire="Evidence")
@dataclass(frozen=True, slots=True)
class Evidence:
    """Accuse a peer of a lie, with the statements and parts that prove it.

    ``kind``: one of KINDS (verifying.py). ``chunk`` is the one that it is about, if it is about
    any.
    """

    kind: Annotated[str, Within(1, 32)]
    culprit: PeerId
    terms: AuditTerms
    said: Annotated[tuple[SignedStatement, ...], Within(1, STATEMENTS_MAX)]
    chunk: _Chunk = 0
    parts: Annotated[tuple[Shown, ...], Within(0, AUDITED_PEERS_MAX)] = ()
    result: Annotated[tuple[Shown, ...], Within(0, 1)] = ()

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.encoded).digest()

    @property
    def encoded(self) -> bytes:
        return MAGIC + encode(self)


@dataclass(frozen=True, slots=True)
class Finding:
    """Say what a piece of evidence proves.

    ``banned``: who is out by this evidence. ``stands_alone``: whoever has checked it need not know
    the run.
    """

    kind: str
    banned: tuple[bytes, ...]
    text: str
    stands_alone: bool = True


MAGIC: Final = b"atoll evidence 1\n"


def parse_evidence(data: bytes) -> Evidence:
    """Return the evidence that these bytes are, true or not; EvidenceError if they are none."""
    if len(data) > EVIDENCE_BYTES_MAX or not data.startswith(MAGIC):
        raise EvidenceError("this is no evidence that this version of atoll can read")
    try:
        found = decode(data[len(MAGIC) :], allowed=(Evidence,))
    except RemoteProtocolError as error:
        raise EvidenceError(f"this evidence cannot be read: {error.what}") from error
    assert isinstance(found, Evidence)
    return found
