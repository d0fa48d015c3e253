"""Define the phases of one peer's membership, as a literal table.

Theory. A peer is OUT of the run, a LEARNER that loads the state, or in the view: as its
COORDINATOR, as a MEMBER, or as a CANDIDATE that has lost the coordinator and stands for election.
Only a decided view makes a member or coordinator; only a newer view, a leave or a lost coordinator
takes that away. LEFT is final: a process that comes back is a new incarnation.

    OUT --LEARN--> LEARNER --view names me--> MEMBER --coordinator silent--> CANDIDATE
     ^                                          |  ^                             |
     +-------------- view without me -----------+  +- outbid, decided or heard --+

LOST in phase COORDINATOR means that voters have promised somebody else: the coordinator outbids.
HEARD takes a candidate back whom nobody has promised anything, and who has promised nothing.
"""

from __future__ import annotations

from enum import Enum

from atoll.collectives.errors import LocalProtocolError


class Phase(Enum):
    OUT = "out"
    LEARNER = "learner"
    MEMBER = "member"
    COORDINATOR = "coordinator"
    CANDIDATE = "candidate"
    LEFT = "left"


class Trigger(Enum):
    LEARN = "told to load the state"
    LED = "a view names me coordinator"
    FOLLOWED = "a view names me, and another as coordinator"
    LOST = "the coordinator is lost, or voters have promised elsewhere"
    OUTBID = "promised a higher ballot"
    HEARD = "the coordinator is heard again, and nothing was promised meanwhile"
    EXCLUDED = "a newer view is without me"
    LEAVE = "the user wants to leave"


_OUT, _LEARNER, _MEMBER = Phase.OUT, Phase.LEARNER, Phase.MEMBER
_COORDINATOR, _CANDIDATE, _LEFT = Phase.COORDINATOR, Phase.CANDIDATE, Phase.LEFT

TRANSITIONS: dict[tuple[Phase, Trigger], Phase] = {
    (_OUT, Trigger.LEARN): _LEARNER,
    (_OUT, Trigger.LED): _COORDINATOR,
    (_OUT, Trigger.FOLLOWED): _MEMBER,
    (_OUT, Trigger.LEAVE): _LEFT,
    (_LEARNER, Trigger.LEARN): _LEARNER,
    (_LEARNER, Trigger.LED): _COORDINATOR,
    (_LEARNER, Trigger.FOLLOWED): _MEMBER,
    (_LEARNER, Trigger.LEAVE): _LEFT,
    (_MEMBER, Trigger.LED): _COORDINATOR,
    (_MEMBER, Trigger.FOLLOWED): _MEMBER,
    (_MEMBER, Trigger.LOST): _CANDIDATE,
    (_MEMBER, Trigger.OUTBID): _MEMBER,
    (_MEMBER, Trigger.EXCLUDED): _OUT,
    (_MEMBER, Trigger.LEAVE): _LEFT,
    (_COORDINATOR, Trigger.LED): _COORDINATOR,
    (_COORDINATOR, Trigger.FOLLOWED): _MEMBER,
    (_COORDINATOR, Trigger.LOST): _CANDIDATE,
    (_COORDINATOR, Trigger.OUTBID): _MEMBER,
    (_COORDINATOR, Trigger.EXCLUDED): _OUT,
    (_COORDINATOR, Trigger.LEAVE): _LEFT,
    (_CANDIDATE, Trigger.LED): _COORDINATOR,
    (_CANDIDATE, Trigger.FOLLOWED): _MEMBER,
    (_CANDIDATE, Trigger.LOST): _CANDIDATE,
    (_CANDIDATE, Trigger.OUTBID): _MEMBER,
    (_CANDIDATE, Trigger.HEARD): _MEMBER,
    (_CANDIDATE, Trigger.EXCLUDED): _OUT,
    (_CANDIDATE, Trigger.LEAVE): _LEFT,
}


def next_phase(phase: Phase, trigger: Trigger) -> Phase:
    """Return the phase that follows, or raise LocalProtocolError if the table has none."""
    following = TRANSITIONS.get((phase, trigger))
    if following is None:
        raise LocalProtocolError(f"phase {phase.value} does not know '{trigger.value}'")
    return following
