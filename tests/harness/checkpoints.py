"""Writing checkpoints of a TinyRun, acting meanwhile, and comparing what is in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.optim.manifest import Parameter
from atoll.peer.checkpoint.reader import load_checkpoint
from atoll.peer.checkpoint.writer import CheckpointWriter
from atoll.peer.net.identity import Home
from atoll.peer.rounds.state import ChunkCopy
from harness.tinyrun import TinyRun

RUN, SECRET = "demo", bytes(range(32))
SMALL = (Parameter("w", (9000,)),)  # three chunks


def writer_for(folder: Path, home: Home, secret: bytes = SECRET) -> CheckpointWriter:
    return CheckpointWriter(folder, RUN, secret, home.peer_id, home.sign)


def write(writer: CheckpointWriter, run: TinyRun) -> Path:
    return writer.write(run.state, run.log, lambda: run.view, 5).path


def check_is(path: Path, run: TinyRun, round_number: int) -> None:
    """The checkpoint holds exactly the state after the round."""
    loaded = load_checkpoint(path, run=RUN, secret=SECRET)
    assert loaded.round == round_number
    assert (loaded.state.theta.tobytes(), loaded.state.momentum.tobytes()) == run.after[
        loaded.round
    ]
    loaded.state.close()


def before_each_chunk(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]
) -> None:
    """Let ``act`` happen just before the writer copies a chunk."""
    copy = run.state.read_chunk

    def read_chunk(chunk: int, out: memoryview) -> ChunkCopy:
        act(chunk)
        return copy(chunk, out)

    monkeypatch.setattr(run.state, "read_chunk", read_chunk)


def load_round(path: Path) -> int:
    loaded = load_checkpoint(path, run=RUN, secret=SECRET)
    loaded.state.close()
    return loaded.round
