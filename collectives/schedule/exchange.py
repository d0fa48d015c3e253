"""Let owners of chunks tell each other, before any result, what a rule on whole vectors needs.

Theory. A rule that depends on distances (robust/gram.py) can be applied by an owner only when it
knows the inner products over all chunks. So each owner waits for all parts of all of its chunks,
tells every other owner the inner products over these, and encodes results once it has heard from
all of them. Until then no result is made: owners take in all parts that come (a whole encoded
vector in memory), and no part waits for a result. The frame carries the number of its sender's
first chunk, which names the sender's shard and is checked like any other.

``VoteExchange`` is one participant's part of the schedule, without locks, clocks or I/O.
"""

from __future__ import annotations

from atoll.collectives.schedule.plan import NOBODY, ReducePlan
from atoll.collectives.schedule.protocol_errors import refused
from atoll.collectives.schedule.schedule import FrameAdmission, FrameKind, OutgoingFrame


class VoteExchange:
    def __init__(self, plan: ReducePlan, me: int) -> None:
        self._plan, self._me = plan, me
        needed = plan.rule is not None and plan.rule.needs_gram
        self._first: dict[int, int] = {}  # owner -> its first chunk
        for chunk, owner in enumerate(plan.owners):
            if needed and owner != NOBODY:
                self._first.setdefault(owner, chunk)
        others = self._first.keys() - {me} if me in self._first else set[int]()
        self._untold = set(others)
        self._unheard = set(others)
        self._is_known = False  # what there is to tell

    @property
    def destinations(self) -> frozenset[int]:
        """Return the owners that are still to be told."""
        return frozenset(self._untold)

    @property
    def waiting(self) -> frozenset[int]:
        """Return the owners that this one has not heard from, once nothing else is missing here."""
        return frozenset(self._unheard) if self._is_known else frozenset()

    def known(self) -> None:
        """Note that all parts of all own chunks are here."""
        self._is_known = True

    def next_send(self, dest: int) -> OutgoingFrame | None:
        if not self._is_known or dest not in self._untold:
            return None
        self._untold.discard(dest)
        return OutgoingFrame(FrameKind.GRAM, self._first[self._me])

    def admit(self, src: int, chunk: int) -> FrameAdmission:
        """Judge what another owner tells: whether it is wanted.

        Raises RemoteProtocolError if ``src`` has nothing to tell.
        """
        if self._me not in self._first or self._first.get(src) != chunk:
            what = f"inner products with chunk {chunk}, which nobody needs"
            raise refused(self._plan.name(src), what)
        return FrameAdmission.ACCEPT if src in self._unheard else FrameAdmission.DROP

    def heard(self, src: int) -> None:
        self._unheard.discard(src)
