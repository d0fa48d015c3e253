"""Carry out one attempt at a round on this peer: what it is, what it may do, and its life.

A peer reduces an attempt with the others (``start``), copies its whole result from one of them
(``fetch``), or does both, one after the other. Reductions run in threads of their own and fetches
in tasks, so that no round waits for another one. The retry of a round goes on in the memory of the
attempt before: what that has finished may be kept (salvage.py).

Of an audited attempt all parts are promised before one is sent: the whole contribution is encoded
first, because its digests are what a peer commits to. So it takes the memory of one encoded vector
more, and of the parts of the shard that this peer owns another.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from atoll.collectives import ReducePlan, Reduction, RoundResult, get_codec
from atoll.collectives.chunks import ChunkGrid
from atoll.collectives.codecs import F32, U8, Decoder, Gathered
from atoll.collectives.digests import quick_digest, strong_digest
from atoll.collectives.engine.accumulate import PartAuditor
from atoll.collectives.engine.parts import Contribution
from atoll.collectives.engine.send import Outlet, Receipt
from atoll.collectives.errors import AtollError, LocalProtocolError, RemoteProtocolError
from atoll.collectives.feedback import Compensated
from atoll.collectives.robust import RobustRule
from atoll.optim.pseudo_gradient import submission_layout
from atoll.peer.durable.round_files import RoundName
from atoll.peer.membership.kept_chunks import Kept
from atoll.peer.membership.messages import REDUCE, Begin
from atoll.peer.membership.view import View, short
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.rounds.attempt_plan import kept_of, plan_of, rule_of, shape_of
from atoll.peer.rounds.entries import INIT, STEP, EntryHead, entry_root
from atoll.peer.rounds.error_feedback import Residual
from atoll.peer.rounds.log import RoundLog
from atoll.peer.rounds.outputs import SETTLE_POLL_S, SETTLE_S, TrainerOutputs
from atoll.peer.rounds.salvage import FetchKept, KeptCopy, KeptPlan, header_of, pack_chunks
from atoll.peer.rounds.state import ReplicatedState
from atoll.peer.rounds.verifier import AttemptVerifier, AuditedParts, VerifiedAttempt
from atoll.peer.state_sync.client import ResultFetcher
from atoll.peer.streams.manager import FrameOutlet, Streams
from atoll.peer.streams.router import Router
from atoll.peer.streams.stream import DataStream

if TYPE_CHECKING:
    from atoll.peer.verify.terms import AuditTerms

# Twice this at most without a chunk of 1 MiB: it comes at less than 1 Mbit/s, or not at all.
KEPT_STALL_S = 5.0

Source = Callable[[int, F32], None]


@dataclass(slots=True)
class Replica:
    """Hold the state, the last rounds, the input of this peer's trainer, and the view.

    Also what codecs have left out of that input.
    """

    log: RoundLog
    state: ReplicatedState | None = None
    # The region whose submission the membership machine has accepted last. It is not cleared by
    # rounds: whether an attempt may read it is the machine's decision.
    inputs: F32 | None = None
    encoded: U8 | None = None  # in place of it, where it was encoded when it was handed over
    steps: bytes = b""  # what its trainer has committed to of the local steps that led to them
    outputs: TrainerOutputs = field(default_factory=TrainerOutputs)
    view: View | None = None
    residual: Residual = field(default_factory=Residual)


class AttemptPort(Protocol):
    """Serve the attempts of a peer: what they need of it, and who hears what came of them.

    All but ``threadsafe`` and ``note_progress`` are called in the event loop.
    """

    me: bytes
    host: ConnectionManager
    replica: Replica
    router: Router
    streams: Streams
    audits: AttemptVerifier
    fetcher: ResultFetcher

    def is_wanted(self, begin: Begin, /) -> bool:
        """Return whether this attempt is still to be carried out."""

    def failed(self, begin: Begin, peers: tuple[bytes, ...], why: str, /) -> None:
        """Hear that an attempt has failed, because of these peers; of none if it is our own."""

    def reduced(self, begin: Begin, root: bytes, /) -> None:
        """Hear that the result of an attempt is complete, with this root."""

    def note_busy(self) -> None:
        """Look whether any attempt is being reduced."""

    def ended(self, run: AttemptRun, /) -> None:
        """Hear that an attempt is over."""

    def note_progress(self, nbytes: int, /) -> None:
        """Count so many bytes of local work as progress; from any thread."""

    def log(self, line: str, /) -> None:
        """Write a line about rounds."""

    def spawn(self, work: Coroutine[Any, Any, None], /) -> None:
        """Run ``work`` as a task that ends with the peer."""

    def threadsafe(self, act: Callable[..., None], *arguments: object) -> None:
        """Call ``act`` in the event loop soon; from any thread."""


class AttemptRun:
    """Carry out one attempt, whether this peer takes part or copies the result.

    Lives in the event loop; what threads report comes back into it (``AttemptPort.threadsafe``).
    """

    def __init__(
        self,
        peer: AttemptPort,
        begin: Begin,
        result: RoundResult,
        kept: tuple[Kept, ...],
        begun_s: float,
        *,
        rule: RobustRule | None,
        terms: AuditTerms | None,
    ) -> None:
        self._peer = peer
        self.begin, self.result, self.kept = begin, result, kept
        self.rule = rule  # that bears somebody
        self.terms = terms  # of an audited attempt ...
        self.audit: VerifiedAttempt | None = None  # ... and how it stands
        self.begun_s = begun_s  # when the first attempt at the round began here
        self.root = b""  # not empty: the result is complete
        self.lent = False  # others may read the complete result at any time from now on
        self.in_outputs = False  # the reduction works in the trainer's memory
        self.saving = False  # it is being written to the disk
        self.initial: ReplicatedState | None = None  # of INIT: its result is these parameters
        self.ended = False
        self.reduction: Reduction | None = None
        self.copying: KeptCopy | None = None  # kept chunks that were lacking ...
        self._watching: asyncio.Task[None] | None = None  # ... and whether they come
        self.fetching: asyncio.Task[None] | None = None  # the whole result, from ``holder``
        self.holder = b""
        self.source: Source | None = None  # of our part of a step
        self.before: F32 | None = None  # the run's parameters before it, where validators need them
        self.tries = 1  # attempts at the round that began here, with this one
        self.sent = SentPayload()
        self.again_bytes = 0  # payload that the round has cost twice here so far

    # ------------------------------------------------------------ what it is

    @property
    def name(self) -> RoundName:
        """Return the name of the file of its result."""
        return RoundName(self.begin.round, self.begin.view, self.begin.attempt)

    @property
    def is_read(self) -> bool:
        """Return whether the result is read, so that nobody may write to it any more.

        Else bytes of two attempts would be sent as one.
        """
        in_use = self.reduction is not None and self.reduction.uses_result
        return self.lent or self.saving or in_use

    def lend(self) -> None:
        """Let others read the complete result at any time from now on."""
        if self.in_outputs and not self.lent:  # which is the trainer's once it is committed
            self.result = self.result.copy(self._peer.replica.log.spare)
        self.lent = True

    def settled(self, limit_s: float = SETTLE_S) -> bool:
        """Wait until the reduction, which has ended, has left the result; return whether it has."""
        by_s = time.monotonic() + limit_s
        while self.reduction is not None and self.reduction.uses_result:
            if time.monotonic() > by_s:
                return False
            time.sleep(SETTLE_POLL_S)
        return True

    @property
    def is_reducing(self) -> bool:
        """Return whether its frames are under way, our own or those that others need from us."""
        return self.reduction is not None and not self.ended

    @property
    def progress_bytes(self) -> int:
        return self.reduction.progress_bytes if self.reduction is not None else 0

    @property
    def finals(self) -> bytes:
        """Return the digests of the chunks that a retry may keep; empty if it may keep none.

        Where every participant has a slot in a chunk, those of an attempt with others would not
        fit: it begins anew. What may not be kept for want of trust is the machine's decision
        (``Terms.keeps_nothing``).
        """
        if isinstance(self.result.codec, Gathered):
            return b""
        return self.result.packed_digests

    def missing(self) -> tuple[bytes, ...]:
        """Return the participants whose parts of the reduction have not all come."""
        late = sorted(self.reduction.missing()) if self.reduction is not None else ()
        return tuple(self.begin.exchange[index] for index in late)

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

    def _origin_of(self) -> bytes:
        origins = bytearray(self.result.grid.count if self.kept else 0)
        for item in self.kept:
            origins[item.chunk] = item.origin
        return bytes(origins)

    def _chunks_with(self, peer: bytes) -> list[int]:
        """Return the chunks of the result that have this participant's part in them."""
        begin, origin_of = self.begin, self._origin_of() or bytes(self.result.grid.count)
        weights = [dict(zip(o.participants, o.weights, strict=True)) for o in begin.origins]
        if not weights[0].get(peer):
            return []
        return [chunk for chunk, origin in enumerate(origin_of) if weights[origin].get(peer)]

    # ------------------------------------------------------------ its end

    def end(self) -> None:
        """End the attempt: no thread writes to the result any more, and what is final stays so.

        Its threads end by themselves: what they still send carries its number and is dropped on
        arrival.
        """
        if not self.ended:
            self.ended = True
            self._peer.ended(self)
        if self.audit is not None:
            self.audit.end()
        if self.reduction is not None:
            self.reduction.abort()
        for task in (self.fetching, self._watching):
            if task is not None:
                task.cancel()

    def free(self) -> None:
        """Free the buffers of an ended attempt at once, not with the next collection of cycles."""
        self.reduction = self.copying = self.audit = None

    def keep_residual(self) -> None:
        """Take over what the codec leaves out of our part.

        The result is about to be applied, and θ is still the one before it.
        """
        me, source = self._peer.me, self.source
        chunks = self._chunks_with(me)
        if chunks and isinstance(source, Compensated):
            index = self.begin.participants.index(me)
            residual = self._peer.replica.residual
            residual.commit(source, self.result, index, self._noted(chunks))

    def _noted(self, chunks: list[int]) -> Iterator[int]:
        """Yield chunks, and note progress after each: a coarse codec takes its time again."""
        for chunk in chunks:
            yield chunk
            self._peer.note_progress(self.result.layout.size(chunk))

    def failed(self, peers: tuple[bytes, ...], why: str) -> None:
        self._peer.failed(self.begin, tuple(p for p in peers if p != self._peer.me), why)

    def reduced(self, root: bytes) -> None:
        """Report that the result is complete, unless the attempt was aborted.

        Attempts of the next view count from 1 again, so what is said late of this one would be
        taken for that one's.
        """
        if not self.root and not self.ended:
            self.root = root
            self._peer.reduced(self.begin, root)

    # ------------------------------------------------------------ reducing

    def start(self) -> None:
        """Begin to reduce; fail if this peer's submission is gone."""
        contribution = self._contribution()
        if contribution is None:
            self.failed((), "this peer's submission is gone")
            return
        if self.terms is not None:
            steps = self._peer.replica.steps
            self._peer.spawn(self._peer.audits.begin(self, self.terms, contribution.source, steps))
            return
        kept = {item.chunk: item.digest for item in self.kept}
        self._reduce(
            plan_of(self.begin, self.result.grid, kept, self.rule),
            contribution,
            kept=kept,
            # The root of many chunks takes a while: computed in the thread that brings the last.
            on_done=lambda digests: self._peer.threadsafe(self.reduced, self.root_of(digests)),
        )

    def _contribution(self) -> Contribution | None:
        """Return what gives this peer's own part; None if there is none."""
        replica, begin, grid = self._peer.replica, self.begin, self.result.grid
        inputs, state = replica.inputs, replica.state
        if begin.kind == INIT and self._peer.me not in begin.counted:
            return Contribution(_nothing)  # it hands on what another one has
        if self._peer.me in begin.helpers:
            return Contribution(_nothing)  # it adds up what others have
        if begin.kind == STEP and state is not None and replica.encoded is not None:
            return _encoded_contribution(state, replica.encoded, begin.fragment)
        if inputs is None:
            return None
        if begin.kind == STEP:  # computed from the submission of the trainer
            if state is None or inputs.size != state.grid.total:
                return None
            self.source = replica.residual.source(state, inputs, begin)
            return Contribution(self.source)
        if inputs.size != grid.total:
            return None

        def own(chunk: int) -> F32:
            """Return the part of any other round: it lies in the trainer's memory as it is."""
            lo, hi = grid.bounds(chunk)
            return inputs[lo:hi]

        def copy(chunk: int, out: F32) -> None:
            np.copyto(out, own(chunk))

        return Contribution(copy, own)

    def _reduce(
        self,
        plan: ReducePlan,
        contribution: Contribution,
        *,
        on_done: Callable[[list[bytes]], None],
        kept: Mapping[int, bytes] | None = None,
        auditor: PartAuditor | None = None,
    ) -> None:
        """Start the reduction, and a sender for each of its destinations as streams open."""
        peer, begin = self._peer, self.begin
        reduction = self.reduction = Reduction(
            plan=plan,
            me=plan.participants.index(peer.me),
            contribution=contribution,
            result=self.result,
            on_done=on_done,
            on_failed=lambda index, why: peer.threadsafe(
                self.failed, (plan.participants[index],), why
            ),
            kept=kept,
            auditor=auditor,
        )
        copying = self.copying = KeptCopy(self._kept_plan(reduction), self.result.layout, self)
        peer.router.expect_attempt(begin, reduction, copying)
        wanted = sorted(reduction.destinations)
        stripes = {index: peer.streams.stripes(begin.exchange[index]) for index in wanted}
        reduction.start({}, stripes)
        peer.note_busy()
        peer.streams.begin_round(begin.round)
        for index, count in stripes.items():
            for stripe in range(count):
                stream = peer.streams.open_to(begin.exchange[index], stripe)
                if stream is None:
                    peer.spawn(self._dial(reduction, index, stripe))
                    continue
                try:
                    self._attach(reduction, index, stream)
                except RuntimeError as error:
                    self.failed((), f"no thread sends for this peer: {error}")
        if reduction.lacking and peer.me not in begin.helpers:
            copying.start()
            self._watching = asyncio.get_running_loop().create_task(_watch(copying))

    async def _dial(self, reduction: Reduction, index: int, stripe: int) -> None:
        other = self.begin.exchange[index]
        try:
            stream = await self._peer.streams.to(other, stripe)
        except AtollError as error:
            if not stripe:  # the others only make it faster
                self.failed((other,), error.what)
            return
        self._attach(reduction, index, stream)

    def _attach(self, reduction: Reduction, index: int, stream: DataStream) -> None:
        outlet = FrameOutlet(stream, header_of(self.begin))
        reduction.start({index: CountingOutlet(outlet, self.sent)})

    def stream_broken(self, other: bytes, why: str) -> None:
        """Fail if the reduction still lacks something of this peer, whose last stream has ended."""
        if self.reduction is None or other not in self.begin.exchange:
            return
        if self.begin.exchange.index(other) in self.reduction.missing():
            self.failed((other,), why)

    # ------------------------------------------------------------ an audited attempt (AuditedRun)

    def is_wanted(self) -> bool:
        return self._peer.is_wanted(self.begin) and not self.ended

    def send_parts(self, parts: AuditedParts) -> None:
        assert self.terms is not None
        assert self.source is not None
        self._reduce(
            self.terms.work.plan,
            Contribution(self.source, coded=parts.own_part),
            auditor=parts,
            on_done=lambda digests: self._peer.threadsafe(self._compare, digests),
        )

    def passed(self) -> None:
        self._peer.spawn(self._passed())

    def _compare(self, digests: list[bytes]) -> None:
        if self.audit is not None and self.reduction is not None and not self.ended:
            views = [self.result.view(chunk) for chunk in range(self.result.grid.count)]
            self.audit.reduced(views, digests, self.reduction.inner_products)

    async def _passed(self) -> None:
        self.reduced(await asyncio.to_thread(self.root_of, list(self.result.digests)))

    # ------------------------------------------------------------ kept chunks (KeptPort)

    def _kept_plan(self, reduction: Reduction) -> KeptPlan:
        view, me = self._peer.replica.view, self._peer.me
        members = [member.peer for member in view.members] if view is not None else []
        lacking = {
            item.chunk: [members[holder] for holder in item.holders if members[holder] != me]
            for item in self.kept
            if item.chunk in reduction.lacking
        }
        return KeptPlan(lacking, self.begin.exchange.index(me))

    def put_kept(self, chunk: int, data: U8) -> bool:
        reduction = self.reduction
        return reduction is None or reduction.put_kept(chunk, data)

    def ask_kept(self, holder: bytes, chunks: list[int]) -> None:
        self._peer.threadsafe(self._ask_kept, holder, chunks)

    def kept_failed(self, holder: bytes, why: str) -> None:
        self._peer.threadsafe(self.failed, (holder,) if holder else (), why)

    def _ask_kept(self, holder: bytes, chunks: list[int]) -> None:
        begin, peer = self.begin, self._peer
        packed = pack_chunks(chunks)
        question = FetchKept(begin.lineage, begin.view, begin.round, begin.attempt, packed)
        if peer.is_wanted(begin) and not peer.host.send(holder, question):
            assert self.copying is not None
            self.copying.gave_up(holder, f"no control link to its holder {short(holder)}")

    # ------------------------------------------------------------ copying the whole result

    def needs(self, holder: bytes) -> bool:
        """Return whether an order to copy the result from this peer adds something.

        Who takes part in an audit believes nobody, and passes or gives up.
        """
        if self.terms is not None and self._peer.me in self.begin.participants:
            return False
        under_way = self.fetching is not None and not self.fetching.done()
        return not (self.root or (under_way and self.holder == holder))

    def fetch(self, holder: bytes) -> None:
        """Begin to copy what the result lacks from a peer that has it."""
        self.holder = holder
        self.fetching = asyncio.get_running_loop().create_task(self._fetch())

    async def _fetch(self) -> None:
        digests = self.result.digests
        try:
            if not all(digests):  # else the reduction was faster than the order to fetch
                digests = await self._peer.fetcher.fetch(self.begin, self.holder, self.result)
        except AtollError as error:  # the coordinator repeats the order, with another holder
            self._peer.log(f"fetching the result of round {self.begin.round} failed: {error.what}")
            return
        self.result.digests = digests
        self.reduced(await asyncio.to_thread(self.root_of, digests))


def _result_in(state: ReplicatedState, codec: Decoder, grid: ChunkGrid) -> RoundResult:
    """Return the result of INIT in the memory that it is for: these are the first parameters."""
    memory: U8 = state.theta.view(np.uint8)
    return RoundResult(codec, grid, lambda nbytes: memory[:nbytes])


def _encoded_contribution(
    state: ReplicatedState, encoded: U8, fragment: int
) -> Contribution | None:
    """Return the part of a step that lies in the trainer's memory as it travels."""
    codec, layout = get_codec(state.spec.codec), submission_layout(state.spec, state.manifest)
    first, _ = state.chunks_of(fragment)
    if encoded.size < layout.total_bytes:
        return None

    def coded(chunk: int) -> U8:
        start, end = layout.slice(first + chunk)
        return encoded[start:end]

    def decoded(chunk: int, out: F32) -> None:
        codec.decode(coded(chunk), out)

    return Contribution(decoded, coded=coded)


def _nothing(chunk: int, out: F32) -> None:
    raise LocalProtocolError(f"a part of chunk {chunk} was asked of a peer that has none")


async def _watch(copying: KeptCopy) -> None:
    while copying.lacking:
        await asyncio.sleep(KEPT_STALL_S)
        copying.check_stalls(f"its holder has sent nothing for {KEPT_STALL_S:.0f} s")


# ------------------------------------------------------------ all attempts at hand


class AttemptTable:
    """Keep the attempts at hand on this peer: the last one at each round under way."""

    def __init__(self, peer: AttemptPort) -> None:
        self._peer = peer
        self._by_round: dict[int, AttemptRun] = {}
        self._progress_before = 0  # of reductions that are gone
        self.again_bytes = 0  # of all rounds so far

    def get(self, round_number: int) -> AttemptRun | None:
        return self._by_round.get(round_number)

    def at(self, round_number: int, attempt: int) -> AttemptRun | None:
        run = self._by_round.get(round_number)
        return run if run is not None and run.begin.attempt == attempt else None

    @property
    def all(self) -> list[AttemptRun]:
        return list(self._by_round.values())

    @property
    def progress_bytes(self) -> int:
        """Return the progress of all reductions so far, in bytes; it only ever grows."""
        return self._progress_before + sum(run.progress_bytes for run in self.all)

    def drop(self, over: Callable[[int], bool]) -> None:
        """End and forget the attempts at the rounds that are over."""
        for number in [number for number in self._by_round if over(number)]:
            run = self._by_round.pop(number)
            run.end()
            self._forget(run)

    def open(self, begin: Begin, state: ReplicatedState | None, members: int) -> AttemptRun:
        """Return a new attempt; the one before at this round has been ended.

        ``members``: how many the view has. Takes a while for INIT and where a result has to be
        copied. AtollError for an opening that makes no sense, MemoryError.
        """
        codec, grid = shape_of(begin, state)
        kept = kept_of(begin, members, grid.count)
        if kept and isinstance(codec, Gathered):
            raise RemoteProtocolError(f"BEGIN of round {begin.round} keeps chunks with other slots")
        rule = rule_of(begin, state)
        audits = self._peer.audits
        terms = audits.terms_of(begin, state.spec, grid) if state is not None else None
        if rule is not None:  # of a result that is copied, too
            rule.check(sum(weight > 0 for weight in begin.weights))
        before, replica = self._by_round.get(begin.round), self._peer.replica
        begun_s = time.monotonic() if before is None else before.begun_s
        is_read = before is not None and before.is_read
        in_outputs = before is not None and before.in_outputs
        if is_read and in_outputs:
            replica.outputs.move()
        initial = before.initial if before is not None else None
        if begin.kind == INIT and before is None:
            initial = ReplicatedState(begin.blob, self._peer.note_progress)
            result = _result_in(initial, codec, grid)
        elif before is None or (before.result.codec, before.result.grid) != (codec, grid):
            result, in_outputs = self._new_result(begin, codec, grid)
        elif is_read:
            result, in_outputs = before.result.copy(replica.log.spare), False
            initial = None
        else:
            result = before.result
        if initial is not None and (
            initial.blob != begin.blob or not np.may_share_memory(result.array, initial.theta)
        ):
            initial = None  # another trainer's offer
        if before is not None:
            self._forget(before)
        run = AttemptRun(self._peer, begin, result, kept, begun_s, rule=rule, terms=terms)
        run.in_outputs, run.initial = in_outputs, initial
        self._by_round[begin.round] = run
        return run

    def _new_result(
        self, begin: Begin, codec: Decoder, grid: ChunkGrid
    ) -> tuple[RoundResult, bool]:
        """Return the empty result of an attempt, and whether it is in the trainer's memory."""
        replica = self._peer.replica
        # Of an operation nothing is kept: digests only tell whether all have the same.
        digest = strong_digest if begin.operation is None else quick_digest
        if begin.kind == REDUCE and self._peer.me in begin.participants and codec.name == "float32":
            memory = replica.outputs.memory(codec.encoded_bytes(grid.total))
            if memory is not None:
                return RoundResult(codec, grid, lambda _: memory, digest), True
        return RoundResult(codec, grid, replica.log.spare, digest), False

    def begun_again(self, before: AttemptRun, run: AttemptRun) -> None:
        """Carry over what was sent and counted from ``before`` to ``run``, which follows it.

        Both are at the same round. Called in the event loop, as is ``sent_again``.
        """
        run.tries, run.again_bytes = before.tries, before.again_bytes
        if _attempt_of(before.begin) == _attempt_of(run.begin):  # what it has not got is fetched
            run.sent, run.source = before.sent, before.source
            return
        run.tries += 1
        in_vain_bytes = run.sent.carry(before.sent, {item.chunk for item in run.kept})
        self.sent_again(run.begin.round, in_vain_bytes)

    def sent_again(self, round_number: int, nbytes: int) -> None:
        self.again_bytes += nbytes
        run = self.get(round_number)
        if run is not None:
            run.again_bytes += nbytes

    def _forget(self, run: AttemptRun) -> None:
        self._progress_before += run.progress_bytes
        run.free()


def _attempt_of(begin: Begin) -> tuple[bytes, int, int]:
    return begin.lineage, begin.view, begin.attempt


# ------------------------------------------------------------ what a round costs twice


class SentPayload:
    """Count what one attempt of this peer has sent, by chunk, without headers.

    A chunk that the next attempt keeps was not sent in vain. What it sends of the others is more
    than the same round would have taken without the death, and so are kept chunks that are handed
    out. Called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[int] = Counter()

    def add(self, chunk: int, nbytes: int) -> None:
        with self._lock:
            self._bytes[chunk] += nbytes

    @property
    def total_bytes(self) -> int:
        with self._lock:
            return self._bytes.total()

    def carry(self, before: SentPayload, kept: Container[int]) -> int:
        """Go on from a broken attempt; return the bytes that it has sent in vain.

        What it sent of ``kept`` chunks counts as sent by this one, which may break as well; the
        rest was in vain.
        """
        with before._lock:
            sent = Counter(before._bytes)
        for chunk, nbytes in sent.items():
            if chunk in kept:
                self.add(chunk, nbytes)
        return sum(nbytes for chunk, nbytes in sent.items() if chunk not in kept)


class CountingOutlet:
    """Count frames when they are begun, and send them through another outlet.

    A stream that breaks has sent some part of its last one, and nobody knows which.
    """

    def __init__(self, outlet: Outlet, sent: SentPayload) -> None:
        self._outlet, self._sent = outlet, sent

    def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> Receipt | None:
        self._sent.add(chunk, payload.nbytes)
        return self._outlet.send(kind, chunk, payload, offset)
