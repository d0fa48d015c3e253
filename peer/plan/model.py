"""Predict the rounds of a run: how long they take and why, and what each host sends. Pure.

Theory
======

A round in which all wait is one thing after the other::

    training    H local steps of whoever is slowest
    begin       the last to be done tells the coordinator, which tells everyone to begin
    exchange    what `choose` predicts for these links: the model that plans rounds in a run
    TCP begins  streams that were idle while hosts trained find their rate again (``slow_start_s``)
    commit      everyone tells the coordinator that it has the result, which says: apply it
    apply       the daemon's outer step and digests, the trainer's copies, the disk

``Streaming DiLoCo`` has a round for each of its P fragments, which are under way while hosts train,
so that only the copies take time, as long as

    a fragment is back within DELAY_STEPS_MAX steps        else everyone waits for the rest of it
    its bytes take no longer than the H / P steps until the next one      else links set the pace

What hosts do beside (probes, a newcomer's state, a disk that is busy) is not in it, nor packets
that are lost, nor that an exchange and training share processors.

**How far to trust it.** Constants come from docs/log.md, as they say. Of the rounds of four hosts
that are measured there it is within 2 %; eight daemons on two cores took 37 % longer than it says.
``tests/benchmarks/plan.py`` says how far it is off on shapes that it has not been fitted to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from atoll.collectives.chunks import grid_for
from atoll.collectives.codecs import Decoder, get_codec
from atoll.collectives.errors import ConfigError
from atoll.collectives.planning.choice import (
    KINDS,
    SEGMENT_BYTES,
    Choice,
    choose,
    task_of,
)
from atoll.collectives.planning.cost_model import LINK_OVERHEAD
from atoll.collectives.planning.network_model import F64, Network
from atoll.collectives.planning.pacing import carried_bytes
from atoll.optim.run_spec import MEAN, SYNC_EVERY_MAX, RunSpec, feedback_of

# For each parameter: decode, step, digest. docs/log.md: some 0.05 s of four million.
OUTER_STEP_S: Final = 12e-9
# For each parameter: what a trainer hands over and takes back. docs/log.md: StreamingDiLoCo, which
# does nothing else but train, computes 98.6 % of 6 s with eight million.
COPIES_S: Final = 10e-9
# Four syncs of 5 ms, and writing: of ten million parameters 51 ms (`make bench-durable`).
DISK_S, DISK_PARAMETER_S = 0.02, 3e-9
# A stream that was idle has the window of a new one again, halved for each timeout that it was
# silent (RFC 9293, RFC 7661; Linux: tcp_slow_start_after_idle), and doubles it each round trip.
WINDOW_SEGMENTS: Final = 10  # RFC 6928
TIMEOUT_MIN_S: Final = 0.2  # of Linux; a round trip more
HALVINGS_MAX: Final = 64.0  # of any window nothing is left then
DELAY_STEPS_MAX: Final = 10  # as StreamingDiLoCo finds it
# Methods of runs in which a round is training, then an exchange for which all wait.
WAITING_METHODS: Final = ("diloco", "local_sgd", "sparse_loco")
# What members say all the time. `make demo`: 107 kB in 70 s, most of them heartbeats.
CONTROL_BYTES_PER_S: Final = 1.5e3
DAY_S: Final = 86400.0
HOSTS_MAX: Final = 64  # a plan of so many takes some seconds; a status that says it, 0.1 s
FRAGMENTS: Final = 5  # of a model of twelve blocks: three in each, and one of the rest
FRAGMENTS_MAX: Final = 64
PARAMETERS_MAX: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class TrainingHost:
    """Describe a host: seconds of a local step, what it trains on in one, and what it costs.

    ``price_gb``: of 10^9 bytes that leave it.
    """

    name: str
    step_s: float
    tokens_per_step: float = 0.0
    price_hour: float = 0.0
    price_gb: float = 0.0

    def __post_init__(self) -> None:
        figures = (self.step_s, self.tokens_per_step, self.price_hour, self.price_gb)
        if not all(0 <= figure < math.inf for figure in figures) or self.step_s <= 0:
            raise ConfigError(
                f"{self.name}: seconds per step have to be positive, and nothing below 0",
                fix="say step_s for each host, or --step-s for all",
            )


@dataclass(frozen=True, slots=True)
class RunSketch:
    """Describe the run that is to be planned. ``coordinator``: its number; whoever founds the run.

    ``fragments``: that StreamingDiLoCo would have.
    """

    hosts: tuple[TrainingHost, ...]
    network: Network
    parameters: int
    fragments: int = FRAGMENTS
    coordinator: int = 0

    def __post_init__(self) -> None:
        if not 2 <= len(self.hosts) <= HOSTS_MAX or self.network.count != len(self.hosts):
            raise ConfigError(f"a plan is for 2 to {HOSTS_MAX} hosts, not {len(self.hosts)}")
        if not 1 <= self.parameters <= PARAMETERS_MAX:
            raise ConfigError(f"a model of {self.parameters} parameters", fix="say --parameters")
        if not 1 <= self.fragments <= FRAGMENTS_MAX:
            raise ConfigError(f"{self.fragments} fragments; there are 1 to {FRAGMENTS_MAX}")

    @property
    def in_tokens(self) -> bool:
        """Return whether what hosts train on is known in tokens; else it is counted in steps."""
        return all(host.tokens_per_step > 0 for host in self.hosts)

    def samples_per_step(self, host: TrainingHost) -> float:
        return host.tokens_per_step if self.in_tokens else 1.0


@dataclass(frozen=True, slots=True)
class MethodFacts:
    """Say what a plan has to know of a method.

    ``documented``: by codec, the method whose losses were measured; the first for other codecs.
    ``needs``: what it asks of model or network.
    """

    line: str
    documented: dict[str, str]
    needs: str
    every_step: bool = False
    streams: bool = False  # rounds are under way while hosts train


METHOD_FACTS: Final = {
    "diloco": MethodFacts(
        'atoll.DiLoCo(model, optimizer, sync_every={H}, peer=atoll.attach(), codec="{codec}")',
        {
            "int8": "diloco",
            "int4": "diloco-int4",
            "float32": "diloco-float32",
            "fp4_e3m0": "diloco-fp4",
        },
        "all wait for the slowest, once in a round",
    ),
    "streaming": MethodFacts(
        "atoll.StreamingDiLoCo(model, optimizer, sync_every={H}, peer=atoll.attach(),"
        ' codec="{codec}")',
        {"fp4_e3m0": "streaming"},
        "the model's blocks need numbers in their names, as in blocks.7.attention.weight",
        streams=True,
    ),
    "sparse_loco": MethodFacts(
        'atoll.SparseLoCo(model, optimizer, sync_every={H}, peer=atoll.attach(), codec="{codec}")',
        {"topk": "sparseloco"},
        "each peer receives parts of all others, and has to reach them: for some dozens",
    ),
    "gradient_average": MethodFacts(
        'atoll.GradientAverage(model, optimizer, atoll.connect(), codec="{codec}")',
        {"float32": "data-parallel", "int8": "data-parallel-int8"},
        "all wait for the slowest at every step, and a trainer is one process",
        every_step=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """Name a method with its local steps in a round and its codec."""

    method: str
    sync_every: int
    codec: str

    def __post_init__(self) -> None:
        facts = METHOD_FACTS.get(self.method)
        if facts is None:
            known = ", ".join(METHOD_FACTS)
            raise ConfigError(f"a plan knows no method {self.method!r}", fix=f"use one of {known}")
        if facts.every_step and self.sync_every != 1:
            raise ConfigError(f"{self.method} has rounds of one step, not {self.sync_every}")
        if not 1 <= self.sync_every <= SYNC_EVERY_MAX:
            raise ConfigError(f"rounds of {self.sync_every} steps")
        self.result_codec(2)

    @property
    def facts(self) -> MethodFacts:
        return METHOD_FACTS[self.method]

    @property
    def code(self) -> str:
        """Return the line that makes it."""
        return self.facts.line.format(H=self.sync_every, codec=self.codec)

    def result_codec(self, peers: int) -> Decoder:
        """Return the codec of a round's result. Raises ConfigError for one that cannot be."""
        if self.facts.every_step:
            return get_codec(self.codec)
        return self._spec.result_codec((1.0,) * peers)

    @property
    def shapes(self) -> tuple[str, ...]:
        """Return the kinds of reductions that it may have."""
        is_any = self.facts.every_step or not self._spec.needs_butterfly
        return KINDS if is_any else ("butterfly",)

    @property
    def _spec(self) -> RunSpec:
        gathers = self.method == "sparse_loco"
        return RunSpec(
            sync_every=self.sync_every,
            codec=self.codec,
            aggregate="senders" if gathers else MEAN,
            error_feedback=0.95 if gathers else feedback_of(self.codec, None),
        )


@dataclass(frozen=True, slots=True)
class RoundPart:
    """Hold a part of a round's time, and where the figure comes from."""

    name: str
    seconds: float
    source: str


@dataclass(frozen=True, slots=True, eq=False)
class RoundForecast:
    """Hold what is predicted of a round of all fragments.

    ``sent_bytes``: by each host, with headers. ``delay_steps``: until a fragment is back, of a
    method that does not wait for it; else 0. ``busiest``: what limits the exchange.
    """

    variant: Variant
    parts: tuple[RoundPart, ...]
    round_s: float
    training: float  # share of the time in which hosts train, the mean of them
    samples_per_s: float  # tokens, or steps where nobody knows tokens; of all hosts
    sent_bytes: F64
    topology: str
    busiest: str
    delay_steps: int = 0

    def day_bytes(self) -> F64:
        """Return what each host sends in a day."""
        return self.sent_bytes * (DAY_S / self.round_s) + CONTROL_BYTES_PER_S * DAY_S

    def day_cost(self, run: RunSketch) -> float:
        """Return what all hosts cost in a day: machines, and what they send."""
        hours = sum(host.price_hour for host in run.hosts) * DAY_S / 3600
        prices = np.array([host.price_gb for host in run.hosts])
        return float(hours + (self.day_bytes() / 1e9 * prices).sum())

    def cost_of(self, run: RunSketch, samples: float) -> float:
        """Return what it costs to train on so many tokens (or steps)."""
        return self.day_cost(run) * samples / (self.samples_per_s * DAY_S)


def forecast(run: RunSketch, variant: Variant) -> RoundForecast:
    """Predict the rounds of a run with this method."""
    fragments = min(run.fragments, variant.sync_every) if variant.facts.streams else 1
    exchange = _Exchange(run, variant, fragments)
    if variant.facts.streams:
        parts = _streamed(run, variant, fragments, exchange)
    else:
        parts = _waited(run, variant, exchange)
    round_s = sum(part.seconds for part in parts)
    trained = [variant.sync_every * host.step_s for host in run.hosts]
    samples = variant.sync_every * sum(map(run.samples_per_step, run.hosts))
    delay = max(1, math.ceil(exchange.whole_s / max(host.step_s for host in run.hosts)))
    return RoundForecast(
        variant=variant,
        parts=parts,
        round_s=round_s,
        training=sum(trained) / len(trained) / round_s,
        samples_per_s=samples / round_s,
        sent_bytes=fragments * exchange.carried.sum(axis=1) / (1 - LINK_OVERHEAD),
        topology=exchange.choice.kind,
        busiest=exchange.busiest,
        delay_steps=delay if variant.facts.streams else 0,
    )


class _Exchange:
    """Hold what is known of the exchange of one of so many fragments."""

    def __init__(self, run: RunSketch, variant: Variant, fragments: int) -> None:
        network, count = run.network, len(run.hosts)
        elements = -(-run.parameters // fragments)
        codec = variant.result_codec(count)
        task = task_of(grid_for(elements), codec, kinds=variant.shapes)
        names = tuple(host.name for host in run.hosts)
        self.choice: Choice = choose(network, task, names)
        part_bytes, result_bytes = (
            each.encoded_bytes(elements) for each in (codec.part_codec, codec)
        )
        whole = sum(self.choice.shards)
        shards = tuple(part_bytes * size / whole for size in self.choice.shards)
        self.carried = carried_bytes(self.choice.routes(), shards, result_bytes / part_bytes)
        self.busiest = self.choice.reasons[0].rpartition("limited by ")[2]
        idle_s = variant.sync_every * _slowest(run).step_s / fragments
        self.parts = around_exchange(
            elements,
            coordinator_trip_s(network, run.coordinator),
            self.choice.predicted_s,
            slow_start_s(network, self.carried, self.choice.predicted_s, idle_s),
        )
        self.whole_s = sum(part.seconds for part in self.parts)
        self.lines_s = lines_s(network, self.carried)


def around_exchange(
    parameters: int, trip_s: float, exchange_s: float, begins_s: float
) -> tuple[RoundPart, ...]:
    """Return all parts of a round but training, from the last submission to the applied result."""
    disk_s = DISK_S + DISK_PARAMETER_S * parameters
    return (
        RoundPart("begin", trip_s, "a round trip to the coordinator"),
        RoundPart("exchange", exchange_s, "the model that plans rounds"),
        RoundPart("TCP begins", begins_s, "streams that were idle double their window each trip"),
        RoundPart("commit", trip_s, "a round trip to the coordinator"),
        RoundPart("apply", OUTER_STEP_S * parameters + disk_s, "docs/log.md: outer step, disk"),
    )


def _waited(run: RunSketch, variant: Variant, exchange: _Exchange) -> tuple[RoundPart, ...]:
    """Return the parts of a round in which all wait."""
    slowest = _slowest(run)
    return (
        RoundPart("training", variant.sync_every * slowest.step_s, f"steps of {slowest.name}"),
        *exchange.parts,
        RoundPart("copies", COPIES_S * run.parameters, "docs/log.md: to the daemon and back"),
    )


def _streamed(
    run: RunSketch, variant: Variant, fragments: int, exchange: _Exchange
) -> tuple[RoundPart, ...]:
    """Return the parts of a round of all fragments, which are under way while hosts train."""
    slowest = _slowest(run)
    training_s = variant.sync_every * slowest.step_s
    delay_s = min(DELAY_STEPS_MAX, variant.sync_every - 1) * slowest.step_s
    late_s = fragments * max(0.0, exchange.whole_s - delay_s)
    full_s = max(0.0, fragments * exchange.lines_s - training_s)
    return (
        RoundPart("training", training_s, f"steps of {slowest.name}"),
        RoundPart("waiting", max(late_s, full_s), "for fragments that are not back in time"),
        RoundPart("copies", COPIES_S * run.parameters, "docs/log.md: to the daemon and back"),
    )


def _slowest(run: RunSketch) -> TrainingHost:
    return max(run.hosts, key=lambda host: host.step_s)


# ---------------------------------------------------------------- what surrounds an exchange


def coordinator_trip_s(network: Network, coordinator: int) -> float:
    """Return the longest round trip between the coordinator and anybody."""
    trips = network.latency_s[coordinator] + network.latency_s[:, coordinator]
    return float(trips.max())


def slow_start_s(network: Network, carried: F64, exchange_s: float, idle_s: float) -> float:
    """Return what it costs that streams begin slowly, which were idle for so long.

    A stream that is to carry P segments in ``exchange_s`` needs a window of W; it has ten, or what
    halving has left of W, and doubles it with each round trip. Until then it has sent W less what
    it began with, so with a window of w at first it takes::

        P trip / W + (log2(W / w) - 1 + w / W) trip

    Where W is nearly all of P, a smaller one would do as well: the least of that counts.
    """
    worst = 0.0
    for source, target in zip(*np.nonzero(carried), strict=True):
        trip_s = float(network.latency_s[source, target] + network.latency_s[target, source])
        if trip_s <= 0 or exchange_s <= 0:
            continue
        segments = float(carried[source, target]) / SEGMENT_BYTES
        window = segments * trip_s / exchange_s
        halvings = min(idle_s / (TIMEOUT_MIN_S + trip_s), HALVINGS_MAX)
        first = max(WINDOW_SEGMENTS, window / 2**halvings)
        used = min(window, math.log(2) * (segments + first))
        if used > first:
            trips = segments / used + math.log2(used / first) - 1 + first / used
            worst = max(worst, trips * trip_s - exchange_s)
    return worst


def lines_s(network: Network, carried: F64) -> float:
    """Return how long the busiest link is busy with these bytes."""
    wire = carried / (1 - LINK_OVERHEAD)
    busy = (wire.sum(axis=1) / network.up, wire.sum(axis=0) / network.down, wire / network.pair)
    return float(max(times.max() for times in busy))
