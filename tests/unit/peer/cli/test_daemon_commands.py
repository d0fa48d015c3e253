"""`atoll up`, `join` and `follow`: what contradicts itself is refused before anything starts."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll.peer.cli import daemon, main
from atoll.peer.daemon.options import DaemonOptions
from atoll.peer.membership.view import ARCHIVE, DEFAULT_RULES, REPLICA, WITNESS, Rules
from atoll.peer.net.identity import Home, RunRecord
from atoll.peer.telemetry.page.history import History
from atoll.peer.telemetry.page.server import PageServer

A, B, C = "10.0.0.1:29600", "10.0.0.2:29600", "10.0.0.3:29600"
SECRET = bytes(range(32))


def start(home: Path, *arguments: str) -> int:
    return main.main([*arguments, "--home", str(home), "--listen", "127.0.0.1:0"])


def secret_file(folder: Path) -> str:
    (folder / "secret").write_text(SECRET.hex() + "\n")
    return str(folder / "secret")


# ---------------------------------------------------------------- contradictions


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--resume D --expect 2 --peers A,B", "--resume goes on from a checkpoint, --expect"),
        ("--resume D --peers A,B", "--resume goes on from a checkpoint, --expect"),
        ("--resume D --force-new-lineage", "begins without state, --resume with it"),
        ("--resume D --witness", "a witness holds no state to go on from"),
        ("--expect 2", "--expect and --peers need each other"),
        ("--peers A,B", "--expect and --peers need each other"),
        ("--expect 3 --peers A,B", "--expect 3, but --peers has 2"),
        ("--expect 2 --peers A,A", "--expect 2, but --peers has 1"),
        ("--expect 1 --peers A", "founding together takes two"),
        ("--expect 2 --peers A,B", "the founders need one secret in common"),
        ("--expect 2 --peers A,nowhere", "nowhere"),
        ("--witness --checkpoint D", "a witness holds no state, so it writes no checkpoints"),
        ("--every 5", "--every without --checkpoint"),
        ("--resume D", "cannot be read: No such file"),
        ("--secret-file D", "No such file"),
        ("--congestion cubik", "--congestion cubik: this"),
        ("--up-mbit 50,22:00-6=9", "is expected at character 10,"),
        ("--down-gb-per-day 1", "--down-gb-per-day 1: a number of gigabytes"),
    ],
)
def test_contradictions_are_refused(
    line: str,
    says: str,
    tmp_path: Path,
    started: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = {"A": A, "A,B": f"{A},{B}", "A,A": f"{A},{A}", "A,nowhere": f"{A},nowhere"}
    values["D"] = str(tmp_path / "nothing")
    arguments = [values.get(word, word) for word in line.split()]
    assert start(tmp_path / "home", "up", "--run", "demo", *arguments) in (2, 26)
    printed = capsys.readouterr().err
    assert says in printed
    assert "Traceback" not in printed
    assert not started


@pytest.mark.parametrize("wrong", [("--every", "5"), ("--listen", "nowhere")])
def test_a_home_remembers_no_run_that_was_never_started(
    wrong: tuple[str, str], tmp_path: Path, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Or its made-up secret would stand against the one that the founders share."""
    home = str(tmp_path / "home")
    assert main.main(["up", "--run", "demo", "--home", home, *wrong]) == 2
    assert "fix:" in capsys.readouterr().err
    assert (
        start(tmp_path / "home", "up", "--run", "demo", "--secret-file", secret_file(tmp_path)) == 0
    )
    assert started[0].secret == SECRET


def test_another_secret_than_the_homes_is_refused_with_advice(
    tmp_path: Path, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with Home.open(tmp_path / "home") as home:
        home.save_run(RunRecord("demo", bytes(32), (A,)))
    assert (
        start(tmp_path / "home", "up", "--run", "demo", "--secret-file", secret_file(tmp_path)) == 2
    )
    printed = capsys.readouterr().err
    assert "is not the secret that this home has" in printed
    assert "another --home" in printed


@pytest.mark.parametrize("every", ["0", "-3", "often"])
def test_every_is_a_number_of_rounds(every: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        start(tmp_path, "up", "--run", "demo", "--checkpoint", str(tmp_path), "--every", every)


# ---------------------------------------------------------------- what is started


def test_rules_are_the_users_then_the_runs_then_the_default() -> None:
    class Resumed:
        rules = Rules("any", "rollback", "halt")

    def rules(resume: Any = None, **asked: str | int) -> Rules:
        return daemon._rules(argparse.Namespace(**asked), resume)

    assert rules() == DEFAULT_RULES
    assert rules(policy="majority") == Rules("majority")
    assert rules(Resumed()) == Resumed.rules
    assert rules(Resumed(), on_lost="halt") == Rules("any", "halt", "halt")
    assert rules(Resumed(), min_trainers=2) == Rules("any", "rollback", "halt", 2)


@pytest.mark.parametrize("count", ["0", "-1", "1025", "99999999999999999999", "two", "1.5"])
def test_min_trainers_is_a_number_of_members(count: str, tmp_path: Path) -> None:
    for line in (("up", "--run", "demo", "--min-trainers", count), ("min-trainers", count)):
        with pytest.raises(SystemExit) as stopped:
            start(tmp_path / "home", *line)
        assert stopped.value.code == 2


def test_founders_share_a_secret_and_come_back_with_the_same_line(
    tmp_path: Path, started: list[DaemonOptions]
) -> None:
    founding = ("--expect", "2", "--peers", f"{A},{B}", "--secret-file", secret_file(tmp_path))
    line = ("up", "--run", "demo", *founding)
    assert start(tmp_path / "home", *line) == 0
    options = started.pop()
    assert options.founders == options.contacts == (A, B)
    assert (options.secret, options.found, options.returns) == (SECRET, False, False)
    with Home.open(tmp_path / "home") as home:
        home.save_run(RunRecord("demo", SECRET, (B, A)))  # as its daemon does, its own at the end
    assert start(tmp_path / "home", *line) == 0
    options = started.pop()
    assert (options.founders, options.contacts, options.returns) == ((), (B,), True)


def test_roles(tmp_path: Path, started: list[DaemonOptions]) -> None:
    start(tmp_path / "a", "up", "--run", "demo")
    start(tmp_path / "w", "up", "--run", "demo", "--witness")
    assert [options.role for options in started] == [REPLICA, WITNESS]
    invite = f"atoll://{A}/demo#" + _token()
    start(tmp_path / "b", "join", invite)
    start(tmp_path / "v", "join", invite, "--witness")
    start(tmp_path / "f", "follow", invite, "--checkpoint", str(tmp_path / "kept"), "--every", "7")
    assert [options.role for options in started[2:]] == [REPLICA, WITNESS, ARCHIVE]
    assert (started[-1].checkpoint, started[-1].every) == (tmp_path / "kept", 7)
    assert [options.found for options in started] == [True, True, False, False, False]


def test_data_goes_without_a_cipher_only_if_asked(
    tmp_path: Path, started: list[DaemonOptions]
) -> None:
    invite = f"atoll://{A}/demo#" + _token()
    for number, line in enumerate((("up", "--run", "demo"), ("join", invite), ("follow", invite))):
        start(tmp_path / f"{number}", *line)
        start(tmp_path / f"{number}", *line, "--plain-streams")
        assert started[-2].ciphers == ("aes-256-gcm",)
        assert started[-1].ciphers == ("none", "aes-256-gcm")


def test_the_congestion_control_is_the_kernels_choice_or_the_users(
    tmp_path: Path, started: list[DaemonOptions]
) -> None:
    invite = f"atoll://{A}/demo#" + _token()
    for number, line in enumerate((("up", "--run", "demo"), ("join", invite), ("follow", invite))):
        start(tmp_path / f"{number}", *line)
        start(tmp_path / f"{number}", *line, "--congestion", "reno")
        assert [options.congestion for options in started[-2:]] == ["auto", "reno"]


def test_a_run_with_checkpoints_is_not_founded_anew_by_mistake(
    tmp_path: Path, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept" / f"demo-{8:012d}-0123abcd").mkdir(parents=True)
    keeps = ("--checkpoint", str(tmp_path / "kept"))
    assert start(tmp_path / "home", "up", "--run", "demo", *keeps) == 2
    assert "--resume" in capsys.readouterr().err
    assert start(tmp_path / "home", "up", "--run", "another", *keeps) == 0
    assert start(tmp_path / "h", "up", "--run", "demo", *keeps, "--force-new-lineage") == 0
    assert len(started) == 2


def test_a_home_whose_run_is_gone_says_what_can_be_done(
    tmp_path: Path, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with Home.open(tmp_path / "home") as home:
        home.save_run(RunRecord("demo", SECRET, (A,)))  # it was the only member
    assert start(tmp_path / "home", "up", "--run", "demo") == 2
    printed = capsys.readouterr().err
    assert "--resume PATH" in printed
    assert "--force-new-lineage" in printed
    assert not started


def test_help_explains_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["up", "--help"])
    printed = capsys.readouterr().out
    for part in ("rules of the run", "founding together", "when nobody of the run is left"):
        assert part in printed


def _token() -> str:
    from atoll.peer.net.invite import Invite, fingerprint_of

    return str(Invite("10.0.0.1", 29600, "demo", fingerprint_of(b"p" * 32), SECRET)).split("#")[1]


def test_probes_are_sent_unless_the_user_wants_none(
    tmp_path: Path, started: list[DaemonOptions]
) -> None:
    invite = f"atoll://{A}/demo#" + _token()
    for number, line in enumerate((("up", "--run", "demo"), ("join", invite), ("follow", invite))):
        start(tmp_path / f"{number}", *line)
        start(tmp_path / f"{number}", *line, "--probes", "off")
        assert [options.probes for options in started[-2:]] == [True, False]


def test_sigterm_means_to_leave_unless_the_place_is_to_be_kept(
    tmp_path: Path, started: list[DaemonOptions]
) -> None:
    start(tmp_path / "a", "up", "--run", "demo")
    start(tmp_path / "b", "up", "--run", "demo", "--on-term", "keep")
    assert [options.keeps_place for options in started] == [False, True]


def test_a_secret_that_was_given_is_not_printed_in_an_invite(
    tmp_path: Path, started: list[DaemonOptions]
) -> None:
    start(tmp_path / "a", "up", "--run", "demo")
    start(tmp_path / "b", "up", "--run", "demo", "--secret-file", secret_file(tmp_path))
    assert [options.secret_given for options in started] == [False, True]


# ---------------------------------------------------------------- where the page is


@pytest.mark.parametrize(
    ("advertise", "host"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("192.0.2.7:29600", "192.0.2.7"),
        ("[2001:db8::7]", "[2001:db8::7]"),
        ("[2001:db8::7]:29600", "[2001:db8::7]"),
        ("node.example:29600", "node.example"),
    ],
)
def test_the_page_is_at_the_host_of_the_advertised_address(
    advertise: str, host: str, tmp_path: Path
) -> None:
    page = PageServer("0.0.0.0", 0, History(tmp_path), tmp_path)
    try:
        where = f"  page: http://{host}:{page.port}/"
        said = daemon._where_page_is(page, advertise, with_token=True)
        assert said == f"{where}?token={page.token}"
        said = daemon._where_page_is(page, advertise, with_token=False)
        assert said == f"{where} (its token is in {page.token_path})"
    finally:
        page.close()


def test_the_token_is_for_a_terminal_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not daemon._Log().is_for_a_terminal
    terminal, other = os.openpty()
    with open(other, "w") as shown:
        monkeypatch.setattr(sys, "stdout", shown)
        assert daemon._Log().is_for_a_terminal
        assert not daemon._Log(str(tmp_path / "log")).is_for_a_terminal
    os.close(terminal)
