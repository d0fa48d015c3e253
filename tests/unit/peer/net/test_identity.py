"""The home folder: one holder, private files, an incarnation that never repeats."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from harness.failing_disk import small_disk

from atoll.collectives.errors import ConfigError, HomeInUseError
from atoll.peer.membership.view import Member
from atoll.peer.net.certs import run_tls
from atoll.peer.net.identity import (
    HOME_VERSION,
    KNOWN_ADDRESSES_MAX,
    SOCKET_PATH_BYTES_MAX,
    Home,
    RunRecord,
    default_home,
    socket_path,
    write_atomic,
)

SECRET = bytes(range(32))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_identity_is_made_once_and_kept(tmp_path: Path) -> None:
    with Home.open(tmp_path / "deep" / "home") as home:
        first, signature = home.peer_id, home.sign(b"text")
        assert mode(home.path) == 0o700
        assert mode(home.path / "identity.key") == 0o600
    Ed25519PublicKey.from_public_bytes(first).verify(signature, b"text")
    with Home.open(tmp_path / "deep" / "home") as home:
        assert home.peer_id == first


def test_a_second_holder_is_refused_by_pid(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home")
    with pytest.raises(HomeInUseError, match=f"process {os.getpid()}"):
        Home.open(home.path)
    home.close()
    Home.open(tmp_path / "home").close()


def test_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    code = "import sys; from atoll.peer.net.identity import Home; Home.open(sys.argv[1]); print(1)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "h")], check=True)
    assert done.returncode == 0
    Home.open(tmp_path / "h").close()


@pytest.mark.parametrize("name", ["identity.key", "run.json"])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, name: str) -> None:
    with Home.open(tmp_path / "h") as home:
        home.save_run(RunRecord("r", SECRET))
    (tmp_path / "h" / name).chmod(0o640)
    with pytest.raises(ConfigError) as caught, Home.open(tmp_path / "h") as home:
        home.load_run()
    assert caught.value.fix == f"chmod 600 {tmp_path / 'h' / name}"


def test_a_home_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "h").mkdir(mode=0o755)
    (tmp_path / "h").chmod(0o755)
    with pytest.raises(ConfigError) as caught:
        Home.open(tmp_path / "h")
    assert caught.value.fix == f"chmod 700 {tmp_path / 'h'}"


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33])
def test_a_damaged_key_is_never_replaced(tmp_path: Path, content: bytes) -> None:
    Home.open(tmp_path / "h").close()
    (tmp_path / "h" / "identity.key").write_bytes(content)
    with pytest.raises(ConfigError, match="not an Ed25519 key"):
        Home.open(tmp_path / "h")
    assert (tmp_path / "h" / "identity.key").read_bytes() == content


def test_a_file_is_not_a_home(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError):
        Home.open(tmp_path / "file")
    with pytest.raises(ConfigError):
        Home.open(tmp_path / "file" / "below")


def test_incarnations_increase_whatever_the_clock_does(tmp_path: Path) -> None:
    with Home.open(tmp_path / "h") as home:
        assert home.next_incarnation(1000) == 1000
        assert home.next_incarnation(5) == 1001
    with Home.open(tmp_path / "h") as home:
        assert home.next_incarnation(5) == 1002
        assert home.next_incarnation(2000) == 2000
        (home.path / "incarnation").write_text("twelve")
        with pytest.raises(ConfigError, match="does not hold a number"):
            home.next_incarnation(1)


@pytest.mark.parametrize("text", ["9" * 25, str((1 << 63) - 1), "-1"])
def test_an_incarnation_that_no_view_can_name_is_refused(tmp_path: Path, text: str) -> None:
    with Home.open(tmp_path / "h") as home:
        (home.path / "incarnation").write_text(text)
        with pytest.raises(ConfigError, match="no clock gives") as caught:
            home.next_incarnation(1)
        assert "rm " in caught.value.fix
        (home.path / "incarnation").write_text(str((1 << 63) - 2))
        assert Member(home.peer_id, home.next_incarnation(1)).inc == (1 << 63) - 1


def test_a_full_disk_stops_no_start(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64 << 10) as disk, Home.open(disk / "home") as home:
        first = home.next_incarnation(10**18)
        with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(1024)):
                pass
        with pytest.raises(OSError, match="No space left"):
            (disk / "more").write_bytes(b"1")
        assert first < home.next_incarnation(10**18) < home.next_incarnation(10**18)
        assert run_tls(home, bytes(32)).tag


def test_the_run_record_round_trips_and_hides_its_secret(tmp_path: Path) -> None:
    record = RunRecord("demo", SECRET, ("a:1", "[::1]:2"))
    with Home.open(tmp_path / "h") as home:
        assert home.load_run() is None
        home.save_run(record)
        assert home.load_run() == record
        assert mode(home.path / "run.json") == 0o600
        many = tuple(f"h:{i}" for i in range(1, 100))
        home.save_run(RunRecord("demo", SECRET, many))
        assert home.load_run() == RunRecord("demo", SECRET, many[:KNOWN_ADDRESSES_MAX])
    assert SECRET.hex() not in repr(record)
    assert repr(SECRET) not in repr(record)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "[" * 50_000,
        '{"run": "r", "secret": "00", "known": []}',
        '{"run": "r", "secret": "SECRETzz", "known": []}',
        '{"run": "a b", "secret": "' + SECRET.hex() + '", "known": []}',
        '{"run": "r", "secret": "' + SECRET.hex() + '", "known": [1]}',
        '{"run": "r", "secret": "' + SECRET.hex() + '"}',
    ],
)
def test_a_damaged_run_record_is_a_config_error_without_the_secret(
    tmp_path: Path, text: str
) -> None:
    with Home.open(tmp_path / "h") as home:
        write_atomic(home.path / "run.json", text.encode())
        with pytest.raises(ConfigError) as caught:
            home.load_run()
    assert "SECRET" not in str(caught.value)
    assert SECRET.hex() not in str(caught.value)


def test_a_run_record_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    with Home.open(tmp_path) as home:
        home.save_run(RunRecord("demo", SECRET))
        path = tmp_path / "run.json"
        newer = path.read_text().replace(f'"version": {HOME_VERSION}', '"version": 99')
        path.write_text(newer)
        with pytest.raises(ConfigError, match=r"home has version 99, .* reads 2") as caught:
            home.load_run()
        assert "newer" in caught.value.fix
        assert path.read_text() == newer


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomic(tmp_path / "f", b"old")

    def disk_full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short stand-in for /tmp; pytest's own folders have long names."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr("atoll.peer.net.identity.SOCKETS_BASE", Path(folder))
        yield Path(folder)


def test_a_home_has_one_socket_however_it_is_named(tmp_path: Path, base: Path) -> None:
    for name in ("near", "f" * 100):
        home, alias = tmp_path / name, base / f"alias-{len(name)}"
        home.mkdir()
        alias.symlink_to(home)
        spelled = home / ".." / name
        assert len({socket_path(one, "s") for one in (home, alias, spelled)}) == 1


def test_socket_paths_fit_and_are_private(tmp_path: Path, base: Path) -> None:
    near, far = base / "h", tmp_path / ("x" * 120)
    assert socket_path(near, "s") == near / "run" / "s"
    path = socket_path(far, "s")
    assert len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX
    assert not path.parent.exists()  # a client makes nothing
    with Home.open(far) as home:
        assert home.socket_path("s") == path
    assert mode(path.parent) == 0o700
    assert socket_path(far, "s") == path
    assert socket_path(tmp_path / ("y" * 120), "s") != path
    path.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="can be entered by other users"):
        socket_path(far, "s")


def test_a_planted_link_is_refused(tmp_path: Path, base: Path) -> None:
    far = tmp_path / ("x" * 120)
    folder = socket_path(far, "s").parent
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a folder of this user"):
        socket_path(far, "s")


def test_the_default_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_home() == tmp_path / ".local" / "state" / "atoll"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert default_home() == tmp_path / ".local" / "state" / "atoll"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_home() == tmp_path / "state" / "atoll"
    monkeypatch.setenv("ATOLL_HOME", "~/mine")
    assert default_home() == tmp_path / "mine"
    assert default_home("~/given") == tmp_path / "given"
