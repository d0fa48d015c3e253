"""Agree on keys for data streams over bare TCP, and prove them on the stream. Sans-I/O.

Whoever wants to send asks over the control link (``StreamAsked``). The other side, which will have
to read, answers with a connection id and a fresh key (``StreamGranted``), or says why not
(``StreamDenied``); TLS streams remain for that case. So forward secrecy and identity are TLS's.
Only who lists ciphers in its hello is asked: earlier versions do not know these messages.

Who cannot dial the reader offers the stream instead (``StreamOffered``, with the key in it), and
the reader dials, or says why it cannot (``StreamDenied``). From there on it is the same handshake,
with the parts exchanged; what flows on the stream afterwards is not.

The TCP connection then opens with::

    dialler    0xA7 | version u8 | connection id, 16 bytes | random, 16 bytes
    acceptor   random, 16 bytes | HMAC of all that came before
    dialler    HMAC of all that came before

and both make the secret of the records from the key and the two random values. An id and its key
serve one connection: they are gone when the dialler has proved that it has the key, and before
that after GRANT_S. Nobody without the key learns anything, or makes the acceptor keep anything.
"""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from typing import Annotated, Literal

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from atoll.collectives.errors import LocalProtocolError, RemoteProtocolError
from atoll.collectives.schedule.plan import STREAMS_MAX
from atoll.peer.net.wire import Within, message

# The first byte of such a stream; TLS begins with 0x16.
STREAM_FIRST_BYTE = 0xA7
STREAM_VERSION = 1
CONN_ID_BYTES = RANDOM_BYTES = 16
KEY_BYTES = 32
PROOF_BYTES = 32
# The three messages of the opening; the dialler sends 66 bytes before it is believed.
OPENING_BYTES = 2 + CONN_ID_BYTES + RANDOM_BYTES
GREETING_BYTES = RANDOM_BYTES + PROOF_BYTES
DIALLER_PROOF_BYTES = PROOF_BYTES
# An id waits so long for its connection: a dial takes 5 s at most, and begins at once.
GRANT_S = 10.0
# Streams that a peer may be opening at a time: all that a round uses, at once.
GRANTS_PER_PEER_MAX = STREAMS_MAX

CIPHER_AES = "aes-256-gcm"
# Neither secret nor protected from changes. Only where both sides want it; never asked by default.
CIPHER_NONE = "none"
# Not asked for either: what remains where no other is agreed on.
CIPHER_TLS = "tls"
# What a side can do, the preferred one first: as it is, and where its user does without protection.
CIPHERS = (CIPHER_AES,)
CIPHERS_PLAIN = (CIPHER_NONE, CIPHER_AES)
# Loopback, RFC 1918, RFC 4193 and link-local. Not Python's is_private, which means "not global".
_TRUSTED = [
    *map(ipaddress.ip_network, ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")),
    *map(ipaddress.ip_network, ("169.254.0.0/16", "::1/128", "fc00::/7", "fe80::/10")),
]
# How many ciphers a peer, perhaps of a later version, may say it can do.
CIPHERS_MAX = 8
CipherName = Annotated[str, Within(1, 64)]
WHAT_CHARACTERS_MAX = 1000


@message(wire="StreamAsked")
class StreamAsked:
    """Ask whether the sender may open a data stream to the receiver.

    ``number`` comes back in the answer. ``ciphers``: what the dialler can do, the preferred one
    first.
    """

    number: Annotated[int, Within(0, 2**63 - 1)]
    ciphers: Annotated[tuple[CipherName, ...], Within(1, CIPHERS_MAX)]


@message(wire="StreamGranted")
class StreamGranted:
    """Grant a data stream: with this id and this key, for one connection, within GRANT_S."""

    number: Annotated[int, Within(0, 2**63 - 1)]
    cipher: CipherName
    conn_id: Annotated[bytes, Within(CONN_ID_BYTES, CONN_ID_BYTES)]
    key: Annotated[bytes, Within(KEY_BYTES, KEY_BYTES)]

    def __repr__(self) -> str:  # keys must not get into logs
        return f"StreamGranted(number={self.number}, cipher={self.cipher!r})"


@message(wire="StreamOffered")
class StreamOffered:
    """Offer a stream on which the sender of this sends; the receiver is to dial within GRANT_S.

    ``cipher`` may be CIPHER_TLS: the dialler's hello then names ``conn_id``, and the key is unused.
    """

    number: Annotated[int, Within(0, 2**63 - 1)]
    cipher: CipherName
    conn_id: Annotated[bytes, Within(CONN_ID_BYTES, CONN_ID_BYTES)]
    key: Annotated[bytes, Within(KEY_BYTES, KEY_BYTES)]

    def __repr__(self) -> str:  # keys must not get into logs
        return f"StreamOffered(number={self.number}, cipher={self.cipher!r})"


@message(wire="StreamDenied")
class StreamDenied:
    """Deny a data stream that was asked for or offered, and say why, for people.

    ``connected``: the one who dialled for an offer came as far as a connection, so that somebody is
    there.
    """

    number: Annotated[int, Within(0, 2**63 - 1)]
    what: Annotated[str, Within(0, WHAT_CHARACTERS_MAX)]
    connected: bool = False


def choose_cipher(asked: tuple[str, ...], allowed: tuple[str, ...]) -> str:
    """Return the first of ``asked`` that is among ``allowed``; "" if none is."""
    return next((name for name in asked if name in allowed), "")


def permitted(ciphers: tuple[str, ...], remote_ip: str) -> tuple[str, ...]:
    """Return the ciphers that may be used with this address.

    CIPHER_NONE is among them only if ``is_trusted_network``.
    """
    if is_trusted_network(remote_ip):
        return ciphers
    return tuple(name for name in ciphers if name != CIPHER_NONE)


def check_granted(asked: StreamAsked, granted: StreamGranted, remote_ip: str) -> None:
    """Raise RemoteProtocolError unless ``granted`` is an answer that ``asked`` has asked for.

    ``remote_ip``: where the stream goes. Nobody can talk this side into CIPHER_NONE there unless
    it asked for that, and ``is_trusted_network``.
    """
    if granted.number != asked.number or granted.cipher not in asked.ciphers:
        raise RemoteProtocolError(f"{granted} does not answer {asked}")
    if granted.cipher not in permitted((granted.cipher,), remote_ip):
        raise RemoteProtocolError(f"a data stream to {remote_ip} must not go without a cipher")


def is_trusted_network(ip: str) -> bool:
    """Return whether CIPHER_NONE may be used with this address.

    Such an address is private, of this link or of this machine.
    """
    try:
        address = ipaddress.ip_address(ip.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return any((mapped or address) in network for network in _TRUSTED)


# ------------------------------------------------------------ the acceptor's memory


@dataclass(frozen=True, slots=True)
class StreamGrant:
    """Describe what ``peer`` may open until ``until_s``."""

    peer: bytes
    granted: StreamGranted
    until_s: float


class Grants:
    """Keep the ids that have been given out and not yet used."""

    def __init__(self) -> None:
        self._open: dict[bytes, StreamGrant] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, peer: bytes, granted: StreamGranted, now_s: float) -> str:
        """Remember what a peer is about to be told; return "", or why it must be denied instead."""
        self._open = {i: grant for i, grant in self._open.items() if grant.until_s > now_s}
        if sum(grant.peer == peer for grant in self._open.values()) >= GRANTS_PER_PEER_MAX:
            return f"{GRANTS_PER_PEER_MAX} data streams are being opened already"
        if granted.conn_id in self._open:
            raise LocalProtocolError("a connection id was drawn twice")
        self._open[granted.conn_id] = StreamGrant(peer, granted, now_s + GRANT_S)
        return ""

    def find(self, conn_id: bytes, now_s: float) -> StreamGrant | None:
        """Return the grant of this id, if nobody has used it and there is still time."""
        grant = self._open.get(conn_id)
        return grant if grant is not None and grant.until_s > now_s else None

    def take(self, conn_id: bytes, now_s: float) -> StreamGrant | None:
        """Return the grant as :meth:`find` does, and give it to nobody again.

        Of two that prove themselves one is late.
        """
        grant = self.find(conn_id, now_s)
        self._open.pop(conn_id, None)
        return grant

    def forget(self, peer: bytes) -> None:
        """Forget what was agreed on the control link to ``peer``, which is gone."""
        self._open = {i: grant for i, grant in self._open.items() if grant.peer != peer}


# ------------------------------------------------------------ the opening of a stream


def conn_id_of(opening: bytes) -> bytes:
    """Return the connection id in the dialler's first message.

    Raises RemoteProtocolError if it is no opening of a data stream, or one of another version.
    """
    if len(opening) != OPENING_BYTES or opening[0] != STREAM_FIRST_BYTE:
        raise RemoteProtocolError("not the opening of a data stream")
    if opening[1] != STREAM_VERSION:
        raise RemoteProtocolError(
            f"a data stream of version {opening[1]}; this side speaks {STREAM_VERSION}"
        )
    return bytes(opening[2 : 2 + CONN_ID_BYTES])


class Handshake:
    """Carry out one side of one opening. The methods are called in the order of the messages."""

    def __init__(self, granted: StreamGranted) -> None:
        self._granted = granted
        self._transcript = b""  # all messages so far, of either side

    def opening(self, random: bytes) -> bytes:
        """Return the dialler's first message. ``random``: RANDOM_BYTES, fresh."""
        head = bytes((STREAM_FIRST_BYTE, STREAM_VERSION))
        self._transcript = head + self._granted.conn_id + _checked(random)
        return self._transcript

    def greeting(self, opening: bytes, random: bytes) -> bytes:
        """Return the acceptor's answer to ``opening``. ``random``: RANDOM_BYTES, fresh."""
        if conn_id_of(opening) != self._granted.conn_id:
            raise LocalProtocolError("the opening of another data stream")
        self._transcript = bytes(opening) + _checked(random)
        proof = self._proof("acceptor")
        self._transcript += proof
        return self._transcript[OPENING_BYTES:]

    def answer(self, greeting: bytes) -> bytes:
        """Return the dialler's proof; raise RemoteProtocolError if the greeting is no proof."""
        self._transcript += greeting[:RANDOM_BYTES]
        self._check("acceptor", greeting[RANDOM_BYTES:])
        self._transcript += greeting[RANDOM_BYTES:]
        proof = self._proof("dialler")
        self._transcript += proof
        return proof

    def finish(self, proof: bytes) -> None:
        """Check the dialler's proof, as the acceptor. Raises RemoteProtocolError if it is none."""
        self._check("dialler", proof)
        self._transcript += proof

    def secret(self) -> bytes:
        """Return the 32 bytes that both sides make the records' keys from.

        They are of this connection alone.
        """
        return self._derive("records", salt=self._transcript)

    def _proof(self, side: Literal["dialler", "acceptor"]) -> bytes:
        return hmac.digest(self._derive(f"proof of {side}"), self._transcript, "sha256")

    def _check(self, side: Literal["dialler", "acceptor"], proof: bytes) -> None:
        if not hmac.compare_digest(self._proof(side), proof):
            raise RemoteProtocolError(f"the {side} of a data stream did not prove its key")

    def _derive(self, purpose: str, salt: bytes | None = None) -> bytes:
        info = f"atoll stream {self._granted.cipher} {purpose}".encode()
        return HKDF(SHA256(), KEY_BYTES, salt, info).derive(self._granted.key)


def _checked(random: bytes) -> bytes:
    if len(random) != RANDOM_BYTES:
        raise LocalProtocolError(f"{len(random)} random bytes, not {RANDOM_BYTES}")
    return random
