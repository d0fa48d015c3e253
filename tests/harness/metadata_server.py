"""A real HTTP server that speaks the metadata protocols of three clouds, with their refusals."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

TOKEN = "token-of-imds"
NAME = "vm-7"


class MetadataServer:
    """``gone_s``: the unix time at which the machine goes; None: there is no notice.

    ``asked`` counts requests by path; ``token`` is what it takes at AWS, and a test may change it.
    """

    def __init__(self) -> None:
        self.gone_s: float | None = None  # unix time
        self.action, self.event = "terminate", "Preempt"
        self.machines = ["vm-1", NAME]
        self.token = TOKEN
        self.broken = False  # answers in riddles
        self.asked: dict[str, int] = {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self, "GET")

            def do_PUT(self) -> None:
                server.answer(self, "PUT")

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, request: BaseHTTPRequestHandler, method: str) -> None:
        self.asked[request.path] = self.asked.get(request.path, 0) + 1
        status, body = self._answer(method, request.path, request.headers)
        if self.broken:
            status, body = 200, b"<html>a login page"
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def _answer(self, method: str, path: str, headers: Any) -> tuple[int, bytes]:
        when = None if self.gone_s is None else datetime.fromtimestamp(self.gone_s, UTC)
        if path == "/latest/api/token":
            is_right = method == "PUT" and "X-aws-ec2-metadata-token-ttl-seconds" in headers
            return (200, self.token.encode()) if is_right else (400, b"")
        if path == "/latest/meta-data/spot/instance-action":
            if headers.get("X-aws-ec2-metadata-token") != self.token:
                return 401, b"Unauthorized"
            if when is None:
                return 404, b"Not Found"
            said = {"action": self.action, "time": f"{when:%Y-%m-%dT%H:%M:%SZ}"}
            return 200, json.dumps(said).encode()
        if path == "/computeMetadata/v1/instance/preempted":
            if headers.get("Metadata-Flavor") != "Google":
                return 403, b"Missing Metadata-Flavor"
            return 200, b"FALSE" if when is None else b"TRUE"
        if headers.get("Metadata") != "true":
            return 400, b"Bad request"
        if path == "/metadata/instance/compute/name?api-version=2021-02-01&format=text":
            return 200, NAME.encode()
        if path == "/metadata/scheduledevents?api-version=2020-07-01":
            events = [{"EventType": "Freeze", "Resources": [NAME], "NotBefore": ""}]
            if when is not None:
                at = format_datetime(when, usegmt=True)
                event = {"EventType": self.event, "Resources": self.machines, "NotBefore": at}
                events.append(event)
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": events}).encode()
        return 404, b""
