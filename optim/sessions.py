"""Describe the session that an optimizer needs with a run: a daemon's, or one of a swarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from atoll.collectives.codecs import F32
from atoll.optim.manifest import Manifest
from atoll.optim.run_spec import FROZEN, RunSpec
from atoll.peer.client.session import Outcome
from atoll.peer.client.session_ops import Reduced
from atoll.peer.client.session_validation import Validation
from atoll.peer.client.session_vectors import Members


class Attachable(Protocol):
    """Describe what all sessions can do."""

    def observe(self, **figures: Any) -> None: ...

    def attach(
        self,
        spec: RunSpec,
        manifest: Manifest,
        initial: Callable[[F32], None],
        frozen: str = FROZEN[0],
        /,
    ) -> None: ...

    def close(self) -> None: ...


class TrainerSession(Attachable, Protocol):
    """Describe a trainer's session; ``atoll.peer.client.session.Session`` says what each call
    does."""

    round: int
    epoch: int
    operations: int

    def submit(self, fill: Callable[[F32], None], weight: float, fragment: int = 0, /) -> None: ...

    def wait(self, fragment: int = 0, /) -> Outcome: ...

    def next_fragment(self) -> int: ...

    def replicas(self) -> int: ...

    def first_rank(self, value: float, /) -> float: ...

    def pull(self, read: Callable[[F32], None], /) -> Any: ...

    def check(self) -> None: ...


class OperationsSession(Attachable, Protocol):
    """Describe the session of a method whose trainers hold the parameters themselves."""

    round: int

    @property
    def peer_name(self) -> str: ...

    def all_reduce(self, tensor: Any, op: str = "mean", *, codec: str = "float32") -> Reduced: ...

    def all_gather(self, data: bytes) -> list[tuple[str, bytes]]: ...


class VectorAsked(Protocol):
    """Describe a vector that was asked for; see ``atoll.peer.client.session.AskedVector``."""

    def wait(self, timeout_s: float, /) -> None: ...

    def look(self, timeout_s: float, /) -> str: ...

    def read(self) -> F32: ...

    def drop(self) -> None: ...


class GossipSession(Attachable, Protocol):
    """Describe the session of a method whose trainers hand vectors to each other, one to one."""

    @property
    def peer_name(self) -> str: ...

    def pull(self, read: Callable[[F32], None], /) -> Any: ...

    def members(self) -> Members: ...

    def publish(self, name: str, number: int, values: F32, codec: str, /) -> None: ...

    def newest(self, peer: str, name: str, /) -> int: ...

    def ask_vector(
        self, peer: str, name: str, number: int, elements: int, codec: str, /
    ) -> VectorAsked: ...

    def check(self) -> None: ...


@runtime_checkable
class ValidatingSession(Protocol):
    """Describe the session of a method whose trainers take local steps of each other again."""

    def submit(
        self, fill: Callable[[F32], None], weight: float, fragment: int = 0, steps: bytes = b"", /
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
    """Describe several processes that are one trainer, ``ranks`` of them; one has a session."""

    ranks: int

    def lead(self, ask: Callable[[GossipSession], F32], elements: int, /) -> F32:
        """Ask the session of the one that has it; return float32[elements] in all of them."""
        ...

    def all_true(self, mine: bool, /) -> bool:
        """Return whether ``mine`` is true in each of them."""
        ...

    def total(self, mine: float, /) -> float:
        """Return the sum of what each of them has."""
        ...

    def whole(self, write: Callable[[F32], None], flat: F32, part: slice, /) -> None:
        """Fill that part of ``flat`` in each of them with what all of them ``write``.

        Each writes its rows of float32[elements].
        """
        ...
