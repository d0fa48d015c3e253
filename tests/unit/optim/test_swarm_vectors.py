"""Vectors that workers of a swarm hand to each other."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.collectives.codecs import get_codec
from atoll.collectives.errors import CodecError, ConnectError, RoundTimeoutError, StateError
from atoll.optim import Swarm
from atoll.optim.swarm import SwarmSession

ELEMENTS = 5000  # two chunks


def other(session: SwarmSession) -> str:
    return session.members().names[1 - session.number]


def given(number: int) -> np.ndarray:
    return np.linspace(-1, number, ELEMENTS, dtype=np.float32)


def fetch(session: SwarmSession, peer: str, number: int) -> np.ndarray:
    asked = session.ask_vector(peer, "v", number, ELEMENTS)
    asked.wait(0.0)
    return asked.read().copy()


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_each_gets_what_the_other_sees(codec: str) -> None:
    def one(session: SwarmSession) -> tuple[np.ndarray, np.ndarray]:
        values = given(1 + session.number)
        session.publish("v", 1, values, codec)
        assert session.newest(other(session), "v") == 1
        np.testing.assert_array_equal(fetch(session, session.peer_name, 1), values)
        return values, fetch(session, other(session), 1)

    swarm = Swarm(2)
    (first, of_second), (second, of_first) = swarm.run(one)
    np.testing.assert_array_equal(of_first, first)
    np.testing.assert_array_equal(of_second, second)
    assert (codec == "float32") == np.array_equal(first, given(1))
    assert abs(swarm.encoded_bytes - 2 * get_codec(codec).encoded_bytes(ELEMENTS)) < 64
    assert swarm.round == 0  # none of it is a round of the run


def test_who_is_early_waits_while_others_get_further() -> None:
    def one(session: SwarmSession) -> None:
        if session.number == 0:
            np.testing.assert_array_equal(fetch(session, other(session), 3), given(3))
            return
        for number in (1, 2, 3):
            session.newest(other(session), "v")  # a meeting, in which the other one still waits
            session.publish("v", number, given(number))

    Swarm(2).run(one)


def test_when_nobody_gets_further_all_are_told() -> None:
    def one(session: SwarmSession) -> int:
        with pytest.raises(RoundTimeoutError, match=f"v 1 of {other(session)} has not been"):
            fetch(session, other(session), 1)
        session.publish("v", 1, given(1))
        return fetch(session, other(session), 1).size

    assert Swarm(2).run(one) == [ELEMENTS] * 2


def test_what_is_not_kept_or_will_never_come_is_gone() -> None:
    def one(session: SwarmSession) -> None:
        if session.number == 0:
            for number in (1, 2, 5):
                session.publish("v", number, given(number))
            return
        np.testing.assert_array_equal(fetch(session, other(session), 2), given(2))
        for number in (1, 3, 6):  # replaced, left out, and its publisher has ended
            with pytest.raises(StateError, match=f"v {number} of worker-0 .* newest is 5"):
                fetch(session, other(session), number)
        with pytest.raises(StateError, match="not waited for"):
            session.ask_vector(other(session), "v", 5, ELEMENTS).read()
        with pytest.raises(ConnectError, match="nobody is not in the swarm"):
            session.newest("nobody", "v")
        with pytest.raises(CodecError, match="NaN"):
            session.publish("v", 1, np.full(3, np.nan, np.float32), "int8")

    Swarm(2).run(one)


def test_who_looks_for_a_vector_comes_before_a_barrier() -> None:
    """The other one may yet come to the barrier, which is of all."""

    def one(session: SwarmSession) -> tuple[str, ...]:
        session.publish("v", 1, given(1))
        for _ in range(session.number):
            fetch(session, other(session), 1)
        return session.barrier()

    assert Swarm(2).run(one) == [("worker-0", "worker-1")] * 2
    session = Swarm(2).sessions[0]
    assert session.members() == Swarm(2).sessions[1].members()
