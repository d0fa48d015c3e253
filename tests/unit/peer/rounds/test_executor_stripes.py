"""Rounds over several data streams from each to each: shared, broken, refused."""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.runner_sites import Site, begin_of, by_hand, eventually, prepare, scenario

from atoll.collectives.errors import ConnectError
from atoll.collectives.planning.pacing import TRIAL_EVERY, TRIAL_FACTOR, stripe_pace
from atoll.collectives.schedule.plan import STREAMS_MAX
from atoll.collectives.schedule.schedule import FrameKind
from atoll.peer.links.messages import PROBE, probe_header
from atoll.peer.membership import events as ev
from atoll.peer.streams import manager as streams_module
from atoll.peer.streams.frames import DataHeader
from atoll.peer.streams.keys import CIPHER_AES
from atoll.peer.streams.manager import FrameOutlet, StripeId
from atoll.peer.streams.stream import TELLS_DELIVERY, DataStream, unacknowledged_bytes

STRIPES = 3


def widen(sites: list[Site], stripes: int = STRIPES) -> None:
    for site in sites:
        for other in sites:
            if other is not site:
                site.executor.streams.widen(other.me, stripes)


def opened(site: Site, to: Site) -> list[DataStream]:
    return [
        stream for stripe, stream in site.executor.streams._outgoing.items() if stripe.peer == to.me
    ]


async def run_round(sites: list[Site], number: int, attempt: int) -> None:
    begin = begin_of(sites, attempt, number)
    expected = by_hand(sites, begin, sites[0].state)
    for site in sites:
        site.carry_out(ev.Reduce(begin))
    await eventually(lambda: all(site.reduced(attempt, number) for site in sites))
    assert len({site.reduced(attempt, number) for site in sites}) == 1
    for site in sites:
        site.carry_out(ev.Apply(begin, b"c" * 32))
    await eventually(lambda: all(site.applied(number) for site in sites))
    for site in sites:
        np.testing.assert_array_equal(site.state.theta, expected)


def test_a_round_uses_as_many_as_it_is_told_and_the_next_one_again(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, 2_000_000)
        await run_round(sites, 2, 1)
        assert {len(opened(a, b)) for a in sites for b in sites if a is not b} == {1}
        widen(sites)
        await run_round(sites, 3, 1)
        a, b, _ = sites
        await eventually(lambda: len(opened(a, b)) == STRIPES)
        before = opened(a, b)
        await run_round(sites, 4, 1)
        assert opened(a, b) == before
        assert a.executor.streams.ciphers() == {CIPHER_AES: 2 * 2 * STRIPES}
        sent = a.executor.streams.sent_bytes
        a.executor.streams.close_to(b.me)
        assert opened(a, b) == []
        assert a.executor.streams.sent_bytes == sent

    scenario(tmp_path, "abc", play)


def test_as_many_as_there_may_be_are_opened_at_once_and_sealed(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        a, b = sites
        prepare(sites, 200_000)
        widen(sites, STREAMS_MAX)
        await run_round(sites, 2, 1)
        await eventually(lambda: len(opened(a, b)) == len(opened(b, a)) == STREAMS_MAX)
        await run_round(sites, 3, 1)
        assert a.executor.streams.ciphers() == {CIPHER_AES: 2 * STREAMS_MAX}

    scenario(tmp_path, "ab", play)


def test_a_stream_that_breaks_in_a_round_is_not_missed(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, 4_000_000)
        widen(sites)
        await run_round(sites, 2, 1)
        a, b = sites
        await eventually(lambda: len(opened(a, b)) == STRIPES)
        victim = opened(a, b)[1]
        begin = begin_of(sites, 1, 3)
        expected = by_hand(sites, begin, a.state)
        for site in sites:
            site.carry_out(ev.Reduce(begin))
        moved = a.executor.streams.moved_bytes
        await eventually(lambda: a.executor.streams.moved_bytes > moved)
        victim._sock.shutdown(socket.SHUT_RDWR)  # as a middlebox does that forgets a connection
        await eventually(lambda: all(site.reduced(1, 3) for site in sites))
        for site in sites:
            site.carry_out(ev.Apply(begin, b"c" * 32))
        await eventually(lambda: all(site.applied(3) for site in sites))
        for site in sites:
            np.testing.assert_array_equal(site.state.theta, expected)
            assert not [e for e in site.fed if isinstance(e, ev.ReduceFailed)]
        await run_round(sites, 4, 1)
        await eventually(lambda: len(opened(a, b)) == STRIPES)

    scenario(tmp_path, "ab", play)


@pytest.mark.skipif(not TELLS_DELIVERY, reason="this system does not tell what was acknowledged")
@pytest.mark.parametrize("fate", ["reset", "stands still"])
def test_what_a_stream_has_taken_and_does_not_deliver_is_not_missed(
    tmp_path: Path, fate: str
) -> None:
    """Its sender has handed it to the kernel and knows of nothing."""

    async def play(sites: list[Site]) -> None:
        prepare(sites, 4_000_000)
        widen(sites)
        await run_round(sites, 2, 1)
        a, b = sites
        await eventually(lambda: len(opened(a, b)) == STRIPES)
        victim = opened(a, b)[1]
        victim.pace(2_000)  # so slow that what it takes stays here behind what it has
        view = a.executor.replica.view
        assert view is not None
        for _ in range(8):
            FrameOutlet(victim, probe_header(view)).send(PROBE, 0, memoryview(bytes(16 << 10)))
        lost, sendall = [], victim.sendall

        def sendall_and_reset(*parts: memoryview, **rest: Any) -> int:
            end = sendall(*parts, **rest)
            lost.append(unacknowledged_bytes(victim._sock))
            if fate == "stands still":
                return end
            victim._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            victim._sock.close()
            return end

        victim.sendall = sendall_and_reset  # type: ignore[method-assign]
        await run_round(sites, 3, 1)
        assert lost[0]
        assert not [e for site in sites for e in site.fed if isinstance(e, ev.ReduceFailed)]
        await run_round(sites, 4, 1)

    scenario(tmp_path, "ab", play)


def test_one_that_cannot_be_opened_costs_only_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, 500_000)
        await run_round(sites, 2, 1)
        widen(sites)

        async def refuse(peer: bytes, address: str) -> DataStream:
            raise ConnectError("refused")

        for site in sites:
            monkeypatch.setattr(site.host, "open_data", refuse)
        await run_round(sites, 3, 1)
        assert all(not isinstance(e, ev.ReduceFailed) for site in sites for e in site.fed)

    scenario(tmp_path, "ab", play)


def test_a_stream_that_is_replaced_goes_on_until_nobody_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_module, "RETIRED_IDLE_S", 0.2)

    async def play(sites: list[Site]) -> None:
        prepare(sites, 200_000)
        a, b = sites
        streams = a.executor.streams
        old = await streams.to(b.me)
        outlet = FrameOutlet(
            old, DataHeader(FrameKind.RESULT, 0, 0, 0, b"L" * 8, 1, 99, 1, 0), aside=True
        )
        with monkeypatch.context() as patch:
            patch.setattr(type(old), "worn", True)
            new = await streams.to(b.me)
        assert new is not old
        for _ in range(4):
            await asyncio.sleep(0.1)
            outlet.send(FrameKind.RESULT, 0, memoryview(bytes(1000)))  # a donor in the middle of it
            assert not old.closed
        sent = streams.sent_bytes
        await eventually(lambda: old.closed)
        assert streams.sent_bytes == sent
        assert await streams.to(b.me) is new
        await run_round(sites, 2, 1)

    scenario(tmp_path, "ab", play)


def test_the_number_is_bounded_and_ends_with_the_peer(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        streams, other = sites[0].executor.streams, sites[1].me
        for wanted, count in ((0, 1), (5, 5), (1000, STREAMS_MAX)):
            streams.widen(other, wanted)
            assert streams.stripes(other) == count
        assert await streams.to(other, 3) is await streams.to(other, 3)
        assert StripeId(other, 3) in streams._outgoing
        streams.forget(other)
        assert streams.stripes(other) == 1
        assert not streams._outgoing
        await asyncio.sleep(0)

    scenario(tmp_path, "ab", play)


def test_a_pace_holds_for_all_stripes_together_and_for_those_to_come(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        a, b = sites
        prepare(sites, 500_000)
        streams = a.executor.streams
        streams.pace(b.me, 8e6)
        await run_round(sites, 2, 1)
        assert [stream.pace_bytes_per_s for stream in opened(a, b)] == [TRIAL_FACTOR * 8e6], (
            "the first round with another pace is to show what the link has"
        )
        streams.pace(b.me, 8.01e6)  # as an estimate wavers
        await run_round(sites, 3, 1)
        assert [stream.pace_bytes_per_s for stream in opened(a, b)] == [8.01e6]
        streams.pace(b.me, 8e6)
        widen(sites)
        await run_round(sites, 4, 1)
        await eventually(lambda: len(opened(a, b)) == STRIPES)
        each = stripe_pace(8e6, STRIPES)
        assert {stream.pace_bytes_per_s for stream in opened(a, b)} == {TRIAL_FACTOR * each}, (
            "the first round over more of them is to show what fewer could not"
        )
        widen(sites)
        await run_round(sites, 5, 1)
        assert {stream.pace_bytes_per_s for stream in opened(a, b)} == {each}
        assert {stream.pace_bytes_per_s for stream in opened(b, a)} == {0.0}
        streams.begin_round(TRIAL_EVERY)  # which is to show what the link has
        assert {stream.pace_bytes_per_s for stream in opened(a, b)} == {TRIAL_FACTOR * each}
        streams.begin_round(TRIAL_EVERY + 1)
        assert {stream.pace_bytes_per_s for stream in opened(a, b)} == {each}
        streams.pace(b.me, 0.0)
        assert {stream.pace_bytes_per_s for stream in opened(a, b)} == {0.0}

    scenario(tmp_path, "ab", play)
