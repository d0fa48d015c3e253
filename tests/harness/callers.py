"""Trainers that call collectives: sessions in threads of the test's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import atoll
from atoll.collectives.errors import CollectiveMissedError
from atoll.peer.client.session import Session
from harness.processes import WAIT_S, Fleet

__all__ = ["Callers", "callers"]

T = TypeVar("T")


class Callers:
    """One session for each of ``names``, each with a thread of its own."""

    def __init__(self, run: Fleet, names: str) -> None:
        self._run = run
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self.sessions: dict[str, Session] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> Session:
        self._threads[name] = ThreadPoolExecutor(1, thread_name_prefix=f"trainer-{name}")
        home = self._run.peers[name].home
        connected = self.start(name, lambda: atoll.connect(home, reconnect_s=0))
        session = self.sessions[name] = connected.result(WAIT_S)
        return session

    def start(self, name: str, work: Callable[[], T]) -> Future[T]:
        return self._threads[name].submit(work)

    def start_until_in(self, name: str, work: Callable[[], T]) -> Future[T]:
        """The same, and again where a round went on without it: on a machine that has no time for
        it a peer may be out of the group for a moment, and calls again as the error says."""

        def again() -> T:
            while True:
                try:
                    return work()
                except CollectiveMissedError:
                    continue

        return self.start(name, again)

    @property
    def names(self) -> dict[str, str]:
        """What everybody calls each of them."""
        return {name: session.peer_name for name, session in self.sessions.items()}

    def each_own(self, calls: Mapping[str, Callable[[Session], T]]) -> dict[str, T]:
        """Make these calls, by name, at once; what each gets."""
        made = {n: self.start(n, lambda n=n: calls[n](self.sessions[n])) for n in calls}
        return {name: future.result(WAIT_S) for name, future in made.items()}

    def each(self, call: Callable[[Session], T], names: Sequence[str] = "") -> dict[str, T]:
        """Make this call in all sessions at once; what each gets."""
        return self.each_own(dict.fromkeys(names or list(self.sessions), call))

    def meet(self) -> None:
        """Until all are attached: a barrier is of those who are there."""

        def together(session: Session) -> None:
            while len(session.barrier()) < len(self.sessions):
                """The same barrier shows everybody that everybody is there."""

        self.each(together)

    def end(self, name: str) -> None:
        session = self.sessions.pop(name)
        self._threads[name].submit(session.close).result(WAIT_S)
        self._threads.pop(name).shutdown()

    def close(self) -> None:
        for name in list(self.sessions):
            self.end(name)


@contextmanager
def callers(run: Fleet, names: str) -> Iterator[Callers]:
    made = Callers(run, names)
    try:
        yield made
    finally:
        made.close()
