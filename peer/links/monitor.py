"""Measure the links to the other members, and tell the coordinator: the shell.

Reads the counters of all data streams at intervals, carries messages, and has probes sent. What is
decided is in estimates.py, tcp_info.py and link_table.py.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from atoll.collectives.planning.network_model import Network
from atoll.collectives.units import rate
from atoll.peer.caps.caps import Caps
from atoll.peer.daemon.ports import LinkMonitorPort
from atoll.peer.links.estimates import LinkChanges, LinkEstimate, OwnLinks, PairEstimate
from atoll.peer.links.link_table import LOCAL_BYTES_PER_S, LinkTable, RowTimes, describe
from atoll.peer.links.messages import AboutLinks, LinkRow, ProbeOver
from atoll.peer.links.prober import READ_PROBE_S, Prober
from atoll.peer.links.tcp_info import LossWatch, TcpInfo, TcpInterval, Traffic, between, parse
from atoll.peer.membership.view import REPLICA, View, short
from atoll.peer.streams.congestion import BBR, CUBIC
from atoll.peer.streams.stream import DataStream
from atoll.peer.telemetry.rows import LinkSeen, brief

READ_S = 0.25  # between two readings of the counters of all streams; shorter during a probe
ROW_LOOK_S = 1.0  # between two looks whether somebody is to be told


class MeasuredStreams(Protocol):
    """Give access to the data streams of a daemon (peer/streams/manager.py)."""

    @property
    def bbr(self) -> bool: ...

    def outgoing(self) -> Sequence[tuple[bytes, DataStream]]: ...

    def incoming(self) -> Sequence[tuple[bytes, DataStream]]: ...

    async def to(self, peer: bytes) -> DataStream: ...


class LinkMonitor:
    """Measure links and keep what others say of theirs, in the event loop.

    All probes of an hour send no more than one round does (``daemon.round_bytes``). ``probes``:
    false if this peer is to send none, and take none. ``caps``: what this peer keeps to, if to
    anything: the others are told, so that the plan of the rounds asks no more of it.
    """

    def __init__(
        self,
        *,
        me: bytes,
        streams: MeasuredStreams,
        daemon: LinkMonitorPort,
        probes: bool = True,
        caps: Caps | None = None,
    ) -> None:
        self._me, self._streams, self._daemon = me, streams, daemon
        self._loop = asyncio.get_running_loop()
        self._readings: WeakKeyDictionary[DataStream, tuple[TcpInfo, float]] = WeakKeyDictionary()
        self._watches: WeakKeyDictionary[DataStream, LossWatch] = WeakKeyDictionary()
        self._pairs: dict[bytes, PairEstimate] = {}
        self._own, self._caps = OwnLinks(), caps
        self._arrives: dict[bytes, float] = {}  # what the others can send here, as they say
        self._changes, self._table, self._told = LinkChanges(), LinkTable(), RowTimes()
        self._was_reducing = 0
        self._looked_s = float("-inf")
        self._said_full = False
        self._prober = Prober(
            me=me,
            streams=streams,
            daemon=daemon,
            reducing=lambda: self._reducing() > 0,
            budget_bytes=lambda: daemon.round_bytes(1 + len(self._pairs)),
            on=probes,
        )

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(READ_PROBE_S if self._prober.active else READ_S)
                self.look()
        finally:
            self._prober.close()

    # ------------------------------------------------------------ what is known

    def link(self, peer: bytes) -> LinkEstimate:
        """Return the estimate of the link to ``peer``, as far as it is known here."""
        pair = self._pairs.get(peer)
        if pair is None:
            return LinkEstimate()
        link = pair.now(self._loop.time())
        return (
            replace(link, out=LOCAL_BYTES_PER_S, age_s=0.0, is_bound=False)
            if self._daemon.is_local(peer)
            else link
        )

    def status(self, peer: bytes) -> dict[str, Any]:
        """Return what people see of one member; only what is known.

        Rates are in bytes per second.
        """
        link = self.link(peer)
        if self._daemon.is_local(peer):
            return {"local": True, "rtt_ms": round(1e3 * link.rtt_s, 2)}
        arrives = self._table.out(peer, self._me) or self._arrives.get(peer, 0.0)
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

    def seen(self, peer: bytes) -> LinkSeen:
        """Return what was measured of the link to a member, as rows tell it."""
        link, is_local = self.link(peer), self._daemon.is_local(peer)
        out = link.out if link.out and not is_local else None
        return LinkSeen(brief(peer), link.rtt_s or None, out, link.loss)

    def gaps(self, participants: Collection[bytes], apart: Collection[tuple[int, int]] = ()) -> int:
        """Count the ways between these of which this peer knows no rate, or no round trip.

        ``apart``: pairs without a link, as positions in ascending order of peer id.
        """
        self._table.put(self._me, self._row(self._loop.time()))
        return self._table.gaps(participants, apart)

    def network(self, participants: Collection[bytes]) -> Network:
        """Return the links between these, in ascending order of peer id, as this peer knows them.

        Only the coordinator of a view knows more than its own. Raises ConfigError for nobody.
        """
        self._table.put(self._me, self._row(self._loop.time()))
        return self._table.network(sorted(participants))

    def is_seen(self, participants: Collection[bytes]) -> bool:
        """Return whether it is known, by more than bounds, what leaves and what enters each."""
        self._table.put(self._me, self._row(self._loop.time()))
        return self._table.has_ends(participants)

    def bbr(self, participants: Collection[bytes]) -> tuple[bool, ...]:
        """Return, for each peer in ascending order, whether losses need not slow its streams."""
        return self._table.bbr(participants)

    def totals(self) -> dict[str, int]:
        """Return what this peer's own links have carried, in bytes per second; 0 if unknown."""
        now_s = self._loop.time()
        return {
            "up_bytes_per_s": round(self._own.up(now_s)),
            "down_bytes_per_s": round(self._own.down(now_s)),
        }

    # ------------------------------------------------------------ reading

    def look(self) -> None:
        """Read all counters, and do what is due."""
        now_s, view = self._loop.time(), self._daemon.view()
        others = self._others(view)
        reducing = self._reducing()
        of_two = max(reducing, self._was_reducing) == 2
        self._was_reducing = reducing
        traffic = Traffic(
            self._intervals(self._streams.outgoing()), self._intervals(self._streams.incoming())
        )
        bbr = self._streams.bbr
        self._pairs = {peer: self._pairs.get(peer) or PairEstimate(bbr=bbr) for peer in others}
        for peer, pair in self._pairs.items():
            # Streams may have no moment without a queue. Small messages do, all day.
            pair.round_trip(self._daemon.least_rtt_s(peer), now_s)
            full = peer == self._prober.filled
            alone = (full or of_two) and traffic.is_alone(peer)
            pair.handle(traffic.out.get(peer, ()), now_s, alone=alone, full=full)
        leaving, coming = (
            [streams for peer, streams in way.items() if not self._daemon.is_local(peer)]
            for way in (traffic.out, traffic.into)
        )
        self._own.handle(leaving, coming, now_s)
        # Where the system counts nothing a probe would show nothing.
        linked = self._daemon.link_peers() if self._readings else ()
        remote = {
            p: e for p, e in self._pairs.items() if p in linked and not self._daemon.is_local(p)
        }
        self._prober.allowed = self._caps is None or self._caps.allows_probes
        self._prober.look(remote, traffic, now_s)
        if view is not None and now_s - self._looked_s >= ROW_LOOK_S:
            self._looked_s = now_s
            self._tell(view, now_s)

    def _reducing(self) -> int:
        """Return how many take part in the largest reduction under way; 0 for none."""
        return max((len(begin.participants) for begin in self._daemon.begins()), default=0)

    def _others(self, view: View | None) -> list[bytes]:
        """Return the members with which data are exchanged."""
        members = view.members if view is not None else ()
        if not any(m.peer == self._me and m.role == REPLICA for m in members):
            return []
        return [m.peer for m in members if m.role == REPLICA and m.peer != self._me]

    def _intervals(
        self, streams: Sequence[tuple[bytes, DataStream]]
    ) -> defaultdict[bytes, list[TcpInterval]]:
        """Return what each stream did since the last reading, by peer."""
        found: defaultdict[bytes, list[TcpInterval]] = defaultdict(list)
        for peer, stream in streams:
            info, at_s = parse(stream.tcp_info()), self._loop.time()
            if info is None:
                continue
            before, before_s = self._readings.get(stream, (None, at_s))
            self._readings[stream] = (info, at_s)
            did = between(before, info, at_s - before_s, stream.pace_bytes_per_s)
            if stream.is_indirect or stream.is_punched:
                did = replace(did, min_rtt_s=0.0)  # no round trip to the peer: see least_rtt_s
            found[peer].append(did)
            if did.pace and self._streams.bbr:
                self._watch(peer, stream, did)
        return found

    def _watch(self, peer: bytes, stream: DataStream, did: TcpInterval) -> None:
        """Let a stream heed losses no more that hold it back, until its next plan.

        The plan knew of none: a way of which little has been seen, or one that has become worse.
        """
        watch = self._watches.setdefault(stream, LossWatch())
        if not watch.is_held_back(did) or stream.congestion != CUBIC or stream.use_congestion(BBR):
            return
        found = f"{rate(did.delivered / did.took_s)} of the planned {rate(did.pace)}"
        self._daemon.note(
            "network",
            f"losses hold what goes to {short(peer)} at {found}: {BBR} is used until the next plan",
        )

    # ------------------------------------------------------------ messages

    def on_message(self, source: bytes, message: AboutLinks) -> None:
        """Take a message about links and probes."""
        view = self._daemon.view()
        known = view is not None and source in view.peers
        if isinstance(message, LinkRow):
            if known:
                self._table.put(source, message)
            return
        if isinstance(message, ProbeOver) and message.out and known:
            self._arrives[source] = message.out
        self._prober.on_message(source, message)

    def _row(self, now_s: float) -> LinkRow:
        links = {peer: self.link(peer) for peer in sorted(self._pairs)}
        up_cap, down_cap = self._caps.for_rounds() if self._caps is not None else (None, None)
        return LinkRow(
            peers=tuple(links),
            rtt_s=tuple(link.rtt_s or None for link in links.values()),
            out=tuple(link.out or None for link in links.values()),
            loss=tuple(link.loss for link in links.values()),
            up=self._own.up(now_s) or None,
            down=self._own.down(now_s) or None,
            bbr=self._streams.bbr,
            up_cap=up_cap,
            down_cap=down_cap,
            bounds=tuple(peer for peer, link in links.items() if link.is_bound),
        )

    def _tell(self, view: View, now_s: float) -> None:
        self._table.keep(view.peers)
        self._arrives = {peer: rate for peer, rate in self._arrives.items() if peer in view.peers}
        self._changes.keep(view.peers)
        for peer in self._pairs:
            if line := self._changes.about(peer, self.link(peer), now_s):
                self._daemon.note("network", line)
        row = self._row(now_s)
        if view.coordinator == self._me:
            self._table.put(self._me, row)
            self._say_full(view)
            return
        to = (view.coordinator, view.number)
        due = row.peers and self._told.due(row, to, len(view.members), now_s)
        if due and self._daemon.send(view.coordinator, row):
            self._told.sent(row, to, now_s)

    def _say_full(self, view: View) -> None:
        """Log the network when all of it is measured, once in the life of a daemon."""
        replicas = [m.peer for m in view.members if m.role == REPLICA]
        remote = not all(self._daemon.is_local(peer) for peer in replicas if peer != self._me)
        if not self._said_full and remote and not self._table.gaps(replicas):
            self._said_full = True
            self._daemon.note("network", f"measured {describe(self._table.network(replicas))}")
