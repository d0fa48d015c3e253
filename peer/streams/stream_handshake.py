"""Open a data stream over bare TCP: both sides prove, in the event loop, that they have its key.

The socket is then given to a ``SealedStream`` or a ``PlainStream``. Nothing of it is kept before
the dialler has proved itself, and nothing is read beyond that.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import NamedTuple

from atoll.collectives.errors import RemoteProtocolError
from atoll.peer.streams.keys import (
    CIPHERS,
    CONN_ID_BYTES,
    DIALLER_PROOF_BYTES,
    GREETING_BYTES,
    KEY_BYTES,
    OPENING_BYTES,
    RANDOM_BYTES,
    STREAM_FIRST_BYTE,
    Grants,
    Handshake,
    StreamAsked,
    StreamDenied,
    StreamGranted,
    choose_cipher,
    conn_id_of,
    permitted,
)

# Time for the whole exchange, of either side (reliability_and_security.md 3.1).
OPENING_TIMEOUT_S = 3.0


class AcceptedStream(NamedTuple):
    """Describe a stream that was opened to this side by ``peer``."""

    peer: bytes
    cipher: str
    secret: bytes


def answer_asked(
    grants: Grants,
    peer: bytes,
    asked: StreamAsked,
    *,
    remote_ip: str,
    allowed: tuple[str, ...] = CIPHERS,
) -> StreamGranted | StreamDenied:
    """Return what ``peer``, which asked for a stream, is told. Call it inside a running loop.

    ``remote_ip``: where its control link comes from. ``allowed``: the ciphers that this side's user
    permits, as far as they are ``permitted``. What is granted is added to ``grants``.
    """
    allowed = permitted(allowed, remote_ip)
    cipher = choose_cipher(asked.ciphers, allowed)
    if not cipher:
        return StreamDenied(asked.number, f"here only these ciphers are allowed: {allowed}")
    conn_id, key = secrets.token_bytes(CONN_ID_BYTES), secrets.token_bytes(KEY_BYTES)
    granted = StreamGranted(asked.number, cipher, conn_id, key)
    why_not = grants.add(peer, granted, asyncio.get_running_loop().time())
    return StreamDenied(asked.number, why_not) if why_not else granted


async def open_stream(sock: socket.socket, granted: StreamGranted) -> bytes:
    """Open a stream as the dialler, on a connected non-blocking socket; return its secret.

    Raises OSError (TimeoutError after OPENING_TIMEOUT_S) or RemoteProtocolError; the socket stays
    the caller's to close.
    """
    loop, handshake = asyncio.get_running_loop(), Handshake(granted)
    async with asyncio.timeout(OPENING_TIMEOUT_S):
        await loop.sock_sendall(sock, handshake.opening(secrets.token_bytes(RANDOM_BYTES)))
        greeting = await _exactly(sock, GREETING_BYTES)
        await loop.sock_sendall(sock, handshake.answer(greeting))
    return handshake.secret()


async def accept_stream(sock: socket.socket, grants: Grants) -> AcceptedStream:
    """Open a stream as the other side, once STREAM_FIRST_BYTE has been read from the socket.

    Raises errors as :func:`open_stream` does. The grant is used up when the dialler has proved
    itself.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(OPENING_TIMEOUT_S):
        opening = bytes((STREAM_FIRST_BYTE,)) + await _exactly(sock, OPENING_BYTES - 1)
        conn_id = conn_id_of(opening)
        grant = grants.find(conn_id, loop.time())
        if grant is None:
            raise RemoteProtocolError("a data stream whose id is not known, or not any more")
        cipher, remote_ip = grant.granted.cipher, str(sock.getpeername()[0])
        if cipher not in permitted((cipher,), remote_ip):  # the control link's address was
            raise RemoteProtocolError(f"a data stream from {remote_ip} needs a cipher")
        handshake = Handshake(grant.granted)
        greeting = handshake.greeting(opening, secrets.token_bytes(RANDOM_BYTES))
        await loop.sock_sendall(sock, greeting)
        handshake.finish(await _exactly(sock, DIALLER_PROOF_BYTES))
    if grants.take(conn_id, loop.time()) is not grant:
        raise RemoteProtocolError("a data stream whose id has been used meanwhile")
    return AcceptedStream(grant.peer, cipher, handshake.secret())


async def _exactly(sock: socket.socket, count: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        piece = await loop.sock_recv(sock, count - len(data))
        if not piece:
            raise ConnectionResetError("the other side closed the connection")
        data += piece
    return data
