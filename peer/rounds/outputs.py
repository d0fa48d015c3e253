"""Let the result of an all-reduce grow where the trainer reads it, without a copy.

Theory
======

The trainer shares memory with its daemon: one half holds what goes into its all-reduce, the other
is for what comes out. Where bytes travel as they are (float32) the reduction receives and adds up
in that second half, and once the round is committed the result lies there already.

From then on the half is the trainer's, which may have the next result written there at once. So
nobody of the round before may still be at it:

- threads that send a final chunk to somebody, or receive one that no longer counts: a commit waits
  for them, SETTLE_S at most, which is what it takes them to notice;
- another peer that copies the whole result: it gets a copy of its own (``AttemptRun.lend``);
- an attempt that broke, whose threads hang in a stream: the retry goes on in other memory.

Where one of these may still be, the result is *moved*: the trainer is handed new memory with the
result, and never uses the old one again.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from atoll.collectives.codecs import F32, U8
from atoll.peer.client.shared_memory import Region

SETTLE_S: Final = 0.2
SETTLE_POLL_S: Final = 0.0005


class TrainerOutputs:
    """Know where the trainer expects the result of its all-reduce.

    ``floats``: float32[elements], or None before there was one. ``moved``: the memory that it is to
    be handed because the result lies there; it is closed by whoever takes it.
    """

    def __init__(self) -> None:
        self.floats: F32 | None = None
        self.moved: Region | None = None

    def expect(self, floats: F32) -> None:
        """Have the next result written here."""
        self.forget_moved()
        self.floats = floats

    def memory(self, nbytes: int) -> U8 | None:
        """Return the memory as uint8[nbytes]; None where that is not its length."""
        floats = self.floats
        return floats.view(np.uint8) if floats is not None and floats.nbytes == nbytes else None

    def is_at(self, array: U8) -> bool:
        """Return whether an encoded result lies there."""
        floats = self.floats
        return floats is not None and floats.ctypes.data == array.ctypes.data

    def move(self) -> None:
        """Have the result written elsewhere. Raises ConfigError if there is no memory for it.

        Takes a while: not for the event loop.
        """
        if self.floats is not None:
            region = Region("result", self.floats.size)
            self.forget_moved()
            self.floats, self.moved = region.floats, region

    def take_moved(self) -> Region | None:
        region, self.moved = self.moved, None
        return region

    def forget_moved(self) -> None:
        """Close the memory that a trainer has not come for, as its call has failed."""
        if (region := self.take_moved()) is not None:
            region.close()
