"""Data streams to a peer that cannot be dialled: it dials for them, and the other side sends."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest
from harness.openings import FRAME, carries, dialled, grants_of, opened
from harness.wires import receive

from atoll.collectives.errors import ConnectError
from atoll.peer.membership.view import short
from atoll.peer.net.hello import DATA
from atoll.peer.streams import keys, opener
from atoll.peer.streams.keys import CIPHERS, StreamGranted, StreamOffered
from atoll.peer.streams.opener import OFFERS_PER_PEER_MAX, STREAMS_PER_PEER_MAX
from atoll.peer.streams.stream import DataStream

if TYPE_CHECKING:
    from tests.unit.peer.conftest import Net, Node


def dead_address() -> str:
    """Return an address of this machine at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        return f"127.0.0.1:{silent.getsockname()[1]}"


def count_dials(node: Node) -> list[str]:
    """Return the addresses that ``node`` dials from now on, as they come."""
    dials: list[str] = []
    real = node.host.attempt

    def counted(address: str) -> object:
        dials.append(address)
        return real(address)

    node.host.attempt = counted  # type: ignore[method-assign,assignment]
    return dials


async def offered_to(b: Node, a: Node) -> tuple[asyncio.Task[DataStream], StreamOffered]:
    """Let ``a`` offer a stream to ``b``, which does nothing; return the opening and the offer."""
    offers: asyncio.Queue[StreamOffered] = asyncio.Queue()
    b.host._streams._on_offered = lambda link, offered: offers.put_nowait(offered)  # type: ignore[method-assign]
    opening = asyncio.create_task(a.host.open_data(b.id, ""))
    return opening, await offers.get()


@pytest.mark.parametrize(
    ("ours", "cipher"), [(CIPHERS, "aes-256-gcm"), ((), "tls")], ids=["sealed", "tls"]
)
def test_a_peer_without_an_address_is_sent_to(net: Net, ours: tuple[str, ...], cipher: str) -> None:
    async def scenario() -> None:
        a, b = await net.linked(ours)  # b has dialled, and listens nowhere
        for _ in range(3):
            assert await carries(b, a) == cipher
        dials = [line for line in a.logs if "dials" in line]
        assert dials == [
            f"{short(b.id)} dials for the data streams to it: it advertises no address"
        ]
        assert grants_of(a) == grants_of(b) == 0
        assert await carries(a, b) == cipher

    net.run(scenario())


def test_a_large_frame_arrives_whole(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        sender, receiver = await opened(b, a)
        assert sender.is_reversed
        assert not receiver.is_reversed
        data = FRAME * 2000
        sending = asyncio.create_task(asyncio.to_thread(sender.sendall, data))
        assert await asyncio.to_thread(receive, receiver, len(data)) == data
        await sending
        for end in (sender, receiver):
            end.close()

    net.run(scenario())


def test_who_is_dialled_in_vain_dials_itself_from_then_on(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        b.address = dead_address()
        dials = count_dials(a)
        for _ in range(2):
            assert await carries(b, a) == "aes-256-gcm"
        assert dials == [b.address]  # once; what has worked goes first
        assert "dials for the data streams to it: cannot reach" in a.logs[0]
        assert "connection refused" in a.logs[0]
        assert len(a.logs) == 1

    net.run(scenario())


def test_who_answers_nothing_when_dialled_is_not_waited_for(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opener, "OTHER_WAY_S", 0.05)

    async def scenario() -> None:
        a, b = await net.linked()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            b.address = f"127.0.0.1:{silent.getsockname()[1]}"
            assert await carries(b, a) == "aes-256-gcm"
        assert "nothing has come of dialling it so far" in a.logs[0]

    net.run(scenario())


def test_who_is_known_to_be_outbound_is_not_dialled(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        b.address = dead_address()
        a.host.outbound = {b.id}
        dials = count_dials(a)
        assert await carries(b, a) == "aes-256-gcm"
        assert dials == []
        assert "it cannot be dialled from outside" in a.logs[0]

    net.run(scenario())


def test_the_usual_way_comes_back_when_the_reverse_one_fails(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        await b.listen()
        a.host.outbound = {b.id}
        b.host._links[a.id].dialled_address = dead_address()
        sender, receiver = await opened(b, a)
        assert not sender.is_reversed
        for end in (sender, receiver):
            end.close()

    net.run(scenario())


def test_of_two_that_cannot_be_dialled_both_are_named(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        b.address = dead_address()
        b.host._links[a.id].dialled_address = dead_address()
        with pytest.raises(ConnectError) as caught:
            await a.host.open_data(b.id, b.address)
        assert f"cannot reach {b.address} (TCP" in caught.value.what
        assert f"{short(b.id)} cannot dial this peer: cannot reach" in caught.value.what
        assert "open port" in (caught.value.fix or "")
        assert grants_of(a) == 0

    net.run(scenario())


def test_an_offer_that_nobody_waits_for_any_more_is_refused(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        opening, offered = await offered_to(b, a)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        granted = StreamGranted(1, offered.cipher, offered.conn_id, offered.key)
        async with dialled(a) as sock:
            with pytest.raises(ConnectionResetError):
                await opener.open_stream(sock, granted)
        await a.until(lambda: a.logs)
        assert "whose id is not known, or not any more" in a.logs[0]
        with pytest.raises(ConnectError, match="no such stream has been offered"):
            await b.host.call_tls(a.id, a.address, offered.conn_id)

    net.run(scenario())


def test_another_peer_cannot_take_an_offer(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked(())
        c = net.node("c")
        await c.host.dial(a.address)
        opening, offered = await offered_to(b, a)
        with pytest.raises(ConnectError, match="no such stream has been offered"):
            await c.host.call_tls(a.id, a.address, offered.conn_id)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)

    net.run(scenario())


def test_streams_and_dials_for_offers_are_limited(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        ends = [await opened(b, a) for _ in range(STREAMS_PER_PEER_MAX)]
        with pytest.raises(ConnectError, match=f"{STREAMS_PER_PEER_MAX} data streams are open"):
            await a.host.open_data(b.id, "")
        for end in (end for pair in ends for end in pair):
            end.close()
        link, sent = b.host._links[a.id], []
        monkeypatch.setattr(b.host, "send", lambda peer, msg: sent.append(msg) or True)
        link.dialled_address = "192.0.2.1:9"  # answers nothing, RFC 5737
        offered = StreamOffered(1, CIPHERS[0], bytes(16), bytes(32))
        for _ in range(OFFERS_PER_PEER_MAX + 1):
            b.host._streams.on_message(link, offered)
        assert [msg.what for msg in sent] == [
            f"{OFFERS_PER_PEER_MAX} streams are being dialled for already"
        ]

    net.run(scenario())


@pytest.mark.parametrize("seen_by", ["a", "b"])
def test_no_cipher_needs_a_trusted_network_on_both_sides(
    net: Net, monkeypatch: pytest.MonkeyPatch, seen_by: str
) -> None:
    async def scenario() -> None:
        a, b = await net.linked(("none",), ("none",), ip="127.0.0.2")
        link = a.host._links[b.id] if seen_by == "a" else b.host._links[a.id]
        untrusted = link.remote_ip
        monkeypatch.setattr(keys, "is_trusted_network", lambda ip: ip != untrusted)
        assert await carries(b, a) == "tls"
        monkeypatch.undo()

    net.run(scenario())


def test_a_plain_hello_for_data_cannot_name_an_offer_of_its_own(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        with pytest.raises(ConnectError, match="no such stream has been offered"):
            await b.host.call_tls(a.id, a.address, bytes(16))
        hello = b.host._hello(DATA)
        assert hello.offer == b""

    net.run(scenario())
