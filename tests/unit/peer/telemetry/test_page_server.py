"""Who may see the page, and what a request may cost: the server alone, on loopback."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.collectives.errors import ConfigError
from atoll.peer.cli import main
from atoll.peer.cli.page import page_address
from atoll.peer.telemetry.page import server as server_module
from atoll.peer.telemetry.page.history import History
from atoll.peer.telemetry.page.server import (
    FILES,
    HEADERS,
    TOKEN_FILE,
    PageServer,
    is_this_machine,
    page_token,
)

Serving = Callable[..., PageServer]
SECRET_TEXT = "run-of-nobody-else"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serving]:
    """Pages that answer until the test is over."""
    made: list[PageServer] = []

    def served(host: str = "127.0.0.1", status: Any = lambda: {"run": SECRET_TEXT}) -> PageServer:
        page = PageServer(host, 0, History(tmp_path), tmp_path)
        made.append(page)
        page.start(status)
        return page

    yield served
    for page in made:
        page.close()


def ask(
    page: PageServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_what_is_served_on_loopback(serve: Serving) -> None:
    page = serve()
    assert page.url("") == f"http://127.0.0.1:{page.port}/"
    code, headers, body = ask(page, "/api/status")
    assert code == 200
    assert json.loads(body)["status"] == {"run": SECRET_TEXT}
    assert {name: headers[name] for name in HEADERS} == HEADERS
    assert "Server" not in headers
    for path, (_, content_type) in FILES.items():
        code, headers, body = ask(page, path)
        assert (code, headers["Content-Type"]) == (200, content_type)
        assert len(body) > 100
        assert b"//" not in body.replace(b"http://www.w3.org/2000/svg", b"") or path.endswith(".js")
    assert json.loads(ask(page, "/api/history?points=10")[2])["rounds"] == {}
    assert json.loads(ask(page, "/api/events")[2])["events"] == []
    assert ask(page, "/api/status", "HEAD")[2] == b""


@pytest.mark.parametrize(
    "path", ["/page", "/../pyproject.toml", "/page.py", "/api", "//etc/passwd"]
)
def test_there_is_nothing_else(serve: Serving, path: str) -> None:
    assert ask(serve(), path)[0] == 404


def test_nothing_can_be_changed(serve: Serving) -> None:
    page = serve()
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert ask(page, "/api/status", method)[0] == 501


@pytest.mark.parametrize(
    "query", ["points=x", "points=-1", "points=nan", "since=inf", "since=1e999"]
)
def test_a_query_that_makes_no_sense_is_refused(serve: Serving, query: str) -> None:
    status, _, said = ask(serve(), f"/api/history?{query}")
    assert status == 400
    assert said.decode().strip() == f"{query.partition('=')[0]} is a number from 0 on"


def asked_as_it_is(page: PageServer, target: str) -> bytes:
    """The first line of the answer to a target that a client of ours would not send."""
    with socket.create_connection(("127.0.0.1", page.port), timeout=60) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return connection.makefile("rb").readline().strip()


@pytest.mark.parametrize("target", ["http://[", "/api/status?" + "&".join(["a=b"] * 101)])
def test_an_address_that_makes_no_sense_is_refused_once_the_token_is_there(
    serve: Serving, target: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert asked_as_it_is(serve(), target) == b"HTTP/1.0 400 Bad Request"
    assert asked_as_it_is(serve("0.0.0.0"), target) == b"HTTP/1.0 403 Forbidden"
    assert capfd.readouterr().err == "", "no traceback in the log of a service"


def test_pages_of_other_sites_do_not_see_it(serve: Serving) -> None:
    """A site may let its own name lead to 127.0.0.1; its Host tells."""
    page = serve()
    for host in (
        "evil.example",
        f"evil.example:{page.port}",
        "127.0.0.1.evil.example",
        "",
        "[::2]",
    ):
        code, _, body = ask(page, "/api/status", Host=host)
        assert code == 403, host
        assert SECRET_TEXT.encode() not in body
    for host in ("localhost", "LOCALHOST:9", "127.0.0.1:1", "[::1]:2", "127.8.8.8"):
        assert ask(page, "/api/status", Host=host)[0] == 200, host
    assert not is_this_machine("localhost.")
    assert not is_this_machine("0.0.0.0")


def test_off_loopback_nothing_is_seen_without_the_token(serve: Serving, tmp_path: Path) -> None:
    page = serve("0.0.0.0")
    token = (tmp_path / TOKEN_FILE).read_text().strip()
    assert (tmp_path / TOKEN_FILE).stat().st_mode & 0o777 == 0o600
    assert page.url("192.0.2.7") == f"http://192.0.2.7:{page.port}/?token={token}"
    wrong = ["", token[:-1], token + "0", "0" * len(token), "ü"]
    refused = {ask(page, path)[::2] for path in ("/", "/page.js", "/api/status", "/nothing")}
    refused |= {ask(page, f"/?token={text}".encode().decode("latin-1"))[::2] for text in wrong[:-1]}
    refused |= {
        ask(page, "/api/status", Authorization=f"Bearer {text}")[::2] for text in wrong[:-1]
    }
    refused |= {ask(page, "/", Cookie=f"atoll-{page.port}={text}; a=b")[::2] for text in wrong[:-1]}
    refused |= {ask(page, "/", Cookie=f"atoll-1={token}")[::2]}
    assert refused == {(403, b"this page needs its token\n")}

    code, headers, body = ask(page, f"/?token={token}")
    assert (code, headers["Location"], body) == (303, "/", b"")
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite" in cookie
    assert ask(page, "/", Cookie=f"x=y; {cookie.partition(';')[0]}")[0] == 200
    assert ask(page, "/api/status", Authorization=f"Bearer {token}")[0] == 200


def test_the_token_stays_the_same_and_a_damaged_one_is_made_anew(tmp_path: Path) -> None:
    token = page_token(tmp_path)
    assert page_token(tmp_path) == token
    (tmp_path / TOKEN_FILE).write_text(token[:-1])
    assert page_token(tmp_path) != token
    assert page_token(tmp_path) == page_token(tmp_path)


def test_a_page_without_a_home_is_shown_on_this_machine_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this machine only"):
        PageServer("0.0.0.0", 0, History(tmp_path), None)


def test_a_port_that_is_taken_is_said_at_once(serve: Serving, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no page at 127"):
        PageServer("127.0.0.1", serve().port, History(tmp_path), tmp_path)


def test_a_daemon_that_does_not_answer_is_said(serve: Serving) -> None:
    def busy() -> dict[str, Any]:
        raise TimeoutError

    assert ask(serve(status=busy), "/api/status")[0] == 503


def test_the_daemon_is_not_asked_again_for_every_viewer(serve: Serving) -> None:
    asked: list[int] = []

    def status() -> dict[str, Any]:
        asked.append(1)
        return {}

    page = serve(status=status)
    threads = [threading.Thread(target=ask, args=(page, "/api/status")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) < 8


def test_connections_are_bounded_and_old_ones_end(
    serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = serve()
    idle = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(40)]
    for connection in idle:
        connection.settimeout(60)
    # Those beyond the limit end at once, the others when they have been there for too long.
    assert sum(connection.recv(1) == b"" for connection in idle[-20:]) == 20
    monkeypatch.setattr(server_module, "CONNECTION_S", 0.0)
    assert idle[0].recv(1) == b""
    for connection in idle:
        connection.close()
    monkeypatch.undo()
    for _ in range(100):
        try:
            if ask(page, "/")[0] == 200:
                return
        except (http.client.HTTPException, OSError):
            continue
    raise AssertionError("the page does not answer any more")


def test_addresses_of_pages() -> None:
    assert page_address("8080") == ("127.0.0.1", 8080)
    assert page_address("0") == ("127.0.0.1", 0)
    assert page_address("[::1]:80") == ("::1", 80)
    for wrong in ("", "x", "70000", "host:port", "-1"):
        with pytest.raises(ConfigError):
            page_address(wrong)


@pytest.mark.parametrize("text", [None, "", "import atoll\n"])
def test_a_file_without_events_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    path = tmp_path / "file"
    if text is not None:
        path.write_text(text)
    assert main.main(["replay", str(path)]) == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert "name an events.jsonl of a home" in said
