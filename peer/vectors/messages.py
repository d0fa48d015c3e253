"""Describe the messages by which a daemon gets a vector of another one's trainer. Sans-I/O.

The question goes over the control link and may wait there until the vector is published. The answer
comes back the same way, then the encoded chunks as frames of a data stream, whose headers have the
number as ``round`` and the ticket as ``attempt``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from atoll.optim.manifest import ELEMENTS_MAX
from atoll.peer.net.wire import Within, message

NAME_BYTES_MAX = 32
TICKETS_MAX = (1 << 32) - 1  # a frame's ``attempt``
WHY_BYTES_MAX = 300

Ticket = Annotated[int, Within(1, TICKETS_MAX)]
Name = Annotated[str, Within(1, NAME_BYTES_MAX)]
Number = Annotated[int, Within(0, (1 << 62) - 1)]  # a frame's ``round``, with room to count on


@message(wire="AskVector")
@dataclass(frozen=True, slots=True)
class AskVector:
    """Ask for what a trainer has published under this name and number, as soon as it has.

    ``number`` 0: only say which is the newest.
    """

    ticket: Ticket
    name: Name
    number: Number = 0


@message(wire="VectorIs")
@dataclass(frozen=True, slots=True)
class VectorIs:
    """Announce a vector, with so many elements in this codec; or, without elements, say why not.

    The latter may also come in the middle of it: then no more follows. ``newest``: the number of
    the newest, 0 for none.
    """

    ticket: Ticket
    newest: Number
    elements: Annotated[int, Within(0, ELEMENTS_MAX)] = 0
    codec: Annotated[str, Within(0, NAME_BYTES_MAX)] = ""
    why: Annotated[str, Within(0, WHY_BYTES_MAX)] = ""


@message(wire="DropVector")
@dataclass(frozen=True, slots=True)
class DropVector:
    """Say that a vector is not wanted any more."""

    ticket: Ticket


def is_name(name: str) -> bool:
    """Return whether vectors can be called so: printable, of 1 to NAME_BYTES_MAX bytes."""
    return name.isprintable() and 0 < len(name.encode()) <= NAME_BYTES_MAX


AboutVectors = AskVector | DropVector | VectorIs
