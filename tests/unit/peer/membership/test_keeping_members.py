"""Elections keep everyone but those who are certainly gone or have been silent for long."""

from __future__ import annotations

import pytest
from harness.cluster import Cluster, peer_id

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.phase import Phase
from atoll.peer.membership.timing import Timing

REMOVE_S = Timing().remove_s


def formed(names: str) -> Cluster:
    cluster = Cluster(names)
    cluster.form(names)
    return cluster


def silence(cluster: Cluster, name: str) -> None:
    """Its machine loses power: nobody refuses anything."""
    cluster.host(name).off = True
    cluster.kill(name)


def lose_promises(cluster: Cluster, *names: str) -> None:
    late = {peer_id(name) for name in names}
    cluster.hold = lambda source, peer, message: source in late and isinstance(message, ms.Promise)


def test_who_answers_late_stays() -> None:
    """Half of the living answer only after the others are a quorum and have waited."""
    names = "abcdefghijk"
    cluster = formed(names)
    before = {host.peer: host.node.me.inc for host in cluster.living()}
    lose_promises(cluster, *"hijk")
    cluster.kill("a")
    cluster.until_round(names[1:], 2, limit_s=5.0)
    assert cluster.in_one_view(names[1:])
    assert not cluster.noted("excluded")
    assert {host.peer: host.node.me.inc for host in cluster.living()} == {
        peer: inc for peer, inc in before.items() if peer != peer_id("a")
    }


def test_a_coordinator_that_was_cut_off_for_a_moment_comes_back_as_a_member() -> None:
    cluster = formed("abcde")
    cluster.isolate("a")
    cluster.until_round("bcde", 3)
    cluster.heal()
    cluster.until_round("abcde", 1, limit_s=3.0)
    assert not cluster.noted("excluded")
    assert not cluster.host("a").leads


def test_no_round_waits_for_a_lost_coordinator_that_is_kept() -> None:
    cluster = formed("abcde")
    silence(cluster, "a")
    assert cluster.until_round("bcde", 1) < Timing().failure_s + 0.5
    assert cluster.in_one_view("abcde") or len(cluster.checker.latest.members) == 5
    assert cluster.until_round("bcde", 3) < 0.5
    took_s = cluster.until(lambda: cluster.in_one_view("bcde"), limit_s=2 * REMOVE_S)
    assert took_s < REMOVE_S


def test_others_that_died_with_it_hold_one_round_up_and_are_removed() -> None:
    cluster = formed("abcdefg")
    for name in "ag":
        silence(cluster, name)
    assert cluster.until_round("bcdef", 1) < 2 * Timing().failure_s + 0.5
    assert cluster.until_round("bcdef", 3) < 0.5
    cluster.until(lambda: cluster.in_one_view("bcdef"), limit_s=2 * REMOVE_S)


@pytest.mark.parametrize("linked", [True, False])
def test_silence_for_the_removal_time_counts_without_a_link(linked: bool) -> None:
    """All have stood for long, each alone; then b, c and d hear each other, and e never answers."""
    cluster = formed("abcde")
    for name in "bcde":
        cluster.isolate(name)
    silence(cluster, "a")
    cluster.until(lambda: all(cluster.host(n).node.phase is Phase.CANDIDATE for n in "bcde"))
    for name in "bcd" if not linked else "":
        cluster.give(name, ev.LinkDown(peer_id("e"), "no progress"))
    cluster.run(REMOVE_S + 3.0)
    before = cluster.checker.latest
    cluster.cut = {pair for pair in cluster.cut if peer_id("e") in pair}
    cluster.until(lambda: cluster.checker.latest != before, limit_s=5.0)
    view = cluster.checker.latest
    assert set(view.peers) == {peer_id(name) for name in ("bcde" if linked else "bcd")}


def test_who_does_not_answer_a_deaf_candidate_is_not_silent() -> None:
    """e alone does not hear the coordinator, so nobody answers it."""
    cluster = formed("abcde")
    cluster.one_way |= {(peer_id("a"), peer_id("e"))}
    cluster.run(REMOVE_S + 3.0)
    node = cluster.host("e").node
    assert node.phase is Phase.CANDIDATE
    assert node.election is not None
    assert node.election.silences_s().keys() == {peer_id("a")}


def test_who_is_back_as_a_new_incarnation_does_not_stay() -> None:
    """Nobody waits for a life that is over, even if its next one listens at the same address."""
    cluster = formed("abcde")
    cluster.pause("a")
    cluster.kill("e")
    cluster.restart("e")
    cluster.until(lambda: all(peer_id("e") in cluster.host(n).node.refused for n in "bcd"))
    cluster.hold = lambda source, peer, message: isinstance(message, ms.Join)
    for name in "bcd":
        cluster.give(name, ev.LinkUp(peer_id("e")))
    cluster.until(lambda: cluster.checker.latest.coordinator != peer_id("a"))
    assert cluster.checker.latest.peers == tuple(map(peer_id, "abcd"))


def test_a_member_that_has_moved_is_named_where_it_is() -> None:
    cluster = formed("abc")
    cluster.give("a", ev.LinkUp(peer_id("b"), "elsewhere:2"))

    def address_of_b() -> str:
        view = cluster.host("c").node.view
        member = view.member(peer_id("b")) if view is not None else None
        return member.address if member is not None else ""

    cluster.until(lambda: address_of_b() == "elsewhere:2")
