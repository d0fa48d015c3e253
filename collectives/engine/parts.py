"""Encode the own part of each chunk, and bring all parts of one reduction together.

``Sums`` (mean_parts.py), ``Slots`` (gathered_parts.py) and ``Stacks`` (robust_parts.py) say what
becomes of them.
Nothing is decided here: the engine says whose part is added when, one thread at a time for each
chunk.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from atoll.collectives.chunks import encoded_layout
from atoll.collectives.codecs import F32, U8, Codec
from atoll.collectives.engine.buffers import BufferPool
from atoll.collectives.engine.result import RoundResult
from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.robust.gram import InnerProducts

# Chunks that are filled and encoded at the same time. Each takes a float32 chunk, and this many
# cores encode more than 100 Gbit/s of float32, so more would take memory and bring nothing.
ENCODERS_MAX: Final = 4


class PartError(Exception):
    """Report that a participant has sent what cannot be used: which one, and the reason."""

    def __init__(self, participant: int, why: str) -> None:
        super().__init__(why)
        self.participant, self.why = participant, why


class Parts(ABC):
    """Take in the parts of one reduction, chunk by chunk, and encode what they give.

    ``codec`` is that of parts. Buffers that ``encoded`` lends are given back to it, but where bytes
    could not be decoded: then the reduction fails anyway.

    ``source(chunk, out)`` fills in the own part; ``own(chunk)``, if given, shows where it lies.
    What they raise goes on to the caller. ``coded(chunk)``, once it is set, shows the own part as
    it was encoded before; ``keep(participant, chunk, part)`` is shown each part that comes, and may
    copy it.
    """

    coded: Callable[[int], U8] | None = None
    keep: Callable[[int, int, U8], None] | None = None

    def __init__(
        self,
        result: RoundResult,
        codec: Codec,
        source: Callable[[int, F32], None],
        own: Callable[[int], F32] | None = None,
    ) -> None:
        self._result, self._codec, self._grid = result, codec, result.grid
        self._layout = encoded_layout(result.grid, codec)
        self.encoded = BufferPool(self._layout.chunk_bytes, np.uint8)
        self._floats = BufferPool(result.grid.size(0), np.float32)
        self._source, self._own = source, own
        self._encoders = threading.BoundedSemaphore(ENCODERS_MAX)

    @property
    def allocated_bytes(self) -> int:
        return self.encoded.allocated_bytes + self._floats.allocated_bytes

    @abstractmethod
    def in_place(self, chunk: int) -> bool:
        """Return whether a chunk grows where the result lies: then each addition writes there."""

    @abstractmethod
    def add(self, chunk: int, participant: int | None, buffer: U8) -> None:
        """Add the part of a participant, or a sum of several, and give the buffer back.

        ``participant`` is None for a sum of several, which has its weights already. Raises
        CodecError for bytes that cannot be decoded.
        """

    @abstractmethod
    def add_own(self, chunk: int, me: int, *, coded: bool) -> None:
        """Add the own part as it is or, if ``coded``, as others decode it. Raises CodecError."""

    def whole(self, chunk: int) -> Sequence[int]:
        """Note that all parts of a chunk are added, and return the chunks that can be encoded now.

        Each chunk is returned once. Raises PartError.
        """
        return (chunk,)

    @property
    def told_bytes(self) -> int:
        """Return the bytes of what owners tell each other (``GramExchange``); 0 for nothing."""
        return 0

    def to_tell(self) -> U8 | None:
        """Return what this owner tells others, uint8[told_bytes]; None while it is not known."""
        return None

    @property
    def inner_products(self) -> InnerProducts:
        """Return the inner products that a rule has used, once all owners have told theirs.

        Before that, and where the rule needs none, they are empty.
        """
        return InnerProducts()

    def told(self, owner: int, data: U8) -> Sequence[int]:
        """Take in what another owner has told, and return the chunks that can be encoded now.

        Raises PartError if it cannot be used, and LocalProtocolError where owners tell each other
        nothing.
        """
        raise LocalProtocolError("these parts need nothing from other owners")

    @abstractmethod
    def encode(self, chunk: int, out: U8) -> None:
        """Encode what the parts of a chunk give into ``out``, when all are added, and forget it.

        Raises CodecError or PartError.
        """

    def part(self, chunk: int, buffer: U8, *, own: bool) -> U8:
        """Return what to send of a chunk: the sum, if there is one here, else the own part.

        It is the own part too if it must be ``own``. It lies in ``buffer``, or where it was before.
        Raises CodecError.
        """
        return self._encode_own(chunk, buffer)

    def copied(self, payload: U8, buffer: U8) -> U8 | None:
        """Return a copy, for ``add``, of the own part that lies in ``buffer``.

        Return None if ``payload`` shows where the part lies: from there ``add_own`` adds it.
        """
        if not np.may_share_memory(payload, buffer):
            return None
        copy = self.encoded.take()
        copy[: payload.size] = payload
        return copy

    @property
    def is_audited(self) -> bool:
        """Return whether it is verified afterwards what owners have told.

        Then no word of a single one breaks the reduction off and names somebody else.
        """
        return self.keep is not None

    def came(self, chunk: int, participant: int, buffer: U8) -> None:
        """Show ``keep`` a participant's part that is here, and is about to be added."""
        if self.keep is not None:
            self.keep(participant, chunk, buffer[: self._layout.size(chunk)])

    def _encode_own(self, chunk: int, buffer: U8) -> U8:
        if self.coded is not None:
            return self.coded(chunk)
        if self._own is not None and self._codec.contract.kind == "exact":
            where = self._own(chunk).view(np.uint8)
            self._codec.check(where, self._grid.size(chunk))
            return where
        out = buffer[: self._layout.size(chunk)]
        if self._own is not None:
            self._codec.encode(self._own(chunk), out)
            return out
        with self._encoders:
            floats = self._floats.take()
            try:
                values = floats[: self._grid.size(chunk)]
                self._source(chunk, values)
                self._codec.encode(values, out)
            finally:
                self._floats.give(floats)
        return out
