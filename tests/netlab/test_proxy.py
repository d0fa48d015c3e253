"""A host whose router lets nothing out but to a SOCKS5 proxy trains with the others through it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness import socks_server
from harness.full_rounds import assert_trains
from harness.labnet import NAMES, LabNet, router_before
from harness.processes import Process, fleet, until

from atoll.peer.lab.lab import Lab
from atoll.peer.lab.routers import add_rules

pytestmark = [pytest.mark.usefixtures("routers"), pytest.mark.timeout(300)]

MBIT, TRIP_MS = 100.0, 20.0
PROXY, TRAINERS = 0, "bcd"  # the last one is shut in
SHUT_IN = 3
PORT = "1080"


def shut_in(lab: Lab) -> None:
    """Let the router drop all that is not to the proxy."""
    _, space = router_before(lab, SHUT_IN)
    rule = f'iifname "to-*" ip daddr != {lab.address(PROXY)} drop'
    add_rules(space, f"insert rule ip filtering through {rule}\n")


def test_a_host_that_reaches_a_proxy_and_nothing_else_trains(tmp_path: Path) -> None:
    with (
        Lab(4, rate_mbit=MBIT, rtt_ms=TRIP_MS, nat={SHUT_IN: "restricted"}) as lab,
        fleet(tmp_path, LabNet(lab)) as run,  # type: ignore[arg-type]  # as much as needed
    ):
        shut_in(lab)
        program = [sys.executable, socks_server.__file__, lab.address(PROXY), PORT]
        proxy = Process(lab.command(PROXY, *program), tmp_path / "proxy.log")
        until(lambda: "ready" in proxy.text, "the proxy is there", proxy)
        url = f"socks5://{lab.address(PROXY)}:{PORT}"
        try:
            for host in (1, 2):
                reached = lab.run(SHUT_IN, "ping", "-c1", "-W1", lab.address(host))
                assert reached.returncode, "nothing gets out"
            run.options = lambda name: ("--proxy", url) if NAMES.index(name) == SHUT_IN else ()
            run.form(TRAINERS)
            inside = run.peers["d"]
            assert_trains(run, TRAINERS)
            for host in (1, 2):
                assert f" {lab.address(host)}:" in proxy.text
            assert lab.sent_bytes(SHUT_IN, 1) == lab.sent_bytes(SHUT_IN, 2) == 0
            until(lambda: "this peer is outbound" in inside.text, "it is told", inside)
            address = lab.address(PROXY)
            assert f"cannot dial it at {address}:" in inside.text
        finally:
            proxy.kill()
            proxy.ends()
