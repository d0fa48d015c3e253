"""Begin attempts whose aggregates are audited: parts are promised before they are sent.

The whole contribution is encoded before anything is sent, because its digests are what a peer
commits to; so it takes the memory of one encoded vector more, and of the parts of the shard that
this peer owns another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from atoll.collectives import Contribution, ReducePlan
from atoll.collectives.codecs import F32
from atoll.collectives.errors import AtollError
from atoll.peer.audit.manager import AuditManager
from atoll.peer.audit.parts import encoded_parts
from atoll.peer.audit.terms import AuditTerms
from atoll.peer.membership.messages import Begin
from atoll.peer.rounds.attempt_table import AttemptRun


class AuditedAttempts:
    """Begin audited attempts. Lives in the event loop.

    ``start(job, plan, how)`` starts a reduction with the further arguments ``how``; the other
    callables are the reducer's.
    """

    def __init__(
        self,
        me: bytes,
        audits: AuditManager,
        *,
        is_wanted: Callable[[Begin], bool],
        failed: Callable[[Begin, tuple[bytes, ...], str], None],
        reduced: Callable[[AttemptRun, bytes], None],
        start: Callable[[AttemptRun, ReducePlan, dict[str, Any]], None],
        threadsafe: Callable[..., None],
        spawn: Callable[[Any], None],
    ) -> None:
        self._me, self._audits = me, audits
        self._is_wanted, self._failed, self._reduced = is_wanted, failed, reduced
        self._start, self._threadsafe, self._spawn = start, threadsafe, spawn

    async def begin(
        self, job: AttemptRun, terms: AuditTerms, source: Callable[[int, F32], None], steps: bytes
    ) -> None:
        """Commit to all parts and to the local ``steps``; send the parts once all others have too.

        The attempt fails here if this peer has promised something in it before, if its trainer has
        committed to no local steps where validators need them, or if its contribution cannot be
        encoded.
        """
        begin, work = job.begin, terms.work
        if not self._audits.may_promise(terms):
            self._failed(begin, (), "this peer has promised something in this attempt before")
            return
        counts = terms.counted[terms.participants.index(self._me)]
        if counts and terms.validators and not steps:
            self._failed(begin, (), "this peer's trainer has committed to no local steps")
            return
        try:
            compute = self._audits.compute
            parts = await compute(encoded_parts, work, source) if counts else []
            auditor = await compute(self._audits.auditor, terms, parts, steps)
        except AtollError as error:
            self._failed(begin, (), f"the own contribution: {error.what}")
            return
        if not self._is_wanted(begin) or job.ended:
            return

        def gate() -> None:
            how = {
                "contribution": Contribution(source, coded=parts.__getitem__),
                "auditor": auditor,
                "on_done": lambda digests: self._threadsafe(self._compare, job, digests),
            }
            self._start(job, work.plan, how)

        job.audit = self._audits.begin(
            auditor,
            gate=gate,
            passed=lambda: self._spawn(self._passed(job)),
            failed=lambda peers, why: self._failed(
                begin, tuple(peer for peer in peers if peer != self._me), why
            ),
        )
        job.audit.pump()

    def _compare(self, job: AttemptRun, digests: list[bytes]) -> None:
        if job.audit is not None and job.reduction is not None and not job.ended:
            views = [job.result.view(chunk) for chunk in range(job.result.grid.count)]
            job.audit.reduced(views, digests, job.reduction.inner_products)

    async def _passed(self, job: AttemptRun) -> None:
        root = await asyncio.to_thread(job.root_of, list(job.result.digests))
        self._reduced(job, root)
