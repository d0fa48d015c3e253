"""The status page of a run over links, one of which is slow: words and table both name it."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.browser import page_of, tab
from harness.labnet import LabNet
from harness.processes import fleet

from atoll.peer.lab.lab import Lab

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
        with page_of(run.peers["a"]) as url:
            seen.open(url)
            slow = seen.shows("#slow", "the exchange takes", "the slowest link is", names[SLOW])
            assert "Mbit/s" in slow
            seen.shows("#links", *names.values(), f"{TRIP_MS:.0f} ms")
            assert seen.complaints == []


@pytest.mark.usefixtures("routers")
@pytest.mark.timeout(600)
def test_the_page_tells_who_can_only_dial_out(tmp_path: Path) -> None:
    """One of four is behind a router: another shows that, and its own page what it means."""
    hosts, inside = "abcd", "d"
    with (
        tab() as seen,
        Lab(len(hosts), rate_mbit=MBIT, rtt_ms=TRIP_MS, nat={3: "restricted"}) as lab,
        fleet(tmp_path, LabNet(lab)) as run,  # type: ignore[arg-type]  # as much of a net as needed
    ):
        run.form(hosts)
        for name in hosts:
            run.train(name, ELEMENTS, inner_s=0.3, method="reporting")
        names = {name: run.peers[name].status()["peer"] for name in hosts}
        run.peers["a"].reaches(ROUNDS)
        with page_of(run.peers["a"]) as url:
            seen.open(url)
            seen.shows("#peers", *names.values(), "outbound")
            rows = seen.text("#peers").splitlines()
            assert [names[inside] in row for row in rows if "outbound" in row] == [True]
        with page_of(run.peers[inside]) as url:
            seen.open(url)
            seen.shows("#plan", "this peer is outbound: others cannot dial it")
            assert seen.complaints == []
