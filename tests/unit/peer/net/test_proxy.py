"""Through a SOCKS5 proxy on real sockets: links and streams, what goes wrong, what is not said."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from harness.socks_server import Asked, SocksServer
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError, ConnectError
from atoll.peer.net.dial import Dial, greet_proxy
from atoll.peer.net.proxy import REPLIES, Proxy, parse_proxy, proxied, without_password
from atoll.peer.net.reach_messages import OK, UNABLE, DialBack
from atoll.peer.net.relayed import is_indirect, proved_ip_of, remote_ip_of
from atoll.peer.net.tls import is_local
from atoll.peer.streams.keys import CIPHER_NONE, CIPHERS, CIPHERS_PLAIN

if TYPE_CHECKING:
    from tests.unit.peer.conftest import Net, Node

NAMES = {"b.test": "127.0.0.1"}  # addresses of this machine are dialled directly, names are not
SECRET = "wh@t:ever"
ESCAPED = "wh%40t%3Aever"


def by_name(node: Node) -> str:
    return f"b.test:{node.address.rpartition(':')[2]}"


async def behind(net: Net, server: SocksServer, **options: object) -> tuple[Node, Node]:
    """One that dials through the proxy, and one that can be dialled."""
    a, b = net.node("a", **options), net.node("b", **options)
    a.host.proxy = parse_proxy(server.url)
    await b.listen()
    return a, b


def test_a_link_and_a_stream_go_through_it_and_the_kernel_is_not_believed(net: Net) -> None:
    async def scenario() -> None:
        with SocksServer(names=NAMES) as server:
            a, b = await behind(net, server)
            assert await a.host.dial(by_name(b)) == b.id
            port = int(b.address.rpartition(":")[2])
            assert server.asked == [Asked(3, "b.test", port)]
            link = a.host.link_of(b.id)
            assert link is not None
            assert link.is_proxied
            assert not link.is_local, "it only goes through this machine"
            assert (link.proved_ip, link.tcp_info()) == ("", b"")
            assert 0 < link.rtt_s < 5, "as the handshake took"
            stream = await a.host.open_data(b.id, by_name(b))
            assert server.asked == [Asked(3, "b.test", port)] * 2
            assert stream.is_indirect
            assert not stream.is_local
            assert stream.cipher == CIPHERS[0]
            stream.close()

    net.run(scenario())


def test_no_bytes_go_without_a_cipher_though_both_would_agree(net: Net) -> None:
    async def scenario() -> None:
        with SocksServer(names=NAMES) as server:
            a, b = await behind(net, server, ciphers=CIPHERS_PLAIN)
            await a.host.dial(by_name(b))
            through = await a.host.open_data(b.id, by_name(b))
            assert through.cipher in CIPHERS
            assert through.cipher != CIPHER_NONE
            through.close()
            c = net.node("c", ciphers=CIPHERS_PLAIN)
            await c.host.dial(b.address)
            direct = await c.host.open_data(b.id, b.address)
            assert direct.cipher == CIPHER_NONE
            direct.close()

    net.run(scenario())


def test_whom_a_proxy_on_this_machine_brings_is_not_taken_for_a_neighbour(net: Net) -> None:
    async def scenario() -> None:
        with SocksServer(names=NAMES) as server:
            a, b = net.node("a"), net.node("b")
            b.host.proxy = parse_proxy(server.url)
            b.host._listener._behind_proxy = True
            await b.listen()
            await a.host.dial(b.address)
            await b.until(lambda: b.host.link_of(a.id))
            link = b.host.link_of(a.id)
            assert link is not None
            assert link.is_proxied
            assert not link.is_local
            assert link.proved_ip == ""

    net.run(scenario())


def test_this_machine_itself_is_dialled_directly(net: Net) -> None:
    async def scenario() -> None:
        with SocksServer() as server:
            a, b = await behind(net, server)
            await a.host.dial(b.address)
            assert server.asked == []
            link = a.host.link_of(b.id)
            assert link is not None
            assert link.is_local

    net.run(scenario())


def test_a_password_is_shown_to_the_proxy_and_to_nobody_else(net: Net) -> None:
    async def scenario() -> None:
        with SocksServer(names=NAMES, login=("ada", SECRET)) as server:
            a, b = net.node("a"), net.node("b")
            await b.listen()
            place = f"{server.host}:{server.port}"
            a.host.proxy = parse_proxy(f"socks5://ada:{ESCAPED}@{place}")
            await a.host.dial(by_name(b))
            assert server.logins == [("ada", SECRET)]
            a.host.proxy = parse_proxy(f"socks5://ada:{ESCAPED}x@{place}")
            with pytest.raises(ConnectError, match="does not accept the user") as caught:
                await a.host.dial(f"other.{by_name(b)}")
            text = f"{caught.value} {caught.value.fix} {a.host.proxy} {a.host.proxy!r} {a.logs}"
            assert "ATOLL_PROXY" in caught.value.fix
            assert place in str(caught.value)
            assert "ada" not in text
            assert "ever" not in text

    net.run(scenario())


async def _fails(net: Net, server: SocksServer, limit_s: float = 5.0) -> ConnectError:
    a = net.node("a")
    dial = Dial("far.test:29600", "demo", "", proxy=parse_proxy(server.url))
    with pytest.raises(ConnectError) as caught:
        async with dial.limited(limit_s):
            await dial.reach(a.tls.client)
    assert not dial.is_connected
    assert f"far.test:29600 through proxy {server.url} (" in caught.value.what
    assert caught.value.fix
    assert not isinstance(caught.value.__cause__, ConnectionRefusedError), "no proof of a death"
    return caught.value


@pytest.mark.parametrize(("reply", "words"), [*REPLIES.items(), (77, "does not know")])
def test_what_the_proxy_answers_is_said_in_words(net: Net, reply: int, words: str) -> None:
    async def scenario() -> None:
        with SocksServer(reply=reply) as server:
            error = await _fails(net, server)
        assert error.stage == "TCP behind the proxy"
        assert words in error.what
        assert f"(reply {reply})" in error.what

    net.run(scenario())


@pytest.mark.parametrize(
    ("instead", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not SOCKS5 (it begins 0x48)"),
        (b"\x05\x01", "method 0x01"),
        (b"\x05\x02", "method 0x02"),
        (b"\x05\xff", "wants a user and a password"),
        (b"\x05", "closed the connection without an answer"),
        (b"", "closed the connection without an answer"),
        (b"\x05\x00\x05\x00\x00\x09\x00\x00", "address type 0x09"),
        (b"\x05\x00\x04\x5a\x00\x00", "not SOCKS5 (it begins 0x04)"),
        (b"\x05\x00\x05\x00\x00\x03\xff", "closed the connection without an answer"),
    ],
)
def test_what_is_no_proxy_is_told_apart(net: Net, instead: bytes, words: str) -> None:
    async def scenario() -> None:
        with SocksServer(instead=instead) as server:
            error = await _fails(net, server)
        assert words in error.what

    net.run(scenario())


def test_a_slow_proxy_and_none_end_in_time(net: Net) -> None:
    async def scenario() -> None:
        began_s = time.monotonic()
        with SocksServer(pause_s=0.5) as server:
            error = await _fails(net, server, limit_s=0.2)
            assert error.stage == "proxy"
            assert "no answer in time" in error.what
        assert time.monotonic() - began_s < 5
        error = await _fails(net, server)
        assert "the proxy cannot be reached: connection refused" in error.what
        with pytest.raises(ConnectError, match=r"does not let this machine in.*refused"):
            await greet_proxy(parse_proxy(server.url))

    net.run(scenario())


def test_a_peer_behind_a_proxy_is_no_witness_that_another_is_dead(net: Net) -> None:
    async def scenario() -> None:
        with SocksServer(names=NAMES) as server, socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            a, _ = await behind(net, server)
            place = f"b.test:{closed.getsockname()[1]}"
            assert await a.host.probe(place, 2.0) == "silent"
            direct = net.node("direct")
            assert await direct.host.probe(place.replace("b.test", "127.0.0.1"), 2.0) == "refused"
        assert server.asked

    net.run(scenario())


def test_nobody_learns_where_he_comes_from_of_a_member_that_a_proxy_brings_him(net: Net) -> None:
    async def scenario() -> None:
        a, asker = net.node("a"), net.node("asker")
        a.host._listener._behind_proxy = True
        await a.listen()
        await asker.listen()
        port = int(asker.address.rpartition(":")[2])
        found = await asker.host.ask_reach(a.id, a.address, port)
        assert found.answers == ()
        a.host._listener._behind_proxy = False
        found = await asker.host.ask_reach(a.id, a.address, port)
        assert [one.outcome for one in found.answers] == [OK]

    net.run(scenario())


def test_a_socket_through_it_has_the_address_that_was_dialled_or_any() -> None:
    for host, stated in (("10.0.0.7", "10.0.0.7"), ("fd00::7", "fd00::7"), ("x.org", "0.0.0.0")):
        with socket.create_server(("127.0.0.1", 0)) as server:
            marked = proxied(socket.create_connection(server.getsockname()), host)
            with marked:
                assert is_indirect(marked)
                assert remote_ip_of(marked) == stated
                assert proved_ip_of(marked) == ""
                assert not is_local(marked)


@pytest.mark.parametrize(
    ("text", "proxy"),
    [
        ("socks5://10.0.0.1:1080", Proxy("10.0.0.1", 1080)),
        ("socks5h://[fd00::1]:1055/", Proxy("fd00::1", 1055)),
        ("socks5://u:p@vpn:1", Proxy("vpn", 1, "u", "p")),
        ("socks5://u:p@ss@vpn:1", Proxy("vpn", 1, "u", "p@ss")),
        (f"socks5://ada:{ESCAPED}@vpn:1", Proxy("vpn", 1, "ada", SECRET)),
    ],
)
def test_urls_of_proxies(text: str, proxy: Proxy) -> None:
    assert parse_proxy(text) == proxy
    assert str(proxy) == str(Proxy(proxy.host, proxy.port))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://u:hidden@vpn:1",
        "socks4://vpn:1",
        "socks5://u:hidden",
        "socks5://u:hidden@vpn",
        "socks5://hidden@vpn:1",
        "socks5://u:@vpn:1",
        "socks5://:hidden@vpn:1",
        "socks5://vpn:99999",
        f"socks5://u:{'hidden' * 50}@vpn:1",
    ],
)
def test_what_is_no_url_of_a_proxy_is_not_quoted(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_proxy(text)
    assert "hidden" not in f"{caught.value} {caught.value.fix}"
    assert caught.value.fix


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=60))
def test_any_password_can_be_written_and_none_is_shown(password: str) -> None:
    from urllib.parse import quote

    proxy = parse_proxy(f"socks5://u:{quote(password, safe='')}@vpn:1")
    assert proxy.password == password
    text = f"said socks5://u:{quote(password, safe='')}@vpn:1 here"
    assert without_password(text) == "said socks5://...@vpn:1 here"


def test_the_answer_of_a_dial_back_through_a_proxy_counts_only_if_it_came_through(
    net: Net,
) -> None:
    async def scenario() -> None:
        with SocksServer(names=NAMES) as server, socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            a, b = await behind(net, server)
            outcome: Callable[..., object] = a.host._reach._outcome
            for port, expected in (
                (int(b.address.rpartition(":")[2]), OK),
                (closed.getsockname()[1], UNABLE),
            ):
                assert await outcome(DialBack(0, b.id, 1, "b.test", port)) == expected

    net.run(scenario())
