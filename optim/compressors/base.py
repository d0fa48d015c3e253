"""Define a compressor: how a trainer's gradient travels, and what becomes of all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim.every_step.exchange import Exchange, Exchanged, Given
from atoll.optim.manifest import Manifest
from atoll.optim.run_spec import settings_text


class Compressor(ABC):
    """Turn the gradients of all trainers into one, for a single ``GradientAverage``.

    Its numbers must be equal on all peers, and its text is compared before the first step. Pure
    arithmetic: what is the same on all peers must come of the same bits by operations that are
    rounded alike everywhere, so not by a matrix product.
    """

    # Its name in the specification of a run; a user's own is called as it shows itself.
    wire: ClassVar[str] = ""
    # The inner optimizer must have no momentum of its own.
    has_momentum: ClassVar[bool] = False
    _manifest: Manifest | None = None

    def __str__(self) -> str:
        return settings_text(self.wire, self) if self.wire else repr(self)

    def begin(self, manifest: Manifest, codec: str, name: str) -> None:
        """Begin to compress the gradients of this model.

        ``codec`` is for vectors that are summed up, ``name`` this peer's. ConfigError if it has
        begun already.
        """
        if self._manifest is not None:
            raise ConfigError(
                f"this {type(self).__name__} compresses another model's gradients already",
                fix="make one for each GradientAverage",
            )
        self._manifest, self._codec, self._name = manifest, codec, name
        self._allocate(manifest)

    @abstractmethod
    def _allocate(self, manifest: Manifest) -> None:
        """Make what is kept from step to step, zero at first.

        ConfigError if it does not suit the model.
        """

    @property
    def trainer_bytes(self) -> float:
        """Return the bytes of host memory for each parameter, at most.

        These come beside the gradient and what other trainers give in a gather; see
        ``GradientAverage.trainer_bytes``.
        """
        return 8.0  # what is summed up, and the sum

    @property
    def shared(self) -> list[F32]:
        """Return what is equal on all peers; newcomers are given it, in place."""
        return []

    @abstractmethod
    def forget(self) -> None:
        """Forget what this peer keeps for itself: it belongs to parameters that are gone."""

    def kept(self) -> dict[str, Any]:
        """Return what this peer keeps for itself, for a file: arrays and numbers."""
        return {}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Restore what ``kept`` gave; the arrays are those of a compressor like this one."""
        assert not kept

    @abstractmethod
    def average(self, gradient: F32, step: int, exchange: Exchange) -> F32 | None:
        """Return the mean gradient, float32[n] that is the caller's; None if nobody has one.

        ``gradient``, of this trainer, is left alone; it is zeros where ``exchange.counts`` is not
        true. ``step``: of the run. What is kept changes after the last call of ``exchange``.
        """


@dataclass(kw_only=True)
class Dense(Compressor):
    """Average gradients without any compression but that of the codec."""

    wire: ClassVar[str] = "Dense"

    def _allocate(self, manifest: Manifest) -> None:
        """Make nothing, because nothing is kept."""

    def forget(self) -> None:
        """Forget nothing, because nothing is kept."""

    def average(self, gradient: F32, step: int, exchange: Exchange) -> F32 | None:
        return mean_of(exchange.total(gradient, self._codec))


def mean_of(found: Exchanged) -> F32 | None:
    """Return the mean, in place; None if nobody gave anything."""
    if not found.count:
        return None
    return np.divide(found.total, np.float32(found.count), out=found.total)


def check(ok: bool, compressor: Compressor, wanted: str) -> None:
    """Raise ConfigError unless ``ok``; ``wanted`` says what the numbers of a compressor must be."""
    if not ok:
        raise ConfigError(f"{compressor}"[:300], fix=f"it needs {wanted}")


def malformed(given: Given, why: str) -> RemoteProtocolError:
    """Return the error that is to be raised for what was given."""
    return RemoteProtocolError(
        f"what {given.name} gave of its gradient cannot be read: {why}",
        fix="run the same version of atoll on all peers",
    )
