"""What comes out of an audit's machine (machine.py): orders to its shell, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from atoll.peer.audit.evidence import Evidence
from atoll.peer.audit.statements import AskSaid, Said

__all__ = ["Convicted", "Effect", "Failed", "Need", "Passed", "Step", "Tell"]


class Step(Enum):
    COMMIT = "commit"  # until all have committed
    REDUCE = "reduce"  # until the result is here
    RESULT = "result"  # until all owners have committed to theirs
    REVEAL = "reveal"  # until all secrets are known
    CHECK = "check"  # until all have told their numbers
    VERDICT = "verdict"  # until all owners have compared them
    OPEN = "open"  # until what is in doubt is opened and judged
    PASSED = "passed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Tell:
    """Send to these participants; none: to all others."""

    message: Said | AskSaid
    peers: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Need:
    """Do what ``step`` needs, and tell the machine. REDUCE: parts may be sent. CHECK: compute the
    numbers (``told``). VERDICT: compare those of others (``judged``). OPEN: open and get ``parts``
    (sender, chunk), and judge them (``resolved``)."""

    step: Step
    parts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Convicted:
    """There is evidence: whoever it bans is to be banned."""

    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Passed:
    """The result may be committed."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt has failed because of these (none: it cannot be said)."""

    peers: tuple[bytes, ...]
    why: str


Effect = Tell | Need | Convicted | Passed | Failed
