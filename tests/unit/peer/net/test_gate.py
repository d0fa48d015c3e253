"""The gate: limits on strangers, in total, per address and per second."""

from __future__ import annotations

from atoll.peer.net.gate import PENDING_MAX, PENDING_PER_ADDRESS_MAX, STARTS_PER_ADDRESS_MAX, Gate


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
