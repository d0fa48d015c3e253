"""`atoll doctor INVITE` against real members: how far the way into a run leads, and what they say.

Each line is looked at with the command's exit code and in its --json; nothing is ever joined.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from harness.doctors import Examined, examine, instead_of
from harness.netns import Net
from harness.processes import NET_PORT, Fleet, Peer, fleet, until
from harness.wrong_clock import WrongClock

import atoll
from atoll.peer.authority.key import Authority
from atoll.peer.doctor.run_checks import STAGES
from atoll.peer.doctor.table import CHECKS
from atoll.peer.net.hello import PROTOCOL_MAX
from atoll.peer.net.invite import Invite

UNFIT = 3
ELEMENTS = 4_000_000
# As the hello of protocol 2 was, which knew fewer kinds of connections.
OLDER = """
import sys
from atoll.collectives import version
version.VERSION = "0.1.9"
from atoll.peer.net import hello
hello.PROTOCOL_MIN = hello.PROTOCOL_MAX = 2
hello.EXAMINE, hello.REACH = "no such kind", "nor this"
from atoll.peer.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A run of two with a model: the tests below only look at it."""
    with fleet(tmp_path_factory.mktemp("run")) as made:
        made.up("a")
        made.join("b")
        made.sees("a", 2)
        made.train("a", elements=ELEMENTS)
        made.peers["a"].reaches(2)
        yield made


def fails_at(found: Examined, line: str) -> None:
    """What comes before it is well, and nothing behind it was tried."""
    assert found.code == UNFIT, found.document
    assert not found.document["fit"]
    assert found.with_status("fail") == [line]
    assert found[line]["fix"]
    stages = list(STAGES.values())
    for stage in stages[: stages.index(line)]:
        assert found[stage]["status"] == "ok", found[stage]
    behind = [*stages[stages.index(line) + 1 :], "model", "clock", "round-trip", "dial-back"]
    for stage in (*behind, "rate-up", "rate-down"):
        assert found[stage]["status"] == "skipped", found[stage]
    assert f"see {line} above" in found.errors


def test_everything_about_a_run_that_is_well(run: Fleet, tmp_path: Path) -> None:
    peer = run.peers["a"]
    found = examine(tmp_path, run.invite)
    assert (found.code, found.document["fit"]) == (0, True), found.document
    assert found.document["run"] == "demo"
    assert found.document["address"] == f"127.0.0.1:{peer.port}"
    assert [check["id"] for check in found.document["checks"]] == [check.id for check in CHECKS]
    assert not found.with_status("fail")
    assert found["name"]["value"] == ["127.0.0.1"]
    assert found["version"]["value"] == {"atoll": atoll.__version__, "protocol": PROTOCOL_MAX}
    model = found["model"]["value"]
    assert (model["parameters"], model["state_bytes"]) == (ELEMENTS, 8 * ELEMENTS)
    assert (model["method"], model["codec"]) == ("diloco", "int8")
    assert model["daemon_bytes"] > 10 * ELEMENTS
    assert "(run demo)" in found["memory"]["what"]
    assert abs(found["clock"]["value"]) < 5, "one machine"
    assert 0 < found["round-trip"]["value"] < 5
    assert set(found["dial-back"]["value"]) == {p.status()["peer"] for p in run.peers.values()}
    assert found["dial-back"]["value"][run.peers["b"].status()["peer"]] == "ok"
    assert found["dial-back"]["status"] == "ok"
    for line in ("rate-up", "rate-down"):
        assert found[line]["value"] > 0
    assert "joining loads the state" in found["rate-down"]["what"]
    assert len(peer.status()["members"]) == 2, "it has joined nothing"
    assert "rejected" not in peer.text


def test_rates_are_not_measured_where_they_are_not_wanted(run: Fleet, tmp_path: Path) -> None:
    found = examine(tmp_path, run.invite, "--no-rates")
    assert found.code == 0
    assert found["rate-up"]["status"] == found["rate-down"]["status"] == "skipped"


def test_too_little_memory_for_the_runs_model(run: Fleet, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable:    100000 kB\n")
    prefix = instead_of("/proc/meminfo", tmp_path / "meminfo")
    found = examine(tmp_path, run.invite, "--no-rates", prefix=prefix)
    assert (found.code, found.with_status("fail")) == (UNFIT, ["memory"])
    assert "(run demo)" in found["memory"]["what"]


# ---------------------------------------------------------------- the way in, stage by stage


def test_a_resolver_that_is_broken(run: Fleet, tmp_path: Path) -> None:
    invite = replace(Invite.parse(run.invite), host="a-member.example.org")
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    file = tmp_path / "resolv.conf"
    prefix = instead_of("/etc/resolv.conf", file, networked=False)  # nobody is there to ask
    found = examine(tmp_path, str(invite), prefix=prefix)
    fails_at(found, "name")
    assert "a-member.example.org" in found["name"]["fix"]


def test_a_port_that_is_closed(run: Fleet, tmp_path: Path) -> None:
    with socket.socket() as closed:  # bound, so that nobody else takes it meanwhile
        closed.bind(("127.0.0.1", 0))
        invite = replace(Invite.parse(run.invite), port=closed.getsockname()[1])
        found = examine(tmp_path, str(invite))
    fails_at(found, "tcp")
    assert "connection refused" in found["tcp"]["what"]


def test_a_port_of_another_program(run: Fleet, tmp_path: Path) -> None:
    def greet() -> None:
        while True:
            try:
                sock, _ = other.accept()
            except OSError:  # shut down: the doctor has looked
                return
            with sock, contextlib.suppress(OSError):  # whoever asked may have gone
                sock.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                sock.recv(4096)

    with socket.create_server(("127.0.0.1", 0)) as other:
        greeting = threading.Thread(target=greet, daemon=True)
        greeting.start()
        invite = replace(Invite.parse(run.invite), port=other.getsockname()[1])
        found = examine(tmp_path, str(invite))
        other.shutdown(socket.SHUT_RDWR)  # wakes accept; close alone would not
        greeting.join()
    fails_at(found, "tls")
    assert "atoll port" in found["tls"]["fix"]


def test_another_secret_is_named_with_both_tags(run: Fleet, tmp_path: Path) -> None:
    right = examine(tmp_path, run.invite, "--no-rates")["secret"]["value"]
    invite = replace(Invite.parse(run.invite), secret=bytes(32))
    found = examine(tmp_path, str(invite))
    fails_at(found, "secret")
    assert f"tag {right}" in found["secret"]["what"]
    assert "yours has tag" in found["secret"]["what"]
    assert invite.secret.hex() not in str(found.document)


def test_another_peer_at_the_address(run: Fleet, tmp_path: Path) -> None:
    invite = replace(Invite.parse(run.invite), port=run.peers["b"].port)
    fails_at(examine(tmp_path, str(invite)), "identity")


def test_another_run_with_the_same_secret(run: Fleet, tmp_path: Path) -> None:
    found = examine(tmp_path, str(replace(Invite.parse(run.invite), run="other")))
    fails_at(found, "admission")
    assert "demo" in found["admission"]["what"]


def test_an_old_version_is_named(tmp_path: Path) -> None:
    home = tmp_path / "a"
    arguments = ("up", "--run", "demo", "--listen", "127.0.0.1:0")
    peer = Peer(home, *arguments, program=("-c", OLDER))
    try:
        found = examine(tmp_path, peer.invite)
    finally:
        peer.kill()
        peer.ends()
    fails_at(found, "version")
    assert "atoll 0.1.9 (protocol 2)" in found["version"]["what"]
    assert "install atoll" in found["version"]["fix"]


def test_a_home_of_another_run(run: Fleet, tmp_path: Path) -> None:
    with fleet(tmp_path) as other:
        peer = other.up("c")
        found = examine(tmp_path, run.invite, "--home", str(peer.home), "--no-rates")
    assert (found.code, found.with_status("fail")) == (UNFIT, ["invite"])
    assert "belongs to an older run of the same name" in found["invite"]["what"]


def test_an_invite_of_an_authority(tmp_path: Path) -> None:
    folder = tmp_path / "authority"
    authority = Authority.new(folder)
    with fleet(tmp_path) as guarded:
        grant, seed = authority.token("demo", "replica", 2, 0)
        own = tmp_path / "own"
        own.write_text(str(authority.invite(grant, ("127.0.0.1", 9), seed)))
        trusted = ("--authority", authority.public_key.hex(), "--pass", str(own))
        peer = guarded.start("a", "up", "--run", "demo", *trusted)
        until(lambda: peer.try_status().get("members"), "the run is founded", peer)
        where = ("127.0.0.1", peer.port)
        good = authority.invite(grant, where, seed)
        found = examine(tmp_path, str(good), "--no-rates")
        assert (found.code, found["identity"]["value"]) == (0, False), found.document
        assert found["admission"]["status"] == "ok"

        grant, seed = authority.token("demo", "replica", 1, int(time.time()) - 60)
        late = examine(tmp_path, str(authority.invite(grant, where, seed)), "--no-rates")
        assert (late.code, late.with_status("fail")) == (UNFIT, ["invite"])
        assert "expired" in late["invite"]["what"]

        forged = replace(good, grant=good.grant[:-1] + bytes([good.grant[-1] ^ 1]))
        found = examine(tmp_path, str(forged), "--no-rates")
        assert (found.code, found.with_status("fail")) == (UNFIT, ["invite"])
        assert str(good.seed.hex()) not in str(found.document)


# ---------------------------------------------------------------- what the member says


def test_a_clock_that_is_wrong(tmp_path: Path) -> None:
    clock = WrongClock(tmp_path / "clock")
    clock.jump(3600)
    with fleet(tmp_path) as late:
        late.environment = clock.environment
        late.up("a")
        found = examine(tmp_path, late.invite, "--no-rates")
    clock.close()
    assert (found.code, found["clock"]["status"]) == (0, "warn")
    assert found["clock"]["value"] == pytest.approx(3600, abs=30)
    assert "behind" in found["clock"]["what"]
    assert found["model"]["value"] is None, "no trainer has come"


def test_dial_back_tells_who_got_through_and_who_did_not(tmp_path: Path) -> None:
    with Net("abd") as net, fleet(tmp_path, net) as run:
        run.up("a")
        alone = _on(net, "d", tmp_path, run.invite)
        assert (alone.code, alone["dial-back"]["status"]) == (0, "warn")
        assert "not confirmed" in alone["dial-back"]["what"]
        run.join("b")
        run.sees("a", 2)
        found = _on(net, "d", tmp_path, run.invite)
        assert (found.code, found["dial-back"]["status"]) == (0, "ok"), found["dial-back"]
        assert len(found["dial-back"]["value"]) == 2
        assert found["address"]["value"]["observed"] == net.address("d")

        deaf = _on(net, "d", tmp_path, run.invite, listen="127.0.0.1")
        assert (deaf.code, deaf["dial-back"]["status"]) == (0, "warn")
        assert set(deaf["dial-back"]["value"].values()) == {"refused"}
        assert "outbound" in deaf["dial-back"]["fix"]

        cut = net._cut()
        cut.drop("to", net.address("d"), "ipproto", "tcp", "dport", str(NET_PORT))
        found = _on(net, "d", tmp_path, run.invite)
        cut.undo()
        assert (found.code, found["dial-back"]["status"]) == (0, "warn")
        assert set(found["dial-back"]["value"].values()) == {"silent"}


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft, of the package nftables")
def test_a_slow_link_and_a_private_address_behind_nat(tmp_path: Path) -> None:
    """The doctor's host is behind d: its packets leave with d's address."""
    with Net("ad", rate_bps={"d": 1e6}) as net, fleet(tmp_path, net) as run:
        run.up("a")
        net.also("d", ["198.51.100.9"])
        space = net.command("d", [])
        masquerade = "table ip n { chain c { type nat hook postrouting priority 100;"
        masquerade += " snat to 198.51.100.9; }; }"
        subprocess.run([*space, "nft", masquerade], check=True)
        found = _on(net, "d", tmp_path, run.invite, rates=True)
    assert found.code == 0
    assert found["address"]["status"] == "warn"
    assert found["address"]["value"]["observed"] == "198.51.100.9"
    assert "behind NAT" in found["address"]["what"]
    for line in ("rate-up", "rate-down"):
        assert found[line]["status"] == "warn"
        assert 0 < found[line]["value"] < 2


def _on(
    net: Net, host: str, folder: Path, invite: str, *, listen: str = "0.0.0.0", rates: bool = False
) -> Examined:
    where = ("--listen", f"{listen}:{NET_PORT}", *(() if rates else ("--no-rates",)))
    return examine(folder, invite, *where, prefix=net.command(host, []))
