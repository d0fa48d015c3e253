"""Decide who counts in a round, with what weight, and whether they are enough to begin it.

Theory. A robust rule that has to bear f liars needs a number of participants. A round of fewer
would be refused by each of them, and be tried again and again; so the coordinator *holds* it,
says so, and begins it when enough have arrived. In a run with probation (probation.py) newcomers
weigh nothing and all others alike, whatever their trainers say; a round in which nobody counts is
held as well: to let newcomers count because the others are late would be an invitation. An audited
round has so many participants at most; where more have arrived, they take turns.

``min_trainers`` is the same for trainers: fewer than that begin no round, nor go on with one after
a death, also in a fork. The view's rules have the number, or else the run's specification. A
trainer that has come with another call than the others counts as there: it is told what they call,
and they go on, or who is in the middle of several calls could never be joined. In an asynchronous
run all trainers that are attached count, because a round is of whoever has submitted. The first
parameters of a run need one trainer only: the others begin with them.

Every member checks that: it takes no part in a round whose BEGIN breaks the rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from atoll.collectives.audit.sketch import AUDITED_PEERS_MAX
from atoll.peer.membership.events import Effect, Note
from atoll.peer.membership.flaky_peers import FlakyPeers
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.messages import Begin
from atoll.peer.membership.probation import NO_TERMS, Terms
from atoll.peer.membership.roster import Roster
from atoll.peer.membership.round_kind import choose
from atoll.peer.membership.view import View, short
from atoll.peer.rounds.entries import INIT, STEP, fragment_of

# Of an audited round of which there are too many: newcomers serve, but take nobody's place for it.
NEW_SEATS = AUDITED_PEERS_MAX // 4
NAMES_MAX = 8  # in a line about who is there


def trainers_needed(view: View, terms: Terms) -> int:
    """Return how many trainers a round of this view needs."""
    count = view.rules.min_trainers or terms.min_trainers
    return min(count, AUDITED_PEERS_MAX) if terms.audited else count


class Eligibility:
    """Weigh the participants of a round, and hold rounds of too few.

    It is a part of the coordinator, and reads its follower and its roster.
    """

    def __init__(
        self, view: View, own: MemberState, roster: Roster, emit: Callable[[Effect], None]
    ) -> None:
        self._view = view
        self._newcomers = {newcomer.peer for newcomer in view.newcomers}
        self._own = own
        self._roster = roster
        self._emit = emit
        self.flaky_peers = FlakyPeers(emit)
        self.held = ""  # why the next round is not begun, for people who ask
        self._noted = ""

    @property
    def terms(self) -> Terms:
        return self._own.terms or NO_TERMS

    def learn(self) -> None:
        """Take the terms of the run from most of those that have them.

        A witness has no specification, and a replica none before its first state.
        """
        own = self._own
        if own.is_replica and own.terms is not None:
            return
        said = Counter(
            beat.terms for beat in self._roster.heartbeats.values() if beat.terms is not None
        )
        if said:
            own.terms = max(said, key=lambda terms: (said[terms], terms.probation, terms.least))

    # ------------------------------------------------------------ the next round

    def weights(
        self, chosen: Sequence[bytes], kind: str, fragment: int, before: Begin | None
    ) -> tuple[float, ...]:
        """Return the weights of an attempt of ``chosen``, in their order.

        ``before`` is the attempt that it follows, if there was any.
        """
        if kind != STEP:
            return (1.0,) * len(chosen)
        if self.terms.probation:
            return tuple(0.0 if peer in self._newcomers else 1.0 for peer in chosen)
        if before is not None:
            known = dict(zip(before.participants, before.weights, strict=True))
            weights = tuple(known[peer] for peer in chosen)
        else:
            weights = tuple(self._roster.weight(peer, fragment) for peer in chosen)
        return weights if any(weights) else (1.0,) * len(chosen)  # nobody counted anything

    def may_begin(
        self, present: set[bytes], number: int, arrived: Collection[bytes], fragment: int
    ) -> bool:
        """Return whether round ``number`` can be begun with those who have arrived.

        If not, it is held, and the log says so once for each number of peers.
        """
        kind, chosen = choose(arrived, self._roster)
        if not self.terms.asynchronous and not self.has_trainers(number, arrived, present):
            return False
        return self.is_enough(number, kind, self.weights(chosen, kind, fragment, None))

    def may_go_on(
        self, number: int, kind: str, chosen: Sequence[bytes], begin: Begin, alive: set[bytes]
    ) -> bool:
        """Return whether ``chosen`` are enough for another attempt after ``begin``."""
        here = {*chosen} | ({*begin.aside} & alive)
        if self.terms.asynchronous:
            here = self._roster.trainers(alive)
        if kind != INIT and not self.has_trainers(number, here, alive):
            return False
        return self.is_enough(number, kind, self.weights(chosen, kind, begin.fragment, begin))

    def are_attached(self, number: int, present: set[bytes]) -> bool:
        """Return whether round ``number`` can come about with the trainers that there are.

        So many are attached, or some members have not said yet whether they have one.
        """
        if self._roster.unheard(present):
            return True
        return self.has_trainers(number, self._roster.trainers(present), present)

    def has_trainers(self, number: int, here: Collection[bytes], present: set[bytes]) -> bool:
        """Return whether those who are ``here`` are as many as the round needs.

        If not, it is held, and people are told who of those who are ``present`` has a trainer.
        """
        count = trainers_needed(self._view, self.terms)
        if len(here) >= count or count == 1:  # without any there is nothing to begin
            return True
        attached = self._roster.trainers(present)
        names, few = _names(attached), count - len(attached)
        lower = f"lower it: atoll min-trainers {max(1, len(here))}"
        if few > 0:
            more = f"{few} more trainer{'s' if few > 1 else ''}"
            start = "start another (python train.py)"
            text = f"{more}: min_trainers is {count}, attached: {names}; {start}"
            self._hold(f"round {number} waits for {text} or {lower}", said=bool(attached))
        else:
            late = _names(attached - {*here})
            self._hold(
                f"round {number} waits for the trainer of {late}, which is attached: min_trainers"
                f" is {count}; or {lower}"
            )
        return False

    def is_enough(self, number: int, kind: str, weights: Sequence[float]) -> bool:
        """Return whether enough participants count in an attempt with these weights.

        If not, it is held.
        """
        terms, counted = self.terms, self._counted(weights)
        if kind != STEP or counted >= terms.least:
            return True
        new = len(weights) - counted if terms.probation else 0
        tail = f" ({new} on probation)" if new else ""
        count = f"{terms.least} peers that count" if terms.least > 1 else "a peer that counts"
        here = f"{counted or 'none'} {'are' if counted > 1 else 'is'} here"
        self._hold(f"round {number} is held: {terms.rule or 'it'} needs {count}, {here}{tail}")
        return False

    def _hold(self, why: str, *, said: bool = True) -> None:
        """Say why the next round is not begun; in the log, too, once.

        ``said`` is false where nobody trains yet: then the log has no line.
        """
        self.held = why
        if said and why != self._noted:
            self._noted = why
            self._emit(Note("held", why))

    def seats(
        self, number: int, kind: str, chosen: tuple[bytes, ...], now_s: float
    ) -> tuple[bytes, ...]:
        """Return those of ``chosen`` who take part in round ``number``."""
        staying = self.flaky_peers.without(chosen, now_s) if kind == STEP else chosen
        fragment = fragment_of(number, self._own.fragments)
        counted = self._counted(self.weights(staying, kind, fragment, None))
        enough = self.terms.asynchronous or len(staying) >= trainers_needed(self._view, self.terms)
        if counted >= self.terms.least and enough:
            chosen = staying
        if kind != STEP or not self.terms.audited or len(chosen) <= AUDITED_PEERS_MAX:
            return chosen
        new = [peer for peer in chosen if peer in self._newcomers]
        old = [peer for peer in chosen if peer not in self._newcomers]
        spare = min(NEW_SEATS, AUDITED_PEERS_MAX - self.terms.least)
        for_new = min(len(new), max(spare, AUDITED_PEERS_MAX - len(old)))
        turn = number // self._own.fragments  # so that all serve for each fragment
        of_old = _in_turn(old, AUDITED_PEERS_MAX - for_new, turn)
        return (*of_old, *_in_turn(new, for_new, turn))

    def _counted(self, weights: Sequence[float]) -> int:
        return sum(weight > 0 for weight in weights)

    def owners(self, chosen: Sequence[bytes], kind: str) -> tuple[bool, ...]:
        """Return for each of ``chosen`` whether it may own a part of the result.

        An owner could send what it likes.
        """
        return tuple(kind != STEP or peer not in self._newcomers for peer in chosen)


def _in_turn(peers: list[bytes], count: int, turn: int) -> list[bytes]:
    """Return so many of these peers, other ones in each turn."""
    first = turn * count % len(peers) if peers else 0
    ranked = sorted(peers)
    return (ranked[first:] + ranked[:first])[:count]


def _names(peers: Collection[bytes]) -> str:
    shown = [short(peer) for peer in sorted(peers)]
    more = f" and {len(shown) - NAMES_MAX} more" if len(shown) > NAMES_MAX else ""
    return ", ".join(shown[:NAMES_MAX]) + more or "nobody"


def too_few_trainers(begin: Begin, view: View, terms: Terms | None) -> str:
    """Return why a member takes no part in a round of so few trainers; "" if it does.

    Of an asynchronous run only the coordinator knows who is there.
    """
    if begin.kind == INIT or terms is None or terms.asynchronous:
        return ""
    here = len({*begin.participants, *begin.aside} & {*view.peers})
    count = trainers_needed(view, terms)
    return f"it has {here} trainers, and min_trainers is {count}" if here < count else ""


def wrong_weights(begin: Begin, view: View, terms: Terms | None) -> str:
    """Return why a member does not take part in a round that is begun like this; "" if it does."""
    if begin.kind != STEP or terms is None or not terms.probation:
        return ""
    new = {newcomer.peer for newcomer in view.newcomers}
    for origin in begin.origins:
        for peer, weight in zip(origin.participants, origin.weights, strict=True):
            if view.member(peer) is None:
                return f"{short(peer)} is to take part and is no member"
            if weight != (0.0 if peer in new else 1.0):
                standing = "is on probation" if peer in new else "counts like all others"
                return f"{short(peer)} is to weigh {weight:g} and {standing}"
    layout = begin.layout
    if new.intersection(begin.participants) and (
        layout is None or layout.lets_own(new, begin.participants)
    ):
        return "newcomers are to own a part of the result"
    return ""
