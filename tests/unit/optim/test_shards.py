"""Samples for torch: loaders and their workers, samplers, iterables, files; in a swarm."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from atoll.collectives.errors import ConfigError, DataError, RemoteProtocolError
from atoll.data import Shards
from atoll.optim import AsyncDiLoCo, DiLoCo, NoLoCo, StreamingDiLoCo, Swarm
from atoll.optim.deck import Deal, Seat
from atoll.optim.experimental import CO2
from atoll.optim.method import Method
from atoll.optim.shards import packed, unpacked
from atoll.optim.swarm import SwarmSession

H = 3
ASYNC = partial(AsyncDiLoCo, outer_delay=1)


class Numbers:
    """A data set whose samples are their indices."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> int:
        return index


class Loop:
    """A small training loop; ``seen`` has what each step was taken with."""

    def __init__(self, session: SwarmSession, method: Callable[..., Any] = DiLoCo) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(2, 1)
        self.inner = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.outer = method(self.net, self.inner, H, session)
        self.seen: list[list[int]] = []

    def step(self, indices: Iterable[int]) -> None:
        self.seen.append([int(index) for index in indices])
        self.net(torch.ones(1, 2)).sum().backward()
        self.inner.step()
        self.inner.zero_grad()

    def run(self, batches: Iterable[Any], steps: int = 10**6) -> Loop:
        for batch in batches:
            self.step(batch)
            if len(self.seen) == steps:
                break
        return self

    @property
    def used(self) -> Counter[int]:
        return Counter(index for batch in self.seen for index in batch)


def alone(work: Callable[[SwarmSession], Any]) -> Any:
    (found,) = Swarm(1).run(work)
    return found


def numbers(samples: int) -> Any:
    return Numbers(samples)


@pytest.mark.parametrize("method", [DiLoCo, CO2])
def test_three_trainers_share_an_epoch(method: type[Method]) -> None:
    def train(session: SwarmSession) -> tuple[Loop, Shards]:
        loop = Loop(session, method)
        shards = Shards(1_000, loop.outer)
        return loop.run(shards.loader(numbers(1_000), 4), 60), shards

    found = Swarm(3).run(train)
    used = sum((loop.used for loop, _ in found), Counter[int]())
    assert used.total() == 3 * 60 * 4
    assert set(used.values()) == {1}
    rounds = 20 if method is DiLoCo else 19  # of CO2 one is under way
    assert {shards.deals for _, shards in found} == {1 + rounds}


def test_it_takes_how_many_samples_there_are() -> None:
    dataset: Any = [1, 2, 3]
    nobody: Any = None
    with pytest.raises(ConfigError, match=r"Shards\(len\(dataset\), outer\)"):
        Shards(dataset, nobody)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_through_all_epochs(workers: int) -> None:
    def train(session: SwarmSession) -> tuple[Loop, Shards]:
        loop = Loop(session)
        shards = Shards(103, loop.outer, epochs=3, block=4)
        return loop.run(shards.loader(numbers(103), 5, num_workers=workers)), shards

    loop, shards = alone(train)
    assert loop.used == Counter(dict.fromkeys(range(103), 3))
    assert shards.is_over
    assert shards.epoch == 2
    assert list(map(len, loop.seen)) == [5] * 61 + [4]


def test_a_sampler_for_a_loader_of_ones_own() -> None:
    def train(session: SwarmSession) -> Loop:
        loop = Loop(session)
        shards = Shards(50, loop.outer, epochs=2)
        loader = DataLoader(
            numbers(50), batch_size=4, sampler=shards.sampler(ahead=2 * 4), num_workers=1
        )
        return loop.run(loader)

    assert alone(train).used == Counter(dict.fromkeys(range(50), 2))


def in_order(indices: range) -> list[int]:
    assert indices.start % 8 == 0 or len(indices) < 8
    return list(indices)


@pytest.mark.parametrize("workers", [0, 2])
def test_blocks_are_read_whole_by_workers(workers: int) -> None:
    def train(session: SwarmSession) -> Loop:
        loop = Loop(session)
        shards = Shards(100, loop.outer, epochs=2, block=8)
        samples = shards.iterable(in_order, workers=workers)
        return loop.run(DataLoader(samples, batch_size=5))

    assert alone(train).used == Counter(dict.fromkeys(range(100), 2))


def test_a_block_with_another_number_of_samples_is_refused() -> None:
    def train(session: SwarmSession) -> None:
        loop = Loop(session)
        list(Shards(100, loop.outer, block=8).iterable(lambda indices: [1, 2]))

    with pytest.raises(DataError, match="gave 2 samples"):
        alone(train)


def test_what_a_loop_has_not_taken_is_dealt_again() -> None:
    """It ends in the middle, with batches of workers under way."""

    def train(session: SwarmSession) -> Loop:
        loop = Loop(session)
        shards = Shards(90, loop.outer, epochs=1)
        loop.run(shards.loader(numbers(90), 4, num_workers=2), 7)
        return loop.run(shards.loader(numbers(90), 4))

    assert alone(train).used == Counter(range(90))


@pytest.mark.parametrize("steps", [4, 5])
def test_what_a_loader_of_ones_own_has_fetched_ahead_is_dealt_again(steps: int) -> None:
    def train(session: SwarmSession) -> Loop:
        loop = Loop(session)
        shards = Shards(96, loop.outer, epochs=1)
        ahead = DataLoader(
            numbers(96), batch_size=4, sampler=shards.sampler(ahead=2 * 2 * 4), num_workers=2
        )
        loop.run(ahead, steps)
        return loop.run(shards.loader(numbers(96), 4))

    assert alone(train).used == Counter(range(96))


def test_what_is_drawn_where_drawing_fails_is_dealt_again() -> None:
    def train(session: SwarmSession) -> tuple[list[int], list[int]]:
        shards = Shards(40, session)
        drawn = iter(shards.sampler(ahead=3))
        had = [next(drawn) for _ in range(5)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shards, "draw", lambda most: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                next(drawn)
        shards.deal()
        return had, list(islice(shards.sampler(), 38))

    had, more = alone(train)
    assert Counter(had[:2] + more) == Counter(range(40))


def test_what_was_drawn_of_a_hand_that_is_given_up_is_not_told_of_the_next() -> None:
    """Give up a hand, as where the others have made several deals without this trainer."""

    def train(session: SwarmSession) -> list[int]:
        shards = Shards(40, session, epochs=1)
        drawn: Any = iter(shards.sampler(ahead=8))
        for _ in range(10):
            next(drawn)
        shards._reset()
        drawn.close()
        assert shards._lost == []
        return list(shards.sampler())

    assert Counter(alone(train)) == Counter(range(40))


@pytest.mark.parametrize(("trainers", "every"), [(1, 7), (2, 5), (3, 5)])
def test_the_end_of_the_samples_is_not_lost_where_loops_break(trainers: int, every: int) -> None:
    """Break every so many batches: workers have drawn the end by then, and is_over is asked."""

    def train(session: SwarmSession) -> Loop:
        loop = Loop(session)
        shards = Shards(96, loop.outer, epochs=1)
        batches = shards.loader(numbers(96), 4, num_workers=2)
        while not shards.is_over:
            loop.run(batches, len(loop.seen) + every)
        loop.outer.finish()
        return loop

    used = sum((loop.used for loop in Swarm(trainers).run(train)), Counter[int]())
    assert used == Counter(range(96))


def test_a_saved_trainer_goes_on_in_the_middle_of_its_hand(tmp_path: Path) -> None:
    def train(session: SwarmSession) -> list[Loop]:
        loop = Loop(session)
        shards = Shards(90, loop.outer, epochs=1)
        loop.run(shards.loader(numbers(90), 4, num_workers=2), 2 * H + 1)
        loop.outer.save(tmp_path, shards=shards)
        again = Loop(session)
        shards = Shards(90, again.outer, epochs=1)
        assert again.outer.load(tmp_path, shards=shards)
        return [loop, again.run(shards.loader(numbers(90), 4))]

    first, second = alone(train)
    assert first.used + second.used == Counter(range(90))


def test_all_that_were_killed_go_on_from_their_file(tmp_path: Path) -> None:
    """A step that was in no round is done again, and nothing else."""
    found = []
    for steps in (2 * H + 1, 10**6):  # each time another swarm

        def train(session: SwarmSession, steps: int = steps) -> Loop:
            loop = Loop(session)
            shards = Shards(90, loop.outer, epochs=1, folder=tmp_path)
            return loop.run(shards.loader(numbers(90), 4), steps)

        found.append(alone(train))
    committed = Counter(index for batch in found[0].seen[: 2 * H] for index in batch)
    assert committed + found[1].used == Counter(range(90))
    assert not list(tmp_path.glob("*.writing"))


def test_a_file_of_other_samples_is_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(session: SwarmSession, samples: int = 90) -> Loop:
        loop = Loop(session)
        shards = Shards(samples, loop.outer, epochs=1, folder=tmp_path)
        return loop.run(shards.loader(numbers(samples), 4))

    alone(train)
    (tmp_path / "shards.json").write_text("{")
    assert alone(train).used == Counter(range(90))
    assert "cannot be read" in capsys.readouterr().err
    assert alone(lambda session: train(session, 40)).used == Counter(range(40))
    assert "is of other samples (90 samples, block=1" in capsys.readouterr().err


def test_steps_that_are_given_up_are_taken_with_their_samples_again() -> None:
    def train(session: SwarmSession) -> tuple[Loop, int]:
        loop = Loop(session)
        shards = Shards(60, loop.outer, epochs=1)
        batches = iter(shards.loader(numbers(60), 4))
        for _ in range(H + 2):
            loop.step(next(batches))
        loop.outer._take_run()  # as after its daemon got another state
        given_up = len(loop.seen)
        return loop.run(batches), given_up

    loop, given_up = alone(train)
    lost = Counter(index for batch in loop.seen[H:given_up] for index in batch)
    assert loop.used == Counter(range(60)) + lost


def test_so_they_are_with_batches_under_way() -> None:
    def train(session: SwarmSession) -> tuple[Loop, int]:
        loop = Loop(session)
        shards = Shards(60, loop.outer, epochs=1)
        loop.run(shards.loader(numbers(60), 4, num_workers=2), H + 2)
        loop.outer._take_run()
        return loop.run(shards.loader(numbers(60), 4)), H + 2

    loop, given_up = alone(train)
    lost = Counter(index for batch in loop.seen[H:given_up] for index in batch)
    assert loop.used == Counter(range(60)) + lost


def test_a_loop_without_rounds_deals_by_hand() -> None:
    def train(session: SwarmSession) -> list[int]:
        shards, used = Shards(100, session), []
        for step, batch in enumerate(shards.loader(numbers(100), 2)):
            used += batch.tolist()
            if step % 4 == 3:
                shards.deal()
            if step == 19:
                break
        return used

    first, second = Swarm(2).run(train)
    assert len({*first, *second}) == 80


def test_who_leaves_wants_no_hand() -> None:
    def train(session: SwarmSession) -> tuple[Any, Shards]:
        loop = Loop(session)
        shards = Shards(60, loop.outer)
        loop.run(shards.loader(numbers(60), 4), H - 1)
        shards.round_over("committed", counted=True, leaves=session.number == 0)
        return shards.draw(1), shards

    (nothing, _), (something, shards) = Swarm(2).run(train)
    assert nothing is None
    assert something is not None
    assert [seat.name for seat in shards._deal.seats] == ["worker-1"]


@pytest.mark.parametrize("method", [ASYNC, StreamingDiLoCo, NoLoCo])
def test_methods_without_rounds_of_all_are_refused(method: Callable[..., Any]) -> None:
    def train(session: SwarmSession) -> None:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        inner = torch.optim.SGD(net.parameters(), lr=0.01)
        Shards(10, method(net, inner, 4, session))

    with pytest.raises(ConfigError, match="Shards deals in a collective of all trainers"):
        alone(train)


def test_arguments_that_cannot_be_are_refused() -> None:
    def train(session: SwarmSession) -> None:
        outer = Loop(session).outer
        for refused in (
            lambda: Shards(10, outer, epochs=0),
            lambda: Shards(0, outer),
            lambda: Shards(10, outer).deal(),
            lambda: Shards(10, outer).loader(numbers(10), 0),
            lambda: Shards(10, outer).load_state_dict(Shards(11, outer).state_dict()),
        ):
            with pytest.raises(ConfigError):
                refused()

    alone(train)


def test_the_name_is_there_without_an_import_of_its_own() -> None:
    code = (
        "import sys, atoll; assert 'torch' not in sys.modules; "
        "assert atoll.data.Shards.__name__ == 'Shards'; assert 'data' in dir(atoll)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_deal_travels_as_a_vector() -> None:
    deal = Deal(7, 3, 100, ((1, 2), (5, 90)), (Seat("ä", 7, ((3, 4),)), Seat("b", 6)))
    assert unpacked(packed(deal)) == deal
    for values in (packed(deal)[:-1], packed(deal) * -1, packed(deal) * 0):
        with pytest.raises(RemoteProtocolError):
            unpacked(values)
