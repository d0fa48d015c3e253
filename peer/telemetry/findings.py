"""Say in one sentence who slows the run down and why, from the last rows of all; pure.

A peer is slow if the others wait for it, which each of them reports in its own rows: whom it has
waited for last, and for how long. Why it is slow is seen by comparison: it trains longer than the
others do, its links carry less, or else its submission comes late for another reason (its trainer
was started late, its machine is busy). Where nobody waits, a round is either trained or exchanged,
and the sentence says which of the two takes most of it, and over which link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from atoll.collectives.units import count, duration, rate

ROUNDS_JUDGED = 20  # the last ones: enough that one late round is no verdict
PRESENT_MIN_S = 60.0  # rows of large views come that rarely (reporter.py), and clocks differ
WAIT_SHARE_MIN = 0.05  # of a round: less than that nobody would want to mend
EXCHANGE_SHARE_MIN = 0.5  # of a round: from there on links decide how fast the run is
LONGER = 1.2  # times what the others have: what is less is noise
EXPLAINS_MIN = 0.5  # of the wait for a peer: its longer training is why they wait

Rows = Mapping[str, Sequence[Mapping[str, Any]]]  # by peer, the oldest first
Links = Mapping[str, Sequence[Mapping[str, Any]]]  # by who has measured them


def grown(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return by how much a trainer's total has grown over rows; one that fell has begun anew."""
    totals = [float(row[name]) for row in rows if name in row]
    return sum(now - before if now >= before else now for before, now in pairwise(totals))


class Slowness(NamedTuple):
    """Hold who is slow, if anybody, what that costs each round, and the sentence."""

    peer: str
    share: float
    text: str


def who_is_slow(rows: Rows, links: Links) -> Slowness:
    """Return who slows the run down and why, judged by the last ROUNDS_JUDGED rows of each.

    `atoll top` and the status page both ask this, so that they name the same peer. Of several that
    a row names, the one that came last is to blame for all of the wait (see `last_of`): had the
    others been in time, it would have been as long. Who has no trainer waits for nobody.
    """
    last: Rows = {peer: list(found)[-ROUNDS_JUDGED:] for peer, found in rows.items() if found}
    training = {peer: found for peer, found in last.items() if trains(found)}
    took_s = median(mean(found, "took_s") for found in training.values()) if training else 0.0
    if not took_s:
        return Slowness("", 0.0, "no round with a trainer was committed yet")
    blamed = _waited_for(last, training)
    if blamed:
        peer = max(blamed, key=lambda name: (blamed[name], name))
        share = blamed[peer] / took_s
        if share >= WAIT_SHARE_MIN:
            text = (
                f"{peer} is slow: the others wait {duration(blamed[peer])} of each"
                f" {duration(took_s)} round for it ({share:.0%})"
            )
            return Slowness(peer, share, text + _why(peer, blamed[peer], last, training))
    return Slowness("", 0.0, _nobody(training, took_s, links))


def present(rows: Rows) -> Rows:
    """Return the rows of whoever has sent one lately; ``rows``: who was heard last is the last.

    That is within ROUNDS_JUDGED rows of the usual length of the last one that came, whatever round
    it is of: round numbers go back with a checkpoint or a rollback, times do not.
    """
    known = {peer: found for peer, found in rows.items() if found}
    if not known:
        return {}
    usual_s = median(float(row.get("took_s", 0.0)) for found in known.values() for row in found)
    lately_s = max(PRESENT_MIN_S, ROUNDS_JUDGED * usual_s)
    now_s = float(next(reversed(known.values()))[-1]["unix_s"])
    return {p: found for p, found in known.items() if abs(now_s - found[-1]["unix_s"]) <= lately_s}


def trains(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a trainer's work was in one of these rounds."""
    return any(row.get("counted") for row in rows)


def mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the mean of a time per round, over rows that may be of several rounds each."""
    return sum(float(row.get(name, 0.0)) for row in rows) / max(1, _rounds(rows))


def _rounds(rows: Sequence[Mapping[str, Any]]) -> int:
    return sum(int(row["last"]) - int(row["first"]) + 1 for row in rows)


def _waited_for(last: Rows, training: Rows) -> dict[str, float]:
    """Return for how long a peer that trains has waited for each, per round, in the mean."""
    blamed: dict[str, float] = {}
    for peer, rows in training.items():
        rounds = max(1, _rounds(rows))
        for row in rows:
            if late := last_of(row, peer, last):
                blamed[late] = blamed.get(late, 0.0) + float(row.get("wait_s", 0.0)) / rounds
    return {
        name: waited_s / max(1, len(training) - (name in training))
        for name, waited_s in blamed.items()
    }


def last_of(row: Mapping[str, Any], peer: str, rows: Rows) -> str:
    """Return who of those that ``peer`` has waited for in a row was the last; "": nobody.

    A row names whoever was late when that was heard last, and some of them were in time for others:
    who comes last of all waits for nobody. ``rows``: of all, which tell how long each has waited.
    """
    others = [name for name in row.get("waited_for", ()) if name != peer]
    number = int(row["last"])
    return min(others, key=lambda name: _waited_s(rows.get(name, ()), number), default="")


def _waited_s(rows: Sequence[Mapping[str, Any]], number: int) -> float:
    """Return how long a peer has waited in a round; 0.0 where no row of it tells."""
    for row in reversed(rows):
        if row["first"] <= number <= row["last"]:
            return mean([row], "wait_s")
    return 0.0


def _why(peer: str, waited_s: float, last: Rows, training: Rows) -> str:
    """Say what is slow about a peer, compared with the others, who wait so long for it."""
    own = last.get(peer)
    others = [rows for name, rows in training.items() if name != peer]
    if own is None:
        return "; it has sent no rows lately"
    if not own[-1].get("counted"):
        number = max((row["last"] for row in own if row.get("counted")), default=0)
        return "; its training has been in no round" + (f" since round {number}" if number else "")
    mine_s, theirs_s = mean(own, "compute_s"), median(mean(rows, "compute_s") for rows in others)
    if mine_s > LONGER * theirs_s or mine_s - theirs_s >= EXPLAINS_MIN * waited_s:
        return f", because it trains {duration(mine_s)}, the others {duration(theirs_s)}"
    up = float(own[-1].get("up", 0.0))
    usual_up = median(float(rows[-1].get("up", 0.0)) for rows in others)
    if 0 < LONGER * up < usual_up:
        return f"; its links carry {rate(up)} up, those of the others {rate(usual_up)}"
    longer = "no" if mine_s <= theirs_s else "hardly"
    return f", though it trains {longer} longer than they do: its submission comes late"


def _nobody(last: Rows, took_s: float, links: Links) -> str:
    exchange_s = median(mean(rows, "exchange_s") for rows in last.values())
    compute_s = median(mean(rows, "compute_s") for rows in last.values())
    judged = count(max(len(rows) for rows in last.values()), "round")
    text = f"nobody waits for anybody in the last {judged}"
    if took_s > 0 and exchange_s / took_s >= EXCHANGE_SHARE_MIN:
        text += f"; the exchange takes {duration(exchange_s)} of each {duration(took_s)}"
        if narrow := narrowest(links, last):
            where, out = narrow
            text += f", and the slowest link is {where} with {rate(out)}"
        return text
    return f"{text}: a round is {duration(compute_s)} of training, {duration(exchange_s)} exchange"


def narrowest(links: Links, last: Rows) -> tuple[str, float] | None:
    """Return which link is the slowest of these peers', in words, and its rate; None: unknown.

    That may be one between two of them, or what one has carried in all, up or down.
    """
    rates = [
        (float(link["out"]), f"{source} to {link['peer']}")
        for source, seen in links.items()
        for link in seen
        if link.get("out") and source in last and link["peer"] in last
    ]
    rates += [
        (float(rows[-1][way]), f"the {way}link of {peer}")
        for peer, rows in last.items()
        for way in ("up", "down")
        if rows[-1].get(way)
    ]
    if not rates:
        return None
    out, where = min(rates)
    return where, out
