"""Pack and unpack which samples a trainer took at each of its local steps. Pure.

::

    u32 steps
    each step:    u32 batches      several where gradients are accumulated or a step was skipped
    each batch:   u32 indices, u32 bytes of each of two states of random numbers (0: none)
                  int64 each index; these states
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct
from struct import error as StructError
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import ConfigError, RemoteProtocolError

I64 = NDArray[np.int64]
INDICES_MAX = 8192  # in a step: 64 KiB. For longer batches note a seed, or the first of a row
BATCHES_MAX = 4096  # in a step: gradients of so many are seldom accumulated
RNG_BYTES_MAX = 8192  # for a state; the Mersenne Twister on the host has 5,056
STEP_BYTES_MAX = 8 * INDICES_MAX + BATCHES_MAX * (12 + 2 * RNG_BYTES_MAX)
COUNT, BATCH = Struct("<I"), Struct("<III")


@dataclass(frozen=True)
class Batch:
    """Hold what a batch was made of.

    ``indices``: int64[n], what the user's loop knows it by. ``rng``: the states of the random
    numbers of the host, and of the device, when it was begun; empty if they are not kept.
    """

    indices: I64
    rng: tuple[bytes, bytes] = (b"", b"")


Steps: TypeAlias = list[tuple[Batch, ...]]


def check_step(step: tuple[Batch, ...]) -> None:
    """Raise ConfigError for more than a step may have."""
    indices = sum(batch.indices.size for batch in step)
    if indices > INDICES_MAX or len(step) > BATCHES_MAX:
        raise ConfigError(
            f"a local step of {len(step)} batches with {indices:,} indices; at most {BATCHES_MAX:,}"
            f" and {INDICES_MAX:,} are kept for a replay",
            fix="note something shorter from which the same batch can be made, as a seed",
        )
    if max((len(state) for batch in step for state in batch.rng), default=0) > RNG_BYTES_MAX:
        raise ConfigError(f"a random number generator has a state of over {RNG_BYTES_MAX} bytes")


def pack(steps: Steps) -> bytes:
    """Pack the batches of steps as bytes; ConfigError for a step that is too large."""
    parts = [COUNT.pack(len(steps))]
    for step in steps:
        check_step(step)
        parts.append(COUNT.pack(len(step)))
        for batch in step:
            parts.append(BATCH.pack(batch.indices.size, *map(len, batch.rng)))
            parts += [batch.indices.astype("<i8").tobytes(), *batch.rng]
    return b"".join(parts)


def unpack(data: bytes, count: int) -> Steps:
    """Unpack ``count`` steps from bytes of anyone: the inverse of ``pack``.

    RemoteProtocolError for bytes that are none.
    """
    try:
        return _unpacked(memoryview(data), count)
    except (StructError, ValueError, ConfigError) as error:
        raise RemoteProtocolError(f"the samples of local steps cannot be read: {error}") from error


def _unpacked(data: memoryview, count: int) -> Steps:
    (steps,) = COUNT.unpack_from(data)
    if steps != count:
        raise ValueError(f"{steps} steps, not {count}")
    at, found = COUNT.size, []
    for _ in range(steps):
        (batches,) = COUNT.unpack_from(data, at)
        at += COUNT.size
        if not 0 < batches <= BATCHES_MAX:
            raise ValueError(f"{batches} batches of a step")
        step = []
        for _ in range(batches):
            indices, *states = BATCH.unpack_from(data, at)
            at += BATCH.size
            if indices > INDICES_MAX or max(states) > RNG_BYTES_MAX:
                raise ValueError(f"{indices} indices, random states of {states} bytes")
            ends = np.cumsum([at, 8 * indices, *states]).tolist()
            if ends[-1] > len(data):
                raise ValueError("they are cut off")
            first, second = (bytes(data[a:b]) for a, b in pairwise(ends[1:]))
            values = np.frombuffer(data[at : ends[1]], "<i8").astype(np.int64)
            step.append(Batch(values, (first, second)))
            at = ends[-1]
        check_step(tuple(step))
        found.append(tuple(step))
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes too many")
    return found


def batches_leaf(packed: bytes) -> bytes:
    """Return the leaf in the tree for the packed batches of a segment."""
    return hashlib.sha256(b"atoll local batches" + packed).digest()


def batches_bytes_max(steps: int) -> int:
    """Return the most bytes of the batches of so many steps; a reader refuses more."""
    return COUNT.size + steps * (COUNT.size + STEP_BYTES_MAX)
