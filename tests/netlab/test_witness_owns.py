"""Two daemons that can only dial out train through a witness that relays no data: it owns all."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from harness.full_rounds import ELEMENTS, ROUNDS, assert_goes_on, assert_trains
from harness.labnet import LabNet
from harness.processes import Fleet, fleet, until

from atoll.peer.lab.lab import Lab

pytestmark = [pytest.mark.usefixtures("routers"), pytest.mark.timeout(300)]

MBIT, TRIP_MS = 40.0, 20.0
DIALS_BYTES_MAX = 8_000  # of two peers that exchange nothing but attempts to dial
LARGE, SEVERAL = 2e6, 12  # elements, and rounds: the first and last are counted in part
within = partial(pytest.approx, rel=0.15)
ELECTION_S = 3.0  # from a coordinator's death to the next one, where its host refuses at once


@contextmanager
def homes(folder: Path, witnesses: str, trainers: str) -> Iterator[tuple[Lab, Fleet]]:
    """Witnesses that can be dialled and relay no data, and trainers behind a router each."""
    names = witnesses + trainers
    nat = dict.fromkeys(map(names.index, trainers), "symmetric")  # nobody meets directly
    with (
        Lab(len(names), rate_mbit=MBIT, rtt_ms=TRIP_MS, nat=nat) as lab,
        fleet(folder, LabNet(lab)) as run,  # type: ignore[arg-type]  # as much of a net as needed
    ):
        run.options = lambda name: ("--witness",) if name in witnesses else ()
        yield lab, run


def test_a_witness_owns_what_two_outbound_trainers_reduce(tmp_path: Path) -> None:
    with homes(tmp_path, "a", "bc") as (lab, run):
        run.form("abc")
        before = lab.counters(0).sent_bytes
        assert_trains(run, "bc")
        sent_bytes = lab.counters(0).sent_bytes - before
        assert re.search(
            r"witness \S+ owns the result, and adds nothing to it", run.peers["a"].text
        )
        assert lab.sent_bytes(1, 2) + lab.sent_bytes(2, 1) < DIALS_BYTES_MAX
        # A vector comes from each in every round, and one goes to each, in int8.
        assert sent_bytes > 0.9 * ROUNDS * 2 * ELEMENTS
        assert int(run.peers["a"].status()["relay"]["carried_bytes"]) < 0.1 * sent_bytes


def test_what_a_witness_that_owns_moves_is_as_much_as_was_said(tmp_path: Path) -> None:
    with homes(tmp_path, "a", "bc") as (lab, run):
        run.form("abc")
        for name in "bc":
            run.train(name, LARGE, inner_s=0.5)
        said = r"of each round (\S+) MB come to it and (\S+) MB go from it"
        witness = run.peers["a"]
        until(lambda: re.search(said, witness.text), "it is said", *run.peers.values())
        began, before = run.peers["b"].status()["round"], lab.counters(0)
        run.peers["b"].reaches(began + SEVERAL)
        ended, after = run.peers["b"].status()["round"], lab.counters(0)
        into, out = map(float, re.findall(said, witness.text)[-1])
        # The line, with headers and control links, from the middle of one round to that of another.
        rounds = ended - began
        assert (after.received_bytes - before.received_bytes) / rounds == within(1e6 * into)
        assert (after.sent_bytes - before.sent_bytes) / rounds == within(1e6 * out)


def test_three_outbound_trainers_go_on_when_the_witness_that_owns_dies(tmp_path: Path) -> None:
    with homes(tmp_path, "ab", "cde") as (_, run):
        run.form("abcde")
        assert_trains(run, "cde")
        owners = re.findall(r"witness (\S+) owns the result", run.peers[run.coordinator].text)
        dying = next(n for n in "ab" if run.peers[n].status()["peer"] in owners[-1])
        run.peers[dying].kill()
        run.peers[dying].ends()
        assert_goes_on(run, "cde")


def test_an_election_goes_on_where_most_voters_can_only_dial_out(tmp_path: Path) -> None:
    with homes(tmp_path, "ab", "cde") as (_, run):
        run.form("abcde")
        lead = run.coordinator
        other = "ab".replace(lead, "")
        assert lead in "ab"

        def known_as_outbound() -> bool:
            told = run.peers[other].status()["members"]
            return sum(one["outbound"] for one in told) == 3

        until(known_as_outbound, f"{other} knows who is outbound", *run.peers.values())
        heir = run.peers[other].status()["peer"]
        run.peers[lead].kill()
        began_s = time.monotonic()
        until(
            lambda: run.peers["c"].try_status().get("coordinator") == heir,
            f"{other} coordinates",
            *run.peers.values(),
            timeout_s=30,
        )
        assert time.monotonic() - began_s < ELECTION_S
