"""--proxy: where it may stand, and that its password stands nowhere else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from atoll.peer.cli import main, proxy
from atoll.peer.cli.proxy import hide_password
from atoll.peer.cli.settings import FILE
from atoll.peer.daemon.options import DaemonOptions
from atoll.peer.net.invite import Invite
from atoll.peer.net.own_address import NOWHERE, own_address
from atoll.peer.net.proxy import Proxy

PLAIN, FULL = "socks5://vpn:1055", "socks5://ada:hidden@vpn:1055"
ADA = Proxy("vpn", 1055, "ada", "hidden")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("ATOLL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    return tmp_path


def test_a_flag_and_a_variable_and_the_file_set_it(
    started: list[DaemonOptions], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = ["up", "--run", "demo", "--listen", "127.0.0.1:0"]
    assert main.main(up) == 0
    assert main.main([*up, "--proxy", PLAIN]) == 0
    monkeypatch.setenv("ATOLL_PROXY", FULL)
    assert main.main(up) == 0
    monkeypatch.delenv("ATOLL_PROXY")
    (folder / FILE).write_text(f'proxy = "{FULL}"\n')
    (folder / FILE).chmod(0o600)
    assert main.main(up) == 0
    assert [one.proxy for one in started] == [None, Proxy("vpn", 1055), ADA, ADA]
    assert "hidden" not in repr(started)


def test_a_peer_joins_by_a_name_that_this_machine_cannot_resolve(
    started: list[DaemonOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    invite = Invite("founder.invalid", 29600, "demo", b"f" * 8, bytes(range(32)))
    assert main.main(["join", str(invite), "--proxy", PLAIN]) == 0
    assert (started[0].contacts[0], started[0].advertises) == ("founder.invalid:29600", False)
    assert started[0].advertise == (own_address(*NOWHERE, "vpn") or "127.0.0.1")


def test_a_router_is_asked_where_the_library_is_unless_one_says_no(
    started: list[DaemonOptions],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    up = ["up", "--run", "demo", "--listen", "127.0.0.1:0"]
    for installed in (True, False):
        monkeypatch.setattr(proxy, "is_installed", lambda there=installed: there)
        assert main.main(up) == 0
        assert main.main([*up, "--upnp", "off"]) == 0
    assert main.main([*up, "--upnp", "on"]) == 2
    assert "atoll[upnp]" in capsys.readouterr().err
    assert [one.upnp for one in started] == [True, False, False, False]


def test_a_file_with_a_password_that_others_can_read_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / FILE).write_text(f'proxy = "{FULL}"\n')
    (folder / FILE).chmod(0o644)
    assert main.main(["up", "--run", "demo"]) == 2
    assert "hidden" not in capsys.readouterr().err


def test_config_does_not_show_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATOLL_PROXY", FULL)
    assert main.main(["config"]) == 0
    assert "hidden" not in capsys.readouterr().out
    assert main.main(["config", "--json", "up"]) == 0
    shown = json.loads(capsys.readouterr().out)["options"]["proxy"]
    assert shown == {
        "value": None,
        "origin": "environment",
        "where": "ATOLL_PROXY",
        "secret": True,
    }
    monkeypatch.setenv("ATOLL_PROXY", PLAIN)
    assert main.main(["config", "--json", "up"]) == 0
    assert json.loads(capsys.readouterr().out)["options"]["proxy"]["value"] == PLAIN


@pytest.mark.parametrize("wrong", ["http://ada:hidden@vpn:1", "socks5://ada:hidden"])
def test_what_is_no_proxy_is_a_mistake_and_not_quoted(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main.main(["doctor", "--proxy", wrong])
    assert "hidden" not in capsys.readouterr().err
    monkeypatch.setenv("ATOLL_PROXY", wrong)
    assert main.main(["up", "--run", "demo"]) == 2
    said = capsys.readouterr().err
    assert "ATOLL_PROXY" in said
    assert "hidden" not in said


@pytest.mark.parametrize(
    ("line", "left", "found"),
    [
        (f"atoll up --proxy {FULL} --run x", "atoll up --run x", FULL),
        (f"atoll up --proxy={FULL} --run x", "atoll up --run x", FULL),
        (f"atoll up --prox {FULL}", "atoll up", FULL),
        (f"atoll up --proxy {PLAIN}", f"atoll up --proxy {PLAIN}", ""),
        (f"atoll run -- t.py --proxy {FULL}", f"atoll run -- t.py --proxy {FULL}", ""),
        (f"atoll join --listen {FULL}", f"atoll join --listen {FULL}", ""),
    ],
)
def test_the_command_line_loses_the_password(line: str, left: str, found: str) -> None:
    assert hide_password(line.split()) == (left.split(), found)


@pytest.mark.parametrize(
    "advertised",
    [
        "gpu:port",
        "gpu:70000",
        "2001:db8::1",
        "gpu.test",
        "[::1]",
        "0.0.0.0",
        "0.0.0.0:29600",
        "[::]",
    ],
)
def test_a_wrong_address_to_advertise_is_said_before_anything_has_begun(
    advertised: str, started: list[DaemonOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    is_right = advertised in ("gpu.test", "[::1]")
    line = ["up", "--run", "demo", "--listen", "127.0.0.1:0", "--advertise", advertised]
    assert main.main(line) == (0 if is_right else 2)
    assert len(started) == is_right
    assert ("ATOLL-E10" in capsys.readouterr().err) != is_right
