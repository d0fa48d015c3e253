"""Who has a link to whom by what heartbeats say, and what rounds make of it."""

from __future__ import annotations

import pytest
from harness.cluster import Cluster, peer_id
from harness.samples import sample

from atoll.peer.membership import events as ev
from atoll.peer.membership.link_graph import LinkGraph, graph_of, shown_apart
from atoll.peer.membership.messages import Heartbeat
from atoll.peer.membership.view import Member, View, short

A, B, C, D, E = (name.encode() * 32 for name in "abcde")
VIEW = View(b"L" * 32, 3, tuple(Member(p, 1) for p in (A, B, C, D, E)), A, 4, b"0" * 32)


def beat(*unlinked: int) -> Heartbeat:
    before = sample("Heartbeat", "bare")
    fields = {name: getattr(before, name) for name in before.__slots__}
    fields |= {name: getattr(before, name) for name in ("lineage", "view")}
    return Heartbeat(**fields | {"unlinked": unlinked})


def test_a_pair_is_apart_when_both_say_so() -> None:
    said = {A: beat(), B: beat(2, 3), C: beat(1), D: beat()}
    links = graph_of(VIEW, said)
    assert links.apart((A, B, C, D)) == ((1, 2),)
    assert not links.are_linked(C, B)
    assert links.are_linked(B, D), "D may just have lost it, or is dead"
    assert links.reaches(A, (A, B, C, D))
    assert not links.reaches(B, (A, C))
    assert links.unlinked(B, (A, C, D)) == {C}
    assert graph_of(VIEW, {B: beat(900), C: beat(1)}).is_complete, "there is no such member"


def test_members_without_a_link_are_named_in_order() -> None:
    for wrong in ((2, 1), (1, 1)):
        with pytest.raises(ValueError, match="in order"):
            beat(*wrong)


def test_the_largest_part_with_somebody_linked_to_all() -> None:
    everyone = (A, B, C, D, E)
    assert LinkGraph().with_owner(everyone, everyone, A) == everyone
    assert LinkGraph([(B, C), (C, D)]).with_owner(everyone, everyone, A) == everyone
    links = LinkGraph([(A, B), (C, D), (D, E)])
    assert links.with_owner(everyone, everyone, A) == (A, B, C, E), "C and E own, not A alone"
    assert links.with_owner(everyone, (D,), A) == (A, B, D), "only D may own anything"
    star = LinkGraph([(x, y) for x in (A, B, C) for y in (A, B, C) if x < y] + [(D, A), (D, B)])
    assert star.with_owner((A, B, C, D), (A, B, C, D), A) == (C, D), "the others have nobody"
    assert links.with_owner(everyone, (), A) == everyone


def test_pairs_are_shown_but_not_all_of_many() -> None:
    assert shown_apart(LinkGraph([(C, B)]), (A, B, C)) == (
        f"{short(B)} and {short(C)} have no link to each other"
    )
    many = LinkGraph([(x, y) for x in (A, B, C, D) for y in (A, B, C, D) if x < y])
    assert shown_apart(many, (A, B, C, D)).endswith(", nor have 2 other pairs")


def test_a_link_that_may_be_under_way_is_not_lacking_yet() -> None:
    """A peer that cannot be dialled says at once what it lacks, as it can do nothing about it."""
    cluster = Cluster("abc")
    cluster.form("abc")
    node = cluster.host("b").node
    cluster.give("b", ev.LinkDown(peer_id("c"), "reset"))
    where = node.view.peers.index(peer_id("c")) if node.view is not None else -1

    def said() -> tuple[int, ...]:
        return node.heartbeats.heartbeat().unlinked

    cluster.run(0.9 * node.timing.linking_s)
    assert said() == ()
    cluster.run(0.4 * node.timing.linking_s)
    assert said() == (where,)
    cluster.give("b", ev.LinkUp(peer_id("c")))
    assert said() == ()
    cluster.give("b", ev.Reach(outbound=True))
    cluster.give("b", ev.LinkDown(peer_id("c"), "reset"))
    assert said() == (where,)
    assert node.heartbeats.heartbeat().outbound
