"""Define what is said so that two peers dial each other at the same moment. Sans-I/O.

A router lets in what belongs to a connection that was begun inside. So both ends must begin the
same one: each dials the other's *mapped* address, which is where its router lets a port of it
appear. Only others see that address. Whoever needs it asks a member that can be dialled
(``ObserveAsked``), connects to it from that port with the token, and is told over the control link
what was seen (``Observed``).

Whoever wants a connection tells the other one its mapped address (``PunchAsked``), over the control
link that the two have through a relay. That one learns its own, answers (``PunchReady``), or says
why not (``PunchDenied``), and half a round trip later both dial.
"""

from __future__ import annotations

from typing import Annotated, Final

from atoll.peer.net.wire import Within, message

# The first byte of a connection to an observer; TLS begins with 0x16, streams with 0xA7, circuits
# with 0xA8.
OBSERVE_FIRST_BYTE: Final = 0xA9
TOKEN_BYTES: Final = 16
NONCE_BYTES: Final = 16
IP_CHARACTERS_MAX: Final = 64
WHAT_CHARACTERS_MAX: Final = 300
Number = Annotated[int, Within(0, 2**63 - 1)]
Token = Annotated[bytes, Within(TOKEN_BYTES, TOKEN_BYTES)]
Nonce = Annotated[bytes, Within(NONCE_BYTES, NONCE_BYTES)]
MappedIp = Annotated[str, Within(1, IP_CHARACTERS_MAX)]
Port = Annotated[int, Within(1, (1 << 16) - 1)]


@message(wire="ObserveAsked")
class ObserveAsked:
    """Ask a member to say where the connection that brings ``token`` comes from."""

    number: Number
    token: Token

    def __repr__(self) -> str:  # tokens must not get into logs
        return f"ObserveAsked(number={self.number})"


@message(wire="Observed")
class Observed:
    """Say where a connection came from."""

    number: Number
    ip: MappedIp
    port: Port


@message(wire="PunchAsked")
class PunchAsked:
    """Ask for a connection that both ends dial; the sender will be at this address."""

    number: Number
    nonce: Nonce
    ip: MappedIp
    port: Port

    def __repr__(self) -> str:  # nonces must not get into logs
        return f"PunchAsked(number={self.number}, at={self.ip}:{self.port})"


@message(wire="PunchReady")
class PunchReady:
    """Agree: the sender dials half a round trip after this, and will be at this address."""

    number: Number
    nonce: Nonce
    ip: MappedIp
    port: Port

    def __repr__(self) -> str:  # nonces must not get into logs
        return f"PunchReady(number={self.number}, at={self.ip}:{self.port})"


@message(wire="PunchDenied")
class PunchDenied:
    """Say why it cannot be, for people. ``hopeless``: because of the sender's router.

    That is said unasked, too, by whoever would ask.
    """

    number: Number
    what: Annotated[str, Within(0, WHAT_CHARACTERS_MAX)]
    hopeless: bool = False
