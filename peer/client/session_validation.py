"""Do a session's part in the validation of local steps: what the daemon wants of its trainer.

``atoll.optim.replay.validating`` uses it. What is shown goes from trainer to trainer as a published
vector (session_vectors.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import SessionError

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Validation:
    """Describe one segment of one peer's local steps, drawn in a round that is committed.

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


class SessionValidations(ABC):
    """Provide the methods of a session for validation."""

    _region: Floats | None

    @abstractmethod
    def _ask(self, command: str, **arguments: Any) -> Any: ...

    def validations(self) -> list[Validation]:
        """Return what is open now.

        It stays so until ``shown`` or ``judged``, or until it is too late.
        """
        return [Validation(**each) for each in self._ask("validations")]

    def shown(self, validation: Validation) -> None:
        """Tell the daemon that the own segment was published, or cannot be."""
        self._ask("shown", terms=validation.terms)

    def fits(self, validation: Validation, fill: Callable[[Floats], None], *, start: bool) -> bool:
        """Return whether parameters that ``fill`` writes are those of the validation's round.

        With ``start`` they are the run's before the round, else those that its peer has submitted.
        Between two submissions only: raises SessionError otherwise, or if the round is too long
        ago.
        """
        if self._region is None:
            raise SessionError("fits before attach", fix="call attach first")
        fill(self._region)
        place = {"terms": validation.terms, "target": validation.target}
        return bool(self._ask("fits", start=start, **place))

    def judged(self, validation: Validation, judgement: int | None, why: str) -> None:
        """Tell the daemon how a segment was judged.

        ``judgement`` is 0: right, 1: wrong, 2: withheld; None: nothing can be said. See Judgement
        in peer/verify/statements.py.
        """
        place = {"terms": validation.terms, "target": validation.target}
        self._ask("judged", judgement=judgement, why=why, **place)
