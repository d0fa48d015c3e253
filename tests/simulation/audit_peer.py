"""A participant of simulated audited attempts: what it has of the one at hand, and its bans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from atoll.collectives.codecs import U8
from atoll.peer.verify.attempt_audit import AttemptAudit, AuditStep
from atoll.peer.verify.ban_record import Bans
from atoll.peer.verify.evidence import Evidence
from atoll.peer.verify.promises import Promises
from atoll.peer.verify.terms import AuditTerms
from simulation.liar import Liar

__all__ = ["Peer", "array"]

# Somebody who takes everything at the last moment sends its parts, and what it makes of those of
# others, within this.
STALL_S: Final = 120.0


@dataclass
class Peer:
    """One participant: its audit, and the reduction's bytes."""

    name: bytes
    signer: Any
    liar: Liar
    promises: Promises
    audit: AttemptAudit | None = None
    got: dict[tuple[int, int], bytes] = field(default_factory=dict)
    grams: dict[int, bytes] = field(default_factory=dict)
    results: dict[int, bytes] = field(default_factory=dict)
    own_grams: bytes = b""  # of each own chunk
    matrix: bytes = b""
    gate_s: float | None = None  # since when parts may be sent
    made: bool = False
    outcome: str = ""
    failed: tuple[bytes, ...] = ()
    bans: Bans = field(default_factory=lambda: Bans(b""))
    attempts: list[AuditTerms] = field(default_factory=list)  # that it took part in
    paused_until_s: float = 0.0
    early: list[tuple[bytes, object]] = field(default_factory=list)

    @property
    def banned(self) -> dict[bytes, Evidence]:
        return {ban.peer: ban.evidence for ban in self.bans.all}

    def give_up(self, now_s: float) -> None:
        """A reduction in which nothing moves ends in a real run as well (membership/attempt.py):
        who has found a liar sends nothing more, and those who have not wait for it."""
        audit = self.audit
        if audit is None or self.gate_s is None or now_s - self.gate_s < STALL_S:
            return
        if not self.outcome and audit.step is AuditStep.REDUCE:
            work, me = audit.terms.work, audit.index
            mine = work.shards.get(me, [])
            lacking = {s for s in work.counted for chunk in mine if (s, chunk) not in self.got}
            owners = work.plan.owners
            lacking |= {owner for c, owner in enumerate(owners) if c not in self.results} - {me}
            names = audit.terms.participants
            self.outcome, self.failed = "failed", tuple(names[index] for index in sorted(lacking))


def array(data: bytes) -> U8:
    return np.frombuffer(data, np.uint8)
