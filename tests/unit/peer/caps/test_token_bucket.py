"""One bucket: never more than the rate allows, the most urgent first, and nobody waits for ever."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.caps.token_bucket import (
    DEBT_S_MAX,
    PIECE_BYTES_MIN,
    RATE_BYTES_PER_S_MIN,
    STARVED_S,
    TokenBucket,
)

RATES = st.floats(RATE_BYTES_PER_S_MIN, 1e9)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.floats(0, 3)),
        st.tuples(st.just("take"), st.integers(1, 4 << 20)),
        st.tuples(st.just("return"), st.floats(0, 1)),  # this part of the last grant did not move
    ),
    max_size=60,
)


def taken(bucket: TokenBucket, wanted: int, now_s: float) -> int:
    """What somebody is granted at once, who gives up otherwise."""
    ticket = bucket.ask(0, now_s)
    granted = bucket.take(ticket, wanted, now_s)
    bucket.drop(ticket)
    return granted


@given(rate=RATES, steps=STEPS)
def test_no_time_has_more_than_the_rate_and_one_bucket(
    rate: float, steps: list[tuple[str, float]]
) -> None:
    now_s, bucket = 0.0, TokenBucket(rate, 0.0)
    moved: list[tuple[float, float]] = []  # (when, bytes)
    for kind, value in steps:
        if kind == "wait":
            now_s += value
        elif kind == "take":
            granted = taken(bucket, int(value), now_s)
            assert 0 <= granted <= value
            moved.append((now_s, granted))
        elif moved:
            at_s, granted = moved[-1]
            back = value * granted
            bucket.charge(-back, now_s)
            moved[-1] = at_s, granted - back
    for first, (from_s, _) in enumerate(moved):
        total = 0.0
        for at_s, count in moved[first:]:
            total += count
            assert total <= rate * (at_s - from_s) + bucket.burst_bytes + 1 + 1e-9 * total


@given(rate=RATES, control=st.lists(st.integers(1, 1 << 20), max_size=20))
def test_bulk_makes_good_for_what_did_not_ask(rate: float, control: list[int]) -> None:
    bucket = TokenBucket(rate, 0.0)
    for count in control:
        bucket.charge(count, 0.0)
    debt = min(max(sum(control) - bucket.burst_bytes, 0.0), DEBT_S_MAX * rate)
    ticket = bucket.ask(0, 0.0)
    wait_s = bucket.wait_s(ticket, PIECE_BYTES_MIN, 0.0)
    assert wait_s >= debt / rate - 1e-6
    assert wait_s <= DEBT_S_MAX + PIECE_BYTES_MIN / rate + 1e-6, "bulk has a trickle all the same"
    assert bucket.take(ticket, PIECE_BYTES_MIN, wait_s + 1e-6) == PIECE_BYTES_MIN


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_the_most_urgent_goes_first_and_equals_in_turn(urgencies: list[int]) -> None:
    bucket = TokenBucket(1e6, 0.0)
    tickets = [(urgency, bucket.ask(urgency, 0.0)) for urgency in urgencies]
    for place, (_, ticket) in enumerate(sorted(tickets)):
        now_s = place * 1e-6
        others = {other for _, other in tickets} - {ticket}
        for other in others:
            assert bucket.take(other, 1, now_s) == 0
            assert bucket.wait_s(other, 1, now_s) == math.inf
        assert bucket.take(ticket, 1, now_s) == 1
        tickets = [pair for pair in tickets if pair[1] != ticket]


def test_who_waited_too_long_goes_before_the_urgent() -> None:
    bucket = TokenBucket(1e6, 0.0)
    patient = bucket.ask(3, 0.0)
    urgent = bucket.ask(0, STARVED_S)
    assert bucket.take(urgent, 100, STARVED_S) == 0
    assert bucket.take(patient, 100, STARVED_S) == 100
    assert bucket.take(urgent, 100, STARVED_S) == 100


def test_a_dropped_turn_is_the_next_ones() -> None:
    bucket = TokenBucket(1e6, 0.0)
    first, second = bucket.ask(0, 0.0), bucket.ask(0, 0.0)
    bucket.drop(first)
    assert bucket.take(second, 100, 0.0) == 100


def test_without_a_limit_everything_goes_at_once_and_a_limit_begins_at_once() -> None:
    bucket = TokenBucket(math.inf, 0.0)
    for _ in range(3):
        assert taken(bucket, 1 << 30, 0.0) == 1 << 30
    bucket.charge(1 << 30, 0.0)
    bucket.set_rate(1e6, 1.0)
    moved, now_s = 0, 1.0
    while now_s <= 11.0:
        moved += taken(bucket, 1 << 20, now_s)
        now_s += 0.01
    assert moved == pytest.approx(10e6, rel=0.02)
    bucket.set_rate(math.inf, 12.0)
    assert taken(bucket, 1 << 30, 12.0) == 1 << 30


def test_a_slower_rate_begins_with_no_more_than_its_bucket() -> None:
    bucket = TokenBucket(1e9, 0.0)
    bucket.set_rate(1e5, 0.0)
    assert 0 < sum(taken(bucket, 1 << 20, 0.0) for _ in range(100)) <= bucket.burst_bytes
