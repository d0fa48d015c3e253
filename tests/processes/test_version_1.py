"""Atoll with protocol 1: its checkpoints and homes are read for ever, its peers are refused."""

from __future__ import annotations

import hashlib
import shutil
import socket
import ssl
import struct
import sys
import threading
from pathlib import Path

import msgpack
import pytest
from harness.processes import WAIT_S, Process, fleet, until

import atoll
from atoll.collectives.errors import AdmissionError, VersionError
from atoll.peer.checkpoint.reader import load_checkpoint
from atoll.peer.cli import main
from atoll.peer.net.certs import run_tls
from atoll.peer.net.identity import Home
from atoll.peer.net.invite import Invite, fingerprint_of

GOLDEN = Path(__file__).parents[1] / "golden"
TRAINER = Path(__file__).parents[1] / "harness" / "streaming_trainer.py"
DILOCO, STREAMING = GOLDEN / "checkpoint_v1", GOLDEN / "checkpoint_v1_streaming"
ROUND = 8
SECRET = bytes.fromhex("63d5b8e78a2bec9beaf18e155c40c534959627b0ddfcd61b0ff95604b6c5599d")
# SHA-256 of what `atoll checkpoint export` made of them on the day on which they were written.
EXPORTED = {
    DILOCO: "986c610c48ab7951f01d62b332b902a3142e8c0c1f1ab3b81d673a626716bce0",
    STREAMING: "e3fd730eabb5d2d5988e598f7d518fd465120d371bc3324b1cacd763aeb34d35",
}
# What their manifests say: digests of states whose chunks have SHA-256 digests ...
DIGESTS = {
    DILOCO: "a524d2b9bbf70aef6ced0a6e6932998465fc062c7bea07e933962dba88244020",
    STREAMING: "84c078eb2c96daf5b554a5c59b1f963990922390b04feacebd44d9ebf7f2a72f",
}
# ... and of the same states with chunks that have BLAKE3 digests, as a run of today names them.
DIGESTS_NOW = {
    DILOCO: "7f825df5612b4763a9272da41cd9801a8ac616fb0963a9904e982d29b2fd0e69",
    STREAMING: "9b9fade46b38f8bcc0b633fd78a0dbce667108a5a798a18a205da352dff9b5cf",
}


def home_of_version_1(folder: Path) -> Path:
    """A copy of the home that wrote ``DILOCO``, private as it was: git keeps no such modes."""
    shutil.copytree(GOLDEN / "home_v1", folder)
    folder.chmod(0o700)
    for path in folder.iterdir():
        path.chmod(0o600)
    return folder


@pytest.mark.parametrize("golden", [DILOCO, STREAMING], ids=lambda path: path.name)
def test_a_checkpoint_of_version_1_loads(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_checkpoint(golden, run="demo", secret=SECRET if golden is DILOCO else None)
    assert (loaded.round, loaded.state.digest.hex()) == (ROUND, DIGESTS_NOW[golden])
    loaded.state.close()
    for action in ("inspect", "verify"):
        assert main.main(["checkpoint", action, str(golden)]) == 0
    printed = capsys.readouterr().out
    assert DIGESTS[golden] in printed
    assert f"OK {golden.name}: run demo, round {ROUND}" in printed
    out = tmp_path / "exported.safetensors"
    assert main.main(["checkpoint", "export", str(golden), "--out", str(out)]) == 0
    assert hashlib.sha256(out.read_bytes()).hexdigest() == EXPORTED[golden]


def test_a_home_of_version_1_loads(tmp_path: Path) -> None:
    with Home.open(home_of_version_1(tmp_path / "home")) as home:
        record = home.load_run()
        assert record is not None
        assert (record.run, record.secret, len(record.known)) == ("demo", SECRET, 2)
        assert home.next_incarnation(0) == 1795572048804723734 + 1


def test_training_goes_on_from_a_checkpoint_and_a_home_of_version_1(tmp_path: Path) -> None:
    """The home's secret is that of the checkpoint, so the checkpoint's tag is checked too."""
    home_of_version_1(tmp_path / "a")
    with fleet(tmp_path) as run:
        run.up("a", "--resume", str(DILOCO))
        status = run.peers["a"].reaches(ROUND)
        assert (status["peer"], status["round"]) == ("c05abc48", ROUND)
        assert status["digest"] == DIGESTS_NOW[DILOCO]
        run.train("a", elements=600)
        run.peers["a"].reaches(ROUND + 3)


def test_streaming_training_goes_on_from_a_checkpoint_of_version_1(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        peer = run.up("a", "--resume", str(STREAMING))
        assert peer.reaches(ROUND)["round"] == ROUND
        command = [sys.executable, str(TRAINER), str(peer.home), str(ROUND + 3)]
        run.trainers["a"] = Process(command, tmp_path / "trainer.log")
        peer.reaches(ROUND + 3)
        assert run.trainers["a"].ends() == 0


# ---------------------------------------------------------------- peers of protocol 1


def old_frame(name: str, **fields: object) -> bytes:
    """One message as protocol 1 wrote it."""
    payload = msgpack.packb([name, fields])
    return struct.pack(">I", len(payload)) + payload


def read_message(stream: ssl.SSLSocket) -> list[object]:
    """The next message, whatever it is."""
    with stream.makefile("rb") as file:
        (length,) = struct.unpack(">I", file.read(4))
        message = msgpack.unpackb(file.read(length))
    assert isinstance(message, list)
    return message


def test_a_peer_of_protocol_1_that_dials_is_told_both_versions(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        peer = run.up("a")
        invite = Invite.parse(peer.invite)
        hello = {"protocol_min": 1, "protocol_max": 1, "run": "demo", "kind": "control", "inc": 1}
        with Home.open(tmp_path / "old") as home:
            context = run_tls(home, invite.secret).client
            with (
                socket.create_connection((invite.host, invite.port), timeout=WAIT_S) as plain,
                context.wrap_socket(plain) as stream,
            ):
                stream.sendall(old_frame("Hello", **hello, address="127.0.0.1:9", ciphers=[]))
                name, refused = read_message(stream)
        assert name == "Refused"
        assert isinstance(refused, dict)
        assert refused["code"] == VersionError.code
        says = (
            f"that peer runs atoll {atoll.__version__} (protocol 3), you run an atoll that does"
            " not say its version (protocol 1)"
        )
        assert str(refused["what"]).startswith(says)
        until(lambda: says in peer.text, "its own log names both", peer)


def test_a_peer_of_protocol_1_that_is_dialled_is_named_by_its_version(tmp_path: Path) -> None:
    def serve() -> None:
        plain, _ = listener.accept()
        with plain, context.wrap_socket(plain, server_side=True) as stream:
            heard.append(read_message(stream))
            what = (
                "no common protocol version: this side speaks version 1, the other side version 2"
            )
            stream.sendall(old_frame("Refused", code=VersionError.code, what=what))

    heard: list[list[object]] = []
    with Home.open(tmp_path / "old") as home, socket.create_server(("127.0.0.1", 0)) as listener:
        context = run_tls(home, SECRET).server
        port = listener.getsockname()[1]
        invite = Invite("127.0.0.1", port, "demo", fingerprint_of(home.peer_id), SECRET)
        server = threading.Thread(target=serve)
        server.start()
        with fleet(tmp_path) as run:
            joiner = run.join("a", str(invite))
            assert joiner.ends() == VersionError.exit_code
            server.join(WAIT_S)
        assert heard[0][0] == "Hello"
        assert (
            f"127.0.0.1:{port} runs an atoll that does not say its version (protocol 1), you run"
            f" atoll {atoll.__version__} (protocol 3)"
        ) in joiner.text
        assert f"install atoll {atoll.__version__} on that machine too" in joiner.text


def test_who_asks_for_another_run_is_told_which_one_that_is(tmp_path: Path) -> None:
    """Two runs with one secret, as founders that share a file have them."""
    with fleet(tmp_path) as run:
        invite = run.up("a").invite
        joiner = run.join("b", invite.replace("/demo#", "/msg#"))
        assert joiner.ends() == AdmissionError.exit_code
        assert "that peer runs 'demo', you asked for 'msg'" in joiner.text
