"""What goes wrong between a key and its stream, and what strangers and members make of that."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from harness.openings import FRAME, carries, dialled, grants_of, key_of, opened
from harness.wires import receive

from atoll.collectives.errors import ConnectError
from atoll.peer.net.tls import TlsSocket
from atoll.peer.streams import keys as streamkeys
from atoll.peer.streams import opener
from atoll.peer.streams.keys import (
    CIPHERS,
    GRANTS_PER_PEER_MAX,
    StreamAsked,
    StreamDenied,
    StreamGranted,
)
from atoll.peer.streams.opener import STREAMS_PER_PEER_MAX
from atoll.peer.streams.stream import DataStream

if TYPE_CHECKING:
    from tests.unit.peer.conftest import Net, Node


def test_the_limit_holds_for_keys_that_were_given_before(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        ends = [await opened(a, b) for _ in range(STREAMS_PER_PEER_MAX - 1)]
        keys = [await key_of(a, b) for _ in range(2)]
        for granted in keys:
            async with dialled(a) as sock:
                await opener.open_stream(sock, granted)
        await a.until(lambda: a.logs)
        assert len(a.streams) == STREAMS_PER_PEER_MAX
        assert a.logs[0].endswith(f": {STREAMS_PER_PEER_MAX} data streams are open")
        for sender, _ in ends:
            sender.close()

    net.run(scenario())


# ---------------------------------------------------------------- broken in between


def test_keys_that_nobody_uses_run_out_and_go_with_the_link(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        for _ in range(GRANTS_PER_PEER_MAX):
            await key_of(a, b)
        assert await carries(a, b) == "tls"
        assert f"{GRANTS_PER_PEER_MAX} data streams are being opened already" in b.logs[0]
        b.host.drop(a.id, "test")
        await a.until(lambda: a.downs)
        assert grants_of(a) == 0
        await b.host.dial(a.address)
        assert await carries(a, b) == "aes-256-gcm"

    net.run(scenario())


def test_the_control_link_ends_between_the_key_and_its_use(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        granted = await key_of(a, b)
        a.host.drop(b.id, "test")
        await b.until(lambda: b.downs)
        async with dialled(a) as sock:
            with pytest.raises(ConnectionResetError):
                await opener.open_stream(sock, granted)
        await a.until(lambda: a.logs)
        assert "whose id is not known, or not any more" in a.logs[0]
        assert not a.streams

    net.run(scenario())


async def unanswered(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> tuple[Node, Node, asyncio.Task[DataStream]]:
    """The second opens a stream to the first, which has heard the question and says nothing."""
    a, b = await net.linked()
    asked = asyncio.Event()
    monkeypatch.setattr(a.host._streams, "on_message", lambda link, msg: asked.set() or True)
    opens = asyncio.create_task(b.host.open_data(a.id, a.address))
    await asked.wait()
    return a, b, opens


def test_the_control_link_ends_before_the_answer(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        a, b, opens = await unanswered(net, monkeypatch)
        a.host.drop(b.id, "test")
        with pytest.raises(ConnectError, match=r"the control link to .* has ended meanwhile"):
            await opens
        assert b.host._streams._questions == {}
        assert b.logs == []

    net.run(scenario())


def test_the_control_link_is_another_one_before_tls_has_taken_over(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the keys of the old one were forgotten is not to be put down to the cipher."""

    async def scenario() -> None:
        a, b = await net.linked()
        with pytest.raises(ConnectError, match="needs a control link first"):
            await a.host.open_data(bytes(32), a.address)
        call = b.host.call_tls

        async def called(peer: bytes, address: str) -> TlsSocket:
            b.host.drop(a.id, "test")
            await a.until(lambda: a.downs)
            await b.host.dial(a.address)
            return await call(peer, address)

        with monkeypatch.context() as patch:
            patch.setattr(b.host, "call_tls", called)
            patch.setattr(streamkeys, "GRANTS_PER_PEER_MAX", 0)
            with pytest.raises(ConnectError, match=r"the control link to .* has ended meanwhile"):
                await b.host.open_data(a.id, a.address)
        assert await carries(a, b) == "aes-256-gcm"
        assert b.logs == []

    net.run(scenario())


def test_a_host_closes_while_it_opens_a_stream(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        _, b, opens = await unanswered(net, monkeypatch)
        await b.host.close()
        with pytest.raises(ConnectError, match="this daemon is closing"):
            await opens

    net.run(scenario())


def test_a_former_life_gets_no_key(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        link = SimpleNamespace(peer_id=b.id, hello=SimpleNamespace(life=0), remote_ip="127.0.0.1")
        assert a.host._streams.on_message(cast("Any", link), StreamAsked(1, CIPHERS))
        assert grants_of(a) == 0
        again = net.node("b", life=2)
        await key_of(a, b)
        assert grants_of(a) == 1
        await again.host.dial(a.address)
        assert grants_of(a) == 0

    net.run(scenario())


# ---------------------------------------------------------------- hostile


def test_a_stranger_repeats_what_opened_a_stream(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        said: list[bytes] = []
        sendall = asyncio.get_running_loop().sock_sendall

        async def overheard(sock: socket.socket, data: bytes) -> None:
            said.append(bytes(data))
            await sendall(sock, data)

        monkeypatch.setattr(asyncio.get_running_loop(), "sock_sendall", overheard)
        sender, receiver = await opened(a, b)
        monkeypatch.undo()
        first, greeting, proof = said
        for words in (first, first + proof, first + greeting + proof):
            before = len(a.logs)
            a.host._listener._logged_s = -1.0  # say each
            async with dialled(a) as sock:
                await sendall(sock, words)
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.get_running_loop().sock_recv(sock, 100) == b""
            await a.until(lambda before=before: len(a.logs) > before)
            assert "whose id is not known, or not any more" in a.logs[-1]
        assert a.streams == [receiver]
        sender.sendall(FRAME)
        assert await asyncio.to_thread(receive, receiver, len(FRAME)) == FRAME

    net.run(scenario())


def test_a_stranger_cannot_use_up_a_key_by_its_id(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        granted = await key_of(a, b)
        wrong = StreamGranted(1, granted.cipher, granted.conn_id, bytes(32))
        handshake = streamkeys.Handshake(wrong)
        loop = asyncio.get_running_loop()
        async with dialled(a) as sock:
            await loop.sock_sendall(sock, handshake.opening(bytes(16)) + bytes(32))
            await a.until(lambda: a.logs)
        assert "the dialler of a data stream did not prove its key" in a.logs[0]
        async with dialled(a) as sock:
            await opener.open_stream(sock, granted)
            await a.until(lambda: a.streams)

    net.run(scenario())


def test_a_member_that_asks_without_end_gets_few_keys(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        for number in range(1000):
            assert b.host.send(a.id, StreamAsked(number, CIPHERS))
        await key_question_is_denied(a, b)
        assert grants_of(a) == GRANTS_PER_PEER_MAX
        assert not a.downs

    net.run(scenario())


async def key_question_is_denied(a: Node, b: Node) -> None:
    streams = b.host._streams
    why = await streams._ask(a.id, StreamAsked(1 << 40, CIPHERS))
    assert why == f"it gave no key: {GRANTS_PER_PEER_MAX} data streams are being opened already"


def test_answers_that_nobody_waits_for_do_nothing(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        a.host.send(b.id, StreamGranted(1, CIPHERS[0], bytes(16), bytes(32)))
        a.host.send(b.id, StreamDenied(2, "no"))
        assert await carries(a, b) == "aes-256-gcm"
        assert (b.messages, b.downs) == ([], [])

    net.run(scenario())
