"""Define evidence against a peer, and verify what it proves: anybody can, without the network.

What convicts a peer is signed by itself, together with the digest of the terms, so nobody can make
it up; and what others have said enters only if the accused has signed that it heard just that. Four
kinds are weaker. Somebody who withholds signs nothing, and local steps that were taken again give
other digits on other machines: *withheld*, *work* and *slander* rest on the word of more than half
of the participants, and *pair* takes its accuser along. Whether these participants were
members of the run is known to its members alone (``Finding.stands_alone``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Final, TypeVar

from atoll.collectives.audit.sketch import AUDITED_PEERS_MAX
from atoll.collectives.digests import strong_digest
from atoll.collectives.errors import AtollError, EvidenceError, RemoteProtocolError
from atoll.collectives.merkle import opens
from atoll.peer.membership.signatures import verifies
from atoll.peer.membership.view import PeerId, plain, short
from atoll.peer.net.wire import Within, decode, encode, message
from atoll.peer.rounds.entries import CHUNKS_MAX
from atoll.peer.verify.checks import (
    gram_fits,
    matrix_fits,
    part_numbers,
    recomputed_digest,
)
from atoll.peer.verify.statement import (
    IN_ORDER,
    ONCE,
    Check,
    Commitment,
    Elimination,
    Judgement,
    Replayed,
    Resultant,
    Reveal,
    SignedStatement,
    StatementPhase,
    Verdict,
    Withholding,
    body_fits,
    body_of,
    draw_of,
    heard_of,
    seed_of,
    told_numbers,
)
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
@dataclass(frozen=True)  # without slots, as what it keeps is no field
class Evidence:
    """Accuse a peer of a lie, with the statements and parts that prove it.

    ``kind``: one of KINDS. ``chunk`` is the one that it is about, if it is about
    any.
    """

    kind: Annotated[str, Within(1, 32)]
    culprit: PeerId
    terms: AuditTerms
    said: Annotated[tuple[SignedStatement, ...], Within(1, STATEMENTS_MAX)]
    chunk: _Chunk = 0
    parts: Annotated[tuple[Shown, ...], Within(0, AUDITED_PEERS_MAX)] = ()
    result: Annotated[tuple[Shown, ...], Within(0, 1)] = ()

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.encoded).digest()

    @cached_property
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


# ---------------------------------------------------------------- what it proves

_T = TypeVar("_T")


def verify_evidence(evidence: Evidence) -> Finding:
    """Return what evidence proves; EvidenceError, with the reason, if it proves nothing."""
    verify = KINDS.get(evidence.kind)
    if verify is None:
        raise EvidenceError(f"evidence of a kind that is not known here: {evidence.kind!r}")
    try:
        case = _GenuineEvidence(evidence)
        finding = verify(case)
        needed = len(case.used) == len(evidence.parts) and case.used_result == bool(evidence.result)
        _require(needed, "it contains parts that prove nothing")
        return finding
    except EvidenceError:
        raise
    except AtollError as error:  # a rule or codec that is not known, a body that cannot be read
        raise EvidenceError(f"this evidence cannot be checked: {error.what}") from error
    except Exception as error:  # hostile numbers: whatever they break, they end no daemon
        what = f"{type(error).__name__}: {error}"
        raise EvidenceError(f"this evidence cannot be checked: {what[:200]}") from error


class _GenuineEvidence:
    """Hold evidence whose signatures are good, and belong to its attempt."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence, self.terms = evidence, evidence.terms
        self.culprit, self.chunk = evidence.culprit, evidence.chunk
        self.used: set[int] = set()  # senders of the parts that have been looked at
        self.used_result = False
        digest = self.terms.digest
        for each in evidence.said:
            _require(each.statement.terms == digest, "a statement is of another attempt")
            _require(each.signer in self.terms.participants, "a signer did not take part")
            good = verifies(each.signer, each.statement.digest, each.signature)
            _require(good, f"a signature of {short(each.signer)} is forged")
        _require(self.culprit in self.terms.participants, "the accused did not take part")

    @property
    def place(self) -> int:
        return self.terms.participants.index(self.culprit)

    def all_of(self, phase: StatementPhase) -> dict[bytes, SignedStatement]:
        return {each.signer: each for each in self.evidence.said if each.phase is phase}

    def word(self, phase: StatementPhase, signer: bytes) -> SignedStatement:
        found = self.all_of(phase).get(signer)
        if found is None:
            raise EvidenceError(f"what {short(signer)} said in phase {phase.name} is missing")
        return found

    def heard(self, signer: bytes, phase: StatementPhase) -> dict[bytes, SignedStatement]:
        """Return all statements of a phase.

        ``signer`` has said in the next that it heard just these; EvidenceError if not.
        """
        found = self.all_of(phase)
        later = self.word(StatementPhase(phase + 1), signer)
        _require(heard_of(found) == later.statement.heard, "it has heard something else")
        return found

    def replayed(self, peer: bytes, *judgements: Judgement) -> set[bytes]:
        """Return who of the jury says one of these judgements of a participant's local steps."""
        words = self.all_of(StatementPhase.REPLAYED).items()
        bodies = {signer: _body(each, Replayed) for signer, each in words}
        return {
            signer
            for signer in bodies.keys() & set(self.terms.jury)
            if bodies[signer].peer == peer and bodies[signer].judgement in judgements
        }

    def commitment(self, index: int) -> Commitment:
        return _body(self.word(StatementPhase.COMMIT, self.terms.participants[index]), Commitment)

    def check(self, index: int) -> Check:
        return _body(self.word(StatementPhase.CHECK, self.terms.participants[index]), Check)

    def part(self, index: int) -> Shown:
        """Return the opened part of a participant; EvidenceError if it was not committed to."""
        shown = next((s for s in self.evidence.parts if s.sender == index), None)
        if shown is None or shown.chunk != self.chunk:
            raise EvidenceError("a part is missing")
        owners = self.terms.work.plan.owners
        _require(self.chunk < len(owners), "there is no such chunk")
        root = self.commitment(index).roots[owners[self.chunk]]
        digest = strong_digest(shown.data)
        _require(
            opens(digest, self.chunk, owners, shown.proof, root), "a part is not what was committed"
        )
        self.used.add(index)
        return shown

    @property
    def owner(self) -> int:
        return self.terms.work.plan.owners[self.chunk]

    def result_digest(self) -> bytes:
        """Return the digest that the owner has signed for its result of the chunk."""
        owner = self.terms.participants[self.owner]
        digests = _body(self.word(StatementPhase.RESULT, owner), Resultant).digests
        place = self.terms.work.shards[self.owner].index(self.chunk)
        return digests[32 * place : 32 * place + 32]

    def result(self) -> bytes:
        _require(len(self.evidence.result) == 1, "the result is missing")
        data = self.evidence.result[0].data
        signed = strong_digest(data) == self.result_digest()
        _require(signed, "the result is not what its owner has signed")
        self.used_result = True
        return data

    def numbers_are_right(self, index: int) -> bool:
        """Return whether a participant's sketch and norm fit its part of the chunk.

        They also have to fit the result that it has heard of.
        """
        claimed, work = self.check(index), self.terms.work
        self.heard(self.terms.participants[index], StatementPhase.RESULT)
        true = part_numbers(work, claimed.seed, self.chunk, self.part(index).data, self.result())
        return told_numbers(work, claimed, self.chunk) == true


def _equivocation(case: _GenuineEvidence) -> Finding:
    said = [each for each in case.evidence.said if each.signer == case.culprit]
    _require(len(said) == len(case.evidence.said) == 2, "it takes two statements")
    one, other = said
    _require(one.phase is other.phase and one.phase in ONCE, "they are of different phases")
    _require(one.statement != other.statement, "they are the same")
    return _found(case, f"signed two different statements in phase {one.phase.name}")


def _malformed(case: _GenuineEvidence) -> Finding:
    (said,) = _exactly(case.evidence.said, 1)
    _require(said.signer == case.culprit, "somebody else has said it")
    try:
        wrong = body_fits(case.terms, case.place, said.statement)
    except RemoteProtocolError as error:
        wrong = error.what
    _require(bool(wrong), "there is nothing wrong with it")
    return _found(case, f"signed what cannot be: {wrong}")


def _draw(case: _GenuineEvidence) -> Finding:
    committed = _body(case.word(StatementPhase.COMMIT, case.culprit), Commitment)
    secret = _body(case.word(StatementPhase.REVEAL, case.culprit), Reveal).secret
    right = draw_of(case.terms.digest, case.culprit, secret) == committed.draw
    _require(not right, "it has revealed what it had committed to")
    return _found(case, "revealed another number than it had committed to")


def _seed(case: _GenuineEvidence) -> Finding:
    reveals = case.heard(case.culprit, StatementPhase.REVEAL)
    _require(set(reveals) == set(case.terms.participants), "a revealed number is missing")
    secrets = {peer: _body(each, Reveal).secret for peer, each in reveals.items()}
    claimed = case.check(case.place).seed
    _require(claimed != seed_of(case.terms, secrets), "its draw is right")
    return _found(case, "computed another draw than the revealed numbers give")


def _sketch(case: _GenuineEvidence) -> Finding:
    _require(not case.numbers_are_right(case.place), "its numbers are right")
    return _found(case, f"signed numbers that do not fit its part of chunk {case.chunk}")


def _silent(case: _GenuineEvidence) -> Finding:
    """Return a finding against an owner that has seen wrong numbers, and has said nothing."""
    _require(case.place == case.owner, "it does not own this chunk")
    sender = _only_sender(case)
    case.heard(case.culprit, StatementPhase.COMMIT)
    case.heard(case.culprit, StatementPhase.CHECK)
    _require(not case.numbers_are_right(sender), "there was nothing to say")
    verdict = _body(case.word(StatementPhase.VERDICT, case.culprit), Verdict)
    _require(sender not in verdict.senders, "it has accused the sender")
    name = short(case.terms.participants[sender])
    return _found(case, f"kept silent about the wrong numbers of {name} in chunk {case.chunk}")


def _false(case: _GenuineEvidence) -> Finding:
    sender = _only_sender(case)
    case.heard(case.culprit, StatementPhase.COMMIT)
    case.heard(case.culprit, StatementPhase.CHECK)
    verdict = _body(case.word(StatementPhase.VERDICT, case.culprit), Verdict)
    accused = dict(zip(verdict.senders, verdict.chunks, strict=True))
    _require(accused.get(sender) == case.chunk, "it has not accused the sender of that")
    _require(case.numbers_are_right(sender), "the accusation is true")
    name = short(case.terms.participants[sender])
    return _found(case, f"accused {name} falsely")


def _result(case: _GenuineEvidence) -> Finding:
    work = case.terms.work
    _require(case.place == case.owner, "it does not own this chunk")
    case.heard(case.culprit, StatementPhase.COMMIT)
    parts = {index: case.part(index).data for index in work.counted}
    said = {
        case.terms.participants.index(peer): _body(each, Resultant)
        for peer, each in case.heard(case.culprit, StatementPhase.RESULT).items()
    }
    _require(len(said) == len(case.terms.participants), "what an owner has signed is missing")
    right = recomputed_digest(work, case.chunk, parts, said[case.place]) == case.result_digest()
    _require(not (right and matrix_fits(work, said, case.place)), "its result is right")
    return _found(case, f"signed a wrong result of chunk {case.chunk}")


def _gram(case: _GenuineEvidence) -> Finding:
    _require(case.place == case.owner, "it does not own this chunk")
    case.heard(case.culprit, StatementPhase.COMMIT)
    parts = {index: case.part(index).data for index in case.terms.work.counted}
    signed = _body(case.word(StatementPhase.RESULT, case.culprit), Resultant)
    right = gram_fits(case.terms.work, case.chunk, parts, signed)
    _require(not right, "its inner products are right")
    return _found(case, f"signed wrong inner products of chunk {case.chunk}")


def _withheld(case: _GenuineEvidence) -> Finding:
    words = case.all_of(StatementPhase.WITHHELD)
    bodies = {_body(each, Withholding) for each in words.values()}
    _require(len(bodies) == 1, "they speak of different things")
    _require(next(iter(bodies)).peer == case.culprit, "they speak of somebody else")
    jury = case.terms.jury
    voices = words.keys() & set(jury) - {case.culprit}
    _require(len(voices) >= case.terms.majority, "they are not more than half")
    phase = next(iter(bodies)).phase
    _require(
        phase >= StatementPhase.REVEAL,
        "who says nothing before the draw is left out, and not banned",
    )
    what = StatementPhase(phase).name if phase < len(IN_ORDER) else "of an opened part"
    text = f"withheld what it owed in phase {what}, say {len(voices)} of {len(jury)}"
    return _found(case, text, stands_alone=False)


def _pair(case: _GenuineEvidence) -> Finding:
    (said,) = _exactly(case.evidence.said, 1)
    other = _body(said, Elimination)
    _require(other.peer == case.culprit != said.signer, "it names somebody else")
    _require(said.signer in case.terms.jury, "who is on probation takes nobody along")
    text = f"and {short(said.signer)} contradict each other: {plain(other.why)}"
    found = _found(case, text, stands_alone=False)
    return Finding(found.kind, (case.culprit, said.signer), found.text, stands_alone=False)


def _work(case: _GenuineEvidence) -> Finding:
    voices = case.replayed(case.culprit, Judgement.WRONG, Judgement.NEVER) - {case.culprit}
    jury = case.terms.jury
    _require(2 * len(voices) > len(jury), "they are not more than half")
    text = f"did other local steps than it has committed to, say {len(voices)} of {len(jury)}"
    return _found(case, text, stands_alone=False)


def _slander(case: _GenuineEvidence) -> Finding:
    """Return a finding against a validator that more than half say has accused falsely.

    The accused may speak for itself: without it honest ones may be no majority, and with it liars
    are none.
    """
    said = _body(case.word(StatementPhase.REPLAYED, case.culprit), Replayed)
    _require(said.judgement == Judgement.WRONG, "it accuses nobody")
    voices, jury = case.replayed(said.peer, Judgement.RIGHT) - {case.culprit}, case.terms.jury
    _require(2 * len(voices) > len(jury), "they are not more than half")
    text = f"accused {short(said.peer)}, whose local steps are right, say {len(voices)}"
    return _found(case, f"{text} of {len(jury)}", stands_alone=False)


KINDS: Final[Mapping[str, Callable[[_GenuineEvidence], Finding]]] = {
    "equivocation": _equivocation,
    "malformed": _malformed,
    "draw": _draw,
    "seed": _seed,
    "sketch": _sketch,
    "silent": _silent,
    "false": _false,
    "result": _result,
    "gram": _gram,
    "withheld": _withheld,
    "pair": _pair,
    "work": _work,
    "slander": _slander,
}


def _found(case: _GenuineEvidence, text: str, *, stands_alone: bool = True) -> Finding:
    whole = f"{short(case.culprit)} {text} (round {case.terms.round})"
    return Finding(case.evidence.kind, (case.culprit,), whole, stands_alone)


def _only_sender(case: _GenuineEvidence) -> int:
    (shown,) = _exactly(case.evidence.parts, 1)
    return shown.sender


def _exactly(items: Iterable[_T], count: int) -> tuple[_T, ...]:
    found = tuple(items)
    _require(len(found) == count, f"it takes just {count}")
    return found


def _body(said: SignedStatement, kind: type[_T]) -> _T:
    found = body_of(said.statement)
    if not isinstance(found, kind):
        raise EvidenceError(f"a statement is no {kind.__name__}")
    return found


def _require(holds: bool, why_not: str) -> None:
    if not holds:
        raise EvidenceError(f"this evidence proves nothing: {why_not}")
