"""Gather bytes of all trainers at every step, with the newcomers of every_step.py."""

from __future__ import annotations

from atoll.optim.every_step.every_step import EveryStep


class EveryStepGather(EveryStep):
    """Train with a gather of all trainers' bytes at every step.

    ``present``: the names of those who took part in the last exchange, newcomers among them, in the
    order that all see.
    """

    present: tuple[str, ...] = ()

    def _gather_step(self, data: bytes, counts: bool = True) -> list[tuple[str, bytes]]:
        """Return name and bytes of the trainers that had something to give (``counts``).

        They are in one order everywhere. Left out are the parts that were made with parameters that
        have been replaced meanwhile, as may have happened here too before it returns.

        Raise StateError if no exchange comes about, IncompatibleRunError if another trainer does
        something else, ConfigError for more than 16 MiB.
        """
        given = self._whole(
            lambda exchange: exchange.gather(data if exchange.counts else b""), counts
        )
        self.present = tuple(one.name for one in given)
        return [(one.name, one.data) for one in given if one.counts]
