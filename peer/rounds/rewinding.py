"""Go back to the state of an earlier round, by a checkpoint and the rounds since on this disk.

A commit changes the state in its place, and an outer step has no inverse in floating point. So who
has to take one back, as a member of a history that goes on without it, loads the last checkpoint
before that and applies the rounds in between again. That takes as long as a restart does, and the
memory of a second state meanwhile. Without checkpoints and rounds (``--durable votes`` or ``off``)
there is no way back, and the state comes from others.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from atoll.collectives.errors import CheckpointError, CodecError
from atoll.peer.checkpoint.reader import candidates, load_checkpoint, readable
from atoll.peer.rounds.entries import OPERATIONS
from atoll.peer.rounds.log import RoundLog
from atoll.peer.rounds.state import ReplicatedState


class Checkpoints(NamedTuple):
    """Say where this peer's checkpoints are, and of which run."""

    folder: Path
    run: str
    secret: bytes


def rewound(log: RoundLog, where: Checkpoints, round_number: int) -> ReplicatedState | None:
    """Return the state after an earlier round of the log; None if this peer's disk lacks it.

    In a worker thread. Raises ConfigError where there is no memory for it, OSError where the folder
    cannot be read.
    """
    paths = candidates(where.folder, where.run) if where.folder.is_dir() else []
    found = readable(paths, run=where.run, secret=where.secret)
    for path, manifest in found.items():  # the latest first
        is_before = manifest.round <= round_number
        if not is_before or log.chain_after(manifest.round) != manifest.chain:
            continue
        try:
            state = load_checkpoint(path, run=where.run, secret=where.secret).state
        except CheckpointError:
            continue
        if _brought_to(state, log, round_number):
            return state
        state.close()
    return None


def _brought_to(state: ReplicatedState, log: RoundLog, round_number: int) -> bool:
    """Apply the rounds of the log; return whether that has led to the state that was there."""
    while state.round < round_number:
        head = log.head(state.round + 1)
        if head is None:
            return False
        nbytes = 0 if head.kind in OPERATIONS else state.layout(head).total_bytes
        encoded = log.part(head.round, 0, nbytes) if nbytes else memoryview(b"")
        if encoded is None:
            return False
        try:
            state.apply(head, np.frombuffer(encoded, np.uint8))
        except CodecError:
            return False  # the file is damaged
    return state.digest == log.digest_after(round_number)
