"""Bans in views: when a coordinator names one, who votes for it, and that it stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.cluster import LINEAGE, Cluster, peer_id

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.bans import BanBook, BansBelieved, BelievedBan, forgets
from atoll.peer.membership.view import BANNED_MAX, Ballot, Banned, Member, View

A, B, C, D, E = (peer_id(name) for name in "abcde")
DIGEST = b"d" * 32


def view_of(cluster: Cluster, name: str = "a") -> View:
    view = cluster.host(name).node.view
    assert view is not None
    return view


def listed(cluster: Cluster, names: str, banned: bytes) -> bool:
    return all(view_of(cluster, name).is_banned(banned) for name in names)


# ---------------------------------------------------------------- in a run


@pytest.mark.parametrize("stands_alone", [True, False])
@pytest.mark.parametrize("banned", ["a", "c"])  # "a" coordinates
def test_who_is_banned_goes_and_every_view_says_so(banned: str, stands_alone: bool) -> None:
    cluster, others = Cluster("abcd"), "abcd".replace(banned, "")
    cluster.form("abcd")
    out = peer_id(banned)
    cluster.outlaws.convict(out, [*map(peer_id, others)], stands_alone=stands_alone)
    cluster.until(lambda: listed(cluster, others, out), limit_s=3.0)
    assert cluster.in_one_view(others)
    assert view_of(cluster, "b").banned == (Banned(out, cluster.outlaws.digest(out)),)
    cluster.until_round(others)
    cluster.kill("b")
    rest = others.replace("b", "")
    cluster.until(lambda: cluster.in_one_view(rest), limit_s=30.0)
    assert listed(cluster, rest, out)


def test_it_goes_in_the_view_that_names_it() -> None:
    cluster = Cluster("abcd")
    cluster.form("abcd")
    number = view_of(cluster).number
    cluster.outlaws.convict(C, [A, B, D], stands_alone=True)
    cluster.until(lambda: cluster.in_one_view("abd"))
    assert view_of(cluster).number == number + 1
    assert listed(cluster, "abd", C)


def test_evidence_that_stands_alone_is_named_once_a_quorum_has_it() -> None:
    cluster = Cluster("abcd")
    cluster.form("abcd")
    cluster.hold = lambda source, peer, message: isinstance(message, ms.Accept)
    cluster.outlaws.convict(D, [A], stands_alone=True)
    assert cluster.host("a").node.coordinator is not None
    cluster.until(lambda: D in cluster.outlaws.believers and len(cluster.outlaws.believers[D]) == 3)
    cluster.hold = lambda source, peer, message: False
    cluster.until(lambda: listed(cluster, "abc", D), limit_s=3.0)


def test_a_joiner_learns_it_with_its_first_view_and_the_banned_stays_outside() -> None:
    cluster = Cluster("abcd")
    cluster.form("abc")
    cluster.outlaws.convict(C, [A, B], stands_alone=False)
    cluster.until(lambda: listed(cluster, "ab", C))
    cluster.link("a", "d")
    cluster.until(lambda: cluster.in_one_view("abd"))
    assert listed(cluster, "abd", C)
    again = Member(C, 99, address="c:1")
    cluster.give("a", ev.Received(C, ms.Join(again)))
    cluster.until_round("ab", 4)
    assert not view_of(cluster).member(C)


def test_a_fork_keeps_bans() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.outlaws.convict(C, [A, B], stands_alone=True)
    cluster.until(lambda: listed(cluster, "ab", C))
    cluster.kill("a")
    cluster.until(lambda: view_of(cluster, "b").fork, limit_s=30.0)
    assert listed(cluster, "b", C)


# ---------------------------------------------------------------- the vote


def test_nobody_votes_for_a_ban_that_it_does_not_believe() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    a = cluster.host("a")
    claims = frozenset({B})  # b is said to believe it, which is not so
    cluster.deliver(a, BansBelieved((BelievedBan(C, DIGEST, True, claims),)))
    cluster.run(2.0)
    assert not listed(cluster, "b", C)
    assert "ban" in cluster.host("b").notes
    assert "ban" in cluster.host("c").notes
    cluster.outlaws.convict(C, [A, B], stands_alone=True)  # now it does
    cluster.until(lambda: listed(cluster, "ab", C), limit_s=3.0)


@pytest.mark.parametrize("fault", ["it says that it believes and does not vote", "it dies"])
def test_a_ban_of_a_stranger_waits_for_all_who_live(fault: str) -> None:
    """c has never met d, and would believe only what most members say."""
    cluster = Cluster("abc")
    cluster.form("abc")
    if fault == "it dies":
        cluster.kill("b")
    else:
        cluster.hold = lambda source, peer, message: (
            source == B and isinstance(message, ms.Accepted)
        )
    ban = BelievedBan(D, DIGEST, True, frozenset({B}))
    cluster.deliver(cluster.host("a"), BansBelieved((ban,)))
    cluster.until_round("ac", 4)
    assert "ban" not in cluster.host("c").notes


def test_nobody_votes_for_a_view_that_forgets() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.outlaws.convict(C, [A, B], stands_alone=True)
    cluster.until(lambda: listed(cluster, "ab", C))
    cluster.alarms -= {"rejected"}
    before = view_of(cluster)
    after = replace(before, number=before.number + 1, banned=())
    accept = ms.Accept(LINEAGE, before.number, Ballot(0, A), after)
    for _ in range(3):  # it is repeated, and said once
        cluster.give("b", ev.Received(A, accept))
    assert cluster.host("b").notes.count("rejected") == 1


def test_what_follows_names_all_that_was_named_in_the_same_order() -> None:
    members = tuple(Member(peer, 1, address="x:1") for peer in (A, B, C))
    bans = (Banned(D, DIGEST), Banned(E, DIGEST))
    before = View(LINEAGE, 3, members, A, 4, b"c" * 32, banned=bans)
    for named, wrong in ((bans, False), ((*bans, Banned(b"f" * 32, DIGEST)), False)):
        assert bool(forgets(before, replace(before, number=4, banned=named))) == wrong
    for named in ((), bans[:1], bans[::-1], (Banned(D, b"e" * 32), bans[1])):
        assert forgets(before, replace(before, number=4, banned=named))


def test_a_view_names_each_once_and_no_member() -> None:
    members = (Member(A, 1, address="x:1"),)
    for bans in ((Banned(A, DIGEST),), (Banned(B, DIGEST), Banned(B, b"e" * 32))):
        with pytest.raises(ValueError, match="banned"):
            View(LINEAGE, 3, members, A, 4, b"c" * 32, banned=bans)


# ---------------------------------------------------------------- when a ban is due


def book(*bans: BelievedBan) -> BanBook:
    found = BanBook(A)
    found.set(bans)
    return found


VIEW = View(
    LINEAGE, 3, tuple(Member(p, 1, address="x:1") for p in (A, B, C, D, E)), A, 4, b"c" * 32
)


@pytest.mark.parametrize(
    ("stands_alone", "believers", "alive", "due"),
    [
        (True, {B, C}, {A, B, C, D}, True),
        (True, {B}, {A, B, C, D}, False),  # no quorum: who lacks the evidence cannot vote
        (True, {B, C}, {A, B, D}, False),  # c is not here to vote
        (True, {B, C, E}, {A, B, D, E}, False),  # e's own word on e
        (False, {B, C}, {A, B, C, D}, False),  # d may never hear it
        (False, {B, C}, {A, B, C}, False),  # d may come back when b has gone for ever
        (False, {B, C, D}, {A, B, C, D, E}, True),
        (False, {B, C, D}, {A, B, C}, True),
        (False, {B}, {A, B}, False),
    ],
)
def test_a_ban_is_due_when_the_votes_are_sure(
    stands_alone: bool, believers: set[bytes], alive: set[bytes], due: bool
) -> None:
    ban = BelievedBan(E, DIGEST, stands_alone, frozenset(believers))
    expected = (Banned(E, DIGEST),) if due else ()
    assert book(ban).due(VIEW, alive) == expected
    named = replace(VIEW, members=VIEW.members[:4], banned=(Banned(E, DIGEST),))
    assert book(ban).due(named, alive) == ()


@pytest.mark.parametrize("stands_alone", [True, False])
@pytest.mark.parametrize("believers", [{B}, {B, C}, {B, C, D}])
def test_a_ban_of_one_that_is_no_member_is_due_when_all_believe(
    stands_alone: bool, believers: set[bytes]
) -> None:
    ban = BelievedBan(E, DIGEST, stands_alone, frozenset(believers))
    due = book(ban).due(replace(VIEW, members=VIEW.members[:4]), {A, B, C, D})
    assert bool(due) == (believers == {B, C, D})


def test_nobody_names_itself_and_no_more_than_a_view_holds() -> None:
    everyone = {A, B, C, D, E}
    own = BelievedBan(A, DIGEST, True, frozenset(everyone))
    assert book(own).due(VIEW, everyone) == ()
    strangers = [number.to_bytes(32, "big") for number in range(BANNED_MAX + 5)]
    many = book(*(BelievedBan(peer, DIGEST, True, frozenset(everyone)) for peer in strangers))
    assert len(many.due(VIEW, everyone)) == BANNED_MAX
