"""Put a state together: get chunks and entries until every chunk is at the goal. Sans-I/O.

The part of the machine in machine.py that works once there is memory. A chunk comes from a donor as
it is in *its* state, with a proof that leads to that state's digest; it counts once the digest is
agreed among several members. Then it is brought forward entry by entry, each verified against the
chain, whose heads come from one donor at a time. Chunks may be of different rounds all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.peer.membership.events import Goal
from atoll.peer.rounds.entries import EntryHead
from atoll.peer.state_sync import events as ev
from atoll.peer.state_sync import messages as msg
from atoll.peer.state_sync.sources import Ask, DonorTable, Drop, Piece
from atoll.peer.state_sync.verification import (
    RUN_MAX,
    Heads,
    ReceivedPart,
    entry_holds,
    fold,
    state_of,
)

OWN_S = 5.0  # for heads that say whether our own state counts; then chunks are asked for as well
REVIEW_CHUNKS = 1000  # at a time: 10 ms, with the client's lock held, of a model of any size
# Of questions for heads.
ANSWER_S = 5.0  # then another donor is asked
REST_S = 2.0  # of a donor that has no heads for us, or those of another history
PARTS_MAX = 64  # answers to one of them: 64 MiB of heads at the very most


class StateAssembly:
    """Get the chunks of a state, from one task to the next.

    Lives as long as the machine: what has been received stays.
    """

    def __init__(self, donors: DonorTable, out: list[ev.Effect]) -> None:
        self.table: ChunkTable | None = None
        self.progress_s = 0.0  # when something useful came last
        self._donors, self._out = donors, out
        self._history = ProvenHistory()
        self._own = ev.OwnState()
        self._own_counts = False  # our own state may be on the history of the goal
        self._own_until_s = 0.0  # ... and nothing is asked for until then, or until that is known
        self._goal = 0  # its round
        self._went_back = False  # ... which is before that of the goal before
        self._due = 0  # chunks of which what they need has to be looked at again ...
        self._next = 0  # ... beginning with this one
        self._refuted: set[int] = set()  # chunks whose bytes here are not what they should be

    # ------------------------------------------------------------ the task

    def aim(self, goal: Goal) -> bool:
        """Set the goal; return False if it is of another history than what is here so far."""
        before, self._goal = self._goal, goal.round
        if goal.round != before:
            self._went_back = goal.round < before
        if self._went_back and self.table is not None:
            self.table.go_back(goal.round)
        self.look_again()
        return self._history.aim(goal.round, goal.chain)

    def begin(self, goal: Goal, own: ev.OwnState, now_s: float) -> None:
        self._own = own
        self._own_counts = 0 < own.round <= goal.round and not goal.suspect
        self._own_until_s = float("inf")
        self.progress_s = now_s
        if own.chain:
            self._history.stands_at(own.round, own.chain)
        if self.table is not None and not self.table.store.is_open:
            self.table = None  # a commit has overwritten it

    def prepared(self, store: ev.SyncStore, blob_digest: bytes, now_s: float) -> None:
        self.table = ChunkTable(store, blob_digest)
        self._refuted.clear()
        self.look_again()
        self.progress_s = now_s

    def take_cached(self, cached: Sequence[tuple[int, int, bytes]]) -> None:
        """Take chunks of an earlier life that donors may confirm and bring forward."""
        assert self.table is not None
        taken = 0
        for chunk, number, digest in cached:
            is_recent = self._goal - msg.DIGESTS_MAX < number <= self._goal
            if is_recent and self._donors.pieces.reaches_back(number + 1):
                self.table.take_state(chunk, number, digest, b"")
                taken += 1
        if cached:
            count = self.table.count
            self._out.append(
                ev.LogLine(
                    f"{taken} of {count} chunks of the state are here from before the restart"
                )
            )

    def release(self) -> None:
        """Stop taking what was asked for."""
        if self.table is not None:
            self._want_nothing(self.table)
            self.table.forget_unagreed(self._donors.attestation.agreed)

    def lost(self, peer: bytes) -> None:
        """Stop waiting for heads of this donor, whose control link has ended."""
        self._history.forget(peer)

    def look_again(self) -> None:
        """Look at all chunks again: something has changed that may concern every one."""
        self._due = self.table.count if self.table is not None else 0

    def on_agreed(self) -> None:
        """Look at all chunks again, because other digests are agreed than before.

        Donors of chunks that are of another state than the agreed one are excluded.
        """
        self.look_again()
        if self.table is not None:
            for peer, number in self.table.expose(self._donors.attestation.agreed).items():
                self._donors.exclude(peer, f"what it sent is not of the state after round {number}")

    def distrust_all(self) -> None:
        assert self.table is not None
        self.table.distrust_all()
        self.look_again()

    def review(self, goal: Goal, now_s: float) -> None:
        """Look at some chunks, if anything has come out that may concern all of them."""
        table = self.table
        assert table is not None
        if self._own_counts:
            self._judge_own(table, goal, now_s)
        for _ in range(min(self._due, REVIEW_CHUNKS)):
            self._next = (self._next + 1) % table.count
            self._due -= 1
            self._refresh(table, goal, self._next, now_s)
        self._ask_heads(table, goal, now_s)

    def request_pieces(self, goal: Goal, now_s: float) -> bool:
        """Ask for what is wanted; return True when all of the goal's state is here."""
        table, pieces = self.table, self._donors.pieces
        assert table is not None
        asks, drops = pieces.plan(now_s)
        self._drop(drops)
        for ask in asks:
            self._request(table, ask)
        agreed = self._donors.attestation.agreed
        here = not pieces.wanted and not self._due and goal.round in agreed
        return here and table.is_complete(goal.round, agreed)

    # ------------------------------------------------------------ history

    def _want_nothing(self, table: ChunkTable) -> None:
        for chunk in range(table.count):
            self._drop(self._donors.pieces.forget(chunk))

    def _judge_own(self, table: ChunkTable, goal: Goal, now_s: float) -> None:
        """Decide whether our own state is on the history of the goal.

        Then it needs entries only.
        """
        if not self._donors.usable():
            return  # links are being renewed
        own, heads = self._own, self._history.valid
        known = heads.chain_after(own.round) if heads is not None else b""
        if own.round == goal.round:
            known = goal.chain
        if not known and self._donors.pieces.reaches_back(own.round + 1):
            if now_s >= self._own_until_s > 0:
                self._own_until_s = 0.0
                self.look_again()
            self._own_until_s = min(self._own_until_s, now_s + OWN_S)
            return  # the heads will tell
        self._own_counts = False
        self.look_again()
        if known == own.chain:
            table.seed(own.round)

    def _ask_heads(self, table: ChunkTable, goal: Goal, now_s: float) -> None:
        first = table.needs_heads_from(goal.round)
        if self._own_counts and self._own.round < goal.round:
            first = min(first or goal.round, self._own.round + 1)
        while self._history.mute:
            if self._donors.gave_no_heads(self._history.mute.pop()):
                self.look_again()
        if first and self._donors.pieces.reaches_back(first):
            donors = self._donors.usable()
            question = self._history.ask(first, goal.round, goal.chain, donors, now_s)
            if question is not None:
                self._out.append(question)

    def take_heads(self, source: bytes, message: msg.HeadsAre, now_s: float) -> None:
        history, old, changes = self._history, self._history.heads, self._history.changes
        wrong = history.take(source, message, now_s)
        if wrong:
            self._donors.exclude(source, wrong)
        if history.changes == changes:
            return
        self.progress_s = now_s
        new = history.heads
        self.look_again()
        if old is not None and new is not None and new.contradicts(old):
            self._donors.forget_exclusions()
            lost = 0
            if self.table is not None:
                lost = self.table.change_history(old, new)
                self._want_nothing(self.table)  # entries under way would seem to be wrong
            self._out.append(
                ev.LogLine(f"the run's history has changed: {lost} chunks are downloaded again")
            )

    # ------------------------------------------------------------ pieces

    def _refresh(self, table: ChunkTable, goal: Goal, chunk: int, now_s: float) -> None:
        """Want what the chunk needs now, and nothing else of it."""
        pieces = self._donors.pieces
        heads, agreed = self._history.valid, self._donors.attestation.agreed
        asked = pieces.asked(chunk, now_s)
        piece = table.next_piece(chunk, goal.round, heads, agreed, pieces.reaches_back, asked)
        if piece is None or (self._own_counts and now_s < self._own_until_s):
            self._drop(pieces.forget(chunk))
        else:
            self._drop(pieces.want(piece, table.nbytes(piece, heads)))

    def _hint(self, table: ChunkTable, chunk: int) -> bytes:
        return b"" if chunk in self._refuted else table.store.hint(chunk)

    def _request(self, table: ChunkTable, ask: Ask) -> None:
        chunk, entry, last = ask.piece
        have = b"" if entry else self._hint(table, chunk)
        self._donors.send(ask.peer, msg.FetchPiece(ask.ticket, chunk, entry, last, have))

    def _drop(self, drops: list[Drop]) -> None:
        by_peer: dict[bytes, list[int]] = {}
        for peer, ticket in drops:
            by_peer.setdefault(peer, []).append(ticket)
        for peer, tickets in by_peer.items():  # at most ASKED_MAX each
            self._donors.send(peer, msg.DropPieces(tuple(tickets)))

    def take_piece(self, event: ev.PieceArrived, goal: Goal, now_s: float) -> None:
        """Verify and store what has arrived, if it is still wanted.

        Who sends rubbish is left out from now on.
        """
        piece = self._donors.pieces.expects(event.source, event.ticket)
        table = self.table
        if piece is None or table is None or not table.store.is_open:
            return
        if self._went_back and max(event.number, piece.last) > goal.round:
            self._donors.pieces.refuse(event.source, event.ticket, now_s)  # the donor will go back
            return
        wrong = self._store(table, piece, event)
        if wrong:
            self._donors.exclude(event.source, wrong)
            self.look_again()  # what came before the wrong part counts
            return
        self.progress_s = now_s
        self._drop(self._donors.pieces.arrived(event.source, event.ticket, now_s))
        self._refresh(table, goal, piece.chunk, now_s)

    def _store(self, table: ChunkTable, piece: Piece, event: ev.PieceArrived) -> str:
        """Store a piece; return "", or what is wrong with it."""
        if piece.entry:
            return self._store_run(table, piece, event.parts)
        store, chunk = table.store, piece.chunk
        if len(event.parts) != 1:
            return f"chunk {chunk} cannot be read"
        [part] = event.parts
        if not part.same and len(part.data) != store.state_bytes(chunk):
            return f"chunk {chunk} has {len(part.data)} bytes"
        leaf = self._hint(table, chunk) if part.same else part.data_digest
        digest = state_of(leaf, chunk, table.count, part.proof, table.blob_digest)
        agreed = self._donors.attestation.agreed.get(event.number, digest)
        if not leaf or not digest or agreed != digest:
            return f"chunk {chunk} is not of the state after round {event.number}"
        if part.same and store.leaf(chunk) != leaf:
            self._refuted.add(chunk)  # our memory is wrong, not the donor: have it sent
            return ""
        if part.same:
            store.keep(chunk, event.number)
        else:
            store.put(chunk, event.number, part.data, part.data_digest, digest)
            self._refuted.discard(chunk)
        table.take_state(chunk, event.number, digest, event.source)
        return ""

    def _store_run(self, table: ChunkTable, piece: Piece, parts: Sequence[ReceivedPart]) -> str:
        """Replay as many entries as came, the first of them first.

        Return "", or what is wrong with them.
        """
        store, chunk = table.store, piece.chunk
        entries = table.run(piece, self._history.valid)
        if not entries:
            return ""  # the run has left this history meanwhile
        if not 0 < len(parts) <= len(entries):
            return f"chunk {chunk} of entry {piece.entry} cannot be read"
        for head, part in zip(entries, parts, strict=False):
            if head.round <= table.round_of(chunk):
                continue  # of an earlier answer, whose end was wrong
            place = store.place(head, chunk)
            right = len(part.data) == store.entry_bytes(head, chunk) and not part.same
            if place is None or not right or not entry_holds(head, *place, part):
                return f"chunk {chunk} of entry {head.round} is not what its root says"
            store.replay(chunk, head, part.data)
            table.take_entry(chunk, head.round)
        return ""


# ---------------------------------------------------------------- which chunk is of which round


@dataclass(slots=True)
class _Chunk:
    at: int = -1  # the round that it is of; -1: it is not here, or not confirmed
    origin: int = -1  # the round of the donor's state that it came from; `at` or before
    digest: bytes = b""  # of that state, where the proof leads; empty: from our own state
    source: bytes = b""  # the donor; empty: ourselves
    confirmed: bool = False  # the digest has been agreed


class ChunkTable:
    """Keep the account of one attempt at one state, across goals; ``store`` has the bytes."""

    def __init__(self, store: ev.SyncStore, blob_digest: bytes) -> None:
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

    def forget_unagreed(self, agreed: Mapping[int, bytes]) -> None:
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


# ---------------------------------------------------------------- heads of entries


@dataclass(slots=True)
class _HeadRequest:
    peer: bytes
    first: int
    last: int
    chain: bytes  # after the last, as the goal says
    since_s: float
    before: bytes = b""
    heads: list[EntryHead] = field(default_factory=list)
    parts: int = 0

    @property
    def next(self) -> int:
        return self.first + len(self.heads)


class ProvenHistory:
    """Ask for heads and prove them; ``heads`` is proven: it leads to the chain of a goal."""

    def __init__(self) -> None:
        self.heads: Heads | None = None
        self.changes = 0  # counts what was proven
        self._left = False  # the goal is on another history than `heads`
        self._question: _HeadRequest | None = None
        self._rests_until_s: dict[bytes, float] = {}
        self.mute: list[bytes] = []  # donors that did not answer, or gave nothing; for the owner
        self._more: ev.SendToDonor | None = None

    @property
    def valid(self) -> Heads | None:
        """Return the heads, if they are of the history of the goal."""
        return None if self._left else self.heads

    def head(self, number: int) -> EntryHead | None:
        return self.valid.head(number) if self.valid is not None else None

    def aim(self, number: int, chain: bytes) -> bool:
        """Set the goal; return False if the heads say that it is of another history."""
        known = self.heads.chain_after(number) if self.heads else b""
        self._left = bool(known) and known != chain
        return not self._left

    def stands_at(self, number: int, chain: bytes) -> None:
        """Forget what led to our own state, or an archive's memory would grow with the run."""
        heads = self.heads
        if heads is not None and heads.first <= number and heads.chain_after(number) == chain:
            heads.forget_until(number)

    def ask(
        self,
        first: int,
        last: int,
        chain: bytes,
        donors: Sequence[tuple[bytes, msg.StateIs]],
        now_s: float,
    ) -> ev.SendToDonor | None:
        """Return the next question, if heads from ``first`` to the goal are lacking.

        None if none are, or if they cannot be had now.
        """
        if self._more is not None:
            more, self._more = self._more, None
            return more
        heads, asked = self.valid, self._question
        if heads is not None and heads.first <= first and heads.last >= last:
            return None
        if asked is not None and now_s < asked.since_s + ANSWER_S:
            return None
        if asked is not None:
            self.mute.append(asked.peer)
            self._rest(asked.peer, now_s)
        able = [
            (peer, has)
            for peer, has in donors
            if has.round >= last and self._rests_until_s.get(peer, 0.0) <= now_s
        ]
        if heads is not None and heads.first <= first <= heads.last + 1:
            first = heads.last + 1  # only what is new
        peer = next((peer for peer, has in able if has.log_first <= first), None)
        if peer is None:
            self._question = None
            return None
        self._question = _HeadRequest(peer, first, last, chain, now_s)
        return ev.SendToDonor(peer, msg.AskHeads(first, last))

    def take(self, source: bytes, answer: msg.HeadsAre, now_s: float) -> str:
        """Take heads from a donor; return what is wrong with the donor, or "".

        Heads that are proven are kept.
        """
        asked = self._question
        if asked is None or source != asked.peer or answer.first != asked.next:
            return ""
        if not answer.heads:
            self.mute.append(source)
            self._rest(source, now_s)
            return ""
        if asked.parts == 0:
            asked.before = answer.before
        asked.parts += 1
        asked.since_s = now_s
        asked.heads += answer.heads[: asked.last + 1 - asked.next]
        if asked.next <= asked.last and asked.parts < PARTS_MAX:
            self._more = ev.SendToDonor(source, msg.AskHeads(asked.next, asked.last))
            return ""
        self._question = None
        tip = fold(asked.before, asked.first, asked.heads)
        if not tip:
            return f"its heads of entries {asked.first} to {asked.last} contradict themselves"
        if tip == asked.chain and asked.next > asked.last:
            self._prove(asked)
        else:  # it may not have heard of a rollback yet
            self._rest(source, now_s)
        return ""

    def forget(self, peer: bytes) -> None:
        """Stop waiting for an answer of this donor: the link by which it was asked has ended."""
        if self._question is not None and self._question.peer == peer:
            self._question = self._more = None

    def _prove(self, asked: _HeadRequest) -> None:
        heads = self.valid
        self.changes += 1
        if heads is not None and asked.first == heads.last + 1:
            if asked.before == heads.tip:
                heads.extend(asked.heads)
            else:
                self._left = True  # the run left our history before this; ask for all of it
            return
        self.heads, self._left = Heads(asked.before, asked.first, asked.heads), False

    def _rest(self, peer: bytes, now_s: float) -> None:
        self._question = self._more = None
        self._rests_until_s[peer] = now_s + REST_S
