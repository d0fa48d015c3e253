"""Work out the terms of an audited attempt from its BEGIN and the run's specification.

What the terms are: peer/verify/terms.py.
"""

from __future__ import annotations

from atoll.collectives import ChunkGrid
from atoll.collectives.audit.sketch import AUDITED_PEERS_MAX
from atoll.collectives.errors import ConfigError
from atoll.optim.spec import RunSpec, shard_chunks_max
from atoll.peer.membership.messages import Begin
from atoll.peer.rounds.entries import STEP
from atoll.peer.verify.terms import AuditTerms


def terms_of(begin: Begin, spec: RunSpec, grid: ChunkGrid) -> AuditTerms | None:
    """Return the terms of an attempt, or None if it is not audited.

    ConfigError where it cannot be audited: too many participants, a layout that is no butterfly, or
    shards that are too large.
    """
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
    planned = layout.shares if layout is not None else (1,) * count
    counted = tuple(weight > 0 for weight in begin.weights)
    try:
        return AuditTerms(
            lineage=begin.lineage,
            view=begin.view,
            round=begin.round,
            attempt=begin.attempt,
            fragment=begin.fragment,
            participants=begin.participants,
            counted=counted,
            shares=_shares_that_fit(spec, planned, sum(counted), grid.count),
            rule=spec.aggregate,
            codec=spec.codec,
            elements=grid.total,
            chunk_elements=grid.chunk_elements,
            validators=spec.validators,
        )
    except ValueError as error:
        raise ConfigError(f"round {begin.round} cannot be audited: {error}") from error


def _shares_that_fit(
    spec: RunSpec, planned: tuple[int, ...], count: int, chunks: int
) -> tuple[int, ...]:
    """Return the planned shares, or equal ones where some owner could not sign for its shard.

    What an owner has to say of its shard must fit. All peers work the shares out alike. ConfigError
    if equal ones are too large as well.
    """
    most = shard_chunks_max(spec.rule, count)
    for shares in (planned, tuple(min(share, 1) for share in planned)):
        if sum(shares) < 1 or -(-max(shares) * chunks // sum(shares)) <= most:
            return shares
    owners = sum(share > 0 for share in planned)
    raise ConfigError(
        f"{owners} owners of {chunks:,} chunks under {spec.aggregate}; where {count} count, each"
        f" can own {most:,} in an audited round",
        fix="cut the model into more fragments, or take a rule by coordinate (trimmed, median)",
    )
