"""Rounds with local steps, some of which are not what their trainers have committed to.

The decisions are those that ship (peer/verify/validation.py). Replays are replaced by the truth: a
segment that was cheated in gives other numbers, and an honest one the same. Liars cheat in some of
their segments, or call honest work wrong, to all or to some, or cover for each other, or show
nothing. Words are delivered in any order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from atoll.peer.verify.attempt_audit import Convicted, TellParticipants
from atoll.peer.verify.evidence import Evidence, verify_evidence
from atoll.peer.verify.statement import (
    Judgement,
    Replayed,
    SignedStatement,
    StatementPhase,
    sign_statement,
)
from atoll.peer.verify.terms import AuditTerms
from atoll.peer.verify.validation import Validations, ValidationTask, draw
from simulation.audit_options import Key

__all__ = ["CHEATS", "CHOOSES", "COVERS", "FAVOURS", "HIDES", "SLANDERS", "Options", "World"]

CHEATS = "cheats"  # in some segments of each round, and calls what others do right
SLANDERS = "slanders"  # works well, and calls that of others wrong
COVERS = "covers"  # works well, and calls everything right
HIDES = "hides"  # cheats, and shows nothing
CHOOSES = "chooses"  # cheats, and shows nothing where it has cheated
FAVOURS = "favours"  # works well, and shows it to all but its validator
LINEAGE = bytes(32)


@dataclass(frozen=True)
class Options:
    seed: int
    peers: int
    liars: dict[int, str]
    validators: int = 1
    segments: int = 10
    cheated: int = 10
    lost: float = 0.0  # how often honest ones have nothing to show


class World:
    def __init__(self, options: Options) -> None:
        self.options, self.rng = options, random.Random(options.seed)
        made = [Key(self.rng) for _ in range(options.peers)]
        self.keys = {key.me: key for key in made}
        self.liars = {made[index].me: kind for index, kind in options.liars.items()}
        self.machines = {me: Validations(me, key) for me, key in self.keys.items()}
        self.banned: dict[bytes, Evidence] = {}
        self.round = 1
        self._queue: list[tuple[bytes, SignedStatement]] = []

    @property
    def honest(self) -> list[bytes]:
        return [peer for peer in self.keys if peer not in self.liars]

    def play(self, rounds: int) -> Iterator[int]:
        """After each round its number; everybody is right about whom it bans, or this fails."""
        for _ in range(rounds):
            self.round += 1
            self._play_round()
            yield self.round

    def _terms(self) -> AuditTerms:
        here = tuple(sorted(peer for peer in self.keys if peer not in self.banned))
        return AuditTerms(
            lineage=LINEAGE,
            view=1,
            round=self.round,
            attempt=self.round,
            fragment=0,
            participants=here,
            counted=(True,) * len(here),
            shares=(1,) * len(here),
            rule="mean",
            codec="int8",
            elements=4096,
            chunk_elements=1024,
            validators=self.options.validators,
        )

    def _play_round(self) -> None:
        terms, seed = self._terms(), self.rng.randbytes(32)
        works = {peer: self.rng.randbytes(32) for peer in terms.participants}
        cheated = set(self.rng.sample(range(self.options.segments), self.options.cheated))
        self._lost = {p for p in self.honest if self.rng.random() < self.options.lost}
        for peer in self.rng.sample(terms.participants, len(terms.participants)):
            self.machines[peer].committed(terms, seed, works)
        self._validators = {each.target: each.validator for each in draw(terms, seed)}
        for each in draw(terms, seed):
            if each.validator in self.liars:
                self._lie(terms, each.validator, each.target)
        idle = 0
        while idle < 3:  # trainers look between rounds; so much goes around within a few
            moved = self._deliver()
            for peer in self.honest:
                for task in self.machines[peer].tasks():
                    self._do(peer, task, cheated)
                    moved = True
            idle = 0 if moved or self._queue else idle + 1

    def _do(self, peer: bytes, task: ValidationTask, cheated: set[int]) -> None:
        machine, kind = self.machines[peer], self.liars.get(task.target)
        is_cheated = task.number % self.options.segments in cheated
        hidden = kind == HIDES or (kind == CHOOSES and is_cheated) or task.target in self._lost
        hidden |= kind == FAVOURS and self._validators.get(task.target) == peer
        if task.target == peer:
            machine.shown(task.terms.digest)
        elif hidden:
            machine.judged(task.terms.digest, task.target, Judgement.WITHHELD, "nothing came")
        else:
            judgement = Judgement.WRONG if kind == CHEATS and is_cheated else Judgement.RIGHT
            machine.judged(task.terms.digest, task.target, judgement, "")
        self._carry(peer)

    def _lie(self, terms: AuditTerms, liar: bytes, target: bytes) -> None:
        slander = self.liars[liar] == SLANDERS and target not in self.liars
        body = Replayed(target, int(Judgement.WRONG if slander else Judgement.RIGHT), "I say so")
        word = sign_statement(
            terms.digest, StatementPhase.REPLAYED, b"", body, liar, self.keys[liar]
        )
        heard = [p for p in terms.participants if p != liar]
        if self.rng.random() < 0.5:
            heard = self.rng.sample(heard, self.rng.randint(1, len(heard)))
        self._queue += [(peer, word) for peer in heard]

    def _carry(self, peer: bytes) -> None:
        for effect in self.machines[peer].take():
            if isinstance(effect, Convicted):
                self._ban(effect.evidence)
            elif isinstance(effect, TellParticipants) and isinstance(
                effect.message, SignedStatement
            ):
                self._queue += [(other, effect.message) for other in effect.peers]

    def _deliver(self) -> bool:
        queue, self._queue = self._queue, []
        self.rng.shuffle(queue)
        for peer, word in queue:
            if peer not in self.liars:
                self.machines[peer].hear(word, word.signer)
                self._carry(peer)
        return bool(queue)

    def _ban(self, evidence: Evidence) -> None:
        (culprit,) = verify_evidence(evidence).banned
        assert culprit in self.liars, f"seed {self.options.seed}: {evidence.kind} of an honest one"
        self.banned.setdefault(culprit, evidence)
        for machine in self.machines.values():
            machine.banned([culprit])
