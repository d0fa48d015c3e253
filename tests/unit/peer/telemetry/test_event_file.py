"""The file of events: bounded, whole after any end, read also where it was cut off."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.peer.telemetry import event_file
from atoll.peer.telemetry.event_file import EVENTS_FILE, EventFile, files_of, follow, read


def of(number: int, text: str = "") -> dict[str, object]:
    return {"unix_s": 1000.0 + number, "kind": "view", "text": text or f"view {number}"}


def numbers(path: Path, since_unix_s: float = 0.0) -> list[int]:
    return [int(event["unix_s"]) - 1000 for event in read(path, since_unix_s)]


def opened(folder: Path, said: list[str] | None = None) -> EventFile:
    return EventFile(folder / EVENTS_FILE, (said if said is not None else []).append)


def test_events_are_there_at_once_and_after_a_restart(tmp_path: Path) -> None:
    file = opened(tmp_path)
    for number in range(3):
        file.append(of(number))
    assert numbers(tmp_path) == [0, 1, 2]
    file.close()
    again = opened(tmp_path)
    again.append(of(3))
    again.close()
    assert numbers(tmp_path) == numbers(tmp_path / EVENTS_FILE) == [0, 1, 2, 3]
    assert numbers(tmp_path, since_unix_s=1002.0) == [2, 3]
    assert (tmp_path / EVENTS_FILE).stat().st_mode & 0o777 == 0o600


def test_files_are_bounded_and_the_oldest_events_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_file, "FILE_BYTES_MAX", 2000)
    file = opened(tmp_path)
    for number in range(1000):
        file.append(of(number))
    file.close()
    assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 2000 * event_file.FILES_KEPT
    kept = numbers(tmp_path)
    assert kept == [*range(kept[0], 1000)]
    assert 100 < len(kept) < 300


@pytest.mark.parametrize("cut", range(2, 40, 7))
def test_a_line_that_was_cut_off_costs_itself_only(tmp_path: Path, cut: int) -> None:
    file = opened(tmp_path)
    file.append(of(0))
    file.append(of(1))
    file.close()
    os.truncate(file.path, file.path.stat().st_size - cut)
    again = opened(tmp_path)
    again.append(of(2))
    again.close()
    assert numbers(tmp_path) == [0, 2]


def test_what_is_no_event_is_skipped(tmp_path: Path) -> None:
    lines = [b"", b"{", b"[1]", b"3", b'{"kind": 3, "unix_s": 1}', b'{"kind": "a"}', b"\xff\xfe"]
    lines += [b'{"kind": "a", "unix_s": "x"}', json.dumps(of(5)).encode(), b"x" * (1 << 17)]
    lines += [b"[" * 60_000, b'{"kind": "a", "unix_s": 1, "text": ' + b"[" * 60_000]
    lines += [b'{"kind": "row", "unix_s": %b}' % time for time in (b"1e18", b"-1", b"NaN")]
    (tmp_path / EVENTS_FILE).write_bytes(b"\n".join(lines))
    assert numbers(tmp_path) == [5]


def test_a_disk_that_is_nearly_full_is_left_to_others_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"blocks": 10}
    clock = {"now_s": 100.0}
    monkeypatch.setattr(event_file.time, "monotonic", lambda: clock["now_s"])
    monkeypatch.setattr(
        event_file.os,
        "statvfs",
        lambda path: SimpleNamespace(f_bavail=free["blocks"], f_frsize=4096),
    )
    said: list[str] = []
    file = opened(tmp_path, said)
    for number in range(5):
        file.append(of(number))
    assert len(said) == 1
    assert "MB free; events are written from 67 MB" in said[0]
    assert numbers(tmp_path) == []
    free["blocks"] = 1 << 30
    file.append(of(6))
    assert numbers(tmp_path) == []
    clock["now_s"] += event_file.LOOK_EVERY_S
    file.append(of(7))
    file.append(of(8))
    file.close()
    assert numbers(tmp_path) == [7, 8]


def test_a_write_that_fails_is_tried_again_after_a_time_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = {"now_s": 100.0}
    monkeypatch.setattr(event_file.time, "monotonic", lambda: clock["now_s"])
    said: list[str] = []
    file = opened(tmp_path, said)

    def refuse(descriptor: int, line: bytes) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(event_file.os, "write", refuse)
        for number in range(5):
            file.append(of(number))
            clock["now_s"] += event_file.LOOK_EVERY_S
    assert said == [f"cannot write events to {file.path}: Disk quota exceeded"]
    file.append(of(7))
    file.close()
    assert numbers(tmp_path) == [7]


def test_where_nothing_can_be_written_nothing_is_raised(tmp_path: Path) -> None:
    said: list[str] = []
    file = EventFile(tmp_path / "missing" / EVENTS_FILE, said.append)
    file.append(of(0))
    file.append(of(1))
    file.close()
    assert len(said) == 1


def test_who_follows_sees_what_is_written_also_in_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_file, "FILE_BYTES_MAX", 300)
    file = opened(tmp_path)
    file.append(of(0))
    seen = follow(tmp_path, pause_s=0.0)
    assert next(seen) is None  # what was there before is not told
    told: list[int] = []
    for number in range(1, 20):
        file.append(of(number))
        while not told or told[-1] != number:
            event = next(seen)
            if event is not None:
                told.append(int(event["unix_s"]) - 1000)
    assert told == [*range(1, 20)]
    file.close()
