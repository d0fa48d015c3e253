"""What an optimizer needs of its connection to a run: a daemon's session, or one of a swarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from atoll.collectives.codecs import F32
from atoll.optim.manifest import Manifest
from atoll.optim.spec import RunSpec
from atoll.peer.session import Outcome, Reduced

__all__ = ["OperationsSession", "TrainerSession"]


class TrainerSession(Protocol):
    """``atoll.peer.session.Session`` says what each of these does."""

    round: int
    epoch: int

    def attach(
        self, spec: RunSpec, manifest: Manifest, initial: Callable[[F32], None], /
    ) -> None: ...

    def submit(self, fill: Callable[[F32], None], weight: float, /) -> None: ...

    def wait(self) -> Outcome: ...

    def pull(self, read: Callable[[F32], None], /) -> Any: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class OperationsSession(Protocol):
    """Of a method whose trainers hold the parameters themselves."""

    round: int

    @property
    def peer_name(self) -> str: ...

    def attach(
        self, spec: RunSpec, manifest: Manifest, initial: Callable[[F32], None], /
    ) -> None: ...

    def all_reduce(self, tensor: Any, op: str = "mean", *, codec: str = "float32") -> Reduced: ...

    def all_gather(self, data: bytes) -> list[tuple[str, bytes]]: ...

    def close(self) -> None: ...
