"""Connect through a SOCKS5 proxy (RFC 1928, RFC 1929): a machine that has no other way out.

User-space VPNs offer one where a container has no TUN device, and networks that let nothing else
out. The proxy makes the connection and resolves the name; what the kernel says of the socket is
then true of the way to the proxy alone (relayed.py). Addresses of this machine itself are dialled
directly: to the proxy they would be its own.
"""

from __future__ import annotations

import asyncio
import re
import socket
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import Final
from urllib.parse import unquote

from atoll.collectives.errors import ConfigError
from atoll.peer.net.address_kind import LOOPBACK, NAME, address_kind
from atoll.peer.net.invite import format_address, parse_address
from atoll.peer.net.relayed import ProxiedSocket, remote_ip_of

PAGE: Final = "docs/reachability.md"
_FORM: Final = "socks5://HOST:PORT or socks5://USER:PASSWORD@HOST:PORT"
_URL: Final = re.compile(r"socks5h?://(?:(?P<who>.*)@)?(?P<place>[^@]*?)/?")
_PASSWORD: Final = re.compile(r"(socks5h?://)\S*@", re.IGNORECASE)
FIELD_BYTES_MAX: Final = 255  # of a user, a password and a name: each has a length of one byte

_VERSION: Final = 5
_LOGIN_VERSION: Final = 1
_CONNECT: Final = 1
_NO_LOGIN, _LOGIN, _NO_METHOD = 0, 2, 0xFF
_IPV4, _DOMAIN, _IPV6 = 1, 3, 4
_ADDRESS_BYTES: Final = {_IPV4: 4, _IPV6: 16}
_PORT_BYTES: Final = 2
# What a proxy answers where it makes no connection (RFC 1928, section 6).
REPLIES: Final = {
    1: "it failed (general failure)",
    2: "its rules do not allow this connection",
    3: "it has no route to that network",
    4: "it has no route to that machine, or cannot resolve the name",
    5: "the other machine refused the connection",
    6: "the other machine was not reached in time (TTL expired)",
    7: "it does not make connections (command not supported)",
    8: "it does not know this kind of address",
}
_LOGIN_FIX: Final = "check the user and the password in ATOLL_PROXY"
_RULES_FIX: Final = "have whoever runs the proxy allow it, or use another proxy"
_NO_SOCKS_FIX: Final = "is that the port of a SOCKS5 proxy? see --proxy"


class ProxyError(OSError):
    """Report that a proxy made no connection. It proves nothing of the peer behind it.

    ``fix``: what to do; "" where that is the same as without a proxy.
    """

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.fix = fix


@dataclass(frozen=True, slots=True)
class Proxy:
    """Name a SOCKS5 proxy. Its text is without the user and the password."""

    host: str
    port: int
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"socks5://{format_address(self.host, self.port)}"

    def leads_to(self, host: str) -> bool:
        """Return whether a host is dialled through this proxy: all but this machine itself."""
        return host.lower() != "localhost" and address_kind(host) != LOOPBACK


def parse_proxy(text: str) -> Proxy:
    """Return the proxy of ``socks5://[USER:PASSWORD@]HOST:PORT``; raise ConfigError otherwise.

    Errors never quote it: there may be a password in it.
    """
    found = _URL.fullmatch(text.strip())
    if found is None:
        raise ConfigError("the proxy is no URL of a SOCKS5 proxy", fix=f"write {_FORM}")
    user, colon, password = (found["who"] or "").partition(":")
    user, password = unquote(user), unquote(password)
    try:
        host, port = parse_address(found["place"])
    except ConfigError:
        what = "the proxy has no HOST:PORT behind socks5://"
        raise ConfigError(what, fix=f"write {_FORM}") from None
    lengths = len(user.encode()), len(password.encode())
    if found["who"] is not None and not (colon and min(lengths) > 0):
        raise ConfigError("the proxy has a user without a password", fix=f"write {_FORM}")
    if max(lengths) > FIELD_BYTES_MAX:
        what = f"the user or the password of the proxy is longer than {FIELD_BYTES_MAX} bytes"
        raise ConfigError(what, fix="no SOCKS5 proxy takes that (RFC 1929): choose a shorter one")
    return Proxy(host, port, user, password)


def without_password(text: str) -> str:
    """Return a text with the user and the password of every proxy in it cut out."""
    return _PASSWORD.sub(r"\1...@", text)


class Socks:
    """Carry on the conversation with a proxy on a connected non-blocking socket.

    Every wait is the caller's to limit; the socket stays the caller's to close. What the proxy
    answers is never trusted to be short, or SOCKS at all. Raises ProxyError and OSError.
    """

    def __init__(self, sock: socket.socket, proxy: Proxy) -> None:
        self._sock, self._proxy = sock, proxy
        self._loop = asyncio.get_running_loop()

    async def log_in(self) -> None:
        """Agree on how this side shows who it is, and do so."""
        methods = bytes((_NO_LOGIN, _LOGIN) if self._proxy.user else (_NO_LOGIN,))
        await self._send(bytes((_VERSION, len(methods))) + methods)
        version, method = await self._read(2)
        self._check(version, _VERSION)
        if method == _NO_METHOD and not self._proxy.user:
            fix = "set ATOLL_PROXY=socks5://USER:PASSWORD@HOST:PORT"
            raise ProxyError("it wants a user and a password", fix)
        if method not in methods:
            what = "it takes neither user and password nor nobody's"
            raise ProxyError(f"{what} (method {method:#04x})", "use another proxy")
        if method == _LOGIN:
            await self._show_password()

    async def _show_password(self) -> None:
        user, password = self._proxy.user.encode(), self._proxy.password.encode()
        login = bytes((_LOGIN_VERSION, len(user))) + user + bytes((len(password),)) + password
        await self._send(login)
        version, status = await self._read(2)
        self._check(version, _LOGIN_VERSION)
        if status:
            raise ProxyError(f"it does not accept the user and the password ({status})", _LOGIN_FIX)

    async def connect(self, host: str, port: int) -> None:
        """Have the proxy connect to a host, whose name it resolves; return when it has."""
        asked = bytes((_VERSION, _CONNECT, 0)) + _address(host) + port.to_bytes(_PORT_BYTES, "big")
        await self._send(asked)
        version, reply, _, kind = await self._read(4)
        self._check(version, _VERSION)
        if reply:
            words = REPLIES.get(reply, "it answered something that SOCKS5 does not know")
            raise ProxyError(f"{words} (reply {reply})", _RULES_FIX if reply == 2 else "")
        size = _ADDRESS_BYTES.get(kind)
        if kind == _DOMAIN:
            size = (await self._read(1))[0]
        if size is None:
            raise ProxyError(f"its answer is not SOCKS5 (address type {kind:#04x})", _NO_SOCKS_FIX)
        await self._read(size + _PORT_BYTES)  # where it dials from: nobody needs it

    def _check(self, version: int, expected: int) -> None:
        if version != expected:
            raise ProxyError(f"its answer is not SOCKS5 (it begins {version:#04x})", _NO_SOCKS_FIX)

    async def _send(self, data: bytes) -> None:
        try:
            await self._loop.sock_sendall(self._sock, data)
        except ConnectionError as error:
            raise _hung_up() from error

    async def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            try:
                piece = await self._loop.sock_recv(self._sock, count - len(data))
            except ConnectionError as error:
                raise _hung_up() from error
            if not piece:
                raise _hung_up()
            data += piece
        return data


def _hung_up() -> ProxyError:
    return ProxyError("it closed the connection without an answer", _NO_SOCKS_FIX)


def _address(host: str) -> bytes:
    """Return a host as SOCKS5 has it: an IP address, or a name for the proxy to resolve."""
    if address_kind(host) == NAME:
        name = host.encode("ascii")  # parse_address admits no other
        return bytes((_DOMAIN, len(name))) + name
    address = ip_address(host.partition("%")[0])
    return bytes((_IPV6 if isinstance(address, IPv6Address) else _IPV4,)) + address.packed


def proxied(sock: socket.socket, host: str) -> ProxiedSocket:
    """Return the same connection, marked as one through a proxy to ``host``; ``sock`` is used up.

    Of a name nobody here knows the address: it is "any", which is private to nobody.
    """
    stated_ip = "0.0.0.0" if address_kind(host) == NAME else host.partition("%")[0]
    return _marked(sock, stated_ip)


def came_by_proxy(sock: socket.socket) -> ProxiedSocket:
    """Return an accepted connection, marked as one that a proxy has made; ``sock`` is used up.

    A user-space VPN brings those who dial this machine from its own address.
    """
    return _marked(sock, remote_ip_of(sock))


def _marked(sock: socket.socket, stated_ip: str) -> ProxiedSocket:
    marked = ProxiedSocket(fileno=sock.detach())
    marked.setblocking(False)
    marked.stated_ip = stated_ip
    return marked
