"""What a ledger says after a restart: views void what was said before, and chains lead."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from harness.cluster import Cluster
from harness.disks import Disk
from harness.elections import CHAIN, LINEAGE, OTHER, VIEW, A, B, R
from harness.host import Host

from atoll.peer.membership import durable_records
from atoll.peer.membership import messages as ms
from atoll.peer.membership.consensus import base_of
from atoll.peer.membership.durable_records import (
    SYNCED_FIRST,
    AcceptedRecord,
    CommitRecord,
    IncarnationRecord,
    OperationsRecord,
    PromiseRecord,
    ReadyRecord,
    Record,
    ViewRecord,
    compacted,
    recovered,
)
from atoll.peer.membership.operations import Operation
from atoll.peer.membership.view import Ballot, View
from atoll.peer.rounds.entries import REDUCE

FIRST = replace(VIEW, base_round=0, base_chain=CHAIN)
BALLOT = Ballot(2, B, 5)


def ready(view: View, number: int, before: bytes, root: bytes = R) -> ReadyRecord:
    begin = ms.Begin(view.lineage, view.number, number, 1, ms.STEP, (A, B), (1.0, 1.0))
    run = ms.Run(number, 1, 0, root)
    return ReadyRecord(view.lineage, view.number, run, before, begin)


ONE = ready(FIRST, 1, CHAIN)
TWO = ready(FIRST, 2, ONE.after)
STORED = {ONE.place, TWO.place}
# An incarnation, a view, a promise, a vote, and commits of the view's base, the checkpoint and now.
VOTES_MAX = 7
LEDGER: list[Record] = [
    IncarnationRecord(7),
    ViewRecord(FIRST),
    ONE,
    CommitRecord(1, ONE.after),
    TWO,
]


def test_what_is_ready_and_not_committed_is_held_and_not_applied() -> None:
    found = recovered(LEDGER, 5, stored=STORED)
    assert (found.inc, found.view, found.position) == (7, FIRST, 5)
    assert found.known == found.state == (1, ONE.after)
    assert found.replay == (ONE,)
    assert found.ready == (TWO,)
    assert not found.missing


def test_a_commit_applies_it() -> None:
    found = recovered([*LEDGER, CommitRecord(2, TWO.after)], 6, stored=STORED)
    assert found.state == (2, TWO.after)
    assert found.replay == (ONE, TWO)
    assert not found.ready


def test_a_view_commits_what_leads_to_its_base() -> None:
    following = replace(FIRST, number=4, base_round=2, base_chain=TWO.after)
    found = recovered([*LEDGER, ViewRecord(following)], 6, stored=STORED)
    assert found.state == found.known == (2, TWO.after)


def test_a_view_voids_what_does_not_lead_to_its_base() -> None:
    following = replace(FIRST, number=4, base_round=1, base_chain=ONE.after)
    promise = PromiseRecord(LINEAGE, 3, BALLOT)
    vote = AcceptedRecord(ms.Accepted(LINEAGE, 3, BALLOT, following.digest), following)
    found = recovered([*LEDGER, promise, vote, ViewRecord(following)], 8, stored=STORED)
    assert found.known == (1, ONE.after)
    assert not found.ready
    assert (found.promised, found.frozen, found.accepted) == (Ballot(), False, None)


def test_a_ready_of_another_view_does_not_count() -> None:
    following = replace(FIRST, number=4, base_round=1, base_chain=ONE.after)
    found = recovered([*LEDGER[:-1], ViewRecord(following), TWO], 6, stored=STORED)
    assert not found.ready


def test_a_promise_freezes_also_after_a_restart() -> None:
    found = recovered([*LEDGER, PromiseRecord(LINEAGE, 3, BALLOT)], 6)
    assert (found.promised, found.frozen) == (BALLOT, True)
    late = recovered([*LEDGER, PromiseRecord(LINEAGE, 2, BALLOT)], 6)  # of an older view
    assert (late.promised, late.frozen) == (Ballot(), False)


def test_a_new_incarnation_remembers_no_view_and_every_round() -> None:
    found = recovered([*LEDGER, IncarnationRecord(8)], 6, stored=STORED)
    assert (found.inc, found.view) == (8, None)
    assert found.state == (1, ONE.after)


@pytest.mark.parametrize("base", [7, 8])
@pytest.mark.parametrize("is_compacted", [False, True])
def test_rounds_of_a_lineage_that_gave_way_are_no_state_of_the_other(
    is_compacted: bool, base: int
) -> None:
    """Renewed, and let into the other lineage beyond all that it has done in its own."""
    at = {"base_round": base, "base_chain": str(base).encode() * 32}
    there = replace(FIRST, lineage=b"other".ljust(32), number=9, **at)
    records: list[Record] = [*LEDGER, CommitRecord(2, TWO.after), IncarnationRecord(8)]
    records.append(CommitRecord(7, b"7" * 32))  # which it has caught up with
    if is_compacted:
        records = [*compacted(records, 0, checkpoints=(2, 7))]
    records.append(ViewRecord(there))
    checkpoints = [(2, TWO.after), (7, b"7" * 32)]
    assert recovered(records, 9, checkpoints, STORED).state == (7, b"7" * 32)
    assert recovered(records, 9, checkpoints[:1], STORED).state == (0, b"")


def test_a_file_that_is_missing_costs_the_state_and_not_the_vote() -> None:
    records = [*LEDGER, CommitRecord(2, TWO.after), ready(FIRST, 3, TWO.after)]
    found = recovered(records, 7, stored={ONE.place})
    assert found.known == (2, TWO.after)
    assert found.state == (1, ONE.after)
    assert [head.run.round for head in found.ready] == [3]
    assert found.missing == {3}


def test_a_result_that_is_missing_is_not_held() -> None:
    run = ms.Run(5, 1, 0, R)
    report = ms.Report(4, CHAIN, True, (run,))
    assert base_of(VIEW, {A: report, B: report}).held
    lacking = replace(report, missing=(5,))
    base = base_of(VIEW, {A: lacking, B: lacking})
    assert (base.round, base.held) == (5, False)
    knowing = ms.Report(4, CHAIN, True, known_round=6, known_chain=OTHER)
    base = base_of(VIEW, {A: knowing, B: report})
    assert (base.round, base.chain, base.held) == (6, OTHER, False)


def test_the_state_begins_with_the_checkpoint_that_leads_furthest() -> None:
    records = [*LEDGER, CommitRecord(2, TWO.after)]
    found = recovered(records, 6, [(1, ONE.after), (1, OTHER)], STORED)
    assert (found.checkpoint, found.replay) == ((1, ONE.after), (TWO,))
    elsewhere = recovered(records, 6, [(2, OTHER)], STORED)  # of another history
    assert elsewhere.checkpoint == (0, b"")


@pytest.mark.parametrize("calls", [0.0, 0.8])
@pytest.mark.parametrize("seed", range(4))
def test_compaction_changes_nothing_that_is_said(
    seed: int, calls: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ledgers that a run with crashes has written, with and without operations."""
    monkeypatch.setattr(durable_records, "OPERATIONS_KEPT", 2)
    cluster = Cluster("")
    called = Operation(REDUCE, 1000, "sum", "float32")

    def call(host: Host) -> Operation | None:  # the same at all that stand at a round
        return called if random.Random(f"{seed} {host.round}").random() < calls else None

    cluster.call_of = call
    cluster.is_durable, cluster.save_every = True, 1000
    for name in "abc":
        cluster.add(name)
    cluster.form("abc")
    dice = random.Random(seed)
    for _ in range(4):
        name = dice.choice("abc")
        cluster.kill(name)
        cluster.run(dice.random())
        cluster.restart(name)
        cluster.run(3 * dice.random())
    for disk in cluster.homes.values():
        records = [record for _, record in disk.records]
        whole = recovered(records, 9)
        since = dice.randint(0, whole.known[0])
        short = recovered(compacted(records, since), 9)
        assert_same_state(disk, records, since)
        kept = (whole.inc, whole.view, whole.proof, whole.promised, whole.frozen, whole.accepted)
        same = (short.inc, short.view, short.proof, short.promised, short.frozen, short.accepted)
        assert kept == same
        assert (whole.known, whole.ready) == (short.known, short.ready)
        assert len(compacted(records, since)) <= len(records) + 1
        votes_only = compacted(records, since, since)
        assert compacted(votes_only, since, since) == votes_only
        votes = recovered(votes_only, 9)
        assert (votes.inc, votes.view, votes.promised, votes.accepted) == (
            *kept[:2],
            kept[3],
            kept[5],
        )
        assert (votes.known, votes.ready) == (whole.known, whole.ready)
        assert len(votes_only) <= VOTES_MAX + len(whole.ready)


def assert_same_state(disk: Disk, records: list[Record], since: int) -> None:
    """Checkpoints anywhere on the way lead to the same state after a compaction."""
    places = {*disk.rounds}
    whole = recovered(records, 9, stored=places)
    ways = [step.end for step in whole.replay if step.end[0] >= since]
    for checkpoint in ways:
        kept = compacted(records, checkpoint[0], checkpoints=[checkpoint[0]])
        found = recovered(kept, 9, [checkpoint], places)
        assert (found.state, found.known) == (whole.state, whole.known)
        changes = [step for step in whole.replay if step.changes_state and step.end > checkpoint]
        assert [step for step in found.replay if step.changes_state] == changes
        assert compacted(kept, checkpoint[0], checkpoints=[checkpoint[0]]) == kept


def test_operations_become_one_record_unless_a_checkpoint_may_be_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(durable_records, "OPERATIONS_KEPT", 2)
    records, at = [*LEDGER[:4]], ONE.after
    called = Operation(REDUCE, 1000, "sum", "float32")
    for number in range(2, 12):
        head = ready(FIRST, number, at)
        assert head.begin is not None
        begin = replace(head.begin, kind=REDUCE, operation=called)
        at = head.after
        records += [replace(head, begin=begin), CommitRecord(number, at)]

    def folded(**limits: object) -> list[tuple[int, int]]:
        kept = compacted(records, 1, **limits)  # type: ignore[arg-type]
        assert recovered(kept, 9, [(1, ONE.after)]).state == (11, at)
        return [(r.first, r.last) for r in kept if isinstance(r, OperationsRecord)]

    assert folded() == [(1, 9)]
    assert folded(checkpoints=[1, 5]) == [(1, 5), (5, 9)]
    assert folded(writing=6) == [(1, 6)]


def test_the_table_names_messages_and_records() -> None:
    kinds = {kind for first in SYNCED_FIRST.values() for kind in first}
    assert kinds <= {IncarnationRecord, ViewRecord, PromiseRecord, AcceptedRecord}


def test_compaction_keeps_promises_votes_and_rounds_that_no_checkpoint_has() -> None:
    following = replace(FIRST, number=4, base_round=2, base_chain=TWO.after)
    promise = PromiseRecord(LINEAGE, 3, BALLOT)
    vote = AcceptedRecord(ms.Accepted(LINEAGE, 3, BALLOT, following.digest), following)
    records = compacted([*LEDGER, CommitRecord(2, TWO.after), promise, vote], 1)
    assert ONE not in records
    found = recovered(records, 9, [(1, ONE.after)], STORED)
    assert found.state == (2, TWO.after)
    assert (found.promised, found.frozen, found.accepted) == (BALLOT, True, vote)
