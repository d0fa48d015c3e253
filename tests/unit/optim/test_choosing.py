"""`docs/choosing.md`: its numbers are those of the code, and its rows name what there is."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.convergence.figures import summaries
from benchmarks.convergence.methods import CEILING, METHODS
from benchmarks.convergence.plan import Plan
from benchmarks.convergence.report import BEGIN, END
from benchmarks.convergence.results import Results
from benchmarks.convergence.table import choices, losses
from harness.grids import rest_is_slow
from harness.method_costs import COSTS, Memory, Row, measure, measure_memory
from torch import nn

from atoll import optim
from atoll.optim import (
    DGC,
    AsyncDiLoCo,
    GradientAverage,
    LayerBits,
    LGreCo,
    NoLoCo,
    Population,
    PowerSGD,
    StreamingDiLoCo,
    Swarm,
    experimental,
)
from atoll.optim.compressors import Compressor
from atoll.optim.experimental import CO2, EF21
from atoll.peer.plan.losses import parse_losses

SLACK = 0.5  # bytes of a parameter: copies of one of 48 layers, objects

FOLDER = Path(__file__).parents[3] / "docs"
TEXT = (FOLDER / "choosing.md").read_text("utf-8")


def rows(heading: str) -> dict[str, list[str]]:
    """First cell -> the others, of the table below a heading."""
    below = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in below.splitlines() if line.startswith("|")]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in lines[2:]}


WRITTEN = {name.strip("`"): cells for name, cells in rows("What it costs").items()}


def three_digits(number: float) -> str:
    return f"{float(f'{number:.3g}'):,.10g}"


def test_every_row_is_measured_and_what_is_measured_has_a_row() -> None:
    assert list(WRITTEN) == list(COSTS)


@pytest.mark.parametrize("name", COSTS)
def test_what_a_row_says_is_what_the_codecs_and_the_run_say(name: str) -> None:
    row, (sent, every, fewer, daemon, _) = COSTS[name], WRITTEN[name]
    found = measure(row)
    assert every == str(row.sync_every)
    if row.per_parameter:
        assert (sent, fewer) == (three_digits(found.sent_bytes), three_digits(found.fewer))
    else:
        assert sent == f"{found.sent_bytes:g} in all"
    if found.daemon_bytes is not None:
        assert daemon == f"{found.daemon_bytes:.0f}"


@pytest.mark.parametrize("name", rest_is_slow(COSTS, 4))
def test_a_trainers_memory_is_what_is_written_and_what_is_allocated(name: str) -> None:
    found = measure_memory(COSTS[name])
    assert WRITTEN[name][4] == found.written
    check(found)


def check(found: Memory) -> None:
    """It is a bound, and not a wide one."""
    assert found.measured <= found.said + SLACK
    assert found.measured >= 0.75 * found.said - SLACK


@pytest.mark.parametrize(
    "compressor",
    [
        DGC(clip=1.0, nesterov=True, dense=("blocks.0.",)),
        EF21(eta=0.5),
        LayerBits(choice=LGreCo()),
        PowerSGD(rank=8, start=0),
        PowerSGD(rank=4, start=1000),
        PowerSGD(rank=4, start=0, choice=LGreCo()),
    ],
    ids=str,
)
def test_compressors_with_other_numbers_say_what_they_take(compressor: Compressor) -> None:
    def make(model: nn.Module, inner: Any, session: Any, _: int, **more: Any) -> GradientAverage:
        return GradientAverage(model, inner, session, compressor=copy.copy(compressor), **more)

    inner = torch.optim.SGD if compressor.has_momentum else torch.optim.AdamW
    check(measure_memory(Row(make, inner=inner)))


def test_it_is_printed_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    def start(name: str, session: Any) -> str:
        model = nn.Linear(1024, 1024, bias=False)  # 1 MiB for each byte of a parameter
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        COSTS[name].make(model, inner, session, 1)
        return capsys.readouterr().err

    names = ("CO2", "AsyncDiLoCo", "GradientAverage", "NoLoCo", "DeMo", "Population")
    said = {name: Swarm(1).run(partial(start, name))[0] for name in names}
    assert re.search(r"^atoll: 1,048,576 parameters\. Extra memory: daemon \d", said["CO2"])
    assert ", trainer 16 MiB, GPU 0." in said["CO2"]
    assert ", trainer 4 MiB, GPU 0." in said["AsyncDiLoCo"]
    assert "daemon 8 MiB, trainer 12 MiB. While a newcomer" in said["GradientAverage"]
    assert ", trainer 12 MiB, GPU 0." in said["NoLoCo"]
    assert ", trainer 4 MiB. While a newcomer" in said["DeMo"]
    assert "both take 8 MiB, and as much for each number" in said["Population"]


def test_what_classes_say_of_memory() -> None:
    kinds: dict[str, Any] = {
        "CO2": CO2,
        "StreamingDiLoCo(eager=True)": StreamingDiLoCo,
        "AsyncDiLoCo": AsyncDiLoCo,
        "NoLoCo": NoLoCo,
        "Population": Population,
    }
    for name, kind in kinds.items():
        says = " ".join((kind.__doc__ or "").split())
        found = re.findall(r"(\d+) bytes of (?:the trainer's )?host memory for each", says)
        found += re.findall(r"(\d+) bytes of the trainer's host memory", says)
        assert WRITTEN[name][4] in found, name


def test_every_method_is_in_every_table() -> None:
    methods = {"DiLoCo", "StreamingDiLoCo", "LocalSGD", "SparseLoCo", "NoLoCo", "DeMo"}
    methods |= {"ZerothOrder", "Population", "GradientAverage", "AsyncDiLoCo"}
    for heading in ("What it costs", "What peers do to each other", "Where to begin"):
        named = {word for first in rows(heading) for word in re.findall(r"`(\w+)", first)}
        assert methods <= named, heading
        assert named <= {*optim.__all__, *experimental.__all__}, heading


def test_what_it_names_is_there() -> None:
    classes = set(re.findall(r"`([A-Z]\w+)[(`]", TEXT))
    assert classes - {*optim.__all__, *experimental.__all__} == {"Contract"}
    root = Path(__file__).parents[3]
    for path in re.findall(r"`((?:tests|docs|collectives)/[\w/.]+\.py)`", TEXT):
        assert (root / path).exists(), path


def test_every_row_that_was_measured_is_printed() -> None:
    """``make bench-convergence`` writes the table, whenever it adds a row or its code changes."""
    plan, results = Plan(), Results(FOLDER / "convergence" / "results.jsonl")
    assert BEGIN + choices(plan, results) + END in TEXT
    printed = rows("Measured")
    measured = {each.line.method for each in summaries(plan, results)}
    assert {METHODS[name].label for name in measured} <= printed.keys()


def test_atoll_plan_knows_the_same_losses() -> None:
    """``make bench-convergence`` writes them from the same rows."""
    plan, results = Plan(), Results(FOLDER / "convergence" / "results.jsonl")
    written = (FOLDER.parent / "peer" / "plan" / "losses.json").read_text("utf-8")
    assert written == losses(plan, results)
    cells = {tuple(line.strip("| ").split(" | ")[:2]): line for line in TEXT.splitlines()}
    for row in parse_losses(written).rows:
        if row.method != CEILING:
            h = str(row.sync_every) if row.sync_every > 1 else ""
            assert f"{100 * row.above:+.1f}" in cells[row.label, h], row
