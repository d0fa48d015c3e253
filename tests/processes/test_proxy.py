"""Daemons and the doctor behind a SOCKS5 proxy, as users start them."""

from __future__ import annotations

from pathlib import Path

from harness.doctors import examine
from harness.processes import fleet, until
from harness.socks_server import SocksServer

UNFIT = 3
NAMES = {"founder.test": "127.0.0.1"}


def test_a_peer_joins_by_a_name_that_only_the_proxy_knows_and_hides_the_password(
    tmp_path: Path,
) -> None:
    with SocksServer(names=NAMES, login=("ada", "hidden")) as server, fleet(tmp_path) as run:
        founder = run.up("a")
        invite = founder.invite.replace("127.0.0.1", "founder.test")
        proxy = f"socks5://ada:hidden@{server.host}:{server.port}"
        run.options = lambda name: ("--proxy", proxy)
        peer = run.join("b", invite)
        run.sees("b", 2)
        assert server.asked[0].host == "founder.test"
        status = peer.status()
        assert status["proxy"] == server.url
        until(lambda: f"proxy {server.url} makes all connections" in peer.text, "said", peer)
        assert "hidden" not in peer.text
        assert "hidden" not in str(status)
        command = Path(f"/proc/{peer.pid}/cmdline").read_bytes()
        assert b"join" in command
        assert b"hidden" not in command

        server.cut()  # as one that is started again; either may dial the other then
        until(lambda: " ended: " in peer.text, "it has lost its connection", peer)

        def connected() -> bool:
            members = peer.try_status().get("members", ())
            return [m["state"] for m in members if not m["you"]] == ["connected"]

        until(connected, "they are linked again", peer, founder)


def test_the_doctor_says_what_is_wrong_with_a_proxy(tmp_path: Path) -> None:
    with SocksServer(names=NAMES) as server, fleet(tmp_path) as run:
        invite = run.up("a").invite
        named = invite.replace("127.0.0.1", "founder.test")
        well = examine(tmp_path, named, "--no-rates", "--proxy", server.url)
        assert well.code == 0, well.document
        assert well["proxy"]["status"] == "ok"
        assert f"founder.test is for {server.url} to find" in well["name"]["what"]
        assert f" answered through {server.url} in " in well["tcp"]["what"]
        server.reply = 2
        denied = examine(tmp_path, named, ATOLL_PROXY=server.url)
        assert (denied.code, denied.with_status("fail")) == (UNFIT, ["tcp"])
        assert "its rules do not allow this connection (reply 2)" in denied["tcp"]["what"]
        server.reply, server.login = 0, ("ada", "hidden")
        found = examine(tmp_path, "--proxy", server.url)
        assert (found.code, found.with_status("fail")) == (UNFIT, ["proxy"])
        assert "wants a user and a password" in found["proxy"]["what"]
        assert "ATOLL_PROXY" in found["proxy"]["fix"]
    gone = examine(tmp_path, "--proxy", server.url)
    assert "cannot be reached: connection refused" in gone["proxy"]["what"]
    assert "skipped" in examine(tmp_path)["proxy"]["status"]


def test_a_founder_says_at_once_that_its_proxy_is_not_there(tmp_path: Path) -> None:
    """It dials nobody, and so nothing else would show it."""
    with SocksServer() as server:
        gone = server.url
    with SocksServer() as server, fleet(tmp_path) as run:
        run.options = lambda name: ("--proxy", gone if name == "a" else server.url)
        peer, well = run.up("a"), run.up("b")
        said = f"proxy {gone} does not let this machine in: the proxy cannot be reached"
        until(lambda: said in peer.text, "it is said", peer)
        assert "does not let this machine in" not in well.text
