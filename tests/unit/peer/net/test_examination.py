"""What a member tells a machine that may join: outline, clock and rates, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import msgpack
import pytest

from atoll.collectives.errors import ConnectError, RemoteProtocolError
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import RunSpec
from atoll.peer.caps.caps import ANYTHING, Cap
from atoll.peer.caps.token_bucket import BURST_S
from atoll.peer.net import examination
from atoll.peer.net.dial import Dial
from atoll.peer.net.examination import (
    AT_ONCE_MAX,
    STEP_BYTES_MAX,
    AskRate,
    RateIs,
    RunOutline,
    measure,
    outline_of,
    read_clock,
)
from atoll.peer.net.hello import EXAMINE, PROTOCOL_MAX, PROTOCOL_MIN, Hello
from atoll.peer.net.tls import READ_BYTES
from atoll.peer.net.wire import decode

if TYPE_CHECKING:
    from atoll.peer.net.tls import TlsChannel
    from tests.unit.peer.conftest import Net, Node

RATE = 8e6  # of a cap
OUTLINE = RunOutline(0.0, elements=7, method="diloco", codec="int8")


async def listening(net: Net) -> Node:
    node = net.node("a")
    node.host._daemon.outline = lambda: OUTLINE  # type: ignore[method-assign]
    await node.listen()
    return node


async def introduced(net: Net, member: Node) -> TlsChannel:
    me = net.node("b")
    dial = Dial(member.address, "demo", me.tls.tag)
    channel, _ = await dial.reach(me.tls.client)
    await dial.say(channel, Hello(PROTOCOL_MIN, PROTOCOL_MAX, "demo", EXAMINE, 0, ""))
    return channel


def test_a_capped_member_is_measured_as_fast_as_its_caps_are(net: Net) -> None:
    async def scenario() -> None:
        member = await listening(net)
        caps = Cap(ANYTHING), Cap(ANYTHING)
        member.host.counts.up, member.host.counts.down = caps
        channel = await introduced(net, member)
        for cap, up in zip(caps, (False, True), strict=True):
            before, began_s = cap.moved_bytes, time.monotonic()
            cap.set_rate(RATE)
            found = await measure(channel, up=up)
            took_s = time.monotonic() - began_s
            assert found[0] > 0
            # One bucket is there from the start, and a piece goes when nothing is owed.
            assert cap.moved_bytes - before <= RATE * (took_s + BURST_S) + READ_BYTES

        channel.close()

    net.run(scenario())


def test_outline_clock_and_rates(net: Net) -> None:
    async def scenario() -> None:
        member = await listening(net)
        channel = await introduced(net, member)
        reading = await read_clock(channel)
        assert abs(reading.offset_s) <= reading.rtt_s
        assert abs(reading.outline.unix_s - time.time()) < 60
        told = reading.outline
        assert (told.elements, told.method, told.observed) == (7, "diloco", "127.0.0.1")
        channel.close()
        for up in (True, False):
            channel = await introduced(net, member)
            count, seconds = await measure(channel, up=up)
            assert 0 < count <= STEP_BYTES_MAX
            assert seconds > 0
            channel.close()
        assert not member.ups, "nobody has a link"

    net.run(scenario())


def test_who_asks_for_too_many_bytes_gets_no_more(net: Net) -> None:
    async def scenario() -> None:
        member = await listening(net)
        channel = await introduced(net, member)
        for _ in range(2):
            await channel.send(AskRate(down=STEP_BYTES_MAX))
            await channel.receive_of(RateIs)
            await channel.discard(STEP_BYTES_MAX)
        await channel.send(AskRate(down=1))
        with pytest.raises(OSError):
            await channel.receive_of(RateIs)
        await member.until(lambda: any("more bytes" in line for line in member.logs))
        channel.close()

    net.run(scenario())


def test_a_few_are_examined_at_a_time(net: Net) -> None:
    async def scenario() -> None:
        member = await listening(net)
        channels = [await introduced(net, member) for _ in range(AT_ONCE_MAX)]
        for channel in channels:
            await read_clock(channel)
        late = await introduced(net, member)
        with pytest.raises(ConnectError, match="examined already"):
            await read_clock(late)
        for channel in (*channels, late):
            channel.close()
        await until_one_is_served(net, member)

    net.run(scenario())


async def until_one_is_served(net: Net, member: Node) -> None:
    async with asyncio.timeout(30):
        while True:
            channel = await introduced(net, member)
            with contextlib.suppress(ConnectError):
                await read_clock(channel)
                channel.close()
                return
            channel.close()


def test_a_connection_that_ends_gives_the_steps_that_were_done(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "BYTES_MAX", 100 << 10)  # two steps of the member's side

    async def scenario() -> None:
        channel = await introduced(net, await listening(net))
        count, _ = await measure(channel, up=True)
        assert 0 < count < 64 << 10
        channel.close()

    net.run(scenario())


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("RunOutline", {"unix_s": float("nan")}),
        ("RunOutline", {"unix_s": 0.0, "elements": -1}),
        ("RunOutline", {"unix_s": 0.0, "method": "\x1b[2J"}),
        ("RunOutline", {"unix_s": 0.0, "observed": "x" * 65}),
        ("RateIs", {"bytes": 1, "seconds": -1.0}),
        ("RateIs", {"bytes": STEP_BYTES_MAX + 1, "seconds": 1.0}),
        ("AskRate", {"up": STEP_BYTES_MAX + 1, "down": 0}),
    ],
)
def test_what_cannot_be_is_refused(name: str, values: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(msgpack.packb([name, values]))


def test_the_outline_of_a_run() -> None:
    model = Manifest.of([Parameter("w", (10, 100)), Parameter("b", (100,))])
    held = outline_of(RunSpec(sync_every=10), model)
    assert (held.elements, held.state_bytes, held.method) == (1100, 8800, "diloco")
    lean = outline_of(RunSpec(sync_every=1, momentum_codec="dynamic8"), model)
    assert lean.state_bytes == 4 * 1100 + 1100 + 4 * 5
    assert held.daemon_bytes > 10 * 1100
    spec = RunSpec(sync_every=1, method="noloco")
    carried = outline_of(spec, model.outline("noloco", 3))
    assert carried.elements == 1103
    assert carried.daemon_bytes == 8 * 1103
