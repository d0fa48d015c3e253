"""Describe the session that a method needs with a run: a daemon's, or one of a swarm.

A *session* is what people have: methods take it as ``peer``. Its *channel* is what methods use of
it and nobody else (``atoll.peer.client.trainer_channel.TrainerChannel`` says what each call does).
A worker of a swarm and a rank of a trainer are both in one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError
from atoll.optim.manifest import Manifest
from atoll.optim.pseudo_gradient import Writer
from atoll.optim.run_spec import FROZEN, RunSpec
from atoll.peer.client.session import Reduced
from atoll.peer.client.trainer_channel import Members, Outcome, Validation


class AnySession(Protocol):
    """Describe what all sessions have."""

    @property
    def channel(self) -> Channel: ...

    def close(self) -> None: ...


class TrainerSession(AnySession, Protocol):
    """Describe the session of a method with rounds."""

    @property
    def channel(self) -> RoundChannel: ...


class GossipSession(AnySession, Protocol):
    """Describe the session of a method whose trainers hand vectors to each other, one to one."""

    @property
    def channel(self) -> VectorChannel: ...


class OperationsSession(AnySession, Protocol):
    """Describe the session of a method whose trainers hold the parameters themselves.

    ``atoll.peer.client.session.Session`` says what each call does.
    """

    @property
    def round(self) -> int: ...

    @property
    def peer_name(self) -> str: ...

    def all_reduce(self, tensor: Any, op: str = "mean", *, codec: str = "float32") -> Reduced: ...

    def all_gather(self, data: bytes) -> list[tuple[str, bytes]]: ...


class Channel(Protocol):
    """Describe what all channels can do."""

    def observe(self, **figures: Any) -> None: ...

    def hurry(self, wait_s: float, /) -> AbstractContextManager[None]: ...

    def end_within(self, wait_s: float, /) -> None: ...

    def attach(
        self,
        spec: RunSpec,
        manifest: Manifest,
        initial: Callable[[F32], None],
        frozen: str = FROZEN[0],
        /,
    ) -> None: ...


class RoundChannel(Channel, Protocol):
    """Describe the channel of a method whose daemons step the run's parameters by rounds."""

    round: int
    epoch: int
    operations: int

    @property
    def is_stale(self) -> bool: ...

    def submit(self, write: Writer, weight: float, fragment: int = 0, /) -> None: ...

    def wait(self, fragment: int = 0, /) -> Outcome: ...

    def next_fragment(self) -> int: ...

    def replicas(self) -> int: ...

    def first_rank(self, value: float, /) -> float: ...

    def pull(self, read: Callable[[F32], None], /) -> Any: ...

    def check(self) -> None: ...


class VectorAsked(Protocol):
    """Describe a vector that was asked for, as ``trainer_channel.AskedVector`` does."""

    def wait(self, timeout_s: float, /) -> None: ...

    def look(self, timeout_s: float, /) -> str: ...

    def read(self) -> F32: ...

    def drop(self) -> None: ...


class VectorChannel(Channel, Protocol):
    """Describe the channel of a method whose trainers hand vectors to each other, one to one."""

    @property
    def peer_name(self) -> str: ...

    @property
    def connection(self) -> int: ...

    def pull(self, read: Callable[[F32], None], /) -> Any: ...

    def members(self) -> Members: ...

    def publish(self, name: str, number: int, values: F32, codec: str, /) -> None: ...

    def newest(self, peer: str, name: str, /) -> int: ...

    def ask_vector(
        self, peer: str, name: str, number: int, elements: int, codec: str, /
    ) -> VectorAsked: ...

    def check(self) -> None: ...


@runtime_checkable
class ValidationChannel(Protocol):
    """Describe the channel of a method whose trainers take local steps of each other again."""

    def submit(
        self, write: Writer, weight: float, fragment: int = 0, steps: bytes = b"", /
    ) -> None: ...

    def validations(self) -> list[Validation]: ...

    def shown(self, validation: Validation, /) -> None: ...

    def fits(
        self, validation: Validation, fill: Callable[[F32], None], /, *, start: bool
    ) -> bool: ...

    def judged(self, validation: Validation, judgement: int | None, why: str, /) -> None: ...

    def publish(self, name: str, number: int, values: F32, codec: str, /) -> None: ...

    def ask_vector(
        self, peer: str, name: str, number: int, elements: int, codec: str, /
    ) -> VectorAsked: ...


@runtime_checkable
class LeadingRank(Protocol):
    """Describe ``ranks`` processes that are one trainer; number 0 has a daemon's channel."""

    ranks: int
    rank: int

    def lead(self, ask: Callable[[VectorChannel], F32], elements: int, /) -> F32:
        """Ask the channel of the one that has it; return float32[elements] in all of them."""
        ...

    def all_true(self, mine: bool, /) -> bool:
        """Return whether ``mine`` is true in each of them."""
        ...

    def leaves_after(self, step: int, asked: bool, /) -> bool:
        """Return whether all of them leave after this step, as the first was ``asked`` to."""
        ...

    def total(self, mine: float, /) -> float:
        """Return the sum of what each of them has."""
        ...

    def whole(self, write: Callable[[F32], None], flat: F32, part: slice, /) -> None:
        """Fill that part of ``flat`` in each of them with what all of them ``write``.

        Each writes its rows of float32[elements].
        """
        ...


def every_rank(channel: object, mine: bool) -> bool:
    """Return whether ``mine`` is true in every process of this trainer."""
    return channel.all_true(mine) if isinstance(channel, LeadingRank) else mine


def whole(
    channel: object, write: Callable[[F32], None], flat: F32, part: slice = slice(None)
) -> None:
    """Write the model, or a part of it, to float32[elements]: the rows of every process.

    ``write`` writes those of this process of the trainer; ``part`` is the slice that is written.
    """
    if isinstance(channel, LeadingRank):
        channel.whole(write, flat, part)
    else:
        write(flat)


def check_ranks(peer: object, ranks: int) -> None:
    """Raise ConfigError if the model is sharded over more processes than ``peer`` is of."""
    own = peer.ranks if isinstance(peer, LeadingRank) else 1
    if ranks > own:
        raise ConfigError(
            f"the model is sharded over {ranks} ranks, and this session is of {own}: all but their "
            "rows would be lost",
            fix="give it RankSession(session)"
            + (", with the group of all ranks that share the model" if own > 1 else ""),
        )


def check_alone(method: str, peer: object, ranks: int = 1) -> None:
    """Raise ConfigError if the trainer has, or the model is sharded over, several processes."""
    if ranks > 1 or isinstance(peer, LeadingRank):
        raise ConfigError(
            f"{method} is for trainers of one process, and this one "
            + (f"has a model that is sharded over {ranks} ranks" if ranks > 1 else "has ranks"),
            fix="use a method with rounds, such as DiLoCo, and give it RankSession(session); or "
            "give each process a daemon and a whole model of its own",
        )
