"""Define the terms of an audited attempt: what everybody who takes part has to agree on. Pure.

Every statement names their digest, so that a statement of one attempt means nothing in another, and
whoever looks at evidence later knows what was being computed: by whom, over how many elements, cut
into which chunks, encoded how, and aggregated by which rule.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Final

from atoll.collectives.audit.sketch import AUDITED_PEERS_MAX
from atoll.collectives.chunks import ChunkGrid
from atoll.collectives.codecs import Codec, get_codec
from atoll.collectives.errors import ConfigError
from atoll.collectives.robust import RobustRule, get_rule
from atoll.collectives.robust.rule import RULE_CHARACTERS_MAX
from atoll.collectives.schedule.plan import ReducePlan, shared_plan
from atoll.optim.run_spec import VALIDATORS_MAX, RunSpec, round_key, shard_chunks_max
from atoll.peer.membership.messages import STEP, Begin
from atoll.peer.membership.view import Attempts, Lineage, Lives, PeerId, Rounds, Views
from atoll.peer.net.wire import Within, encode, message
from atoll.peer.rounds.entries import CHUNKS_MAX, Fragment

CODEC_CHARACTERS_MAX: Final = 32
MEAN: Final = "mean"  # RunSpec.aggregate

_Share = Annotated[int, Within(0, CHUNKS_MAX)]
_Count = Annotated[int, Within(1, 1 << 48)]


@message(wire="AuditTerms")
@dataclass(frozen=True, slots=True)
class AuditTerms:
    """State who takes part in an attempt at a round, and what they compute.

    ``participants`` in ascending order of peer id; those that are ``counted`` have a part in the
    aggregate, all alike; ``shares`` says who owns how much of the chunks (plan.shared_plan).
    ``lives`` are the processes that take part: what one of them has signed says nothing of a later
    one, which has other secrets and other parts.
    """

    lineage: Lineage
    view: Views
    round: Rounds
    attempt: Attempts
    fragment: Fragment
    participants: Annotated[tuple[PeerId, ...], Within(1, AUDITED_PEERS_MAX)]
    counted: Annotated[tuple[bool, ...], Within(1, AUDITED_PEERS_MAX)]
    shares: Annotated[tuple[_Share, ...], Within(1, AUDITED_PEERS_MAX)]
    rule: Annotated[str, Within(1, RULE_CHARACTERS_MAX)]
    codec: Annotated[str, Within(1, CODEC_CHARACTERS_MAX)]
    elements: _Count
    chunk_elements: _Count
    validators: Annotated[int, Within(0, VALIDATORS_MAX)] = 0  # how many take local steps again
    lives: Annotated[tuple[Lives, ...], Within(0, AUDITED_PEERS_MAX)] = ()

    def __post_init__(self) -> None:
        count = len(self.participants)
        if list(self.participants) != sorted(set(self.participants)):
            raise ValueError("participants are in order, each of them once")
        if len(self.counted) != count or len(self.shares) != count:
            raise ValueError("each participant has a share, and counts or does not")
        if self.lives and len(self.lives) != count:
            raise ValueError("each participant has a life")
        if not (self.rule + self.codec).isprintable():
            raise ValueError("the names of a rule and a codec are printable")
        if not any(self.counted) or not any(self.shares):
            raise ValueError("somebody counts, and somebody owns a share")
        if self.elements > self.chunk_elements * CHUNKS_MAX:
            raise ValueError(f"more than {CHUNKS_MAX} chunks")

    @property
    def digest(self) -> bytes:
        return _digest(self)

    def life_of(self, peer: bytes) -> int:
        """Return which process of a participant takes part; 0 where its number is not known."""
        return self.lives[self.participants.index(peer)] if self.lives else 0

    @property
    def work(self) -> ReductionTerms:
        """Return what the terms mean.

        ConfigError if a rule or a codec of that name is not known here, or makes no plan.
        """
        return _work(self)

    @property
    def jury(self) -> list[PeerId]:
        """Return the participants whose word counts where nothing else proves anything.

        Who is on probation has shown nothing yet: else it would cost nothing to be many.
        """
        return [p for p, counts in zip(self.participants, self.counted, strict=True) if counts]

    @property
    def majority(self) -> int:
        """Return how many of the jury are more than half.

        One of them at least is honest, where most are.
        """
        return len(self.jury) // 2 + 1


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
            lives=begin.lives,
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


class ReductionTerms:
    """Work out what terms mean: the plan of the reduction, and how its numbers are encoded."""

    def __init__(self, terms: AuditTerms) -> None:
        self.terms = terms
        self.grid = ChunkGrid(terms.elements, terms.chunk_elements)
        self.codec = get_codec(terms.codec)
        weights = [float(counts) for counts in terms.counted]
        plan = shared_plan(terms.participants, weights, self.grid, (), terms.shares)
        rule = get_rule(terms.rule) if terms.rule != MEAN else None
        self.rule: RobustRule | None = None if rule is None or rule.is_mean else rule
        self.plan: ReducePlan = plan
        if self.rule is not None:
            key = round_key(terms.lineage, terms.round)
            self.plan = ReducePlan(
                plan.participants, plan.weights, plan.owners, rule=self.rule, key=key
            )
        self.counted = [index for index, counts in enumerate(terms.counted) if counts]

    @property
    def part_codec(self) -> Codec:
        return self.codec.part_codec

    @cached_property
    def shards(self) -> dict[int, list[int]]:
        """Return the chunks of each participant that owns any."""
        found: dict[int, list[int]] = {}
        for chunk, owner in enumerate(self.plan.owners):
            found.setdefault(owner, []).append(chunk)
        return found


@lru_cache(16)
def _digest(terms: AuditTerms) -> bytes:
    return hashlib.sha256(b"atoll audit terms 1\0" + encode(terms)).digest()


@lru_cache(16)
def _work(terms: AuditTerms) -> ReductionTerms:
    return ReductionTerms(terms)
