"""Exchange pairwise: two peers send each other everything, and each adds it up for itself.

Theory of operation
===================

Each of the two sends its own encoded part of every chunk to the other at once, and adds both parts
in the order of participants. That sum is the result: there are no owners, and no results are on
the way. A chunk takes one latency, where a butterfly of two takes two. The bytes are the same: in a
butterfly half of what each sends is parts, and the other half results.

Both end with the same bits because both add the same values: each takes its own part too from the
encoded bytes that it sends (``OutgoingFrame.added_here``). So each part is quantized once. The
mean is not quantized at all if the codec of the result is float32, whatever that of the parts is.

``PairSchedule`` is the schedule of ONE of the two, a state machine as ``TreeSchedule`` is. One
participant may also be alone, and it may have no part (weight 0): it takes in what the other adds
alone. The *index* of a chunk counts those that are not kept; the *base* is the first of them that
is not final here.

Rule 1.  Own parts leave in the order of chunks, the i-th when ``i < base + lead``: what an attempt
         that breaks has on the way, and loses, stays small.
Rule 2.  A part with ``i >= base + 2 * lead`` is held: its stream pauses. It can only come from one
         that has no parts to wait for, as the weight here is 0, or that breaks rule 1.
Rule 3.  A chunk that NOBODY owns is kept from an earlier attempt: see rule 6 of ``tree.py``.

**Memory.** By rule 1 there are at most ``lead`` own parts, and by rule 2 at most ``2 * lead`` parts
of the other and sums; ``pair_lead`` keeps that within a budget, usually at half of it.

**No deadlock.** Let b be the smaller base, that of p, and b' that of the other, q. Rule 1 lets both
send the b-th part, if they have not yet. q holds nothing that p sends, all of it below b + lead. On
each stream from q the indices rise, so nothing that lies before the b-th part is held by p, nor is
that part. So what p lacks of the b-th chunk comes, p's base moves on, and by induction all becomes
final. If both have parts nothing is ever held: q has got none of p's from b + lead on, so
b' <= b + lead, and all that q sends is below b + 2 * lead.

**A death** needs no care. What the survivor has finished are means of both, and the next plan says
which of them are kept; in an attempt of both again, those are the same bytes on either side.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.schedule.plan import NOBODY, ReducePlan
from atoll.collectives.schedule.schedule import (
    FrameAdmission,
    FrameKind,
    Idle,
    OutgoingFrame,
    check_frame,
    chunks_ahead,
    refused,
)

# What an open chunk takes: the own part, once it is sent, and the other's, until both are added.
PARTS_OPEN: Final = 2


class PairSchedule:
    """Schedule what participant ``me`` sends, takes in and adds, by a plan that ``is_pairwise``.

    The theory is at the top of this file. ``part_bytes``, ``sum_bytes``: see ``pair_lead``.
    """

    def __init__(self, plan: ReducePlan, me: int, part_bytes: int = 1, sum_bytes: int = 1) -> None:
        everyone = range(len(plan.participants))
        self._plan, self._me = plan, me
        self._others = frozenset(everyone) - {me}  # one, or nobody
        self._sources = tuple(p for p in everyone if plan.weights[p] > 0)
        self._chunks = [chunk for chunk, owner in enumerate(plan.owners) if owner != NOBODY]
        self._index = {chunk: index for index, chunk in enumerate(self._chunks)}
        self._lead = pair_lead(len(self._chunks), part_bytes, sum_bytes)
        self._base = 0
        self._final = [False for _ in plan.owners]
        self._final_count = 0
        # sending
        self._sends = bool(self._others) and me in self._sources
        self._sent = 0  # own parts that have been handed out
        # receiving and adding
        self._loading: set[int] = set()  # own parts that are being encoded
        self._arrived: set[tuple[int, int]] = set()  # (source, chunk), the own ones too
        self._added = [0 for _ in plan.owners]  # sources of each chunk that have been added
        self._adding: set[int] = set()

    # ------------------------------------------------------------ facts

    @property
    def done(self) -> bool:
        return self._final_count == len(self._final)

    @property
    def destinations(self) -> frozenset[int]:
        return self._others if self._sends and self._chunks else frozenset()

    def local_chunks(self) -> tuple[int, ...]:
        alone = self._sources == (self._me,) and not self._sends
        return tuple(self._chunks) if alone else ()

    def is_own_part(self, src: int, chunk: int) -> bool:
        return True

    def is_star(self, chunk: int) -> bool:
        return True

    def is_root(self, chunk: int) -> bool:
        return True

    # ------------------------------------------------------------ sending

    def next_send(self, dest: int, unsure: Collection[int] = ()) -> OutgoingFrame | Idle:
        if not self._sends or self._sent == len(self._chunks):
            return Idle.DONE
        if self._sent >= self._base + self._lead:
            return Idle.WAIT
        chunk = self._chunks[self._sent]
        self._sent += 1
        self._loading.add(chunk)
        return OutgoingFrame(FrameKind.CONTRIB, chunk, added_here=True)

    def broken(self, dest: int) -> None:
        """Do nothing: nobody else is kept waiting for the other."""

    # ------------------------------------------------------------ receiving

    def admit(self, src: int, kind: int, chunk: int) -> FrameAdmission:
        check_frame(self._plan, self._me, src, kind, chunk)
        if kind != FrameKind.CONTRIB:
            what = f"a result of chunk {chunk}, which everyone adds up for itself"
            raise refused(self._plan.name(src), what)
        if src not in self._sources:
            what = f"a part of chunk {chunk}, which it has none of: its weight is 0"
            raise refused(self._plan.name(src), what)
        if (src, chunk) in self._arrived or self._final[chunk]:
            return FrameAdmission.DROP
        ahead = self._index[chunk] >= self._base + 2 * self._lead
        return FrameAdmission.HOLD if ahead else FrameAdmission.ACCEPT

    def arrived(self, src: int, chunk: int) -> None:
        if src == self._me:
            expected = chunk in self._loading
            self._loading.discard(chunk)
        else:
            expected = self.admit(src, FrameKind.CONTRIB, chunk) is FrameAdmission.ACCEPT
        if not expected:
            text = f"part of chunk {chunk} arrived, but is not admitted or handed out"
            raise LocalProtocolError(text)
        self._arrived.add((src, chunk))

    # ------------------------------------------------------------ adding

    def next_fold(self, chunk: int) -> int | None:
        added = self._added[chunk]
        if chunk in self._adding or added == len(self._sources):
            return None
        src = self._sources[added]
        if (src, chunk) not in self._arrived and (src != self._me or self._sends):
            return None
        self._adding.add(chunk)
        return src

    def folded(self, chunk: int) -> bool:
        self._adding.remove(chunk)
        self._added[chunk] += 1
        return self._added[chunk] == len(self._sources)

    def final(self, chunk: int) -> None:
        if self._final[chunk]:
            raise LocalProtocolError(f"chunk {chunk} became final twice")
        self._final[chunk] = True
        self._final_count += 1
        while self._base < len(self._chunks) and self._final[self._chunks[self._base]]:
            self._base += 1

    def known(self) -> None:
        """Do nothing: there is no other owner."""

    def heard(self, owner: int) -> None:
        raise LocalProtocolError("in a pairwise exchange owners tell each other nothing")

    # ------------------------------------------------------------ whom it waits for

    def missing(self) -> frozenset[int]:
        """Return the participant that this one waits for: the other, or nobody.

        It waits while the other's part of the base is not here, or the other does not take the own
        one.
        """
        if self._base == len(self._chunks):
            return frozenset()
        chunk = self._chunks[self._base]
        waited = (p for p in self._sources if p != self._me or self._sends)
        late = any((p, chunk) not in self._arrived for p in waited)
        return self._others if late else frozenset()


def pair_lead(chunks: int, part_bytes: int, sum_bytes: int) -> int:
    """Return how many of ``chunks`` may be open: the same number on both sides.

    ``part_bytes``, ``sum_bytes``: of the largest chunk, encoded and as a float32 sum.
    """
    return chunks_ahead(chunks, PARTS_OPEN * part_bytes + sum_bytes)
