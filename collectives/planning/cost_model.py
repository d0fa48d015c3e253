"""Predict how long one all-reduce takes on a network: the cost model for choosing a collective.

Theory
======

``n`` participants, ``c`` encoded bytes in a chunk, ``k[r]`` chunks that r owns. Every collective,
but the pairwise exchange, is two trees for each owner (``routes.py``), so one theory covers all of
them. Three limits:

**Lines.** Line ``l`` (an uplink, a downlink, a pair, the line of a site) carries ``F[l]`` bytes::

    F[i, j] = c * sum over r of k[r] * ([i sends parts for r to j] + [i sends results of r to j])
    lines_s = max over l of F[l] / rate[l], and of what a peer's processor has to do

Fair sharing does not change when a line has carried everything, so it is not needed here. Lines are
busy from the first moment to almost the last: what is added is the longest latency and the work on
the last chunk (``fill_s``). With equal links of rate R, B encoded bytes in all, equal shards::

    butterfly, ring, tree    2 B (n-1)/n / R     each sends 2 (n-1) chunks for one of every owner
    butterfly, share x       B (1 + (n-2) x) / R, see shards.py
    hierarchical             the line of a site carries 2 B (m-1)/m for m sites of equal size,
                             whatever the number of peers in them; a butterfly's n/m times that

**Ways.** The first chunk of every owner together are a *generation*. A part waits at each hop for
the parts that share its line in the same step; the *step* of a part is the height of the sender
in its tree, that of a result the depth of the receiver. With t = c / R, latency L, and p for the
work on a chunk at both ends of a hop::

    butterfly      2 (L + (n-1) t + p)
    ring           2 (n-1) (L + t + p)
    k-ary tree     2 D (L + ~k t + p), of depth D = log_k n
    hierarchical   4 (L + ... + p), or 3 where the owner's site has one member

**Windows.** A participant opens no more than ``lead`` chunks of an owner (rule 2 of ``tree.py``):
the next part leaves when the result of the one ``lead`` before is back at its sender, one *cycle*
later. A cycle is the way up and the way back down to the senders, so it is the whole way in a
butterfly and half of it in a ring. With the largest shard of k chunks in ``N = ceil(k / lead)``
windows::

    windows_s = (N - 1) * cycle + way + (chunks in the last window - 1) * slowest step

Where one chunk is open, a slowest peer that owns none sends parts and receives results on lines of
their own, and with several owners these fall out of step: the shorter of the two steps takes no
time of the cycle (``hidden_s``).

**Ends.** Streams to all owners share an uplink in turns, so the first part for every owner arrives
at about the same time. Until then no results come, and who owns little has nothing to receive. And
when its last part has left, the result of that is still to come. So, for each peer of a butterfly::

    downlink    F / rate, and the wait for the first result, less the parts that come before it
    uplink      F / rate, and the wait for the last result, less the results that leave meanwhile

With equal shards next to nothing is left of both. A slow one of 16 that owns none of 64 chunks has
15 of them on the way before the first result comes: 23 % more than its line alone takes.

**Together.** The time is the larger of ``lines_s + fill_s`` and ``windows_s``, and at least what
the ends say. Where windows overlap on the lines (a cycle shorter than the way), parts of one wait
behind results of another, and near where both limits are equal neither is reached. The loss:
``(a**q + b**q)**(1/q)`` with ``1/q = OVERLAP * (1 - cycle/way)``, less where links are uneven.
Trees, sites and uneven rings leave their busiest line idle while what it would carry is still under
way (``_idle``, TREE_OVERLAP, RING_LAPS).

**How far to trust it.** The constants are fitted to a simulation (``tests/harness/chunk_sim.py``)
that runs the real schedules over shared lines; ``tests/benchmarks/costs.py`` shows both beside each
other. For 2 to 32 peers the model is within 10 % of it for butterflies, rings and sites, on equal
links and with one slow peer; within 16 % for trees, but 19 % where a slow peer is inside of one.
Where every rate differs, by up to four times, half of the cases are within 7 %, but rings may take
15 % more than predicted, and butterflies with shards by rate 35 % more: rule 3 of ``tree.py``
keeps the parts for all owners at one pace, which suits equal shards. With one or two chunks for
each owner they may also take 30 % less: windows of uneven shards are rough then.

Everyone contributes here: a participant of weight 0 costs a little less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import ConfigError
from atoll.collectives.planning.network_model import F64, Network
from atoll.collectives.schedule.pair import pair_lead
from atoll.collectives.schedule.routes import ROOT, Routes
from atoll.collectives.schedule.schedule import chunks_ahead

# Share of what a link carries: TCP/IP over Ethernet takes 3.5 %, frames and records the rest.
LINK_OVERHEAD: Final = 0.04
# Encoded bytes that one processor encodes, or decrypts, checks, decodes and adds, per second:
# SHA-256 alone makes 1.8e9, encryption about 2e9 (measured on a shared server core).
PROCESS_BYTES_PER_S: Final = 1e9
# Time for each frame on each side, whatever its size: a system call, waking a thread, a lock.
FRAME_S: Final = 50e-6
# What a processor does with a chunk of a pairwise exchange: encode the own part, take in the
# other's, add the own one.
PAIRWISE_WORK: Final = 3
# See "Together" above.
OVERLAP: Final = 0.57
# In trees with several owners everyone is at another height for each, so lines stand idle for a
# part of the time, and most of all while the first chunks climb.
TREE_IDLE: Final = 0.3
TREE_IDLE_FIRST: Final = 1.2
TREE_OVERLAP: Final = 0.1  # the 1/q of "Together"
# With more than two sites the lines between them wait for the sums of all sites.
SITE_IDLE: Final = 0.75
# Where the links of a ring differ, the slowest edge has sent what it has and waits for the rest to
# come round: once per window, for the part of a lap by which the others are faster.
RING_LAPS: Final = 1.25
LAP_LATENCY: Final = 0.5  # share of the latency round the ring that is not waited for


I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rates:
    """Hold what a cost depends on beside the network.

    ``sum_bytes``: bytes of a chunk in float32, which with the encoded size limits the lead; 0: as
    encoded. Raises ConfigError for what cannot be.
    """

    overhead: float = LINK_OVERHEAD
    process_bytes_per_s: float = PROCESS_BYTES_PER_S
    frame_s: float = FRAME_S
    sum_bytes: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.overhead < 1 and self.process_bytes_per_s > 0 and self.frame_s >= 0):
            raise ConfigError(f"impossible rates of a cost model: {self}")


@dataclass(frozen=True, slots=True)
class Cost:
    """Hold the seconds of one all-reduce, what they are made of, and which line is the busiest.

    ``busiest`` has ``{0}`` for the first participant's name, and so on.
    """

    seconds: float
    lines_s: float
    windows_s: float
    busiest: str


def routes_cost(
    network: Network, shape: Shape, shards: Sequence[int], chunk_bytes: int, rates: Rates
) -> Cost:
    """Return the cost of reducing ``shards[r]`` chunks for each owner r.

    ``chunk_bytes``: encoded bytes of a chunk. Raises ConfigError if network, routes and shards are
    not of the same number of participants.
    """
    n = network.count
    if shape.count != n or len(shards) != n or min(shards) < 0 or chunk_bytes < 1:
        raise ConfigError(f"{n} peers, routes of {shape.count}, shards {list(shards)}")
    if n == 1 or not sum(shards):
        return Cost(0.0, 0.0, 0.0, "nothing")
    chunks = np.array(shards, dtype=np.int64)
    up, down = shape.up, shape.down
    wire = chunk_bytes / (1 - rates.overhead)
    work_s = chunk_bytes / rates.process_bytes_per_s + rates.frame_s

    flows = shape.flows(shards)
    lines_s, even, busiest = _lines(network, flows * wire, work_s, flows, up, chunks)
    most = int(chunks.max())
    lead = _lead(up, chunks, chunk_bytes, rates.sum_bytes or chunk_bytes)
    heights = up.heights
    # So many windows each owner's chunks take; in the later ones only large shards are left.
    windows = -(-chunks // lead)
    windows_s, ways_s, cycles_s, before = 0.0, 0.0, 0.0, 0
    for until in sorted(set(windows.tolist()) - {0}):
        generation = _generation(network, (up, down), heights, windows >= until, wire, 2 * work_s)
        hidden_s = generation.hidden_s if lead == 1 else 0.0
        windows_s += (until - before) * (generation.cycle_s - hidden_s)
        ways_s += (until - before) * generation.way_s
        cycles_s += (until - before) * generation.cycle_s
        before = until
    last = most - (before - 1) * lead
    windows_s += generation.way_s - generation.cycle_s + (last - 1) * generation.slowest_s
    windows_s += hidden_s  # nothing follows the last one

    lines_s += _idle(network, shape.kind, lines_s, even, chunks, heights, up)
    lap_s = shape.depth * float(network.latency_s[flows > 0].mean())
    laps_s = max(0.0, ways_s - cycles_s - LAP_LATENCY * before * lap_s)
    lines_s += RING_LAPS * laps_s * (1 - even)
    lines_s += float(network.latency_s[flows > 0].max()) + work_s
    overlap = OVERLAP * even * (1 - cycles_s / ways_s) if before > 1 else 0.0
    if shape.kind == "tree" and (chunks > 0).sum() > 1:
        overlap = max(overlap, TREE_OVERLAP)
    total = _together(lines_s, windows_s, overlap)
    ends_s = _ends(network, shape, chunks, lead, wire, 2 * work_s) if shape.depth == 1 else 0.0
    return Cost(max(total, ends_s), max(lines_s, ends_s), windows_s, busiest)


def pairwise_cost(network: Network, chunks: int, chunk_bytes: int, rates: Rates) -> Cost:
    """Return the cost of a pairwise exchange of so many chunks.

    Two peers send each other everything, and each adds it up for itself (``pair.py``). That takes
    ``B / R + L``, where a butterfly of two has ``B / R + 2 L`` and two thirds of the work. In each
    window one sends what the last one of the other allows, so over both ways by turns. Raises
    ConfigError unless there are two peers.

    Over 1,260 cases from 1 Mbit/s to 10 Gbit/s, 1 to 64 chunks, also of unequal links, half are
    within 1 % of the simulation and all but six, at 10 Gbit/s, within 10 %.
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


def _together(lines_s: float, windows_s: float, overlap: float) -> float:
    larger = max(lines_s, windows_s)
    if overlap <= 0:
        return larger
    shorter = min(lines_s, windows_s) / larger
    return larger * math.pow(1 + math.pow(shorter, 1 / overlap), overlap)


def _lines(
    network: Network, wire: F64, work_s: float, flows: F64, up: TreeArrays, chunks: I64
) -> tuple[float, float, str]:
    """Return the time of the busiest line, how even the peers' links are, and the line's name.

    The time is in seconds; even is mean / maximum. ``wire``: bytes that cross, headers included.
    """
    n = network.count
    sites = np.asarray(network.sites)
    across = np.where(network.across(), wire, 0)
    leaving = np.bincount(sites, across.sum(axis=1), len(network.site_up))
    entering = np.bincount(sites, across.sum(axis=0), len(network.site_down))
    # Each encodes an own part of every chunk, or a sum, and the results of its own; takes in all.
    encoded = chunks.sum() * np.ones(n)
    pairs = wire / network.pair
    src, dst = divmod(int(pairs.argmax()), n)
    found = [
        ("the uplink of", wire.sum(axis=1) / network.up),
        ("the downlink of", wire.sum(axis=0) / network.down),
        ("the line out of the site of", (leaving / network.site_up)[sites]),
        ("the line into the site of", (entering / network.site_down)[sites]),
        ("the CPU of", (encoded + flows.sum(axis=0)) * work_s),
    ]
    worst = [(float(times.max()), f"{name} {{{int(times.argmax())}}}") for name, times in found]
    worst.append((float(pairs.max()), f"the path from {{{src}}} to {{{dst}}}"))
    longest, name = max(worst, key=lambda entry: entry[0])
    links = np.maximum(found[0][1], found[1][1])
    return longest, float(links.mean() / links.max()), name


def _idle(
    network: Network,
    kind: str,
    lines_s: float,
    even: float,
    chunks: I64,
    heights: I64,
    up: TreeArrays,
) -> float:
    """Return the seconds that the busiest line stands idle, as what it would carry still climbs."""
    inner = (heights > 0) & (up.parents != ROOT)
    if (chunks > 0).sum() == 1 or not inner.any():
        return 0.0
    most = int(chunks.max())
    if kind == "tree":
        return lines_s * even * (TREE_IDLE + TREE_IDLE_FIRST / most) / network.count
    if kind == "hierarchical":
        sites = len(network.site_up)
        return lines_s * SITE_IDLE * max(0, sites - 2) / sites / most
    return 0.0


def _ends(
    network: Network, shape: Shape, chunks: I64, lead: int, wire: float, hop_s: float
) -> float:
    """Return the seconds of the slowest link of a peer in a butterfly, with what it waits for.

    See "Ends" above.
    """
    up, down, latency_s = shape.up, shape.down, network.latency_s
    carried = shape.flows(chunks.tolist()) * wire
    owners, last = np.flatnonzero(chunks), np.flatnonzero(chunks == chunks.max())
    parts_s = _steps(network, up.parents, up.heights, owners, wire, climbing=True)
    first_s = _climb(up, parts_s, latency_s, hop_s)[owners].min() + latency_s[owners].min(axis=0)
    results_s = _steps(network, down.parents, down.depth, last, wire, climbing=False)
    last_s = _descend(down, results_s, latency_s, hop_s)[last].max()
    last_s = last_s + latency_s[:, last].min(axis=1) + hop_s
    others = (network.count - 1) * wire
    before = others * np.minimum(chunks, lead) / network.down
    after = others * (chunks == chunks.max()) / network.up
    enter_s = carried.sum(axis=0) / network.down + np.maximum(0, first_s - before)
    leave_s = carried.sum(axis=1) / network.up + np.maximum(0, last_s - after)
    return float(max(enter_s.max(), leave_s.max()))


class _Generation(NamedTuple):
    way_s: float
    cycle_s: float
    slowest_s: float
    hidden_s: float  # part of the cycle, where windows follow each other


def _generation(
    network: Network,
    trees: tuple[TreeArrays, TreeArrays],
    heights: I64,
    owns: NDArray[np.bool_],
    wire: float,
    hop_s: float,
) -> _Generation:
    """Return the times of one chunk of each owner that ``owns`` names, together.

    See "Ways" and "Windows" above.
    """
    up, down = trees
    owners = np.flatnonzero(owns)
    parts_s = _steps(network, up.parents, heights, owners, wire, climbing=True)
    results_s = _steps(network, down.parents, down.depth, owners, wire, climbing=False)
    climb = _climb(up, parts_s, network.latency_s, hop_s)
    descent = _descend(down, results_s, network.latency_s, hop_s)
    leaves = (heights == 0) & (up.parents != ROOT)
    hides = up.depth.max() == 1 and not owns[parts_s.max(axis=0).argmax()]
    hidden = min(parts_s.max(), results_s.max()) * (1 - 1 / len(owners))
    return _Generation(
        way_s=float((climb + descent.max(axis=1))[owners].max()),
        cycle_s=float((climb + np.where(leaves, descent, 0).max(axis=1))[owners].max()),
        slowest_s=float(np.maximum(parts_s, results_s).max()),
        hidden_s=float(hidden) if hides else 0.0,
    )


def _steps(
    network: Network, parents: I64, level: I64, owners: I64, wire: float, *, climbing: bool
) -> F64:
    """Return the seconds that the transfer between p and its parent takes, float64[root, p].

    It shares its lines with the other transfers of its step. ``level`` names the step, and of each
    owner one chunk is on the way.
    """
    n = len(parents)
    sites = np.asarray(network.sites)
    roots, peers = np.nonzero(parents != ROOT)
    keep = np.isin(roots, owners)
    roots, peers = roots[keep], peers[keep]
    above = parents[roots, peers]
    src, dst = (peers, above) if climbing else (above, peers)
    step = level[roots, peers]
    steps = int(step.max()) + 1
    taken = np.zeros(len(src))

    def share(line: I64, rate: F64, apply: NDArray[np.bool_] | None = None) -> None:
        key = line * steps + step
        weights = None if apply is None else apply.astype(np.float64)
        together = np.bincount(key, weights)[key]
        times = together * wire / rate[line]
        np.maximum(taken, times if apply is None else np.where(apply, times, 0), out=taken)

    share(src, network.up)
    share(dst, network.down)
    share(src * n + dst, network.pair.reshape(-1))
    between = sites[src] != sites[dst]
    if between.any():
        share(sites[src], network.site_up, between)
        share(sites[dst], network.site_down, between)
    found = np.zeros((n, n))
    found[roots, peers] = taken
    return found


def _climb(trees: TreeArrays, steps_s: F64, latency_s: F64, hop_s: float) -> F64:
    """Return the seconds until the first chunk's sum is complete at the root, float64[root]."""
    n = len(steps_s)
    roots = np.arange(n)
    ready = np.zeros((n, n))
    for place in range(n - 1, 0, -1):
        here = trees.order[:, place]
        above = trees.parents[roots, here]
        at_s = ready[roots, here] + steps_s[roots, here] + latency_s[here, above] + hop_s
        ready[roots, above] = np.maximum(ready[roots, above], at_s)
    return ready[roots, roots]


def _descend(trees: TreeArrays, steps_s: F64, latency_s: F64, hop_s: float) -> F64:
    """Return the seconds from a root's complete sum until its result is at p, float64[root, p].

    Both are of the first chunk.
    """
    n = len(steps_s)
    roots = np.arange(n)
    found = np.zeros((n, n))
    for place in range(1, n):
        here = trees.order[:, place]
        above = trees.parents[roots, here]
        found[roots, here] = (
            found[roots, above] + steps_s[roots, here] + latency_s[above, here] + hop_s
        )
    return found


def _lead(up: TreeArrays, chunks: I64, part_bytes: int, sum_bytes: int) -> int:
    """Return how many chunks of an owner may be open, as ``lead_chunks`` finds it from a plan."""
    n = len(chunks)
    roots, peers = np.nonzero((up.parents != ROOT) & (chunks[:, None] > 0))
    children = np.zeros((n, n), dtype=np.int64)
    np.add.at(children, (roots, up.parents[roots, peers]), 1)
    open_bytes = int((children * part_bytes + (children > 0) * sum_bytes).sum(axis=0).max())
    return chunks_ahead(int(chunks.max()), open_bytes)


# ---------------------------------------------------------------- trees as arrays


class Shape:
    """Hold the two trees of each owner."""

    def __init__(self, routes: Routes) -> None:
        self.kind = routes.kind
        self.count = len(routes.up)
        self.up = TreeArrays.of(routes.up)
        self.down = self.up if routes.down is routes.up else TreeArrays.of(routes.down)

    @property
    def depth(self) -> int:
        """Return the steps that a part takes to its owner, at most."""
        return int(self.up.depth.max())

    @property
    def noise(self) -> float:
        """Return by how much the error of the mean exceeds that of one quantization, as a factor.

        For independent vectors. Each sum that is sent is quantized once, so a sum of s vectors adds
        ``s / n``, and the sizes of all sums add up to the depths of all participants; the result
        adds 1. The worst over all owners: (n+1)/2 for a ring, 2 - 1/n for a butterfly.
        """
        return float(self.up.depth.sum(axis=1).max()) / self.count + 1

    def flows(self, shards: Sequence[int]) -> F64:
        """Return the chunks that cross between two participants, float64[from, to].

        Root r owns ``shards[r]`` chunks; parts and results are counted.
        """
        found = np.zeros((self.count, self.count))
        chunks = np.asarray(shards, dtype=np.float64)
        for trees, climbing in ((self.up, True), (self.down, False)):
            roots, peers = np.nonzero(trees.parents != ROOT)
            above = trees.parents[roots, peers]
            np.add.at(found, (peers, above) if climbing else (above, peers), chunks[roots])
        return found


@dataclass(frozen=True)
class TreeArrays:
    """Hold one tree for each root, as int64[root, participant].

    ``parents``: ROOT for the root itself. ``depth``: steps to the root. ``order[r]``: the
    participants by depth in r's tree, r first.
    """

    parents: I64
    depth: I64
    order: I64

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> TreeArrays:
        parents = np.array(rows, dtype=np.int64)
        n = len(parents)
        hops = np.where(parents == ROOT, np.arange(n)[:, None], parents)
        depth = (parents != ROOT).astype(np.int64)
        # Each turn doubles how far up ``hops`` points; ``depth`` counts the steps to there.
        for _ in range(max(1, n - 1).bit_length()):
            depth = depth + np.take_along_axis(depth, hops, axis=1)
            hops = np.take_along_axis(hops, hops, axis=1)
        return cls(parents, depth, np.argsort(depth, axis=1, kind="stable"))

    @cached_property
    def heights(self) -> I64:
        """Return the steps from the farthest participant below p, int64[root, p]."""
        found = np.zeros_like(self.parents)
        roots = np.arange(len(found))
        for place in range(len(found) - 1, 0, -1):
            here = self.order[:, place]
            above = self.parents[roots, here]
            found[roots, above] = np.maximum(found[roots, above], found[roots, here] + 1)
        return found
