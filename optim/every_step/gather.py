"""Keep gathers for different purposes apart, and gather long data in pieces.

Gathers have no shape that daemons could compare, so each says with its first byte what it is for: a
trainer that missed a round may gather scores while the others already hand over state. It also says
what kind of trainer it is from, and for which round it is.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from atoll.collectives.errors import CollectiveMissedError, RemoteProtocolError
from atoll.optim.every_step.exchange import PART_BYTES_MAX
from atoll.optim.run_spec import BLOB_BYTES_MAX, LENGTH_BYTES
from atoll.optim.sessions import OperationsSession

NEW, COUNTS = 1, 2  # flags: from a newcomer; from a trainer that has something to give
MORE, LATER = 4, 8  # flags of one of several pieces: it is not the last; it is not the first
GATHERED_BYTES_MAX = 64 * 1024  # what `all_gather` takes of one trainer, its head too
# The purpose, the flags and the round that it is for (modulo 2**32).
HEAD: Final = struct.Struct("<BBI")
# The bytes to leave free in a call: a thousand trainers may come at once, and give a head each.
COMING_BYTES = 1024 * (HEAD.size + LENGTH_BYTES)


@dataclass(frozen=True, slots=True)
class GatheredPart:
    """Hold what one trainer gave to one call.

    ``is_of_round``: it is for the same round as this trainer's own, as far as both know.
    """

    name: str
    purpose: int
    flags: int
    is_of_round: bool
    data: bytes


def gather_parts(
    peer: OperationsSession, purpose: int, data: bytes, flags: int = 0
) -> list[GatheredPart]:
    """Return what all gave, for any purpose; RemoteProtocolError for what has no head."""
    number, parts = (peer.round + 1) % 2**32, []
    for name, text in peer.all_gather(HEAD.pack(purpose, flags, number) + data):
        if len(text) < HEAD.size or text[1] & ~(NEW | COUNTS | MORE | LATER):
            raise RemoteProtocolError(
                f"what {name} gave to a gather has no head",
                fix="run the same version of atoll on all peers",
            )
        theirs, whose, awaited = HEAD.unpack_from(text)
        parts.append(GatheredPart(name, theirs, whose, awaited == number, text[HEAD.size :]))
    return parts


def gather_for(purpose: int, peer: OperationsSession, data: bytes) -> list[tuple[str, bytes]]:
    """Return the names and data of the trainers that gather for this purpose.

    CollectiveMissedError if most gather for another one, as with calls of different kinds; of
    several that are equally frequent the first counts.
    """
    parts = gather_parts(peer, purpose, data)
    counts = Counter(part.purpose for part in parts)
    if max(counts, key=lambda p: counts[p]) != purpose:  # the first of several
        raise CollectiveMissedError("the other trainers were gathering something else")
    return [(part.name, part.data) for part in parts if part.purpose == purpose]


class Pieces:
    """Gather data in as many calls as the longest needs, from those who are there in all of them.

    ``data`` is this trainer's.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._given = data, 0
        self._whole: dict[str, tuple[int, list[bytes]]] | None = None

    def next(self, trainers: int) -> tuple[int, bytes]:
        """Return flags and data of this trainer's next piece.

        ``trainers``: how many took part in the last call.
        """
        begin, end = self._given, self._given + _room(trainers)
        self._given = end
        flags = MORE * (end < len(self._data)) | LATER * (self._whole is not None)
        return flags, self._data[begin:end]

    def add(self, parts: Sequence[GatheredPart]) -> bool:
        """Add the pieces of one call; return whether there is another one.

        RemoteProtocolError for pieces that have no end.
        """
        before, self._whole, more = self._whole, {}, False
        for part in parts:
            if before is not None and part.name not in before:
                continue
            had = before[part.name][1] if before is not None else []
            self._whole[part.name] = part.flags, [*had, part.data]
            is_last = not part.flags & MORE
            if sum(map(len, had)) + len(part.data) > PART_BYTES_MAX or not (is_last or part.data):
                raise RemoteProtocolError(
                    f"what {part.name} gives has pieces without an end",
                    fix="run the same version of atoll on all peers",
                )
            more |= not is_last
        return more

    def whole(self) -> list[tuple[str, int, bytes]]:
        """Return name, flags and data of each trainer, in the same order everywhere."""
        return [(n, flags, b"".join(data)) for n, (flags, data) in (self._whole or {}).items()]


def _room(trainers: int) -> int:
    """Return how many bytes of each of so many trainers fit into one call, without heads."""
    of_all = (BLOB_BYTES_MAX - COMING_BYTES) // trainers - LENGTH_BYTES
    return min(GATHERED_BYTES_MAX, of_all) - HEAD.size
