"""A session's part in the validation of local steps: what the daemon wants of its trainer.

``atoll.optim.replay.validating`` uses it. What is shown goes from trainer to trainer as a published
vector (session_gossip.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import SessionError

__all__ = ["Validation", "Validations"]

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Validation:
    """One segment of the local steps of one peer, drawn in a round that is committed.

    ``own``: this trainer's own, to be shown. Otherwise those of ``target``, called ``name``, to be
    taken again. The segment is the one with ``number`` modulo their count. ``work`` is the
    commitment to the steps of the round, ``before`` that of the last round before in which this
    peer counted, or b"".
    """

    terms: bytes
    round: int
    target: bytes
    name: str
    own: bool
    number: int
    work: bytes
    before: bytes


class Validations(ABC):
    """Methods of a session."""

    _region: Floats | None

    @abstractmethod
    def _ask(self, command: str, **arguments: Any) -> Any: ...

    def validations(self) -> list[Validation]:
        """What is open now. It stays so until ``shown`` or ``judged``, or until it is too late."""
        return [Validation(**each) for each in self._ask("validations")]

    def shown(self, validation: Validation) -> None:
        """The own segment was published, or cannot be."""
        self._ask("shown", terms=validation.terms)

    def fits(self, validation: Validation, fill: Callable[[Floats], None], *, start: bool) -> bool:
        """Whether parameters that ``fill`` writes are the run's before the round (``start``), or
        those that its peer has submitted. Between two submissions only. SessionError otherwise, or
        if the round is too long ago."""
        if self._region is None:
            raise SessionError("fits before attach", fix="call attach first")
        fill(self._region)
        place = {"terms": validation.terms, "target": validation.target}
        return bool(self._ask("fits", start=start, **place))

    def judged(self, validation: Validation, judgement: int | None, why: str) -> None:
        """0: right, 1: wrong, 2: withheld; None: nothing can be said. Judgement in
        peer/audit/statements.py."""
        place = {"terms": validation.terms, "target": validation.target}
        self._ask("judged", judgement=judgement, why=why, **place)
