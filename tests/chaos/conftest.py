"""Fleets that the tests of a module share: forming one takes longer than most faults.

A test ends with ``assert_healthy``. If it did not get there the fleet is ended, its logs are shown
and the next test gets a new one: a failure does not spread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from harness.health import assert_healthy
from harness.netns import Net
from harness.processes import Fleet

FOUR = "abcd"
FIVE = "abcde"


class Keeper:
    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._kept: dict[str, Fleet] = {}

    def lend(self, kind: str, make: Callable[[Fleet], None], net: str = "") -> Iterator[Fleet]:
        run = self._kept.get(kind)
        if run is None:
            run = Fleet(self._folders.mktemp(kind), Net(net) if net else None)
            self._kept[kind] = run
            make(run)
        run.healthy = False
        yield run
        if not run.healthy:
            print(run.report())
            self._kept.pop(kind).close()

    def close(self) -> None:
        for run in self._kept.values():
            run.close()


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    made = Keeper(tmp_path_factory)
    yield made
    made.close()


@pytest.fixture
def four(keeper: Keeper) -> Iterator[Fleet]:
    """Four daemons on loopback, each with a trainer; rounds commit."""
    yield from keeper.lend("four", lambda run: trains(run, FOUR))


@pytest.fixture
def five(keeper: Keeper) -> Iterator[Fleet]:
    """Five daemons with trainers, each on a host of its own; ``run.net`` has the faults."""
    yield from keeper.lend("five", lambda run: trains(run, FIVE), FIVE)


def trains(run: Fleet, names: str, elements: float = 2e5) -> None:
    run.form(names)
    for name in names:
        run.train(name, elements)
    assert_healthy(run)
