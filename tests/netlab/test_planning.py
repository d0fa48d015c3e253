"""Daemons plan their rounds for the links that they have measured. Rates are the lab's."""

from __future__ import annotations

import time
from itertools import permutations
from pathlib import Path

import pytest
from harness.labnet import LabNet
from harness.processes import Fleet, fleet, until

from atoll.peer.lab.lab import Lab
from atoll.peer.links.probe_schedule import PROBE_BYTES_MAX

HOSTS, SLOW = "abcd", "d"
MBIT, SLOW_MBIT, TRIP_MS = 40.0, 8.0, 10.0
FAR_MS, LOSS_PERCENT = 80.0, 2.0  # cubic carries about a megabit then
ELEMENTS = 500_000
ROUND_BYTES = 4 * ELEMENTS  # of float32
FRAMING = 0.01  # of probes: headers, seals
OWNS_NOTHING = "too slow to hand out a part of the result to all others: "
PLANNED = "plan       butterfly, about "
PATIENCE_S = 180.0  # probes go one at a time, between rounds, and rest for long after each


def layout(run: Fleet, name: str) -> str:
    return str(run.peers[name].status()["layout"])


def sent_bytes(run: Fleet, name: str) -> tuple[int, int]:
    """(round, bytes of its rounds so far) while no round is under way."""
    while True:
        status = run.peers[name].status()
        if not status["attempt"]:
            return status["round"], status["bytes"]["sent"]["rounds"]


def sent_between_rounds(run: Fleet, lab: Lab, host: int, name: str) -> tuple[dict[str, int], int]:
    """Return what a daemon counts as sent, by purpose, and what its interface counts, both at rest.

    A daemon counts what an exchange has sent when it ends: in the middle of one the two differ.
    """
    while True:
        before = run.peers[name].status()
        on_the_wire = lab.counters(host).sent_bytes
        after = run.peers[name].status()
        at_rest = not before["attempt"] and not after["attempt"]
        if at_rest and before["round"] == after["round"]:
            return before["bytes"]["sent"], on_the_wire
        time.sleep(0.1)


@pytest.mark.timeout(300)
def test_losses_that_no_plan_knew_of_do_not_hold_a_round_back(tmp_path: Path) -> None:
    names = HOSTS[:3]
    with (
        Lab(3, rate_mbit=MBIT, rtt_ms=FAR_MS) as lab,
        fleet(tmp_path, LabNet(lab)) as run,  # type: ignore[arg-type]  # as much of a net as needed
    ):
        run.form(names)
        for name in names:
            run.train(name, 4 * ELEMENTS, inner_s=2.0, codec="float32")
        lead = run.peers[run.coordinator]
        until(lambda: PLANNED in lead.text, "a plan", *run.peers.values(), timeout_s=PATIENCE_S)
        for name in names:  # paced now: cubic sends
            run.peers[name].reaches(lead.status()["round"] + 2)
        for source, target in permutations(range(3), 2):
            lab.set_path(source, target, loss=LOSS_PERCENT)

        def is_seen() -> bool:
            return any("losses hold what goes to " in peer.text for peer in run.peers.values())

        until(is_seen, "losses to be seen", *run.peers.values(), timeout_s=60.0)
        done = lead.status()["round"]
        for name in names:
            run.peers[name].reaches(done + 2)
        assert run.agree(names) >= done


@pytest.mark.timeout(300)
def test_a_peer_with_a_slow_link_owns_nothing_once_links_are_known(tmp_path: Path) -> None:
    rates = {0: MBIT, 1: MBIT, 2: MBIT, 3: SLOW_MBIT}
    with (
        Lab(4, rate_mbit=rates, rtt_ms=TRIP_MS) as lab,
        fleet(tmp_path, LabNet(lab)) as run,  # type: ignore[arg-type]  # as much of a net as needed
    ):
        run.form(HOSTS)
        for name in HOSTS:
            run.train(name, ELEMENTS, inner_s=4.0, codec="float32")  # probes have time in between
        begin_s = time.monotonic()
        while not all(OWNS_NOTHING in layout(run, name) for name in HOSTS):
            assert time.monotonic() - begin_s < PATIENCE_S, [layout(run, name) for name in HOSTS]
            time.sleep(0.5)
        lead = run.peers[run.coordinator]
        assert PLANNED in lead.text
        before, sent_before = sent_bytes(run, SLOW)
        run.peers[SLOW].reaches(before + 2)
        after, sent_after = sent_bytes(run, SLOW)
        # With an equal share it would send half as much again: of its own quarter to the others.
        assert (sent_after - sent_before) / (after - before) == pytest.approx(ROUND_BYTES, rel=0.05)
        assert run.agree(HOSTS) >= 3
        for host, name in enumerate(HOSTS):
            sent, on_the_wire = sent_between_rounds(run, lab, host, name)
            probes_max = min(1.5 * ROUND_BYTES, 3 * PROBE_BYTES_MAX)
            assert 0 < sent["probes"] < (1 + FRAMING) * probes_max, "of an hour"
            # Headers of packets, acknowledgements, and control messages between the two questions.
            assert 0.85 * on_the_wire < sum(sent.values()) < on_the_wire, sent
