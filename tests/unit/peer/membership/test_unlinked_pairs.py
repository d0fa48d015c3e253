"""Runs in which some pairs of members have no link: who can only dial out trains all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.cluster import Cluster, peer_id
from harness.faults import begins_of, busy_with

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.link_graph import BROKEN_MIN_S
from atoll.peer.membership.operations import Operation
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import REPLICA, WITNESS, short
from atoll.peer.membership.witness_owners import Work


def running(names: str, outbound: str = "", *pairs: str, timing: Timing | None = None) -> Cluster:
    """A run of these, of whom some can only dial out, and some pairs have no common protocol."""
    cluster = Cluster("", timing)
    cluster.outbound |= {*outbound}
    cluster.unlinkable |= {frozenset(map(peer_id, pair)) for pair in pairs}
    for name in names:
        cluster.add(name)
    cluster.form(names)
    return cluster


def owners(begin: ms.Begin) -> str:
    if begin.helpers:
        return "".join(peer[:1].decode() for peer in begin.helpers)
    shares = begin.layout.shares if begin.layout is not None else (1,) * len(begin.participants)
    pairs = zip(begin.participants, shares, strict=True)
    return "".join(peer[:1].decode() for peer, share in pairs if share)


def participants(begin: ms.Begin) -> str:
    return "".join(peer[:1].decode() for peer in begin.participants)


def settle(cluster: Cluster) -> list[ms.Begin]:
    """Run until the links are known, and some rounds more."""
    cluster.run(cluster.timing.linking_s + 1.0)
    begins = begins_of(cluster)
    cluster.until_round("".join(host.name for host in cluster.living()), 3)
    return begins


def outbound(cluster: Cluster, name: str) -> str:
    view = cluster.host(name).node.view
    assert view is not None
    return "".join(peer[:1].decode() for peer in view.outbound)


def test_the_view_says_who_can_only_dial_out() -> None:
    cluster = running("abcd", "cd")
    cluster.until(lambda: {outbound(cluster, name) for name in "abcd"} == {"cd"}, 20.0)
    views = cluster.host("a").node.view
    cluster.run(30.0)
    assert cluster.host("a").node.view == views  # that it is known makes no further ones
    cluster.give("d", ev.Reach(outbound=False))  # a port has been opened
    cluster.until(lambda: {outbound(cluster, name) for name in "abcd"} == {"c"}, 20.0)
    cluster.kill("a")  # elections keep it
    cluster.until(lambda: cluster.in_one_view("bcd"), 30.0)
    assert {outbound(cluster, name) for name in "bcd"} == {"c"}
    cluster.kill("c")
    cluster.until(lambda: cluster.in_one_view("bd"), 30.0)
    assert {outbound(cluster, name) for name in "bd"} == {""}


def test_one_outbound_of_four_is_an_owner_like_others() -> None:
    cluster = running("abcd", "d")
    begins = settle(cluster)
    assert {(participants(b), owners(b)) for b in begins} == {("abcd", "abcd")}
    assert not cluster.noted("links")


def test_two_outbound_of_four_own_nothing_and_exchange_nothing() -> None:
    cluster = running("abcd", "cd")
    begins = settle(cluster)
    assert {(participants(b), owners(b)) for b in begins} == {("abcd", "ab")}
    a, b, c, d = (short(peer_id(name)) for name in "abcd")
    said = f"butterfly; {c} and {d} have no link to each other: {a} and {b} own it"
    assert {begin.layout.why for begin in begins if begin.layout is not None} == {said}
    assert not cluster.noted("miss")
    assert not cluster.noted("retry")
    assert cluster.noted("links") == ["a"]


def test_three_outbound_and_one_reachable() -> None:
    cluster = running("abcd", "bcd")
    begins = settle(cluster)
    assert {(participants(b), owners(b)) for b in begins} == {("abcd", "a")}


def test_ipv4_only_and_ipv6_only_in_one_run() -> None:
    cluster = running("abcd", "", "bc")
    begins = settle(cluster)
    assert {(participants(b), owners(b)) for b in begins} == {("abcd", "ad")}


def test_a_reduction_of_the_trainers_own_goes_the_same_ways() -> None:
    cluster = running("abcd", "cd")
    cluster.run(cluster.timing.linking_s + 1.0)
    begins = begins_of(cluster)
    cluster.call_of = lambda host: Operation(ms.REDUCE, 1000, "sum", "float32")
    cluster.until_round("abcd", 3)
    reduced = [b for b in begins if b.kind == ms.REDUCE]
    assert {(participants(b), owners(b)) for b in reduced} == {("abcd", "ab")}


def test_objects_are_gathered_from_all() -> None:
    cluster = running("abcd", "bcd")
    cluster.run(cluster.timing.linking_s + 1.0)
    begins = begins_of(cluster)
    cluster.call_of = lambda host: Operation(ms.GATHER)
    cluster.until_round("abcd", 3)
    assert {participants(b) for b in begins if b.kind == ms.GATHER} == {"abcd"}


def test_an_owner_dies_and_the_retry_keeps_what_all_can_copy() -> None:
    cluster = running("abcde", "cde")
    settle(cluster)
    cluster.chunk_s = 0.2
    cluster.until(busy_with(cluster, "b"))
    cluster.run(0.3)
    begins = begins_of(cluster)
    cluster.kill("b")
    cluster.until_round("acde", 2)
    assert owners(begins[0]) == "a"
    assert begins[0].kept
    assert not cluster.noted("give-up")


def test_who_has_no_owner_in_reach_is_left_out_and_told_why() -> None:
    """Without a's trainer nobody who trains has a link to another one."""
    cluster = running("abc", "bc")
    settle(cluster)
    cluster.detach("a")
    cluster.until(lambda: bool(cluster.host("b").node.heartbeats.left_out))
    begins = begins_of(cluster)
    cluster.until_round("abc", 3)
    assert {participants(b) for b in begins} == {"b"}
    assert {b.without for b in begins} == {(peer_id("c"),)}
    b, c = short(peer_id("b")), short(peer_id("c"))
    said = cluster.host("c").node.heartbeats.left_out
    assert said.startswith(
        f"{c} cannot take part: it takes a peer linked to all, and {b} and {c} have no link to"
        " each other; open a port at one of them"
    )
    assert cluster.noted("links") == ["a", "a"], "the pair, and who is left out"
    cluster.train("a")
    cluster.until_round("abc", 3)
    assert not cluster.host("c").node.heartbeats.left_out
    assert participants(begins[-1]) == "abc"


def test_too_few_with_links_hold_the_round() -> None:
    cluster = running("abc", "bc")
    cluster.give("a", ev.TrainersAsked(2))
    cluster.run(cluster.timing.linking_s)
    cluster.until_round("abc", 1)
    cluster.detach("a")
    cluster.until(lambda: bool(cluster.host("c").node.heartbeats.held))
    before = cluster.committed
    cluster.run(3.0)
    assert cluster.committed == before
    assert "it takes a peer linked to all" in cluster.host("c").node.heartbeats.held
    assert not cluster.noted("rejected")


def test_an_audited_round_is_of_those_who_are_all_linked() -> None:
    """Statements and opened parts go from anybody to anybody."""
    cluster = Cluster("")
    cluster.outbound |= {*"cd"}
    terms = ms.Terms(audited=True)
    for name in "abcd":
        cluster.add(name)
        cluster.give(name, ev.Configured("spec", 1, 1, terms))
    cluster.form("abcd")
    begins = settle(cluster)
    assert {participants(b) for b in begins} == {"abc"}
    assert "links between all in an audited round" in cluster.host("d").node.heartbeats.left_out


# ---------------------------------------------------------------- who coordinates


def lead_of(cluster: Cluster) -> str:
    return "".join(host.name for host in cluster.living() if host.leads)


def test_an_outbound_coordinator_hands_over_after_a_while() -> None:
    cluster = running("abcd", "d", timing=replace(Timing(), better_s=6.0))
    cluster.give("a", ev.HandOver(peer_id("d")))
    cluster.until(lambda: lead_of(cluster) == "d")
    cluster.run(0.9 * cluster.timing.better_s)
    assert lead_of(cluster) == "d", "a change costs a view"
    cluster.until(lambda: lead_of(cluster) in ("a", "b", "c"), 10.0)
    cluster.until_round("abcd", 3)
    view = cluster.host("a").node.view
    cluster.run(2 * cluster.timing.better_s)
    assert cluster.host("a").node.view == view, "and stays there"


def test_who_can_be_dialled_stands_before_who_cannot() -> None:
    cluster = running("abcd", "b")
    cluster.kill("a")
    cluster.until(lambda: lead_of(cluster) == "c")
    cluster.until_round("bcd", 2)


def test_an_outbound_peer_coordinates_where_nobody_else_can() -> None:
    """It is a rank and no veto: c sleeps, so b stands, which reaches it."""
    cluster = running("abc", "b")
    cluster.pause("c")
    cluster.kill("a")
    cluster.run(1.5)
    cluster.resume("c")
    cluster.until_round("bc", 2)


def test_a_member_without_a_link_to_its_coordinator_is_not_voted_out() -> None:
    """b has a link to it and takes over."""
    cluster = running("abcd", "", "cd")
    cluster.give("a", ev.HandOver(peer_id("c")))
    cluster.until(lambda: lead_of(cluster) == "c")
    cluster.run(1.1 * cluster.timing.remove_s)
    assert lead_of(cluster) == "c"
    cluster.until(lambda: lead_of(cluster) in ("a", "b"))
    cluster.until_round("abcd", 3)
    assert cluster.host("d").node.me.inc == 1, "it was never out"


def test_who_is_dead_is_voted_out_as_ever() -> None:
    cluster = running("abcd", "cd")
    cluster.give("a", ev.HandOver(peer_id("c")))
    cluster.until(lambda: lead_of(cluster) == "c")
    cluster.kill("b")
    cluster.until(lambda: cluster.in_one_view("acd"), 100.0)


def test_a_new_view_reaches_those_who_did_not_hear_the_votes() -> None:
    """c and d hear of a decided view from its coordinator, with its proof."""
    cluster = running("abcd", "cd")
    settle(cluster)
    cluster.kill("a")
    cluster.until(lambda: lead_of(cluster) == "b")
    cluster.until_round("bcd", 3)
    assert not cluster.noted("unproven")
    assert not cluster.noted("excluded")


def test_a_long_election_throws_nobody_out_for_want_of_a_link() -> None:
    """c has not heard of d for long, but never had a link to it."""
    cluster = running("abcde", "cd")
    settle(cluster)
    for name in "abe":
        cluster.pause(name)
    cluster.run(2 * cluster.timing.remove_s)
    cluster.resume("e")
    cluster.run(1.0)
    cluster.resume("b")
    cluster.until_round("bcde", 3, 90.0)
    assert cluster.host("d").node.me.inc == cluster.host("c").node.me.inc == 1


def test_without_its_only_reachable_member_a_run_waits() -> None:
    """No coordinator has links to a quorum; it goes on when that member is heard again."""
    cluster = running("abcd", "bcd")
    settle(cluster)
    cluster.pause("a")
    cluster.run(20.0)
    before = cluster.committed
    assert {*"bcd"} <= {*cluster.noted("no-quorum")}
    cluster.resume("a")
    cluster.until_round("abcd", 3)
    assert cluster.committed > before


def test_who_has_links_to_too_few_asks_nobody() -> None:
    """b and c would only keep d from standing, which alone has links to a quorum."""
    cluster = running("abcde", "bc")
    settle(cluster)
    cluster.pause("d")
    cluster.kill("a")
    cluster.kill("e")
    before = len(cluster.trace)
    cluster.run(10.0)
    assert not [line for line in cluster.trace[before:] if " Prepare" in line]
    assert {*"bc"} <= {*cluster.noted("no-quorum")}
    cluster.resume("d")
    cluster.until(lambda: lead_of(cluster) == "d", 5.0)
    cluster.until_round("bcd", 3)


def test_a_coordinator_that_loses_its_quorum_makes_room_for_one_that_has_one() -> None:
    """b hears c alone, and says so; c hears all, and does not stand by b."""
    cluster = running("abcd", "", "ad")
    assert lead_of(cluster) == "b", "it took over to let d in"
    cluster.run(5.0)
    for other in "ad":
        cluster.unlinkable.add(frozenset((peer_id("b"), peer_id(other))))
        cluster.give("b", ev.LinkDown(peer_id(other), "reset"))
        cluster.give(other, ev.LinkDown(peer_id("b"), "reset"))
    cluster.until(lambda: lead_of(cluster) in ("a", "c", "d"), 5.0)
    cluster.until_round("ac", 3)
    cluster.until_round("acd", 3)
    assert cluster.host("d").node.me.inc == 1, "a has no link to it, but c had: it stayed"


def test_who_has_no_link_to_the_coordinator_can_join() -> None:
    """d has IPv6 alone and a IPv4 alone; b has both, and takes over when d goes on asking it."""
    cluster = running("abc", "", "ad")
    cluster.add("d")
    for name in "bc":
        cluster.link(name, "d")
    cluster.train("d")
    cluster.until(lambda: cluster.in_one_view("abcd"), 3 * cluster.timing.cut_off_s)
    last = settle(cluster)[-1]
    assert (participants(last), owners(last)) == ("abcd", "bc")
    view = cluster.host("a").node.view
    cluster.run(3 * cluster.timing.cut_off_s)
    assert cluster.host("a").node.view == view


def test_a_joiner_that_was_dropped_here_and_has_no_way_any_more_is_a_caller() -> None:
    """d was a joiner of a, downloaded nothing, and lost its link: it is not known here for ever."""
    timing = replace(Timing(), cut_off_s=3.0, joiner_stall_s=1.5)
    cluster = running("abc", "", timing=timing)
    cluster.run(timing.cut_off_s)
    cluster.stuck = lambda host, donor: host.name == "d"
    cluster.add("d")
    for member in "abc":
        cluster.link(member, "d")
    dropped = cluster.host("a").notes.count("join")
    cluster.until(lambda: cluster.host("a").notes.count("join") > dropped + 1, 10.0)
    cluster.unlinkable.add(frozenset(map(peer_id, "ad")))
    for one, other in ("ad", "da"):
        cluster.give(one, ev.LinkDown(peer_id(other), "reset"))
    cluster.stuck = lambda host, donor: False
    cluster.until(lambda: cluster.in_one_view("abcd"), 10 * timing.cut_off_s)
    assert lead_of(cluster) in "bc"


def test_calls_elsewhere_move_a_new_coordinator_after_a_while_only() -> None:
    """d can reach one member at a time and calls there: the view must not follow it about."""
    timing = replace(Timing(), cut_off_s=3.0, callers_s=12.0)
    cluster = running("abc", "", "ad", timing=timing)
    cluster.run(timing.callers_s)
    cluster.add("d")
    cluster.unlinkable.add(frozenset(map(peer_id, "cd")))
    cluster.link("b", "d")
    cluster.until(lambda: lead_of(cluster) == "b", 3 * timing.cut_off_s)
    began_s = cluster.now_s
    cluster.unlinkable -= {frozenset(map(peer_id, "cd"))}
    cluster.unlinkable.add(frozenset(map(peer_id, "bd")))
    for one, other in ("bd", "db"):
        cluster.give(one, ev.LinkDown(peer_id(other), "reset"))
    cluster.link("c", "d")
    cluster.until(lambda: lead_of(cluster) == "c", 10 * timing.cut_off_s)
    assert cluster.now_s - began_s >= timing.callers_s


def test_a_member_that_others_claim_to_reach_is_spared_for_a_while_only() -> None:
    """Nobody takes over from a within that time, though the others say that they reach d."""
    timing = replace(Timing(), cut_off_s=1000.0, spare_s=20.0)
    cluster = running("abcd", timing=timing)
    cluster.unlinkable.add(frozenset(map(peer_id, "ad")))
    for one, other in ("ad", "da"):
        cluster.give(one, ev.LinkDown(peer_id(other), "reset"))
    cluster.run(2 * timing.remove_s)
    assert cluster.in_one_view("abcd")
    cluster.until(lambda: cluster.in_one_view("abc"), timing.spare_s)


def test_who_asks_nobody_for_its_vote_hears_of_later_views() -> None:
    """b has a link to d alone, and the view changes without it."""
    patient = replace(Timing(), better_s=1000.0, cut_off_s=1000.0)
    cluster = running("abcde", timing=patient)
    for other in "ace":
        cluster.unlinkable.add(frozenset((peer_id("b"), peer_id(other))))
        cluster.give("b", ev.LinkDown(peer_id(other), "reset"))
        cluster.give(other, ev.LinkDown(peer_id("b"), "reset"))
    cluster.run(5.0)
    cluster.kill("e")
    cluster.until(lambda: cluster.in_one_view("abcd"), 20.0)


def test_from_the_second_stall_on_the_coordinator_owns_all() -> None:
    """Where one owns at a time, each stall finds the paths of one; all can be heard by it."""
    cluster = running("abcde")
    lead = cluster.host("a").node.coordinator
    assert lead is not None
    begins = begins_of(cluster)
    for pair, own in (("bd", "ace"), ("ce", "a"), ("cd", "a")):
        lead.roster.break_paths([(peer_id(pair[0]), peer_id(pair[1]))], cluster.now_s)
        cluster.until_round("abcde")
        cluster.until_round("abcde")
        assert owners(begins[-1]) == own
    cluster.run(BROKEN_MIN_S)
    cluster.until_round("abcde")
    assert owners(begins[-1]) == "abcde"


# ---------------------------------------------------------------- links through relays


def through_relays(
    names: str,
    outbound: str,
    relays: dict[str, bool],
    terms: ms.Terms | None = None,
    witnesses: str = "",
    *,
    forms: bool = True,
) -> Cluster:
    """A run in which some carry the control links of those who can only dial out, or data too."""
    cluster = Cluster("")
    cluster.outbound |= {*outbound}
    cluster.relays |= relays
    for name in names:
        cluster.add(name, WITNESS if name in witnesses else REPLICA)
        if terms is not None and name not in witnesses:
            cluster.give(name, ev.Configured("spec", 1, 1, terms))
    if forms:
        cluster.form(names)
    return cluster


def test_a_relayed_control_link_is_no_way_for_data() -> None:
    """c and d hear each other, and own nothing all the same: no relay carries data."""
    cluster = through_relays("abcd", "cd", {"a": False, "b": False})
    begins = settle(cluster)
    assert {(participants(b), owners(b)) for b in begins} == {("abcd", "ab")}
    assert peer_id("d") in cluster.host("c").node.linked
    assert not cluster.noted("miss")
    assert not cluster.noted("retry")
    c, d = short(peer_id("c")), short(peer_id("d"))
    reasons = {begin.layout.why for begin in begins if begin.layout is not None}
    assert any(f"{c} and {d} have no way for data to each other" in why for why in reasons)


def test_who_is_relayed_owns_where_nobody_has_direct_links_to_all() -> None:
    """While a trains it owns all; without it b and c reach each other through the relay alone."""
    cluster = through_relays("abc", "bc", {"a": True})
    begins = settle(cluster)
    assert {(participants(b), owners(b)) for b in begins} == {("abc", "a")}
    cluster.detach("a")
    begins = begins_of(cluster)
    cluster.until_round("abc", 6)
    assert (participants(begins[-1]), owners(begins[-1])) == ("bc", "bc")
    assert not cluster.noted("miss")


def test_a_relay_dies_and_those_behind_it_have_no_link_any_more() -> None:
    cluster = through_relays("abcde", "de", {"a": True, "b": True})
    assert peer_id("e") in cluster.host("d").node.linked
    cluster.kill("a")
    cluster.until_round("bcde", 2)
    assert peer_id("e") in cluster.host("d").node.linked, "b carries it"
    cluster.kill("b")
    cluster.until_round("cde", 2)
    assert peer_id("e") not in cluster.host("d").node.linked
    cluster.restart("b")
    cluster.until_round("bcde", 2)
    assert peer_id("e") in cluster.host("d").node.linked


def test_an_audited_round_needs_control_links_between_all_and_no_more() -> None:
    """Statements go through a relay; parts go to owners that have direct links to all."""
    cluster = through_relays("abcd", "cd", {"a": False}, ms.Terms(audited=True))
    begins = settle(cluster)
    assert {(participants(b), owners(b)) for b in begins} == {("abcd", "ab")}
    assert not cluster.host("d").node.heartbeats.left_out


def test_an_election_goes_on_over_relayed_links_where_most_can_only_dial_out() -> None:
    """The coordinator dies: c and d hear each other through b, and one of three is elected."""
    cluster = through_relays("abcde", "cde", {"a": False, "b": False})
    settle(cluster)
    assert lead_of(cluster) == "a"
    cluster.kill("a")
    took_s = cluster.until(lambda: lead_of(cluster) == "b", 3.0)
    assert took_s < 3.0
    cluster.until_round("bcde", 2)


def test_a_coordinator_that_can_only_dial_out_needs_relayed_links_to_a_quorum() -> None:
    """b sleeps; c may stand, as a relay that has no vote carries its links."""
    cluster = Cluster("")
    cluster.outbound |= {*"bcd"}
    cluster.relays |= {"a": False, "x": False}
    for name in "abcd":
        cluster.add(name)
    cluster.add("x", "archive")
    cluster.form("abcd")
    cluster.run(cluster.timing.linking_s + 1.0)
    cluster.kill("a")
    cluster.until(lambda: lead_of(cluster) in (*"bcd",), 5.0)
    cluster.until(lambda: cluster.in_one_view("bcd"), 30.0)


# ---------------------------------------------------------------- a witness that owns

AVERAGED = ms.Terms(work=Work((4096,), 4096, "int8"))


def test_a_witness_owns_what_two_outbound_trainers_reduce() -> None:
    """No relay carries data: parts and results go through the witness all the same."""
    cluster = through_relays("abc", "bc", {"a": False}, AVERAGED, witnesses="a")
    begins = settle(cluster)
    assert {(participants(b), owners(b)) for b in begins} == {("bc", "a")}
    works = {(b.owners.elements, b.owners.codec) for b in begins if b.owners is not None}
    assert works == {(4096, "int8")}
    assert not cluster.noted("retry")
    assert not cluster.host("c").node.heartbeats.left_out
    b, c = short(peer_id("b")), short(peer_id("c"))
    why = {b.owners.why for b in begins if b.owners is not None}
    assert why == {
        f"witness {short(peer_id('a'))} owns the result, and adds nothing to it:"
        f" {b} and {c} have no way for data to each other"
    }
    assert cluster.host("a").round == 0 or not cluster.host("a").jobs


def test_two_go_through_a_relay_and_three_let_the_witness_own() -> None:
    """A relay carries 2 (n - 1) vectors each way, who owns n."""
    cluster = through_relays("abc", "bc", {"a": True}, AVERAGED, witnesses="a")
    assert {(participants(b), owners(b)) for b in settle(cluster)} == {("bc", "bc")}
    cluster = through_relays("abcd", "bcd", {"a": True}, AVERAGED, witnesses="a")
    assert {(participants(b), owners(b)) for b in settle(cluster)} == {("bcd", "a")}


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        (replace(AVERAGED, audited=True), "an audited run trusts no owner"),
        (replace(AVERAGED, rule="trimmed(f=1)"), "trimmed(f=1) is to bear liars"),
        (replace(AVERAGED, probation=2), "who is on probation owns nothing"),
        (replace(AVERAGED, work=None), "its parts are more than averaged"),
    ],
)
def test_a_witness_owns_nothing_where_owners_are_not_trusted(terms: ms.Terms, why: str) -> None:
    """Nobody stops for that: one goes on alone, and it is said why the other does not."""
    cluster = through_relays("abc", "bc", {"a": False}, terms, witnesses="a", forms=False)
    begins = begins_of(cluster)
    cluster.found("a")
    for one, other in ("ab", "ac", "bc"):
        cluster.link(one, other)
    cluster.until(lambda: cluster.in_one_view("abc"))
    for name in "bc":
        cluster.train(name)
    cluster.until(lambda: why in cluster.host("c").node.heartbeats.left_out)
    cluster.until(lambda: max(cluster.host(name).round for name in "bc") >= 4)
    assert {owners(b) for b in begins if b.kind == ms.STEP} <= {"b", "c"}
    assert not cluster.noted("rejected")


def test_a_witness_that_owns_dies_and_another_one_does() -> None:
    cluster = through_relays("avbcd", "bcd", {"a": False, "v": False}, AVERAGED, witnesses="av")
    begins = settle(cluster)
    (owner,) = {owners(b) for b in begins}
    cluster.chunk_s = 0.2
    cluster.until(
        lambda: any(job.begin.kind == ms.STEP for job in cluster.host(owner).jobs.values())
    )
    cluster.run(0.1)
    begins = begins_of(cluster)
    cluster.kill(owner)
    cluster.until_round("bcd", 3)
    assert {(participants(b), owners(b)) for b in begins} == {("bcd", "av".replace(owner, ""))}


def test_a_witness_that_no_data_reach_is_owner_no_more() -> None:
    """Its links stand, and data do not pass: the trainers stay, and wait for another way."""
    cluster = through_relays("avbc", "bc", {"a": False, "v": False}, AVERAGED, witnesses="av")
    begins = settle(cluster)
    (owner,) = {owners(b) for b in begins}
    cluster.data_cut |= {frozenset(map(peer_id, (owner, name))) for name in "bc"}
    begins = begins_of(cluster)
    cluster.until_round("bc", 3)
    assert participants(begins[-1]) == "bc"
    assert owners(begins[-1]) == "av".replace(owner, "")


def test_the_path_is_to_blame_where_a_relay_carries_it() -> None:
    """b and c stay: a relayed pair on which nothing moves is apart for a while."""
    cluster = through_relays("abcd", "bc", {"a": True}, witnesses="a")
    settle(cluster)
    cluster.detach("d")
    cluster.until_round("bc", 2)
    cluster.data_cut.add(frozenset(map(peer_id, "bc")))
    begins = begins_of(cluster)
    cluster.train("d")
    cluster.until_round("bcd", 2)
    assert (participants(begins[-1]), owners(begins[-1])) == ("bcd", "d")


def test_the_first_parameters_get_to_who_turns_out_to_have_no_link() -> None:
    """INIT begins before it is known that b and c have none: a witness hands them on then."""
    cluster = through_relays("abc", "", {}, AVERAGED, witnesses="a", forms=False)
    cluster.unlinkable.add(frozenset(map(peer_id, "bc")))
    begins = begins_of(cluster)
    cluster.found("a")
    for one, other in ("ab", "ac"):
        cluster.link(one, other)
    for name in "bc":
        cluster.train(name)
    cluster.until(lambda: all(cluster.host(name).round >= 3 for name in "bc"), 10.0)
    assert {participants(b) for b in begins} == {"bc"}
    assert owners(begins[-1]) == "a"
