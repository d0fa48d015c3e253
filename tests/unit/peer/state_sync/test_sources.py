"""Who sends which piece: shares, thefts, refusals, losses."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.peer.state_sync.messages import ASKED_MAX
from atoll.peer.state_sync.sources import ARRIVAL_S, HANG_S, REST_S, Ask, Piece, PieceScheduler

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def pull_of(peers: list[bytes], pieces: int, first: int = 1, last: int = 9) -> PieceScheduler:
    pull = PieceScheduler()
    for peer in peers:
        pull.offer(peer, first, last)
    for chunk in range(pieces):
        pull.want(Piece(chunk, 0), 1000)
    return pull


def deliver(pull: PieceScheduler, asks: list[Ask], peer: bytes, now_s: float) -> None:
    """The oldest request of this donor is answered."""
    ask = next(a for a in asks if a.peer == peer and pull.expects(peer, a.ticket))
    pull.arrived(peer, ask.ticket, now_s)


def test_everybody_gets_a_share_and_nobody_more_than_allowed() -> None:
    pull = pull_of([A, B, C], 100)
    asks, drops = pull.plan(0.0)
    assert not drops
    assert len(asks) == 3 * ASKED_MAX
    assert len({ask.piece for ask in asks}) == len(asks)
    assert {pull.outstanding(peer) for peer in (A, B, C)} == {ASKED_MAX}
    assert {ask.peer for ask in asks[:3]} == {A, B, C}, "the first pieces come from everybody"


def test_entries_that_few_have_come_first_and_the_oldest_of_these() -> None:
    pull = PieceScheduler()
    pull.offer(A, 2, 9)
    pull.offer(B, 6, 9)
    pull.want(Piece(0, 0), 1000)
    for chunk, entry in enumerate((8, 5, 4), 1):
        pull.want(Piece(chunk, entry, 9), 100)
    asks, _ = pull.plan(0.0)
    assert [ask.piece.entry for ask in asks if ask.peer == A] == [4, 5]
    assert [ask.piece.entry for ask in asks if ask.peer == B] == [8, 0]
    assert pull.reaches_back(2)
    assert not pull.reaches_back(1)


def test_a_slow_donor_is_relieved_of_what_it_has_not_begun() -> None:
    pull = pull_of([A, B], 2 * ASKED_MAX)
    asks, _ = pull.plan(0.0)
    for i in range(ASKED_MAX):
        deliver(pull, asks, A, 0.1 * (i + 1))
    thefts, drops = pull.plan(1.0)
    assert {ask.peer for ask in thefts} == {A}
    assert {drop.peer for drop in drops} == {B}
    waited_longest = min(ask.ticket for ask in asks if ask.peer == B)
    assert waited_longest not in {drop.ticket for drop in drops}, "it may be on its way"
    assert pull.outstanding(A) + pull.outstanding(B) >= ASKED_MAX


def test_a_piece_that_does_not_come_is_asked_of_a_second_donor_and_the_first_to_send_it_wins() -> (
    None
):
    pull = pull_of([A, B], 2)
    asks, _ = pull.plan(0.0)
    deliver(pull, asks, A, 0.01)
    assert pull.plan(0.9 * HANG_S) == ([], []), "to ask twice costs it twice"
    thefts, drops = pull.plan(5.0)
    assert not drops
    assert [(ask.peer, ask.piece) for ask in thefts] == [(A, asks[1].piece)]
    [drop] = pull.arrived(A, thefts[0].ticket, 5.1)
    assert (drop.peer, drop.ticket) == (B, asks[1].ticket)
    assert pull.expects(B, asks[1].ticket) is None
    assert not pull.wanted


def test_a_piece_that_has_begun_to_arrive_is_waited_for_longer() -> None:
    """Rounds have most of the link meanwhile."""
    pull = pull_of([A, B], 2)
    asks, _ = pull.plan(0.0)
    deliver(pull, asks, A, 0.01)
    pull.arrives(B, asks[1].ticket)
    pull.arrives(C, asks[1].ticket)  # a stranger's word for it
    assert pull.plan(0.9 * ARRIVAL_S) == ([], [])
    thefts, _ = pull.plan(1.1 * ARRIVAL_S)
    assert [ask.piece for ask in thefts] == [asks[1].piece]


def test_equally_fast_donors_do_not_steal() -> None:
    pull = pull_of([A, B], 4)
    asks, _ = pull.plan(0.0)
    deliver(pull, asks, A, 1.0)
    deliver(pull, asks, B, 1.0)
    deliver(pull, asks, A, 2.0)
    assert pull.plan(2.0) == ([], [])


def test_what_a_lost_donor_should_have_sent_is_asked_of_others() -> None:
    pull = pull_of([A, B], 2 * ASKED_MAX)
    asks, _ = pull.plan(0.0)
    for i in range(ASKED_MAX):
        deliver(pull, asks, A, 0.1 * (i + 1))
    pull.lose(B)
    again, _ = pull.plan(1.0)
    assert {ask.piece for ask in again} == {ask.piece for ask in asks if ask.peer == B}
    assert pull.donors == (A,)


def test_a_refusal_lets_the_donor_rest() -> None:
    pull = pull_of([A], 1)
    [ask], _ = pull.plan(0.0)
    pull.refuse(A, ask.ticket, 0.0)
    assert pull.plan(REST_S / 2) == ([], [])
    [again], _ = pull.plan(REST_S)
    assert again.piece == ask.piece


def test_wanting_something_else_of_a_chunk_replaces_it() -> None:
    pull = pull_of([A], 1)
    [ask], _ = pull.plan(0.0)
    [drop] = pull.want(Piece(0, 5, 7), 10)
    assert drop.ticket == ask.ticket
    assert pull.expects(A, ask.ticket) is None
    assert pull.want(Piece(0, 5, 7), 10) == []
    [again], _ = pull.plan(0.0)
    assert again.piece == Piece(0, 5, 7)


def test_a_longer_run_does_not_replace_what_has_been_asked_a_shorter_one_does() -> None:
    pull = PieceScheduler()
    pull.offer(A, 2, 9)
    pull.want(Piece(0, 5, 7), 10)
    assert pull.asked(0, 0.0) is None
    pull.want(Piece(0, 5, 8), 10)
    [ask], _ = pull.plan(0.0)
    assert ask.piece == pull.asked(0, HANG_S) == Piece(0, 5, 8)
    assert pull.asked(0, HANG_S + 0.1) is None, "it seems to hang"
    assert pull.want(Piece(0, 5, 9), 10) == []
    assert pull.expects(A, ask.ticket) == Piece(0, 5, 8)
    assert pull.want(Piece(0, 5, 6), 10) != []


def test_a_donor_of_unknown_speed_takes_over_from_one_that_hangs() -> None:
    pull = pull_of([A], 2)
    pull.plan(0.0)
    pull.offer(B, 1, 9)
    assert pull.plan(0.1) == ([], [])
    thefts, _ = pull.plan(5.0)
    assert {ask.peer for ask in thefts} == {B}


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.sampled_from("oplriwfa"), st.integers(0, 5)), max_size=80))
def test_nothing_is_lost_and_no_limit_is_passed(moves: list[tuple[str, int]]) -> None:
    pull, now_s = PieceScheduler(), 0.0
    wanted: dict[int, Piece] = {}
    asked: list[Ask] = []
    peers = (A, B, C)
    for move, value in moves:
        now_s += 0.3
        peer = peers[value % 3]
        live = [a for a in asked if pull.expects(a.peer, a.ticket)]
        if move == "o":
            pull.offer(peer, 1, 9)
        elif move == "l":
            pull.lose(peer)
        elif move == "i":
            pull.interrupt(peer)
        elif move == "w":
            wanted[value] = Piece(value, value % 3, value % 3)
            pull.want(wanted[value], 100)
        elif move == "f":
            wanted.pop(value, None)
            pull.forget(value)
        elif move == "r" and live:
            ask = live[value % len(live)]
            pull.refuse(ask.peer, ask.ticket, now_s)
        elif move == "a" and live:
            ask = live[value % len(live)]
            pull.arrived(ask.peer, ask.ticket, now_s)
            wanted.pop(ask.piece.chunk, None)
        asked += pull.plan(now_s)[0]
        assert pull.wanted == len(wanted)
        assert all(pull.outstanding(peer) <= ASKED_MAX for peer in peers)
    pull.offer(A, 1, 9)
    now_s += 10
    while wanted:
        asked += pull.plan(now_s)[0]
        live = [a for a in asked if pull.expects(a.peer, a.ticket)]
        assert live, f"nobody is asked for {wanted}"
        pull.arrived(live[0].peer, live[0].ticket, now_s)
        assert wanted.pop(live[0].piece.chunk) == live[0].piece
