"""Keep the result of a round as it grows, over all attempts at the round.

A chunk is *final* when its encoded bytes are complete and checked. An attempt that breaks leaves
its final chunks here, and the next one may keep them: it names their digests, and whatever else
was final is forgotten, because it will be reduced again among other peers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from atoll.collectives.chunks import ChunkGrid, encoded_layout
from atoll.collectives.codecs import U8, Decoder
from atoll.collectives.digests import DIGEST_BYTES, Digest, strong_digest
from atoll.collectives.errors import CodecError


class RoundResult:
    """Hold the encoded chunks of ``grid`` in ``array``, uint8[layout.total_bytes].

    Without a lock: one attempt at a time writes, under its own lock. ``digests`` has what
    ``digest`` returns for each final chunk, and b"" for the others. ``spare(nbytes)`` gives memory
    with any contents.
    """

    def __init__(
        self,
        codec: Decoder,
        grid: ChunkGrid,
        spare: Callable[[int], U8] | None = None,
        digest: Digest = strong_digest,
    ) -> None:
        self.codec, self.grid, self.digest = codec, grid, digest
        self.layout = encoded_layout(grid, codec)
        total_bytes = self.layout.total_bytes
        self.array = spare(total_bytes) if spare else np.empty(total_bytes, np.uint8)
        self.digests = [b""] * grid.count
        self._on_final: Callable[[int], None] | None = None

    def finish(self, chunk: int, digest: bytes) -> None:
        """Make a chunk final: nobody writes to it any more, in this attempt."""
        self.digests[chunk] = digest
        if self._on_final is not None:
            self._on_final(chunk)

    def watch(self, on_final: Callable[[int], None] | None) -> None:
        """Call ``on_final`` with each chunk that is or becomes final; None: nobody any more.

        In any thread; with one that becomes final right now perhaps twice.
        """
        self._on_final = on_final
        for chunk, digest in enumerate(self.digests):
            if digest and on_final is not None:
                on_final(chunk)

    def copy(self, spare: Callable[[int], U8] | None = None) -> RoundResult:
        """Return the same result in other memory."""
        copied = RoundResult(self.codec, self.grid, spare, self.digest)
        np.copyto(copied.array, self.array)
        copied.digests = list(self.digests)
        return copied

    def keep(self, kept: Mapping[int, bytes]) -> frozenset[int]:
        """Forget every final chunk that is not kept with just its digest.

        Return the kept chunks that are not here. Nobody may be writing.
        """
        self.digests = [
            digest if digest == kept.get(chunk) else b""
            for chunk, digest in enumerate(self.digests)
        ]
        return frozenset(chunk for chunk in kept if not self.digests[chunk])

    def view(self, chunk: int) -> U8:
        lo, hi = self.layout.slice(chunk)
        return self.array[lo:hi]

    def fits(self, chunk: int, data: U8, digest: bytes) -> bool:
        """Return whether ``data`` are the encoded bytes that have this digest, and decode."""
        if len(data) != self.layout.size(chunk) or self.digest(data) != digest:
            return False
        try:
            self.codec.check(data, self.grid.size(chunk))  # a holder that vouches may not have
        except CodecError:
            return False
        return True

    @property
    def packed_digests(self) -> bytes:
        """Return the digests, 32 bytes per chunk; zeros where it is not final."""
        return b"".join(digest or bytes(DIGEST_BYTES) for digest in self.digests)
