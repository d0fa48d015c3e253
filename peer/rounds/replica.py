"""Hold what this peer has for its rounds, and find what it contributes to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from atoll.collectives.codecs import F32
from atoll.peer.membership.view import View
from atoll.peer.rounds.attempt_table import AttemptRun
from atoll.peer.rounds.entries import STEP
from atoll.peer.rounds.error_feedback import Residual
from atoll.peer.rounds.log import RoundLog
from atoll.peer.rounds.state import ReplicatedState

Source = Callable[[int, F32], None]
Own = Callable[[int], F32]


@dataclass(slots=True)
class Replica:
    """Hold the state, the last rounds, the input of this peer's trainer, and the view.

    Also what codecs have left out of that input.
    """

    log: RoundLog
    state: ReplicatedState | None = None
    # The region whose submission the membership machine has accepted last. It is not cleared:
    # whether an attempt may read it is the machine's decision.
    inputs: F32 | None = None
    steps: bytes = b""  # what its trainer has committed to of the local steps that led to them
    outputs: F32 | None = None  # where the trainer expects the result of its all-reduce
    view: View | None = None
    residual: Residual = field(default_factory=Residual)


def contribution(replica: Replica, job: AttemptRun) -> tuple[Own | None, Source | None]:
    """Return where the own part of an attempt lies, and what fills it in.

    The first is None if the part lies nowhere yet; both are None if there is no part.
    """
    own = _own(replica, job)
    if own is None:
        return None, _source(replica, job)

    def copy(chunk: int, out: F32) -> None:
        np.copyto(out, own(chunk))

    return own, copy


def _source(replica: Replica, job: AttemptRun) -> Source | None:
    """Return what computes our part of a step from the submission of the trainer, or None."""
    inputs, state, begin = replica.inputs, replica.state, job.begin
    if begin.kind != STEP or inputs is None or state is None or inputs.size != state.grid.total:
        return None
    job.source = replica.residual.source(state, inputs, begin)
    return job.source


def _own(replica: Replica, job: AttemptRun) -> Own | None:
    """Return our part of any other round, which lies in the trainer's memory as it is, or None."""
    inputs, grid = replica.inputs, job.result.grid
    if job.begin.kind == STEP or inputs is None or inputs.size != grid.total:
        return None
    floats = inputs

    def part(chunk: int) -> F32:
        lo, hi = grid.bounds(chunk)
        return floats[lo:hi]

    return part
