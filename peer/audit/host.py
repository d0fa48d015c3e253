"""The audited attempts of a daemon: carries out what their machines decide.

Lives in the event loop; arithmetic runs in worker threads. A peer that has passed an attempt goes
on answering for it, until the attempt is over for all: others may lack a statement or a part that
it has.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, TypeVar

from atoll.collectives.codecs import U8
from atoll.peer.audit.auditor import Auditor
from atoll.peer.audit.effects import Convicted, Effect, Failed, Passed, Step, Tell
from atoll.peer.audit.evidence import Evidence
from atoll.peer.audit.statements import AUDIT_MESSAGES, AskParts, AskSaid, Piece, Said
from atoll.peer.audit.terms import AuditTerms
from atoll.peer.group.signing import Signer

__all__ = ["Attempt", "AuditHost"]

T = TypeVar("T")
TICK_S: Final = 0.25
# Statements of attempts that have not begun here: from all participants of a few of them.
EARLY_MAX: Final = 1024
EARLY_BYTES_MAX: Final = 16 * 1024 * 1024


class Attempt:
    """One attempt. ``gate``: parts may be sent now. Afterwards ``passed`` or ``failed`` is called,
    once: with the participants that it failed because of, and why."""

    def __init__(
        self,
        host: AuditHost,
        auditor: Auditor,
        gate: Callable[[], None],
        passed: Callable[[], None],
        failed: Callable[[tuple[bytes, ...], str], None],
    ) -> None:
        self.auditor = auditor
        self._host, self._gate, self._passed, self._failed = host, gate, passed, failed
        self._wanted: tuple[tuple[int, int], ...] = ()
        self._settling = False
        self.ended = False

    @property
    def terms(self) -> AuditTerms:
        return self.auditor.terms

    def reduced(
        self,
        results: Sequence[U8],
        digests: Sequence[bytes],
        grams: dict[int, bytes],
        matrix: bytes,
    ) -> None:
        """The whole result is here, with the inner products as owners have told them, and what the
        rule has made of them here."""
        self.auditor.reduced(results)
        self._host.spawn(self._compare(digests, grams, matrix))

    async def _compare(
        self, digests: Sequence[bytes], grams: dict[int, bytes], matrix: bytes
    ) -> None:
        """What was sent with what was promised."""
        liars = await self._host.compute(self.auditor.unlike_promised)
        if self.ended:
            return
        machine = self.auditor.machine
        if liars:
            peer = self.terms.participants[liars[0]]
            machine.mismatch(peer, "its part is not what it has committed to", self._host.now_s)
        else:
            machine.reduced(digests, grams, matrix, self._host.now_s)
        self.pump()

    # ------------------------------------------------------------ effects

    def pump(self) -> None:
        machine = self.auditor.machine
        while not self.ended and (effects := machine.take()):
            for effect in effects:
                self._carry(effect)

    def _carry(self, effect: Effect) -> None:
        if isinstance(effect, Tell):
            self._tell(effect.message, effect.peers)
        elif isinstance(effect, Convicted):
            self._host.convict(effect.evidence)
        elif isinstance(effect, Passed):
            self._passed()
        elif isinstance(effect, Failed):
            self._failed(effect.peers, effect.why)
        elif effect.step is Step.REDUCE:
            self._gate()
        elif effect.step is Step.CHECK:
            self._host.spawn(self._tell_numbers())
        elif effect.step is Step.VERDICT:
            self._host.spawn(self._judge())
        else:
            self._wanted = effect.parts
            for ask in self.auditor.requests(effect.parts):
                self._tell(ask, ())
            self._settle_soon()

    def _tell(self, message: object, peers: Collection[bytes]) -> None:
        me = self.auditor.machine.me
        for peer in peers or self.terms.participants:
            if peer != me:
                self._host.send(peer, message)

    async def _tell_numbers(self) -> None:
        check = await self._host.compute(self.auditor.numbers)
        if not self.ended:
            self.auditor.machine.told(check, self._host.now_s)
            self.pump()
        if not self.ended:
            await self._host.compute(self.auditor.look)  # until others have told theirs

    async def _judge(self) -> None:
        accused, doubted = await self._host.compute(self.auditor.verdict)
        if not self.ended:
            self.auditor.machine.judged(accused, doubted, self._host.now_s)
            self.pump()

    def _settle_soon(self) -> None:
        complete = set(self._wanted) <= self.auditor.opened.keys()
        if self.auditor.machine.step is Step.OPEN and complete and not self._settling:
            self._settling = True
            self._host.spawn(self._settle())

    async def _settle(self) -> None:
        found = await self._host.compute(self.auditor.settlement)
        if self.ended:
            return
        if not found:
            self._host.log(
                f"round {self.terms.round}: {len(self._wanted)} parts were opened, all was right"
            )
        self.auditor.machine.resolved(found, self._host.now_s)
        self.pump()

    # ------------------------------------------------------------ what others say

    def hear(self, message: object, source: bytes) -> None:
        machine, auditor = self.auditor.machine, self.auditor
        if source not in self.terms.participants:
            return
        if isinstance(message, Said):
            machine.hear(message, self._host.now_s)
        elif isinstance(message, AskSaid):
            machine.asked(message, source)
        elif isinstance(message, AskParts):
            for piece in auditor.answer(message, source):
                self._host.send(source, piece)
        elif isinstance(message, Piece) and auditor.take(message, source, self._wanted):
            self._settle_soon()
        self.pump()

    def end(self) -> None:
        """It is committed, or given up: nobody needs anything of it any more."""
        self.ended = True
        self._host.forget(self)

    def tick(self) -> None:
        self.auditor.machine.tick(self._host.now_s, self.auditor.opened)
        self.pump()


class AuditHost:
    """``convict`` takes evidence that was found here."""

    def __init__(
        self,
        me: bytes,
        signer: Signer,
        *,
        send: Callable[[bytes, object], bool],
        convict: Callable[[Evidence], None],
        log: Callable[[str], None],
    ) -> None:
        self._me, self._signer = me, signer
        self.send, self.convict, self.log = send, convict, log
        self._loop = asyncio.get_running_loop()
        self._attempts: dict[bytes, Attempt] = {}  # by the digest of their terms
        self._early: list[tuple[bytes, Said]] = []
        self._early_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.TimerHandle | None = None
        self._computing = 0
        self.progress = 0  # for stall detectors: grows while an audit has a reason to take time

    @property
    def now_s(self) -> float:
        return self._loop.time()

    def auditor(self, terms: AuditTerms, own: Sequence[U8]) -> Auditor:
        """Hashes the encoded own parts: in any thread."""
        secret = secrets.token_bytes(32)
        return Auditor(terms, self._me, self._signer, own, secret, self.now_s)

    def begin(
        self,
        auditor: Auditor,
        *,
        gate: Callable[[], None],
        passed: Callable[[], None],
        failed: Callable[[tuple[bytes, ...], str], None],
    ) -> Attempt:
        """The caller pumps it, once it knows it."""
        terms = auditor.terms
        attempt = self._attempts[terms.digest] = Attempt(self, auditor, gate, passed, failed)
        early, self._early, self._early_bytes = self._early, [], 0
        for source, each in early:
            if each.statement.terms == terms.digest:
                attempt.hear(each, source)
            else:
                self._keep(source, each)
        self._tick_soon()
        return attempt

    async def compute(self, work: Callable[..., T], *arguments: Any) -> T:
        """In a worker thread. It may take longer than the round may stand still."""
        self._computing += 1
        self._tick_soon()
        try:
            return await asyncio.to_thread(work, *arguments)
        finally:
            self._computing -= 1

    def forget(self, attempt: Attempt) -> None:
        self._attempts.pop(attempt.terms.digest, None)

    def banned(self, peers: Collection[bytes]) -> None:
        for attempt in list(self._attempts.values()):
            attempt.auditor.machine.banned(peers, self.now_s)
            attempt.pump()

    def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        for attempt in list(self._attempts.values()):
            attempt.end()
        for task in self._tasks:
            task.cancel()

    def on_message(self, source: bytes, message: object) -> bool:
        """False if it is about something else."""
        if not isinstance(message, AUDIT_MESSAGES):
            return False
        digest = message.statement.terms if isinstance(message, Said) else message.terms
        attempt = self._attempts.get(digest)
        if attempt is not None:
            attempt.hear(message, source)
        elif isinstance(message, Said):
            self._keep(source, message)
        return True

    def _keep(self, source: bytes, each: Said) -> None:
        """It may be early, or late. What is lost can be asked for again."""
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
            attempt.tick()
        if self._computing or any(each.auditor.machine.is_patient for each in attempts):
            self.progress += 1
        if self._computing or self._attempts:
            self._tick_soon()

    def spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
