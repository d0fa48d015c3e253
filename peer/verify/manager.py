"""Run the audited attempts of a daemon: carry out what their machines decide.

Lives in the event loop; arithmetic runs in worker threads. A peer that has passed an attempt goes
on answering for it, until the attempt is over for all: others may lack a statement or a part that
it has.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Final, TypeVar

from atoll.collectives.chunks import ChunkGrid
from atoll.collectives.codecs import F32, U8
from atoll.collectives.errors import AtollError
from atoll.collectives.robust.gram import InnerProducts
from atoll.optim.manifest import Manifest
from atoll.optim.run_spec import RunSpec
from atoll.peer.daemon.ports import AuditPort
from atoll.peer.membership.messages import Begin
from atoll.peer.membership.signing import Signer
from atoll.peer.rounds.verifier import AuditedRun, VerifiedAttempt
from atoll.peer.verify.attempt_audit import (
    AttemptAudit,
    AuditFailed,
    AuditStep,
    Convicted,
    Effect,
    Passed,
    TellParticipants,
)
from atoll.peer.verify.disclosure import encoded_parts
from atoll.peer.verify.promises import Promises
from atoll.peer.verify.statement import (
    AuditMessage,
    SignedStatement,
    StatementPhase,
)
from atoll.peer.verify.terms import AuditTerms, terms_of
from atoll.peer.verify.validation import ValidationService

T = TypeVar("T")
TICK_S: Final = 0.25
# Statements of attempts that have not begun here: from all participants of a few of them.
EARLY_MAX: Final = 1024
EARLY_BYTES_MAX: Final = 16 * 1024 * 1024


class AuditedAttempt:
    """Run the audit of one attempt in the event loop."""

    def __init__(self, host: AuditManager, audit: AttemptAudit, run: AuditedRun) -> None:
        self.audit = audit
        self._host, self._run = host, run
        self.ended = False

    @property
    def terms(self) -> AuditTerms:
        return self.audit.terms

    def reduced(
        self, results: Sequence[U8], digests: Sequence[bytes], products: InnerProducts
    ) -> None:
        """Take the whole result, which is here, with the inner products that it was made with."""
        self._spawn(self._compare(results, digests, products))

    async def _compare(
        self, results: Sequence[U8], digests: Sequence[bytes], products: InnerProducts
    ) -> None:
        """Compare the parts that were sent with those that were promised."""
        audit = self.audit
        liars = await self._host.compute(audit.unlike_promised)
        if self.ended:
            return
        if liars:
            peer = self.terms.participants[liars[0]]
            audit.mismatch(peer, "its part is not what it has committed to", self._host.now_s)
        else:
            audit.reduced(results, digests, products, self._host.now_s)
        self.pump()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._host.spawn(self._unless_ended(work))

    async def _unless_ended(self, work: Coroutine[Any, Any, None]) -> None:
        """Carry out work; an error fails the attempt, or is ignored if it has ended.

        The result's memory of an attempt that has ended may be another one's already. And what
        others have told may break a rule's arithmetic: that must not end a daemon.
        """
        try:
            await work
        except Exception as error:
            if not self.ended:
                self._run.failed((), f"audit: {type(error).__name__}: {error}")

    # ------------------------------------------------------------ effects

    def pump(self) -> None:
        """Carry out what the audit decides, until it waits for something."""
        while not self.ended and (effects := self.audit.take()):
            for effect in effects:
                self._carry(effect)
        if self.ended:
            return
        for peer, message in (*self.audit.answers(), *self.audit.asks(self._host.now_s)):
            self._host.daemon.send(peer, message)

    def _carry(self, effect: Effect) -> None:
        if isinstance(effect, TellParticipants):
            self._tell(effect.message, effect.peers)
        elif isinstance(effect, Convicted):
            self._host.daemon.convict(effect.evidence)
        elif isinstance(effect, Passed):
            self._run.passed()
        elif isinstance(effect, AuditFailed):
            self._run.failed(effect.peers, effect.why)
        elif effect.step is AuditStep.REDUCE:
            self._run.send_parts(self.audit)
        elif effect.step is AuditStep.CHECK:
            self._spawn(self._tell_numbers())
        elif effect.step is AuditStep.VERDICT:
            self._spawn(self._judge())
        else:
            self._spawn(self._settle())

    def _tell(self, message: object, peers: Collection[bytes]) -> None:
        for peer in peers or self.terms.participants:
            if peer != self.audit.me:
                self._host.daemon.send(peer, message)

    async def _tell_numbers(self) -> None:
        check = await self._host.compute(self.audit.numbers)
        if not self.ended:
            self.audit.told(check, self._host.now_s)
            self.pump()
        if not self.ended:
            await self._host.compute(self.audit.look)  # until others have told theirs

    async def _judge(self) -> None:
        accused, doubted = await self._host.compute(self.audit.verdict)
        if not self.ended:
            self.audit.judged(accused, doubted, self._host.now_s)
            self.pump()

    async def _settle(self) -> None:
        found = await self._host.compute(self.audit.settlement)
        if self.ended:
            return
        if not found:
            text = f"{self.audit.doubted_parts} parts were opened, all was right"
            self._host.daemon.note("audit", f"round {self.terms.round}: {text}")
        self.audit.resolved(found, self._host.now_s)
        self.pump()

    # ------------------------------------------------------------ what happens

    def hear(self, message: AuditMessage, source: bytes) -> None:
        if source in self.terms.participants:
            self.audit.hear(message, source, self._host.now_s)
            self.pump()

    def banned(self, peers: Collection[bytes]) -> None:
        self.audit.banned(peers, self._host.now_s)
        self.pump()

    def link_lost(self, peer: bytes) -> None:
        if peer in self.terms.participants:
            self.audit.link_lost(peer)

    def tick(self) -> None:
        self.audit.tick(self._host.now_s)
        self.pump()

    def end(self) -> None:
        """End an attempt that is committed or given up: nobody needs anything of it any more."""
        self.ended = True
        self._host.forget(self)


class AuditManager:
    """Keep the audited attempts of a daemon (AttemptVerifier), and pass on what others say."""

    def __init__(self, me: bytes, signer: Signer, daemon: AuditPort) -> None:
        self._me, self._signer, self.daemon = me, signer, daemon
        self.validation = ValidationService(me, signer, daemon)
        self._loop = asyncio.get_running_loop()
        self._attempts: dict[bytes, AuditedAttempt] = {}  # by the digest of their terms
        self._promises = Promises(me, daemon.life())
        self._early: list[tuple[bytes, SignedStatement]] = []
        self._early_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.TimerHandle | None = None
        self._computing = 0
        self.progress = 0  # for stall detectors: grows while an audit has a reason to take time

    @property
    def now_s(self) -> float:
        return self._loop.time()

    def terms_of(self, begin: Begin, spec: RunSpec, grid: ChunkGrid) -> AuditTerms | None:
        return terms_of(begin, spec, grid)

    def took_part(self, terms: bytes) -> bool:
        return self._promises.took_part(terms)

    def audit_of(self, terms: AuditTerms, own: Sequence[U8], steps: bytes = b"") -> AttemptAudit:
        """Return the audit of an attempt; it hashes the encoded own parts. Safe in any thread."""
        secret = secrets.token_bytes(32)
        now_s = self.now_s
        return AttemptAudit(terms, self._me, self._signer, own, secret, now_s, work=steps)

    async def begin(
        self,
        run: AuditedRun,
        terms: AuditTerms,
        source: Callable[[int, F32], None],
        steps: bytes,
    ) -> None:
        if not self._promises.may_promise(terms):
            text = "this peer, or an earlier process of it, has promised something there before"
            run.failed((), text)
            return
        counts = terms.counted[terms.participants.index(self._me)]
        if counts and terms.validators and not steps:
            run.failed((), "this peer's trainer has committed to no local steps")
            return
        try:
            own = await self.compute(encoded_parts, terms.work, source) if counts else []
            audit = await self.compute(self.audit_of, terms, own, steps)
        except AtollError as error:
            run.failed((), f"the own contribution: {error.what}")
            return
        if run.is_wanted():
            attempt = self.start(run, audit)
            run.audit = attempt
            attempt.pump()

    def start(self, run: AuditedRun, audit: AttemptAudit) -> AuditedAttempt:
        """Begin an attempt with what was said early; the caller pumps it, once it knows it."""
        terms = audit.terms
        for peer in terms.participants:
            if peer != self._me and self.daemon.linked_life(peer) != terms.life_of(peer):
                audit.link_lost(peer)  # what that process says may not have come here
        attempt = self._attempts[terms.digest] = AuditedAttempt(self, audit, run)
        early, self._early, self._early_bytes = self._early, [], 0
        for source, each in early:
            if each.statement.terms == terms.digest:
                attempt.hear(each, source)
            else:
                self._keep(source, each)
        self._tick_soon()
        return attempt

    def committed(
        self, attempt: VerifiedAttempt, spec: RunSpec, manifest: Manifest, theta: F32
    ) -> None:
        assert isinstance(attempt, AuditedAttempt)
        self.validation.committed(attempt.audit, spec, manifest, theta)

    async def compute(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run ``work`` in a worker thread; it may take longer than the round may stand still."""
        self._computing += 1
        self._tick_soon()
        try:
            return await asyncio.to_thread(work, *arguments)
        finally:
            self._computing -= 1

    def forget(self, attempt: AuditedAttempt) -> None:
        self._attempts.pop(attempt.terms.digest, None)

    def banned(self, peers: Collection[bytes]) -> None:
        self.validation.banned(peers)
        for attempt in list(self._attempts.values()):
            attempt.banned(peers)

    def link_lost(self, peer: bytes) -> None:
        """Hear that there is no control link to that process of a peer any more."""
        self.validation.link_lost(peer)
        for attempt in self._attempts.values():
            attempt.link_lost(peer)

    def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        for attempt in list(self._attempts.values()):
            attempt.end()
        for task in self._tasks:
            task.cancel()

    def on_message(self, source: bytes, message: AuditMessage) -> None:
        """Take a message about an audited attempt, or one that is to come."""
        if isinstance(message, SignedStatement) and message.phase is StatementPhase.REPLAYED:
            self.validation.hear(message, source)
            return
        digest = message.statement.terms if isinstance(message, SignedStatement) else message.terms
        attempt = self._attempts.get(digest)
        if attempt is not None:
            attempt.hear(message, source)
        elif isinstance(message, SignedStatement):
            self._keep(source, message)

    def _keep(self, source: bytes, each: SignedStatement) -> None:
        """Keep a statement that may be early, or late; what is lost can be asked for again."""
        self._early.append((source, each))
        self._early_bytes += len(each.statement.body)
        while len(self._early) > EARLY_MAX or self._early_bytes > EARLY_BYTES_MAX:
            self._early_bytes -= len(self._early.pop(0)[1].statement.body)

    def _tick_soon(self) -> None:
        if self._ticking is None:
            self._ticking = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        attempts = list(self._attempts.values())
        for attempt in attempts:
            self._excuse_relayed(attempt)
            attempt.tick()
        if self._computing or any(each.audit.is_patient for each in attempts):
            self.progress += 1
        if self._computing or self._attempts:
            self._tick_soon()

    def _excuse_relayed(self, attempt: AuditedAttempt) -> None:
        """Say of nobody that it withholds anything who is heard through a relay only.

        A relay that holds back what one peer says would have all others call that peer silent.
        """
        for peer in attempt.terms.participants:
            if self.daemon.is_relayed(peer):
                attempt.audit.link_lost(peer)

    def spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
