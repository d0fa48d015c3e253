"""How well the cost model predicts an all-reduce of 16 and 32 peers.

    python tests/benchmarks/costs.py [--peers 16 32] [--mib 4 64] [--codecs float32 int8]
        [--networks equal slow sites unequal]
    python tests/benchmarks/costs.py --real [--peers 16 32] [--mbit 20 10] [--real-mib 8]
        [--times 5]

The real schedules run in a simulation of lines that are shared (tests/harness/chunk_sim.py) beside
what ``routes_cost`` says, headers and the work on each chunk included in both. A row is one shape;
``chosen`` is what ``choose`` takes, with its own size of chunks. The bar is 10 % for every row.

    equal    100 Mbit/s and 25 ms one way, everywhere
    slow     the same, but one peer has a fifth of the rate
    sites    four sites with 1 Gbit/s inside and 100 Mbit/s out of each, 20 ms apart
    unequal  rates up and down from a seventh to the whole of 100 Mbit/s, each peer another

``--real``: the same question for engines and streams in network namespaces (wan.py, needs root), at
rates that one machine can carry for all: the processors of this one must not be what limits.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results
from harness.chunk_sim import ChunkSim

from atoll.collectives import get_codec, grid_for
from atoll.collectives.planning.choice import ReductionTask, choose
from atoll.collectives.planning.cost_model import (
    FRAME_S,
    LINK_OVERHEAD,
    PROCESS_BYTES_PER_S,
    Rates,
    Shape,
    routes_cost,
)
from atoll.collectives.planning.network_model import Network, measured, uniform
from atoll.collectives.planning.shards import butterfly_shards, equal_shards
from atoll.collectives.schedule.plan import ReducePlan
from atoll.collectives.schedule.routes import Routes, hierarchical, ring, star, tree

BAR = 0.10
RATE = 12.5e6  # 100 Mbit/s
LATENCY_S = 0.025
SITES = 4
NETWORKS = ("equal", "slow", "sites", "unequal")
ARITY = 4  # of trees
WAN = Path(__file__).with_name("wan.py")


@dataclass(frozen=True)
class Case:
    peers: int
    network: str
    codec: str
    mib: float
    shape: str


@dataclass(frozen=True)
class Row:
    case: Case
    label: str
    model_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        return self.model_s / self.simulated_s - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--mib", type=float, nargs="+", default=[4.0, 64.0], help="of float32")
    parser.add_argument("--codecs", nargs="+", default=["float32", "int8"])
    parser.add_argument("--networks", nargs="+", default=NETWORKS, choices=NETWORKS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--real", action="store_true", help="hosts of a lab instead")
    parser.add_argument("--mbit", type=float, nargs="+", default=[20.0, 10.0], help="with --real")
    parser.add_argument("--real-mib", type=float, default=8.0)
    parser.add_argument("--times", type=int, default=5, help="rounds, with --real")
    chosen = parser.parse_args()
    if chosen.real:
        real(chosen)
        return
    begun_s = time.monotonic()
    title = f"{'peers network  codec    MiB  shape':<65}"
    print(f"{title} model  simulated   error")
    rows = []
    with ProcessPoolExecutor(chosen.jobs, get_context("fork")) as pool:
        for row in pool.map(compared, list(cases(chosen))):
            rows.append(row)
            missed = "" if abs(row.error) < BAR else "  MISSED"
            case = row.case
            print(
                f"{case.peers:5} {case.network:<8} {case.codec:<8} {case.mib:3g}  {row.label:<34}"
                f" {row.model_s:7.3f} {row.simulated_s:10.3f} {row.error:+7.1%}{missed}",
                flush=True,
            )
    for network in chosen.networks:
        errors = [abs(row.error) for row in rows if row.case.network == network]
        good = sum(error < BAR for error in errors)
        print(f"{network}: {good} of {len(errors)} within {BAR:.0%}, worst {max(errors):.1%}")
    for peers in chosen.peers:
        of_these = [row for row in rows if row.case.peers == peers]
        picked = [row for row in of_these if row.case.shape == "chosen"]
        for name, found in ((f"{peers}/worst", of_these), (f"{peers}/chosen/worst", picked)):
            results.say(name, 100 * max(abs(row.error) for row in found), "%")
    print(f"{len(rows)} simulations in {time.monotonic() - begun_s:.0f} s")


def cases(chosen: argparse.Namespace) -> Iterator[Case]:
    for peers, network, codec, mib in itertools.product(
        chosen.peers, chosen.networks, chosen.codecs, chosen.mib
    ):
        shapes = ["butterfly", "ring", "tree", "chosen"]
        if network == "sites":
            shapes.insert(3, "hierarchical")
        for shape in shapes:
            yield Case(peers, network, codec, mib, shape)


def compared(case: Case) -> Row:
    network, elements = network_of(case), int(case.mib * 2**18)
    bits = 8 * get_codec(case.codec).encoded_bytes(elements) / elements
    task = ReductionTask(elements, bits)
    size = grid_for(elements).chunk_elements
    if case.shape == "chosen":
        choice = choose(network, task)
        routes, shards, size = choice.routes(), choice.shards, choice.chunk_elements
        label = f"chosen: {choice.kind}" + (f" of {choice.arity}" if choice.arity else "")
    else:
        routes, label = routes_of(case, network), case.shape
        by_rate = case.shape == "butterfly"
        shards = (butterfly_shards if by_rate else equal)(network, task.chunks(size))
    chunk_bytes = task.chunk_bytes(size)
    rates = Rates(LINK_OVERHEAD, PROCESS_BYTES_PER_S, FRAME_S, 4 * size)
    cost = routes_cost(network, Shape(routes), shards, chunk_bytes, rates)
    plan = ReducePlan(
        participants=tuple(i.to_bytes(2) for i in range(case.peers)),
        weights=(1.0,) * case.peers,
        owners=tuple(peer for peer, count in enumerate(shards) for _ in range(count)),
        shape=routes,
    )
    sim = ChunkSim(
        network,
        plan,
        chunk_bytes,
        LINK_OVERHEAD,
        PROCESS_BYTES_PER_S,
        frame_s=FRAME_S,
        sum_bytes=4 * size,
    )
    return Row(case, f"{label}, {len(plan.owners)} chunks", cost.seconds, sim.run())


def equal(network: Network, chunks: int) -> tuple[int, ...]:
    return equal_shards(network.count, chunks)


def routes_of(case: Case, network: Network) -> Routes:
    if case.shape == "ring":
        return ring(range(case.peers))
    if case.shape == "tree":
        return tree(case.peers, ARITY)
    return hierarchical(network.sites) if case.shape == "hierarchical" else star(case.peers)


def network_of(case: Case) -> Network:
    n, everyone = case.peers, range(case.peers)
    ways = {(i, j): LATENCY_S for i in everyone for j in everyone if i != j}
    if case.network == "equal":
        return uniform(n, RATE, LATENCY_S)
    if case.network == "slow":
        rates = [RATE] * (n - 1) + [RATE / 5]
        return measured(n, up=rates, down=rates, latency_s=ways, sites=everyone)
    if case.network == "unequal":
        up = [RATE * (1 + i * 5 % 7) / 7 for i in everyone]
        down = [RATE * (1 + i * 3 % 7) / 7 for i in everyone]
        return measured(n, up=up, down=down, latency_s=ways, sites=everyone)
    site = [peer * SITES // n for peer in everyone]
    ways = {(i, j): 0.0002 if site[i] == site[j] else 0.02 for i, j in ways}
    lines = dict.fromkeys(range(SITES), RATE)
    inside = [10 * RATE] * n
    return measured(
        n, up=inside, down=inside, latency_s=ways, sites=site, site_up=lines, site_down=lines
    )


def real(chosen: argparse.Namespace) -> None:
    """wan.py prints what the model says beside what was measured."""
    for peers, mbit in itertools.product(chosen.peers, chosen.mbit):
        command = [sys.executable, str(WAN), "--hosts", str(peers), "--mbit", str(mbit), "--plan"]
        command += ["--mib", str(chosen.real_mib), "--times", str(chosen.times), "--codecs"]
        subprocess.run([*command, *chosen.codecs], check=True)


if __name__ == "__main__":
    main()
