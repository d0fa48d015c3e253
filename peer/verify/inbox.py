"""Keep what was stated in an audited attempt, and find out who is guilty by it. Pure.

``Inbox`` keeps one statement of each signer in each phase. Every statement that comes in is known
to be genuine, and is looked at for what is wrong.

An owner compares what senders have told with the parts that it holds (``accusations``). When parts
of a chunk were opened to all, everybody recomputes its result and the numbers of its senders
(``settle``): whatever does not fit what its author has signed is evidence against that author, and
against an owner who has seen it and kept silent, or has accused somebody who was right.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from atoll.collectives.codecs import U8
from atoll.collectives.errors import RemoteProtocolError
from atoll.peer.verify.checks import (
    gram_fits,
    matrix_fits,
    part_numbers,
    recomputed_digest,
)
from atoll.peer.verify.evidence import Evidence, Shown
from atoll.peer.verify.statement import (
    IN_ORDER,
    ONCE,
    Check,
    Commitment,
    Resultant,
    Reveal,
    SignedStatement,
    StatementPhase,
    Verdict,
    body_fits,
    body_of,
    draw_of,
    heard_of,
    seed_of,
    told_numbers,
)
from atoll.peer.verify.terms import AuditTerms


class Inbox:
    def __init__(self, terms: AuditTerms) -> None:
        self._terms, self._id = terms, terms.digest
        self._said: dict[StatementPhase, dict[bytes, SignedStatement]] = {
            phase: {} for phase in ONCE
        }
        self._heard: dict[StatementPhase, bytes] = {}  # of phases that are complete

    def of(self, phase: StatementPhase) -> Mapping[bytes, SignedStatement]:
        return self._said.get(phase, {})

    def heard(self, phase: StatementPhase) -> bytes:
        """Return the digest of all that was said in the phase before; b"" for the first."""
        if phase is StatementPhase.COMMIT:
            return b""
        if phase in self._heard:
            return self._heard[phase]
        before = IN_ORDER[phase - 1]
        heard = heard_of(self._said[before])
        if self.is_complete(before):
            self._heard[phase] = heard
        return heard

    def is_complete(self, phase: StatementPhase) -> bool:
        return len(self._said[phase]) == len(self._terms.participants)

    def silent(self, phase: StatementPhase) -> list[bytes]:
        return [peer for peer in self._terms.participants if peer not in self._said[phase]]

    def differing(self, phase: StatementPhase) -> list[bytes]:
        """Return those who say that they heard something else in the phase before than we have."""
        mine = self.heard(phase)
        return [p for p, each in self._said[phase].items() if each.statement.heard != mine]

    def add(self, each: SignedStatement) -> Evidence | None:
        """Keep a new statement; return evidence where it shows that its signer lies.

        What a signer may say often is not kept.
        """
        have = self._said.get(each.phase, {})
        before = have.get(each.signer)
        if before is not None:
            if before.statement == each.statement:
                return None
            return Evidence("equivocation", each.signer, self._terms, (before, each))
        if self._is_malformed(each):
            return Evidence("malformed", each.signer, self._terms, (each,))
        have[each.signer] = each
        return None

    def _is_malformed(self, each: SignedStatement) -> bool:
        index = self._terms.participants.index(each.signer)
        try:
            return bool(body_fits(self._terms, index, each.statement))
        except RemoteProtocolError:
            return True

    # ------------------------------------------------------------ what was said, by participant

    def _bodies(self, phase: StatementPhase) -> dict[int, object]:
        place = {peer: index for index, peer in enumerate(self._terms.participants)}
        return {place[p]: body_of(each.statement) for p, each in self._said[phase].items()}

    @property
    def commitments(self) -> dict[int, Commitment]:
        return {
            i: b
            for i, b in self._bodies(StatementPhase.COMMIT).items()
            if isinstance(b, Commitment)
        }

    @property
    def resultants(self) -> dict[int, Resultant]:
        return {
            i: b for i, b in self._bodies(StatementPhase.RESULT).items() if isinstance(b, Resultant)
        }

    @property
    def checks(self) -> dict[int, Check]:
        return {i: b for i, b in self._bodies(StatementPhase.CHECK).items() if isinstance(b, Check)}

    @property
    def verdicts(self) -> dict[int, Verdict]:
        return {
            i: b for i, b in self._bodies(StatementPhase.VERDICT).items() if isinstance(b, Verdict)
        }

    def result_digests(self) -> dict[int, bytes]:
        """Return the digest of each chunk of the result, as its owner has signed it."""
        found = {}
        for owner, body in self.resultants.items():
            for place, chunk in enumerate(self._terms.work.shards.get(owner, ())):
                found[chunk] = body.digests[32 * place : 32 * place + 32]
        return found

    def accused(self) -> set[tuple[int, int]]:
        """Return the accusations of all verdicts, as (sender, chunk)."""
        told = self.verdicts.values()
        return {pair for v in told for pair in zip(v.senders, v.chunks, strict=True)}

    # ------------------------------------------------------------ the draw

    @property
    def seed(self) -> bytes:
        """Return the common draw; only once all secrets are known."""
        secrets = {peer: _secret(each) for peer, each in self._said[StatementPhase.REVEAL].items()}
        return seed_of(self._terms, secrets)

    def broken_draw(self) -> Evidence | None:
        """Return evidence if somebody has revealed another number than it had committed to."""
        for peer, each in self._said[StatementPhase.REVEAL].items():
            commit = self._said[StatementPhase.COMMIT].get(peer)
            if commit is None:
                continue
            body = body_of(commit.statement)
            assert isinstance(body, Commitment)
            if draw_of(self._id, peer, _secret(each)) != body.draw:
                return Evidence("draw", peer, self._terms, (commit, each))
        return None

    def wrong_seed(self) -> Evidence | None:
        """Return evidence if somebody computes with another draw.

        Only once all secrets are known.
        """
        seed = self.seed
        for peer, each in self._said[StatementPhase.CHECK].items():
            body = body_of(each.statement)
            if isinstance(body, Check) and body.seed != seed:
                told = (*self._said[StatementPhase.REVEAL].values(), each)
                return Evidence("seed", peer, self._terms, told)
        return None


def _secret(each: SignedStatement) -> bytes:
    body = body_of(each.statement)
    assert isinstance(body, Reveal)
    return body.secret


# ---------------------------------------------------------------- who is guilty


def accusations(
    terms: AuditTerms, inbox: Inbox, true: Mapping[tuple[int, int], bytes]
) -> dict[int, int]:
    """Return senders whose told numbers are not the true ones, each with the first such chunk.

    ``true``: the true numbers by (sender, chunk), of the parts that this owner holds.
    """
    checks, found = inbox.checks, dict[int, int]()
    for (sender, chunk), numbers in sorted(true.items(), key=lambda item: item[0][::-1]):
        if told_numbers(terms.work, checks[sender], chunk) != numbers:
            found.setdefault(sender, chunk)
    return found


def settle(
    terms: AuditTerms,
    inbox: Inbox,
    opened: Mapping[tuple[int, int], Shown],
    results: Sequence[U8],
) -> list[Evidence]:
    """Return the evidence that opened parts give, one piece at most against each culprit.

    Every opened part is what its sender has committed to.
    """
    found: list[Evidence] = []
    for chunk in sorted({chunk for _, chunk in opened}):
        shown = {sender: part for (sender, of), part in opened.items() if of == chunk}
        found += _wrong_result(terms, inbox, chunk, shown)
        found += _wrong_gram(terms, inbox, chunk, shown)
        for sender in sorted(shown):
            found += _wrong_numbers(terms, inbox, shown[sender], results[chunk].tobytes())
    first: dict[bytes, Evidence] = {}
    for each in found:
        first.setdefault(each.culprit, each)  # one is enough of each
    return list(first.values())


def _wrong_result(
    terms: AuditTerms, inbox: Inbox, chunk: int, shown: Mapping[int, Shown]
) -> Iterable[Evidence]:
    work = terms.work
    if not shown.keys() >= {*work.counted}:
        return
    parts = {index: shown[index].data for index in work.counted}
    owner, said = work.plan.owners[chunk], inbox.resultants
    signed = inbox.result_digests()[chunk]
    right = recomputed_digest(work, chunk, parts, said[owner]) == signed
    if right and matrix_fits(work, said, owner):
        return
    words = [*_all(inbox, StatementPhase.COMMIT), *_all(inbox, StatementPhase.RESULT)]
    # What an owner has heard of the others' inner products, it says with its secret.
    words.append(inbox.of(StatementPhase.REVEAL)[terms.participants[owner]])
    ordered = tuple(shown[index] for index in work.counted)
    yield Evidence(
        "result", terms.participants[owner], terms, tuple(words), chunk=chunk, parts=ordered
    )


def _wrong_gram(
    terms: AuditTerms, inbox: Inbox, chunk: int, shown: Mapping[int, Shown]
) -> Iterable[Evidence]:
    work, owner = terms.work, terms.work.plan.owners[chunk]
    if not shown.keys() >= {*work.counted}:
        return
    parts = {index: shown[index].data for index in work.counted}
    if gram_fits(work, chunk, parts, inbox.resultants[owner]):
        return
    peer = terms.participants[owner]
    words = (*_all(inbox, StatementPhase.COMMIT), inbox.of(StatementPhase.RESULT)[peer])
    ordered = tuple(shown[index] for index in work.counted)
    yield Evidence("gram", peer, terms, words, chunk=chunk, parts=ordered)


def _wrong_numbers(
    terms: AuditTerms, inbox: Inbox, part: Shown, result: bytes
) -> Iterable[Evidence]:
    """Yield evidence about the numbers of one sender in one chunk, or its owner's verdict on them.

    The owner is guilty of silence about wrong numbers, or of a false accusation.
    """
    work, sender, chunk = terms.work, part.sender, part.chunk
    owner, check = work.plan.owners[chunk], inbox.checks[sender]
    true = part_numbers(work, check.seed, chunk, part.data, result)
    peer, owning = terms.participants[sender], terms.participants[owner]
    verdict = inbox.verdicts[owner]
    accused = dict(zip(verdict.senders, verdict.chunks, strict=True))
    kept = Shown(owner, chunk, result)
    about = [*_all(inbox, StatementPhase.RESULT), inbox.of(StatementPhase.REVEAL)[peer]]
    if true != told_numbers(work, check, chunk):
        own = [inbox.of(StatementPhase.COMMIT)[peer], inbox.of(StatementPhase.CHECK)[peer], *about]
        yield Evidence("sketch", peer, terms, tuple(own), chunk, (part,), (kept,))
        kind = "silent" if sender not in accused and owner != sender else ""
    else:
        kind = "false" if accused.get(sender) == chunk else ""
    if kind:
        words = [*_all(inbox, StatementPhase.COMMIT), *_all(inbox, StatementPhase.CHECK), *about]
        words.append(inbox.of(StatementPhase.VERDICT)[owning])
        yield Evidence(kind, owning, terms, tuple(words), chunk, (part,), (kept,))


def _all(inbox: Inbox, phase: StatementPhase) -> Collection[SignedStatement]:
    return inbox.of(phase).values()
