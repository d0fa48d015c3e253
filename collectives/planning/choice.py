"""Choose the collective and its shape: the fastest that the cost model knows and the codec allows.

Pure: the coordinator calls ``choose`` with what was measured, and writes the answer into its plan.

What may not be chosen, however fast:

    robust aggregation      anything but the butterfly: partial sums hide who contributed what
    4 bits and less         rings, and trees deeper than two levels. Each level quantizes the sums
                            again; with relative error w per quantization of independent vectors,
                            the mean has (n+1)/2 w after a ring, 2 w after a butterfly, 3 w with
                            one level between (``noise``), and w is 0.01 to 0.02 at 4 bits
    8 bits                  rings of more than 32: 17 w, with w = 5e-5
    more than two peers     pairwise exchange

The butterfly is taken unless another is faster by more than what the model may be wrong by: it has
the least noise, and a death costs it the least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from atoll.collectives.chunks import (
    CHUNK_ELEMENTS_MAX,
    CHUNK_ELEMENTS_MIN,
    ChunkGrid,
    grid_for,
)
from atoll.collectives.codecs import Decoder
from atoll.collectives.errors import ConfigError
from atoll.collectives.planning.cost_model import Cost, Rates, Shape, pairwise_cost, routes_cost
from atoll.collectives.planning.network_model import Network
from atoll.collectives.planning.ring_order import best_tour
from atoll.collectives.planning.shards import butterfly_shards, equal_shards, shared_equally
from atoll.collectives.schedule.plan import EVERYONE, STREAMS_MAX
from atoll.collectives.schedule.routes import Routes, hierarchical, ring, star, tree
from atoll.collectives.units import duration, listed, rate

KINDS: Final = ("butterfly", "ring", "tree", "hierarchical", "pairwise")
ARITIES: Final = (2, 3, 4, 8)
ARITIES_MANY: Final = (4,)
# Below 8 bits a quantization loses 1 % and more of the values: one level of partial sums at most.
WHOLE_BITS_MIN: Final = 8
DEPTH_COARSE_MAX: Final = 2
RING_8_BIT_PEERS_MAX: Final = 32  # relative error below 1e-3
EXACT_BITS_MIN: Final = 16  # from here on the noise of partial sums does not matter
# With more peers a ring is not ordered, since that takes seconds, and fewer shapes are tried.
SEARCH_PEERS_MAX: Final = 128
# By how much another must be faster than the butterfly: what the model may be wrong by.
MARGIN: Final = 0.10
# By how much another split must be faster than equal parts: the model is least right where parts
# differ.
UNEVEN_MARGIN: Final = 0.15
# Chunk sizes that are tried: the grid's, and halves of it down to a quarter.
HALVINGS: Final = 2
SEGMENT_BYTES: Final = 1448  # payload of a full TCP packet over Ethernet
# What systems let a socket's buffer grow to unasked: one stream has no more on the way.
SOCKET_BUFFER_BYTES: Final = 4 * 2**20
# The streams of a pair should be able to carry more than they are to: see ``streams_for``.
# So much more by their windows: kernels keep room in a socket's buffer for what is no payload, and
# a probe over one stream ends before a large window is open, so that it finds a half of
# ``stream_bytes_per_s``.
WINDOW_ROOM: Final = 4
LOSS_ROOM: Final = 2  # more by what losses leave of them: the formula is a rough one
LOSSY_STREAMS_MIN: Final = 2  # with BBR: one that stands still after a loss is not the pair's end
REASONS_MAX: Final = 24
PAIRS_SHOWN: Final = 4  # without a link, in what people read
NO_LINK_S: Final = 1e9  # of a step of a ring where no link is: any other tour is taken
PAIRWISE_NOISE: Final = 1.0  # see ``Shape.noise``: the mean is not encoded again


@dataclass(frozen=True, slots=True)
class ReductionTask:
    """Describe what is to be reduced, and what may be chosen for it.

    ``bits``: encoded bits per element, scales included. ``chunk_elements``: 0 leaves the size to
    the choice. ``kinds``: what may be chosen from; the butterfly always may. ``bbr``: by
    participant, whether losses do not slow its streams; empty if they slow all. ``apart``: the
    pairs of participants without a link, in ascending order; nothing may go between them.
    ``uneven_margin``: by how much another split must be faster than equal parts. Raises ConfigError
    for what cannot be.
    """

    elements: int
    bits: float
    robust: bool = False
    chunk_elements: int = 0
    kinds: tuple[str, ...] = KINDS
    rates: Rates = field(default_factory=Rates)
    streams_max: int = STREAMS_MAX
    bbr: tuple[bool, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()
    uneven_margin: float = UNEVEN_MARGIN

    def __post_init__(self) -> None:
        if self.elements < 1 or not 0 < self.bits <= 64:
            raise ConfigError(f"{self.elements} elements of {self.bits} bits cannot be reduced")
        if not 0 <= self.chunk_elements <= CHUNK_ELEMENTS_MAX:
            raise ConfigError(f"chunks of {self.chunk_elements} elements")
        if not set(self.kinds) <= set(KINDS) or self.streams_max < 1:
            raise ConfigError(f"kinds {self.kinds}, at most {self.streams_max} streams")

    def chunk_bytes(self, chunk_elements: int) -> int:
        """Return the encoded bytes of a whole chunk."""
        return max(1, math.ceil(min(chunk_elements, self.elements) * self.bits / 8))

    def chunks(self, chunk_elements: int) -> int:
        return -(-self.elements // chunk_elements)

    def owners(self, count: int) -> tuple[int, ...]:
        """Return who of so many participants may own parts: those with a link to each other one.

        Raises ConfigError if that is nobody.
        """
        lacking = {peer for pair in self.apart for peer in pair}
        found = tuple(peer for peer in range(count) if peer not in lacking)
        if not found:
            raise ConfigError(f"none of {count} peers has links to all others")
        return found

    def has_owners(self, count: int) -> bool:
        """Return whether one of so many participants has a link to each other one."""
        return len({peer for pair in self.apart for peer in pair}) < count

    def has_bbr(self, peer: int) -> bool:
        return self.bbr[peer] if self.bbr else False


def task_of(
    grid: ChunkGrid,
    codec: Decoder,
    *,
    kinds: tuple[str, ...] = KINDS,
    bbr: tuple[bool, ...] = (),
    apart: tuple[tuple[int, int], ...] = (),
) -> ReductionTask:
    """Return the task of reducing a vector of this grid to a result in this codec.

    The cost model knows one size of chunks: the mean of a part's and a result's, so that each line
    carries the right sum of both, of equal shares.
    """
    both = codec.part_codec.encoded_bytes(grid.total) + codec.encoded_bytes(grid.total)
    return ReductionTask(
        grid.total,
        8 * both / 2 / grid.total,
        chunk_elements=grid.chunk_elements,
        kinds=kinds,
        bbr=bbr,
        apart=apart,
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """Describe the collective that was chosen. Participants are indices, as in the plan.

    ``order``: of a ring, else empty. ``arity``: of a tree, else 0. ``sites``: of a hierarchical
    one, else empty. ``shards``: the number of chunks that each owns. ``streams``: (from, to, count)
    of the pairs that need more than one. ``noise``: see ``Shape.noise``. ``reasons``: for people,
    the whole in a few words first; ``details``: for those who want to know more.
    """

    kind: str
    count: int
    order: tuple[int, ...]
    arity: int
    sites: tuple[int, ...]
    shards: tuple[int, ...]
    chunk_elements: int
    streams: tuple[tuple[int, int, int], ...]
    predicted_s: float
    noise: float
    reasons: tuple[str, ...]
    details: tuple[str, ...]

    def routes(self) -> Routes:
        """Return the trees of the collective.

        A pairwise exchange has none and gets those of a butterfly: just as many bytes cross each
        link.
        """
        if self.kind == "ring":
            return ring(self.order)
        if self.kind == "tree":
            return tree(self.count, self.arity)
        if self.kind == "hierarchical":
            return hierarchical(self.sites)
        return star(self.count)

    def owners(self) -> tuple[int, ...]:
        """Return the owner of each chunk, or EVERYONE in a pairwise exchange.

        Shards are contiguous, in the order of participants.
        """
        if self.kind == "pairwise":
            return (EVERYONE,) * sum(self.shards)
        return tuple(peer for peer, size in enumerate(self.shards) for _ in range(size))


@dataclass(frozen=True, slots=True)
class _Candidate:
    kind: str
    shape: Shape
    shards: tuple[int, ...]
    chunk_elements: int
    cost: Cost
    order: tuple[int, ...] = ()
    arity: int = 0

    @property
    def label(self) -> str:
        return f"{self.kind} of {self.arity}" if self.arity else self.kind


def choose(network: Network, task: ReductionTask, names: Sequence[str] = ()) -> Choice:
    """Return the collective for this task on this network, the same on every machine.

    ``names``: of the participants, in what is said to people; their numbers if empty. Raises
    ConfigError if ``task.bbr`` is of another number of peers.
    """
    names = names or tuple(map(str, range(network.count)))
    if task.bbr and len(task.bbr) != network.count:
        raise ConfigError(f"{network.count} peers, and {len(task.bbr)} that have BBR or not")
    allowed, left_out = _allowed(network, task)
    sizes = _sizes(network, task)
    found: dict[str, _Candidate] = {}
    for size in sizes:
        for candidate in _candidates(network, task, size, allowed):
            best = found.get(candidate.label)
            if best is None or candidate.cost.seconds < best.cost.seconds:
                found[candidate.label] = candidate
    butterfly = found["butterfly"]
    fastest = min(found.values(), key=lambda candidate: candidate.cost.seconds)
    # Small gains are within the error of the model.
    worth = fastest.cost.seconds < (1 - MARGIN) * butterfly.cost.seconds
    chosen = fastest if worth else butterfly
    streams = _streams(network, task, chosen)
    said = _explain(network, task, chosen, names)
    said += _explain_streams(network, task, streams, names)
    return Choice(
        kind=chosen.kind,
        count=network.count,
        order=chosen.order,
        arity=chosen.arity,
        sites=network.sites if chosen.kind == "hierarchical" else (),
        shards=chosen.shards,
        chunk_elements=chosen.chunk_elements,
        streams=streams,
        predicted_s=chosen.cost.seconds,
        noise=chosen.shape.noise if chosen.kind != "pairwise" else PAIRWISE_NOISE,
        reasons=tuple(said)[:REASONS_MAX],
        details=tuple(_details(chosen, found) + left_out)[:REASONS_MAX],
    )


# ---------------------------------------------------------------- what may be chosen


def _allowed(network: Network, task: ReductionTask) -> tuple[set[str], list[str]]:
    """Return the kinds that may be chosen, and why others may not."""
    n, sites = network.count, len(network.site_up)
    out: dict[str, str] = {}
    if n != 2:
        out["pairwise"] = ""
    if not 1 < sites < n:
        out["hierarchical"] = ""
    if n < 3:
        out |= {"ring": "", "tree": ""}
    if n > SEARCH_PEERS_MAX:
        out.setdefault("ring", f"{n} peers are more than {SEARCH_PEERS_MAX}")
    if task.bits < WHOLE_BITS_MIN:
        lost = f"{task.bits:.3g} bits per element would be quantized again at each hop"
        out.setdefault("ring", lost)
    elif task.bits < EXACT_BITS_MIN and n > RING_8_BIT_PEERS_MAX:
        out.setdefault("ring", f"8 bits add up too much noise over {n} peers")
    if task.robust:
        for kind in KINDS[1:]:
            out.setdefault(kind, "robust aggregation has to see every contribution")
    for kind in KINDS[1:]:
        if kind not in task.kinds:
            out.setdefault(kind, "excluded by the task")
    reasons = [f"{kind} left out: {why}" for kind, why in out.items() if why]
    return set(KINDS) - set(out), reasons


def _sizes(network: Network, task: ReductionTask) -> list[int]:
    """Return the numbers of elements in a chunk that are tried, largest first."""
    if task.chunk_elements:
        return [task.chunk_elements]
    largest = grid_for(task.elements).chunk_elements
    if network.count > SEARCH_PEERS_MAX:
        return [largest]
    halves = [largest >> shift for shift in range(HALVINGS + 1)]
    step = CHUNK_ELEMENTS_MIN  # all of these are multiples of a codec's block
    return sorted({max(step, half // step * step) for half in halves} | {largest}, reverse=True)


def _candidates(
    network: Network, task: ReductionTask, size: int, allowed: set[str]
) -> Iterator[_Candidate]:
    n, chunks, nbytes = network.count, task.chunks(size), task.chunk_bytes(size)
    rates = replace(task.rates, sum_bytes=4 * min(size, task.elements))
    owners = task.owners(n)
    equal = equal_shards(n, chunks)
    evens = {equal, shared_equally(n, chunks, owners)}
    splits = set(evens)
    if chunks < n:
        splits.add(shared_equally(n, chunks, (_middle(network, owners),)))

    def best(
        routes: Routes,
        among: set[tuple[int, ...]],
        order: tuple[int, ...] = (),
        arity: int = 0,
    ) -> Iterator[_Candidate]:
        """Yield the fastest of these splits with which nothing goes where no link is."""
        shape = Shape(routes)
        costs = [
            (routes_cost(network, shape, shards, nbytes, rates), shards)
            for shards in sorted(among)
            if not routes.crosses(task.apart, [peer for peer, own in enumerate(shards) if own])
        ]
        if costs:
            cost, shards = min(costs, key=lambda entry: entry[0].seconds)
            for even, split in costs:
                if split in evens and cost.seconds > (1 - task.uneven_margin) * even.seconds:
                    cost, shards = even, split
            yield _Candidate(shape.kind, shape, shards, size, cost, order, arity)

    everyone = star(n)
    yield from best(everyone, splits | {butterfly_shards(network, chunks, owners)})
    if "pairwise" in allowed:
        cost = pairwise_cost(network, chunks, nbytes, rates)
        yield _Candidate("pairwise", Shape(everyone), equal, size, cost)
    if "ring" in allowed:
        order = best_tour(_step_s(network, task))
        yield from best(ring(order), {equal}, order=order)
    if "hierarchical" in allowed:
        yield from best(hierarchical(network.sites), splits)
    if "tree" in allowed:
        for arity in ARITIES if n <= SEARCH_PEERS_MAX else ARITIES_MANY:
            if arity >= n - 1:
                continue
            routes = tree(n, arity)
            if task.bits >= WHOLE_BITS_MIN or Shape(routes).depth <= DEPTH_COARSE_MAX:
                yield from best(routes, splits, arity=arity)


def _step_s(
    network: Network, task: ReductionTask
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return the seconds of one step of a ring on each edge, float64[n, n].

    In a step a shard of what is reduced crosses the edge, with the edge's latency.
    """
    shard_bytes = task.elements * task.bits / 8 / network.count / (1 - task.rates.overhead)
    steps = shard_bytes / network.alone_bytes_per_s() + network.latency_s
    for one, other in task.apart:
        steps[one, other] = steps[other, one] = NO_LINK_S
    return np.asarray(steps, dtype=np.float64)


def _middle(network: Network, owners: Sequence[int]) -> int:
    """Return the owner that a few bytes reach all others from, and back, soonest.

    Of equal ones it is the fastest.
    """
    farthest = (network.latency_s + network.latency_s.T).max(axis=1)
    slower = np.minimum(network.up, network.down)
    return min(owners, key=lambda p: (farthest[p], -slower[p], p))


# ---------------------------------------------------------------- streams


def stream_bytes_per_s(round_trip_s: float, loss: float) -> float:
    """Return the bytes per second that one TCP stream carries, however fast the lines are.

    Its window is what a socket's buffer holds, and with loss at most ``sqrt(3 / (2 p))`` packets
    (Mathis et al. 1997) or ``1.054 (RTT / p)^(3/4)`` (CUBIC, RFC 9438), whichever is larger. BBR
    does better: ask with ``loss`` 0.
    """
    if round_trip_s <= 0:
        return math.inf
    window = float(SOCKET_BUFFER_BYTES)
    if loss > 0:
        packets = max(math.sqrt(1.5 / loss), 1.054 * (round_trip_s / loss) ** 0.75)
        window = min(window, packets * SEGMENT_BYTES)
    return window / round_trip_s


def streams_for(bytes_per_s: float, round_trip_s: float, loss: float, *, bbr: bool) -> int:
    """Return how many streams a pair needs that is to carry ``bytes_per_s``.

    ``bbr``: losses do not slow them.

    These are more than would just do (WINDOW_ROOM, LOSS_ROOM), because what a pair has was measured
    over the streams that it had: a probe uses one, and on a long fat path finds what one window
    carries. A plan that only asked for streams to carry that would ask for one again, and never
    learn better. With room to spare the next rounds show more if there is more, the plan after them
    asks for more streams, and so on until the path is full. Probes over several streams would not
    get there: a path of 1 Gbit/s and 200 ms holds 25 MB, twice what a probe may send. Nor need
    anybody keep in mind which measurements are to be believed: where one stream was the limit or
    nearly so, there are more; where it was not, it costs nothing.
    """
    room = stream_bytes_per_s(round_trip_s, 0.0)
    needed = math.ceil(WINDOW_ROOM * bytes_per_s / room)
    slowed = stream_bytes_per_s(round_trip_s, loss)
    if slowed < room and bbr:
        needed = max(needed, LOSSY_STREAMS_MIN if bytes_per_s > slowed else 1)
    elif slowed < room:
        needed = max(needed, math.ceil(LOSS_ROOM * bytes_per_s / slowed))
    return max(1, needed)


def _streams(
    network: Network, task: ReductionTask, chosen: _Candidate
) -> tuple[tuple[int, int, int], ...]:
    """Return (from, to, count) of the pairs that need several streams.

    With so many a pair moves its bytes in the time of the whole.
    """
    chunks = chosen.shape.flows(chosen.shards)  # a pairwise exchange has those of a butterfly
    wire = chunks * task.chunk_bytes(chosen.chunk_elements) / (1 - task.rates.overhead)
    found = []
    for src, dst in zip(*np.nonzero(wire), strict=True):
        trip_s = float(network.latency_s[src, dst] + network.latency_s[dst, src])
        wanted = float(wire[src, dst]) / max(chosen.cost.seconds, 1e-9)
        loss, bbr = float(network.loss[src, dst]), task.has_bbr(int(src))
        count = min(task.streams_max, streams_for(wanted, trip_s, loss, bbr=bbr))
        if count > 1:
            found.append((int(src), int(dst), count))
    return tuple(found)


# ---------------------------------------------------------------- reasons


def _explain(
    network: Network, task: ReductionTask, chosen: _Candidate, names: Sequence[str]
) -> list[str]:
    cost = chosen.cost
    limit = cost.busiest.format(*names)
    if cost.windows_s > cost.lines_s:
        limit = "round trips, not by rates"
    said = [f"{chosen.label}, about {duration(cost.seconds)} per round, limited by {limit}"]
    if chosen.kind == "ring":
        said.append("in the order " + ", ".join(names[peer] for peer in chosen.order))
    owners = task.owners(network.count)
    if task.apart:
        said.append(_explain_apart(task, chosen, names))
    nothing = [names[peer] for peer in owners if not chosen.shards[peer]]
    if nothing and sum(chosen.shards) >= network.count:
        said.append(f"too slow to hand out a part of the result to all others: {listed(nothing)}")
    return said


def _explain_apart(task: ReductionTask, chosen: _Candidate, names: Sequence[str]) -> str:
    """Say which pairs have no link, and who owns the result therefore."""
    pairs = [f"{names[one]} and {names[other]}" for one, other in task.apart[:PAIRS_SHOWN]]
    more = len(task.apart) - len(pairs)
    shown = ", ".join(pairs) + (f" and {more} more pairs" if more else "")
    if all(chosen.shards):
        return f"{shown} have no link: nothing goes between them"
    owners = [name for name, size in zip(names, chosen.shards, strict=True) if size]
    return f"{shown} have no link: {listed(owners)} own{'' if owners[1:] else 's'} the result"


def _details(chosen: _Candidate, found: dict[str, _Candidate]) -> list[str]:
    cost, said = chosen.cost, []
    for other in sorted(found.values(), key=lambda candidate: candidate.cost.seconds):
        if other is not chosen:
            close = other.cost.seconds < cost.seconds
            why = f", which is within the model's error of {MARGIN:.0%}" if close else ""
            said.append(f"{other.label} would take {duration(other.cost.seconds)}{why}")
    if all(chosen.shards) and max(chosen.shards) - min(chosen.shards) > 1:
        said.append(f"shards of {min(chosen.shards)} to {max(chosen.shards)} chunks, by rate")
    said.append(f"{sum(chosen.shards)} chunks of {chosen.chunk_elements} elements")
    return said


def _explain_streams(
    network: Network,
    task: ReductionTask,
    streams: Sequence[tuple[int, int, int]],
    names: Sequence[str],
) -> list[str]:
    if not streams:
        return []
    src, dst, count = max(streams, key=lambda entry: entry[2])
    trip_s, loss = float(network.latency_s[src, dst] + network.latency_s[dst, src]), 0.0
    why = f"up to {count} streams (from {names[src]} to {names[dst]}): with {duration(trip_s)}"
    if not task.has_bbr(src):
        loss = float(network.loss[src, dst])
        why += f" and {loss:.2%} loss"
    return [f"{why} one carries at most {rate(stream_bytes_per_s(trip_s, loss))}"]
