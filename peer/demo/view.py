"""Show `atoll demo`: a live page on a terminal, or plain lines anywhere else."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from itertools import pairwise
from typing import Protocol

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atoll.collectives.units import size
from atoll.peer.demo.figures import DemoFigures, PeerFigures
from atoll.peer.demo.summary import DemoCheck

WIDTH_MAX = 100  # a page wider than this is harder to read, not easier
IDENTITY_WIDTH = 92  # a narrower page leaves the identities out
CHART_ROWS = 7
LABEL_WIDTH = 19  # of the summary
FIXED_ROWS = CHART_ROWS + 11  # everything but the table's rows and the log
LOG_ROWS = (3, 12)  # at least, at most
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille cell, by row

STATE_STYLES = {
    "coordinator": "bold cyan",
    "member": "green",
    "killed": "bold red",
    "left": "dim",
}
ACTIVITY_STYLES = {"training": "green", "waiting": "yellow"}
KIND_STYLES = {
    "kill": "bold red",
    "dead": "red",
    "error": "bold red",
    "join": "bold green",
    "good": "green",
    "view": "cyan",
}


class DemoDisplay(Protocol):
    """Describe what the script needs of a view."""

    def show(self, figures: DemoFigures, elapsed_s: float) -> None: ...

    def finish(self, lines: list[tuple[str, str]], verdict: list[DemoCheck]) -> None: ...

    def close(self) -> None: ...


def make_view(*, plain: bool) -> DemoDisplay:
    """Return the live view where the terminal can show it, else the plain one."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a name in another encoding must not end us
    console = Console(highlight=False)
    capable = console.is_terminal and not console.is_dumb_terminal and console.encoding == "utf-8"
    return PlainView() if plain or not capable else LiveView(console)


# ---------------------------------------------------------------- plain


class PlainView:
    """Print one line for each round and each happening."""

    def __init__(self) -> None:
        self._happenings = 0
        self._rounds = 0

    def show(self, figures: DemoFigures, elapsed_s: float) -> None:
        for happening in figures.happenings[self._happenings :]:
            print(f"{happening.at_s:6.1f} s  {figures.with_names(happening.text)}", flush=True)
        self._happenings = len(figures.happenings)
        for number in sorted(figures.losses):
            if number > self._rounds:
                self._rounds = number
                print(_round_line(figures, number, elapsed_s), flush=True)

    def finish(self, lines: list[tuple[str, str]], verdict: list[DemoCheck]) -> None:
        print()
        for label, text in lines:
            print(f"{label:<{LABEL_WIDTH}}  {text}")
        for check in verdict:
            print(f"{check.name:<{LABEL_WIDTH}}  {'ok' if check.ok else 'FAILED: ' + check.why}")
        print(flush=True)

    def close(self) -> None:
        """Do nothing: lines need no farewell."""


def _round_line(figures: DemoFigures, number: int, elapsed_s: float) -> str:
    sent = size(sum(peer.sent_bytes for peer in figures.peers))
    training = sum(peer.activity in ("training", "waiting") for peer in figures.living)
    what = "untrained" if number == 1 else f"held-out loss {figures.losses[number]:.3f}"
    if number == 1:
        return f"{elapsed_s:6.1f} s  round 1: initial parameters, loss {figures.losses[1]:.3f}"
    return f"{elapsed_s:6.1f} s  round {number}: {what}, {training} training, {sent} sent by all"


# ---------------------------------------------------------------- live


class LiveView:
    """Draw the page: peers, loss curve, progress, log. It is redrawn when the script says so."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def show(self, figures: DemoFigures, elapsed_s: float) -> None:
        width = min(WIDTH_MAX, self._console.width)
        room = self._console.height - FIXED_ROWS - len(figures.peers)
        rows = min(max(room, LOG_ROWS[0]), LOG_ROWS[1])
        self._live.update(page(figures, elapsed_s, width, rows), refresh=True)

    def finish(self, lines: list[tuple[str, str]], verdict: list[DemoCheck]) -> None:
        self._live.stop()
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", width=LABEL_WIDTH, justify="right")
        table.add_column()
        for label, text in lines:
            table.add_row(label, text)
        marks = Text()
        apart = "   " if all(check.ok for check in verdict) else "\n"
        for check in verdict:
            mark, style = ("✓", "bold green") if check.ok else ("✗", "bold red")
            marks.append(f"{mark} ", style)
            marks.append((check.name if check.ok else f"{check.name}: {check.why}") + apart)
        self._console.print(Text(), table, Text(), marks, Text(), sep="\n")

    def close(self) -> None:
        self._live.stop()


def page(figures: DemoFigures, elapsed_s: float, width: int, log_rows: int) -> Group:
    """Return everything that the live view shows, ``width`` columns wide."""
    return Group(
        _title(figures, elapsed_s, width),
        _peers(figures, width),
        _curve(figures, width),
        _progress(figures, width),
        Text(),
        *_log(figures, width, log_rows),
    )


def _title(figures: DemoFigures, elapsed_s: float, width: int) -> Table:
    left = Text.assemble((" atoll demo ", "bold reverse cyan"), "  ")
    if figures.parameters:
        left.append(f"{figures.parameters / 1e6:.2f} M parameters, ")
        left.append(f"{figures.sync_every} steps a round, {figures.codec} on the wire", "")
    else:
        left.append("DiLoCo between peers on this machine")
    minutes, seconds = divmod(int(elapsed_s), 60)
    grid = Table.grid(expand=False)
    grid.add_column(width=width - 6, no_wrap=True)
    grid.add_column(width=6, justify="right", style="dim")
    grid.add_row(left, f"{minutes}:{seconds:02d}")
    return grid


def _peers(figures: DemoFigures, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, width=width, header_style="dim", padding=(0, 1, 0, 0))
    table.add_column("peer", no_wrap=True, min_width=7)
    if width >= IDENTITY_WIDTH:
        table.add_column("identity", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=11)
    table.add_column("trainer", no_wrap=True, min_width=8)
    for name in ("round", "took part", "steps", "sent", "received"):
        table.add_column(name, justify="right", no_wrap=True)
    for peer in figures.peers:
        row = _peer_row(peer)
        if width < IDENTITY_WIDTH:
            del row[1]
        table.add_row(*row, style="dim" if peer.killed else "")
    return table


def _peer_row(peer: PeerFigures) -> list[str | Text]:
    return [
        peer.name,
        peer.ident,
        Text(peer.state, STATE_STYLES.get(peer.state, "yellow")),
        Text(peer.activity, ACTIVITY_STYLES.get(peer.activity, "dim")),
        str(peer.round or ""),
        str(peer.contributed or ""),
        str(peer.steps or ""),
        size(peer.sent_bytes),
        size(peer.received_bytes),
    ]


def _curve(figures: DemoFigures, width: int) -> Text:
    text = Text(" held-out loss", "dim")
    if figures.last_loss is not None and 1 in figures.losses:
        text.append(f"  {figures.losses[1]:.3f}", "default")
        text.append(" → ", "dim")
        text.append(f"{figures.last_loss:.3f}", "bold")
        text.append(" nats per byte", "dim")
    marks = {figures.killed_round: "kill", figures.joined_round: "join"}
    for number, kind, what in (
        (figures.killed_round, "kill", "killed"),
        (figures.joined_round, "join", "newcomer"),
    ):
        if number:
            text.append("   ┊", KIND_STYLES[kind])
            text.append(f" {what}", "dim")
    text.append("\n")
    low, high = _range(figures.losses)
    rows = loss_chart(
        figures.losses, max(figures.rounds, figures.round), width - 8, CHART_ROWS, marks
    )
    for number, row in enumerate(rows):
        label = {0: f"{high:.2f}", len(rows) - 1: f"{low:.2f}"}.get(number, "") if high else ""
        text.append(f" {label:>5} ", "dim")
        for character, kind in row:
            text.append(character, KIND_STYLES.get(kind, kind))
        text.append("\n")
    return text


def _range(losses: Mapping[int, float]) -> tuple[float, float]:
    return (min(losses.values()), max(losses.values())) if losses else (0.0, 0.0)


def loss_chart(
    losses: Mapping[int, float], rounds: int, width: int, height: int, marks: Mapping[int, str]
) -> list[list[tuple[str, str]]]:
    """Draw a curve of braille dots: ``height`` rows of ``width`` (character, kind) pairs.

    ``marks`` puts a vertical line at a round; its kind is the mark's, that of the curve "cyan".
    """
    cells = [[0] * width for _ in range(height)]
    low, high = _range(losses)
    across, down = 2 * width - 1, 4 * height - 1

    def column(number: float) -> float:
        return across * (number - 1) / max(1, rounds - 1)

    known = sorted(losses.items())
    for (round_a, loss_a), (round_b, loss_b) in pairwise(known):
        x_a, x_b = column(round_a), column(round_b)
        y_a, y_b = (down * (high - loss) / ((high - low) or 1.0) for loss in (loss_a, loss_b))
        steps = max(1, math.ceil(max(abs(x_b - x_a), abs(y_b - y_a))))
        for step in range(steps + 1):
            x = round(x_a + (x_b - x_a) * step / steps)
            y = round(y_a + (y_b - y_a) * step / steps)
            cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
    lines = {round(column(r)) // 2: kind for r, kind in marks.items() if 0 < r <= rounds}
    return [
        [
            (chr(0x2800 + cell), "cyan") if cell else ("┊", lines[x]) if x in lines else (" ", "")
            for x, cell in enumerate(row)
        ]
        for row in cells
    ]


def _progress(figures: DemoFigures, width: int) -> Table:
    rounds = max(figures.rounds, figures.round)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=0)
    grid.add_column(width=30)
    grid.add_column(width=width - 33, no_wrap=True, overflow="ellipsis")
    bar = ProgressBar(rounds, figures.round, complete_style="cyan", finished_style="green")
    text = Text.assemble((f"round {figures.round} of {rounds}", "bold"), "   ")
    text.append(f"waits for {figures.doing}" if figures.doing != "done" else "done", "dim")
    grid.add_row("", bar, text)
    return grid


def _log(figures: DemoFigures, width: int, rows: int) -> list[Text]:
    lines = []
    for happening in figures.happenings[-rows:]:
        line = Text(f" {happening.at_s:5.1f} s  ", "dim", no_wrap=True, overflow="ellipsis")
        line.append(figures.with_names(happening.text), KIND_STYLES.get(happening.kind, "default"))
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return lines + [Text()] * (rows - len(lines))  # the page keeps its height
