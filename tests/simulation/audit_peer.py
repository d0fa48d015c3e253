"""A participant of simulated audited attempts: what it has of the one at hand, and its bans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from atoll.peer.audit.auditor import Auditor
from atoll.peer.audit.bans import Bans
from atoll.peer.audit.evidence import Evidence
from atoll.peer.audit.terms import AuditTerms
from simulation.liar import Liar

__all__ = ["Peer"]


@dataclass
class Peer:
    """One participant: an auditor, and the reduction's bytes."""

    name: bytes
    signer: Any
    liar: Liar
    auditor: Auditor | None = None
    got: dict[tuple[int, int], bytes] = field(default_factory=dict)
    grams: dict[int, bytes] = field(default_factory=dict)
    results: dict[int, bytes] = field(default_factory=dict)
    own_grams: bytes = b""  # of each own chunk
    matrix: bytes = b""
    gate: bool = False
    made: bool = False
    outcome: str = ""
    failed: tuple[bytes, ...] = ()
    wanted: tuple[tuple[int, int], ...] = ()
    bans: Bans = field(default_factory=lambda: Bans(b""))
    attempts: list[AuditTerms] = field(default_factory=list)  # that it took part in
    paused_until_s: float = 0.0
    early: list[tuple[bytes, object]] = field(default_factory=list)

    @property
    def banned(self) -> dict[bytes, Evidence]:
        return {ban.peer: ban.evidence for ban in self.bans.all}
