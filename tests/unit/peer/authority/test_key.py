"""`atoll authority`: the folder, what it prints, and what `atoll up` and `join` make of that."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from harness.passes import peer_of

from atoll.collectives.errors import ConfigError, PassForgedError, PassMissingError, PassRunError
from atoll.peer.authority.grants import Credential, Grant, Revocations
from atoll.peer.authority.key import Authority, expiry, parse_id
from atoll.peer.cli import main
from atoll.peer.daemon.options import DaemonOptions
from atoll.peer.membership.view import ARCHIVE, WITNESS
from atoll.peer.net.identity import Home, RunRecord
from atoll.peer.net.invite import Invite

AT = "203.0.113.7:29600"


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main.main(["authority", "new", str(tmp_path / "key")]) == 0
    assert parse_id(capsys.readouterr().out.strip()) == Authority.open(tmp_path / "key").public_key
    return tmp_path / "key"


def start(home: Path, *arguments: str) -> int:
    return main.main([*arguments, "--home", str(home), "--listen", "127.0.0.1:0"])


def invites(
    capsys: pytest.CaptureFixture[str], folder: Path, what: str, *arguments: str, run: str = "demo"
) -> list[str]:
    """What `atoll authority` printed for somebody to copy."""
    capsys.readouterr()
    line = ["authority", what, str(folder), *arguments, "--run", run, "--at", AT]
    assert main.main(line) == 0
    return capsys.readouterr().out.splitlines()


def invite(capsys: pytest.CaptureFixture[str], folder: Path, *more: str, run: str = "demo") -> str:
    (line,) = invites(capsys, folder, "invite", *more, run=run)
    return line.split()[2]


# ---------------------------------------------------------------- the folder


def test_the_key_is_private_and_never_overwritten(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = folder / "authority.key"
    assert key.stat().st_mode & 0o777 == 0o600
    before = key.read_bytes()
    assert len(before) == 32
    assert main.main(["authority", "new", str(folder)]) == 2
    assert "holds an authority already" in capsys.readouterr().err
    assert key.read_bytes() == before
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="other users may read it"):
        Authority.open(folder)


def test_a_folder_without_a_key_says_how_to_make_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["authority", "revoke", str(tmp_path), peer_of("b").hex()]) == 2
    assert f"atoll authority new {tmp_path}" in capsys.readouterr().err


def test_each_run_has_a_secret_of_its_own_and_always_the_same(folder: Path) -> None:
    authority = Authority.open(folder)
    assert authority.secret_of("demo") == Authority.open(folder).secret_of("demo")
    assert authority.secret_of("demo") != authority.secret_of("other")
    assert authority.secret_of("demo") != (folder / "authority.key").read_bytes()


def test_lists_grow_and_their_number_rises(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate("bcb", 1):
        assert main.main(["authority", "revoke", str(folder), peer_of(name).hex()]) == 0
        data = (folder / "revocations").read_bytes()
        latest = Revocations.parse(data, Authority.open(folder).public_key)
        assert latest.number == number
    assert latest.ids == {peer_of("b"), peer_of("c")}
    shutil.copy(folder / "authority.key", folder / "revocations")
    assert main.main(["authority", "revoke", str(folder), peer_of("d").hex()]) == 2
    assert "copy the newest list back" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "7", "d", "0d", "-1d", "7w", "1.5h", "7d7d", "9999999d"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ConfigError):
        expiry(text, 0.0)


def test_times_until_something_expires() -> None:
    assert [expiry(text, 1000.9) for text in ("7d", "12h", "30m", "never")] == [
        1000 + 604_800,
        1000 + 43_200,
        1000 + 1800,
        0,
    ]


@pytest.mark.parametrize("text", ["", "xyz", "ab" * 31, "ab" * 33, "b5822151"])
def test_what_is_no_id(text: str) -> None:
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        parse_id(text)


# ---------------------------------------------------------------- what it prints


def test_an_invite_carries_a_token(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = invites(capsys, folder, "invite", "--uses", "3", "--expires", "1h")
    assert re.fullmatch(r"atoll join atoll://\S+", line)
    found = Invite.parse(line.split()[2])
    grant = Grant.parse(found.grant, Authority.open(folder).public_key)
    assert (found.run, found.address, grant.uses, grant.run) == ("demo", AT, 3, "demo")
    assert Invite.parse(str(found)) == found
    for secret in (found.secret, found.seed):
        assert repr(secret) not in repr(found)
    issued = (folder / "issued").read_text()
    assert grant.subject.hex() in issued
    assert found.seed.hex() not in issued


def test_roles_have_lines_of_their_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = invites(capsys, folder, "invite", "--role", ARCHIVE)
    assert line.startswith("atoll follow atoll://")
    (line,) = invites(capsys, folder, "invite", "--role", WITNESS)
    assert line.endswith(" --witness")


def test_each_id_gets_an_invite(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = invites(capsys, folder, "allow", peer_of("b").hex(), peer_of("c").hex())
    for line, name in zip(lines, "bc", strict=True):
        grant = Grant.parse(Invite.parse(line.split()[2]).grant, Authority.open(folder).public_key)
        assert (grant.subject, grant.uses, grant.not_after_s) == (peer_of(name), 0, 0)


def test_an_invite_s_damage_is_noticed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = invite(capsys, folder)
    start_of_token = text.index("#") + 1
    for at in range(start_of_token, len(text) - 1):
        damaged = text[:at] + ("a" if text[at] != "a" else "b") + text[at + 1 :]
        with pytest.raises(ConfigError):
            Invite.parse(damaged)


def test_id_makes_a_home_and_says_who_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["id", "--home", str(tmp_path / "b")]) == 0
    with Home.open(tmp_path / "b") as home:
        assert parse_id(capsys.readouterr().out.strip()) == home.peer_id


# ---------------------------------------------------------------- up and join


def test_joining_binds_the_token_to_this_home_and_the_home_remembers(
    folder: Path,
    tmp_path: Path,
    started: list[DaemonOptions],
    capsys: pytest.CaptureFixture[str],
) -> None:
    public = Authority.open(folder).public_key
    assert start(tmp_path / "b", "join", invite(capsys, folder)) == 0
    (options,) = started
    with Home.open(tmp_path / "b") as home:
        found = Credential.parse(options.credential, public, "demo")
        assert found.peer == home.peer_id
        assert (options.authority, options.fingerprint) == (public, None)
        home.save_run(options.record(("127.0.0.1:1", AT)))
        record = home.load_run()
    assert record == RunRecord(
        "demo", options.secret, ("127.0.0.1:1", AT), public, options.credential
    )
    assert start(tmp_path / "b", "up", "--run", "demo") == 0
    options = started[-1]
    assert options.returns
    assert (options.authority, options.credential) == (public, found.encode())


def test_a_founder_needs_a_pass(
    folder: Path,
    tmp_path: Path,
    started: list[DaemonOptions],
    capsys: pytest.CaptureFixture[str],
) -> None:
    authority = Authority.open(folder)
    up = ("up", "--run", "demo", "--authority", authority.public_key.hex())
    assert start(tmp_path / "a", *up) == PassMissingError.exit_code
    assert f"ATOLL-{PassMissingError.code}" in capsys.readouterr().err
    assert not started
    text = invite(capsys, folder)
    (tmp_path / "invite").write_text(f"atoll join {text}\n")
    assert start(tmp_path / "a", *up, "--pass", str(tmp_path / "invite")) == 0
    options = started[-1]
    assert options.founds
    assert options.secret == authority.secret_of("demo")
    assert start(tmp_path / "a", *up) == 0  # it is remembered
    assert started[-1].credential == options.credential
    listed = ("--expect", "2", "--peers", f"127.0.0.1:1,{AT}", "--advertise", "127.0.0.1:1")
    assert start(tmp_path / "c", *up, "--pass", text, *listed) == 0
    assert started[-1].founders == ("127.0.0.1:1", AT)


@pytest.mark.parametrize(
    ("key", "more", "error"),
    [
        ("another", (), PassForgedError),
        ("this", ("--secret-file", "F"), ConfigError),
        ("no id", (), ConfigError),
    ],
)
def test_contradictions(
    folder: Path,
    tmp_path: Path,
    started: list[DaemonOptions],
    capsys: pytest.CaptureFixture[str],
    key: str,
    more: tuple[str, ...],
    error: type[ConfigError | PassForgedError],
) -> None:
    public = Authority.open(folder).public_key
    keys = {"another": peer_of("another").hex(), "this": public.hex()}
    text = invite(capsys, folder)
    line = ("up", "--run", "demo", "--authority", keys.get(key, key), "--pass", text, *more)
    assert start(tmp_path / "a", *line) == error.exit_code
    assert f"ATOLL-{error.code} " in capsys.readouterr().err
    assert not started


def test_invites_for_something_else_are_refused_before_anything_starts(
    folder: Path,
    tmp_path: Path,
    started: list[DaemonOptions],
    capsys: pytest.CaptureFixture[str],
) -> None:
    public = Authority.open(folder).public_key
    up = ("up", "--run", "demo", "--authority", public.hex(), "--pass")
    assert start(tmp_path / "a", *up, invite(capsys, folder, run="other")) == PassRunError.exit_code
    assert f"ATOLL-{PassRunError.code} " in capsys.readouterr().err
    (line,) = invites(capsys, folder, "allow", peer_of("b").hex())
    assert start(tmp_path / "a", "join", line.split()[2]) == PassForgedError.exit_code
    assert f"ATOLL-{PassForgedError.code} " in capsys.readouterr().err
    plain = str(Invite("127.0.0.1", 1, "demo", bytes(8), bytes(32)))
    assert start(tmp_path / "a", *up, plain) == PassMissingError.exit_code
    assert not started


def test_a_home_of_a_run_without_an_authority_gets_none(
    folder: Path,
    tmp_path: Path,
    started: list[DaemonOptions],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert start(tmp_path / "a", "up", "--run", "demo") == 0
    assert started[-1].authority == b""
    public = Authority.open(folder).public_key
    line = ("up", "--run", "demo", "--authority", public.hex(), "--pass", invite(capsys, folder))
    assert start(tmp_path / "a", *line) == ConfigError.exit_code
    assert "the run of this home has no authority" in capsys.readouterr().err
