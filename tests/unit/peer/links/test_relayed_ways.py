"""Test what relays leave of ways, which plans use them, and how many bytes they carry."""

from __future__ import annotations

import numpy as np
import pytest
from harness.cluster import peer_id

from atoll.collectives.chunks import grid_for
from atoll.collectives.codecs import get_codec
from atoll.collectives.planning.choice import KINDS
from atoll.collectives.planning.network_model import Network, uniform
from atoll.peer.links.planner import RoundPlan, plan_rounds
from atoll.peer.links.relayed_ways import Pairs, RelayedWays, relayed_ways
from atoll.peer.membership.view import short
from atoll.peer.relay.choice import RelayChoice

MBIT = 125_000.0
ELEMENTS = 4 << 20
PEERS = tuple(sorted(map(peer_id, "abcd")))
R, S = peer_id("r"), peer_id("s")


def plan(
    network: Network,
    apart: Pairs = (),
    relayed: Pairs = (),
    rate: float = 20 * MBIT,
    kinds: tuple[str, ...] = KINDS,
) -> RoundPlan:
    peers = PEERS[: network.count]
    ways = relayed_ways(peers, relayed, {R: rate})
    grid, codec = grid_for(ELEMENTS), get_codec("int8")
    return plan_rounds(peers, network, grid, codec, kinds=kinds, apart=apart, relayed=ways)


def vector_bytes() -> int:
    return get_codec("int8").encoded_bytes(ELEMENTS)


def test_a_pair_meets_where_its_ends_say_it_does() -> None:
    pairs = tuple((n, m) for n in range(4) for m in range(n + 1, 4))
    ways = relayed_ways(PEERS, pairs, {R: MBIT, S: MBIT, PEERS[0]: 0.0})
    assert ways.all == pairs
    for relay, met in ways.pairs.items():
        for one, other in met:
            choice = RelayChoice(PEERS[one])
            assert choice.rank(PEERS[other], [R, S], 0.0)[0] == relay
    assert relayed_ways(PEERS, pairs, {}) == RelayedWays()


def test_two_through_a_relay_are_as_slow_as_it_and_it_carries_two_vectors_each_way() -> None:
    """R5: a relay carries 2 (n - 1) vectors: what comes in goes out again."""
    made = plan(uniform(2, 100 * MBIT, 0.025), relayed=((0, 1),))
    assert made.relayed_bytes[R] == pytest.approx(2 * vector_bytes(), rel=0.02)
    expected_s = 2 * vector_bytes() / (20 * MBIT)
    assert made.choice.predicted_s == pytest.approx(expected_s, rel=0.15)
    assert f"relay {short(R)} carries 8.5 MB of each round" in made.advice.layout.why


def test_three_outbound_ones_share_the_rate_of_their_relay() -> None:
    pairs = ((0, 1), (0, 2), (1, 2))
    made = plan(uniform(3, 100 * MBIT, 0.025), relayed=pairs)
    assert made.relayed_bytes[R] == pytest.approx(4 * vector_bytes(), rel=0.02)
    expected_s = 4 * vector_bytes() / (20 * MBIT)
    assert made.choice.predicted_s == pytest.approx(expected_s, rel=0.15)


def test_a_slow_relay_is_not_used_where_others_can_own_and_a_fast_one_is() -> None:
    four, butterfly = uniform(4, 100 * MBIT, 0.025), ("butterfly",)
    slow = plan(four, relayed=((2, 3),), rate=2 * MBIT, kinds=butterfly)
    assert not slow.relayed_bytes
    assert slow.advice.layout.shares[2:] == (0, 0)
    fast = plan(four, relayed=((2, 3),), rate=1000 * MBIT, kinds=butterfly)
    assert fast.relayed_bytes
    assert all(fast.advice.layout.shares)
    alone = plan(four, apart=((2, 3),), kinds=butterfly)
    assert fast.choice.predicted_s < alone.choice.predicted_s == slow.choice.predicted_s


def test_a_ring_leads_round_a_pair_that_is_relayed() -> None:
    made = plan(uniform(4, 100 * MBIT, 0.025), relayed=((2, 3),), rate=2 * MBIT, kinds=("ring",))
    assert made.advice.layout.kind == "ring"
    assert not made.advice.layout.crosses(((2, 3),))
    assert not made.relayed_bytes


def test_what_a_participant_relays_crosses_its_own_lines_twice() -> None:
    ways = relayed_ways(PEERS[:3], ((1, 2),), {PEERS[0]: 20 * MBIT})
    limited = ways.limit(uniform(3, 100 * MBIT, 0.025), PEERS[:3])
    assert limited.up[0] == limited.down[0] == 80 * MBIT
    assert limited.pair[1, 2] == limited.pair[2, 1] == 10 * MBIT
    assert np.isinf(limited.pair[0, 1])
