"""The daemon's event log: printed, published, kept for `atoll status`.

Most lines are of interest for minutes. That the run went on without a quorum, met another history,
or went back behind what it had committed, is of interest for as long as anybody uses what came of
it, and the flags of a view fade with the next one. So those few are kept apart, until the daemon
ends; the log on the disk, where there is one, is for what came before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from atoll.peer.group.views import View, plain

__all__ = ["ERROR_KINDS", "HISTORY_KEPT", "HISTORY_KINDS", "Journal"]

EVENTS_KEPT = 200  # for `atoll status`; the whole log is what the daemon prints
EVENTS_SHOWN = 20
# Kept apart: of each kind the last few. Members can cause any number of meetings (kind "met"), so
# no kind takes the places of another, nor a long list of members those of the status.
HISTORY_KINDS = ("fork", "met", "rollback", "yield")
HISTORY_KEPT = 8
HISTORY_CHARACTERS_MAX = 400
ERROR_KINDS = frozenset(
    {
        "base-lost",
        "disk",
        "diverged",
        "equivocation",
        "forged",
        "load-failed",
        "miss",
        "no-quorum",
        "refused",
        "rejected",
        "rollback",
    }
)


class Journal:
    """``publish`` takes every event once trainers and commands are listened to."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.publish: Callable[[dict[str, Any]], None] | None = None
        self.last_error, self.last_error_unix_s = "", 0.0
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)
        self._history: dict[str, deque[dict[str, Any]]] = {
            kind: deque(maxlen=HISTORY_KEPT) for kind in HISTORY_KINDS
        }
        self._view = ""

    @property
    def events(self) -> list[dict[str, Any]]:
        """The last ones."""
        return list(self._events)[-EVENTS_SHOWN:]

    @property
    def history(self) -> list[dict[str, Any]]:
        """What the flags of views said, and what became of other histories; the oldest first."""
        return sorted((e for kept in self._history.values() for e in kept), key=_when)

    def note(self, kind: str, text: str, **fields: object) -> None:
        """One line of the log, with ``fields`` for those who read it by program."""
        text = plain(text)  # some of it may be another's words
        event = {"unix_s": time.time(), "kind": kind, "text": text, **fields}
        self._events.append(event)
        if kind in ERROR_KINDS:
            self.failed(text)
        if kind == "fork":  # of this peer's own lineage, or that there is another one
            self._remember("fork" if self._view and text.endswith(self._view) else "met", text)
        elif kind in self._history:
            self._remember(kind, text)
        self._say(f"{time.strftime('%H:%M:%S')} {kind:<10} {text.removeprefix(f'{kind} ')}")
        if self.publish is not None:
            self.publish(event)

    def failed(self, text: str) -> None:
        """What `atoll status` shows as the last error."""
        self.last_error, self.last_error_unix_s = text, time.time()

    def installed(self, view: View) -> None:
        """A view is in force. A joiner hears of its flags in no other way."""
        self._view = view.describe()
        if view.rollback:
            self._remember("rollback", f"rounds after {view.base_round} are lost")
        if view.fork:
            self._remember("fork", self._view)

    def _remember(self, kind: str, text: str) -> None:
        kept = self._history[kind]
        if kept and kept[-1]["text"] in text:
            kept.pop()  # the same, told in full now
        kept.append({"unix_s": time.time(), "kind": kind, "text": text[:HISTORY_CHARACTERS_MAX]})


def _when(event: dict[str, Any]) -> float:
    moment = event["unix_s"]
    assert isinstance(moment, float)
    return moment
