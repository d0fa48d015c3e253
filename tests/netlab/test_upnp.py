"""A router that forwards a port when it is asked (UPnP): miniupnpd, on routers of a lab."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.labnet import LabNet
from harness.processes import NET_PORT, Fleet, Peer, fleet, until
from harness.upnp_router import COMMAND, PUBLIC_IP, forwarded, start_upnp

from atoll.peer.lab.lab import Lab
from atoll.peer.net.upnp import is_installed

pytestmark = [
    pytest.mark.usefixtures("routers"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which(COMMAND) is None, reason=f"apt-get install {COMMAND}-nftables"),
    pytest.mark.skipif(not is_installed(), reason="pip install miniupnpc"),
]
AT_HOME = 2
FORWARDS = re.compile(rf"forwards {re.escape(PUBLIC_IP)}:(\d+) to this peer")


@contextmanager
def site(folder: Path, hosts: int, nat: Any, **router: Any) -> Iterator[tuple[Lab, Fleet]]:
    """Peers of whom those behind the router of AT_HOME ask it."""
    with (
        Lab(hosts, rate_mbit=100, rtt_ms=10, nat=nat) as lab,
        fleet(folder, LabNet(lab)) as run,  # type: ignore[arg-type]  # as much as needed
    ):
        del run.environment["ATOLL_UPNP"]
        daemon = start_upnp(lab, AT_HOME, folder, **router)
        try:
            yield lab, run
        finally:
            daemon.kill()
            daemon.ends()


def invite_of(peer: Peer) -> str:
    command = [sys.executable, "-m", "atoll.peer.cli", "invite", "--home", str(peer.home)]
    return subprocess.check_output(command, text=True).split()[-1]


def is_reachable(peer: Peer, place: str) -> None:
    said = f"others can dial this peer at {place}: "
    until(lambda: said in peer.text, f"{peer.name} is dialled at {place}", peer)


def confirmed_by_two(peer: Peer, place: str) -> None:
    until(lambda: f"//{place}/" in invite_of(peer), f"the invite of {peer.name} has {place}", peer)


def test_the_router_forwards_the_port_as_long_as_the_daemon_runs(tmp_path: Path) -> None:
    with site(tmp_path, 3, {AT_HOME: "restricted"}) as (lab, run):
        run.form("ab")
        peer = run.join("c")
        place = f"{lab.public_address(AT_HOME)}:{NET_PORT}"
        is_reachable(peer, place)
        assert "outbound" not in peer.text, "it was asked before the first dial-back"
        assert FORWARDS.findall(peer.text) == [str(NET_PORT)]
        assert f"dport {NET_PORT} dnat ip to {lab.address(AT_HOME)}:{NET_PORT}" in forwarded(
            lab, AT_HOME
        )
        name = peer.status()["peer"]
        for other in "ab":
            members = run.peers[other].status()["members"]
            assert not next(m for m in members if m["peer"] == name)["outbound"]
        confirmed_by_two(peer, place)
        assert PUBLIC_IP not in invite_of(peer), "what dial-backs have confirmed counts for more"
        peer.kill(15)
        assert peer.ends() == 0
        assert f"the router forwards {PUBLIC_IP}:{NET_PORT} no longer" in peer.text
        assert "dnat" not in forwarded(lab, AT_HOME)


def test_where_another_machine_has_the_port_it_is_another_one(tmp_path: Path) -> None:
    leased = f"TCP:{NET_PORT}:192.168.102.9:{NET_PORT}:0:another"
    with site(tmp_path, 4, {AT_HOME: "restricted"}, leased=leased) as (lab, run):
        run.form("ab")
        peer = run.join("c")
        until(lambda: FORWARDS.search(peer.text), "it is forwarded", peer)
        (port,) = FORWARDS.findall(peer.text)
        assert int(port) != NET_PORT
        place = f"{lab.public_address(AT_HOME)}:{port}"
        is_reachable(peer, place)
        rules = forwarded(lab, AT_HOME)
        assert f"dport {port} dnat ip to {lab.address(AT_HOME)}:{NET_PORT}" in rules
        assert f"dport {NET_PORT} dnat ip to 192.168.102.9:{NET_PORT}" in rules
        confirmed_by_two(peer, place)
        run.join("d", invite_of(peer))
        run.sees("d", 4)


def test_a_founder_gives_out_the_address_that_the_router_forwards(tmp_path: Path) -> None:
    with site(tmp_path, 3, {AT_HOME: "restricted"}) as (_, run):
        founder = run.up("c")
        until(lambda: FORWARDS.search(founder.text), "it is forwarded", founder)
        until(lambda: f"//{PUBLIC_IP}:{NET_PORT}/" in founder.invite, "the invite", founder)


@pytest.mark.parametrize("options", [(), ("--advertise", f"203.0.113.7:{NET_PORT}")])
def test_a_router_that_refuses_is_said_and_one_is_not_asked_in_vain(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    with site(tmp_path, 3, {AT_HOME: "restricted"}, allow="") as (lab, run):
        run.options = lambda name: options if name == "c" else ()
        run.form("ab")
        peer = run.join("c")
        run.sees("c", 3)
        if options:
            until(lambda: "not confirmed yet" in peer.text, "it is told", peer)
            assert "router at" not in peer.text
        else:
            until(lambda: "this peer is outbound" in peer.text, "it is told", peer)
            assert peer.text.count("does not forward port 29600: ") == 1
        assert "dnat" not in forwarded(lab, AT_HOME)


def test_where_no_router_answers_that_is_said_once(tmp_path: Path) -> None:
    with site(tmp_path, 3, {AT_HOME: "restricted"}) as (_, run):
        run.up("a")  # on no router's side
        peer = run.peers["a"]
        until(lambda: "no router here answers UPnP" in peer.text, "it is said", peer)
        silenced = run.start("b", "join", run.invite, "--upnp", "off")
        run.sees("b", 2)
        assert "UPnP" not in silenced.text
