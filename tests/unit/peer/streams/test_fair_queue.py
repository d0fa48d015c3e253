"""Whose frame goes next: by urgency, then by waiting, and nobody for ever."""

from __future__ import annotations

import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.peer.streams.fair_queue import LAST, PASSED_MAX, FairQueue

WAIT_S = 30.0


class Queue:
    """Threads that wait for a turn while another one has it, and the order in which they get it."""

    def __init__(self) -> None:
        self.turns = FairQueue()
        self.order: list[str] = []
        self.threads: list[threading.Thread] = []

    def wait(self, name: str, urgency: int) -> None:
        before = len(self.turns._waiting)
        thread = threading.Thread(target=self._take, args=(name, urgency))
        self.threads.append(thread)
        thread.start()
        deadline_s = time.monotonic() + WAIT_S
        while len(self.turns._waiting) == before:
            assert time.monotonic() < deadline_s
            time.sleep(0.0005)

    def _take(self, name: str, urgency: int) -> None:
        with self.turns.turn(urgency):
            self.order.append(name)

    def join(self) -> list[str]:
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        return self.order


def test_a_free_one_is_had_at_once() -> None:
    turns = FairQueue()
    for urgency in (5, 1, LAST):
        with turns.turn(urgency):
            assert turns._held
    assert not turns._held


def test_a_round_that_waits_is_seen_and_a_donor_is_not() -> None:
    queue = Queue()
    with queue.turns.turn(LAST):
        assert not queue.turns.holds_up_a_round
        queue.wait("donor", LAST)
        assert not queue.turns.holds_up_a_round
        queue.wait("round", 7)
        assert queue.turns.holds_up_a_round
    queue.join()
    assert not queue.turns.holds_up_a_round


@settings(max_examples=20)
@given(st.lists(st.integers(1, 3), max_size=PASSED_MAX))
def test_the_oldest_round_goes_first_and_equals_by_waiting(urgencies: list[int]) -> None:
    queue = Queue()
    with queue.turns.turn(1):
        for number, urgency in enumerate(urgencies):
            queue.wait(f"{urgency} {number:02}", urgency)
    assert queue.join() == sorted(queue.order)


def test_whoever_is_last_is_passed_over_so_often_and_no_more() -> None:
    queue = Queue()
    with queue.turns.turn(1):
        queue.wait("learner", LAST)
        for number in range(2 * PASSED_MAX):
            queue.wait(f"round {number}", 1)
    assert queue.join().index("learner") == PASSED_MAX


def test_an_error_gives_the_turn_back() -> None:
    turns = FairQueue()
    try:
        with turns.turn(1):
            raise OSError
    except OSError:
        pass
    with turns.turn(1):
        pass


def test_two_threads_never_have_it_at_once() -> None:
    turns, inside, worst = FairQueue(), [], []

    def work(urgency: int) -> None:
        for _ in range(100):
            with turns.turn(urgency):
                inside.append(urgency)
                worst.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work, args=(urgency,)) for urgency in (1, 1, 2, LAST)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert max(worst) == 1
    assert len(worst) == 400
