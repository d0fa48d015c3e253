"""Under a robust rule or an audit no chunk of a broken attempt is kept: nobody is believed."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.collectives.chunks import ChunkGrid
from atoll.optim.run_spec import RunSpec
from atoll.peer.membership.events import Configured, Effect, FinalChunks
from atoll.peer.membership.kept_chunks import Kept, pack_kept
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.messages import INIT, STEP, Begin, Terms
from atoll.peer.membership.participation import wrong_kept
from atoll.peer.membership.probation import terms_of
from atoll.peer.membership.view import Member
from atoll.peer.rounds.entries import EntryOrigin

ME, OTHER, LINEAGE = b"m" * 32, b"o" * 32, b"L" * 32
RULE, AUDIT, MEAN = Terms(rule="trimmed(f=1)"), Terms(audited=True), Terms()


def begin_of(kind: str, *, kept: bool) -> Begin:
    packed = pack_kept([Kept(0, 1, b"x" * 32, (0,))]) if kept else b""
    past = (EntryOrigin((ME, OTHER), (1.0, 1.0)),) if kept else ()
    return Begin(LINEAGE, 2, 4, 1, kind, (ME, OTHER), (1.0, 1.0), past=past, kept=packed)


@pytest.mark.parametrize(("terms", "why"), [(RULE, "under trimmed(f=1)"), (AUDIT, "not verified")])
def test_a_step_that_keeps_chunks_is_refused(terms: Terms, why: str) -> None:
    assert why in wrong_kept(begin_of(STEP, kept=True), terms)
    assert not wrong_kept(begin_of(STEP, kept=False), terms)
    assert not wrong_kept(begin_of(INIT, kept=True), terms)
    assert not wrong_kept(begin_of(STEP, kept=True), MEAN)
    assert not wrong_kept(begin_of(STEP, kept=True), None)


@pytest.mark.parametrize(
    ("terms", "kind", "told"),
    [(RULE, STEP, b""), (AUDIT, STEP, b""), (MEAN, STEP, b"d" * 32), (RULE, INIT, b"d" * 32)],
)
def test_a_member_tells_nothing_that_nobody_may_believe(
    terms: Terms, kind: str, told: bytes
) -> None:
    effects: list[Effect] = []
    own = MemberState(Member(ME, 1), effects.append)
    own.round, own.chain = 3, b"3" * 32
    own.on_configured(Configured("spec", 1, 1, terms))
    own.on_begin(begin_of(kind, kept=False))
    finals = own.on_final_chunks(FinalChunks(4, 1, b"d" * 32, (OTHER,)))
    assert finals is not None
    assert (finals.digests, finals.missing) == (told, (OTHER,))


@pytest.mark.parametrize(
    ("wanted", "has_work"),
    [({}, True), ({"aggregate": "trimmed(f=1)"}, False), ({"method": "noloco"}, False)],
)
def test_a_witness_may_own_what_are_averages_only(wanted: dict[str, Any], has_work: bool) -> None:
    terms = terms_of(RunSpec(sync_every=1, **wanted), [ChunkGrid(4096, 1024)])
    assert (terms.work is not None) is has_work
    assert terms_of(RunSpec(sync_every=1, **wanted)).work is None


def test_a_rule_that_bears_nobody_is_the_mean() -> None:
    assert not terms_of(RunSpec(sync_every=1, aggregate="trimmed(f=0)")).keeps_nothing
    assert terms_of(RunSpec(sync_every=1, aggregate="trimmed(f=1)")).keeps_nothing
    assert terms_of(RunSpec(sync_every=1, audit=True)).keeps_nothing
