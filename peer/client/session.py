"""Connect a trainer to its local daemon. Free of torch; used by ``atoll.optim``.

    session = atoll.connect()          # the daemon of the default home

Commands travel over zmq, tensors lie in shared memory, and the lifeline's end of file tells at
once that the daemon is gone (peer/daemon/ipc_server.py). A session belongs to one process and one
thread.
"""

from __future__ import annotations

import contextlib
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

from atoll.collectives.errors import (
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
from atoll.optim.manifest import Manifest
from atoll.optim.run_spec import FROZEN, RunSpec, blob
from atoll.peer.client.console import say
from atoll.peer.client.ipc_client import COMMAND_TIMEOUT_S, PROGRESS_S, IpcClient, has_ended, lost
from atoll.peer.client.session_ops import POLL_S, Operations
from atoll.peer.client.session_validation import SessionValidations
from atoll.peer.client.session_vectors import Gossip
from atoll.peer.client.shared_memory import receive_region
from atoll.peer.daemon.ipc_server import LIFELINE
from atoll.peer.membership.view import REPLICA
from atoll.peer.net.identity import default_home, socket_path

Floats = NDArray[np.float32]
CONNECT_TIMEOUT_S = 10.0  # a daemon answers in milliseconds; one that starts up needs a second
_HALTED_FIX = "find the machine whose memory or arithmetic is wrong; see `atoll status`"
CARRIERS = ("submit", "operate", "publish")  # commands with which figures travel
PULL_TRIES = 100  # two commits within one copy, so often in a row, cannot be


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


def connect(home: str | Path | None = None, *, timeout_s: float = CONNECT_TIMEOUT_S) -> Session:
    """Open a session with the daemon of ``home``.

    ``home`` is by default ATOLL_HOME, else ``atoll`` in the user's state folder. Raises
    NoDaemonError if none answers within ``timeout_s``.
    """
    return Session(default_home(home), timeout_s)


def ask(home: str | Path | None, command: str, **arguments: Any) -> Any:
    """Return the daemon's answer to one command, without a session: for the command line."""
    with zmq.Context() as context:
        with contextlib.closing(IpcClient(context, default_home(home))) as dealer:
            return dealer.ask(command, arguments)


class Session(Operations, Gossip, SessionValidations):
    """Connect one trainer with its daemon. Made by :func:`connect`.

    Any method may raise DaemonLostError.
    """

    def __init__(self, home: Path, timeout_s: float) -> None:
        self._pid = os.getpid()
        _OPEN.add(self)
        self._home = home
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._lifeline: socket.socket | None = None
        self._region: Floats | None = None
        self._theta: list[Floats] = []
        self._deadline_s = 600.0
        self._state_serial = -1
        self._submitted: dict[int, int] = {}  # fragment -> the call that waits
        self._figures: dict[str, tuple[Any, int]] = {}  # their sums since the last submission
        self.round = 0
        self.epoch = 0
        try:
            self._dealer = _wait_for_daemon(self._context, home, timeout_s)
            self._lifeline = self._open_lifeline()
            hello = self._ask("hello", pid=self._pid)
        except BaseException:
            self.close()
            raise
        self.run: str = hello["run"]
        self.peer_name: str = hello["peer"]

    # ------------------------------------------------------------ the life of a trainer

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
        self._deadline_s = spec.round_deadline_s
        started_s = said_s = time.monotonic()
        how = {"blob": packed, "frozen": frozen}
        answer = self._ask("attach", **how)
        self._region = self._receive("region", writable=True)
        written = False
        while answer["state"] != "ready":
            if answer["state"] == "void" and not written:
                initial(self._region)
                written = True
            if answer["state"] == "void" and not answer["offered"]:
                self._ask("offer", blob=packed)
            now_s = time.monotonic()
            if now_s - started_s > self._deadline_s:
                raise self._too_late(now_s - started_s)
            if now_s - said_s > PROGRESS_S:
                said_s = now_s
                say(
                    f"no state of the run yet after {duration(now_s - started_s)}: {answer['text']}"
                )
            self._dealer.receive(POLL_S, self._lifeline)
            answer = self._ask("attach", **how)
        if answer["text"]:
            say(answer["text"])
        self._dealer.events.clear()

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
        self._dealer.events[:] = [
            (kind, value)
            for kind, value in self._dealer.events
            if kind == "outcome" and value["call"] in waited_for
        ]
        how = {"weight": float(weight), "fragment": fragment, "steps": steps}
        self._ask("submit", epoch=self.epoch, call=self._calls, **how)

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

    def _outcome(self, call: int) -> dict[str, Any]:
        started_s = said_s = time.monotonic()
        while True:
            for position, (kind, value) in enumerate(self._dealer.events):
                if kind == "outcome" and value["call"] == call:
                    del self._dealer.events[position]
                    return value
            self._dealer.receive(1.0, self._lifeline)
            now_s = time.monotonic()
            if now_s - started_s > self._deadline_s:
                raise self._too_late(now_s - started_s)
            if now_s - said_s > PROGRESS_S:
                said_s = now_s
                waiting = self._ask("waiting")
                if waiting["code"] == DivergedError.code:  # waiting longer cannot help
                    raise DivergedError(waiting["text"], fix=_HALTED_FIX)
                say(str(waiting["text"]))

    def _too_late(self, elapsed_s: float) -> RoundError:
        waiting = self._ask("waiting")
        kinds = {error.code: error for error in (NoQuorumError, TooFewPeersError)}
        kind = kinds.get(waiting["code"], RoundTimeoutError)
        return kind(
            f"no commit for {duration(elapsed_s, 1)}: {waiting['text']}",
            fix="see `atoll status`; a larger round_deadline_s waits longer",
            phase="commit",
            elapsed_s=elapsed_s,
        )

    def next_fragment(self) -> int:
        """Return the fragment of which the run wants a submission next."""
        return int(self._ask("next"))

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
            answer = self._ask("pull")
            if answer["serial"] != self._state_serial:
                self._map_state(answer["serial"])
            read(self._theta[answer["buffer"]])
            if self._ask("valid", **{k: answer[k] for k in ("serial", "buffer", "generation")}):
                self.round, self.epoch = answer["round"], answer["epoch"]
                return self.round
        raise SessionError(f"the run's parameters changed in each of {PULL_TRIES} copies")

    def check(self) -> None:
        """Raise DaemonLostError if the daemon is gone. Cheap enough for every training step."""
        self._check_process()
        if self._lifeline is not None and has_ended(self._lifeline):
            raise lost(self._home)

    def report(self, **metrics: float) -> None:
        """Send figures that `atoll status` shows for this trainer."""
        self._ask("report", metrics={name: float(value) for name, value in metrics.items()})

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
        answer = self._ask("status")
        assert isinstance(answer, dict)
        return answer

    def close(self) -> None:
        """End the session. What was submitted to a round in progress still counts."""
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        if hasattr(self, "_dealer"):
            self._dealer.close()
        self._region = self._exchange = self._vector_memory = None
        self._theta = []
        self._context.term()

    # ------------------------------------------------------------ inside

    def forget_lifeline(self) -> None:
        """Close the lifeline in a forked child: its copy must not outlive the trainer."""
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None

    def _ask(self, command: str, **arguments: Any) -> Any:
        self._check_process()
        if self._lifeline is None:
            raise SessionError("this session is closed", fix="call atoll.connect() again")
        if self._figures and command in CARRIERS:
            arguments["figures"] = {n: float(t) / count for n, (t, count) in self._figures.items()}
            self._figures.clear()
        return self._dealer.ask(command, arguments, self._lifeline, self._deadline_s)

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
            lifeline.sendall(self._dealer.identity)
            if lifeline.recv(1) != b"!":
                raise lost(self._home)
        except OSError as error:
            lifeline.close()
            raise lost(self._home) from error
        return lifeline

    def _receive(self, name: str, *, writable: bool, **arguments: Any) -> Floats:
        """Ask for a region; its descriptor comes over the lifeline after the answer."""
        self._ask(name, **arguments)
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


_OPEN: weakref.WeakSet[Session] = weakref.WeakSet()


def _after_fork() -> None:
    """Close the lifelines that a forked child, such as a DataLoader's worker, has inherited.

    The daemon would take it for a trainer.
    """
    for session in _OPEN:
        session.forget_lifeline()


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
