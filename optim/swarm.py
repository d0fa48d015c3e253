"""Many workers of a run in one process, without daemons and without a network.

    swarm = Swarm(8)
    losses = swarm.run(train)     # train(session) is the loop that would run on one machine

``train`` is called once for each worker, with a session that takes the place of what
``atoll.connect()`` gives: the optimizers of this package run on it unchanged. A round is made of
the arithmetic that daemons use: the same pseudo-gradients, codecs, order of additions and outer
step. So three workers here, and three peers whose ids are in the order of these workers, end with
the same bits. What is missing is time, traffic and trouble.

Workers take turns (turns.py), so all of them may use one device and one source of data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np

from atoll.collectives.chunks import encoded_layout, grid_for
from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, SessionError
from atoll.collectives.together import reduce_together
from atoll.optim.manifest import Manifest, pseudo_gradient
from atoll.optim.outer import OuterStep
from atoll.optim.spec import RunSpec, check_same
from atoll.optim.turns import WORKERS_MAX, Turns
from atoll.peer.session import Outcome

__all__ = ["Swarm", "SwarmSession"]

T = TypeVar("T")


class Swarm:
    """``workers`` of one run; ``sessions`` are theirs, in the order in which their parts are added.

    ``encoded_bytes``: what all of them together would have sent in pseudo-gradients and results of
    a butterfly, without headers.
    """

    def __init__(self, workers: int) -> None:
        if not 0 < workers <= WORKERS_MAX:
            raise ConfigError(f"a swarm of {workers} workers", fix=f"give it 1 to {WORKERS_MAX}")
        self.sessions = [SwarmSession(self, number) for number in range(workers)]
        self.encoded_bytes = 0
        self.turns = Turns(workers, self._make_round)
        self._state: SwarmState | None = None

    def run(self, train: Callable[[SwarmSession], T]) -> list[T]:
        """What ``train`` returns, of each worker. The first exception in any of them ends all, and
        is raised here."""
        return self.turns.run([partial(train, session) for session in self.sessions])

    @property
    def state(self) -> SwarmState:
        """The run's, after its last round. SessionError before the first worker has attached."""
        if self._state is None:
            raise SessionError("no worker has attached yet", fix="call run() first")
        return self._state

    def attach(self, spec: RunSpec, manifest: Manifest, initial: Callable[[F32], None]) -> None:
        if self._state is None:
            self._state = SwarmState(spec, manifest, initial)
        check_same((spec, manifest), (self._state.spec, self._state.manifest), "swarm")

    def _make_round(self) -> None:
        """Of all that wait. Those whose loops have ended are no part of it any more."""
        state = self.state
        waiting = [s for s in self.sessions if s.submitted is not None]
        nbytes = state.commit([s.submitted for s in waiting if s.submitted is not None])
        self.encoded_bytes += 2 * (len(waiting) - 1) * nbytes
        for session in waiting:
            session.submitted = None


class SwarmState:
    """The parameters and momentum of a run, float32[elements] each, and the step of a round."""

    def __init__(self, spec: RunSpec, manifest: Manifest, initial: Callable[[F32], None]) -> None:
        if spec.fragments > 1:
            raise ConfigError("a swarm has no fragments yet", fix="leave `fragments` at 1")
        self.spec, self.manifest = spec, manifest
        self.grid = grid_for(manifest.elements)
        self.theta: F32 = np.zeros(manifest.elements, np.float32)
        self.momentum: F32 = np.zeros_like(self.theta)
        self.round = 1  # the first one gives a run its parameters
        self._step = OuterStep(spec, self.grid.chunk_elements)
        self._layout = encoded_layout(self.grid, self._step.codec)
        initial(self.theta)

    def commit(self, submitted: list[tuple[F32, float]]) -> int:
        """The round of these parameters and weights; how many bytes its encoded result has."""
        weights = [weight for _, weight in submitted]
        sources = [partial(self._delta, values) for values, _ in submitted]
        result = reduce_together(self._step.codec, self.grid, weights, sources)
        for chunk in range(self.grid.count):
            start, end = self._layout.slice(chunk)
            lo, hi = self.grid.bounds(chunk)
            pair = self.theta[lo:hi], self.momentum[lo:hi]
            self._step(result[start:end], pair, pair)
        self.round += 1
        return result.nbytes

    def _delta(self, submitted: F32, chunk: int, out: F32) -> None:
        lo, hi = self.grid.bounds(chunk)
        pseudo_gradient(self.theta[lo:hi], submitted[lo:hi], out, self.manifest, lo, hi)


class SwarmSession:
    """What an optimizer uses of ``atoll.peer.session.Session``, which says what each does."""

    run = "swarm"
    epoch = 0  # nothing is ever undone

    def __init__(self, swarm: Swarm, number: int) -> None:
        self._swarm, self.number = swarm, number
        self.peer_name = f"worker-{number}"
        self.round = 0
        self.submitted: tuple[F32, float] | None = None  # parameters and weight
        self.reported: dict[str, float] = {}
        self._region: F32 | None = None

    def attach(self, spec: RunSpec, manifest: Manifest, initial: Callable[[F32], None]) -> None:
        self._swarm.attach(spec, manifest, initial)
        self._region = np.empty(manifest.elements, np.float32)

    def submit(self, fill: Callable[[F32], None], weight: float) -> None:
        if self._region is None:
            raise SessionError("submit before attach", fix="call attach first")
        fill(self._region)
        self.submitted = self._region, float(weight)

    def wait(self) -> Outcome:
        self._swarm.turns.wait(self.number)
        return Outcome("committed", self._swarm.state.round, waited_s=0.0)

    def pull(self, read: Callable[[F32], None]) -> int:
        shown = self._swarm.state.theta.view()
        shown.flags.writeable = False
        read(shown)
        self.round = self._swarm.state.round
        return self.round

    def check(self) -> None:
        """There is no daemon that could die."""

    def report(self, **metrics: float) -> None:
        self.reported = {name: float(value) for name, value in metrics.items()}

    def close(self) -> None:
        """Its part of the next rounds is over when its loop has ended."""
