"""Keep the attempts at hand on this peer, one for each round under way, and their results.

A retry of a round goes on in the memory of the attempt before: what that has finished may be kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from atoll.collectives import (
    ChunkGrid,
    ReducePlan,
    Reduction,
    RoundResult,
    get_codec,
    grid_for,
    pairwise_plan,
    shared_plan,
)
from atoll.collectives.codecs import F32, Decoder, Gathered
from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.robust import RobustRule
from atoll.optim.spec import parse_blob, rule_key
from atoll.peer.membership.kept_chunks import Kept, parse_kept
from atoll.peer.membership.messages import Begin
from atoll.peer.rounds.audit_terms import terms_of
from atoll.peer.rounds.entries import INIT, STEP, EntryHead, entry_root
from atoll.peer.rounds.resend_stats import SentPayload
from atoll.peer.rounds.salvage import KeptCopy
from atoll.peer.rounds.state import ReplicatedState
from atoll.peer.verify.manager import AuditedAttempt
from atoll.peer.verify.terms import AuditTerms


@dataclass(slots=True)
class AttemptRun:
    """Hold one attempt on this peer, whether it takes part or copies the result."""

    begin: Begin
    kept: tuple[Kept, ...]
    result: RoundResult
    begun_s: float  # when the first attempt at the round began here
    root: bytes = b""  # not empty: the result is complete
    lent: bool = False  # others may read the complete result at any time from now on
    reduction: Reduction | None = None
    copying: KeptCopy | None = None  # kept chunks that were lacking ...
    watching: asyncio.Task[None] | None = None  # ... and whether they come
    fetching: asyncio.Task[None] | None = None  # the whole result, from ``holder``
    holder: bytes = b""
    ended: bool = False
    source: Callable[[int, F32], None] | None = None  # of our part of a step
    tries: int = 1  # attempts at the round that began here, with this one
    sent: SentPayload = field(default_factory=SentPayload)
    again_bytes: int = 0  # payload that the round has cost twice here so far: see resend_stats.py
    rule: RobustRule | None = None  # that bears somebody
    terms: AuditTerms | None = None  # of an audited attempt ...
    audit: AuditedAttempt | None = None  # ... and how it stands
    before: F32 | None = None  # the run's parameters before it, where validators need them

    @property
    def is_read(self) -> bool:
        """Return whether the result is read, so that nobody may write to it any more.

        Else bytes of two attempts would be sent as one.
        """
        return self.lent or (self.reduction is not None and self.reduction.uses_result)

    @property
    def is_reducing(self) -> bool:
        """Return whether its frames are under way, our own or those that others need from us."""
        return self.reduction is not None and not self.ended

    @property
    def progress_bytes(self) -> int:
        return self.reduction.progress_bytes if self.reduction is not None else 0

    def end(self) -> None:
        """End the attempt: no thread writes to the result any more, and what is final stays so."""
        self.ended = True
        if self.audit is not None:
            self.audit.end()
        if self.reduction is not None:
            self.reduction.abort()
        for task in (self.fetching, self.watching):
            if task is not None:
                task.cancel()

    @property
    def finals(self) -> bytes:
        """Return the digests of the chunks that a retry may keep; empty if it may keep none.

        Where every participant has a slot in a chunk, those of an attempt with others would not
        fit: it begins anew. So it does with a robust rule or an audit: nobody is believed to have a
        chunk that others have not.
        """
        if self.rule or self.terms or isinstance(self.result.codec, Gathered):
            return b""
        return self.result.packed_digests

    def root_of(self, digests: list[bytes]) -> bytes:
        begin = self.begin
        return entry_root(begin.origins, self._origin_of(), digests, begin.blob)

    def entry(self, chain: bytes) -> EntryHead:
        """Return the log entry that this result becomes; ``chain`` is the one after it."""
        begin = self.begin
        return EntryHead(
            begin.round,
            begin.kind,
            begin.fragment,
            begin.origins,
            self._origin_of(),
            self.root,
            chain,
            begin.blob,
        )

    def chunks_with(self, peer: bytes) -> list[int]:
        """Return the chunks of the result that have this participant's part in them."""
        begin, origin_of = self.begin, self._origin_of() or bytes(self.result.grid.count)
        weights = [dict(zip(o.participants, o.weights, strict=True)) for o in begin.origins]
        if not weights[0].get(peer):
            return []
        return [chunk for chunk, origin in enumerate(origin_of) if weights[origin].get(peer)]

    def _origin_of(self) -> bytes:
        origins = bytearray(self.result.grid.count if self.kept else 0)
        for item in self.kept:
            origins[item.chunk] = item.origin
        return bytes(origins)


class AttemptTable:
    """Keep the jobs by round. ``spare(nbytes)`` gives memory for a result."""

    def __init__(self, spare: Callable[[int], NDArray[np.uint8]]) -> None:
        self._spare = spare
        self._by_round: dict[int, AttemptRun] = {}
        self._progress_before = 0  # of reductions that are gone
        self.again_bytes = 0  # of all rounds so far

    def get(self, round_number: int) -> AttemptRun | None:
        return self._by_round.get(round_number)

    def at(self, round_number: int, attempt: int) -> AttemptRun | None:
        job = self._by_round.get(round_number)
        return job if job is not None and job.begin.attempt == attempt else None

    @property
    def all(self) -> list[AttemptRun]:
        return list(self._by_round.values())

    @property
    def progress_bytes(self) -> int:
        """Return the progress of all reductions so far, in bytes; it only ever grows."""
        return self._progress_before + sum(job.progress_bytes for job in self.all)

    def drop(self, over: Callable[[int], bool]) -> None:
        """End and forget the jobs of the rounds that are over."""
        for number in [number for number in self._by_round if over(number)]:
            job = self._by_round.pop(number)
            job.end()
            self._forget(job)

    def open(self, begin: Begin, state: ReplicatedState | None, members: int) -> AttemptRun:
        """Return the job of a new attempt; the one before at this round has been ended.

        Takes a while for INIT and where a result has to be copied. AtollError for an opening that
        makes no sense, MemoryError.
        """
        codec, grid = _shape_of(begin, state)
        kept = _kept_of(begin, members, grid.count)
        if kept and isinstance(codec, Gathered):
            raise RemoteProtocolError(f"BEGIN of round {begin.round} keeps chunks with other slots")
        rule = rule_of(begin, state)
        terms = terms_of(begin, state.spec, grid) if state is not None else None
        if kept and (rule is not None or terms is not None):
            why = "under a rule" if terms is None else "of an attempt that was not verified"
            raise RemoteProtocolError(f"BEGIN of round {begin.round} keeps chunks {why}")
        if rule is not None:  # of a result that is copied, too
            rule.check(sum(weight > 0 for weight in begin.weights))
        before = self._by_round.get(begin.round)
        begun_s = time.monotonic() if before is None else before.begun_s
        if before is None or (before.result.codec, before.result.grid) != (codec, grid):
            result = RoundResult(codec, grid, self._spare)
        elif before.is_read:
            result = before.result.copy(self._spare)
        else:
            result = before.result
        if before is not None:
            self._forget(before)
        job = AttemptRun(begin, kept, result, begun_s, rule=rule, terms=terms)
        self._by_round[begin.round] = job
        return job

    def begun_again(self, before: AttemptRun, job: AttemptRun) -> None:
        """Carry over what was sent and counted from ``before`` to ``job``, which follows it.

        Both are at the same round. Called in the event loop, as is ``sent_again``.
        """
        job.tries, job.again_bytes = before.tries, before.again_bytes
        if _attempt_of(before.begin) == _attempt_of(job.begin):  # what it has not got is fetched
            job.sent, job.source = before.sent, before.source
            return
        job.tries += 1
        in_vain_bytes = job.sent.carry(before.sent, {item.chunk for item in job.kept})
        self.sent_again(job.begin.round, in_vain_bytes)

    def sent_again(self, round_number: int, nbytes: int) -> None:
        self.again_bytes += nbytes
        job = self.get(round_number)
        if job is not None:
            job.again_bytes += nbytes

    def _forget(self, job: AttemptRun) -> None:
        """Free the buffers of an ended job at once, not with the next collection of cycles."""
        self._progress_before += job.progress_bytes
        job.reduction = job.copying = None


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


def _attempt_of(begin: Begin) -> tuple[bytes, int, int]:
    return begin.lineage, begin.view, begin.attempt


def _shape_of(begin: Begin, state: ReplicatedState | None) -> tuple[Decoder, ChunkGrid]:
    if begin.kind == INIT:
        _, manifest = parse_blob(begin.blob)
        return get_codec("float32"), manifest.grid
    if begin.operation is not None:
        return get_codec(begin.operation.codec), grid_for(begin.operation.elements)
    if state is None:
        raise RemoteProtocolError(f"round {begin.round} is begun, but there is no state yet")
    return state.spec.result_codec(begin.weights), state.fragment_grid(begin.fragment)


def _kept_of(begin: Begin, members: int, chunks: int) -> tuple[Kept, ...]:
    try:
        kept = parse_kept(begin.kept, members, len(begin.origins))
    except ValueError as error:
        raise RemoteProtocolError(f"BEGIN of round {begin.round}: {error}") from error
    if kept and kept[-1].chunk >= chunks:
        raise RemoteProtocolError(f"BEGIN keeps chunk {kept[-1].chunk} of {chunks}")
    return kept
