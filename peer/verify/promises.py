"""Remember in which attempts this process has promised something: once, and as itself. Pure.

Who signs two commitments for the same terms is a liar, and a BEGIN that is repeated asks for just
that: after one has fallen behind, after a restart, or by a lying coordinator. What this process has
signed it knows. What an earlier one has signed it does not, so it signs nothing for terms that name
another process than itself (``AuditTerms.lives``), nor for terms that name none.
"""

from __future__ import annotations

from typing import Final

from atoll.peer.verify.terms import AuditTerms

# Attempts of a view that are remembered, and of all views: what was promised there, and who was in.
ATTEMPTS_MAX: Final = 4096


class Promises:
    """Keep what one process of a participant has promised."""

    def __init__(self, me: bytes, life: int) -> None:
        self._me, self._life = me, life
        self._view: tuple[bytes, int] = (b"", 0)
        self._numbers: set[int] = set()  # of the attempts in this view that we have promised for
        self._took_part: dict[bytes, None] = {}  # digests of terms, the oldest first

    def is_named(self, terms: AuditTerms) -> bool:
        """Return whether it is this process of the participant that takes part."""
        return terms.life_of(self._me) == self._life

    def may_promise(self, terms: AuditTerms) -> bool:
        """Return whether this process may commit in an attempt, and note that it does."""
        if not self.is_named(terms):
            return False
        view = (terms.lineage, terms.view)
        if view != self._view:
            self._view, self._numbers = view, set()
        full = len(self._numbers) >= ATTEMPTS_MAX and terms.attempt < min(self._numbers)
        if full or terms.attempt in self._numbers:
            return False
        self._numbers.add(terms.attempt)
        if len(self._numbers) > ATTEMPTS_MAX:
            self._numbers.discard(min(self._numbers))
        self._took_part[terms.digest] = None
        if len(self._took_part) > ATTEMPTS_MAX:
            del self._took_part[next(iter(self._took_part))]
        return True

    def took_part(self, terms: bytes) -> bool:
        """Return whether it has promised something under the terms with this digest."""
        return terms in self._took_part
