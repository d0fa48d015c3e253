"""What participants of simulated audits say and send, for others to change: see liars.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from atoll.peer.verify.statement import (
    Check,
    DisclosedPiece,
    SignedStatement,
    StatementPhase,
    sign_statement,
)
from atoll.peer.verify.terms import AuditTerms

if TYPE_CHECKING:
    from simulation.audits import World

__all__ = ["Liar", "Lies"]


class Liar:
    """An honest one: changes nothing. Subclasses override what they lie in."""

    kind = "honest"
    honest = True
    must_fall = False
    reads_after_s = 0.0  # so long everything that comes lies unread

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.must_fall = False

    def begin(self, terms: AuditTerms, index: int, world: World) -> None:
        self.terms, self.index, self.world = terms, index, world
        self.me = terms.participants[index]
        self.must_fall = False
        honest = [p for p in terms.participants if world.peers[p].liar.honest]
        self.victim = self.rng.choice(honest)

    def tell(self, message: object, dest: bytes) -> Iterator[tuple[float, object]]:
        yield 0.0, message

    def part(self, chunk: int, data: bytes) -> bytes:
        return data

    def result(self, chunk: int, data: bytes, dest: bytes) -> bytes:
        return data

    def gram(self, data: bytes) -> bytes:
        return data

    def check(self, check: Check) -> Check:
        return check

    def accused(self, accused: dict[int, int]) -> dict[int, int]:
        return accused

    def pieces(
        self, pieces: list[tuple[bytes, DisclosedPiece]]
    ) -> list[tuple[bytes, DisclosedPiece]]:
        return pieces

    def _is_mine(self, message: object, phase: StatementPhase) -> bool:
        return isinstance(message, SignedStatement) and (message.signer, message.phase) == (
            self.me,
            phase,
        )

    def _other(self, each: SignedStatement, body: object) -> SignedStatement:
        """The same statement with another body, signed as well."""
        signer = self.world.peers[self.me].signer
        return sign_statement(
            each.statement.terms, each.phase, each.statement.heard, body, self.me, signer
        )


class Lies(Liar):
    honest = False
