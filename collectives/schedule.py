"""What a schedule decides, and what the engine asks of it.

A schedule is the sans-I/O half of a collective, for ONE participant: which frame to send next,
which frame to take in, what to add next. ``engine.py`` is the other half and runs any of them.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, IntEnum
from typing import NamedTuple, Protocol

__all__ = ["Admission", "Frame", "Idle", "Kind", "Schedule", "Send"]


class Kind(IntEnum):
    """What a data frame carries; the values are on the wire."""

    CONTRIB = 1
    RESULT = 2
    GRAM = 9  # what owners tell each other, where the rule needs it: see exchange.py


class Send(NamedTuple):
    """``added_here``: an own part that is added here as well. It is encoded once, and ``arrived``
    follows with this participant as its source."""

    kind: Kind
    chunk: int
    added_here: bool = False


class Frame(NamedTuple):
    """``lane``: which of several streams from ``src`` brings it; 0 is the only one. ``offset``: of
    the piece in its chunk, in bytes."""

    src: int
    kind: int
    chunk: int
    lane: int = 0
    offset: int = 0


class Idle(Enum):
    WAIT = "nothing to send yet: ask again when a chunk is final or a sum complete"
    PACED = "not yet: ask again after the next contribution to another"
    DONE = "nothing left to send"


class Admission(Enum):
    ACCEPT = "take the bytes in"
    HOLD = "not yet: ask again after the next chunk is final"
    DROP = "not needed: read the bytes and forget them"


class Schedule(Protocol):
    """Participants are indices into the plan. Calls never overlap: the engine holds its lock."""

    @property
    def done(self) -> bool:
        """Whether every chunk is final here."""

    @property
    def destinations(self) -> frozenset[int]:
        """Who gets anything from this participant."""

    def local_chunks(self) -> tuple[int, ...]:
        """Chunks to which only this participant adds and that it does not send: nothing that
        arrives starts them."""

    def is_own_part(self, src: int, chunk: int) -> bool:
        """Whether what ``src`` sends for this chunk is its own part, and not a sum of several."""

    def is_star(self, chunk: int) -> bool:
        """Whether the whole is added here, of nothing but own parts."""

    def is_root(self, chunk: int) -> bool:
        """Whether its sum here is the whole."""

    def next_send(self, dest: int, unsure: Collection[int] = ()) -> Send | Idle:
        """Hand out the next frame for ``dest``, each one once. CONTRIB: the sum, if there is one
        here, else the own part. ``unsure``: chunks whose results were handed out for ``dest``, over
        several streams, and may not have arrived."""

    def broken(self, dest: int) -> None:
        """Nothing more can be sent there, over any stream."""

    def admit(self, src: int, kind: int, chunk: int) -> Admission:
        """Judge a frame: whether its bytes are wanted. Several streams may bring the same one; what
        is complete is judged again. ACCEPT lets ``arrived`` (CONTRIB), ``final`` (RESULT) or
        ``heard`` (GRAM) follow.

        RemoteProtocolError if ``src`` may not send this frame, now or ever.
        """

    def arrived(self, src: int, chunk: int) -> None:
        """An accepted contribution is complete; or an own part that is ``added_here``, encoded."""

    def next_fold(self, chunk: int) -> int | None:
        """The source whose contribution to add to the sum of ``chunk`` now; this participant itself
        when it is the turn of its own part.

        None if its turn has not come, or another one is being added. Expects ``folded`` to follow.
        """

    def folded(self, chunk: int) -> bool:
        """The contribution is added. True: it was the last. The root encodes the sum and calls
        ``final``; any other sends it when ``next_send`` says so."""

    def final(self, chunk: int) -> None:
        """The encoded bytes of ``chunk`` are complete and checked."""

    def known(self) -> None:
        """What this owner has to tell the others is known."""

    def heard(self, owner: int) -> None:
        """What that owner had to tell is here."""

    def missing(self) -> frozenset[int]:
        """The participants that this one waits for."""
