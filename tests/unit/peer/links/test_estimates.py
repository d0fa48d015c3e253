"""Estimates against a link whose rate is known: noise, idle senders, shared links, paces."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.planning.pacing import LINK_SHARE, TRIAL_EVERY, TRIAL_FACTOR, is_trial
from atoll.peer.links.estimates import (
    FORGOTTEN_S,
    KEPT_S,
    LOSS_BYTES_MIN,
    RTT_KEPT_S,
    RTT_STEP_S,
    START_BYTES,
    WINDOWS_MIN,
    BestRate,
    OwnLinks,
    PairEstimate,
)
from atoll.peer.links.tcp_info import TcpInterval

RATE = 2.5e6
STEP_S = 0.25


def moved(
    rate: float,
    *,
    took_s: float = STEP_S,
    kernel: float | None = None,
    busy: float = 1.0,
    app_limited: bool = False,
    pace: float = 0.0,
    rtt_s: float = 0.05,
    lost: float = 0.0,
) -> TcpInterval:
    return TcpInterval(
        took_s,
        busy_s=busy * took_s,
        delivered=rate * took_s,
        sent=rate * took_s,
        lost=lost,
        rate=rate if kernel is None else kernel,
        app_limited=app_limited,
        unsent=0 if app_limited else 10_000,
        pace=pace,
        rtt_s=rtt_s,
        min_rtt_s=0.04,
    )


def received(rate: float) -> TcpInterval:
    return TcpInterval(STEP_S, arrived=rate * STEP_S)


class Link:
    """One pair, and a clock."""

    def __init__(self, took_s: float = STEP_S) -> None:
        self.pair, self.now_s, self.took_s = PairEstimate(), 1000.0, took_s

    def give(self, *intervals: TcpInterval, alone: bool = True, full: bool = False) -> None:
        self.now_s += self.took_s
        self.pair.handle(intervals, self.now_s, alone=alone, full=full)

    def free(self, rate: float = RATE, seconds: float = 3.0) -> None:
        for _ in range(round(seconds / self.took_s)):
            self.give(moved(rate, took_s=self.took_s))

    @property
    def out(self) -> float:
        return self.pair.now(self.now_s).out

    @property
    def age_s(self) -> float:
        return self.pair.now(self.now_s).age_s


# ---------------------------------------------------------------- the rate


@given(st.integers(0, 2**32))
def test_the_rate_is_found_among_samples_that_say_less(seed: int) -> None:
    """Whatever else the sender did before and afterwards, for hours."""
    draw = random.Random(seed)
    link, rate = Link(), 10 ** draw.uniform(4.5, 8.5)

    def something(seconds: float) -> None:
        """Samples that say nothing about the link; and noise in what the kernel says of them."""
        for _ in range(round(seconds / STEP_S)):
            part, kernel = rate * draw.random(), rate * draw.uniform(0, 1.02)
            kind = draw.choice(["idle", "app", "shared", "paced"])
            if kind == "idle":
                link.give()
            elif kind == "paced":
                link.give(moved(part, kernel=part, pace=part * draw.uniform(0.95, 1.1)))
            else:
                flag = kind == "app"
                link.give(moved(part, kernel=kernel, app_limited=flag), alone=kind != "shared")

    something(20)
    assert link.out == 0, "none of that says what the link has"
    for _ in range(16):
        noisy = rate * draw.uniform(0.92, 1.04)
        link.give(moved(noisy, kernel=rate * draw.uniform(0.5, 1.15)))
    assert link.out == pytest.approx(rate, rel=0.08)
    for _ in range(3):
        link.now_s += draw.uniform(0, KEPT_S)
        something(10)
        assert link.out == pytest.approx(rate, rel=0.08)


def spiral(hours: float, *, told: bool) -> float:
    """The estimate after so long in which its stream keeps to 99 % of it; ``told``: whether the
    estimate knows of the pace."""
    link, took_s = Link(took_s=1.0), 1.0
    link.free()
    for _ in range(round(hours * 3600)):
        pace = 0.99 * link.out
        link.give(moved(min(pace, RATE), took_s=took_s, pace=pace if told else 0.0))
    return link.out


def test_a_pace_does_not_bring_its_own_estimate_down() -> None:
    assert spiral(5, told=True) == pytest.approx(RATE)
    assert spiral(5, told=False) < 0.95 * RATE, "else this test shows nothing"


def test_a_rate_that_was_measured_too_low_is_corrected_by_rounds() -> None:
    """Rounds of three participants, two seconds of every ten, paced by half of what the link has;
    and then by what is known. Each round with another pace is a trial, as one of sixteen is."""
    link = Link()
    link.free(RATE / 2)
    before = 0.0
    for number in range(1, TRIAL_EVERY + 1):
        tries = is_trial(number) or link.out != before
        pace = LINK_SHARE * link.out * (TRIAL_FACTOR if tries else 1.0)
        before = link.out
        for _ in range(round(2.0 / STEP_S)):
            link.give(moved(min(pace, RATE), pace=pace), alone=False)
        for _ in range(round(8.0 / STEP_S)):
            link.give()
        assert (
            link.out >= min(RATE, 0.999 * LINK_SHARE * TRIAL_FACTOR * before)
            if tries
            else link.out >= before
        )
    assert link.out == pytest.approx(RATE)
    assert link.now_s - 1000.0 < 200, "within some minutes"


def test_a_probe_that_ends_while_tcp_begins_is_a_bound_and_one_that_goes_on_is_not() -> None:
    for rates, is_bound in (
        ((0.1, 0.4, 1.0), True),  # of 1 MiB over a long fast path
        ((0.5, 0.95, 1.0, 1.0, 0.97), False),
        ((1.0,), True),
    ):
        link = Link(took_s=0.1)
        link.pair.begin_probe()
        for share in rates:
            link.give(moved(share * RATE, took_s=0.1), full=True)
        assert link.pair.probed(link.now_s)
        assert link.pair.now(link.now_s).is_bound == is_bound
        link.pair.begin_probe()  # an hour later, as short again
        link.give(moved(RATE / 3, took_s=0.1), full=True)
        assert link.pair.probed(link.now_s)
        assert link.pair.now(link.now_s).is_bound == is_bound
        link.free()  # as a round of two shows it
        assert not link.pair.now(link.now_s).is_bound


def test_one_round_of_two_is_a_bound_and_several_are_not() -> None:
    """Doubt one alone: all that disturbs a round makes a rate smaller."""
    link = Link()
    for number in range(WINDOWS_MIN + 2):
        link.free(0.3 * RATE, seconds=1.5)
        link.give()  # it rests
        assert link.out > 0
        assert link.pair.now(link.now_s).is_bound == (number < WINDOWS_MIN - 1)


@pytest.mark.parametrize("loss", [0.0003, 0.001, 0.005, 0.02])
def test_losses_of_a_path_are_still_seen_where_bursts_are_left_out(loss: float) -> None:
    link, dice = Link(), np.random.default_rng(1)
    for _ in range(64):
        lost = 1448 * dice.poisson(loss * LOSS_BYTES_MIN / 1448)
        link.give(moved(LOSS_BYTES_MIN / STEP_S, rtt_s=0.04, lost=float(lost)))
    assert link.pair.now(link.now_s).loss == pytest.approx(loss, rel=0.4)


def test_what_a_probe_finds_in_spite_of_its_streams_pace_counts_at_once() -> None:
    """Its pace is lifted for it, so that nothing but the link limits what it sends."""
    link = Link(took_s=0.1)
    link.free(RATE / 2)
    for _ in range(100):
        link.give(moved(0.49 * RATE, took_s=0.1, pace=RATE / 2), alone=False)
    assert link.out == pytest.approx(RATE / 2)
    link.pair.begin_probe()
    for _ in range(5):
        link.give(moved(RATE, took_s=0.1, pace=1e12), full=True)
    assert link.pair.probed(link.now_s)
    assert link.out == pytest.approx(RATE)


def test_a_link_that_has_become_slower_is_found_in_spite_of_the_pace() -> None:
    link = Link(took_s=1.0)
    link.free()
    for _ in range(round(KEPT_S) + 10):
        link.give(moved(RATE / 2, took_s=1.0, pace=0.99 * RATE))
    assert link.out == pytest.approx(RATE / 2)


def test_a_link_that_has_become_faster_is_found_at_once() -> None:
    link = Link()
    link.free()
    link.free(2 * RATE, seconds=1.0)
    assert link.out == pytest.approx(2 * RATE)


def test_what_is_carried_while_others_share_the_link_may_only_raise_the_estimate() -> None:
    link = Link()
    for _ in range(20):
        link.give(moved(RATE), alone=False)
    assert link.out == 0
    link.free(RATE)
    age_s = link.age_s
    for _ in range(20):
        link.give(moved(1.5 * RATE), alone=False)
    assert link.out == pytest.approx(1.5 * RATE)
    assert link.age_s >= age_s + 20 * STEP_S, "a probe may still find more"


def test_a_probe_is_not_held_back_whatever_the_kernel_says() -> None:
    link = Link(took_s=0.1)
    for rate in (0.2 * RATE, 0.6 * RATE, RATE, 0.9 * RATE):
        link.give(moved(rate, took_s=0.1, app_limited=True), full=True)
    assert link.out == 0, "it may be broken off while the rate still grows"
    assert link.pair.probed(link.now_s)
    assert link.out == pytest.approx(RATE), "the best that the kernel has seen"
    assert link.age_s == 0


def test_a_probe_that_was_broken_off_leaves_nothing_to_the_next_one() -> None:
    link = Link(took_s=0.1)
    link.give(moved(RATE, took_s=0.1), full=True)
    link.pair.begin_probe()
    assert not link.pair.probed(link.now_s), "it has found nothing"
    assert link.out == 0


def test_rounds_of_three_raise_what_a_short_probe_has_found() -> None:
    """It ended while TCP's window was still opening; nothing that they see is ever free."""
    link = Link()
    link.give(moved(0.4 * RATE, took_s=0.1), full=True)
    assert link.pair.probed(link.now_s)
    for _ in range(round(4.0 / STEP_S)):
        link.give(moved(RATE), alone=False)
    assert link.out == pytest.approx(RATE)


def test_the_bucket_of_a_shaper_is_not_the_link() -> None:
    """The first bytes after each pause go through ten times as fast."""
    link = Link()
    for _ in range(10):
        link.give(moved(10 * RATE, took_s=START_BYTES / 11 / RATE))
        for _ in range(8):
            link.give(moved(RATE))
        link.give()
    assert link.out == pytest.approx(RATE, rel=0.03)


def test_a_link_on_which_nothing_lasts_is_known_from_what_the_kernel_says() -> None:
    link = Link()
    link.give(moved(8e7, busy=0.1, kernel=1.2e9), full=True)
    assert link.out == 0, "the probe may be broken off"
    assert link.age_s == float("inf")
    link.pair.probed(link.now_s)
    assert link.out == pytest.approx(1.2e9)
    assert link.age_s == 0, "nothing better is to be had"


def test_several_streams_are_counted_together() -> None:
    link = Link()
    for _ in range(12):
        link.give(*(moved(RATE / 4, kernel=RATE) for _ in range(4)))
    assert link.out == pytest.approx(RATE)
    for _ in range(2000):
        paced = [moved(RATE / 8, kernel=RATE, pace=RATE / 7.9) for _ in range(4)]
        link.give(*paced)
    assert link.out == pytest.approx(RATE)


def test_nobody_plans_with_what_was_long_ago() -> None:
    link = Link()
    link.free()
    link.now_s += FORGOTTEN_S - 1
    assert link.out
    link.now_s += 2
    assert link.out == 0


def test_the_best_of_some_time() -> None:
    best = BestRate()
    for at_s, rate in ((0.0, 5.0), (10.0, 3.0), (20.0, 4.0)):
        best.free(rate, at_s)
    assert best.value == 5
    best.free(1.0, KEPT_S + 5)
    assert best.value == 4, "the first is old now; the second was never the best of any time"
    best.at_least(3.7, KEPT_S + 6)
    best.free(1.0, 2 * KEPT_S)
    assert best.value == 4, "something has come near to it meanwhile"


# ---------------------------------------------------------------- round trips and losses


def test_the_round_trip_is_the_least_of_some_time() -> None:
    link = Link()
    trips_s: Iterator[float] = iter([0.08, 0.05, 0.06])
    for trip_s in trips_s:
        link.give(TcpInterval(STEP_S, min_rtt_s=trip_s))
    assert link.pair.now(link.now_s).rtt_s == 0.05
    for _ in range(round((RTT_KEPT_S + 2 * RTT_STEP_S) / RTT_STEP_S)):
        link.now_s += RTT_STEP_S
        link.give(TcpInterval(STEP_S, min_rtt_s=0.09))
    assert link.pair.now(link.now_s).rtt_s == 0.09, "the way has become longer"


def test_small_messages_show_the_way_that_a_probe_fills() -> None:
    """The stream's own least is that of a queue which stood when it was opened, and ever since."""
    link = Link()
    for _ in range(20):
        link.give(moved(RATE, rtt_s=0.08), full=True)
        link.pair.round_trip(0.02, link.now_s)
    link.pair.round_trip(0.0, link.now_s)  # a connection that does not know yet
    assert link.pair.now(link.now_s).rtt_s == 0.02


def test_losses_of_a_path_are_counted_and_those_of_a_queue_are_not() -> None:
    link = Link()
    for _ in range(20):
        link.give(moved(RATE, rtt_s=0.045, lost=0.01 * RATE * STEP_S))
    assert link.pair.now(link.now_s).loss == pytest.approx(0.01)
    for _ in range(20):
        link.give(moved(RATE, rtt_s=0.1, lost=0.3 * RATE * STEP_S))
    for _ in range(3):  # made good when the queue has gone
        link.give(moved(RATE, rtt_s=0.045, lost=0.3 * RATE * STEP_S))
    assert link.pair.now(link.now_s).loss == pytest.approx(0.01)


@pytest.mark.parametrize("overflows", [1, 3])
def test_what_a_full_queue_loses_at_once_is_no_loss_of_the_path(overflows: int) -> None:
    """Leave out what TCP loses while it begins; the queue has gone when the counters are read."""
    link = Link()
    for n in range(16):
        burst = 0.1 if n % 4 == 0 and n // 4 < overflows else 0.0
        link.give(moved(LOSS_BYTES_MIN / STEP_S, rtt_s=0.04, lost=burst * LOSS_BYTES_MIN))
    assert link.pair.now(link.now_s).loss == 0.0


def test_few_bytes_say_nothing_of_losses() -> None:
    link = Link()
    link.give(moved(0.9 * LOSS_BYTES_MIN / STEP_S, rtt_s=0.04, lost=1000))
    assert link.pair.now(link.now_s).loss is None


def test_losses_of_long_ago_are_outweighed() -> None:
    link = Link()
    for n in count():
        link.give(moved(1e8, rtt_s=0.04, lost=1e6 if n < 4 else 0.0))
        if n > 60:
            break
    assert link.pair.now(link.now_s).loss < 0.001


# ---------------------------------------------------------------- the links of this peer


def test_the_uplink_is_what_leaves_to_several_at_a_time() -> None:
    own, now_s = OwnLinks(), 0.0
    for _ in range(10):
        now_s += STEP_S
        own.handle([[moved(3 * RATE)], []], [], now_s)
    assert own.up(now_s) == 0, "of one stream alone nobody knows which side is the slower one"
    for _ in range(10):
        now_s += STEP_S
        own.handle([[moved(RATE)], [moved(2 * RATE)]], [], now_s)
    assert own.up(now_s) == pytest.approx(3 * RATE)
    for _ in range(round(3 * KEPT_S / STEP_S)):  # in hours with paces nothing is lost
        now_s += STEP_S
        paced = [[moved(0.99 * RATE, pace=RATE)], [moved(1.98 * RATE, pace=2 * RATE)]]
        own.handle(paced, [], now_s)
    assert own.up(now_s) == pytest.approx(3 * RATE)


def test_the_downlink_is_what_comes_from_several_at_a_time() -> None:
    own, now_s = OwnLinks(), 0.0
    for _ in range(10):
        now_s += STEP_S
        own.handle([], [[received(5 * RATE)]], now_s)
    assert own.down(now_s) == 0
    for _ in range(10):
        now_s += STEP_S
        own.handle([], [[received(RATE)], [received(RATE)]], now_s)
    assert own.down(now_s) == pytest.approx(2 * RATE)
    for _ in range(round(3 * KEPT_S / STEP_S)):  # its senders are paced, which it does not know
        now_s += STEP_S
        own.handle([], [[received(0.99 * RATE)], [received(0.99 * RATE)]], now_s)
    assert own.down(now_s) == pytest.approx(2 * RATE)
    assert own.down(now_s + FORGOTTEN_S) == 0
