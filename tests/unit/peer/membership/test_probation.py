"""Newcomers: who is one by which view, what they weigh, and whom nobody believes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.cluster import LINEAGE, Cluster, peer_id, short
from harness.newcomers import come, members, new, running, view_of, weights_of_rounds

from atoll.peer.membership import messages as ms
from atoll.peer.membership.attempt import vertex_cover
from atoll.peer.membership.layout import Advised, Layout
from atoll.peer.membership.messages import Terms
from atoll.peer.membership.participation import wrong_weights
from atoll.peer.membership.probation import (
    CompletedRounds,
    graduated,
    rounds_left,
    wrong_graduation,
)
from atoll.peer.membership.view import ABSENT_MAX, Absent, Member, Newcomer, View

K = 4
TERMS = Terms(K)
CHAIN = b"c" * 32
A, B, C, D = (peer_id(name) for name in "abcd")


# ---------------------------------------------------------------- from round to round


def test_a_newcomer_takes_part_without_weight_and_counts_after_k_rounds() -> None:
    cluster = running("ab", TERMS)
    assert new(cluster) == {"b": K}
    first = view_of(cluster).number
    cluster.log_rounds = 100
    cluster.until(lambda: not new(cluster))
    cluster.until_round("ab", 3)
    weights = [x[B] for x in weights_of_rounds(cluster) if B in x]
    assert weights[:K] == [0.0] * K
    assert set(weights[K:]) == {1.0}
    assert view_of(cluster).number == first + 1  # nothing else has changed it


def test_founders_count_from_the_first_round_on() -> None:
    cluster = running("abc", TERMS, "abc")
    assert new(cluster) == {}
    assert all(set(x.values()) == {1.0} for x in weights_of_rounds(cluster))


def test_weights_are_not_what_trainers_say() -> None:
    cluster = running("ab", TERMS, "ab")
    cluster.host("a").weight = 1000.0
    cluster.until_round("ab", 3)
    assert weights_of_rounds(cluster)[-1] == {A: 1.0, B: 1.0}


def test_rounds_without_the_newcomer_do_not_serve_it() -> None:
    cluster = running("ab", TERMS)
    cluster.detach("b")
    cluster.until_round("ab", 3 * K)
    assert new(cluster) == {"b": K}
    left = rounds_left(view_of(cluster), cluster.host("a").node.follower.completed)
    cluster.train("b")
    cluster.until_round("ab", 2)
    assert (
        rounds_left(view_of(cluster), cluster.host("a").node.follower.completed)[B] < left[B] <= K
    )


def test_what_it_has_served_outlives_its_coordinator() -> None:
    cluster = running("abcd", Terms(12), start="abc")
    cluster.until_round("abcd", 6)
    cluster.kill("a")
    cluster.until(lambda: members(cluster) == "bcd")
    assert new(cluster)["d"] <= 12 - 5
    cluster.until(lambda: not new(cluster))


# ---------------------------------------------------------------- coming back


def away(cluster: Cluster, name: str) -> None:
    cluster.kill(name)
    cluster.until(lambda: name not in members(cluster))


def test_who_counts_and_is_back_soon_counts_again() -> None:
    cluster = running("abc", Terms(500), start="abc")
    away(cluster, "c")
    assert [x.peer for x in view_of(cluster).absent] == [C]
    cluster.restart("c")
    come(cluster, "c")
    assert new(cluster) == {}
    assert not view_of(cluster).absent


def test_who_was_away_for_long_begins_anew() -> None:
    cluster = running("abc", Terms(5), start="abc")
    away(cluster, "c")
    cluster.until_round("ab", 8)
    cluster.restart("c")
    come(cluster, "c")
    assert new(cluster) == {"c": 5}


def test_a_newcomer_that_goes_begins_anew() -> None:
    cluster = running("abc", Terms(30), start="ab")
    cluster.until_round("abc", 4)
    away(cluster, "c")
    assert not view_of(cluster).absent
    cluster.restart("c")
    come(cluster, "c")
    assert new(cluster) == {"c": 30}


# ---------------------------------------------------------------- nobody is believed


def view(newcomers: dict[bytes, int], number: int = 5, base: int = 10, **more: object) -> View:
    named = tuple(Newcomer(peer, rounds) for peer, rounds in newcomers.items())
    everyone = tuple(Member(peer, 1) for peer in (A, B, C))
    made = View(LINEAGE, number, everyone, A, base, CHAIN, newcomers=named)
    return replace(made, **more)  # type: ignore[arg-type]


def begin(weights: tuple[float, ...], **more: object) -> ms.Begin:
    layout = Layout("butterfly", (1, 1, 0))
    made = ms.Begin(LINEAGE, 5, 11, 1, ms.STEP, (A, B, C), weights, layout=layout)
    return replace(made, **more)  # type: ignore[arg-type]


BEFORE = view({C: 3})


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (begin((1.0, 1.0, 1.0)), f"{short(C)} is to weigh 1 and is on probation"),
        (begin((1.0, 2.0, 0.0)), f"{short(B)} is to weigh 2 and counts like all others"),
        (begin((1.0, 0.0, 0.0)), f"{short(B)} is to weigh 0"),
        (begin((1.0, 1.0, 0.0), participants=(A, B, D)), f"{short(D)} is to take part and is no"),
        (begin((1.0, 1.0, 0.0), layout=None), "own a part"),
        (begin((1.0, 1.0, 0.0), layout=Layout("butterfly", (1, 1, 1))), "own a part"),
        (begin((1.0, 1.0, 0.0), layout=Layout("ring", (1, 1, 0), (0, 1, 2))), "own a part"),
        (begin((1.0, 1.0, 0.0), past=(ms.Begin(LINEAGE, 5, 11, 1, ms.STEP, (C,), (1.0,)).origins)),
         f"{short(C)} is to weigh 1"),
    ],
)  # fmt: skip
def test_a_round_that_counts_a_newcomer_is_refused(wrong: ms.Begin, text: str) -> None:
    assert wrong_weights(begin((1.0, 1.0, 0.0)), BEFORE, TERMS) == ""
    assert text in wrong_weights(wrong, BEFORE, TERMS)
    assert wrong_weights(wrong, BEFORE, Terms(0)) == ""
    assert wrong_weights(wrong, BEFORE, None) == ""


def test_members_take_no_part_in_such_a_round_and_say_so() -> None:
    cluster = running("abc", Terms(50), start="ab")
    cluster.alarms = frozenset()
    cluster.until_round("abc", 2)
    lead = cluster.host("a").node.coordinator
    assert lead is not None
    lead.eligibility.weights = lambda chosen, *_: (1.0,) * len(chosen)  # type: ignore[method-assign]
    before = cluster.committed
    cluster.run(2.0)
    assert cluster.committed <= before + 1  # one may have been under way
    assert {"a", "b", "c"} <= set(cluster.noted("rejected"))


def follow(before: View, **changes: object) -> View:
    base = {"number": before.number + 1, "base_round": 14, "newcomers": (), "absent": ()}
    return replace(before, **(base | changes))  # type: ignore[arg-type]


def served(before: View, rounds: int, by: bytes = C) -> CompletedRounds:
    known = CompletedRounds(before)
    for number in range(rounds):
        known.count(ms.Begin(LINEAGE, 5, 11 + number, 1, ms.STEP, (A, by), (1.0, 1.0)))
    return known


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 4])
def test_a_voter_that_has_seen_everything_lets_nothing_be_taken_off(rounds: int) -> None:
    known = CompletedRounds(BEFORE)
    for number in range(4):
        who = (A, C) if number < rounds else (A, B)
        known.count(ms.Begin(LINEAGE, 5, 11 + number, 1, ms.STEP, who, (1.0, 1.0)))
    left = max(0, 3 - rounds)
    for said in range(5):
        named = (Newcomer(C, said),) if said else ()
        wrong = wrong_graduation(BEFORE, follow(BEFORE, newcomers=named), known, TERMS)
        assert bool(wrong) == (not left <= said <= 3)
    assert graduated(BEFORE, follow(BEFORE), known, TERMS).newcomers == (
        (Newcomer(C, left),) if left else ()
    )


def test_what_a_voter_has_not_seen_it_believes() -> None:
    half = served(BEFORE, 2)  # of four rounds since the view before
    for said, wrong in ((0, False), (1, False), (3, False), (4, True)):
        named = (Newcomer(C, said),) if said else ()
        after = follow(BEFORE, newcomers=named)
        assert bool(wrong_graduation(BEFORE, after, half, TERMS)) == wrong


@pytest.mark.parametrize(
    ("after", "ok"),
    [
        (follow(BEFORE, newcomers=(Newcomer(B, 1), Newcomer(C, 3))), False),  # counts already
        (follow(BEFORE, members=BEFORE.members[:2], absent=(Absent(C, 14),)), False),  # did not
        (follow(BEFORE, members=BEFORE.members[::2], newcomers=(Newcomer(C, 3),),
                absent=(Absent(B, 14),)), True),
        (follow(BEFORE, members=BEFORE.members[::2], newcomers=(Newcomer(C, 3),),
                absent=(Absent(B, 13),)), False),
        (follow(BEFORE, newcomers=(Newcomer(C, 3),), absent=(Absent(D, 14),)), False),
        (follow(BEFORE, newcomers=(Newcomer(C, 3),), since=14), False),
        (follow(BEFORE, members=(*BEFORE.members, Member(D, 1)), newcomers=(Newcomer(C, 3),)),
         False),
        (follow(BEFORE, members=(*BEFORE.members, Member(D, 1)),
                newcomers=(Newcomer(C, 3), Newcomer(D, K))), True),
        (follow(BEFORE, members=(*BEFORE.members, Member(D, 1)),
                newcomers=(Newcomer(C, 3), Newcomer(D, K - 1))), False),
    ],
)  # fmt: skip
def test_voters_refuse_a_view_that_makes_somebody_count(after: View, ok: bool) -> None:
    known = served(BEFORE, 4, by=B)
    assert bool(wrong_graduation(BEFORE, after, known, TERMS)) != ok


def test_no_view_comes_about_in_which_a_newcomer_counts_too_early() -> None:
    cluster = running("abc", Terms(50), start="ab")
    cluster.alarms = frozenset()
    lead = cluster.host("a").node.coordinator
    assert lead is not None
    number = view_of(cluster).number
    lead.propose(replace(view_of(cluster), number=number + 1, newcomers=()), cluster.now_s)
    cluster.run(1.0)
    assert view_of(cluster).number == number
    assert "b" in cluster.noted("rejected")


# ---------------------------------------------------------------- views


def test_of_those_who_went_the_latest_are_remembered() -> None:
    gone = tuple(Absent(bytes([n // 250, n % 250]).ljust(32, b"x"), n) for n in range(ABSENT_MAX))
    before = view({}, absent=gone)
    after = graduated(
        before, follow(before, members=before.members[:2]), CompletedRounds(), Terms(1000)
    )
    assert after.absent == (*gone[1:], Absent(C, 14))
    assert graduated(before, follow(before), CompletedRounds(), TERMS).absent[0].since == 14 - K
    assert graduated(before, follow(before), CompletedRounds(), Terms(0)).absent == ()


def test_who_comes_before_anything_was_trained_founds_the_run() -> None:
    for since, base, rounds in ((0, 0, 0), (0, 1, 0), (0, 2, K), (9, 9, 0), (9, 10, K)):
        before = view({}, base=base, since=since)
        after = follow(before, members=(*before.members, Member(D, 1)), base_round=base)
        after = graduated(before, after, CompletedRounds(), TERMS)
        assert after.newcomers == ((Newcomer(D, rounds),) if rounds else ())


@pytest.mark.parametrize(
    "wrong",
    [
        {"newcomers": (Newcomer(D, 1),)},
        {"newcomers": (Newcomer(B, 1), Newcomer(B, 2))},
        {"absent": (Absent(A, 1),)},
        {"absent": (Absent(D, 1), Absent(D, 2))},
    ],
)
def test_a_view_that_contradicts_itself_is_none(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="newcomer"):
        replace(BEFORE, **wrong)  # type: ignore[arg-type]


def test_newcomers_own_nothing_of_a_result_whatever_was_planned() -> None:
    cluster = running("abc", Terms(50), start="ab")
    lead = cluster.host("a").node.coordinator
    assert lead is not None
    lead.advice = Advised((A, B, C), Layout("ring", (1, 2, 3), (2, 1, 0)))
    cluster.until_round("abc", 3)
    last = cluster.host("a").log[-1].begin
    assert last.participants == (A, B, C)
    assert last.layout is not None
    assert (last.layout.kind, last.layout.shares) == ("butterfly", (1, 2, 0))


# ---------------------------------------------------------------- broken edges


@pytest.mark.parametrize(
    ("misses", "cover"),
    [
        ({"d": "b", "e": "b"}, "de"),  # whom newcomers alone name stays, however many they are
        ({"d": "a", "e": "bc"}, "de"),
        ({"d": "e"}, "e"),  # among themselves as ever
        ({"d": "b", "a": "b"}, "b"),  # whom one that counts names goes, and they stay
        ({"c": "de"}, "c"),  # nor does one that counts leave out all of them
        ({"a": "d"}, "d"),
        ({"d": "d"}, "d"),
    ],
)
def test_newcomers_leave_out_nobody_but_themselves(misses: dict[str, str], cover: str) -> None:
    """Of five, a the coordinator, d and e on probation."""
    named = {k.encode(): tuple(v.encode() for v in vs) for k, vs in misses.items()}
    found = vertex_cover(named, b"a", {b"d", b"e"})
    assert b"".join(sorted(found)).decode() == cover
