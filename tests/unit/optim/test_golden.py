"""Histories of every method are as they were: whoever changes arithmetic sees it here.

`make golden-rewrite` writes them anew, where a change was meant. harness/golden.py says what the
tolerance is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from harness import golden
from harness.golden import CASES, FOLDER, History

from atoll.optim import DiLoCo, Swarm
from atoll.optim.run_spec import COLLECTIVES, METHODS


def numbers(history: History) -> list[float]:
    """All of them, in order."""

    def flat(value: Any) -> list[float]:
        if isinstance(value, dict):
            return [x for name in sorted(value) for x in flat(value[name])]
        return [x for one in value for x in flat(one)] if isinstance(value, list) else [value]

    return flat(history)


def is_close(found: History, kept: History, tolerance: float) -> bool:
    """Relatively, or to a value of 1: parameters are drawn from [-1, 1)."""
    a, b = numbers(found), numbers(kept)
    assert len(a) == len(b)
    return all(abs(x - y) <= tolerance * max(1.0, abs(y)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_history_is_as_written(name: str) -> None:
    case, kept = CASES[name], golden.read(name)
    found = golden.play(case)
    assert [[sorted(one) for one in row] for row in found] == [
        [sorted(one) for one in row] for row in kept
    ]
    assert is_close(found, kept, case.tolerance), "make golden-rewrite, and read the difference"


def test_it_trains() -> None:
    """Histories of methods that do not get anywhere would say little."""
    untrained = golden.Model().loss(b"heldout")
    for name in CASES:
        losses = [worker["loss"] for row in golden.read(name) for worker in row]
        assert min(losses) < 0.95 * untrained, name


def test_files_are_those_of_the_cases() -> None:
    assert {path.name for path in FOLDER.glob("*.json")} == {f"{name}.json" for name in CASES}


def test_there_is_one_of_each_method() -> None:
    """Of those that a run may have, but for the one of a session's own collectives."""

    methods = set()
    for case in CASES.values():
        swarm = Swarm(1)
        swarm.run(partial(golden.train, replace(case, rows=1)))
        methods.add(swarm.state.spec.method)
    assert methods == set(METHODS) - {COLLECTIVES}


@pytest.mark.parametrize("change", [{"outer_lr": 0.7007}, {"outer_momentum": 0.9009}])
def test_a_rate_that_is_a_tenth_of_a_percent_off_shows(change: dict[str, float]) -> None:
    options = {**golden.OUTER, "codec": "float32", **change}
    make = partial(_diloco, options)
    found = golden.play(replace(CASES["diloco_float32"], make=make))
    assert not is_close(found, golden.read("diloco_float32"), golden.TOLERANCE)


def _diloco(options: dict[str, Any], model: Any, inner: Any, session: Any) -> DiLoCo:
    return DiLoCo(model, inner, golden.H, session, **options)
