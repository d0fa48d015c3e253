"""A headless Chromium for tests of the status page; they are skipped where there is none."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from atoll.peer.client.ipc_client import ask
from atoll.peer.telemetry.page.history import History
from atoll.peer.telemetry.page.server import PageServer
from harness.processes import Peer

LOOK_MS = 100
WAIT_MS = 120_000  # these machines are shared: a limit that only a hang exceeds
# As root it has no sandbox; and it is to ask nobody but the page for anything.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WCAG_AA = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


class Tab:
    """Hold a page in a browser, with what went wrong on it and what it asked for."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.asked: set[str] = set()
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda said: self._on_said(said.type, said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(f"a dialog: {dialog.message}"))
        page.on("request", lambda request: self.asked.add(request.url))

    def _on_said(self, kind: str, text: str) -> None:
        if kind == "error" and "ERR_CONNECTION_REFUSED" not in text:  # of a daemon that restarts
            self.complaints.append(text)

    def open(self, url: str) -> None:
        """Go there, and wait until everything has been asked for once."""
        self.page.goto(url)
        self.page.wait_for_selector("main[data-ready=yes]")

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def shows(self, selector: str, *words: str) -> str:
        """Return the text there, once it has all of these words."""
        deadline_s = time.monotonic() + WAIT_MS / 1e3
        while not all(word in self.text(selector) for word in words):
            assert time.monotonic() < deadline_s, f"{selector} has not {words}: {self.text('body')}"
            self.page.wait_for_timeout(LOOK_MS)
        return self.text(selector)

    def violations(self) -> list[str]:
        """Return what axe-core finds against WCAG 2.2 AA and its own good practice."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page, options={"runOnly": WCAG_AA})
        return [
            f"{rule['id']}: {rule['help']}: {[node['html'][:200] for node in rule['nodes'][:3]]}"
            for rule in found.response["violations"]
        ]


@contextlib.contextmanager
def tab(width: int = 1280, scheme: str = "light") -> Iterator[Tab]:
    """Yield a tab of a browser that is ended on the way out."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            size = {"width": width, "height": 900}
            yield Tab(browser.new_page(viewport=size, color_scheme=scheme))
        finally:
            browser.close()


@contextlib.contextmanager
def page_of(peer: Peer) -> Iterator[str]:
    """Yield the URL of the page of a daemon that is in a network of its own.

    No browser of this host reaches that: the page is served here, from the same file and with the
    same answers of the daemon.
    """
    page = PageServer("127.0.0.1", 0, History(peer.home), peer.home)
    page.start(peer.status, lambda: ask(peer.home, "rows", last=1))
    try:
        yield page.url("")
    finally:
        page.close()
