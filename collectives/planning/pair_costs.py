"""Predict how long a pairwise exchange takes; see ``costs.py`` for the other collectives.

Over 1,260 cases from 1 Mbit/s to 10 Gbit/s, 1 to 64 chunks, also of unequal links, half are within
1 % of the simulation (``tests/harness/chunk_sim.py``) and all but six, at 10 Gbit/s, within 10 %.
"""

from __future__ import annotations

from typing import Final

from atoll.collectives.errors import ConfigError
from atoll.collectives.planning.cost_model import Cost, Rates
from atoll.collectives.planning.network_model import Network
from atoll.collectives.schedule.pair import pair_lead

# What a processor does with a chunk of a pairwise exchange: encode the own part, take in the
# other's, add the own one.
PAIRWISE_WORK: Final = 3


def pairwise_cost(network: Network, chunks: int, chunk_bytes: int, rates: Rates) -> Cost:
    """Return the cost of a pairwise exchange of so many chunks.

    Two peers send each other everything, and each adds it up for itself (``pairs.py``). That takes
    ``B / R + L``, where a butterfly of two has ``B / R + 2 L`` and two thirds of the work. In each
    window one sends what the last one of the other allows, so over both ways by turns. Raises
    ConfigError unless there are two peers.
    """
    if network.count != 2:
        raise ConfigError(f"a pairwise exchange is between 2 peers, not {network.count}")
    rate = network.alone_bytes_per_s()
    work_s = chunk_bytes / rates.process_bytes_per_s + rates.frame_s
    lead = pair_lead(chunks, chunk_bytes, rates.sum_bytes or chunk_bytes)
    windows = -(-chunks // lead)
    last = chunks - (windows - 1) * lead
    ways = ((0, 1), (1, 0))
    # A thread encodes a chunk, then sends it; the other side takes it in and adds the own part.
    steps_s = [chunk_bytes / (1 - rates.overhead) / float(rate[way]) + work_s for way in ways]
    hops_s = [steps_s[n] + float(network.latency_s[way]) + 2 * work_s for n, way in enumerate(ways)]
    busy_s = PAIRWISE_WORK * chunks * work_s
    idle_s = max(hops_s) - PAIRWISE_WORK * work_s - (min(lead, chunks) - 1) * work_s
    costs = [Cost(busy_s + max(0.0, idle_s), busy_s, 0.0, "the CPUs")]
    for n, (i, j) in enumerate(ways):
        lines_s = hops_s[n] + (chunks - 1) * steps_s[n]
        turns_s = (windows + 1) // 2 * hops_s[n] + windows // 2 * hops_s[1 - n]
        windows_s = turns_s + (last - 1) * steps_s[n]
        costs.append(
            Cost(max(lines_s, windows_s), lines_s, windows_s, f"the path from {{{i}}} to {{{j}}}")
        )
    return max(costs, key=lambda cost: cost.seconds)
