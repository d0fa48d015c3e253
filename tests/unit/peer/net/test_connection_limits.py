"""Limits on strangers, in total, per address and per second."""

from __future__ import annotations

import pytest

from atoll.collectives.errors import AddressFullError
from atoll.peer.net.connection_limits import (
    FAILURES_FREE,
    MEMBERS_PER_ADDRESS_MAX,
    MEMBERS_SILENT,
    PAUSED_MAX,
    STARTS_PER_ADDRESS_MAX,
    STRANGERS_SILENT,
    STRANGERS_SPEAKING,
    ConnectionLimiter,
    PendingConnection,
    check_members,
    counted_as,
    origin_of,
    plain_ip,
)

LOOPBACK = "127.0.0.1"


class Limited:
    """A limiter and what comes to it. Addresses have networks of their own unless they say."""

    def __init__(self) -> None:
        self.limiter = ConnectionLimiter()
        self.gave_up: list[str] = []

    def enter(
        self, ip: str, now_s: float = 0.0, *, of_member: bool = False
    ) -> PendingConnection | str:
        place = self.limiter.enter(origin_of(ip), now_s, of_member=of_member)
        if isinstance(place, PendingConnection):
            place.give_up = lambda: self.gave_up.append(ip)
        return place

    def speaks(self, ip: str, now_s: float = 0.0, *, of_member: bool = False) -> str:
        """Enter and say something; why that does not lead to a handshake."""
        place = self.enter(ip, now_s, of_member=of_member)
        assert isinstance(place, PendingConnection), place
        reason = self.limiter.speaks(place)
        if reason:
            self.limiter.leave(place)
        return reason


def address(number: int) -> str:
    return f"203.{number // 250}.{number % 250}.7"


def test_one_address_gets_a_few_handshakes_and_gives_them_back() -> None:
    limited = Limited()
    place = limited.enter("203.0.113.7")
    assert isinstance(place, PendingConnection)
    assert not limited.limiter.speaks(place)
    for _ in range(STRANGERS_SPEAKING.per_address - 1):
        assert not limited.speaks("203.0.113.7")
    assert "8 connections of 203.0.113.7 are already" in limited.speaks("203.0.113.7", 1.5)
    assert not limited.speaks("203.0.113.8", 1.5)
    limited.limiter.leave(place)
    assert not limited.speaks("203.0.113.7", 1.5)


def test_one_network_gets_half_of_all_handshakes() -> None:
    limited = Limited()
    for number in range(STRANGERS_SPEAKING.per_network):
        assert not limited.speaks(f"203.0.113.{number}")
    assert "32 connections of 203.0.113.0/24 are" in limited.speaks("203.0.113.250")
    for number in range(STRANGERS_SPEAKING.total - STRANGERS_SPEAKING.per_network):
        assert not limited.speaks(address(number))
    assert "64 connections are already waiting to be admitted" in limited.speaks(address(200))


def test_one_address_gets_a_few_starts_in_a_second() -> None:
    limited = Limited()
    for _ in range(STARTS_PER_ADDRESS_MAX):
        assert isinstance(limited.enter(address(1), 5.0), PendingConnection)
    assert "in a second" in str(limited.enter(address(1), 5.9))
    assert isinstance(limited.enter(address(2), 5.9), PendingConnection)
    assert isinstance(limited.enter(address(1), 6.0), PendingConnection)


@pytest.mark.parametrize("ip", ["203.0.113.7", "2001:db8:1:2::7"])
def test_the_oldest_silent_one_of_an_address_makes_room(ip: str) -> None:
    """Whoever comes last has its moment to speak."""
    limited = Limited()
    others = [limited.enter(address(number)) for number in range(20)]
    first = [limited.enter(ip, float(number)) for number in range(STRANGERS_SILENT.per_address)]
    assert not limited.gave_up
    last = limited.enter(ip, 99.0)
    assert isinstance(last, PendingConnection)
    assert limited.gave_up == [ip]
    assert not limited.limiter.speaks(last)
    assert limited.limiter.pending == len(others) + len(first)


@pytest.mark.parametrize("prefix", ["203.0.113.", "2001:db8:1:"])
def test_silence_of_many_addresses_of_a_network_keeps_no_other_peer_of_it_out(prefix: str) -> None:
    end = "" if "." in prefix else "::"
    limited = Limited()
    elsewhere = limited.enter("198.51.100.1")
    for second in range(3):
        for number in range(100):
            assert isinstance(
                limited.enter(f"{prefix}{number}{end}", float(second)), PendingConnection
            )
    assert len(limited.gave_up) == 300 - STRANGERS_SILENT.per_network
    assert not limited.speaks(f"{prefix}250{end}", 3.0)
    assert isinstance(elsewhere, PendingConnection)
    assert not limited.limiter.speaks(elsewhere)  # it had nothing to give up


def test_silence_from_everywhere_keeps_nobody_out() -> None:
    limited = Limited()
    for number in range(5 * STRANGERS_SILENT.total):
        assert isinstance(limited.enter(address(number)), PendingConnection)
    assert limited.limiter.pending == STRANGERS_SILENT.total
    assert not limited.speaks("198.51.100.1")


def test_members_have_places_of_their_own() -> None:
    """Strangers take none of them, and who shares a member's address takes its own only."""
    limited = Limited()
    for number in range(STRANGERS_SPEAKING.total):
        assert not limited.speaks(address(number))
    for number in range(STRANGERS_SILENT.total):
        limited.enter(address(number), 5.0)
    for _ in range(1000):
        limited.enter("198.51.100.1", 6.0, of_member=True)
    assert set(limited.gave_up) == {"198.51.100.1"}
    assert len(limited.gave_up) == 1000 - MEMBERS_SILENT.per_address
    for ip in ("198.51.100.1", "198.51.100.2"):
        assert not limited.speaks(ip, 6.0, of_member=True)


def test_loopback_counts_towards_the_totals_only() -> None:
    """All programs of this machine share it; they keep nobody out either."""
    limited = Limited()
    for _ in range(STRANGERS_SPEAKING.total):
        assert not limited.speaks(LOOPBACK)
    for _ in range(STRANGERS_SILENT.total):
        assert isinstance(limited.enter(LOOPBACK), PendingConnection)
    assert not limited.gave_up
    for _ in range(FAILURES_FREE):
        limited.limiter.failed(LOOPBACK, 0.0)
    assert isinstance(limited.enter(LOOPBACK), PendingConnection)
    assert isinstance(limited.enter("203.0.113.7"), PendingConnection)
    assert limited.gave_up == [LOOPBACK, LOOPBACK]


def test_it_remembers_nobody_for_long() -> None:
    limited = Limited()
    for second in range(100):
        for number in range(50):
            place = limited.enter(address(50 * second + number), float(second))
            assert isinstance(place, PendingConnection)
            limited.limiter.speaks(place)
            limited.limiter.leave(place)
    assert len(limited.limiter._starts) <= 50
    assert limited.limiter.pending == 0
    kinds = (*limited.limiter._silent.values(), *limited.limiter._speaking.values())
    assert not any(places._of for places in kinds)


def test_an_address_whose_connections_come_to_nothing_waits_longer_and_longer() -> None:
    limited, ip = Limited(), "203.0.113.7"
    limiter = limited.limiter
    for _ in range(FAILURES_FREE - 1):
        limiter.failed(ip, 0.0)
    assert isinstance(limited.enter(ip), PendingConnection)
    limiter.failed(ip, 0.0)
    pauses_s = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    now_s = 0.0
    for pause_s in pauses_s:
        assert "came to nothing" in str(limited.enter(ip, now_s + pause_s - 0.01))
        assert isinstance(
            limited.enter(ip, now_s, of_member=True), PendingConnection
        )  # a member's, by now
        now_s += pause_s
        assert isinstance(limited.enter(ip, now_s), PendingConnection)
        assert isinstance(limited.enter("203.0.113.8", now_s), PendingConnection)
        limiter.failed(ip, now_s)
    limiter.succeeded(ip)
    assert isinstance(limited.enter(ip, now_s), PendingConnection)


def test_it_remembers_only_so_many_failures() -> None:
    limiter = ConnectionLimiter()
    for number in range(2 * PAUSED_MAX):
        limiter.failed(str(number), 0.0)
    assert len(limiter._failures) == PAUSED_MAX
    assert str(2 * PAUSED_MAX - 1) in limiter._failures


@pytest.mark.parametrize(
    ("ip", "plain", "counted"),
    [
        ("203.0.113.7", "203.0.113.7", "203.0.113.7"),
        ("::ffff:203.0.113.7", "203.0.113.7", "203.0.113.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::1", "fe80::/64"),
    ],
)
def test_what_counts_as_one_address(ip: str, plain: str, counted: str) -> None:
    assert plain_ip(ip) == plain
    assert counted_as(plain) == counted
    assert (origin_of(ip).ip, origin_of(ip).address) == (plain, counted)


@pytest.mark.parametrize(
    ("ip", "network"),
    [
        ("203.0.113.7", "203.0.113.0/24"),
        ("::ffff:203.0.113.7", "203.0.113.0/24"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1::/48"),
    ],
)
def test_what_counts_as_one_network(ip: str, network: str) -> None:
    assert origin_of(ip).network == network


FULL = ["203.0.113.7"] * MEMBERS_PER_ADDRESS_MAX


@pytest.mark.parametrize(
    ("ip", "others", "most"),
    [
        ("203.0.113.7", FULL, None),
        ("203.0.113.7", FULL[:2], 2),
        ("127.0.0.1", ["127.0.0.1"], 1),
        ("2001:db8:1:2::1", ["2001:db8:1:2::9"], 1),  # one network
    ],
)
def test_an_address_has_so_many_members_and_no_more(
    ip: str, others: list[str], most: int | None
) -> None:
    with pytest.raises(AddressFullError, match="that may come from the address"):
        check_members(ip, others, most)
    check_members(ip, others[1:], most)
    check_members("198.51.100.1", others, most)
    check_members(ip, others, 0)


@pytest.mark.parametrize("ip", ["127.0.0.1", "10.1.2.3", "192.168.0.9", "::1", "fd00::1"])
def test_private_addresses_are_exempt_unless_a_number_is_given(ip: str) -> None:
    check_members(ip, [ip] * 100, None)
    with pytest.raises(AddressFullError):
        check_members(ip, [ip] * 100, 100)
