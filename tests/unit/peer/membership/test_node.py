"""Founding, joining and leaving, on several real machines under a virtual clock."""

from __future__ import annotations

import ast
import itertools

import pytest
from harness.cluster import LINEAGE, Cluster, peer_id
from harness.faults import busy_with, lose
from harness.rooms import MODULES

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.phase import Phase
from atoll.peer.membership.view import genesis_chain


def test_founding_makes_a_void_view_of_one() -> None:
    cluster = Cluster("a")
    cluster.found("a")
    node = cluster.host("a").node
    assert node.phase is Phase.COORDINATOR
    assert node.view is not None
    assert (node.view.number, node.view.peers, node.view.base_round) == (1, (peer_id("a"),), 0)
    assert node.follower.chain == genesis_chain(LINEAGE)
    cluster.run(5.0)
    assert cluster.committed == 0  # void: nobody has initialised it


@pytest.mark.parametrize("names", ["ab", "abc", "abcde"])
def test_a_group_forms_and_trains_within_a_virtual_second(names: str) -> None:
    cluster = Cluster(names)
    cluster.form(names, rounds=3)
    assert cluster.now_s < 1.0
    assert {cluster.host(n).node.follower.chain for n in names} == {
        cluster.host("a").node.follower.chain
    }


def test_joining_a_run_that_trains_loads_its_state_and_contributes() -> None:
    cluster = Cluster("ab")
    cluster.form("ab")
    cluster.add("c")
    cluster.link("b", "c")  # b does not coordinate: it redirects
    cluster.host("c").trains = True
    cluster.until(lambda: cluster.in_one_view("abc"))
    assert ("reload", cluster.host("c").round) in cluster.host("c").told
    cluster.until(lambda: cluster.host("c").told[-1][0] == "committed")


def test_joiner_of_another_specification_is_refused_by_name() -> None:
    cluster = Cluster("ab")
    cluster.found("a")
    cluster.host("a").node.follower.spec = "H=500"
    cluster.host("b").node.follower.spec = "H=400"
    cluster.link("a", "b")
    cluster.run(2.0)
    assert "refused" in cluster.host("b").notes
    assert "yours H=400, run H=500" in cluster.tail(10_000)
    assert cluster.host("b").node.phase is Phase.OUT


def test_newcomers_never_outnumber_those_who_are_in() -> None:
    """Old voters alone stay a quorum of every new view."""
    cluster = Cluster("abcdefg")
    cluster.found("a")
    for other in "bcdefg":
        cluster.link("a", other)
    cluster.until(lambda: cluster.in_one_view("abcdefg"))
    sizes = [len(v.members) for _, v in sorted(cluster.checker.views.items())]
    assert sizes == sorted(sizes)
    for before, after in itertools.pairwise(sizes):
        assert after - before <= max(1, before - 1)


def test_joiner_that_lost_its_install_learns_of_it() -> None:
    cluster = Cluster("ab")
    cluster.found("a")
    lose(cluster, ms.Install, to="b", count=1)
    cluster.link("a", "b")
    assert cluster.until(lambda: cluster.in_one_view("ab")) < 1.0


@pytest.mark.parametrize("leaver", ["b", "a"])
def test_member_or_coordinator_leaves_and_the_others_go_on(leaver: str) -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.leave(leaver)
    took_s = cluster.until(lambda: not cluster.host(leaver).alive)
    assert took_s < 0.5  # agreed, not timed out
    stay = "abc".replace(leaver, "")
    cluster.until_round(stay)
    assert cluster.in_one_view(stay)
    assert not cluster.noted("coordinator-lost")


def test_leaving_in_the_middle_of_a_reduce() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.until(busy_with(cluster, "b"))
    number = cluster.committed + 1
    cluster.leave("b")
    assert cluster.until(lambda: not cluster.host("b").alive) < 0.5
    assert cluster.until_round("ac") < 1.0
    assert "retry" not in cluster.host("a").notes, "it did its part to the end"
    entry = next(entry for entry in cluster.host("a").log if entry.round == number)
    assert peer_id("b") in entry.begin.participants


def test_one_of_two_leaves_then_the_last_one() -> None:
    cluster = Cluster("ab")
    cluster.form("ab")
    cluster.leave("a")
    cluster.until(lambda: not cluster.host("a").alive)
    cluster.until_round("b")
    view = cluster.host("b").node.view
    assert view is not None
    assert not view.fork
    cluster.leave("b")
    assert not cluster.host("b").alive  # at once: there is nobody to agree with
    assert cluster.host("b").node.phase is Phase.LEFT


def test_a_coordinator_does_not_leave_with_the_only_copy_of_the_state() -> None:
    """b is behind when a wants to go: a waits until b has loaded."""
    cluster = Cluster("ab")
    cluster.form("ab")
    cluster.isolate("b")
    cluster.until_round("a")
    cluster.load_s = 5.0  # half a second for each log entry
    cluster.heal()
    cluster.until(lambda: cluster.host("b").loads == 1)
    cluster.run(0.3)  # a has heard that b lives
    cluster.leave("a")
    assert 0.9 < cluster.until(lambda: not cluster.host("a").alive) < 3.9
    cluster.until_round("b")
    assert "base-lost" not in cluster.host("b").notes


def test_leaver_that_nobody_hears_goes_after_four_seconds() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.isolate("b")
    cluster.leave("b")
    took_s = cluster.until(lambda: not cluster.host("b").alive)
    assert 4.0 <= took_s < 4.5
    cluster.until_round("ac")


def test_everyone_leaves_at_once() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    for name in "abc":
        cluster.leave(name)
    cluster.until(lambda: not cluster.living(), limit_s=5.0)


def test_lost_leave_is_repeated() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    lose(cluster, ms.Leave, count=2)
    cluster.leave("c")
    assert cluster.until(lambda: not cluster.host("c").alive) < 1.0


def test_unknown_message_is_noted_and_changes_nothing() -> None:
    cluster = Cluster("ab")
    cluster.form("ab")
    cluster.give("a", ev.Received(peer_id("b"), object()))
    assert cluster.host("a").notes[-1] == "protocol"
    cluster.until_round("ab")


def test_orders_of_others_than_the_coordinator_are_ignored() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    own = cluster.host("b").node.follower
    view = cluster.host("b").node.view
    assert view is not None
    forged = ms.Commit(view.lineage, view.number, own.round + 1, 99, b"x" * 32)
    cluster.give("b", ev.Received(peer_id("c"), forged))
    assert not own.unsynced
    for order in (
        ms.SyncTarget(view.lineage, view.number, 99, b"x" * 32),
        ms.CoordinatorBeat(view.lineage, view.number, 99, b"x" * 32, forged),
        ms.Resync(view.lineage, view.number, own.round, b"x" * 32),
    ):
        cluster.give("b", ev.Received(peer_id("c"), order))
        assert not own.unsynced
    assert cluster.host("b").loads == 0


# ---------------------------------------------------------------- who owns which field


def test_only_the_node_writes_what_all_parts_read() -> None:
    """No other part assigns to the situation that it is given, nor knows the node."""
    for name, path in MODULES.items():
        if not name.startswith("atoll.peer.membership.") or name.endswith((".node", ".situation")):
            continue
        for item in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(item, ast.ImportFrom):
                assert item.module != "atoll.peer.membership.node", name
            if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store):
                of = ast.unparse(item.value)
                assert of not in ("here", "self._here"), f"{name} writes {ast.unparse(item)}"
