"""What becomes of a trainer's work when its daemon was started again."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from atoll.peer.membership.view import short
from atoll.peer.rounds.entries import GATHER, STEP, EntryHead, EntryOrigin
from atoll.peer.rounds.resumed_work import Fate, fate_of, why_not_on

ME, OTHER = b"m" * 32, b"o" * 32


def head(number: int, *peers: bytes, fragment: int = 0, weight: float = 1.0) -> EntryHead:
    origin = EntryOrigin(peers, tuple(weight if peer == ME else 1.0 for peer in peers))
    return EntryHead(number, STEP, fragment, (origin,), b"", b"", chain(number))


def chain(number: int) -> bytes:
    return bytes([number]) * 32


@dataclass
class Log:
    heads: dict[int, EntryHead] = field(default_factory=dict)
    before: int = 0

    @property
    def first(self) -> int:
        return min(self.heads, default=self.before + 1)

    @property
    def last(self) -> int:
        return max(self.heads, default=self.before)

    def head(self, round_number: int) -> EntryHead | None:
        return self.heads.get(round_number)

    def chain_after(self, round_number: int) -> bytes:
        known = self.first - 1 <= round_number <= self.last
        return chain(round_number) if known else b""


def log_of(*heads: EntryHead) -> Log:
    return Log({one.round: one for one in heads}, heads[0].round - 1 if heads else 0)


def test_a_submission_counts_in_the_round_that_names_its_peer() -> None:
    log = log_of(head(4, OTHER), head(5, ME, OTHER), head(6, OTHER))
    assert fate_of(log, ME, 0, 3, 6) == Fate("committed", 5, 0.5, (short(ME), short(OTHER)))
    assert fate_of(log, ME, 0, 5, 6) == Fate("again", 6)


def test_only_rounds_of_its_fragment_count_and_only_those_with_a_weight() -> None:
    gathered = EntryHead(6, GATHER, 0, (EntryOrigin((ME,), (1.0,)),), b"", b"", chain(6))
    log = log_of(head(4, ME, fragment=1), head(5, ME, OTHER, weight=0.0), gathered)
    assert fate_of(log, ME, 0, 3, 6).kind == "again"
    assert fate_of(log, ME, 1, 3, 6).kind == "committed"


def test_a_chunk_that_a_retry_has_kept_counts() -> None:
    """Though the last attempt was without this peer."""
    origins = (EntryOrigin((ME, OTHER), (1.0, 1.0)), EntryOrigin((OTHER,), (1.0,)))
    kept = EntryHead(4, STEP, 0, origins, bytes([0, 1]), b"", chain(4))
    assert fate_of(log_of(kept), ME, 0, 3, 4) == Fate("committed", 4, 0.25, (short(OTHER),))


def test_where_entries_are_missing_nobody_can_tell() -> None:
    log = log_of(head(5, OTHER))
    assert fate_of(log, ME, 0, 3, 5).kind == "reload"  # round 4 is not here any more
    assert fate_of(log, ME, 0, 4, 5).kind == "again"
    assert fate_of(log_of(), ME, 0, 7, 7).kind == "again"  # nothing has happened since


def test_of_a_round_that_is_not_in_the_log_yet_nothing_is_said() -> None:
    log = log_of(head(4, OTHER), head(5, ME, OTHER))
    assert fate_of(log, ME, 0, 3, 4).kind == "again"
    assert fate_of(log, ME, 0, 4, 5).kind == "committed"
    assert fate_of(log, ME, 0, 5, 6).kind == "again"  # of which no result is known yet
    loaded = Log(before=5)  # in one piece
    assert fate_of(loaded, ME, 0, 4, 5).kind == "reload"
    assert fate_of(loaded, ME, 0, 5, 6).kind == "again"


@pytest.mark.parametrize(
    ("now", "deltas", "why"),
    [(4, False, ""), (5, False, ""), (6, False, "2 rounds have gone by"), (6, True, "")],
)
def test_local_work_holds_as_after_a_missed_round(now: int, deltas: bool, why: str) -> None:
    log = log_of(*(head(number, OTHER) for number in range(3, 7)))
    base, here = (4, chain(4)), (now, chain(now))
    assert why_not_on(log, base, here, fragments=1, deltas=deltas) == why
    assert why_not_on(log, base, here, fragments=2, deltas=deltas) == ""


def test_collectives_are_no_rounds_that_were_missed() -> None:
    origins = (EntryOrigin((OTHER,), (1.0,)),)
    calls = [EntryHead(n, GATHER, 0, origins, b"", b"", chain(n)) for n in (5, 6)]
    log = log_of(head(4, ME), *calls)
    assert why_not_on(log, (4, chain(4)), (6, chain(6)), fragments=1, deltas=False) == ""


def test_another_history_is_told_from_one_that_is_forgotten() -> None:
    log, here = log_of(head(8, OTHER)), (8, chain(8))
    known = {"fragments": 1, "deltas": True}
    assert "another one" in why_not_on(log, (7, chain(9)), here, **known)
    assert "another one" in why_not_on(log, (9, chain(9)), here, **known)
    assert "6 rounds have gone by, more than" in why_not_on(log, (2, chain(2)), here, **known)
    assert "another one" in why_not_on(log, (8, b""), here, **known)
    assert why_not_on(log_of(), (0, chain(3)), (0, chain(3)), **known) == ""  # right here
