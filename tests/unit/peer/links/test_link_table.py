"""Rows of all members, good and bad, become a network to plan with."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.collectives.planning.choice import ReductionTask, choose
from atoll.collectives.planning.network_model import (
    LATENCY_MAX_S,
    LOSS_MAX,
    RATE_MAX_BYTES_PER_S,
    RATE_MIN_BYTES_PER_S,
)
from atoll.peer.links.estimates import PAUSE_S, LinkChanges, LinkEstimate
from atoll.peer.links.link_table import LOCAL_BYTES_PER_S, LinkTable, describe, has_changed
from atoll.peer.links.messages import MEASURED_MAX, LinkRow

PEERS = [bytes([n]) * 32 for n in (1, 2, 3)]
A, B, C = PEERS
RATES = {(A, B): 1e6, (A, C): 2e6, (B, A): 3e6, (B, C): 4e6, (C, A): 5e6, (C, B): 6e6}


def row(peer: bytes, **changes: object) -> LinkRow:
    others = tuple(other for other in PEERS if other != peer)
    values: dict[str, object] = {
        "peers": others,
        "rtt_s": tuple(0.02 + 0.01 * PEERS.index(other) for other in others),
        "out": tuple(RATES[peer, other] for other in others),
        "loss": (0.001, None),
    }
    return LinkRow(**(values | changes))  # type: ignore[arg-type]


def full() -> LinkTable:
    picture = LinkTable()
    for peer in PEERS:
        picture.put(peer, row(peer))
    return picture


def test_participants_come_in_the_order_of_their_ids() -> None:
    picture = full()
    assert picture.gaps(PEERS) == 0
    network = picture.network([C, A, B])
    for (source, target), rate in RATES.items():
        assert network.pair[PEERS.index(source), PEERS.index(target)] == rate
    assert network.latency_s[0, 1] == network.latency_s[1, 0] == pytest.approx(0.01), (
        "half of the least round trip that one of them has seen"
    )
    assert network.loss[0, 1] == 0.001
    assert network.loss[0, 2] == 0
    assert picture.network([B, C]).pair[0, 1] == RATES[B, C]
    assert picture.out(C, A) == RATES[C, A]


def test_an_end_has_at_least_what_one_of_its_pairs_has() -> None:
    picture = full()
    assert picture.network(PEERS).up.tolist() == [2e6, 4e6, 6e6], "nothing else is known"
    picture.put(A, row(A, up=1.5e6, down=9e6))
    picture.put(B, row(B, up=7e6, down=2e6))
    network = picture.network(PEERS)
    assert network.up.tolist() == [2e6, 7e6, 6e6]
    assert network.down.tolist() == [9e6, 6e6, 4e6]


def test_an_end_has_at_most_what_its_peer_allows_itself() -> None:
    picture = full()
    picture.put(A, row(A, up=1.5e6, down=9e6, up_cap=0.5e6, down_cap=20e6))
    picture.put(B, row(B, up_cap=1.0))  # it cannot mean that
    network = picture.network(PEERS)
    assert network.up.tolist() == [0.5e6, RATE_MIN_BYTES_PER_S, 6e6]
    assert network.down.tolist() == [9e6, 6e6, 4e6]
    unlimited = row(A, up_cap=None)
    assert has_changed(row(A, up_cap=0.5e6), unlimited)
    assert has_changed(unlimited, row(A, down_cap=0.5e6))
    assert not has_changed(row(A, down_cap=0.5e6), row(A, down_cap=0.51e6))


def test_what_a_peer_allows_itself_makes_its_ends_known() -> None:
    picture = LinkTable()
    for peer in PEERS:
        picture.put(peer, row(peer, out=(None, None)))
    assert picture.gaps(PEERS) == 6
    picture.put(A, row(A, out=(None, None), up_cap=1e6, down_cap=2e6))
    picture.put(B, row(B, out=(None, None), up=3e6, down=4e6))
    assert picture.gaps(PEERS) == 4, "the ways between A and B are known by their ends"


def test_who_has_left_counts_no_more() -> None:
    picture = full()
    picture.keep([A, B])
    assert picture.gaps([A, B]) == 0
    assert picture.gaps(PEERS) == 2, "who has no row knows nothing of what leaves it"
    assert picture.out(C, A) == 0
    assert picture.network(PEERS).pair[2, 0] == math.inf


def test_a_way_is_known_by_its_rate_and_its_round_trip() -> None:
    picture = full()
    picture.put(B, row(B, out=(None, None)))
    assert picture.gaps(PEERS) == 2, "nobody knows what leaves B"
    assert picture.gaps([A, C]) == 0
    picture.put(B, row(B, rtt_s=(None, 0.02)))
    assert picture.gaps(PEERS) == 0, "A has seen the round trip"
    picture.put(A, row(A, rtt_s=(None, 0.02)))
    assert picture.gaps(PEERS) == picture.gaps([A, B]) == 2
    assert LinkTable().gaps(PEERS) == 6
    assert LinkTable().gaps(PEERS, ((0, 2),)) == 4, "there is no way where no link is"


def test_a_way_is_known_by_what_its_ends_have() -> None:
    """From a few probes of each, or from what rounds have shown of its own links."""
    picture = full()
    for peer in PEERS:  # each has measured the one after it
        after = PEERS[(PEERS.index(peer) + 1) % 3]
        known = row(peer)
        out = tuple(RATES[peer, p] if p == after else None for p in known.peers)
        picture.put(peer, replace(known, out=out))
    assert picture.gaps(PEERS) == 0
    network = picture.network(PEERS)
    assert network.pair[0, 2] == math.inf
    assert network.alone_bytes_per_s()[0, 2] == min(RATES[A, B], RATES[B, C])
    describe(network)


def test_ends_are_known_by_rounds_caps_and_probes_that_lasted() -> None:
    picture = LinkTable()
    assert not picture.has_ends(PEERS)
    assert full().has_ends(PEERS), "probes that lasted are enough"
    for peer in PEERS:
        picture.put(peer, row(peer, out=(None, None), up=2e6, down=4e6))
    assert picture.gaps(PEERS) == 0
    assert picture.has_ends(PEERS)
    assert picture.network(PEERS).pair[0, 2] == 2e6, "so that it has a pace, as all others have"
    picture.put(A, row(A, out=(None, None), up=2e6))
    assert not picture.has_ends(PEERS)
    picture.put(A, row(A, out=(None, None), up=2e6, down_cap=1e6))
    assert picture.has_ends(PEERS)
    assert picture.network(PEERS).pair[1, 0] == 1e6
    assert has_changed(row(A, up=1e6), row(A, up=1.06e6)), "it was held back"
    assert not has_changed(row(A, up=1e6), row(A, up=0.94e6))


def test_of_bounds_ends_are_not_known_and_rounds_show_more() -> None:
    picture = full()
    picture.put(A, row(A, bounds=(B,)))
    assert not picture.has_ends(PEERS), "that C is slow says nothing of what else leaves A"
    picture.put(B, row(B, bounds=(A, C)))
    picture.put(C, row(C, bounds=(A,)))
    assert picture.network(PEERS).pair[0, 1] == RATES[A, B]
    picture.put(A, row(A, bounds=(B, C), up=9e6))
    picture.put(B, row(B, bounds=(A, C), down=8e6))
    assert picture.network(PEERS).pair[0, 1] == 8e6, "rounds have shown more than the bound"
    assert has_changed(row(A), row(A, bounds=(B,)))


def test_what_two_on_one_machine_have_says_nothing_of_their_ends() -> None:
    picture, near = LinkTable(), (LOCAL_BYTES_PER_S, 3e6)
    seen = [row(A, out=near, bounds=(C,)), row(B, out=near, bounds=(C,)), row(C, bounds=(A, B))]
    for peer, said in zip(PEERS, seen, strict=True):
        picture.put(peer, said)
    assert not picture.has_ends(PEERS)
    for peer, said in zip(PEERS, seen, strict=True):
        picture.put(peer, replace(said, up=12e6, down=12e6))
    assert picture.has_ends(PEERS)
    assert picture.network(PEERS).pair[0, 2] == 12e6, "and not what is within the machine"


def test_what_a_machine_has_within_says_nothing_of_its_link_to_others() -> None:
    picture = LinkTable()
    local = LOCAL_BYTES_PER_S
    picture.put(A, row(A, out=(local, 2e6)))
    picture.put(B, row(B, out=(local, None)))
    picture.put(C, row(C, out=(3e6, None), up=5e6))
    assert picture.gaps(PEERS) == 2, "from B to C and back: nobody has seen what its link has"
    network = picture.network(PEERS)
    assert network.pair[0, 1] == network.up[0] == local
    assert network.pair[1, 2] == 2e6, "what enters C"
    assert network.pair[2, 1] == 2.5e6, "as usual"
    picture.put(B, row(B, out=(local, None), up=1e6, down=4e6))
    network = picture.network(PEERS)
    assert (network.pair[1, 2], network.pair[2, 1]) == (1e6, 4e6)


def test_who_has_bbr_says_so() -> None:
    picture = full()
    assert picture.bbr([C, A, B]) == (False, False, False)
    picture.put(B, row(B, bbr=True))
    assert picture.bbr([C, A, B]) == (False, True, False)
    assert picture.bbr([b"x" * 32, B]) == (True, False), "who has no row has none"


def test_nothing_known_is_a_network_too() -> None:
    network = LinkTable().network(PEERS)
    assert np.isfinite(network.up).all()
    with pytest.raises(ConfigError):
        LinkTable().network([])


numbers = st.none() | st.floats(0, MEASURED_MAX) | st.just(MEASURED_MAX) | st.just(5e-324)
some_peers = st.lists(st.sampled_from([*PEERS, b"x" * 32]), max_size=4, unique=True)


@given(st.data())
def test_a_liar_is_bounded(data: st.DataObject) -> None:
    """Whatever passes the decoder gives a network that one can plan with."""
    picture = full()
    for liar in data.draw(st.sets(st.sampled_from(PEERS), min_size=1)):
        peers = tuple(data.draw(some_peers))
        values = st.lists(numbers, min_size=len(peers), max_size=len(peers)).map(tuple)
        rtt_s, out, loss = (data.draw(values) for _ in range(3))
        lie = LinkRow(peers, rtt_s, out, loss, up=data.draw(numbers), down=data.draw(numbers))
        picture.put(liar, lie)
    network = picture.network(PEERS)
    assert (network.up <= RATE_MAX_BYTES_PER_S).all()
    assert (network.latency_s <= LATENCY_MAX_S).all()
    assert (network.loss <= LOSS_MAX).all()
    choose(network, ReductionTask(1 << 20, 8.0))
    describe(network)


def test_one_line_for_people() -> None:
    line = describe(full().network(PEERS))
    assert line.startswith("6 links: 20 to 30 ms, 8 to 48 Mbit/s, ")
    assert describe(full().network([A])) == "no links"


# ---------------------------------------------------------------- news


def test_a_link_that_has_become_another_one_is_said_once() -> None:
    news, begin_s = LinkChanges(), PAUSE_S
    assert not news.about(A, LinkEstimate(rtt_s=0.02), -1e6), "its rate is still unknown"
    assert not news.about(A, LinkEstimate(0.2, 1e5), 0.0)
    assert not news.about(A, LinkEstimate(0.02, 1e6), begin_s - 1), "it is getting known"
    assert not news.about(A, LinkEstimate(0.03, 1.9e6), begin_s)
    line = news.about(A, LinkEstimate(0.05, 0.4e6), begin_s + 1)
    assert "rate from 8 Mbit/s to 3.2 Mbit/s" in line
    assert "round trip from 20 ms to 50 ms" in line
    assert not news.about(A, LinkEstimate(0.05, 0.4e6), begin_s + 1 + PAUSE_S)
    assert not news.about(A, LinkEstimate(0.05, 4e6), begin_s + PAUSE_S), "one line a minute"
    assert news.about(A, LinkEstimate(0.05, 4e6), begin_s + 2 + PAUSE_S)
    news.keep([])
    assert not news.about(A, LinkEstimate(0.02, 1e6), 1e6), "it has left and is new again"


def test_round_trips_within_a_building_are_no_news() -> None:
    news = LinkChanges()
    news.about(A, LinkEstimate(0.0001, 1e6), 0.0)
    assert not news.about(A, LinkEstimate(0.001, 1e6), 100.0)
    assert news.about(A, LinkEstimate(0.01, 1e6), 100.0)
