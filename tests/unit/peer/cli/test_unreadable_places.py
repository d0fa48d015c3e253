"""Folders that the user may not look into: as `sudo -u atoll atoll status`, typed in /root."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.peer.checkpoint.reader import folder_name
from atoll.peer.cli import main
from atoll.peer.cli.settings import FILE
from atoll.peer.doctor.machine_probe import look_at_home
from atoll.peer.durable import CHECKPOINT_FOLDER

NOBODY = 65534


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Nobody may look into the folder, nor may root, who is somebody else meanwhile."""
    user = os.geteuid()
    folder.chmod(0)
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o700)


def test_a_command_runs_where_it_may_not_look_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    line = ["config", "--json", "up"]
    assert main.main(line) == 0  # what it imports, root may read
    (tmp_path / "home").mkdir()
    for path in (tmp_path / FILE, tmp_path / "home" / FILE):
        path.write_text('run = "hidden"\n')
    capsys.readouterr()
    with closed(tmp_path):
        assert main.main(line) == 0
        assert json.loads(capsys.readouterr().out)["options"]["run"]["value"] is None
        assert main.main([*line, "--config", FILE]) == 2  # this one was asked for
        assert f"{tmp_path / FILE} cannot be read: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["", "home"])
def test_the_doctor_says_which_home_it_may_not_look_into(tmp_path: Path, place: str) -> None:
    home = tmp_path / "home"
    (home / CHECKPOINT_FOLDER / folder_name("demo", 3, b"c" * 32)).mkdir(parents=True)
    with closed(tmp_path / place):
        found = look_at_home(home, "demo")
    assert found.problem == f"{home} cannot be read: permission denied"
    assert "--home" in found.fix
