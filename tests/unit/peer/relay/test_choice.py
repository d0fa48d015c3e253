"""Through which relay a peer is reached: both ends meet at one, and bad ones come last."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.relay.choice import (
    FAULT_S,
    FAULTS_MAX,
    FAULTS_PER_PEER_MAX,
    WITNESSES_MIN,
    RelayChoice,
)
from atoll.peer.relay.silences import SILENT_LOOKS, Silences

A, B, C = (name.encode() * 32 for name in "abc")
RELAYS = [bytes([number]) * 32 for number in range(1, 9)]
ids = st.binary(min_size=32, max_size=32)


@given(ids, ids, st.lists(ids, unique=True, max_size=8))
def test_both_ends_rank_alike_and_name_neither_end(
    me: bytes, peer: bytes, others: list[bytes]
) -> None:
    mine = RelayChoice(me).rank(peer, [*others, me, peer], 0.0)
    assert mine == RelayChoice(peer).rank(me, reversed([*others, me, peer]), 0.0)
    assert set(mine) == set(others) - {me, peer}


def test_pairs_are_spread_over_the_relays() -> None:
    choice = RelayChoice(A)
    peers = [number.to_bytes(32, "big") for number in range(400)]
    firsts = Counter(choice.rank(peer, RELAYS, 0.0)[0] for peer in peers)
    assert set(firsts) == set(RELAYS)
    assert max(firsts.values()) < 100


def test_a_relay_that_was_seen_to_damage_comes_last_for_a_while() -> None:
    choice = RelayChoice(A)
    best, *rest = choice.rank(B, RELAYS, 0.0)
    assert choice.blame(best, 1.0, B)
    assert not choice.blame(best, 2.0, B), "that is no news"
    assert choice.rank(B, RELAYS, 3.0) == [*rest, best]
    assert choice.rank(B, RELAYS, 2.0 + FAULT_S) == [best, *rest]


def test_what_is_seen_on_the_way_to_a_peer_or_said_by_it_counts_for_that_way_alone() -> None:
    choice, other = RelayChoice(A), b"o" * 32
    best = choice.rank(B, RELAYS, 0.0)[0]
    to_other = choice.rank(other, RELAYS, 0.0)
    assert choice.blame(best, 0.0, B)
    assert choice.rank(B, RELAYS, 1.0)[-1] == best
    assert choice.rank(other, RELAYS, 1.0) == to_other


def test_a_relay_that_fails_on_the_ways_to_different_peers_is_avoided_to_all() -> None:
    choice, other = RelayChoice(A), b"o" * 32
    best = choice.rank(other, RELAYS, 0.0)[0]
    for number in range(WITNESSES_MIN):
        assert choice.rank(other, RELAYS, 1.0)[0] == best
        assert choice.blame(best, 0.0, bytes([number]) * 32)
        choice.blame(best, 0.0, bytes([number]) * 32)  # one peer, however often
    assert choice.rank(other, RELAYS, 1.0)[-1] == best
    assert choice.rank(other, RELAYS, FAULT_S)[0] == best


def test_faults_that_are_remembered_are_bounded() -> None:
    choice = RelayChoice(A)
    relays = [number.to_bytes(32, "big") for number in range(2 * FAULTS_MAX)]
    for relay in relays:
        choice.blame(relay, 0.0, relay)
    assert not choice.is_faulty(relays[0], relays[0], 1.0)
    assert choice.is_faulty(relays[-1], relays[-1], 1.0)
    assert len(choice._faulty_until_s) == FAULTS_MAX


def test_a_peer_that_blames_everybody_makes_nobody_forget_what_was_seen() -> None:
    choice, bad = RelayChoice(A), b"r" * 32
    assert choice.blame(bad, 0.0, C)
    others = [number.to_bytes(32, "big") for number in range(2 * FAULTS_MAX)]
    news = [choice.blame(other, 1.0, B) for other in others]
    assert sum(news) == FAULTS_PER_PEER_MAX, "the rest is not even written down"
    assert choice.is_faulty(bad, C, 2.0)
    assert choice.blame(others[-1], 1.0 + FAULT_S, B), "once these are over"


# ---------------------------------------------------------------- silences


def test_a_link_is_silent_when_nothing_has_come_for_some_looks() -> None:
    silences = Silences()
    for _ in range(SILENT_LOOKS):
        silences.look({"one": 1.0, "two": 1.0})
        assert not silences.is_silent("one")
    silences.look({"one": 1.0, "two": 2.0})
    assert silences.is_silent("one")
    assert not silences.is_silent("two")
    silences.look({"one": 3.0})
    assert not silences.is_silent("one"), "it was heard"
    assert not silences.is_silent("two"), "it is forgotten"
