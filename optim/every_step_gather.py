"""Bytes of all trainers at every step, with the newcomers of every_step.py.

Gathers have no shape that daemons could compare, so each says what it is for with its first byte:
a trainer that missed a round gathers for its step while the others already hand over state, and
neither must take the other's bytes for its own. What most are gathering for counts, as with calls
of different kinds; of several the purpose of the first. The others have missed that round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from atoll.collectives.codecs import F32
from atoll.collectives.errors import (
    CollectiveMismatchError,
    CollectiveMissedError,
    ConfigError,
    RemoteProtocolError,
    StateError,
)
from atoll.optim.every_step import CHECK_EVERY, TRIES_MAX, EveryStep
from atoll.optim.manifest import Manifest
from atoll.optim.sessions import OperationsSession
from atoll.optim.spec import RunSpec
from atoll.peer.session import Reduced

__all__ = ["PART_BYTES_MAX", "EveryStepGather", "PurposefulSession", "check_part"]

# A session's all-gather takes 64 KiB from each trainer; two bytes are the purpose and the flag.
PART_BYTES_MAX = 64 * 1024 - 2
PURPOSE_OTHER, PURPOSE_STEP = b"o", b"s"
PART, NEWCOMER, NOTHING = 0, 1, 2  # what a part is: one that counts, a newcomer's, no part at all


class PurposefulSession:
    """``peer``, whose all-gathers for different purposes (one byte each) are kept apart."""

    def __init__(self, peer: OperationsSession) -> None:
        self._peer = peer

    @property
    def peer_name(self) -> str:
        return self._peer.peer_name

    def attach(self, spec: RunSpec, manifest: Manifest, initial: Callable[[F32], None]) -> None:
        self._peer.attach(spec, manifest, initial)

    def all_reduce(self, tensor: Any, op: str = "mean", *, codec: str = "float32") -> Reduced:
        return self._peer.all_reduce(tensor, op, codec=codec)

    def all_gather(self, data: bytes, purpose: bytes = PURPOSE_OTHER) -> list[tuple[str, bytes]]:
        """Of those who gather for this purpose; CollectiveMissedError if most do for another."""
        given = self._peer.all_gather(purpose + data)
        for name, part in given:
            if not part:
                raise RemoteProtocolError(f"{name} gathers something else: its part is empty")
        counts = Counter(part[:1] for _, part in given)
        if max(counts, key=lambda p: counts[p]) != purpose:  # the first of several
            raise CollectiveMissedError("the other trainers were gathering something else")
        return [(name, part[1:]) for name, part in given if part[:1] == purpose]

    def close(self) -> None:
        self._peer.close()


class EveryStepGather(EveryStep):
    """``present``: the names of those who took part in the last exchange, newcomers among them, in
    the order that all see."""

    def __init__(
        self,
        model: nn.Module,
        inner: Sequence[Optimizer],
        peer: OperationsSession,
        spec: RunSpec,
        check_every: int = CHECK_EVERY,
    ) -> None:
        self._gathering = PurposefulSession(peer)
        super().__init__(model, inner, self._gathering, spec, check_every)
        self.present: tuple[str, ...] = ()

    def _gather(self, data: bytes) -> list[tuple[str, bytes]]:
        """What the trainers gave, in one order everywhere, but for the parts that were made with
        parameters that have been replaced meanwhile, as may have happened here too before it
        returns.

        StateError if no exchange comes about; IncompatibleRunError if another trainer does
        something else; ConfigError for more than PART_BYTES_MAX.
        """
        check_part(len(data))
        kind = PART
        for _ in range(TRIES_MAX):
            try:
                mine = bytes([NEWCOMER if self._is_new else kind]) + data
                parts = self._gathering.all_gather(mine, PURPOSE_STEP)
                kinds = {name: _kind(name, part) for name, part in parts}
                if NEWCOMER not in kinds.values():
                    self._compare_now_and_then()
                    self.present = tuple(kinds)
                    return [(name, part[1:]) for name, part in parts if kinds[name] == PART]
                if not self._take_state():
                    kind, data = NOTHING, b""
            except (CollectiveMissedError, CollectiveMismatchError):
                self._missed += 1
                self._is_new = True
        raise StateError(
            f"no exchange of step {self.steps} came about in {TRIES_MAX} tries",
            fix="see `atoll status`: trainers come and go, or miss rounds, faster than they step; "
            "or one of them runs another program",
        )


def check_part(nbytes: int) -> None:
    """ConfigError if a trainer may not give so many bytes at a step."""
    if nbytes > PART_BYTES_MAX:
        raise ConfigError(
            f"{nbytes:,} bytes from each trainer at every step; {PART_BYTES_MAX:,} fit",
            fix="send less at each step, or train a smaller model",
        )


def _kind(name: str, part: bytes) -> int:
    if not part or part[0] > NOTHING or (part[0] == NOTHING and len(part) > 1):
        raise RemoteProtocolError(
            f"{name} gave {len(part)} bytes that are no part of a step",
            fix="run the same version of atoll on all peers",
        )
    return part[0]
