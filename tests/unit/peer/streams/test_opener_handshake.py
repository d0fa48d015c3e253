"""The opening of a data stream over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Iterator

import pytest

from atoll.collectives.errors import RemoteProtocolError
from atoll.peer.streams import keys as streamkeys
from atoll.peer.streams import opener
from atoll.peer.streams.keys import (
    CIPHER_AES,
    CIPHER_NONE,
    CIPHERS_PLAIN,
    GRANTS_PER_PEER_MAX,
    GREETING_BYTES,
    OPENING_BYTES,
    STREAM_FIRST_BYTE,
    Grants,
    Handshake,
    StreamAsked,
    StreamDenied,
    StreamGranted,
)
from atoll.peer.streams.opener import (
    AcceptedStream,
    accept_stream,
    answer_asked,
    open_stream,
)
from atoll.peer.streams.stream import SealedStream

ALICE = b"a" * 32


@pytest.fixture
def wires() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dialled = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
    with dialled, accepted:
        dialled.setblocking(False)
        accepted.setblocking(False)
        yield dialled, accepted


def ask(grants: Grants, ciphers: tuple[str, ...] = (CIPHER_AES,)) -> StreamGranted:
    answer = answer_asked(grants, ALICE, StreamAsked(1, ciphers), remote_ip="127.0.0.1")
    assert isinstance(answer, StreamGranted)
    return answer


async def accept(sock: socket.socket, grants: Grants) -> AcceptedStream:
    """As a listener does: the first byte says what it is."""
    assert await asyncio.get_running_loop().sock_recv(sock, 1) == bytes((STREAM_FIRST_BYTE,))
    return await accept_stream(sock, grants)


def run(scenario: Coroutine[None, None, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await scenario

    asyncio.run(limited())


def test_from_the_question_to_the_first_frame(wires: tuple[socket.socket, socket.socket]) -> None:
    async def scenario() -> None:
        grants = Grants()
        granted = ask(grants)
        secret, accepted = await asyncio.gather(
            open_stream(wires[0], granted), accept(wires[1], grants)
        )
        assert accepted == (ALICE, CIPHER_AES, secret, granted.conn_id)
        assert len(grants) == 0
        sender = SealedStream(wires[0], "bob", secret, dialled=True)
        receiver = SealedStream(wires[1], "alice", accepted.secret, dialled=False)
        sender.sendall(b"frame")
        target = bytearray(5)
        receiver.recv_into(memoryview(target))
        assert target == b"frame"

    run(scenario())


def test_what_follows_the_proof_at_once_is_left_to_the_stream(
    wires: tuple[socket.socket, socket.socket],
) -> None:
    async def scenario() -> None:
        grants = Grants()
        granted = ask(grants)
        accepting = asyncio.create_task(accept(wires[1], grants))
        secret = await open_stream(wires[0], granted)
        SealedStream(wires[0], "bob", secret, dialled=True).sendall(b"at once")
        accepted = await accepting
        receiver = SealedStream(wires[1], "alice", accepted.secret, dialled=False)
        target = bytearray(7)
        receiver.recv_into(memoryview(target))
        assert target == b"at once"

    run(scenario())


@pytest.mark.parametrize(
    ("asked", "allowed", "ip", "cipher"),
    [
        ((CIPHER_AES,), (CIPHER_AES,), "8.8.8.8", CIPHER_AES),
        ((CIPHER_NONE, CIPHER_AES), CIPHERS_PLAIN, "10.0.0.1", CIPHER_NONE),
        ((CIPHER_NONE, CIPHER_AES), CIPHERS_PLAIN, "8.8.8.8", CIPHER_AES),
        ((CIPHER_NONE,), CIPHERS_PLAIN, "8.8.8.8", ""),
        ((CIPHER_NONE,), (CIPHER_AES,), "10.0.0.1", ""),
    ],
)
def test_answers(asked: tuple[str, ...], allowed: tuple[str, ...], ip: str, cipher: str) -> None:
    async def scenario() -> None:
        grants = Grants()
        answer = answer_asked(grants, ALICE, StreamAsked(9, asked), remote_ip=ip, allowed=allowed)
        assert answer.number == 9
        if cipher:
            assert isinstance(answer, StreamGranted)
            assert answer.cipher == cipher
        else:
            assert isinstance(answer, StreamDenied)
        assert len(grants) == bool(cipher)

    run(scenario())


def test_answers_stop_at_the_limit() -> None:
    async def scenario() -> None:
        grants = Grants()
        answers = [
            answer_asked(grants, ALICE, StreamAsked(n, CIPHERS_PLAIN), remote_ip="10.0.0.1")
            for n in range(GRANTS_PER_PEER_MAX + 1)
        ]
        granted = [StreamGranted] * GRANTS_PER_PEER_MAX
        assert [type(answer) for answer in answers] == [*granted, StreamDenied]
        keys = {answer.key for answer in answers if isinstance(answer, StreamGranted)}
        assert len(keys) == GRANTS_PER_PEER_MAX

    run(scenario())


def test_an_id_that_nobody_gave_out(wires: tuple[socket.socket, socket.socket]) -> None:
    async def scenario() -> None:
        foreign = ask(Grants())
        dialling = asyncio.create_task(open_stream(wires[0], foreign))
        with pytest.raises(RemoteProtocolError, match="id is not known"):
            await accept(wires[1], Grants())
        wires[1].close()
        with pytest.raises(ConnectionResetError):
            await dialling

    run(scenario())


def test_a_stranger_uses_up_nothing(wires: tuple[socket.socket, socket.socket]) -> None:
    """Someone saw the id on the wire, and does not know the key."""

    async def scenario() -> None:
        grants = Grants()
        granted = ask(grants)
        wires[0].send(Handshake(granted).opening(bytes(16)) + bytes(32))
        with pytest.raises(RemoteProtocolError, match="dialler of a data stream did not prove"):
            await accept(wires[1], grants)
        assert grants.find(granted.conn_id, asyncio.get_running_loop().time()) is not None

    run(scenario())


def test_of_two_that_prove_themselves_one_is_refused(
    wires: tuple[socket.socket, socket.socket],
) -> None:
    async def scenario() -> None:
        grants = Grants()
        granted = ask(grants)
        accepting = asyncio.create_task(accept(wires[1], grants))
        dialler, loop = Handshake(granted), asyncio.get_running_loop()
        await loop.sock_sendall(wires[0], dialler.opening(bytes(16)))
        greeting = await loop.sock_recv(wires[0], GREETING_BYTES)
        assert grants.take(granted.conn_id, loop.time()) is not None  # the other one was faster
        await loop.sock_sendall(wires[0], dialler.answer(greeting))
        with pytest.raises(RemoteProtocolError, match="used meanwhile"):
            await accepting

    run(scenario())


def test_no_cipher_is_refused_to_a_connection_from_elsewhere(
    wires: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control link came from a network that is trusted, and this one does not."""

    async def scenario() -> None:
        grants = Grants()
        asked = StreamAsked(1, CIPHERS_PLAIN)
        granted = answer_asked(grants, ALICE, asked, remote_ip="10.0.0.1", allowed=CIPHERS_PLAIN)
        assert isinstance(granted, StreamGranted)
        monkeypatch.setattr(streamkeys, "is_trusted_network", lambda ip: ip != "127.0.0.1")
        wires[0].send(Handshake(granted).opening(bytes(16)))
        with pytest.raises(RemoteProtocolError, match=r"from 127\.0\.0\.1 needs a cipher"):
            await accept(wires[1], grants)
        wires[1].close()
        assert await asyncio.get_running_loop().sock_recv(wires[0], 100) == b""

    run(scenario())


@pytest.mark.parametrize("sent", [0, 1, OPENING_BYTES - 1, OPENING_BYTES])
def test_nobody_keeps_the_acceptor_waiting(
    wires: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    monkeypatch.setattr(opener, "OPENING_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        grants = Grants()
        first = Handshake(ask(grants)).opening(bytes(16))
        wires[0].send(first[1 : 1 + sent] if sent < OPENING_BYTES else first[1:])
        with pytest.raises(TimeoutError):
            await accept_stream(wires[1], grants)

    run(scenario())


def test_nobody_keeps_the_dialler_waiting(
    wires: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opener, "OPENING_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            await open_stream(wires[0], ask(Grants()))

    run(scenario())


def test_a_greeting_that_proves_nothing(wires: tuple[socket.socket, socket.socket]) -> None:
    async def scenario() -> None:
        wires[1].send(bytes(48))
        with pytest.raises(RemoteProtocolError, match="acceptor of a data stream did not prove"):
            await open_stream(wires[0], ask(Grants()))

    run(scenario())
