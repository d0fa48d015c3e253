"""Reduce by trees: partial sums climb a tree to a chunk's owner, the result descends another.

Theory of operation
===================

Each chunk has an owner, the *root* of its two trees (``routes.py``). A participant that nobody
sends parts to is a *leaf* for that root: it sends its own encoded part to its parent. Any other
adds the parts of its children and its own one in the order of participants. What it has added, an
inner participant encodes and sends to its own parent; the root encodes it once, and these bytes
descend to everyone, unchanged. So everyone ends with the same bytes, whatever the shape.

``TreeSchedule`` is the schedule of ONE participant: a state machine without locks, clocks or I/O.
The engine asks it what to send, what it may take in and what to add next. The *index* of a chunk
counts the chunks of its root; the *base* of a root is its first chunk that is not final here.

Rule 1.  Results go first, then partial sums, then own parts: whoever waits for the former can
         finish sooner, and they free memory.
Rule 2.  A leaf sends the i-th part for a root when ``i < base + lead``. So no more than ``lead``
         chunks of a root are open anywhere, and what an attempt that breaks has in the buffers of
         streams, and loses, stays small.
Rule 3.  Own parts leave for all roots at the same pace: a root that owns n chunks does not get its
         i-th before every other has got the share (i - SPREAD) / n of its own, unless its stream
         broke. On slow links the streams of a peer differ in speed, and a chunk needs everyone's
         part: without this rule most parts are sent by half of the round, few chunks are final,
         and an attempt that breaks loses much. By shares, because owners of little would otherwise
         be served at the start, and those of much at the end alone.
Rule 4.  A part with ``i >= base + 2 * lead`` is held: its stream pauses. It can only come where a
         peer has several streams, and their order is lost, or from one that breaks rule 2.
Rule 5.  Results are never held, and partial sums by no sender. But where several streams lead to a
         participant, no part leaves for it that it would hold (rule 4) because of a result from
         here that may not have arrived. A stream may lose that result, and by then others, which
         have to bring it again, would all stand behind such a part.
Rule 6.  A chunk that NOBODY owns is kept from an earlier attempt: no frame carries it, it becomes
         final from outside, and nothing else waits for it.

**Memory.** By rules 2 and 4 a participant has at most ``2 * lead`` parts of each child and sums
of each root that it adds for; ``lead_chunks`` keeps that within a budget, usually at half of it.

**No deadlock.** Let b be the base, of root r at p, that is the smallest share of its root's chunks.
The result of that chunk is at r or will be: by rule 3 the root that has got the smallest share from
a sender is never paced, and while that share is at most b's, its next index is at most its base, so
rule 2 does not stop it either; so every sender's part of chunk b leaves in turn. None is held,
since b < base + 2 * lead. So every inner participant gets what it adds up, and sends it by rule 5;
the root gets all; and results are never held. A stream on which a part is held carries everything
before it. What follows it there was handed out later: a result that frees it was known to its
sender before the part was sent (its base was beyond i - lead), so by rule 1 it was handed out
before. So p gets the result, its base moves on, and by induction all chunks become final
everywhere. Over several streams the result has arrived before the part was sent, by rule 5; and
what rule 5 keeps back waits for results only, which nothing keeps back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final

from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.schedule.plan import NOBODY, ReducePlan
from atoll.collectives.schedule.routes import ROOT
from atoll.collectives.schedule.schedule import (
    FrameAdmission,
    FrameKind,
    Idle,
    OutgoingFrame,
    check_frame,
    chunks_ahead,
    refused,
)

# One chunk in the buffers of a stream, and one for a sender that comes late to its turn.
SPREAD_CHUNKS: Final = 2


class TreeSchedule:
    """Schedule what participant ``me`` sends, takes in and adds: see the theory at the top.

    ``part_bytes``, ``sum_bytes``: see ``lead_chunks``.
    """

    def __init__(self, plan: ReducePlan, me: int, part_bytes: int = 1, sum_bytes: int = 1) -> None:
        everyone = range(len(plan.participants))
        routes = plan.routes
        self._plan, self._me = plan, me
        self._lead = lead_chunks(plan, part_bytes, sum_bytes)
        self._up = [routes.up[root][me] for root in everyone]  # my parent, by root
        self._down = [routes.down[root][me] for root in everyone]
        self._hand_on = [routes.down_children[root][me] for root in everyone]
        self._sources = [self._sources_of(root) for root in everyone]
        self._children = [frozenset(p for p in found if p != me) for found in self._sources]
        self._whole = [
            frozenset(p for p in children if not self._adds(root, p))
            for root, children in enumerate(self._children)
        ]
        self._chunks_of: list[list[int]] = [[] for _ in everyone]
        self._index: list[int] = []  # each chunk's place among those of its root
        for chunk, owner in enumerate(plan.owners):
            self._index.append(len(self._chunks_of[owner]) if owner != NOBODY else 0)
            if owner != NOBODY:
                self._chunks_of[owner].append(chunk)
        self._base = [0 for _ in everyone]
        self._final = [False for _ in plan.owners]
        self._final_count = 0
        # sending, by destination
        self._results: list[deque[int]] = [deque() for _ in everyone]
        self._partials: list[deque[int]] = [deque() for _ in everyone]
        self._own: list[dict[int, int]] = [{} for _ in everyone]  # root -> parts sent, as a leaf
        self._to_come = [0 for _ in everyone]  # results and partial sums that are still to be sent
        self._broken: set[int] = set()
        self._exchange = GramExchange(plan, me)
        self._expect_sends()
        # receiving and adding
        self._arrived: set[tuple[int, int]] = set()  # (source, chunk), not yet added
        self._added: dict[int, int] = {}  # sources of an open sum that have been added
        self._adding: set[int] = set()
        self._summed: set[int] = set()  # chunks whose sum is complete here

    def _sources_of(self, root: int) -> tuple[int, ...]:
        """Return whose parts are added here for this root, in order; without children, nobody's."""
        children = self._plan.routes.up_children[root][self._me]
        found = [p for p in children if self._contributes(root, p)]
        if not found and self._up[root] != ROOT:
            return ()
        return tuple(sorted([*found, *([self._me] if self._plan.weights[self._me] > 0 else [])]))

    def _contributes(self, root: int, participant: int) -> bool:
        """Return whether anything comes from a participant for this root."""
        if self._plan.weights[participant] > 0:
            return True
        below = self._plan.routes.up_children[root][participant]
        return any(self._contributes(root, p) for p in below)

    def _adds(self, root: int, participant: int) -> bool:
        """Return whether what a participant sends is a sum, and not its own part alone."""
        below = self._plan.routes.up_children[root][participant]
        return any(self._contributes(root, p) for p in below)

    def _expect_sends(self) -> None:
        for dest in self._exchange.destinations:
            self._to_come[dest] += 1
        for root, chunks in enumerate(self._chunks_of):
            if not chunks:
                continue
            for dest in self._hand_on[root]:
                self._to_come[dest] += len(chunks)
            parent = self._up[root]
            if parent == ROOT:
                continue
            if self._sources[root]:
                self._to_come[parent] += len(chunks)
            elif self._plan.weights[self._me] > 0:
                self._own[parent][root] = 0

    # ------------------------------------------------------------ facts

    @property
    def done(self) -> bool:
        return self._final_count == len(self._final)

    @property
    def destinations(self) -> frozenset[int]:
        """Return the participants that get anything from this one."""
        sent = enumerate(zip(self._to_come, self._own, strict=True))
        return frozenset(dest for dest, (to_come, own) in sent if to_come or own)

    def local_chunks(self) -> tuple[int, ...]:
        """Return the chunks to which only this participant adds.

        Nothing that arrives starts them.
        """
        alone = [root for root, found in enumerate(self._sources) if found == (self._me,)]
        return tuple(sorted(chunk for root in alone for chunk in self._chunks_of[root]))

    def is_own_part(self, src: int, chunk: int) -> bool:
        """Return whether ``src`` sends its own part of this chunk, and not a sum of several."""
        return src == self._me or src in self._whole[self._plan.owners[chunk]]

    def is_star(self, chunk: int) -> bool:
        """Return whether the whole is added here, of nothing but own parts."""
        root = self._plan.owners[chunk]
        return self._up[root] == ROOT and self._whole[root] == self._children[root]

    def is_root(self, chunk: int) -> bool:
        return self._plan.owners[chunk] == self._me

    # ------------------------------------------------------------ sending

    def next_send(self, dest: int, unsure: Collection[int] = ()) -> OutgoingFrame | Idle:
        told = self._exchange.next_send(dest)
        if told is not None:
            self._to_come[dest] -= 1
            return told
        if self._results[dest]:
            self._to_come[dest] -= 1
            return OutgoingFrame(FrameKind.RESULT, self._results[dest].popleft())
        if self._partials[dest] and not self._may_be_held(self._partials[dest][0], unsure):
            self._to_come[dest] -= 1
            return OutgoingFrame(FrameKind.CONTRIB, self._partials[dest].popleft())
        own = self._own[dest]
        open_roots = [root for root, sent in own.items() if sent < len(self._chunks_of[root])]
        if open_roots:
            ready = [
                r
                for r in open_roots
                if own[r] < self._base[r] + self._lead
                and not self._may_be_held(self._chunks_of[r][own[r]], unsure)
            ]
            if not ready:
                return Idle.WAIT
            root = min(ready, key=lambda root: own[root] / len(self._chunks_of[root]))
            if own[root] - SPREAD_CHUNKS >= self._slowest() * len(self._chunks_of[root]):
                return Idle.PACED
            own[root] += 1
            return OutgoingFrame(FrameKind.CONTRIB, self._chunks_of[root][own[root] - 1])
        return Idle.WAIT if self._to_come[dest] else Idle.DONE

    def _may_be_held(self, chunk: int, unsure: Collection[int]) -> bool:
        """Return whether a part of a chunk may be held where it goes: see rule 5.

        It may where one of the ``unsure`` results has not arrived.
        """
        root, index = self._plan.owners[chunk], self._index[chunk] - 2 * self._lead
        return any(self._plan.owners[c] == root and self._index[c] <= index for c in unsure)

    def _slowest(self) -> float:
        """Return the share of its chunks of the root that has got the smallest.

        A root with all of its chunks is out, and one whose stream broke; 1 if all are.
        """
        behind = (
            sent / len(self._chunks_of[root])
            for dest, own in enumerate(self._own)
            if dest not in self._broken
            for root, sent in own.items()
            if sent < len(self._chunks_of[root])
        )
        return min(behind, default=1.0)

    def broken(self, dest: int) -> None:
        self._broken.add(dest)

    # ------------------------------------------------------------ receiving

    def admit(self, src: int, kind: int, chunk: int) -> FrameAdmission:
        check_frame(self._plan, self._me, src, kind, chunk)
        root = self._plan.owners[chunk]
        if kind == FrameKind.GRAM:
            return self._exchange.admit(src, chunk)
        if kind == FrameKind.CONTRIB:
            return self._judge_part(root, src, chunk)
        if self._down[root] != src:
            raise refused(self._plan.name(src), f"a result of chunk {chunk}, which others hand on")
        return FrameAdmission.DROP if self._final[chunk] else FrameAdmission.ACCEPT

    def _judge_part(self, root: int, src: int, chunk: int) -> FrameAdmission:
        if src not in self._children[root]:
            what = f"a part of chunk {chunk}, which it has none of for this peer"
            raise refused(self._plan.name(src), what)
        added = self._added.get(chunk, 0)
        seen = chunk in self._summed or self._sources[root].index(src) < added
        if seen or (src, chunk) in self._arrived or self._final[chunk]:
            return FrameAdmission.DROP
        ahead = self._index[chunk] >= self._base[root] + 2 * self._lead
        return FrameAdmission.HOLD if ahead else FrameAdmission.ACCEPT

    def arrived(self, src: int, chunk: int) -> None:
        if self.admit(src, FrameKind.CONTRIB, chunk) is not FrameAdmission.ACCEPT:
            raise LocalProtocolError(f"part of chunk {chunk} arrived, but is not admitted")
        self._arrived.add((src, chunk))

    # ------------------------------------------------------------ adding

    def next_fold(self, chunk: int) -> int | None:
        sources = self._sources[self._plan.owners[chunk]]
        done = self._added.get(chunk, 0)
        if chunk in self._adding or chunk in self._summed or done == len(sources):
            return None
        src = sources[done]
        if src != self._me and (src, chunk) not in self._arrived:
            return None
        self._adding.add(chunk)
        return src

    def folded(self, chunk: int) -> bool:
        self._adding.remove(chunk)
        root = self._plan.owners[chunk]
        done = self._added.get(chunk, 0)
        self._arrived.discard((self._sources[root][done], chunk))
        self._added[chunk] = done + 1
        if done + 1 < len(self._sources[root]):
            return False
        del self._added[chunk]
        self._summed.add(chunk)
        if self._up[root] != ROOT:
            self._partials[self._up[root]].append(chunk)
        return True

    def final(self, chunk: int) -> None:
        if self._final[chunk]:
            raise LocalProtocolError(f"chunk {chunk} became final twice")
        self._final[chunk] = True
        self._final_count += 1
        root = self._plan.owners[chunk]
        if root == NOBODY:
            return
        for dest in self._hand_on[root]:
            self._results[dest].append(chunk)
        chunks = self._chunks_of[root]
        while self._base[root] < len(chunks) and self._final[chunks[self._base[root]]]:
            self._base[root] += 1

    def known(self) -> None:
        self._exchange.known()

    def heard(self, owner: int) -> None:
        self._exchange.heard(owner)

    # ------------------------------------------------------------ whom it waits for

    def missing(self) -> frozenset[int]:
        """Return the participants that this one waits for.

        They are the children whose part of a base is not here; if there are none, those who should
        hand results on. While a child is late, the others are late because of it: naming them would
        blame everyone.
        """
        late: set[int] = set()
        behind: set[int] = set()
        for root, chunks in enumerate(self._chunks_of):
            if self._base[root] == len(chunks):
                continue
            chunk = chunks[self._base[root]]
            behind.add(self._down[root])
            if chunk not in self._summed:
                waited = self._sources[root][self._added.get(chunk, 0) :]
                late |= {p for p in waited if (p, chunk) not in self._arrived}
        late.discard(self._me)
        # Before all owners have been heard there are no results, so everybody would be behind.
        return frozenset((late or self._exchange.waiting or behind) - {self._me, ROOT})


class GramExchange:
    """Let owners of chunks tell each other, before any result, what a rule on whole vectors needs.

    Theory. A rule that depends on distances (robust/gram.py) can be applied by an owner only when
    it knows the inner products over all chunks. So each owner waits for all parts of all of its
    chunks, tells every other owner the inner products over these, and encodes results once it has
    heard from all of them. Until then no result is made: owners take in all parts that come (a
    whole encoded vector in memory), and no part waits for a result. The frame carries the number of
    its sender's first chunk, which names the sender's shard and is checked like any other.

    This is one participant's part of it.
    """

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


def lead_chunks(plan: ReducePlan, part_bytes: int, sum_bytes: int) -> int:
    """Return how many chunks of a root may be open: the same number on all participants.

    ``part_bytes``, ``sum_bytes``: of the largest chunk, encoded and as a float32 sum.
    """
    shards: dict[int, int] = {}
    for owner in plan.owners:
        if owner != NOBODY:
            shards[owner] = shards.get(owner, 0) + 1
    children = plan.routes.up_children
    # The participant that adds for most: each open chunk takes a part of each child, and a sum.
    open_bytes = max(
        sum(len(children[r][p]) * part_bytes + sum_bytes for r in shards if children[r][p])
        for p in range(len(plan.participants))
    )
    if plan.rule is not None and plan.rule.needs_gram:
        return max(shards.values(), default=1)  # no result before all parts: GramExchange
    return chunks_ahead(max(shards.values(), default=0), open_bytes)
