"""Two buffers of parameters and momentum, and the arithmetic on one chunk of them.

Commits, replays and checkpoints go through the same ``OuterStep``, so that they give the same bits.
Which buffer is current, and who may write when, is the state's business (state.py).
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll.collectives import ChunkGrid, EncodedLayout, encoded_layout, get_codec, grid_for
from atoll.optim.manifest import Manifest
from atoll.optim.outer import nesterov_step
from atoll.optim.spec import RunSpec
from atoll.peer.memory import Region
from atoll.peer.rounds.entries import INIT

__all__ = ["U8", "Floats", "OuterStep", "StateBuffers"]

Floats: TypeAlias = NDArray[np.float32]
Pair: TypeAlias = tuple[Floats, Floats]  # parameters and momentum
U8: TypeAlias = NDArray[np.uint8]
_FLOAT32 = get_codec("float32")  # of INIT, whatever the run's codec


class OuterStep:
    """The arithmetic of an entry on one chunk: one instance per thread, because it has scratch."""

    def __init__(self, spec: RunSpec, grid: ChunkGrid) -> None:
        self.codec = get_codec(spec.codec)
        self._lr, self._mu = spec.outer_lr, spec.outer_momentum
        self._delta = np.empty(grid.chunk_elements, np.float32)
        self._scratch = np.empty(grid.chunk_elements, np.float32)

    def __call__(self, kind: str, encoded: U8, source: Pair, target: Pair) -> None:
        """Both are parameters and momentum, float32[n] each, and may be the same memory.

        CodecError for malformed bytes; then nothing is written.
        """
        theta, momentum = target
        if kind == INIT:
            _FLOAT32.decode(encoded, theta)
            momentum.fill(0)
            return
        delta = self._delta[: theta.size]
        self.codec.decode(encoded, delta)
        nesterov_step(
            *source,
            delta,
            lr=self._lr,
            mu=self._mu,
            out_theta=theta,
            out_momentum=momentum,
            scratch=self._scratch[: theta.size],
        )


class StateBuffers:
    """``shared`` holds θ0, θ1, b0, b1, each float32[elements]. One thread at a time writes."""

    def __init__(self, spec: RunSpec, manifest: Manifest) -> None:
        count = manifest.elements
        self.grid = grid_for(count)
        self._step = OuterStep(spec, self.grid)
        self.codec = self._step.codec
        self.shared = Region("state", 4 * count)
        floats = self.shared.floats
        self.theta = (floats[:count], floats[count : 2 * count])
        self.momentum = (floats[2 * count : 3 * count], floats[3 * count :])

    def layout(self, kind: str, chunks: range) -> EncodedLayout:
        """Where ``chunks`` lie in the encoded bytes of an entry that consists of them."""
        lo, hi = self.grid.bounds(chunks.start)[0], self.grid.bounds(chunks.stop - 1)[1]
        codec = _FLOAT32 if kind == INIT else self.codec
        return encoded_layout(ChunkGrid(hi - lo, self.grid.chunk_elements), codec)

    def step(self, kind: str, chunk: int, encoded: U8, source: int, target: int) -> None:
        """One chunk of an entry: read from one buffer, write to the other or to the same.

        CodecError for malformed bytes; then nothing is written.
        """
        self._step(kind, encoded, self._pair(chunk, source), self._pair(chunk, target))

    def leaf(self, chunk: int, buffer: int) -> bytes:
        """The SHA-256 of a chunk's parameters and momentum."""
        theta, momentum = self.parts(chunk, buffer)
        text = hashlib.sha256(theta.data)
        text.update(momentum.data)
        return text.digest()

    def parts(self, chunk: int, buffer: int) -> tuple[U8, U8]:
        """The bytes of a chunk's parameters and of its momentum, in place."""
        theta, momentum = self._pair(chunk, buffer)
        return theta.view(np.uint8), momentum.view(np.uint8)

    def fill(self, chunk: int, buffer: int, parts: tuple[U8, U8]) -> None:
        """Overwrite a chunk with such bytes."""
        for target, source in zip(self.parts(chunk, buffer), parts, strict=True):
            np.copyto(target, source)

    def _pair(self, chunk: int, buffer: int) -> Pair:
        lo, hi = self.grid.bounds(chunk)
        return self.theta[buffer][lo:hi], self.momentum[buffer][lo:hi]
