"""The status page of a run over links, one of which is slow: words and table both name it."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.browser import tab
from harness.labnet import LabNet
from harness.processes import fleet

from atoll.peer.lab.lab import Lab
from atoll.peer.telemetry.page.history import History
from atoll.peer.telemetry.page.server import PageServer

HOSTS, SLOW = "abc", "c"
MBIT, SLOW_MBIT, TRIP_MS = 80.0, 8.0, 20.0
ELEMENTS = 500_000
ROUNDS = 6


@pytest.mark.timeout(600)
def test_the_page_names_the_slow_link(tmp_path: Path) -> None:
    rates = {HOSTS.index(name): SLOW_MBIT if name == SLOW else MBIT for name in HOSTS}
    with (
        tab() as seen,
        Lab(len(HOSTS), rate_mbit=rates, rtt_ms=TRIP_MS) as lab,
        fleet(tmp_path, LabNet(lab)) as run,  # type: ignore[arg-type]  # as much of a net as needed
    ):
        run.form(HOSTS)
        for name in HOSTS:
            run.train(name, ELEMENTS, inner_s=0.3, codec="float32", method="reporting")
        names = {name: run.peers[name].status()["peer"] for name in HOSTS}
        run.peers["a"].reaches(ROUNDS)
        # A browser of this host does not reach the lab's: the page is served here, from the same
        # file and with the same answers of the daemon.
        home = run.peers["a"].home
        page = PageServer("127.0.0.1", 0, History(home), home)
        page.start(run.peers["a"].status)
        try:
            seen.open(page.url(""))
            slow = seen.shows("#slow", "the exchange takes", "the slowest link is", names[SLOW])
            assert "Mbit/s" in slow
            seen.shows("#links", *names.values(), f"{TRIP_MS:.0f} ms")
            assert seen.complaints == []
        finally:
            page.close()
