"""Choose among candidates, and find the one change that would help most. Pure.

Candidates are compared by how far their samples lead: samples per second, times what a sample is
worth by the losses that were measured (losses.py). So a fast method whose loss is high and a slow
one whose loss is low can be told apart, and a method that is no better than one machine alone never
wins by its speed. Of those within SAME of the best the one that sends least is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from atoll.collectives.errors import ConfigError
from atoll.collectives.planning.network_model import F64, RATE_MAX_BYTES_PER_S, Network
from atoll.collectives.units import count
from atoll.peer.plan.losses import DocumentedLoss, LossTable
from atoll.peer.plan.model import RoundForecast, RunSketch, Variant, forecast

# Each a method that beat one machine alone after a warm start, on slow links and on fast ones.
DEFAULT_VARIANTS: Final = (
    Variant("gradient_average", 1, "int8"),
    Variant("diloco", 30, "int8"),
    Variant("diloco", 30, "int4"),
    Variant("diloco", 100, "int8"),
    Variant("diloco", 100, "int4"),
    Variant("streaming", 30, "fp4_e3m0"),
    Variant("streaming", 100, "fp4_e3m0"),
    Variant("sparse_loco", 30, "topk"),
)
CANDIDATES_MAX: Final = 16  # what a screen shows
SAME: Final = 0.02  # nobody can tell such speeds apart
FASTER: Final = 2.0  # of a link, to see what it would gain
GAIN_MIN: Final = 0.01  # of an improvement that is worth a line
IMPROVEMENTS_MAX: Final = 6
UNEVEN: Final = 1.1  # slowest step over the mean, from where each peer's own number of steps pays


@dataclass(frozen=True, slots=True, eq=False)
class JudgedVariant:
    """Hold a candidate: its rounds, the loss that was measured, and what it comes to.

    ``lead_per_s``: samples per second of data-parallel training that would lead as far.
    """

    forecast: RoundForecast
    loss: DocumentedLoss
    lead_per_s: float

    @property
    def variant(self) -> Variant:
        return self.forecast.variant


@dataclass(frozen=True, slots=True)
class Improvement:
    """Say what one change gains: in speed, and in how far that leads, as fractions.

    A faster candidate that leads no further is none: the table of candidates has it.
    """

    text: str
    speed: float
    lead: float


@dataclass(frozen=True, slots=True, eq=False)
class PlanAdvice:
    """Hold what is recommended, all that was compared, what would help, and what to know of it.

    ``alone_per_s``: samples per second of the fastest machine by itself.
    """

    best: JudgedVariant
    judged: tuple[JudgedVariant, ...]
    improvements: tuple[Improvement, ...]
    alone_per_s: float

    @property
    def is_worth_it(self) -> bool:
        """Return whether all together get further than the fastest machine alone."""
        return self.best.lead_per_s > self.alone_per_s


def advise(
    run: RunSketch, losses: LossTable, variants: Sequence[Variant] = DEFAULT_VARIANTS
) -> PlanAdvice:
    """Compare the candidates. Raises ConfigError for none, too many, or one without a loss."""
    if not 1 <= len(variants) <= CANDIDATES_MAX:
        raise ConfigError(f"{len(variants)} candidates; 1 to {CANDIDATES_MAX} can be compared")
    judged = tuple(judge(run, losses, variant) for variant in dict.fromkeys(variants))
    best = _best(judged)
    alone = max(run.samples_per_step(host) / host.step_s for host in run.hosts)
    changes = _changes(run, losses, best, judged)
    found = [change for change in changes if min(change.speed, change.lead) >= GAIN_MIN]
    found.sort(key=lambda change: -change.lead)
    return PlanAdvice(best, judged, tuple(found[:IMPROVEMENTS_MAX]), alone)


def judge(run: RunSketch, losses: LossTable, variant: Variant) -> JudgedVariant:
    """Predict a candidate's rounds and look its loss up."""
    documented = variant.facts.documented
    name = documented.get(variant.codec, next(iter(documented.values())))
    loss = losses.nearest(name, variant.sync_every)
    if loss is None:
        raise ConfigError(f"no loss of {variant.method} was measured: it cannot be compared")
    found = forecast(run, variant)
    return JudgedVariant(found, loss, found.samples_per_s * losses.worth(loss.above))


def _best(judged: Sequence[JudgedVariant]) -> JudgedVariant:
    furthest = max(each.lead_per_s for each in judged)
    near = [each for each in judged if each.lead_per_s >= (1 - SAME) * furthest]
    return min(near, key=lambda each: float(each.forecast.day_bytes().sum()))


# ---------------------------------------------------------------- what would help


def _changes(
    run: RunSketch, losses: LossTable, best: JudgedVariant, judged: Sequence[JudgedVariant]
) -> Iterator[Improvement]:
    """Yield what each change of one thing would gain, whatever it gains."""

    def gains(text: str, other: JudgedVariant) -> Improvement:
        speed = other.forecast.samples_per_s / best.forecast.samples_per_s - 1
        return Improvement(text, speed, other.lead_per_s / best.lead_per_s - 1)

    for text, changed in (*_other_links(run), *_other_hosts(run)):
        yield gains(text, judge(changed, losses, best.variant))
    for each in judged:
        if each is not best:
            yield gains(f"{_named(each.variant)} ({_loss_beside(each, best)})", each)
    steps_s = [host.step_s for host in run.hosts]
    waits = not best.variant.facts.every_step and not best.variant.facts.streams
    if waits and max(steps_s) > UNEVEN * sum(steps_s) / len(steps_s):
        yield _own_steps(run, best)


def _other_links(run: RunSketch) -> Iterator[tuple[str, RunSketch]]:
    """Yield the run with faster links: of whoever has the slowest, each way, and of all."""
    network = run.network
    slowest = int(network.up.argmin()), int(network.down.argmin())
    ways = [(slowest[0], -1, "uplink"), (-1, slowest[1], "downlink")]
    if slowest[0] == slowest[1]:
        ways.append((*slowest, "link, both ways"))
    for leaving, entering, name in ways:
        host = run.hosts[max(leaving, entering)].name
        yield f"{host} with twice its {name}", _with_twice(run, leaving, entering)
    changed = replace(
        network,
        up=_within(FASTER * network.up),
        down=_within(FASTER * network.down),
        pair=_within(FASTER * network.pair),
        site_up=_within(FASTER * network.site_up),
        site_down=_within(FASTER * network.site_down),
    )
    yield "all links twice as fast", replace(run, network=changed)


def _with_twice(run: RunSketch, leaving: int, entering: int) -> RunSketch:
    """Return the run where one host's uplink and another's downlink are faster; -1: nobody's."""
    network = run.network
    up, down, pair = network.up.copy(), network.down.copy(), network.pair.copy()
    if leaving >= 0:
        up[leaving] *= FASTER
        pair[leaving] *= FASTER
    if entering >= 0:
        down[entering] *= FASTER
        pair[:, entering] *= FASTER
    changed = replace(network, up=_within(up), down=_within(down), pair=_within(pair))
    return replace(run, network=changed)


def _within(rates: F64) -> F64:
    """Return rates that a network may have; infinite ones stay."""
    return np.where(np.isinf(rates), rates, np.minimum(rates, RATE_MAX_BYTES_PER_S))


def _other_hosts(run: RunSketch) -> Iterator[tuple[str, RunSketch]]:
    """Yield the run without the host that trains slowest, and without that of the slowest link."""
    if len(run.hosts) < 3:
        return
    ends = np.minimum(run.network.up, run.network.down)
    slowest = max(range(len(run.hosts)), key=lambda n: run.hosts[n].step_s)
    for host in dict.fromkeys((slowest, int(ends.argmin()))):
        yield f"without {run.hosts[host].name}", without(run, host)


def without(run: RunSketch, host: int) -> RunSketch:
    """Return the run without one host."""
    keep = [n for n in range(len(run.hosts)) if n != host]
    both = np.ix_(keep, keep)
    network = run.network
    sites = sorted({network.sites[n] for n in keep})
    kept = Network(
        up=network.up[keep],
        down=network.down[keep],
        pair=network.pair[both],
        latency_s=network.latency_s[both],
        loss=network.loss[both],
        sites=tuple(sites.index(network.sites[n]) for n in keep),
        site_up=network.site_up[sites],
        site_down=network.site_down[sites],
    )
    return replace(
        run,
        hosts=tuple(run.hosts[n] for n in keep),
        network=kept,
        coordinator=max(0, run.coordinator - (host <= run.coordinator)),
    )


def _own_steps(run: RunSketch, best: JudgedVariant) -> Improvement:
    """Return what it gains that each peer takes as many steps as it gets done in the same time."""
    slowest_s = max(host.step_s for host in run.hosts)
    now = sum(map(run.samples_per_step, run.hosts))
    then = sum(run.samples_per_step(host) * slowest_s / host.step_s for host in run.hosts)
    round_s = best.variant.sync_every * slowest_s
    gain = then / now - 1
    return Improvement(f"round_s={round_s:.3g}: each takes as many steps as it can", gain, gain)


def _named(variant: Variant) -> str:
    steps = "" if variant.facts.every_step else f", {count(variant.sync_every, 'step')} in a round"
    return f"{variant.method} {variant.codec}{steps}"


def _loss_beside(other: JudgedVariant, best: JudgedVariant) -> str:
    return f"its loss {other.loss.above:+.1%} and not {best.loss.above:+.1%}"
