"""Test what a punch goes through, what observers' answers mean, what is kept of a pair."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import LocalProtocolError, RemoteProtocolError
from atoll.peer.punch.course import (
    PUNCH_TRANSITIONS,
    Mapped,
    PunchCourse,
    PunchState,
    PunchTrigger,
    judge_mappings,
    meet_s,
    try_s,
    why_not_meet,
)
from atoll.peer.punch.messages import NONCE_BYTES
from atoll.peer.punch.pairs import (
    HOPELESS_S,
    PAIR_TRANSITIONS,
    PAUSE_S,
    PAUSE_S_MAX,
    UNMET_S,
    PairState,
    PairTrigger,
    PunchPairs,
    next_pair_state,
)
from atoll.peer.punch.preamble import PREAMBLE_BYTES, Preamble

A, B = b"a" * 32, b"b" * 32
NONCES = bytes(NONCE_BYTES), bytes(range(NONCE_BYTES))


# ---------------------------------------------------------------- one punch


def test_a_punch_goes_its_way() -> None:
    course = PunchCourse()
    for trigger in (PunchTrigger.LEARNT, PunchTrigger.AGREED, PunchTrigger.MET):
        course.go(trigger)
    assert course.state is PunchState.MADE


def test_what_is_in_no_table_raises() -> None:
    for state, trigger in itertools.product(PunchState, PunchTrigger):
        course = PunchCourse()
        course.state = state
        if (state, trigger) in PUNCH_TRANSITIONS:
            course.go(trigger)
        else:
            with pytest.raises(LocalProtocolError):
                course.go(trigger)
    for pair in itertools.product(PairState, PairTrigger):
        assert next_pair_state(*pair) is PAIR_TRANSITIONS[pair], "nothing is impossible for a pair"


def test_every_punch_may_fail_until_it_has_ended() -> None:
    ended = {PunchState.MADE, PunchState.FAILED}
    for state in PunchState:
        assert ((state, PunchTrigger.FAILED) in PUNCH_TRANSITIONS) == (state not in ended)


def test_two_observers_that_see_two_ports_show_a_symmetric_router() -> None:
    one, other = Mapped("192.0.2.1", 7000), Mapped("192.0.2.1", 7001)
    assert judge_mappings([one]) == one
    assert judge_mappings([one, one]) == one
    assert judge_mappings([one, other]) is None
    assert judge_mappings([one, Mapped("192.0.2.2", 7000)]) is None


@pytest.mark.parametrize(
    ("ip", "stated", "requester", "may"),
    [
        ("198.51.100.7", "198.51.100.7", "203.0.113.1", True),
        ("198.51.100.8", "198.51.100.7", "203.0.113.1", False),  # another machine
        ("10.0.0.5", "10.0.0.5", "203.0.113.1", False),  # near us, for a relay that is not
        ("10.0.0.5", "10.0.0.5", "10.0.0.9", True),
        ("127.0.0.1", "127.0.0.1", "10.0.0.9", False),
        ("router.example", "router.example", "203.0.113.1", False),
    ],
)
def test_only_where_the_other_end_comes_from_is_dialled(
    ip: str, stated: str, requester: str, may: bool
) -> None:
    assert (why_not_meet(Mapped(ip, 7000), stated, requester) == "") == may


def test_a_try_lasts_some_round_trips_and_a_meeting_some_tries() -> None:
    assert meet_s(0.0) == meet_s(0.05) > 3 * try_s(0.05)
    assert meet_s(0.4) == pytest.approx(3 * try_s(0.4))
    assert try_s(0.0) == try_s(0.05) < try_s(0.4) == pytest.approx(1.2)


# ---------------------------------------------------------------- what is remembered


def test_failures_are_repeated_at_growing_intervals_that_have_a_limit() -> None:
    pairs, now_s, pauses_s = PunchPairs(), 0.0, []
    assert pairs.may_try(A, now_s)
    for turn in range(12):
        assert pairs.take(A, PairTrigger.FAILED, now_s) == (turn == 0), "only the first is news"
        assert not pairs.may_try(A, now_s)
        pauses_s.append(pairs.pause_s(A, now_s))
        now_s += pauses_s[-1]
        assert pairs.may_try(A, now_s)
    assert pauses_s[:3] == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S]
    assert pauses_s[-2:] == [PAUSE_S_MAX, PAUSE_S_MAX]
    assert pairs.take(A, PairTrigger.MADE, now_s)
    assert pairs.may_try(A, now_s)
    pairs.take(A, PairTrigger.FAILED, now_s)
    assert pairs.pause_s(A, now_s) == PAUSE_S


def test_streams_that_fail_together_fail_once() -> None:
    pairs = PunchPairs()
    for after_s in (0.0, 0.1, 0.2):
        pairs.take(A, PairTrigger.FAILED, after_s)
    assert pairs.pause_s(A, 0.2) == pytest.approx(PAUSE_S - 0.2)
    assert pairs.may_try(B, 0.2)


def test_without_an_answer_nothing_is_known_and_it_is_tried_soon() -> None:
    pairs = PunchPairs()
    pairs.take(A, PairTrigger.MADE, 0.0)
    assert not pairs.take(A, PairTrigger.UNMET, 1.0)
    assert pairs.pause_s(A, 1.0) == UNMET_S
    assert pairs.state(A) is PairState.WORKS
    pairs.take(A, PairTrigger.FAILED, 10.0)
    pairs.take(A, PairTrigger.UNMET, 10.0 + PAUSE_S)
    assert pairs.pause_s(A, 10.0 + PAUSE_S) == UNMET_S
    pairs.take(A, PairTrigger.FAILED, 20.0 + PAUSE_S)
    assert pairs.pause_s(A, 20.0 + PAUSE_S) == 2 * PAUSE_S


def test_a_symmetric_router_is_not_tried_for_long() -> None:
    pairs = PunchPairs()
    assert pairs.take(A, PairTrigger.HOPELESS, 0.0)
    assert not pairs.take(A, PairTrigger.HOPELESS, 1.0)
    assert pairs.pause_s(A, 1.0) == HOPELESS_S
    assert pairs.state(A) is PairState.HOPELESS


# ---------------------------------------------------------------- the first bytes


def ends() -> tuple[Preamble, Preamble]:
    return Preamble("asker", NONCES, (A, B)), Preamble("answerer", NONCES, (A, B))


def test_each_end_knows_the_other() -> None:
    asker, answerer = ends()
    assert len(asker.own) == PREAMBLE_BYTES
    asker.check(answerer.own)
    answerer.check(asker.own)


def test_nobody_else_is_taken_for_it() -> None:
    asker, answerer = ends()
    wrong = [
        asker.own,  # what it has said itself, sent back
        Preamble("answerer", (NONCES[0], NONCES[0]), (A, B)).own,
        Preamble("answerer", (NONCES[1], NONCES[0]), (A, B)).own,
        Preamble("answerer", NONCES, (B, A)).own,
        b"\x16" + answerer.own[1:],
        answerer.own[:-1],
        b"",
    ]
    for received in wrong:
        with pytest.raises(RemoteProtocolError, match="somebody else"):
            asker.check(received)
    with pytest.raises(LocalProtocolError):
        Preamble("asker", (b"", NONCES[1]), (A, B))


@given(st.binary(max_size=2 * PREAMBLE_BYTES))
def test_garbage_is_no_proof(received: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        ends()[0].check(received)
