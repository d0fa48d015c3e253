"""Draw an overview of a run for a terminal: sentences, and a table of peers below them."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from atoll.peer.telemetry.overview import Overview, PeerLine

ERRORS_SHOWN = 4
MBIT = 8e-6  # of a byte
LABEL_CHARACTERS = 10
COLUMNS = (  # at most 80 characters together
    "peer",
    "role",
    "reach",
    "round",
    "steps\n/s",
    "train exch\nwait %",
    "up\nMbit/s",
    "down\nMbit/s",
    "loss",
)
LEFT = ("peer", "role", "reach")
UNKNOWN = "-"


def screen(shown: Overview, *, keys: bool = False) -> RenderableType:
    """Return the page; ``keys``: with what can be pressed."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True)
    for line in shown.peers:
        style = "red" if line.reach in ("gone", "no link") else ""
        table.add_row(*_cells(line), style=style)
    lines: list[RenderableType] = [Text(shown.title, style="bold")]
    lines.append(_labelled("slow", shown.slow))
    lines.append(_labelled("now", shown.now))
    for label, text in (
        ("exchange", shown.predicted),
        ("plan", shown.plan),
        ("done", shown.eta),
    ):
        if text:
            lines.append(_labelled(label, text))
    lines += [_labelled("error", text, "red") for text in shown.errors[:ERRORS_SHOWN]]
    if len(shown.errors) > ERRORS_SHOWN:
        lines.append(_labelled("error", f"and of {len(shown.errors) - ERRORS_SHOWN} more peers"))
    lines += [Text("q: quit", style="dim")] if keys else []
    return Group(*lines, Text(""), table)  # the table last: a low terminal cuts off the end


def plain_screen(shown: Overview, width: int) -> str:
    """Return the page as plain text, for scripts."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    console.print(screen(shown))
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _labelled(label: str, text: str, style: str = "") -> Table:
    """Return a label and a text that stays in its own column where it takes more lines."""
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_column(width=LABEL_CHARACTERS, no_wrap=True)
    row.add_column(overflow="fold")
    row.add_row(Text(label, style="dim"), Text(text, style=style))
    return row


def _cells(line: PeerLine) -> tuple[str, ...]:
    shares = (line.compute, line.exchange, line.wait)
    split = UNKNOWN
    if all(share is not None for share in shares):
        split = " ".join(f"{100 * (share or 0.0):3.0f}" for share in shares)
    return (
        line.peer,
        line.role,
        line.reach,
        UNKNOWN if line.round is None else str(line.round),
        UNKNOWN if line.steps_per_s is None else _number(line.steps_per_s),
        split,
        _against(line.up, line.up_max),
        _against(line.down, line.down_max),
        UNKNOWN if line.loss is None else f"{line.loss:.4g}",
    )


def _against(now: float | None, most: float | None) -> str:
    """Return a rate, and the most that the links have carried."""
    if now is None:
        return UNKNOWN
    return f"{_number(MBIT * now)}/{_number(MBIT * most) if most else UNKNOWN}"


def _number(value: float) -> str:
    """Return a number in at most four characters, while it is below a million."""
    if value >= 1e4:
        return f"{value / 1e3:.0f}k"
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"
