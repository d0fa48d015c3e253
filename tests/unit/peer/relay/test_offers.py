"""Test what a relay may have a peer dial: so many at once, and nothing for a while if all fail."""

from __future__ import annotations

import pytest

from atoll.peer.relay.offers import (
    FAILURES_MAX,
    OFFERS_MAX,
    PAUSE_S,
    PER_RELAY_MAX,
    RELAYS_MAX,
    Offers,
)

R, S = (name.encode() * 32 for name in "rs")


def fails(offers: Offers, count: int, now_s: float = 0.0, *, led_there: bool = False) -> int:
    """Let so many offers of R fail; return how many of them are written down."""
    said = 0
    for _ in range(count):
        assert offers.begin(R, now_s)
        said += offers.failed(R, now_s, led_there=led_there)
        offers.ended(R)
    return said


def test_one_relay_takes_so_many_places_and_not_all() -> None:
    offers = Offers()
    assert [offers.begin(R, 0.0) for _ in range(PER_RELAY_MAX + 1)].count(True) == PER_RELAY_MAX
    assert offers.begin(S, 0.0)
    offers.ended(R)
    assert offers.begin(R, 0.0)
    others = (number.to_bytes(32, "big") for number in range(OFFERS_MAX))
    assert [offers.begin(one, 0.0) for one in others].count(True) == OFFERS_MAX - PER_RELAY_MAX - 1


def test_after_failures_in_a_row_nothing_is_dialled_for_a_while() -> None:
    offers = Offers()
    assert fails(offers, FAILURES_MAX) == 1, "it is said once"
    assert not offers.begin(R, PAUSE_S - 0.1)
    assert offers.begin(S, 0.0), "that is the matter of one relay"
    assert fails(offers, 1, PAUSE_S) == 1
    assert not offers.begin(R, PAUSE_S + 0.1), "one more is enough"


@pytest.mark.parametrize("led_there", [True, False])
def test_a_relay_that_answers_is_not_paused(led_there: bool) -> None:
    offers = Offers()
    for _ in range(2):
        fails(offers, FAILURES_MAX - 1)
        if led_there:
            fails(offers, 1, led_there=True)
        else:
            offers.joined(R)
    assert offers.begin(R, 0.0)


def test_relays_that_are_remembered_are_bounded() -> None:
    offers = Offers()
    for number in range(2 * RELAYS_MAX):
        offers.failed(number.to_bytes(32, "big"), 0.0, led_there=False)
    assert len(offers._failures) == RELAYS_MAX
    fails(offers, 1)
    assert not offers._under_way
