"""Daemons plan their rounds for the links that they have measured. Rates are the lab's."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from harness.labnet import LabNet
from harness.processes import Fleet, fleet

from atoll.peer.lab.lab import Lab

HOSTS = "abc"
MBIT, SLOW_MBIT, TRIP_MS = 40.0, 8.0, 10.0
ELEMENTS = 500_000
ROUND_BYTES = 4 * ELEMENTS  # of float32
PATIENCE_S = 180.0  # probes go one at a time, between rounds, and twice where they differ


def layout(run: Fleet, name: str) -> str:
    return str(run.peers[name].status()["layout"])


def sent_bytes(run: Fleet, name: str) -> tuple[int, int]:
    """(round, bytes of its rounds so far) while no round is under way."""
    while True:
        status = run.peers[name].status()
        if not status["attempt"]:
            return status["round"], status["bytes"]["data_sent"] - status["bytes"]["probes_sent"]


@pytest.mark.timeout(300)
def test_a_peer_with_a_slow_link_owns_nothing_once_links_are_known(tmp_path: Path) -> None:
    rates = {0: MBIT, 1: MBIT, 2: SLOW_MBIT}
    with (
        Lab(3, rate_mbit=rates, rtt_ms=TRIP_MS) as lab,
        fleet(tmp_path, LabNet(lab)) as run,  # type: ignore[arg-type]  # as much of a net as needed
    ):
        run.form(HOSTS)
        for name in HOSTS:
            run.train(name, ELEMENTS, inner_s=4.0, codec="float32")  # probes have time in between
        begin_s = time.monotonic()
        while not all("no chunks" in layout(run, name) for name in HOSTS):
            assert time.monotonic() - begin_s < PATIENCE_S, [layout(run, name) for name in HOSTS]
            time.sleep(0.5)
        lead = run.peers[run.coordinator]
        assert "plan       butterfly, about " in lead.text
        before, sent_before = sent_bytes(run, "c")
        run.peers["c"].reaches(before + 2)
        after, sent_after = sent_bytes(run, "c")
        # With an equal share it would send a third more: of its own third to both others.
        assert (sent_after - sent_before) / (after - before) == pytest.approx(ROUND_BYTES, rel=0.05)
        assert run.agree(HOSTS) >= 3
