"""Hold two buffers of parameters and momentum, and do the arithmetic on one chunk of them.

Which buffer is current, and who may write when, is the state's business (state.py).
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll.collectives import ChunkGrid, EncodedLayout, encoded_layout, get_codec
from atoll.collectives.codecs import Decoder
from atoll.optim.manifest import Manifest
from atoll.optim.outer_step import OuterStep, Pair
from atoll.optim.run_spec import RunSpec
from atoll.peer.client.shared_memory import Region
from atoll.peer.rounds.entries import INIT, EntryHead

Floats: TypeAlias = NDArray[np.float32]
U8: TypeAlias = NDArray[np.uint8]
_FLOAT32 = get_codec("float32")  # of INIT, whatever the run's codec


class StateBuffers:
    """Hold two buffers of parameters θ and momentum b. One thread at a time writes.

    ``shared`` holds θ0, θ1, b0, b1, each float32[elements].
    """

    def __init__(self, spec: RunSpec, manifest: Manifest) -> None:
        count = manifest.elements
        self.grid, self._manifest = manifest.grid, manifest
        self._spec, self._step = spec, OuterStep(spec, self.grid.chunk_elements)
        self.shared = Region("state", 4 * count)
        floats = self.shared.floats
        self.theta = (floats[:count], floats[count : 2 * count])
        self.momentum = (floats[2 * count : 3 * count], floats[3 * count :])

    def codec(self, head: EntryHead) -> Decoder:
        """Return the decoder of the bytes of an entry.

        Where every participant has a slot in them, they are of one attempt: such rounds keep no
        chunks.
        """
        return _FLOAT32 if head.kind == INIT else self._spec.result_codec(head.origin(0).weights)

    def layout(self, head: EntryHead, chunks: range) -> EncodedLayout:
        """Return where ``chunks`` lie in the encoded bytes of an entry that consists of them."""
        lo, hi = self.grid.bounds(chunks.start)[0], self.grid.bounds(chunks.stop - 1)[1]
        return encoded_layout(ChunkGrid(hi - lo, self.grid.chunk_elements), self.codec(head))

    def step(self, head: EntryHead, chunk: int, encoded: U8, source: int, target: int) -> None:
        """Apply one chunk of an entry: read from one buffer, write to the other or to the same.

        CodecError for malformed bytes; then nothing is written.
        """
        if head.kind != INIT:
            first, _ = self._manifest.chunks_of(head.fragment, self._spec.fragments)
            self._step(
                self.codec(head),
                encoded,
                self._pair(chunk, source),
                self._pair(chunk, target),
                round_number=head.round,
                contributors=head.origin(chunk - first).contributors,
            )
            return
        theta, momentum = self._pair(chunk, target)
        _FLOAT32.decode(encoded, theta)
        momentum.fill(0)

    def leaf(self, chunk: int, buffer: int) -> bytes:
        """Return the SHA-256 of a chunk's parameters and momentum."""
        theta, momentum = self.parts(chunk, buffer)
        text = hashlib.sha256(theta.data)
        text.update(momentum.data)
        return text.digest()

    def parts(self, chunk: int, buffer: int) -> tuple[U8, U8]:
        """Return the bytes of a chunk's parameters and of its momentum, in place."""
        theta, momentum = self._pair(chunk, buffer)
        return theta.view(np.uint8), momentum.view(np.uint8)

    def fill(self, chunk: int, buffer: int, parts: tuple[U8, U8]) -> None:
        """Overwrite a chunk with the bytes of parameters and momentum, as ``parts`` gives them."""
        for target, source in zip(self.parts(chunk, buffer), parts, strict=True):
            np.copyto(target, source)

    def _pair(self, chunk: int, buffer: int) -> Pair:
        lo, hi = self.grid.bounds(chunk)
        return self.theta[buffer][lo:hi], self.momentum[buffer][lo:hi]
