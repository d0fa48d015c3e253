"""Provide a session's own collectives, for training loops that are written by hand.

    session = atoll.connect()
    here = session.barrier()                      # names of the trainers that were there
    for peer, data in session.all_gather(b"..."):
        ...
    mean = session.all_reduce(gradient).value     # numpy array or torch tensor, on any device

Each call is one round of the run. All attached trainers take part, each must make the same call,
and all get the same result or none. Trainers come and go: who has died meanwhile is not in the
result, and who has joined is in the next one. Without an optimizer the first call attaches the
session, and the run is one for collectives alone.
"""

from __future__ import annotations

import math
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.codecs import get_codec
from atoll.collectives.errors import (
    CodecError,
    CollectiveMismatchError,
    CollectiveMissedError,
    ConfigError,
    RoundError,
)
from atoll.collectives.units import duration
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import BLOB_BYTES_MAX, COLLECTIVES, FROZEN, RunSpec
from atoll.peer.client.console import say
from atoll.peer.client.flat_vectors import Vector, vector_of
from atoll.peer.client.ipc_client import PROGRESS_S, IpcClient
from atoll.peer.membership.operations import BARRIER, OBJECT_BYTES_MAX, OPS
from atoll.peer.membership.view import MEMBERS_MAX
from atoll.peer.rounds.entries import GATHER, REDUCE

Floats = NDArray[np.float32]
POLL_S = 0.05  # while a run has no state yet, or is in a round that is not ours
SUM_MAX = 3.4e38 / MEMBERS_MAX  # so that a sum over all members of a view is finite
_MISSED_FIX = (
    "call it again: it takes part in the next round. A trainer is waited for half a minute; where "
    "calls are further apart than that, let every trainer make the same calls in the same order"
)
_MISMATCH_FIX = (
    "let every trainer make the same calls, with the same arguments, in the same order; who comes "
    "later begins with the call that the others make"
)


@dataclass(frozen=True, slots=True)
class Reduced:
    """Hold what an all-reduce has come to.

    ``value`` is a new array or tensor like the one that was given, ``peers`` are the names of those
    whose tensors are in it, and ``round`` is the run's round.
    """

    value: Any
    peers: tuple[str, ...]
    round: int


class Operations(ABC):
    """Provide the part of a session that needs nothing but the rounds of its run."""

    round: int
    operations = 0  # rounds that were calls of this trainer, whatever came of them
    _dealer: IpcClient
    _lifeline: socket.socket | None
    _deadline_s: float
    _region: Floats | None
    _calls = 0  # of this session, so that a late answer is not taken for another one's
    # Shared with the daemon: what goes in, then what comes out, float32 each.
    _exchange: Floats | None = None

    def barrier(self) -> tuple[str, ...]:
        """Wait until all attached trainers have called it. Return their names, one's own too.

        Raises CollectiveMismatchError if most trainers called something else, or as many, and one
        of them has been there longer; CollectiveMissedError if the round went on without this one;
        NoQuorumError or RoundTimeoutError if nothing was committed within the run's round deadline.
        """
        return tuple(name for name, _ in self._gather(b"", BARRIER))

    def all_gather(self, data: bytes) -> list[tuple[str, bytes]]:
        """Return the bytes and peer names of all trainers, in the same order everywhere.

        For small things: 64 KiB from each, 512 KiB from all. Raises ConfigError for more, at all
        trainers alike if it is together that they are too many; other errors as for
        :meth:`barrier`.
        """
        if len(data) > OBJECT_BYTES_MAX:
            raise ConfigError(
                f"all_gather() of {len(data):,} bytes; one trainer may give {OBJECT_BYTES_MAX:,}",
                fix="gather less, or use all_reduce for vectors",
            )
        return self._gather(bytes(data), "")

    def all_reduce(self, tensor: Any, op: str = "mean", *, codec: str = "float32") -> Reduced:
        """Return the mean, sum, max or min (``op``) of every element over all trainers.

        ``tensor`` itself is left alone. All trainers get the same bits.

        ``tensor``: a numpy array or torch tensor of float32, float16 or bfloat16, of any shape, on
        any device; it is computed in float32. All must give as many elements, with the same ``op``
        and ``codec``. ``codec``: how values travel (see ``atoll.collectives.codecs``); other ones
        than float32 save bytes and lose what they lose: nothing is fed back.

        Raises ConfigError for other tensors or codecs, CodecError for NaN or Inf (in a sum, for
        more than 3.3e35); other errors as for :meth:`barrier`.
        """
        vector = vector_of(tensor)
        if op not in OPS:
            raise ConfigError(f"op is {op!r}", fix=f"use one of {', '.join(OPS)}")
        check_codec(codec, "all_reduce()")
        self._ready()
        flat = self._memory_for(vector.elements)
        vector.write(flat[0])
        _check_values(flat[0], vector, op)
        shared, self._exchange = self._exchange, None  # given up, it may yet be read by a round
        outcome = self._operate(kind=REDUCE, elements=vector.elements, op=op, codec=codec)
        self._exchange = shared
        return Reduced(vector.read(flat[1]), tuple(outcome["peers"]), outcome["round"])

    def _memory_for(self, elements: int) -> tuple[Floats, Floats]:
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

    def _gather(self, data: bytes, op: str) -> list[tuple[str, bytes]]:
        outcome = self._operate(kind=GATHER, op=op, given=data)
        sizes = dict(outcome["sizes"])
        if sizes:
            largest = max(sizes, key=lambda name: sizes[name])
            raise ConfigError(
                f"the objects of {len(sizes)} trainers have {sum(sizes.values()):,} bytes together,"
                f" the largest is {largest}'s with {sizes[largest]:,}; {BLOB_BYTES_MAX:,} fit into"
                " one round",
                fix="gather less from each trainer, in several rounds",
            )
        return [(name, given) for name, given in outcome["objects"]]

    # ------------------------------------------------------------ inside

    def _ready(self) -> None:
        if self._region is None:
            self.attach(*_collectives(), lambda flat: flat.fill(0.0))

    def _operate(self, **call: Any) -> dict[str, Any]:
        """Make the call, as soon as the daemon can take it, and wait for its outcome."""
        self._ready()
        self._calls += 1
        self._dealer.events.clear()  # answers to calls that were given up
        started_s = said_s = time.monotonic()
        while why := self._ask("operate", call=self._calls, **call):
            now_s = time.monotonic()
            if now_s - started_s > self._deadline_s:
                raise self._too_late(now_s - started_s)
            if now_s - said_s > PROGRESS_S:
                said_s = now_s
                so_far = duration(now_s - started_s)
                say(f"this trainer cannot take part yet ({so_far} so far): {why}")
            self._dealer.receive(POLL_S, self._lifeline)
        outcome = self._outcome(self._calls)
        elapsed_s = time.monotonic() - started_s
        self.round = outcome["round"]
        self.operations += 1
        if outcome["kind"] == "mismatch":
            raise CollectiveMismatchError(
                outcome["text"], fix=_MISMATCH_FIX, phase="barrier", elapsed_s=elapsed_s
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

    @abstractmethod
    def attach(
        self,
        spec: RunSpec,
        manifest: Manifest,
        initial: Callable[[Floats], None],
        frozen: str = FROZEN[0],
    ) -> None:
        """Become the daemon's trainer."""

    @abstractmethod
    def _ask(self, command: str, **arguments: Any) -> Any:
        """Return the daemon's answer to a command."""

    @abstractmethod
    def _receive(self, name: str, *, writable: bool, **arguments: Any) -> Floats:
        """Return memory of the daemon's."""

    @abstractmethod
    def _outcome(self, call: int) -> dict[str, Any]:
        """Return what became of the submission with this number, as the daemon says it."""

    @abstractmethod
    def _too_late(self, elapsed_s: float) -> RoundError:
        """Return the error for a wait that exceeds the round deadline."""


def check_codec(name: str, call: str) -> None:
    """Raise ConfigError for a codec with a key, which a session's ``call`` has not.

    For an unknown codec, raises CodecError, which lists the known ones.
    """
    if get_codec(name).contract.keyed:
        raise ConfigError(
            f"codec {name!r} needs a key for each vector, which {call} has not",
            fix="use float32, bfloat16 or int8",
        )


def _check_values(flat: Floats, vector: Vector, op: str) -> None:
    """Raise CodecError for values that could not be encoded, or summed.

    They are found here, where they were made: the others are not harmed.
    """
    largest = max(float(flat.max()), -float(flat.min()))  # both hand on NaN
    if math.isfinite(largest) and (op != "sum" or largest <= SUM_MAX):
        return
    what = "NaN or Inf in it" if not math.isfinite(largest) else f"values up to {largest:g} in it"
    most = f"; a sum takes at most {SUM_MAX:g} of each trainer" if math.isfinite(largest) else ""
    raise CodecError(
        f"all_reduce() of a {vector} with {what}{most}",
        fix="look for the step that made them; nothing was sent to the other trainers, who go on "
        "without this one after half a minute, or at once when it has ended",
    )


def _collectives() -> tuple[RunSpec, Manifest]:
    """Return what a run without an optimizer begins with: one parameter that nobody changes."""
    spec = RunSpec(method=COLLECTIVES, sync_every=1, codec="float32")
    return spec, Manifest.of([Parameter(COLLECTIVES, (1,))])
