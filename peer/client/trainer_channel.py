"""Carry what a method of ``atoll.optim`` and its daemon have to say to each other.

This is the private part of a session (session.py): submissions and their outcomes, the run's
parameters, vectors for other trainers, local steps that others take again. Commands travel over
zmq, tensors lie in shared memory, and the lifeline's end of file tells at once that the daemon is
gone (peer/daemon/ipc_server.py).
"""

from __future__ import annotations

import os
import select
import socket
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from atoll.collectives.codecs import get_codec
from atoll.collectives.errors import (
    CollectiveLostError,
    CollectiveMismatchError,
    CollectiveMissedError,
    ConfigError,
    DivergedError,
    NoDaemonError,
    NoQuorumError,
    RoundError,
    RoundTimeoutError,
    SessionError,
    TooFewPeersError,
)
from atoll.collectives.units import duration
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import COLLECTIVES, FROZEN, RunSpec, blob
from atoll.peer.client.console import say
from atoll.peer.client.ipc_client import COMMAND_TIMEOUT_S, PROGRESS_S, IpcClient, has_ended, lost
from atoll.peer.client.shared_memory import receive_region
from atoll.peer.daemon.ipc_server import LIFELINE
from atoll.peer.membership.view import REPLICA
from atoll.peer.net.identity import socket_path
from atoll.peer.rounds.entries import REDUCE

Floats = NDArray[np.float32]
POLL_S = 0.05  # while a run has no state yet, or is in a round that is not ours
LOOK_S = 1.0  # one question to the daemon waits so long; it answers at once when there is news
CARRIERS = ("submit", "operate", "publish")  # commands with which figures travel
PULL_TRIES = 100  # two commits within one copy, so often in a row, cannot be
_HALTED_FIX = "find the machine whose memory or arithmetic is wrong; see `atoll status`"
_MISSED_FIX = (
    "call it again: it takes part in the next round. A trainer is waited for half a minute; where "
    "calls are further apart than that, let every trainer make the same calls in the same order"
)
_LOST_FIX = (
    "make the lost calls again if the others lack what came of them, or ignore it; parameters and "
    "steps of the optimizer are not concerned"
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


class TrainerChannel:
    """Connect one trainer with its daemon. Any call may raise DaemonLostError.

    A channel belongs to one process and one thread.
    """

    def __init__(self, home: Path, timeout_s: float) -> None:
        self._pid = os.getpid()
        _OPEN.add(self)
        self._home = home
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._lifeline: socket.socket | None = None
        self._region: Floats | None = None
        self._theta: list[Floats] = []
        self.deadline_s = 600.0
        self._state_serial = -1
        self._submitted: dict[int, int] = {}  # fragment -> the call that waits
        self._figures: dict[str, tuple[Any, int]] = {}  # their sums since the last submission
        self._calls = 0  # so that a late answer is not taken for another one's
        # Shared with the daemon: what goes into a collective, then what comes out, float32 each ...
        self._exchange: Floats | None = None
        self._vector_memory: Floats | None = None  # ... and one vector at a time
        self.round = 0
        self.epoch = 0
        self.operations = 0  # rounds that were calls of this trainer, whatever came of them
        try:
            self._client = _wait_for_daemon(self._context, home, timeout_s)
            self._lifeline = self._open_lifeline()
            hello = self.ask("hello", pid=self._pid)
        except BaseException:
            self.close()
            raise
        self.run: str = hello["run"]
        self.peer_name: str = hello["peer"]

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
        packed = blob(spec, manifest)
        self.deadline_s = spec.round_deadline_s
        started_s = said_s = time.monotonic()
        how = {"blob": packed, "frozen": frozen}
        answer = self.ask("attach", **how)
        self._region = self._receive("region", writable=True)
        written = False
        while answer["state"] != "ready":
            if answer["state"] == "void" and not written:
                initial(self._region)
                written = True
            if answer["state"] == "void" and not answer["offered"]:
                self.ask("offer", blob=packed)
            now_s = time.monotonic()
            if now_s - started_s > self.deadline_s:
                raise self._too_late(now_s - started_s)
            if now_s - said_s > PROGRESS_S:
                said_s = now_s
                say(
                    f"no state of the run yet after {duration(now_s - started_s)}: {answer['text']}"
                )
            self._client.receive(POLL_S, self._lifeline)
            answer = self.ask("attach", **how)
        if answer["text"]:
            say(answer["text"])
        self._client.events.clear()

    def submit(
        self,
        fill: Callable[[Floats], None],
        weight: float,
        fragment: int = 0,
        steps: bytes = b"",
    ) -> None:
        """Hand over the trainer's parameters, or those of one fragment, for a round.

        ``fill`` writes them, ``weight`` is their share. In a run with fragments it writes those of
        one, while other ones may be under way. ``steps``: the commitment to the local steps that
        led there, in a run with validators. Raises SessionError before ``attach``.
        """
        if self._region is None:
            raise SessionError("submit before attach", fix="call attach first")
        fill(self._region)
        self._calls += 1
        self._submitted[fragment] = self._calls
        waited_for = self._submitted.values()  # not the answer to a submission that was given up
        self._client.events[:] = [
            (kind, value)
            for kind, value in self._client.events
            if kind == "outcome" and value["call"] in waited_for
        ]
        how = {"weight": float(weight), "fragment": fragment, "steps": steps}
        self.ask("submit", epoch=self.epoch, call=self._calls, **how)

    def wait(self, fragment: int = 0) -> Outcome:
        """Wait for the round of a submission and return what became of it.

        Raises RoundTimeoutError, or NoQuorumError or TooFewPeersError where that is why, after the
        run's round deadline; DivergedError where waiting longer cannot help; SessionError before
        ``submit``.
        """
        if fragment not in self._submitted:
            raise SessionError("wait before submit", fix="call submit first")
        started_s = time.monotonic()
        value = self._outcome(self._submitted.pop(fragment))
        waited_s = time.monotonic() - started_s
        share, peers = value.get("share", 0.0), tuple(value.get("peers", ()))
        return Outcome(value["kind"], value["round"], waited_s, share, peers, len(peers))

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
        for _ in range(PULL_TRIES):
            answer = self.ask("pull")
            if answer["serial"] != self._state_serial:
                self._map_state(answer["serial"])
            read(self._theta[answer["buffer"]])
            if self.ask("valid", **{k: answer[k] for k in ("serial", "buffer", "generation")}):
                self.round, self.epoch = answer["round"], answer["epoch"]
                return self.round
        raise SessionError(f"the run's parameters changed in each of {PULL_TRIES} copies")

    def check(self) -> None:
        """Raise DaemonLostError if the daemon is gone. Cheap enough for every training step."""
        self._check_process()
        if self._lifeline is not None and has_ended(self._lifeline):
            raise lost(self._home)

    def hurry(self, wait_s: float) -> None:
        """Wait for the daemon and for rounds no longer than that from now on."""
        self.deadline_s = min(self.deadline_s, wait_s)

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
        if hasattr(self, "_client"):
            self._client.close()
        self._region = self._exchange = self._vector_memory = None
        self._theta = []
        self._context.term()

    # ------------------------------------------------------------ collectives

    def attach_for_collectives(self) -> None:
        """Attach without an optimizer, unless that was done; then the run is for collectives."""
        if self._region is None:
            self.attach(*_collectives(), lambda flat: flat.fill(0.0))

    def exchange_memory(self, elements: int) -> tuple[Floats, Floats]:
        """Return what to write to, and where the result will be, float32[elements] each.

        The memory behind them is at least as large as ever before.
        """
        shared = self._exchange
        if shared is None or len(shared) < 2 * elements:
            self._exchange = None
            shared = self._receive("exchange", writable=True, elements=elements)
            self._exchange = shared
        half = len(shared) // 2
        return shared[:elements], shared[half : half + elements]

    def reduce(self, elements: int, op: str, codec: str) -> dict[str, Any]:
        """Reduce what lies in the ``exchange_memory``, where the result is then."""
        shared, self._exchange = self._exchange, None  # given up, it may yet be read by a round
        outcome = self.operate(kind=REDUCE, elements=elements, op=op, codec=codec)
        self._exchange = shared
        return outcome

    def operate(self, **call: Any) -> dict[str, Any]:
        """Make the call, as soon as the daemon can take it, and wait for its outcome."""
        self.attach_for_collectives()
        self._calls += 1
        self._client.events.clear()  # answers to calls that were given up
        started_s = said_s = time.monotonic()
        while why := self.ask("operate", call=self._calls, **call):
            now_s = time.monotonic()
            if now_s - started_s > self.deadline_s:
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
        shared = self.vector_memory(values.size)
        np.copyto(shared, values)
        self.ask("publish", name=name, number=number, elements=values.size, codec=codec)
        np.copyto(values, shared)

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

        This peer's own are had in the same way.
        """
        self.vector_memory(elements)
        ticket = self.ask(
            "ask_vector", peer=peer, name=name, number=number, elements=elements, codec=codec
        )
        return AskedVector(self, f"{name} {number} of {peer}", ticket, elements)

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
            raise SessionError("fits before attach", fix="call attach first")
        fill(self._region)
        place = {"terms": validation.terms, "target": validation.target}
        return bool(self.ask("fits", start=start, **place))

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
        """Return the daemon's answer to a command; figures that were observed go along."""
        self._check_process()
        if self._lifeline is None:
            raise SessionError("this session is closed", fix="call atoll.connect() again")
        if self._figures and command in CARRIERS:
            arguments["figures"] = {n: float(t) / count for n, (t, count) in self._figures.items()}
            self._figures.clear()
        return self._client.ask(command, arguments, self._lifeline, self.deadline_s)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise SessionError(
                "a session cannot be used after fork", fix="call atoll.connect() in the new process"
            )

    def _open_lifeline(self) -> socket.socket:
        lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            lifeline.settimeout(COMMAND_TIMEOUT_S)
            lifeline.connect(os.fspath(socket_path(self._home, LIFELINE)))
            lifeline.sendall(self._client.identity)
            if lifeline.recv(1) != b"!":
                raise lost(self._home)
        except OSError as error:
            lifeline.close()
            raise lost(self._home) from error
        return lifeline

    def _receive(self, name: str, *, writable: bool, **arguments: Any) -> Floats:
        """Ask for a region; its descriptor comes over the lifeline after the answer."""
        self.ask(name, **arguments)
        assert self._lifeline is not None
        readable, _, _ = select.select([self._lifeline], [], [], COMMAND_TIMEOUT_S)
        if not readable:
            raise lost(self._home)
        return receive_region(self._lifeline, writable=writable)

    def _map_state(self, serial: int) -> None:
        floats = self._receive("state", writable=False)
        count = len(floats) // 4
        self._theta = [floats[:count], floats[count : 2 * count]]
        self._state_serial = serial

    def _outcome(self, call: int) -> dict[str, Any]:
        started_s = said_s = time.monotonic()
        while True:
            for position, (kind, value) in enumerate(self._client.events):
                if kind == "outcome" and value["call"] == call:
                    del self._client.events[position]
                    return value
            self._client.receive(1.0, self._lifeline)
            now_s = time.monotonic()
            if now_s - started_s > self.deadline_s:
                raise self._too_late(now_s - started_s)
            if now_s - said_s > PROGRESS_S:
                said_s = now_s
                waiting = self.ask("waiting")
                if waiting["code"] == DivergedError.code:  # waiting longer cannot help
                    raise DivergedError(waiting["text"], fix=_HALTED_FIX)
                say(str(waiting["text"]))

    def _too_late(self, elapsed_s: float) -> RoundError:
        waiting = self.ask("waiting")
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
        while state != "here":
            limit_s = timeout_s if state == "asked" else channel.deadline_s
            look_s = min(LOOK_S, max(0.0, limit_s - waited_s))
            state = channel.ask("look_for_vector", ticket=self._ticket, timeout_s=look_s)
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

    def look(self, timeout_s: float) -> str:
        """Return "asked" while the vector is not published, and "here" when it is here.

        It is something else while the vector is on its way. Returns at once when it is here, else
        after ``timeout_s`` at most. Raises what ``wait`` raises, but for time.
        """
        ask = self._channel.ask
        return str(ask("look_for_vector", ticket=self._ticket, timeout_s=timeout_s))

    def read(self) -> Floats:
        """Return the vector, float32[n], read-only.

        Its memory is this one's until the session's next call of any vector. It may be read again,
        until it is dropped.
        """
        self._channel.ask("read_vector", ticket=self._ticket)
        shown = self._channel.vector_memory(self._elements).view()
        shown.flags.writeable = False
        return shown

    def drop(self) -> None:
        """Give the vector up: it is not wanted (any more)."""
        self._channel.ask("drop_vector", ticket=self._ticket)


def check_codec(name: str, call: str) -> None:
    """Raise ConfigError for a codec with a key, which ``call`` has not.

    For an unknown codec, raises CodecError, which lists the known ones.
    """
    if get_codec(name).contract.keyed:
        raise ConfigError(
            f"codec {name!r} needs a key for each vector, which {call} has not",
            fix="use float32, bfloat16 or int8",
        )


def _collectives() -> tuple[RunSpec, Manifest]:
    """Return what a run without an optimizer begins with: one parameter that nobody changes."""
    spec = RunSpec(method=COLLECTIVES, sync_every=1, codec="float32")
    return spec, Manifest.of([Parameter(COLLECTIVES, (1,))])


_OPEN: weakref.WeakSet[TrainerChannel] = weakref.WeakSet()


def _after_fork() -> None:
    """Close the lifelines that a forked child, such as a DataLoader's worker, has inherited.

    The daemon would take it for a trainer.
    """
    for channel in _OPEN:
        channel.forget_lifeline()


os.register_at_fork(after_in_child=_after_fork)


def _wait_for_daemon(
    context: zmq.Context[zmq.Socket[bytes]], home: Path, timeout_s: float
) -> IpcClient:
    """Connect to a daemon that may just be starting. Raise NoDaemonError after ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return IpcClient(context, home)
        except NoDaemonError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(POLL_S)
