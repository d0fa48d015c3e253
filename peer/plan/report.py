"""Say what a plan has come to: to people who meet atoll for the first time, and to programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from atoll.collectives.units import count, duration, listed, size
from atoll.peer.plan.advice import JudgedVariant, PlanAdvice
from atoll.peer.plan.losses import LossTable
from atoll.peer.plan.model import DELAY_STEPS_MAX, RunSketch

BILLION: Final = 1e9
SHOWN_MIN: Final = 0.005  # of a round: parts that take less are added up
NAMED_MAX: Final = 3  # hosts in a sentence; of more their number stands there
HEADS: Final = (
    "candidate",
    "H",
    "codec",
    "round",
    "training",
    "",
    "sent/day",
    "loss",
    "as good as",
)
NOT_COMPARED: Final = ("LocalSGD", "AsyncDiLoCo", "NoLoCo", "DeMo")
TOPOLOGIES: Final = {"hierarchical": "by sites", "pairwise": "an exchange of two"}


def text_of(run: RunSketch, advice: PlanAdvice, losses: LossTable) -> str:
    """Return everything as text: the line to paste, the round, candidates, what would help."""
    lines = [
        f"plan for {count(len(run.hosts), 'host')}, {run.parameters:,} parameters",
        "",
        f"    outer = {advice.best.variant.code}",
        "",
        *(f"but {text}\n" for text in warnings(run, advice)),
        *_round_lines(run, advice),
        "",
        *_table([_heads(run), *(_row(run, each, advice.best) for each in advice.judged)]),
        "",
        *_help_lines(advice),
        "",
        "what to know",
        *(f"  - {caveat}" for caveat in caveats(run, advice, losses)),
    ]
    return "\n".join(lines)


def _round_lines(run: RunSketch, advice: PlanAdvice) -> list[str]:
    best = advice.best.forecast
    large = [part for part in best.parts if part.seconds >= SHOWN_MIN * best.round_s]
    parts = [f"{part.name} {duration(part.seconds)}" for part in large]
    rest_s = best.round_s - sum(part.seconds for part in large)
    parts += [f"the rest {duration(rest_s)}"] if rest_s >= SHOWN_MIN * best.round_s else []
    shape = TOPOLOGIES.get(best.topology, best.topology)
    sent = best.day_bytes()
    said = [
        ("round", f"{duration(best.round_s)}: {', '.join(parts)}"),
        ("exchange", f"{shape}, limited by {best.busiest}"),
        (
            "training",
            f"{best.training:.0%} of the time, mean of all hosts;"
            f" {_speed(run, best.samples_per_s)}",
        ),
        (
            "sent",
            f"{size(float(best.sent_bytes.max()))} per round by who sends most,"
            f" {size(float(sent.max()))} per day; {size(float(sent.sum()))} by all",
        ),
    ]
    if best.delay_steps:
        late = count(best.delay_steps, "step")
        said.append(("delay", f"results are merged about {late} after they were sent"))
    if (day := best.day_cost(run)) > 0:
        unit = "10^9 tokens" if run.in_tokens else "10^6 local steps of all"
        amount = BILLION if run.in_tokens else BILLION / 1e3
        said.append(("cost", f"{day:,.2f} per day, {best.cost_of(run, amount):,.2f} per {unit}"))
    return [f"{name:<10} {text}" for name, text in said]


def _speed(run: RunSketch, per_s: float) -> str:
    return f"{_value(run, per_s)} {'tokens/s' if run.in_tokens else 'local steps/s'}"


def _value(run: RunSketch, per_s: float) -> str:
    return f"{per_s:,.0f}" if run.in_tokens else f"{per_s:.3g}"


def _unit(run: RunSketch) -> str:
    return "tokens/s" if run.in_tokens else "steps/s"


def _heads(run: RunSketch) -> tuple[str, ...]:
    return tuple(head or _unit(run) for head in HEADS)


def _row(run: RunSketch, each: JudgedVariant, best: JudgedVariant) -> tuple[str, ...]:
    found, variant = each.forecast, each.variant
    return (
        f"{'> ' if each is best else '  '}{variant.method}",
        str(variant.sync_every),
        variant.codec,
        duration(found.round_s),
        f"{found.training:.0%}",
        _value(run, found.samples_per_s),
        size(float(found.day_bytes().max())),
        f"{each.loss.above:+.1%}",
        _value(run, each.lead_per_s),
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if place in (0, 2) else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _help_lines(advice: PlanAdvice) -> list[str]:
    if not advice.improvements:
        return [
            "what would help most: faster machines; no link or setting leads as much as 1 % further"
        ]
    lines = ["what would help most"]
    return lines + [f"  {change.speed:+6.0%}  {change.text}" for change in advice.improvements]


def warnings(run: RunSketch, advice: PlanAdvice) -> list[str]:
    """Say what speaks against the whole plan; nothing if it is worth it."""
    if advice.is_worth_it:
        return []
    alone = _speed(run, advice.alone_per_s)
    together = _value(run, advice.best.lead_per_s)
    return [
        f"by these losses, of short runs, the fastest machine by itself gets further: {alone}"
        f" alone; all together are as good as {together}"
    ]


def caveats(run: RunSketch, advice: PlanAdvice, losses: LossTable) -> list[str]:
    """Say what the figures rest on, and where they end."""
    best, unit = advice.best, _unit(run)
    row, variant = best.loss, best.variant
    error = "one seed" if row.error is None else f"{row.error:.1%} over {count(row.seeds, 'seed')}"
    said = [
        f"loss: held-out, above data-parallel at every step; here of {row.label}"
        + (f" with {row.sync_every} steps in a round" if row.sync_every > 1 else "")
        + f" ({row.above:+.1%}, {error}; {row.limits or 'no limits noted'})",
        f"these losses are of a model of {losses.size} parameters, {losses.workers} workers and"
        f" {row.steps:,} steps: longer runs lose less, and more workers more; docs/choosing.md",
        f"as good as: how many {unit} of data-parallel training would lead as far, taking it that"
        f" loss falls as the {losses.exponent:.2f}th power of the samples, as from one worker to"
        f" {losses.workers}",
    ]
    said.append(f"{variant.facts.line.partition('(')[0]}: {variant.facts.needs}")
    if row.sync_every != variant.sync_every:
        said.append(
            f"{variant.sync_every} steps in a round were not measured: taken as the nearest"
        )
    if variant.facts.documented.get(variant.codec) is None:
        said.append(f"{variant.codec} was not measured with it: taken as {row.label}")
    if best.forecast.delay_steps > 1:
        said.append(
            f"its loss was measured with results merged one step late, and here it is about"
            f" {best.forecast.delay_steps} (at most {DELAY_STEPS_MAX}): it will be higher"
        )
    if (silent := _without_tokens(run)) and len(silent) < len(run.hosts):
        who = listed(silent) if len(silent) <= NAMED_MAX else count(len(silent), "host")
        said.append(
            f"all training is counted in local steps, because it is not known how many tokens a"
            f" step of {who} has: say --tokens-per-step, or let scripts call outer.count(tokens)"
        )
    said.append("Muon as the inner optimizer is worth more than any of these: docs/choosing.md")
    said.append(f"{listed(NOT_COMPARED)} are not compared: docs/choosing.md says when they fit")
    return said


def _without_tokens(run: RunSketch) -> list[str]:
    """Return the hosts of which nobody knows how many tokens a step has."""
    return [host.name for host in run.hosts if host.tokens_per_step <= 0]


def document(run: RunSketch, advice: PlanAdvice, losses: LossTable) -> dict[str, Any]:
    """Return everything for programs, in plain types."""
    return {
        "hosts": [host.name for host in run.hosts],
        "parameters": run.parameters,
        "unit": "tokens" if run.in_tokens else "steps",
        "best": _plain(run, advice.best),
        "candidates": [_plain(run, each) for each in advice.judged],
        "alone_per_s": advice.alone_per_s,
        "is_worth_it": advice.is_worth_it,
        "improvements": [
            {"text": change.text, "speed": change.speed, "lead": change.lead}
            for change in advice.improvements
        ],
        "caveats": [*warnings(run, advice), *caveats(run, advice, losses)],
    }


def _plain(run: RunSketch, each: JudgedVariant) -> dict[str, Any]:
    found = each.forecast
    billion = found.cost_of(run, BILLION) if run.in_tokens else None
    return {
        "method": each.variant.method,
        "sync_every": each.variant.sync_every,
        "codec": each.variant.codec,
        "code": each.variant.code,
        "round_s": found.round_s,
        "parts": [
            {"name": part.name, "seconds": part.seconds, "source": part.source}
            for part in found.parts
        ],
        "training": found.training,
        "per_s": found.samples_per_s,
        "lead_per_s": each.lead_per_s,
        "topology": found.topology,
        "limited_by": found.busiest,
        "delay_steps": found.delay_steps,
        "sent_per_round_bytes": [round(sent) for sent in found.sent_bytes.tolist()],
        "sent_per_day_bytes": [round(sent) for sent in found.day_bytes().tolist()],
        "cost_per_day": found.day_cost(run),
        "cost_per_billion_tokens": billion,
        "loss_above": each.loss.above,
        "loss_error": each.loss.error,
        "loss_of": each.loss.label,
        "loss_sync_every": each.loss.sync_every,
        "loss_limits": each.loss.limits,
    }
