"""Add parts whose turn has come, and finish what is whole: the adding half of the engine.

It has no threads of its own: whoever brings a part calls ``fold`` and does what can be done then.
``changed`` guards the schedule and all state here, and is the engine's; it is held for look-ups and
copies of a finished chunk, never while a codec, a rule or a callback runs.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from atoll.collectives.codecs import U8
from atoll.collectives.engine.parts import PartError, Parts
from atoll.collectives.engine.result import RoundResult
from atoll.collectives.engine.send import reason_of
from atoll.collectives.errors import CodecError
from atoll.collectives.schedule.schedule import Schedule

UNHASHED = b"-"  # stands for the digest of a chunk that is final and was not hashed


class FoldCalls(NamedTuple):
    """Hold what ``Folding`` calls to ask the engine, and to tell it.

    It is not held on to, or a reduction that is over would keep its buffers until the next
    collection of cycles. ``aborted`` and ``wake`` are called with the lock.
    """

    aborted: Callable[[], bool]
    wake: Callable[[], None]
    failed: Callable[[int, str], None]
    done: Callable[[list[bytes]], None]
    came: Callable[[int, U8], None] | None  # a chunk of the result is final


class Folding:
    """Add up the parts of each chunk in their turn, and finish the chunks that are whole.

    ``hashed``: whether the digests of final chunks are SHA-256 or a mark.
    """

    def __init__(
        self,
        me: int,
        schedule: Schedule,
        parts: Parts,
        result: RoundResult,
        changed: threading.Condition,
        *,
        hashed: bool,
    ) -> None:
        self._me, self._schedule, self._parts, self._result = me, schedule, parts, result
        self._changed, self._hashed = changed, hashed
        self.waiting: dict[tuple[int, int], U8] = {}  # (src, chunk): received, not yet added
        self.writing: set[int] = set()  # chunks of the result that are being summed or encoded

    def fold(self, chunk: int, calls: FoldCalls) -> None:
        """Add to the sum of a chunk what is here and has its turn; the root finishes it."""
        complete = False
        while not complete:
            with self._changed:
                src = None if calls.aborted() else self._schedule.next_fold(chunk)
                if src is None:
                    return
                buffer = self.waiting.pop((src, chunk), None)
                if self._parts.in_place(chunk):
                    self.writing.add(chunk)
            wrong = ""
            try:
                self._add(chunk, src, buffer)
            except Exception as error:  # by codec or source: whatever it was must not end a reader
                wrong = f"its contribution to chunk {chunk}: {reason_of(error)}"
            with self._changed:
                self.writing.discard(chunk)
                complete = not wrong and self._schedule.folded(chunk)
                if complete:
                    calls.wake()
            if wrong:
                calls.failed(src, wrong)
                return
        if self._schedule.is_root(chunk):
            self._release(lambda: self._parts.whole(chunk), calls)

    def _add(self, chunk: int, src: int, buffer: U8 | None) -> None:
        """Add a part that has arrived, or the own one, to the sum of a chunk.

        In a whole of own parts alone the own one takes the same way through the codec.
        """
        if buffer is not None:
            whole = self._schedule.is_own_part(src, chunk)
            if whole:
                self._parts.came(chunk, src, buffer)
            self._parts.add(chunk, src if whole else None, buffer)
        else:
            self._parts.add_own(chunk, src, coded=self._schedule.is_star(chunk))

    def told(self, owner: int, data: U8, calls: FoldCalls) -> None:
        """Take in what another owner had to tell: see ``GramExchange``."""
        with self._changed:
            self._schedule.heard(owner)
        self._release(lambda: self._parts.told(owner, data), calls)

    def _release(self, ask: Callable[[], Sequence[int]], calls: FoldCalls) -> None:
        """Finish the chunks that can be encoded now.

        What there is to tell is told in any case, or the others would wait for us and never see
        what is wrong.
        """
        chunks: Sequence[int] = ()
        try:
            chunks = ask()
        except PartError as error:
            calls.failed(error.participant, error.why)
        except Exception as error:  # by the rule: it must not end a reader, or blame it
            calls.failed(self._me, f"the rule: {reason_of(error)}")
        if self._parts.to_tell() is not None:
            with self._changed:
                self._schedule.known()
                calls.wake()
        for chunk in chunks:
            self._complete(chunk, calls)

    def _complete(self, chunk: int, calls: FoldCalls) -> None:
        """Encode a sum that is the whole into the result, and finish the chunk."""
        with self._changed:
            if calls.aborted():
                return
            self.writing.add(chunk)
        try:
            self._parts.encode(chunk, self._result.view(chunk))
            self.finish(chunk, calls)
        except CodecError as error:
            calls.failed(self._me, f"the mean of chunk {chunk}: {error.what}")
        except PartError as error:
            calls.failed(error.participant, error.why)
        except Exception as error:  # as above
            calls.failed(self._me, f"the result of chunk {chunk}: {reason_of(error)}")
        finally:
            with self._changed:
                self.writing.discard(chunk)

    def finish(self, chunk: int, calls: FoldCalls, kept: U8 | None = None) -> None:
        """Make a chunk final that is right, and lies in the result or elsewhere (``kept``)."""
        data = self._result.view(chunk) if kept is None else kept
        digest = hashlib.sha256(data.data).digest() if self._hashed else UNHASHED
        with self._changed:
            # A kept one may come from two holders.
            if calls.aborted() or self._result.digests[chunk]:
                return
            if kept is not None:  # under the lock: nothing else says that somebody writes
                self._result.view(chunk)[:] = kept
            self._result.digests[chunk] = digest
            self._schedule.final(chunk)
            digests = list(self._result.digests) if self._schedule.done else []
            calls.wake()
        if calls.came is not None:
            calls.came(chunk, self._result.view(chunk))
        if digests:
            calls.done(digests)
