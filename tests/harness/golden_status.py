"""Make the lines of `tests/golden/status.txt`: what `atoll status --json` has.

A line is a path, the types that were found there, and the value where the same fleet always gives
the same one, and it is no sentence. Items of a list are ``[]``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from harness.processes import Fleet, fleet, until

__all__ = ["SOMETIMES", "STATUS_HEAD", "lines_of", "status_lines", "statuses"]

STATUS_HEAD = (
    "Keys, types and steady values of `atoll status --json`: of a coordinator that trains, of a",
    "witness, and of an archive. make golden-rewrite writes it anew.",
)
# Known only once something was measured.
SOMETIMES = ("in_bytes_per_s", "out_bytes_per_s", "loss", "local")
# What is inside depends on what has happened so far; lines of the log have these keys at least.
OPEN = (
    "digests",
    "streams",
    "congestion",
    "history",
    "event_counts",
    "trainer.metrics",
    "members[].arrived",
)
EVENT_KEYS = ("kind", "text", "type", "unix_s")
# What the same fleet does not always say: where, when, how much, who.
VARIES = frozenset((
    "address", "arrived", "attached", "attempt", "bytes", "chain", "checkpoint", "congestion",
    "coordinator", "digest", "digests", "event_counts", "events", "history", "id", "incarnation",
    "last_commit_unix_s", "last_error", "last_error_unix_s", "last_round_s", "layout",
    "lineage", "metrics", "own_links", "peer", "pid", "received", "round", "rounds_spent",
    "rtt_ms", "sent", "sent_again", "state", "streams", "synced", "uptime_s", "view",
    "waiting", "you",
))  # fmt: skip


def statuses(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what three peers of one run say as soon as each of them has all that it will have."""
    with fleet(folder) as run:
        run.up("coordinator")
        run.train("coordinator", elements=5000, inner_s=0.2)
        run.start("witness", "join", run.invite, "--witness")
        run.start("archive", "follow", run.invite)
        return {name: _settled(run, name) for name in ("coordinator", "witness", "archive")}


def _settled(run: Fleet, name: str) -> dict[str, Any]:
    peer = run.peers[name]

    def there() -> dict[str, Any] | None:
        status = peer.try_status()
        known = len(status.get("members", ())) == 2 and status["round"] >= 3
        if name == "coordinator":
            known = known and bool(status["learners"]) and bool(status["trainer"])
            known = known and all("round" in member for member in status["members"])
        return _asked(peer.home) if known else None

    return until(there, f"{name} has all that it says", *run.peers.values())


def _asked(home: Path) -> dict[str, Any]:
    """Return what the command prints, as a script reads it."""
    command = [sys.executable, "-m", "atoll.peer.cli", "status", "--json", "--home", str(home)]
    asked = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(asked.stdout)
    assert isinstance(found, dict)
    return found


def status_lines(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, status in found.items():
        yield from (f"{name} {line}" for line in lines_of(status))


def lines_of(status: dict[str, Any]) -> list[str]:
    """Return path, types and steady value of all that is in a status, in order of path."""
    types: dict[str, set[str]] = {}
    values: dict[str, set[str]] = {}
    for path, value in _walk("", status):
        types.setdefault(path, set()).add(_kind(value))
        if not isinstance(value, dict | list):
            values.setdefault(path, set()).add(json.dumps(value))
    lines = []
    for path in sorted(types):
        value = values.get(path, set())
        steady = len(value) == 1 and " " not in "".join(value) and not VARIES & {*_keys(path)}
        shown = f" {value.pop()}" if steady else ""
        lines.append(f"{path} {'|'.join(sorted(types[path]))}{shown}")
    return lines


def _walk(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    if path:
        yield path, value
    if path in OPEN:
        return
    if isinstance(value, dict):
        for key, below in value.items():
            if key not in SOMETIMES and (path != "events[]" or key in EVENT_KEYS):
                yield from _walk(f"{path}.{key}".lstrip("."), below)
    elif isinstance(value, list):
        for below in value:
            yield from _walk(f"{path}[]", below)


def _keys(path: str) -> list[str]:
    return path.replace("[]", "").split(".")


def _kind(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "bool", type(None): "null"}
    return names.get(type(value), "number")
