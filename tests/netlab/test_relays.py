"""Daemons that can only dial out train together, through others that carry their bytes."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.full_rounds import ELEMENTS, ROUNDS, assert_goes_on, assert_trains
from harness.labnet import LabNet
from harness.processes import NET_PORT, Fleet, fleet, until

from atoll.peer.lab.lab import Lab
from atoll.peer.net.identity import Home
from atoll.peer.net.invite import Invite
from atoll.peer.relay.choice import RelayChoice

pytestmark = [pytest.mark.usefixtures("routers"), pytest.mark.timeout(300)]

MBIT, TRIP_MS = 40.0, 20.0
RELAY_MBIT = "20"
# Whoever comes late gets the state through the relay between two rounds.
INNER_S = 1.0
# Of two peers that exchange nothing but attempts to dial.
DIALS_BYTES_MAX = 8_000
MISSING = "no relay is there between the two"
ATTEMPTS = re.compile(r"^[0-9:]{8} \w+ +round (\d+) took (\d+) attempts", re.MULTILINE)


@contextmanager
def homes(
    folder: Path,
    relays: str,
    trainers: str,
    kind: str = "symmetric",  # through which nobody punches
    mbit: str = RELAY_MBIT,
    reachable: str = "",
    **lab: Any,
) -> Iterator[tuple[Lab, Fleet]]:
    """Trainers behind a router each, and witnesses that can be dialled and relay data."""
    names = reachable + relays + trainers
    options = ("--witness", "--relay", mbit) if mbit else ("--witness",)
    nat = {names.index(name): kind for name in trainers}
    with (
        Lab(len(names), rate_mbit=MBIT, rtt_ms=TRIP_MS, nat=nat, **lab) as made,
        fleet(folder, LabNet(made)) as run,  # type: ignore[arg-type]  # as much of a net as needed
    ):
        run.options = lambda name: options if name in relays else ()
        yield made, run


def via(run: Fleet, name: str) -> dict[str, str]:
    """Return through whom a peer is linked to each other one, by their names; "" directly."""
    names = {short_id(run, other): other for other in run.peers}
    members = run.peers[name].status()["members"]
    return {names[one["peer"]]: names.get(one["via"], "") for one in members if not one["you"]}


def attempts(run: Fleet, name: str) -> int:
    """Return how many attempts the worst round has taken since everybody was there."""
    return max((int(count) for _, count in ATTEMPTS.findall(run.peers[name].text)), default=1)


def short_id(run: Fleet, name: str) -> str:
    """Return how a peer is called, which its daemon says at its start."""
    found = re.search(r"\bpeer ([0-9a-f]{8})\b", run.peers[name].text)
    assert found is not None
    return found[1]


def carried_bytes(run: Fleet, name: str) -> int:
    return int(run.peers[name].status()["relay"]["carried_bytes"])


def test_two_outbound_trainers_and_a_witness_that_relays_train(tmp_path: Path) -> None:
    with homes(tmp_path, "a", "bc") as (lab, run):
        run.form("abc")
        assert_trains(run, "bc", inner_s=INNER_S)
        assert via(run, "b") == {"a": "", "c": "a"}
        # It relays half of the numbers and of the result of each, or owns all: as much, in int8.
        assert lab.counters(0).sent_bytes > 0.9 * ROUNDS * 2 * ELEMENTS
        until(lambda: carried_bytes(run, "a") > 2 * ELEMENTS, "it relays", *run.peers.values())
        assert lab.sent_bytes(1, 2) + lab.sent_bytes(2, 1) < DIALS_BYTES_MAX


def test_a_trainer_that_can_be_dialled_relays_for_two_that_cannot(tmp_path: Path) -> None:
    with homes(tmp_path, "", "cd", reachable="ab") as (_, run):
        run.options = lambda name: ("--relay", RELAY_MBIT) if name == "b" else ()
        run.form("abcd")
        assert_trains(run, "abcd", inner_s=INNER_S)


def test_without_a_relay_for_data_the_control_link_is_relayed_all_the_same(tmp_path: Path) -> None:
    with homes(tmp_path, "a", "bc", mbit="") as (_, run):
        run.form("abc")
        until(lambda: via(run, "b")["c"] == "a", "b and c meet at a", *run.peers.values())


def test_ipv6_only_and_ipv4_only_train_through_a_dual_stack_relay(tmp_path: Path) -> None:
    with (
        Lab(3, rate_mbit=MBIT, rtt_ms=TRIP_MS, families={0: "46", 2: "6"}) as lab,
        fleet(tmp_path, LabNet(lab)) as run,  # type: ignore[arg-type]  # as much of a net as needed
    ):
        dual = "--listen", f"[::]:{NET_PORT}", "--advertise", lab.address(0)
        run.options = lambda name: (*dual, "--relay", RELAY_MBIT, "--witness") * (name == "a")
        founder = run.up("a")
        run.join("b")
        # The same invite, with the other address of its machine.
        run.join("c", str(replace(Invite.parse(founder.invite), host=lab.address(0, "6"))))
        for name in "abc":
            run.sees(name, 3)
        assert_trains(run, "bc", inner_s=INNER_S)
        assert via(run, "b")["c"] == "a"


# ---------------------------------------------------------------- who dies


def test_the_relay_is_killed_in_a_round_and_another_stands_by(tmp_path: Path) -> None:
    with homes(tmp_path, "ab", "cd") as (_, run):
        run.form("abcd")
        assert_trains(run, "cd", inner_s=INNER_S)
        relay = via(run, "c")["d"]
        until(lambda: run.peers["c"].try_status().get("attempt"), "a round is under way")
        names = {name: short_id(run, name) for name in "abcd"}
        run.peers[relay].kill()
        run.peers[relay].ends()
        other = "ab".replace(relay, "")
        assert_goes_on(run, "cd")
        assert via(run, "c")["d"] == other
        assert f"(it led through relay {names[relay]})" in run.peers["c"].text
        members = {one["peer"] for one in run.peers["c"].status()["members"]}
        assert {short_id(run, "c"), short_id(run, "d")} <= members
        assert max(attempts(run, "c"), attempts(run, "d")) <= 2


def test_the_only_relay_dies_and_comes_back(tmp_path: Path) -> None:
    with homes(tmp_path, "a", "bc") as (_, run):
        run.form("abc")
        assert_trains(run, "bc", inner_s=INNER_S)
        run.peers["a"].kill()
        run.peers["a"].ends()
        until(
            lambda: all(MISSING in run.peers[name].text for name in "bc"),
            "both say what is missing",
            *run.peers.values(),
        )
        run.again("a")
        run.sees("b", 3)
        assert_goes_on(run, "bc")


# ---------------------------------------------------------------- who lies


@pytest.mark.parametrize("how", ["flips", "drops", "replays", "holds"])
def test_a_relay_that_spoils_what_it_carries_is_named_and_avoided(how: str, tmp_path: Path) -> None:
    with homes(tmp_path, "ab", "cd") as (_, run):
        ids = {}
        for name in "abcd":
            with Home.open(tmp_path / name) as home:
                ids[name] = home.peer_id
        first = RelayChoice(ids["c"]).rank(ids["d"], [ids["a"], ids["b"]], 0.0)[0]
        bad = "a" if first == ids["a"] else "b"
        run.odd[bad] = f"relay:{how}"
        run.form("abcd")
        for name in "cd":
            run.train(name, ELEMENTS, inner_s=INNER_S)
        named = f"relay +{short_id(run, bad)} is avoided"
        until(
            lambda: all(re.search(named, run.peers[name].text) for name in "cd"),
            "both name the relay",
            *run.peers.values(),
        )
        assert_goes_on(run, "cd")


def test_a_relay_that_delays_and_records_learns_nothing(tmp_path: Path) -> None:
    with homes(tmp_path, "a", "bc") as (_, run):
        run.odd["a"] = "relay:records"
        run.form("abc")
        assert_trains(run, "bc", inner_s=INNER_S)
        until(lambda: carried_bytes(run, "a") > 2 * ELEMENTS, "it relays", *run.peers.values())
        seen = (tmp_path / "a" / "relayed").read_bytes()
        assert len(seen) > ELEMENTS
        assert len(zlib.compress(seen)) > 0.99 * len(seen), "it is ciphertext"


def test_two_train_through_a_relay_that_is_slow_to_pass_on(tmp_path: Path) -> None:
    with homes(tmp_path, "a", "bc") as (_, run):
        run.odd["a"] = "relay:delays"
        run.form("abc")
        assert_trains(run, "bc", inner_s=INNER_S)
