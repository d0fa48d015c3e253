"""Define the steps of an audited attempt, and which follows which. Pure.

Theory (BTARD, Gorbunov et al. 2022, algorithms 1 to 3). Everybody *commits* to its encoded parts
and to a secret number before any part is sent, so that nobody can choose its part by those of
others. Owners *commit to their results* before any number is revealed, so that nobody can choose a
result by the draw; then all secrets are *revealed*, and together they are the draw. From it
everybody computes the same random projections, tells those of its own parts (*check*), and owners
compare what is told with the parts that they hold (*verdict*). Where a result or a number is in
doubt, the parts of that chunk are *opened* to all, and everybody computes what is right.

What an honest participant does not get from another is asked of all the others: statements prove
themselves, so that anybody may hand them on. So who said something to one honest participant has
said it to all, and who said two things is found out. What nobody has after ``SILENCE_S`` is
*withheld*: more than half of the participants who say so are evidence, once the draw has begun.
Before it, and where they are fewer, the attempt fails and names who was missing. A participant that
dies is the membership machine's affair: it ends the attempt long before.

The step says what is waited for; what comes early is kept. An attempt ends in PASSED, or in FAILED
with evidence or without.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from atoll.peer.verify.statements import IN_ORDER, StatementPhase


class AuditStep(Enum):
    COMMIT = "commit"  # until all have committed
    REDUCE = "reduce"  # until the result is here
    RESULT = "result"  # until all owners have committed to theirs
    REVEAL = "reveal"  # until all secrets are known
    CHECK = "check"  # until all have told their numbers
    VERDICT = "verdict"  # until all owners have compared them
    OPEN = "open"  # until what is in doubt is opened and judged
    PASSED = "passed"
    FAILED = "failed"


class Cause(Enum):
    ALL_SAID = "all have said it"
    REDUCED = "the result is here"
    CLEAN = "nothing is in doubt"
    DOUBT = "something is in doubt"
    BROKEN = "somebody is guilty, or missing"


TRANSITIONS: Final[Mapping[tuple[AuditStep, Cause], AuditStep]] = {
    (AuditStep.COMMIT, Cause.ALL_SAID): AuditStep.REDUCE,
    (AuditStep.REDUCE, Cause.REDUCED): AuditStep.RESULT,
    (AuditStep.RESULT, Cause.ALL_SAID): AuditStep.REVEAL,
    (AuditStep.REVEAL, Cause.ALL_SAID): AuditStep.CHECK,
    (AuditStep.CHECK, Cause.ALL_SAID): AuditStep.VERDICT,
    (AuditStep.VERDICT, Cause.CLEAN): AuditStep.PASSED,
    (AuditStep.VERDICT, Cause.DOUBT): AuditStep.OPEN,
    (AuditStep.OPEN, Cause.CLEAN): AuditStep.PASSED,
    (AuditStep.COMMIT, Cause.BROKEN): AuditStep.FAILED,
    (AuditStep.REDUCE, Cause.BROKEN): AuditStep.FAILED,
    (AuditStep.RESULT, Cause.BROKEN): AuditStep.FAILED,
    (AuditStep.REVEAL, Cause.BROKEN): AuditStep.FAILED,
    (AuditStep.CHECK, Cause.BROKEN): AuditStep.FAILED,
    (AuditStep.VERDICT, Cause.BROKEN): AuditStep.FAILED,
    (AuditStep.OPEN, Cause.BROKEN): AuditStep.FAILED,
}
# In which step the statements of which phase are waited for.
WAITS_FOR: Final[Mapping[AuditStep, StatementPhase]] = {
    AuditStep.COMMIT: StatementPhase.COMMIT,
    AuditStep.RESULT: StatementPhase.RESULT,
    AuditStep.REVEAL: StatementPhase.REVEAL,
    AuditStep.CHECK: StatementPhase.CHECK,
    AuditStep.VERDICT: StatementPhase.VERDICT,
}
OVER: Final = (AuditStep.PASSED, AuditStep.FAILED)
PATIENT: Final = (AuditStep.REVEAL, AuditStep.CHECK, AuditStep.VERDICT, AuditStep.OPEN)
OPENED: Final = len(IN_ORDER)  # the phase of a Withholding that is about an opened part
