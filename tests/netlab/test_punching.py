"""Daemons that can only dial out meet directly, where their routers let them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from harness.full_rounds import ELEMENTS, assert_goes_on, assert_trains
from harness.labnet import NAMES, LabNet
from harness.processes import Fleet, fleet, until

from atoll.peer.client.ipc_client import ask
from atoll.peer.lab.lab import Lab

pytestmark = [pytest.mark.usefixtures("routers"), pytest.mark.timeout(300)]

MBIT, TRIP_MS = 40.0, 20.0
RELAY_MBIT: Final = "20"
# Whoever comes late gets the state between two rounds.
INNER_S: Final = 1.0
DIRECT_S: Final = 10.0  # from the first link between the two
# A round's data is a hundred times what control links, beats and dials bring in its time.
QUIET_BYTES: Final = ELEMENTS / 4


@contextmanager
def homes(
    folder: Path, reachable: str, outbound: dict[str, str], witnesses: str = "", **lab: Any
) -> Iterator[tuple[Lab, Fleet]]:
    """Peers that can be dialled, some of them witnesses that relay, and others behind routers."""
    names = reachable + "".join(outbound)
    nat = {NAMES.index(name): kind for name, kind in outbound.items()}
    with (
        Lab(len(names), rate_mbit=MBIT, rtt_ms=TRIP_MS, nat=nat, **lab) as made,
        fleet(folder, LabNet(made)) as run,  # type: ignore[arg-type]  # as much of a net as needed
    ):
        run.options = lambda name: ("--witness", "--relay", RELAY_MBIT) if name in witnesses else ()
        yield made, run


def via(run: Fleet, name: str, other: str) -> str:
    """Return how one peer is linked to another one: "", "punched", by which relay, or not."""
    ids = {peer: each.status()["peer"] for peer, each in run.peers.items()}
    members = run.peers[name].status()["members"]
    found = next(member for member in members if member["peer"] == ids[other])
    names = {peer: each for each, peer in ids.items()}
    if found["state"] != "connected":
        return str(found["state"])
    return names.get(found["via"], str(found["via"]))


@pytest.mark.parametrize(
    ("one", "other"), [("restricted", "restricted,levels=2"), ("full", "restricted")]
)
def test_two_behind_routers_meet_directly(one: str, other: str, tmp_path: Path) -> None:
    """A witness carries their data until they have met, and nothing of it afterwards."""
    with homes(tmp_path, "a", {"b": one, "c": other}, witnesses="a") as (lab, run):
        run.form("abc")
        began_s = time.monotonic()
        both = [("b", "c"), ("c", "b")]
        # The router of a full cone lets the other one in at the port that the peer listens on.
        met = ("punched", "") if "full" in (one, other) else ("punched",)
        until(lambda: all(via(run, *pair) in met for pair in both), "they have met")
        assert time.monotonic() - began_s < DIRECT_S
        assert_trains(run, "bc", inner_s=INNER_S)
        carried = run.peers["a"].status()["relay"]["carried_bytes"]
        direct = lab.sent_bytes(1, 2)
        assert_goes_on(run, "bc")
        assert run.peers["a"].status()["relay"]["carried_bytes"] - carried < QUIET_BYTES
        assert lab.sent_bytes(1, 2) - direct > ELEMENTS


def test_a_symmetric_router_lets_nobody_meet_and_says_so(tmp_path: Path) -> None:
    """Two observers see two ports of one: both ends say once why they stay on the relay."""
    nat = {"c": "restricted", "d": "symmetric"}
    with homes(tmp_path, "ab", nat, witnesses="ab") as (_, run):
        run.form("abcd")
        until(lambda: "gives each connection another port (it has" in run.peers["d"].text, "d says")
        stays = "no direct connection to "
        for name in "cd":
            until(lambda name=name: stays in run.peers[name].text, f"{name} says so too")  # type: ignore[misc]
        assert_trains(run, "cd", inner_s=INNER_S)
        assert {via(run, "c", "d"), via(run, "d", "c")} <= {"a", "b"}
        for name in "cd":
            assert run.peers[name].text.count(stays) == 1
        assert run.peers["d"].text.count("gives each connection another port (it has") == 1


def test_one_observer_cannot_tell_and_it_is_tried(tmp_path: Path) -> None:
    nat = {"b": "symmetric", "c": "restricted"}
    with homes(tmp_path, "a", nat, witnesses="a") as (_, run):
        run.form("abc")
        for name in "bc":
            peer = run.peers[name]
            until(lambda peer=peer: "nothing came through" in peer.text, "it is said", peer)  # type: ignore[misc]
        assert_trains(run, "bc", inner_s=INNER_S)
        assert via(run, "b", "c") == via(run, "c", "b") == "a"


def test_two_outbound_of_four_meet_directly(tmp_path: Path) -> None:
    """And what one of them sends the other takes no detour, though no witness relays data."""
    with homes(tmp_path, "ab", {"c": "restricted", "d": "restricted"}) as (lab, run):
        run.form("abcd")
        both = [("c", "d"), ("d", "c")]
        until(lambda: all(via(run, *pair) == "punched" for pair in both), "they have met")
        assert_trains(run, "abcd", inner_s=INNER_S)
        direct = lab.sent_bytes(2, 3)
        assert_goes_on(run, "abcd")
        assert lab.sent_bytes(2, 3) - direct > ELEMENTS / 4


def test_a_punched_connection_that_a_router_forgets_is_replaced(tmp_path: Path) -> None:
    """Replace what a router has forgotten and resets or drops; the relay carries on meanwhile."""
    with homes(tmp_path, "a", {"b": "restricted", "c": "restricted"}, witnesses="a") as (lab, run):
        run.form("abc")
        both = [("b", "c"), ("c", "b")]
        until(lambda: all(via(run, *pair) == "punched" for pair in both), "they have met")
        assert_trains(run, "bc", inner_s=INNER_S)
        lab.change_address(2)
        assert_goes_on(run, "bc")
        until(lambda: all(via(run, *pair) == "punched" for pair in both), "they have met again")
        assert_goes_on(run, "bc")


def test_a_relay_that_comes_later_is_dialled_and_takes_over(tmp_path: Path) -> None:
    """Whoever can be dialled is dialled, though its first links lead through a relay.

    Only so can it relay: when the relay that was there first dies, the two go on over it.
    """
    nat = {"b": "symmetric", "c": "symmetric"}
    with homes(tmp_path, "ad", nat, witnesses="ad") as (_, run):
        run.form("abc")
        until(lambda: via(run, "b", "c") == "a", "b and c meet at a", *run.peers.values())
        ask(run.peers["a"].home, "handover", peer=run.peers["b"].status()["peer"])
        until(lambda: run.coordinator == "b", "b leads, to whom d has no way but through a")
        run.join("d")
        run.sees("b", 4)
        ways = [pair for one in "bc" for pair in ((one, "d"), ("d", one))]
        until(lambda: all(via(run, *pair) == "" for pair in ways), "d is linked directly")
        assert_trains(run, "bc", inner_s=INNER_S)
        d, others = run.peers["d"].status()["peer"], [run.peers[name] for name in "bc"]
        run.peers["a"].kill()
        run.peers["a"].ends()
        taken = f"relay {d} carries the connection to "
        until(lambda: all(taken in peer.text for peer in others), "d takes over", *others)
        assert_goes_on(run, "bc")
        assert run.peers["d"].status()["relay"]["carried_bytes"] > ELEMENTS
