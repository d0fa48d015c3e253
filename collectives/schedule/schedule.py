"""Describe what a schedule decides, and what the engine asks of it.

A schedule is the sans-I/O half of a collective, for ONE participant: which frame to send next,
which frame to take in, what to add next. ``Reduction`` is the other half and runs any of them.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, IntEnum
from typing import Final, NamedTuple, Protocol

from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.schedule.plan import NOBODY, ReducePlan

# Ahead of an owner's results: two chunks keep a stream busy, and with a quarter of its chunks a
# round does not take more than four or five round trips on long links.
LEAD_CHUNKS_MIN: Final = 2
LEAD_PART: Final = 4
# What the open chunks of all owners and sources may take together. With the buffers of the senders
# it keeps a reduction near the 64 MiB that a daemon may take beside its state.
LEAD_BYTES_MAX: Final = 32 * 2**20


class Schedule(Protocol):
    """Decide for one participant what to send, what to take in and what to add next.

    Participants are indices into the plan. Calls never overlap: the engine holds its lock.
    """

    @property
    def done(self) -> bool:
        """Return whether every chunk is final here."""

    @property
    def destinations(self) -> frozenset[int]:
        """Return the participants that get anything from this one."""

    def local_chunks(self) -> tuple[int, ...]:
        """Return the chunks to which only this participant adds and that it does not send.

        Nothing that arrives starts them.
        """

    def is_own_part(self, src: int, chunk: int) -> bool:
        """Return whether ``src`` sends its own part of this chunk, and not a sum of several."""

    def is_star(self, chunk: int) -> bool:
        """Return whether the whole is added here, of nothing but own parts."""

    def is_root(self, chunk: int) -> bool:
        """Return whether the sum of a chunk here is the whole."""

    def next_send(self, dest: int, unsure: Collection[int] = ()) -> OutgoingFrame | Idle:
        """Hand out the next frame for ``dest``, each one once.

        CONTRIB is the sum, if there is one here, else the own part. ``unsure``: chunks whose
        results were handed out for ``dest``, over several streams, and may not have arrived.
        """

    def broken(self, dest: int) -> None:
        """Note that nothing more can be sent to ``dest``, over any stream."""

    def admit(self, src: int, kind: int, chunk: int) -> FrameAdmission:
        """Judge a frame: whether its bytes are wanted.

        Several streams may bring the same one; what is complete is judged again. ACCEPT lets
        ``arrived`` (CONTRIB), ``final`` (RESULT) or ``heard`` (GRAM) follow.

        Raises RemoteProtocolError if ``src`` may not send this frame, now or ever.
        """

    def arrived(self, src: int, chunk: int) -> None:
        """Note that a contribution is complete.

        It is an accepted one, or an own part that is ``added_here``, encoded.
        """

    def next_fold(self, chunk: int) -> int | None:
        """Return the source whose contribution to add to the sum of ``chunk`` now.

        It is this participant itself when it is the turn of its own part, and None if no turn has
        come, or another one is being added. Expects ``folded`` to follow.
        """

    def folded(self, chunk: int) -> bool:
        """Note that the contribution is added, and return whether it was the last.

        Then the root encodes the sum and calls ``final``; any other sends it when ``next_send``
        says so.
        """

    def final(self, chunk: int) -> None:
        """Note that the encoded bytes of ``chunk`` are complete and checked."""

    def known(self) -> None:
        """Note that what this owner has to tell the others is known."""

    def heard(self, owner: int) -> None:
        """Note that what ``owner`` had to tell is here."""

    def missing(self) -> frozenset[int]:
        """Return the participants that this one waits for."""


class FrameKind(IntEnum):
    """Name what a data frame carries; the values are on the wire."""

    CONTRIB = 1
    RESULT = 2
    GRAM = 9  # what owners tell each other, where the rule needs it: see ``GramExchange``


class OutgoingFrame(NamedTuple):
    """Name the next frame to send.

    ``added_here``: an own part that is added here as well. It is encoded once, and ``arrived``
    follows with this participant as its source.
    """

    kind: FrameKind
    chunk: int
    added_here: bool = False


class Frame(NamedTuple):
    """Name a frame that arrives, or a piece of one.

    ``stripe``: which of several streams from ``src`` brings it; 0 is the only one. ``offset``:
    where the piece begins in its chunk, in bytes.
    """

    src: int
    kind: int
    chunk: int
    stripe: int = 0
    offset: int = 0


class Idle(Enum):
    WAIT = "nothing to send yet: ask again when a chunk is final or a sum complete"
    PACED = "not yet: ask again after the next contribution to another"
    DONE = "nothing left to send"


class FrameAdmission(Enum):
    ACCEPT = "take the bytes in"
    HOLD = "not yet: ask again after the next chunk is final"
    DROP = "not needed: read the bytes and forget them"


def chunks_ahead(shard: int, open_bytes: int) -> int:
    """Return how many of an owner's ``shard`` chunks may be open, each of ``open_bytes``.

    All participants compute the same number.
    """
    wanted = max(LEAD_CHUNKS_MIN, shard // LEAD_PART)
    return max(1, min(wanted, LEAD_BYTES_MAX // max(1, open_bytes)))


def refused(peer: str, what: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"peer {peer} sent {what}", fix="run the same version of atoll on all peers"
    )


def check_frame(plan: ReducePlan, me: int, src: int, kind: int, chunk: int) -> None:
    """Raise RemoteProtocolError for what no schedule of this plan lets ``src`` send to ``me``."""
    if not 0 <= src < len(plan.participants) or src == me:
        raise RemoteProtocolError(f"a data frame from {src}, who takes no part in this attempt")
    if not 0 <= chunk < len(plan.owners):
        raise refused(plan.name(src), f"chunk {chunk} of {len(plan.owners)}")
    if kind not in tuple(FrameKind):
        raise refused(plan.name(src), f"a data frame of unknown kind {kind}")
    if plan.owners[chunk] == NOBODY:
        kept = f"chunk {chunk}, which is kept from an earlier attempt"
        raise refused(plan.name(src), kept)
