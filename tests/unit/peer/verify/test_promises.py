"""Test what one process of a participant may promise: once in an attempt, and only as itself."""

from __future__ import annotations

from dataclasses import replace

from atoll.peer.verify.promises import Promises
from atoll.peer.verify.terms import AuditTerms

ME, OTHER = b"a" * 32, b"b" * 32
TERMS = AuditTerms(
    b"L" * 32, 1, 7, 1, 0, (ME, OTHER), (True,) * 2, (1,) * 2, "mean", "int8", 3 * 256, 256,
    lives=(4, 9),
)  # fmt: skip


def test_nobody_promises_twice_in_one_attempt() -> None:
    """A BEGIN may be repeated to one who had fallen behind."""
    mine = Promises(ME, 4)
    assert mine.may_promise(TERMS)
    assert mine.took_part(TERMS.digest)
    assert not mine.may_promise(TERMS)
    assert not mine.may_promise(replace(TERMS, rule="krum(f=0)"))
    assert mine.may_promise(replace(TERMS, attempt=3))
    assert mine.may_promise(replace(TERMS, attempt=2))
    assert mine.may_promise(replace(TERMS, view=2))
    assert not mine.took_part(replace(TERMS, view=9).digest)


def test_a_process_promises_nothing_for_another() -> None:
    """Sign nothing: what the earlier one has signed under these terms nobody knows any more."""
    later = Promises(ME, 5)
    assert not later.may_promise(TERMS)
    assert not later.may_promise(replace(TERMS, lives=()))
    assert later.may_promise(replace(TERMS, lives=(5, 9)))
    assert replace(TERMS, lives=(5, 9)).digest != TERMS.digest
