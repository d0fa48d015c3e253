"""Hold encoded parts, and disclose them to all once something is in doubt. Sans-I/O.

Held are all parts of one participant, which it commits to, and those of others in its shard. Both
lie in one piece of memory each: fresh pages, chunk by chunk, cost more than copies.

Whoever lacks a part asks for it piece by piece, its sender first, then the owner of the chunk, then
the others: some of them have it opened already. Nobody is asked for two pieces at a time, so that
heartbeats do not wait behind parts on a slow line, and no link gets more than it can carry. Who is
asked answers once all verdicts are there: nobody can choose its part, its result or its secret by
what it sees any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from atoll.collectives.codecs import F32, U8
from atoll.collectives.errors import LocalProtocolError
from atoll.peer.verify.evidence import Shown
from atoll.peer.verify.statement import PIECE_BYTES, AskPart, DisclosedPiece
from atoll.peer.verify.terms import AuditTerms, ReductionTerms


def encoded_parts(work: ReductionTerms, source: Callable[[int, F32], None]) -> list[U8]:
    """Return the own part of each chunk, encoded, in one piece of memory.

    ``source`` fills float32 with the values of a chunk; what it raises goes on. CodecError for NaN
    and infinity.
    """
    grid, codec = work.grid, work.part_codec
    sizes = [codec.encoded_bytes(grid.size(chunk)) for chunk in range(grid.count)]
    whole, values = np.empty(sum(sizes), np.uint8), np.empty(grid.size(0), np.float32)
    parts, lo = [], 0
    for chunk, nbytes in enumerate(sizes):
        part = whole[lo : lo + nbytes]
        floats = values[: grid.size(chunk)]
        source(chunk, floats)
        codec.encode(floats, part)
        parts.append(part)
        lo += nbytes
    if lo != whole.size:
        raise LocalProtocolError("an encoded vector has another length than its chunks")
    return parts


class HeldParts:
    """Keep copies of all parts of the chunks that participant ``owner`` owns, of all who count."""

    def __init__(self, work: ReductionTerms, owner: int) -> None:
        self._rows = {sender: row for row, sender in enumerate(work.counted)}
        self._places: dict[int, slice] = {}
        end = 0
        for chunk in work.shards.get(owner, ()):
            nbytes = work.part_codec.encoded_bytes(work.grid.size(chunk))
            self._places[chunk] = slice(end, end + nbytes)
            end += nbytes
        self._all = np.empty((len(self._rows), end), np.uint8)

    def copy(self, sender: int, chunk: int, part: U8) -> U8:
        """Copy a part and return the copy. Safe in any thread; once for each part."""
        kept: U8 = self._all[self._rows[sender], self._places[chunk]]
        np.copyto(kept, part)
        return kept


# ---------------------------------------------------------------- parts that are opened

OPENED_MAX: Final = 4096  # pieces that are sent to one participant; an honest one needs fewer
ASKS_MAX: Final = 64  # of one participant that wait for their time; an honest one has one
LENT_MAX: Final = 64  # parts that are kept ready for the next piece: of a chunk, those of all
STALLED_S: Final = 5.0  # without a piece, and somebody else is asked


@dataclass(slots=True)
class _Pull:
    """Track where a part comes from, and what of it is here.

    It comes from the ``turn``-th of those who may have it.
    """

    data: U8
    turn: int = 0
    have: int = 0  # bytes
    asked_s: float | None = None  # a piece is under way

    def restart(self) -> None:
        self.turn, self.have, self.asked_s = self.turn + 1, 0, None


class PartDisclosure:
    """Ask others for opened parts that are lacking here, and answer them.

    ``show`` gives a part that this peer has made or was sent, with its proof; ``promised`` says
    whether a part is what its sender has committed to.
    """

    def __init__(
        self,
        terms: AuditTerms,
        me: int,
        show: Callable[[int, int], Shown | None],
        promised: Callable[[Shown], bool],
    ) -> None:
        self._terms, self._me, self._show, self._promised = terms, me, show, promised
        self.opened: dict[tuple[int, int], Shown] = {}
        self._pulls: dict[tuple[int, int], _Pull] = {}
        self._waiting: dict[bytes, dict[AskPart, None]] = {}  # by who asks
        self._sent: dict[bytes, int] = {}  # pieces to each
        self._ready: dict[tuple[int, int], Shown] = {}

    # ------------------------------------------------------------ what is lacking here

    def want(self, parts: Iterable[tuple[int, int]]) -> None:
        """Begin to get these parts (sender, chunk); what is here already counts as opened."""
        codec, grid = self._terms.work.part_codec, self._terms.work.grid
        for sender, chunk in parts:
            if (shown := self._show(sender, chunk)) is not None:
                self.opened[sender, chunk] = shown
            else:
                data = np.empty(codec.encoded_bytes(grid.size(chunk)), np.uint8)
                self._pulls[sender, chunk] = _Pull(data)

    def asks(self, now_s: float) -> list[tuple[bytes, AskPart]]:
        """Return whom to ask for what now."""
        found = []
        for pull in self._pulls.values():
            if pull.asked_s is not None and now_s - pull.asked_s >= STALLED_S:
                pull.restart()
        asked = {self._source(p, x) for p, x in self._pulls.items() if x.asked_s is not None}
        for place, pull in self._pulls.items():
            source = self._source(place, pull)
            if pull.asked_s is None and source not in asked:
                asked.add(source)
                pull.asked_s = now_s
                found.append((source, AskPart(self._terms.digest, *place, pull.have)))
        return found

    def _source(self, place: tuple[int, int], pull: _Pull) -> bytes:
        sender, chunk = place
        everybody = (sender, self._terms.work.plan.owners[chunk], *range(self._count))
        able = [index for index in dict.fromkeys(everybody) if index != self._me]
        peer: bytes = self._terms.participants[able[pull.turn % len(able)]]
        return peer

    @property
    def _count(self) -> int:
        return len(self._terms.participants)

    def take(self, piece: DisclosedPiece, source: bytes) -> bool:
        """Take a piece; return whether its part is whole now, and what was promised."""
        place = (piece.sender, piece.chunk)
        pull = self._pulls.get(place)
        if pull is None or pull.asked_s is None or self._source(place, pull) != source:
            return False
        end = piece.offset + len(piece.data)
        if piece.offset != pull.have or end != min(pull.have + PIECE_BYTES, pull.data.size):
            return False
        pull.data[piece.offset : end] = np.frombuffer(piece.data, np.uint8)
        pull.have, pull.asked_s = end, None
        if end < pull.data.size:
            return False
        shown = Shown(*place, pull.data.tobytes(), piece.proof)
        if not self._promised(shown):
            pull.restart()
            return False
        del self._pulls[place]
        self.opened[place] = shown
        return True

    # ------------------------------------------------------------ what others lack

    def asked(self, ask: AskPart, source: bytes) -> None:
        waiting = self._waiting.setdefault(source, {})
        if len(waiting) < ASKS_MAX:
            waiting[ask] = None

    def answers(self) -> list[tuple[bytes, DisclosedPiece]]:
        """Return which pieces to send to whom; to be called once parts may be shown."""
        waiting, self._waiting = self._waiting, {}
        found = []
        for source, asks in waiting.items():
            for ask in asks:
                shown, sent = self._lent(ask.sender, ask.chunk), self._sent.get(source, 0)
                data = shown.data[ask.offset : ask.offset + PIECE_BYTES] if shown else b""
                if shown is None or not data or sent >= OPENED_MAX:
                    continue
                self._sent[source] = sent + 1
                place = (self._terms.digest, ask.sender, ask.chunk, ask.offset)
                found.append((source, DisclosedPiece(*place, data, shown.proof)))
        return found

    def _lent(self, sender: int, chunk: int) -> Shown | None:
        place = (sender, chunk)
        shown = self.opened.get(place) or self._ready.get(place) or self._show(sender, chunk)
        if shown is not None and place not in self.opened:
            self._ready[place] = shown
            if len(self._ready) > LENT_MAX:
                del self._ready[next(iter(self._ready))]
        return shown
