"""Trouble that a machine makes: full log disks, stray children, dead sockets, odd moments."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import pytest
import zmq
from harness.processes import TRAINER, Process, fleet, until

import atoll
from atoll.collectives.errors import NoQuorumError
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import RunSpec
from atoll.peer.daemon.ipc_server import CLIENT_ID_BYTES, COMMANDS, LIFELINE
from atoll.peer.net.identity import socket_path


def test_a_log_that_cannot_be_written_does_not_end_the_daemon(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.up("a")
        read_end, write_end = os.pipe()
        command = [sys.executable, "-m", "atoll.peer.cli", "join", run.invite]
        command += ["--home", str(tmp_path / "b"), "--listen", "127.0.0.1:0"]
        joiner = subprocess.Popen(command, stdout=write_end, stderr=subprocess.DEVNULL)
        os.close(write_end)
        try:
            run.sees("a", 2)
            os.close(read_end)  # as when `| tee` is killed
            run.join("c")
            run.sees("a", 3)  # b had to log the new view
            assert joiner.poll() is None
            joiner.send_signal(signal.SIGINT)
            assert joiner.wait(10) == 0
        finally:
            joiner.kill()
            joiner.wait()


def test_a_full_disk_under_the_log_does_not_keep_a_daemon_from_starting(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.up("a")
        command = [sys.executable, "-m", "atoll.peer.cli", "join", run.invite]
        command += ["--home", str(tmp_path / "b"), "--listen", "127.0.0.1:0"]
        with open("/dev/full", "w") as full:
            joiner = subprocess.Popen(command, stdout=full, stderr=subprocess.DEVNULL)
        try:
            run.sees("a", 2)
        finally:
            joiner.kill()
            joiner.wait()


def test_a_trainer_with_workers_is_seen_to_die(tmp_path: Path) -> None:
    """Forked children (a DataLoader's) inherit descriptors and outlive their parent for a while."""
    with fleet(tmp_path) as run:
        peer = run.up("a")
        arguments = [sys.executable, str(TRAINER), str(peer.home), "1000", "0", "0.02", "fork"]
        trainer = Process(arguments, tmp_path / "forking.log")
        try:
            peer.reaches(3)
            trainer.kill()
            trainer.ends()
            until(lambda: peer.status()["trainer"] is None, "the death is noticed", timeout_s=5)
        finally:
            for line in trainer.lines:
                if "child" in line:
                    os.kill(line["child"], signal.SIGKILL)


def test_attaching_without_a_quorum_ends_in_an_error_that_says_so(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        # Both at once: one at a time, two survivors of three go on, then one. Who has stopped votes
        # for nothing any more.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for name in "ab":
                run.peers[name].kill(number)
        for name in "ab":
            run.peers[name].ends()
        session = atoll.connect(run.peers["c"].home)
        spec = RunSpec(sync_every=1, round_deadline_s=3.0)
        manifest = Manifest.of([Parameter("w", (1000,))])
        with pytest.raises(NoQuorumError, match="no commit for 3 s"):
            session.channel.attach(spec, manifest, lambda flat: flat.fill(1.0))
        session.close()


STUCK = """
import sys, threading, time
from atoll.peer.cli import daemon, main
daemon.END_TIMEOUT_S = 1.0
threading.Thread(target=time.sleep, args=(60,), name="held-by-a-disk").start()
sys.exit(main.main(sys.argv[1:]))
"""


def test_a_daemon_whose_thread_hangs_ends_all_the_same_and_shows_where(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STUCK, "up", "--run", "demo", "--listen", "127.0.0.1:0"]
    command += ["--home", str(tmp_path / "a")]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert daemon.stdout is not None
        for line in daemon.stdout:
            if "atoll leave" in line:
                break
        daemon.send_signal(signal.SIGTERM)
        said, complaint = daemon.communicate(timeout=15)
    finally:
        daemon.kill()
        daemon.wait()
    assert "left the run" in said
    assert "Timeout" in complaint
    assert "Thread 0x" in complaint


def test_commands_of_a_killed_daemon_answer_at_once(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        peer = run.up("a")
        peer.kill()
        peer.ends()
        started_s = time.monotonic()
        command = [sys.executable, "-m", "atoll.peer.cli", "status", "--home", str(peer.home)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 14
        assert time.monotonic() - started_s < 8  # not the ten seconds of an answer that never comes


def test_broken_local_clients_do_not_end_the_daemon(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        peer = run.up("a")
        run.train("a")
        peer.reaches(2)
        broken = [
            b"\xff\xff",
            msgpack.packb(7),
            msgpack.packb([1, "status"]),
            msgpack.packb([1, ["x"], {}]),
            msgpack.packb([1, "hello", {"pid": float("inf")}]),
            msgpack.packb([1, "report", {"metrics": 1}]),
            msgpack.packb([1, "valid", {"generation": 0}]),
            msgpack.packb([1, "attach", {"blob": b"x"}]),
            msgpack.packb([1, "region", {}]),
        ]
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            identity = b"\1" * CLIENT_ID_BYTES
            dealer.setsockopt(zmq.IDENTITY, identity)
            dealer.connect(f"ipc://{socket_path(peer.home, COMMANDS)}")
            with socket.socket(socket.AF_UNIX) as lifeline:
                lifeline.connect(os.fspath(socket_path(peer.home, LIFELINE)))
                lifeline.sendall(identity)
                assert lifeline.recv(1) == b"!"
                for message in broken:
                    dealer.send(message)
                    assert dealer.poll(10_000), message
                    assert b"error" in dealer.recv()
        assert peer.status()["phase"] == "coordinator"
        assert peer.popen.poll() is None


def test_ctrl_c_while_the_others_are_silent_does_not_forget_the_run(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        lineage = run.peers["b"].status()["lineage"]
        run.peers["a"].kill()
        run.peers["a"].ends()
        for name in "bc":
            run.peers[name].kill(signal.SIGSTOP)
        silent = run.start("a", "up", "--run", "demo")
        until(lambda: "back in run demo" in silent.text, "it begins", silent)
        time.sleep(0.3)  # somewhere in its first contact
        silent.kill(signal.SIGINT)
        assert silent.ends(10) in (0, 2)
        for name in "bc":
            run.peers[name].kill(signal.SIGCONT)
        run.start("a", "up", "--run", "demo")
        assert run.sees("a", 3)["lineage"] == lineage
