"""The steps of an audited attempt as a literal table. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from atoll.peer.audit.effects import Step
from atoll.peer.audit.statements import IN_ORDER, Phase

__all__ = ["OPENED", "OVER", "PATIENT", "TRANSITIONS", "WAITS_FOR", "Cause"]


class Cause(Enum):
    ALL_SAID = "all have said it"
    REDUCED = "the result is here"
    CLEAN = "nothing is in doubt"
    DOUBT = "something is in doubt"
    BROKEN = "somebody is guilty, or missing"


TRANSITIONS: Final[Mapping[tuple[Step, Cause], Step]] = {
    (Step.COMMIT, Cause.ALL_SAID): Step.REDUCE,
    (Step.REDUCE, Cause.REDUCED): Step.RESULT,
    (Step.RESULT, Cause.ALL_SAID): Step.REVEAL,
    (Step.REVEAL, Cause.ALL_SAID): Step.CHECK,
    (Step.CHECK, Cause.ALL_SAID): Step.VERDICT,
    (Step.VERDICT, Cause.CLEAN): Step.PASSED,
    (Step.VERDICT, Cause.DOUBT): Step.OPEN,
    (Step.OPEN, Cause.CLEAN): Step.PASSED,
    (Step.COMMIT, Cause.BROKEN): Step.FAILED,
    (Step.REDUCE, Cause.BROKEN): Step.FAILED,
    (Step.RESULT, Cause.BROKEN): Step.FAILED,
    (Step.REVEAL, Cause.BROKEN): Step.FAILED,
    (Step.CHECK, Cause.BROKEN): Step.FAILED,
    (Step.VERDICT, Cause.BROKEN): Step.FAILED,
    (Step.OPEN, Cause.BROKEN): Step.FAILED,
}
# In which step the statements of which phase are waited for.
WAITS_FOR: Final[Mapping[Step, Phase]] = {
    Step.COMMIT: Phase.COMMIT,
    Step.RESULT: Phase.RESULT,
    Step.REVEAL: Phase.REVEAL,
    Step.CHECK: Phase.CHECK,
    Step.VERDICT: Phase.VERDICT,
}
OVER: Final = (Step.PASSED, Step.FAILED)
PATIENT: Final = (Step.REVEAL, Step.CHECK, Step.VERDICT, Step.OPEN)
OPENED: Final = len(IN_ORDER)  # the phase of a Withholding that is about an opened part
