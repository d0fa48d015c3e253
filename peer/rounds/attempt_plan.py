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
    pairwise_plan,
    shared_plan,
)
from atoll.collectives.chunks import operation_grid
from atoll.collectives.codecs import Decoder, mean_codec
from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.robust import RobustRule
from atoll.optim.run_spec import parse_blob, round_key
from atoll.peer.membership.kept_chunks import Kept, parse_kept
from atoll.peer.membership.messages import Begin
from atoll.peer.rounds.entries import INIT, STEP
from atoll.peer.rounds.state import ReplicatedState


def shape_of(begin: Begin, state: ReplicatedState | None) -> tuple[Decoder, ChunkGrid]:
    """Return how the result of an attempt is encoded, and how it is cut into chunks.

    RemoteProtocolError if that follows from a state that is not here.
    """
    if begin.kind == INIT:
        _, manifest = parse_blob(begin.blob)
        return get_codec("float32"), manifest.grid
    if begin.operation is not None:
        grid = operation_grid(begin.operation.elements, len(begin.participants))
        return get_codec(begin.operation.codec), grid
    owners = begin.owners
    if state is None and owners is not None and owners.elements:
        return mean_codec(owners.codec), ChunkGrid(owners.elements, owners.chunk_elements)
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
    if begin.owners is not None:
        plan = _owned_by_witnesses(begin, grid, kept)
    elif layout is not None and layout.is_pairwise:
        plan = pairwise_plan(begin.participants, begin.weights, grid, kept)
    else:
        shares = layout.shares if layout is not None else (1,) * len(begin.participants)
        shape = layout.routes() if layout is not None else None
        plan = shared_plan(begin.participants, begin.weights, grid, kept, shares, shape)
    if begin.operation is not None:
        return replace(plan, fold=begin.operation.op)
    return replace(plan, rule=rule, key=round_key(begin.lineage, begin.round))


def _owned_by_witnesses(begin: Begin, grid: ChunkGrid, kept: Collection[int]) -> ReducePlan:
    weights = dict(zip(begin.participants, begin.weights, strict=True))
    everyone = begin.exchange
    shares = [int(peer in begin.helpers) for peer in everyone]
    weighed = [weights.get(peer, 0.0) for peer in everyone]
    return shared_plan(everyone, weighed, grid, kept, shares)


def rule_of(begin: Begin, state: ReplicatedState | None) -> RobustRule | None:
    """Return the rule that takes the place of the mean in this round; None if it bears nobody."""
    rule = state.spec.rule if state is not None and begin.kind == STEP else None
    return None if rule is None or rule.is_mean else rule
