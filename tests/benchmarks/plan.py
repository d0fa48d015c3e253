"""How well `atoll plan` predicts rounds of real daemons, and how good its choice is; as root.

    python tests/benchmarks/plan.py [--only shapes | NAME ... | choice] [--seed 7] [--rounds 9]

Hosts of a lab, each with a daemon and a trainer whose steps are a sleep. *Shapes*: four that stay
the same and two that are drawn (the seed is printed; at most 4 hosts, 50 Mbit/s, 5 million
parameters, so that the cores of this machine are not the limit). The round that `atoll plan`
predicts from what the lab was told, beside the median of the rounds after the links were measured;
the bar is 15 %. *Choice*: seven candidates on one shape, each run; how many more samples per second
the best of those makes whose documented loss is no worse than that of the one that is recommended;
the bar is 10 %. Takes about fifteen minutes.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results
from harness.labnet import NAMES, LabNet
from harness.plans import sketch
from harness.processes import Fleet, fleet

from atoll.peer.cli.plan import read_losses
from atoll.peer.lab.lab import Lab
from atoll.peer.plan.advice import advise
from atoll.peer.plan.model import RoundForecast, RunSketch, Variant, forecast
from atoll.peer.telemetry.event_file import read
from benchmarks.utilization import start, steps

WARM = 2  # rounds: the first is INIT, and streams are new
PLANNED_S = 90.0  # until links are measured; after that whatever rounds there are count
PATIENCE_S = 300.0  # for the rounds of one shape
LOOK_S = 0.5  # peers share the cores with this script


@dataclass(frozen=True)
class LabShape:
    """A lab, and the trainers on it: seconds of training in a round, of each host."""

    name: str
    mbit: tuple[float, ...]
    rtt_ms: float
    parameters: float
    training_s: tuple[float, ...]
    codec: str

    @property
    def sketch(self) -> RunSketch:
        return sketch(self.mbit, self.rtt_ms, self.training_s, self.parameters)

    @property
    def told(self) -> str:
        rates = "/".join(f"{each:g}" for each in self.mbit)
        train = "/".join(f"{each:g}" for each in sorted(set(self.training_s)))
        size = f"{self.parameters / 1e6:.1f}M {self.codec}"
        return f"{self.name:<8} {rates} Mbit/s, {self.rtt_ms:g} ms, {size}, {train} s"


SHAPES = (
    LabShape("equal", (50,) * 4, 40, 5e6, (3.0,) * 4, "int8"),
    LabShape("slow", (50, 50, 50, 10), 30, 2e6, (2.0,) * 4, "int4"),
    LabShape("far", (50,) * 3, 200, 3e6, (3.0,) * 3, "int8"),
    LabShape("uneven", (30, 40), 60, 4e6, (2.0, 3.0), "float32"),
)
CHOICE_STEP_S = 0.05
CHOICE = sketch((20,) * 4, 40, CHOICE_STEP_S, 2e6)
CANDIDATES = (
    *(Variant("diloco", h, codec) for h in (30, 100) for codec in ("int8", "int4")),
    Variant("sparse_loco", 30, "topk"),
    *(Variant("streaming", h, "fp4_e3m0") for h in (30, 100)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["shapes", "choice"])
    parser.add_argument("--seed", type=int, default=None, help="of the shapes that are drawn")
    parser.add_argument("--rounds", type=int, default=9, help="that count, of each")
    chosen = parser.parse_args()
    seed = int(time.time()) % 10_000 if chosen.seed is None else chosen.seed
    shapes = (*SHAPES, *drawn(seed))
    known = {shape.name for shape in shapes}
    print(f"seed {seed}", flush=True)
    wanted = [s for s in shapes if "shapes" in chosen.only or s.name in chosen.only]
    assert wanted or set(chosen.only) == {"choice"}, f"shapes are {sorted(known)}"
    errors = [measure(shape, chosen.rounds) for shape in wanted]
    if errors:
        results.say("plan/shapes/largest_error", 100 * max(errors), "%")
    if "choice" in chosen.only:
        results.say("plan/choice/behind", 100 * choose(chosen.rounds), "%")


def drawn(seed: int) -> Iterator[LabShape]:
    """Two shapes that nobody has fitted anything to."""
    random_ = random.Random(seed)
    for name in ("drawn-1", "drawn-2"):
        count = random_.randint(2, 4)
        yield LabShape(
            name,
            tuple(float(random_.randint(10, 50)) for _ in range(count)),
            float(random_.randint(5, 150)),
            random_.uniform(1e6, 5e6),
            tuple(round(random_.uniform(2.0, 4.0), 1) for _ in range(count)),
            random_.choice(("int8", "int4", "bfloat16")),
        )


@contextmanager
def hosts(mbit: tuple[float, ...], rtt_ms: float) -> Iterator[Fleet]:
    with (
        Lab(len(mbit), rate_mbit=dict(enumerate(mbit)), rtt_ms=rtt_ms) as lab,
        tempfile.TemporaryDirectory() as folder,
        fleet(Path(folder), LabNet(lab)) as run,  # type: ignore[arg-type]  # what a fleet needs
    ):
        yield run


def measure(shape: LabShape, rounds: int) -> float:
    """Print what was predicted and measured; return by how much they differ, as a fraction."""
    found = forecast(shape.sketch, Variant("diloco", 1, shape.codec))
    with hosts(shape.mbit, shape.rtt_ms) as run:
        names = NAMES[: len(shape.mbit)]
        run.form(names)
        for name, training_s in zip(names, shape.training_s, strict=True):
            run.train(name, shape.parameters, inner_s=training_s, codec=shape.codec)
        run.peers["a"].reaches(WARM)
        planned = wait_for_plan(run, names)
        rows = rows_after(run, names, run.peers["a"].status()["round"] + 1, rounds)
        told = run.peers["a"].status()["round_time"]
    took_s = statistics.median(row["took_s"] for row in rows)
    exchange_s = statistics.median(row["exchange_s"] for row in rows)
    error = took_s / found.round_s - 1
    own = f"{told['predicted_s']:.2f} s" if told else "nothing"
    print(
        f"{shape.told}: predicted {found.round_s:.2f} s, measured {took_s:.2f} s ({error:+.1%});"
        f" from BEGIN on {after_begin_s(found):.2f} and {exchange_s:.2f} s; status predicts {own};"
        f" {'planned' if planned else 'not planned'}, n={len(rows)}, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return abs(error)


def after_begin_s(found: RoundForecast) -> float:
    """Return what a daemon counts as the exchange: from BEGIN to the applied result."""
    return sum(p.seconds for p in found.parts if p.name not in ("training", "begin", "copies"))


def wait_for_plan(run: Fleet, names: str) -> bool:
    limit_s = time.monotonic() + PLANNED_S
    while time.monotonic() < limit_s:
        if all(run.peers[name].try_status().get("layout") for name in names):
            return True
        time.sleep(LOOK_S)
    return False


def rows_after(run: Fleet, names: str, first: int, rounds: int) -> list[dict[str, Any]]:
    """Return what each round from the first on was for the first peer, by its own clock."""
    peer = run.peers[names[0]]
    me = peer.status()["peer"]

    limit_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit_s:
        rows = [row for row in read(peer.home) if row["kind"] == "row" and row["peer"] == me]
        known = [each_round(row) for row in rows if row["first"] >= first and row.get("counted")]
        if sum(row["rounds"] for row in known) >= rounds:
            return known
        time.sleep(LOOK_S)
    raise SystemExit(f"not {rounds} rounds after round {first}\n{run.report()}")


def each_round(row: dict[str, Any]) -> dict[str, Any]:
    """A row's times by the number of its rounds."""
    rounds = row["last"] - row["first"] + 1
    times = {name: row.get(name, 0.0) / rounds for name in ("took_s", "exchange_s")}
    return {"rounds": rounds, **times}


# ---------------------------------------------------------------- the choice


def choose(rounds: int) -> float:
    """Run each candidate; return how far the recommended one is behind the best, as a fraction."""
    advice = advise(CHOICE, read_losses(), CANDIDATES)
    speeds: dict[Variant, float] = {}
    for judged in advice.judged:
        variant = judged.variant
        speeds[variant] = run_candidate(variant, rounds)
        predicted = judged.forecast.samples_per_s
        error = speeds[variant] / predicted - 1
        print(
            f"{variant.method} H={variant.sync_every} {variant.codec}: predicted {predicted:.1f}"
            f" steps/s of all, measured {speeds[variant]:.1f} ({error:+.1%});"
            f" documented loss {judged.loss.above:+.1%}",
            flush=True,
        )
    best = advice.best
    rivals = [each for each in advice.judged if each.loss.above <= best.loss.above]
    most = max(speeds[each.variant] for each in rivals)
    print(f"recommended: {best.variant.code}", flush=True)
    return 1 - speeds[best.variant] / most


def run_candidate(variant: Variant, rounds: int) -> float:
    """Return the local steps per second of all hosts."""
    count = len(CHOICE.hosts)
    mbit = tuple(8e-6 * rate for rate in CHOICE.network.up.tolist())
    with hosts(mbit, 2e3 * float(CHOICE.network.latency_s[0, 1])) as run:
        names = NAMES[:count]
        run.form(names)
        if variant.facts.streams:
            return streamed(run, names, variant, rounds)
        training_s = variant.sync_every * CHOICE_STEP_S
        method = "sparse_loco" if variant.method == "sparse_loco" else "diloco"
        for name in names:
            run.train(
                name, CHOICE.parameters, inner_s=training_s, codec=variant.codec, method=method
            )
        run.peers["a"].reaches(WARM)
        rows = rows_after(run, names, WARM + 1, rounds)
        took_s = statistics.median(row["took_s"] for row in rows)
        return count * variant.sync_every / took_s


def streamed(run: Fleet, names: str, variant: Variant, rounds: int) -> float:
    """Return the same of a method whose rounds are under way while its trainers compute."""
    chosen = argparse.Namespace(
        parameters=CHOICE.parameters, sync_every=variant.sync_every, step_s=CHOICE_STEP_S
    )
    trainers = {name: start(run, name, "streaming_diloco", chosen) for name in names}
    begin, end = (variant.sync_every * n for n in (WARM, WARM + rounds))
    limit_s = time.monotonic() + PATIENCE_S
    while min(map(steps, trainers.values())) < end:
        if time.monotonic() > limit_s:
            raise SystemExit(f"not {end} steps of all\n{run.report()}")
        time.sleep(LOOK_S)
    per_s = 0.0
    for trainer in trainers.values():
        at = {line["steps"]: line["now_s"] for line in trainer.lines if "steps" in line}
        per_s += (end - begin) / (at[end] - at[begin])
    return per_s


if __name__ == "__main__":
    main()
