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
from typing import Any, TypeVar

import numpy as np

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, SessionError
from atoll.optim.manifest import Manifest
from atoll.optim.spec import RunSpec, check_same
from atoll.optim.swarm_calls import Call, Gather, Reduce, Step, answer
from atoll.optim.swarm_state import Submitted, SwarmState
from atoll.optim.swarm_vectors import Look, SwarmGossip, SwarmVectors
from atoll.optim.turns import WORKERS_MAX, Turns
from atoll.peer.session import Outcome, Reduced, vector_of

__all__ = ["Swarm", "SwarmSession"]

T = TypeVar("T")


class Swarm:
    """``workers`` of one run; ``sessions`` are theirs, in the order in which their parts are added.

    ``encoded_bytes``: what all of them together would have sent so far, encoded, without headers:
    pseudo-gradients and results of a butterfly, vectors and objects of their own collectives, and
    vectors that they fetch from each other; not what they begin with.
    """

    def __init__(self, workers: int) -> None:
        if not 0 < workers <= WORKERS_MAX:
            raise ConfigError(f"a swarm of {workers} workers", fix=f"give it 1 to {WORKERS_MAX}")
        self.vectors = SwarmVectors([f"worker-{number}" for number in range(workers)])
        self.sessions = [SwarmSession(self, number) for number in range(workers)]
        self.encoded_bytes = 0
        self.round = 0  # of the run
        self.turns = Turns(workers, self._meet)
        self._state: SwarmState | None = None

    def run(self, train: Callable[[SwarmSession], T]) -> list[T]:
        """What ``train`` returns, of each worker. The first exception in any of them ends all, and
        is raised here."""
        self.vectors.begin()
        return self.turns.run([partial(self._train, train, session) for session in self.sessions])

    def _train(self, train: Callable[[SwarmSession], T], session: SwarmSession) -> T:
        try:
            return train(session)
        finally:
            self.vectors.ended(session.peer_name)

    @property
    def state(self) -> SwarmState:
        """The run's, after its last round. SessionError before the first worker has attached."""
        if self._state is None:
            raise SessionError("no worker has attached yet", fix="call run() first")
        return self._state

    def attach(self, spec: RunSpec, manifest: Manifest, initial: Callable[[F32], None]) -> None:
        if self._state is None:
            self._state = SwarmState(spec, manifest, initial)
            self.round += 1
        check_same((spec, manifest), (self._state.spec, self._state.manifest), "swarm")

    def _meet(self) -> None:
        """Of all that wait. Those whose loops have ended are no part of it any more. Who looks for
        vectors comes first; the others go on waiting, because those may yet join them."""
        waiting = [s for s in self.sessions if s.call is not None]
        looking = [s for s in waiting if isinstance(s.call, Look)]
        answers, sent_bytes = answer([s.call for s in looking or waiting if s.call is not None])
        self.encoded_bytes += sent_bytes
        self.round += not looking
        names = tuple(session.peer_name for session in waiting)
        for session, given in zip(looking or waiting, answers, strict=True):
            if not looking or given is not None:
                session.call, session.answer, session.present = None, given, names


class SwarmSession(SwarmGossip):
    """What ``atoll.peer.session.Session`` offers to training loops; it says what each does."""

    run = "swarm"
    epoch = 0  # nothing is ever undone

    def __init__(self, swarm: Swarm, number: int) -> None:
        self._swarm, self.number = swarm, number
        self.vectors = swarm.vectors
        self.peer_name = self.vectors.names[number]
        self.round = self.operations = 0
        self.reported: dict[str, float] = {}
        self.call: Call | None = None  # what it waits for ...
        self.answer: Any = None  # ... what has become of it ...
        self.present: tuple[str, ...] = ()  # ... and of whose calls
        self._region: F32 | None = None
        self._submitted: dict[int, Step] = {}  # by fragment

    def attach(self, spec: RunSpec, manifest: Manifest, initial: Callable[[F32], None]) -> None:
        self._swarm.attach(spec, manifest, initial)
        self._region = np.zeros(manifest.elements, np.float32)

    def submit(self, fill: Callable[[F32], None], weight: float, fragment: int = 0) -> None:
        if self._region is None:
            raise SessionError("submit before attach", fix="call attach first")
        fill(self._region)
        submitted = Submitted(self.number, self._region, float(weight))
        self._submitted[fragment] = Step(self._swarm.state, submitted, fragment)

    def wait(self, fragment: int = 0) -> Outcome:
        share, numbers = self._meet(self._submitted.pop(fragment))
        peers = tuple(self.vectors.names[number] for number in numbers)
        return Outcome("committed", self._swarm.round, waited_s=0.0, share=share, peers=peers)

    def next_fragment(self) -> int:
        fragments, begun = self._swarm.state.spec.fragments, self._swarm.state.round - 1
        for later in range(begun, begun + fragments):
            if later % fragments not in self._submitted:
                return later % fragments
        return begun % fragments

    def replicas(self) -> int:
        return len(self._swarm.sessions)

    def pull(self, read: Callable[[F32], None]) -> int:
        shown = self._swarm.state.theta.view()
        shown.flags.writeable = False
        read(shown)
        self.round = self._swarm.round
        return self.round

    def barrier(self) -> tuple[str, ...]:
        self._meet(Gather(b"", "barrier()"))
        return self.present

    def all_gather(self, data: bytes) -> list[tuple[str, bytes]]:
        every = self._meet(Gather(bytes(data), "all_gather()"))
        return list(zip(self.present, every, strict=True))

    def all_reduce(self, tensor: Any, op: str = "mean", *, codec: str = "float32") -> Reduced:
        vector = vector_of(tensor)
        flat = np.empty(vector.elements, np.float32)
        vector.write(flat)
        reduced = self._meet(Reduce(flat, op, codec))
        return Reduced(vector.read(reduced), self.present, self.round)

    def check(self) -> None:
        """There is no daemon that could die."""

    def report(self, **metrics: float) -> None:
        self.reported = {name: float(value) for name, value in metrics.items()}

    def close(self) -> None:
        """Its part of the next rounds is over when its loop has ended."""

    @property
    def _waits(self) -> bool:
        return self.call is not None

    def _meet(self, call: Call) -> Any:
        self.call = call
        while self._waits:
            self._swarm.turns.wait(self.number)
        self.round = self._swarm.round
        self.operations += isinstance(call, Gather | Reduce)
        return self.answer
