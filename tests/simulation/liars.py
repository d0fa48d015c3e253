"""Participants that lie in an audited attempt: each kind changes one thing of what it sends.

``must_fall``: it has done what has to be found in the attempt in which it is done. Those that only
delay, stay silent or make noise may be left out of a round without being banned.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from atoll.peer.verify.statement import (
    Check,
    Commitment,
    DisclosedPiece,
    Resultant,
    Reveal,
    SignedStatement,
    StatementPhase,
    Verdict,
    body_of,
)
from atoll.peer.verify.terms import AuditTerms
from simulation.framers import Babbler, Framer
from simulation.gram_liars import EvenGram, FarGram, OneGram, StretchedGram, TwoGrams
from simulation.laggards import Replayer, Slow, SlowReader
from simulation.liar import Liar, Lies

if TYPE_CHECKING:
    from simulation.audits import World

__all__ = ["KINDS", "liar_of"]


class DenseShift(Lies):
    """An owner that adds several quantization steps everywhere in a chunk."""

    kind = "dense shift"

    def result(self, chunk: int, data: bytes, dest: bytes) -> bytes:
        if chunk != self.terms.work.shards[self.index][0]:
            return data
        work = self.terms.work
        values = np.empty(work.grid.size(chunk), np.float32)
        work.codec.decode(np.frombuffer(data, np.uint8), values)
        values += np.float32(4 * np.abs(values).max())
        out = np.empty(len(data), np.uint8)
        work.codec.encode(values, out)
        self.must_fall = True
        return out.tobytes()


class Flip(DenseShift):
    """An owner that turns the sign of a chunk."""

    kind = "flipped result"

    def result(self, chunk: int, data: bytes, dest: bytes) -> bytes:
        if chunk != self.terms.work.shards[self.index][-1]:
            return data
        work = self.terms.work
        values = np.empty(work.grid.size(chunk), np.float32)
        work.codec.decode(np.frombuffer(data, np.uint8), values)
        out = np.empty(len(data), np.uint8)
        work.codec.encode(-20 * values, out)
        self.must_fall = work.codec.name != "int4"  # the room of whose steps grows as it does
        return out.tobytes()


class TwoResults(Lies):
    """An owner that sends one peer another result than it has signed."""

    kind = "two results"

    def result(self, chunk: int, data: bytes, dest: bytes) -> bytes:
        if dest != self.victim or chunk != self.terms.work.shards[self.index][0]:
            return data
        self.must_fall = True
        work = self.terms.work
        values = np.empty(work.grid.size(chunk), np.float32)
        work.codec.decode(np.frombuffer(data, np.uint8), values)
        out = np.empty(len(data), np.uint8)
        work.codec.encode(values * np.float32(0.5), out)
        return out.tobytes()


class WrongPart(Lies):
    """A sender whose parts for one owner, or for all, are not what it has committed to."""

    kind = "wrong part"

    def begin(self, terms: AuditTerms, index: int, world: World) -> None:
        super().begin(terms, index, world)
        self.victims = {self.victim} if self.rng.random() < 0.5 else set(terms.participants)

    def part(self, chunk: int, data: bytes) -> bytes:
        if self.terms.participants[self.terms.work.plan.owners[chunk]] not in self.victims:
            return data
        self.must_fall = True
        return data[:-1] + bytes([data[-1] ^ 1])


class WrongSketch(Lies):
    """A sender that tells other numbers than those of its part, in a chunk that another owns."""

    kind = "wrong sketch"

    def check(self, check: Check) -> Check:
        sketches = np.frombuffer(check.sketches, "<f4").copy().reshape(-1, 8)
        foreign = [c for c, o in enumerate(self.terms.work.plan.owners) if o != self.index]
        sketches[self.rng.choice(foreign), self.rng.randrange(8)] += np.float32(
            self.rng.choice((0.25, 1e3))
        )
        self.must_fall = True
        return replace(check, sketches=sketches.tobytes())


class WrongNorm(Lies):
    kind = "wrong norm"

    def check(self, check: Check) -> Check:
        norms = np.frombuffer(check.norms, "<f4").copy()
        foreign = [c for c, o in enumerate(self.terms.work.plan.owners) if o != self.index]
        norms[self.rng.choice(foreign)] *= np.float32(1.5)
        self.must_fall = True
        return replace(check, norms=norms.tobytes())


class Silent(WrongSketch):
    """Lies in its numbers, and as an owner accuses nobody: in favour of others of its kind."""

    kind = "silent owner"

    def accused(self, accused: dict[int, int]) -> dict[int, int]:
        return {}


class FalseAccuser(Lies):
    kind = "false accusation"

    def accused(self, accused: dict[int, int]) -> dict[int, int]:
        victim = self.terms.participants.index(self.victim)
        self.must_fall = True
        return accused | {victim: self.terms.work.shards[self.index][0]}


class Equivocator(Lies):
    """Signs two statements in one phase, one of them for half of the others."""

    kind = "equivocation"

    def begin(self, terms: AuditTerms, index: int, world: World) -> None:
        super().begin(terms, index, world)
        self.phase = self.rng.choice(tuple(StatementPhase)[:5])
        others = [p for p in terms.participants if p != self.me]
        self.half = set(self.rng.sample(others, self.rng.randint(1, max(1, len(others) - 1))))
        self.told: dict[bool, set[bytes]] = {True: set(), False: set()}

    def tell(self, message: object, dest: bytes) -> Iterator[tuple[float, object]]:
        mine = isinstance(message, SignedStatement) and message.signer == self.me
        if not mine or message.phase is not self.phase or dest not in self.half:  # type: ignore[union-attr]
            if mine and message.phase is self.phase:  # type: ignore[union-attr]
                self._note(dest, twice=False)
            yield 0.0, message
            return
        assert isinstance(message, SignedStatement)
        body = body_of(message.statement)
        if isinstance(body, Commitment):
            body = replace(body, draw=bytes(32))
        elif isinstance(body, Resultant):
            body = replace(body, digests=bytes(len(body.digests)))
        elif isinstance(body, Reveal):
            body = Reveal(bytes(32))
        elif isinstance(body, Check):
            body = replace(body, norms=np.zeros(len(body.norms) // 4, "<f4").tobytes())
        elif isinstance(body, Verdict):
            victim = self.terms.participants.index(self.victim)
            body = Verdict((victim,), (self.terms.work.shards.get(self.index, [0])[0],))
        self._note(dest, twice=True)
        yield 0.0, self._other(message, body)

    def _note(self, dest: bytes, *, twice: bool) -> None:
        """It has to fall once two honest ones have different statements of it."""
        if self.world.peers[dest].liar.honest:
            self.told[twice].add(dest)


class Withholder(Lies):
    """Says nothing from some phase on, or tells it to one alone."""

    kind = "withholding"

    def begin(self, terms: AuditTerms, index: int, world: World) -> None:
        super().begin(terms, index, world)
        self.phase = self.rng.choice(
            (
                StatementPhase.RESULT,
                StatementPhase.REVEAL,
                StatementPhase.CHECK,
                StatementPhase.VERDICT,
            )
        )
        self.confidant = self.victim if self.rng.random() < 0.3 else b""

    def tell(self, message: object, dest: bytes) -> Iterator[tuple[float, object]]:
        mine = isinstance(message, SignedStatement) and message.signer == self.me
        late = mine and self.phase <= message.phase <= StatementPhase.VERDICT  # type: ignore[union-attr]
        if not late or dest == self.confidant:
            yield 0.0, message


class BadReveal(Lies):
    """Reveals another number than it has committed to."""

    kind = "draw abort"

    def tell(self, message: object, dest: bytes) -> Iterator[tuple[float, object]]:
        if self._is_mine(message, StatementPhase.REVEAL):
            assert isinstance(message, SignedStatement)
            self.must_fall = True
            other = self._other(message, Reveal(bytes(32)))
            audit = self.world.peers[self.me].audit
            assert audit is not None
            audit.inbox._said[StatementPhase.REVEAL][self.me] = other  # it computes with it too
            yield 0.0, other
        else:
            yield 0.0, message


class Forger(Lies):
    """Puts words into the mouths of others, and sends what cannot be read."""

    kind = "forgery"

    def tell(self, message: object, dest: bytes) -> Iterator[tuple[float, object]]:
        if isinstance(message, SignedStatement):
            yield 0.0, replace(message, signer=self.victim)
            yield 0.0, replace(message, signature=bytes(64))
        yield 0.0, message


class DrawRefuser(Withholder):
    """Hears the numbers of all others, and then keeps its own: it does not like the draw."""

    kind = "draw refused"

    def begin(self, terms: AuditTerms, index: int, world: World) -> None:
        super().begin(terms, index, world)
        self.phase, self.confidant = StatementPhase.REVEAL, b""


class Malformed(Lies):
    kind = "malformed"

    def tell(self, message: object, dest: bytes) -> Iterator[tuple[float, object]]:
        if self._is_mine(message, StatementPhase.CHECK):
            assert isinstance(message, SignedStatement)
            self.must_fall = True
            body = body_of(message.statement)
            assert isinstance(body, Check)
            yield 0.0, self._other(message, replace(body, norms=b"\0"))
        else:
            yield 0.0, message


class Deflector(Silent):
    """Silent in favour of others, but it names them, in a chunk that is none of its own."""

    kind = "deflecting owner"

    def accused(self, accused: dict[int, int]) -> dict[int, int]:
        if not accused:
            return {}
        self.must_fall = True
        foreign = next(c for c, o in enumerate(self.terms.work.plan.owners) if o != self.index)
        return dict.fromkeys(accused, foreign)


class WrongSeed(Lies):
    """Computes with a draw of its own."""

    kind = "wrong seed"

    def check(self, check: Check) -> Check:
        self.must_fall = True
        return replace(check, seed=bytes(32))


class Closed(WrongSketch):
    """Lies in its numbers, and then opens nothing, or something else."""

    kind = "opens nothing"

    def pieces(
        self, pieces: list[tuple[bytes, DisclosedPiece]]
    ) -> list[tuple[bytes, DisclosedPiece]]:
        if self.rng.random() < 0.5:
            return []
        return [(dest, replace(p, data=bytes(len(p.data)))) for dest, p in pieces]


KINDS = {
    each.kind: each
    for each in (
        DenseShift,
        Flip,
        TwoResults,
        WrongPart,
        WrongSketch,
        WrongNorm,
        Silent,
        FalseAccuser,
        Equivocator,
        Withholder,
        BadReveal,
        DrawRefuser,
        Slow,
        SlowReader,
        Replayer,
        Forger,
        Malformed,
        Babbler,
        Framer,
        Deflector,
        WrongSeed,
        Closed,
        EvenGram,
        OneGram,
        FarGram,
        StretchedGram,
        TwoGrams,
    )
}


def liar_of(kind: str, rng: random.Random) -> Liar:
    return KINDS[kind](rng) if kind else Liar(rng)
