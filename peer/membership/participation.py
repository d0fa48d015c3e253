"""Decide who takes part in the next round, when it opens, and with what weights.

:class:`Barrier` says when those who are late are waited for no longer, :class:`Eligibility` whether
those who are there are enough and what each weighs, :class:`FlakyPeers` who sits out for a while,
and :func:`opening` what BEGIN says of the call and of those left out. All are parts of the
coordinator. What a member checks of that itself is here too: :func:`too_few_trainers`,
:func:`wrong_weights`, :func:`wrong_kept`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from statistics import median

from atoll.collectives.audit.sketch import AUDITED_PEERS_MAX
from atoll.collectives.units import duration, listed
from atoll.peer.membership.attempt import vertex_cover
from atoll.peer.membership.events import Effect, Note
from atoll.peer.membership.layout import WHY_CHARS_MAX
from atoll.peer.membership.link_graph import shown_apart, shown_relayed
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.messages import NO_TERMS, Begin, Terms
from atoll.peer.membership.operations import Call, agreed, keep_objects, pack_objects
from atoll.peer.membership.roster import Roster
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import View, short
from atoll.peer.membership.witness_owners import CHEAPER_FROM, Owners
from atoll.peer.rounds.entries import GATHER, INIT, OPERATIONS, STEP, fragment_of

# ---------------------------------------------------------------- when

GIVEN_UP_PAUSE_S = 1.0  # the second time that a round is given up; twice as long each time ...
GIVEN_UP_PAUSE_MAX_S = 30.0  # ... up to the time that stragglers get
_PHASES_KEPT = 9  # inner phases whose median sets the stragglers' time


class InnerPhases:
    """Know how long the trainers' phases took lately: each member does, as it may coordinate next.

    A phase lasts from a commit to the first BEGIN after it. Only whole ones count: not one in which
    the view began, nor one after a round that was given up, nor the moment before a collective that
    follows a round.
    """

    def __init__(self) -> None:
        self.lasted_s: list[float] = []
        self._opened_s: float | None = None  # when the one at hand began; None if it is not whole
        self._submitted_s: dict[int, float] = {}  # fragment -> when our trainer has arrived last

    def open(self, now_s: float) -> None:
        """Let one begin, as a round is committed."""
        self._opened_s = now_s

    def interrupt(self) -> None:
        """Discard the one at hand: nobody knows when it began."""
        self._opened_s = None

    def begun(self, begin: Begin, now_s: float) -> None:
        """Note that a round is begun, again or for the first time."""
        if self._opened_s is not None and begin.operation is None:
            self.lasted_s = [*self.lasted_s, now_s - self._opened_s][-_PHASES_KEPT:]
        self._opened_s = None

    def submitted(self, fragment: int, now_s: float) -> None:
        """Note that this peer's trainer has arrived."""
        self._submitted_s[fragment] = now_s

    def submitted_s(self, fragment: int) -> float | None:
        """Return when this peer's trainer has arrived last, if it ever has."""
        return self._submitted_s.get(fragment)


class Barrier:
    """Decide when the next round opens, and with whom.

    Theory. A round opens when all attached trainers have arrived, or when the stragglers' time
    since the first arrival is up: three usual inner phases, but not less than 3 s nor more than
    30 s; and half a usual phase where that is more, since trainers whose phases take minutes vary
    by more than 30 s. A straggler that was not there when its time was up is not waited for again
    until it has arrived once more: a hung trainer costs the others one wait and not one in every
    round.

    A usual phase is the median of the last ones, from view to view, whoever coordinates. A change
    of views does not begin the wait anew: those who have arrived go on waiting since they arrived,
    as far as the coordinator knows; a new one knows it of its own trainer. If a straggler arrives
    after all, it was no hang but a slow trainer or a pause, and the time that it took counts
    instead of all phases before: a trainer that is slower than the others by far is waited for from
    then on, and a pause is forgotten after two rounds. The time is 30 s while no phase is known,
    and for a session's own collectives: who misses one of those gets an error. For these it is two
    usual phases where that is more: who joins with a call that the others make after each round is
    not to be alone in it, and the others not to be late.

    A round that is given up opens again at once, as those it failed with may have died. One that is
    given up again and again opens ever more rarely: of a peer that is alone and whose submissions
    cannot be used, each attempt would fail in a moment, for ever.
    """

    def __init__(
        self,
        own: MemberState,
        roster: Roster,
        timing: Timing,
        emit: Callable[[Effect], None],
        now_s: float,
        phases: InnerPhases,
    ) -> None:
        self._own = own
        self._roster = roster
        self._timing = timing
        self._emit = emit
        self._phases = phases
        self._is_first = True  # the round that opens next, in this view
        self._first_arrival_s: float | None = None
        self._waits_for = 0  # the round of that arrival
        self._opened_s = now_s
        self._given_up = 0  # how often in a row
        self._pauses_until_s = now_s
        self._stragglers: dict[bytes, float] = {}  # and when the phase began that they were late in
        self.left_out: set[bytes] = set()  # who was waited for and is not in the round that opened

    def committed(self, now_s: float) -> None:
        """Start the wait for the next round, as one is committed."""
        self._given_up = 0
        self._open(now_s)

    def given_up(self, now_s: float) -> float:
        """Start the wait for a round that was given up; return how many seconds it takes at least.

        These are none the first time.
        """
        self._phases.interrupt()
        self._given_up += 1
        pause_s = 0.0
        if self._given_up > 1:
            doublings = min(self._given_up - 2, 10)
            pause_s = min(GIVEN_UP_PAUSE_S * 2.0**doublings, GIVEN_UP_PAUSE_MAX_S)
        self._pauses_until_s = now_s + pause_s
        self._open(now_s)
        return pause_s

    def _open(self, now_s: float) -> None:
        self._opened_s = now_s
        self._is_first = False
        self._first_arrival_s = None

    def hold(self) -> None:
        """Discard the inner phase at hand, because too few trainers are attached.

        How long those take that come is no inner phase.
        """
        self._phases.interrupt()
        self._is_first = False
        self._first_arrival_s = None

    def take_over(self, before: Barrier, staying: Collection[bytes]) -> None:
        """Go on with what this coordinator knew in the view before."""
        if before._waits_for == self._own.round + 1:
            self._first_arrival_s = before._first_arrival_s
            self._waits_for = before._waits_for
        self._stragglers = {p: s for p, s in before._stragglers.items() if p in staying}
        self._given_up, self._pauses_until_s = before._given_up, before._pauses_until_s

    def waited_s(self, now_s: float) -> float:
        return now_s - self._opened_s

    def participants(
        self,
        number: int,
        present: set[bytes],
        now_s: float,
        may_begin: Callable[[int, set[bytes], int], bool] = lambda number, arrived, fragment: True,
    ) -> tuple[bytes, ...]:
        """Return who takes part in round ``number``; nobody yet if it has to wait.

        ``may_begin`` says whether it can be of those who have arrived, when no others are waited
        for (:meth:`Eligibility.may_begin`).
        """
        if now_s < self._pauses_until_s:
            return ()
        if self._roster.awaited(present, now_s):
            return ()  # in a new view: who has arrived is in their first heartbeats
        arrived = self._arrived(number, present)
        self._note_returns(arrived, now_s)
        self._stragglers = {p: s for p, s in self._stragglers.items() if p in present - arrived}
        if not arrived:
            return ()
        if self._first_arrival_s is None or self._waits_for != number:
            self._first_arrival_s = self._arrived_s(arrived, number, now_s)
            self._waits_for = number
        late = self._roster.attached(present) - arrived - self._stragglers.keys()
        straggle_s = self._straggle_s(arrived)
        if late and now_s - self._first_arrival_s < straggle_s:
            return ()
        if not may_begin(number, arrived, fragment_of(number, self._own.fragments)):
            return ()
        if late:
            self._stragglers |= dict.fromkeys(late, self._opened_s)
            names = listed([short(peer) for peer in sorted(late)])
            text = f"round {number} begins without {names}: the others have waited"
            self._emit(Note("stragglers", f"{text} {duration(straggle_s)}"))
        self.left_out = late
        self._is_first = False
        self._first_arrival_s = None
        return tuple(arrived)

    def _arrived_s(self, arrived: Collection[bytes], number: int, now_s: float) -> float:
        """Return since when the first of these waits: in a new view since it submitted."""
        fragment = fragment_of(number, self._own.fragments)
        here_s = self._phases.submitted_s(fragment) if self._is_first else None
        return now_s if here_s is None or self._own.me not in arrived else here_s

    def late(self, present: set[bytes]) -> set[bytes]:
        """Return the peers that the next round waits for, for people who ask."""
        return self._roster.attached(present) - self._arrived(self._own.round + 1, present)

    def _arrived(self, number: int, present: set[bytes]) -> set[bytes]:
        own = self._own
        fragment = fragment_of(number, own.fragments)
        return self._roster.arrived(present, fragment, own.round, own.chain)

    def _note_returns(self, arrived: Collection[bytes], now_s: float) -> None:
        """Count what stragglers have taken that have come after all, 30 s of it at most."""
        took_s = max((now_s - s for p, s in self._stragglers.items() if p in arrived), default=0.0)
        took_s = min(took_s, self._timing.straggle_max_s)
        phases = self._phases
        if took_s and phases.lasted_s and took_s > median(phases.lasted_s):
            phases.lasted_s = [took_s]

    def _calls(self, arrived: Collection[bytes]) -> bool:
        return any(self._roster.calls(peer) for peer in arrived)

    def _straggle_s(self, arrived: Collection[bytes]) -> float:
        """Return how long the first of a round waits for the others, in seconds."""
        most_s = self._timing.straggle_max_s
        if not self._phases.lasted_s:
            return most_s
        phase_s = median(self._phases.lasted_s)
        if self._calls(arrived):
            return max(most_s, 2 * phase_s)
        return max(self._timing.straggle_min_s, min(3 * phase_s, most_s), phase_s / 2)


# ---------------------------------------------------------------- with what weights

# Of an audited round of which there are too many: newcomers serve, but take nobody's place for it.
NEWCOMERS_MAX = AUDITED_PEERS_MAX // 4
NAMES_MAX = 8  # in a line about who is there
# What people can do where data have no way.
RELAY_ADVICE = (
    "open a port at one of them, or let a member that both can dial carry their data"
    " (atoll up or join with --relay MBIT, a witness will do)"
)


def trainers_needed(view: View, terms: Terms) -> int:
    """Return how many trainers a round of this view needs."""
    count = view.rules.min_trainers or terms.min_trainers
    return min(count, AUDITED_PEERS_MAX) if terms.audited else count


class Eligibility:
    """Weigh the participants of a round, and hold rounds of too few.

    Theory. A robust rule that has to bear f liars needs a number of participants. A round of fewer
    would be refused by each of them, and be tried again and again; so the coordinator *holds* it,
    says so, and begins it when enough have arrived. In a run with probation (probation.py)
    newcomers weigh nothing and all others alike, whatever their trainers say; a round in which
    nobody counts is held as well: to let newcomers count because the others are late would be an
    invitation. An audited round has so many participants at most; where more have arrived, they
    take turns.

    ``min_trainers`` is the same for trainers: fewer than that begin no round, nor go on with one
    after a death, also in a fork. The view's rules have the number, or else the run's
    specification. A trainer that has come with another call than the others counts as there: it is
    told what they call, and they go on, or who is in the middle of several calls could never be
    joined. In an asynchronous run all trainers that are attached count, because a round is of
    whoever has submitted. The first parameters of a run need one trainer only: the others begin
    with them.

    Every member checks that: it takes no part in a round whose BEGIN breaks the rule.
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
        self.witnesses: tuple[bytes, ...] = ()  # that live
        self.held = ""  # why the next round is not begun, for people who ask
        self.left_out = ""  # who takes no part for want of links, and what to do about it
        self._noted = self._noted_out = ""

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
        if kind not in (INIT, STEP):
            return (1.0,) * len(chosen)
        if self.terms.probation and kind == STEP:
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
        kind, chosen = self.choose(arrived, fragment)
        linked = self.linked(kind, chosen)
        here = {*arrived}.difference({*chosen}.difference(linked))
        if not self.terms.asynchronous and not self.has_trainers(number, here, present):
            return False
        return self.is_enough(number, kind, self.weights(linked, kind, fragment, None))

    def choose(self, arrived: Collection[bytes], fragment: int) -> tuple[str, tuple[bytes, ...]]:
        """Return the kind of the next round, and who of those that have arrived wants just that.

        If most want a step and too few of them count, while somebody who counts has called a
        collective, it is the collective: the two would wait for each other for ever.
        """
        kind, chosen = choose(arrived, self._roster)
        if kind != STEP or self._counted(self.weights(chosen, kind, fragment, None)) >= (
            self.terms.least
        ):
            return kind, chosen
        callers = [peer for peer in arrived if self._roster.calls(peer)]
        return (
            (kind, chosen) if self._newcomers.issuperset(callers) else choose(callers, self._roster)
        )

    def linked(self, kind: str, chosen: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Return those of ``chosen`` who can do such a round together; say once who is left out."""
        staying = self.with_links(kind, chosen)
        out, links = {*chosen}.difference(staying), self._roster.links
        audited = kind == STEP and self.terms.audited
        needs = "links between all in an audited round" if audited else "a peer linked to all"
        refused = self.terms.no_witness_owns if kind == STEP and self.witnesses else ""
        why = f"{shown_apart(links, chosen)}{f'; {refused}' if refused else ''}"
        self.left_out = (
            f"{_names(out)} cannot take part: it takes {needs}, and {why}; {RELAY_ADVICE}"
            if out
            else ""
        )
        if self.left_out and self.left_out != self._noted_out:
            self._emit(Note("links", self.left_out))
        self._noted_out = self.left_out or self._noted_out
        return staying

    def with_links(self, kind: str, chosen: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Return those of ``chosen`` who can do such a round with the links that they have.

        Data of somebody who may own the result have to have a way to all (link_graph.py). In an
        audited round each has to have a link to each as well, be it through a relay: statements and
        opened parts go from anybody to anybody, as control messages.
        """
        links = self._roster.links
        if links.is_complete or kind in (INIT, GATHER):
            return chosen
        if kind == STEP and self.terms.audited:
            lacking = {peer: links.unheard_by(peer, chosen) for peer in chosen}
            out = vertex_cover(lacking, self._roster.me)
            chosen = tuple(peer for peer in chosen if peer not in out)
        able = tuple(compress(chosen, self.owners(chosen, kind)))
        return links.with_owner(chosen, (*able, *self._helpers(kind)), self._roster.me)

    def _helpers(self, kind: str) -> tuple[bytes, ...]:
        """Return the witnesses that may own parts of such a round (witness_owners.py)."""
        if kind == STEP and self.terms.no_witness_owns:
            return ()
        return self.witnesses

    def helper(self, kind: str, chosen: Sequence[bytes], fragment: int) -> Owners | None:
        """Return the witness that owns all parts of a round of ``chosen``; None if nobody has to.

        Nobody has to where a participant has a direct way to all; nor, of fewer than CHEAPER_FROM,
        where one has a way through relays: a relay carries as much, and cannot read it.
        """
        links, may_own = self._roster.links, self.owners(chosen, kind)
        relays_do = len(chosen) < CHEAPER_FROM
        able = [*compress(chosen, may_own)]
        if kind == GATHER or len(chosen) < 2:
            return None
        if any(links.reaches(p, chosen, directly=not relays_do) for p in able):
            return None
        found = [p for p in self._helpers(kind) if links.reaches(p, chosen)]
        if not found:
            return None
        why = shown_apart(links, chosen) if links.apart(chosen) else shown_relayed(links, chosen)
        owner = next((p for p in found if links.reaches(p, chosen, directly=True)), found[0])
        text = f"witness {short(owner)} owns the result, and adds nothing to it: {why}"
        owners = Owners((owner,), (self._roster.life(owner),), why=text[:WHY_CHARS_MAX])
        work = self.terms.work
        if kind != STEP or work is None:
            return owners
        elements = work.elements[fragment] if fragment < len(work.elements) else 0
        return replace(
            owners, elements=elements, chunk_elements=work.chunk_elements, codec=work.codec
        )

    def may_go_on(
        self, number: int, kind: str, chosen: Sequence[bytes], begin: Begin, alive: set[bytes]
    ) -> bool:
        """Return whether ``chosen`` are enough for another attempt after ``begin``."""
        if kind == INIT:
            return begin.counted[0] in chosen
        here = {*chosen} | ({*begin.aside} & alive)
        if self.terms.asynchronous:
            here = self._roster.trainers(alive)
        if not self.has_trainers(number, here, alive):
            return False
        return self.is_enough(number, kind, self.weights(chosen, kind, begin.fragment, begin))

    def are_attached(self, number: int, present: set[bytes]) -> bool:
        """Return whether round ``number`` can come about with the trainers that there are.

        So many are attached, or some members have not said yet whether they have one.
        """
        if trainers_needed(self._view, self.terms) == 1 or self._roster.unheard(present):
            return True
        return self.has_trainers(number, self._roster.trainers(present), present)

    def has_trainers(self, number: int, here: Collection[bytes], present: set[bytes]) -> bool:
        """Return whether those who are ``here`` are as many as the round needs.

        If not, it is held, and people are told who of those who are ``present`` has a trainer.
        """
        count = trainers_needed(self._view, self.terms)
        if count == 1 or len(here) >= count:  # without any there is nothing to begin
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
            why = f"; {self.left_out}" if self.left_out else ""
            self._hold(
                f"round {number} waits for the trainer of {late}, which is attached: min_trainers"
                f" is {count}; or {lower}{why}"
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

    def select_participants(
        self, number: int, kind: str, chosen: tuple[bytes, ...], now_s: float
    ) -> tuple[bytes, ...]:
        """Return those of ``chosen`` who take part in round ``number``."""
        staying = self.flaky_peers.without(chosen, now_s) if kind == STEP else chosen
        staying = self.linked(kind, staying)
        fragment = fragment_of(number, self._own.fragments)
        counted = self._counted(self.weights(staying, kind, fragment, None))
        enough = self.terms.asynchronous or len(staying) >= trainers_needed(self._view, self.terms)
        fine = counted >= self.terms.least and enough
        chosen = staying if fine else self.linked(kind, chosen)
        if kind != STEP or not self.terms.audited or len(chosen) <= AUDITED_PEERS_MAX:
            return chosen
        new = [peer for peer in chosen if peer in self._newcomers]
        old = [peer for peer in chosen if peer not in self._newcomers]
        spare = min(NEWCOMERS_MAX, AUDITED_PEERS_MAX - self.terms.least)
        for_new = min(len(new), max(spare, AUDITED_PEERS_MAX - len(old)))
        turn = number // self._own.fragments  # so that all serve for each fragment
        of_old = _in_turn(old, AUDITED_PEERS_MAX - for_new, turn)
        return (*of_old, *_in_turn(new, for_new, turn))

    def _counted(self, weights: Sequence[float]) -> int:
        return sum(weight > 0 for weight in weights)

    def may_keep(self, kind: str) -> bool:
        """Return whether an attempt may keep chunks that a broken one has finished.

        The result of an operation is of one origin, so it keeps none.
        """
        return kind not in OPERATIONS and not (kind == STEP and self.terms.keeps_nothing)

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


def wrong_kept(begin: Begin, terms: Terms | None) -> str:
    """Return why a member does not believe the chunks that an attempt keeps; "" if it does."""
    if begin.kind != STEP or not begin.kept or terms is None or not terms.keeps_nothing:
        return ""
    under = f"under {terms.rule}" if terms.rule else "of an attempt that was not verified"
    return f"it keeps chunks {under}"


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


def wrong_owners(begin: Begin, view: View, terms: Terms | None) -> str:
    """Return why a member takes no part in a round that these own; "" if it does."""
    for peer in begin.helpers:
        if peer not in view.witnesses:
            return f"{short(peer)} is to own the result, and neither takes part nor is a witness"
    if not begin.helpers or begin.kind != STEP or terms is None:
        return ""
    return terms.no_witness_owns


# ---------------------------------------------------------------- without whom

FAILURES_MAX = 3  # rounds in a row: one or two may be bad luck
PAUSE_MIN_S = 30.0  # some of the time limits that it costs, ...
PAUSE_MAX_S = 600.0  # ... and so long that these cost a few per cent; twice as long each time


@dataclass(slots=True)
class _Record:
    round: int  # the last that it has failed in
    count: int = 0
    pause_s: float = 0.0
    until_s: float = 0.0


class FlakyPeers:
    """Make peers sit out for a while if one round after the other is begun again because of them.

    Theory. Who cannot be reduced with, or says nothing in an audit, is left out of the next
    attempt, and is in the next round again: it may have been slow for a moment. A peer that does it
    in every round costs everybody a time limit each time, and nothing proves that it means to. So
    one that has ended attempts in several rounds, and was in none that was committed meanwhile,
    takes no part for a while, which grows each time. It follows the run all the same. Too few are
    never left: many that have trouble at once have it with the network.

    Only members are remembered, so that it stays small.
    """

    def __init__(self, emit: Callable[[Effect], None]) -> None:
        self._emit = emit
        self._records: dict[bytes, _Record] = {}

    def blame(self, round_number: int, peers: Collection[bytes], now_s: float) -> None:
        """Note that an attempt at this round goes on without these peers, which live."""
        for peer in sorted(peers):  # in an order of its own, not that of a set
            record = self._records.setdefault(peer, _Record(0))
            if record.round == round_number:
                continue
            record.round, record.count = round_number, record.count + 1
            if record.count < FAILURES_MAX:
                continue
            record.pause_s = min(PAUSE_MAX_S, 2 * record.pause_s or PAUSE_MIN_S)
            record.until_s = now_s + record.pause_s
            text = (
                f"{short(peer)} takes no part for {duration(record.pause_s)}: {record.count} rounds"
            )
            self._emit(Note("spoils", f"{text} in a row had to be begun again without it", peer))

    def completed(self, participants: Collection[bytes]) -> None:
        """Forget what these have failed in: a round of theirs was committed."""
        for peer in participants:
            self._records.pop(peer, None)

    def without(self, chosen: tuple[bytes, ...], now_s: float) -> tuple[bytes, ...]:
        """Return those of ``chosen`` that take part; all, if half of them or more would not."""
        out = {peer for peer, record in self._records.items() if now_s < record.until_s}
        staying = tuple(peer for peer in chosen if peer not in out)
        return staying if 2 * len(staying) > len(chosen) else chosen

    def take_over(self, before: FlakyPeers, members: Collection[bytes]) -> None:
        """Take over what the view before knew of these members, as its coordinator."""
        self._records = {p: record for p, record in before._records.items() if p in members}


# ---------------------------------------------------------------- which round


@dataclass(frozen=True, slots=True)
class RoundKind:
    """Hold what BEGIN says beside participants and weights."""

    operation: Call = None
    blob: bytes = b""
    without: tuple[bytes, ...] = ()
    aside: tuple[bytes, ...] = ()


def choose(arrived: Collection[bytes], roster: Roster) -> tuple[str, tuple[bytes, ...]]:
    """Return the kind of the next round, and who of those that have arrived wants just that."""
    calls = {peer: roster.heartbeats[peer].operation for peer in arrived}
    call = agreed(calls, roster.since)
    return call.kind if call else STEP, tuple(peer for peer in arrived if calls[peer] == call)


def opening(
    kind: str,
    chosen: tuple[bytes, ...],
    before: Begin | None,
    roster: Roster,
    left_out: Collection[bytes],
) -> RoundKind:
    """Return what BEGIN says of an attempt beside its participants and weights.

    It is the attempt that follows ``before``, or the first one at a round. ``left_out``: peers
    whose trainers were waited for, or want another round than this.
    """
    if kind == INIT:
        return RoundKind(blob=before.blob if before is not None else b"")
    if before is not None:
        without = {*before.without, *before.participants}.difference(chosen)
        kept = keep_objects(before.blob, before.participants, chosen) if kind == GATHER else b""
        return RoundKind(before.operation, kept, tuple(sorted(without)), before.aside)
    given = [roster.given(peer) for peer in chosen]
    operation = None if kind == STEP else roster.heartbeats[chosen[0]].operation
    beats, others = roster.heartbeats, tuple(sorted(set(left_out).difference(chosen)))
    return RoundKind(
        operation,
        pack_objects(given) if kind == GATHER else b"",
        others,
        tuple(p for p in others if beats[p].arrived and beats[p].operation != operation),
    )
