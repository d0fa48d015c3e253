"""How daemons start: where an invite is seen, what is printed first, what a failed start leaves."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness.netns import Net
from harness.processes import DAEMON, JOIN_LINE, NET_PORT, Peer, fleet, until

from atoll.peer.net.connection_limits import STRANGERS_SPEAKING
from atoll.peer.net.invite import Invite

SCRIPT = Path(sys.executable).with_name("atoll")


def secret_of(invite: str) -> str:
    return invite.partition("#")[2]


def command_lines(pid: int) -> list[str]:
    """What any user of the machine can read of a process and of those that it has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    pids = [pid, *map(int, children)]
    return [Path(f"/proc/{each}/cmdline").read_bytes().decode() for each in pids]


# ---------------------------------------------------------------- invites


@pytest.mark.parametrize("program", [(str(SCRIPT),), DAEMON], ids=["script", "module"])
def test_an_invite_is_not_on_the_command_line_of_a_daemon(
    program: tuple[str, ...], tmp_path: Path
) -> None:
    """The process is the same: its id, its options, its environment, its folder, its signals."""
    with fleet(tmp_path) as run:
        invite = run.up("a").invite
        options = ("--listen", "127.0.0.1:0", "--advertise", "localhost")
        pasted = f" {invite}\n"
        peer = Peer(tmp_path / "b", "join", pasted, *options, program=program, ATOLL_TOLD="kept")
        run.peers["b"] = peer
        run.sees("b", 2)
        lines = command_lines(peer.pid)
        assert "--advertise\0localhost" in lines[0]
        assert not [line for line in lines if secret_of(invite) in line]
        assert b"ATOLL_TOLD=kept" in Path(f"/proc/{peer.pid}/environ").read_bytes()
        assert Path(f"/proc/{peer.pid}/cwd").readlink() == Path.cwd()
        assert not [path for path in Path(f"/proc/{peer.pid}/fd").iterdir() if is_pipe(path)]
        peer.kill(signal.SIGTERM)
        assert peer.ends() == 0
        assert "left the run" in peer.text


def is_pipe(path: Path) -> bool:
    try:
        return str(path.readlink()).startswith("pipe:")
    except OSError:  # closed meanwhile
        return False


def test_an_invite_comes_from_a_file_or_from_standard_input(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        invite = run.up("a").invite
        command = [sys.executable, *DAEMON, "invite", "--home", str(tmp_path / "a")]
        printed = subprocess.check_output(command, text=True)
        assert printed.strip() == f"atoll join {invite}"
        (tmp_path / "line").write_text(printed)
        run.start("b", "join", "--invite-file", str(tmp_path / "line"))
        run.sees("a", 2)
        log = (tmp_path / "c.log").open("wb")
        arguments = ["join", "-", "--listen", "127.0.0.1:0", "--home", str(tmp_path / "c")]
        with (
            log,
            subprocess.Popen(
                [sys.executable, *DAEMON, *arguments], stdin=subprocess.PIPE, stdout=log, stderr=log
            ) as third,
        ):
            try:
                assert third.stdin is not None
                third.stdin.write(b"\n" + printed.encode())
                third.stdin.flush()  # and it stays open, as a terminal does
                run.sees("a", 3)
                assert not any(secret_of(invite) in line for line in command_lines(third.pid))
            finally:
                third.kill()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("join",), "no invite is given"),
        (("follow",), "no invite is given"),
        (("join", "FILE", "--invite-file", "FILE"), "two invites are given"),
        (("join", "FILE"), "holds no invite"),
        (("join", "-"), "standard input holds no invite"),
        (("join", "nowhere#SECRET"), "'nowhere' is no invite"),
    ],
)
def test_an_invite_that_is_none_is_refused(
    words: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").write_text("nothing\n" * 1000)
    arguments = [word.replace("FILE", str(tmp_path / "empty")) for word in words]
    command = [sys.executable, *DAEMON, *arguments, "--home", str(tmp_path / "home")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 2
    assert says in done.stderr
    assert "SECRET" not in done.stdout + done.stderr


# ---------------------------------------------------------------- the first line


def test_the_first_line_is_the_join_line_or_whom_a_peer_joined(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        first = run.up("a")
        invite = first.invite
        assert first.text.splitlines()[0] == f"atoll join {invite}"
        joiner = run.join("b")
        run.sees("b", 2)
        by = f"{first.status()['peer']} at {re.escape(first.status()['address'])}"
        pattern = (
            rf"(entering run demo.*\n(?s:.*))?joined run demo: 1 peer, coordinator {by}, round 0\n"
        )
        until(lambda: re.match(pattern, joiner.text), "b says whom it joined", joiner)
        archive = run.start("f", "follow", invite)
        until(
            lambda: re.search(
                rf"^following run demo: 2 peers, coordinator {by}", archive.text, re.MULTILINE
            ),
            "the archive says so",
            archive,
        )

        joiner.kill()
        joiner.ends()
        again = run.restart("b")
        until(
            lambda: re.search(r"^back in run demo with 1 other member", again.text, re.MULTILINE),
            "it came back",
            again,
        )
        for peer in (joiner, archive, again):
            assert not JOIN_LINE.search(peer.text)
            assert secret_of(invite) not in peer.text
            assert " limits " not in peer.text
        assert first.text.count(secret_of(invite)) == 1
        assert Invite.parse(again.invite).secret == Invite.parse(invite).secret  # for who asks


def test_limits_are_printed_for_who_asks(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        peer = run.up("a", "--verbose")
        assert peer.text.splitlines()[0] == f"atoll join {peer.invite}"
        until(lambda: "descriptors; glibc" in peer.text, "it says what its limits are", peer)


def test_a_newcomer_goes_on_trying_where_somebody_is_too_busy_to_answer(tmp_path: Path) -> None:
    """As when a hundred are started at once by a script, and all dial the same peer."""
    with fleet(tmp_path) as run:
        first = run.up("a")
        assert first.invite
        first.kill(signal.SIGSTOP)  # its kernel goes on taking connections
        joiner = run.join("b")
        until(lambda: "goes on trying for 2 min" in joiner.text, "b says what it waits for", joiner)
        assert "no answer in time" in joiner.text
        first.kill(signal.SIGCONT)
        run.sees("b", 2)


def test_a_newcomer_goes_on_trying_where_others_have_all_places(tmp_path: Path) -> None:
    with fleet(tmp_path) as run, ExitStack() as others:
        first = run.up("a")
        for _ in range(STRANGERS_SPEAKING.total):
            stranger = others.enter_context(socket.create_connection(("127.0.0.1", first.port)))
            stranger.sendall(b"\x16")  # a handshake that begins
        joiner = run.join("b")
        until(lambda: "goes on trying for 2 min" in joiner.text, "b says what it waits for", joiner)
        assert "connection" in joiner.text
        assert "no answer in time" not in joiner.text
        others.close()
        run.sees("b", 2)


# ---------------------------------------------------------------- starts that fail


def test_a_failed_start_leaves_no_secret_behind(tmp_path: Path) -> None:
    """Or the corrected one would be refused for not having the secret of the wrong one."""
    wrong, right = tmp_path / "wrong", tmp_path / "right"
    wrong.write_text("00" * 32)
    right.write_text("11" * 32)
    with fleet(tmp_path) as run, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        failed = run.start("a", "up", "--run", "demo", "--secret-file", str(wrong), port=port)
        assert failed.ends() == 2
        assert f"port {port} of 127.0.0.1 is in use" in failed.text
        assert "--listen HOST:PORT" in failed.text
        assert not (failed.home / "run.json").exists()
        peer = run.up("a", "--secret-file", str(right))
        assert Invite.parse(peer.invite).secret == bytes.fromhex("11" * 32)
        assert (peer.home / "run.json").exists()


def test_founders_that_waited_with_a_wrong_secret_can_be_corrected(tmp_path: Path) -> None:
    wrong, right = tmp_path / "wrong", tmp_path / "right"
    wrong.write_text("00" * 32)
    right.write_text("11" * 32)
    with fleet(tmp_path, Net("ab")) as run:
        assert run.net is not None
        peers = ",".join(f"{run.net.address(name)}:{NET_PORT}" for name in "ab")
        founding = ("up", "--run", "demo", "--expect", "2", "--peers", peers, "--secret-file")
        waits = run.start("a", *founding, str(wrong))
        until(lambda: "1 of 2 founders" in waits.try_status().get("waiting", ""), "a waits", waits)
        waits.kill(signal.SIGINT)
        assert waits.ends() == 0
        for name in "ab":
            run.start(name, *founding, str(right))
        for name in "ab":
            run.sees(name, 2)


def test_a_taken_port_is_an_error_and_no_other_is_taken(tmp_path: Path) -> None:
    with fleet(tmp_path, Net("a")) as run:
        assert run.net is not None
        inside = run.net.command("a", ())
        first = Peer(tmp_path / "1", "up", "--run", "demo", prefix=inside)
        second = None
        try:
            assert Invite.parse(first.invite).port == NET_PORT
            second = Peer(tmp_path / "2", "up", "--run", "demo", prefix=inside)
            assert second.ends() == 2
            assert f"port {NET_PORT} is in use" in second.text
            assert "--listen :PORT" in second.text
            assert not JOIN_LINE.search(second.text)
            free = ("--listen", ":0")
            second = Peer(tmp_path / "2", "up", "--run", "demo", *free, prefix=inside)
            assert Invite.parse(second.invite).port not in (0, NET_PORT)
        finally:
            for peer in filter(None, (first, second)):
                peer.kill()
                peer.ends()
