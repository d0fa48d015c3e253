"""What a broken attempt hands on: which chunks, of which origin, and who goes on without whom."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.membership.attempt import Attempt, AttemptCleanup
from atoll.peer.membership.events import Effect, Send
from atoll.peer.membership.kept_chunks import HOLDERS_MAX, KEPT_MAX, Kept, pack_kept, parse_kept
from atoll.peer.membership.link_graph import LinkGraph
from atoll.peer.membership.messages import STEP, AskFinals, Begin, Finals, Miss
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import Member, View
from atoll.peer.rounds.entries import EntryOrigin

TIMING = Timing()
A, B, C, D = (name.encode() * 32 for name in "abcd")
EVERYONE = (A, B, C, D)
NOT = bytes(32)
X, Y, Z = (bytes([n]) * 32 for n in (1, 2, 3))


class Over:
    """Attempt 2 of coordinator A has ended; ``participants`` go on."""

    def __init__(
        self,
        *participants: bytes,
        past: tuple[EntryOrigin, ...] = (),
        kept: bytes = b"",
        misses: dict[bytes, tuple[bytes, ...]] | None = None,
        apart: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        self.links = LinkGraph(apart)
        view = View(b"L" * 32, 3, tuple(Member(p, 1) for p in EVERYONE), A, 4, b"0" * 32)
        begin = Begin(b"L" * 32, 3, 5, 2, STEP, EVERYONE, (1.0,) * 4, past=past, kept=kept)
        self.sent: list[Effect] = []
        attempt = Attempt(view, A, begin, TIMING, self.sent.append, 0.0)
        for peer, missing in (misses or {}).items():
            attempt.on_miss(peer, Miss(b"L" * 32, 3, 5, 2, missing))
        self.sent.clear()
        emit = self.sent.append
        self.closing = AttemptCleanup(attempt, participants, participants, TIMING, emit, 10.0)

    def says(self, peer: bytes, *digests: bytes, missing: tuple[bytes, ...] = ()) -> None:
        finals = Finals(b"L" * 32, 3, 5, 2, b"".join(digests), missing)
        self.closing.on_finals(peer, finals)

    def kept(self, *alive: bytes) -> tuple[tuple[EntryOrigin, ...], tuple[Kept, ...]]:
        past, packed = self.closing.kept(alive or EVERYONE, EVERYONE, self.links)
        return past, parse_kept(packed, len(EVERYONE), 1 + len(past))


def test_everybody_who_goes_on_is_asked_and_waited_for_a_moment() -> None:
    over = Over(A, B, C)
    asked = {e.peer for e in over.sent if isinstance(e, Send) and isinstance(e.message, AskFinals)}
    assert asked == {A, B, C}
    for peer in (A, B):
        over.says(peer, X)
        assert not over.closing.is_done(10.1, EVERYONE)
    assert over.closing.is_done(10.1, (A, B)), "the dead are not waited for"
    assert over.closing.is_done(10.0 + TIMING.kept_s, EVERYONE)
    over.says(C, NOT)
    assert over.closing.is_done(10.1, EVERYONE)


def test_of_holders_those_are_named_that_all_can_copy_from() -> None:
    over = Over(A, B, C, D, apart=((A, D), (B, D), (C, D)))
    for peer in (A, B):
        over.says(peer, X, Y, NOT)
    over.says(C, X, NOT, NOT)
    over.says(D, X, NOT, Z)
    assert over.kept()[1] == (Kept(0, 1, X, (0, 1, 2)),), "D can copy Y from nobody, nor they Z"
    over = Over(A, B, C, D, apart=((A, D), (B, C)))
    over.says(A, X)
    over.says(B, X)
    assert over.kept()[1] == (Kept(0, 1, X, (0, 1)),), "C copies it from A, and D from B"
    over = Over(A, B, C, D, apart=((A, D),))
    over.says(A, X)
    assert over.kept()[1] == (), "D has no link to A"


def test_a_chunk_with_one_digest_is_kept_with_its_holders() -> None:
    over = Over(A, B, C)
    over.says(A, X, NOT, Y)
    over.says(B, X, NOT, Z)
    over.says(C, NOT, NOT, NOT)
    past, kept = over.kept()
    assert past == (EntryOrigin(EVERYONE, (1.0,) * 4),)
    assert kept == (Kept(0, 1, X, (0, 1)),), "of two digests neither is kept"
    assert over.kept(B, C)[1] == (Kept(0, 1, X, (1,)), Kept(2, 1, Z, (1,))), "only the living count"


def test_nothing_is_kept_of_a_submission_that_turned_out_unusable() -> None:
    over = Over(A, B, C, misses={D: (D,)})
    over.says(A, X)
    assert over.kept() == ((), ())


def test_a_chunk_that_was_kept_before_keeps_its_origin() -> None:
    """Chunk 1 was reduced among A and B two attempts ago: it must not pass for everybody's."""
    earlier = EntryOrigin((A, B), (2.0, 1.0))
    over = Over(A, B, past=(earlier,), kept=pack_kept([Kept(1, 1, Y, (0,))]))
    over.says(A, X, Y)
    past, kept = over.kept()
    assert {item.chunk: past[item.origin - 1] for item in kept} == {
        0: EntryOrigin(EVERYONE, (1.0,) * 4),
        1: earlier,
    }


def test_lists_of_another_grid_do_not_count() -> None:
    over = Over(A, B)
    over.says(A, X, Y)
    over.says(B, X)
    assert over.kept()[1] == (Kept(0, 1, X, (0,)), Kept(1, 1, Y, (0,)))


def test_who_is_waited_for_by_the_others_is_left_out_of_a_second_try() -> None:
    over = Over(A, B, C)
    over.says(A, NOT, missing=(C,))
    over.says(B, NOT, missing=(C,))
    assert over.closing.participants(EVERYONE, excluding=False) == (A, B, C)
    assert over.closing.participants(EVERYONE, excluding=True) == (A, B)
    assert over.closing.participants((A, C, D), excluding=True) == (A,), "nor the dead"


def test_one_whom_two_others_wait_for_explains_a_stall() -> None:
    over = Over(*EVERYONE)
    over.says(A, NOT, missing=(C,))
    assert not over.closing.is_clear(EVERYONE), "of one path either end may be to blame"
    over.says(B, NOT, missing=(C,))
    over.says(C, NOT, missing=(A, B))
    assert over.closing.is_clear(EVERYONE)
    assert not over.closing.is_clear((A, C, D)), "the dead have no say"
    over.says(A, NOT, missing=(C, D))
    over.says(B, NOT, missing=(C, D))
    assert not over.closing.is_clear(EVERYONE), "it may be that all are slow"


def test_a_coordinator_at_one_end_of_all_waiting_hands_over() -> None:
    over = Over(*EVERYONE)
    over.says(A, missing=(B, C, D))
    over.says(B, missing=(A,))
    assert not over.closing.is_between(A, EVERYONE), "it may be the path to b"
    over.says(C, missing=(A,))
    assert over.closing.is_between(A, EVERYONE)
    assert not over.closing.is_between(A, (A, B, D)), "the dead have no say"
    over.says(D, missing=(B,))
    over.says(B, missing=(A, D))
    assert not over.closing.is_between(A, EVERYONE), "b and d have waited for each other"


# ---------------------------------------------------------------- packed

digests = st.binary(min_size=32, max_size=32)
holders = st.lists(st.integers(0, 3), min_size=1, max_size=HOLDERS_MAX, unique=True).map(tuple)
records = st.tuples(st.integers(1, 4), digests, holders)


@given(st.dictionaries(st.integers(0, 2**32 - 1), records, max_size=20))
def test_what_is_packed_is_read_back(found: dict[int, tuple[int, bytes, tuple[int, ...]]]) -> None:
    kept = tuple(Kept(chunk, *found[chunk]) for chunk in sorted(found))
    assert parse_kept(pack_kept(reversed(kept)), 4, 5) == kept


@given(st.binary(max_size=200) | st.binary(min_size=86, max_size=86))
def test_any_bytes_are_records_in_order_or_refused(packed: bytes) -> None:
    try:
        kept = parse_kept(packed, 4, 5)
    except ValueError:
        return
    assert pack_kept(kept) == packed or any(_gap(packed))
    assert [item.chunk for item in kept] == sorted({item.chunk for item in kept})


def _gap(packed: bytes) -> list[bool]:
    """A list of holders with nobody in the middle is read, and packed without the gap."""
    rows = np.frombuffer(packed, np.uint8).reshape(-1, 43)[:, 5:11].copy().view(">u2")
    return [0xFFFF in row[:-1] for row in rows.tolist()]


@pytest.mark.parametrize(
    "wrong",
    [
        Kept(0, 0, X, (0,)),  # of the new attempt itself
        Kept(0, 5, X, (0,)),  # of an origin that BEGIN does not name
        Kept(0, 1, X, (4,)),  # held by somebody outside the view
        Kept(0, 1, X, ()),  # held by nobody
    ],
)
def test_records_that_make_no_sense_are_refused(wrong: Kept) -> None:
    with pytest.raises(ValueError, match="kept chunk 0"):
        parse_kept(pack_kept([wrong]), 4, 5)


def test_more_than_fit_are_not_packed_and_a_longer_list_is_refused() -> None:
    packed = pack_kept(Kept(chunk, 1, X, (0,)) for chunk in range(KEPT_MAX + 1))
    assert len(parse_kept(packed, 4, 5)) == KEPT_MAX
    with pytest.raises(ValueError, match="not a list"):
        parse_kept(packed + packed[:43], 4, 5)


def test_who_waits_for_those_who_wait_goes_on() -> None:
    """C and D exchange nothing with each other; A and B lack what these own."""
    over = Over(A, B, C, D)
    over.says(A, missing=(C, D))
    over.says(B, missing=(C, D))
    over.says(C, missing=(D,))
    over.says(D, missing=(C,))
    going = over.closing.participants(EVERYONE, excluding=True)
    assert len(going) == 3
    assert {A, B} <= {*going}
