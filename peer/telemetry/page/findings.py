"""Say in one sentence who slows the run down and why, from the last rows of all; pure.

A peer is slow if the others wait for it, which each of them reports in its own rows: whom it has
waited for last, and for how long. Why it is slow is seen by comparison: it trains longer than the
others do, or else its submission comes late for another reason (its trainer was started late, its
machine is busy). Where nobody waits, a round is either trained or exchanged, and the sentence says
which of the two takes most of it, and over which link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from atoll.collectives.units import count, duration, rate

ROUNDS_JUDGED = 20  # the last ones: enough that one late round is no verdict
WAIT_SHARE_MIN = 0.05  # of a round: less than that nobody would want to mend
EXCHANGE_SHARE_MIN = 0.5  # of a round: from there on links decide how fast the run is
LONGER = 1.2  # times the others' training: what is less is noise

Rows = Mapping[str, Sequence[Mapping[str, Any]]]  # by peer, the oldest first
Links = Mapping[str, Sequence[Mapping[str, Any]]]  # by who has measured them


class Slowness(NamedTuple):
    """Hold who is slow, if anybody, what that costs each round, and the sentence."""

    peer: str
    share: float
    text: str


def who_is_slow(rows: Rows, links: Links) -> Slowness:
    """Return who slows the run down and why, judged by the last ROUNDS_JUDGED rows of each."""
    last: Rows = {peer: list(found)[-ROUNDS_JUDGED:] for peer, found in rows.items() if found}
    newest = max((row["last"] for found in last.values() for row in found), default=0)
    # Of whoever has gone, rows stay; they say nothing about the run of now.
    last = {p: found for p, found in last.items() if found[-1]["last"] > newest - ROUNDS_JUDGED}
    if not last:
        return Slowness("", 0.0, "no round has been recorded yet")
    took_s = median(mean(found, "took_s") for found in last.values())
    blamed = _waited_for(last)
    if blamed and took_s > 0:
        peer = max(blamed, key=lambda name: (blamed[name], name))
        share = blamed[peer] / took_s
        if share >= WAIT_SHARE_MIN:
            return Slowness(peer, share, _late(peer, blamed[peer], took_s, last))
    return Slowness("", 0.0, _nobody(last, took_s, links))


def mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the mean of a time per round, over rows that may be of several rounds each."""
    return sum(float(row.get(name, 0.0)) for row in rows) / max(1, _rounds(rows))


def _rounds(rows: Sequence[Mapping[str, Any]]) -> int:
    return sum(int(row["last"]) - int(row["first"]) + 1 for row in rows)


def _waited_for(last: Rows) -> dict[str, float]:
    """Return for how long a peer that waited has waited for each, per round, in the mean."""
    waits = {
        (peer, row["last"]): float(row.get("wait_s", 0.0)) for peer in last for row in last[peer]
    }
    blamed: dict[str, float] = {}
    for peer, rows in last.items():
        rounds = max(1, _rounds(rows))
        for row in rows:
            late = last_of(row.get("waited_for", ()), peer, row["last"], waits)
            if late:
                blamed[late] = blamed.get(late, 0.0) + float(row.get("wait_s", 0.0)) / rounds
    others = max(1, len(last) - 1)
    return {name: waited_s / others for name, waited_s in blamed.items()}


def last_of(
    late: Sequence[str], peer: str, number: int, waits: Mapping[tuple[str, int], float]
) -> str:
    """Return who of those that ``peer`` has waited for in a round was the last; "": nobody.

    A row names whoever was late when that was heard last, and some of them were in time for others:
    who comes last of all waits for nobody. ``waits``: how long each peer has waited in each round.
    """
    others = [name for name in late if name != peer]
    return min(others, key=lambda name: waits.get((name, number), 0.0), default="")


def _late(peer: str, waited_s: float, took_s: float, last: Rows) -> str:
    text = (
        f"{peer} is slow: the others wait {duration(waited_s)} of each {duration(took_s)} round"
        f" for it ({waited_s / took_s:.0%})"
    )
    own = last.get(peer)
    others = [mean(rows, "compute_s") for name, rows in last.items() if name != peer]
    if own is None or not others:
        return f"{text}; it has sent no rows lately"
    mine_s, theirs_s = mean(own, "compute_s"), median(others)
    if mine_s > LONGER * theirs_s:
        return f"{text}, because it trains {duration(mine_s)}, the others {duration(theirs_s)}"
    return f"{text}, though it trains no longer than they do: its submission comes late"


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
