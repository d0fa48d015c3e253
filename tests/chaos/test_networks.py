"""The network that faults are made with does what it says: tests/harness/netns.py, bad_path.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from harness.netns import NAMESPACES, Net
from harness.processes import Process, until

PORT = 5000
# Answers each line with the number of bytes in it.
ECHO = f"""
import socket, threading
def serve(sock):
    for line in sock.makefile("rb"):
        sock.sendall(b"%d\\n" % len(line))
listener = socket.create_server(("0.0.0.0", {PORT}))
print("listening", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
# Sends lines of argv[2:] bytes over one connection; a line of JSON for each answer.
CALLER = f"""
import json, socket, sys, time
sock = socket.create_connection((sys.argv[1], {PORT}), timeout=2)
for count in map(int, sys.argv[2:]):
    began_s = time.monotonic()
    sock.sendall(b"x" * (count - 1) + b"\\n")
    answer = b""
    while not answer.endswith(b"\\n"):
        answer += sock.recv(100)
    print(json.dumps([int(answer), time.monotonic() - began_s]), flush=True)
    if len(sys.argv) > 3:
        sys.stdin.readline()
"""


def serve(net: Net, host: str, folder: Path) -> Process:
    server = Process(net.command(host, [sys.executable, "-c", ECHO]), folder / f"{host}.log")
    until(lambda: "listening" in server.text, "it listens", server)
    return server


def call(net: Net, source: str, target: str, count: int = 10) -> float | None:
    """Seconds until the answer; None if there was none in two."""
    command = [sys.executable, "-c", CALLER, net.address(target), str(count)]
    done = subprocess.run(net.command(source, command), capture_output=True, text=True)
    if "TimeoutError" in done.stderr:
        return None
    got, took_s = json.loads(done.stdout)
    assert got == count, done.stderr
    return float(took_s)


def test_cuts_drop_silently_and_heal(tmp_path: Path) -> None:
    with Net("abc") as net:
        server = serve(net, "b", tmp_path)
        try:
            for break_it in (
                lambda: net.cut("a", "b"),
                lambda: net.cut("b", "a"),
                lambda: net.split("a", "bc"),
                lambda: net.silence("b"),
            ):
                cut = break_it()
                assert call(net, "a", "b") is None
                cut.undo()
                assert call(net, "a", "b") is not None
            net.split("ac", "b")
            net.heal()
            net.cut("a", "c")  # not between these two
            assert call(net, "a", "b") is not None
        finally:
            server.kill()
            server.ends()


def test_half_open_connections_stay_open_and_carry_nothing(tmp_path: Path) -> None:
    with Net("ab") as net:
        server = serve(net, "b", tmp_path)
        caller = subprocess.Popen(
            net.command("a", [sys.executable, "-c", CALLER, net.address("b"), "5", "5"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert caller.stdout is not None
            assert json.loads(caller.stdout.readline())[0] == 5
            net.half_open("a", "b")
            assert call(net, "a", "b") is not None  # a new one
            said, complaint = caller.communicate("go on\n")
            assert "TimeoutError" in complaint
            assert not said
        finally:
            server.kill()
            server.ends()


def test_a_link_is_as_slow_as_it_is_asked_to_be(tmp_path: Path) -> None:
    """Lower bounds only: a machine may always be slower."""
    with Net("ab", delay_s=0.02, rate_bps={"a": 80e6}) as net:
        server = serve(net, "b", tmp_path)
        try:
            assert (call(net, "a", "b") or 0.0) >= 4 * 0.02
            # 10 MB in a second, less what the bucket holds at first.
            assert (call(net, "a", "b", 2_000_000) or 0.0) >= 0.17
            assert net.moved_bytes("a")[0] > 2_000_000
        finally:
            server.kill()
            server.ends()


def test_nothing_stays_behind() -> None:
    mine = f"atoll-{os.getpid()}-"
    with Net("ab", delay_s=0.01):
        assert any(path.name.startswith(mine) for path in NAMESPACES.iterdir())
    assert not any(path.name.startswith(mine) for path in NAMESPACES.iterdir())
