"""Members dial a peer back that asks whether it can be dialled: who, where, how often."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import TYPE_CHECKING

import pytest

from atoll.collectives.errors import AdmissionError, ConnectError, RemoteProtocolError
from atoll.collectives.version import VERSION
from atoll.peer.net.address_kind import address_kind
from atoll.peer.net.dial import Dial
from atoll.peer.net.hello import PROTOCOL_MAX, PROTOCOL_MIN, REACH, Hello
from atoll.peer.net.reach import (
    ASKERS_MAX,
    DIAL_BACK_S,
    PAUSE_S,
    PER_ADDRESS_MAX,
    PER_MEMBER_MAX,
    Candidate,
    DialBackLimits,
    ask_reach,
    choose_helpers,
    may_dial,
)
from atoll.peer.net.reach_messages import (
    OK,
    OTHER,
    REFUSED,
    SILENT,
    UNABLE,
    AskReach,
    DialBack,
    ReachReport,
)
from atoll.peer.net.tls import TlsChannel

if TYPE_CHECKING:
    from tests.unit.peer.conftest import Net, Node


def port_of(node: Node) -> int:
    return int(node.address.rpartition(":")[2])


async def members(net: Net, names: str, ip: str = "127.0.0.1") -> list[Node]:
    """Members of which the first has a link to every other one."""
    nodes = [net.node(name) for name in names]
    address = await nodes[0].listen(ip)
    for node in nodes[1:]:
        await node.listen(ip)
        await node.host.dial(address)
    return nodes


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_two_others_dial_and_the_asked_member_too(net: Net) -> None:
    async def scenario() -> None:
        a, *_ = await members(net, "abcd")
        asker = net.node("asker")
        await asker.listen()
        found = await asker.host.ask_reach(a.id, a.address, port_of(asker))
        assert found.asked == a.id
        assert found.observed == found.ip == "127.0.0.1"
        assert len(found.answers) == 3
        assert found.answers[0].by == a.id
        assert {one.outcome for one in found.answers} == {OK}
        assert len({one.by for one in found.answers}) == 3
        assert all(one.from_ip == "127.0.0.1" and one.took_s < 5 for one in found.answers)
        assert found.program == VERSION
        assert abs(found.offset_s) < 1.0
        assert 0 < found.rtt_s < 1
        assert asker.host.link_peers() == ()  # it has become no member by that

    net.run(scenario())


def test_over_ipv6_it_is_the_same(net: Net) -> None:
    async def scenario() -> None:
        a, _ = await members(net, "ab", "::1")
        asker = net.node("asker")
        _, port = await asker.host.listen("::1", 0)
        found = await asker.host.ask_reach(a.id, a.address, port)
        assert found.observed == "::1"
        assert [one.outcome for one in found.answers] == [OK, OK]

    net.run(scenario())


def test_whom_the_asker_has_dialled_dials_only_if_there_is_nobody_else(net: Net) -> None:
    async def scenario() -> None:
        a, b, c, d = await members(net, "abcd")
        asker = net.node("asker")
        await asker.listen()
        await asker.host.dial(b.address)
        found = await asker.host.ask_reach(a.id, a.address, port_of(asker))
        assert {one.by for one in found.answers} == {a.id, c.id, d.id}

    net.run(scenario())


def test_a_closed_port_is_refused_and_another_peer_is_told_apart(net: Net) -> None:
    async def scenario() -> None:
        a, b = await members(net, "ab")
        found = await net.node("closed").host.ask_reach(a.id, a.address, free_port())
        assert [one.outcome for one in found.answers] == [REFUSED, REFUSED]
        found = await net.node("wrong").host.ask_reach(a.id, a.address, port_of(b))
        assert [one.outcome for one in found.answers] == [OTHER, OTHER]

    net.run(scenario())


def test_who_accepts_and_says_nothing_is_silent_within_the_limit(net: Net) -> None:
    async def scenario() -> None:
        a, _ = await members(net, "ab")
        with socket.socket() as dumb:
            dumb.bind(("127.0.0.1", 0))
            dumb.listen()
            began_s = time.monotonic()
            port = dumb.getsockname()[1]
            found = await net.node("dumb").host.ask_reach(a.id, a.address, port)
        assert [one.outcome for one in found.answers] == [SILENT, SILENT]
        assert time.monotonic() - began_s > DIAL_BACK_S
        assert all(one.took_s >= DIAL_BACK_S for one in found.answers)

    net.run(scenario())


def test_nobody_dials_for_the_same_asker_twice_in_a_minute(net: Net) -> None:
    async def scenario() -> None:
        a, _ = await members(net, "ab")
        asker = net.node("asker")
        await asker.listen()
        first = await asker.host.ask_reach(a.id, a.address, port_of(asker))
        assert len(first.answers) == 2
        again = await asker.host.ask_reach(a.id, a.address, port_of(asker))
        assert again.answers == ()
        assert 0 < again.wait_s <= PAUSE_S
        report = await asker.host.ask_reach(a.id, a.address, 0)  # asks for no dial
        assert report.wait_s == 0
        assert report.observed == "127.0.0.1"

    net.run(scenario())


def test_a_member_without_others_answers_alone(net: Net) -> None:
    async def scenario() -> None:
        (a,) = await members(net, "a")
        asker = net.node("asker")
        await asker.listen()
        found = await asker.host.ask_reach(a.id, a.address, port_of(asker))
        assert [(one.by, one.outcome) for one in found.answers] == [(a.id, OK)]

    net.run(scenario())


def test_who_is_no_daemon_can_ask(net: Net) -> None:
    """As `atoll doctor` does: with a certificate of the run and without a link."""

    async def scenario() -> None:
        a, _ = await members(net, "ab")
        doctor = net.node("doctor")
        hello = Hello(PROTOCOL_MIN, PROTOCOL_MAX, "demo", REACH, 1, "")
        dial = Dial(a.address, "demo", doctor.tls.tag)
        found = await ask_reach(dial, doctor.tls.client, hello, AskReach(free_port()))
        assert [one.outcome for one in found.answers] == [REFUSED, REFUSED]

        other = Hello(PROTOCOL_MIN, PROTOCOL_MAX, "other", REACH, 1, "")
        elsewhere = Dial(a.address, "other", doctor.tls.tag)
        with pytest.raises(AdmissionError, match="runs 'demo'"):
            await ask_reach(elsewhere, doctor.tls.client, other, AskReach(1))

    net.run(scenario())


def test_a_helper_that_says_nothing_does_not_keep_the_answer(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        a, b = await members(net, "ab")
        monkeypatch.setattr("atoll.peer.net.reach.HELPER_S", 0.2)
        monkeypatch.setattr(b.host._reach, "_help", lambda link, dial: None)
        asker = net.node("asker")
        await asker.listen()
        found = await asker.host.ask_reach(a.id, a.address, port_of(asker))
        assert [one.by for one in found.answers] == [a.id]

    net.run(scenario())


def test_a_member_that_closes_stops_dialling(net: Net) -> None:
    async def scenario() -> None:
        a, b = await members(net, "ab")
        with socket.socket() as dumb:
            dumb.bind(("127.0.0.1", 0))
            dumb.listen()
            port = dumb.getsockname()[1]
            asker = net.node("asker")
            asking = asyncio.create_task(asker.host.ask_reach(a.id, a.address, port))
            dialler, _ = await asyncio.to_thread(dumb.accept)  # one of them has dialled
            await b.host.close()
            await a.host.close()
            dialler.close()
            with contextlib.suppress(ConnectError):
                await asking

    net.run(scenario())


def test_what_is_observed_must_be_an_address(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        (a,) = await members(net, "a")
        asker = net.node("asker")
        for observed in ("", "gpu.example.org", "[8.8.8.8]", "8.8.8.8\x1b[2J"):

            async def serve(channel: TlsChannel, *_: object, observed: str = observed) -> None:
                await channel.receive_of(AskReach)
                await channel.send(ReachReport(observed, (), time.time()))

            monkeypatch.setattr(a.host._reach, "serve", serve)
            with pytest.raises(RemoteProtocolError, match="no IP address"):
                await asker.host.ask_reach(a.id, a.address, 0)

    net.run(scenario())


def test_a_dial_back_without_the_zone_of_a_link_tells_nothing_of_the_asker(net: Net) -> None:
    async def scenario() -> None:
        (a,) = await members(net, "a")
        dial = DialBack(1, bytes(32), 1, "fe80::1", 29600)
        assert (await a.host._reach._dial(dial)).outcome == UNABLE

    net.run(scenario())


# ---------------------------------------------------------------- decisions


def test_limits_forget_nothing_that_they_need_and_are_bounded() -> None:
    limits = DialBackLimits()
    assert limits.take((b"a", 1), "8.8.8.8", 100.0) == 0
    assert limits.take((b"a", 1), "8.8.8.8", 130.0) == pytest.approx(30.0)
    assert limits.take((b"a", 2), "8.8.8.8", 130.0) == 0  # it was restarted
    assert limits.take((b"a", 1), "8.8.8.8", 160.0) == 0
    asked = [limits.take((b"b", n), "9.9.9.9", 240.0) for n in range(PER_ADDRESS_MAX + 1)]
    assert asked[:-1] == [0.0] * PER_ADDRESS_MAX
    assert asked[-1] == PAUSE_S
    assert limits.take((b"c", 1), "1.1.1.1", 240.0) == 0
    for number in range(5000):
        assert limits.take((b"d", number), "127.0.0.1", 240.0) == 0
        limits.take((b"e", number), f"10.0.{number // 250}.{number % 250}", 240.0)
    assert len(limits._asked_s) <= ASKERS_MAX
    assert len(limits._of_address) <= ASKERS_MAX


def test_one_member_cannot_have_another_scan_networks() -> None:
    limits = DialBackLimits()
    addresses = [f"8.8.{number}.1" for number in range(PER_MEMBER_MAX + 1)]
    granted = [limits.take((b"m", n), ip, 60.0, b"m") == 0 for n, ip in enumerate(addresses)]
    assert granted == [True] * PER_MEMBER_MAX + [False]
    assert limits.take((b"other", 1), "9.9.9.9", 60.0, b"other") == 0
    assert limits.take((b"m", 1000), "9.9.9.9", 120.0, b"m") == 0  # a minute later


def test_one_member_cannot_use_up_what_others_may_ask_for_the_same_address() -> None:
    limits, victim = DialBackLimits(), "8.8.8.8"
    asked = [limits.take((b"liar", n), victim, 60.0, b"liar") for n in range(PER_ADDRESS_MAX + 1)]
    assert asked == [0.0] * PER_ADDRESS_MAX + [PAUSE_S]
    assert limits.take((b"honest", 1), victim, 60.0, b"honest") == 0
    assert limits.take((b"victim", 1), victim, 60.0) == 0


def test_helpers_are_elsewhere_and_not_behind_the_same_router() -> None:
    near, far = Candidate(b"n", "203.0.113.9"), Candidate(b"f", "198.51.100.9")
    dialled, same = Candidate(b"d", "192.0.2.9"), Candidate(b"s", "203.0.113.5")
    linked = [same, near, dialled, far]
    assert choose_helpers(linked, "203.0.113.5", {b"d"}) == [b"f", b"d"]
    assert choose_helpers([same, near], "203.0.113.5", ()) == [b"n"]
    here = [Candidate(b"1", "127.0.0.1"), Candidate(b"2", "127.0.0.1")]
    assert choose_helpers(here, "127.0.0.1", {b"1"}) == [b"2", b"1"]


@pytest.mark.parametrize(
    ("ip", "requester", "may"),
    [
        ("198.51.100.7", "203.0.113.5", True),
        ("192.168.1.7", "203.0.113.5", False),
        ("192.168.1.7", "192.168.1.5", True),
        ("100.64.3.2", "203.0.113.5", False),
        ("127.0.0.1", "192.168.1.5", False),
        ("127.0.0.1", "127.0.0.1", True),
        ("192.168.1.7", "0.0.0.0", False),  # whoever was dialled by name through a proxy
        ("192.168.1.7", "64:ff9b::cb00:7105", False),  # ... from a network of IPv6 only
        ("240.0.0.1", "203.0.113.5", False),
        ("fe80::1", "2001:db8::1", False),
        *((ip, "203.0.113.5", False) for ip in ("0.0.0.0", "::", "::ffff:0.0.0.0")),  # this machine
        *((ip, "203.0.113.5", False) for ip in ("224.0.0.1", "ff0e::1", "255.255.255.255")),
        ("gpu.example.org", "127.0.0.1", False),  # nobody has us ask a resolver either
        *((ip, "192.168.1.5", False) for ip in ("[8.8.8.8]", "8.8.8.8%x", "fe80::1%eth0")),
    ],
)
def test_nobody_outside_can_have_private_networks_tried(ip: str, requester: str, may: bool) -> None:
    assert may_dial(ip, requester) is may


@pytest.mark.parametrize(
    ("host", "kind"),
    [
        ("127.0.0.1", "loopback"),
        ("[::1]", "loopback"),
        ("10.1.2.3", "private"),
        ("172.32.0.1", "public"),
        ("100.127.255.1", "carrier"),
        ("169.254.3.3", "link-local"),
        ("fe80::1%eth0", "link-local"),
        ("::ffff:192.168.0.1", "private"),
        ("fd00::1", "private"),
        ("8.8.8.8", "public"),
        ("2001:db8::1", "public"),
        ("gpu.example.org", "name"),
        ("192.0.0.2", "carrier"),  # of a router that has IPv4 over the provider's IPv6 only
        ("192.0.2.1", "public"),
        ("240.0.0.1", "private"),
        ("255.255.255.255", "private"),
        ("4000::1", "private"),
        ("fec0::1", "private"),
        ("224.0.0.1", "link-local"),
        ("ff0e::1", "link-local"),
        ("64:ff9b::808:808", "public"),
    ],
)
def test_kinds_of_addresses(host: str, kind: str) -> None:
    assert address_kind(host) == kind
