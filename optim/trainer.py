"""Give every method a beginning and an end, and learning rates that follow the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Self

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from atoll.collectives.codecs import F32
from atoll.optim.manifest import Manifest
from atoll.optim.model_io import ModelVector
from atoll.optim.run_spec import RunSpec
from atoll.optim.schedules import Schedules
from atoll.optim.sessions import Attachable


class Trainer(ABC):
    """Begin and end the training of a model with a method.

    Use it as a context manager or call ``close()``; either closes ``peer`` too.

    ``frozen`` (of every method): parameters that are not trained must be the same on all peers,
    and the persistent buffers must be alike: IncompatibleRunError names the tensors that differ.
    "warn" prints them instead, and "ignore" does not look, for those who mean it; it need not be
    the same on all. Parameters that are frozen, unfrozen or added later are a ConfigError at the
    next step.
    """

    peer: Attachable
    _vector: ModelVector

    def __init__(self) -> None:
        self._schedules = Schedules()

    @property
    @abstractmethod
    def global_step(self) -> int:
        """Return the steps that the run has behind it, as seen by this trainer."""

    def follow(self, scheduler: LRScheduler) -> None:
        """Keep the learning rates of ``scheduler`` those of ``global_step``.

        It does so now, whenever the run has gone on without this trainer, and when it takes the
        run's state anew.

        As usual call ``scheduler.step()`` once after each step of the (last) inner optimizer. Give
        it as it was made: its state need not be saved. ConfigError for one that needs a metric.
        """
        self._schedules.add(scheduler, self.global_step)

    def report(self, **figures: float | Tensor) -> None:
        """Tell this peer's daemon how training goes.

        Call ``report(loss=loss)`` after a step, as often as you like. The mean of what was reported
        since the last round (of replicas: outer step) travels to the daemon with the next, and no
        further: ``atoll status`` shows it, and the line of each round in the daemon's log has the
        ``loss``. Costs nothing worth mentioning: a tensor is read when it travels. Where the
        optimizer is given a closure that returns a loss, that is reported without a call. Of ranks
        the first one's counts.
        """
        self.peer.observe(**figures)

    def _attach(
        self, spec: RunSpec, manifest: Manifest, initial: Callable[[F32], None], frozen: str
    ) -> None:
        """Attach ``peer`` after what can be checked here; what is not trained goes along."""
        fingerprint = self._vector.frozen.fingerprint(frozen)
        self.peer.attach(spec, replace(manifest, frozen=fingerprint), initial, frozen)

    def close(self) -> None:
        """Unhook inner optimizers and close the session; the model keeps its parameters."""
        self.peer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
