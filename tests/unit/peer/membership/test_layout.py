"""Layouts of rounds: which fit, what BEGIN carries when, and what a hostile one can do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.cluster import Cluster, peer_id
from harness.faults import begins_of, busy_with

from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.peer.membership import messages as ms
from atoll.peer.membership.layout import (
    HANDED_ON,
    PAIR_ELEMENTS_MAX,
    PAIRWISE,
    Advised,
    Layout,
    handed_on,
    layout_for,
    pair_for,
)
from atoll.peer.membership.operations import Operation
from atoll.peer.net.wire import decode, encode

PEERS = tuple(sorted(peer_id(name) for name in "abcd"))
RING = Layout("ring", (1, 1, 1, 1), (2, 0, 3, 1), why="as fast as it goes")


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "star"},
        {"kind": "ring", "order": (0, 1, 1, 3)},
        {"kind": "ring", "order": (0, 1, 2)},
        {"kind": "hierarchical", "order": (0, 0, 1)},
        {"kind": "tree", "order": (0, 1, 2, 3)},
        {"kind": "butterfly", "order": (0,)},
        {"kind": "pairwise", "order": ()},  # of four
        {"kind": "butterfly", "order": (), "shares": (0, 0, 0, 0)},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"somebody owns a share|no layout of 4"):
        replace(RING, **wrong)


def test_what_each_kind_makes_of_it() -> None:
    shares = (1, 2, 0, 1)
    assert Layout("butterfly", shares).routes() is None
    made = {
        "ring": Layout("ring", shares, (2, 0, 3, 1)),
        "tree": Layout("tree", shares, arity=2),
        "hierarchical": Layout("hierarchical", shares, (0, 0, 7, 7)),
    }
    for kind, layout in made.items():
        routes = layout.routes()
        assert routes is not None
        assert routes.kind == kind
        assert len(routes.up) == 4
        assert decode(encode(ms.Begin(*begin_fields(), layout=layout))).layout == layout


def begin_fields() -> tuple[object, ...]:
    return (b"L" * 32, 1, 2, 1, ms.STEP, PEERS, (1.0,) * 4)


def test_a_begin_whose_layout_is_of_another_number_is_refused_when_it_arrives() -> None:
    with pytest.raises(ValueError, match="a share for each participant"):
        ms.Begin(*begin_fields(), layout=Layout("butterfly", (1, 1, 1)))
    packed = encode(ms.Begin(*begin_fields(), layout=RING))
    with pytest.raises(RemoteProtocolError, match="no layout of 4 is a rung"):
        decode(packed.replace(b"ring", b"rung"))


def test_advice_names_peers_in_order_one_share_for_each() -> None:
    for peers in (PEERS[::-1], (PEERS[0], PEERS[0], PEERS[1], PEERS[2]), PEERS[:3]):
        with pytest.raises(ConfigError, match="layout"):
            Advised(peers, RING)
    with pytest.raises(ConfigError, match="3 shares for a layout of 4"):
        Advised(PEERS, RING, (1, 2, 3))


def test_who_gets_which_layout() -> None:
    advice = Advised(PEERS, replace(RING, shares=(3, 0, 2, 0)))
    assert layout_for(None, PEERS, ms.STEP, again=False) is None
    assert layout_for(advice, PEERS, ms.STEP, again=False) is advice.layout
    again = layout_for(advice, PEERS, ms.STEP, again=True)
    assert again is not None
    assert (again.kind, again.shares) == ("butterfly", (3, 0, 2, 0))
    assert layout_for(advice, PEERS, ms.REDUCE, again=False) == again  # of another size and codec
    finer = Advised(PEERS, advice.layout, (9, 7, 8, 1))
    for kind, broken in ((ms.REDUCE, False), (ms.REDUCE, True), (ms.STEP, True)):
        found = layout_for(finer, PEERS, kind, again=broken)
        assert found is not None
        assert found.shares == finer.shares
    assert layout_for(advice, PEERS, ms.GATHER, again=False) is None
    assert layout_for(advice, PEERS, ms.INIT, again=False) is None
    fewer = layout_for(advice, PEERS[1:3], ms.STEP, again=False)
    assert fewer is not None
    assert (fewer.kind, fewer.shares) == ("butterfly", (0, 2))
    assert (
        layout_for(advice, (PEERS[1], PEERS[3]), ms.STEP, again=False) is None
    )  # nobody would own it
    assert (
        layout_for(advice, (PEERS[0], b"z" * 32), ms.STEP, again=False) is None
    )  # a stranger to it


def test_rounds_go_as_advised_until_one_of_them_dies() -> None:
    cluster = Cluster("abcd")
    cluster.form("abcd")
    begun = begins_of(cluster)
    for name in "abcd":  # only the coordinator's matters
        cluster.give(name, Advised(PEERS, RING))
    cluster.until_round("abcd")
    assert begun[-1].layout == RING
    cluster.until(busy_with(cluster, "c"))
    cluster.kill("d")
    cluster.until_round("abc")
    after = [begin for begin in begun if len(begin.participants) == 3]
    assert {begin.layout and (begin.layout.kind, begin.layout.shares) for begin in after} == {
        ("butterfly", (1, 1, 1))
    }


def test_another_coordinator_begins_without_advice() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    peers = tuple(sorted(peer_id(name) for name in "abc"))
    cluster.give("a", Advised(peers, Layout("tree", (1, 2, 3), arity=1)))
    begun = begins_of(cluster)
    cluster.until_round("abc")
    assert {begin.layout and begin.layout.kind for begin in begun} >= {"tree"}
    cluster.kill("a")
    cluster.until_round("bc")
    assert begun[-1].layout is None


def test_the_first_round_does_not_follow_the_plan() -> None:
    cluster = Cluster("abc")
    cluster.found("a")
    cluster.give("a", Advised((peer_id("a"),), Layout("butterfly", (1,))))
    begun = begins_of(cluster)
    for other in "bc":
        cluster.link("a", other)
    cluster.link("b", "c")
    cluster.until(lambda: cluster.in_one_view("abc"))
    cluster.train("a")
    cluster.until(lambda: cluster.host("a").round >= 1)
    found = [begin.layout for begin in begun if begin.kind == ms.INIT]
    assert [layout.why for layout in found if layout is not None] == [HANDED_ON]


def test_the_first_parameters_are_handed_on_by_those_who_lack_them() -> None:
    cluster = Cluster("abcd")
    cluster.found("a")
    for one, other in ("ab", "ac", "ad", "bc", "bd", "cd"):
        cluster.link(one, other)
    cluster.until(lambda: cluster.in_one_view("abcd"))
    begun = begins_of(cluster)
    cluster.train("b")
    cluster.until(lambda: cluster.host("a").round >= 1)
    first = next(begin for begin in begun if begin.kind == ms.INIT)
    assert first.participants == PEERS
    assert first.counted == (peer_id("b"),)
    assert first.layout is not None
    assert first.layout.shares == (1, 0, 1, 1)


def test_who_is_linked_to_all_hands_the_first_parameters_on() -> None:
    only_c = handed_on((1.0, 0.0, 0.0), (False, False, True))
    assert only_c is not None
    assert only_c.shares == (0, 0, 1)
    nobody = handed_on((0.0, 1.0, 0.0), (False, True, False))
    assert nobody is not None
    assert nobody.shares == (0, 1, 0)
    assert handed_on((1.0,), (True,)) is None


def test_only_a_small_vector_of_two_goes_both_ways_at_once() -> None:
    pair = pair_for(PEERS[:2], PAIR_ELEMENTS_MAX)
    assert pair is not None
    assert pair.is_pairwise
    assert pair_for(PEERS[:2], PAIR_ELEMENTS_MAX + 1) is None
    assert pair_for(PEERS[:2], 0) is None  # a step, or a gather
    assert pair_for(PEERS[:3], 1) is None


@pytest.mark.parametrize("elements", [256, PAIR_ELEMENTS_MAX + 1])
def test_two_reduce_a_small_vector_in_one_journey(elements: int) -> None:
    cluster = Cluster("ab")
    cluster.form("ab")
    called = Operation(ms.REDUCE, elements, "sum", "float32")
    cluster.call_of = lambda host: called if host.round >= 2 else None
    begun = begins_of(cluster)
    cluster.until_round("ab", 4)
    kinds = {b.layout.kind if b.layout else "" for b in begun if b.kind == ms.REDUCE}
    assert kinds == ({PAIRWISE} if elements == 256 else {""})
