"""Carry out an audited attempt with its bytes: the machine, held parts, opened parts. Sans-I/O.

Whoever has sockets and threads sends what comes out, and calls ``numbers``, ``verdict`` and
``settlement`` where arithmetic is due, in a thread of its own if it takes long. The simulator does
the same without threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

from atoll.collectives.audit.commitment import opening, opens, shard_roots
from atoll.collectives.codecs import U8
from atoll.collectives.merkle import merkle_root
from atoll.peer.membership.signing import Signer
from atoll.peer.verify.arithmetic import doubted
from atoll.peer.verify.evidence import Evidence, Shown
from atoll.peer.verify.judge import accusations, settle
from atoll.peer.verify.machine import SILENCE_S, Audit
from atoll.peer.verify.numbers import Numbers, ResultNumbers
from atoll.peer.verify.part_disclosure import PartDisclosure
from atoll.peer.verify.parts import HeldParts
from atoll.peer.verify.statements import Check, DisclosedPiece, StatementPhase
from atoll.peer.verify.terms import AuditTerms

# A slow machine sketches and hashes as much: an hour for a trillion, seconds for what runs today.
ELEMENTS_PER_S: Final = 10_000_000


class Auditor:
    """Join the machine of an audited attempt with the parts and results that it is about.

    ``own``: the encoded own parts, one for each chunk, which the reduction will send; none if this
    peer does not count.
    """

    def __init__(
        self,
        terms: AuditTerms,
        me: bytes,
        signer: Signer,
        own: Sequence[U8],
        secret: bytes,
        now_s: float,
        work: bytes = b"",
    ) -> None:
        self.terms, self.index = terms, terms.participants.index(me)
        self._own = own
        self._digests = [hashlib.sha256(part.data).digest() for part in own]
        owners = terms.work.plan.owners
        roots = shard_roots(self._digests, owners, len(terms.participants)) if own else ()
        silence_s = SILENCE_S + terms.elements / ELEMENTS_PER_S
        self.machine = Audit(
            terms,
            me,
            signer,
            roots=roots,
            work=work if own else b"",
            secret=secret,
            now_s=now_s,
            silence_s=silence_s,
        )
        self._copies = HeldParts(terms.work, self.index)
        self._held: dict[tuple[int, int], U8] = {}  # parts of chunks that this peer owns ...
        self._held_digests: dict[tuple[int, int], bytes] = {}
        self._results: Sequence[U8] = ()
        self._numbers = Numbers(terms.work, own, self._held)
        self.opening = PartDisclosure(terms, self.index, self._shown, self._is_promised)

    # ------------------------------------------------------------ the reduction

    def keep(self, sender: int, chunk: int, part: U8) -> None:
        """Keep and hash a copy of a part of a chunk that this peer owns. Safe in any thread."""
        copy = self._copies.copy(sender, chunk, part)
        self._held_digests[sender, chunk] = hashlib.sha256(copy.data).digest()
        self._held[sender, chunk] = copy

    def came(self, chunk: int, result: U8) -> None:
        """Take a chunk of the result and compute what needs no draw. Safe in any thread."""
        self._numbers.came(chunk, result)

    def reduced(self, results: Sequence[U8]) -> None:
        """Keep the result, all chunks of which are here."""
        self._results = results

    def unlike_promised(self) -> list[int]:
        """Return the senders whose parts, all of which are here, are not what was committed to."""
        work, commitments = self.terms.work, self.machine.inbox.commitments
        shard = work.shards.get(self.index, ())
        return [
            sender
            for sender in work.counted
            if sender != self.index
            and shard
            and merkle_root([self._held_digests[sender, chunk] for chunk in shard])
            != commitments[sender].roots[self.index]
        ]

    # ------------------------------------------------------------ arithmetic, when it is due

    def numbers(self) -> Check:
        return self._numbers.check(self.machine.inbox.seed, self._results)

    def look(self) -> tuple[Mapping[tuple[int, int], bytes], Sequence[ResultNumbers]]:
        """Return what others should tell of the parts held here; it needs nothing that they tell.

        Beside it, what all results look like (``Numbers.look``).
        """
        return self._numbers.look(self.machine.inbox.seed, self._results)

    def verdict(self) -> tuple[dict[int, int], list[int]]:
        """Return whom this owner accuses (sender -> chunk), and the chunks in doubt for all."""
        inbox = self.machine.inbox
        true, seen = self.look()
        accused = accusations(self.terms, inbox, true)
        return accused, doubted(self.terms.work, inbox.checks, inbox.resultants, seen)

    def settlement(self) -> list[Evidence]:
        return settle(self.terms, self.machine.inbox, self.opening.opened, self._results)

    # ------------------------------------------------------------ opening

    def answers(self) -> list[tuple[bytes, DisclosedPiece]]:
        """Return which pieces of our parts to send to whom; none before all verdicts are here."""
        is_time = self.machine.inbox.is_complete(StatementPhase.VERDICT)
        return self.opening.answers() if is_time else []

    def _shown(self, sender: int, chunk: int) -> Shown | None:
        """Return a part with its proof, if we have all that proves it; else None.

        This is so for our own parts, and for those of chunks that we own.
        """
        owners = self.terms.work.plan.owners
        if chunk >= len(owners):
            return None
        if sender == self.index and self._own:
            proof = opening(self._digests, owners, chunk)
            return Shown(sender, chunk, self._own[chunk].tobytes(), proof)
        if (sender, chunk) not in self._held or owners[chunk] != self.index:
            return None
        # Of what a sender has sent us; of other chunks nothing, and nothing is asked for.
        digests = [self._held_digests.get((sender, other), b"") for other in range(len(owners))]
        proof = opening(digests, owners, chunk)
        return Shown(sender, chunk, self._held[sender, chunk].tobytes(), proof)

    def _is_promised(self, shown: Shown) -> bool:
        owners = self.terms.work.plan.owners
        root = self.machine.inbox.commitments[shown.sender].roots[owners[shown.chunk]]
        digest = hashlib.sha256(shown.data).digest()
        return opens(digest, shown.chunk, owners, shown.proof, root)
