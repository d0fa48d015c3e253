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
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from atoll.collectives.chunks import grid_for
from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.engine.reference import reduce_together
from atoll.collectives.errors import (
    CollectiveMismatchError,
    ConfigError,
    ConnectError,
    RoundTimeoutError,
    SessionError,
    StateError,
)
from atoll.optim.manifest import Manifest
from atoll.optim.pseudo_gradient import Writer
from atoll.optim.run_spec import (
    BLOB_BYTES_MAX,
    FROZEN,
    LENGTH_BYTES,
    RunSpec,
    check_collectives,
    check_same,
)
from atoll.optim.swarm_state import SwarmState, SwarmSubmission
from atoll.optim.turns import WORKERS_MAX, WorkerTurns
from atoll.peer.client.console import say
from atoll.peer.client.flat_vectors import vector_of
from atoll.peer.client.own_loops import OwnLoops
from atoll.peer.client.session import Reduced
from atoll.peer.client.trainer_channel import Members, Outcome

T = TypeVar("T")
KEPT = 2  # numbers of one name, as daemons keep them
Who = tuple[str, str]  # a worker, and a name


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


class SwarmSession(OwnLoops):
    """Offer training loops what ``atoll.peer.client.session.Session`` does, which explains each
    call."""

    run = "swarm"
    epoch = 0  # nothing is ever undone
    connection, is_stale = 0, False  # and nothing is lost

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

    @property
    def channel(self) -> Self:
        """Return this, which is its own channel."""
        return self

    def attach(
        self,
        spec: RunSpec,
        manifest: Manifest,
        initial: Callable[[F32], None],
        frozen: str = FROZEN[0],
    ) -> None:
        self._swarm.attach(spec, manifest, initial, frozen)
        self._region = np.zeros(manifest.elements, np.float32)

    def submit(self, write: Writer, weight: float, fragment: int = 0) -> None:
        if self._region is None:
            raise SessionError("submit before attach", fix="call attach first")
        state = self._swarm.state
        part = state.manifest.part_of(fragment, state.spec.fragments)
        write(self._region[part], part.start)
        self._local_steps += 1
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
        reduced = self._operate(ReduceCall(flat, op, codec))
        return Reduced(vector.read(reduced), self.present, self.round)

    def check(self) -> None:
        """Count a local step; there is no daemon that could die."""
        self._local_steps += 1

    def hurry(self, wait_s: float) -> AbstractContextManager[None]:
        """Do nothing: rounds take no time here."""
        return nullcontext()

    def end_within(self, wait_s: float) -> None:
        """Do nothing: there is no daemon that could end."""

    def report(self, **metrics: float) -> None:
        self.reported = {name: float(value) for name, value in metrics.items()}

    def observe(self, **figures: Any) -> None:
        """Keep the last of these figures."""
        plain = {n: v.detach() if hasattr(v, "detach") else v for n, v in figures.items()}
        self.reported |= {name: float(value) for name, value in plain.items()}

    def close(self) -> None:
        """Do nothing: its part of the next rounds is over when its loop has ended."""

    def members(self) -> Members:
        """Return all workers: those whose loops have ended too, like peers whose trainers have."""
        return Members(1, self.vectors.names)

    def publish(self, name: str, number: int, values: F32, codec: str = "float32") -> None:
        self.vectors.publish((self.peer_name, name), number, values, codec)

    def newest(self, peer: str, name: str) -> int:
        return self._look(peer, name, 0).newest

    def ask_vector(
        self, peer: str, name: str, number: int, elements: int, codec: str = "float32"
    ) -> SwarmAsked:
        return SwarmAsked(self, peer, name, number)

    # ------------------------------------------------------------ inside

    def _look(self, peer: str, name: str, number: int) -> SeenVector:
        if peer not in self.vectors.names:
            raise ConnectError(f"{peer} is not in the swarm")
        is_new = not self.vectors.newest((self.peer_name, name))
        look = Look(self.vectors, (peer, name), number, is_new)
        own = look.seen() if peer == self.peer_name else None
        return own or self._meet(look)

    def _operate(self, call: GatherCall | ReduceCall) -> Any:
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
        self.operations += isinstance(call, GatherCall | ReduceCall)
        return self.answer


class SwarmAsked:
    """Wait for a vector; ``atoll.peer.client.session.AskedVector`` says what each call does."""

    def __init__(self, session: SwarmSession, peer: str, name: str, number: int) -> None:
        self._session, self._place = session, (peer, name, number)
        self._values: F32 | None = None

    def __str__(self) -> str:
        return "{1} {2} of {0}".format(*self._place)

    def wait(self, timeout_s: float) -> None:
        seen = self._session._look(*self._place)
        if seen.state == "gone":
            raise StateError(f"{self} cannot be had: the newest is {seen.newest}")
        if seen.state == "late":
            raise RoundTimeoutError(f"{self} has not been published: all wait", phase="gossip")
        self._values = seen.values

    def read(self) -> F32:
        if self._values is None:
            raise StateError(f"{self} was not waited for")
        shown = self._values.view()
        shown.flags.writeable = False
        return shown

    def drop(self) -> None:
        self._values = None


class SwarmCall(ABC):
    """Describe what one worker waits for.

    ``alike``: what must be equal in the calls of all.
    """

    alike: str

    @abstractmethod
    def answers(self, calls: Sequence[Any]) -> tuple[list[Any], int]:
        """Answer ``calls``, this one among them, which are alike.

        Return what each worker gets, and how many bytes all of them together would have sent,
        without headers.
        """


@dataclass
class StepCall(SwarmCall):
    """Carry out a round of the optimizer, on ``state``, which ``replicas`` peers hold."""

    state: SwarmState
    submitted: SwarmSubmission
    replicas: int
    fragment: int = 0

    @property
    def alike(self) -> str:  # type: ignore[override]
        return f"a round of fragment {self.fragment}"

    def answers(self, calls: Sequence[StepCall]) -> tuple[list[tuple[float, list[int]]], int]:
        """Return each worker's share in the mean, and the workers whose parts are in it.

        The bytes that were sent come with them, as ``SwarmCall.answers`` says.
        """
        weights = [call.submitted.weight for call in calls]
        part, result = self.state.commit([call.submitted for call in calls], self.fragment)
        sent_bytes = _butterfly_bytes(calls, part, result)
        if self.state.spec.is_asynchronous:  # the others fetch it; else they have left
            sent_bytes += (self.replicas - len(calls)) * result
        numbers = [call.submitted.worker for call in calls if call.submitted.weight > 0]
        return [(weight / sum(weights), numbers) for weight in weights], sent_bytes


@dataclass
class GatherCall(SwarmCall):
    """Gather the bytes of all workers; it is a barrier where they are empty."""

    data: bytes
    alike: str

    def answers(self, calls: Sequence[GatherCall]) -> tuple[list[list[bytes]], int]:
        every = [call.data for call in calls]
        together = sum(LENGTH_BYTES + len(data) for data in every)
        if together > BLOB_BYTES_MAX:
            raise ConfigError(
                f"the objects of {len(every)} trainers have {together:,} bytes together, with their"
                f" lengths; {BLOB_BYTES_MAX:,} fit into one round",
                fix="gather less from each trainer, in several rounds",
            )
        return [every] * len(calls), (len(calls) - 1) * sum(map(len, every))


@dataclass
class ReduceCall(SwarmCall):
    """Reduce vectors, as daemons do it for ``session.all_reduce``."""

    flat: F32
    op: str
    codec: str

    @property
    def alike(self) -> str:  # type: ignore[override]
        return f'all_reduce() of {self.flat.size:,} elements, op="{self.op}", codec="{self.codec}"'

    def answers(self, calls: Sequence[ReduceCall]) -> tuple[list[F32], int]:
        codec, grid = get_codec(self.codec), grid_for(self.flat.size)

        def part(flat: F32, chunk: int, out: F32) -> None:
            np.copyto(out, flat[slice(*grid.bounds(chunk))])

        sources = [partial(part, call.flat) for call in calls]
        result = reduce_together(codec, grid, [1.0] * len(calls), sources, self.op)
        reduced: F32 = np.empty_like(self.flat)
        for chunk in range(grid.count):
            codec.decode(result.view(chunk), reduced[slice(*grid.bounds(chunk))])
        return [reduced] * len(calls), _butterfly_bytes(
            calls, result.array.nbytes, result.array.nbytes
        )


@dataclass
class Look(SwarmCall):
    """Look at what a worker has published.

    A worker that waits for a vector waits in the meetings of all, and stays there while others
    still get further. When nobody does, it is told that the vector comes too late: so time goes by
    in a swarm.

    ``number`` 0: only which is the newest. ``is_new``: the worker that looks has none of this name,
    so this is what it begins with, which is no traffic of the training.
    """

    vectors: SwarmVectors
    who: Who
    number: int
    is_new: bool
    alike = "for vectors"

    def answers(self, calls: Sequence[Look]) -> tuple[list[SeenVector | None], int]:
        """Return what each call sees, or None while it may still come; and the bytes sent.

        When it may still come for all of them, all are told that it comes too late.
        """
        seen = [call.seen() for call in calls]
        if not any(seen):
            late = [SeenVector("late", call.vectors.newest(call.who)) for call in calls]
            return [*late], 0
        pairs = zip(calls, seen, strict=True)
        sent = [c.who for c, s in pairs if s and s.values is not None and not c.is_new]
        return seen, sum(map(self.vectors.encoded_bytes, sent))

    def seen(self) -> SeenVector | None:
        newest, values = self.vectors.newest(self.who), self.vectors.find(self.who, self.number)
        if not self.number or values is not None:
            return SeenVector("here", newest, values)
        may_come = self.number > newest and self.who[0] in self.vectors.working
        return None if may_come else SeenVector("gone", newest)


class SeenVector(NamedTuple):
    """Hold what a look at a vector has found: its state, the newest number and perhaps its values.

    ``state``: here, with ``values`` unless only the newest number was asked for; late: it has not
    come; gone: it cannot come any more.
    """

    state: str
    newest: int
    values: F32 | None = None


class SwarmVectors:
    """Keep what all workers have published, as codecs have left it.

    ``names``: of all workers; ``working``: those whose loops have not ended.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.begin()

    def begin(self) -> None:
        self.working = set(self.names)
        self._kept: dict[Who, dict[int, F32]] = {}
        self._encoded_bytes: dict[Who, int] = {}

    def ended(self, name: str) -> None:
        """Note that the loop of this worker has ended."""
        self.working.discard(name)

    def publish(self, who: Who, number: int, values: F32, codec_name: str) -> None:
        """Publish float32[n], which then is what others get; CodecError if it is not encodable."""
        codec, grid = get_codec(codec_name), grid_for(values.size)
        nbytes = 0
        for chunk in range(grid.count):
            part = values[slice(*grid.bounds(chunk))]
            encoded = np.empty(codec.encoded_bytes(part.size), np.uint8)
            codec.encode(part, encoded)
            codec.decode(encoded, part)
            nbytes += encoded.nbytes
        before = self._kept.get(who, {})
        kept = sorted(n for n in before if n < number)[-(KEPT - 1) :]
        self._kept[who] = {n: before[n] for n in kept} | {number: values.copy()}
        self._encoded_bytes[who] = nbytes

    def newest(self, who: Who) -> int:
        return max(self._kept.get(who, ()), default=0)

    def find(self, who: Who, number: int) -> F32 | None:
        return self._kept.get(who, {}).get(number)

    def encoded_bytes(self, who: Who) -> int:
        """Return how many bytes each vector of this worker and name has, encoded."""
        return self._encoded_bytes.get(who, 0)


def answer(calls: Sequence[SwarmCall]) -> tuple[list[Any], int]:
    """Return ``SwarmCall.answers``, once all are seen to be alike; else CollectiveMismatchError."""
    kinds = sorted({call.alike for call in calls})
    if len(kinds) > 1:
        raise CollectiveMismatchError(
            f"workers of the swarm called {' and '.join(kinds)}",
            fix="let every worker make the same calls, with the same arguments, in the same order",
        )
    return calls[0].answers(calls)


def _butterfly_bytes(calls: Sequence[SwarmCall], part_bytes: int, result_bytes: int) -> int:
    """Return the bytes that all peers together send in a butterfly.

    Each part but one's own goes to its owner, each result to all others. Per peer that makes
    ``(n-1)/n * (part_bytes + result_bytes)``; a gathered result has n parts in it.
    """
    return (len(calls) - 1) * (part_bytes + result_bytes)
