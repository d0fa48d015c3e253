"""Connect a trainer to its local daemon: what training loops that are written by hand call.

    session = atoll.connect()                     # the daemon of the default home
    here = session.barrier()                      # names of the trainers that were there
    for peer, data in session.all_gather(b"..."):
        ...
    mean = session.all_reduce(gradient).value     # numpy array or torch tensor, on any device

Each of these calls is one round of the run. All attached trainers take part, each must make the
same call, and all get the same result or none. Trainers come and go: who has died meanwhile is not
in the result, and who has joined is in the next one. Without an optimizer the first call attaches
the session, and the run is one for collectives alone. ``gather(at_least=N)`` waits for so many
trainers, ``share(state)`` gives newcomers what the others have (own_loops.py).

A session belongs to one process and one thread. What methods of ``atoll.optim`` have to say to the
daemon goes through its ``channel`` (trainer_channel.py).
"""

from __future__ import annotations

import math
import operator
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.collectives.errors import CodecError, ConfigError
from atoll.optim.run_spec import BLOB_BYTES_MAX, LENGTH_BYTES
from atoll.peer.client.flat_vectors import Vector, vector_of
from atoll.peer.client.own_loops import OwnLoops
from atoll.peer.client.trainer_channel import (
    RECONNECT_S,
    AskedVector,
    ExchangeMemory,
    Floats,
    Members,
    TrainerChannel,
    check_codec,
)
from atoll.peer.membership.operations import BARRIER, OBJECT_BYTES_MAX, OPS
from atoll.peer.membership.view import MEMBERS_MAX
from atoll.peer.net.identity import default_home
from atoll.peer.rounds.entries import GATHER

CONNECT_TIMEOUT_S = 10.0  # a daemon answers in milliseconds; one that starts up needs a second
SUM_MAX = 3.4e38 / MEMBERS_MAX  # so that a sum over all members of a view is finite


def connect(
    home: str | Path | None = None,
    *,
    timeout_s: float = CONNECT_TIMEOUT_S,
    reconnect_s: float = RECONNECT_S,
) -> Session:
    """Open a session with the daemon of ``home``.

    ``home`` is by default ATOLL_HOME, else ``atoll`` in the user's state folder. Raises
    NoDaemonError if none answers within ``timeout_s``, or a second for one that hangs.

    ``reconnect_s``: where the daemon ends, calls wait so long until it is started again, and go on:
    with the local work where the run is where it was or a round further, else from the run's
    parameters. 0: they raise DaemonLostError at once. ConfigError for a negative number.
    """
    if not 0 <= reconnect_s < math.inf:
        raise ConfigError(f"reconnect_s={reconnect_s}", fix="give seconds, or 0")
    return Session(default_home(home), timeout_s, reconnect_s)


@dataclass(frozen=True, slots=True)
class Reduced:
    """Hold what an all-reduce has come to.

    ``value`` is a new array or tensor like the one that was given, ``peers`` are the names of those
    whose tensors are in it, and ``round`` is the run's round.
    """

    value: Any
    peers: tuple[str, ...]
    round: int


class Session(OwnLoops):
    """Connect one trainer with its daemon. Made by :func:`connect`.

    Any method may raise DaemonLostError, and a collective whose daemon was started again meanwhile
    CollectiveLostError: then the session is attached again. ``run``: the name of the run;
    ``peer_name``: that of this peer; ``round``: the run's, as this trainer knows it.
    """

    def __init__(self, home: Path, timeout_s: float, reconnect_s: float = RECONNECT_S) -> None:
        self.channel = TrainerChannel(home, timeout_s, reconnect_s)
        self.run, self.peer_name = self.channel.run, self.channel.peer_name
        self._buffers: dict[int, ExchangeMemory] = {}  # by where they lie

    @property
    def round(self) -> int:
        return self.channel.round

    def barrier(self) -> tuple[str, ...]:
        """Wait until all attached trainers have called it. Return their names, one's own too.

        Raises CollectiveMismatchError if most trainers called something else, or as many, and one
        of them has been there longer; CollectiveMissedError if the round went on without this one;
        NoQuorumError or RoundTimeoutError if nothing was committed within the run's round deadline.
        """
        return tuple(name for name, _ in self._gather(b"", BARRIER))

    def all_gather(self, data: bytes) -> list[tuple[str, bytes]]:
        """Return the bytes and peer names of all trainers, in the same order everywhere.

        For small things: 64 KiB from each, 512 KiB from all, with 4 bytes for the length of each.
        Raises ConfigError for more, at all trainers alike if it is together that they are too many;
        other errors as for :meth:`barrier`.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ConfigError(
                f"all_gather() of {type(data).__name__}, and it takes bytes",
                fix="encode it, for example by json.dumps(value).encode()",
            )
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
        more than 3.3e35), or where the result has larger values than the dtype of ``tensor`` takes;
        other errors as for :meth:`barrier`.
        """
        vector = vector_of(tensor)
        if op not in OPS:
            raise ConfigError(f"op is {op!r}", fix=f"use one of {', '.join(OPS)}")
        check_codec(codec, "all_reduce()")
        self.channel.check()
        self.channel.attach_for_collectives()
        buffer = self._buffers.get(vector.address)
        if buffer is not None and not self.channel.has(buffer):
            buffer = None  # a call with it has failed: now it is a tensor as any other
        memory = buffer or self.channel.exchange_memory(vector.elements)
        given, most = memory.given(vector.elements), SUM_MAX if op == "sum" else math.inf
        if not vector.write_finite(given, most):
            vector.write(given)
            raise _unfit(given, vector, most)
        with self._in_step():
            outcome, result = self.channel.reduce(memory, vector.elements, op, codec)
        value = vector.read(result) if buffer is None else vector.over(result)
        return Reduced(value, tuple(outcome["peers"]), outcome["round"])

    def buffer(self, *shape: int) -> Any:
        """Return float32 zeros of this shape in memory that the daemon shares.

        ``all_reduce`` of it, or of what begins where it begins, copies nothing: the result's
        ``value`` lies beside it, and is good until the next call with the same buffer. A torch
        tensor, or a numpy array in a script that has not imported torch. It takes twice the memory
        of its values, as long as it is in use. After a call that has failed, or after the daemon
        was started again, it is a tensor like any other: make a new one.

        Raises ConfigError for an empty shape, for more than there is memory for, or for more
        buffers than 15.
        """
        shape = tuple(map(operator.index, shape))  # those of numpy are no Python numbers
        elements = math.prod(shape)
        if elements < 1:
            raise ConfigError(f"a buffer of shape {shape}", fix="say how many elements it has")
        self.channel.check()
        self.channel.attach_for_collectives()
        memory = self.channel.new_exchange_memory(elements)
        flat = memory.given(elements).reshape(shape)
        self._buffers[flat.ctypes.data] = memory
        weakref.finalize(flat, self._let_go, flat.ctypes.data, memory).atexit = False
        torch = sys.modules.get("torch")
        return flat if torch is None else torch.from_numpy(flat)

    def _let_go(self, address: int, memory: ExchangeMemory) -> None:
        if self._buffers.get(address) is memory:
            del self._buffers[address]
        self.channel.drop(memory)

    def members(self) -> Members:
        """Return the members of the run; only this peer while it is in no view."""
        return self.channel.members()

    def publish(self, name: str, number: int, values: Floats, codec: str = "float32") -> None:
        """Let others have float32[n] under this name and number; see ``TrainerChannel.publish``."""
        self.channel.attach_for_collectives()
        self.channel.publish(name, number, values, codec)

    def newest(self, peer: str, name: str) -> int:
        """Return the number of a peer's newest vector of this name, 0 for none."""
        self.channel.attach_for_collectives()
        return self.channel.newest(peer, name)

    def ask_vector(
        self, peer: str, name: str, number: int, elements: int, codec: str = "float32"
    ) -> AskedVector:
        """Have a vector of a peer fetched as soon as it is published; its ``wait`` waits for it.

        Raises ConfigError for more than 64 at a time; each counts until it is dropped, or nothing
        refers to it any more.
        """
        self.channel.attach_for_collectives()
        return self.channel.ask_vector(peer, name, number, elements, codec)

    def observe(self, **figures: Any) -> None:
        """Remember figures of a local step, whose means travel with the next submission."""
        self.channel.observe(**figures)

    def report(self, **metrics: float) -> None:
        """Send figures that `atoll status` shows for this trainer.

        Raises SessionError before an optimizer is made or a collective is called.
        """
        self.channel.ask("report", metrics={name: float(value) for name, value in metrics.items()})

    def status(self) -> dict[str, Any]:
        """Return what `atoll status` shows, as data."""
        return self.channel.status()

    def close(self) -> None:
        """End the session. What was submitted to a round in progress still counts."""
        self.channel.close()

    def _gather(self, data: bytes, op: str) -> list[tuple[str, bytes]]:
        self.channel.check()
        with self._in_step():
            outcome = self.channel.operate(kind=GATHER, op=op, given=data)
        sizes = dict(outcome["sizes"])
        if sizes:
            largest = max(sizes, key=lambda name: sizes[name])
            together = sum(sizes.values()) + LENGTH_BYTES * len(sizes)
            raise ConfigError(
                f"the objects of {len(sizes)} trainers have {together:,} bytes together, with their"
                f" lengths, the largest is {largest}'s with {sizes[largest]:,}; {BLOB_BYTES_MAX:,}"
                " fit into one round",
                fix="gather less from each trainer, in several rounds",
            )
        return [(name, given) for name, given in outcome["objects"]]


def _unfit(flat: Floats, vector: Vector, most: float) -> CodecError:
    """Return what is wrong with values that could not be encoded, or summed.

    They are found here, where they were made: the others are not harmed.
    """
    largest = max(float(flat.max()), -float(flat.min()))  # both hand on NaN
    what, limit = "NaN or Inf in it", ""
    if math.isfinite(largest):
        what = f"values up to {largest:g} in it"
        limit = f"; a sum takes at most {most:g} of each trainer"
    return CodecError(
        f"all_reduce() of a {vector} with {what}{limit}",
        fix="look for the step that made them; nothing was sent to the other trainers, who go on "
        "without this one after half a minute, or at once when it has ended",
    )
