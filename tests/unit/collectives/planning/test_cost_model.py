"""The cost model against a simulation of the real schedules on shared lines, and by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from harness.chunk_sim import ChunkSim

from atoll.collectives.errors import ConfigError
from atoll.collectives.planning.cost_model import Rates, Shape, pairwise_cost, routes_cost
from atoll.collectives.planning.network_model import Network, measured, uniform
from atoll.collectives.planning.shards import butterfly_shards
from atoll.collectives.schedule.plan import EVERYONE, ReducePlan
from atoll.collectives.schedule.routes import Routes, hierarchical, ring, star, tree

MBIT_100 = 12.5e6
CHUNK = 2**18
RATES = Rates(frame_s=0.0)


def simulated_s(
    network: Network, routes: Routes, shards: Sequence[int], chunk_bytes: int = CHUNK
) -> float:
    n = network.count
    plan = ReducePlan(
        participants=tuple(i.to_bytes(2) for i in range(n)),
        weights=(1.0,) * n,
        owners=tuple(peer for peer, size in enumerate(shards) for _ in range(size)),
        shape=routes,
    )
    segments = 16 if len(plan.owners) <= 32 else 8
    sim = ChunkSim(
        network, plan, chunk_bytes, RATES.overhead, RATES.process_bytes_per_s, segments=segments
    )
    return sim.run()


def error(network: Network, routes: Routes, shards: Sequence[int]) -> float:
    """Model / simulation - 1."""
    cost = routes_cost(network, Shape(routes), shards, CHUNK, RATES)
    return cost.seconds / simulated_s(network, routes, shards) - 1


def sited(sites: int, members: int) -> Network:
    """1 Gbit/s and 0.2 ms inside a site, 100 Mbit/s and 20 ms between them."""
    n = sites * members
    site = [peer // members for peer in range(n)]
    latency = {
        (i, j): 0.0002 if site[i] == site[j] else 0.02 for i in range(n) for j in range(n) if i != j
    }
    lines = dict.fromkeys(range(sites), MBIT_100)
    return measured(
        n,
        up=[10 * MBIT_100] * n,
        down=[10 * MBIT_100] * n,
        latency_s=latency,
        sites=site,
        site_up=lines,
        site_down=lines,
    )


# (peers, chunks that each owns)
SIZES = [(2, 1), (2, 8), (3, 4), (4, 1), (4, 4), (4, 16), (8, 2), (8, 6), (16, 1), (16, 2)]
LARGE = [(24, 2), (32, 1)]


@pytest.mark.parametrize("latency_s", [0.001, 0.025, 0.05])
@pytest.mark.parametrize(("n", "each"), SIZES)
def test_butterflies_and_rings_on_equal_links_are_within_10_percent(
    n: int, each: int, latency_s: float
) -> None:
    network = uniform(n, MBIT_100, latency_s)
    for routes in (star(n), ring(range(n))):
        assert abs(error(network, routes, [each] * n)) < 0.10, routes.kind


@pytest.mark.parametrize(("n", "each"), LARGE)
def test_so_are_those_of_24_and_32_peers(n: int, each: int) -> None:
    network = uniform(n, MBIT_100, 0.025)
    for routes in (star(n), ring(range(n)), tree(n, 4)):
        assert abs(error(network, routes, [each] * n)) < 0.10, routes.kind


@pytest.mark.parametrize("each", [1, 2, 4])
@pytest.mark.parametrize(("sites", "members"), [(2, 2), (2, 4), (4, 2), (3, 3)])
def test_sites_are_within_10_percent(sites: int, members: int, each: int) -> None:
    network = sited(sites, members)
    n = network.count
    for routes in (hierarchical(network.sites), star(n), ring(range(n))):
        assert abs(error(network, routes, [each] * n)) < 0.10, routes.kind


@pytest.mark.parametrize("arity", [2, 3])
@pytest.mark.parametrize("n", [4, 8, 16])
def test_trees_of_one_owner_are_within_10_percent(n: int, arity: int) -> None:
    """What trees are for: a small payload that one peer owns."""
    network = uniform(n, MBIT_100, 0.025)
    for chunks in (1, 2, 4, 8):
        assert abs(error(network, tree(n, arity), [chunks] + [0] * (n - 1))) < 0.10


@pytest.mark.parametrize("n", [4, 8])
def test_trees_of_all_owners_are_within_16_percent(n: int) -> None:
    for latency_s in (0.0005, 0.01, 0.025, 0.05):
        network = uniform(n, MBIT_100, latency_s)
        for each in (1, 2, 4, 8):
            assert abs(error(network, tree(n, 2), [each] * n)) < 0.16


@pytest.mark.parametrize(("n", "each"), [(4, 16), (8, 16), (16, 4)])
def test_one_slow_peer_is_within_10_percent(n: int, each: int) -> None:
    """Of 16 with 64 chunks it waits for the first results longer than for most else."""
    rates = [MBIT_100] * (n - 1) + [MBIT_100 / 5]
    pairs = {(i, j): 0.025 for i in range(n) for j in range(n) if i != j}
    network = measured(n, up=rates, down=rates, latency_s=pairs, sites=range(n))
    shards = butterfly_shards(network, each * n)
    assert shards[-1] == 0
    assert abs(error(network, star(n), shards)) < 0.10
    # The split by rates is what makes it fast, in the simulation too.
    equal_s = routes_cost(network, Shape(star(n)), [each] * n, CHUNK, RATES).seconds
    assert simulated_s(network, star(n), shards) < 0.75 * equal_s
    assert abs(error(network, ring(range(n)), [each] * n)) < 0.10


@pytest.mark.parametrize(("n", "each"), [(3, 8), (4, 8), (8, 8), (16, 4)])
def test_where_every_rate_differs_the_model_is_rougher(n: int, each: int) -> None:
    """Measured over 30 networks of 3 to 10 peers with rates and ways at random: half within 7 %,
    the worst 26 %."""
    up = [MBIT_100 * (1 + i * 5 % 7) / 7 for i in range(n)]
    down = [MBIT_100 * (1 + i * 3 % 7) / 7 for i in range(n)]
    network = measured(n, up=up, down=down, sites=range(n))
    shards = butterfly_shards(network, each * n)
    assert abs(error(network, star(n), shards)) < 0.10
    assert abs(error(network, star(n), [each] * n)) < 0.10
    # However rough a prediction is: shards by rate are faster, as the schedules run them.
    assert simulated_s(network, star(n), shards) <= simulated_s(network, star(n), [each] * n)


def test_many_rates_by_hand() -> None:
    """A long reduction: only the busiest line counts, and it has a name."""
    rates = Rates(overhead=0.0, process_bytes_per_s=1e12, frame_s=0.0)
    network = measured(
        3,
        up=[1e6, 2e6, 4e6],
        down=[4e6, 4e6, 3e6],
        latency_s={(0, 1): 0.0, (0, 2): 0.0, (1, 2): 0.0},
        sites=range(3),
    )
    cost = routes_cost(network, Shape(star(3)), (10, 20, 30), 1000, rates)
    # Peer 0 sends 50 parts and 2 * 10 results; the last result comes half a chunk later.
    assert cost.lines_s == pytest.approx(0.0705)
    assert cost.busiest == "the uplink of {0}"
    slow = measured(3, up=[1e6] * 3, down=[1e6] * 3, pair={(2, 0): 1e4}, sites=range(3))
    # Peer 2 sends peer 0 its 10 parts, and 30 results.
    cost = routes_cost(slow, Shape(star(3)), (10, 20, 30), 1000, rates)
    assert cost.lines_s == pytest.approx(4.0, rel=0.01)
    assert cost.busiest == "the path from {2} to {0}"


def test_the_way_of_one_chunk_by_hand() -> None:
    rates = Rates(overhead=0.0, process_bytes_per_s=1e12, frame_s=0.001)
    network = uniform(4, 1e6, 0.01)
    hop_s = 0.01 + 0.002 + 0.001  # latency, both ends, 1000 bytes at 1 MB/s
    ways = {
        "butterfly": 2 * hop_s + 2 * 0.002,  # three chunks share the link of the owner
        "ring": 6 * hop_s,
    }
    for routes in (star(4), ring(range(4))):
        cost = routes_cost(network, Shape(routes), (1, 0, 0, 0), 1000, rates)
        assert cost.windows_s == pytest.approx(ways[routes.kind], rel=1e-4)


def test_noise_and_depth_of_shapes() -> None:
    assert Shape(star(8)).noise == pytest.approx(2 - 1 / 8)
    assert Shape(ring(range(8))).noise == pytest.approx(9 / 2)
    assert Shape(tree(7, 2)).noise == pytest.approx(1 + (2 * 1 + 4 * 2) / 7)
    assert Shape(hierarchical([0, 0, 1, 1])).depth == 2
    assert (Shape(star(8)).depth, Shape(ring(range(8))).depth) == (1, 7)


def test_more_of_anything_good_is_never_slower() -> None:
    slow, fast, near = (uniform(8, rate, lat) for rate, lat in ((1e6, 0.05), (2e6, 0.05), (1e6, 0)))
    for routes in (star(8), ring(range(8)), tree(8, 2)):
        shape = Shape(routes)
        base = routes_cost(slow, shape, [4] * 8, CHUNK, RATES).seconds
        for better in (fast, near):
            assert routes_cost(better, shape, [4] * 8, CHUNK, RATES).seconds <= base
        assert routes_cost(slow, shape, [5] * 8, CHUNK, RATES).seconds >= base


def test_pairwise_takes_one_way() -> None:
    network = uniform(2, 1e6, 0.05)
    rates = Rates(overhead=0.0, process_bytes_per_s=1e12, frame_s=0.0)
    assert pairwise_cost(network, 100, 10_000, rates).seconds == pytest.approx(1.05)
    with pytest.raises(ConfigError):
        pairwise_cost(uniform(3, 1e6, 0.05), 1, 1, rates)


@pytest.mark.parametrize("chunks", [1, 2, 3, 8, 33, 64])
@pytest.mark.parametrize("latency_s", [0.0002, 0.005, 0.05, 0.2])
@pytest.mark.parametrize("rate", [MBIT_100 / 10, MBIT_100, 10 * MBIT_100, 100 * MBIT_100])
def test_pairwise_is_within_10_percent(rate: float, latency_s: float, chunks: int) -> None:
    network = uniform(2, rate, latency_s)
    plan = ReducePlan((b"a", b"b"), (1.0, 1.0), (EVERYONE,) * chunks)
    segments = 32 if chunks <= 8 else 8  # in a short exchange each one is a part of the time
    sim = ChunkSim(
        network, plan, CHUNK, RATES.overhead, RATES.process_bytes_per_s, segments=segments
    )
    predicted_s = pairwise_cost(network, chunks, CHUNK, RATES).seconds
    assert predicted_s == pytest.approx(sim.run(), rel=0.1)


def test_nothing_costs_nothing_and_misfits_are_refused() -> None:
    assert routes_cost(uniform(1, 1e6, 0), Shape(star(1)), [5], CHUNK, RATES).seconds == 0
    assert routes_cost(uniform(3, 1e6, 0), Shape(star(3)), [0] * 3, CHUNK, RATES).seconds == 0
    for shards in ([1], [1, 1, -1]):
        with pytest.raises(ConfigError):
            routes_cost(uniform(3, 1e6, 0), Shape(star(3)), shards, CHUNK, RATES)
    with pytest.raises(ConfigError):
        Rates(overhead=1.0)


@pytest.mark.parametrize("latency_s", [0.001, 0.025, 0.05])
@pytest.mark.parametrize("shards", [(16, 0, 0, 0), (8, 8, 0, 0), (32, 0, 0, 0, 0, 0), (5, 6, 5, 0)])
def test_some_own_everything_because_others_have_no_links(
    shards: tuple[int, ...], latency_s: float
) -> None:
    """One owner of four: its link carries six times the vector, and is the limit."""
    n = len(shards)
    network = uniform(n, MBIT_100, latency_s)
    assert abs(error(network, star(n), shards)) < 0.10
    if shards.count(0) == n - 1:
        cost = routes_cost(network, Shape(star(n)), shards, CHUNK, RATES)
        wire = sum(shards) * CHUNK / (1 - RATES.overhead)
        assert cost.lines_s == pytest.approx((n - 1) * wire / MBIT_100, rel=0.05)
        assert "{0}" in cost.busiest
