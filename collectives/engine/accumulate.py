"""Add parts whose turn has come, and finish what is whole: the adding half of the engine.

It has no threads of its own: whoever brings a part calls ``fold`` and does what can be done then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from atoll.collectives.codecs import U8
from atoll.collectives.engine.control import Control, reason_of
from atoll.collectives.engine.parts import PartError, Parts
from atoll.collectives.engine.result import RoundResult
from atoll.collectives.errors import CodecError
from atoll.collectives.schedule.schedule import Schedule


class Accumulator:
    """Add up the parts of each chunk in their turn, and finish the chunks that are whole.

    ``auditor`` is shown parts and results.
    """

    def __init__(
        self,
        me: int,
        schedule: Schedule,
        parts: Parts,
        result: RoundResult,
        control: Control,
        auditor: PartAuditor | None,
    ) -> None:
        self._me, self._schedule, self._parts, self._result = me, schedule, parts, result
        self._control, self._changed = control, control.changed
        self._auditor = auditor
        self.waiting: dict[tuple[int, int], U8] = {}  # (src, chunk): received, not yet added
        self.writing: set[int] = set()  # chunks of the result that are being summed or encoded

    def fold(self, chunk: int) -> None:
        """Add to the sum of a chunk what is here and has its turn; the root finishes it."""
        complete = False
        while not complete:
            with self._changed:
                src = None if self._control.aborted else self._schedule.next_fold(chunk)
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
                    self._control.wake()
            if wrong:
                self._control.fail(src, wrong)
                return
        if self._schedule.is_root(chunk):
            self._release(lambda: self._parts.whole(chunk))

    def _add(self, chunk: int, src: int, buffer: U8 | None) -> None:
        """Add a part that has arrived, or the own one, to the sum of a chunk.

        In a whole of own parts alone the own one takes the same way through the codec.
        """
        if buffer is not None:
            whole = self._schedule.is_own_part(src, chunk)
            if whole and self._auditor is not None:
                self._auditor.keep(src, chunk, buffer[: self._parts.layout.size(chunk)])
            self._parts.add(chunk, src if whole else None, buffer)
        else:
            self._parts.add_own(chunk, src, coded=self._schedule.is_star(chunk))

    def told(self, owner: int, data: U8) -> None:
        """Take in what another owner had to tell: see ``GramExchange``."""
        with self._changed:
            self._schedule.heard(owner)
        self._release(lambda: self._parts.told(owner, data))

    def _release(self, ask: Callable[[], Sequence[int]]) -> None:
        """Finish the chunks that can be encoded now.

        What there is to tell is told in any case, or the others would wait for us and never see
        what is wrong.
        """
        chunks: Sequence[int] = ()
        try:
            chunks = ask()
        except PartError as error:
            self._control.fail(error.participant, error.why)
        except Exception as error:  # by the rule: it must not end a reader, or blame it
            self._control.fail(self._me, f"the rule: {reason_of(error)}")
        if self._parts.to_tell() is not None:
            with self._changed:
                self._schedule.known()
                self._control.wake()
        for chunk in chunks:
            self._complete(chunk)

    def _complete(self, chunk: int) -> None:
        """Encode a sum that is the whole into the result, and finish the chunk."""
        with self._changed:
            if self._control.aborted:
                return
            self.writing.add(chunk)
        try:
            self._parts.encode(chunk, self._result.view(chunk))
            self.finish(chunk)
        except CodecError as error:
            self._control.fail(self._me, f"the mean of chunk {chunk}: {error.what}")
        except PartError as error:
            self._control.fail(error.participant, error.why)
        except Exception as error:  # as above
            self._control.fail(self._me, f"the result of chunk {chunk}: {reason_of(error)}")
        finally:
            with self._changed:
                self.writing.discard(chunk)

    def finish(self, chunk: int, kept: U8 | None = None) -> None:
        """Make a chunk final that is right, and lies in the result or elsewhere (``kept``)."""
        data = self._result.view(chunk) if kept is None else kept
        digest = self._result.digest(data)
        with self._changed:
            # A kept one may come from two holders.
            if self._control.aborted or self._result.digests[chunk]:
                return
            if kept is not None:  # under the lock: nothing else says that somebody writes
                self._result.view(chunk)[:] = kept
            self._result.finish(chunk, digest)
            self._schedule.final(chunk)
            digests = list(self._result.digests) if self._schedule.done else []
            self._control.wake()
        if self._auditor is not None:
            self._auditor.came(chunk, self._result.view(chunk))
        if digests:
            self._control.on_done(digests)


class PartAuditor(Protocol):
    """See what is added up and what comes of it, to verify it afterwards. Called by any thread."""

    def keep(self, sender: int, chunk: int, part: U8, /) -> None:
        """Look at a part as ``sender`` has encoded it, and copy it if it is needed later."""

    def came(self, chunk: int, result: U8, /) -> None:
        """Look at a final chunk of the result, where it lies."""
