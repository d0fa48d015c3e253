"""The terms of an audited attempt (peer/audit/terms.py): of its BEGIN and the specification."""

from __future__ import annotations

from atoll.collectives import ChunkGrid
from atoll.collectives.errors import ConfigError
from atoll.optim.spec import RunSpec
from atoll.peer.audit.terms import AUDITED_PEERS_MAX, AuditTerms
from atoll.peer.group.messages import Begin
from atoll.peer.rounds.entries import STEP

__all__ = ["terms_of"]


def terms_of(begin: Begin, spec: RunSpec, grid: ChunkGrid) -> AuditTerms | None:
    """The terms of an attempt; None if it is not audited. ConfigError where it cannot be."""
    if not spec.audit or begin.kind != STEP:
        return None
    count, layout = len(begin.participants), begin.layout
    if count > AUDITED_PEERS_MAX:
        raise ConfigError(
            f"{count} participants; an audited round has {AUDITED_PEERS_MAX} at most",
            fix="found several runs, or found it with audit=False",
        )
    if layout is not None and (layout.is_pairwise or layout.routes() is not None):
        raise ConfigError(f"an audited round is a butterfly, and no {layout.kind}")
    try:
        return AuditTerms(
            lineage=begin.lineage,
            view=begin.view,
            round=begin.round,
            attempt=begin.attempt,
            fragment=begin.fragment,
            participants=begin.participants,
            counted=tuple(weight > 0 for weight in begin.weights),
            shares=layout.shares if layout is not None else (1,) * count,
            rule=spec.aggregate,
            codec=spec.codec,
            elements=grid.total,
            chunk_elements=grid.chunk_elements,
            validators=spec.validators,
        )
    except ValueError as error:
        raise ConfigError(f"round {begin.round} cannot be audited: {error}") from error
