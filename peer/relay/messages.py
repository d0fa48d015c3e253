"""Define what peers and a relay say to each other about circuits, on control links. Sans-I/O.

A *circuit* is a connection between two peers that a relay splices from two. Whoever wants one asks
the relay (``CircuitAsked``). The relay gives each end a token of its own: the asker in its answer
(``CircuitGranted``), the other one unasked (``CircuitOffered``), or it says why not
(``CircuitDenied``). Each end connects to the relay's port within TOKEN_S and sends::

    0xA8 | token, 32 bytes

and the relay answers one byte, JOINED, as soon as both are there. What follows is the two ends'
affair: the asker speaks first, as whoever has dialled does, TLS or the opening of a data stream.
The relay sees sizes and times, and nothing that it could read or change unnoticed.
"""

from __future__ import annotations

from typing import Annotated, Final

from atoll.peer.membership.view import PeerId
from atoll.peer.net.wire import Within, message

# The first byte of an end's connection to its relay; TLS begins with 0x16, a data stream with 0xA7.
CIRCUIT_FIRST_BYTE: Final = 0xA8
JOINED: Final = b"\x01"
TOKEN_BYTES: Final = 32
# How long a token is good: a connection to the relay takes 5 s at most.
TOKEN_S: Final = 10.0
IP_CHARACTERS_MAX: Final = 64
WHAT_CHARACTERS_MAX: Final = 300
Number = Annotated[int, Within(0, 2**63 - 1)]
Token = Annotated[bytes, Within(TOKEN_BYTES, TOKEN_BYTES)]
StatedIp = Annotated[str, Within(0, IP_CHARACTERS_MAX)]


@message(wire="CircuitAsked")
class CircuitAsked:
    """Ask a relay for a circuit to ``peer``. ``number`` comes back in the answer.

    ``bulk``: for a data stream, and not for a control link.
    """

    number: Number
    peer: PeerId
    bulk: bool = False


@message(wire="CircuitGranted")
class CircuitGranted:
    """Grant a circuit, for one connection. ``ip``: where the relay sees the other end."""

    number: Number
    token: Token
    ip: StatedIp

    def __repr__(self) -> str:  # tokens must not get into logs
        return f"CircuitGranted(number={self.number})"


@message(wire="CircuitOffered")
class CircuitOffered:
    """Tell the other end that ``peer`` has asked for a circuit to it, and comes from ``ip``."""

    token: Token
    peer: PeerId
    ip: StatedIp

    def __repr__(self) -> str:  # tokens must not get into logs
        return f"CircuitOffered(peer={self.peer.hex()[:8]})"


@message(wire="CircuitAlive")
class CircuitAlive:
    """Show that a control link through a relay works: each end says it every ALIVE_S.

    The kernel knows only the way to the relay.
    """


@message(wire="CircuitFault")
class CircuitFault:
    """Tell a peer that what came from it through ``relay`` was not what it had sent."""

    relay: PeerId
    what: Annotated[str, Within(0, WHAT_CHARACTERS_MAX)]


@message(wire="CircuitDenied")
class CircuitDenied:
    """Deny a circuit, and say why, for people."""

    number: Number
    what: Annotated[str, Within(0, WHAT_CHARACTERS_MAX)]
