"""A segment taken again by another process, whose libraries use the instructions of another CPU.

python -m harness.replay_elsewhere FILE OPTIMIZER COMMITMENT     prints the verdict as JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from atoll.optim.model_io import ModelVector
from atoll.optim.replay.checkpoint import leaf_of
from atoll.optim.replay.difference import ReplayVerdict
from atoll.optim.replay.replaying import replay
from atoll.optim.replay.step_disclosure import (
    Opened,
    StepDisclosure,
    WorkCommitment,
    batches_leaf,
    pack,
)
from harness.replaying import OPTIMIZERS, Loop, text_model

__all__ = ["OLD_CPU", "replayed_elsewhere"]

# What PyTorch's own kernels, MKL and oneDNN take for a processor without AVX.
OLD_CPU = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
}
TIMEOUT_S = 120  # no run comes near it


def replayed_elsewhere(opened: Opened, optimizer: str, folder: Path, **sizes: int) -> ReplayVerdict:
    """Of a segment that is all of its round, by such a process."""
    start, batches, end = opened.start, pack(opened.steps), opened.end
    assert end is not None
    assert opened.extent.segments == 1
    leaves = [leaf_of(start.digests()), batches_leaf(batches), leaf_of(end.digests())]
    commitment = WorkCommitment(opened.extent, leaves)
    opening = StepDisclosure(
        opened.extent,
        0,
        start.encode(),
        commitment.proof(0),
        batches,
        commitment.proof(1),
        end.encode(),
        commitment.proof(2),
    )
    file = folder / "segment"
    file.write_bytes(opening.encode())
    module = [sys.executable, "-m", "harness.replay_elsewhere"]
    told = [str(file), optimizer, commitment.digest.hex(), json.dumps(sizes)]
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, **OLD_CPU, "PYTHONPATH": path}
    done = subprocess.run(
        [*module, *told], env=environment, capture_output=True, timeout=TIMEOUT_S, check=True
    )
    return ReplayVerdict(**json.loads(done.stdout))


def main(file: str, optimizer: str, commitment: str, sizes: str) -> None:
    torch.set_num_threads(1)
    model = text_model(**json.loads(sizes))
    manifest = ModelVector(model).manifest
    opening = StepDisclosure.decode(Path(file).read_bytes(), manifest)
    loop = Loop(model, OPTIMIZERS[optimizer](model))
    verdict = replay(opening.open(bytes.fromhex(commitment)), loop.task())
    print(json.dumps(asdict(verdict)))


if __name__ == "__main__":
    main(*sys.argv[1:])
