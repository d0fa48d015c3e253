"""Do a daemon's part in validation: hand its trainer tasks, and pass on what comes of them.

The trainer takes the steps again (optim/replay/validating.py), because only it has the model. What
needs the round is compared here: whether a segment begins where the run was, and whether what it
ends in are the parts that its trainer had committed to. So the parameters before a round are kept
until nobody can doubt any more what was done in it: 4 bytes for each, of two rounds as a rule, and
of VALIDATED_MAX at most.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll.collectives.audit.commitment import shard_roots
from atoll.collectives.codecs import F32
from atoll.collectives.errors import SessionError
from atoll.optim.contribution import delta_source
from atoll.optim.manifest import Manifest, rounded_to_working
from atoll.optim.spec import RunSpec
from atoll.peer.daemon.ports import AuditPort
from atoll.peer.membership.signing import Signer
from atoll.peer.membership.view import short
from atoll.peer.verify.auditor import Auditor
from atoll.peer.verify.effects import TellParticipants
from atoll.peer.verify.parts import encoded_parts
from atoll.peer.verify.statements import Commitment, Judgement, SignedStatement
from atoll.peer.verify.steps import AuditStep
from atoll.peer.verify.terms import AuditTerms
from atoll.peer.verify.validation import Validations, ValidationTask


@dataclass(frozen=True, slots=True)
class _Round:
    """Hold what an audited round began with, and who had committed to what."""

    terms: AuditTerms
    spec: RunSpec
    manifest: Manifest
    theta: F32
    commitments: dict[int, Commitment]


class Validating:
    """Join the validation machine with the trainer's parameters.

    Lives in the event loop; ``fits`` may be called in any thread.
    """

    def __init__(
        self,
        me: bytes,
        signer: Signer,
        daemon: AuditPort,
    ) -> None:
        self._me, self._daemon = me, daemon
        self._machine = Validations(me, signer)
        self._rounds: dict[bytes, _Round] = {}  # by the digest of their terms

    # ------------------------------------------------------------ rounds

    def committed(self, auditor: Auditor, spec: RunSpec, manifest: Manifest, theta: F32) -> None:
        """Note that an attempt that was audited here is in the run.

        ``theta``: float32[elements], the run's parameters before it.
        """
        terms, machine = auditor.terms, auditor.machine
        if machine.step is not AuditStep.PASSED:
            return
        inbox = machine.inbox
        commitments = inbox.commitments
        self._rounds[terms.digest] = _Round(terms, spec, manifest, theta, commitments)
        works = {terms.participants[i]: c.work for i, c in commitments.items() if c.work}
        self._machine.committed(terms, inbox.seed, works)
        self._pump()

    def hear(self, word: SignedStatement, source: bytes) -> None:
        self._machine.hear(word, source)
        self._pump()

    def banned(self, peers: Collection[bytes]) -> None:
        self._machine.banned(peers)
        self._pump()

    def _pump(self) -> None:
        for effect in self._machine.take():
            if isinstance(effect, TellParticipants):
                for peer in effect.peers:
                    self._daemon.send(peer, effect.message)
            else:
                self._daemon.convict(effect.evidence)
        pending = self._machine.pending
        self._rounds = {digest: each for digest, each in self._rounds.items() if digest in pending}

    # ------------------------------------------------------------ the own trainer

    def tasks(self) -> list[dict[str, Any]]:
        """Return what the trainer has to do, in plain types.

        ``own``: these steps are its own, and are to be shown.
        """
        return [self._plain(task) for task in self._machine.tasks()]

    def shown(self, terms: bytes) -> None:
        self._machine.shown(terms)

    def judged(self, terms: bytes, target: bytes, judgement: int | None, why: str) -> None:
        found = None if judgement is None else Judgement(judgement)
        self._machine.judged(terms, target, found, why)
        self._pump()

    def fits(self, terms: bytes, target: bytes, flat: F32, *, start: bool) -> bool:
        """Return whether parameters, float32[elements], begin or end where they should.

        With ``start`` they have to be where the run was before the round; without, they have to
        lead to the parts that ``target`` has committed to. SessionError if the round is over.
        """
        known = self._rounds.get(terms)
        if known is None or target not in known.terms.participants:
            raise SessionError("nothing of that round has to be judged any more")
        if start:
            return np.array_equal(rounded_to_working(known.theta, known.manifest), flat)
        work = known.terms.work
        source = delta_source(known.spec, known.manifest, known.theta, flat, 0)
        parts = encoded_parts(work, source)
        digests = [hashlib.sha256(part.data).digest() for part in parts]
        roots = shard_roots(digests, work.plan.owners, len(known.terms.participants))
        commitment = known.commitments[known.terms.participants.index(target)]
        return tuple(roots) == commitment.roots

    def _plain(self, task: ValidationTask) -> dict[str, Any]:
        return {
            "terms": task.terms.digest,
            "round": task.terms.round,
            "target": task.target,
            "name": short(task.target),
            "own": task.target == self._me,
            "number": task.number,
            "work": task.work,
            "before": task.before,
        }
