"""Say at a glance how a run goes, from `atoll status` and the rows of all: `atoll top` shows it.

Everything is the mean of each peer's last rows, which are the same at every peer, and so is the
sentence about who is slow. What only this daemon knows (its view, its waiting) comes from its
status. No clock, nothing drawn: top_screen.py does that.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from statistics import mean
from typing import Any

from atoll.collectives.units import duration, listed
from atoll.peer.telemetry.findings import ROUNDS_JUDGED, grown, trains, who_is_slow

ROWS_ASKED = ROUNDS_JUDGED  # of each peer: what is shown is their mean, and they are what is recent

Row = dict[str, Any]
IDLE_ROUNDS, IDLE_MIN_S = 3.0, 10.0  # without a commit: a prediction means little then


@dataclass(frozen=True, slots=True)
class PeerLine:
    """Hold what is shown of one peer; None where it is not known. Rates are bytes per second."""

    peer: str
    role: str
    reach: str
    round: int | None = None
    steps_per_s: float | None = None
    compute: float | None = None  # shares of the time
    exchange: float | None = None
    wait: float | None = None
    up: float | None = None
    up_max: float | None = None  # what its links have carried
    down: float | None = None
    down_max: float | None = None
    loss: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class RunGoal:
    """Say when the run is done, for who asks: at a round, or when so many tokens are seen."""

    rounds: int = 0
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Overview:
    """Hold everything that one screen shows."""

    title: str
    peers: tuple[PeerLine, ...]
    slow: str
    now: str
    predicted: str
    plan: str
    eta: str = ""
    errors: tuple[str, ...] = ()


def overview(
    status: dict[str, Any], rows: Iterable[Row], now_unix_s: float, goal: RunGoal = RunGoal()
) -> Overview:
    """Return what is to be shown of a run now; ``rows``: the last of all peers, in order."""
    of: dict[str, list[Row]] = {}
    for row in rows:
        of.setdefault(str(row["peer"]), []).append(row)
    members = [*status["members"], *status["learners"]]
    steps = int((status["spec"] or {}).get("sync_every", 0))
    lines = tuple(_line(m, of.get(m["peer"], []), status, steps) for m in members)
    present = {member["peer"]: of[member["peer"]] for member in members if member["peer"] in of}
    failing: dict[str, list[str]] = {}  # the same is often seen by all
    for line in lines:
        if line.error:
            failing.setdefault(line.error, []).append(line.peer)
    errors = tuple(f"{listed(names)}: {error}" for error, names in failing.items())
    return Overview(
        title=_title(status, now_unix_s),
        peers=lines,
        slow=who_is_slow(present, {}).text,
        now=status["waiting"],
        predicted=_predicted(present.get(status["coordinator"], [])),
        plan=status["layout"],
        eta=_eta(status, present, now_unix_s, goal),
        errors=errors,
    )


def _title(status: dict[str, Any], now_unix_s: float) -> str:
    size = f", {status['parameters']:,} parameters" if status["parameters"] else ""
    text = f"run {status['run']}, round {status['round']}{size}"
    if status["last_commit_unix_s"]:
        ago_s = max(0.0, now_unix_s - status["last_commit_unix_s"])
        text += f", committed {duration(ago_s)} ago"
    return f"{text}, seen by {status['peer']}"


# How a peer that cannot be dialled is linked, by what its entry says; else it is a relay's name.
_WAYS = {"": "outbound", "punched": "punched"}


def _line(member: dict[str, Any], rows: Sequence[Row], status: dict[str, Any], H: int) -> PeerLine:
    you = member["peer"] == status["peer"]
    role = "coord" if member.get("coordinator") else member["role"]
    reach = "you" if you else member.get("state", "joining")
    reach = {"no connection": "no link", "connected": "linked"}.get(reach, reach)
    if member["outbound"] and reach in ("you", "linked", "joining"):
        reach = _WAYS.get(member.get("via", ""), "relayed")
    role = {"replica": "member"}.get(role, role)
    if not rows:
        number = member.get("round")
        return PeerLine(member["peer"], role, reach, number, error=_own_error(status, you=you))
    last, took_s = rows[-1], sum(_of(row, "took_s") for row in rows)
    took_s = took_s if trains(rows) else 0.0  # it waits for nobody: it has no trainer
    shares = [
        sum(_of(row, f"{what}_s") for row in rows) / took_s if took_s else None
        for what in ("compute", "exchange", "wait")
    ]
    own = _own_error(status, you=you)
    return PeerLine(
        member["peer"],
        role,
        reach,
        max(last["last"], member.get("round", 0)),
        _steps_per_s(rows, H),
        shares[0],
        shares[1],
        shares[2],
        _moved(rows, "sent"),
        last.get("up"),
        _moved(rows, "received"),
        last.get("down"),
        last.get("loss"),
        own if you else last.get("error", ""),
    )


def _own_error(status: dict[str, Any], *, you: bool) -> str:
    return str(status["last_error"]) if you else ""


def _of(row: Row, name: str) -> float:
    return float(row.get(name, 0.0))


def _span_s(rows: Sequence[Row]) -> float:
    return float(rows[-1]["unix_s"] - rows[0]["unix_s"]) if rows else 0.0


def _moved(rows: Sequence[Row], way: str) -> float | None:
    """Return bytes per second; each row has those since the row before."""
    span_s = _span_s(rows)
    return sum(sum(row[way]) for row in rows[1:]) / span_s if span_s > 0 else None


def _steps_per_s(rows: Sequence[Row], per_round: int) -> float | None:
    """Return the local steps per second: as its trainer has reported, or as the run has them."""
    span_s = _span_s(rows)
    if span_s <= 0:
        return None
    if steps_per_s := _per_s(_since_told(rows, "steps"), "steps"):
        return steps_per_s
    counted = sum(row["last"] - row["first"] + 1 for row in rows[1:] if row.get("counted"))
    return counted * per_round / span_s if per_round else None


# ---------------------------------------------------------------- what was promised, and the end


def _predicted(rows: Sequence[Row]) -> str:
    """Say what the plan has promised for the exchange, and what it took; as coordinator's rows."""
    promised = [row["predicted_s"] for row in rows if row.get("predicted_s")]
    took = [_of(r, "exchange_s") / (r["last"] - r["first"] + 1) for r in rows if r.get("counted")]
    if not promised or not took:
        return ""
    measured_s = mean(took)
    return f"{duration(promised[-1])} predicted, {duration(measured_s)} measured"


def _eta(
    status: dict[str, Any], rows: dict[str, list[Row]], now_unix_s: float, goal: RunGoal
) -> str:
    """Say when the goal is reached, if it goes on as in the last rows."""
    found = []
    if goal.rounds:
        each = max(rows.values(), key=len, default=[])
        span_s = _span_s(each)
        speed = (each[-1]["last"] - each[0]["last"]) / span_s if span_s > 0 else 0.0
        name = f"round {goal.rounds}"
        found.append(_until(name, goal.rounds, status["round"], speed, now_unix_s))
    if goal.tokens:
        found.append(_tokens_until(goal.tokens, rows, now_unix_s))
    each_s = max(map(_took_s, rows.values()), default=0.0)
    since_s = now_unix_s - (status["last_commit_unix_s"] or now_unix_s)
    if found and since_s > max(IDLE_MIN_S, IDLE_ROUNDS * each_s):
        found.append(f"but no round has come for {duration(since_s)}")
    return "; ".join(found)


def _took_s(rows: Sequence[Row]) -> float:
    """Return the usual time of a round, pauses included."""
    return _span_s(rows) / max(1.0, _of(rows[-1], "last") - _of(rows[0], "last"))


def _tokens_until(goal: float, rows: dict[str, list[Row]], now_unix_s: float) -> str:
    name = f"{goal:,.0f} tokens"
    told = [found for each in rows.values() if (found := _since_told(each, "tokens"))]
    if not told:
        return f"{name}: no trainer tells its tokens; call outer.count(tokens) before each step"
    seen = sum(each[0]["tokens"] + grown(each, "tokens") for each in told)
    per_s = sum(_per_s(each, "tokens") for each in told)
    return _until(name, goal, seen, per_s, now_unix_s)


def _since_told(rows: Sequence[Row], name: str) -> Sequence[Row]:
    """Return the rows from the first one on that tells a total of the trainer."""
    return list(dropwhile(lambda row: name not in row, rows))


def _per_s(rows: Sequence[Row], name: str) -> float:
    span_s = _span_s(rows)
    return grown(rows, name) / span_s if span_s > 0 else 0.0


def _until(name: str, goal: float, now: float, speed: float, now_unix_s: float) -> str:
    if now >= goal:
        return f"{name}: reached"
    if speed <= 0:
        return f"{name}: nobody knows, nothing moves on"
    left_s = (goal - now) / speed
    when = time.strftime("%a %H:%M", time.localtime(now_unix_s + left_s))
    return f"{name} in {duration(left_s)}, {when}"
