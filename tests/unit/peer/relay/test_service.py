"""Peers that reach each other through a relay: real connections, whose direct way nobody uses."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from atoll.collectives.errors import ConnectError
from atoll.collectives.schedule.plan import STREAMS_MAX
from atoll.peer.membership.view import short
from atoll.peer.net.connection_limits import FAILURES_FREE, PendingConnection, origin_of
from atoll.peer.net.link import ControlLink
from atoll.peer.net.punched import meeting
from atoll.peer.net.reach import ReachLinks, ReachService
from atoll.peer.net.reach_messages import UNABLE, DialBack, DialledBack
from atoll.peer.net.relayed import Route, parse_route, shown
from atoll.peer.net.wire import message
from atoll.peer.relay import offers, service
from atoll.peer.relay.circuits import PER_JOINER_MAX
from atoll.peer.relay.messages import CircuitAsked, CircuitFault, CircuitOffered
from atoll.peer.relay.offers import FAILURES_MAX, PER_RELAY_MAX
from atoll.peer.relay.splicer import Splicer
from atoll.peer.streams.keys import CIPHER_NONE, CIPHERS

if TYPE_CHECKING:
    from tests.unit.peer.conftest import Net, Node

RATE = 1e9
PATIENCE_S = 30.0


@message(wire="RelayNote")
class RelayNote:
    number: int


class Relays:
    """Name all relays to everybody, and note who is blamed."""

    def __init__(self, *relays: bytes) -> None:
        self.relays = relays
        self.blamed: asyncio.Queue[tuple[bytes, str, bytes]] = asyncio.Queue()  # on the way to whom

    def relays_to(self, peer: bytes, /, *, bulk: bool) -> tuple[bytes, ...]:
        return self.relays

    def blame_relay(self, relay: bytes, why: str, peer: bytes, /) -> None:
        self.blamed.put_nowait((relay, why, peer))


async def starred(
    net: Net, *names: str, rate: float = RATE, ciphers: tuple[str, ...] = CIPHERS
) -> list[Node]:
    """Return a relay, and peers that have dialled it, and which it knows as members."""
    relay = net.node("r", relay_bytes_per_s=rate)
    await relay.listen()
    ends = [net.node(name, ciphers=ciphers) for name in names]
    for end in ends:
        await end.host.dial(relay.address)
        end.host.known_relays = Relays(relay.id)
    relay.members = {relay.id, *(end.id for end in ends)}
    return [relay, *ends]


def route(relay: Node, peer: Node) -> str:
    return str(Route(relay.id, peer.id))


async def established(node: Node, other: Node) -> ControlLink:
    """Return the control link of a node to another one, once it is there."""
    await node.until(lambda: node.host.link_of(other.id))
    link = node.host.link_of(other.id)
    assert link is not None
    return link


def test_a_route_is_an_address_of_its_own() -> None:
    one = Route(b"r" * 32, b"p" * 32)
    assert parse_route(str(one)) == one
    for text in ("relay:29600", f"{one}x", str(one).upper(), "127.0.0.1:1"):
        assert parse_route(text) is None


def test_two_that_have_dialled_a_relay_have_a_control_link_through_it(net: Net) -> None:
    async def scenario() -> None:
        relay, a, b = await starred(net, "a", "b", rate=0.0)
        assert await a.host.dial(route(relay, b), expect_peer=b.id) == b.id
        await b.until(lambda: b.host.link_of(a.id))
        for end, other in ((a, b), (b, a)):
            link = end.host.link_of(other.id)
            assert link is not None
            assert (link.relay, link.proved_ip, link.is_local) == (relay.id, "", False)
            assert link.remote_ip == "127.0.0.1", "as the relay states it"
            assert end.host.tcp_info(other.id) == b"", "the kernel knows only the relay"
            assert end.host.srtt_s(other.id) > 0
            assert end.host.send(other.id, RelayNote(1))
            await other.until(lambda: other.messages)  # noqa: B023  # awaited here
        assert a.messages == [(b.id, RelayNote(1))]
        circuits = relay.host.relay.status()["circuits"]
        assert [(one["bulk"], one["count"]) for one in circuits] == [(False, 1)]

    net.run(scenario())


@pytest.mark.parametrize("ciphers", [CIPHERS, (), (CIPHER_NONE, *CIPHERS)])
def test_data_goes_through_a_relay_sealed_or_in_tls_and_never_bare(
    ciphers: tuple[str, ...], net: Net
) -> None:
    async def scenario() -> None:
        relay, a, b = await starred(net, "a", "b", ciphers=ciphers)
        await a.host.dial(route(relay, b), expect_peer=b.id)
        stream = await a.host.open_data(b.id, "127.0.0.1:1")  # nobody dials that
        assert stream.relay == relay.id
        assert stream.cipher != CIPHER_NONE
        await b.until(lambda: b.streams)
        data, got = bytes(range(256)) * 4000, bytearray(1_024_000)
        await asyncio.gather(
            asyncio.to_thread(stream.sendall, data),
            asyncio.to_thread(b.streams[0].recv_into, memoryview(got)),
        )
        assert bytes(got) == data
        async with asyncio.timeout(PATIENCE_S):
            # What has been passed on is counted in a thread.
            while relay.host.relay.status()["carried_bytes"] <= len(data):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        stream.close()

    net.run(scenario())


def test_a_relay_that_has_no_descriptors_left_ends_the_circuit(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        relay, a, b = await starred(net, "a", "b")
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(service, "Splicer", none_left)
            with pytest.raises((ConnectError, OSError)):
                await a.host.dial(route(relay, b), expect_peer=b.id)
        assert len(relay.host.relay._table) == 0, "its place is free again"
        await a.host.dial(route(relay, b), expect_peer=b.id)
        await established(b, a)

    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    net.run(scenario())


def test_a_relay_without_a_rate_carries_no_data_and_says_so(net: Net) -> None:
    async def scenario() -> None:
        relay, a, b = await starred(net, "a", "b", rate=0.0)
        await a.host.dial(route(relay, b), expect_peer=b.id)
        with pytest.raises(ConnectError, match="started without --relay"):
            await a.host.open_data(b.id, "")
        a.host.known_relays = Relays()
        with pytest.raises(ConnectError, match="no way for data") as raised:
            await a.host.open_data(b.id, "")
        assert "--relay MBIT" in raised.value.fix

    net.run(scenario())


def test_what_is_refused_through_a_relay_names_the_ends_for_people(net: Net) -> None:
    async def scenario() -> None:
        relay, a, b = await starred(net, "a", "b")
        with pytest.raises(ConnectError, match="needs a control link first") as raised:
            await a.host.call_tls(b.id, route(relay, b))
        assert f"{short(b.id)} through relay {short(relay.id)}" in raised.value.what
        assert "relay:" not in raised.value.what
        assert shown(meeting(b.id)) == f"{short(b.id)} from both sides at once"

    net.run(scenario())


def test_a_relay_denies_what_leads_to_nobody_it_knows(net: Net) -> None:
    async def scenario() -> None:
        relay, a = await starred(net, "a")
        with pytest.raises(ConnectError, match="no connection of its own to"):
            await a.host.dial(str(Route(relay.id, b"x" * 32)), expect_peer=b"x" * 32)
        with pytest.raises(ConnectError, match="no connection to relay"):
            await a.host.dial(str(Route(b"y" * 32, b"x" * 32)), expect_peer=b"x" * 32)

    net.run(scenario())


def test_whoever_is_no_member_yet_gets_few_circuits(net: Net) -> None:
    async def scenario() -> None:
        relay, a, b = await starred(net, "a", "b")
        relay.members = {relay.id, a.id}
        link = relay.host.link_of(b.id)
        assert link is not None
        for number in range(PER_JOINER_MAX):
            assert relay.host.relay._grant(link, CircuitAsked(number, a.id, True)) == ""
        assert "8 circuits of one peer" in relay.host.relay._grant(
            link, CircuitAsked(9, a.id, True)
        )

    net.run(scenario())


def test_nobody_dials_an_address_that_a_relay_states(net: Net) -> None:
    """It could state any, and have the machines around this one tried."""

    async def scenario() -> None:
        relay, a, b = await starred(net, "a", "b")
        port = int((await a.listen()).rpartition(":")[2])
        reached = await a.host.ask_reach(b.id, route(relay, b), port)
        assert (reached.observed, reached.answers) == ("127.0.0.1", ())
        await a.host.dial(route(relay, b), expect_peer=b.id)
        link = await established(b, a)
        dial = DialBack(1, a.id, 1, "127.0.0.1", port)
        said: list[object] = []
        links = SimpleNamespace(send=lambda _, msg: said.append(msg), attempt=b.host.attempt)
        assert ReachService(cast(ReachLinks, links)).on_message(link, dial)
        assert said == [DialledBack(1, UNABLE, 0.0)]

    net.run(scenario())


@pytest.mark.parametrize("ip", ["", "router.example", "127.0.0.1:1", "1.2.3"])
def test_what_a_relay_states_is_an_address_or_nothing_comes_of_it(ip: str, net: Net) -> None:
    async def scenario() -> None:
        relay, a, b = await starred(net, "a", "b")
        (await established(relay, b)).remote_ip = ip
        with pytest.raises(ConnectError, match="states no address of the peer"):
            await a.host.dial(route(relay, b), expect_peer=b.id)
        (await established(relay, b)).remote_ip = "127.0.0.1"
        (await established(relay, a)).remote_ip = ip
        with pytest.raises(ConnectError):
            await a.host.dial(route(relay, b), expect_peer=b.id)
        await b.until(lambda: any("states no address of the peer" in line for line in b.logs))

    net.run(scenario())


def test_a_relay_notices_an_end_that_is_gone_without_a_word(net: Net) -> None:
    """By the kernel's keepalive: else its circuit takes a place of the pair for ever."""

    async def scenario() -> None:
        relay, a, b = await starred(net, "a", "b")
        ends: list[socket.socket] = []
        splicer = SimpleNamespace(
            add=lambda _, one, two, pair, bulk: ends.extend((one, two)),
            close=lambda: [end.close() for end in ends],
        )
        relay.host.relay._splicer = cast(Splicer, splicer)
        dial = asyncio.ensure_future(a.host.dial(route(relay, b), expect_peer=b.id))
        async with asyncio.timeout(PATIENCE_S):
            while not ends:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.01)
        for end in ends:
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        dial.cancel()

    net.run(scenario())


def test_an_expelled_peer_loses_its_circuits(net: Net) -> None:
    async def scenario() -> None:
        relay, a, b = await starred(net, "a", "b")
        await a.host.dial(route(relay, b), expect_peer=b.id)
        await b.until(lambda: b.ups[1:])
        relay.host.drop(a.id, "banned", expelled=True)
        await b.until(lambda: b.downs)
        assert b.downs[0][0] == a.id
        assert relay.host.relay.status()["circuits"] == []

    net.run(scenario())


def test_a_direct_link_takes_the_place_of_a_relayed_one_and_not_the_other_way(net: Net) -> None:
    async def scenario() -> None:
        relay, a, b = await starred(net, "a", "b")
        await a.host.dial(route(relay, b), expect_peer=b.id)
        await b.until(lambda: b.host.link_of(a.id))
        stream = await a.host.open_data(b.id, "")
        await a.host.dial(await b.listen(), expect_peer=b.id, anew=True)
        link = a.host.link_of(b.id)
        assert link is not None
        assert link.relay == b""
        assert stream.is_outdated, "data goes the direct way from here on"
        stream.close()
        await a.host.dial(route(relay, b), expect_peer=b.id, anew=True)
        assert a.host.link_of(b.id) is link
        assert a.downs == [], "nobody was away"

    net.run(scenario())


def test_a_second_relay_stands_by_and_takes_over(net: Net) -> None:
    async def scenario() -> None:
        relay, a, b = await starred(net, "a", "b")
        second = net.node("s")
        await second.listen()
        for end in (a, b):
            await end.host.dial(second.address)
        second.members = {second.id, a.id, b.id}
        await a.host.dial(route(relay, b), expect_peer=b.id)
        await a.host.dial(route(second, b), expect_peer=b.id, anew=True)
        await b.until(lambda: b.host.standby_of(a.id))
        await relay.host.close()
        await a.until(lambda: (b.id, "", 1) in a.ups[3:] or len(a.ups) > 3)
        for end, other in ((a, b), (b, a)):
            link = end.host.link_of(other.id)
            assert link is not None
            assert link.relay == second.id
            assert end.host.standby_of(other.id) is None
        assert a.host.send(b.id, RelayNote(2))
        await b.until(lambda: b.messages)

    net.run(scenario())


def test_garbage_for_a_token_is_refused(net: Net) -> None:
    async def scenario() -> None:
        relay, _ = await starred(net, "a")
        host, port = relay.address.split(":")
        for opening in (b"\xa8" + bytes(32), b"\xa8" + bytes(5)):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(opening)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        assert relay.host.relay.status()["circuits"] == []

    net.run(scenario())


def test_an_offer_that_leads_nowhere_is_logged_and_forgotten(net: Net) -> None:
    async def scenario() -> None:
        relay, a = await starred(net, "a")
        relay.host.send(a.id, CircuitOffered(bytes(32), b"x" * 32, "192.0.2.1"))
        await a.until(lambda: any("no circuit to" in line for line in a.logs))

    net.run(scenario())


def test_a_relay_of_two_address_families_is_dialled_where_it_comes_from(net: Net) -> None:
    """It advertises one address, which a machine of the other family cannot dial."""

    async def scenario() -> None:
        relay, b = await starred(net, "b")
        relay.address = f"[2001:db8::1]:{relay.address.rpartition(':')[2]}"
        a = net.node("a")
        await relay.host.dial(await a.listen())
        await established(a, relay)
        relay.members.add(a.id)
        a.host.known_relays = Relays(relay.id)
        await b.host.dial(route(relay, a), expect_peer=a.id)
        await established(a, b)
        assert not any("no circuit" in line for line in a.logs)

    net.run(scenario())


def test_a_relay_cannot_have_a_peer_dial_as_often_as_it_likes(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address may be a third party's, and what fails must not fill the log."""
    monkeypatch.setattr(offers, "PAUSE_S", 10 * PATIENCE_S)

    async def scenario() -> None:
        relay, a = await starred(net, "a")
        dialled = 0

        async def third_party(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal dialled
            dialled += 1
            writer.close()

        server = await asyncio.start_server(third_party, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        (await established(a, relay)).dialled_address = f"127.0.0.1:{port}"
        for number in range(3000):
            relay.host.send(a.id, CircuitOffered(number.to_bytes(32, "big"), b"x" * 32, "::1"))
        relay.host.send(a.id, RelayNote(0))
        await a.until(lambda: a.messages)
        for number in range(3000):
            relay.host.send(a.id, CircuitOffered(number.to_bytes(32, "big"), b"x" * 32, "::1"))
            await asyncio.sleep(0)
        relay.host.send(a.id, RelayNote(1))
        await a.until(lambda: a.messages[1:])
        server.close()
        await a.until(lambda: any("no circuit to" in line for line in a.logs))
        assert 0 < dialled <= PER_RELAY_MAX + FAILURES_MAX
        assert sum("no circuit to" in line for line in a.logs) == 1

    net.run(scenario())


def test_all_streams_of_a_round_open_at_once_and_count_for_nobody_else(net: Net) -> None:
    """As without a relay: whoever is linked is no stranger; but no address becomes a member's."""

    async def scenario() -> None:
        relay, a, b = await starred(net, "a", "b")
        (await established(relay, a)).remote_ip = "192.0.2.8"
        await a.host.dial(route(relay, b), expect_peer=b.id)
        assert (await established(b, a)).remote_ip == "192.0.2.8"
        assert not b.host.is_member_ip("192.0.2.8")
        streams = await asyncio.gather(*(a.host.open_data(b.id, "") for _ in range(STREAMS_MAX)))
        assert {stream.cipher for stream in streams} <= {*CIPHERS}
        assert not any("rejected" in line for line in b.logs)
        for stream in streams:
            stream.close()

    net.run(scenario())


def test_what_fails_through_a_relay_turns_nobody_away_who_comes_directly(net: Net) -> None:
    """The relay could state the address of whoever it wants to keep out."""

    async def scenario() -> None:
        relay, a, b = await starred(net, "a", "b")
        (await established(relay, a)).remote_ip = "192.0.2.8"
        limiter, loop = b.host._listener._limiter, asyncio.get_running_loop()
        for _ in range(FAILURES_FREE):
            sock = await a.host.attempt(route(relay, b)).bare()
            await loop.sock_sendall(sock, b"nothing of ours")
            with contextlib.suppress(OSError):
                assert not await loop.sock_recv(sock, 1)
            sock.close()
        async with asyncio.timeout(PATIENCE_S):
            while sum(x.in_a_row for x in limiter._failures.values()) < FAILURES_FREE:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        place = limiter.enter(origin_of("192.0.2.8"), loop.time(), of_member=False)
        assert isinstance(place, PendingConnection)
        limiter.leave(place)

    net.run(scenario())


def test_a_peer_is_told_of_a_relay_that_damages_what_it_sends(net: Net) -> None:
    async def scenario() -> None:
        relay, a, b = await starred(net, "a", "b")
        await a.host.dial(route(relay, b), expect_peer=b.id)
        await b.until(lambda: b.host.link_of(a.id))
        b.host.on_fault(a.id, relay.id, "record 3 is not authentic", True)
        known = a.host.known_relays
        assert isinstance(known, Relays)
        async with asyncio.timeout(20):
            blamed, why, peer = await known.blamed.get()
        assert (blamed, peer) == (relay.id, b.id)
        assert "record 3 is not authentic" in why
        assert "RelayNote" not in repr(CircuitFault(relay.id, why))

    net.run(scenario())


def test_what_a_peer_may_have_done_itself_blames_the_relay_on_the_way_to_it_alone(net: Net) -> None:
    async def scenario() -> None:
        relay, a, b = await starred(net, "a", "b")
        await a.host.dial(route(relay, b), expect_peer=b.id)
        link = await established(b, a)
        known = b.host.known_relays
        assert isinstance(known, Relays)
        b.host.on_fault(a.id, relay.id, "record 3 is not authentic", True)
        link.is_damaged = True
        link.end("record 4 is not authentic")
        async with asyncio.timeout(PATIENCE_S):
            seen = [await known.blamed.get() for _ in range(2)]
        assert [(blamed, peer) for blamed, _, peer in seen] == [(relay.id, a.id)] * 2

    net.run(scenario())
