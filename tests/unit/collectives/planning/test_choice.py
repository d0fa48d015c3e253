"""What is chosen, and why."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.collectives.planning.choice import (
    KINDS,
    LOSS_ROOM,
    LOSSY_STREAMS_MIN,
    WINDOW_ROOM,
    Choice,
    ReductionTask,
    choose,
    stream_bytes_per_s,
    streams_for,
)
from atoll.collectives.planning.network_model import Network, measured, uniform
from atoll.collectives.schedule.plan import EVERYONE, STREAMS_MAX, ReducePlan

MBIT_100 = 12.5e6
ELEMENTS = 16 * 2**20
FLOAT32 = ReductionTask(ELEMENTS, 32)
INT8 = ReductionTask(ELEMENTS, 8.125)
INT4 = ReductionTask(ELEMENTS, 4.5)


def pairs(n: int, value: float) -> dict[tuple[int, int], float]:
    return {(i, j): value for i in range(n) for j in range(n) if i != j}


def bad_paths(n: int = 6) -> Network:
    """Everyone at 100 Mbit/s, but from each to the one after the next nearly nothing passes."""
    slow = {(i, (i + 2) % n): 2e5 for i in range(n)}
    rates = [MBIT_100] * n
    return measured(n, up=rates, down=rates, pair=slow, latency_s=pairs(n, 0.005), sites=range(n))


def sited(sites: int = 4, members: int = 4) -> Network:
    n = sites * members
    site = [peer // members for peer in range(n)]
    latency = {(i, j): 0.0002 if site[i] == site[j] else 0.02 for i, j in pairs(n, 0)}
    lines = dict.fromkeys(range(sites), MBIT_100)
    rates = [10 * MBIT_100] * n
    return measured(n, up=rates, down=rates, latency_s=latency, site_up=lines, site_down=lines)


def test_equal_links_have_a_butterfly_of_equal_shards() -> None:
    choice = choose(uniform(4, MBIT_100, 0.025), FLOAT32)
    assert choice.kind == "butterfly"
    assert len(set(choice.shards)) == 1
    # 2 (n-1)/n of 64 MiB, with headers, and hardly more
    assert choice.predicted_s == pytest.approx(1.5 * 2**26 / 0.96 / MBIT_100, rel=0.02)
    assert choice.streams == ()


def test_a_slow_peer_owns_nothing_and_the_reasons_say_so() -> None:
    rates = [MBIT_100] * 3 + [MBIT_100 / 5]
    network = measured(4, up=rates, down=rates, latency_s=pairs(4, 0.025))
    for task in (FLOAT32, INT4):
        choice = choose(network, task)
        assert choice.kind == "butterfly"
        assert choice.shards[3] == 0
        slow = "too slow to hand out a part of the result to all others: d"
        assert slow in choose(network, task, "abcd").reasons
    # Its line alone takes 28.0 s; the first results come when it has sent a chunk to each owner.
    assert choose(network, FLOAT32).predicted_s == pytest.approx(28.3, abs=0.1)


def test_bad_paths_are_gone_round_by_a_ring_if_the_codec_allows() -> None:
    network = bad_paths()
    for task in (FLOAT32, INT8):
        choice = choose(network, task)
        assert choice.kind == "ring"
        after = (*choice.order[1:], choice.order[0])
        assert all((b - a) % 6 != 2 for a, b in zip(choice.order, after, strict=True))
        assert any("in the order 0, " in reason for reason in choice.reasons)
    assert choose(network, INT4).kind != "ring"
    assert any(r.startswith("ring left out: 4.5 bits") for r in choose(network, INT4).details)


def test_sites_have_a_hierarchical_one_also_at_4_bits() -> None:
    for task in (FLOAT32, INT4):
        choice = choose(sited(), task)
        assert choice.kind == "hierarchical"
        assert choice.sites == (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)
        assert choice.noise == pytest.approx(2.5)
        assert choice.reasons[0].endswith(", limited by the line out of the site of 0")


def test_few_bytes_to_many_peers_have_a_tree() -> None:
    choice = choose(uniform(96, MBIT_100, 0.001), ReductionTask(4000, 32))
    assert choice.kind == "tree"
    assert choice.arity in (2, 3, 4, 8)
    assert sum(choice.shards) == 1


@pytest.mark.parametrize("network", [bad_paths(), sited(), uniform(96, MBIT_100, 0.001)])
def test_robust_aggregation_has_a_butterfly_whatever_it_costs(network: Network) -> None:
    choice = choose(network, ReductionTask(4000, 32, robust=True))
    assert choice.kind == "butterfly"
    assert any("every contribution" in detail for detail in choice.details)


def test_small_gains_are_within_the_models_error() -> None:
    choice = choose(uniform(2, MBIT_100, 0.025), ReductionTask(600_000, 32))
    assert choice.kind == "butterfly"
    assert any("within the model's error" in detail for detail in choice.details)
    # One long round trip for few bytes is another matter.
    choice = choose(uniform(2, MBIT_100, 0.1), ReductionTask(4000, 32))
    assert choice.kind == "pairwise"
    assert choice.predicted_s < 0.11
    assert set(choice.owners()) == {EVERYONE}
    assert choice.noise == 1.0, "one quantization of each part, and none of the mean"


def test_a_pairwise_exchange_has_the_streams_that_its_bytes_need() -> None:
    network = measured(
        2,
        up=[MBIT_100] * 2,
        down=[MBIT_100] * 2,
        latency_s=pairs(2, 0.1),
        loss=pairs(2, 1e-3),
    )
    choice = choose(network, ReductionTask(2**18, 32))
    assert choice.kind == "pairwise"
    one = stream_bytes_per_s(0.2, 1e-3)
    count = math.ceil(LOSS_ROOM * 2**20 / 0.96 / choice.predicted_s / one)
    assert choice.streams == ((0, 1, count), (1, 0, count))
    assert count > 1


def test_what_a_task_excludes_is_not_chosen() -> None:
    choice = choose(bad_paths(), ReductionTask(ELEMENTS, 32, kinds=("butterfly", "tree")))
    assert choice.kind in ("butterfly", "tree")
    assert "ring left out: excluded by the task" in choice.details


def test_8_bits_have_no_ring_of_more_than_32() -> None:
    network = bad_paths(33)
    assert any("too much noise over 33" in detail for detail in choose(network, INT8).details)


def test_what_one_stream_carries() -> None:
    # 4 MiB of buffer in 50 ms; 17.3 packets of 1448 bytes at 0.5 % loss
    assert stream_bytes_per_s(0.05, 0) == pytest.approx(4 * 2**20 / 0.05)
    assert stream_bytes_per_s(0.05, 0.005) == pytest.approx(17.32 * 1448 / 0.05, rel=1e-3)
    # Cubic's window is the larger one on long paths with little loss: 1.054 * (0.3/1e-4)^0.75
    assert stream_bytes_per_s(0.3, 1e-4) == pytest.approx(427.2 * 1448 / 0.3, rel=1e-3)
    assert stream_bytes_per_s(0, 0.01) == float("inf")


def test_lossy_and_long_fat_pairs_have_several_streams() -> None:
    rates = [MBIT_100] * 4
    lossy = measured(
        4, up=rates, down=rates, latency_s=pairs(4, 0.025), loss={(0, 1): 0.005}, sites=range(4)
    )
    # A third of 100 Mbit/s, of which one stream carries 4 Mbit/s.
    assert choose(lossy, FLOAT32).streams == ((0, 1, STREAMS_MAX),)
    assert choose(lossy, ReductionTask(ELEMENTS, 32, streams_max=3)).streams == ((0, 1, 3),)
    fat = uniform(2, 1.25e9, 0.05)
    assert {count for _, _, count in choose(fat, ReductionTask(2**28, 32)).streams} == {STREAMS_MAX}


def test_losses_add_a_second_stream_where_the_sender_has_bbr_and_no_more() -> None:
    rates, loss = [MBIT_100] * 4, {(0, 1): 0.005, (1, 0): 0.005, (2, 3): 1e-7}
    lossy = measured(4, up=rates, down=rates, latency_s=pairs(4, 0.025), loss=loss, sites=range(4))
    choice = choose(lossy, ReductionTask(ELEMENTS, 32, bbr=(True, False, True, True)))
    assert choice.streams == ((0, 1, LOSSY_STREAMS_MIN), (1, 0, STREAMS_MAX))
    both = choose(lossy, ReductionTask(ELEMENTS, 32, bbr=(True,) * 4))
    assert both.streams == ((0, 1, LOSSY_STREAMS_MIN), (1, 0, LOSSY_STREAMS_MIN))
    assert any("50 ms one carries at most 671 Mbit/s" in reason for reason in both.reasons)
    with pytest.raises(ConfigError):
        choose(lossy, ReductionTask(ELEMENTS, 32, bbr=(True,) * 3))


@given(st.floats(1e3, 1e10), st.floats(0, 1), st.floats(0, 0.5) | st.just(0.0), st.booleans())
def test_streams_have_room_for_more_than_they_are_asked_for(
    rate: float, trip_s: float, loss: float, bbr: bool
) -> None:
    count = streams_for(rate, trip_s, loss, bbr=bbr)
    assert count >= 1
    assert count * stream_bytes_per_s(trip_s, 0.0) >= WINDOW_ROOM * rate * (1 - 1e-9)
    assert count >= streams_for(rate, trip_s, 0.0, bbr=bbr)
    if not bbr:
        assert count * stream_bytes_per_s(trip_s, loss) >= LOSS_ROOM * rate * (1 - 1e-9)
    elif count < LOSSY_STREAMS_MIN:
        assert stream_bytes_per_s(trip_s, loss) >= rate, "even one that heeds losses would do"


def test_a_long_fat_path_is_filled_by_and_by_from_what_one_stream_has_shown() -> None:
    """1 Gbit/s and 200 ms. A probe over one stream shows a half of what its window carries, whose
    buffer the kernel does not use for payload alone; rounds show what their streams carry."""
    path, trip_s, used = 125e6, 0.2, 0.6
    one = used * stream_bytes_per_s(trip_s, 0.0)
    known, counts = one / 2, []
    for _ in range(5):
        network = measured(2, pair=pairs(2, known), latency_s=pairs(2, trip_s / 2))
        planned = choose(network, ReductionTask(2**26, 32, kinds=("butterfly",)))
        (count,) = {count for _, _, count in planned.streams}
        counts.append(count)
        known = max(known, min(path, count * one))
    assert known == path
    assert counts == sorted(counts)
    assert counts[0] > 1


@settings(max_examples=40)
@given(
    n=st.integers(1, 9),
    rates=st.lists(st.floats(1e5, 1e9), min_size=18, max_size=18),
    elements=st.integers(1, 2**22),
    bits=st.sampled_from([0.3, 2.125, 4.5, 8.125, 16, 32]),
    robust=st.booleans(),
    sites=st.lists(st.integers(0, 2), min_size=9, max_size=9),
)
def test_every_choice_makes_a_plan_and_keeps_the_rules(
    n: int, rates: list[float], elements: int, bits: float, robust: bool, sites: list[int]
) -> None:
    lines = dict.fromkeys(range(3), 1e6)
    network = measured(n, up=rates[:n], down=rates[9 : 9 + n], sites=sites[:n], site_up=lines)
    task = ReductionTask(elements, bits, robust=robust)
    choice = choose(network, task)
    assert choice == choose(network, task)
    plan = ReducePlan(
        tuple(bytes([i]) for i in range(n)), (1.0,) * n, choice.owners(), choice.routes()
    )
    assert len(plan.owners) == -(-elements // choice.chunk_elements)
    assert choice.reasons[0].startswith(choice.kind)
    if robust:
        assert choice.kind == "butterfly"
    if bits < 8:
        assert choice.kind != "ring"
        assert choice.noise <= 3
    check_shape(choice)


def check_shape(choice: Choice) -> None:
    assert choice.kind in KINDS
    assert (choice.kind == "ring") == bool(choice.order)
    assert (choice.kind == "tree") == bool(choice.arity)
    assert (choice.kind == "hierarchical") == bool(choice.sites)
    assert len(choice.shards) == choice.count


def test_a_given_chunk_size_is_kept() -> None:
    choice = choose(
        uniform(4, MBIT_100, 0.025), ReductionTask(ELEMENTS, 32, chunk_elements=262_144)
    )
    assert choice.chunk_elements == 262_144
    assert sum(choice.shards) == 64


def test_impossible_tasks_are_refused() -> None:
    for task in ({"elements": 0}, {"bits": 0}, {"chunk_elements": 2**30}, {"kinds": ("star",)}):
        with pytest.raises(ConfigError):
            ReductionTask(**{"elements": 10, "bits": 32, **task})  # type: ignore[arg-type]


# ---------------------------------------------------------------- pairs without a link


def crossed(choice: Choice, *apart: tuple[int, int]) -> bool:
    owners = [peer for peer, size in enumerate(choice.shards) if size]
    return choice.kind != "pairwise" and choice.routes().crosses(apart, owners)


def test_who_lacks_a_link_owns_nothing_and_the_reasons_say_so() -> None:
    task = replace(FLOAT32, apart=((1, 2),), kinds=("butterfly",))
    choice = choose(uniform(4, MBIT_100, 0.025), task, "abcd")
    assert choice.kind == "butterfly"
    assert choice.shards[1] == choice.shards[2] == 0
    assert choice.shards[0] == choice.shards[3]
    assert "b and c have no link: a and d own the result" in choice.reasons
    assert not any("too slow" in reason for reason in choice.reasons)
    # Two owners of four: twice the vector crosses each of their links, and not one and a half.
    assert choice.predicted_s == pytest.approx(2 * 2**26 / 0.96 / MBIT_100, rel=0.05)


def test_the_only_one_with_all_links_owns_everything() -> None:
    apart = ((1, 2), (1, 3), (2, 3))
    choice = choose(uniform(4, MBIT_100, 0.025), replace(FLOAT32, apart=apart), "abcd")
    assert choice.shards[1:] == (0, 0, 0)
    assert "a owns the result" in "; ".join(choice.reasons)
    assert choice.predicted_s == pytest.approx(3 * 2**26 / 0.96 / MBIT_100, rel=0.05)
    with pytest.raises(ConfigError, match="none of 3 peers"):
        choose(uniform(3, MBIT_100, 0.025), replace(FLOAT32, apart=((0, 1), (0, 2))))


def test_shapes_are_taken_where_each_of_their_edges_is_a_link() -> None:
    """A ring leads round the missing link, and then nobody carries more than with all links."""
    four = choose(uniform(4, MBIT_100, 0.025), replace(FLOAT32, apart=((1, 2),)), "abcd")
    assert four.kind == "ring"
    assert not crossed(four, (1, 2))
    assert four.predicted_s == pytest.approx(1.5 * 2**26 / 0.96 / MBIT_100, rel=0.1)
    assert "b and c have no link: nothing goes between them" in four.reasons
    ring = choose(bad_paths(), replace(FLOAT32, apart=((0, 3),)))
    assert ring.kind == "ring"
    assert not crossed(ring, (0, 3))
    assert all(ring.shards)
    plain = choose(sited(), INT8)
    assert plain.kind == "hierarchical"
    within = choose(sited(), replace(INT8, apart=((0, 1),)))
    assert not crossed(within, (0, 1))


@settings(max_examples=40)
@given(
    n=st.integers(3, 7),
    lacking=st.sets(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=6),
    bits=st.sampled_from([4.5, 8.125, 32.0]),
    latency_s=st.sampled_from([0.001, 0.05]),
)
def test_nothing_goes_where_no_link_is(
    n: int, lacking: set[tuple[int, int]], bits: float, latency_s: float
) -> None:
    apart = tuple(sorted({(min(p), max(p)) for p in lacking if p[0] != p[1] and max(p) < n}))
    task = ReductionTask(ELEMENTS, bits, apart=apart)
    choice = choose(uniform(n, MBIT_100, latency_s), task)
    assert sum(choice.shards) > 0
    assert not crossed(choice, *apart)
    assert not {(s, t) for s, t, _ in choice.streams if (min(s, t), max(s, t)) in apart}
