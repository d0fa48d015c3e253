"""The network that is made where there is no compiler; and who clears it away."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from netlab.measures import (
    PATIENCE_S,
    PAYLOAD_SHARE,
    Flood,
    arrived,
    bound,
    ping_ms,
    received_mbit,
    send_numbered,
    tcp_mbit,
)

from atoll.peer.lab import spaces
from atoll.peer.lab.lab import Lab
from atoll.peer.lab.netem import has_netem


@pytest.fixture
def _kernel() -> None:
    if not has_netem():
        pytest.skip("this kernel has no netem")


@pytest.mark.usefixtures("_kernel")
def test_delays_and_rates() -> None:
    with Lab(3, rtt_ms=40, rate_mbit=10, network="netem") as lab:
        assert 40 * 0.99 <= ping_ms(lab, 0, 1) <= 40 * 1.05
        with Flood(lab, 0, 1):
            time.sleep(0.5)
            assert received_mbit(lab, 1, during_s=1.0) == pytest.approx(10, rel=0.05)
            lab.set_rate(0, up=4)
            time.sleep(0.5)
            assert received_mbit(lab, 1, during_s=1.0) == pytest.approx(4, rel=0.05)
            lab.set_rate(1, down=2)
            time.sleep(0.5)
            assert received_mbit(lab, 1, during_s=1.0) == pytest.approx(2, rel=0.05)
        assert lab.counters(0).dropped_packets
        lab.set_rate(1, down=10)
        lab.set_rate(0, up=10)
        share = tcp_mbit(lab, 0, 2, warm_s=1.0, during_s=1.5) / (10 * PAYLOAD_SHARE)
        assert 0.95 <= share <= 1.01


@pytest.mark.usefixtures("_kernel")
def test_loss_and_cuts() -> None:
    with Lab(3, loss=5, network="netem") as lab, bound(lab, 0) as zero, bound(lab, 1) as one:
        send_numbered(lab, 0, 1, 4000, gap_s=0.001, every=50)
        lost = 4000 - len(arrived(one, quiet_s=0.3))
        assert abs(lost - 200) < 4 * (4000 * 0.05 * 0.95) ** 0.5
        assert lab.counters(0).dropped_packets == lost
        lab.set_path(1, 0, loss=0.0)
        lab.set_path(0, 1, loss=0.0)
        lab.cut(0, 1)
        send_numbered(lab, 0, 1, 2)
        send_numbered(lab, 1, 0, 3)
        assert len(arrived(zero, quiet_s=0.3)) == 3
        assert not arrived(one, quiet_s=0.1)
        lab.heal()
        send_numbered(lab, 0, 1, 4)
        assert len(arrived(one, quiet_s=0.3)) == 4


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("reorder", [False, True])
def test_jitter_reorders_only_if_asked(reorder: bool) -> None:
    with Lab(2, rtt_ms=60, jitter_ms=10, reorder=reorder, network="netem") as lab:
        with bound(lab, 1) as receiver:
            send_numbered(lab, 0, 1, 300, gap_s=0.001)
            numbers = [number for number, _ in arrived(receiver, quiet_s=0.3)]
    assert len(numbers) == 300
    assert (numbers == sorted(numbers)) is not reorder


def test_the_keeper_clears_away_when_its_owner_ends() -> None:
    prefix = f"{spaces.new_prefix()}7"  # of no lab
    names = [spaces.space_name(prefix, host) for host in range(2)]
    keeper = subprocess.Popen(
        [sys.executable, "-m", "atoll.peer.lab.keeper", prefix], stdin=subprocess.PIPE
    )
    for name in names:
        subprocess.run(["ip", "netns", "add", name], check=True)
    inside = subprocess.Popen(
        spaces.enter_command(names[1], ["sh", "-c", "echo; exec sleep 1000"]),
        stdout=subprocess.PIPE,
    )
    assert inside.stdout is not None
    inside.stdout.readline()
    keeper.communicate()
    assert inside.wait(PATIENCE_S) == -signal.SIGKILL
    inside.stdout.close()
    assert not spaces.spaces_of(prefix)
