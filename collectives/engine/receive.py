"""Decide where the bytes of arriving frames go, and what becomes of those that do not come.

A frame carries a whole chunk, or, where several streams from a source share its chunks, a *piece*
of PIECE_BYTES. A whole result is received where it belongs, unless another stream may bring it too:
then aside, because bytes that are final must not be written again by a stream that was slow. Parts
and pieces are always received aside; a piece is copied to its place when it is complete. What comes
a second time is dropped then.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

import numpy as np

from atoll.collectives.chunks import EncodedLayout
from atoll.collectives.codecs import U8, Decoder
from atoll.collectives.engine.buffers import BufferPool
from atoll.collectives.engine.result import RoundResult
from atoll.collectives.errors import LocalProtocolError, RemoteProtocolError, RoundTimeoutError
from atoll.collectives.schedule.plan import ReducePlan
from atoll.collectives.schedule.schedule import Frame, FrameKind, refused

# A stream that loses packets carries some 0.5 MB/s: a piece is late by less than 0.1 s at the end
# of a round, and its header costs a thousandth.
PIECE_BYTES: Final = 32 << 10


class ReceivedChunk(NamedTuple):
    data: U8  # may be longer than the frame
    in_place: bool


class _Place(NamedTuple):
    arrived: ReceivedChunk
    piece_bytes: int  # 0: it is a whole chunk


class _Pieces:
    """Hold where the pieces of one chunk from one source belong, and which are lacking."""

    def __init__(self, whole: ReceivedChunk, size: int) -> None:
        self.whole = whole
        self.lacking = set(range(0, size, PIECE_BYTES))


class ReceiveBuffers:
    """Give arriving frames their place in memory, and put the pieces of chunks together.

    ``parts`` is the layout of parts, of which ``buffers`` hold a chunk each; ``told_bytes``: see
    Parts. Calls never overlap: the engine holds its lock.
    """

    def __init__(
        self,
        result: RoundResult,
        parts: EncodedLayout,
        buffers: BufferPool[np.uint8],
        told_bytes: int = 0,
    ) -> None:
        self._result, self._parts, self._buffers = result, parts, buffers
        self._told_bytes = told_bytes
        self._told_buffers = BufferPool(told_bytes, np.uint8)
        self._result_buffers = BufferPool(result.layout.chunk_bytes, np.uint8)
        self._piece_buffers = BufferPool(PIECE_BYTES, np.uint8)
        self._places: dict[Frame, _Place] = {}
        self._pieces: dict[tuple[int, int, int], _Pieces] = {}  # (src, kind, chunk)

    @property
    def writes_result(self) -> bool:
        """Return whether somebody receives into the result."""
        return any(place.arrived.in_place for place in self._places.values())

    @property
    def allocated_bytes(self) -> int:
        return self._piece_buffers.allocated_bytes + self._result_buffers.allocated_bytes

    def __contains__(self, frame: Frame) -> bool:
        return frame in self._places

    def size(self, frame: Frame) -> int:
        """Return the bytes of a frame's whole chunk, or of what owners tell each other."""
        if frame.kind == FrameKind.GRAM:
            return self._told_bytes
        layout = self._result.layout if frame.kind == FrameKind.RESULT else self._parts
        return layout.size(frame.chunk)

    def length(self, frame: Frame) -> int:
        """Return the bytes of a frame that is arriving; 0 if it is not."""
        place = self._places.get(frame)
        return place.piece_bytes or self.size(frame) if place is not None else 0

    def fits(self, frame: Frame, length: int) -> bool:
        """Return whether a frame of this length is a whole chunk, or a piece of one."""
        size = self.size(frame)
        if length == size and not frame.offset:
            return True
        whole_pieces = not frame.offset % PIECE_BYTES
        return whole_pieces and 0 < length == min(PIECE_BYTES, size - frame.offset)

    def place(self, frame: Frame, length: int) -> U8:
        """Reserve the place of a frame, and return where to receive it."""
        if length < self.size(frame):
            place = _Place(ReceivedChunk(self._piece_buffers.take(), False), length)
        elif frame.kind == FrameKind.RESULT and not frame.stripe:
            place = _Place(ReceivedChunk(self._result.view(frame.chunk), True), 0)
        else:
            place = _Place(ReceivedChunk(self._pool(frame).take(), False), 0)
        self._places[frame] = place
        return place.arrived.data

    def filled(self, frame: Frame, *, wanted: bool) -> ReceivedChunk | None:
        """Take in a frame that is complete; return the chunk, if that is whole and ``wanted`` now.

        What is returned is to be given back; else None. Raises LocalProtocolError for a frame that
        has no place.
        """
        place = self._places.pop(frame, None)
        if place is None:
            raise LocalProtocolError(
                f"frame {frame.src}/{frame.kind}/{frame.chunk} was not reserved"
            )
        whole = place.arrived if wanted else None
        if wanted and place.piece_bytes:
            whole = self._add_piece(frame, place.arrived.data[: place.piece_bytes])
        if whole is not place.arrived:
            self._give_back(frame, place)
        if whole is not None or not wanted:
            self._forget_pieces(frame, whole)
        return whole

    def _add_piece(self, frame: Frame, data: U8) -> ReceivedChunk | None:
        key = (frame.src, frame.kind, frame.chunk)
        pieces = self._pieces.get(key)
        if pieces is None:
            in_place = frame.kind == FrameKind.RESULT
            target = self._result.view(frame.chunk) if in_place else self._pool(frame).take()
            pieces = _Pieces(ReceivedChunk(target, in_place), self.size(frame))
            self._pieces[key] = pieces
        if frame.offset in pieces.lacking:
            pieces.whole.data[frame.offset : frame.offset + len(data)] = data
            pieces.lacking.discard(frame.offset)
        return None if pieces.lacking else pieces.whole

    def _forget_pieces(self, frame: Frame, whole: ReceivedChunk | None) -> None:
        """Forget what has arrived beside ``whole`` of a chunk that is here: it is not needed."""
        pieces = self._pieces.pop((frame.src, frame.kind, frame.chunk), None)
        if pieces is not None and pieces.whole is not whole:
            self.give_back(frame, pieces.whole)

    def ended(self, frame: Frame) -> None:
        """Forget a frame of which the rest will not come."""
        place = self._places.pop(frame, None)
        if place is not None:
            self._give_back(frame, place)

    def give_back(self, frame: Frame, arrived: ReceivedChunk) -> None:
        """Take back what ``filled`` has returned, which is not needed any more."""
        if not arrived.in_place:
            self._pool(frame).give(arrived.data)

    def _give_back(self, frame: Frame, place: _Place) -> None:
        if place.piece_bytes:
            self._piece_buffers.give(place.arrived.data)
        else:
            self.give_back(frame, place.arrived)

    def _pool(self, frame: Frame) -> BufferPool[np.uint8]:
        if frame.kind == FrameKind.GRAM:
            return self._told_buffers
        return self._result_buffers if frame.kind == FrameKind.RESULT else self._buffers


# ---------------------------------------------------------------- errors


def wrong_length(
    plan: ReducePlan, frame: Frame, length: int, codec: Decoder, expected: int
) -> RemoteProtocolError:
    where = f" at {frame.offset}" if frame.offset else ""
    takes = f"which takes {expected} in {codec.name}"
    return refused(plan.name(frame.src), f"{length} bytes{where} for chunk {frame.chunk}, {takes}")


def twice(plan: ReducePlan, frame: Frame) -> RemoteProtocolError:
    return refused(plan.name(frame.src), f"chunk {frame.chunk} while the same frame arrives")


def held_too_long(
    plan: ReducePlan, src: int, chunk: int, waited_s: float, missing: Collection[int]
) -> RoundTimeoutError:
    """Return the error for a frame that was held for too long.

    ``missing``: the participants that this peer waits for.
    """
    late = ", ".join(plan.name(p) for p in sorted(missing))
    return RoundTimeoutError(
        f"peer {plan.name(src)} has waited {waited_s:.1f} s to send chunk {chunk}, "
        f"because this peer still waits for {late or 'itself'}",
        fix="see `atoll status` for the links to those peers",
        phase="reduce",
        elapsed_s=waited_s,
    )
