"""What gathers are for, and long parts in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.adding import Adding, names
from harness.troubled_swarm import TroubledSwarm

from atoll.collectives.errors import CollectiveMissedError, RemoteProtocolError
from atoll.optim import QSDP, GradientAverage, Swarm
from atoll.optim.every_step.exchange import PART_BYTES_MAX
from atoll.optim.every_step.gather import GatheredPart, Pieces, gather_for
from atoll.optim.swarm import SwarmSession
from atoll.peer.membership.operations import pack_objects

STEPS, WORKERS = 6, 3


PIECE = 800  # what is said in the beginning has less


class Long(Adding):
    """Each trainer gives a part of another length: four pieces the first, two the third."""

    def step(self) -> list[str]:
        mine = self.peer.peer_name
        given = self._gather_step(mine.encode() * 100 * (4 - int(mine[-1])))
        with torch.no_grad():
            for name, data in given:
                assert data == name.encode() * 100 * (4 - int(name[-1]))
                self.weight += 1 + int(name[-1])
        self.steps += 1
        return [name for name, _ in given]


@pytest.fixture
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.optim.every_step.gather.GATHERED_BYTES_MAX", PIECE + 6)


def train_long(session: Any) -> tuple[float, int]:
    method = Long(session)
    while method.steps < 30:  # long after the trouble
        method.step()
    return float(method.weight.detach()[0]), method.steps


@pytest.mark.usefixtures("_small_pieces")
def test_long_parts_come_in_as_many_calls_as_the_longest_needs():
    def train(session: SwarmSession) -> list[int]:
        method, calls = Long(session), []
        for _ in range(3):
            before = session.operations
            assert method.step() == (names(0, 1, 2) if calls else names(0))
            calls.append(session.operations - before)
        return calls[1:]

    assert Swarm(WORKERS).run(train) == [[4, 4]] * WORKERS


@pytest.mark.usefixtures("_small_pieces")
@pytest.mark.parametrize("worker", [0, 2])
@pytest.mark.parametrize("number", range(1, 60, 2))
def test_pieces_that_somebody_misses_are_no_step(worker: int, number: int):
    """Each step is of all pieces of those who are in it, or of none of theirs."""
    found = TroubledSwarm(WORKERS, {(worker, number), (worker, number + 3)}).run(train_long)
    assert len(set(found)) == 1


@pytest.mark.usefixtures("_small_pieces")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("after", range(4))
def test_who_leaves_between_two_pieces_is_not_counted(first: bool, after: int):
    """The loop of the one whose part is the longest, or the shortest, ends there."""
    leaver = 0 if first else WORKERS - 1

    class Leaving:
        def __init__(self, session: SwarmSession) -> None:
            self._session, self.left = session, 10**6

        def __getattr__(self, name: str) -> Any:
            return getattr(self._session, name)

        def all_gather(self, data: bytes) -> list[tuple[str, bytes]]:
            self.left -= 1
            if self.left < 0:
                raise InterruptedError
            return self._session.all_gather(data)

    def train(session: SwarmSession) -> tuple[float, list[list[str]]]:
        leaving = Leaving(session)
        method: Any = Long(leaving)
        counted = []
        while method.steps < STEPS:
            if session.number == leaver and method.steps == 3:
                leaving.left = after
            try:
                counted.append(method.step())
            except InterruptedError:
                break
        return float(method.weight.detach()[0]), counted

    found = Swarm(WORKERS).run(train)
    stayed = [found[n] for n in range(WORKERS) if n != leaver]
    assert stayed[0] == stayed[1]
    rest = [name for name in names(0, 1, 2) if name != f"worker-{leaver}"]
    assert stayed[0][1] == [names(0)] + [names(0, 1, 2)] * 2 + [rest] * 3
    assert len(found[leaver][1]) == 3


@pytest.mark.usefixtures("_small_pieces")
@pytest.mark.parametrize("until", range(14, 26))
def test_who_comes_between_two_pieces_is_a_newcomer(until: int):
    def train(session: Any) -> tuple[float, int]:
        if session.number == 1:
            session.away(until=until)
        return train_long(session)

    assert len(set(TroubledSwarm(WORKERS).run(train))) == 1


def test_more_trainers_have_smaller_pieces():
    for trainers in (1, 2, 7, 8, 9, 100, 1024):
        flags, piece = Pieces(bytes(PART_BYTES_MAX)).next(trainers)
        objects = [bytes(6) + piece] * trainers + [bytes(6)] * (1024 - trainers)  # who is coming
        assert len(pack_objects(objects)) == sum(4 + len(data) for data in objects)
        assert flags == 4
        assert trainers > 8 or len(piece) + 6 > 64_000
    assert Pieces(b"short").next(1024) == (0, b"short")


def test_many_trainers_have_long_parts_too():
    """Of twelve together they are more than fits into one call; newcomers give nothing."""

    def train(session: SwarmSession) -> list[int]:
        method = Adding(session)
        found = []
        for _ in range(2):
            given = method._gather_step(bytes([session.number]) * 60_000)
            method.steps += 1
            assert all(data == bytes([int(name[7:])]) * 60_000 for name, data in given)
            found.append(len(given))
        return found

    assert Swarm(12).run(train) == [[1, 12]] * 12


def test_compressors_have_long_parts():
    """Of a matrix with as many bytes as two calls take."""

    def train(session: SwarmSession) -> tuple[torch.Tensor, int]:
        net = torch.nn.Linear(300, 300)
        with torch.no_grad():
            net.weight.fill_(0.0)
        inner = torch.optim.SGD(net.parameters(), lr=1.0)
        with GradientAverage(net, inner, session, compressor=QSDP(bits=8)) as outer:
            while outer.steps < 2:
                net.weight.grad = torch.full((300, 300), 1.0 + session.number)
                before = session.operations
                inner.step()
        return net.weight.detach().clone(), session.operations - before

    (first, calls), (second, _) = Swarm(2).run(train)
    assert torch.equal(first, second)
    assert calls == 3  # two gathers, and a sum of what is no matrix
    torch.testing.assert_close(first, torch.full((300, 300), -1.5 - 1.5), rtol=0.02, atol=0)


@pytest.mark.parametrize(
    ("data", "times"), [(b"", 1), (bytes(PART_BYTES_MAX + 1), 1), (bytes(PART_BYTES_MAX), 2)]
)
def test_pieces_without_an_end_are_refused(data: bytes, times: int):
    pieces, part = Pieces(b""), GatheredPart("a", 1, 4, True, data)
    for _ in range(times - 1):
        assert pieces.add([part])
    with pytest.raises(RemoteProtocolError, match="what a gives has pieces without an end"):
        pieces.add([part])


# ---------------------------------------------------------------- purposes


class Scripted:
    """A session in which the others have given these."""

    peer_name, round = "me", 6

    def __init__(self, before: list[bytes], after: list[bytes]) -> None:
        self.before, self.after = before, after

    def all_gather(self, data: bytes) -> list[tuple[str, bytes]]:
        every = [*self.before, data, *self.after]
        return [(f"peer-{i}", part) for i, part in enumerate(every)]


def gathered(before: list[bytes], after: list[bytes]) -> list[tuple[str, bytes]]:
    session: Any = Scripted(before, after)
    return gather_for(ord("s"), session, b"mine")


def part(purpose: bytes, data: bytes = b"") -> bytes:
    return purpose + bytes([0, 7, 0, 0, 0]) + data


def test_what_is_for_something_else_is_left_out():
    found = gathered([part(b"o", b"other"), part(b"s", b"one")], [part(b"s", b"two")])
    assert found == [("peer-1", b"one"), ("peer-2", b"mine"), ("peer-3", b"two")]
    assert gathered([], [part(b"o")]) == [("peer-0", b"mine")]  # of two the first


@pytest.mark.parametrize(
    ("before", "after"), [([part(b"o")], []), ([], [part(b"o"), part(b"o", b"a")])]
)
def test_who_gathers_for_something_else_than_most_has_missed_it(before, after):
    with pytest.raises(CollectiveMissedError, match="something else"):
        gathered(before, after)


def test_parts_without_a_purpose_or_kind_are_refused():
    with pytest.raises(RemoteProtocolError, match="peer-1"):
        gathered([], [b""])
    for wrong in (b"s", b"s\x03abc", b"s\x02abc", b"s\x10abcdef"):

        def train(session: Any, wrong: bytes = wrong) -> None:
            method = Adding(session)
            if session.number:
                session.all_gather(wrong)
            else:
                method.step()

        with pytest.raises(RemoteProtocolError, match="worker-1 gave"):
            Swarm(2).run(train)
