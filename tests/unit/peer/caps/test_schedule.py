"""Caps by the hour: what a text means, and where a wrong one is wrong."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.peer.caps.schedule import (
    DAY_MINUTES,
    EXAMPLE,
    MBIT_MAX,
    MBIT_MIN,
    RateSchedule,
    parse_schedule,
)

OPTION = "--up-mbit"


def at(schedule: RateSchedule, clock: str) -> float:
    """Mbit/s at a time of day."""
    hours, minutes = clock.split(":")
    return schedule.at(60 * int(hours) + int(minutes)) * 8e-6


def test_the_example_is_unlimited_by_night() -> None:
    schedule = parse_schedule(EXAMPLE, OPTION)
    assert at(schedule, "21:59") == 50
    assert at(schedule, "22:00") == math.inf
    assert at(schedule, "00:00") == math.inf
    assert at(schedule, "05:59") == math.inf
    assert at(schedule, "06:00") == 50


def test_windows_in_any_order_and_until_midnight() -> None:
    schedule = parse_schedule("unlimited,18:00-24:00=2.5,00:00-06:30=100", OPTION)
    assert at(schedule, "23:59") == 2.5
    assert at(schedule, "00:00") == at(schedule, "06:29") == 100
    assert at(schedule, "06:30") == at(schedule, "17:59") == math.inf


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, dict[int, str]]:
    """A text, and the rate that each minute has by it."""
    rates = st.one_of(
        st.just("unlimited"), st.integers(1, 10**6).map(str), st.sampled_from(("1.5", "999.25"))
    )
    usual = draw(rates)
    cuts = sorted(draw(st.sets(st.integers(0, DAY_MINUTES - 1), max_size=8)))
    pairs = list(zip(cuts, cuts[1:] + cuts[:1], strict=True)) if len(cuts) > 1 else []
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    minutes = dict.fromkeys(range(DAY_MINUTES), usual)
    words = [usual]
    for begin, end in chosen:
        rate = draw(rates)
        times = (f"{begin // 60:02}:{begin % 60:02}", f"{end // 60:02}:{end % 60:02}")
        words.append(f"{times[0]}-{times[1]}={rate}")
        length = (end - begin) % DAY_MINUTES
        for minute in range(begin, begin + length):
            minutes[minute % DAY_MINUTES] = rate
    return ",".join(words), minutes


@given(schedules())
def test_every_minute_has_the_rate_of_its_window(case: tuple[str, dict[int, str]]) -> None:
    text, minutes = case
    schedule = parse_schedule(text, OPTION)
    for minute, rate in minutes.items():
        wanted = math.inf if rate == "unlimited" else float(rate)
        assert schedule.at(minute) * 8e-6 == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("text", "character", "expected"),
    [
        ("", 1, "a number of Mbit/s"),
        ("fast", 1, "a number of Mbit/s"),
        ("-5", 1, "a number of Mbit/s"),
        ("0.5", 1, f"from {MBIT_MIN:g} to {MBIT_MAX:,.0f}"),
        ("1e3", 1, "a number of Mbit/s"),
        ("unlimitedly", 1, "a number of Mbit/s"),
        ("50 Mbit", 1, "a number of Mbit/s"),
        ("50,", 4, "a time from 00:00 to 24:00"),
        ("50,22-06:00=9", 4, "a time from 00:00 to 24:00"),
        ("50,22:00-6=9", 10, "a time from 00:00 to 24:00"),
        ("50,22:00-25:00=9", 10, "a time from 00:00 to 24:00"),
        ("50,22:60-23:00=9", 4, "a time from 00:00 to 24:00"),
        ("50,24:01-02:00=9", 4, "a time from 00:00 to 24:00"),
        ("50,22:00=9", 9, '"-"'),
        ("50,22:00-06:00", 15, '"="'),
        ("50,22:00-06:00=", 16, "a number of Mbit/s"),
        ("50,22:00-06:00=none", 16, "a number of Mbit/s"),
        ("50,22:00-22:00=9", 4, "a window that is not empty"),
        ("50,00:00-24:00=9", 4, "a window that is not empty"),
        ("50,22:00-06:00=9,05:59-07:00=8", 18, "does not overlap"),
        ("50,08:00-10:00=9,07:00-12:00=8", 18, "does not overlap"),
    ],
)
def test_a_mistake_is_shown_at_its_place(text: str, character: int, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_schedule(text, OPTION)
    assert f"is expected at character {character}," in caught.value.what
    assert expected in caught.value.what
    assert text[character - 1 :] in caught.value.what
    assert caught.value.what.startswith(OPTION)
    assert EXAMPLE in str(caught.value)


@given(st.text(st.sampled_from("0123456789:-=,. unlimited"), max_size=30))
def test_any_text_is_a_schedule_or_an_error_with_a_place(text: str) -> None:
    schedule, error = None, ""
    try:
        schedule = parse_schedule(text, OPTION)
    except ConfigError as raised:
        error = raised.what
    assert schedule is not None or "at character " in error
    if schedule is not None:
        assert all(schedule.at(minute) >= MBIT_MIN / 8e-6 * 0.999 for minute in range(DAY_MINUTES))
