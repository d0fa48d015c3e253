"""Founding together and resuming together, on a virtual clock."""

from __future__ import annotations

from itertools import combinations

import pytest
from harness.cluster import LINEAGE, Cluster
from harness.world import peer_id

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.view import ARCHIVE, Rules

OLD = b"O" * 32
RULES = Rules("majority", "rollback", "halt")


def addresses(names: str) -> tuple[str, ...]:
    return tuple(f"{name}:1" for name in names)


def link_all(cluster: Cluster, names: str) -> None:
    for a, b in combinations(names, 2):
        cluster.link(a, b)


def voters(names: str, number: int = 3, lineage: bytes = OLD) -> ms.BootstrapConfig:
    ids = tuple(peer_id(name) for name in names)
    return ms.BootstrapConfig(voters=ids, lineage=lineage, number=number, rules=RULES)


def seconds(cluster: Cluster, elapsed_s: float) -> None:
    until_s = cluster.now_s + elapsed_s
    cluster.until(lambda: cluster.now_s >= until_s)


def restore(cluster: Cluster, name: str, number: int, chain: bytes) -> None:
    cluster.give(name, ev.Restored(number, chain, chain))


# ---------------------------------------------------------------- founding


@pytest.mark.parametrize("order", ["abc", "cab", "bca"])
def test_all_founders_are_in_the_first_view(order: str) -> None:
    cluster = Cluster("abc")
    named = ms.BootstrapConfig(founders=addresses("cba"), rules=RULES)
    for count, name in enumerate(order):
        cluster.give(name, named)
        for before in order[:count]:
            cluster.link(name, before)
        seconds(cluster, 5.0)
        if count < 2:
            assert all(cluster.host(n).node.view is None for n in "abc")
            here = f"{count + 1} of 3 founders are here"
            assert cluster.host(name).node.bootstrap.describe() == here
    assert cluster.in_one_view("abc")
    view = cluster.host("a").node.view
    assert view is not None
    assert (view.number, view.rules, len(view.ancestors)) == (1, RULES, 1)  # the cradle
    assert not any(cluster.host(n).node.bootstrap.waiting for n in "abc")


def test_a_call_that_is_lost_is_made_again_from_the_cradle() -> None:
    cluster = Cluster("abc")
    lost = {"count": 0}

    def hold(source: bytes, peer: bytes, message: object) -> bool:
        late = (
            isinstance(message, ms.BootstrapHello)
            and source == peer_id("b")
            and cluster.now_s < 3.0
        )
        lost["count"] += late
        return late

    cluster.hold = hold  # b hears the others and enters; they have not heard b
    for name in "abc":
        cluster.give(name, ms.BootstrapConfig(founders=addresses("abc")))
    link_all(cluster, "abc")
    cluster.until(lambda: cluster.in_one_view("abc"), 10.0)
    assert lost["count"] > 2


def test_who_is_not_named_does_not_count_and_joins_later() -> None:
    cluster = Cluster("abcd")
    for name in "abd":
        cluster.give(name, ms.BootstrapConfig(founders=addresses("abc")))
    link_all(cluster, "abd")
    seconds(cluster, 10.0)
    assert all(cluster.host(n).node.view is None for n in "abd")
    cluster.give("c", ms.BootstrapConfig(founders=addresses("abc")))
    for name in "abd":
        cluster.link("c", name)
    cluster.until(lambda: cluster.in_one_view("abcd"))


# ---------------------------------------------------------------- resuming


def test_a_majority_goes_on_from_the_highest_position_and_a_minority_waits() -> None:
    cluster = Cluster("abc")
    restore(cluster, "a", 5, b"5" * 32)
    restore(cluster, "b", 7, b"7" * 32)
    for name in "ab":
        cluster.give(name, voters("abc"))
    seconds(cluster, 60.0)
    waiting = cluster.host("a").node.bootstrap.describe()
    assert "1 of the 3 members of view 3 are here and 2 are needed" in waiting
    assert cluster.host("a").node.view is None
    cluster.link("a", "b")
    # The third one hears of them, and votes or joins, as it happens.
    cluster.until(lambda: cluster.in_one_view("ab") or cluster.in_one_view("abc"))
    view = cluster.host("a").node.view
    assert view is not None
    assert (view.base_round, view.base_chain) == (7, b"7" * 32)
    assert (view.ancestors[0], view.rules) == (OLD, RULES)
    assert view.lineage != OLD


def test_the_later_of_two_views_is_the_one_whose_voters_decide() -> None:
    cluster = Cluster("abcd")
    for name in "ac":
        restore(cluster, name, 5, b"5" * 32)
    restore(cluster, "d", 7, b"7" * 32)
    for name in "ac":
        cluster.give(name, voters("abc", number=3))
    cluster.give("d", voters("abcd", number=4))
    # a and c are a majority of what they know, but hear in time that d knows better.
    link_all(cluster, "acd")
    cluster.until(lambda: cluster.in_one_view("acd") or cluster.in_one_view("abcd"))
    view = cluster.host("a").node.view
    assert view is not None
    assert view.base_round == 7


def test_a_voter_without_a_checkpoint_votes_too() -> None:
    cluster = Cluster("abc")
    restore(cluster, "a", 5, b"5" * 32)
    cluster.give("a", voters("abc"))
    cluster.give("b", ev.Tick())
    cluster.link("a", "b")  # which only wants to join
    # c, which a's cradle names with no incarnation, has called before the promises were counted.
    cluster.until(lambda: cluster.in_one_view("abc"))
    view = cluster.host("b").node.view
    assert view is not None
    assert view.base_round == 5


def test_a_stranger_or_an_archive_does_not_vote() -> None:
    cluster = Cluster("a")
    cluster.add("f", ARCHIVE)
    cluster.add("x")
    cluster.give("a", voters("abf"))
    link_all(cluster, "afx")
    seconds(cluster, 10.0)
    assert all(cluster.host(n).node.view is None for n in "afx")
    assert not cluster.host("x").node.bootstrap.waiting
    assert not cluster.host("f").node.bootstrap.waiting


def test_whoever_finds_the_run_alive_joins_it() -> None:
    cluster = Cluster("abc")
    cluster.form("ab")
    cluster.give("c", voters("abc"))
    assert cluster.host("c").node.bootstrap.waiting
    cluster.link("c", "b")  # not the coordinator
    cluster.until(lambda: cluster.in_one_view("abc"))
    assert not cluster.host("c").node.bootstrap.waiting


def test_nobody_is_called_back_to_found_a_run_that_lives() -> None:
    """Else two that have not heard of it both called a third one back, as fast as they were told:
    a storm of messages (seed 81949)."""
    cluster = Cluster("abcd")
    cluster.form("ab")
    cluster.hold = lambda source, peer, message: isinstance(message, ms.Join)
    cluster.give("c", voters("cd"))
    cluster.link("c", "b")
    c = cluster.host("c").node
    cluster.until(lambda: not c.bootstrap.waiting)
    cluster.give("d", voters("cd"))
    cluster.link("c", "d")
    cluster.isolate("cd")
    seconds(cluster, c.timing.run_lost_s / 2)
    assert not c.bootstrap.waiting
    assert c.view is None
    cluster.until(lambda: cluster.in_one_view("cd"))  # the run is silent for long enough
    assert c.now_s > c.timing.run_lost_s


def test_a_cradle_that_others_have_outrun_is_left() -> None:
    """Two of four have founded the run; two others, in a cradle of their own, hear of it."""
    cluster = Cluster("abcde")
    cluster.kill("e")
    for name in "cd":
        cluster.give(name, voters("cde", number=9, lineage=b"C" * 32))

    def hold(source: bytes, peer: bytes, message: object) -> bool:
        return isinstance(message, ms.Promise)  # their election comes to nothing

    cluster.hold = hold
    cluster.link("c", "d")
    cluster.until(lambda: any(cluster.host(n).node.view is not None for n in "cd"))
    cluster.hold = lambda source, peer, message: (
        isinstance(message, ms.Promise) and (source in (peer_id("c"), peer_id("d")))
    )
    cluster.form("ab")
    for a in "ab":
        for b in "cd":
            cluster.link(a, b)
    cluster.until(lambda: cluster.in_one_view("abcd"))


def test_a_founder_that_hears_late_that_it_has_founded_the_run_stays_in() -> None:
    """It was told where the run is before it was told that it is in it, and left: then the only one
    that was in died, and all three waited for a run of which nobody was left (seed 486)."""
    cluster = Cluster("abc")
    named = ms.BootstrapConfig(founders=addresses("abc"), rules=RULES)
    for name in "abc":
        cluster.give(name, named)
    nodes = {name: cluster.host(name).node for name in "abc"}

    def leads() -> str:
        return "".join(name for name, node in nodes.items() if node.election and node.election.busy)

    cluster.hold = lambda source, peer, message: (
        isinstance(message, ms.Accepted | ms.Install) and peer == peer_id(leads()[:1])
    )
    link_all(cluster, "abc")
    cluster.until(lambda: any(node.view and node.view.number for node in nodes.values()))
    inside = next(name for name, node in nodes.items() if node.view and node.view.number)
    late = next(node for node in nodes.values() if node.view and not node.view.number)
    view = nodes[inside].view
    assert view is not None
    assert late.me in view.members
    redirect = ms.Redirect(view)
    cluster.deliver(cluster.hosts[late.me.peer], ev.Received(peer_id(inside), redirect))
    assert late.me in view.members
    cluster.kill(inside)
    cluster.hold = lambda source, peer, message: False
    cluster.until(lambda: late.view == view)


def test_a_cradle_is_no_run_to_send_joiners_to() -> None:
    """b waits in a cradle that nobody else will enter; c and e ask it, and are needed elsewhere."""
    cluster = Cluster("abcde")
    cluster.rules = RULES
    cluster.hold = lambda source, peer, message: (source, peer) == (peer_id("b"), peer_id("a"))
    restore(cluster, "a", 2, b"2" * 32)
    cluster.give("a", voters("ab", number=2))
    cluster.link("a", "b")
    cluster.until(lambda: cluster.host("b").node.view is not None)
    restore(cluster, "d", 3, b"3" * 32)
    cluster.give("d", voters("abcde", number=5))
    for joiner in "ce":
        cluster.link(joiner, "b")
    seconds(cluster, 1.0)
    link_all(cluster, "abcde")
    cluster.hold = lambda source, peer, message: False
    cluster.until(lambda: cluster.in_one_view("acde"))
    cluster.until(lambda: cluster.host("b").node.view is None)  # it has left its cradle, to join


def test_a_founder_that_has_forgotten_its_vote_makes_another_lineage() -> None:
    """b votes with a, is started again, and votes with c: two first views, of two lineages."""
    cluster = Cluster("abc")
    cluster.isolate("c")
    for name in "abc":
        cluster.give(name, voters("abc"))
        restore(cluster, name, 5, b"5" * 32)
    cluster.link("a", "b")
    cluster.until(lambda: cluster.in_one_view("ab"))
    first = cluster.host("a").node.view
    assert first is not None
    cluster.kill("b")
    cluster.cut.clear()
    cluster.isolate("a")
    cluster.restart("b")
    restore(cluster, "b", 5, b"5" * 32)
    cluster.give("b", voters("abc"))
    cluster.link("b", "c")
    cluster.until(lambda: cluster.in_one_view("bc"))
    second = cluster.host("b").node.view
    assert second is not None
    assert second.number == 1
    assert second.lineage != first.lineage


def test_where_a_founder_has_learnt_while_it_waited_is_history_too() -> None:
    """a and b are of a run that goes on from the same view as c and d would; it teaches c and dies
    before c is in."""
    cluster = Cluster("abcde")
    cluster.rules = RULES
    cluster.kill("e")
    cluster.form("ab")
    restore(cluster, "d", 1, b"1" * 32)
    for name in "cd":
        cluster.give(name, voters("cde"))
    cluster.hold = lambda source, peer, message: isinstance(message, ms.Install)
    cluster.link("c", "a")
    host = cluster.host("c")
    cluster.until(lambda: host.round >= 2)
    assert host.node.view is None
    for name in "ab":
        cluster.kill(name)
    cluster.hold = lambda source, peer, message: False
    cluster.link("c", "d")
    cluster.until(lambda: cluster.in_one_view("cd"))
    view = host.node.view
    assert view is not None
    assert view.base_round == host.round
    assert view.ancestors[:2] == (OLD, LINEAGE)


def test_whoever_a_first_view_excludes_founds_again_if_that_is_lost() -> None:
    """b dies when it has voted, and comes back; the first view names its former life (seed 17177).
    Then a dies, the only one in that view, and comes back with nothing."""
    cluster = Cluster("ab")
    a, b = cluster.host("a"), cluster.host("b")

    def hold(source: bytes, peer: bytes, message: object) -> bool:
        return isinstance(message, ms.Accept) and peer == b.peer

    cluster.hold = hold
    cluster.give("a", voters("ab"))
    cluster.give("b", voters("ab"))
    restore(cluster, "b", 5, b"5" * 32)
    cluster.link("a", "b")
    cluster.until(lambda: a.node.election is not None and bool(a.node.election.acceptor.accepted))
    cluster.kill("b")
    cluster.hold = lambda source, peer, message: False
    cluster.restart("b")
    restore(cluster, "b", 5, b"5" * 32)
    cluster.give("b", voters("ab"))
    cluster.link("a", "b")
    cluster.until(lambda: bool(cluster.noted("excluded")), 20.0)
    cluster.kill("a")
    cluster.restart("a")
    cluster.link("a", "b")
    cluster.until(lambda: cluster.in_one_view("ab"), 60.0)
    view = a.node.view
    assert view is not None
    assert view.base_round == 5
