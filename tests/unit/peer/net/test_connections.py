"""Two daemons' links over loopback: both directions, admission, errors that say what to do."""

from __future__ import annotations

import asyncio
import socket
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import atoll
from atoll.collectives.errors import (
    AdmissionError,
    ConfigError,
    ConnectError,
    LocalProtocolError,
    VersionError,
)
from atoll.peer.links.tcp_info import parse
from atoll.peer.net.dial import Dial
from atoll.peer.net.hello import (
    CONTROL,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Hello,
    Refused,
)
from atoll.peer.net.invite import fingerprint_of
from atoll.peer.net.link import PUNCHED_RTT_S
from atoll.peer.net.listener import check_port
from atoll.peer.net.tls import TlsChannel
from atoll.peer.net.wire import encode, frame, message

if TYPE_CHECKING:
    from tests.unit.peer.conftest import Net, Node


@message(wire="LinkNote")
class LinkNote:
    number: int
    blob: bytes = b""


def test_messages_go_both_ways_in_order(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        for number in range(100):
            assert a.host.send(b.id, LinkNote(number, bytes(number * 100)))
            assert b.host.send(a.id, LinkNote(-number))
        await a.until(lambda: len(a.messages) == 100)
        await b.until(lambda: len(b.messages) == 100)
        assert a.messages == [(b.id, LinkNote(-number)) for number in range(100)]
        assert b.messages == [(a.id, LinkNote(n, bytes(n * 100))) for n in range(100)]
        assert a.ups == [(b.id, "", 1)]
        assert b.ups == [(a.id, a.address, 1)]
        assert a.host.link_peers() == (b.id,)
        assert 0 < a.host.srtt_s(b.id) < 5
        assert 0 < b.host.srtt_s(a.id) < 5
        if sys.platform == "linux":
            counted = parse(a.host.tcp_info(b.id))
            assert counted is not None
            assert 0 < counted.min_rtt_s < 5
            assert 0 < a.host.least_rtt_s(b.id) <= counted.min_rtt_s
            link = a.host.link_of(b.id)
            assert link is not None
            link.is_punched = True  # its first round trip was that between two SYNs
            assert a.host.least_rtt_s(b.id) == 0.0
            link._began_s -= PUNCHED_RTT_S
            assert a.host.least_rtt_s(b.id) > 0.0
        assert a.host.tcp_info(a.id) == b"", "no link"
        assert a.host.least_rtt_s(a.id) == 0.0
        said = sum(len(frame(encode(LinkNote(-number)))) for number in range(100))
        assert a.host.counts.received == b.host.counts.sent
        assert b.host.counts.received == a.host.counts.sent
        assert b.host.counts.sent["control"] > said, "handshakes and framing count too"
        assert sum(b.host.counts.sent.values()) == b.host.counts.sent["control"]

    net.run(scenario())


def test_messages_of_rounds_count_as_such_at_both_ends(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        for host in (a.host, b.host):
            host._of_rounds = ("LinkNote",)
        note = LinkNote(1, bytes(10_000))
        assert a.host.send(b.id, note)
        await b.until(lambda: b.messages)
        size = len(frame(encode(note)))
        assert (
            b.host.counts.received["rounds"] == size <= a.host.counts.sent["rounds"] < 1.01 * size
        )
        assert sum(b.host.counts.received.values()) == sum(a.host.counts.sent.values())

    net.run(scenario())


def test_the_largest_message_passes_and_a_larger_one_is_our_defect(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        assert a.host.send(b.id, LinkNote(1, bytes(1_000_000)))
        await b.until(lambda: b.messages)
        with pytest.raises(LocalProtocolError):
            a.host.send(b.id, LinkNote(1, bytes(1 << 20)))
        assert not a.host.send(b"nobody", LinkNote(1))

    net.run(scenario())


def test_closing_delivers_what_was_queued_and_says_goodbye(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        for number in range(8):
            a.host.send(b.id, LinkNote(number, bytes(900_000)))
        await a.host.close()
        await b.until(lambda: b.downs)
        assert [msg.number for _, msg in b.messages] == list(range(8))  # type: ignore[attr-defined]
        assert b.downs == [(a.id, "the other side said goodbye")]
        assert b.host.link_peers() == ()
        assert not a.downs

    net.run(scenario())


def test_drop_ends_the_link_on_both_sides(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        a.host.drop(b.id, "evicted")
        assert not a.downs  # never from inside the call
        await a.until(lambda: a.downs)
        await b.until(lambda: b.downs)
        assert a.downs == [(b.id, "evicted")]
        a.host.drop(b.id, "again")
        assert await b.host.dial(a.address) == a.id

    net.run(scenario())


def test_a_broken_link_that_is_dropped_is_down_once(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        link = a.host._links[b.id]
        while a.host.send(b.id, LinkNote(1, bytes(1_000_000))):
            pass  # until the queue is full: the link has failed, which is not yet reported
        a.host.drop(b.id, "evicted")
        await a.until(lambda: a.downs)
        await link.ended.wait()
        assert a.downs == [(b.id, "evicted")]

    net.run(scenario())


PEER_PROCESS = """
import asyncio, sys, types
from atoll.peer.net.certs import run_tls
from atoll.peer.net.identity import Home
from atoll.peer.net.connections import ConnectionManager

async def main():
    home = Home.open(sys.argv[1])
    daemon = types.SimpleNamespace(
        life=lambda: 1, incarnation=lambda: 1, advertised=str, on_message=print,
        on_up=print, on_down=print, on_data=print, note=print)
    host = ConnectionManager(peer_id=home.peer_id, tls=run_tls(home, bytes(range(32))), run="demo",
        daemon=daemon)
    await host.dial(sys.argv[2])
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_killed_process_is_down_at_once(net: Net, tmp_path: object) -> None:
    async def scenario() -> None:
        a = net.node("a")
        victim = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PEER_PROCESS, f"{tmp_path}/victim", await a.listen()
        )
        try:
            await a.until(lambda: a.ups)
        finally:
            victim.kill()
            await victim.wait()
        await a.until(lambda: a.downs)
        assert a.downs[0][1] in (
            "the other side closed the connection without a goodbye",
            "connection reset by peer",
        )

    net.run(scenario())


def test_a_wrong_run_is_not_admitted_and_both_are_named(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        c = net.node("c", run="other")
        with pytest.raises(AdmissionError, match="that peer runs 'demo', you asked for 'other'"):
            await c.host.dial(a.address)
        assert a.host.link_peers() == (b.id,)

    net.run(scenario())


def test_a_wrong_token_is_not_admitted_and_both_tags_are_named(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        c = net.node("c", secret=bytes(32))
        assert a.tls.tag != c.tls.tag
        named = rf"to run demo at .*tag {a.tls.tag}, yours has tag {c.tls.tag}"
        with pytest.raises(AdmissionError, match=named) as caught:
            await c.host.dial(a.address)
        assert "join" in caught.value.fix
        await a.until(lambda: a.logs)
        assert a.logs[0].endswith(": it has another run's secret")
        assert a.host.link_peers() == (b.id,)
        assert not a.downs

    net.run(scenario())


def test_a_refusal_between_holders_of_one_secret_is_an_accident(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that turned on the way ends no daemon: it dials again."""

    async def scenario() -> None:
        a, _ = await net.linked()
        c = net.node("c", secret=bytes(32))  # refused, as a damaged certificate is

        async def same(dial: Dial) -> str:
            return c.tls.tag

        monkeypatch.setattr(Dial, "_their_tag", same)
        with pytest.raises(ConnectError, match=f"secret with tag {c.tls.tag}\n") as caught:
            await c.host.dial(a.address)
        assert not isinstance(caught.value, AdmissionError)

    net.run(scenario())


def test_a_certificate_refused_after_our_handshake_is_not_admitted(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS 1.3: the client is done before the server has judged it; the alert is the first read."""

    async def scenario() -> None:
        a, c = net.node("a"), net.node("c", secret=bytes(32))
        c.tls.client.load_verify_locations(cadata=_pem_of(a))  # c trusts a; a does not trust c
        with pytest.raises(AdmissionError, match=r"not admitted to run demo at .* \(admission"):
            await c.host.dial(await a.listen())

    net.run(scenario())


def _pem_of(node: Node) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    from atoll.peer.net.certs import ca_certificate, ca_key

    return ca_certificate(ca_key(bytes(range(32)))).public_bytes(Encoding.PEM).decode()


async def say(node: Node, address: str, hello: Hello) -> Hello | Refused:
    """Dial with ``node``'s identity and a hello of our own; the answer."""
    attempt = Dial(address, "demo", node.tls.tag)
    async with attempt.limited():
        channel, _ = await attempt.reach(node.tls.client)
        try:
            return await attempt.greet(channel, hello)
        finally:
            channel.close()


def test_another_version_is_refused_by_the_acceptor(net: Net) -> None:
    async def scenario() -> None:
        a, b = net.node("a"), net.node("b")
        answer = await say(b, await a.listen(), Hello(7, 9, "demo", CONTROL, 1, ""))
        assert isinstance(answer, Refused)
        assert answer.code == VersionError.code
        assert "(protocol 3), you run an atoll that does not say its version" in answer.what
        assert "(protocols 7 to 9)" in answer.what
        assert (answer.protocol_min, answer.protocol_max) == (PROTOCOL_MIN, PROTOCOL_MAX)
        assert answer.program == atoll.__version__
        assert not a.ups

    net.run(scenario())


def test_another_version_is_refused_by_the_dialler(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        a, b = net.node("a"), net.node("b")
        address = await a.listen()
        strange = Hello(7, 9, "demo", CONTROL, 1, "")

        async def greet(channel: TlsChannel, mine: Hello) -> Hello:
            return strange

        monkeypatch.setattr(Dial, "greet", lambda self, channel, mine: greet(channel, mine))
        with pytest.raises(VersionError, match=r"\(protocols 7 to 9\), you run .*\(protocol 3\)"):
            await b.host.dial(address)
        assert not b.ups

    net.run(scenario())


def test_a_refusal_reaches_the_dialler_as_its_error(net: Net) -> None:
    async def scenario() -> None:
        a, b = net.node("a"), net.node("b")
        address = await a.listen()
        with pytest.raises(ConnectError, match=f"{address} refused: a data stream needs"):
            await b.host.call_tls(a.id, address)

    net.run(scenario())


def test_the_wrong_peer_at_the_right_address(net: Net) -> None:
    async def scenario() -> None:
        a, b = net.node("a"), net.node("b")
        address = await a.listen()
        for expected in (
            {"expect_fingerprint": fingerprint_of(b.id)},
            {"expect_peer": b"x" * 32},
        ):
            with pytest.raises(ConnectError, match=r"\(identity, .*another peer of run demo"):
                await b.host.dial(address, **expected)
        assert await b.host.dial(address, fingerprint_of(a.id), a.id) == a.id
        assert await b.host.dial("nowhere.invalid:1", expect_peer=a.id) == a.id  # linked already

    net.run(scenario())


def test_dialling_oneself(net: Net) -> None:
    async def scenario() -> None:
        a = net.node("a")
        with pytest.raises(ConnectError, match="is this daemon itself"):
            await a.host.dial(await a.listen())
        assert not a.ups
        assert not a.conflicts

    net.run(scenario())


def test_every_stage_of_dialling_is_named(net: Net) -> None:
    async def scenario() -> None:
        a = net.node("a")
        with pytest.raises(ConnectError, match=r"nowhere.invalid:1 \(DNS, after \d") as caught:
            await a.host.dial("nowhere.invalid:1")
        assert "spelling" in caught.value.fix
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(ConnectError, match=r"\(TCP, .*connection refused") as caught:
                await a.host.dial(address)
            assert "firewall" in caught.value.fix
            silent.listen()
            attempt = Dial(address, "demo", "")
            with pytest.raises(ConnectError, match=r"\(TLS, after .*no answer in time"):
                async with attempt.limited(0.05):
                    await attempt.reach(a.tls.client)
        with pytest.raises(ConnectError, match="not HOST:PORT"):
            await a.host.dial("")

    net.run(scenario())


def test_a_port_that_speaks_something_else(net: Net) -> None:
    async def scenario() -> None:
        async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(http, "127.0.0.1", 0)
        a = net.node("a")
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectError, match=r"\(TLS, after .*wrong version number") as caught:
            await a.host.dial(f"127.0.0.1:{port}")
        assert not isinstance(caught.value, AdmissionError)
        server.close()
        await server.wait_closed()

    net.run(scenario())


def test_a_peer_is_dialled_once_at_a_time(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        a, b = net.node("a"), net.node("b")
        address = await a.listen()
        attempts: list[str] = []
        attempt = b.host.attempt

        def counted(where: str) -> Dial:
            attempts.append(where)
            return attempt(where)

        monkeypatch.setattr(b.host, "attempt", counted)
        dials = (b.host.dial(address, expect_peer=a.id) for _ in range(5))
        assert await asyncio.gather(*dials) == [a.id] * 5
        assert attempts == [address]
        assert await b.host.dial(address, expect_peer=a.id, anew=True) == a.id
        assert attempts == [address] * 2

    net.run(scenario())


def test_probes(net: Net) -> None:
    async def scenario() -> None:
        a, b = net.node("a"), net.node("b")
        address = await a.listen()
        assert await b.host.probe(address, 5.0) == "up"
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            nobody = f"127.0.0.1:{silent.getsockname()[1]}"
            assert await b.host.probe(nobody, 5.0) == "refused"
            silent.listen()
            assert await b.host.probe(nobody, 5.0) == "up", "whoever it is"
        assert await b.host.probe("garbage", 5.0) == "silent"
        assert not a.ups
        assert not b.ups

    net.run(scenario())


def test_a_peer_of_the_other_family_is_dialled_where_it_comes_from_if_that_can_be(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        link = a.host._links[b.id]
        link.hello = replace(link.hello, address="192.168.1.7:29600")
        dialled = {
            "192.168.1.9": "192.168.1.7:29600",
            "2001:db8::7": "[2001:db8::7]:29600",
            "fe80::1": "192.168.1.7:29600",  # not without its zone
        }
        for remote_ip, address in dialled.items():
            link.remote_ip = remote_ip
            assert link.address == address

    net.run(scenario())


def test_a_taken_port_is_a_config_error(net: Net) -> None:
    async def scenario() -> None:
        a, b = net.node("a"), net.node("b")
        port = int((await a.listen()).rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
            await b.host.listen("127.0.0.1", port)

    net.run(scenario())


def test_what_cannot_be_a_host_name_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on a\.\.b:1: not a host name"):
        check_port("a..b", 1)
