"""Answer what the workers of a swarm wait for together, with the arithmetic of daemons."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from atoll.collectives.chunks import grid_for
from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.engine.reference import reduce_together
from atoll.collectives.errors import CollectiveMismatchError, ConfigError
from atoll.optim.spec import BLOB_BYTES_MAX, LENGTH_BYTES
from atoll.optim.swarm_state import SwarmState, SwarmSubmission


class SwarmCall(ABC):
    """Describe what one worker waits for.

    ``alike``: what must be equal in the calls of all.
    """

    alike: str

    @abstractmethod
    def answers(self, calls: Sequence[Any]) -> tuple[list[Any], int]:
        """Answer ``calls``, this one among them, which are alike.

        Return what each worker gets, and how many bytes all of them together would have sent,
        without headers.
        """


@dataclass
class StepCall(SwarmCall):
    """Carry out a round of the optimizer, on ``state``, which ``replicas`` peers hold."""

    state: SwarmState
    submitted: SwarmSubmission
    replicas: int
    fragment: int = 0

    @property
    def alike(self) -> str:  # type: ignore[override]
        return f"a round of fragment {self.fragment}"

    def answers(self, calls: Sequence[StepCall]) -> tuple[list[tuple[float, list[int]]], int]:
        """Return each worker's share in the mean, and the workers whose parts are in it.

        The bytes that were sent come with them, as ``SwarmCall.answers`` says.
        """
        weights = [call.submitted.weight for call in calls]
        part, result = self.state.commit([call.submitted for call in calls], self.fragment)
        sent_bytes = _butterfly_bytes(calls, part, result)
        if self.state.spec.is_asynchronous:  # the others fetch it; else they have left
            sent_bytes += (self.replicas - len(calls)) * result
        numbers = [call.submitted.worker for call in calls if call.submitted.weight > 0]
        return [(weight / sum(weights), numbers) for weight in weights], sent_bytes


@dataclass
class GatherCall(SwarmCall):
    """Gather the bytes of all workers; it is a barrier where they are empty."""

    data: bytes
    alike: str

    def answers(self, calls: Sequence[GatherCall]) -> tuple[list[list[bytes]], int]:
        every = [call.data for call in calls]
        together = sum(LENGTH_BYTES + len(data) for data in every)
        if together > BLOB_BYTES_MAX:
            raise ConfigError(
                f"the objects of {len(every)} trainers have {together:,} bytes together, with their"
                f" lengths; {BLOB_BYTES_MAX:,} fit into one round",
                fix="gather less from each trainer, in several rounds",
            )
        return [every] * len(calls), (len(calls) - 1) * sum(map(len, every))


@dataclass
class FoldCall(SwarmCall):
    """Fold vectors, as daemons do it for ``session.all_reduce``."""

    flat: F32
    op: str
    codec: str

    @property
    def alike(self) -> str:  # type: ignore[override]
        return f'all_reduce() of {self.flat.size:,} elements, op="{self.op}", codec="{self.codec}"'

    def answers(self, calls: Sequence[FoldCall]) -> tuple[list[F32], int]:
        codec, grid = get_codec(self.codec), grid_for(self.flat.size)

        def part(flat: F32, chunk: int, out: F32) -> None:
            np.copyto(out, flat[slice(*grid.bounds(chunk))])

        sources = [partial(part, call.flat) for call in calls]
        result = reduce_together(codec, grid, [1.0] * len(calls), sources, self.op)
        reduced: F32 = np.empty_like(self.flat)
        for chunk in range(grid.count):
            codec.decode(result.view(chunk), reduced[slice(*grid.bounds(chunk))])
        return [reduced] * len(calls), _butterfly_bytes(
            calls, result.array.nbytes, result.array.nbytes
        )


def answer(calls: Sequence[SwarmCall]) -> tuple[list[Any], int]:
    """Return ``SwarmCall.answers``, once all are seen to be alike; else CollectiveMismatchError."""
    kinds = sorted({call.alike for call in calls})
    if len(kinds) > 1:
        raise CollectiveMismatchError(
            f"workers of the swarm called {' and '.join(kinds)}",
            fix="let every worker make the same calls, with the same arguments, in the same order",
        )
    return calls[0].answers(calls)


def _butterfly_bytes(calls: Sequence[SwarmCall], part_bytes: int, result_bytes: int) -> int:
    """Return the bytes that all peers together send in a butterfly.

    Each part but one's own goes to its owner, each result to all others. Per peer that makes
    ``(n-1)/n * (part_bytes + result_bytes)``; a gathered result has n parts in it.
    """
    return (len(calls) - 1) * (part_bytes + result_bytes)
