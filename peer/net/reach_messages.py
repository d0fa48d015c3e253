"""Define what is said about whether a peer can be dialled: messages and their limits. Sans-I/O.

On a connection of its own, of kind REACH (hello.py): the asker says AskReach behind its hello and
gets a ReachReport. Between members, on control links: DialBack and DialledBack, for whoever was
asked, and ReachTold, by which each peer tells all others what it has found out about itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from atoll.peer.membership.view import MEMBERS_MAX, PeerId
from atoll.peer.net.wire import Within, message

# Outcomes of a dial-back: the asker's identity was proved there; its machine answers and nobody
# listens; nothing came back; somebody else answers, another peer behind the same router perhaps.
OK: Final = "ok"
REFUSED: Final = "refused"
SILENT: Final = "silent"
OTHER: Final = "other"
UNABLE: Final = "unable"  # whoever was to dial cannot: nothing is known, nobody is told
OUTCOMES: Final = (OK, REFUSED, SILENT, OTHER, UNABLE)

HELPERS_MAX = 2  # members that dial for whoever was asked: one may be in a strange network itself
# Peers that an asker says it has dialled: what fits into the first frames of a connection, and more
# than it has dialled by the time that it asks.
DIALLED_MAX = 32
IP_CHARACTERS_MAX = 64
PROGRAM_CHARACTERS_MAX = 64
ADDRESS_CHARACTERS_MAX = 300  # the longest DNS name, brackets, a port
PORT_MAX = (1 << 16) - 1
RELAY_BYTES_PER_S_MAX = 125_000_000_000  # a terabit per second


@message(wire="AskReach")
class AskReach:
    """Ask a member whether the sender can be dialled at a port of the address it comes from.

    ``port`` 0 asks for nothing but the report. ``dialled``: peers that the sender has dialled
    itself, who are dialled back by only if there are no others.
    """

    port: Annotated[int, Within(0, PORT_MAX)]
    dialled: Annotated[tuple[PeerId, ...], Within(0, DIALLED_MAX)] = ()


@message(wire="ReachAnswer")
class ReachAnswer:
    """Say what one member got that dialled: ``by`` whom, from where, after how many seconds.

    ``from_ip``: as the asked member sees it; "" for the asked member itself.
    """

    by: PeerId
    outcome: Annotated[str, Within(1, 16)]
    took_s: float
    from_ip: Annotated[str, Within(0, IP_CHARACTERS_MAX)] = ""

    def __post_init__(self) -> None:
        _check(self.outcome, self.took_s)


@message(wire="ReachReport")
class ReachReport:
    """Answer an AskReach.

    ``observed``: the IP address that the asker has from here, the only one that is dialled.
    ``unix_s``: the clock here when this was sent. ``wait_s``: nobody dialled, because this asker
    asked less than a minute ago, or others are at it; it may ask again after so many seconds.
    """

    observed: Annotated[str, Within(0, IP_CHARACTERS_MAX)]
    answers: Annotated[tuple[ReachAnswer, ...], Within(0, HELPERS_MAX + 1)]
    unix_s: float
    program: Annotated[str, Within(0, PROGRAM_CHARACTERS_MAX)] = ""
    wait_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.wait_s >= 0.0 and abs(self.unix_s) < 1e12):
            raise ValueError("a report with times that cannot be")


@message(wire="DialBack")
class DialBack:
    """Ask a member to dial ``asker`` at the address that it has been observed to come from.

    ``number`` comes back in the answer; ``life`` is the asker's.
    """

    number: int
    asker: PeerId
    life: int
    ip: Annotated[str, Within(1, IP_CHARACTERS_MAX)]
    port: Annotated[int, Within(1, PORT_MAX)]


@message(wire="DialledBack")
class DialledBack:
    """Answer a DialBack with what came back, and after how many seconds."""

    number: int
    outcome: Annotated[str, Within(1, 16)]
    took_s: float

    def __post_init__(self) -> None:
        _check(self.outcome, self.took_s)


@message(wire="ReachAt")
class ReachAt:
    """Say that ``peer`` has told where it can be dialled."""

    peer: PeerId
    address: Annotated[str, Within(1, ADDRESS_CHARACTERS_MAX)]


@message(wire="ReachTold")
@dataclass(frozen=True, slots=True)
class ReachTold:
    """Tell a linked peer whether the sender is outbound: one that nobody can dial.

    ``address``: where others have dialled it, if that is not what it advertises: its router's
    address, where the port is forwarded. ``relay``: what it carries of others' data, in bytes per
    second; 0: control links alone. ``mapped``: a router was asked to forward ``address`` for a
    while, and may forget it; that it refuses says nothing about the peer then. ``others``,
    ``addresses``: what peers have told the sender of themselves. Only the coordinator hands that
    on: it has a link to everybody, and n peers send n messages then, not n squared.
    """

    outbound: bool
    others: Annotated[tuple[PeerId, ...], Within(0, MEMBERS_MAX)] = ()
    address: Annotated[str, Within(0, ADDRESS_CHARACTERS_MAX)] = ""
    addresses: Annotated[tuple[ReachAt, ...], Within(0, MEMBERS_MAX)] = ()
    relay: Annotated[int, Within(0, RELAY_BYTES_PER_S_MAX)] = 0
    mapped: bool = False


def _check(outcome: str, took_s: float) -> None:
    if outcome not in OUTCOMES or not 0.0 <= took_s < 1e6:
        raise ValueError("no outcome of a dial")
