"""Get the heads of log entries, from one donor at a time, and prove them. Sans-I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from atoll.peer.rounds.entries import EntryHead
from atoll.peer.state_sync.events import TellDonor
from atoll.peer.state_sync.messages import AskHeads, HeadsAre, StateIs
from atoll.peer.state_sync.verification import Heads, fold

ANSWER_S = 5.0  # then another donor is asked
REST_S = 2.0  # of a donor that has no heads for us, or those of another history
PARTS_MAX = 64  # answers to one question: 64 MiB of heads at the very most


@dataclass(slots=True)
class _HistoryRequest:
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


class Histories:
    """Ask for heads and prove them; ``heads`` is proven: it leads to the chain of a goal."""

    def __init__(self) -> None:
        self.heads: Heads | None = None
        self.changes = 0  # counts what was learned
        self._left = False  # the goal is on another history than `heads`
        self._question: _HistoryRequest | None = None
        self._rests_until_s: dict[bytes, float] = {}
        self.mute: list[bytes] = []  # donors that did not answer, or gave nothing; for the owner
        self._more: TellDonor | None = None

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

    def ask(
        self,
        first: int,
        last: int,
        chain: bytes,
        donors: Sequence[tuple[bytes, StateIs]],
        now_s: float,
    ) -> TellDonor | None:
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
        self._question = _HistoryRequest(peer, first, last, chain, now_s)
        return TellDonor(peer, AskHeads(first, last))

    def take(self, source: bytes, answer: HeadsAre, now_s: float) -> str:
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
            self._more = TellDonor(source, AskHeads(asked.next, asked.last))
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

    def _prove(self, asked: _HistoryRequest) -> None:
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
