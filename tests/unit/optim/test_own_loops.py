"""What loops of one's own begin with, in a swarm: enough trainers, and one state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atoll.collectives.errors import (
    CollectiveMismatchError,
    CollectiveMissedError,
    ConfigError,
    TooFewPeersError,
)
from atoll.optim.swarm import Swarm, SwarmSession
from atoll.peer.client.own_loops import HAS, LACKS, Found, OwnLoops, ReducedValue


def test_all_begin_with_the_state_of_the_first() -> None:
    def train(session: SwarmSession) -> tuple[bool, list[float]]:
        weights = torch.full((2, 3), float(session.number), dtype=torch.bfloat16)
        bias = np.full(4, 10.0 + session.number, np.float32)
        replaced = session.share([weights, bias], at_least=3)
        assert not session.share([weights, bias])  # nobody lacks anything
        return replaced, [*weights.flatten().tolist(), *bias.tolist()]

    found = Swarm(3).run(train)
    assert [replaced for replaced, _ in found] == [False, True, True]
    assert [values for _, values in found] == [[0.0] * 6 + [10.0] * 4] * 3


def test_a_newcomer_gets_what_one_of_the_others_has() -> None:
    def train(session: SwarmSession) -> float:
        state = torch.tensor([float(session.number)])
        session.has_state = session.number > 0  # as if 0 had come late
        session.share([state])
        return state.item()

    assert Swarm(3).run(train) == [1.0, 1.0, 1.0]


def test_a_gather_waits_for_enough() -> None:
    def train(session: SwarmSession) -> Found:
        return session.gather(b"%d" % session.number, at_least=2)

    assert [data for _, data in Swarm(2).run(train)[0]] == [b"0", b"1"]
    with pytest.raises(TooFewPeersError, match="1 trainer of 2 are here"):
        Swarm(1).run(lambda session: session.gather(at_least=2, wait_s=0.0))
    with pytest.raises(ConfigError, match="at_least=0"):
        Swarm(1).run(lambda session: session.gather(at_least=0))


class Script(OwnLoops):
    """A session whose gathers come to what is written down: flags of others, or an error."""

    peer_name = "me"

    def __init__(self, *gathers: Found | Exception) -> None:
        self._gathers = iter(gathers)
        self.given: list[bytes] = []

    def all_gather(self, data: bytes) -> Found:
        self.given.append(data)
        found = next(self._gathers)
        if isinstance(found, Exception):
            with self._in_step():
                raise found
        return [("me", data), *found]

    def all_reduce(
        self, tensor: np.ndarray, op: str = "mean", *, codec: str = "float32"
    ) -> ReducedValue:
        assert not tensor.any()  # the other one is the donor
        return Sum(np.array([7.0], np.float32))


class Sum:
    peers = ("me", "other")

    def __init__(self, value: np.ndarray) -> None:
        self.value = value


@pytest.mark.parametrize("error", [CollectiveMismatchError, CollectiveMissedError])
def test_who_was_out_of_step_says_so_and_takes_the_state_again(error: type[Exception]) -> None:
    has, lacks = HAS + b" 1", LACKS + b" 1"
    session = Script([("other", has)], error("they have taken a step"), [("other", has)])
    session.has_state, state = True, np.zeros(1, np.float32)
    assert not session.share([state])
    assert session.share([state])
    assert session.given == [has, has, lacks]
    assert state == 7.0


def test_an_owner_is_enough_for_a_newcomer() -> None:
    """Whatever it asks for: the others would go on without it."""
    session = Script([], [("other", HAS + b" 1")])
    assert session.share([np.zeros(1, np.float32)], at_least=3)
    assert session.given == [LACKS + b" 1"] * 2
