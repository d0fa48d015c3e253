"""The replicated state of a run: outer parameters and momentum, and the arithmetic of a commit.

Two buffers: the current one is what everybody reads (trainer, donors, pseudo-gradients) and never
changes; a commit writes the next state into the other and swaps. Each chunk has a *leaf*, the
SHA-256 of its parameters and momentum; the digest of the state is the hash of all leaves and of
the run's specification, so equal digests mean equal runs, bit for bit.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from atoll.collectives import encoded_layout, get_codec, grid_for
from atoll.collectives.errors import ConfigError
from atoll.optim.manifest import Manifest, pseudo_gradient
from atoll.optim.outer import nesterov_step
from atoll.optim.spec import parse_blob
from atoll.peer.memory import Region

__all__ = ["LEAF_BYTES", "ReplicatedState", "check_head_fits", "state_digest"]

Floats = NDArray[np.float32]
LEAF_BYTES = 32
# Leaves and specification travel in one control frame (1 MiB): about 4 G parameters and more.
HEAD_BYTES_MAX = (1 << 20) - 4096
_serials = itertools.count(1)  # tells a trainer that it has to map another state


def check_head_fits(blob: bytes, manifest: Manifest) -> None:
    """ConfigError for a model that this version could not hand to a joiner."""
    head_bytes = len(blob) + LEAF_BYTES * grid_for(manifest.elements).count
    if head_bytes > HEAD_BYTES_MAX:
        raise ConfigError(
            f"{manifest.elements:,} parameters are too many for this version: the digests of their"
            f" chunks take {head_bytes:,} bytes, {HEAD_BYTES_MAX:,} fit into a control frame",
            fix="train a smaller model",
        )


def state_digest(blob: bytes, leaves: bytes) -> bytes:
    return hashlib.sha256(hashlib.sha256(blob).digest() + leaves).digest()


class ReplicatedState:
    """``shared`` holds θ0, θ1, b0, b1, each float32[elements], for the trainer to map.

    One thread at a time calls the methods that write; readers check ``generation`` of the buffer
    that they read before and after.
    """

    def __init__(self, blob: bytes) -> None:
        self.blob = blob
        self.serial = next(_serials)
        self.spec, self.manifest = parse_blob(blob)
        count = self.manifest.elements
        self.grid = grid_for(count)
        self.codec = get_codec(self.spec.codec)
        self.layout = encoded_layout(self.grid, self.codec)
        self.shared = Region("state", 4 * count)
        floats = self.shared.floats
        self._theta = [floats[:count], floats[count : 2 * count]]
        self._momentum = [floats[2 * count : 3 * count], floats[3 * count :]]
        self._position = (0, 0)  # round and current buffer: replaced in one step
        self.generation = [0, 0]  # of each buffer, counted up before it is written
        self.leaves = b""
        self.digest = b""
        self._delta = np.empty(self.grid.chunk_elements, np.float32)
        self._scratch = np.empty(self.grid.chunk_elements, np.float32)

    @property
    def round(self) -> int:
        return self._position[0]

    @property
    def current(self) -> int:
        return self._position[1]

    @property
    def position(self) -> tuple[int, int]:
        """Round and current buffer that belong together, for readers in other threads."""
        return self._position

    @property
    def theta(self) -> Floats:
        return self._theta[self.current]

    @property
    def momentum(self) -> Floats:
        return self._momentum[self.current]

    def close(self) -> None:
        self.shared.close()

    # ------------------------------------------------------------ reading

    def delta_of(self, submission: Floats) -> Callable[[int, Floats], None]:
        """The source of a reduction: Δ = θ - θ_m of one chunk, from the state as it is now."""
        theta, grid, manifest = self.theta, self.grid, self.manifest

        def fill(chunk: int, out: Floats) -> None:
            lo, hi = grid.bounds(chunk)
            pseudo_gradient(theta[lo:hi], submission[lo:hi], out, manifest, lo, hi)

        return fill

    def chunk_views(self, chunk: int) -> tuple[memoryview, memoryview]:
        """Parameters and momentum of one chunk, as a donor sends them."""
        lo, hi = self.grid.bounds(chunk)
        return self.theta[lo:hi].data.cast("B"), self.momentum[lo:hi].data.cast("B")

    # ------------------------------------------------------------ writing

    def initialise(self, encoded: NDArray[np.uint8]) -> None:
        """Log entry 1: ``encoded`` is the first trainer's θ as float32; momentum is zero."""
        theta, momentum = self._begin_write()
        np.copyto(theta, encoded.view(np.float32))
        momentum.fill(0)
        self._finish_write(1, self._hash_leaves())

    def apply(self, round_number: int, encoded: NDArray[np.uint8]) -> None:
        """The outer step of a committed round, from the exact bytes that everyone holds."""
        theta, momentum = self._begin_write()
        spec = self.spec
        leaves = bytearray()
        for chunk in range(self.grid.count):
            lo, hi = self.grid.bounds(chunk)
            start, end = self.layout.slice(chunk)
            delta = self._delta[: hi - lo]
            self.codec.decode(encoded[start:end], delta)
            nesterov_step(
                self.theta[lo:hi],
                self.momentum[lo:hi],
                delta,
                lr=spec.outer_lr,
                mu=spec.outer_momentum,
                out_theta=theta[lo:hi],
                out_momentum=momentum[lo:hi],
                scratch=self._scratch[: hi - lo],
            )
            leaves += _leaf(theta[lo:hi], momentum[lo:hi])
        self._finish_write(round_number, bytes(leaves))

    def begin_load(self) -> None:
        self._begin_write()

    def load_chunk(self, chunk: int, data: memoryview, leaf: bytes) -> bool:
        """Take one chunk of a donor into the next buffer; false if it is not what the leaf says."""
        lo, hi = self.grid.bounds(chunk)
        values = np.frombuffer(data, np.float32)
        if len(values) != 2 * (hi - lo) or hashlib.sha256(data).digest() != leaf:
            return False
        other = 1 - self.current
        np.copyto(self._theta[other][lo:hi], values[: hi - lo])
        np.copyto(self._momentum[other][lo:hi], values[hi - lo :])
        return True

    def finish_load(self, round_number: int, leaves: bytes) -> None:
        self._finish_write(round_number, leaves)

    def _begin_write(self) -> tuple[Floats, Floats]:
        other = 1 - self.current
        self.generation[other] += 1  # whoever still reads the old contents learns it by this
        return self._theta[other], self._momentum[other]

    def _finish_write(self, round_number: int, leaves: bytes) -> None:
        self.leaves = leaves
        self.digest = state_digest(self.blob, leaves)
        self._position = (round_number, 1 - self.current)

    def _hash_leaves(self) -> bytes:
        other = 1 - self.current
        bounds = [self.grid.bounds(chunk) for chunk in range(self.grid.count)]
        return b"".join(
            _leaf(self._theta[other][lo:hi], self._momentum[other][lo:hi]) for lo, hi in bounds
        )


def _leaf(theta: Floats, momentum: Floats) -> bytes:
    text = hashlib.sha256(theta.data)
    text.update(momentum.data)
    return text.digest()
