"""Make peers sit out for a while if one round after the other is begun again because of them.

Theory. Who cannot be reduced with, or says nothing in an audit, is left out of the next attempt,
and is in the next round again: it may have been slow for a moment. A peer that does it in every
round costs everybody a time limit each time, and nothing proves that it means to. So one that has
ended attempts in several rounds, and was in none that was committed meanwhile, takes no part for a
while, which grows each time. It follows the run all the same. Too few are never left: many that
have trouble at once have it with the network.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from atoll.collectives.units import duration
from atoll.peer.membership.events import Effect, Note
from atoll.peer.membership.view import short

SPOILS_MAX = 3  # rounds in a row: one or two may be bad luck
PAUSE_MIN_S = 30.0  # some of the time limits that it costs, ...
PAUSE_MAX_S = 600.0  # ... and so long that these cost a few per cent; twice as long each time


@dataclass(slots=True)
class _Record:
    round: int  # the last that it has spoilt
    count: int = 0
    pause_s: float = 0.0
    until_s: float = 0.0


class FlakyPeers:
    """Keep which peers spoil rounds, and until when they sit out.

    It is a part of the coordinator; it is of members only, so that it stays small.
    """

    def __init__(self, emit: Callable[[Effect], None]) -> None:
        self._emit = emit
        self._records: dict[bytes, _Record] = {}

    def blame(self, round_number: int, peers: Collection[bytes], now_s: float) -> None:
        """Note that an attempt at this round goes on without these peers, which live."""
        for peer in peers:
            record = self._records.setdefault(peer, _Record(0))
            if record.round == round_number:
                continue
            record.round, record.count = round_number, record.count + 1
            if record.count < SPOILS_MAX:
                continue
            record.pause_s = min(PAUSE_MAX_S, 2 * record.pause_s or PAUSE_MIN_S)
            record.until_s = now_s + record.pause_s
            text = (
                f"{short(peer)} takes no part for {duration(record.pause_s)}: {record.count} rounds"
            )
            self._emit(Note("spoils", f"{text} in a row had to be begun again without it", peer))

    def served(self, participants: Collection[bytes]) -> None:
        """Forget what these have spoilt: a round of theirs was committed."""
        for peer in participants:
            self._records.pop(peer, None)

    def without(self, chosen: tuple[bytes, ...], now_s: float) -> tuple[bytes, ...]:
        """Return those of ``chosen`` that take part; all, if half of them or more would not."""
        out = {peer for peer, record in self._records.items() if now_s < record.until_s}
        staying = tuple(peer for peer in chosen if peer not in out)
        return staying if 2 * len(staying) > len(chosen) else chosen

    def take_over(self, before: FlakyPeers, members: Collection[bytes]) -> None:
        """Take over what the view before knew of these members, as its coordinator."""
        self._records = {p: record for p, record in before._records.items() if p in members}
