"""Serve the status page over HTTP, read-only: a few routes, in threads beside the event loop.

Who may see it. On loopback everybody on this machine, and no page of another site: a request whose
Host names anything but this machine is refused, which is what a site has that lets its own name
lead to 127.0.0.1 (DNS rebinding). Elsewhere only who has the token, a random one that is kept in
the home: it is in the URL that the daemon prints on a terminal, moves from there into a cookie, so
that it stays in no history of a browser, and whoever scrapes sends it as ``Authorization: Bearer``.
Without it every answer is the same, whatever was asked for.

What it may cost. So many connections at a time, each with one request, of bounded size and time;
what asks the daemon is answered from memory for a second.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import math
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from http.server import BaseHTTPRequestHandler
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs, urlsplit

from atoll.collectives.errors import ConfigError
from atoll.collectives.threads import lower_priority, worker
from atoll.peer.net.identity import write_atomic
from atoll.peer.net.invite import format_address
from atoll.peer.telemetry.page.history import EVENTS_MAX, History

TOKEN_FILE = "page-token"
TOKEN_BYTES = 16
CONNECTIONS_MAX = 16  # a browser has six; more than that is refused at once
IDLE_S = 10.0  # for a line of the request, or for a part of the answer to be taken
CONNECTION_S = 120.0  # for all of it: whoever sends a byte now and then holds no place for ever
LOOK_S = 0.5  # between two looks at connections that are too old
ASK_S = 5.0  # for the daemon to answer; its loop is late only on a starved machine
STATUS_KEPT_S = 1.0  # so that many viewers cost the daemon no more than one
POINTS_DEFAULT = 240
EVENTS_DEFAULT = 200
QUERY_FIELDS_MAX = 100

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"

T = TypeVar("T")
Query = Mapping[str, list[str]]
Status = Callable[[], dict[str, Any] | None]  # of the daemon; None: a recorded run has none
Rows = Callable[[], list[dict[str, Any]]]  # the last ones of each peer, as `RowTable.told` has them


class Reply(NamedTuple):
    """Hold the body of an answer and its type."""

    body: bytes
    content_type: str


class PageServer:
    """Serve one run's page and metrics. It listens once it is made, and answers once started."""

    def __init__(self, host: str, port: int, history: History, home: Path | None) -> None:
        """Listen at ``host``; ``home`` keeps the token that others than this machine need.

        Raises ConfigError if nobody can listen there, or if others could see a page without a home.
        """
        self._history = history
        self._status: Status = lambda: None
        self._rows: Rows = list
        self._known: tuple[float, dict[str, Any] | None] = (-math.inf, None)
        self._lock = threading.Lock()
        self._is_started = False
        self._server = _PageListener(host, port, self)
        self.token, self.token_path = "", home / TOKEN_FILE if home is not None else None
        if not self._server.is_loopback:
            if home is None:
                self._server.server_close()
                fix = "give 127.0.0.1:PORT, and look from elsewhere through an ssh tunnel"
                raise ConfigError("a recorded run is shown on this machine only", fix=fix)
            self.token = page_token(home)
        # One more route is one more row.
        self.routes: dict[str, Callable[[Query], Reply | None]] = {
            "/metrics": self._on_metrics,
            "/api/status": self._on_status,
            "/api/history": self._on_history,
            "/api/events": self._on_events,
            **{path: partial(_on_file, *file) for path, file in FILES.items()},
        }

    def start(self, status: Status, rows: Rows = list) -> None:
        """Answer from now on, in threads; ``status`` and ``rows`` are called in any of them."""
        self._status, self._rows = status, rows
        self._is_started = True
        worker(partial(self._server.serve_forever, LOOK_S), "page").start()

    def close(self) -> None:
        """Stop; an answer that is being sent may be cut off."""
        if self._is_started:
            self._server.shutdown()
        self._server.server_close()
        self._server.end_all()
        self._history.close()

    @property
    def port(self) -> int:
        return self._server.port

    def url(self, host: str, *, with_token: bool = True) -> str:
        """Return what to open.

        ``host``: by which others reach this machine, where the page is on all of its addresses.
        """
        own = ipaddress.ip_address(self._server.host)
        host = host.strip("[]") if own.is_unspecified else self._server.host
        address = format_address(host, self.port)
        return f"http://{address}/" + (f"?token={self.token}" if self.token and with_token else "")

    # ------------------------------------------------------------ answers

    def answer(self, path: str, query: Query) -> Reply | None:
        """Return the answer for a path; None where there is nothing.

        Raises ValueError for a query that makes no sense, TimeoutError if the daemon is too busy.
        """
        route = self.routes.get(path)
        return route(query) if route is not None else None

    def _on_status(self, query: Query) -> Reply:
        status = self._fresh_status()
        return _json({"now_unix_s": time.time(), "recorded": status is None, "status": status})

    def _fresh_status(self) -> dict[str, Any] | None:
        with self._lock:
            asked_s, status = self._known
            if time.monotonic() - asked_s > STATUS_KEPT_S:
                status = self._status()
                self._known = time.monotonic(), status
            return status

    def _on_metrics(self, query: Query) -> Reply | None:
        """Return what Prometheus scrapes; a recorded run has none."""
        from atoll.peer.telemetry.metrics import CONTENT_TYPE, metrics_text

        status = self._fresh_status()
        return Reply(metrics_text(status, self._rows()), CONTENT_TYPE) if status else None

    def _on_history(self, query: Query) -> Reply:
        points = _number(query, "points", POINTS_DEFAULT)
        return _json(self._history.summary(_number(query, "since", 0.0), int(points)))

    def _on_events(self, query: Query) -> Reply:
        since, until = _number(query, "since", 0.0), _number(query, "until", math.inf)
        limit = int(_number(query, "limit", EVENTS_DEFAULT))
        kinds = {kind for text in query.get("kind", ()) for kind in text.split(",") if kind}
        return _json(self._history.events(since, until, kinds, min(limit, EVENTS_MAX)))


def _json(document: object) -> Reply:
    return Reply(json.dumps(document, separators=(",", ":"), default=str).encode(), JSON)


def _on_file(name: str, content_type: str, query: Query) -> Reply:
    return Reply(resources.files(__package__).joinpath(name).read_bytes(), content_type)


def _number(query: Query, name: str, otherwise: float) -> float:
    """Return a number from 0 on that a query has; raise ValueError for anything else."""
    text = query.get(name, [""])[-1]
    try:
        number = float(text) if text else otherwise
    except ValueError:
        number = math.nan
    if math.isnan(number) or number < 0 or (text and math.isinf(number)):
        raise ValueError(f"{name} is a number from 0 on")
    return number


# ---------------------------------------------------------------- HTTP


class _PageRequest(BaseHTTPRequestHandler):
    """Answer one request on a connection, and end it."""

    server: _PageListener
    timeout = IDLE_S

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        page, asked = self.server.page, _asked(self.path)
        path, query = asked or ("", {})
        if not page.token:
            if not is_this_machine(self.headers.get("Host", "")):
                self._say(403, "this page is shown to this machine only")
                return
        elif not self._has_token(page.token):
            if is_same(query.get("token", [""])[-1], page.token):
                self._take_cookie(page.token)
            else:
                self._say(403, "this page needs its token")
            return
        if asked is None:
            self._say(400, "this is no address of a page")
            return
        try:
            reply = page.answer(path, query)
        except ValueError as error:
            self._say(400, str(error))
        except TimeoutError:
            self._say(503, "the daemon is too busy to answer")
        else:
            if reply is None:
                self._say(404, "there is nothing")
            else:
                self._send(200, reply, with_body=with_body)

    def _has_token(self, token: str) -> bool:
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and is_same(given.strip(), token):
            return True
        cookies = (
            part.strip().partition("=") for part in self.headers.get("Cookie", "").split(";")
        )
        return any(name == self._cookie and is_same(value, token) for name, _, value in cookies)

    @property
    def _cookie(self) -> str:
        return f"atoll-{self.server.port}"  # browsers do not tell ports apart

    def _take_cookie(self, token: str) -> None:
        """Move the token from the URL into a cookie, so that no history and no Referer has it."""
        cookie = f"{self._cookie}={token}; Path=/; HttpOnly; SameSite=Lax"
        self._send(303, Reply(b"", TEXT), {"Location": "/", "Set-Cookie": cookie})

    def _say(self, code: int, text: str) -> None:
        self._send(code, Reply(f"{text}\n".encode(), TEXT))

    def _send(
        self,
        code: int,
        reply: Reply,
        more: Mapping[str, str] | None = None,
        *,
        with_body: bool = True,
    ) -> None:
        self.send_response_only(code)  # without the name and version of this program
        for name, value in (HEADERS | dict(more or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if with_body:
            self.wfile.write(reply.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that is none, or of another kind: nothing can be changed here."""
        self._say(code, message or "no")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- as it is called
        """Log no requests: whoever looks every second would fill the log."""


class _PageListener(socketserver.ThreadingTCPServer):
    """Accept a bounded number of connections, each for a bounded time."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTIONS_MAX

    def __init__(self, host: str, port: int, page: PageServer) -> None:
        self.page = page
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._open: dict[socket.socket, float] = {}
        self._open_lock = threading.Lock()
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family = found[0][0]
            super().__init__((host, port), _PageRequest)
        except (OSError, UnicodeError) as error:  # UnicodeError: a label that no DNS name may have
            where, why = format_address(host, port), getattr(error, "strerror", "") or error
            fix = "give another port, or --page 0 for any that is free"
            raise ConfigError(f"no page at {where}: {why}", fix=fix) from error

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def host(self) -> str:
        return str(self.server_address[0]).partition("%")[0]

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._open_lock:
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        lower_priority()
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._open_lock:
                self._open.pop(request, None)
            self._places.release()

    def service_actions(self) -> None:
        """End connections that have lasted too long."""
        self._end(time.monotonic() - CONNECTION_S)

    def end_all(self) -> None:
        self._end(math.inf)

    def _end(self, before_s: float) -> None:
        with self._open_lock:
            for request, since_s in self._open.items():
                if since_s < before_s:
                    try:
                        request.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        continue  # its other side has ended it

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that goes away; anything else is a defect, and is shown."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _asked(target: str) -> tuple[str, Query] | None:
    """Return what a request asks for, path and query; None where it makes no sense."""
    try:
        url = urlsplit(target)
        return url.path, parse_qs(url.query, max_num_fields=QUERY_FIELDS_MAX)
    except ValueError:
        return None


# ---------------------------------------------------------------- who may see it


def is_same(given: str, token: str) -> bool:
    """Return whether these are the same text, in a time that tells nothing of where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def is_this_machine(host: str) -> bool:
    """Return whether a request's Host is a name of this machine's own loopback, with any port."""
    name = host.strip().rpartition("]")[0].lstrip("[") if "[" in host else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip()).is_loopback
    except ValueError:
        return False


def page_token(home: Path) -> str:
    """Return the token of a home's page; made when it is first asked for, and kept.

    Raises OSError if it cannot be.
    """
    path = home / TOKEN_FILE
    try:
        known = path.read_text("ascii").strip()
        if len(bytes.fromhex(known)) == TOKEN_BYTES:
            return known
    except (FileNotFoundError, ValueError):
        pass
    token = secrets.token_hex(TOKEN_BYTES)
    write_atomic(path, token.encode() + b"\n")
    return token


def asked_in_loop(loop: Any, take: Callable[[], T]) -> Callable[[], T]:
    """Return a function that has ``take`` called in an event loop, and waits for what it returns.

    It raises TimeoutError where that takes longer than ASK_S, as when the loop has ended.
    """

    def ask() -> T:
        answer: Future[T] = Future()

        def give() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(take())
                except Exception as error:  # raised where it was asked for
                    answer.set_exception(error)

        try:
            loop.call_soon_threadsafe(give)
        except RuntimeError as error:
            raise TimeoutError("the daemon has ended") from error
        try:
            return answer.result(ASK_S)
        finally:
            answer.cancel()

    return ask
