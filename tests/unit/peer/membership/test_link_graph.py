"""Who has a link to whom by what heartbeats say, and what rounds make of it."""

from __future__ import annotations

import pytest
from harness.cluster import Cluster, peer_id
from harness.faults import begins_of
from harness.samples import sample

from atoll.peer.membership import events as ev
from atoll.peer.membership.attempt import unexplained
from atoll.peer.membership.link_graph import (
    BROKEN_MAX_S,
    BROKEN_MIN_S,
    BrokenPaths,
    LinkGraph,
    broken_paths,
    graph_of,
    shown_apart,
)
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
    assert not links.have_path(C, B)
    assert links.have_path(B, D), "D may just have lost it, or is dead"
    assert links.reaches(A, (A, B, C, D))
    assert not links.reaches(B, (A, C))
    assert links.apart_from(B, (A, C, D)) == {C}
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


# ---------------------------------------------------------------- links that carry nothing


def test_paths_are_broken_where_both_ends_wait_for_each_other() -> None:
    bridge = {B: (D, E), C: (D, E), D: (B, C), E: (B, C), A: (B, C, D, E)}
    everyone = (A, B, C, D, E)
    assert broken_paths(bridge, everyone) == {(B, D), (B, E), (C, D), (C, E)}
    assert broken_paths(bridge, (B, C)) == set(), "nobody who may own is linked to all"
    slow = {peer: tuple({*everyone} - {peer}) for peer in everyone}
    assert broken_paths(slow, everyone) == set(), "all may be slow"
    assert broken_paths({B: (C,), D: (C,)}, everyone) == set(), "C has not said anything"


def test_who_waits_for_others_that_are_late_has_an_excuse() -> None:
    bridge = {B: (D, E), D: (B,), E: (B,), A: (B, D, E)}
    assert unexplained(bridge) == {B: {D, E}, D: {B}, E: {B}, A: set()}
    deaf = {A: (E,), B: (E,), C: (E,)}
    assert unexplained(deaf) == {A: {E}, B: {E}, C: {E}}, "E answers nothing"
    ring = {A: (B,), B: (C,), C: (A,)}
    assert unexplained(ring) == {A: {B}, B: {C}, C: {A}}, "somebody is to blame"


def test_a_broken_path_is_tried_again_after_twice_as_long_each_time() -> None:
    paths = BrokenPaths()
    assert paths.note([(B, D)], 100.0) == BROKEN_MIN_S
    assert paths.pairs == {(B, D)}
    assert not paths.step(104.9)
    assert paths.step(105.1)
    assert not paths.pairs
    assert paths.note([(B, D), (C, D)], 106.0) == 2 * BROKEN_MIN_S
    assert paths.step(112.0)
    assert paths.pairs == {(B, D)}
    assert paths.step(116.5)
    assert not paths.step(127.0), "it was well for as long as it had been apart"
    assert paths.note([(B, D)], 127.0) == BROKEN_MIN_S
    for now_s in range(127, 160):
        assert paths.note([(B, D)], now_s) <= BROKEN_MAX_S
    after = BrokenPaths()
    after.take_over(paths, (A, B, C))
    after.step(160.0)
    assert not after.pairs, "D is no member any more"
    assert after.stalls == 0


def test_only_stalls_that_find_the_paths_of_one_peer_are_counted() -> None:
    paths = BrokenPaths()
    paths.note([(B, D), (B, E), (C, D)], 100.0)
    assert paths.stalls == 0, "several owned, and all is known"
    paths.note([(B, D), (B, E)], 101.0)
    paths.note([(C, D)], 102.0)
    assert paths.stalls == 2
    after = BrokenPaths()
    after.take_over(paths, (A, B, C))
    assert after.stalls == 0, "nothing is known of these"
    paths.step(130.0)
    assert paths.stalls == 0


def test_a_bridge_that_coordinates_loses_nobody() -> None:
    """Nothing shows on the links of two halves that hear each other only through one member."""
    cluster = Cluster("abcde")
    cluster.form("abcde")
    cluster.broken_s = 10.0  # streams look well for so long
    halves = [(peer_id(x), peer_id(y)) for x in "bc" for y in "de"]
    cluster.cut |= {frozenset(pair) for pair in halves}
    begins = begins_of(cluster)
    before = cluster.committed
    cluster.run(4.0)
    assert cluster.committed - before > 5
    assert len(begins[-1].participants) == 5
    assert len(cluster.noted("retry")) == 1
    cluster.cut.clear()
    cluster.run(BROKEN_MIN_S)
    assert begins[-1].layout is None, "all own something again"
    assert len(cluster.noted("retry")) <= 2
