"""`--log FILE`: the daemon's lines in files of a bounded size, without secrets."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from atoll.peer.cli import daemon, log_file
from atoll.peer.cli.log_file import LogFile


def test_a_full_file_is_renamed_and_the_oldest_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "LOG_BYTES_MAX", 1000)
    monkeypatch.setattr(log_file, "LOG_FILES", 3)
    log = LogFile(tmp_path / "log")
    for number in range(300):
        log.write(f"line {number:03d}")
    names = ["log", "log.1", "log.2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    text = "".join((tmp_path / name).read_text() for name in reversed(names))
    assert all((tmp_path / name).stat().st_size <= 1000 for name in names)
    numbers = [int(found) for found in re.findall(r"^\d{4}-\d\d-\d\d line (\d+)$", text, re.M)]
    assert numbers == list(range(numbers[0], 300))  # the last ones, each once
    assert len(numbers) > 2 * 1000 // 30


def test_it_goes_on_where_it_ended_and_is_private(tmp_path: Path) -> None:
    for line in ("one", "two"):
        LogFile(tmp_path / "log").write(line)
    assert re.fullmatch(r"(\S+ one\n)(\S+ two\n)", (tmp_path / "log").read_text())
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_an_invite_is_written_without_its_secret(tmp_path: Path) -> None:
    LogFile(tmp_path / "log").write("atoll join atoll://a:29600/demo#tokentoken and more")
    said = (tmp_path / "log").read_text()
    assert "atoll://a:29600/demo#... and more" in said
    assert "token" not in said


def test_a_disk_that_is_full_is_said_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = daemon._Log(str(tmp_path / "log"))
    log.begin("first")

    def full(self: LogFile, line: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LogFile, "write", full)
        log.say("second")
        log.say("third")
    log.say("fourth")
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "first",
        "second",
        "--log: No space left on device; each line is tried again",
        "third",
        "fourth",
    ]
    assert [line.split()[1] for line in (tmp_path / "log").read_text().splitlines()] == [
        "first",
        "fourth",
    ]
