"""A discrete-event simulation of one all-reduce: the real schedules over lines that are shared.

It moves no values, only sizes. A frame is cut into segments. A segment passes the lines of its way
one after the other: the sender's uplink, which serves its destinations in turn, then the pair's
own limit, the lines of the sites, the latency, and the receiver's downlink, each first come first
served. A stream has at most ``window`` bytes on the way, as a socket buffer would have it. A peer
has one processor: what it encodes and what it receives goes through it in order.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from atoll.collectives.planning.network_model import Network
from atoll.collectives.schedule.pair import PairSchedule
from atoll.collectives.schedule.plan import EVERYONE, ReducePlan
from atoll.collectives.schedule.schedule import (
    FrameAdmission,
    FrameKind,
    Idle,
    OutgoingFrame,
    Schedule,
)
from atoll.collectives.schedule.tree import TreeSchedule

SEGMENTS = 8  # per frame: fine enough that a hop does not wait for a whole frame at each line
BUFFER_BYTES_MIN = 256 * 1024
WINDOWS = 2  # bandwidth-delay products that a stream may have on the way


@dataclass
class _Line:
    """Serves segments one after the other, at ``rate`` bytes per second."""

    rate: float
    free_s: float = 0.0

    def pass_s(self, now_s: float, size: float) -> float:
        self.free_s = max(self.free_s, now_s) + size / self.rate
        return self.free_s


@dataclass
class _Stream:
    """From one peer to another: the frame at hand, and how much of it has left."""

    window: float
    frame: OutgoingFrame | None = None
    ready: bool = False  # encoded
    left: int = 0  # segments of the frame that have left
    on_the_way: float = 0.0
    done: bool = False


@dataclass
class ChunkSim:
    network: Network
    plan: ReducePlan
    chunk_bytes: int
    overhead: float
    process_bytes_per_s: float
    frame_s: float = 0.0
    sum_bytes: int = 0  # float32 bytes of a chunk, for what may be open; 0: as encoded
    segments: int = SEGMENTS
    now_s: float = 0.0
    final_s: float = 0.0  # when the last chunk became final anywhere
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _number: int = 0

    def __post_init__(self) -> None:
        n, net = self.network.count, self.network
        self.routes = self.plan.routes
        memory = (self.chunk_bytes, self.sum_bytes or self.chunk_bytes)
        make = PairSchedule if self.plan.is_pairwise else TreeSchedule
        self.schedules: list[Schedule] = [make(self.plan, me, *memory) for me in range(n)]
        self.up = [_Line(float(rate)) for rate in net.up]
        self.down = [_Line(float(rate)) for rate in net.down]
        self.site_up = [_Line(float(rate)) for rate in net.site_up]
        self.site_down = [_Line(float(rate)) for rate in net.site_down]
        self.pair = [[_Line(float(rate)) for rate in row] for row in net.pair]
        self.processors = [_Line(self.process_bytes_per_s) for _ in range(n)]
        rates = net.alone_bytes_per_s()
        self.streams: list[dict[int, _Stream]] = []
        for i, schedule in enumerate(self.schedules):
            mine = {}
            for j in sorted(schedule.destinations):
                trip_s = net.latency_s[i, j] + net.latency_s[j, i]
                window = max(BUFFER_BYTES_MIN, WINDOWS * float(rates[i, j]) * trip_s)
                mine[j] = _Stream(max(window, self.chunk_bytes))
            self.streams.append(mine)
        # Each begins with the one after it: nothing real makes all begin with the same one.
        self.turns = [
            deque(sorted(mine, key=lambda j: (j - i) % n)) for i, mine in enumerate(self.streams)
        ]
        self.sending = [False] * n
        self.segment = self.chunk_bytes / (1 - self.overhead) / self.segments

    def run(self) -> float:
        """Seconds until every participant has every chunk."""
        for me, schedule in enumerate(self.schedules):
            for chunk in schedule.local_chunks():
                self._fold(me, chunk)
            self._pump(me)
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        assert all(schedule.done for schedule in self.schedules), "the schedule stands still"
        return self.final_s

    def _at(self, when_s: float, event: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (when_s, self._number, event))

    # ---- sending

    def _pump(self, me: int) -> None:
        """Give every idle stream its next frame, until none has any."""
        again = True
        while again:
            again = False
            for dest, stream in self.streams[me].items():
                if stream.frame is not None or stream.done:
                    continue
                send = self.schedules[me].next_send(dest)
                if send is Idle.DONE:
                    stream.done = True
                elif isinstance(send, OutgoingFrame):
                    again = True
                    stream.frame, stream.left = send, 0
                    own = send.kind is FrameKind.CONTRIB and self._is_own_part(me, send)
                    stream.ready = not own
                    if own:
                        self._process(me, partial(self._ready, me, stream, send))
        self._serve(me)

    def _is_own_part(self, me: int, send: OutgoingFrame) -> bool:
        """Whether it is encoded just before it leaves; a sum is encoded already."""
        return send.added_here or not self.routes.up_children[self.plan.owners[send.chunk]][me]

    def _ready(self, me: int, stream: _Stream, send: OutgoingFrame) -> None:
        stream.ready = True
        self._serve(me)
        if send.added_here:
            self.schedules[me].arrived(me, send.chunk)
            self._fold(me, send.chunk)

    def _process(self, me: int, then: Callable[[], None]) -> None:
        end_s = self.processors[me].pass_s(self.now_s, self.chunk_bytes) + self.frame_s
        self.processors[me].free_s = end_s
        self._at(end_s, then)

    def _serve(self, me: int) -> None:
        """Put the next segment on the uplink, if it is free: each destination in its turn."""
        if self.sending[me]:
            return
        for _ in range(len(self.turns[me])):
            dest = self.turns[me][0]
            self.turns[me].rotate(-1)
            stream = self.streams[me][dest]
            room = stream.on_the_way < stream.window
            if stream.frame is not None and stream.ready and room:
                self.sending[me] = True
                stream.on_the_way += self.segment
                end_s = self.up[me].pass_s(self.now_s, self.segment)
                self._at(end_s, partial(self._left, me, dest, stream))
                return

    def _left(self, me: int, dest: int, stream: _Stream) -> None:
        assert stream.frame is not None
        frame = stream.frame
        stream.left += 1
        last = stream.left == self.segments
        self.sending[me] = False
        self._travel(me, dest, frame if last else None)
        if last:
            stream.frame = None
            self._pump(me)
        else:
            self._serve(me)

    def _travel(self, src: int, dest: int, frame: OutgoingFrame | None) -> None:
        """The lines between: in order, so their queues can be worked out as the segment leaves."""
        at_s = self.now_s
        lines = [self.pair[src][dest]]
        here, there = self.network.sites[src], self.network.sites[dest]
        if here != there:
            lines += [self.site_up[here], self.site_down[there]]
        lines = [line for line in lines if line.rate < math.inf]
        self._hop(src, dest, frame, lines, at_s)

    def _hop(
        self, src: int, dest: int, frame: OutgoingFrame | None, lines: list[_Line], at_s: float
    ) -> None:
        if lines:
            end_s = lines[0].pass_s(at_s, self.segment)
            self._at(end_s, lambda: self._hop(src, dest, frame, lines[1:], self.now_s))
            return
        arrive_s = at_s + float(self.network.latency_s[src, dest])
        self._at(arrive_s, lambda: self._arrive(src, dest, frame))

    def _arrive(self, src: int, dest: int, frame: OutgoingFrame | None) -> None:
        end_s = self.down[dest].pass_s(self.now_s, self.segment)
        self._at(end_s, lambda: self._received(src, dest, frame))

    # ---- receiving

    def _received(self, src: int, dest: int, frame: OutgoingFrame | None) -> None:
        back_s = self.now_s + float(self.network.latency_s[dest, src])
        self._at(back_s, lambda: self._acknowledged(src, dest))
        if frame is not None:
            admission = self.schedules[dest].admit(src, frame.kind, frame.chunk)
            assert admission is FrameAdmission.ACCEPT, (src, dest, frame, admission)
            self._process(dest, lambda: self._taken(src, dest, frame))

    def _acknowledged(self, src: int, dest: int) -> None:
        self.streams[src][dest].on_the_way -= self.segment
        self._serve(src)

    def _taken(self, src: int, dest: int, frame: OutgoingFrame) -> None:
        if frame.kind is FrameKind.RESULT:
            self._final(dest, frame.chunk)
            self._pump(dest)
        else:
            self.schedules[dest].arrived(src, frame.chunk)
            self._fold(dest, frame.chunk)

    def _fold(self, me: int, chunk: int) -> None:
        schedule = self.schedules[me]
        complete = False
        while not complete and schedule.next_fold(chunk) is not None:
            if self._is_last(me, chunk):
                # Encoding the sum takes the processor once more; then it is ready to leave.
                self._process(me, lambda: self._encoded(me, chunk))
                return
            complete = schedule.folded(chunk)

    def _is_last(self, me: int, chunk: int) -> bool:
        root = self.plan.owners[chunk]
        below = self.routes.up_children[root][me] if root != EVERYONE else (1 - me,)
        sources = [*below, me]
        done = self._folds.get((me, chunk), 0) + 1
        self._folds[me, chunk] = done
        return done == len(sources)

    _folds: dict[tuple[int, int], int] = field(default_factory=dict)

    def _encoded(self, me: int, chunk: int) -> None:
        schedule = self.schedules[me]
        assert schedule.folded(chunk)
        if schedule.is_root(chunk):
            self._final(me, chunk)
        self._pump(me)

    def _final(self, me: int, chunk: int) -> None:
        self.schedules[me].final(chunk)
        self.final_s = self.now_s
