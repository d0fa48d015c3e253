"""Define what participants of an audited attempt state, signed, to all of them. Sans-I/O.

A *statement* belongs to an attempt (by the digest of its terms) and to a phase. Of one signer there
is one in each phase: two that differ are proof that it lies (*equivocation*). From the second phase
on a statement names what its signer has heard in the phase before, so that who said different
things to different peers is found by comparing.

Signatures do not enter into that digest, nor into anything that is drawn at random: a signer can
make many valid ones of the same text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Final

import numpy as np

from atoll.collectives.audit.sketch import AUDITED_PEERS_MAX, SKETCH_WIDTH
from atoll.collectives.robust.gram import packed_sum, unpacked_gram
from atoll.optim.run_spec import SAID_BYTES_MAX
from atoll.peer.membership.signing import Signer
from atoll.peer.membership.view import PeerId
from atoll.peer.net.wire import Within, decode, encode, message
from atoll.peer.rounds.entries import CHUNKS_MAX
from atoll.peer.verify.terms import AuditTerms, ReductionTerms

# Numbers of a whole fragment, or of a shard (optim/run_spec.py); fragments of more chunks are
# refused when a run is founded.
BODY_BYTES_MAX: Final = SAID_BYTES_MAX + 4096
MATRIX_BYTES_MAX: Final = 4 * AUDITED_PEERS_MAX * AUDITED_PEERS_MAX
ACCUSED_MAX: Final = AUDITED_PEERS_MAX  # one chunk of each sender is enough to prove it
PIECE_BYTES: Final = 64 * 1024  # of an opened part: half a second of a line of 1 Mbit/s

WHY_MAX: Final = 400  # characters of a reason: two lines of a log
WORD_BYTES_MAX: Final = 2048  # of a body that is said at any time: a reason takes most of it

_D32 = Annotated[bytes, Within(32, 32)]
_Index = Annotated[int, Within(0, AUDITED_PEERS_MAX - 1)]
_Chunk = Annotated[int, Within(0, CHUNKS_MAX - 1)]


class StatementPhase(IntEnum):
    """Name the phases of an attempt, in this order.

    The last three are said at any time, REPLAYED after the round as well.
    """

    COMMIT = 0
    RESULT = 1
    REVEAL = 2
    CHECK = 3
    VERDICT = 4
    WITHHELD = 5
    ELIMINATE = 6
    REPLAYED = 7


IN_ORDER: Final = (
    StatementPhase.COMMIT,
    StatementPhase.RESULT,
    StatementPhase.REVEAL,
    StatementPhase.CHECK,
    StatementPhase.VERDICT,
)
ANY_TIME: Final = (StatementPhase.WITHHELD, StatementPhase.ELIMINATE, StatementPhase.REPLAYED)
# Nobody honest says two different things in one of these: of several it contradicts one.
ONCE: Final = (*IN_ORDER, StatementPhase.ELIMINATE)


@message(wire="Statement")
@dataclass(frozen=True, slots=True)
class Statement:
    """Say something in a phase of an attempt.

    ``terms``: the digest of the attempt's terms. ``heard``: the digest of all statements of the
    phase before (``heard_of``); empty in the first phase, and in those that are said at any time.
    """

    terms: _D32
    phase: Annotated[int, Within(0, len(StatementPhase) - 1)]
    heard: Annotated[bytes, Within(0, 32)]
    body: Annotated[bytes, Within(0, BODY_BYTES_MAX)]

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(b"atoll audit statement 1\0" + encode(self)).digest()


@message(wire="Said")
@dataclass(frozen=True, slots=True)
class SignedStatement:
    """Hold a statement with its signature: it proves itself, whoever hands it on."""

    signer: PeerId
    statement: Statement
    signature: Annotated[bytes, Within(64, 64)]

    @property
    def phase(self) -> StatementPhase:
        return StatementPhase(self.statement.phase)

    def genuine(self, signer: Signer) -> bool:
        return signer.verify(self.signer, self.statement.digest, self.signature)


# ---------------------------------------------------------------- bodies


@message(wire="Commitment")
@dataclass(frozen=True, slots=True)
class Commitment:
    """Commit to parts, a secret number and local steps, before anybody sends.

    ``roots``: of the encoded parts that go to each participant (collectives/merkle.py); none of a
    participant that does not count. ``draw``: the commitment to the number that is revealed later.
    ``work``: to the local steps behind the part (optim/replay/step_disclosure.py), where validators
    may take some of them again.
    """

    roots: Annotated[tuple[Annotated[bytes, Within(0, 32)], ...], Within(0, AUDITED_PEERS_MAX)]
    draw: _D32
    work: Annotated[bytes, Within(0, 32)] = b""


@message(wire="Resultant")
@dataclass(frozen=True, slots=True)
class Resultant:
    """Say what an owner has made.

    ``digests``: of its chunks of the result, in order, end to end. Where the rule needs
    inner products, ``gram``: those over each of its chunks, packed (robust/gram.py) and end to end,
    whose sum it has told the other owners; and ``matrix``: float32, what it has made of those of
    all owners, because other processors may round the last digits differently.
    """

    digests: Annotated[bytes, Within(0, BODY_BYTES_MAX)]
    gram: Annotated[bytes, Within(0, BODY_BYTES_MAX)]
    matrix: Annotated[bytes, Within(0, MATRIX_BYTES_MAX)] = b""


@message(wire="Reveal")
@dataclass(frozen=True, slots=True)
class Reveal:
    """Reveal the number whose commitment was made in the first phase."""

    secret: _D32


@message(wire="Check")
@dataclass(frozen=True, slots=True)
class Check:
    """Tell the numbers of the own part.

    ``seed``: the draw as its signer knows it. ``sketches``: float32[chunks, 8], of the own part,
    and ``norms``: float32[chunks], of its distance to the result; both are empty if it does not
    count.
    """

    seed: _D32
    sketches: Annotated[bytes, Within(0, BODY_BYTES_MAX)]
    norms: Annotated[bytes, Within(0, BODY_BYTES_MAX)]


@message(wire="Verdict")
@dataclass(frozen=True, slots=True)
class Verdict:
    """Accuse senders whose numbers do not fit the part that this owner got.

    Each is named with one such chunk.
    """

    senders: Annotated[tuple[_Index, ...], Within(0, ACCUSED_MAX)]
    chunks: Annotated[tuple[_Chunk, ...], Within(0, ACCUSED_MAX)]

    def __post_init__(self) -> None:
        if len(self.senders) != len(self.chunks) or len(set(self.senders)) != len(self.senders):
            raise ValueError("a verdict names each sender once, with one chunk")


@message(wire="Withholding")
@dataclass(frozen=True, slots=True)
class Withholding:
    """Say that we have waited for what a participant owes in a phase, and that nobody has it."""

    phase: Annotated[int, Within(0, len(IN_ORDER))]  # one more than the last: an opened part
    peer: PeerId


@message(wire="Elimination")
@dataclass(frozen=True, slots=True)
class Elimination:
    """Say: "One of us two is broken or lies, and I cannot prove which", so both go."""

    peer: PeerId
    why: Annotated[str, Within(0, WHY_MAX)]


class Judgement(IntEnum):
    """Name what is found of the local steps of another.

    WITHHELD: it has shown nothing that fits what it has committed to, which may be no fault of its
    own. NEVER: nor has it for long, to whoever says so.
    """

    RIGHT = 0
    WRONG = 1
    WITHHELD = 2
    NEVER = 3


@message(wire="Replayed")
@dataclass(frozen=True, slots=True)
class Replayed:
    """Say that we have taken some of the local steps of this participant again."""

    peer: PeerId
    judgement: Annotated[int, Within(0, len(Judgement) - 1)]
    why: Annotated[str, Within(0, WHY_MAX)]


# ---------------------------------------------------------------- messages beside statements


@message(wire="AskSaid")
@dataclass(frozen=True, slots=True)
class AskStatement:
    """Ask who has the statements of these participants in this phase."""

    terms: _D32
    phase: Annotated[int, Within(0, len(IN_ORDER) - 1)]
    peers: Annotated[tuple[PeerId, ...], Within(1, AUDITED_PEERS_MAX)]


@message(wire="AskPart")
@dataclass(frozen=True, slots=True)
class AskPart:
    """Ask to open a chunk of a participant's contribution: the piece that begins at ``offset``."""

    terms: _D32
    sender: _Index
    chunk: _Chunk
    offset: Annotated[int, Within(0, 1 << 24)]


@message(wire="Piece")
@dataclass(frozen=True, slots=True)
class DisclosedPiece:
    """Carry a piece of an encoded part that has to be opened.

    ``proof`` leads to the commitment of its sender, which need not be whoever sends this.
    """

    terms: _D32
    sender: _Index
    chunk: _Chunk
    offset: Annotated[int, Within(0, 1 << 24)]
    data: Annotated[bytes, Within(1, PIECE_BYTES)]
    proof: Annotated[bytes, Within(0, 32 * 24)]


AuditMessage = SignedStatement | AskStatement | AskPart | DisclosedPiece

_BODIES: Final[Mapping[StatementPhase, type]] = {
    StatementPhase.COMMIT: Commitment,
    StatementPhase.RESULT: Resultant,
    StatementPhase.REVEAL: Reveal,
    StatementPhase.CHECK: Check,
    StatementPhase.VERDICT: Verdict,
    StatementPhase.WITHHELD: Withholding,
    StatementPhase.ELIMINATE: Elimination,
    StatementPhase.REPLAYED: Replayed,
}


def body_of(statement: Statement) -> object:
    """Return the body; RemoteProtocolError unless it is what belongs to the phase."""
    return decode(statement.body, allowed=(_BODIES[StatementPhase(statement.phase)],))


def sign_statement(
    terms: bytes, phase: StatementPhase, heard: bytes, body: object, me: bytes, signer: Signer
) -> SignedStatement:
    """Sign what we say."""
    statement = Statement(terms, int(phase), heard, encode(body))
    return SignedStatement(me, statement, signer.sign(statement.digest))


def heard_of(statements: Mapping[bytes, SignedStatement]) -> bytes:
    """Return the digest of what was heard in a phase: of signers and statements, not signatures."""
    pairs = sorted((signer, each.statement.digest) for signer, each in statements.items())
    return hashlib.sha256(b"".join(signer + digest for signer, digest in pairs)).digest()


def draw_of(terms: bytes, me: bytes, secret: bytes) -> bytes:
    """Return the commitment to a secret number."""
    return hashlib.sha256(b"atoll audit draw 1\0" + terms + me + secret).digest()


# ---------------------------------------------------------------- what is wrong with a body


_F32: Final = np.dtype("<f4")
_DIGEST_BYTES: Final = 32


def seed_of(terms: AuditTerms, secrets: Mapping[bytes, bytes]) -> bytes:
    """Return the common draw, a SHA-256 of the terms and of all revealed secrets.

    No participant can choose it: all secrets were committed to before any was revealed, and one
    honest secret is enough.
    """
    hashed = hashlib.sha256(b"atoll audit seed 1\0" + terms.digest)
    for peer in sorted(secrets):
        hashed.update(peer + secrets[peer])
    return hashed.digest()


def body_fits(terms: AuditTerms, index: int, statement: Statement) -> str:
    """Return what is wrong with what a participant says in these terms; "" if nothing is.

    ``index``: its place among the participants. RemoteProtocolError if the body cannot be read.
    """
    body, work, counts = body_of(statement), terms.work, terms.counted[index]
    if isinstance(body, Commitment):
        return _commitment_fits(body, terms, counts)
    if isinstance(body, Check):
        return _check_fits(body, work.grid.count if counts else 0)
    if isinstance(body, Resultant):
        return _resultant_fits(body, work, index)
    if isinstance(body, Verdict):
        return _verdict_fits(body, work, index)
    if (
        isinstance(body, Elimination | Withholding | Replayed)
        and body.peer not in terms.participants
    ):
        return "it speaks of somebody who does not take part"
    if isinstance(body, Elimination) and body.peer == terms.participants[index]:
        return "it contradicts itself"
    return ""


def _commitment_fits(body: Commitment, terms: AuditTerms, counts: bool) -> str:
    wanted = len(terms.participants) if counts else 0
    if len(body.roots) != wanted:
        return f"{len(body.roots)} roots, not {wanted}"
    work_bytes = _DIGEST_BYTES if terms.validators and counts else 0
    return "" if len(body.work) == work_bytes else f"a commitment to work of {len(body.work)} bytes"


def _check_fits(body: Check, chunks: int) -> str:
    lengths = (len(body.sketches), len(body.norms))
    if lengths != (4 * SKETCH_WIDTH * chunks, 4 * chunks):
        return f"numbers of {lengths} bytes for {chunks} chunks"
    finite = (np.isfinite(np.frombuffer(d, _F32)).all() for d in (body.sketches, body.norms))
    return "" if all(finite) else "numbers that are not finite"


def _resultant_fits(body: Resultant, work: ReductionTerms, index: int) -> str:
    owned, count = len(work.shards.get(index, ())), len(work.counted)
    if len(body.digests) != _DIGEST_BYTES * owned:
        return f"{len(body.digests)} bytes of digests for {owned} chunks"
    needed = work.rule is not None and work.rule.needs_gram and owned > 0
    if len(body.gram) != (4 * count * (count + 1) * owned if needed else 0):
        return f"inner products of {len(body.gram)} bytes"
    if bool(body.matrix) != needed or len(body.matrix) % (4 * count):
        return f"a matrix of {len(body.matrix)} bytes for {count} parts"
    if not np.isfinite(np.frombuffer(body.matrix, _F32)).all():
        return "a matrix that is not finite"
    try:
        if needed:
            unpacked_gram(shard_gram(work, body), count)
    except ValueError as error:
        return str(error)
    return ""


def _verdict_fits(body: Verdict, work: ReductionTerms, index: int) -> str:
    """Return what is wrong with a verdict; "" if nothing is.

    An owner has the parts of others who count, in the chunks that it owns, and of nobody else: what
    else it names would be no accusation, and would still pass for one.
    """
    if not {*body.senders} <= {*work.counted} - {index}:
        return "it accuses somebody who has no part here"
    if not {*body.chunks} <= {*work.shards.get(index, ())}:
        return "it accuses in a chunk that it does not own"
    return ""


def shard_gram(work: ReductionTerms, owner: Resultant) -> bytes:
    """Return the packed inner products over an owner's shard: the sum of those over its chunks.

    They are what the owner has told before the rule, if they are those that it has signed; b""
    where the rule needs none. ValueError for no such numbers.
    """
    return packed_sum(owner.gram, len(work.counted)) if owner.gram else b""


def told_numbers(work: ReductionTerms, check: Check, chunk: int) -> bytes:
    """Return sketch and norm of a chunk, float32[9] as bytes, as a participant has said them."""
    width = 4 * SKETCH_WIDTH
    return (
        check.sketches[width * chunk : width * (chunk + 1)]
        + check.norms[4 * chunk : 4 * (chunk + 1)]
    )
