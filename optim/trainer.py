"""What every method has: an end, and learning rates that follow the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from atoll.optim.schedules import Schedules
from atoll.optim.sessions import Closable

__all__ = ["Trainer"]


class Trainer(ABC):
    """Use it as a context manager or call ``close()``; either closes ``peer`` too."""

    peer: Closable

    def __init__(self) -> None:
        self._schedules = Schedules()

    @property
    @abstractmethod
    def global_step(self) -> int:
        """Steps that the run has behind it, as seen by this trainer."""

    def follow(self, scheduler: LRScheduler) -> None:
        """Keep the learning rates of ``scheduler`` those of ``global_step``: now, whenever the run
        has gone on without this trainer, and when it takes the run's state anew.

        As usual call ``scheduler.step()`` once after each step of the (last) inner optimizer. Give
        it as it was made: its state need not be saved. ConfigError for one that needs a metric.
        """
        self._schedules.add(scheduler, self.global_step)

    def report(self, **figures: float | Tensor) -> None:
        """Tell this peer's daemon how training goes: ``report(loss=loss)`` after a step, as often
        as you like. The mean of what was reported since the last round (of replicas: outer step)
        travels to the daemon with the next, and no further: ``atoll status`` shows it, and the
        line of each round in the daemon's log has the ``loss``. Costs nothing worth mentioning: a
        tensor is read when it travels. Where the optimizer is given a closure that returns a loss,
        that is reported without a call. Of ranks the first one's counts.
        """
        self.peer.observe(**figures)

    def close(self) -> None:
        """Unhook inner optimizers and close the session. The model keeps its parameters."""
        self.peer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
