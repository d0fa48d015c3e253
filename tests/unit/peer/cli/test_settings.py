"""What an option is, and why: a flag, ATOLL_*, atoll.toml, the default; slips are errors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from atoll.peer.cli import main
from atoll.peer.cli.settings import FILE, FILE_BYTES_MAX, settable
from atoll.peer.daemon.options import DaemonOptions
from atoll.peer.membership.view import DEFAULT_RULES
from atoll.peer.net.invite import DEFAULT_PORT, Invite, fingerprint_of

SECRET = bytes(range(32)).hex()
INVITE = str(Invite("10.0.0.1", 29600, "demo", fingerprint_of(b"p" * 32), bytes(range(32))))
TOKEN = INVITE.partition("#")[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of its own, with the home beside it, and no ATOLL_ variable set."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in list(os.environ):
        if name.startswith("ATOLL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    return tmp_path / "here"


def config(capsys: pytest.CaptureFixture[str], *line: str) -> dict[str, Any]:
    """What `atoll config --json` says of each option."""
    assert main.main(["config", "--json", *line]) == 0
    options: dict[str, Any] = json.loads(capsys.readouterr().out)["options"]
    return options


def fails(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    capsys.readouterr()
    assert main.main([*(line or ("config",))]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


# ---------------------------------------------------------------- the order


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def now(*flags: str) -> tuple[str, str, str]:
        found = config(capsys, "up", *flags)["congestion"]
        return found["value"], found["origin"], found["where"]

    assert now() == ("auto", "default", "default")
    (folder / FILE).write_text('run = "demo"\n\ncongestion = "reno"\n')
    assert now() == ("reno", "file", f"{folder / FILE}:3")
    monkeypatch.setenv("ATOLL_CONGESTION", "cubic")
    assert now() == ("cubic", "environment", "ATOLL_CONGESTION")
    assert now("--congestion", "bbr") == ("bbr", "flag", "--congestion")
    monkeypatch.setenv("ATOLL_CONGESTION", "")  # as compose files say "none"
    assert now() == ("reno", "file", f"{folder / FILE}:3")


def test_the_daemon_is_started_with_what_config_prints(
    folder: Path, started: list[DaemonOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / FILE).write_text(
        'run = "demo"\nlisten = "127.0.0.1:0"\nevery = 7\ncheckpoint = "kept"\nprobes = "off"\n'
        "plain-streams = true\nmin-trainers = 2\n"
    )
    monkeypatch.setenv("ATOLL_SECRET", SECRET)
    monkeypatch.setenv("ATOLL_MIN_TRAINERS", "3")
    monkeypatch.setenv("ATOLL_PLAIN_STREAMS", "no")
    assert main.main(["up", "--every", "9"]) == 0
    (options,) = started
    assert (options.run, options.listen_port, options.every) == ("demo", 0, 9)
    assert options.checkpoint == folder / "kept"
    assert (options.probes, options.plain_streams) == (False, False)
    assert options.rules.min_trainers == 3
    assert options.secret.hex() == SECRET


def test_every_option_of_every_daemon_is_a_key_and_a_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever argparse has: a new option needs nothing here."""
    parser = main.command_parser()
    monkeypatch.setenv("SKYPILOT_NODE_IPS", "10.0.0.1\n10.0.0.2")
    monkeypatch.setenv("SKYPILOT_NODE_RANK", "1")
    monkeypatch.setenv("SKYPILOT_TASK_ID", "sky-1")
    verbs = next(a for a in parser._actions if a.choices and "up" in a.choices)
    assert verbs.choices is not None
    for verb in ("up", "join", "follow"):
        actions = settable(verbs.choices[verb])  # type: ignore[call-overload]
        assert len(actions) > 10
        lines = []
        for name, action in actions.items():
            if name in ("config", "home"):
                continue
            places = {"listen": "10.0.0.1:1", "proxy": "socks5://10.0.0.1:1"}
            text = places.get(name, "3" if action.type else "text")
            text = "on" if action.nargs == 0 else text
            text = str(list(action.choices)[-1]) if action.choices else text
            monkeypatch.setenv(f"ATOLL_{name.upper().replace('-', '_')}", text)
            is_number = action.type and name not in places
            raw = "true" if action.nargs == 0 else text if is_number else json.dumps(text)
            lines.append(f"{name} = {raw}")
        found = config(capsys, verb)
        set_by = {name: found[name]["origin"] for name in actions if name not in ("config", "home")}
        assert set(set_by.values()) == {"environment"}, set_by
        for name in actions:
            if name != "home":
                monkeypatch.delenv(f"ATOLL_{name.upper().replace('-', '_')}", raising=False)
        (folder / FILE).write_text("\n".join(lines))
        (folder / FILE).chmod(0o600)
        found = config(capsys, verb)
        set_by = {name: found[name]["origin"] for name in actions if name not in ("config", "home")}
        assert set(set_by.values()) == {"file"}, set_by
        (folder / FILE).unlink()


def test_without_a_command_the_options_of_all_that_start_a_peer_are_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of `atoll run` among them."""
    (folder / FILE).write_text("grace-s = 20\n")
    found = config(capsys)
    assert {"witness", "expect", "restarts", "on-notice", "notice-url"} <= found.keys()
    assert (found["grace-s"]["value"], found["grace-s"]["origin"]) == (20.0, "file")


def test_an_option_of_another_command_is_left_to_it(
    folder: Path, started: list[DaemonOptions]
) -> None:
    """So that one file is good for all machines."""
    (folder / FILE).write_text('policy = "majority"\nlisten = "127.0.0.1:0"\nwitness = true\n')
    (folder / "invite").write_text(INVITE)
    assert main.main(["follow", "--invite-file", "invite"]) == 0
    assert started[0].role == "archive"


def test_what_is_required_may_be_in_the_file(
    folder: Path, started: list[DaemonOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.main(["up"])
    assert stopped.value.code == 2
    assert "the following arguments are required: --run" in capsys.readouterr().err
    (folder / FILE).write_text('run = "demo"\nlisten = "127.0.0.1:0"')
    assert main.main(["up"]) == 0
    assert started[0].run == "demo"


# ---------------------------------------------------------------- which file


def test_the_file_is_the_chosen_one_or_here_or_in_the_home(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").mkdir()
    places = tmp_path / "home" / FILE, folder / FILE, tmp_path / "chosen.toml"
    for number, path in enumerate(places):
        path.write_text(f'run = "run-{number}"\ncheckpoint = "kept"\npass = "-"\n')
        line = ("--config", str(path)) if path.name == "chosen.toml" else ()
        found = config(capsys, "up", *line)
        assert found["run"]["value"] == f"run-{number}"
        assert found["checkpoint"]["value"] == str(path.parent / "kept")  # beside the file
        assert found["pass"]["value"] == "-"  # standard input


def test_the_home_may_stand_in_the_file_and_all_commands_look_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv("ATOLL_HOME")
    (folder / FILE).write_text(f'home = "{tmp_path}/elsewhere"\n')
    for command in ("status", "leave", "invite"):
        assert main.main([command]) == 14
        assert f"no daemon runs at {tmp_path}/elsewhere" in capsys.readouterr().err


def test_a_file_in_the_home_cannot_move_the_home(tmp_path: Path, capsys: Any) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / FILE).write_text('home = "/elsewhere"\n')
    os.environ.pop("ATOLL_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path)
    (tmp_path / "atoll").symlink_to(home)
    try:
        assert "says that the home is /elsewhere" in fails(capsys)
    finally:
        del os.environ["XDG_STATE_HOME"]


def test_a_file_that_others_can_write_has_to_be_chosen(folder: Path, capsys: Any) -> None:
    """Or whoever can write to a folder decides what those do that work there."""
    (folder / FILE).write_text('run = "theirs"\n')
    (folder / FILE).chmod(0o666)
    assert "every user can write it" in fails(capsys)
    assert config(capsys, "up", "--config", FILE)["run"]["value"] == "theirs"


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\nmin_trainers = 3", f"{FILE}:2: there is no option min_trainers"),
        ("lissten = 'x'", "did you mean listen?"),
        ("zzz = 1", "`atoll config` lists all options"),
        ("config = 'x'", "there is no option config"),
        ("[up]\nrun = 'x'", "[up] is a table, and there are none"),
        ("every = 'often'", "every is 'often', and has to be a number"),
        ("every = true", "every is true, and has to be a number"),
        ("every = 0", "every is '0', and has to be a number"),
        ("listen = 29600", "listen is 29600, and has to be text: HOST:PORT"),
        ("witness = 1", "witness is 1, and has to be true or false"),
        ("witness = 'yes'", "witness is 'yes', and has to be true or false"),
        ("probes = 'maybe'", "probes is 'maybe', and has to be one of on, off"),
        ("probes = true", "probes is true, and has to be one of on, off"),
        ("peers = [1, 2]", "has to be text, or a list of it: A,B,..."),
        ("run = 'a'\nrun = 'b'", "is not TOML: Cannot overwrite a value"),
        ("run = ", "is not TOML: Invalid value"),
        ("a" * (FILE_BYTES_MAX + 1), "has more than 64 KiB"),
    ],
)
def test_mistakes_in_the_file_are_named_with_their_line(
    text: str, says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / FILE).write_text(text)
    assert says in fails(capsys)
    assert says in fails(capsys, "status")  # whatever the command


def test_a_file_that_is_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "none.toml cannot be read: No such file" in fails(
        capsys, "config", "--config", "none.toml"
    )
    (folder / FILE).write_bytes(b"\xff")
    assert "is not UTF-8" in fails(capsys)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("ATOLL_EVERY", "often", "ATOLL_EVERY: every is 'often', and has to be a number"),
        ("ATOLL_WITNESS", "maybe", "ATOLL_WITNESS: witness is 'maybe', and has to be true or"),
        ("ATOLL_DURABLE", "all", "has to be one of rounds, votes, off"),
    ],
)
def test_mistakes_in_the_environment_are_errors(
    variable: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv(variable, value)
    assert says in fails(capsys)


def test_a_variable_that_looks_like_a_slip_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATOLL_LISTN", "127.0.0.1:0")
    monkeypatch.setenv("ATOLL_PORT_29600_TCP", "tcp://10.0.0.1:29600")  # Kubernetes makes these
    assert main.main(["config"]) == 0
    assert capsys.readouterr().err == "ATOLL_LISTN is not read: did you mean ATOLL_LISTEN?\n"


def test_an_option_of_another_command_is_said_to_be_that(capsys: Any) -> None:
    for line in (("up", "--run", "x"), ("config", "up")):
        with pytest.raises(SystemExit):
            main.main([*line, "--on-notice=aws"])
        says = "--on-notice is an option of `atoll run`, not of `atoll up`"
        assert says in capsys.readouterr().err


def test_what_holds_where_nothing_is_said_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["config", "up"]) == 0
    shown = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()}
    rules = DEFAULT_RULES
    assert (shown["policy"], shown["on-lost"], shown["on-fork"]) == (
        rules.policy,
        rules.on_lost,
        rules.on_fork,
    )
    assert shown["listen"] == f":{DEFAULT_PORT}"


def test_peers_may_be_a_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / FILE).write_text('peers = [\n  "a:1",  # ours\n  "b:2",\n]\n')
    assert config(capsys, "up")["peers"]["value"] == "a:1,b:2"


# ---------------------------------------------------------------- secrets


def test_secrets_are_never_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATOLL_SECRET", SECRET)
    monkeypatch.setenv("ATOLL_INVITE", INVITE)
    monkeypatch.setenv("ATOLL_PASS", INVITE)
    for line in (["config"], ["config", "--json"], ["config", "join", INVITE]):
        assert main.main(line) == 0
        said = "".join(capsys.readouterr())
        assert SECRET not in said
        assert TOKEN not in said
        assert "secret" in said
    monkeypatch.setenv("ATOLL_SECRET", "not hex, and quoted nowhere")
    said = fails(capsys, "up", "--run", "demo", "--listen", "127.0.0.1:0")
    assert "ATOLL_SECRET" in said
    assert "quoted nowhere" not in said


@pytest.mark.parametrize("key", ["secret", "invite", "pass"])
def test_a_file_with_a_secret_is_for_its_user_alone(
    key: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / FILE).write_text(f'{key} = "{SECRET if key == "secret" else INVITE}"\n')
    (folder / FILE).chmod(0o644)
    said = fails(capsys)
    assert "holds a secret and other users may read it (mode 0644)" in said
    assert f"chmod 600 {folder / FILE}" in said
    (folder / FILE).chmod(0o600)
    assert main.main(["config"]) == 0


def test_no_secret_is_taken_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.main(["up", "--run", "demo", "--secret", SECRET])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "set ATOLL_SECRET, or give --secret-file FILE" in said
    assert SECRET not in said


def test_an_invite_from_the_environment_joins_and_a_flag_beats_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, started: list[DaemonOptions], capsys: Any
) -> None:
    monkeypatch.setenv("ATOLL_INVITE", INVITE)
    other = INVITE.replace("10.0.0.1", "10.0.0.2")
    (folder / "other").write_text(other)
    line = ("join", "--listen", "127.0.0.1:0")
    assert main.main(list(line)) == 0
    assert main.main([*line, "--invite-file", "other"]) == 0
    assert [options.contacts[0] for options in started] == ["10.0.0.1:29600", "10.0.0.2:29600"]
    monkeypatch.setenv("ATOLL_INVITE_FILE", "other")
    assert "two invites are given" in fails(capsys, *line)


def test_two_secrets_in_one_place_are_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, started: list[DaemonOptions], capsys: Any
) -> None:
    (folder / "file").write_text("11" * 32)
    line = ("up", "--run", "demo", "--listen", "127.0.0.1:0")
    monkeypatch.setenv("ATOLL_SECRET", SECRET)
    assert main.main([*line, "--secret-file", "file"]) == 0
    assert started[0].secret.hex() == "11" * 32  # the flag's
    monkeypatch.setenv("ATOLL_SECRET_FILE", "file")
    assert "two secrets are given" in fails(capsys, *line, "--home", "another")
