"""Find out who is guilty, once parts are compared or opened. Pure functions that make evidence.

An owner compares what senders have told with the parts that it holds (``accusations``). When parts
of a chunk were opened to all, everybody recomputes its result and the numbers of its senders
(``settle``): whatever does not fit what its author has signed is evidence against that author, and
against an owner who has seen it and kept silent, or has accused somebody who was right.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from atoll.collectives.codecs import U8
from atoll.peer.verify.arithmetic import (
    gram_fits,
    matrix_fits,
    part_numbers,
    recomputed_digest,
)
from atoll.peer.verify.bodies import told_numbers
from atoll.peer.verify.evidence import Evidence, Shown
from atoll.peer.verify.inbox import Inbox
from atoll.peer.verify.statements import SignedStatement, StatementPhase
from atoll.peer.verify.terms import AuditTerms


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
