"""Keep what was said in an audited attempt: one statement of each signer in each phase. Pure.

Every statement that comes in is known to be genuine, and is looked at for what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.collectives.errors import RemoteProtocolError
from atoll.peer.verify.bodies import body_fits, seed_of
from atoll.peer.verify.evidence import Evidence
from atoll.peer.verify.statements import (
    IN_ORDER,
    ONCE,
    Check,
    Commitment,
    Resultant,
    Reveal,
    SignedStatement,
    StatementPhase,
    Verdict,
    body_of,
    draw_of,
    heard_of,
)
from atoll.peer.verify.terms import AuditTerms


class Inbox:
    def __init__(self, terms: AuditTerms) -> None:
        self._terms, self._id = terms, terms.digest
        self._said: dict[StatementPhase, dict[bytes, SignedStatement]] = {
            phase: {} for phase in ONCE
        }
        self._heard: dict[StatementPhase, bytes] = {}  # of phases that are complete

    def of(self, phase: StatementPhase) -> Mapping[bytes, SignedStatement]:
        return self._said.get(phase, {})

    def heard(self, phase: StatementPhase) -> bytes:
        """Return the digest of all that was said in the phase before; b"" for the first."""
        if phase is StatementPhase.COMMIT:
            return b""
        if phase in self._heard:
            return self._heard[phase]
        before = IN_ORDER[phase - 1]
        heard = heard_of(self._said[before])
        if self.is_complete(before):
            self._heard[phase] = heard
        return heard

    def is_complete(self, phase: StatementPhase) -> bool:
        return len(self._said[phase]) == len(self._terms.participants)

    def silent(self, phase: StatementPhase) -> list[bytes]:
        return [peer for peer in self._terms.participants if peer not in self._said[phase]]

    def differing(self, phase: StatementPhase) -> list[bytes]:
        """Return those who say that they heard something else in the phase before than we have."""
        mine = self.heard(phase)
        return [p for p, each in self._said[phase].items() if each.statement.heard != mine]

    def add(self, each: SignedStatement) -> Evidence | None:
        """Keep a new statement; return evidence where it shows that its signer lies.

        What a signer may say often is not kept.
        """
        have = self._said.get(each.phase, {})
        before = have.get(each.signer)
        if before is not None:
            if before.statement == each.statement:
                return None
            return Evidence("equivocation", each.signer, self._terms, (before, each))
        if self._is_malformed(each):
            return Evidence("malformed", each.signer, self._terms, (each,))
        have[each.signer] = each
        return None

    def _is_malformed(self, each: SignedStatement) -> bool:
        index = self._terms.participants.index(each.signer)
        try:
            return bool(body_fits(self._terms, index, each.statement))
        except RemoteProtocolError:
            return True

    # ------------------------------------------------------------ what was said, by participant

    def _bodies(self, phase: StatementPhase) -> dict[int, object]:
        place = {peer: index for index, peer in enumerate(self._terms.participants)}
        return {place[p]: body_of(each.statement) for p, each in self._said[phase].items()}

    @property
    def commitments(self) -> dict[int, Commitment]:
        return {
            i: b
            for i, b in self._bodies(StatementPhase.COMMIT).items()
            if isinstance(b, Commitment)
        }

    @property
    def resultants(self) -> dict[int, Resultant]:
        return {
            i: b for i, b in self._bodies(StatementPhase.RESULT).items() if isinstance(b, Resultant)
        }

    @property
    def checks(self) -> dict[int, Check]:
        return {i: b for i, b in self._bodies(StatementPhase.CHECK).items() if isinstance(b, Check)}

    @property
    def verdicts(self) -> dict[int, Verdict]:
        return {
            i: b for i, b in self._bodies(StatementPhase.VERDICT).items() if isinstance(b, Verdict)
        }

    def result_digests(self) -> dict[int, bytes]:
        """Return the SHA-256 of each chunk of the result, as its owner has signed it."""
        found = {}
        for owner, body in self.resultants.items():
            for place, chunk in enumerate(self._terms.work.shards.get(owner, ())):
                found[chunk] = body.digests[32 * place : 32 * place + 32]
        return found

    def accused(self) -> set[tuple[int, int]]:
        """Return the accusations of all verdicts, as (sender, chunk)."""
        told = self.verdicts.values()
        return {pair for v in told for pair in zip(v.senders, v.chunks, strict=True)}

    # ------------------------------------------------------------ the draw

    @property
    def seed(self) -> bytes:
        """Return the common draw; only once all secrets are known."""
        secrets = {peer: _secret(each) for peer, each in self._said[StatementPhase.REVEAL].items()}
        return seed_of(self._terms, secrets)

    def broken_draw(self) -> Evidence | None:
        """Return evidence if somebody has revealed another number than it had committed to."""
        for peer, each in self._said[StatementPhase.REVEAL].items():
            commit = self._said[StatementPhase.COMMIT].get(peer)
            if commit is None:
                continue
            body = body_of(commit.statement)
            assert isinstance(body, Commitment)
            if draw_of(self._id, peer, _secret(each)) != body.draw:
                return Evidence("draw", peer, self._terms, (commit, each))
        return None

    def wrong_seed(self) -> Evidence | None:
        """Return evidence if somebody computes with another draw.

        Only once all secrets are known.
        """
        seed = self.seed
        for peer, each in self._said[StatementPhase.CHECK].items():
            body = body_of(each.statement)
            if isinstance(body, Check) and body.seed != seed:
                told = (*self._said[StatementPhase.REVEAL].values(), each)
                return Evidence("seed", peer, self._terms, told)
        return None


def _secret(each: SignedStatement) -> bytes:
    body = body_of(each.statement)
    assert isinstance(body, Reveal)
    return body.secret
