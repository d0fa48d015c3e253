"""Daemons find out what the network between them is like. Rates and round trips are the lab's."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.labnet import LabNet
from harness.processes import Fleet, fleet

from atoll.peer.daemon.status import render
from atoll.peer.lab.lab import Lab
from atoll.peer.links.probe_schedule import PROBE_BYTES_MAX
from atoll.peer.streams.congestion import BBR, ask

NAMES = "abc"
UP_MBIT, DOWN_MBIT = (20.0, 10.0, 40.0), (30.0, 40.0, 25.0)
TRIP_MS = {(0, 1): 20.0, (0, 2): 60.0, (1, 2): 40.0}
RATE_TOLERANCE, TRIP_SHARE, TRIP_TOLERANCE_MS = 0.15, 0.10, 2.0
# One short probe of each way is a first guess: where other work delays it, it finds less.
GUESS_MIN = 0.3
# Two probes of each, one at a time, with rests, and tries that met somebody else's, or a round.
PATIENCE_S = 90.0
# An hour's probes last a quarter of a second each way: where something else has the processors just
# then, they say what was there, and only new daemons may probe again so soon.
ATTEMPTS = 3

Link = dict[str, Any]


@pytest.fixture
def lab() -> Iterator[Lab]:
    rates = {host: (UP_MBIT[host], DOWN_MBIT[host]) for host in range(3)}
    with Lab(3, rate_mbit=rates) as made:
        for (one, other), trip_ms in TRIP_MS.items():
            made.set_path(one, other, delay_ms=trip_ms / 2)
            made.set_path(other, one, delay_ms=trip_ms / 2)
        yield made


def links(run: Fleet) -> dict[tuple[int, int], Link]:
    """What each daemon shows of each other one."""
    statuses = [run.peers[name].status() for name in NAMES]
    hosts = {status["peer"]: host for host, status in enumerate(statuses)}
    return {
        (host, hosts[member["peer"]]): member
        for host, status in enumerate(statuses)
        for member in status["members"]
        if not member["you"]
    }


def true_mbit(source: int, target: int) -> float:
    return min(UP_MBIT[source], DOWN_MBIT[target])


def too_slow(run: Fleet) -> list[str]:
    """Return what is not known yet, or taken for much slower than it is."""
    rates = {way: (8e-6 * link.get("out_bytes_per_s", 0)) for way, link in links(run).items()}
    return [
        f"{way[0]} to {way[1]}: {mbit:.2f} of {true_mbit(*way)} Mbit/s"
        for way, mbit in rates.items()
        if mbit <= GUESS_MIN * true_mbit(*way)
    ]


def wrong(run: Fleet) -> list[str]:
    """Return what no load excuses: more than a way carries, and round trips that are not its."""
    found = []
    for (source, target), link in links(run).items():
        name, trip_ms = f"{source} to {target}", TRIP_MS[min(source, target), max(source, target)]
        mbit, wanted = 8e-6 * link.get("out_bytes_per_s", 0), true_mbit(source, target)
        if mbit >= (1 + RATE_TOLERANCE) * wanted:
            found.append(f"{name}: {mbit:.2f} of {wanted} Mbit/s")
        if abs(link["rtt_ms"] - trip_ms) > TRIP_SHARE * trip_ms + TRIP_TOLERANCE_MS:
            found.append(f"{name}: {link['rtt_ms']} of {trip_ms} ms")
    return found


def congestion(run: Fleet) -> list[list[str]]:
    return [run.peers[name].status()["congestion"] for name in NAMES]


def eventually(condition: Callable[[], bool], complaint: Callable[[], object]) -> None:
    begin_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begin_s < PATIENCE_S, complaint()
        time.sleep(0.5)


@pytest.mark.timeout(600)
def test_probes_find_every_way_between_hosts_of_different_links(lab: Lab, tmp_path: Path) -> None:
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with fleet(folder, LabNet(lab)) as run:  # type: ignore[arg-type]  # as much of a net as needed
            missed = probed(run)
        print(f"attempt {attempt}: {missed or 'all ways found'}")
        if not missed:
            break
    assert not missed


def probed(run: Fleet) -> list[str]:
    """Form a run that probes, check what must hold at any load, and return what it missed."""
    run.form(NAMES)
    with socket.socket() as sock:
        if not ask(sock, BBR):
            eventually(lambda: congestion(run) == [[BBR]] * 3, lambda: congestion(run))
    for name in NAMES:  # what probes may cost depends on what rounds send
        run.train(name, 2e6, inner_s=1000.0)
    lead = run.peers[run.coordinator]
    eventually(lambda: "measured 6 links: " in lead.text, lambda: lead.text)
    begin_s = time.monotonic()
    while (missed := too_slow(run)) and time.monotonic() - begin_s < PATIENCE_S:
        time.sleep(0.5)
    eventually(lambda: not wrong(run), lambda: wrong(run))
    assert render(lead.status()).count("bit/s, down ") == 2
    sent = [run.peers[name].status()["bytes"]["sent"]["probes"] for name in NAMES]
    assert all(0 < count < 2.02 * PROBE_BYTES_MAX for count in sent), "of an hour"
    print({pair: 8e-6 * link["out_bytes_per_s"] for pair, link in links(run).items()})
    return missed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rounds_go_on_and_teach_what_the_uplinks_have(lab: Lab, tmp_path: Path) -> None:
    with fleet(tmp_path, LabNet(lab)) as run:  # type: ignore[arg-type]  # as much of a net as needed
        run.form(NAMES)
        for name in reversed(NAMES):  # the first one sends its parameters: c has the best uplink
            run.train(name, 2e6, inner_s=5.0)  # probes have their time between rounds

        def up(host: int) -> float:
            return 8e-6 * float(run.peers[NAMES[host]].status()["own_links"]["up_bytes_per_s"])

        # The slowest uplink limits every round: what leaves it, to two at a time, is what it has.
        slow = UP_MBIT.index(min(UP_MBIT))
        near = RATE_TOLERANCE * UP_MBIT[slow]
        eventually(lambda: abs(up(slow) - UP_MBIT[slow]) < near, lambda: up(slow))
        eventually(lambda: not [*too_slow(run), *wrong(run)], lambda: [*too_slow(run), *wrong(run)])
        number = run.peers["a"].status()["round"]
        for name in NAMES:
            run.peers[name].reaches(number + 2)
        assert run.agree(NAMES) >= 1
        for host in range(3):
            assert up(host) < (1 + RATE_TOLERANCE) * UP_MBIT[host]
