"""Ask a cloud's metadata service again and again, until it gives notice."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.peer.supervisor.notices import CLOUDS, SpotNotice

TIMEOUT_S = 2.0  # it is on this very machine, or one hop away
BODY_BYTES_MAX = 64 << 10  # the longest answer is a list of a few events


class MetadataService:
    """Send requests to one address: no proxy, no redirect, and a connection for each."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:  # a bracket is left open, or the port is no number
            raise _no_address(url) from error
        if parts.scheme != "http" or not self._host:
            raise _no_address(url)
        self.url, self._prefix = url, parts.path.rstrip("/")

    def request(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Return status and body of an answer. Raises OSError or HTTPException without one."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.request(method, self._prefix + path, headers=dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read(BODY_BYTES_MAX)
        finally:
            connection.close()


async def watch_notices(
    name: str,
    service: MetadataService,
    given: Callable[[SpotNotice], None],
    say: Callable[[str], None],
) -> None:
    """Ask the cloud ``name`` until it gives a notice, and hand that to ``given``.

    An address that does not answer, or in another way than the cloud does, is asked again for as
    long as it takes; that is said once, and once when it answers again.
    """
    cloud = CLOUDS[name]
    source = cloud.source()
    is_deaf = False
    while True:
        try:
            notice = await asyncio.to_thread(source.ask, service.request, time.time())
        except Exception as error:  # whoever answers may be anybody: no answer may end a training
            if not is_deaf:
                what = str(error) or type(error).__name__
                if isinstance(error, RemoteProtocolError):
                    what = error.what
                say(
                    f"notices of {name} cannot be had from {service.url} ({what}); asking"
                    f" again every {cloud.poll_s:.0f} s: is this machine one of {name}?"
                )
            is_deaf = True
        else:
            if is_deaf:
                say(f"{service.url} answers: there are notices now")
            is_deaf = False
            if notice is not None:
                given(notice)
                return
        await asyncio.sleep(cloud.poll_s)


def _no_address(url: str) -> ConfigError:
    what = f"{url!r} is no address of a metadata service"
    return ConfigError(what, fix="for example http://HOST:PORT")
