"""Let workers take turns: threads of which one runs at a time, in an order that never varies.

A worker goes on until it waits for the others. Then the next one has its turn; when all have come
to wait, or have ended, the last of them lets ``meet`` do what they wait for, and the first goes on.
Each finds the global generators of random numbers (torch, numpy, Python) as it left them, at first
as they were when ``run`` was called: it draws what it would draw in a process of its own.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch

WORKERS_MAX = 1024  # each has a thread; a run has as many members at most
T = TypeVar("T")


class WorkerTurns:
    """Run workers in threads that take turns.

    ``meet`` is called in the thread of the last worker to come.
    """

    def __init__(self, workers: int, meet: Callable[[], None]) -> None:
        self._meet = meet
        self._workers = range(workers)
        self._turn = [threading.Semaphore(0) for _ in self._workers]
        self._waiting: set[int] = set()
        self._ended: set[int] = set(self._workers)
        self._random: list[tuple[Any, ...]] = []
        self._failed: BaseException | None = None
        self._device: int | None = None  # which accelerator the caller has chosen, if any

    def run(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Run each of ``works``, and return the result of each.

        If one raises, the others end where they wait, and it is raised.
        """
        before = _random_state()
        self._device = torch.cuda.current_device() if _uses_cuda() else None
        self._random = [before] * len(self._workers)
        self._waiting, self._ended, self._failed = set(), set(), None
        results: list[T | None] = [None] * len(self._workers)
        threads = [
            threading.Thread(
                target=self._work, args=(n, works[n], results), name=f"worker-{n}", daemon=True
            )
            for n in self._workers
        ]
        for thread in threads:
            thread.start()
        self._turn[0].release()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # an interrupt: whose turn it is goes on until it waits
            self._failed = self._failed or error
            for thread in threads:
                thread.join()
        _set_random_state(before)
        if self._failed is not None:
            raise self._failed
        return cast(list[T], results)

    def wait(self, worker: int) -> None:
        """Wait, as a worker in its turn, until the meeting is over."""
        self._waiting.add(worker)
        self._random[worker] = _random_state()
        self._pass_on(worker)
        self._begin(worker)

    def _work(self, worker: int, work: Callable[[], T], results: list[T | None]) -> None:
        try:
            self._begin(worker)
            if self._device is not None:
                torch.cuda.set_device(self._device)  # which is each thread's own
            results[worker] = work()
        except _Over:
            pass
        except BaseException as error:  # of any kind: nobody else would hear of it
            self._failed = self._failed or error
        finally:
            self._ended.add(worker)
            self._pass_on(worker)

    def _begin(self, worker: int) -> None:
        self._turn[worker].acquire()
        if self._failed is not None:
            raise _Over
        _set_random_state(self._random[worker])

    def _pass_on(self, worker: int) -> None:
        """Pass the turn to the next worker after ``worker`` that can go on."""
        if self._failed is None and len(self._waiting) + len(self._ended) == len(self._workers):
            self._hold_meeting()
            worker = -1
        stopped = self._ended if self._failed is not None else self._ended | self._waiting
        ahead = [n for n in self._workers if n not in stopped]
        if ahead:
            self._turn[min(ahead, key=lambda n: (n <= worker, n))].release()

    def _hold_meeting(self) -> None:
        if not self._waiting:
            return  # all have ended
        try:
            self._meet()
        except BaseException as error:
            self._failed = error
        self._waiting.clear()


class _Over(BaseException):
    """End a worker when another one has failed; no `except Exception` of a user stops it."""


def _random_state() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state() if _uses_cuda() else None
    return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()


def _set_random_state(state: tuple[Any, ...]) -> None:
    cpu, cuda, numpy_state, python_state = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
    np.random.set_state(numpy_state)
    random.setstate(python_state)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
