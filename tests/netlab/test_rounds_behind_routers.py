"""Daemons behind routers train: who can only dial out, beside one or more who can be dialled."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.full_rounds import ELEMENTS, ROUNDS, assert_goes_on, assert_trains, sent_by_device
from harness.labnet import NAMES, LabNet
from harness.processes import NET_PORT, Fleet, fleet, until

from atoll.peer.lab.lab import Lab
from atoll.peer.lab.nat import Nat
from atoll.peer.net.invite import Invite, parse_address

pytestmark = [pytest.mark.usefixtures("routers"), pytest.mark.timeout(300)]

ALL = NAMES[:4]
MBIT, TRIP_MS = 40.0, 20.0
# Of two peers that exchange nothing but attempts to dial: a round is a hundred times that.
DIALS_BYTES_MAX = 8_000
MEMBERS = re.compile(r"^[0-9:]{8} view +\d+: (\d+) members?", re.MULTILINE)


@contextmanager
def site(
    folder: Path, hosts: int = 4, mbit: float = MBIT, **lab: Any
) -> Iterator[tuple[Lab, Fleet]]:
    with (
        Lab(hosts, rate_mbit=mbit, rtt_ms=TRIP_MS, **lab) as made,
        fleet(folder, LabNet(made)) as run,  # type: ignore[arg-type]  # as much of a net as needed
    ):
        yield made, run


def assert_stays_inside(lab: Lab, run: Fleet, hosts: tuple[int, int], least_bytes: float) -> None:
    """Assert that so much passes between the two within their own network, while they train.

    The first rounds may come before the link between the two: they are planned around it.
    """

    def inside_bytes() -> int:
        sent = sum(sent_by_device(lab, host) for host in hosts)
        return sent - lab.counters(hosts[0]).sent_bytes

    everybody = [*run.peers.values(), *run.trainers.values()]
    until(lambda: inside_bytes() > least_bytes, "data within the router's network", *everybody)


# ---------------------------------------------------------------- who is behind a router


@pytest.mark.parametrize("kind", ["restricted", "symmetric,levels=2", "full"])
def test_one_outbound_of_four_trains(kind: str, tmp_path: Path) -> None:
    with site(tmp_path, nat={3: kind}) as (_, run):
        run.form(ALL)
        assert_trains(run, ALL)


def test_two_outbound_of_four_train_and_exchange_nothing_with_each_other(tmp_path: Path) -> None:
    with site(tmp_path, nat={2: "restricted", 3: "symmetric"}) as (lab, run):
        run.form(ALL)
        assert_trains(run, ALL)
        assert lab.sent_bytes(2, 3) < DIALS_BYTES_MAX
        assert lab.sent_bytes(3, 2) < DIALS_BYTES_MAX
        assert lab.sent_bytes(2, 0) > ROUNDS * ELEMENTS / 4 > DIALS_BYTES_MAX  # int8


def test_three_outbound_and_one_reachable_train(tmp_path: Path) -> None:
    with site(tmp_path, nat=dict.fromkeys((1, 2, 3), "restricted")) as (_, run):
        run.form(ALL)
        assert_trains(run, ALL)


def test_two_behind_one_router_train_and_use_their_own_network(tmp_path: Path) -> None:
    with site(tmp_path, nat={(2, 3): "restricted"}) as (lab, run):
        run.form(ALL)
        assert_trains(run, ALL)
        # Each sends the other a quarter of its own and a quarter of the result, in int8.
        assert_stays_inside(lab, run, (2, 3), 0.9 * ROUNDS * ELEMENTS)


@pytest.mark.parametrize("advertised", [True, False])
def test_two_that_meet_only_at_the_address_of_their_router_train(
    advertised: bool, tmp_path: Path
) -> None:
    """Whoever says where the port leads is dialled there; else both dial each other."""
    with site(tmp_path, hosts=3, nat={(1, 2): "full,hairpin=1"}) as (lab, run):
        place = f"{lab.public_address(1)}:{NET_PORT}"
        run.options = lambda name: ("--advertise", place) if advertised and name == "b" else ()
        run.form("abc")
        assert_trains(run, "abc")
        # Each sends the other a third of its own and a third of the result, in int8.
        assert_stays_inside(lab, run, (1, 2), 0.9 * ROUNDS * (2 / 3 + 2 / 3) * ELEMENTS)


def test_two_homes_with_the_same_private_address_train(tmp_path: Path) -> None:
    with site(tmp_path, nat={2: Nat(lan=1), 3: Nat(lan=1)}) as (lab, run):
        assert lab.address(2) == lab.address(3)
        run.form(ALL)
        assert_trains(run, ALL)


# ---------------------------------------------------------------- who dies and comes back


def test_coordinator_and_outbound_peer_are_killed_and_come_back(tmp_path: Path) -> None:
    with site(tmp_path, nat={3: "restricted"}) as (_, run):
        run.form(ALL)
        assert_trains(run, ALL)
        for name in (run.coordinator, "d"):
            run.peers[name].kill()
            run.peers[name].ends()
            assert_goes_on(run, ALL.replace(name, ""))
            run.restart(name)
            run.sees(name, len(ALL))
            assert_goes_on(run, ALL)


def test_the_only_peer_that_can_be_dialled_comes_back(tmp_path: Path) -> None:
    """It can dial nobody: the others dial it, while it waits for them."""
    with site(tmp_path, hosts=2, nat={1: "restricted"}) as (_, run):
        run.form("ab")
        assert_trains(run, "ab")
        run.peers["a"].kill()
        run.peers["a"].ends()
        time.sleep(3.0)
        run.again("a")
        run.sees("a", 2)
        assert_goes_on(run, "ab")


# ---------------------------------------------------------------- what changes in time


@pytest.mark.parametrize(
    ("nat", "idle_s"),
    [
        (Nat(expires_s=15), 20.0),
        pytest.param(Nat(expires_s=5), 20.0, marks=pytest.mark.slow),
        pytest.param(Nat(expires_s=15, expired="reset"), 20.0, marks=pytest.mark.slow),
        pytest.param(Nat(expires_s=5, expired="reset"), 20.0, marks=pytest.mark.slow),
        pytest.param(Nat(expires_s=30), 45.0, marks=pytest.mark.slow),
    ],
)
def test_rounds_go_on_after_a_rest_longer_than_the_router_remembers(
    nat: Nat, idle_s: float, tmp_path: Path
) -> None:
    with site(tmp_path, nat={3: nat}) as (_, run):
        run.form(ALL)
        assert_trains(run, ALL)
        for name in ALL:
            run.trainers[name].kill()
            run.trainers[name].ends()
        time.sleep(idle_s)
        members = [int(count) for count in MEMBERS.findall(run.peers["a"].text)]
        assert {*members[members.index(len(ALL)) :]} == {len(ALL)}, "nobody was lost meanwhile"
        assert_trains(run, ALL)


@pytest.mark.parametrize("kind", ["restricted", pytest.param("full", marks=pytest.mark.slow)])
def test_the_address_changes_in_the_middle_of_a_round(kind: str, tmp_path: Path) -> None:
    with site(tmp_path, nat={3: kind}) as (lab, run):
        run.form(ALL)
        for name in ALL:
            run.train(name, 5 * ELEMENTS, inner_s=1.5, codec="float32")
        assert_goes_on(run, ALL, rounds=1)
        until(lambda: run.peers["d"].try_status().get("attempt"), "a round is under way")
        before = lab.counters(3).sent_bytes
        until(lambda: lab.counters(3).sent_bytes > before + ELEMENTS, "it is in the middle")
        lab.change_address(3)
        assert_goes_on(run, ALL)


# ---------------------------------------------------------------- IPv6


def test_ipv6_only_and_ipv4_only_train_with_dual_stack_ones_in_between(tmp_path: Path) -> None:
    families: Mapping[int, str] = {0: "46", 1: "46", 3: "6"}
    with site(tmp_path, families=families) as (lab, run):

        def options(name: str) -> tuple[str, ...]:
            if lab.families.get(NAMES.index(name)) != "46":
                return ()
            return "--listen", f"[::]:{NET_PORT}", "--advertise", lab.address(NAMES.index(name))

        run.options = options
        founder = run.up("a")
        for name in "bc":
            run.join(name)
        # The same invite, with the other address of its machine.
        run.join("d", str(replace(Invite.parse(founder.invite), host=lab.address(0, "6"))))
        for name in ALL:
            run.sees(name, 4)
        assert_trains(run, ALL)


EVERY_ADDRESS = ("--listen", f":{NET_PORT}")  # as without the option


@pytest.mark.parametrize("family", ["46", "6"])
def test_by_default_a_peer_listens_at_the_address_that_it_advertises(
    family: str, tmp_path: Path
) -> None:
    """Show that who joins over IPv6 advertises IPv6: others dial it there, and nothing relays."""
    with site(tmp_path, 3, families=dict.fromkeys(range(3), family)) as (lab, run):
        run.options = lambda name: EVERY_ADDRESS
        founder = run.up("a")
        advertised = Invite.parse(founder.invite).host
        assert advertised == lab.address(0)  # IPv4 where there is both
        over_6 = str(replace(Invite.parse(founder.invite), host=lab.address(0, "6")))
        for name in "bc":
            run.join(name, over_6)
        for name in "abc":
            run.sees(name, 3)
            others = [m for m in run.peers[name].status()["members"] if not m["you"]]
            assert [m["via"] for m in others] == ["", ""]
            assert not any(m["outbound"] for m in others)
        members = run.peers["a"].status()["members"]
        hosts = [parse_address(m["address"])[0] for m in members]
        assert sorted(hosts) == sorted([advertised, lab.address(1, "6"), lab.address(2, "6")])
        assert "carries the connection" not in "".join(p.text for p in run.peers.values())
        assert_trains(run, "abc")
