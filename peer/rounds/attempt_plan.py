"""Work out what an attempt computes, from its BEGIN and the run's specification.

Everybody works it out alike: how the result is encoded and cut, what is kept of earlier attempts,
which rule takes the place of the mean, who owns which chunks, and, where the run is audited, the
terms that every statement about the attempt names (peer/verify/terms.py).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from atoll.collectives import (
    ChunkGrid,
    ReducePlan,
    get_codec,
    grid_for,
    pairwise_plan,
    shared_plan,
)
from atoll.collectives.audit.sketch import AUDITED_PEERS_MAX
from atoll.collectives.codecs import Decoder
from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.collectives.robust import RobustRule
from atoll.optim.spec import RunSpec, parse_blob, rule_key, shard_chunks_max
from atoll.peer.membership.kept_chunks import Kept, parse_kept
from atoll.peer.membership.messages import Begin
from atoll.peer.rounds.entries import INIT, STEP
from atoll.peer.rounds.state import ReplicatedState
from atoll.peer.verify.terms import AuditTerms


def shape_of(begin: Begin, state: ReplicatedState | None) -> tuple[Decoder, ChunkGrid]:
    """Return how the result of an attempt is encoded, and how it is cut into chunks.

    RemoteProtocolError if that follows from a state that is not here.
    """
    if begin.kind == INIT:
        _, manifest = parse_blob(begin.blob)
        return get_codec("float32"), manifest.grid
    if begin.operation is not None:
        return get_codec(begin.operation.codec), grid_for(begin.operation.elements)
    if state is None:
        raise RemoteProtocolError(f"round {begin.round} is begun, but there is no state yet")
    return state.spec.result_codec(begin.weights), state.fragment_grid(begin.fragment)


def kept_of(begin: Begin, members: int, chunks: int) -> tuple[Kept, ...]:
    """Return what an attempt keeps of those before it; RemoteProtocolError if it makes no sense.

    ``members``: how many the view has; ``chunks``: of the result.
    """
    try:
        kept = parse_kept(begin.kept, members, len(begin.origins))
    except ValueError as error:
        raise RemoteProtocolError(f"BEGIN of round {begin.round}: {error}") from error
    if kept and kept[-1].chunk >= chunks:
        raise RemoteProtocolError(f"BEGIN keeps chunk {kept[-1].chunk} of {chunks}")
    return kept


def plan_of(
    begin: Begin, grid: ChunkGrid, kept: Collection[int], rule: RobustRule | None = None
) -> ReducePlan:
    """Return the reduction plan of an attempt; all chunks but the ``kept`` ones are reduced.

    ``rule``: what takes the place of the mean. ConfigError if the attempt makes no plan, as where
    the rule needs more peers.
    """
    layout = begin.layout
    if layout is not None and layout.is_pairwise:
        plan = pairwise_plan(begin.participants, begin.weights, grid, kept)
    else:
        shares = layout.shares if layout is not None else (1,) * len(begin.participants)
        shape = layout.routes() if layout is not None else None
        plan = shared_plan(begin.participants, begin.weights, grid, kept, shares, shape)
    if begin.operation is not None:
        return replace(plan, fold=begin.operation.op)
    if rule is not None:
        return replace(plan, rule=rule, key=rule_key(begin.lineage, begin.round))
    return plan


def rule_of(begin: Begin, state: ReplicatedState | None) -> RobustRule | None:
    """Return the rule that takes the place of the mean in this round; None if it bears nobody."""
    rule = state.spec.rule if state is not None and begin.kind == STEP else None
    return None if rule is None or rule.is_mean else rule


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
