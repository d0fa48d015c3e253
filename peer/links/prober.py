"""Send probes, and give others their turn: the shell of probe_schedule.py.

A probe is sent by a thread of its own, as fast as its stream takes it, and watched from the event
loop, which ends it when it is enough or in the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from atoll.collectives.errors import AtollError
from atoll.collectives.threads import worker
from atoll.peer.daemon.ports import LinkMonitorPort
from atoll.peer.links.estimates import PairEstimate
from atoll.peer.links.messages import (
    PROBE,
    PROBE_FRAME_BYTES,
    AskProbe,
    MayProbe,
    ProbeOver,
    probe_header,
)
from atoll.peer.links.probe_schedule import ProbeSchedule, ProbeTurns, RunningProbe, probed_peers
from atoll.peer.links.tcp_info import Traffic
from atoll.peer.membership.view import short
from atoll.peer.streams.manager import FrameOutlet
from atoll.peer.streams.stream import DataStream

READ_PROBE_S = 0.1  # between two readings of the counters during a probe
WATCH_S = 0.02  # how soon a probe gives way to a reduction
ANSWER_TIMEOUT_S = 2.0  # for the answer whether a probe may be sent
# While a probe is sent its stream keeps to no pace. Not 0: then nobody could tell whether somebody
# else has set one meanwhile, which is to stay.
PROBE_PACE = 1e12
# Where both ends have dialled at once the kernel takes the time between their SYNs for the first
# round trip, anything from 0 on. BBR makes its window for the least of ten seconds, so that until
# then it gets slower with every turn, and a probe finds a tenth of what the path has.
PUNCHED_YOUNG_S = 12.0


class ProbeStreams(Protocol):
    async def to(self, peer: bytes) -> DataStream: ...


class Prober:
    """Send probes to other peers and answer theirs, in the event loop.

    ``reducing`` returns whether a reduction is under way, here or elsewhere in the view,
    ``budget_bytes`` what all probes may send in an hour. ``on``: false if this peer is to send no
    probes and to take none; ``allowed``, which may change: the same for now.
    """

    def __init__(
        self,
        *,
        me: bytes,
        streams: ProbeStreams,
        daemon: LinkMonitorPort,
        reducing: Callable[[], bool],
        budget_bytes: Callable[[], int],
        on: bool,
    ) -> None:
        self._me, self._streams, self._daemon = me, streams, daemon
        self._reducing, self._budget_bytes, self._on = reducing, budget_bytes, on
        self.allowed = True
        self._loop = asyncio.get_running_loop()
        self._schedule, self._turns = ProbeSchedule(), ProbeTurns(me)
        self._probe: RunningProbe | None = None  # under way ...
        self._probing: asyncio.Task[None] | None = None  # ... and its task
        self._sending = self._disturbed = False
        self._traffic = Traffic({}, {})  # between the last two readings
        self._sent_bytes = 0  # of the probe at hand
        self._enough = threading.Event()
        self._answer: asyncio.Future[MayProbe] | None = None
        self.filled = b""  # to whom bytes are ready all the time, as long as a probe is sent
        self._noise = os.urandom(PROBE_FRAME_BYTES)  # nothing on the way can make it smaller

    @property
    def active(self) -> bool:
        return self._probe is not None

    @property
    def _may_begin(self) -> bool:
        return self._on and self.allowed

    def close(self) -> None:
        self._enough.set()
        if self._probing is not None:
            self._probing.cancel()

    def look(self, pairs: Mapping[bytes, PairEstimate], traffic: Traffic, now_s: float) -> None:
        """Watch the probe under way, or begin one that is due, after each reading of the counters.

        ``pairs``: whom to probe, with what is known.
        """
        self._traffic = traffic
        if not self._sending:
            self.filled = b""  # not before its last bytes have been counted as such
        if self._probe is not None:
            self._watch(self._probe, pairs.get(self._probe.peer), now_s)
        elif self._reducing() or traffic.sending:
            self._schedule.busy(now_s)
        elif self._may_begin and not traffic.arriving and not self._turns.given(now_s):
            self._begin(pairs, now_s)

    def _begin(self, pairs: Mapping[bytes, PairEstimate], now_s: float) -> None:
        self._schedule.keep(pairs, now_s)
        budget_bytes = self._budget_bytes()
        peers = probed_peers(self._me, pairs, budget_bytes)
        ages_s = [(peer, pairs[peer].now(now_s).age_s) for peer in peers]
        probe = self._schedule.next(ages_s, budget_bytes, now_s)
        if probe is not None:
            self._probe = probe
            self._probing = self._loop.create_task(self._run(probe, pairs[probe.peer]))

    def _watch(self, probe: RunningProbe, pair: PairEstimate | None, now_s: float) -> None:
        if not self._sending:
            return
        if not self._traffic.is_alone(probe.peer):
            self._disturbed = True  # it would find too little
        if (
            self._disturbed
            or pair is None  # it is no member any more
            or probe.enough(self._sent_bytes, now_s)
        ):
            self._enough.set()

    async def _run(self, probe: RunningProbe, pair: PairEstimate) -> None:
        """Ask, send until it is enough or a reduction begins, and say that it is over."""
        self._sent_bytes, peer = 0, probe.peer
        asked = failed = False
        answer, took_s = MayProbe(granted=False), 0.0
        try:
            self._turns.asks()
            answer = await self._may_probe(peer)
            asked = answer.granted
            if asked and self._turns.begins(self._loop.time()) and not self._reducing():
                stream = await self._streams.to(peer)
                if stream.is_punched and time.monotonic() - stream.began_s < PUNCHED_YOUNG_S:
                    return
                probe.began_s = self._loop.time()
                pair.begin_probe()
                try:
                    ended = await self._send_probe(stream, probe)
                finally:  # also if it breaks: the budget is of the time in which it sent
                    took_s = self._loop.time() - probe.began_s
                if ended:
                    await asyncio.sleep(2 * READ_PROBE_S)  # its last bytes are counted meanwhile
                    failed = not pair.probed(self._loop.time())
        except AtollError:  # the stream did not come about: rounds will report that
            failed = True
        finally:
            self._probe = self._probing = None
            self._turns.ends()
            now_s = self._loop.time()
            if asked:
                self._daemon.send(peer, ProbeOver(pair.now(now_s).out or None))
                self._schedule.ended(peer, self._sent_bytes, now_s, took_s=took_s, failed=failed)
            else:
                self._schedule.refused(peer, now_s, for_long=answer.never)

    async def _may_probe(self, peer: bytes) -> MayProbe:
        self._answer = self._loop.create_future()
        if not self._daemon.send(peer, AskProbe()):
            return MayProbe(granted=False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await self._answer
        return MayProbe(granted=False)

    async def _send_probe(self, stream: DataStream, probe: RunningProbe) -> bool:
        """Send a probe; return whether it came to its end by itself, and undisturbed."""
        view, paced = self._daemon.view(), stream.pace_bytes_per_s
        if view is None:
            return False
        outlet = FrameOutlet(stream, probe_header(view), aside=True)
        ended: asyncio.Future[bool] = self._loop.create_future()
        if paced:
            stream.pace(PROBE_PACE)
        self._enough.clear()
        self._sending, self.filled, self._disturbed = True, probe.peer, False
        name = f"probe-{short(probe.peer)}"
        worker(lambda: self._send_frames(outlet, probe.bytes_max, ended), name).start()
        try:
            while not ended.done():
                if self._reducing():
                    self._enough.set()
                    await ended
                    return False
                await asyncio.wait([ended], timeout=WATCH_S)
            return ended.result() and not self._disturbed
        finally:
            self._enough.set()
            self._sending = False
            if stream.pace_bytes_per_s == PROBE_PACE:
                stream.pace(paced)

    def _send_frames(
        self, outlet: FrameOutlet, bytes_max: int, ended: asyncio.Future[bool]
    ) -> None:
        """Send the frames of a probe, in a thread of its own.

        ``ended`` is told in the event loop whether that went well.
        """
        payload, well = memoryview(self._noise), True
        try:
            while not self._enough.is_set() and self._sent_bytes + len(payload) <= bytes_max:
                outlet.send(PROBE, 0, payload)
                self._sent_bytes += len(payload)
        except AtollError:
            well = False

        def end() -> None:
            if not ended.done():  # else the task that waited was cancelled
                ended.set_result(well)

        with contextlib.suppress(RuntimeError):  # the loop has ended before this thread
            self._loop.call_soon_threadsafe(end)

    def on_message(self, source: bytes, message: AskProbe | MayProbe | ProbeOver) -> None:
        now_s = self._loop.time()
        if isinstance(message, AskProbe) and not self._on:
            self._daemon.send(source, MayProbe(granted=False, never=True))
        elif isinstance(message, AskProbe):
            loaded = self._traffic.sending or self._traffic.arriving - {source}
            busy = self._reducing() or bool(loaded) or not self.allowed
            self._daemon.send(source, MayProbe(self._turns.ask(source, now_s, busy=busy)))
        elif isinstance(message, ProbeOver):
            self._turns.over(source, now_s)
        else:
            self._on_answer(source, message)

    def _on_answer(self, source: bytes, answer: MayProbe) -> None:
        waiting, asked = self._answer, self._probe
        if waiting is not None and not waiting.done() and asked and asked.peer == source:
            waiting.set_result(answer)
        elif answer.granted:  # too late: somebody else may want the turn
            self._daemon.send(source, ProbeOver())
