"""Who has round after round begun again sits out, and audited rounds have so many seats."""

from __future__ import annotations

import pytest
from harness.cluster import Cluster, peer_id
from harness.newcomers import running, weights_of_rounds

from atoll.collectives.audit.sketch import AUDITED_PEERS_MAX
from atoll.peer.membership import messages as ms
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.messages import Terms
from atoll.peer.membership.participation import (
    FAILURES_MAX,
    NEWCOMERS_MAX,
    PAUSE_MAX_S,
    PAUSE_MIN_S,
    Eligibility,
    FlakyPeers,
)
from atoll.peer.membership.roster import Roster
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import Member, Newcomer, View
from atoll.peer.rounds.entries import fragment_of

A, B, C, D = (peer_id(name) for name in "abcd")
ALL = (A, B, C, D)


def test_it_takes_several_rounds_in_a_row() -> None:
    notes: list[object] = []
    flaky_peers = FlakyPeers(notes.append)
    for number in (2, 3, 4, 5):
        flaky_peers.blame(number, {D}, 0.0)
        flaky_peers.blame(number, {D}, 0.0)  # attempts at one round count once
        if number == 3:
            flaky_peers.completed({D})
    assert flaky_peers.without(ALL, 1.0) == ALL
    flaky_peers.blame(6, {D}, 10.0)
    assert flaky_peers.without(ALL, 10.0 + PAUSE_MIN_S - 0.1) == (A, B, C)
    assert flaky_peers.without(ALL, 10.0 + PAUSE_MIN_S) == ALL
    assert len(notes) == 1


def test_each_pause_is_twice_as_long_and_one_good_round_makes_up_for_all() -> None:
    flaky_peers, now_s = FlakyPeers(lambda effect: None), 0.0
    for number in range(2, 2 + FAILURES_MAX):
        flaky_peers.blame(number, {D}, now_s)
    pauses_s = []
    for number in range(20, 28):
        begun_s = now_s
        while D not in flaky_peers.without(ALL, now_s):
            now_s += 1.0
        pauses_s.append(now_s - begun_s)
        flaky_peers.blame(number, {D}, now_s)
    assert pauses_s[:3] == [PAUSE_MIN_S, 2 * PAUSE_MIN_S, 4 * PAUSE_MIN_S]
    assert pauses_s[-1] == PAUSE_MAX_S
    flaky_peers.completed({D})
    assert flaky_peers.without(ALL, now_s) == ALL


def test_more_than_half_stay() -> None:
    flaky_peers = FlakyPeers(lambda effect: None)
    for number in range(FAILURES_MAX):
        flaky_peers.blame(number + 2, {C, D}, 0.0)
    assert flaky_peers.without(ALL, 1.0) == ALL
    assert flaky_peers.without((*ALL, b"e" * 32), 1.0) == (A, B, b"e" * 32)


def test_in_a_run_it_costs_three_rounds_and_then_a_pause() -> None:
    cluster = running("abcd", Terms(), "abcd")
    cluster.data_cut |= {frozenset((B, D)), frozenset((C, D))}  # it fetches results from a
    cluster.until(lambda: "spoils" in cluster.host("a").notes, limit_s=300.0)
    before = len(weights_of_rounds(cluster))
    cluster.until_round("abc", 3)
    took_s = cluster.until_round("abc", 10)
    assert all(D not in weights for weights in weights_of_rounds(cluster)[before:])
    assert took_s < 10.0  # nobody waits for it
    cluster.data_cut.clear()
    cluster.until(lambda: D in weights_of_rounds(cluster)[-1], limit_s=2 * PAUSE_MIN_S)


def test_a_new_coordinators_view_keeps_it() -> None:
    cluster = running("abcd", Terms(), "abcd")
    cluster.data_cut |= {frozenset((B, D)), frozenset((C, D))}  # it fetches results from a
    cluster.until(lambda: "spoils" in cluster.host("a").notes, limit_s=300.0)
    cluster.leave("c")  # a view change
    cluster.until(lambda: cluster.in_one_view("abd"))
    count = len(weights_of_rounds(cluster))
    cluster.until_round("ab", 5)
    assert all(D not in weights for weights in weights_of_rounds(cluster)[count + 1 :])


# ---------------------------------------------------------------- seats


def eligibility(old: int, new: int) -> tuple[Eligibility, tuple[bytes, ...]]:
    peers = tuple(number.to_bytes(32, "big") for number in range(old + new))
    members = tuple(Member(peer, 1, address="x:1") for peer in peers)
    newcomers = tuple(Newcomer(peer, 5) for peer in peers[old:])
    view = View(b"L" * 32, 3, members, peers[0], 4, b"c" * 32, newcomers=newcomers)
    own = MemberState(members[0], lambda effect: None)
    own.terms = Terms(5, audited=True)
    return Eligibility(view, own, Roster(view, peers[0], Timing(), 0.0), lambda effect: None), peers


@pytest.mark.parametrize(
    ("old", "new", "of_old", "of_new"),
    [
        (64, 0, 64, 0),
        (40, 24, 40, 24),
        (60, 30, 64 - NEWCOMERS_MAX, NEWCOMERS_MAX),
        (30, 60, 30, 34),
        (100, 5, 59, 5),
        (3, 100, 3, 61),
    ],
)
def test_an_audited_round_of_too_many_is_of_all_in_turn(
    old: int, new: int, of_old: int, of_new: int
) -> None:
    counts, peers = eligibility(old, new)
    seen: set[bytes] = set()
    for number in range(2, 30):
        chosen = counts.select_participants(number, ms.STEP, peers, 0.0)
        assert len(chosen) == len(set(chosen)) <= AUDITED_PEERS_MAX
        assert sum(peer in peers[:old] for peer in chosen) == of_old
        assert len(chosen) - of_old == of_new
        seen |= set(chosen)
    assert seen == set(peers)
    assert counts.select_participants(2, ms.GATHER, peers, 0.0) == peers


def test_newcomers_take_no_seat_that_the_rule_needs() -> None:
    counts, peers = eligibility(70, 30)
    for least, of_old in ((48, 48), (60, 60), (64, 64)):
        counts._own.terms = Terms(5, least, audited=True)
        chosen = counts.select_participants(9, ms.STEP, peers, 0.0)
        assert len(chosen) == AUDITED_PEERS_MAX
        assert len({*chosen} & {*peers[:70]}) == of_old


@pytest.mark.parametrize("fragments", [2, 3, 4])
def test_all_have_seats_in_rounds_of_each_fragment(fragments: int) -> None:
    """Ranks of 128 of which 64 have seats would alternate, as fragments do."""
    counts, peers = eligibility(128, 0)
    counts._own.fragments = fragments
    seen: dict[int, set[bytes]] = {fragment: set() for fragment in range(fragments)}
    for number in range(2, 2 + 8 * fragments):
        seen[fragment_of(number, fragments)] |= {
            *counts.select_participants(number, ms.STEP, peers, 0.0)
        }
    assert all(served == {*peers} for served in seen.values())


def test_who_has_no_seat_is_told_and_goes_on() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    lead = cluster.host("a").node.coordinator
    assert lead is not None
    lead.eligibility.select_participants = lambda number, kind, chosen, now_s: tuple(  # type: ignore[method-assign]
        peer for peer in chosen if peer != C or number % 2
    )
    cluster.until_round("abc", 6)
    parts = [C in weights for weights in weights_of_rounds(cluster)[-4:]]
    assert sorted(parts) == [False, False, True, True]
    assert any(kind == "missed" for kind, _ in cluster.host("c").told)


def test_nobody_sits_out_where_too_few_would_be_left() -> None:
    counts, peers = eligibility(4, 0)
    for number in range(FAILURES_MAX):
        counts.flaky_peers.blame(number + 2, {peers[0]}, 0.0)
    assert counts.select_participants(9, ms.STEP, peers, 1.0) == peers[1:]
    assert counts.select_participants(9, ms.REDUCE, peers, 1.0) == peers
    counts._own.terms = Terms(5, least=4)
    assert counts.select_participants(9, ms.STEP, peers, 1.0) == peers


def test_where_nobody_is_waited_for_any_number_may_be_left() -> None:
    """An asynchronous round is of one trainer: how many a run needs says nothing about it."""
    counts, peers = eligibility(4, 0)
    for number in range(FAILURES_MAX):
        counts.flaky_peers.blame(number + 2, {peers[0]}, 0.0)
    counts._own.terms = Terms(5, min_trainers=4)
    assert counts.select_participants(9, ms.STEP, peers, 1.0) == peers
    counts._own.terms = Terms(5, min_trainers=4, asynchronous=True)
    assert counts.select_participants(9, ms.STEP, peers, 1.0) == peers[1:]
