"""Plans of rounds from measured links: layouts, streams, paces; and when a plan is made again."""

from __future__ import annotations

import pytest

from atoll.collectives import get_codec, grid_for
from atoll.collectives.codecs import gathered_codec
from atoll.collectives.planning.network_model import Network, measured, uniform
from atoll.collectives.planning.pacing import LINK_SHARE
from atoll.peer.links.link_table import GROWN
from atoll.peer.links.messages import StreamPlan
from atoll.peer.links.planner import (
    CHANGE,
    LOSSY_SLACK,
    PACED_BYTES_PER_S_MAX,
    differs,
    plan_rounds,
)

PEERS = tuple(bytes([letter]) * 32 for letter in b"abcd")
MBIT = 125e3
GRID = grid_for(4 << 20)
INT8, FLOAT = get_codec("int8"), get_codec("float32")


def wide(
    *mbit: float, trip_ms: float = 50.0, loss: float = 0.0, sites: tuple[int, ...] = ()
) -> Network:
    count = len(mbit)
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    rates = [each * MBIT for each in mbit]
    return measured(
        count,
        up=rates,
        down=rates,
        pair={(i, j): min(rates[i], rates[j]) for i, j in pairs},
        latency_s=dict.fromkeys(pairs, trip_ms / 2e3),
        loss=dict.fromkeys(pairs, loss),
        sites=sites or range(count),
    )


def test_a_slow_peer_owns_nothing_and_paces_fit_every_link() -> None:
    network = wide(100, 100, 100, 20)
    plan = plan_rounds(PEERS, network, GRID, FLOAT)
    assert plan.advice.participants == PEERS
    layout = plan.advice.layout
    assert layout.kind == "butterfly"
    assert layout.shares[3] == 0
    assert sum(layout.shares) == GRID.count
    assert "too slow to hand out a part" in plan.advice.layout.why
    out = {peer: dict(zip(told.peers, told.pace, strict=True)) for peer, told in plan.told.items()}
    for index, peer in enumerate(PEERS):
        rate = float(network.up[index])
        limit = (1 + 1e-9) * LINK_SHARE * rate
        assert 0 < sum(out[peer].values()) <= limit
        assert sum(rates.get(peer, 0.0) for rates in out.values()) <= limit
    slow_in = sum(rates.get(PEERS[3], 0.0) for rates in out.values())
    assert slow_in > 0.9 * 20 * MBIT  # its line is kept full


def test_two_far_apart_exchange_everything_where_that_saves_a_way() -> None:
    peers, small = PEERS[:2], grid_for(100_000)
    plan = plan_rounds(peers, wide(100, 100, trip_ms=300), small, INT8)
    assert plan.advice.layout.kind == "pairwise"
    assert all(told.pace[0] > 0 for told in plan.told.values())
    large = plan_rounds(peers, wide(100, 100, trip_ms=10), GRID, INT8)
    assert large.advice.layout.kind == "butterfly"


def test_where_only_a_butterfly_will_do_nothing_else_is_planned() -> None:
    """No rings, trees or pairs, however fast; results may be as large as all parts together."""
    sites = wide(100, 100, 100, 100, sites=(0, 0, 1, 1))
    topk = get_codec("topk")
    for peers, network in ((PEERS[:2], wide(100, 100, trip_ms=300)), (PEERS, sites)):
        whole = gathered_codec(topk, (1.0,) * len(peers), "senders")
        plan = plan_rounds(peers, network, grid_for(100_000), whole, kinds=("butterfly",))
        assert plan.advice.layout.kind == "butterfly"
        assert "excluded by the task" in "; ".join(plan.choice.details)


def test_a_vector_of_one_chunk_has_an_owner_and_others_are_shared_out() -> None:
    advice = plan_rounds(PEERS, wide(100, 100, 100, 50), grid_for(10), FLOAT).advice
    assert sum(advice.layout.shares) == 1
    slow, *fast = reversed(advice.shares)
    assert 0 <= slow < min(fast)
    assert max(fast) < 0.4 * sum(advice.shares)


def test_a_way_that_nobody_has_measured_has_a_pace_where_the_others_do() -> None:
    """Give it its share of what both ends have: without a pace it would be in the others' way."""
    way, mbit_8 = {}, 8 * MBIT
    for i, j in ((0, 1), (1, 0), (0, 2), (2, 0), (1, 2)):
        way[i, j] = mbit_8
    plan = plan_rounds(PEERS[:3], measured(3, pair=way), GRID, FLOAT)
    pace = {
        (source, PEERS.index(peer)): rate
        for source, told in enumerate(plan.told.values())
        for peer, rate in zip(told.peers, told.pace, strict=True)
    }
    assert len(pace) == 6
    assert all(0 < each <= LINK_SHARE * mbit_8 for each in pace.values())


def test_what_only_probes_have_found_gives_no_paces_and_no_slightly_uneven_shares() -> None:
    for rates, is_even in (((100, 100, 85, 100), True), ((100, 100, 10, 100), False)):
        plan = plan_rounds(PEERS, wide(*rates), GRID, FLOAT, is_seen=False)
        assert all(told.pace == (0.0, 0.0, 0.0) for told in plan.told.values())
        shares = plan.advice.layout.shares
        assert (max(shares) - min(shares) <= 1) == is_even
    seen = plan_rounds(PEERS, wide(100, 100, 50, 100), GRID, FLOAT)
    assert seen.advice.layout.shares[2] < max(seen.advice.layout.shares) - 1
    even = plan_rounds(PEERS, wide(100, 100, 90, 100), GRID, FLOAT).advice.layout.shares
    assert max(even) - min(even) <= 1, "the model is right by less than that"
    others = plan_rounds(PEERS, wide(100, 100, 90, 100), GRID, FLOAT).advice.shares
    assert max(others) - min(others) <= 1, "nor for collectives, or when somebody is missing"


def test_in_the_first_rounds_only_large_differences_are_believed() -> None:
    for rates, is_even in (((100, 100, 60, 100), True), ((100, 100, 20, 100), False)):
        plan = plan_rounds(PEERS, wide(*rates), GRID, FLOAT, is_young=True)
        shares = plan.advice.layout.shares
        assert (max(shares) - min(shares) <= 1) == is_even
        assert any(rate > 0 for told in plan.told.values() for rate in told.pace)
    later = plan_rounds(PEERS, wide(100, 100, 60, 100), GRID, FLOAT).advice.layout.shares
    assert later[2] < max(later) - 1


def test_fast_links_have_no_pace() -> None:
    plan = plan_rounds(PEERS, uniform(4, 10 * PACED_BYTES_PER_S_MAX, 1e-4), GRID, INT8)
    assert all(told.pace == (0.0, 0.0, 0.0) for told in plan.told.values())
    assert all(told.streams == (1, 1, 1) for told in plan.told.values())


def test_lossy_paths_get_several_streams() -> None:
    plan = plan_rounds(PEERS, wide(100, 100, 100, 100, loss=0.005), GRID, FLOAT)
    assert all(min(told.streams) > 1 for told in plan.told.values())
    assert "streams" in "; ".join(plan.choice.reasons)


def test_losses_add_one_stream_where_the_sender_has_bbr() -> None:
    lossy = wide(100, 100, 100, 100, loss=0.005)
    plan = plan_rounds(PEERS, lossy, GRID, FLOAT, bbr=(True, True, True, False))
    *others, last = plan.told.values()
    assert all(told.streams == (2, 2, 2) and told.lossy == (True,) * 3 for told in others)
    assert min(last.streams) > 2
    assert all(told.pace == (0.0, 0.0, 0.0) for told in others)  # it has one of its own
    assert min(last.pace) > 0


@pytest.mark.parametrize("found", [0.4, 1.0])
def test_a_long_fat_path_has_several_streams_although_a_probe_had_one(found: float) -> None:
    """1 Gbit/s and 200 ms; what it finds is a part of one window in each round trip."""
    pair = dict.fromkeys(((0, 1), (1, 0)), found * 4 * 2**20 / 0.2)
    network = measured(2, pair=pair, latency_s=dict.fromkeys(pair, 0.1))
    plan = plan_rounds(PEERS[:2], network, grid_for(64 << 20), FLOAT)
    assert all(told.streams[0] > 1 for told in plan.told.values())


def test_only_where_losses_would_slow_a_stream_it_must_not_heed_them() -> None:
    clean = plan_rounds(PEERS, wide(100, 100, 100, 100), GRID, FLOAT)
    harmless = plan_rounds(PEERS, wide(100, 100, 100, 100, loss=1e-6), GRID, FLOAT)
    lossy = plan_rounds(PEERS, wide(100, 100, 100, 100, loss=0.005), GRID, FLOAT)
    for peer in PEERS:
        assert clean.told[peer].lossy == harmless.told[peer].lossy == (False,) * 3
        assert clean.told[peer].pace == harmless.told[peer].pace
        assert lossy.told[peer].lossy == (True,) * 3
        more = [LOSSY_SLACK * rate for rate in clean.told[peer].pace]
        assert lossy.told[peer].pace == pytest.approx(more)  # room for what is sent again


def test_sites_are_used_where_the_lines_between_them_are_slow() -> None:
    near, far = 0.0002, 0.05
    sites = (0, 0, 1, 1)
    pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
    network = measured(
        4,
        up=[1e9] * 4,
        down=[1e9] * 4,
        latency_s={(i, j): near if sites[i] == sites[j] else far for i, j in pairs},
        sites=sites,
        site_up={0: 10 * MBIT, 1: 10 * MBIT},
        site_down={0: 10 * MBIT, 1: 10 * MBIT},
    )
    layout = plan_rounds(PEERS, network, GRID, FLOAT).advice.layout
    assert layout.kind == "hierarchical"
    assert layout.order == sites
    assert layout.routes() is not None


@pytest.mark.parametrize("mbit", [(100, 100), (100, 90, 10), (5, 5, 5, 500)])
@pytest.mark.parametrize("codec", ["int4", "int8", "float32"])
def test_whatever_is_chosen_is_a_layout(mbit: tuple[float, ...], codec: str) -> None:
    peers = PEERS[: len(mbit)]
    plan = plan_rounds(peers, wide(*mbit), GRID, get_codec(codec))
    assert len(plan.advice.layout.shares) == len(peers)
    assert plan.told.keys() == set(peers)
    for peer, told in plan.told.items():
        assert isinstance(told, StreamPlan)
        assert set(told.peers) == set(peers) - {peer}


def test_small_changes_are_not_worth_another_plan() -> None:
    before = wide(100, 100, 20)
    assert not differs(before, wide(100 * (1 - CHANGE / 2), 100, 20))
    assert not differs(before, wide(100 * (1 + GROWN / 2), 100, 20))
    assert not differs(before, wide(100, 100, 20, trip_ms=52))
    assert not differs(before, wide(100, 100, 20, loss=0.0005))
    for other in (
        wide(100, 70, 20),
        wide(100, 100 * (1 + 2 * GROWN), 20),
        wide(100, 100, 20, trip_ms=90),
        wide(100, 100, 20, loss=0.01),
        wide(100, 100, 20, sites=(0, 0, 1)),
        wide(100, 100),
    ):
        assert differs(before, other)


def test_nobody_is_told_of_streams_to_whom_it_has_no_link() -> None:
    network = wide(100, 100, 100, 100)
    plan = plan_rounds(PEERS, network, GRID, FLOAT, kinds=("butterfly",), apart=((1, 2),))
    layout, advice = plan.advice.layout, plan.advice
    assert layout.shares[1] == layout.shares[2] == advice.shares[1] == advice.shares[2] == 0
    assert "have no link: " in layout.why
    for one, other in ((1, 2), (2, 1)):
        assert PEERS[other] not in plan.told[PEERS[one]].peers
        assert set(plan.told[PEERS[one]].peers) == {PEERS[0], PEERS[3]}
    assert not layout.crosses(((1, 2),))
