"""Evidence of every kind, as liars leave it behind; and what nobody may make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from harness.convicts import ALONE, LIES, left_behind
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.audit_options import keys
from simulation.audits import World

from atoll.collectives.errors import EvidenceError
from atoll.peer.verify.evidence import (
    EVIDENCE_BYTES_MAX,
    KINDS,
    Evidence,
    parse_evidence,
    verify_evidence,
)
from atoll.peer.verify.statement import (
    IN_ORDER,
    Elimination,
    StatementPhase,
    Withholding,
    sign_statement,
)

ALL = [*LIES, "silent"]
WEAK = ("withholding", "wrong part", "other steps", "false replay")
OF_A_CHUNK = "wrong inner products of a chunk"


def test_these_are_all_kinds() -> None:
    assert {LIES.get(lie, lie) for lie in ALL} == set(KINDS)


@pytest.mark.parametrize("lie", ALL)
def test_it_is_checked_by_who_knows_nothing_else(lie: str) -> None:
    evidence = left_behind(lie)
    again = parse_evidence(evidence.encoded)
    assert again == evidence
    assert again.digest == evidence.digest
    finding = verify_evidence(again)
    assert finding.kind == LIES.get(lie, lie)
    assert evidence.culprit in finding.banned
    assert finding.stands_alone == (lie not in WEAK)


def refused(evidence: Evidence) -> None:
    with pytest.raises(EvidenceError):
        verify_evidence(parse_evidence(evidence.encoded))


@pytest.mark.parametrize("lie", ALL)
def test_it_convicts_nobody_else(lie: str) -> None:
    evidence = left_behind(lie)
    banned = verify_evidence(evidence).banned
    for peer in evidence.terms.participants:
        if peer not in banned:
            refused(replace(evidence, culprit=peer))


@pytest.mark.parametrize("lie", ALL)
def test_a_word_that_is_missing_or_forged_makes_it_worthless(lie: str) -> None:
    evidence = left_behind(lie)
    spare = len(evidence.said) - evidence.terms.majority if lie == "withholding" else 0
    for place, each in enumerate(evidence.said):
        forged = replace(each, signature=bytes(64))
        said = (*evidence.said[:place], forged, *evidence.said[place + 1 :])
        refused(replace(evidence, said=said))
        if not spare:
            refused(replace(evidence, said=evidence.said[:place] + evidence.said[place + 1 :]))


@pytest.mark.parametrize("lie", ALL)
def test_it_belongs_to_its_attempt(lie: str) -> None:
    evidence = left_behind(lie)
    refused(replace(evidence, terms=replace(evidence.terms, attempt=99)))
    refused(replace(evidence, terms=replace(evidence.terms, codec="float32", rule="mean")))


@pytest.mark.parametrize(
    "lie", ["wrong sketch", "false accusation", "dense shift", "silent", OF_A_CHUNK]
)
def test_parts_and_results_are_what_was_promised(lie: str) -> None:
    evidence = left_behind(lie)

    def changed(data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1])

    for place, part in enumerate(evidence.parts):
        for other in (
            replace(part, data=changed(part.data)),
            replace(part, sender=(part.sender + 1) % 5),
            replace(part, chunk=(part.chunk + 1) % 10),
            replace(part, proof=part.proof[:-32]),
        ):
            parts = (*evidence.parts[:place], other, *evidence.parts[place + 1 :])
            refused(replace(evidence, parts=parts))
    for result in evidence.result:
        refused(replace(evidence, result=(replace(result, data=changed(result.data)),)))
        refused(replace(evidence, result=()))


def test_inner_products_that_are_right_convict_nobody() -> None:
    """Of another chunk of the same owner."""
    evidence = left_behind(OF_A_CHUNK)
    work = evidence.terms.work
    shard = work.shards[evidence.terms.participants.index(evidence.culprit)]
    assert evidence.chunk in shard
    for chunk in shard:
        if chunk != evidence.chunk:
            parts = tuple(replace(part, chunk=chunk) for part in evidence.parts)
            refused(replace(evidence, chunk=chunk, parts=parts))


@pytest.mark.parametrize("rule", ["mean", "gm(f=1)"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_words_of_honest_peers_are_evidence_of_nothing(kind: str, rule: str) -> None:
    """All that five honest peers have said, arranged as evidence of each kind."""
    world = World(replace(ALONE, liars={}, rule=rule), keys(ALONE))
    world.play()
    peer = next(iter(world.peers.values()))
    assert peer.audit is not None
    audit = peer.audit
    inbox, terms = audit.inbox, audit.terms
    for count in (1, 2, len(IN_ORDER)):
        words = tuple(w for phase in IN_ORDER[-count:] for w in inbox.of(phase).values())
        for culprit in terms.participants:
            for parts in ((), tuple(audit._shown(audit.index, c) for c in (0,))):  # type: ignore[misc]
                refused(Evidence(kind, culprit, terms, words, parts=parts))  # type: ignore[arg-type]


def withheld(phase: StatementPhase, silent: int, voices: tuple[int, ...], counted: str) -> Evidence:
    """What so many say of one of five; ``counted``: 1 for each that does, 0 for newcomers."""
    signers = {key.me: key for key in keys(ALONE)}
    world = World(ALONE, keys(ALONE))
    terms = world._terms(tuple(world.peers), 1)
    flags = tuple(flag == "1" for flag in counted)
    terms = replace(terms, counted=flags, shares=tuple(map(int, flags)))
    body = Withholding(int(phase), terms.participants[silent])
    names = [terms.participants[voice] for voice in voices]
    words = [
        sign_statement(terms.digest, StatementPhase.WITHHELD, b"", body, n, signers[n])
        for n in names
    ]
    return Evidence("withheld", terms.participants[silent], terms, tuple(words))


def test_silence_before_the_draw_is_no_evidence() -> None:
    for phase in IN_ORDER:
        evidence = withheld(phase, 0, (1, 2, 3), "11111")
        if phase < StatementPhase.REVEAL:
            refused(evidence)
        else:
            assert verify_evidence(evidence).banned == (evidence.culprit,)


def test_newcomers_have_no_say() -> None:
    """Three of five, of whom two have shown nothing yet."""
    refused(withheld(StatementPhase.CHECK, 0, (1, 3, 4), "11100"))
    assert verify_evidence(withheld(StatementPhase.CHECK, 0, (1, 2), "11100")).banned
    assert verify_evidence(withheld(StatementPhase.CHECK, 3, (1, 2), "11100")).banned


def pair(counted: str, why: str = "it has sent something else") -> Evidence:
    """One of five contradicts the first one."""
    terms = withheld(StatementPhase.CHECK, 0, (), counted).terms
    signers = {key.me: key for key in keys(ALONE)}
    accused, accuser, *_ = terms.participants
    body = Elimination(accused, why)
    word = sign_statement(
        terms.digest, StatementPhase.ELIMINATE, b"", body, accuser, signers[accuser]
    )
    return Evidence("pair", accused, terms, (word,))


def test_what_liars_write_is_one_line_on_a_terminal() -> None:
    finding = verify_evidence(pair("11111", "x\x1b[2J\nproven: nobody lies"))
    assert finding.text.isprintable()
    for name in ("rule", "codec"):
        with pytest.raises(ValueError, match="printable"):
            replace(pair("11111").terms, **{name: "\x1b[2J"})  # type: ignore[arg-type]


def test_a_newcomer_takes_nobody_along() -> None:
    assert len(verify_evidence(pair("11111")).banned) == 2
    refused(pair("10111"))


def test_a_minority_bans_nobody() -> None:
    evidence = left_behind("withholding")
    refused(replace(evidence, said=evidence.said[: evidence.terms.majority - 1]))
    same = (evidence.said[0],) * evidence.terms.majority
    refused(replace(evidence, said=same))


def test_what_is_no_evidence_at_all() -> None:
    evidence = left_behind("draw abort")
    for data in (b"", b"atoll evidence 1\n", b"atoll evidence 2\n" + evidence.encoded[17:]):
        with pytest.raises(EvidenceError):
            parse_evidence(data)
    with pytest.raises(EvidenceError, match="no evidence"):
        parse_evidence(bytes(EVIDENCE_BYTES_MAX + 1))
    refused(replace(evidence, kind="unheard of"))


def _flips(data: bytes) -> Callable[[int, int], bytes]:
    def flipped(place: int, bit: int) -> bytes:
        place %= len(data)
        return data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :]

    return flipped


@settings(max_examples=300, deadline=None)
@given(lie=st.sampled_from(ALL), place=st.integers(0, 1 << 30), bit=st.integers(0, 7))
def test_any_flipped_bit_is_refused_or_changes_nothing(lie: str, place: int, bit: int) -> None:
    """Nothing else than EvidenceError is ever raised."""
    evidence = left_behind(lie)
    data = _flips(evidence.encoded)(place, bit)
    try:
        finding = verify_evidence(parse_evidence(data))
    except EvidenceError:
        return
    assert set(finding.banned) == set(verify_evidence(evidence).banned)


def test_parts_that_prove_nothing_are_refused() -> None:
    """A file of 64 parts takes 64 MiB, whatever it is about."""
    part = left_behind("dense shift").parts[0]
    for lie in ("equivocation", "withholding", "dense shift"):
        evidence = left_behind(lie)
        for changed in (
            replace(evidence, parts=(*evidence.parts, part)),
            replace(evidence, parts=(*evidence.parts, replace(part, sender=63))),
        ):
            with pytest.raises(EvidenceError, match="prove nothing"):
                verify_evidence(changed)
    evidence = left_behind("equivocation")
    with pytest.raises(EvidenceError, match="two statements"):
        verify_evidence(replace(evidence, said=(*evidence.said, evidence.said[0])))
