"""Validators: who takes local steps of others again, and what follows. Sans-I/O.

Theory (BTARD, Gorbunov et al. 2022, section 3, with the replays of docs/replay.md). With its parts
a trainer commits to its local steps (``Commitment.work``). The common draw of the round, which
nobody can choose, names validators and for each a target, and which segment is to be shown. The
validator takes its steps again and says RIGHT, or WRONG. It may lie, so its word alone bans nobody:
where it says WRONG, everybody does the same, and hands its word on. More than half of the
participants who say WRONG are evidence against the target (*work*), more than half who say RIGHT
against the validator (*slander*). So who is right is never banned as long as most are honest.

Who shows nothing may have lost it: its trainer may have died just then. So WITHHELD is no evidence;
it makes everybody ask. Whoever has shown us nothing ``WITHHELD_MAX`` times in succession is WRONG.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from atoll.collectives.errors import RemoteProtocolError
from atoll.peer.audit.effects import Convicted, Tell
from atoll.peer.audit.evidence import Evidence
from atoll.peer.audit.statements import (
    WHY_MAX,
    Judgement,
    Phase,
    Replayed,
    Said,
    body_of,
    said,
)
from atoll.peer.audit.terms import AuditTerms
from atoll.peer.group.signing import Signer

__all__ = ["VALIDATED_MAX", "WITHHELD_MAX", "Task", "Validations", "draw"]

# Attempts that are remembered: whoever has to take steps again does it within a few rounds, and the
# parameters before each round that is remembered are kept.
VALIDATED_MAX: Final = 4
WITHHELD_MAX: Final = 3  # trainers that die in the seconds after a round do so once
WORDS_MAX: Final = 256  # of attempts that are not over here yet


@dataclass(frozen=True, slots=True)
class Drawn:
    """``validator`` takes a segment of ``target`` again: the one whose number is ``number`` modulo
    their count."""

    validator: bytes
    target: bytes
    number: int


@dataclass(frozen=True, slots=True)
class Task:
    """For the own trainer. ``target``: the peer whose steps it is about, which is this one if they
    are to be shown. ``work``: what it has committed to, ``before``: in the round before, or b""."""

    terms: AuditTerms
    target: bytes
    number: int
    work: bytes
    before: bytes


@dataclass(slots=True)
class _Case:
    """All that is said of one target's steps in one attempt."""

    task: Task
    validator: bytes
    words: dict[bytes, Said] = field(default_factory=dict)  # the first of each
    open: bool = False  # given to the own trainer, which has not judged yet
    done: bool = False  # judged here
    over: bool = False  # somebody was found guilty, or the validator has found nothing wrong

    def saying(self, judgement: Judgement) -> dict[bytes, Said]:
        return {s: w for s, w in self.words.items() if _body(w).judgement == judgement}


def draw(terms: AuditTerms, seed: bytes) -> list[Drawn]:
    """Validators and targets of an attempt, all of them different; fewer where few take part. Who
    does not count has no part that could be wrong."""
    ranked = sorted(terms.participants, key=lambda peer: _hash(seed, b"rank", peer))
    counts = dict(zip(terms.participants, terms.counted, strict=True))
    pairs = min(terms.validators, len(ranked) // 2)
    targets = [peer for peer in ranked if counts[peer]][:pairs]
    validators = [peer for peer in ranked if peer not in targets]
    return [
        Drawn(validator, target, int.from_bytes(_hash(seed, b"segment", target)[:8], "big"))
        for validator, target in zip(validators, targets, strict=False)
    ]


class Validations:
    """Of one participant. What comes out is taken with ``take``; what its trainer has to do, with
    ``tasks``."""

    def __init__(self, me: bytes, signer: Signer) -> None:
        self._me, self._signer = me, signer
        self._attempts: dict[bytes, dict[bytes, _Case]] = {}  # by terms and target, oldest first
        # Of the last round here: its number, and what each that counted has committed to.
        self._last: tuple[int, dict[bytes, bytes]] = (0, {})
        self._withheld: dict[bytes, int] = {}  # how often in succession, from us
        self._early: list[Said] = []
        self._effects: list[Tell | Convicted] = []

    def take(self) -> list[Tell | Convicted]:
        effects, self._effects = self._effects, []
        return effects

    @property
    def pending(self) -> set[bytes]:
        """The attempts of which something may still have to be judged."""
        return {t for t, cases in self._attempts.items() if any(not c.over for c in cases.values())}

    def banned(self, peers: Collection[bytes]) -> None:
        for cases in self._attempts.values():
            for case in cases.values():
                if not {case.task.target, case.validator}.isdisjoint(peers):
                    case.open, case.over = False, True

    # ------------------------------------------------------------ what happens

    def committed(self, terms: AuditTerms, seed: bytes, works: Mapping[bytes, bytes]) -> None:
        """An attempt's result is in the run. ``works``: what each that counts has committed to."""
        cases, (number, last) = {}, self._last
        for each in draw(terms, seed):
            before = last.get(each.target, b"") if number == terms.round - 1 else b""
            task = Task(terms, each.target, each.number, works[each.target], before)
            cases[each.target] = _Case(task, each.validator)
            cases[each.target].open = self._me in (each.validator, each.target)
        self._attempts[terms.digest] = cases
        self._last = (terms.round, dict(works))
        while len(self._attempts) > VALIDATED_MAX:
            del self._attempts[next(iter(self._attempts))]
        early, self._early = self._early, []
        for word in early:
            self.hear(word)

    def tasks(self) -> list[Task]:
        return [c.task for cases in self._attempts.values() for c in cases.values() if c.open]

    def shown(self, terms: bytes) -> None:
        """The own steps, by the own trainer."""
        if (case := self._case(terms, self._me)) is not None:
            case.open = False

    def judged(self, terms: bytes, target: bytes, judgement: Judgement | None, why: str) -> None:
        """By the own trainer; None: rounding may have led there as well."""
        case = self._case(terms, target)
        if case is None or case.done or target == self._me:
            return
        case.open, case.done = False, True
        if judgement is Judgement.WITHHELD:
            times = self._withheld[target] = self._withheld.get(target, 0) + 1
            if times >= WITHHELD_MAX:
                judgement, why = Judgement.WRONG, f"has shown nothing {times} times: {why}"
        else:
            self._withheld.pop(target, None)
        if judgement is not None:
            self._say(case, judgement, why)

    def hear(self, word: Said) -> None:
        """From its signer or anybody else."""
        terms = word.statement.terms
        if word.phase is not Phase.REPLAYED or not word.genuine(self._signer):
            return
        if terms not in self._attempts:
            self._early = [*self._early[-WORDS_MAX + 1 :], word]
            return
        try:
            case = self._case(terms, _body(word).peer)
        except RemoteProtocolError:  # what it says is nothing
            return
        if case is None or word.signer not in case.task.terms.participants:
            return
        if word.signer not in case.words:
            case.words[word.signer] = word
            self._consider(case)

    # ------------------------------------------------------------ inside

    def _case(self, terms: bytes, target: bytes) -> _Case | None:
        return self._attempts.get(terms, {}).get(target)

    def _say(self, case: _Case, judgement: Judgement, why: str) -> None:
        terms, body = case.task.terms, Replayed(case.task.target, int(judgement), why[:WHY_MAX])
        word = said(terms.digest, Phase.REPLAYED, b"", body, self._me, self._signer)
        case.words[self._me] = word
        self._effects.append(Tell(word, _others(terms, self._me)))
        self._consider(case)

    def _consider(self, case: _Case) -> None:
        task, wrong = case.task, case.saying(Judgement.WRONG)
        first, accusation = case.words.get(case.validator), wrong.get(case.validator)
        if first is None or case.over:
            return
        if _body(first).judgement == Judgement.RIGHT:
            case.over = True
            return
        if task.target == self._me and self._me not in case.words:
            self._say(case, Judgement.RIGHT, "they are my own")
            return
        if not (case.open or case.done or task.target == self._me):
            case.open = True
            self._effects.append(Tell(first, _others(task.terms, self._me)))  # so that all look
        guilty = {s: w for s, w in wrong.items() if s != task.target}
        if len(guilty) >= task.terms.majority:
            self._convict(case, "work", task.target, guilty.values())
        right = case.saying(Judgement.RIGHT)
        if accusation is not None and len(right) >= task.terms.majority:
            words = (accusation, *right.values())
            self._convict(case, "slander", case.validator, words)

    def _convict(self, case: _Case, kind: str, culprit: bytes, words: Iterable[Said]) -> None:
        case.open, case.over = False, True
        evidence = Evidence(kind, culprit, case.task.terms, tuple(words))
        self._effects.append(Convicted(evidence))


def _others(terms: AuditTerms, me: bytes) -> tuple[bytes, ...]:
    return tuple(peer for peer in terms.participants if peer != me)


def _body(word: Said) -> Replayed:
    body = body_of(word.statement)
    assert isinstance(body, Replayed)
    return body


def _hash(seed: bytes, what: bytes, peer: bytes) -> bytes:
    return hashlib.sha256(b"atoll validators 1\0" + seed + what + peer).digest()
