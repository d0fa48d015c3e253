"""Keep the daemon's event log: printed, published, kept for `atoll status`.

Most lines are of interest for minutes. That the run went on without a quorum, met another history,
or went back behind what it had committed, is of interest for as long as anybody uses what came of
it, and the flags of a view fade with the next one. So those few are kept apart, until the daemon
ends; the log on the disk, where there is one, is for what came before.

Each round that is committed here has a line (:class:`RoundLines`): they are printed and published,
and not kept, or nothing else would be left.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from atoll.collectives.units import listed, size
from atoll.peer.daemon.ports import RoundLinesPort
from atoll.peer.membership.messages import Begin
from atoll.peer.membership.view import View, plain, short
from atoll.peer.rounds.entries import INIT
from atoll.peer.telemetry.rows import RoundTimes, is_figure

ROUND = "round"  # the kind of the lines about committed rounds
SUMMED_UP_S = 1.0  # collectives of so long a time have one line: there may be hundreds a second
NAMES_MAX = 8  # peers that such a line names
SPENT_MIN_S = 0.05  # what is less would be shown as nothing

SAVED = "saved"  # the kind of the events about checkpoints in the home: one after every few rounds
QUIET_KINDS = frozenset({SAVED})  # for those who look back: recorded, and neither printed nor kept

# What each kind of event is about: so people choose (`atoll events --kind`), and so it is drawn.
# tests/unit/peer/daemon/test_event_types.py finds every kind in the source.
EVENT_TYPES: dict[str, str] = {
    # a round of the run, and what keeps it from its end
    "agreed": "round",
    "give-up": "round",
    "held": "round",
    "hold": "round",
    "loading": "round",
    "lost-calls": "round",
    "miss": "round",
    "no-quorum": "round",
    "retry": "round",
    "round": "round",
    "spoils": "round",
    "stragglers": "round",
    # who is in the run, and who leads it
    "admitted": "view",
    "amnesia": "view",
    "coordinator-lost": "view",
    "dead": "view",
    "excluded": "view",
    "genesis": "view",
    "hand-over": "view",
    "join": "view",
    "leave": "view",
    "restarted": "view",
    "resume": "view",
    "view": "view",
    "waiting": "view",
    # connections, and what they carry
    "caps": "link",
    "link": "link",
    "links": "link",
    "network": "link",
    "reach": "link",
    "relay": "link",
    # the state of one peer, taken from others or from the disk
    "recovered": "sync",
    "transfer": "sync",
    "unsynced": "sync",
    # what was chosen, and by which means it is done
    "codecs": "plan",
    "limits": "plan",
    "plan": "plan",
    "checkpoint": "checkpoint",
    "saved": "checkpoint",
    # more than one history of a run
    "base-lost": "fork",
    "diverged": "fork",
    "doubt": "fork",
    "fork": "fork",
    "rollback": "fork",
    "yield": "fork",
    # who has broken the rules, or is out
    "audit": "ban",
    "ban": "ban",
    "banned": "ban",
    "equivocation": "ban",
    "forged": "ban",
    "revoked": "ban",
    "unproven": "ban",
    # what somebody should look at
    "conflict": "error",
    "disk": "error",
    "late": "error",
    "load-failed": "error",
    "mismatch": "error",
    "protocol": "error",
    "refused": "error",
    "rejected": "error",
    "trainer": "trainer",
}

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


class EventLog:
    """Keep, print and publish the daemon's events.

    ``publish`` takes every event once trainers and commands are listened to, ``record`` once there
    is a file of them.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.publish: Callable[[dict[str, Any]], None] | None = None
        self.record: Callable[[dict[str, Any]], None] | None = None  # to the file of events
        self.last_error, self.last_error_unix_s = "", 0.0
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)
        self._history: dict[str, deque[dict[str, Any]]] = {
            kind: deque(maxlen=HISTORY_KEPT) for kind in HISTORY_KINDS
        }
        self._view = ""
        self.counts: dict[str, int] = {}  # events so far, by kind

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return the last EVENTS_SHOWN events, the oldest first."""
        return list(self._events)[-EVENTS_SHOWN:]

    @property
    def history(self) -> list[dict[str, Any]]:
        """Return what view flags said and what became of other histories; the oldest first."""
        return sorted((e for kept in self._history.values() for e in kept), key=_when)

    def note(self, kind: str, text: str, **fields: object) -> None:
        """Write one line of the log, with ``fields`` for those who read it by program."""
        text = plain(text)  # some of it may be another's words
        about = EVENT_TYPES.get(kind, "error")
        self.counts[kind] = self.counts.get(kind, 0) + 1
        event = {"unix_s": time.time(), "kind": kind, "type": about, "text": text, **fields}
        if kind != ROUND and kind not in QUIET_KINDS:
            self._events.append(event)
        if kind in ERROR_KINDS:
            self.failed(text)
        if kind == "fork":  # of this peer's own lineage, or that there is another one
            self._remember("fork" if self._view and text.endswith(self._view) else "met", text)
        elif kind in self._history:
            self._remember(kind, text)
        if kind not in QUIET_KINDS:
            self._say(f"{time.strftime('%H:%M:%S')} {kind:<10} {text.removeprefix(f'{kind} ')}")
        if self.record is not None:
            self.record(event)
        if self.publish is not None:
            self.publish(event)

    def failed(self, text: str) -> None:
        """Set what `atoll status` shows as the last error."""
        self.last_error, self.last_error_unix_s = text, time.time()

    def installed(self, view: View) -> None:
        """Remember the flags of a view in force: a joiner hears of them in no other way."""
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


class RoundLines:
    """Write a line for each round that was committed here.

    It says who was in it, how long it took since the one before and what for, what this daemon has
    sent for rounds meanwhile, and the loss that its trainer has reported. Rounds that are
    collectives of the trainers' own are summed up, a second of them in one line.
    """

    def __init__(self, daemon: RoundLinesPort) -> None:
        self._daemon = daemon
        self._ended_s: float | None = None  # when the last round that has a line was over
        self._said_bytes = 0
        self._calls: list[Begin] = []  # collectives without a line: the first and the last
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    def committed(self, begin: Begin, times: RoundTimes, *, takes_part: bool) -> None:
        """Write the line of a round that is over, or count a collective for the next summary.

        ``times``: how it was spent; ``takes_part``: whether this peer does.
        """
        if begin.operation is None:
            self.sum_up()
            what = f"round {begin.round}" + ("  first parameters" if begin.kind == INIT else "")
            tail = f" ({spent(times)})" if takes_part else ""
            with_loss = takes_part and begin.kind != INIT
            self._say(what, begin, times.exchange_s, tail, with_loss=with_loss)
            return
        self._calls = [self._calls[0] if self._calls else begin, begin]
        self._count += 1
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(SUMMED_UP_S, self.sum_up)

    def sum_up(self) -> None:
        """Say what collectives there were since the last line."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if not self._calls:
            return
        (first, last), count = self._calls, self._count
        self._calls, self._count = [], 0
        what = f"round {last.round}  collective"
        if count > 1:
            what = f"rounds {first.round} to {last.round}  {count} collectives"
        self._say(what, last, 0.0, "", with_loss=True)

    def _say(
        self, what: str, begin: Begin, exchange_s: float, tail: str, *, with_loss: bool
    ) -> None:
        now_s, sent_bytes = time.monotonic(), self._daemon.sent_for_rounds_bytes()
        took_s = now_s - self._ended_s if self._ended_s is not None else exchange_s
        sent, self._said_bytes, self._ended_s = sent_bytes - self._said_bytes, sent_bytes, now_s
        peers = begin.counted if begin.kind == INIT else begin.participants
        names = [short(peer) for peer in peers]
        fields: dict[str, object] = {"round": begin.round, "peers": names, "took_s": took_s}
        more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
        who = f"{len(names)} peer{'s' if len(names) > 1 else ''}"
        text = f"{what}  {who} ({', '.join(names[:NAMES_MAX])}{more})  {took_s:.1f} s{tail}"
        text += f"  {size(sent)} sent"
        loss = self._daemon.new_loss() if with_loss else None
        if loss is not None:
            text += f"  loss {loss:.4g}"
            fields |= {"loss": loss} if is_figure(loss) else {}
        self._daemon.note(ROUND, text, **fields, sent_bytes=sent)


def spent(times: RoundTimes) -> str:
    """Say how the time of a round was spent, in seconds."""
    parts = [f"compute {times.compute_s:.1f}"] if times.compute_s >= SPENT_MIN_S else []
    parts.append(f"exchange {times.exchange_s:.1f}")
    if times.wait_s >= SPENT_MIN_S:
        late = f" for {listed([short(peer) for peer in times.waited_for])}"
        parts.append(f"wait {times.wait_s:.1f}{late if times.waited_for else ''}")
    return ", ".join(parts)


def _when(event: dict[str, Any]) -> float:
    moment = event["unix_s"]
    assert isinstance(moment, float)
    return moment
