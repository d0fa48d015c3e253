"""Make the plan of the coming rounds from what was measured. No clock.

A plan has two parts. The *layout* (which collective, in which shape, who owns how much) goes into
BEGIN, because all participants must use the same one. Who sends over how many streams, and how
fast, is each peer's own affair: it is told in a message of its own (``StreamPlan``), and one that
never hears it is only slower.

A plan may have gaps: ways whose own rate nobody has measured (``Network.pair`` is infinite). Shapes
and shares follow from what stands in for them, which at worst is what rounds without a plan do. A
pace does not: one that is a guess may hold a fast link back, and nothing would show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.collectives.chunks import ChunkGrid
from atoll.collectives.codecs import Decoder
from atoll.collectives.planning.choice import (
    KINDS,
    Choice,
    ReductionTask,
    choose,
    stream_bytes_per_s,
)
from atoll.collectives.planning.network_model import Network
from atoll.collectives.planning.pacing import carried_bytes, paces
from atoll.collectives.planning.shards import butterfly_shards
from atoll.peer.links.messages import StreamPlan
from atoll.peer.membership.layout import WHY_CHARS_MAX, Advised, Layout
from atoll.peer.membership.view import short

# 1 Gbit/s. On faster links chunks wait for processors and not in queues: a pace gains nothing, and
# one from an estimate that is too low would cost.
PACED_BYTES_PER_S_MAX = 125e6
# By how much something must have changed before the plan is made again: estimates waver by less.
CHANGE = 0.10
# What streams to a lossy way may take of their pace without BBR: what is lost is sent again within.
LOSSY_SLACK = 1.1
# Latencies of less than this are those of a processor's queue, and decide nothing.
LATENCY_CHANGE_S = 0.002
LOSS_CHANGE = 0.001  # below it, a stream fills most paths
# Shares of a vector of any size are in so many parts: finer than that no rate is known.
FINE_PARTS = 1024


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Hold what the coordinator is advised, what each participant is told, and why."""

    advice: Advised
    told: Mapping[bytes, StreamPlan]
    choice: Choice


def plan_rounds(
    participants: Sequence[bytes],
    network: Network,
    grid: ChunkGrid,
    codec: Decoder,
    bbr: tuple[bool, ...] = (),
    *,
    kinds: tuple[str, ...] = KINDS,
) -> RoundPlan:
    """Plan rounds of these participants over a vector of this grid. May take seconds for very many.

    They are in ascending order of peer id, as ``network`` has them. ``codec`` is that of the
    result. ``bbr``, ``kinds``: see Task.

    The cost model knows one size of chunks: the mean of a part's and a result's, so that each line
    carries the right sum of both, of equal shares.
    """
    part_bytes = codec.part_codec.encoded_bytes(grid.total)
    result_bytes = codec.encoded_bytes(grid.total)
    bits = 8 * (part_bytes + result_bytes) / 2 / grid.total
    task = ReductionTask(grid.total, bits, chunk_elements=grid.chunk_elements, kinds=kinds, bbr=bbr)
    choice = choose(network, task, tuple(map(short, participants)))
    order = choice.order if choice.kind == "ring" else choice.sites
    layout = Layout(choice.kind, choice.shards, order, max(1, choice.arity), _why(choice))
    shards = tuple(size * task.chunk_bytes(grid.chunk_elements) for size in choice.shards)
    pace = paces(network, carried_bytes(choice.routes(), shards, result_bytes / part_bytes))
    pace[np.isinf(network.pair)] = 0.0
    streams = {(source, target): count for source, target, count in choice.streams}
    told = {}
    for source, peer in enumerate(participants):
        others = [target for target in range(len(participants)) if target != source]
        lossy = tuple(_is_lossy(network, source, n, float(pace[source, n])) for n in others)
        told[peer] = StreamPlan(
            peers=tuple(participants[target] for target in others),
            streams=tuple(streams.get((source, target), 1) for target in others),
            pace=tuple(
                _pace(float(pace[source, n]), lossy=mark, bbr=task.has_bbr(source))
                for n, mark in zip(others, lossy, strict=True)
            ),
            lossy=lossy,
        )
    advice = Advised(tuple(participants), layout, butterfly_shards(network, FINE_PARTS))
    return RoundPlan(advice, told, choice)


def differs(before: Network, now: Network) -> bool:
    """Return whether a plan for the one network may not suit the other."""
    if before.count != now.count or before.sites != now.sites:
        return True
    for one, other in ((before.up, now.up), (before.down, now.down), (before.pair, now.pair)):
        if not np.allclose(one, other, rtol=CHANGE, atol=0.0):
            return True
    return not (
        np.allclose(before.latency_s, now.latency_s, rtol=2 * CHANGE, atol=LATENCY_CHANGE_S)
        and np.allclose(before.loss, now.loss, rtol=0.5, atol=LOSS_CHANGE)
    )


def _is_lossy(network: Network, source: int, target: int, bytes_per_s: float) -> bool:
    """Return whether a stream that gives way to every loss would fall short of this pace."""
    trip_s = float(network.latency_s[source, target] + network.latency_s[target, source])
    loss = float(network.loss[source, target])
    return loss > 0 and stream_bytes_per_s(trip_s, loss) < bytes_per_s


def _pace(bytes_per_s: float, *, lossy: bool, bbr: bool) -> float:
    """Return the pace to tell a sender, in bytes per second; 0: none.

    BBR has a pace of its own, and is slower with two (docs/log.md).
    """
    if not 0 < bytes_per_s < PACED_BYTES_PER_S_MAX or (lossy and bbr):
        return 0.0
    return LOSSY_SLACK * bytes_per_s if lossy else bytes_per_s


def _why(choice: Choice) -> str:
    why = "; ".join(choice.reasons)
    return why if len(why) <= WHY_CHARS_MAX else f"{why[: WHY_CHARS_MAX - 3]}..."
