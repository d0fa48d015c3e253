"""Data streams between two hosts: sealed where both can, TLS where that fails, never in silence."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from harness.openings import FRAME, carries, grants_of, opened
from harness.wires import receive

from atoll.collectives.errors import ConnectError
from atoll.peer.membership.view import short
from atoll.peer.streams import keys, opener, stream
from atoll.peer.streams.keys import CIPHERS, CIPHERS_PLAIN, StreamAsked, StreamDenied, StreamGranted
from atoll.peer.streams.opener import STREAMS_PER_PEER_MAX
from atoll.peer.streams.stream import DataStream

if TYPE_CHECKING:
    from tests.unit.peer.conftest import Net, Node

NONE_IN_COMMON = "it has none of our ciphers"
WARNING = "data streams are neither secret nor protected with peers that agree to that"


# ---------------------------------------------------------------- as it should be


def test_streams_are_sealed_by_default(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        await b.listen()
        assert await carries(a, b) == "aes-256-gcm"
        assert await carries(b, a) == "aes-256-gcm"
        assert (a.logs, b.logs) == ([], [])
        assert grants_of(a) == grants_of(b) == 0
        assert a.host._listener._limiter.pending == 0

    net.run(scenario())


def test_a_stream_that_ended_is_forgotten(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        for _ in range(3):
            await carries(a, b)
        a.streams.clear()
        for _ in range(30_000):  # the thread that read holds it for a moment more
            if not [*a.host._streams._open, *b.host._streams._open]:
                return
            await asyncio.sleep(1e-3)
        pytest.fail("a stream is kept")

    net.run(scenario())


def test_what_is_sent_before_the_other_side_looks_is_kept(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        sender = await b.host.open_data(a.id, a.address)
        sender.sendall(FRAME)
        await a.until(lambda: a.streams)
        assert await asyncio.to_thread(receive, a.streams[0], len(FRAME)) == FRAME
        sender.close()

    net.run(scenario())


@pytest.mark.parametrize("ciphers", [CIPHERS, ()], ids=["sealed", "tls"])
def test_streams_of_one_peer_are_limited(net: Net, ciphers: tuple[str, ...]) -> None:
    async def scenario() -> None:
        a, b = await net.linked(ciphers)
        ends = [await opened(a, b) for _ in range(STREAMS_PER_PEER_MAX)]
        said = len(b.logs)
        with pytest.raises(ConnectError, match=f"{STREAMS_PER_PEER_MAX} data streams are open"):
            await b.host.open_data(a.id, a.address)
        for end in ends.pop():
            end.close()
        assert await carries(a, b) == ("aes-256-gcm" if ciphers else "tls")
        assert len(b.logs) == said
        for sender, _ in ends:
            sender.close()

    net.run(scenario())


def test_closing_a_host_ends_its_streams(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        sender, receiver = await opened(a, b)
        waiting = asyncio.create_task(asyncio.to_thread(receive, receiver, 1, idle=True))
        await a.host.close()
        with pytest.raises(ConnectError, match=r"closed on this side"):
            await waiting
        assert receiver.closed
        assert not sender.closed

    net.run(scenario())


# ---------------------------------------------------------------- through TLS

Fault = Callable[["Node", "Node", pytest.MonkeyPatch], None]


def denies(a: Node, b: Node, patch: pytest.MonkeyPatch) -> None:
    def answer(link: object, asked: StreamAsked) -> StreamDenied:
        return StreamDenied(asked.number, "not today")

    patch.setattr(a.host._streams, "_answer", answer)


def answers_nothing(a: Node, b: Node, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(opener, "ANSWER_TIMEOUT_S", 0.05)
    patch.setattr(a.host._streams, "on_message", lambda link, msg: True)


def answers_another_question(a: Node, b: Node, patch: pytest.MonkeyPatch) -> None:
    def answer(link: object, asked: StreamAsked) -> StreamGranted:
        return StreamGranted(asked.number, "rot13", bytes(16), bytes(32))

    patch.setattr(a.host._streams, "_answer", answer)


def resets(a: Node, b: Node, patch: pytest.MonkeyPatch) -> None:
    async def refuse(sock: socket.socket) -> None:
        raise ConnectionResetError("something between the two takes nothing but TLS")

    patch.setattr(a.host, "accept_stream", refuse)


def keeps_silent(a: Node, b: Node, patch: pytest.MonkeyPatch) -> None:
    async def wait(sock: socket.socket) -> None:
        while await asyncio.get_running_loop().sock_recv(sock, 1000):
            pass
        raise ConnectionResetError("it was silence")

    patch.setattr(opener, "OPENING_TIMEOUT_S", 0.05)
    patch.setattr(a.host, "accept_stream", wait)


def proves_nothing(a: Node, b: Node, patch: pytest.MonkeyPatch) -> None:
    async def greet(sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_recv(sock, 1000)
        await loop.sock_sendall(sock, bytes(keys.GREETING_BYTES))
        raise ConnectionResetError("seen through")

    patch.setattr(a.host, "accept_stream", greet)


def has_no_key_left(a: Node, b: Node, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(keys, "GRANTS_PER_PEER_MAX", 0)


FAULTS: dict[str, tuple[Fault, str]] = {
    "denied": (denies, "it gave no key: not today"),
    "no answer": (answers_nothing, r"\(data stream, after .*: no answer in time"),
    "a strange answer": (answers_another_question, r"cipher='rot13'\) does not answer"),
    "reset": (resets, r"\(data stream, after .*(closed the connection|reset)"),
    "silence": (keeps_silent, r"\(data stream, after .*: no answer in time"),
    "no proof": (proves_nothing, "acceptor of a data stream did not prove its key"),
    "too many keys": (has_no_key_left, "it gave no key: 0 data streams are being opened already"),
}


@pytest.mark.parametrize(("fault", "why"), FAULTS.values(), ids=FAULTS.keys())
def test_where_no_sealed_stream_comes_about_tls_takes_its_place(
    net: Net, monkeypatch: pytest.MonkeyPatch, fault: Fault, why: str
) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        fault(a, b, monkeypatch)
        tries = count_attempts(b)
        for _ in range(3):
            assert await carries(a, b) == "tls"
        assert tries[0] == 1
        (line,) = b.logs
        assert line.startswith(f"data streams to {short(a.id)} go through TLS: ")
        assert re.search(why, line)
        # With the next control link it is tried again.
        monkeypatch.undo()
        b.host.drop(a.id, "test")
        await a.until(lambda: a.downs)
        await b.host.dial(a.address)
        assert await carries(a, b) == "aes-256-gcm"
        assert len(b.logs) == 1

    net.run(scenario())


def test_what_may_pass_is_tried_again_later_and_seldomer(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        clock = SimpleNamespace(monotonic=lambda: clock.now_s, now_s=1000.0)
        monkeypatch.setattr(opener, "time", clock)
        monkeypatch.setattr(stream, "time", clock)
        with monkeypatch.context() as patch:
            denies(a, b, patch)
            tries = count_attempts(b)
            sender, receiver = await opened(a, b)
            assert not sender.worn
            for at_s, expected in ((59, 1), (61, 2), (179, 2), (182, 3), (400, 3)):
                clock.now_s = 1000.0 + at_s
                assert await carries(a, b) == "tls"
                assert tries[0] == expected, at_s
        assert sender.worn, "a sealed one may be had in its place"
        sender.close()
        receiver.close()
        assert await carries(a, b) == "tls", "its time is not over"
        clock.now_s += opener.DETOUR_S_MAX
        assert await carries(a, b) == "aes-256-gcm"
        first, last = b.logs
        assert "go through TLS: it gave no key: not today" in first
        assert "go with aes-256-gcm again" in last

    net.run(scenario())


def count_attempts(node: Node) -> list[int]:
    tries, real = [0], node.host._streams._agree

    async def counted(*arguments: Any) -> DataStream:
        tries[0] += 1
        return await real(*arguments)

    node.host._streams._agree = counted  # type: ignore[method-assign]
    return tries


@pytest.mark.parametrize(("ours", "theirs"), [((), CIPHERS), (CIPHERS, ()), (("rot13",), CIPHERS)])
def test_of_two_hosts_one_has_no_ciphers(
    net: Net, ours: tuple[str, ...], theirs: tuple[str, ...]
) -> None:
    async def scenario() -> None:
        a, b = await net.linked(ours, theirs)
        await b.listen()
        tries = count_attempts(a), count_attempts(b)
        for reader, sender in ((a, b), (b, a)):
            for _ in range(2):
                assert await carries(reader, sender) == "tls"
            (line,) = sender.logs
            assert line == f"data streams to {short(reader.id)} go through TLS: {NONE_IN_COMMON}"
        assert tries == ([0], [0])  # a version that has no ciphers does not know the question

    net.run(scenario())


def test_what_tls_does_not_mend_is_not_put_down_to_the_cipher(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            nobody = f"127.0.0.1:{silent.getsockname()[1]}"
        link = b.host._links[a.id]
        link.dialled_address = nobody
        with pytest.raises(ConnectError, match=r"\(TCP, .*connection refused.*no address"):
            await b.host.open_data(a.id, nobody)
        link.dialled_address = a.address
        with monkeypatch.context() as patch:
            denies(a, b, patch)
            patch.setattr(opener, "STREAMS_PER_PEER_MAX", 0)
            with pytest.raises(ConnectError, match="0 data streams are open"):
                await b.host.open_data(a.id, a.address)
        assert b.logs == []
        assert await carries(a, b) == "aes-256-gcm"

    net.run(scenario())


# ---------------------------------------------------------------- without a cipher


@pytest.mark.parametrize(
    ("ours", "theirs", "untrusted", "cipher"),
    [
        (CIPHERS_PLAIN, CIPHERS_PLAIN, "", "none"),
        (CIPHERS_PLAIN, CIPHERS, "", "aes-256-gcm"),
        (CIPHERS, CIPHERS_PLAIN, "", "aes-256-gcm"),
        (CIPHERS_PLAIN, CIPHERS_PLAIN, "127.0.0.2", "aes-256-gcm"),  # what the dialler sees
        (CIPHERS_PLAIN, CIPHERS_PLAIN, "127.0.0.1", "aes-256-gcm"),  # what the acceptor sees
        (("none",), ("none",), "127.0.0.2", "tls"),
        (("none",), ("none",), "127.0.0.1", "tls"),
    ],
)
def test_no_cipher_only_where_both_want_that_and_trust_the_network(
    net: Net,
    monkeypatch: pytest.MonkeyPatch,
    ours: tuple[str, ...],
    theirs: tuple[str, ...],
    untrusted: str,
    cipher: str,
) -> None:
    monkeypatch.setattr(keys, "is_trusted_network", lambda ip: ip != untrusted)

    async def scenario() -> None:
        a, b = await net.linked(ours, theirs, ip="127.0.0.2")
        assert await carries(a, b) == cipher
        assert (WARNING in a.logs) == ("none" in ours)

    net.run(scenario())
