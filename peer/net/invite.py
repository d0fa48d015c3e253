"""Write and read invites: the one line that lets a machine into a run.

It has the address, the run's name, a fingerprint and the admission token:
``atoll://HOST:PORT/RUN#TOKEN``; the token is base32 (lower case, unpadded) of::

    version u8 = 1 | fingerprint 8 bytes | run secret 32 bytes | crc32 of all before, big-endian

In a run with an authority an invite is made there, for a grant (peer/authority/grants.py)::

    version u8 = 2 | run secret 32 | authority's public key 32 | seed 32 | grant | crc32

The seed is the private key of a token, and zeros with a pass, which is for one peer. Whoever
answers at the address has to show a pass too, so no fingerprint is needed.

The fingerprint is the start of SHA-256 of the inviting peer's id: it proves that the dialled
machine is the one that printed the line. The checksum tells a typing mistake from a refusal.
Whoever holds the secret may join, so no error, log line or ``repr`` here ever contains the token.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import zlib
from dataclasses import dataclass, field
from typing import Self

from atoll.collectives.errors import ConfigError
from atoll.peer.membership.signatures import KEY_BYTES

SECRET_BYTES = 32
DEFAULT_PORT = 29600  # of every peer, unless --listen says another
# 64 bits: found by chance never, by search only at a cost that the secret makes pointless.
FINGERPRINT_BYTES = 8
VERSION = 1
VERSION_AUTHORITY = 2
SEED_BYTES = 32

_SCHEME = "atoll://"
_CRC_BYTES = 4
_RUN_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_BODY_BYTES = 1 + FINGERPRINT_BYTES + SECRET_BYTES
_GRANT_AT = 1 + SECRET_BYTES + KEY_BYTES + SEED_BYTES
_BODY_BYTES_MAX = 1 << 10  # twice what the longest grant takes
_HOST_CHARACTERS_MAX = 253  # RFC 1035: the longest name that DNS can hold
_TOKEN = re.compile(rf"({_SCHEME}[^\s#]*#)\S+")
_FIX = "copy the whole `atoll join` line that was printed, with the part after #"


@dataclass(frozen=True, slots=True)
class Invite:
    """Hold what an invite says.

    ``str()`` is the line, secret included; ``repr()`` hides the secret.
    """

    host: str
    port: int
    run: str
    fingerprint: bytes
    secret: bytes = field(repr=False)
    authority: bytes = b""  # with it: no fingerprint, but a grant and its seed
    grant: bytes = b""
    seed: bytes = field(default=b"", repr=False)

    @property
    def address(self) -> str:
        """Return the address as ``host:port``, an IPv6 host in brackets."""
        return format_address(self.host, self.port)

    def __str__(self) -> str:
        if self.authority:
            body = (
                bytes([VERSION_AUTHORITY]) + self.secret + self.authority + self.seed + self.grant
            )
        else:
            body = bytes([VERSION]) + self.fingerprint + self.secret
        token = base64.b32encode(body + zlib.crc32(body).to_bytes(_CRC_BYTES, "big"))
        return f"{_SCHEME}{self.address}/{self.run}#{token.decode().rstrip('=').lower()}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the invite in ``text``.

        Raises ConfigError, which says which part is wrong, never what the token is.
        """
        text = text.strip()
        if not text.startswith(_SCHEME):
            raise ConfigError("an invite begins with atoll://", fix=_FIX)
        place, hash_sign, token = text.removeprefix(_SCHEME).partition("#")
        address, slash, run = place.partition("/")
        if not (hash_sign and slash):
            raise ConfigError("this invite is not atoll://HOST:PORT/RUN#TOKEN", fix=_FIX)
        host, port = parse_address(address)
        body = _parse_token(token)
        check_run_name(run)
        if body[0] == VERSION:
            return cls(host, port, run, body[1 : 1 + FINGERPRINT_BYTES], body[-SECRET_BYTES:])
        secret, rest = body[1 : 1 + SECRET_BYTES], body[1 + SECRET_BYTES : _GRANT_AT]
        authority, seed = rest[:KEY_BYTES], rest[KEY_BYTES:]
        return cls(host, port, run, b"", secret, authority, body[_GRANT_AT:], seed)


def without_token(text: str) -> str:
    """Return a text with every invite in it cut off where its secret begins."""
    return _TOKEN.sub(r"\1...", text)


def fingerprint_of(peer_id: bytes) -> bytes:
    """Return the 8 bytes by which an invite names the peer that made it."""
    return hashlib.sha256(peer_id).digest()[:FINGERPRINT_BYTES]


def check_run_name(run: str) -> str:
    """Return ``run`` itself if it is a run name; raise ConfigError otherwise."""
    if not _RUN_NAME.fullmatch(run):
        raise ConfigError(
            f"{run[:80]!r} is not a run name",
            fix="use 1 to 64 letters, digits, dots, underscores and hyphens",
        )
    return run


def format_address(host: str, port: int) -> str:
    """Return the address as ``host:port``, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str, *, port_min: int = 1) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[ipv6]:port``; raise ConfigError otherwise.

    ``port_min`` 0 admits "any free port", for the address to listen on.
    """
    shown = repr(text.partition("#")[0][:80])  # after # there may be a token
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(
            f"{shown} is ambiguous", fix="write an IPv6 address in brackets: [2001:db8::1]:29600"
        )
    plain = host.isascii() and host.isprintable() and not set(host) & set(" /#@[]%")
    named = colon and 0 < len(host) <= _HOST_CHARACTERS_MAX and plain
    if not (named and port.isascii() and port.isdigit() and len(port) <= 5):
        raise ConfigError(f"{shown} is not HOST:PORT", fix="for example 203.0.113.7:29600")
    if not port_min <= int(port) < 1 << 16:
        raise ConfigError(f"the port in {shown} is not {port_min} to 65535")
    return host, int(port)


def parse_listen(text: str | None) -> tuple[str, int]:
    """Return where to listen, of ``host:port`` or ``:port``; raise ConfigError for anything else.

    Host "" is every address of this machine, of IPv4 and IPv6; port 0 is any that is free. None is
    every address at the usual port.
    """
    if text is None:
        return "", DEFAULT_PORT
    if text.startswith(":"):
        return "", parse_address(f"any{text}", port_min=0)[1]
    return parse_address(text, port_min=0)


def is_address(text: str) -> bool:
    """Return whether this is HOST:PORT: others may say anything."""
    try:
        parse_address(text)
    except ConfigError:
        return False
    return True


def _parse_token(token: str) -> bytes:
    """Return a token's body: version and all fields, of a length that the version permits.

    Raises ConfigError for a token that is damaged, or of another version.
    """
    try:
        raw = base64.b32decode(token.upper() + "=" * (-len(token) % 8))
    except (binascii.Error, ValueError):
        # `from None`: the cause's message could quote the token.
        raise ConfigError("the part of this invite after # is damaged", fix=_FIX) from None
    if raw and raw[0] not in (VERSION, VERSION_AUTHORITY):
        raise ConfigError(
            f"this invite has version {raw[0]}; this program reads {VERSION} and"
            f" {VERSION_AUTHORITY}",
            fix="copy it again, whole; or install the same atoll version on both machines",
        )
    body, checksum = raw[:-_CRC_BYTES], raw[-_CRC_BYTES:]
    if raw[:1] == bytes([VERSION]):
        whole = len(body) == _BODY_BYTES
    else:
        whole = _GRANT_AT < len(body) <= _BODY_BYTES_MAX
    if not whole or checksum != zlib.crc32(body).to_bytes(_CRC_BYTES, "big"):
        raise ConfigError("the part of this invite after # is damaged or cut short", fix=_FIX)
    return body
