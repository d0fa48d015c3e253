"""A peer that nobody can dial is told so, everybody sees it, and it trains on.

Real daemons. On one machine such a peer advertises a port where nobody listens; on hosts of their
own, a firewall drops what comes to its port.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

from harness.netns import Net
from harness.processes import NET_PORT, Fleet, Peer, fleet, until


def dead_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def asked(peer: Peer, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "atoll.peer.cli", *words, "--home", str(peer.home)]
    return subprocess.run(command, capture_output=True, text=True)


def is_seen(run: Fleet, names: str, outbound: str) -> None:
    """All of ``names`` know that ``outbound`` is one, and that the others are not."""
    wanted = {run.peers[name].status()["peer"]: name in outbound for name in names}

    def seen(name: str) -> bool:
        members = run.peers[name].try_status().get("members", ())
        return {m["peer"]: m["outbound"] for m in members} == wanted

    for name in names:
        until(lambda n=name: seen(n), f"{name} sees who is outbound", *run.peers.values())


def test_an_outbound_peer_is_told_and_shown_and_its_invite_leads_elsewhere(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        port = dead_port()
        outbound = run.start("x", "join", run.invite, "--advertise", f"127.0.0.1:{port}")
        until(lambda: "this peer is outbound" in outbound.text, "it is told", outbound)
        assert f"others cannot dial it at 127.0.0.1:{port}: " in outbound.text
        assert "got a refusal after" in outbound.text
        assert f"let TCP port {port} pass the firewall" in outbound.text
        for name in "abcx":
            run.sees(name, 4)
        is_seen(run, "abcx", "x")

        shown = asked(run.peers["b"], "status").stdout
        row = next(line for line in shown.splitlines() if str(port) in line)
        assert "outbound" in row
        own = asked(outbound, "status").stdout
        assert "reach      this peer is outbound" in own
        reach = json.loads(asked(outbound, "status", "--json").stdout)["reach"]
        assert reach["state"] == "outbound"
        assert json.loads(asked(run.peers["b"], "status", "--json").stdout)["reach"]["text"]

        invite = asked(outbound, "invite").stdout.split()[-1]
        assert f":{port}/" not in invite
        run.join("y", invite)
        run.sees("y", 5)
        is_seen(run, "abcxy", "x")


def test_a_firewall_makes_a_peer_outbound_and_two_of_them_meet_directly(
    tmp_path: Path,
) -> None:
    with Net("abc") as net, fleet(tmp_path, net) as run:
        for name in "bc":
            net.closed(name, NET_PORT)
        founder = run.up("a")
        assert "only machines that have a way to " in founder.text
        for name in "bc":
            peer = run.join(name)
            until(lambda p=peer: "this peer is outbound" in p.text, f"{name} is told", peer)
            assert "not confirmed yet that others can dial this peer" in peer.text
            assert "got no answer in 2.5 s" in peer.text
        for name in "abc":
            run.sees(name, 3)
        is_seen(run, "abc", "bc")  # b and c have no link: a hands on what they have said

        for name in "bc":
            peer = run.peers[name]
            until(lambda p=peer: "is linked directly now" in p.text, f"{name} meets", peer)

        # They go on when a has gone, but nobody can be reached through them.
        founder.kill()
        for name in "bc":
            peer = run.peers[name]
            run.sees(name, 2)
            refused = asked(peer, "invite")
            assert refused.returncode != 0
            assert "nobody can join through this peer" in refused.stderr


def test_whoever_dials_a_silent_founder_reads_why_and_what_would_help(tmp_path: Path) -> None:
    with Net("ab") as net, fleet(tmp_path, net) as run:
        run.up("a")
        net.closed("a", NET_PORT)
        joiner = run.join("b")
        assert joiner.ends() == 10
        assert "no answer in time" in joiner.text
        assert "a private address, behind a router" in joiner.text
        assert "need one that can be dialled" in joiner.text
        assert "relay" in joiner.text
