"""A whole run inside one process: the daemon's arithmetic without a daemon or a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from atoll.collectives.codecs import get_codec
from atoll.optim.manifest import Manifest
from atoll.optim.outer_step import outer_step
from atoll.optim.pseudo_gradient import Writer, delta_source
from atoll.optim.run_spec import RunSpec, check_same
from atoll.peer.client.trainer_channel import Members, Outcome

F32 = NDArray[np.float32]
WAIT_S = 60.0  # no test comes near it; it turns a hang into a failure


class LocalRun:
    """The replicated state of a run of ``peers`` trainers that submit from their own threads.

    ``late`` names (peer, round) pairs: that submission comes after the round is closed. Rounds
    count from 1. ``reload`` names peers that get RELOAD instead of COMMITTED, once.
    """

    def __init__(self, peers: int = 1, late: Sequence[tuple[int, int]] = ()) -> None:
        self.late = set(late)
        self.reload: set[int] = set()
        self.round = 0
        self.epoch = 0  # a rollback raises it
        self.weights: list[dict[int, float]] = []  # of each round, what was counted
        self.spec: RunSpec | None = None
        self.submitted: dict[int, tuple[F32, float]] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.changed = threading.Condition()
        self.sessions = [LocalSession(self, i) for i in range(peers)]

    def found(self, spec: RunSpec, manifest: Manifest, write: Callable[[F32], None]) -> None:
        self.spec, self.manifest = spec, manifest
        self.theta = np.zeros(manifest.elements, np.float32)
        self.momentum = np.zeros_like(self.theta)
        write(self.theta)

    def commit(self) -> None:
        """Mean of the decoded pseudo-gradients in peer order, then the outer step."""
        assert self.spec is not None
        self.round += 1
        codec = get_codec(self.spec.codec)
        counted = {
            i: weight
            for i, (_, weight) in sorted(self.submitted.items())
            if (i, self.round) not in self.late
        }
        self.weights.append(counted)
        mean, delta = np.zeros_like(self.theta), np.empty_like(self.theta)
        encoded = np.empty(codec.encoded_bytes(delta.size), np.uint8)
        for i, weight in counted.items():
            source = delta_source(self.spec, self.manifest, self.theta, self.submitted[i][0], 0)
            for chunk in range(self.manifest.grid.count):
                source(chunk, delta[slice(*self.manifest.grid.bounds(chunk))])
            codec.encode(delta, encoded)
            codec.decode_add(encoded, weight / sum(counted.values()), mean)
        outer_step(
            self.spec.outer,
            self.theta,
            self.momentum,
            mean,
            lr=self.spec.outer_lr,
            mu=self.spec.outer_momentum,
            clip=self.spec.outer_clip,
            out_theta=self.theta,
            out_momentum=self.momentum,
            scratch=delta,
        )
        for i in self.submitted:
            kind = "committed" if i in counted else "missed"
            share = counted.get(i, 0.0) / sum(counted.values())
            kind = "reload" if i in self.reload else kind
            self.outcomes[i] = Outcome(kind, self.round, 0.5, share, count=len(counted))
        self.reload.clear()
        self.submitted.clear()


class LocalSession:
    """The trainer's interface of ``peer.session.Session``."""

    connection, is_stale = 0, False

    def __init__(self, run: LocalRun, index: int) -> None:
        self._run, self._index = run, index
        self.round = 0
        self.epoch = 0
        self.operations = 0
        self.peer_name = f"peer-{index}"
        self.published: dict[str, int] = {}
        self.closed = False
        self.reported: dict[str, float] = {}

    @property
    def channel(self) -> LocalSession:
        """It is its own."""
        return self

    def attach(
        self,
        spec: RunSpec,
        manifest: Manifest,
        initial: Callable[[F32], None],
        frozen: str = "refuse",
    ) -> None:
        with self._run.changed:  # or another thread would find a run without its parameters
            if self._run.spec is None:
                self._run.found(spec, manifest, initial)
        check_same((spec, manifest), (self._run.spec, self._run.manifest), "test", frozen)

    def submit(self, write: Writer, weight: float, fragment: int = 0) -> None:
        region = np.full(self._run.theta.size, np.nan, np.float32)
        write(region, 0)
        with self._run.changed:
            self._run.submitted[self._index] = region, weight
            if len(self._run.submitted) == len(self._run.sessions):
                self._run.commit()
                self._run.changed.notify_all()

    def check(self) -> None:
        """This run never dies."""

    def wait(self, fragment: int = 0) -> Outcome:
        with self._run.changed:
            assert self._run.changed.wait_for(lambda: self._index in self._run.outcomes, WAIT_S)
            return self._run.outcomes.pop(self._index)

    def next_fragment(self) -> int:
        return 0

    def replicas(self) -> int:
        return len(self._run.sessions)

    def first_rank(self, value: float) -> float:
        return value

    def pull(self, read: Callable[[F32], None]) -> int:
        shown = self._run.theta.view()
        shown.flags.writeable = False  # as a client's map of the daemon's memory is
        read(shown)
        self.round, self.epoch = self._run.round, self._run.epoch
        return self.round

    def members(self) -> Members:
        return Members(1, tuple(session.peer_name for session in self._run.sessions))

    def publish(self, name: str, number: int, values: F32, codec: str = "float32") -> None:
        self.published[name] = number

    def newest(self, peer: str, name: str) -> int:
        """Nobody hears of what others publish."""
        return 0

    def report(self, **metrics: float) -> None:
        self.reported = metrics

    def observe(self, **figures: float) -> None:
        self.reported = figures

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def local_run() -> type[LocalRun]:
    return LocalRun


@pytest.fixture
def in_threads() -> Callable[[Sequence[Callable[[], None]]], None]:
    """Run each function in a thread of its own; the first exception is raised here."""

    def run(functions: Sequence[Callable[[], None]]) -> None:
        errors: list[BaseException] = []

        def guarded(function: Callable[[], None]) -> None:
            try:
                function()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(f,), daemon=True) for f in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads)

    return run


@pytest.fixture(autouse=True)
def _quiet_torch() -> Iterator[None]:
    """One thread (the machine is shared) and the same random numbers in every test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
