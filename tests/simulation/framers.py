"""Participants that lie in what is said at any time: it is to harm others, or to break them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from atoll.peer.verify.statement import (
    Elimination,
    SignedStatement,
    Statement,
    StatementPhase,
    sign_statement,
)
from atoll.peer.verify.terms import AuditTerms
from simulation.liar import Lies

if TYPE_CHECKING:
    from simulation.audits import World

__all__ = ["Babbler", "Framer", "OneFramer"]


class Babbler(Lies):
    """Signs what cannot be read, as a statement that is said at any time."""

    kind = "babble"

    def tell(self, message: object, dest: bytes) -> Iterator[tuple[float, object]]:
        if self._is_mine(message, StatementPhase.COMMIT):
            assert isinstance(message, SignedStatement)
            self.must_fall = True
            phase = self.rng.choice((StatementPhase.WITHHELD, StatementPhase.ELIMINATE))
            statement = Statement(message.statement.terms, int(phase), b"", b"\xc1")
            signer = self.world.peers[self.me].signer
            yield 0.0, SignedStatement(self.me, statement, signer.sign(statement.digest))
        yield 0.0, message


class Framer(Lies):
    """Contradicts many honest ones: one after another before all, or each before another one; at
    once, or when nobody needs it any more."""

    kind = "framing"

    def begin(self, terms: AuditTerms, index: int, world: World) -> None:
        super().begin(terms, index, world)
        self.phase = self.rng.choice(
            (StatementPhase.COMMIT, StatementPhase.RESULT, StatementPhase.VERDICT)
        )
        self.delay_s = self.rng.choice((0.0, 0.2, 5.0))
        self.at_all = self.rng.random() < 0.5

    def tell(self, message: object, dest: bytes) -> Iterator[tuple[float, object]]:
        yield 0.0, message
        if self._is_mine(message, self.phase):
            assert isinstance(message, SignedStatement)
            others = [p for p in self.terms.participants if p != self.me]
            accused = others if self.at_all else [self.rng.choice(others)]
            for each in accused:
                body, signer = Elimination(each, "framed"), self.world.peers[self.me].signer
                terms = message.statement.terms
                word = sign_statement(terms, StatementPhase.ELIMINATE, b"", body, self.me, signer)
                yield self.delay_s, word


class OneFramer(Lies):
    """Contradicts one and the same before all, before anything was sent: it has seen nothing."""

    kind = "framing one"

    def tell(self, message: object, dest: bytes) -> Iterator[tuple[float, object]]:
        yield 0.0, message
        if self._is_mine(message, StatementPhase.COMMIT):
            assert isinstance(message, SignedStatement)
            peers, terms = self.world.peers, message.statement.terms
            body = Elimination(next(p for p in self.terms.jury if peers[p].liar.honest), "framed")
            yield (
                0.0,
                sign_statement(
                    terms, StatementPhase.ELIMINATE, b"", body, self.me, peers[self.me].signer
                ),
            )
