"""`atoll demo` as a user runs it: real daemons, real trainers, a real SIGKILL."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

DEMO = (sys.executable, "-m", "atoll.peer.cli", "demo")
FULL_S = 180  # a short demo takes 40 s on two idle cores, and gives up after 170
FEWER_MIN = 60  # times fewer bytes than all-reduce, of peers that stay
END_S = 20  # from a signal to the end of everything


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Empty again after the test, and in no process's arguments. Short, unlike pytest's own: the
    sockets of a home whose path is too long would lie elsewhere."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)
        left = [
            process.info["cmdline"]
            for process in psutil.process_iter(["cmdline"])
            if any(name in argument for argument in process.info["cmdline"] or ())
        ]
        assert left == []
        assert [path.name for path in Path(name).iterdir() if path.name.startswith("atoll-")] == []


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts a demo with ``--plain`` and more arguments; ends what a failed test leaves."""
    started: list[subprocess.Popen[str]] = []

    def demo(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*DEMO, "--plain", *arguments],
            env=os.environ | {"TMPDIR": str(folder)},  # so that what it leaves behind can be seen
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield demo
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=END_S)


def read_until(demo: subprocess.Popen[str], part: str) -> None:
    assert demo.stdout is not None
    for line in demo.stdout:
        if part in line:
            return
    pytest.fail(f"the demo ended without saying {part!r}: {demo.communicate()[1]}")


def test_short_demo_with_a_killed_first_peer_and_a_newcomer(start: Start) -> None:
    demo = start("--peers", "3", "--rounds", "8")
    output, errors = demo.communicate(timeout=FULL_S)
    assert demo.returncode == 0, output + errors
    assert "SIGKILL to the daemon of peer 1" in output
    assert "trainer of peer 1: ATOLL-E82" in output
    lines = {line[:19].strip(): line[19:].strip() for line in output.splitlines()}
    assert lines["untrained loss"].endswith("nats per byte")
    assert "nats per byte after round" in lines["final held-out loss"]
    assert "all-reduce at every step" in lines["bytes sent"]
    for peer in ("peer 2", "peer 3"):
        fewer = re.search(rf"{peer} .* MB, (\d+) times", output)
        assert fewer is not None
        assert int(fewer[1]) >= FEWER_MIN, output
    assert lines["... by purpose"].split() == ["rounds", "state", "probes", "control"]
    each = re.findall(
        r"^ +peer \d +([0-9.]+ k?M?B) +([0-9.]+ k?M?B) +0 B +([0-9.]+ kB)$", output, re.M
    )
    assert len(each) == 4, output
    assert lines["SIGKILL"].startswith("daemon of peer 1")
    assert lines["survivors"].startswith("noticed after")
    assert lines["newcomer"].startswith("peer 4 was started")
    assert lines["state digests"].startswith("equal on peers 2, 3, 4")
    assert "of the training time" in lines["time spent waiting"]
    assert lines["processes"].startswith("all 8 ended as expected")
    assert errors == ""


def test_own_text_one_peer_no_chaos(folder: Path, start: Start) -> None:
    data = folder / "text"
    data.mkdir()
    data.joinpath("a.txt").write_text("one fish, two fish, red fish, blue fish\n" * 1000)
    data.joinpath("b.bin").write_bytes(b"\xff\xfe\x00")
    demo = start("--peers", "1", "--rounds", "3", "--data", str(data))
    output, errors = demo.communicate(timeout=FULL_S)
    assert demo.returncode == 0, output + errors
    assert "one peer alone: nobody is killed" in output
    assert "skipped" in output
    assert "b.bin" in output
    assert "SIGKILL" not in output


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_interrupt_ends_everything(start: Start, number: int, code: int) -> None:
    demo = start()
    read_until(demo, "peer 3 joins")
    demo.send_signal(number)
    _, errors = demo.communicate(timeout=END_S)
    assert demo.returncode == code
    assert "interrupted" in errors
    assert "Traceback" not in errors


def test_a_death_that_is_not_part_of_the_script_fails_at_once(start: Start) -> None:
    demo = start("--no-chaos")
    read_until(demo, "peer 3 joins")
    daemon = next(
        child for child in psutil.Process(demo.pid).children() if "join" in child.cmdline()
    )
    daemon.kill()
    _, errors = demo.communicate(timeout=END_S)
    assert demo.returncode == 1
    assert "the daemon of peer 2 ended with exit code -9" in errors
    assert "--- trainer of peer 2" in errors  # the end of every log


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--peers", "0"), "--peers is 0"),
        (("--peers", "-2"), "--peers is -2"),
        (("--peers", "1000"), "--peers is 1000"),
        (("--rounds", "0"), "--rounds is 0"),
        (("--rounds", "1"), "--rounds is 1"),
        (("--data", "/nowhere"), "no folder /nowhere"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    start: Start, arguments: tuple[str, ...], part: str
) -> None:
    demo = start(*arguments)
    output, errors = demo.communicate(timeout=END_S)
    assert (demo.returncode, output) == (2, "")
    assert "ATOLL-E1" in errors
    assert part in errors
    assert "fix:" in errors


def test_empty_folder_is_refused(folder: Path, start: Start) -> None:
    empty = folder / "nothing"
    empty.mkdir()
    demo = start("--data", str(empty))
    output, errors = demo.communicate(timeout=END_S)
    assert (demo.returncode, output) == (2, "")
    assert "ATOLL-E13" in errors
