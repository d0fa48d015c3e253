"""Rounds of too few that count: held, said once, and begun when enough are there."""

from __future__ import annotations

import pytest
from harness.cluster import Cluster, peer_id
from harness.faults import begins_of, busy_with
from harness.newcomers import come, held, members, new, running, weights_of_rounds

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.messages import Terms
from atoll.peer.membership.operations import Operation
from atoll.peer.rounds.entries import REDUCE

K = 4
A, B = peer_id("a"), peer_id("b")


def test_newcomers_alone_wait_for_one_that_counts() -> None:
    """a founds and goes; b and c have a quorum and do not count."""
    cluster = running("abc", Terms(50))
    cluster.until_round("abc", 2)
    cluster.kill("a")
    cluster.until(lambda: members(cluster) == "bc")
    before = cluster.committed
    cluster.run(20.0)
    assert cluster.committed == before
    text = f"round {before + 1} is held: it needs a peer that counts, none is here (2 on probation)"
    assert text in {held(cluster, "b"), held(cluster, "c")}
    cluster.restart("a")
    come(cluster, "a")
    cluster.until_round("abc")
    assert new(cluster).keys() == {"b", "c"}


def test_one_that_counts_calls_and_most_want_a_step_that_it_would_be_needed_for() -> None:
    """They would wait for each other for ever, and nobody would hear that the calls differ."""
    cluster = running("abc", Terms(50))
    cluster.until_round("abc", 2)
    called = Operation(REDUCE, 1000, "sum", "float32")
    cluster.call_of = lambda host: called if host.name == "a" else None
    begins = begins_of(cluster)
    cluster.until_round("abc", 6)
    rounds = {begin.round: begin for begin in begins if begin.operation is not None}
    assert len(rounds) > 2
    assert {begin.participants for begin in rounds.values()} == {(A,)}
    assert "missed" in [kind for kind, _ in cluster.host("b").told]


def test_a_round_of_too_few_for_its_rule_is_held_and_said_once() -> None:
    cluster = running("abc", Terms(0, 3, "trimmed(f=1)"), start="abc")
    cluster.detach("c")
    cluster.until(lambda: bool(held(cluster)))
    before, notes = cluster.committed, len(cluster.noted("held"))
    cluster.run(5.0)
    text = f"round {before + 1} is held: trimmed(f=1) needs 3 peers that count, 2 are here"
    assert held(cluster, "a") == held(cluster, "b") == text
    assert cluster.committed == before
    assert len(cluster.noted("held")) == notes == 1
    assert not cluster.noted("retry")
    cluster.train("c")
    cluster.until_round("abc", limit_s=2.0)
    cluster.run(0.3)
    assert held(cluster) == ""


@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_retry_of_too_few_is_not_begun(in_flight: int) -> None:
    """c dies in the middle of rounds: they go back to the barrier and wait for its return."""
    terms = Terms(0, 3, "trimmed(f=1)")
    cluster = running("abc", terms, "abc", fragments=4, in_flight=in_flight)
    lead = cluster.host("a").node.coordinator
    assert lead is not None
    cluster.chunk_s = 0.2
    cluster.until(lambda: len(lead.attempts) == in_flight)
    cluster.run(0.05)
    cluster.kill("c")
    cluster.until(lambda: bool(held(cluster)))
    before = cluster.committed
    cluster.run(3.0)
    assert cluster.committed == before
    cluster.restart("c")
    come(cluster, "c")
    cluster.until_round("abc")


def test_rounds_after_one_that_is_held_do_not_stay_open() -> None:
    """d is ready to come in: its view waits for open rounds, and they would wait for the held one,
    which is begun after that view."""
    terms = Terms(0, 3, "trimmed(f=1)")
    cluster = running("abc", terms, "abc", fragments=4, in_flight=2)
    cluster.add("d")
    cluster.give("d", ev.Configured("spec", 4, 2, terms))
    lead = cluster.host("a").node.coordinator
    assert lead is not None
    cluster.chunk_s = 0.2
    cluster.until(lambda: len(lead.attempts) == 2)
    first = min(lead.attempts)
    begin = lead.attempts[first].begin
    cluster.host("c").inner_s = 2.0
    unusable = ev.ReduceFailed(first, begin.attempt, (), "cannot be read")
    cluster.give("c", unusable)
    cluster.until(lambda: first not in {*lead.attempts, *lead.cleanups})
    come(cluster, "d")
    cluster.until_round("abcd", limit_s=10.0)


def test_collectives_are_not_held() -> None:
    cluster = running("abc", Terms(0, 3, "trimmed(f=1)"), start="abc")
    cluster.detach("c")
    cluster.until(lambda: bool(held(cluster)))
    before = cluster.committed
    cluster.call_of = lambda host: ms.Operation(ms.GATHER)
    for name in "ab":
        cluster.detach(name)
        cluster.train(name)
    cluster.until(lambda: cluster.committed > before)


def test_a_witness_that_leads_knows_it_from_the_replicas() -> None:
    cluster = Cluster("ab")
    cluster.add("w", "witness")
    terms = Terms(K, 2, "median(f=1)")
    cluster.checker.probation = K
    for name in "ab":
        cluster.give(name, ev.Configured("spec", 1, 1, terms))
    cluster.form("abw")
    cluster.give("a", ev.HandOver(peer_id("w")))
    cluster.until(lambda: cluster.host("w").leads)
    cluster.until_round("abw")
    assert cluster.host("w").node.follower.terms == terms
    assert weights_of_rounds(cluster)[-1] == {A: 1.0, B: 1.0}
    cluster.detach("b")
    cluster.until(lambda: bool(held(cluster, "w")))
    assert "median(f=1) needs 2 peers that count, 1 is here" in held(cluster, "w")


@pytest.mark.parametrize(
    ("terms", "kept"),
    [(Terms(), True), (Terms(rule="trimmed(f=1)", least=3), False), (Terms(audited=True), False)],
    ids=["mean", "rule", "audit"],
)
def test_under_a_rule_or_an_audit_a_retry_keeps_nothing(*, terms: Terms, kept: bool) -> None:
    """Nobody's word is enough for a chunk that nobody else may have."""
    cluster = running("abcd", terms, start="abcd")
    cluster.until(busy_with(cluster, "d"))
    cluster.data_cut |= {frozenset((A, peer_id("d")))}  # b and c finish what they own
    cluster.run(0.1)
    begins = begins_of(cluster)
    cluster.kill("d")
    cluster.until_round("abc", 1)
    assert bool(begins[0].kept) is kept
