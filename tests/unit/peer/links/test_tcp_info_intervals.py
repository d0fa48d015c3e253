"""From counters to what happened between two readings, and what shared a link with what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.peer.links.estimates import WINDOW_BYTES, WINDOW_S, RateWindow
from atoll.peer.links.tcp_info import (
    HELD_BACK_S,
    HELD_BACK_SHARE,
    LOAD_BYTES,
    LossWatch,
    TcpInfo,
    TcpInterval,
    Traffic,
    between,
)

MSS, HEADERS = 1000, 1.05
BEFORE = TcpInfo(
    app_limited=False,
    mss=MSS,
    received_mss=MSS,
    headers=HEADERS,
    rtt_s=0.05,
    min_rtt_s=0.04,
    received_bytes=10_000,
    unsent_bytes=0,
    received_packets=10,
    delivery_rate=1e6,
    busy_s=1.0,
    delivered=100,
    sent_bytes=110_000,
    retransmitted_bytes=10_000,
    duplicates=2,
)
A, B = b"a" * 32, b"b" * 32
MUCH, LITTLE = TcpInterval(0.1, sent=LOAD_BYTES), TcpInterval(0.1, sent=LOAD_BYTES - 1)


def test_what_moved_is_counted_on_the_wire() -> None:
    after = replace(
        BEFORE,
        received_bytes=30_000,
        received_packets=30,
        delivery_rate=2e6,
        busy_s=1.2,
        delivered=150,
        sent_bytes=170_000,
        retransmitted_bytes=16_000,
        duplicates=3,
        unsent_bytes=7,
    )
    one = between(BEFORE, after, 0.2, pace=5.0)
    assert one.delivered == pytest.approx(HEADERS * 50 * MSS)
    assert one.sent == pytest.approx(HEADERS * 60_000)
    assert one.lost == pytest.approx(HEADERS * 5_000), "one of six packets had arrived after all"
    assert one.rate == pytest.approx(HEADERS * 2e6)
    assert one.arrived == pytest.approx(HEADERS * 20_000)
    assert (one.took_s, one.unsent, one.pace) == (0.2, 7, 5.0)
    assert one.busy_s == pytest.approx(0.2)
    assert one.whole
    assert one.is_load


def test_a_rate_that_the_kernel_has_kept_is_not_a_new_one() -> None:
    assert between(BEFORE, replace(BEFORE, delivered=110), 0.2).rate == 0


def test_a_hole_that_is_filled_is_not_a_fast_link() -> None:
    after = replace(BEFORE, received_bytes=500_000, received_packets=20)
    assert between(BEFORE, after, 0.2).arrived == pytest.approx(HEADERS * 10 * MSS)


def test_counters_of_32_bits_start_again() -> None:
    after = replace(BEFORE, delivered=5)
    assert between(replace(BEFORE, delivered=2**32 - 5), after, 0.2).delivered == pytest.approx(
        HEADERS * 10 * MSS
    )


def test_of_the_first_reading_only_the_round_trip_is_known() -> None:
    one = between(None, BEFORE, 0.0)
    assert (one.min_rtt_s, one.delivered, one.sent, one.rate) == (0.04, 0, 0, 0)
    assert not one.moving


def test_a_window_is_long_enough_for_what_it_counts() -> None:
    window, half_s = RateWindow(), WINDOW_S / 2
    assert window.add(half_s / 2, 1000) == 0
    assert window.add(half_s / 2, 3000) == 0, "half of it"
    assert window.add(half_s, 2000) == pytest.approx(6000 / WINDOW_S)
    assert window.add(half_s / 2, 1000) == 0
    assert window.add(half_s / 2, 1000) == pytest.approx(4000 / WINDOW_S), "it began in the middle"
    window.reset()
    assert window.add(half_s, 1000) == 0
    window.reset()
    trip_s = WINDOW_S
    assert [window.add(half_s, 1000, trip_s) > 0 for _ in range(8)] == [False] * 7 + [True]
    window.reset()
    assert window.add(0.1, WINDOW_BYTES / 2, rtt_s=0.01) == 0
    assert window.add(0.1, WINDOW_BYTES / 2, rtt_s=0.01) == pytest.approx(WINDOW_BYTES / 0.2)


def test_a_window_is_held_back_if_a_part_of_it_was() -> None:
    window, half_s = RateWindow(), WINDOW_S / 2
    found = []
    for held_back in (False, False, True, False, False):
        if window.add(half_s, 1000, held_back=held_back):
            found.append(window.held_back)
    assert found == [False, True, True, False]


def test_a_machine_that_stands_still_does_not_make_its_link_faster() -> None:
    """Mbit/s in 0.1 s each, as counted on a link of 40: no acknowledgement came for 100 ms, and
    those that were late came together."""
    seen = (35.2, 35.3, 33.7, 37.0, 27.9, 33.5, 28.5, 5.3, 34.0, 38.0, 44.7, 51.3)
    seen += (39.6, 39.5, 39.6, 39.0, 39.7, 39.6, 40.0, 39.5, 39.8, 39.9, 40.1, 39.8)
    window = RateWindow()
    found = [rate for mbit in seen if (rate := window.add(0.1, mbit * 0.1, rtt_s=0.1))]
    assert 38 < max(found) < 1.05 * 40


def came(count: float) -> TcpInterval:
    return TcpInterval(0.1, arrived=count)


def test_only_what_goes_to_one_peer_is_alone() -> None:
    assert Traffic({A: [MUCH, MUCH], B: [LITTLE]}, {}).is_alone(A)
    assert not Traffic({A: [MUCH]}, {}).is_alone(B)
    assert not Traffic({A: [MUCH], B: [LITTLE, MUCH]}, {}).is_alone(A)


def test_what_arrives_is_in_the_way_of_the_acknowledgements() -> None:
    for source in (A, B):
        assert not Traffic({A: [MUCH]}, {source: [came(LOAD_BYTES), came(1)]}).is_alone(A)
    assert Traffic({A: [MUCH]}, {A: [came(LOAD_BYTES)], B: [came(LOAD_BYTES)]}).is_alone(A)


def test_who_sends_and_from_whom_something_comes() -> None:
    quiet = Traffic({A: [LITTLE], B: []}, {A: [], B: [came(10)]})
    assert not quiet.sending
    assert not quiet.arriving
    busy = Traffic({A: [MUCH], B: []}, {A: [], B: [came(1e6)]})
    assert (busy.sending, busy.arriving) == ({A}, {B})


STEP_S, PACE = 0.25, 1e6
HELD = TcpInterval(
    STEP_S, busy_s=STEP_S, delivered=0.3 * STEP_S * PACE, sent=1e5, lost=3000.0, unsent=9, pace=PACE
)


def readings_until_held_back(*intervals: TcpInterval) -> int:
    """Return after how many readings a stream is said to be held back; 0 for never."""
    watch = LossWatch()
    return next((n for n, did in enumerate(intervals, 1) if watch.is_held_back(did)), 0)


def test_a_stream_far_below_its_pace_that_loses_for_long_is_held_back() -> None:
    assert readings_until_held_back(*[HELD] * 9) == -(-HELD_BACK_S // STEP_S)
    lost_before = replace(HELD, delivered=0.9 * STEP_S * PACE)
    assert readings_until_held_back(lost_before, *[replace(HELD, lost=0.0)] * 9)


@pytest.mark.parametrize(
    "other",
    [
        replace(HELD, delivered=HELD_BACK_SHARE * STEP_S * PACE),
        replace(HELD, lost=0.0),  # the other side, or a queue without end
        replace(HELD, unsent=0),  # there was no more to send
        replace(HELD, busy_s=0.5 * STEP_S),
    ],
)
def test_what_else_makes_a_stream_slow_are_no_losses(other: TcpInterval) -> None:
    assert not readings_until_held_back(*[other] * 9)


def test_readings_that_were_fast_enough_begin_the_time_anew() -> None:
    fast = replace(HELD, delivered=STEP_S * PACE)
    assert not readings_until_held_back(*[HELD, HELD, fast] * 9)
