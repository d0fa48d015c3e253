"""The network of a lab does what it was asked for, measured through the kernel's own sockets."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence

import pytest
from netlab.measures import (
    PATIENCE_S,
    PAYLOAD_SHARE,
    PORT,
    Flood,
    arrived,
    bound,
    ping_ms,
    received_mbit,
    send_numbered,
    tcp_mbit,
)

from atoll.collectives.errors import ConfigError
from atoll.peer.lab.lab import Lab

# ---------------------------------------------------------------- time


def test_the_round_trip_is_what_was_asked_for() -> None:
    with Lab(3, rtt_ms=40, rate_mbit=100) as lab:
        assert 40 * 0.99 <= ping_ms(lab, 0, 1) <= 40 * 1.05
        lab.set_path(0, 2, delay_ms=5)
        lab.set_path(2, 0, delay_ms=25)
        assert 30 * 0.99 <= ping_ms(lab, 2, 0) <= 30 * 1.05
        lab.set_path(2, 0, delay_ms=5)
        assert ping_ms(lab, 2, 0) <= 10 * 1.15
        assert 40 * 0.99 <= ping_ms(lab, 1, 2, times=5) <= 40 * 1.05, "the others stay as they are"


@pytest.mark.parametrize("reorder", [False, True])
def test_jitter_stays_within_its_bounds_and_reorders_only_if_asked(reorder: bool) -> None:
    with Lab(2, rtt_ms=60, jitter_ms=10, reorder=reorder, seed=3) as lab, bound(lab, 1) as receiver:
        sent_s = send_numbered(lab, 0, 1, 300, gap_s=0.001)
        found = arrived(receiver, quiet_s=0.3)
    delays_ms = [(at_s - sent_s[number]) * 1e3 for number, at_s in found]
    assert len(found) == 300
    assert min(delays_ms) > 19.5
    assert statistics.quantiles(delays_ms, n=10)[-1] < 42
    assert statistics.pstdev(delays_ms) > 1
    numbers = [number for number, _ in found]
    assert (numbers == sorted(numbers)) is not reorder


# ---------------------------------------------------------------- rates


def test_one_tcp_stream_fills_the_link() -> None:
    with Lab(2, rate_mbit=20, rtt_ms=20) as lab:
        mbit = tcp_mbit(lab, 0, 1, warm_s=1.0, during_s=1.5)
        share = mbit / (20 * PAYLOAD_SHARE)
        assert 0.95 <= share <= 1.01, f"{mbit:.2f} Mbit/s of payload is {share:.1%}"


def test_each_host_has_its_own_rates_and_they_change() -> None:
    with Lab(3, rate_mbit={0: (10, 40), 1: 40, 2: (40, 5)}, rtt_ms=20) as lab:
        with Flood(lab, 0, 1):
            time.sleep(0.1)
            assert received_mbit(lab, 1) == pytest.approx(10, rel=0.03), "the sender's uplink"
            lab.set_rate(0, up=20)
            time.sleep(0.1)
            assert received_mbit(lab, 1) == pytest.approx(20, rel=0.03)
            lab.set_rate(1, down=2)
            time.sleep(0.1)
            assert received_mbit(lab, 1) == pytest.approx(2, rel=0.03), "the receiver's downlink"
        with Flood(lab, 0, 2), Flood(lab, 1, 2):
            time.sleep(0.2)
            assert received_mbit(lab, 2) == pytest.approx(5, rel=0.03), "shared by both senders"
        assert all(lab.counters(host).dropped_queue for host in range(3)), "queues are bounded"


def test_a_queue_holds_one_bandwidth_delay_product_or_64_kib() -> None:
    with Lab(2, rate_mbit=10, rtt_ms=20) as lab:  # 64 KiB at 10 Mbit/s are 52 ms
        with Flood(lab, 0, 1):
            time.sleep(0.2)
            assert 65 <= ping_ms(lab, 0, 1, times=7) <= 80
        lab.set_path(0, 1, delay_ms=90)  # 125,000 bytes are 100 ms, and so is the path
        with Flood(lab, 0, 1):
            time.sleep(0.3)
            assert 185 <= ping_ms(lab, 0, 1, times=5) <= 210


# ---------------------------------------------------------------- loss and cuts


def test_loss_is_drawn_from_the_seed() -> None:
    count, loss = 4000, 5.0

    def survivors(seed: int) -> Sequence[int]:
        with Lab(3, loss=loss, seed=seed) as lab, bound(lab, 1) as receiver, bound(lab, 0):
            send_numbered(lab, 2, 0, 100)  # of another pair: takes nothing from this one
            send_numbered(lab, 0, 1, count, gap_s=0.001, every=200)
            found = [number for number, _ in arrived(receiver, quiet_s=0.2)]
            sender = lab.counters(0)
        assert sender.dropped_loss == count - len(found)
        assert sender.dropped_packets == sender.dropped_loss
        return found

    first = survivors(1)
    sigma = (count * loss / 100 * (1 - loss / 100)) ** 0.5
    assert abs(count - len(first) - count * loss / 100) < 4 * sigma
    assert survivors(1) == first
    assert survivors(2) != first


def test_a_cut_is_one_way_and_takes_what_is_on_its_way() -> None:
    with Lab(3, rtt_ms=100) as lab, bound(lab, 0) as zero, bound(lab, 1) as one:
        send_numbered(lab, 0, 1, 1)
        time.sleep(0.005)
        lab.cut(0, 1)
        send_numbered(lab, 0, 1, 2)
        send_numbered(lab, 1, 0, 3)
        send_numbered(lab, 2, 1, 4)
        assert len(arrived(zero, quiet_s=0.2)) == 3
        assert len(arrived(one, quiet_s=0.1)) == 4, "from host 2 only"
        assert lab.counters(0).dropped_cut == 3
        lab.cut(2, 1, both=True)
        lab.heal(0, 1)
        send_numbered(lab, 0, 1, 5)
        send_numbered(lab, 2, 1, 6)
        send_numbered(lab, 1, 2, 7)
        assert len(arrived(one, quiet_s=0.2)) == 5
        assert lab.counters(2).dropped_cut == 6
        assert lab.counters(1).dropped_cut == 7
        lab.heal()
        send_numbered(lab, 2, 1, 8)
        assert len(arrived(one, quiet_s=0.2)) == 8


def test_every_packet_is_accounted_for() -> None:
    with Lab(2, loss=20, rate_mbit=5, rtt_ms=10, seed=7) as lab:
        with Flood(lab, 0, 1), bound(lab, 1):
            time.sleep(0.2)
        time.sleep(0.3)  # until the queue is empty
        sender, receiver = lab.counters(0), lab.counters(1)
        assert sender.sent_packets == receiver.received_packets + sender.dropped_packets
        assert sender.sent_bytes == 1500 * sender.sent_packets
        assert receiver.received_bytes == 1500 * receiver.received_packets


# ---------------------------------------------------------------- sizes


def test_sixty_four_hosts_and_large_packets() -> None:
    with Lab(64, rtt_ms=4, mtu_bytes=9000) as lab, bound(lab, 63) as receiver:
        assert ping_ms(lab, 0, 63, times=3) < 10
        receiver.settimeout(PATIENCE_S)
        with lab.socket(17, socket.SOCK_DGRAM) as sender:
            sender.sendto(bytes(8972), (lab.address(63), PORT))
        assert len(receiver.recv(1 << 16)) == 8972
        assert lab.counters(17).sent_bytes == 9000


def test_wrong_arguments_are_refused_and_change_nothing() -> None:
    with Lab(2, rtt_ms=4) as lab:
        for wrong in (
            lambda: lab.cut(0, 2),
            lambda: lab.cut(1, 1),
            lambda: lab.set_rate(-1, up=3),
            lambda: lab.set_rate(0, down=-1),
            lambda: lab.set_path(0, 1, loss=101),
            lambda: lab.set_path(0, 1, jitter_ms=3),
            lambda: lab.address(7),
            lambda: lab.counters(2),
        ):
            with pytest.raises(ConfigError):
                wrong()
        assert ping_ms(lab, 0, 1, times=3) < 10
    with pytest.raises(ConfigError, match="has ended"):
        lab.cut(0, 1)
