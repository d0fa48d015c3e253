"""Describe what comes out of an audit's machine (machine.py): orders to its shell, in order."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.peer.audit.evidence import Evidence
from atoll.peer.audit.statements import AskSaid, Said
from atoll.peer.audit.steps import Step

__all__ = ["Convicted", "Effect", "Failed", "Need", "Passed", "Tell"]


@dataclass(frozen=True, slots=True)
class Tell:
    """Send to these participants; to all others if none are named."""

    message: Said | AskSaid
    peers: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Need:
    """Do what ``step`` needs, and tell the machine.

    REDUCE: parts may be sent. CHECK: compute the numbers (``told``). VERDICT: compare those of
    others (``judged``). OPEN: open and get ``parts`` (sender, chunk), and judge them
    (``resolved``).
    """

    step: Step
    parts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Convicted:
    """Report evidence: whoever it bans is to be banned."""

    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Passed:
    """Report that the result may be committed."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Report that the attempt has failed because of these peers (none: it cannot be said)."""

    peers: tuple[bytes, ...]
    why: str


Effect = Tell | Need | Convicted | Passed | Failed
