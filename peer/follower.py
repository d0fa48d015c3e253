"""A member's side of rounds: take part, hold the result, apply it when it is committed.

Theory. Between commits a member is in one of three situations about round k+1: it knows of no
attempt; it is in one (``begin``); it holds that attempt's whole result (``ready``). A newer
attempt replaces an older one, a commit or a new view ends it. A member that learns of a commit
whose result it does not hold is *unsynced*: it neither contributes nor counts as a copy until it
has loaded the state again. A *frozen* member has promised a candidate to answer no more READY in
this view (that is what makes the candidate's report complete), but may still apply a COMMIT.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.peer.events import (
    Abort,
    Apply,
    Effect,
    Fetch,
    LoadState,
    Note,
    Reduce,
    Submitted,
    TellTrainer,
)
from atoll.peer.messages import INIT, Begin, Commit, Learn, Ready, Repair, Report
from atoll.peer.views import View, chain_after, genesis_chain

__all__ = ["Follower", "Held"]


@dataclass(frozen=True, slots=True)
class Held:
    """The result of an attempt, complete on this peer but not committed."""

    begin: Begin
    chain: bytes


class Follower:
    """``round`` and ``chain`` identify the last committed state that this peer holds."""

    def __init__(self, me: bytes, emit: Callable[[Effect], None]) -> None:
        self.me = me
        self._emit = emit
        self.round = 0
        self.chain = b""
        self.digest = b""
        self.digest_round = -1
        self.epoch = 1
        self.unsynced = False
        self.doubtful = False  # our bytes differ from the others' although the chain agrees
        self.attached = False
        self.submission: Submitted | None = None
        self.offer = b""  # what our trainer would initialise a void run with
        self.begin: Begin | None = None
        self.ready: Held | None = None
        self.loading: Learn | None = None
        self._spoilt = False  # our contribution to the attempt at hand cannot be used

    # ------------------------------------------------------------ the trainer

    @property
    def arrived(self) -> bool:
        return self.submission is not None  # every change of the round clears it

    def submitted(self, submission: Submitted) -> None:
        """Keep it for the next BEGIN, or answer at once that this round goes on without it."""
        begin = self.begin
        if submission.epoch != self.epoch:
            self._emit(TellTrainer("reload", self.round, self.epoch))
        elif submission.base_round < self.round:
            self._emit(TellTrainer("missed", self.round, self.epoch))  # it crossed the COMMIT
        elif begin is not None and begin.kind != INIT and not self._spoilt:
            self._emit(TellTrainer("missed", begin.round, self.epoch))
        else:
            self.submission = submission

    def spoilt(self) -> None:
        """Our contribution to the attempt at hand cannot be used: its trainer goes on, and what
        it submits next is kept for the attempt after this one."""
        self._spoilt = True
        if self.submission is not None and self.begin is not None:
            self.submission = None
            self._emit(TellTrainer("missed", self.begin.round, self.epoch))

    def detached(self) -> None:
        self.attached = False
        self.offer = b""
        if not self.contributes:
            self.submission = None

    @property
    def contributes(self) -> bool:
        """Whether an attempt in progress reads our trainer's region."""
        return self.begin is not None and self.me in self.begin.participants

    # ------------------------------------------------------------ attempts

    def on_begin(self, begin: Begin) -> None:
        """Start or restart. The caller has checked that we are in the view and not frozen."""
        if self.unsynced or begin.round != self.round + 1:
            return  # one that missed a commit learns of it from the coordinator's next beat
        if self.begin is not None and begin.attempt <= self.begin.attempt:
            return
        self._drop_attempt()
        self.begin = begin
        if self.me in begin.participants:
            self._emit(Reduce(begin))

    def on_repair(self, repair: Repair) -> None:
        if self._is_current(repair.round, repair.attempt) and self.ready is None:
            assert self.begin is not None
            self._emit(Fetch(self.begin, repair.holder))

    def on_reduced(self, round_number: int, attempt: int, root: bytes) -> Ready | None:
        """We hold the whole result: the READY to send, if the attempt is still the current one."""
        begin = self.begin
        if begin is None or not self._is_current(round_number, attempt) or self.ready is not None:
            return None
        chain = chain_after(self.chain, begin.round, begin.participants, begin.weights, root)
        self.ready = Held(begin, chain)
        return self.ready_message()

    def ready_message(self) -> Ready | None:
        if self.ready is None:
            return None
        begin = self.ready.begin
        return Ready(begin.lineage, begin.view, begin.round, begin.attempt, self.ready.chain)

    def _is_current(self, round_number: int, attempt: int) -> bool:
        begin = self.begin
        return begin is not None and (begin.round, begin.attempt) == (round_number, attempt)

    def _drop_attempt(self) -> None:
        if self.begin is not None:
            self._emit(Abort(self.begin.round, self.begin.attempt))
        self.begin = None
        self.ready = None
        self._spoilt = False

    # ------------------------------------------------------------ commits

    def on_commit(self, commit: Commit) -> None:
        self.committed(commit.round, commit.chain)

    def committed(self, round_number: int, chain: bytes) -> None:
        """The group has committed ``round_number``: apply it if we hold it, else fall behind."""
        if round_number <= self.round or self.unsynced:
            return
        held = self.ready
        if held is not None and (held.begin.round, held.chain) == (round_number, chain):
            self._apply(held)
        else:
            self._fell_behind(f"round {round_number} was committed without this peer's copy")

    def _apply(self, held: Held) -> None:
        self.begin = None
        self.ready = None
        self._spoilt = False
        self._emit(Apply(held.begin, held.chain))
        self.round = held.begin.round
        self.chain = held.chain
        self.offer = b""
        if held.begin.kind == INIT:
            self._emit(TellTrainer("reload", self.round, self.epoch))
        elif self.submission is not None:
            kind = "committed" if self.me in held.begin.participants else "missed"
            self._emit(TellTrainer(kind, self.round, self.epoch))
        self.submission = None

    def _fell_behind(self, why: str) -> None:
        self._drop_attempt()
        self.unsynced = True
        self._emit(Note("unsynced", f"{why}; loading the state from another member"))

    # ------------------------------------------------------------ views and state

    def on_install(self, view: View) -> None:
        """Reset what belonged to the old view and reach the new one's base, if we hold it."""
        held = self.ready
        base = (view.base_round, view.base_chain)
        if held is not None and (held.begin.round, held.chain) == base and not self.unsynced:
            self._apply(held)
        self._drop_attempt()
        if not self.chain and self.round == 0:
            self.chain = genesis_chain(view.lineage)
        if (self.round, self.chain) != base and not self.unsynced:
            self._fell_behind(f"the view builds on round {view.base_round}, which is not held here")

    def on_excluded(self) -> None:
        """Out of the view; the state stays, it may still be the group's when we are back."""
        self._drop_attempt()

    def on_learn(self, learn: Learn, in_view: bool) -> None:
        """Load the state from a donor, unless it is what we hold or already being loaded.

        A member that has caught up meanwhile ignores a late order: it may have said READY since,
        and a READY must not be taken back (theory of peer/election.py).
        """
        overtaken = self.loading is not None and learn.round < self.loading.round
        if in_view and (overtaken or not self.unsynced):
            return
        if (self.round, self.chain) == (learn.round, learn.chain) and not self.doubtful:
            self.unsynced = False
            return
        if learn.round == 0:  # a void run: there is nothing to load
            self.round, self.chain, self.unsynced = 0, learn.chain, False
            return
        same = self.loading is not None and (
            (self.loading.round, self.loading.chain, self.loading.donor)
            == (learn.round, learn.chain, learn.donor)
        )
        if not same:
            self._drop_attempt()
            self.unsynced = True
            self.loading = learn
            self._emit(LoadState(learn))

    def on_loaded(self, round_number: int, chain: bytes, digest: bytes) -> None:
        wanted = self.loading
        if wanted is None or (wanted.round, wanted.chain) != (round_number, chain):
            return  # the outcome of an older order
        self.round, self.chain = round_number, chain
        self.digest, self.digest_round = digest, round_number
        self.unsynced = self.doubtful = False
        self.loading = None
        self.submission = None
        self.epoch += 1
        self._emit(TellTrainer("reload", self.round, self.epoch))

    def resync(self, why: str) -> None:
        """Our state is in doubt: behave as one that fell behind.

        Not while we are READY, which must not be taken back; the next round's digest asks again.
        """
        if self.ready is not None:
            return
        self.doubtful = True
        self._fell_behind(why)

    def report(self) -> Report:
        """What a candidate must know before it may choose the base of the next view."""
        if self.ready is None:
            return Report(self.round, self.chain)
        begin = self.ready.begin
        return Report(self.round, self.chain, begin.round, begin.attempt, self.ready.chain)
