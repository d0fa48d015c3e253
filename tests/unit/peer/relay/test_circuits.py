"""Which circuits a relay carries: tokens, limits, and how each moves from state to state."""

from __future__ import annotations

import itertools

import pytest

from atoll.collectives.errors import LocalProtocolError
from atoll.peer.relay.circuits import (
    BULK_PER_PAIR_MAX,
    CIRCUIT_TRANSITIONS,
    CONTROL_PER_PAIR_MAX,
    JOINERS_MAX,
    PER_JOINER_MAX,
    PER_PEER_MAX,
    TO_JOINER_MAX,
    TOTAL_MAX,
    Circuit,
    CircuitState,
    CircuitTable,
    CircuitTrigger,
)
from atoll.peer.relay.messages import TOKEN_S

A, B, C = (name.encode() * 32 for name in "abc")


def asked(table: CircuitTable, *, bulk: bool = False, joiners: tuple[bytes, ...] = ()) -> Circuit:
    circuit = table.ask(A, B, 0.0, bulk=bulk, joiners=joiners)
    assert isinstance(circuit, Circuit)
    return circuit


@pytest.mark.parametrize(("state", "trigger"), [*itertools.product(CircuitState, CircuitTrigger)])
def test_a_circuit_moves_as_the_table_says_and_not_otherwise(
    state: CircuitState, trigger: CircuitTrigger
) -> None:
    circuit = Circuit(1, A, B, 1.0, bulk=False)
    circuit.state = state
    if (state, trigger) in CIRCUIT_TRANSITIONS:
        circuit.go(trigger)
        assert circuit.state is CIRCUIT_TRANSITIONS[state, trigger]
    else:
        with pytest.raises(LocalProtocolError):
            circuit.go(trigger)


def test_both_ends_come_with_tokens_of_their_own_once_each() -> None:
    table = CircuitTable()
    circuit = asked(table)
    first, second = circuit.tokens
    assert first != second
    assert table.come(second, 1.0) == (circuit, 1)
    assert circuit.state is CircuitState.HALF
    assert table.come(second, 1.0) is None, "again"
    assert table.come(first, 1.0) == (circuit, 0)
    assert circuit.state is CircuitState.JOINED
    assert table.come(bytes(32), 1.0) is None


def test_a_circuit_ends_when_an_end_does_not_come_in_time() -> None:
    table = CircuitTable()
    late, half, joined = asked(table), asked(table), asked(table)
    table.come(half.tokens[0], 0.0)
    for token in joined.tokens:
        table.come(token, 0.0)
    assert table.expire(TOKEN_S - 0.1) == []
    assert table.expire(TOKEN_S) == [late, half]
    assert list(table) == [joined]
    assert table.come(late.tokens[0], 0.0) is None, "its tokens have gone with it"


def test_a_token_that_is_too_old_is_no_good_before_anybody_looks() -> None:
    table = CircuitTable()
    assert table.come(asked(table).tokens[0], TOKEN_S) is None


@pytest.mark.parametrize(
    ("bulk", "most"), [(False, CONTROL_PER_PAIR_MAX), (True, BULK_PER_PAIR_MAX)]
)
def test_a_pair_has_so_many_circuits_and_those_that_end_make_room(bulk: bool, most: int) -> None:
    table = CircuitTable()
    for _ in range(most):
        last = asked(table, bulk=bulk)
    refusal = table.ask(B, A, 0.0, bulk=bulk)  # the pair, whoever asks
    assert isinstance(refusal, str)
    assert str(most) in refusal
    assert table.end(last)
    assert not table.end(last), "it has ended"
    asked(table, bulk=bulk)


@pytest.mark.parametrize(("joiner", "most"), [(A, PER_JOINER_MAX), (B, TO_JOINER_MAX)])
def test_somebody_who_joins_asks_for_few_and_so_does_one_peer_for_those_to_it(
    joiner: bytes, most: int
) -> None:
    table = CircuitTable()
    for _ in range(most):
        last = asked(table, bulk=True, joiners=(joiner,))
    assert f"{most} circuits" in str(table.ask(A, B, 0.0, bulk=True, joiners=(joiner,)))
    assert table.end(last)
    asked(table, bulk=True, joiners=(joiner,))


def test_who_asks_for_circuits_to_somebody_who_joins_does_not_keep_it_outside() -> None:
    table, joiner = CircuitTable(), b"j" * 32
    for asker in (A, B):
        while isinstance(table.ask(asker, joiner, 0.0, bulk=True, joiners=(joiner,)), Circuit):
            pass
    for peer in (A, C):
        assert isinstance(table.ask(joiner, peer, 0.0, bulk=False, joiners=(joiner,)), Circuit)
    assert isinstance(table.ask(C, joiner, 0.0, bulk=True, joiners=(joiner,)), Circuit)


def test_a_peer_and_a_relay_have_so_many() -> None:
    table = CircuitTable()
    others = (number.to_bytes(32, "big") for number in itertools.count())
    for peer in itertools.islice(others, PER_PEER_MAX):
        assert isinstance(table.ask(A, peer, 0.0, bulk=False), Circuit)
    assert "one peer" in str(table.ask(A, C, 0.0, bulk=False))
    while len(table) < TOTAL_MAX:
        table.ask(next(others), next(others), 0.0, bulk=False)
    refusal = table.ask(next(others), next(others), 0.0, bulk=False)
    assert refusal == f"the relay carries {TOTAL_MAX} circuits already"


def test_somebody_joins_a_member_that_has_many_circuits() -> None:
    table, joiner = CircuitTable(), b"j" * 32
    for number in range(2 * PER_JOINER_MAX):
        table.ask(A, number.to_bytes(32, "big"), 0.0, bulk=True)
    assert isinstance(table.ask(joiner, A, 0.0, bulk=False, joiners=(joiner,)), Circuit)


def test_those_that_join_take_no_place_of_members() -> None:
    table = CircuitTable()
    joiners = [number.to_bytes(32, "big") for number in range(JOINERS_MAX)]
    for joiner in joiners:
        assert isinstance(table.ask(joiner, A, 0.0, bulk=False, joiners=joiners), Circuit)
    refusal = table.ask(C, A, 0.0, bulk=False, joiners=(*joiners, C))
    assert refusal == f"the relay carries {JOINERS_MAX} circuits of peers that join already"
    assert isinstance(table.ask(B, A, 0.0, bulk=False, joiners=joiners), Circuit)
    assert isinstance(table.ask(C, A, 0.0, bulk=False, joiners=(*joiners[1:], C)), Circuit), "in"


def test_nobody_has_a_circuit_to_itself() -> None:
    assert isinstance(CircuitTable().ask(A, A, 0.0, bulk=False), str)


def test_those_of_one_peer_are_found() -> None:
    table = CircuitTable()
    one = asked(table)
    other = table.ask(B, C, 0.0, bulk=True)
    assert table.of(A) == [one]
    assert table.of(B) == [one, other]
