"""Account for a state that is being put together: the round of each chunk, and its next need.

A chunk comes from a donor as it is in *its* state, with a proof that leads to that state's digest;
it counts once the digest is agreed among several members. Then it is brought forward entry by
entry, each verified against the chain. Chunks may be of different rounds all the time. Sans-I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from atoll.peer.rounds.entries import EntryHead
from atoll.peer.state_sync.events import SyncStore
from atoll.peer.state_sync.pull import Piece
from atoll.peer.state_sync.verification import RUN_MAX, Heads


@dataclass(slots=True)
class _Chunk:
    at: int = -1  # the round that it is of; -1: it is not here, or not confirmed
    origin: int = -1  # the round of the donor's state that it came from; `at` or before
    digest: bytes = b""  # of that state, where the proof leads; empty: from our own state
    source: bytes = b""  # the donor; empty: ourselves
    confirmed: bool = False  # the digest has been agreed


class Assembly:
    """Keep the account of one attempt at one state, across goals; ``store`` has the bytes."""

    def __init__(self, store: SyncStore, blob_digest: bytes) -> None:
        self.store, self.blob_digest = store, blob_digest
        self._chunks = [_Chunk() for _ in range(store.chunks)]
        self._written: set[int] = set()  # chunks whose bytes here are not our own state's any more

    @property
    def count(self) -> int:
        return len(self._chunks)

    # ------------------------------------------------------------ what a chunk needs

    def next_piece(
        self,
        chunk: int,
        goal: int,
        heads: Heads | None,
        agreed: Mapping[int, bytes],
        reaches_back: Callable[[int], bool],
        asked: Piece | None = None,
    ) -> Piece | None:
        """Return what to get for this chunk now; None if it is there, or has to wait for knowledge.

        While the heads do not reach the goal, it is brought to where they end. What has been
        ``asked`` and still helps is waited for.
        """
        mine = self._chunks[chunk]
        if mine.at < 0:
            return Piece(chunk, 0)
        if (mine.digest and mine.origin not in agreed) or mine.at >= goal:
            return None
        if not reaches_back(mine.at + 1):
            return Piece(chunk, 0)  # the logs have dropped what it would need
        if heads is None or heads.first > mine.at + 1 or heads.last <= mine.at:
            return None
        known = min(goal, heads.last)
        parts = [h for h in heads.between(mine.at, known) if self.store.place(h, chunk)]
        if not parts:
            mine.at = known  # no round of its fragment since
            return None
        if asked is not None and asked.entry == parts[0].round and asked.last <= goal:
            return asked
        # Entries of other participants may be larger or smaller than the last: not by much, mostly.
        if len(parts) * self.store.entry_bytes(parts[-1], chunk) > self.store.state_bytes(chunk):
            return Piece(chunk, 0)
        return Piece(chunk, parts[0].round, parts[:RUN_MAX][-1].round)

    def nbytes(self, piece: Piece, heads: Heads | None) -> int:
        """Return how many bytes a donor may send for a piece."""
        if not piece.entry:
            return self.store.state_bytes(piece.chunk)
        return sum(self.store.entry_bytes(head, piece.chunk) for head in self.run(piece, heads))

    def run(self, piece: Piece, heads: Heads | None) -> list[EntryHead]:
        """Return the entries of which a piece has parts, in order; none if the heads do not say."""
        if heads is None or not heads.first <= piece.entry <= piece.last <= heads.last:
            return []
        entries = heads.between(piece.entry - 1, piece.last)
        return [head for head in entries if self.store.place(head, piece.chunk)]

    def needs_heads_from(self, goal: int) -> int:
        """Return the first entry that some chunk before the goal could need; 0 for none."""
        behind = [chunk.at for chunk in self._chunks if 0 <= chunk.at < goal]
        return min(behind) + 1 if behind else 0

    def origins(self) -> frozenset[int]:
        """Return the rounds whose state digests have to be agreed."""
        return frozenset(c.origin for c in self._chunks if c.at >= 0 and c.digest)

    def is_complete(self, goal: int, agreed: Mapping[int, bytes]) -> bool:
        return all(c.at == goal and (not c.digest or c.origin in agreed) for c in self._chunks)

    def ahead_of(self, goal: int) -> int:
        """Return the newest round of any chunk, if it is beyond the goal; else 0."""
        newest = max(chunk.at for chunk in self._chunks)
        return newest if newest > goal else 0

    def round_of(self, chunk: int) -> int:
        """Return the round that a chunk is of; -1 if it is not here."""
        return self._chunks[chunk].at

    # ------------------------------------------------------------ what has come

    def take_state(self, chunk: int, number: int, digest: bytes, source: bytes) -> None:
        self._chunks[chunk] = _Chunk(number, number, digest, source)
        self._written.add(chunk)

    def take_entry(self, chunk: int, number: int) -> None:
        self._chunks[chunk].at = number
        self._written.add(chunk)

    def seed(self, number: int) -> None:
        """Take what is missing from our own state, which is on the history of the goal.

        ``number``: the round of that state. Chunks whose bytes here were overwritten stay missing.
        """
        for index, chunk in enumerate(self._chunks):
            if chunk.at < 0 and index not in self._written:
                self.store.keep(index, number)
                self._chunks[index] = _Chunk(number, number)

    # ------------------------------------------------------------ what turns out to be wrong

    def go_back(self, goal: int) -> None:
        """Want chunks beyond the goal again: it is before what was wanted."""
        for index, chunk in enumerate(self._chunks):
            if chunk.at > goal:
                self._chunks[index] = _Chunk()

    def distrust_all(self) -> None:
        """Forget all chunks: only what a donor confirms counts from now on."""
        self._chunks = [_Chunk() for _ in self._chunks]

    def expose(self, agreed: Mapping[int, bytes]) -> dict[bytes, int]:
        """Return donors of chunks of another state than the agreed one, each with a round.

        The chunks are wanted again. Where another digest was agreed before, the history has
        changed, and nobody is to blame.
        """
        liars: dict[bytes, int] = {}
        for index, chunk in enumerate(self._chunks):
            digest = agreed.get(chunk.origin)
            if chunk.at < 0 or not chunk.digest or digest is None:
                continue
            if digest == chunk.digest:
                chunk.confirmed = True
                continue
            if chunk.source and not chunk.confirmed:
                liars[chunk.source] = chunk.origin
            self._chunks[index] = _Chunk()
        return liars

    def forget_unsettled(self, agreed: Mapping[int, bytes]) -> None:
        """Want chunks again that are of states about which there was no agreement."""
        for index, chunk in enumerate(self._chunks):
            if chunk.at >= 0 and chunk.digest and chunk.origin not in agreed:
                self._chunks[index] = _Chunk()

    def change_history(self, old: Heads | None, new: Heads) -> int:
        """Keep what is the same in both histories; return how many chunks are wanted again.

        Chunks as they came from a donor stay: the digests of the new history decide on them.
        """
        lost = 0
        for index, chunk in enumerate(self._chunks):
            if chunk.at < 0 or (chunk.digest and chunk.at == chunk.origin):
                continue
            chain = old.chain_after(chunk.at) if old else b""
            if not chain or new.chain_after(chunk.at) != chain:
                self._chunks[index] = _Chunk()
                lost += 1
        return lost
