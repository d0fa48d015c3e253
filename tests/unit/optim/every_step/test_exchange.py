"""What methods of every step exchange: sums, bytes, who counts, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from harness.troubled_swarm import TroubledSession, TroubledSwarm

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, RemoteProtocolError, StateError
from atoll.optim import Swarm
from atoll.optim.every_step.every_step import EveryStep
from atoll.optim.every_step.exchange import PART_BYTES_MAX
from atoll.optim.model_io import ModelVector
from atoll.optim.run_spec import RunSpec


class Summing(EveryStep):
    """Each step of it is one exchange, without a model's gradients."""

    def __init__(self, session: Any) -> None:
        net = torch.nn.Linear(3, 1)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        spec = RunSpec(method="gradient_average", sync_every=1, codec="float32")
        terms = {"check_every": 100, "buffers": True, "frozen": "refuse"}
        super().__init__(ModelVector(net), (inner,), session, spec, **terms)
        self.forgotten = 0

    def step(self, values: F32, codec: str = "float32") -> tuple[list[float], int]:
        found = self._exchange(values, codec)
        self.steps += 1
        return found.total.tolist(), found.count

    def gather(self, data: bytes) -> list[tuple[str, bytes, bool]]:
        found = self._whole(lambda exchange: exchange.gather(data))
        return [(given.name, given.data, given.counts) for given in found]

    def _forget(self) -> None:
        self.forgotten += 1


def test_sums_and_bytes_of_those_that_count() -> None:
    """All begin with the same state, so all give something to the first step."""

    def work(session: Any) -> list[Any]:
        mine = Summing(session)
        values = torch.full((5,), 1.0 + session.number).numpy()
        first = [mine.step(values), mine.step(values), mine.step(values, "int8")]
        return [*first, mine.gather(b"%d" % session.number), mine.forgotten]

    for found in Swarm(3).run(work):
        first, second, third, gathered, forgotten = found
        assert first == ([6.0] * 5, 3)
        assert second == ([6.0] * 5, 3)
        assert third[0] == pytest.approx([6.0] * 5, rel=1e-6)
        assert gathered == [(f"worker-{n}", b"%d" % n, True) for n in range(3)]
        assert forgotten == 0


@pytest.mark.parametrize(
    "codec", ["bfloat16", "fp8_e4m3", "fp4_e2m1", "fp4_e3m0", "int2", "dynamic8"]
)
def test_no_codec_changes_how_many_there_are(codec: str) -> None:
    def work(session: Any) -> list[int]:
        mine = Summing(session)
        values = torch.linspace(-1, 1, 100).numpy()
        return [mine.step(values, codec)[1] for _ in range(3)]

    assert Swarm(5).run(work) == [[5, 5, 5]] * 5
    assert Swarm(7).run(work)[0] == [7, 7, 7]


def test_what_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match="bytes from each trainer at every step; 16,777,216 fit"):
        Swarm(1).run(lambda session: Summing(session).gather(bytes(PART_BYTES_MAX + 1)))


def test_always_missed_is_an_error() -> None:
    swarm = TroubledSwarm(2, missed=[(1, number) for number in range(200)])

    def work(session: TroubledSession) -> int | str:
        mine = Summing(session)
        try:
            for _ in range(60):
                mine.step(torch.ones(2).numpy())
        except StateError as error:
            return str(error)
        return mine.steps

    first, second = swarm.run(work)
    assert first == 60
    assert "step 0 came about in 50 tries: the round went on" in second


HEAD = b"p\x010000"  # of a newcomer that says what it has


def test_malformed_bytes_of_others_are_refused() -> None:
    """They say what they like where a trainer gathers for the first time."""
    spec = RunSpec(method="gradient_average", sync_every=1, codec="float32").to_wire()
    wrong = [
        (b"", "no head"),
        (b"x", "no head"),
        (b"x\xff0000", "no head"),
        (HEAD, "cannot be read"),
        (HEAD + b"[]", "cannot be read"),
        (HEAD + b"[" * 20_000, "cannot be read"),
        (HEAD + json.dumps([True, 0, {"method": "x"}, ""]).encode(), "specification"),
        (HEAD + json.dumps([True, -1, spec, ""]).encode(), "cannot be read"),
        (HEAD + json.dumps([True, "1", spec, ""]).encode(), "cannot be read"),
        (HEAD + json.dumps([1, 1, spec, ""]).encode(), "cannot be read"),
    ]
    attached = attach_arguments()
    for data, why in wrong:

        def work(session: Any, data: bytes = data) -> None:
            if session.number:
                session.attach(*attached)
                session.all_reduce(torch.ones(16).numpy(), "sum")
                session.all_gather(data)
            else:
                Summing(session).step(torch.ones(4).numpy())

        with pytest.raises(RemoteProtocolError, match=why):
            Swarm(2).run(work)


def attach_arguments() -> tuple[Any, ...]:
    class Attached:
        number, round, peer_name = 0, 0, "me"

        @property
        def channel(self) -> Attached:
            return self

        def attach(self, *arguments: Any) -> None:
            self.arguments = arguments

    session = Attached()
    Summing(session)
    return session.arguments
