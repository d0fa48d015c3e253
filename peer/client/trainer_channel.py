"""Carry what a method of ``atoll.optim`` and its daemon have to say to each other.

This is the private part of a session (session.py): submissions and their outcomes, the run's
parameters, vectors for other trainers, local steps that others take again. Commands travel over
zmq, tensors lie in shared memory, and the lifeline's end of file tells at once that the daemon is
gone (peer/daemon/ipc_server.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.codecs import get_codec
from atoll.collectives.errors import (
    AtollError,
    CollectiveLostError,
    CollectiveMismatchError,
    CollectiveMissedError,
    ConfigError,
    DaemonLostError,
    DivergedError,
    NoDaemonError,
    NoQuorumError,
    RoundError,
    RoundTimeoutError,
    SessionError,
    StateError,
    TooFewPeersError,
)
from atoll.collectives.units import duration
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.pseudo_gradient import Writer, encode_submission
from atoll.optim.run_spec import COLLECTIVES, FROZEN, RunSpec, blob
from atoll.peer.client.console import say
from atoll.peer.client.ipc_client import (
    COMMAND_TIMEOUT_S,
    PROGRESS_S,
    IpcClient,
    answers,
    has_ended,
    is_readable,
    lost,
    no_answer,
)
from atoll.peer.client.shared_memory import receive_region
from atoll.peer.client.supervised import is_orphaned
from atoll.peer.daemon.ipc_server import LIFELINE
from atoll.peer.membership.view import REPLICA
from atoll.peer.net.identity import socket_path
from atoll.peer.rounds.entries import REDUCE

Floats = NDArray[np.float32]
T = TypeVar("T")
POLL_S = 0.05  # while a run has no state yet, or is in a round that is not ours
ANSWER_S = 1.0  # a daemon answers within 50 ms: who has no time left hears what became of it
LOOK_S = 1.0  # one question to the daemon waits so long; it answers at once when there is news
CARRIERS = ("submit", "operate", "publish")  # commands with which figures travel
# A supervisor starts a daemon again within seconds; who does it by hand needs a minute.
RECONNECT_S = 60.0
NO_EPOCH = 0  # of no daemon: what is submitted under it is answered "reload"
PULL_TRIES = 100  # so often in a row no commit comes within a copy of the parameters
_HALTED_FIX = "find the machine whose memory or arithmetic is wrong; see `atoll status`"
_MISSED_FIX = (
    "call it again: it takes part in the next round. A trainer is waited for half a minute; where "
    "calls are further apart than that, let every trainer make the same calls in the same order"
)
_LOST_FIX = (
    "make the lost calls again if the others lack what came of them, or ignore it; parameters and "
    "steps of the optimizer are not concerned"
)
_UNKNOWN_FIX = (
    "make the call again if all trainers do; the others may have its result, or have gone on "
    "without this trainer. The session is attached again, and parameters are not concerned"
)
_MISMATCH_FIX = (
    "let every trainer make the same calls, with the same arguments, in the same order; who comes "
    "later begins with the call that the others make"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Describe what became of a submission.

    ``kind`` is "committed", "missed" (the round went on without it; go on from your own parameters)
    or "reload" (the daemon got other state; take that).
    """

    kind: str
    round: int
    waited_s: float
    share: float = 0.0  # of the submission in the round's mean
    peers: tuple[str, ...] = ()  # whose submissions are in it, in the order of their ids
    count: int = 0  # how many these are; of ranks all know it, and the first one alone the names


@dataclass(frozen=True, slots=True)
class Members:
    """Name the members of the run that hold what it has.

    ``names`` are those of peers in the order of their ids, the same for all that are in this
    ``view``. Most of them have a trainer. ``min_trainers``: how many of these the run needs.
    ``outbound``: which of them are known to be unable to accept connections from outside.
    """

    view: int
    names: tuple[str, ...]
    min_trainers: int = 1
    outbound: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Validation:
    """Describe one segment of one peer's local steps, drawn in a round that is committed.

    ``own``: this trainer's own, to be shown. Otherwise those of ``target``, called ``name``, to be
    taken again. The segment is the one with ``number`` modulo their count. ``work`` is the
    commitment to the steps of the round, ``before`` that of the last round before in which this
    peer counted, or b"".
    """

    terms: bytes
    round: int
    target: bytes
    name: str
    own: bool
    number: int
    work: bytes
    before: bytes


@dataclass(frozen=True, slots=True)
class _Submission:
    """Hold what waits for a round, to submit it again."""

    call: int
    weight: float
    steps: bytes
    # If a daemon that has ended had it: the round before which it is in none.
    since: int | None = None


@dataclass(frozen=True, slots=True)
class _Attached:
    """Hold how a trainer has attached, to do it again."""

    spec: RunSpec
    manifest: Manifest
    frozen: str
    initial: Callable[[Floats], None]


@dataclass(slots=True, eq=False)
class ExchangeMemory:
    """Hold memory that a trainer shares with its daemon for collectives.

    ``shared``, float32[2 * elements]: what goes in, then what comes out.
    """

    number: int  # by which the daemon knows it
    shared: Floats

    @property
    def elements(self) -> int:
        return len(self.shared) // 2

    def given(self, elements: int) -> Floats:
        return self.shared[:elements]

    def result(self, elements: int) -> Floats:
        return self.shared[self.elements : self.elements + elements]


class TrainerChannel:
    """Connect one trainer with its daemon. Any call may raise DaemonLostError.

    A channel belongs to one process and one thread.

    Where a daemon ends, a call waits up to ``reconnect_s`` for the next process of that daemon,
    attaches to it and goes on: a submission that waits is made again, unless it is in a round by
    then (peer/rounds/resumed_work.py). ``connection`` counts daemons: vectors that were published
    to an earlier one, or asked of it, are gone. ``is_stale``: local work holds no more, and the
    run's parameters are to be pulled. What is submitted before that is answered "reload".
    """

    def __init__(self, home: Path, timeout_s: float, reconnect_s: float = RECONNECT_S) -> None:
        self._pid = os.getpid()
        _OPEN.add(self)
        self._home = home
        self._lifeline: socket.socket | None = None
        # Memory may come over the lifeline that no call waits for, or there is no lifeline yet.
        self._was_interrupted = False
        self._region: Floats | None = None  # of submissions; of encoded ones it is bytes
        self._theta: Floats | None = None  # of the run, shared with the daemon
        self.deadline_s = 600.0
        self._hurries_until_s = math.inf  # on the monotonic clock
        self._ends_by_s = math.inf
        self._state_serial = -1
        self._marks: dict[int, int] = {}  # fragment -> which of its parameters are in that state
        self._submitted: dict[int, _Submission] = {}  # fragment -> what waits
        self._committed: dict[int, int] = {}  # fragment -> the last round that it was in
        self._attached: _Attached | None = None
        self._base: tuple[int, bytes] | None = None  # round and chain of what was pulled last
        self._began_at = 0  # the round that was pulled first
        self._daemon_epoch = NO_EPOCH  # at the last pull
        self._reconnect_s = reconnect_s
        self.connection, self.is_stale = 0, False
        self._figures: dict[str, tuple[Any, int]] = {}  # their sums since the last submission
        self._calls = 0  # so that a late answer is not taken for another one's
        self._exchange: ExchangeMemory | None = None  # of collectives
        self._exchanges: dict[int, ExchangeMemory] = {}  # all that a call may use, by number
        self._dropped: list[int] = []  # the numbers of those that none will use any more
        self._vector_memory: Floats | None = None  # shared with the daemon: one vector at a time
        self._forgotten: list[int] = []  # tickets of vectors that nobody can read any more
        self.round = 0
        self.epoch = 0
        self.operations = 0  # rounds that were calls of this trainer, whatever came of them
        try:
            hello = self._connect(time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise
        self.run: str = hello["run"]
        self.peer_name: str = hello["peer"]
        self.keeps_rounds: bool = hello["keeps_rounds"]  # on its disk

    @property
    def home(self) -> Path:
        """Return the folder of the daemon."""
        return self._home

    # ------------------------------------------------------------ rounds

    def attach(
        self,
        spec: RunSpec,
        manifest: Manifest,
        initial: Callable[[Floats], None],
        frozen: str = FROZEN[0],
    ) -> None:
        """Become this daemon's trainer; return when the run's state can be pulled.

        ``initial`` writes θ (float32[manifest.elements], in the manifest's order) if the run has no
        state yet; the group takes the first that is offered. ``frozen``: as ``check_same`` has it.

        Raises IncompatibleRunError, which lists the differences from the run; TrainerRefusedError
        if the daemon has a trainer; NoQuorumError or RoundTimeoutError if there is no state to pull
        within the run's round deadline.
        """
        how = _Attached(spec, manifest, frozen, initial)
        self.deadline_s = spec.round_deadline_s
        self._region = self.lasting(lambda: self._attach(how))
        self._attached = how

    def _attach(self, how: _Attached) -> Floats:
        """Attach to the daemon, and wait until the run's state can be pulled.

        Return the memory of submissions.
        """
        packed = {"blob": blob(how.spec, how.manifest), "frozen": how.frozen}
        started_s = said_s = time.monotonic()
        limit_s = self.limited(self.deadline_s)
        answer = self.ask_once("attach", **packed)
        offered: Floats | None = None
        while answer["state"] != "ready":
            if answer["state"] == "void" and offered is None:
                offered = self._receive("initial", writable=True)
                how.initial(offered)
            if answer["state"] == "void" and not answer["offered"]:
                self.ask_once("offer", blob=packed["blob"])
            now_s = time.monotonic()
            if now_s - started_s > limit_s:
                raise self._too_late(now_s - started_s)
            if now_s - said_s > PROGRESS_S:
                said_s = now_s
                say(
                    f"no state of the run yet after {duration(now_s - started_s)}: {answer['text']}"
                )
            self._client.receive(POLL_S, self._lifeline)
            answer = self.ask_once("attach", **packed)
        if answer["text"]:
            say(answer["text"])
        self._client.events.clear()
        return self._receive("region", writable=True)

    def submit(
        self,
        write: Writer,
        weight: float,
        fragment: int = 0,
        steps: bytes = b"",
    ) -> None:
        """Hand over the trainer's parameters, or those of one fragment, for a round.

        ``write(out, lo)`` writes them piece by piece: the elements of the vector from ``lo`` on to
        float32[n]. ``weight`` is their share. Of a run with fragments it is those of one, while
        other ones may be under way. ``steps``: the commitment to the local steps that led there, in
        a run with validators. Raises SessionError before ``attach``, and CodecError for values that
        a round cannot carry.
        """
        if self._region is None:
            raise SessionError(
                "submit before attach", fix="make the optimizer first, or call a collective"
            )
        base = self.lasting(lambda: self._write_submission(write, fragment))
        self._calls += 1
        self._submitted[fragment] = submission = _Submission(self._calls, float(weight), steps)
        # Not the answer to a submission that was given up:
        waited_for = [one.call for one in self._submitted.values()]
        self._client.events[:] = [
            (kind, value)
            for kind, value in self._client.events
            if kind == "outcome" and value["call"] in waited_for
        ]
        try:
            for _ in range(PULL_TRIES):
                if (now := self._hand_over(fragment, submission, base)) is None:
                    return
                self._see(fragment, *now)
                base = self._write_submission(write, fragment)
        except DaemonLostError as error:
            self._come_back(error)  # which hands it over, if it is not in a round by then
            return
        raise SessionError(f"the run's parameters changed in each of {PULL_TRIES} submissions")

    def _write_submission(self, write: Writer, fragment: int) -> tuple[int, int] | None:
        """Write to the memory of submissions.

        Return which of the run's parameters it is the difference from; None if it is none.
        """
        assert self._attached is not None
        assert self._region is not None
        spec, manifest = self._attached.spec, self._attached.manifest
        if not spec.encodes_submissions:
            part = manifest.part_of(fragment, spec.fragments)
            write(self._region[part], part.start)
            return None
        if fragment not in self._marks:
            self._see(fragment, *self.ask_once("base", fragment=fragment))
        assert self._theta is not None
        mark = self._marks[fragment]
        encode_submission(spec, manifest, self._theta, write, fragment, self._region.view(np.uint8))
        return None if spec.submits == "deltas" else (self._state_serial, mark)

    def _see(self, fragment: int, serial: int, mark: int) -> None:
        """Note which of the run's parameters of a fragment there are now."""
        if serial != self._state_serial:
            self._map_state(serial)
        self._marks[fragment] = mark

    def _hand_over(
        self, fragment: int, submission: _Submission, base: tuple[int, int] | None = None
    ) -> tuple[int, int] | None:
        """Submit what was written; return what the base is now where it is another one."""
        what = {"weight": submission.weight, "fragment": fragment, "steps": submission.steps}
        how = {} if submission.since is None else {"since": submission.since}
        call, epoch = submission.call, self._daemon_epoch
        answer = self.ask_once("submit", epoch=epoch, call=call, base=base, **what, **how)
        return None if answer is None else (answer[0], answer[1])

    def wait(self, fragment: int = 0) -> Outcome:
        """Wait for the round of a submission and return what became of it.

        Raises RoundTimeoutError, or NoQuorumError or TooFewPeersError where that is why, after the
        run's round deadline; DivergedError where waiting longer cannot help; SessionError before
        ``submit``.
        """
        if fragment not in self._submitted:
            raise SessionError("wait before submit", fix="call submit first")
        started_s = time.monotonic()
        try:
            value = self.lasting(lambda: self._outcome_of(fragment))
        finally:
            del self._submitted[fragment]
        if value["kind"] != "missed":
            self._committed[fragment] = value["round"]
        waited_s = time.monotonic() - started_s
        share, peers = value.get("share", 0.0), tuple(value.get("peers", ()))
        return Outcome(value["kind"], value["round"], waited_s, share, peers, len(peers))

    def _outcome_of(self, fragment: int) -> dict[str, Any]:
        """Wait for the outcome of what was submitted of a fragment.

        What an earlier daemon had may be in a round that is not committed yet. So it is in none
        only when the daemon says so of the round that it is in, or would have been in: until then
        it is submitted again.
        """
        started_s, limit_s = time.monotonic(), self.limited(self.deadline_s)
        while True:
            submission = self._submitted[fragment]
            value = self._outcome(submission.call)
            is_known = value["kind"] != "missed" or submission.since is None
            if is_known or time.monotonic() - started_s > limit_s:
                return value
            time.sleep(POLL_S)
            self._hand_over(fragment, submission)

    def next_fragment(self) -> int:
        """Return the fragment of which the run wants a submission next."""
        return int(self.ask("next"))

    def replicas(self) -> int:
        """Return how many members of the run hold its state: most of them have a trainer."""
        return sum(member["role"] == REPLICA for member in self.status()["members"]) or 1

    def first_rank(self, value: float) -> float:
        """Return what the first process of this trainer gives: this one, if there are no ranks."""
        return value

    def pull(self, read: Callable[[Floats], None]) -> int:
        """Give ``read`` the run's θ (read-only) and return its round.

        ``read`` is called again if θ changed meanwhile; SessionError after PULL_TRIES times.
        """
        return self.lasting(lambda: self._pull(read))

    def _pull(self, read: Callable[[Floats], None]) -> int:
        for _ in range(PULL_TRIES):
            answer = self.ask_once("pull")
            if answer["serial"] != self._state_serial:
                self._map_state(answer["serial"])
            assert self._theta is not None
            read(self._theta)
            if self.ask_once("valid", **{k: answer[k] for k in ("serial", "generation")}):
                self.round, self._marks = answer["round"], dict(enumerate(answer["marks"]))
                if answer["epoch"] != self._daemon_epoch:
                    self._daemon_epoch, self.epoch = answer["epoch"], self.epoch + 1
                if self._base is None:
                    self._began_at = self.round
                self._base, self.is_stale = (self.round, answer["chain"]), False
                return self.round
        raise SessionError(f"the run's parameters changed in each of {PULL_TRIES} copies")

    def check(self) -> None:
        """Come back if the daemon is gone, else raise DaemonLostError.

        Cheap enough for every training step.
        """
        self._check_process()
        if self._was_interrupted:
            self._come_back(_interrupted(self._home))
        elif self._lifeline is not None and has_ended(self._lifeline):
            self._come_back(lost(self._home))

    @contextlib.contextmanager
    def hurry(self, wait_s: float) -> Iterator[None]:
        """Wait no longer than that, in all, for rounds, answers, and a daemon that has ended."""
        before_s = self._hurries_until_s
        self._hurries_until_s = min(before_s, time.monotonic() + wait_s)
        try:
            yield
        finally:
            self._hurries_until_s = before_s

    def end_within(self, wait_s: float) -> None:
        """Wait no longer for a daemon that has ended, from now on: this script is told to end.

        A signal handler may call it while a call waits.
        """
        self._ends_by_s = min(self._ends_by_s, time.monotonic() + wait_s)

    def limited(self, usual_s: float) -> float:
        """Return how long a wait that begins now may last; less than usual for who hurries."""
        return min(usual_s, max(0.0, self._hurries_until_s - time.monotonic()))

    def observe(self, **figures: Any) -> None:
        """Remember figures (numbers, or tensors of one) of a local step.

        Their means travel to the daemon with the next submission, collective or published vector.
        Raises ConfigError for more than one number.
        """
        for name, value in figures.items():
            if getattr(value, "size", 1) != 1 and getattr(value, "numel", lambda: 0)() != 1:
                raise ConfigError(f"{name} is not one number", fix="report its mean, for example")
            # In float32: a sum of many values in bfloat16 stands still.
            value = value.detach().float() if hasattr(value, "detach") else float(value)
            total, count = self._figures.get(name, (0.0, 0))
            self._figures[name] = total + value, count + 1

    def status(self) -> dict[str, Any]:
        answer = self.ask("status")
        assert isinstance(answer, dict)
        return answer

    def close(self) -> None:
        """End the session. What was submitted to a round in progress still counts."""
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        self._was_interrupted = False
        if hasattr(self, "_client"):
            self._client.close()
        self._region = self._exchange = self._vector_memory = None
        self._exchanges.clear()
        self._theta = None

    # ------------------------------------------------------------ collectives

    def attach_for_collectives(self) -> None:
        """Attach without an optimizer, unless that was done; then the run is for collectives."""
        if self._region is None:
            self.attach(*_collectives(), lambda flat: flat.fill(0.0))

    def exchange_memory(self, elements: int) -> ExchangeMemory:
        """Return memory for a collective of so many elements, the same as last time if it can be.

        It is at least as large as ever before.
        """

        def take() -> ExchangeMemory:
            memory = self._exchange
            if memory is None or not self.has(memory) or memory.elements < elements:
                if memory is not None:
                    self.drop(memory)
                memory = self._exchange = self._new_exchange(elements)
            return memory

        return self.lasting(take)

    def new_exchange_memory(self, elements: int) -> ExchangeMemory:
        """Return memory for collectives that nobody else uses. ConfigError for too much of it."""
        return self.lasting(lambda: self._new_exchange(elements))

    def _new_exchange(self, elements: int) -> ExchangeMemory:
        dropped, self._dropped = self._dropped, []
        number, shared = self._receive_numbered("exchange", elements=elements, dropped=dropped)
        memory = self._exchanges[number] = ExchangeMemory(number, shared)
        return memory

    def has(self, memory: ExchangeMemory) -> bool:
        """Return whether a call may use this memory: the daemon has it, and nothing else does."""
        return self._exchanges.get(memory.number) is memory

    def drop(self, memory: ExchangeMemory) -> None:
        """Use this memory no more; not another one with its number, which a later daemon gave."""
        if self.has(memory):
            del self._exchanges[memory.number]
            self._dropped.append(memory.number)

    def reduce(
        self, memory: ExchangeMemory, elements: int, op: str, codec: str
    ) -> tuple[dict[str, Any], Floats]:
        """Reduce what lies in ``memory``; return the outcome, and the result where it lies.

        A call that fails leaves the memory to the daemon: a round may yet read it. So does one
        whose result is elsewhere.
        """
        self.drop(memory)
        call = {"memory": memory.number, "elements": elements, "op": op, "codec": codec}
        outcome = self.operate(kind=REDUCE, **call)
        if outcome.get("moved"):
            return outcome, self._receive("moved", writable=True)
        self._dropped.remove(memory.number)
        self._exchanges[memory.number] = memory
        return outcome, memory.result(elements)

    def operate(self, **call: Any) -> dict[str, Any]:
        """Make the call, as soon as the daemon can take it, and wait for its outcome.

        CollectiveLostError where the daemon has ended meanwhile and come back: nobody here can know
        whether the others have the result.
        """
        self.attach_for_collectives()
        try:
            return self._operate(call)
        except DaemonLostError as error:
            self._come_back(error)
            raise CollectiveLostError(
                "this peer's daemon was started again while a collective of this trainer was under "
                "way, and what came of that is not known",
                fix=_UNKNOWN_FIX,
                phase="barrier",
            ) from error

    def _operate(self, call: dict[str, Any]) -> dict[str, Any]:
        self._calls += 1
        self._client.events.clear()  # answers to calls that were given up
        started_s = said_s = time.monotonic()
        limit_s = self.limited(self.deadline_s)
        while why := self.ask_once("operate", call=self._calls, **call):
            now_s = time.monotonic()
            if now_s - started_s > limit_s:
                raise self._too_late(now_s - started_s)
            if now_s - said_s > PROGRESS_S:
                said_s = now_s
                so_far = duration(now_s - started_s)
                say(f"this trainer cannot take part yet ({so_far} so far): {why}")
            self._client.receive(POLL_S, self._lifeline)
        outcome = self._outcome(self._calls)
        elapsed_s = time.monotonic() - started_s
        self.round = outcome["round"]
        self.operations += 1
        if outcome["kind"] == "mismatch":
            raise CollectiveMismatchError(
                outcome["text"], fix=_MISMATCH_FIX, phase="barrier", elapsed_s=elapsed_s
            )
        if outcome["kind"] == "lost":
            raise CollectiveLostError(
                outcome["text"], fix=_LOST_FIX, phase="barrier", elapsed_s=elapsed_s
            )
        if outcome["kind"] != "committed":
            why = f": {outcome['text']}" if outcome["text"] else ""
            raise CollectiveMissedError(
                f"round {outcome['round']} went on without this trainer{why}",
                fix=_MISSED_FIX,
                phase="barrier",
                elapsed_s=elapsed_s,
            )
        return outcome

    # ------------------------------------------------------------ vectors, trainer to trainer
    #
    #     channel.publish("phi", 17, values)                       # for whoever asks for it
    #     asked = channel.ask_vector(peer, "phi", 17, elements)    # goes on in the background
    #     asked.wait(30.0)
    #     values = asked.read()
    #
    # The daemon keeps the last two numbers of a name, also when its trainer has ended. It asks
    # another daemon and lets the question wait there until that one's trainer has published.

    def members(self) -> Members:
        """Return the members of the run; only this peer while it is in no view."""
        answer = self.ask("members")
        names, outbound = tuple(answer["names"]), tuple(answer["outbound"])
        return Members(answer["view"], names, answer["min_trainers"], outbound)

    def publish(self, name: str, number: int, values: Floats, codec: str = "float32") -> None:
        """Let others have float32[n] under this name and number.

        ``values`` then is what they will get, as the codec has left it. Numbers of a name rise; the
        last two can be had.

        Raises CodecError for values that it cannot take, and then nothing is published; ConfigError
        for more than four names, or without memory.
        """
        check_codec(codec, "publish()")
        number = int(number)

        def publish() -> Floats:
            shared = self.vector_memory(values.size)
            np.copyto(shared, values)
            self.ask_once("publish", name=name, number=number, elements=values.size, codec=codec)
            return shared

        np.copyto(values, self.lasting(publish))

    def newest(self, peer: str, name: str) -> int:
        """Return the number of a peer's newest vector of this name, 0 for none.

        That is what its trainer has published. Raises ConnectError or RoundTimeoutError if the peer
        does not say.
        """
        return int(self.ask("newest", peer=peer, name=name))

    def ask_vector(
        self, peer: str, name: str, number: int, elements: int, codec: str = "float32"
    ) -> AskedVector:
        """Have a vector fetched as soon as it is published.

        This peer's own are had in the same way. Raises ConfigError for more than 64 that are
        neither dropped nor forgotten.
        """
        number, elements = int(number), int(elements)

        def ask() -> int:
            while self._forgotten:
                self.ask_once("drop_vector", ticket=self._forgotten.pop())
            self.vector_memory(elements)
            what = {"peer": peer, "name": name, "number": number, "elements": elements}
            return int(self.ask_once("ask_vector", codec=codec, **what))

        ticket = self.lasting(ask)
        return AskedVector(self, f"{name} {number} of {peer}", ticket, elements)

    def forget_vector(self, ticket: int, connection: int) -> None:
        """Note that a vector cannot be read any more; the next ``ask_vector`` drops it."""
        if connection == self.connection:
            self._forgotten.append(ticket)

    def vector_memory(self, elements: int) -> Floats:
        """Return float32[elements] shared with the daemon.

        The memory behind it is at least as large as ever before.
        """
        shared = self._vector_memory
        if shared is None or len(shared) < elements:
            self._vector_memory = None
            shared = self._receive("vector_memory", writable=True, elements=elements)
            self._vector_memory = shared
        return shared[:elements]

    # ------------------------------------------------------------ validation of local steps

    def validations(self) -> list[Validation]:
        """Return what is open now.

        It stays so until ``shown`` or ``judged``, or until it is too late.
        """
        return [Validation(**each) for each in self.ask("validations")]

    def shown(self, validation: Validation) -> None:
        """Tell the daemon that the own segment was published, or cannot be."""
        self.ask("shown", terms=validation.terms)

    def fits(self, validation: Validation, fill: Callable[[Floats], None], *, start: bool) -> bool:
        """Return whether parameters that ``fill`` writes are those of the validation's round.

        With ``start`` they are the run's before the round, else those that its peer has submitted.
        Between two submissions only: raises SessionError otherwise, or if the round is too long
        ago.
        """
        if self._region is None:
            raise SessionError(
                "fits before attach", fix="make the optimizer first, or call a collective"
            )
        place = {"terms": validation.terms, "target": validation.target}

        def ask() -> bool:
            assert self._region is not None
            fill(self._region)
            return bool(self.ask_once("fits", start=start, **place))

        return self.lasting(ask)

    def judged(self, validation: Validation, judgement: int | None, why: str) -> None:
        """Tell the daemon how a segment was judged.

        ``judgement`` is 0: right, 1: wrong, 2: withheld; None: nothing can be said. See Judgement
        in peer/verify/statement.py.
        """
        place = {"terms": validation.terms, "target": validation.target}
        self.ask("judged", judgement=judgement, why=why, **place)

    # ------------------------------------------------------------ inside

    def forget_lifeline(self) -> None:
        """Close the lifeline in a forked child: its copy must not outlive the trainer."""
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None

    def ask(self, command: str, **arguments: Any) -> Any:
        """Return the daemon's answer to a command that may be given again to the next one."""
        return self.lasting(lambda: self.ask_once(command, **arguments))

    def ask_once(self, command: str, **arguments: Any) -> Any:
        """Return the daemon's answer to a command; figures that were observed go along."""
        self._check_process()
        if self._was_interrupted:
            raise _interrupted(self._home)
        if self._lifeline is None:
            raise SessionError("this session is closed", fix="call atoll.connect() again")
        if self._figures and command in CARRIERS:
            arguments["figures"] = {n: float(t) / count for n, (t, count) in self._figures.items()}
            self._figures.clear()
        patience_s = max(ANSWER_S, self.limited(self.deadline_s))
        return self._client.ask(command, arguments, self._lifeline, patience_s)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise SessionError(
                "a session cannot be used after fork", fix="call atoll.connect() in the new process"
            )

    # ------------------------------------------------------------ the next daemon

    def lasting(self, act: Callable[[], T]) -> T:
        """Return what ``act`` returns; it is done again where a daemon has ended meanwhile."""
        while True:
            try:
                return act()
            except DaemonLostError as error:
                self._come_back(error)

    def _come_back(self, error: AtollError) -> None:
        """Do what ``_attach_again`` does; where Ctrl+C ends that, the next call begins it anew."""
        try:
            self._attach_again(error)
        except BaseException as why:
            self._was_interrupted |= not isinstance(why, AtollError)
            raise

    def _attach_again(self, error: AtollError) -> None:
        """Attach to the next process of the daemon that has ended, or anew to one that is there.

        The latter after a call was interrupted, also where nobody waits for a daemon.

        Raise DaemonLostError if there is none in time, or if this script is what is left of an
        `atoll run`: the next one has a script of its own. Raise SessionError if the daemon is of
        another run.
        """
        reconnect_s = self.limited(self._reconnect_s)
        ended_s = time.monotonic()
        is_there = self._was_interrupted and answers(socket_path(self._home, LIFELINE))
        if (not reconnect_s and not is_there) or ended_s >= self._ends_by_s:
            raise error
        if is_there:
            reconnect_s = max(reconnect_s, COMMAND_TIMEOUT_S)
            say(error.what)
        elif not is_orphaned():
            say(
                f"{error.what}: waiting up to {duration(reconnect_s)} until it is started "
                f"again (atoll up or atoll join, --home {self._home})"
            )
        while True:
            self._disconnect()
            if is_orphaned():
                raise DaemonLostError(
                    f"{error.what}, and so was the `atoll run` that has started this script",
                    fix="start `atoll run` again: it starts the daemon and the script",
                )
            try:
                hello = self._connect(ended_s + reconnect_s)
                if is_orphaned():
                    continue  # the daemon is the next one's
                if hello["run"] != self.run or hello["peer"] != self.peer_name:
                    raise SessionError(
                        f"the daemon at {self._home} is now {hello['peer']} of run {hello['run']}; "
                        f"this trainer's was {self.peer_name} of {self.run}",
                        fix="start this trainer again",
                    )
                self.connection += 1
                self._forgotten = []  # tickets of the one before, also since it has ended
                how_it_goes_on = self._resume() if self._attached is not None else ""
            except NoDaemonError as late:
                waited_s = time.monotonic() - ended_s
                is_told = self._ends_by_s < ended_s + reconnect_s
                waited = duration(waited_s if is_told else reconnect_s)
                until = ", until this script was told to end" if is_told else ""
                raise DaemonLostError(
                    f"{error.what}, and did not come back within {waited}{until}", fix=error.fix
                ) from late
            except DaemonLostError as again:
                if time.monotonic() - ended_s > reconnect_s:
                    raise
                error = again
                time.sleep(POLL_S)  # a stopped daemon may refuse at once, again and again
                continue
            waited = duration(time.monotonic() - ended_s)
            say(f"attached again after {waited}{how_it_goes_on}")
            return

    def _connect(self, by_s: float) -> dict[str, Any]:
        """Connect to the daemon. Raise NoDaemonError where none is there in time, or it hangs."""
        self._client = self._wait_for_daemon(by_s)
        by_s = max(by_s, time.monotonic() + ANSWER_S)
        self._lifeline = self._open_lifeline(by_s)
        about, left_s = {"pid": self._pid}, by_s - time.monotonic()
        hello = self._client.ask("hello", about, self._lifeline, left_s)
        assert isinstance(hello, dict)
        return hello

    def _wait_for_daemon(self, by_s: float) -> IpcClient:
        """Connect to a daemon that may just be starting. Raise NoDaemonError where it is late."""
        while True:
            try:
                return IpcClient(self._home)
            except NoDaemonError:
                if time.monotonic() > min(by_s, self._ends_by_s):
                    raise
            time.sleep(POLL_S)

    def _disconnect(self) -> None:
        """Give up what belonged to a daemon; what was submitted to it is kept in its memory."""
        self.forget_lifeline()
        self._was_interrupted = False
        self._client.close()
        self._exchange = self._vector_memory = None
        self._exchanges, self._dropped = {}, []
        self._theta, self._state_serial, self._marks = None, -1, {}

    def _resume(self) -> str:
        """Attach as before, and go on with what the run allows; return how, for people."""
        assert self._attached is not None
        before = self._region
        region = self._attach(self._attached)
        if before is not None:
            np.copyto(region, before)  # before anything else: this daemon may end as well
        self._region = region
        waiting = {f: self._committed.get(f, self._began_at) for f in self._submitted}
        number, chain = self._base or (0, b"")
        said = self.ask_once("resume", round=number, chain=chain, waiting=list(waiting.items()))
        why_not = said["why_not"] if self._base is not None else ""
        if not why_not:
            self._daemon_epoch = said["epoch"]
        else:
            self._daemon_epoch, self.is_stale = NO_EPOCH, True
        found = set()
        for (fragment, since), fate in zip(waiting.items(), said["fates"], strict=True):
            submission = replace(self._submitted[fragment], since=since)
            self._submitted[fragment] = submission
            kind = "reload" if fate["kind"] == "again" and why_not else fate["kind"]
            if kind == "again":
                self._hand_over(fragment, submission)
            else:
                outcome = {**fate, "kind": kind, "call": submission.call}
                self._client.events.append(("outcome", outcome))
            found.add(kind)
        return _how_it_goes_on(said["round"], why_not, found, is_based=self._base is not None)

    def _open_lifeline(self, by_s: float) -> socket.socket:
        lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        left_s = by_s - time.monotonic()
        try:
            lifeline.settimeout(left_s)
            lifeline.connect(os.fspath(socket_path(self._home, LIFELINE)))
            lifeline.sendall(self._client.identity)
            if lifeline.recv(1) != b"!":
                raise lost(self._home)
            lifeline.settimeout(COMMAND_TIMEOUT_S)
        except TimeoutError as error:
            lifeline.close()
            raise no_answer(self._home, "this session", left_s) from error
        except OSError as error:
            lifeline.close()
            raise lost(self._home) from error
        return lifeline

    def _receive(self, name: str, *, writable: bool, **arguments: Any) -> Floats:
        """Ask for a region; its descriptor comes over the lifeline after the answer."""
        return self._receive_numbered(name, writable=writable, **arguments)[1]

    def _receive_numbered(
        self, name: str, *, writable: bool = True, **arguments: Any
    ) -> tuple[Any, Floats]:
        """Ask for a region; return the answer, and the region.

        Answers are told apart by their numbers, descriptors by their order alone. So where this is
        given up, by Ctrl+C for example, the next call would get the memory of this one, and the
        daemon would read what nobody writes: that call gets a new lifeline instead.
        """
        try:
            answer = self.ask_once(name, **arguments)
            assert self._lifeline is not None
            if not is_readable(self._lifeline, COMMAND_TIMEOUT_S):
                raise lost(self._home)
            return answer, receive_region(self._lifeline, writable=writable)
        except BaseException as error:
            # With other errors the daemon has answered, and sends nothing; or it has ended.
            if not isinstance(error, AtollError) or isinstance(error, NoDaemonError):
                self._was_interrupted = True
            raise

    def _map_state(self, serial: int) -> None:
        elements, floats = self._receive_numbered("state", writable=False)
        self._theta, self._marks = floats[:elements], {}
        self._state_serial = serial

    def _outcome(self, call: int) -> dict[str, Any]:
        started_s = said_s = time.monotonic()
        limit_s = self.limited(self.deadline_s)
        while True:
            for position, (kind, value) in enumerate(self._client.events):
                if kind == "outcome" and value["call"] == call:
                    del self._client.events[position]
                    return value
            left_s = started_s + limit_s - time.monotonic()
            self._client.receive(min(1.0, max(0.0, left_s)), self._lifeline)
            now_s = time.monotonic()
            if now_s - started_s > limit_s:
                raise self._too_late(now_s - started_s)
            if now_s - said_s > PROGRESS_S:
                said_s = now_s
                waiting = self.ask_once("waiting")
                if waiting["code"] == DivergedError.code:  # waiting longer cannot help
                    raise DivergedError(waiting["text"], fix=_HALTED_FIX)
                say(str(waiting["text"]))

    def _too_late(self, elapsed_s: float) -> RoundError:
        waiting = self.ask_once("waiting")
        kinds = {error.code: error for error in (NoQuorumError, TooFewPeersError)}
        kind = kinds.get(waiting["code"], RoundTimeoutError)
        return kind(
            f"no commit for {duration(elapsed_s, 1)}: {waiting['text']}",
            fix="see `atoll status`; a larger round_deadline_s waits longer",
            phase="commit",
            elapsed_s=elapsed_s,
        )


class AskedVector:
    """Wait for and read a vector of another peer that is on its way here."""

    def __init__(self, channel: TrainerChannel, text: str, ticket: int, elements: int) -> None:
        self._channel, self._text = channel, text
        self._ticket, self._elements = ticket, elements
        self._connection = channel.connection
        # A finalizer may run in the middle of another call, so it sends nothing.
        self._forgetting = weakref.finalize(self, channel.forget_vector, ticket, channel.connection)
        self._forgetting.atexit = False

    def __str__(self) -> str:
        return self._text

    def wait(self, timeout_s: float) -> None:
        """Wait until the vector is here.

        It may take ``timeout_s`` until it is published; then it is waited for as long as its bytes
        arrive, within the run's round deadline.

        Raises RoundTimeoutError if it takes longer, StateError if it cannot be had (any more),
        ConnectError if its peer is gone, RemoteProtocolError if that sends something else; then it
        is dropped.
        """
        channel, began_s = self._channel, time.monotonic()
        said_s, state, waited_s = began_s, "asked", 0.0
        timeout_s, arrival_s = channel.limited(timeout_s), channel.limited(channel.deadline_s)
        while state != "here":
            limit_s = timeout_s if state == "asked" else arrival_s
            look_s = min(LOOK_S, max(0.0, limit_s - waited_s))
            state = self._ask("look_for_vector", timeout_s=look_s)
            waited_s = time.monotonic() - began_s
            if state != "here" and look_s <= 0.0:
                self.drop()
                what = "been published" if state == "asked" else "arrived"
                raise RoundTimeoutError(
                    f"{self} has not {what} within {duration(waited_s)}", elapsed_s=waited_s
                )
            if time.monotonic() - said_s > PROGRESS_S:
                said_s = time.monotonic()
                how = "has not been published yet" if state == "asked" else "is on its way"
                say(f"{self} {how} ({duration(waited_s)} so far)")

    def _ask(self, command: str, **arguments: Any) -> Any:
        """Return the daemon's answer; StateError if another daemon was asked for the vector."""

        def ask() -> Any:
            if self._connection != self._channel.connection:
                raise StateError(
                    f"{self} was asked of a daemon that has ended meanwhile", fix="ask for it again"
                )
            return self._channel.ask_once(command, ticket=self._ticket, **arguments)

        return self._channel.lasting(ask)

    def look(self, timeout_s: float) -> str:
        """Return "asked" while the vector is not published, and "here" when it is here.

        It is something else while the vector is on its way. Returns at once when it is here, else
        after ``timeout_s`` at most. Raises what ``wait`` raises, but for time.
        """
        return str(self._ask("look_for_vector", timeout_s=timeout_s))

    def read(self) -> Floats:
        """Return the vector, float32[n], read-only.

        Its memory is this one's until the session's next call of any vector. It may be read again,
        so the daemon keeps it until it is dropped, or nothing refers to this object any more.
        """
        self._ask("read_vector")
        shown = self._channel.vector_memory(self._elements).view()
        shown.flags.writeable = False
        return shown

    def drop(self) -> None:
        """Give the vector up: it is not wanted (any more)."""
        with contextlib.suppress(StateError):  # else it is gone with its daemon
            self._ask("drop_vector")
        self._forgetting.detach()


def check_codec(name: str, call: str) -> None:
    """Raise ConfigError for a codec with a key, which ``call`` has not.

    For an unknown codec, raises CodecError, which lists the known ones.
    """
    if get_codec(name).contract.keyed:
        raise ConfigError(
            f"codec {name!r} needs a key for each vector, which {call} has not",
            fix="use float32, bfloat16 or int8",
        )


def _interrupted(home: Path) -> DaemonLostError:
    return DaemonLostError(
        f"the connection to the daemon at {home} was given up as a call was interrupted",
        fix="make the call again; if the daemon has ended, start it first (atoll up or atoll join)",
    )


def _collectives() -> tuple[RunSpec, Manifest]:
    """Return what a run without an optimizer begins with: one parameter that nobody changes."""
    spec = RunSpec(method=COLLECTIVES, sync_every=1, codec="float32")
    return spec, Manifest.of([Parameter(COLLECTIVES, (1,))])


def _how_it_goes_on(number: int, why_not: str, fates: set[str], *, is_based: bool) -> str:
    """Return what a trainer does that has come back, at this round of the run."""
    if not is_based:
        return ""
    if why_not:
        return (
            f"; the run is at round {number}: {why_not}, so this trainer takes its parameters, and "
            "the inner optimizers keep their moments"
        )
    text = f" at round {number} of the run, and goes on with its local work"
    if "committed" in fates:
        return f"{text}; what it had submitted is in a round"
    return f"{text}, submitted again" if "again" in fates else text


_OPEN: weakref.WeakSet[TrainerChannel] = weakref.WeakSet()


def _after_fork() -> None:
    """Close the lifelines that a forked child, such as a DataLoader's worker, has inherited.

    The daemon would take it for a trainer.
    """
    for channel in _OPEN:
        channel.forget_lifeline()


os.register_at_fork(after_in_child=_after_fork)
