"""Restarts under a new incarnation, and learners: slow, stalled, or of a donor that dies."""

from __future__ import annotations

import pytest
from harness.cluster import Cluster, Host, peer_id
from harness.faults import busy_with, lose

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.node import Node
from atoll.peer.membership.phase import Phase
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import Member, Rules


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("away_s", [0.0, 0.05, 2.0, 10.0], ids=lambda s: f"away{s:g}s")
@pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
def test_restart_before_and_after_the_failure_was_noticed(
    names: str, name: str, away_s: float
) -> None:
    cluster = Cluster(names)
    cluster.form(names)
    cluster.kill(name)
    if away_s:
        cluster.run(away_s)
    cluster.restart(name)
    assert cluster.until_round(names) < 5.0
    cluster.until(lambda: cluster.in_one_view(names), limit_s=1.0)
    view = cluster.host(name).node.view
    assert view is not None
    member = view.member(peer_id(name))
    assert member is not None
    assert member.inc == 2


@pytest.mark.parametrize("name", ["a", "b"])
def test_restart_of_which_no_broken_link_and_no_refusal_told(name: str) -> None:
    """The first that anybody sees is JOIN with a newer incarnation: proof enough of the death."""
    cluster = Cluster("ab")
    cluster.form("ab")
    other = "ab".replace(name, "")
    cluster.cut.add(frozenset((peer_id("a"), peer_id("b"))))
    cluster.kill(name)
    cluster.cut.clear()
    cluster.restart(name)
    assert cluster.until_round("ab") < 3.0
    assert "dead" in cluster.host(other).notes


@pytest.mark.parametrize("sees", [ms.Install, ms.Redirect])
def test_a_life_that_sees_a_newer_one_in_a_view_says_so_and_stays_out(sees: type) -> None:
    """Its home folder was copied; its shell ends it."""
    cluster = Cluster("ab")
    cluster.form("ab")
    older = cluster.host("b")
    cluster.kill("b")
    cluster.restart("b")
    cluster.until(lambda: cluster.in_one_view("ab"))
    view = cluster.host("a").node.view
    assert view is not None
    stranger = Node(Member(older.peer, 1, address="b:1"))
    told = stranger.handle(ev.Received(peer_id("a"), sees(view)), 1.0)
    assert [effect.kind for effect in told if isinstance(effect, ev.Note)] == ["conflict"]
    assert not any(isinstance(effect, ev.Connect) for effect in told)
    assert stranger.view is None
    told = older.node.handle(ev.Received(peer_id("a"), ms.Install(view)), cluster.now_s)
    assert "conflict" in [effect.kind for effect in told if isinstance(effect, ev.Note)]
    assert not any(isinstance(effect, ev.Renew) for effect in told)


def test_a_view_of_an_earlier_life_is_not_entered() -> None:
    """What that life has promised and held is lost: this one has to be taken in anew."""
    cluster = Cluster("ab")
    cluster.form("ab")
    view = cluster.host("a").node.view
    assert view is not None
    again = Node(Member(peer_id("b"), 2, address="b:1"))
    told = again.handle(ev.Received(peer_id("a"), ms.Install(view)), 1.0)
    assert again.view is None
    assert not any(isinstance(effect, ev.Installed) for effect in told)


def test_an_older_life_that_asks_to_join_is_shown_the_view() -> None:
    cluster = Cluster("ab")
    cluster.form("ab")
    cluster.kill("b")
    cluster.restart("b")
    cluster.until(lambda: cluster.in_one_view("ab"))
    node = cluster.host("a").node
    assert node.view is not None
    join = ms.Join(Member(peer_id("b"), 1, address="b:1"))
    told = node.handle(ev.Received(peer_id("b"), join), cluster.now_s)
    assert ev.Send(peer_id("b"), ms.Install(node.view, node.proof)) in told


def test_several_restarts_in_a_row() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    for name in "bacab":
        cluster.kill(name)
        cluster.restart(name)
        assert cluster.until_round("abc") < 5.0


def test_state_that_is_still_the_groups_is_not_loaded_again() -> None:
    """An excluded peer comes back as a new incarnation with its tensors."""
    cluster = Cluster("abc")
    cluster.form("abc")
    for host in cluster.living():
        cluster.detach(host.name)
    cluster.run(1.0)
    cluster.isolate("c")
    cluster.until(lambda: cluster.in_one_view("ab"), limit_s=15.0)
    cluster.heal()
    cluster.until(lambda: cluster.in_one_view("abc"))
    assert "excluded" in cluster.host("c").notes
    assert cluster.host("c").loads == 0


# ---------------------------------------------------------------- learners


def joining(cluster: Cluster, name: str) -> Host:
    host = cluster.add(name)
    host.trains = True
    for other in cluster.living():
        if other is not host:
            cluster.link(name, other.name)
    return host


def test_nobody_waits_for_a_learner() -> None:
    cluster = Cluster("ab")
    cluster.log_rounds = 10_000
    cluster.form("ab")
    cluster.load_s = 10.0  # one donor's time for all chunks: two donors
    usual_s = cluster.until_round("ab", 20)
    joining(cluster, "c")
    assert cluster.until_round("ab", 20) < 1.1 * usual_s
    assert not cluster.in_one_view("abc")
    before = cluster.committed
    took_s = cluster.until(lambda: cluster.in_one_view("abc"), limit_s=12.0)
    assert cluster.committed - before > 0.9 * 20 * took_s / usual_s


@pytest.mark.parametrize("donor", ["a", "b"])
def test_learner_whose_donor_dies_gets_another(donor: str) -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.load_s = 1.0
    host = joining(cluster, "d")
    cluster.until(lambda: host.loads == 1)
    goal = host.node.syncing._asked
    assert goal is not None
    assert {member.peer for member in goal.donors} == {peer_id(name) for name in "abc"}
    cluster.kill(donor)
    rest = "abcd".replace(donor, "")
    assert cluster.until_round(rest, 1, limit_s=15.0) < 10.0


def test_learner_that_dies_holds_the_boundary_no_longer_than_a_member() -> None:
    cluster = Cluster("ab")
    cluster.form("ab")
    cluster.stuck = lambda host, donor: True
    host = joining(cluster, "c")
    cluster.until(lambda: host.node.phase is Phase.LEARNER)
    cluster.kill("c")
    assert cluster.until_round("ab") < 2.0


def test_stalled_learner_is_dropped_and_comes_back_after_growing_pauses() -> None:
    cluster = Cluster("abc", Timing(joiner_stall_s=5.0))
    cluster.form("abc")
    for name in "abc":
        cluster.host(name).inner_s = 0.5
    cluster.stuck = lambda host, donor: host.name == "d"
    joining(cluster, "d")
    lead = cluster.host("a").node.coordinator
    assert lead is not None
    dropped = []
    for count in (1, 2, 3):
        cluster.until(lambda count=count: lead.admission._stalls.get(peer_id("d")) == count)
        dropped.append(cluster.now_s)
        cluster.until_round("abc", 1)  # training goes on meanwhile
    first, second = dropped[1] - dropped[0], dropped[2] - dropped[1]
    assert 6.0 < first < second - 0.5  # five seconds of patience, then a pause that doubles
    cluster.stuck = lambda host, donor: False
    cluster.until(lambda: cluster.in_one_view("abcd"))


def test_stalled_learner_is_given_another_donor_next_time() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.stuck = lambda host, donor: host.name == "d" and donor.name == "b"
    joining(cluster, "d")
    cluster.until(lambda: cluster.in_one_view("abcd"))
    assert "join" in cluster.host("a").notes


def test_member_that_fell_behind_loads_and_takes_part_again() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.cut.add(frozenset((peer_id("a"), peer_id("c"))))
    cluster.cut.add(frozenset((peer_id("b"), peer_id("c"))))
    cluster.until_round("ab")
    cluster.heal()
    assert cluster.until_round("abc") < 2.0
    assert cluster.host("c").loads >= 1


def test_the_quorum_may_need_a_laggard_while_a_round_is_under_way() -> None:
    """c is dead and b fell behind: b has to load the state during the attempt, or nobody moves."""
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.stuck = lambda host, donor: host.name == "b"
    own, view = cluster.host("b").node.follower, cluster.host("b").node.view
    assert view is not None
    cluster.until(lambda: not own.held)
    order = ms.Resync(view.lineage, view.number, own.round, own.digest)
    cluster.give("b", ev.Received(peer_id("a"), order))
    assert own.unsynced
    cluster.until_round("ac", 3)  # they wait for b's load for a while, then go on without it
    cluster.until(busy_with(cluster, "a"))
    cluster.kill("c")
    cluster.stuck = lambda host, donor: False
    assert cluster.until_round("ab") < 5.0


def test_no_way_back_into_a_view_that_was_lost() -> None:
    """An old INSTALL must not revive a voter that has forgotten its votes."""
    cluster = Cluster("abc")
    cluster.form("abc")
    host, old = cluster.host("c"), cluster.host("c").node.view
    assert old is not None
    cluster.hold_renewal = True
    cluster.isolate("c")
    cluster.until(lambda: cluster.in_one_view("ab"), limit_s=15.0)
    cluster.heal()
    cluster.until(lambda: host.node.view is None)
    cluster.give("c", ev.Received(peer_id("a"), ms.Install(old)))
    assert host.node.view is None


def test_an_excluded_peer_passes_on_the_decision_that_only_it_has_learnt() -> None:
    """a and b decide to go on without b; a dies before c has heard of it."""
    cluster = Cluster("abc")
    cluster.form("abc")
    for kind in (ms.Accept, ms.Accepted, ms.Install):
        lose(cluster, kind, to="c")
    before = cluster.host("c").node.view
    cluster.pause("b")
    lead = cluster.host("a").node.coordinator
    assert lead is not None
    cluster.until(lambda: lead.proposer is not None)
    cluster.resume("b")
    cluster.until(lambda: "excluded" in cluster.host("b").notes)
    cluster.kill("a")
    assert cluster.host("c").node.view == before
    cluster.heal()
    assert cluster.until_round("bc", limit_s=10.0) < 5.0


def test_who_is_back_as_a_new_incarnation_while_there_is_no_quorum_is_noted_once() -> None:
    """Each asks to come in, and beats, for as long as no view can be decided."""
    cluster = Cluster("abcd")
    cluster.rules = Rules("majority")
    cluster.form("abcd")
    cluster.pause("a")
    for name in "bcd":
        cluster.kill(name)
        cluster.restart(name)
    cluster.run(2.0)
    cluster.resume("a")
    cluster.run(30.0)
    assert 0 < cluster.host("a").notes.count("dead") <= 2 * len("bcd")
