"""A capped daemon keeps to its caps, whatever it does, and rounds go on. Rates are the lab's.

Bytes are those of the host's interface, with headers. The time between two readings is taken from
before the first to after the second: a machine that is busy only makes it longer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.labnet import LabNet
from harness.processes import Fleet, fleet, until

from atoll.peer.lab.lab import Lab

LINK_MBIT, TRIP_MS = 200.0, 10.0
UP_MBIT, DOWN_MBIT = 10.0, 15.0
CAPS = ("--up-mbit", f"{UP_MBIT:g}", "--down-mbit", f"{DOWN_MBIT:g}")
BYTES_PER_MBIT = 125_000.0
WINDOW_S = 10.0
EXCESS = 1.05  # of a cap, in any ten seconds
ELEMENTS = 1_000_000
CAPPED, HOST = "c", 2


class Counter:
    """Measure how fast a host has sent and received since this was made."""

    def __init__(self, lab: Lab) -> None:
        self._lab, self._since_s = lab, time.monotonic()
        self._before = lab.counters(HOST)

    @property
    def took_s(self) -> float:
        return time.monotonic() - self._since_s

    def mbit(self) -> tuple[float, float]:
        after = self._lab.counters(HOST)
        scale = 1 / BYTES_PER_MBIT / self.took_s
        return (
            (after.sent_bytes - self._before.sent_bytes) * scale,
            (after.received_bytes - self._before.received_bytes) * scale,
        )


@contextmanager
def capped_run(folder: Path) -> Iterator[tuple[Lab, Fleet]]:
    """Give daemons on hosts of their own, of which one has caps."""
    with (
        Lab(3, rate_mbit=LINK_MBIT, rtt_ms=TRIP_MS) as lab,
        fleet(folder, LabNet(lab)) as run,  # type: ignore[arg-type]  # as much of a net as needed
    ):
        run.options = lambda name: CAPS if name == CAPPED else ()
        yield lab, run


@pytest.mark.timeout(300)
def test_rounds_keep_to_the_caps_of_one_and_go_on(tmp_path: Path) -> None:
    with capped_run(tmp_path) as (lab, run):
        run.form("abc")
        for name in "abc":
            run.train(name, ELEMENTS, inner_s=1.0, codec="float32")  # probes have time in between
        peer = run.peers[CAPPED]
        # The plan takes the caps for its links: who is slower than the others owns nothing.
        until(
            lambda: "too slow to hand out" in str(run.peers["a"].status()["layout"]),
            "the coordinator has planned with the caps",
            *run.peers.values(),
        )
        began = peer.status()["round"]
        for _ in range(2):
            counter = Counter(lab)
            time.sleep(WINDOW_S)
            up, down = counter.mbit()
            assert 0 < up <= EXCESS * UP_MBIT
            assert 0 < down <= EXCESS * DOWN_MBIT
        peer.reaches(began + 2)
        assert run.agree("abc") >= 2
        caps = peer.status()["caps"]
        assert caps["up"]["bytes_per_s"] == UP_MBIT * BYTES_PER_MBIT
        assert caps["down"]["bytes_per_s"] == DOWN_MBIT * BYTES_PER_MBIT
        assert "up: 10 Mbit/s from now on, as --up-mbit says" in peer.text
        # What the caps have counted is what the line has carried.
        counted, carried = peer.status()["caps"], lab.counters(HOST)
        assert counted["up"]["today_bytes"] == pytest.approx(carried.sent_bytes, rel=0.05)
        assert counted["down"]["today_bytes"] == pytest.approx(carried.received_bytes, rel=0.05)


@pytest.mark.timeout(300)
def test_a_state_is_loaded_within_the_cap(tmp_path: Path) -> None:
    with capped_run(tmp_path) as (lab, run):
        run.form("ab")
        for name in "ab":
            run.train(name, 3 * ELEMENTS, inner_s=3600.0, codec="float32")
            run.peers[name].reaches(1)
        counter = Counter(lab)
        run.join(CAPPED)
        run.peers[CAPPED].reaches(1)
        took_s = counter.took_s
        _, down = counter.mbit()
        assert took_s >= 8 * 3 * ELEMENTS / (EXCESS * DOWN_MBIT * BYTES_PER_MBIT)
        assert down <= EXCESS * DOWN_MBIT
