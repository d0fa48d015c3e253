"""Show a run live on a terminal: ask the daemon each second, draw, listen for keys."""

from __future__ import annotations

import contextlib
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from atoll.collectives.errors import AtollError
from atoll.peer.client.ipc_client import ask
from atoll.peer.telemetry.overview import ROWS_ASKED, Overview, RunGoal, overview
from atoll.peer.telemetry.top_screen import plain_screen, screen

LOOK_S = 1.0
PLAIN_SIZE = (80, 24)  # where there is no terminal
QUIT_KEYS = ("q", "Q", "\x03", "\x04")


def print_once(home: str | None, goal: RunGoal) -> int:
    """Print one screen as plain text, in whatever encoding the output has."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # the table's line is in few of them
    print(plain_screen(_look(home, goal), shutil.get_terminal_size(PLAIN_SIZE).columns))
    return 0


def show_live(home: str | None, goal: RunGoal) -> int:
    """Draw the run each second until a key ends it."""
    shown = _look(home, goal)  # who calls this without a daemon is told so, by itself
    console = Console(highlight=False)
    with _keys_at_once(), Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(screen(shown, keys=True), refresh=True)
        while _key(LOOK_S) not in QUIT_KEYS:
            live.update(_drawn(home, goal), refresh=True)
    return 0


def _drawn(home: str | None, goal: RunGoal) -> RenderableType:
    """Return what is shown at this look: the run, or why it cannot be seen now.

    A daemon that has gone may be started again, and an answer that is too large may get smaller.
    """
    try:
        return screen(_look(home, goal), keys=True)
    except AtollError as error:
        return Text(f"{error}\nq: quit")


def _look(home: str | None, goal: RunGoal) -> Overview:
    status, rows = ask(home, "status"), ask(home, "rows", last=ROWS_ASKED)
    return overview(status, rows, time.time(), goal)


@contextlib.contextmanager
def _keys_at_once() -> Iterator[None]:
    """Let keys be read one by one, and not be shown."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _key(wait_s: float) -> str:
    """Return a key that is pressed within this time; "" if there is none."""
    ready, _, _ = select.select([sys.stdin], [], [], wait_s)
    return sys.stdin.read(1) if ready else ""
