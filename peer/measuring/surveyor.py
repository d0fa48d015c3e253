"""Measures the links to the other members, and tells the coordinator: the shell.

Reads the counters of all data streams at intervals, sends probes in a thread of their own, carries
messages. What is decided is in survey.py, turns.py, estimates.py and picture.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from atoll.collectives.errors import AtollError
from atoll.collectives.network import Network
from atoll.peer.group.messages import Begin
from atoll.peer.group.views import REPLICA, View, short
from atoll.peer.measuring.estimates import LinkEstimate, OwnLinks, PairEstimate
from atoll.peer.measuring.frames import PROBE, PROBE_FRAME_BYTES, probe_header
from atoll.peer.measuring.messages import ABOUT_LINKS, AskProbe, LinkRow, MayProbe, ProbeOver
from atoll.peer.measuring.news import News
from atoll.peer.measuring.picture import Picture, describe
from atoll.peer.measuring.slices import LOAD_BYTES, Slice, between
from atoll.peer.measuring.survey import Probe, RowTimes, Survey, probing_order
from atoll.peer.measuring.tcpinfo import TcpInfo, parse
from atoll.peer.measuring.turns import ProbeTurns
from atoll.peer.rounds.datastream import DataStream
from atoll.peer.rounds.streams import FrameOutlet

__all__ = ["StreamSource", "Surveyor"]

# Between two readings of the counters of all streams, usually and during a probe.
READ_S, READ_PROBE_S = 0.25, 0.1
ROW_LOOK_S = 1.0  # between two looks whether somebody is to be told
WATCH_S = 0.02  # how soon a probe gives way to a reduction
ANSWER_TIMEOUT_S = 2.0  # for the answer whether a probe may be sent
# While a probe is sent its stream keeps to no pace. Not 0: then nobody could tell whether somebody
# else has set one meanwhile, which is to stay.
PROBE_PACE = 1e12


class StreamSource(Protocol):
    """The data streams of a daemon (peer/rounds/streams.py)."""

    def outgoing(self) -> Sequence[tuple[bytes, DataStream]]: ...

    def incoming(self) -> Sequence[tuple[bytes, DataStream]]: ...

    async def to(self, peer: bytes) -> DataStream: ...


class Surveyor:
    """Lives in the event loop. ``begins``: of the reductions that are under way, here or elsewhere
    in the view. ``send`` is false without a control link."""

    def __init__(
        self,
        *,
        me: bytes,
        streams: StreamSource,
        send: Callable[[bytes, object], bool],
        view: Callable[[], View | None],
        begins: Callable[[], Iterable[Begin]],
        log: Callable[[str], None],
    ) -> None:
        self._me, self._streams, self._send = me, streams, send
        self._view, self._begins, self._log = view, begins, log
        self._loop = asyncio.get_running_loop()
        self._readings: WeakKeyDictionary[DataStream, tuple[TcpInfo, float]] = WeakKeyDictionary()
        self._pairs: dict[bytes, PairEstimate] = {}
        self._own = OwnLinks()
        self._arrives: dict[bytes, float] = {}  # what the others can send here, as they say
        self._survey, self._turns, self._news = Survey(), ProbeTurns(), News()
        self._picture, self._told = Picture(), RowTimes()
        self._was_reducing = 0
        self._looked_s = float("-inf")
        self._said_full = False
        self._probe: Probe | None = None  # under way ...
        self._probing: asyncio.Task[None] | None = None  # ... and its task
        self._full = b""  # to whom bytes are ready all the time, as long as a probe is sent
        self._sending = False
        self._arriving: set[bytes] = set()  # from whom much came between the last two readings
        self._sent_bytes = 0  # of the probe at hand
        self._enough = threading.Event()
        self._answer: asyncio.Future[bool] | None = None
        self.probe_bytes = 0  # of all probes so far
        self._noise = os.urandom(PROBE_FRAME_BYTES)  # nothing on the way can make it smaller

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(READ_PROBE_S if self._probe is not None else READ_S)
                self.look()
        finally:
            self._enough.set()
            if self._probing is not None:
                self._probing.cancel()

    # ------------------------------------------------------------ what is known

    def link(self, peer: bytes) -> LinkEstimate:
        """The link to ``peer``, as far as is known here."""
        pair = self._pairs.get(peer)
        return pair.now(self._loop.time()) if pair is not None else LinkEstimate()

    def status(self, peer: bytes) -> dict[str, Any]:
        """What people see of one member; only what is known. Rates in bytes per second."""
        link = self.link(peer)
        arrives = self._picture.out(peer, self._me) or self._arrives.get(peer, 0.0)
        found: dict[str, Any] = {}
        if link.rtt_s:
            found["rtt_ms"] = round(1e3 * link.rtt_s, 2)
        if link.out:
            found["out_bytes_per_s"] = round(link.out)
        if link.age_s < math.inf:
            found["measured_s_ago"] = round(link.age_s)
        if arrives:
            found["in_bytes_per_s"] = round(arrives)
        if link.loss is not None:
            found["loss"] = round(link.loss, 6)
        return found

    def network(self, participants: Collection[bytes]) -> Network:
        """The links between these, in ascending order of peer id, as this peer knows them: only the
        coordinator of a view knows more than its own. ConfigError for nobody."""
        self._picture.put(self._me, self._row(self._loop.time()))
        return self._picture.network(sorted(participants))

    def totals(self) -> dict[str, int]:
        """What this peer's own links have been seen to carry, bytes per second; 0 if unknown."""
        now_s = self._loop.time()
        return {
            "up_bytes_per_s": round(self._own.up(now_s)),
            "down_bytes_per_s": round(self._own.down(now_s)),
        }

    # ------------------------------------------------------------ reading

    def look(self) -> None:
        """Read all counters, and do what is due."""
        now_s, view = self._loop.time(), self._view()
        others = self._others(view)
        reducing = self._reducing()
        of_two = max(reducing, self._was_reducing) == 2
        self._was_reducing = reducing
        out, into = self._slices(self._streams.outgoing()), self._slices(self._streams.incoming())
        self._arriving = {
            peer for peer, slices in into.items() if sum(one.arrived for one in slices) > LOAD_BYTES
        }
        moving = [peer for peer, slices in out.items() if any(one.is_load for one in slices)]
        self._pairs = {peer: self._pairs.get(peer) or PairEstimate() for peer in others}
        for peer, pair in self._pairs.items():
            full = peer == self._full
            alone = (full or of_two) and not set(moving) - {peer}
            pair.handle(out.get(peer, ()), now_s, alone=alone, full=full)
        self._own.handle(list(out.values()), list(into.values()), now_s)
        if not self._sending:
            self._full = b""  # not before its last bytes have been counted as such
        if self._probe is not None:
            self._watch(self._probe, now_s)
        elif reducing or moving:
            self._survey.busy(now_s)
        elif self._readings:  # else this system counts nothing, and a probe would show nothing
            self._begin_probe(others, now_s)
        if view is not None and now_s - self._looked_s >= ROW_LOOK_S:
            self._looked_s = now_s
            self._tell(view, now_s)

    def _reducing(self) -> int:
        """Participants of the largest reduction under way; 0 for none."""
        return max((len(begin.participants) for begin in self._begins()), default=0)

    def _others(self, view: View | None) -> list[bytes]:
        """Members with which data are exchanged."""
        members = view.members if view is not None else ()
        if not any(m.peer == self._me and m.role == REPLICA for m in members):
            return []
        return [m.peer for m in members if m.role == REPLICA and m.peer != self._me]

    def _slices(
        self, streams: Sequence[tuple[bytes, DataStream]]
    ) -> defaultdict[bytes, list[Slice]]:
        """What each stream did since the last reading, by peer."""
        found: defaultdict[bytes, list[Slice]] = defaultdict(list)
        for peer, stream in streams:
            info, at_s = parse(stream.tcp_info()), self._loop.time()
            if info is None:
                continue
            before, before_s = self._readings.get(stream, (None, at_s))
            self._readings[stream] = (info, at_s)
            found[peer].append(between(before, info, at_s - before_s, stream.pace_bytes_per_s))
        return found

    # ------------------------------------------------------------ probing

    def _begin_probe(self, others: Sequence[bytes], now_s: float) -> None:
        self._survey.keep(others, now_s)
        order = probing_order(self._me, others)
        ages_s = [(peer, self._pairs[peer].now(now_s).age_s) for peer in order]
        probe = self._survey.next(ages_s, now_s)
        if probe is not None:
            self._probe = probe
            self._probing = self._loop.create_task(self._run_probe(probe))

    def _watch(self, probe: Probe, now_s: float) -> None:
        pair = self._pairs.get(probe.peer)
        if pair is None:  # it is no member any more
            self._enough.set()
            return
        enough = probe.enough(self._sent_bytes, pair.samples, pair.last_rate, pair.hint, now_s)
        if enough and self._sending:
            self._enough.set()

    async def _run_probe(self, probe: Probe) -> None:
        """Ask, send until it is enough or a reduction begins, and say that it is over."""
        self._sent_bytes = 0
        pair, peer = self._pairs[probe.peer], probe.peer
        asked = failed = False
        try:
            asked = await self._may_probe(peer)
            if asked and not self._reducing():
                stream = await self._streams.to(peer)
                probe.began_s, probe.last_samples = self._loop.time(), pair.samples
                if await self._send_probe(stream, probe):
                    await asyncio.sleep(2 * READ_PROBE_S)  # its last bytes are counted meanwhile
                    pair.probed(self._loop.time())
                    failed = not self.link(peer).out
        except AtollError:  # the stream did not come about: rounds will report that
            failed = True
        finally:
            self._probe = self._probing = None
            self.probe_bytes += self._sent_bytes
            if asked:
                self._send(peer, ProbeOver(self.link(peer).out or None))
                self._survey.ended(peer, self._sent_bytes, self._loop.time(), failed=failed)
            else:
                self._survey.refused(peer, self._loop.time())

    async def _may_probe(self, peer: bytes) -> bool:
        self._answer = self._loop.create_future()
        if not self._send(peer, AskProbe()):
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await self._answer
        return False

    async def _send_probe(self, stream: DataStream, probe: Probe) -> bool:
        """Whether it came to its end by itself."""
        view, paced = self._view(), stream.pace_bytes_per_s
        if view is None:
            return False
        outlet = FrameOutlet(stream, probe_header(view), aside=True)
        ended: asyncio.Future[bool] = self._loop.create_future()
        if paced:
            stream.pace(PROBE_PACE)
        self._enough.clear()
        self._sending, self._full = True, probe.peer
        name = f"probe-{short(probe.peer)}"
        threading.Thread(
            target=self._send_frames, args=(outlet, probe.bytes_max, ended), name=name, daemon=True
        ).start()
        try:
            while not ended.done():
                if self._reducing():
                    self._enough.set()
                    await ended
                    return False
                await asyncio.wait([ended], timeout=WATCH_S)
            return ended.result()
        finally:
            self._enough.set()
            self._sending = False
            if stream.pace_bytes_per_s == PROBE_PACE:
                stream.pace(paced)

    def _send_frames(
        self, outlet: FrameOutlet, bytes_max: int, ended: asyncio.Future[bool]
    ) -> None:
        """In a thread of its own."""
        payload, well = memoryview(self._noise), True
        try:
            while not self._enough.is_set() and self._sent_bytes < bytes_max:
                outlet.send(PROBE, 0, payload)
                self._sent_bytes += len(payload)
        except AtollError:
            well = False

        def end() -> None:
            if not ended.done():  # else the task that waited was cancelled
                ended.set_result(well)

        with contextlib.suppress(RuntimeError):  # the loop has ended before this thread
            self._loop.call_soon_threadsafe(end)

    # ------------------------------------------------------------ messages

    def on_message(self, source: bytes, message: object) -> bool:
        """False for what is not about links."""
        if not isinstance(message, ABOUT_LINKS):
            return False
        now_s, view = self._loop.time(), self._view()
        if isinstance(message, LinkRow):
            if view is not None and source in view.peers:
                self._picture.put(source, message)
        elif isinstance(message, AskProbe):
            busy = self._reducing() > 0 or bool(self._arriving - {source})
            granted = self._turns.ask(source, now_s, busy=busy)
            self._send(source, MayProbe(granted))
        elif isinstance(message, ProbeOver):
            self._turns.over(source)
            if message.out and view is not None and source in view.peers:
                self._arrives[source] = message.out
        else:
            self._on_answer(source, message)
        return True

    def _on_answer(self, source: bytes, answer: MayProbe) -> None:
        waiting, asked = self._answer, self._probe
        if waiting is not None and not waiting.done() and asked and asked.peer == source:
            waiting.set_result(answer.granted)
        elif answer.granted:  # too late: somebody else may want the turn
            self._send(source, ProbeOver())

    def _row(self, now_s: float) -> LinkRow:
        links = {peer: pair.now(now_s) for peer, pair in sorted(self._pairs.items())}
        return LinkRow(
            peers=tuple(links),
            rtt_s=tuple(link.rtt_s or None for link in links.values()),
            out=tuple(link.out or None for link in links.values()),
            loss=tuple(link.loss for link in links.values()),
            up=self._own.up(now_s) or None,
            down=self._own.down(now_s) or None,
        )

    def _tell(self, view: View, now_s: float) -> None:
        self._picture.keep(view.peers)
        self._arrives = {peer: rate for peer, rate in self._arrives.items() if peer in view.peers}
        self._news.keep(view.peers)
        for peer, pair in self._pairs.items():
            if line := self._news.about(peer, pair.now(now_s), now_s):
                self._log(line)
        row = self._row(now_s)
        if view.coordinator == self._me:
            self._picture.put(self._me, row)
            self._say_full(view)
            return
        to = (view.coordinator, view.number)
        due = row.peers and self._told.due(row, to, len(view.members), now_s)
        if due and self._send(view.coordinator, row):
            self._told.sent(row, to, now_s)

    def _say_full(self, view: View) -> None:
        """Once in the life of a daemon."""
        replicas = [m.peer for m in view.members if m.role == REPLICA]
        if not self._said_full and len(replicas) > 1 and self._picture.is_full(replicas):
            self._said_full = True
            self._log(f"links measured: {describe(self._picture.network(replicas))}")
