"""``atoll checkpoint inspect, verify, export``: what they print, their exit codes, their files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from harness.tinyrun import PARAMETERS, TinyRun
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file

from atoll.peer.checkpoint.format import UNIX_S_MAX, export_header, render_manifest
from atoll.peer.checkpoint.reader import MANIFEST_FILE, STATE_FILE, read_manifest
from atoll.peer.checkpoint.writer import CheckpointWriter
from atoll.peer.cli.checkpoint import CASTS
from atoll.peer.cli.main import main
from atoll.peer.membership.view import short
from atoll.peer.net.identity import Home
from atoll.peer.net.invite import Invite, fingerprint_of

RUN, SECRET = "demo", bytes(range(32))
REFUSED, USAGE = 26, 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TinyRun, Path]]:
    """A run after round 3 and the folder with its checkpoints of rounds 2 and 3."""
    base = tmp_path_factory.mktemp("cli")
    (base / "checkpoints").mkdir()
    with Home.open(base / "home") as home:
        run = TinyRun(home.peer_id)
        writer = CheckpointWriter(base / "checkpoints", RUN, SECRET, home.peer_id, home.sign)
        for _ in range(2):
            run.commit()
            writer.write(run.state, run.log, lambda: run.view, 5)
    yield run, base / "checkpoints"
    run.close()


@pytest.fixture
def run(whole: tuple[TinyRun, Path]) -> TinyRun:
    return whole[0]


@pytest.fixture
def folder(whole: tuple[TinyRun, Path], tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(whole[1], tmp_path / "checkpoints"))


def newest(folder: Path) -> Path:
    return max(folder.iterdir())


def damage(path: Path) -> None:
    with (path / STATE_FILE).open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(b"damage")


def invite(secret: bytes = SECRET, run: str = RUN) -> str:
    return str(Invite("127.0.0.1", 1, run, fingerprint_of(b"p" * 32), secret))


# ---------------------------------------------------------------- inspect, verify


@pytest.mark.parametrize("one", [True, False])
def test_inspect_says_what_it_is(
    run: TinyRun, folder: Path, capsys: pytest.CaptureFixture[str], one: bool
) -> None:
    path = newest(folder) if one else folder
    assert main(["checkpoint", "inspect", str(path)]) == 0
    text = capsys.readouterr().out
    manifest = read_manifest(newest(folder))
    size = (newest(folder) / STATE_FILE).stat().st_size
    for fact in (
        "run         demo (diloco, sync_every 10, int8)",
        "round       3",
        manifest.chain.hex(),
        manifest.digest.hex(),
        manifest.lineage.hex(),
        f"3 in view 7: {', '.join(map(short, run.view.peers))}",
        f"writer      {short(run.peer)}, incarnation 5",
        "UTC, atoll ",
        f"{size:,} bytes, 3 chunks",
        "10,054 in 5 tensors",
        "blocks.0.weight: 80x100 bfloat16",
        "scale: scalar float64",
    ):
        assert fact in text, fact


def test_what_a_stranger_has_signed_cannot_move_the_cursor(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, key = newest(folder), Ed25519PrivateKey.generate()
    signed = replace(
        read_manifest(path),
        peer=key.public_key().public_bytes_raw(),
        version="\x1b[2J1.0\n",
        unix_s=UNIX_S_MAX,
    )
    (path / MANIFEST_FILE).write_bytes(render_manifest(signed, SECRET, key.sign))
    assert main(["checkpoint", "inspect", str(path)]) == 0
    assert "\ntime        9999-12-31 23:59:59 UTC, atoll ?[2J1.0?\n" in capsys.readouterr().out


def test_verify_says_ok_or_why_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = newest(folder)
    assert main(["checkpoint", "verify", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"OK {path.name}: run demo, round 3, 3 chunks")
    assert "not checked: whether a member of the run wrote it" in out
    damage(path)
    assert main(["checkpoint", "verify", str(path)]) == REFUSED
    assert f"ATOLL-E72 {path.name} is damaged: chunk 2" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(folder)]) == 0  # the one before
    out = capsys.readouterr().out
    assert "OK" in out
    assert "round 2" in out


@pytest.mark.parametrize("action", ["inspect", "verify", "export"])
def test_a_later_one_that_is_damaged_is_named(
    folder: Path, tmp_path: Path, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a folder the latest whole one is taken: that must not hide that there was a later one."""
    path = newest(folder)
    damage(path)
    out = ["--out", str(tmp_path / "model.safetensors")] if action == "export" else []
    assert main(["checkpoint", action, str(folder), *out]) == 0
    printed = capsys.readouterr().out
    assert f"passed over: {path.name} is damaged: chunk 2" in printed
    assert path.name not in printed.split("\n", 1)[1]


def test_verify_with_an_invite_tells_this_run_from_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(newest(folder))
    assert main(["checkpoint", "verify", path, "--invite", invite()]) == 0
    assert "not checked" not in capsys.readouterr().out
    assert main(["checkpoint", "verify", path, "--invite", invite(b"x" * 32)]) == REFUSED
    assert "another run that is also called demo" in capsys.readouterr().err
    assert main(["checkpoint", "verify", path, "--invite", invite(run="other")]) == REFUSED
    assert "belongs to run demo, not other" in capsys.readouterr().err
    assert main(["checkpoint", "verify", path, "--invite", "nonsense"]) == USAGE


@pytest.mark.parametrize("action", ["inspect", "verify", "export"])
def test_what_is_no_checkpoint_is_refused(
    tmp_path: Path, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path, tmp_path / "nowhere", Path(__file__)):
        assert main(["checkpoint", action, str(path)]) == REFUSED
        error = capsys.readouterr().err
        assert "ATOLL-E72" in error
        assert "fix:" in error


def test_the_options_of_a_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["up", "--run", "demo", "--every", "0"])
    assert "0 is not a number of rounds" in capsys.readouterr().err


# ---------------------------------------------------------------- export


def test_an_export_loads_without_atoll(run: TinyRun, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    assert main(["checkpoint", "export", str(folder), "--out", str(out)]) == 0
    tensors = load_file(out)
    theta = torch.frombuffer(bytearray(run.after[3][0]), dtype=torch.float32)
    assert sorted(tensors) == [p.name for p in run.manifest.parameters]
    for p in PARAMETERS:
        lo, hi = run.manifest.offsets[p.name]
        wanted = theta[lo:hi].reshape(p.shape).to(getattr(torch, p.dtype))
        assert tensors[p.name].dtype == wanted.dtype
        assert torch.equal(tensors[p.name], wanted)
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "model.safetensors"]


def test_an_export_reads_the_state_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the memory in which it was checked: what changes in the file later is not used."""
    state = newest(folder) / STATE_FILE
    path, size, preadv = state.resolve(), state.stat().st_size, os.preadv
    read = 0

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal read
        count = preadv(fd, buffers, offset)
        if Path(os.readlink(f"/proc/self/fd/{fd}")) == path:
            read += count
        return count

    monkeypatch.setattr(os, "preadv", counted)
    out = tmp_path / "model.safetensors"
    assert main(["checkpoint", "export", str(folder), "--out", str(out)]) == 0
    assert read == size


def test_tensors_of_an_export_are_aligned(run: TinyRun) -> None:
    raw = export_header(run.manifest, 3)
    entries = json.loads(raw[8:])
    assert entries.pop("__metadata__") == {"format": "pt", "round": "3"}
    assert len(raw) % 8 == 0
    for p in PARAMETERS:
        start, end = entries[p.name]["data_offsets"]
        assert start % getattr(torch, p.dtype).itemsize == 0
        assert end - start == p.size * getattr(torch, p.dtype).itemsize


@given(arrays(np.uint32, st.integers(1, 50)))
def test_values_are_rounded_as_torch_rounds_them(bits: np.ndarray) -> None:
    values = bits.view(np.float32)
    values = np.ascontiguousarray(np.where(np.isfinite(values), values, np.float32(0)))
    for dtype, cast in CASTS.items():
        wanted = torch.from_numpy(values.copy()).to(getattr(torch, dtype))
        assert cast(values) == bytes(wanted.view(torch.uint8).numpy())


def test_an_export_has_a_name_of_its_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", "export", str(newest(folder))]) == 0
    assert (tmp_path / "demo-3.safetensors").exists()


@pytest.mark.parametrize("out", [".", "..", "models/", "models"])
def test_an_export_into_a_folder_has_a_name_of_its_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    (tmp_path / "here" / "models").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert main(["checkpoint", "export", str(newest(folder)), "--out", out]) == 0
    assert Path(out, "demo-3.safetensors").is_file()


def test_an_export_that_fails_leaves_what_was_there(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model.safetensors"
    out.write_text("mine")
    path = newest(folder)
    damage(path)
    assert main(["checkpoint", "export", str(path), "--out", str(out)]) == REFUSED
    assert out.read_text() == "mine"
    missing = tmp_path / "missing" / "model.safetensors"
    assert main(["checkpoint", "export", str(folder), "--out", str(missing)]) == USAGE
    assert "No such file or directory" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "model.safetensors"]
