"""From counters to what happened between two readings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.peer.measuring.slices import WINDOW_BYTES, WINDOW_S, Window, between
from atoll.peer.measuring.tcpinfo import TcpInfo

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
    window = Window()
    assert window.add(WINDOW_S / 2, 1000) == 0
    assert window.add(WINDOW_S / 2, 3000) == pytest.approx(4000 / WINDOW_S)
    assert window.add(WINDOW_S / 2, 1000) == 0, "it begins anew"
    window.reset()
    assert window.add(WINDOW_S, 1000, rtt_s=WINDOW_S) == 0, "one round trip is not enough"
    window.reset()
    assert window.add(0.1, WINDOW_BYTES, rtt_s=0.01) == pytest.approx(WINDOW_BYTES / 0.1)
