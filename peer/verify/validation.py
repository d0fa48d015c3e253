"""Have some participants take local steps of others again, and decide what follows.

``Validations`` decides, sans-I/O; ``ValidationService`` is the daemon's part in it.

Theory (BTARD, Gorbunov et al. 2022, section 3, with the replays of docs/replay.md). With its parts
a trainer commits to its local steps (``Commitment.work``). The common draw of the round, which
nobody can choose, names validators and for each a target, and which segment is to be shown. The
validator takes its steps again and says RIGHT, or WRONG. It may lie, so its word alone bans nobody:
where it says WRONG, everybody does the same, and hands its word on. More than half of the
participants who say WRONG are evidence against the target (*work*), more than half who say RIGHT
against the validator (*slander*). So who is right is never banned as long as most are honest.

Who shows nothing may have lost it, or have a slow line; or it shows it to all but one. So WITHHELD
is no evidence. We count it where it was for us to look, or somebody has accused, and where we have
had a link all the time to the very process that took part; and whoever has shown us nothing often
enough is NEVER. That makes everybody look too, and counts against it, but no
validator is banned for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from atoll.collectives.codecs import F32
from atoll.collectives.digests import strong_digest
from atoll.collectives.errors import RemoteProtocolError, SessionError
from atoll.collectives.merkle import shard_roots
from atoll.optim.manifest import Manifest
from atoll.optim.pseudo_gradient import delta_source, rounded_to_working
from atoll.optim.run_spec import RunSpec
from atoll.peer.daemon.ports import AuditPort
from atoll.peer.membership.signing import Signer
from atoll.peer.membership.view import short
from atoll.peer.verify.attempt_audit import AttemptAudit, AuditStep, Convicted, TellParticipants
from atoll.peer.verify.disclosure import encoded_parts
from atoll.peer.verify.evidence import Evidence
from atoll.peer.verify.statement import (
    WHY_MAX,
    WORD_BYTES_MAX,
    Commitment,
    Judgement,
    Replayed,
    SignedStatement,
    StatementPhase,
    body_of,
    sign_statement,
)
from atoll.peer.verify.terms import AuditTerms

# Attempts that are remembered: a validator waits up to ten rounds for a segment, and then so does
# everybody (optim/replay/validating.py: PATIENCE_ROUNDS, COMING_ROUNDS).
VALIDATED_MAX: Final = 24
WITHHELD_MAX: Final = 3  # trainers that die in the seconds after a round do so once
# So much less for each segment that was shown: who loses one of a hundred is never found guilty.
SHOWN: Final = 0.02
# About attempts that are not over here yet, from each that we are linked to: so nobody's words can
# push out those of others.
WORDS_MAX: Final = 64
WORKS_MAX: Final = 1024  # peers whose last commitment is remembered: as many as a view has


@dataclass(frozen=True, slots=True)
class Drawn:
    """Name a validator, its target, and the segment that it takes again.

    It is the segment of ``target`` whose number is ``number`` modulo their count.
    """

    validator: bytes
    target: bytes
    number: int


@dataclass(frozen=True, slots=True)
class ValidationTask:
    """Describe a task for the own trainer.

    ``target``: the peer whose steps it is about, which is this one if they are to be shown.
    ``work``: what it has committed to, ``before``: when it counted last, or b"".
    """

    terms: AuditTerms
    target: bytes
    number: int
    work: bytes
    before: bytes


@dataclass(slots=True)
class _TargetCase:
    """Hold all that is said of one target's steps in one attempt."""

    task: ValidationTask
    validator: bytes
    words: dict[bytes, SignedStatement] = field(default_factory=dict)  # the first of each
    open: bool = False  # given to the own trainer, which has not judged yet
    done: bool = False  # judged here
    over: bool = False  # somebody was found guilty, or the validator has found nothing wrong
    cut: bool = False  # there was no link to the target for a while, or it was started again

    def saying(self, *judgements: Judgement) -> dict[bytes, SignedStatement]:
        return {s: w for s, w in self.words.items() if _body(w).judgement in judgements}


def draw(terms: AuditTerms, seed: bytes) -> list[Drawn]:
    """Return an attempt's validators and targets, all of them different; fewer where few count.

    Who does not count has no part that could be wrong; and of validators that cost nothing a cheat
    would bring as many as it takes to be looked at by nobody else.
    """
    ranked = sorted(terms.jury, key=lambda peer: _hash(seed, b"rank", peer))
    pairs = min(terms.validators, len(ranked) // 2)
    return [
        Drawn(validator, target, int.from_bytes(_hash(seed, b"segment", target)[:8], "big"))
        for target, validator in zip(ranked[:pairs], ranked[pairs : 2 * pairs], strict=True)
    ]


class Validations:
    """Decide one participant's part in the validation of local steps.

    What comes out is taken with ``take``; what its trainer has to do, with ``tasks``.
    """

    def __init__(self, me: bytes, signer: Signer) -> None:
        self._me, self._signer = me, signer
        self._attempts: dict[
            bytes, dict[bytes, _TargetCase]
        ] = {}  # by terms and target, oldest first
        # What each has committed to when it counted last; of all rounds without a gap up to this.
        self._works: dict[bytes, bytes] = {}
        self._round = 0
        self._withheld: dict[bytes, float] = {}  # how often from us, less SHOWN for what was shown
        # What came since the last commit, and before it, by who has sent it: any peer with a link.
        self._early: dict[bytes, list[SignedStatement]] = {}
        self._earlier: dict[bytes, list[SignedStatement]] = {}
        self._effects: list[TellParticipants | Convicted] = []

    def take(self) -> list[TellParticipants | Convicted]:
        effects, self._effects = self._effects, []
        return effects

    @property
    def pending(self) -> set[bytes]:
        """Return the attempts, by the digest of their terms, that still have something to judge."""
        return {t for t, cases in self._attempts.items() if any(not c.over for c in cases.values())}

    def banned(self, peers: Collection[bytes]) -> None:
        for cases in self._attempts.values():
            for case in cases.values():
                if not {case.task.target, case.validator}.isdisjoint(peers):
                    case.open, case.over = False, True

    def link_lost(self, peer: bytes) -> None:
        """Note that a peer may have shown what has not come, or has been started again since."""
        for cases in self._attempts.values():
            if peer in cases:
                cases[peer].cut = True

    # ------------------------------------------------------------ what happens

    def committed(self, terms: AuditTerms, seed: bytes, works: Mapping[bytes, bytes]) -> None:
        """Note that an attempt's result is in the run.

        ``works``: what each that counts has committed to.
        """
        cases: dict[bytes, _TargetCase] = {}
        if terms.round != self._round + 1:  # what we have missed may have counted
            self._works.clear()
        for each in draw(terms, seed):
            before = self._works.get(each.target, b"")
            task = ValidationTask(terms, each.target, each.number, works[each.target], before)
            cases[each.target] = _TargetCase(task, each.validator)
            cases[each.target].open = self._me in (each.validator, each.target)
        self._attempts[terms.digest] = cases
        self._works = dict([*(self._works | dict(works)).items()][-WORKS_MAX:])
        self._round = terms.round
        while len(self._attempts) > VALIDATED_MAX:
            del self._attempts[next(iter(self._attempts))]
        for source, words in (*self._earlier.items(), *self._early.items()):
            for word in words:
                if word.statement.terms in self._attempts:
                    self.hear(word, source)
        self._earlier, self._early = self._early, {}

    def tasks(self) -> list[ValidationTask]:
        return [c.task for cases in self._attempts.values() for c in cases.values() if c.open]

    def shown(self, terms: bytes) -> None:
        """Note that the own trainer has shown the own steps."""
        if (case := self._case(terms, self._me)) is not None:
            case.open = False

    def judged(self, terms: bytes, target: bytes, judgement: Judgement | None, why: str) -> None:
        """Take a judgement of the own trainer; None: rounding may have led there as well."""
        case = self._case(terms, target)
        if case is None or case.done or target == self._me:
            return
        case.open, case.done = False, True
        times = self._withheld.get(target, 0.0)
        if judgement is Judgement.WITHHELD and not case.cut:
            times += 1  # else we would not have looked
            if times > WITHHELD_MAX - 1:
                judgement, why = Judgement.NEVER, f"{WITHHELD_MAX} times nothing, now: {why}"
        elif judgement is not Judgement.WITHHELD:
            times = max(0.0, times - SHOWN)
        self._withheld[target] = times
        if judgement is not None:
            self._say(case, judgement, why)

    def hear(self, word: SignedStatement, source: bytes) -> None:
        """Take a word from its signer or anybody else: ``source``, a peer with a link."""
        statement = word.statement
        terms, is_long = statement.terms, len(statement.body) > WORD_BYTES_MAX
        if word.phase is not StatementPhase.REPLAYED or is_long or not word.genuine(self._signer):
            return
        if terms not in self._attempts:
            self._early[source] = [*self._early.get(source, [])[-WORDS_MAX + 1 :], word]
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

    def _case(self, terms: bytes, target: bytes) -> _TargetCase | None:
        return self._attempts.get(terms, {}).get(target)

    def _say(self, case: _TargetCase, judgement: Judgement, why: str) -> None:
        terms, body = case.task.terms, Replayed(case.task.target, int(judgement), why[:WHY_MAX])
        word = sign_statement(
            terms.digest, StatementPhase.REPLAYED, b"", body, self._me, self._signer
        )
        case.words[self._me] = word
        self._effects.append(TellParticipants(word, _others(terms, self._me)))
        self._consider(case)

    def _consider(self, case: _TargetCase) -> None:
        task, first = case.task, case.words.get(case.validator)
        accusation = case.saying(Judgement.WRONG).get(case.validator)
        if first is None or case.over:
            return
        if _body(first).judgement in (Judgement.RIGHT, Judgement.WITHHELD):
            case.over = True
            return
        if task.target == self._me and self._me not in case.words:
            self._say(case, Judgement.RIGHT, "they are my own")
            return
        if not (case.open or case.done or task.target == self._me):
            case.open = True
            self._effects.append(
                TellParticipants(first, _others(task.terms, self._me))
            )  # so that all look
        jury = set(task.terms.jury)
        guilty = case.saying(Judgement.WRONG, Judgement.NEVER)
        guilty = {s: w for s, w in guilty.items() if s in jury - {task.target}}
        if 2 * len(guilty) > len(jury):
            self._convict(case, "work", task.target, guilty.values())
            return
        right = {s: w for s, w in case.saying(Judgement.RIGHT).items() if s in jury}
        right.pop(case.validator, None)
        if accusation is not None and 2 * len(right) > len(jury):
            words = (accusation, *right.values())
            self._convict(case, "slander", case.validator, words)

    def _convict(
        self, case: _TargetCase, kind: str, culprit: bytes, words: Iterable[SignedStatement]
    ) -> None:
        case.open, case.over = False, True
        evidence = Evidence(kind, culprit, case.task.terms, tuple(words))
        self._effects.append(Convicted(evidence))


def _others(terms: AuditTerms, me: bytes) -> tuple[bytes, ...]:
    return tuple(peer for peer in terms.participants if peer != me)


def _body(word: SignedStatement) -> Replayed:
    body = body_of(word.statement)
    assert isinstance(body, Replayed)
    return body


def _hash(seed: bytes, what: bytes, peer: bytes) -> bytes:
    return hashlib.sha256(b"atoll validators 1\0" + seed + what + peer).digest()


# ---------------------------------------------------------------- the daemon's part
#
# Do a daemon's part in validation: hand its trainer tasks, and pass on what comes of them.
#
# The trainer takes the steps again (optim/replay/validating.py), because only it has the model.
# What needs the round is compared here: whether a segment begins where the run was, and whether
# what it ends in are the parts that its trainer had committed to. So the parameters before a round
# are kept until nobody can doubt any more what was done in it: 4 bytes for each, of two rounds as
# a rule, and of VALIDATED_MAX at most.


@dataclass(frozen=True, slots=True)
class _Round:
    """Hold what an audited round began with, and who had committed to what."""

    terms: AuditTerms
    spec: RunSpec
    manifest: Manifest
    theta: F32
    commitments: dict[int, Commitment]


class ValidationService:
    """Join the validation machine with the trainer's parameters.

    Lives in the event loop; ``fits`` may be called in any thread.
    """

    def __init__(
        self,
        me: bytes,
        signer: Signer,
        daemon: AuditPort,
    ) -> None:
        self._me, self._daemon = me, daemon
        self._machine = Validations(me, signer)
        self._rounds: dict[bytes, _Round] = {}  # by the digest of their terms

    # ------------------------------------------------------------ rounds

    def committed(self, audit: AttemptAudit, spec: RunSpec, manifest: Manifest, theta: F32) -> None:
        """Note that an attempt that was audited here is in the run.

        ``theta``: float32[elements], the run's parameters before it.
        """
        terms, inbox = audit.terms, audit.inbox
        if audit.step is not AuditStep.PASSED:
            return
        commitments = inbox.commitments
        self._rounds[terms.digest] = _Round(terms, spec, manifest, theta, commitments)
        works = {terms.participants[i]: c.work for i, c in commitments.items() if c.work}
        self._machine.committed(terms, inbox.seed, works)
        for peer in audit.unlinked:
            self._machine.link_lost(peer)
        self._pump()

    def link_lost(self, peer: bytes) -> None:
        self._machine.link_lost(peer)

    def hear(self, word: SignedStatement, source: bytes) -> None:
        self._machine.hear(word, source)
        self._pump()

    def banned(self, peers: Collection[bytes]) -> None:
        self._machine.banned(peers)
        self._pump()

    def _pump(self) -> None:
        for effect in self._machine.take():
            if isinstance(effect, TellParticipants):
                for peer in effect.peers:
                    self._daemon.send(peer, effect.message)
            else:
                self._daemon.convict(effect.evidence)
        pending = self._machine.pending
        self._rounds = {digest: each for digest, each in self._rounds.items() if digest in pending}

    # ------------------------------------------------------------ the own trainer

    def tasks(self) -> list[dict[str, Any]]:
        """Return what the trainer has to do, in plain types.

        ``own``: these steps are its own, and are to be shown.
        """
        return [self._plain(task) for task in self._machine.tasks()]

    def shown(self, terms: bytes) -> None:
        self._machine.shown(terms)

    def judged(self, terms: bytes, target: bytes, judgement: int | None, why: str) -> None:
        found = None if judgement is None else Judgement(judgement)
        self._machine.judged(terms, target, found, why)
        self._pump()

    def fits(self, terms: bytes, target: bytes, flat: F32, *, start: bool) -> bool:
        """Return whether parameters, float32[elements], begin or end where they should.

        With ``start`` they have to be where the run was before the round; without, they have to
        lead to the parts that ``target`` has committed to. SessionError if the round is over.
        """
        known = self._rounds.get(terms)
        if known is None or target not in known.terms.participants:
            raise SessionError("nothing of that round has to be judged any more")
        if start:
            return np.array_equal(rounded_to_working(known.theta, known.manifest), flat)
        work = known.terms.work
        source = delta_source(known.spec, known.manifest, known.theta, flat, 0)
        parts = encoded_parts(work, source)
        digests = [strong_digest(part) for part in parts]
        roots = shard_roots(digests, work.plan.owners, len(known.terms.participants))
        commitment = known.commitments[known.terms.participants.index(target)]
        return tuple(roots) == commitment.roots

    def _plain(self, task: ValidationTask) -> dict[str, Any]:
        return {
            "terms": task.terms.digest,
            "round": task.terms.round,
            "target": task.target,
            "name": short(task.target),
            "own": task.target == self._me,
            "number": task.number,
            "work": task.work,
            "before": task.before,
        }
