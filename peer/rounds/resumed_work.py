"""Decide what becomes of a trainer's work when its daemon was started again. Pure.

Theory. A submission may be under way when a daemon dies, and the round that reads it may be
committed by the others: before the next process of this daemon knows of it, or after that. Each
entry of the log names whose submissions are in it, so it counts in the entry that names this peer,
if there is one after the round of which the trainer knows the outcome (``since``); there is one at
most, because a submission is for the next round of its fragment, and whatever the next process
takes part in has submissions of its own. Where the entries do not reach back so far, nobody can
tell, and the trainer takes the run's parameters: then nothing counts twice either.

Local work that was not submitted holds as it does in a daemon that lives: while the run's history
contains the state that the trainer began with, and no more of it has gone by than a missed round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from atoll.peer.membership.view import short
from atoll.peer.rounds.entries import STEP, EntryHead

# Rounds of each fragment that may have gone by without local work that is of parameters: it would
# draw the run back to where it was. (A pseudo-gradient holds against any later state, and what a
# trainer has encoded before its daemon was started again is one by then.)
MISSED_MAX = 1


class RoundHeads(Protocol):
    """Describe the log of rounds, ``first`` to ``last``."""

    @property
    def first(self) -> int: ...

    @property
    def last(self) -> int: ...

    def head(self, round_number: int, /) -> EntryHead | None: ...

    def chain_after(self, round_number: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Fate:
    """Say what has become of a submission: ``kind`` is "committed", "reload", or "again".

    "again": it is in no round so far.
    """

    kind: str
    round: int
    share: float = 0.0
    peers: tuple[str, ...] = ()

    def to_trainer(self, call: int) -> Mapping[str, object]:
        said = {"kind": self.kind, "round": self.round, "share": self.share}
        return {**said, "peers": list(self.peers), "call": call, "text": ""}


def fate_of(log: RoundHeads, me: bytes, fragment: int, since: int, now: int) -> Fate:
    """Return the fate of what ``me`` has submitted of a fragment after round ``since``.

    ``now``: a round that is committed here, or has begun. Of those that are not in the log yet
    nothing is said: who has to know looks again when they are.

    A round that has not waited for a submission may have it all the same: a retry without this peer
    keeps chunks of an attempt that it was in, and a state that was loaded in one piece says of no
    round whose submissions are in it.
    """
    for number in range(since + 1, min(now, log.last) + 1):
        head = log.head(number)
        if head is None:
            return Fate("reload", now)
        if head.kind != STEP or head.fragment != fragment:
            continue
        if any(me in origin.counted for origin in head.origins):
            peers = tuple(map(short, head.contributors))
            return Fate("committed", number, head.share_of(me), peers)
    return Fate("again", now)


def why_not_on(
    log: RoundHeads,
    base: tuple[int, bytes],
    here: tuple[int, bytes],
    *,
    fragments: int,
    deltas: bool,
) -> str:
    """Return why local work that began with the state ``base`` holds no more; "" if it does.

    Both are round and chain; ``here``: where this peer is. ``deltas``: what trainers submit are
    pseudo-gradients.
    """
    (before, chain), (now, _) = base, here
    if not chain or chain not in (log.chain_after(before), here[1] if now == before else b""):
        if before < min(now, log.first - 1):
            return f"{now - before} rounds have gone by, more than this daemon has at hand"
        return "its history is another one"
    heads = [log.head(number) for number in range(before + 1, now + 1)]
    gone = sum(head is None or head.kind == STEP for head in heads)
    if gone <= MISSED_MAX * fragments or deltas:
        return ""
    return f"{gone} rounds have gone by"
