"""Run many workers of a run in one process, without daemons and without a network.

    swarm = Swarm(8)
    losses = swarm.run(train)     # train(session) is the loop that would run on one machine

``train`` is called once for each worker, with a session that takes the place of what
``atoll.connect()`` gives: the optimizers of this package run on it unchanged. A round is made of
the arithmetic that daemons use: the same pseudo-gradients, codecs, order of additions and outer
step. So three workers here, and three peers whose ids are in the order of these workers, end with
the same bits. What is missing is time, traffic and trouble.

    Swarm(3, speeds=[1.0, 1.0, 0.25])    # local steps per second

Speeds matter where a round is of whoever has submitted (``RunSpec.is_asynchronous``): the next one
is of the worker that comes first by its own clock, and of those who come at the same time. Rounds
themselves take no time.

Workers take turns (turns.py), so all of them may use one device and one source of data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, SessionError
from atoll.optim.manifest import Manifest
from atoll.optim.run_spec import FROZEN, RunSpec, check_collectives, check_same
from atoll.optim.swarm_calls import FoldCall, GatherCall, StepCall, SwarmCall, answer
from atoll.optim.swarm_state import SwarmState, SwarmSubmission
from atoll.optim.swarm_vectors import Look, SwarmGossip, SwarmVectors
from atoll.optim.trainer import say
from atoll.optim.turns import WORKERS_MAX, WorkerTurns
from atoll.peer.client.flat_vectors import vector_of
from atoll.peer.client.session import Outcome
from atoll.peer.client.session_ops import Reduced

T = TypeVar("T")


class Swarm:
    """Run the workers of one run in one process.

    ``sessions`` are those of the ``workers``, in the order in which their parts are added.
    ``speeds``: of each, in local steps per second; one, if nothing is said.

    ``encoded_bytes``: what all of them together would have sent so far, encoded, without headers:
    pseudo-gradients and results of a butterfly, vectors and objects of their own collectives, and
    vectors that they fetch from each other; not what they begin with.
    """

    def __init__(self, workers: int, speeds: Sequence[float] = ()) -> None:
        if not 0 < workers <= WORKERS_MAX:
            raise ConfigError(f"a swarm of {workers} workers", fix=f"give it 1 to {WORKERS_MAX}")
        speeds = tuple(speeds) or (1.0,) * workers
        if len(speeds) != workers or not all(0 < speed < math.inf for speed in speeds):
            raise ConfigError(
                f"speeds {str(speeds)[:80]} of {workers} workers",
                fix="give each worker a positive number of steps per second",
            )
        self.vectors = SwarmVectors([f"worker-{number}" for number in range(workers)])
        self.sessions = [SwarmSession(self, n, speed) for n, speed in enumerate(speeds)]
        self.encoded_bytes = 0
        self.round = 0  # the run's
        self.turns = WorkerTurns(workers, self._meet)
        self._state: SwarmState | None = None

    def run(self, train: Callable[[SwarmSession], T]) -> list[T]:
        """Return what ``train`` returns, for each worker.

        The first exception in any of them ends all, and is raised here.
        """
        self.vectors.begin()
        return self.turns.run([partial(self._train, train, session) for session in self.sessions])

    def _train(self, train: Callable[[SwarmSession], T], session: SwarmSession) -> T:
        try:
            return train(session)
        finally:
            self.vectors.ended(session.peer_name)

    @property
    def state(self) -> SwarmState:
        """Return the run's state after its last round.

        SessionError before the first worker has attached.
        """
        if self._state is None:
            raise SessionError("no worker has attached yet", fix="call run() first")
        return self._state

    def attach(
        self,
        spec: RunSpec,
        manifest: Manifest,
        initial: Callable[[F32], None],
        frozen: str = FROZEN[0],
    ) -> None:
        if spec.min_trainers > len(self.sessions):
            raise ConfigError(
                f"min_trainers is {spec.min_trainers}, and the swarm has {len(self.sessions)}",
                fix="give it as many workers as a round needs",
            )
        if self._state is None:
            self._state = self.new_state(spec, manifest, initial)
            self.round += 1
        run = self._state.spec, self._state.manifest
        if warning := check_same((spec, manifest), run, "swarm", frozen):
            say(warning)

    def new_state(
        self, spec: RunSpec, manifest: Manifest, initial: Callable[[F32], None]
    ) -> SwarmState:
        """Return the run's state, made when the first worker attaches.

        A test bench has one whose workers lie.
        """
        return SwarmState(spec, manifest, initial)

    def check_collectives(self) -> None:
        """Raise ConfigError if the run has no collectives."""
        if self._state is not None:
            check_collectives(self._state.spec)

    def _meet(self) -> None:
        """Answer the calls of workers that wait.

        Those whose loops have ended are no part of it any more. Those that look for vectors come
        first; the others go on waiting, because those may yet join them.
        """
        waiting = [s for s in self.sessions if s.call is not None]
        looking = [s for s in waiting if isinstance(s.call, Look)]
        meeting = looking or self._arrived(waiting)
        answers, sent_bytes = answer([s.call for s in meeting if s.call is not None])
        self.encoded_bytes += sent_bytes
        self.round += not looking
        names = tuple(session.peer_name for session in waiting)
        for session, given in zip(meeting, answers, strict=True):
            if not looking or given is not None:
                session.call, session.answer, session.present = None, given, names

    def _arrived(self, waiting: list[SwarmSession]) -> list[SwarmSession]:
        """Return the workers whose round is next.

        One that has been answered comes again at a later time than this, so nobody else can come
        before those that wait.
        """
        if self._state is None or not self._state.spec.is_asynchronous:
            return waiting
        first_s = min(session.clock() for session in waiting)
        return [session for session in waiting if session.clock() == first_s]


class SwarmSession(SwarmGossip):
    """Offer training loops what ``atoll.peer.client.session.Session`` does, which explains each
    call."""

    run = "swarm"
    epoch = 0  # nothing is ever undone

    def __init__(self, swarm: Swarm, number: int, speed: float = 1.0) -> None:
        self._swarm, self.number, self.speed = swarm, number, speed
        self._local_steps = 0
        self.vectors = swarm.vectors
        self.peer_name = self.vectors.names[number]
        self.round = self.operations = 0
        self.reported: dict[str, float] = {}
        self.call: SwarmCall | None = None  # what it waits for ...
        self.answer: Any = None  # ... what has become of it ...
        self.present: tuple[str, ...] = ()  # ... and of whose calls
        self._region: F32 | None = None
        self._submitted: dict[int, StepCall] = {}  # by fragment

    def attach(
        self,
        spec: RunSpec,
        manifest: Manifest,
        initial: Callable[[F32], None],
        frozen: str = FROZEN[0],
    ) -> None:
        self._swarm.attach(spec, manifest, initial, frozen)
        self._region = np.zeros(manifest.elements, np.float32)

    def submit(self, fill: Callable[[F32], None], weight: float, fragment: int = 0) -> None:
        if self._region is None:
            raise SessionError("submit before attach", fix="call attach first")
        fill(self._region)
        self._local_steps += 1
        state = self._swarm.state
        spec = state.spec  # as among peers; here all have founded the run
        alike = spec.probation > 0 or (spec.audit and weight > 0)
        submitted = SwarmSubmission(self.number, self._region, 1.0 if alike else float(weight))
        step = StepCall(state, submitted, len(self._swarm.sessions), fragment)
        self._submitted[fragment] = step

    def wait(self, fragment: int = 0) -> Outcome:
        share, numbers = self._meet(self._submitted.pop(fragment))
        peers = tuple(self.vectors.names[number] for number in numbers)
        number, count = self._swarm.round, len(peers)
        return Outcome("committed", number, waited_s=0.0, share=share, peers=peers, count=count)

    def next_fragment(self) -> int:
        fragments, begun = self._swarm.state.spec.fragments, self._swarm.state.round - 1
        for later in range(begun, begun + fragments):
            if later % fragments not in self._submitted:
                return later % fragments
        return begun % fragments

    def replicas(self) -> int:
        return len(self._swarm.sessions)

    def first_rank(self, value: float) -> float:
        return value

    def pull(self, read: Callable[[F32], None]) -> int:
        shown = self._swarm.state.theta.view()
        shown.flags.writeable = False
        read(shown)
        self.round = self._swarm.round
        return self.round

    def clock(self) -> float:
        """Return the seconds that this worker has trained, at its speed.

        Each ``check()`` and ``submit()`` is the end of a local step, as it is in the methods that
        wait for rounds.
        """
        return self._local_steps / self.speed

    def barrier(self) -> tuple[str, ...]:
        self._operate(GatherCall(b"", "barrier()"))
        return self.present

    def all_gather(self, data: bytes) -> list[tuple[str, bytes]]:
        every = self._operate(GatherCall(bytes(data), "all_gather()"))
        return list(zip(self.present, every, strict=True))

    def all_reduce(self, tensor: Any, op: str = "mean", *, codec: str = "float32") -> Reduced:
        vector = vector_of(tensor)
        flat = np.empty(vector.elements, np.float32)
        vector.write(flat)
        reduced = self._operate(FoldCall(flat, op, codec))
        return Reduced(vector.read(reduced), self.present, self.round)

    def check(self) -> None:
        """Count a local step; there is no daemon that could die."""
        self._local_steps += 1

    def report(self, **metrics: float) -> None:
        self.reported = {name: float(value) for name, value in metrics.items()}

    def observe(self, **figures: Any) -> None:
        """Keep the last of these figures."""
        plain = {n: v.detach() if hasattr(v, "detach") else v for n, v in figures.items()}
        self.reported |= {name: float(value) for name, value in plain.items()}

    def close(self) -> None:
        """Do nothing: its part of the next rounds is over when its loop has ended."""

    def _operate(self, call: GatherCall | FoldCall) -> Any:
        self._swarm.check_collectives()
        return self._meet(call)

    @property
    def _waits(self) -> bool:
        return self.call is not None

    def _meet(self, call: SwarmCall) -> Any:
        self.call = call
        while self._waits:
            self._swarm.turns.wait(self.number)
        self.round = self._swarm.round
        self.operations += isinstance(call, GatherCall | FoldCall)
        return self.answer
