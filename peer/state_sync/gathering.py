"""Get chunks and entries until every chunk is at the goal. Sans-I/O.

The part of the machine in machine.py that works once there is memory: which pieces are needed
(assembly.py), the heads that prove entries (histories.py), and what arrives.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.peer.membership.events import Goal
from atoll.peer.state_sync import events as ln
from atoll.peer.state_sync import messages as ft
from atoll.peer.state_sync.assembly import Assembly
from atoll.peer.state_sync.histories import Histories
from atoll.peer.state_sync.pull import Ask, Drop, Piece
from atoll.peer.state_sync.sources import Supply
from atoll.peer.state_sync.verification import ReceivedPart, entry_holds, state_of

OWN_S = 5.0  # for heads that say whether our own state counts; then chunks are asked for as well
REVIEW_CHUNKS = 1000  # at a time: 10 ms, with the learner's lock held, of a model of any size


class Gathering:
    """Gather the chunks of a state, from one task to the next.

    Lives as long as the machine: what has been received stays.
    """

    def __init__(self, supply: Supply, out: list[ln.Effect]) -> None:
        self.assembly: Assembly | None = None
        self.progress_s = 0.0  # when something useful came last
        self._supply, self._out = supply, out
        self._histories = Histories()
        self._own = ln.Own()
        self._own_counts = False  # our own state may be on the history of the goal
        self._own_until_s = 0.0  # ... and nothing is asked for until then, or until that is known
        self._goal = 0  # its round
        self._went_back = False  # ... which is before that of the goal before
        self._due = 0  # chunks of which what they need has to be looked at again ...
        self._next = 0  # ... beginning with this one
        self._refuted: set[int] = set()  # chunks whose bytes here are not what they should be

    # ------------------------------------------------------------ the task

    def aim(self, goal: Goal) -> bool:
        """Set the goal; return False if it is of another history than what was loaded so far."""
        before, self._goal = self._goal, goal.round
        if goal.round != before:
            self._went_back = goal.round < before
        if self._went_back and self.assembly is not None:
            self.assembly.go_back(goal.round)
        self._look_again()
        return self._histories.aim(goal.round, goal.chain)

    def begin(self, goal: Goal, own: ln.Own, now_s: float) -> None:
        self._own = own
        self._own_counts = 0 < own.round <= goal.round and not goal.suspect
        self._own_until_s = float("inf")
        self.progress_s = now_s
        if self.assembly is not None and not self.assembly.store.is_open:
            self.assembly = None  # a commit has overwritten it

    def prepared(self, store: ln.SyncStore, blob_digest: bytes, now_s: float) -> None:
        self.assembly = Assembly(store, blob_digest)
        self._refuted.clear()
        self._look_again()
        self.progress_s = now_s

    def take_shelved(self, shelved: Sequence[tuple[int, int, bytes]]) -> None:
        """Take chunks of an earlier life that donors may confirm and bring forward."""
        assert self.assembly is not None
        taken = 0
        for chunk, number, digest in shelved:
            is_recent = self._goal - ft.DIGESTS_MAX < number <= self._goal
            if is_recent and self._supply.pull.reaches_back(number + 1):
                self.assembly.take_state(chunk, number, digest, b"")
                taken += 1
        if shelved:
            count = self.assembly.count
            self._out.append(
                ln.Say(f"{taken} of {count} chunks of the state are here from before the restart")
            )

    def release(self) -> None:
        """Stop taking what was asked for."""
        if self.assembly is not None:
            self._want_nothing(self.assembly)
            self.assembly.forget_unsettled(self._supply.attestation.agreed)

    def lost(self, peer: bytes) -> None:
        """Stop waiting for heads of this donor, whose control link has ended."""
        self._histories.forget(peer)

    def learned(self) -> None:
        """Look at all chunks again, because donors have said something new."""
        self._look_again()

    def agreed(self) -> None:
        """Look at all chunks again, because other digests are agreed than before.

        Donors of chunks that are of another state than the agreed one are excluded.
        """
        self._look_again()
        if self.assembly is not None:
            for peer, number in self.assembly.expose(self._supply.attestation.agreed).items():
                self._supply.exclude(peer, f"what it sent is not of the state after round {number}")

    def distrust_all(self) -> None:
        assert self.assembly is not None
        self.assembly.distrust_all()
        self._look_again()

    def review(self, goal: Goal, now_s: float) -> None:
        """Look at some chunks, if anything has been learned that may concern all of them."""
        assembly = self.assembly
        assert assembly is not None
        if self._own_counts:
            self._judge_own(assembly, goal, now_s)
        for _ in range(min(self._due, REVIEW_CHUNKS)):
            self._next = (self._next + 1) % assembly.count
            self._due -= 1
            self._refresh(assembly, goal, self._next, now_s)
        self._ask_heads(assembly, goal, now_s)

    def pull(self, goal: Goal, now_s: float) -> bool:
        """Ask for what is wanted; return True when all of the goal's state is here."""
        assembly, pull = self.assembly, self._supply.pull
        assert assembly is not None
        asks, drops = pull.plan(now_s)
        self._drop(drops)
        for ask in asks:
            self._request(assembly, ask)
        agreed = self._supply.attestation.agreed
        here = not pull.wanted and not self._due and goal.round in agreed
        return here and assembly.is_complete(goal.round, agreed)

    # ------------------------------------------------------------ history

    def _look_again(self) -> None:
        """Look at all chunks again: something has changed that may concern every one."""
        self._due = self.assembly.count if self.assembly is not None else 0

    def _want_nothing(self, assembly: Assembly) -> None:
        for chunk in range(assembly.count):
            self._drop(self._supply.pull.forget(chunk))

    def _judge_own(self, assembly: Assembly, goal: Goal, now_s: float) -> None:
        """Decide whether our own state is on the history of the goal.

        Then it needs entries only.
        """
        if not self._supply.usable():
            return  # links are being renewed
        own, heads = self._own, self._histories.valid
        known = heads.chain_after(own.round) if heads is not None else b""
        if own.round == goal.round:
            known = goal.chain
        if not known and self._supply.pull.reaches_back(own.round + 1):
            if now_s >= self._own_until_s > 0:
                self._own_until_s = 0.0
                self._look_again()
            self._own_until_s = min(self._own_until_s, now_s + OWN_S)
            return  # the heads will tell
        self._own_counts = False
        self._look_again()
        if known == own.chain:
            assembly.seed(own.round)

    def _ask_heads(self, assembly: Assembly, goal: Goal, now_s: float) -> None:
        first = assembly.needs_heads_from(goal.round)
        if self._own_counts and self._own.round < goal.round:
            first = min(first or goal.round, self._own.round + 1)
        while self._histories.mute:
            if self._supply.gave_no_heads(self._histories.mute.pop()):
                self._look_again()
        if first and self._supply.pull.reaches_back(first):
            donors = self._supply.usable()
            question = self._histories.ask(first, goal.round, goal.chain, donors, now_s)
            if question is not None:
                self._out.append(question)

    def take_heads(self, source: bytes, message: ft.HeadsAre, now_s: float) -> None:
        histories, old, changes = self._histories, self._histories.heads, self._histories.changes
        verdict = histories.take(source, message, now_s)
        if verdict:
            self._supply.exclude(source, verdict)
        if histories.changes == changes:
            return
        self.progress_s = now_s
        new = histories.heads
        self._look_again()
        if old is not None and new is not None and new.contradicts(old):
            self._supply.discount_pause()
            lost = 0
            if self.assembly is not None:
                lost = self.assembly.change_history(old, new)
                self._want_nothing(self.assembly)  # entries under way would seem to be wrong
            self._out.append(
                ln.Say(f"the run's history has changed: {lost} chunks are downloaded again")
            )

    # ------------------------------------------------------------ pieces

    def _refresh(self, assembly: Assembly, goal: Goal, chunk: int, now_s: float) -> None:
        """Want what the chunk needs now, and nothing else of it."""
        pull = self._supply.pull
        heads, agreed = self._histories.valid, self._supply.attestation.agreed
        asked = pull.asked(chunk, now_s)
        piece = assembly.next_piece(chunk, goal.round, heads, agreed, pull.reaches_back, asked)
        if piece is None or (self._own_counts and now_s < self._own_until_s):
            self._drop(pull.forget(chunk))
        else:
            self._drop(pull.want(piece, assembly.nbytes(piece, heads)))

    def _hint(self, assembly: Assembly, chunk: int) -> bytes:
        return b"" if chunk in self._refuted else assembly.store.hint(chunk)

    def _request(self, assembly: Assembly, ask: Ask) -> None:
        chunk, entry, last = ask.piece
        have = b"" if entry else self._hint(assembly, chunk)
        self._supply.tell(ask.peer, ft.FetchPiece(ask.ticket, chunk, entry, last, have))

    def _drop(self, drops: list[Drop]) -> None:
        by_peer: dict[bytes, list[int]] = {}
        for peer, ticket in drops:
            by_peer.setdefault(peer, []).append(ticket)
        for peer, tickets in by_peer.items():  # at most ASKED_MAX each
            self._supply.tell(peer, ft.DropPieces(tuple(tickets)))

    def take_piece(self, event: ln.PieceArrived, goal: Goal, now_s: float) -> None:
        """Verify and store what has arrived, if it is still wanted.

        Who sends rubbish is left out from now on.
        """
        piece = self._supply.pull.expects(event.source, event.ticket)
        assembly = self.assembly
        if piece is None or assembly is None or not assembly.store.is_open:
            return
        if self._went_back and max(event.number, piece.last) > goal.round:
            self._supply.pull.refuse(event.source, event.ticket, now_s)  # the donor will go back
            return
        wrong = self._store(assembly, piece, event)
        if wrong:
            self._supply.exclude(event.source, wrong)
            self._look_again()  # what came before the wrong part counts
            return
        self.progress_s = now_s
        self._drop(self._supply.pull.arrived(event.source, event.ticket, now_s))
        self._refresh(assembly, goal, piece.chunk, now_s)

    def _store(self, assembly: Assembly, piece: Piece, event: ln.PieceArrived) -> str:
        """Store a piece; return "", or what is wrong with it."""
        if piece.entry:
            return self._store_run(assembly, piece, event.parts)
        store, chunk = assembly.store, piece.chunk
        if len(event.parts) != 1:
            return f"chunk {chunk} cannot be read"
        [part] = event.parts
        if not part.same and len(part.data) != store.state_bytes(chunk):
            return f"chunk {chunk} has {len(part.data)} bytes"
        leaf = self._hint(assembly, chunk) if part.same else part.sha
        digest = state_of(leaf, chunk, assembly.count, part.proof, assembly.blob_digest)
        agreed = self._supply.attestation.agreed.get(event.number, digest)
        if not leaf or not digest or agreed != digest:
            return f"chunk {chunk} is not of the state after round {event.number}"
        if part.same and store.leaf(chunk) != leaf:
            self._refuted.add(chunk)  # our memory is wrong, not the donor: have it sent
            return ""
        if part.same:
            store.keep(chunk, event.number)
        else:
            store.put(chunk, event.number, part.data, part.sha, digest)
            self._refuted.discard(chunk)
        assembly.take_state(chunk, event.number, digest, event.source)
        return ""

    def _store_run(self, assembly: Assembly, piece: Piece, parts: Sequence[ReceivedPart]) -> str:
        """Replay as many entries as came, the first of them first.

        Return "", or what is wrong with them.
        """
        store, chunk = assembly.store, piece.chunk
        entries = assembly.run(piece, self._histories.valid)
        if not entries:
            return ""  # the run has left this history meanwhile
        if not 0 < len(parts) <= len(entries):
            return f"chunk {chunk} of entry {piece.entry} cannot be read"
        for head, part in zip(entries, parts, strict=False):
            if head.round <= assembly.round_of(chunk):
                continue  # of an earlier answer, whose end was wrong
            place = store.place(head, chunk)
            right = len(part.data) == store.entry_bytes(head, chunk) and not part.same
            if place is None or not right or not entry_holds(head, *place, part):
                return f"chunk {chunk} of entry {head.round} is not what its root says"
            store.replay(chunk, head, part.data)
            assembly.take_entry(chunk, head.round)
        return ""
