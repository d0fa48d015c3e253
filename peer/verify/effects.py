"""Describe what comes out of an audit's machine (machine.py): orders to its shell, in order."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.peer.verify.evidence import Evidence
from atoll.peer.verify.statements import AskStatement, SignedStatement
from atoll.peer.verify.steps import AuditStep


@dataclass(frozen=True, slots=True)
class TellParticipants:
    """Send to these participants; to all others if none are named."""

    message: SignedStatement | AskStatement
    peers: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Need:
    """Do what ``step`` needs, and tell the machine.

    REDUCE: parts may be sent. CHECK: compute the numbers (``told``). VERDICT: compare those of
    others (``judged``). OPEN: open and get ``parts`` (sender, chunk), and judge them
    (``resolved``).
    """

    step: AuditStep
    parts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Convicted:
    """Report evidence: whoever it bans is to be banned."""

    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Passed:
    """Report that the result may be committed."""


@dataclass(frozen=True, slots=True)
class AuditFailed:
    """Report that the attempt has failed because of these peers (none: it cannot be said)."""

    peers: tuple[bytes, ...]
    why: str


Effect = TellParticipants | Need | Convicted | Passed | AuditFailed
