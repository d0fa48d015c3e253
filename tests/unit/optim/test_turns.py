"""Workers take turns: who runs when, with which random numbers, and what ends them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from atoll.optim.turns import WorkerTurns


class Story:
    """What happens, in order. A worker waits as often as its number says, more or less."""

    def __init__(self, workers: int) -> None:
        self.said: list[str] = []
        self.turns = WorkerTurns(workers, lambda: self.said.append("meet"))

    def tell(self, worker: int, rounds: int) -> Callable[[], int]:
        def work() -> int:
            for number in range(rounds):
                self.said.append(f"{worker}.{number}")
                self.turns.wait(worker)
            self.said.append(f"{worker} ends")
            return worker

        return work


def test_the_order_never_varies() -> None:
    for _ in range(20):
        story = Story(3)
        assert story.turns.run([story.tell(n, 2) for n in range(3)]) == [0, 1, 2]
        assert story.said == [
            *("0.0", "1.0", "2.0", "meet"),
            *("0.1", "1.1", "2.1", "meet"),
            *("0 ends", "1 ends", "2 ends"),
        ]


def test_who_has_ended_is_not_waited_for() -> None:
    story = Story(3)
    story.turns.run([story.tell(0, 1), story.tell(1, 0), story.tell(2, 3)])
    assert story.said == [
        *("0.0", "1 ends", "2.0", "meet", "0 ends"),
        *("2.1", "meet", "2.2", "meet", "2 ends"),
    ]


def test_each_draws_what_it_would_draw_alone() -> None:
    turns = WorkerTurns(2, lambda: None)

    def draw(worker: int) -> list[float]:
        random.seed(worker)
        np.random.seed(worker)
        torch.manual_seed(worker)
        drawn = []
        for _ in range(3):
            drawn += [random.random(), float(np.random.rand()), torch.rand(()).item()]
            turns.wait(worker)
        return drawn

    torch.manual_seed(7)
    expected_after = torch.rand(()).item()
    torch.manual_seed(7)
    both = turns.run([lambda: draw(0), lambda: draw(1)])
    assert torch.rand(()).item() == expected_after, "the caller's are as they were"
    turns = WorkerTurns(1, lambda: None)
    assert turns.run([lambda: draw(0)])[0] == both[0]
    assert both[0] != both[1]


def test_an_error_in_one_ends_all_and_is_raised() -> None:
    story = Story(4)
    ended: list[int] = []

    def endless(worker: int) -> Callable[[], int]:
        def work() -> int:
            try:
                while True:
                    try:
                        story.turns.wait(worker)
                    except Exception as error:  # as a careless loop has it
                        story.said.append(str(error))
            finally:
                ended.append(worker)

        return work

    def fails() -> int:
        story.turns.wait(2)
        raise ValueError("of worker 2")

    with pytest.raises(ValueError, match="of worker 2"):
        story.turns.run([endless(0), endless(1), fails, story.tell(3, 9)])
    assert sorted(ended) == [0, 1]
    assert not [thread for thread in threading.enumerate() if "worker-" in thread.name]
    assert story.turns.run([story.tell(n, 0) for n in range(4)]) == [0, 1, 2, 3], "it may run again"


def test_an_error_of_the_meeting_is_raised_too() -> None:
    def meet() -> None:
        raise OSError("nobody came")

    turns = WorkerTurns(2, meet)
    with pytest.raises(OSError, match="nobody came"):
        turns.run([lambda: turns.wait(0), lambda: turns.wait(1)])
