"""The gate: limits on strangers, in total, per address and per second."""

from __future__ import annotations

import pytest

from atoll.collectives.errors import AddressFullError
from atoll.peer.net.gate import (
    FAILURES_FREE,
    MEMBERS_PER_ADDRESS_MAX,
    PAUSED_MAX,
    PENDING_MAX,
    PENDING_PER_ADDRESS_MAX,
    STARTS_PER_ADDRESS_MAX,
    Gate,
    check_members,
    counted_as,
    plain_ip,
)


def test_one_address_gets_a_few_places_and_gives_them_back() -> None:
    gate = Gate()
    for _ in range(PENDING_PER_ADDRESS_MAX):
        assert gate.enter("a", 0.0, exempt=False) is None
    assert "of this address wait" in str(gate.enter("a", 1.5, exempt=False))
    assert gate.enter("b", 1.5, exempt=False) is None
    gate.leave("a")
    assert gate.enter("a", 1.5, exempt=False) is None


def test_one_address_gets_a_few_starts_in_a_second() -> None:
    gate = Gate()
    for _ in range(STARTS_PER_ADDRESS_MAX):
        assert gate.enter("a", 5.0, exempt=False) is None
        gate.leave("a")
    assert "in a second" in str(gate.enter("a", 5.9, exempt=False))
    assert gate.enter("b", 5.9, exempt=False) is None
    assert gate.enter("a", 6.0, exempt=False) is None


def test_the_exempt_count_towards_the_total_only() -> None:
    gate = Gate()
    for _ in range(PENDING_MAX):
        assert gate.enter("a", 0.0, exempt=True) is None
    for exempt in (True, False):
        assert "waiting to be admitted" in str(gate.enter("b", 0.0, exempt=exempt))
    gate.leave("a")
    assert gate.enter("b", 0.0, exempt=False) is None


def test_it_remembers_nobody_for_long() -> None:
    gate = Gate()
    for second in range(100):
        for number in range(50):
            address = f"{second}.{number}"
            assert gate.enter(address, float(second), exempt=False) is None
            gate.leave(address)
    assert len(gate._starts) <= 50
    assert len(gate._pending) == 0


def test_an_address_whose_connections_come_to_nothing_waits_longer_and_longer() -> None:
    gate = Gate()
    for _ in range(FAILURES_FREE - 1):
        gate.failed("a", 0.0)
    assert gate.enter("a", 0.0, exempt=False) is None
    gate.failed("a", 0.0)
    pauses_s = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    now_s = 0.0
    for pause_s in pauses_s:
        assert "came to nothing" in str(gate.enter("a", now_s + pause_s - 0.01, exempt=False))
        assert gate.enter("a", now_s, exempt=True) is None  # a member's, by now
        now_s += pause_s
        assert gate.enter("a", now_s, exempt=False) is None
        assert gate.enter("b", now_s, exempt=False) is None
        gate.leave("a")
        gate.leave("a")
        gate.leave("b")
        gate.failed("a", now_s)
    gate.succeeded("a")
    assert gate.enter("a", now_s, exempt=False) is None


def test_it_remembers_only_so_many_failures() -> None:
    gate = Gate()
    for number in range(2 * PAUSED_MAX):
        gate.failed(str(number), 0.0)
    assert len(gate._failures) == PAUSED_MAX
    assert str(2 * PAUSED_MAX - 1) in gate._failures


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
