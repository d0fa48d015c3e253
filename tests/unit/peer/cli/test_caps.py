"""`--up-mbit`, `--down-mbit` and budgets: what they mean, and what is refused before a start."""

from __future__ import annotations

import argparse
import math

import pytest

from atoll.collectives.errors import ConfigError
from atoll.peer.caps.budget import BYTES_PER_GB, DayBudget
from atoll.peer.caps.caps import UNCAPPED, CapOptions
from atoll.peer.caps.schedule import BYTES_PER_MBIT
from atoll.peer.cli.caps import add_cap_options, cap_options


def parsed(*line: str) -> CapOptions:
    parser = argparse.ArgumentParser()
    add_cap_options(parser)
    return cap_options(parser.parse_args(line))


def test_without_options_nothing_is_capped() -> None:
    assert parsed() == UNCAPPED
    assert UNCAPPED.up.is_open
    assert UNCAPPED.down.is_open


def test_each_direction_has_its_own() -> None:
    found = parsed("--up-mbit", "20,22:00-06:00=unlimited", "--down-gb-per-day", "12.5")
    assert found.up.schedule.at(12 * 60) == 20 * BYTES_PER_MBIT
    assert found.up.schedule.at(23 * 60) == math.inf
    assert found.up.budget is None
    assert found.down.schedule.at(12 * 60) == math.inf
    assert found.down.budget == DayBudget(round(12.5 * BYTES_PER_GB))
    assert not found.up.is_open
    assert not found.down.is_open


@pytest.mark.parametrize(
    "line",
    [
        ("--up-mbit", "fast"),
        ("--down-mbit", "50,22:00-6:00=unlimited"),
        ("--up-gb-per-day", "lots"),
        ("--up-gb-per-day", "1"),
        ("--down-gb-per-day", "nan"),
        ("--down-gb-per-day", "-20"),
        ("--down-gb-per-day", "inf"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(line: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(*line)
    assert caught.value.what.startswith(" ".join(line))
    assert f"write it like {line[0]} " in str(caught.value)
