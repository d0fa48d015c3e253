"""Two surveyors in one process, with real connections between them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.collectives.errors import ConnectError, RemoteProtocolError
from atoll.peer.caps.budget import BYTES_PER_GB, DayBudget
from atoll.peer.caps.caps import CONTROL_SHARE, CapOptions, Caps, Direction
from atoll.peer.caps.schedule import BYTES_PER_MBIT, parse_schedule
from atoll.peer.links import link_table, probe_schedule
from atoll.peer.links import monitor as module
from atoll.peer.links.link_table import LOCAL_BYTES_PER_S
from atoll.peer.links.messages import (
    PROBE,
    PROBE_FRAME_BYTES,
    AskProbe,
    LinkRow,
    MayProbe,
    ProbeOver,
)
from atoll.peer.links.monitor import LinkMonitor
from atoll.peer.links.probe_schedule import PROBE_BYTES_MAX, PROBE_BYTES_MIN
from atoll.peer.links.prober import PUNCHED_YOUNG_S
from atoll.peer.membership.messages import STEP, Begin
from atoll.peer.membership.view import Member, View
from atoll.peer.streams.frames import DATA_HEADER_BYTES, DataHeader, pack_header, unpack_header
from atoll.peer.streams.router import Router
from atoll.peer.streams.stream import DataStream, PlainStream

A, B, C, STRANGER = b"a" * 32, b"b" * 32, b"c" * 32, b"s" * 32
VIEW = View(b"L" * 32, 7, (Member(A, 1), Member(B, 1)), A, 1, b"c" * 32)
PATIENCE_S = 20.0


class Site:
    """A peer: its surveyor, its streams, and what it was told."""

    round_bytes = 8 << 20

    def __init__(self, me: bytes, *, probes: bool = True, caps: Caps | None = None) -> None:
        self.me = me
        self.local = False  # although everything here is
        self.unlinked: set[bytes] = set()
        self.out: dict[bytes, DataStream] = {}
        self.into: dict[bytes, DataStream] = {}
        self.begins: list[Begin] = []
        self.view: View | None = VIEW
        self.lines: list[str] = []
        self.headers: list[DataHeader] = []
        self.sent: list[object] = []
        self.links: dict[bytes, Site] = {}
        self.refuses, self.bbr = False, True
        self.least_rtt_s = 0.0  # of the control link
        self.monitor = LinkMonitor(
            me=me,
            streams=self,
            daemon=SimpleNamespace(
                is_local=lambda peer: self.local,
                least_rtt_s=lambda peer: self.least_rtt_s,
                link_peers=lambda: [peer for peer in (A, B, C) if peer not in self.unlinked],
                send=self.send,
                view=lambda: self.view,
                begins=lambda: self.begins,
                note=lambda kind, text: self.lines.append(text),
                round_bytes=lambda peers: self.round_bytes,
            ),
            probes=probes,
            caps=caps,
        )

    @property
    def probe_bytes(self) -> int:
        """What it has sent in probes."""
        return sum(stream.counts.sent["probes"] for stream in self.out.values())

    def outgoing(self) -> list[tuple[bytes, DataStream]]:
        return list(self.out.items())

    def incoming(self) -> list[tuple[bytes, DataStream]]:
        return list(self.into.items())

    async def to(self, peer: bytes) -> DataStream:
        if self.refuses:
            raise ConnectError("nobody answers")
        return self.out[peer]

    def send(self, peer: bytes, message: object) -> bool:
        self.sent.append(message)
        other = self.links.get(peer)
        if other is None:
            return False
        asyncio.get_running_loop().call_soon(other.monitor.on_message, self.me, message)
        return True

    def said(self, kind: type) -> list[object]:
        return [message for message in self.sent if isinstance(message, kind)]

    def read(self, stream: DataStream) -> None:
        """As the reader thread of a daemon does: what the router does not want is drained."""
        router, head = Router(lambda peer, why: None), memoryview(bytearray(DATA_HEADER_BYTES))
        with contextlib.suppress(ConnectError):
            while True:
                stream.recv_into(head, idle=True)
                header = unpack_header(head)
                assert router.reserve(STRANGER, header) is None
                stream.recv_into(memoryview(bytearray(header.length)))
                self.headers.append(header)


def connect(source: Site, target: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    source.out[target.me] = PlainStream(ours, "them")
    target.into[source.me] = stream = PlainStream(theirs, "us")
    source.links[target.me] = target
    threading.Thread(target=target.read, args=(stream,), daemon=True).start()


def scenario(
    play: Callable[[Site, Site], Awaitable[None]], *, probes: bool = True, caps: Caps | None = None
) -> None:
    """``probes``: whether B has any; ``caps``: its caps."""

    async def whole() -> None:
        a, b = Site(A), Site(B, probes=probes, caps=caps)
        b.bbr = False
        connect(a, b)
        connect(b, a)
        try:
            await play(a, b)
        finally:
            for site in (a, b):
                for stream in (*site.out.values(), *site.into.values()):
                    stream.close()

    asyncio.run(whole())


@contextlib.asynccontextmanager
async def running(*sites: Site) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(site.monitor.run()) for site in sites]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # what is waited for comes from threads
            await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the usual times, or less."""
    for name in ("ROW_LOOK_S", "READ_S"):
        monkeypatch.setattr(module, name, 0.05)
    for name, soon_s in (("QUIET_S", 0.1), ("PAUSE_S", 0.05), ("REFUSED_S", 0.2)):
        monkeypatch.setattr(probe_schedule, name, soon_s)
    monkeypatch.setattr(link_table, "ROW_PAUSE_S", 0.5)


def test_both_ways_are_probed_and_the_coordinator_hears_of_it() -> None:
    async def play(a: Site, b: Site) -> None:
        async with running(a, b):
            await eventually(lambda: a.lines)
            await eventually(lambda: a.said(ProbeOver) and b.said(ProbeOver))
            assert a.lines[0].startswith("measured 2 links: ")
            network = a.monitor.network([B, A])
            assert a.monitor.bbr([B, A]) == (True, False), "as each says of itself"
            assert network.count == 2
            assert network.pair[0, 1] == a.monitor.link(B).out > 1e6
            assert a.monitor.link(B).is_bound, "1 MiB within a machine is over before TCP has begun"
            assert not a.monitor.is_seen([A, B])
            assert a.monitor._row(0.0).bounds == (B,)
            assert network.pair[1, 0] > 1e6, "as B has said"
            assert 0 < network.latency_s[0, 1] < 0.1
            for site, other in ((a, B), (b, A)):
                frames = PROBE_BYTES_MAX // PROBE_FRAME_BYTES
                assert 0 < site.probe_bytes <= PROBE_BYTES_MAX + frames * DATA_HEADER_BYTES
                seen = site.monitor.status(other)
                assert seen["out_bytes_per_s"] > 1e6
                assert seen["in_bytes_per_s"] > 1e6
                assert seen["rtt_ms"] < 100
            count = len(a.said(AskProbe))
            await asyncio.sleep(0.5)
            assert len(a.said(AskProbe)) == count, "they know each other now"
        assert all(header.kind == PROBE for header in (*a.headers, *b.headers))

    scenario(play)


def begin(participants: tuple[bytes, ...] = (A, B)) -> Begin:
    return Begin(VIEW.lineage, 7, 2, 1, STEP, participants, (1.0,) * len(participants))


def test_nobody_probes_in_a_reduction() -> None:
    async def play(a: Site, b: Site) -> None:
        b.begins = [begin()]
        async with running(a):
            await eventually(lambda: MayProbe(granted=False) in b.sent)
            assert a.probe_bytes == 0
            b.begins, a.begins = [], [begin()]
            await asyncio.sleep(0.1)
            asked = len(a.said(AskProbe))
            await asyncio.sleep(0.5)
            assert len(a.said(AskProbe)) == asked
            assert a.probe_bytes == 0

    scenario(play)


def test_a_probe_gives_way_to_a_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    endless(monkeypatch)

    async def play(a: Site, b: Site) -> None:
        stream = a.out[B]
        stream.pace(5e6)
        async with running(a):
            await eventually(lambda: len(b.headers) > 100)
            assert stream.pace_bytes_per_s > 1e9, "a probe finds what its pace would hide"
            assert not a.said(ProbeOver)
            a.begins = [begin()]
            await eventually(lambda: a.said(ProbeOver))
            sent_bytes = a.probe_bytes
            await asyncio.sleep(0.5)
            assert a.probe_bytes == sent_bytes > 0
            assert stream.pace_bytes_per_s == 5e6

    scenario(play)


def endless(patch: pytest.MonkeyPatch) -> None:
    """Probes that nothing ends but what is in their way."""
    patch.setattr(probe_schedule, "PROBE_BYTES_MAX", 1 << 40)
    patch.setattr(probe_schedule, "PROBE_S_MAX", 600.0)
    patch.setattr(probe_schedule, "LINK_SHARE", 1.0)
    patch.setattr(Site, "round_bytes", 1 << 42)


def test_a_probe_ends_when_something_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its acknowledgements would wait behind that, and it would find half of what the link has."""
    endless(monkeypatch)

    async def play(a: Site, b: Site) -> None:
        header = DataHeader(PROBE, 0, 0, PROBE_FRAME_BYTES, b"anything", 1, 2, 3, 4)
        async with running(a):
            await eventually(lambda: len(b.headers) > 100)
            assert not a.said(ProbeOver)
            for _ in range(20):
                b.out[A].sendall(pack_header(header), bytes(PROBE_FRAME_BYTES))
            await eventually(lambda: a.said(ProbeOver))
            assert a.said(ProbeOver) == [ProbeOver(None)]
            assert a.monitor.link(B).out == 0, "what it has found so far is not believed"
            await eventually(lambda: len(a.said(AskProbe)) > 1)

    scenario(play)


def test_round_trips_are_those_of_small_messages_too() -> None:
    async def play(a: Site, b: Site) -> None:
        a.least_rtt_s, streams, a.out = 0.02, a.out, {}
        assert a.monitor.status(B) == {}
        a.monitor.look()
        assert a.monitor.status(B) == {"rtt_ms": 20.0}
        a.out = streams

    scenario(play)


def test_nobody_is_let_in_while_a_probe_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    endless(monkeypatch)

    async def play(a: Site, b: Site) -> None:
        async with running(a, b):
            await eventually(lambda: a.headers or b.headers)
            site, other = (a, b) if b.headers else (b, a)
            before = len(site.said(MayProbe))
            await asyncio.sleep(0.5)
            assert not other.said(ProbeOver)
            assert not site.headers, "one at a time"
            answers = site.said(MayProbe)[before:]
            assert MayProbe(True) not in answers
            site.monitor.on_message(C, AskProbe())
            assert site.said(MayProbe)[-1] == MayProbe(False)

    scenario(play)


def test_a_pace_that_was_set_meanwhile_stays() -> None:
    async def play(a: Site, b: Site) -> None:
        stream = a.out[B]
        stream.pace(5e6)
        async with running(a):
            await eventually(lambda: b.headers)
            stream.pace(0.0)
            await eventually(lambda: a.said(ProbeOver))
            assert stream.pace_bytes_per_s == 0

    scenario(play)


def test_a_stream_that_cannot_be_had_ends_the_probe() -> None:
    async def play(a: Site, b: Site) -> None:
        a.refuses = True
        async with running(a):
            await eventually(lambda: a.said(ProbeOver))
            await asyncio.sleep(0.5)
            assert len(a.said(AskProbe)) == 1, "not again so soon"

    scenario(play)


def test_a_stream_for_which_both_ends_have_dialled_is_not_probed_at_once() -> None:
    """Wait until BBR has forgotten the time between two SYNs, which it took for a round trip."""

    async def play(a: Site, b: Site) -> None:
        a.out[B].is_punched = True
        async with running(a):
            await eventually(lambda: len(a.said(ProbeOver)) > 1)
            assert a.probe_bytes == 0
            a.out[B].began_s -= PUNCHED_YOUNG_S
            await eventually(lambda: a.probe_bytes > 0)

    scenario(play)


def test_without_the_kernels_counters_nothing_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainStream, "tcp_info", lambda self: b"")

    async def play(a: Site, b: Site) -> None:
        async with running(a, b):
            await asyncio.sleep(0.5)
            assert not a.said(AskProbe)
            assert a.monitor.status(B) == {}

    scenario(play)


def test_who_has_no_link_is_not_probed() -> None:
    async def play(a: Site, b: Site) -> None:
        a.unlinked = {B}
        async with running(a, b):
            await eventually(lambda: b.said(AskProbe))
            assert not a.said(AskProbe)

    scenario(play)


def test_within_a_machine_nothing_is_probed_and_everything_is_known() -> None:
    async def play(a: Site, b: Site) -> None:
        for site in (a, b):
            site.local = True
        async with running(a, b):
            await eventually(lambda: a.monitor.gaps([A, B]) == 0)
            await asyncio.sleep(0.5)
            assert not a.said(AskProbe)
            assert not b.said(AskProbe)
            assert a.monitor.status(B)["local"]
            assert a.monitor.network([A, B]).pair[0, 1] == LOCAL_BYTES_PER_S
            assert a.lines == [], "there is nothing to say of links"

    scenario(play)


def test_who_wants_no_probes_sends_none_and_is_not_asked_again_soon() -> None:
    async def play(a: Site, b: Site) -> None:
        async with running(a, b):
            await eventually(lambda: MayProbe(granted=False, never=True) in b.sent)
            await asyncio.sleep(1.0)
            assert len(a.said(AskProbe)) == 1
            assert not b.said(AskProbe)
        assert a.probe_bytes == b.probe_bytes == 0

    scenario(play, probes=False)


def test_whose_budget_is_nearly_spent_sends_no_probes_and_takes_none(tmp_path: Path) -> None:
    direction = Direction(parse_schedule("20", "--up-mbit"), DayBudget(10 * BYTES_PER_GB))
    caps = Caps(CapOptions(up=direction), tmp_path, lambda line: None)
    caps.up.charge(8 * BYTES_PER_GB)
    caps.look(())

    async def play(a: Site, b: Site) -> None:
        async with running(a, b):
            await eventually(lambda: MayProbe(granted=False) in b.sent)
            assert not b.said(AskProbe)
            assert a.probe_bytes == b.probe_bytes == 0
            row = b.monitor._row(0.0)
            assert row.up_cap == pytest.approx((1 - CONTROL_SHARE) * 20 * BYTES_PER_MBIT)
            assert row.down_cap is None

    scenario(play, caps=caps)


def test_runs_whose_rounds_are_small_have_no_probes() -> None:
    async def play(a: Site, b: Site) -> None:
        a.round_bytes = b.round_bytes = PROBE_BYTES_MIN - 1
        async with running(a, b):
            await asyncio.sleep(0.5)
            assert not a.said(AskProbe)
            a.round_bytes = PROBE_BYTES_MIN
            await eventually(lambda: a.said(ProbeOver))
            assert a.probe_bytes < 1.1 * PROBE_BYTES_MIN

    scenario(play)


def test_strangers_are_not_in_the_picture() -> None:
    async def play(a: Site, b: Site) -> None:
        lie = LinkRow((A,), (0.01,), (1e9,), (0.0,))
        a.monitor.on_message(STRANGER, lie)
        a.monitor.on_message(STRANGER, ProbeOver(1e9))
        assert a.monitor.status(STRANGER) == {}
        a.view = None
        a.monitor.on_message(B, lie)
        assert a.monitor.status(B) == {}

    scenario(play)


def test_a_turn_is_refused_while_others_send() -> None:
    """They would share this peer's downlink, and the probe would find what is left of it."""

    async def play(a: Site, b: Site) -> None:
        a.links.clear()  # it cannot ask for a turn of its own
        a.monitor.look()
        a.monitor.on_message(STRANGER, AskProbe())
        a.monitor.on_message(STRANGER, ProbeOver())
        header = DataHeader(PROBE, 0, 0, PROBE_FRAME_BYTES, b"anything", 1, 2, 3, 4)
        for _ in range(20):
            b.out[A].sendall(pack_header(header), bytes(PROBE_FRAME_BYTES))
        await eventually(lambda: len(a.headers) == 20)
        a.monitor.look()
        a.monitor.on_message(C, AskProbe())
        a.monitor.on_message(B, AskProbe())
        assert a.said(MayProbe) == [MayProbe(True), MayProbe(False), MayProbe(True)]
        a.monitor.on_message(B, ProbeOver())
        await asyncio.sleep(0.1)
        a.monitor.look()  # nothing came meanwhile
        a.out[B].sendall(pack_header(header), bytes(PROBE_FRAME_BYTES))
        a.monitor.look()
        a.monitor.on_message(C, AskProbe())
        assert a.said(MayProbe)[-1] == MayProbe(False), "what leaves is in the way as well"

    scenario(play)


def test_a_grant_that_comes_too_late_is_given_back() -> None:
    async def play(a: Site, b: Site) -> None:
        a.monitor.on_message(B, MayProbe(granted=True))
        assert a.sent == [ProbeOver()]
        a.monitor.on_message(B, MayProbe(granted=False))
        assert a.sent == [ProbeOver()]

    scenario(play)


def test_a_probe_that_takes_more_memory_than_it_may_is_refused() -> None:
    router = Router(lambda peer, why: None)
    good = DataHeader(PROBE, 0, 0, PROBE_FRAME_BYTES, b"anything", 1, 2, 3, 4)
    assert router.reserve(STRANGER, good) is None
    with pytest.raises(RemoteProtocolError):
        router.reserve(STRANGER, good._replace(length=PROBE_FRAME_BYTES + 1))
