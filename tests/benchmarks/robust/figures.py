"""What an attack costs, and whether the bars are met."""

from __future__ import annotations

import math
import statistics

from benchmarks.convergence.bars import MET, MISSED, OPEN, Verdict
from benchmarks.convergence.results import Result, Results
from benchmarks.robust.plan import BEST, MEAN, NONE, Plan

__all__ = [
    "BEST_PERCENT",
    "RUINED",
    "RUINED_LEAST",
    "cost",
    "faults",
    "loss",
    "ruined",
    "standing_still",
    "verdicts",
]

RUINED = 0.5  # of the attack-free improvement is lost, or the run has diverged or stands still
BEST_PERCENT = 5.0  # the bar of the best rule: what the worst attack may cost it
RUINED_LEAST = 5  # the bar of the bench itself: so many attacks ruin the mean, or they are too weak
QUICK_RUINED_LEAST = 3  # ... of the six of `--quick`


def of_seeds(plan: Plan, results: Results, rule: str, attack: str) -> list[Result]:
    """Empty until all seeds are there."""
    found = [results.get(plan.row(rule, attack, seed)) for seed in range(plan.seeds)]
    done = [result for result in found if result is not None]
    return done if len(done) == plan.seeds else []


def loss(plan: Plan, results: Results, rule: str, attack: str = NONE) -> float | None:
    """At the end, held out; infinite where a seed diverged, None where one is missing."""
    found = of_seeds(plan, results, rule, attack)
    return statistics.fmean(result.loss for result in found) if found else None


def cost(plan: Plan, results: Results, rule: str, attack: str) -> float | None:
    """Which share of the improvement that the same rule makes without an attack is lost: 0 is
    none, 1 is all of it; infinite where the run diverged. The mean over seeds."""
    free = of_seeds(plan, results, rule, NONE)
    attacked = of_seeds(plan, results, rule, attack)
    if not free or not attacked or any(result.failed for result in free):
        return None
    return statistics.fmean(
        (one.loss - other.loss) / (other.points[0].loss - other.loss)
        for one, other in zip(attacked, free, strict=True)
    )


def standing_still(plan: Plan, results: Results, rule: str) -> float | None:
    """What an attack would cost that let the run learn nothing more: it is far from all of the
    improvement, because most of it comes before the attack begins."""
    free = of_seeds(plan, results, rule, NONE)
    if not free or any(result.failed for result in free):
        return None
    shares = []
    for result in free:
        (then,) = (p.loss for p in result.points if p.step == plan.first_attacked_step)
        shares.append((then - result.loss) / (result.points[0].loss - result.loss))
    return statistics.fmean(shares)


def ruined(share: float | None) -> bool:
    """Also where the share is not a number."""
    return share is not None and not share < RUINED


def verdicts(plan: Plan, results: Results) -> list[Verdict]:
    return [best_verdict(plan, results), mean_verdict(plan, results)]


def best_verdict(plan: Plan, results: Results) -> Verdict:
    what = f"{plan.text_of(BEST)}: of the attack-free improvement, the worst attack costs"
    found = costs(plan, results, BEST)
    bar = f"≤ {BEST_PERCENT:g} %"
    if not found:
        return Verdict(what, bar, "", OPEN)
    worst = max(found, key=lambda attack: found[attack])
    measured = f"{shown_share(found[worst])} ({worst}), {len(found)} of {len(plan.attacks)} attacks"
    if 100 * found[worst] > BEST_PERCENT:
        return Verdict(what, bar, measured, MISSED)
    return Verdict(what, bar, measured, MET if len(found) == len(plan.attacks) else OPEN)


def mean_verdict(plan: Plan, results: Results) -> Verdict:
    what = f"mean: attacks that ruin it ({100 * RUINED:g} % of the improvement lost, or diverged)"
    found = costs(plan, results, MEAN)
    count = sum(map(ruined, found.values()))
    if count >= RUINED_LEAST:
        said = MET
    else:
        said = MISSED if len(found) == len(plan.attacks) else OPEN
    measured = f"{count} of {len(found)} attacks" if found else ""
    return Verdict(what, f"≥ {RUINED_LEAST}", measured, said)


def costs(plan: Plan, results: Results, rule: str) -> dict[str, float]:
    """Of the attacks that have been measured."""
    found = {attack: cost(plan, results, rule, attack) for attack in plan.attacks}
    return {attack: share for attack, share in found.items() if share is not None}


def shown_share(share: float) -> str:
    return f"{100 * share:.1f} %" if math.isfinite(share) else "all: it diverged"


def faults(plan: Plan, results: Results) -> list[str]:
    """What is wrong with the few rows of `--quick`: a sentence for each."""
    wrong = [f"{row.line.method} has no result" for row in plan.pending(results)]
    for rule in plan.possible:
        free = loss(plan, results, rule)
        if free is not None and not math.isfinite(free):
            wrong.append(f"{plan.text_of(rule)} diverges without any attack")
    best = costs(plan, results, BEST)
    wrong += [
        f"{plan.text_of(BEST)} is ruined by {attack}: it costs {shown_share(share)}"
        for attack, share in best.items()
        if ruined(share)
    ]
    mean = costs(plan, results, MEAN)
    count = sum(map(ruined, mean.values()))
    if count < QUICK_RUINED_LEAST:
        wrong.append(
            f"the mean is ruined by {count} of {len(mean)} attacks; they are too weak to show "
            "anything"
        )
    return wrong
