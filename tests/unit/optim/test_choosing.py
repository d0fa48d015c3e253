"""`docs/choosing.md`: its numbers are those of the code, and its rows name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness.method_costs import COSTS, measure

from atoll import optim
from atoll.optim import CO2, NoLoCo, StreamingDiLoCo

TEXT = (Path(__file__).parents[3] / "docs" / "choosing.md").read_text("utf-8")


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


def test_memory_of_trainers_is_what_the_methods_say() -> None:
    for kind, name in ((CO2, "CO2"), (StreamingDiLoCo, "StreamingDiLoCo(eager=True)")):
        says = re.search(r"cost[s]?\s+(\d+)\s+bytes", " ".join((kind.__doc__ or "").split()), re.I)
        assert says is not None
        assert WRITTEN[name][4] == says[1]
    assert f"Costs {WRITTEN['NoLoCo'][4]} bytes" in " ".join((NoLoCo.__doc__ or "").split())


def test_every_method_is_in_every_table() -> None:
    methods = {"DiLoCo", "StreamingDiLoCo", "LocalSGD", "CO2", "SparseLoCo", "NoLoCo", "DeMo"}
    methods |= {"ZerothOrder", "Population", "GradientAverage", "AsyncDiLoCo"}
    for heading in ("What it costs", "What peers do to each other", "Where to begin"):
        named = {word for first in rows(heading) for word in re.findall(r"`(\w+)", first)}
        assert methods <= named, heading
        assert named <= set(optim.__all__), heading


def test_what_it_names_is_there() -> None:
    classes = set(re.findall(r"`([A-Z]\w+)[(`]", TEXT))
    assert classes - set(optim.__all__) == {"Contract"}
    root = Path(__file__).parents[3]
    for path in re.findall(r"`((?:tests|docs|collectives)/[\w/.]+\.py)`", TEXT):
        assert (root / path).exists(), path
