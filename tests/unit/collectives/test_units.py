"""Numbers as people read them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.units import count, duration, listed, memory, rate, size, span


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (4e-6, "0.004 ms"),
        (0.00331, "3.3 ms"),
        (0.05, "50 ms"),
        (0.1234, "123 ms"),
        (0.9999, "1 s"),
        (1.5, "1.5 s"),
        (25.0, "25 s"),
        (83.4, "83 s"),
        (119.0, "119 s"),
        (150.0, "2.5 min"),
        (3600.0, "60 min"),
        (5.2 * 3600, "5.2 h"),
        (3.4 * 86400, "3.4 days"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_prediction_needs_one_digit_only() -> None:
    assert duration(0.00331, 1) == "3 ms"
    assert duration(0.0124, 1) == "12 ms"
    assert duration(21.3, 1) == "21 s"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (950, "950 B"),
        (999.9, "1 kB"),
        (86_000, "86 kB"),
        (999_960, "1 MB"),
        (4_510_000, "4.5 MB"),
        (372e6, "372 MB"),
        (6.65e9, "6.7 GB"),
        (2e18, "2000 PB"),
    ],
)
def test_sizes(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0"), (10 * 2**20, "10 MiB"), (1536 * 2**20, "1.5 GiB"), (2**20 - 1, "1 MiB")],
)
def test_memory(nbytes: float, text: str) -> None:
    assert memory(nbytes) == text


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [
        (0, "0 bit/s"),
        (1.05e11 / 8, "105 Gbit/s"),
        (7.49e10 / 8, "74.9 Gbit/s"),
        (20e6 / 8, "20 Mbit/s"),
        (940_000 / 8, "940 kbit/s"),
        (999_999 / 8, "1 Mbit/s"),
    ],
)
def test_rates(bytes_per_s: float, text: str) -> None:
    assert rate(bytes_per_s) == text


@given(
    st.one_of(st.just(0.0), st.floats(1e-3, 1e15)), st.sampled_from([size, memory, rate, duration])
)
def test_a_number_has_at_most_five_digits_and_one_unit(value: float, say: object) -> None:
    """And it is right to a twentieth."""
    assert callable(say)
    found = re.fullmatch(r"([\d.]+)(?: ([a-zA-Z/]+))?", say(value))
    assert found
    if say is not duration:
        assert len(found[1].replace(".", "").lstrip("0")) <= 5
    scale = dict.fromkeys(("", "B", "bit/s", None), 1.0)
    for step, units in (
        (1000.0, ("kB", "MB", "GB", "TB", "PB")),
        (1000.0, ("kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")),
        (1024.0, ("KiB", "MiB", "GiB", "TiB", "PiB")),
    ):
        scale |= {unit: step ** (place + 1) for place, unit in enumerate(units)}
    scale |= {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "days": 86400.0}
    true = 8 * value if say is rate else value
    least = 5e-13 if say is duration else 0.5
    assert float(found[1]) * scale[found[2]] == pytest.approx(true, rel=0.051, abs=least)


def test_words_around_numbers() -> None:
    assert [count(1, "round"), count(3, "round")] == ["1 round", "3 rounds"]
    assert listed([]) == ""
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert span(["5 ms", "5 ms"]) == "5 ms"
    assert span(["5 ms", "50 ms"]) == "5 to 50 ms"
    assert span(["50 ms", "2 s"]) == "50 ms to 2 s"
