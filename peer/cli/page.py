"""Carry out ``atoll replay``: the status page of a run that was recorded, without a daemon."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from typing import Any

from atoll.collectives.errors import ConfigError
from atoll.peer.net.invite import parse_address

THIS_MACHINE = "127.0.0.1"
PAGE_HELP = "serve the status page here; a port alone is on 127.0.0.1, anything else needs a token"


def add_page_option(verb: argparse.ArgumentParser) -> None:
    """Add ``--page`` to a command that starts a daemon."""
    verb.add_argument("--page", metavar="HOST:PORT", help=PAGE_HELP)


def page_option(text: str | None) -> tuple[str, int] | None:
    """Return where the page is to be served, if anywhere; raise ConfigError for what is nowhere."""
    return page_address(text) if text is not None else None


def page_address(text: str) -> tuple[str, int]:
    """Return host and port of ``--page``: "8080" alone is on loopback.

    Raises ConfigError for what is neither a port nor HOST:PORT.
    """
    if text.isascii() and text.isdigit():
        text = f"{THIS_MACHINE}:{text}"
    return parse_address(text, port_min=0)


def add_replay_verb(verbs: Any) -> None:
    """Add ``replay`` to the sub-commands of ``atoll``."""
    replay = verbs.add_parser("replay", help="show the status page of a recorded events.jsonl")
    replay.add_argument("file", metavar="FILE", help="an events.jsonl, or the folder it is in")
    replay.add_argument(
        "--page", metavar="HOST:PORT", default="0", help="default: any free port on 127.0.0.1"
    )
    replay.set_defaults(command=_replay)


def _replay(parsed: argparse.Namespace) -> int:
    """Serve until Ctrl+C. Raises ConfigError where there is nothing to show."""
    from atoll.peer.telemetry.event_file import files_of, read
    from atoll.peer.telemetry.page.history import History
    from atoll.peer.telemetry.page.server import PageServer

    path = Path(parsed.file)
    fix = "name an events.jsonl of a home, or the home"
    if not files_of(path):
        raise ConfigError(f"there are no events at {path}", fix=fix)
    if next(read(path), None) is None:
        raise ConfigError(f"{path} is no file of events", fix=fix)
    server = PageServer(*page_address(parsed.page), History(path), home=None)
    server.start(lambda: None)
    print(f"{server.url('')} shows {path}; Ctrl+C ends it", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        return 0
    finally:
        server.close()
    return 0
