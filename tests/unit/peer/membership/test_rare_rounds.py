"""Rounds with rare participants, owners, weights and retries, and the first round of a run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from harness.cluster import Cluster, Host, peer_id
from harness.faults import begins_of, busy_with, lose
from harness.values import giver_of

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.coordinator import Coordinator
from atoll.peer.membership.layout import SITES, Advised, Layout
from atoll.peer.membership.operations import Operation, unpack_objects
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import REPLICA, WITNESS, Rules
from atoll.peer.membership.witness_owners import Work
from atoll.peer.rounds.entries import GATHER

GATHERS = Operation(GATHER)
AVERAGED = ms.Terms(work=Work((1_000,), 250, "float32"))


def lead_of(cluster: Cluster, name: str = "a") -> Coordinator:
    lead = cluster.host(name).node.coordinator
    assert lead is not None
    return lead


def void(names: str) -> Cluster:
    """Return a run that these have founded and nobody has begun to train."""
    cluster = Cluster(names)
    link_all(cluster, names)
    return cluster


def link_all(cluster: Cluster, names: str) -> None:
    cluster.found(names[0])
    for i, name in enumerate(names):
        for other in names[:i]:
            cluster.link(name, other)
    cluster.until(lambda: cluster.in_one_view(names))


def participants(begin: ms.Begin) -> str:
    return "".join(peer[:1].decode() for peer in begin.participants)


# ---------------------------------------------------------------- weights and terms


def test_trainers_that_all_count_nothing_count_alike() -> None:
    """A mean of nothing would divide by 0: what they did is taken for equally much."""
    cluster = Cluster("abc")
    cluster.form("abc")
    for name in "abc":
        cluster.host(name).weight = 0.0
    cluster.until_round("abc", 2)  # a submission may have waited before
    begins = begins_of(cluster)
    cluster.until_round("abc", 3)
    assert begins
    assert {weight for begin in begins for weight in begin.weights} == {1.0}


def test_a_coordinator_without_a_specification_takes_the_terms_of_those_that_have_one() -> None:
    """It counts trainers as the others do, before it has a state of its own."""
    cluster = void("abc")
    cluster.checker.min_trainers = 2
    terms = ms.Terms(min_trainers=2)
    cluster.give("b", ev.Configured("spec", 1, 1, terms))
    cluster.until(lambda: cluster.host("a").node.follower.terms == terms, limit_s=5.0)
    assert cluster.host("c").node.follower.terms is None
    for name in "abc":
        cluster.train(name)
    cluster.until_round("abc", 2)
    for name in "bc":
        cluster.detach(name)
    cluster.until(lambda: "min_trainers is 2" in cluster.host("a").node.heartbeats.held)


# ---------------------------------------------------------------- the barrier


def test_who_was_late_while_nobody_knew_how_long_a_phase_takes_is_in_again() -> None:
    """A run of nothing but calls has no phases: nothing is learnt of how long it was away."""
    cluster = Cluster("abc")
    cluster.call_of = lambda host: GATHERS
    cluster.form("abc")
    cluster.host("c").hangs = True
    cluster.until(lambda: bool(cluster.noted("stragglers")))
    cluster.until_round("ab", 3)
    begins = begins_of(cluster)
    cluster.host("c").hangs = False
    cluster.until_round("abc", 4)
    assert participants(begins[-1]) == "abc"
    assert not lead_of(cluster).barrier._phases.lasted_s


def test_a_round_that_was_ended_by_a_rival_is_waited_for_anew() -> None:
    """Two are in flight, and somebody waits in the second when all stop for another lineage.

    When the first is begun again nobody counts as late in it because of that wait.
    """
    cluster = Cluster("abc")
    cluster.rules = Rules(on_fork="halt")
    cluster.fragments, cluster.chunks = 4, 8
    for name in "abc":
        cluster.give(name, ev.Configured("spec", 4, 2))
    cluster.form("abc", 6)
    cluster.host("c").inner_s = 2.0
    lead = lead_of(cluster)

    def waits_in_the_second() -> bool:
        first = cluster.committed + 1
        barrier = lead.barrier
        return bool(
            list(lead.attempts) == [first]
            and barrier._first_arrival_s is not None
            and barrier._waits_for == first + 1
        )

    cluster.chunk_s = 0.2
    cluster.until(waits_in_the_second)
    stranger = cluster.add("s").node.me
    view = cluster.host("a").node.view
    assert view is not None
    meet = ms.Meet(b"M" * 32, 1, stranger)
    cluster.kill("s")
    cluster.give("a", ev.LinkUp(stranger.peer))
    cluster.give("a", ev.Received(stranger.peer, meet))
    cluster.until(lambda: bool(lead.halted))
    assert not lead.attempts
    assert cluster.until_round("abc", 4, limit_s=60.0) > 20.0
    assert not cluster.noted("stragglers")


# ---------------------------------------------------------------- the first round


def test_a_run_is_begun_by_another_when_the_first_dies_in_the_middle_of_an_attempt() -> None:
    """c dies first, and b, whose parameters all were to have, while the others say what is left."""
    cluster = void("abcd")
    cluster.chunk_s = 0.5
    cluster.give("b", ev.Offered(b"spec"))
    cluster.until(busy_with(cluster, "b"))
    lead = lead_of(cluster)
    lose(cluster, ms.Finals, count=3)  # all that are asked for
    cluster.kill("c")
    cluster.until(lambda: bool(lead.cleanups))
    cluster.kill("b")
    cluster.until(lambda: bool(cluster.noted("give-up")), limit_s=10.0)
    cluster.give("d", ev.Offered(b"spec"))
    cluster.until(lambda: all(cluster.host(name).round == 1 for name in "ad"), limit_s=20.0)
    assert cluster.host("a").log[0].begin.counted == (peer_id("d"),)


def test_who_missed_the_first_parameters_begins_from_a_copy_of_them() -> None:
    """Its trainer has nothing to keep: it takes them, as the others took what INIT gave them."""
    cluster = void("abc")
    for name in "abc":
        cluster.host(name).inner_s = 10.0
    cluster.pause("c")
    cluster.train("a")
    cluster.train("b")
    cluster.until(lambda: all(cluster.host(name).round == 1 for name in "ab"))
    cluster.resume("c")
    cluster.train("c")
    cluster.until(lambda: cluster.host("c").round == 1, limit_s=5.0)
    assert cluster.host("c").told == [("reload", 1)]
    cluster.until_round("abc", 2)


# ---------------------------------------------------------------- retries


def test_a_gather_goes_on_with_the_objects_of_who_is_left() -> None:
    """A witness coordinates, and no READY has come when one of three that gave an object dies."""
    cluster = Cluster("")
    cluster.add("w", WITNESS)
    for name in "abc":
        cluster.add(name)
    cluster.form("wabc")
    cluster.call_of = lambda host: GATHERS if host.round >= 3 else None
    begins = begins_of(cluster)
    before = cluster.hold

    def says_nothing_of_results(source: bytes, peer: bytes, message: object) -> bool:
        lost = before(source, peer, message)
        held = isinstance(message, ms.Heartbeat) and any(run.root for run in message.runs)
        return lost or held or isinstance(message, ms.Ready)

    cluster.until_round("abc", 2)
    cluster.hold = says_nothing_of_results
    cluster.until(lambda: bool(lead_of(cluster, "w").attempts))
    cluster.kill("c")
    cluster.until(lambda: participants(begins[-1]) == "ab", limit_s=5.0)
    objects = unpack_objects(begins[-1].blob, 2)
    assert objects is not None
    assert [giver_of(data)[0] for data in objects] == [peer_id("a"), peer_id("b")]
    cluster.hold = before
    cluster.until_round("ab", 2)


def test_a_retry_in_an_asynchronous_run_counts_the_trainers_that_compute() -> None:
    """Of two that are left one goes on: the other takes no part, and counts all the same."""
    terms = ms.Terms(min_trainers=2, asynchronous=True)
    cluster = Cluster("abcd")
    cluster.rounds_wait = False
    for name in "abcd":
        cluster.give(name, ev.Configured("spec", 1, 1, terms))
    cluster.form("abcd")
    cluster.detach("a")
    cluster.until_round("bcd", 1)
    cluster.host("d").hangs = True
    cluster.until_round("bc", 2)
    # Rounds are of who comes first. In a new view the first words of all are waited for.
    lose(cluster, ms.Heartbeat, to="a")
    cluster.until(lambda: all(cluster.host(name).node.follower.submissions for name in "bc"))
    begins = begins_of(cluster)
    cluster.chunk_s = 0.5
    cluster.kill("a")
    cluster.until(lambda: bool(begins) and cluster.host("c").reducing is not None)
    assert participants(begins[-1]) == "bc"
    cluster.kill("c")
    cluster.until_round("bd", 1)
    assert participants(begins[-1]) == "b"
    assert not cluster.noted("give-up")


# ---------------------------------------------------------------- who owns the result, and how


def hubs(
    names: str,
    outbound: str,
    relays: dict[str, bool],
    witnesses: str = "",
    terms: ms.Terms | None = None,
    **times_s: float,
) -> Cluster:
    """Return a run in which some can only dial out, and others relay their data, too."""
    cluster = Cluster("", replace(Timing(), **times_s))
    cluster.outbound |= {*outbound}
    cluster.relays |= relays
    for name in names:
        cluster.add(name, WITNESS if name in witnesses else REPLICA)
        if terms is not None and name not in witnesses:
            cluster.give(name, ev.Configured("spec", 1, 1, terms))
    cluster.form(names)
    return cluster


def test_a_witness_that_can_only_dial_out_owns_what_it_gets_through_a_relay() -> None:
    """All are behind the relay, and nobody else has a direct way to all either."""
    cluster = hubs("avbcd", "vbcd", {"a": True}, "v", AVERAGED)
    cluster.detach("a")
    cluster.run(cluster.timing.linking_s + 1.0)
    begins = begins_of(cluster)
    cluster.until_round("abcd", 3)
    assert {participants(begin) for begin in begins} == {"bcd"}
    assert {begin.helpers for begin in begins} == {(peer_id("v"),)}


def test_all_of_a_round_goes_through_the_relay_where_there_is_no_witness() -> None:
    cluster = hubs("abcd", "bcd", {"a": True}, terms=AVERAGED)
    cluster.detach("a")
    cluster.run(cluster.timing.linking_s + 1.0)
    begins = begins_of(cluster)
    cluster.until_round("abcd", 3)
    assert {participants(begin) for begin in begins} == {"bcd"}
    assert {begin.helpers for begin in begins} == {()}


EVEN, OF_TWO = (1, 1, 1, 1), (1, 1, 0, 0)


@pytest.mark.parametrize(
    ("layout", "is_followed"),
    [
        (Layout("ring", EVEN, (0, 1, 2, 3)), False),
        (Layout("ring", OF_TWO, (0, 2, 1, 3)), True),
        (Layout("tree", OF_TWO, arity=2), True),
        (Layout(SITES, EVEN, (0, 0, 1, 1)), False),
    ],
    ids=["ring", "ring apart", "tree", "sites"],
)
def test_a_plan_is_followed_if_its_data_go_between_members_with_links(
    layout: Layout, is_followed: bool
) -> None:
    """Else those of its owners own all who have links to all."""
    cluster = hubs("abcd", "cd", {})
    cluster.run(cluster.timing.linking_s + 1.0)
    cluster.give("a", Advised(tuple(map(peer_id, "abcd")), layout))
    cluster.until_round("abcd", 1)  # one may be under way
    begins = begins_of(cluster)
    cluster.until_round("abcd", 4)
    assert begins
    for begin in begins:
        assert begin.layout is not None
        if is_followed:
            assert begin.layout == layout
        else:
            assert (begin.layout.kind, begin.layout.shares) == ("butterfly", OF_TWO)


def test_a_better_placed_member_takes_over_only_once_it_has_the_state() -> None:
    """a, which all could dial, is behind for as long as nobody gives it the state."""
    cluster = hubs("abc", "bc", {"a": True}, better_s=6.0)
    cluster.give("a", ev.HandOver(peer_id("c")))
    cluster.until(lambda: cluster.host("c").leads)
    cluster.stuck = lambda host, donor: host.name == "a"
    cluster.pause("a")
    cluster.until_round("bc", 2)
    cluster.resume("a")
    cluster.until(lambda: cluster.host("a").node.follower.unsynced, limit_s=5.0)
    cluster.run(2 * cluster.timing.better_s)
    assert cluster.host("c").leads
    cluster.stuck = lambda host, donor: False
    cluster.until(lambda: cluster.host("a").leads, limit_s=30.0)
    cluster.until_round("abc", 2)


# ---------------------------------------------------------------- states that differ


def test_who_is_in_doubt_does_not_take_over() -> None:
    """It has not heard so yet: RESYNC is lost on its way."""
    cluster = Cluster("abc")
    cluster.form("abc")
    host = cluster.host("c")
    lose(cluster, ms.Resync)
    host.flipped = b"one bit"
    lead = lead_of(cluster)
    cluster.until(lambda: bool(cluster.noted("diverged")))
    cluster.give("a", ev.HandOver(peer_id("c")))
    before = cluster.committed
    cluster.run(2.0)
    assert lead_of(cluster) is lead
    assert lead.roster.is_doubted(host.peer, lead.roster.heartbeats[host.peer].digest)
    assert cluster.committed > before + 2
    cluster.hold = lambda source, peer, message: False
    cluster.until(lambda: host.flipped == b"", limit_s=10.0)
    cluster.until_round("abc", 2)


def test_who_catches_up_has_no_say_in_which_state_is_right() -> None:
    """Two of three agree, and the fourth is not waited for."""
    cluster = Cluster("abcd")
    cluster.form("abcd")
    cluster.stuck = lambda host, donor: host.name == "d"
    cluster.pause("d")
    cluster.until_round("abc", 3)
    cluster.resume("d")
    cluster.until(lambda: cluster.host("d").node.follower.unsynced)
    cluster.host("c").flipped = b"one bit"
    cluster.until(lambda: bool(cluster.noted("diverged")), limit_s=2.0)
    assert cluster.host("d").node.follower.unsynced
    cluster.until(lambda: cluster.host("c").flipped == b"", limit_s=5.0)
    assert not lead_of(cluster).halted
    cluster.stuck = lambda host, donor: False
    cluster.until_round("abcd", 2)


# ---------------------------------------------------------------- who has a quorum


def test_a_promise_of_one_that_has_died_costs_no_view() -> None:
    """b promised c while its coordinator had no quorum; both die, and two that slept are back."""
    cluster = Cluster("abcde")
    cluster.form("abcde")
    lead = lead_of(cluster)
    view = cluster.host("a").node.view
    cluster.pause("d")
    cluster.pause("e")
    cluster.cut.add(frozenset((peer_id("a"), peer_id("c"))))
    cluster.hold = lambda source, peer, message: (
        isinstance(message, ms.Prepare) and source == peer_id("c") and peer != peer_id("b")
    )

    def has_promised() -> bool:
        beat = lead.roster.heartbeats[peer_id("b")]
        return beat.frozen

    cluster.until(has_promised, limit_s=20.0)
    cluster.kill("b")
    cluster.kill("c")
    cluster.until(lambda: not {*map(peer_id, "bc")} & lead.roster.alive(cluster.now_s))
    cluster.resume("d")
    cluster.resume("e")
    cluster.until_round("ade", 2, limit_s=10.0)
    assert cluster.host("a").node.coordinator is lead
    assert cluster.host("a").node.view == view
    assert not {*cluster.noted("coordinator-lost")} & {*"ade"}


def test_a_ready_that_only_a_beat_tells_does_not_count_once_its_peer_has_promised_another() -> None:
    """Take no heartbeat for READY that names a result, if its peer has promised a candidate."""
    cluster = Cluster("abcd")
    cluster.form("abcd")
    a, lead = peer_id("a"), lead_of(cluster)
    number = cluster.host("a").round + 1

    def held(source: bytes, peer: bytes, message: object) -> bool:
        """Return whether a message tells of b's READY, or would end the election."""
        beat = message if isinstance(message, ms.Heartbeat) else None
        if source != peer_id("b"):
            lost = beat is not None and beat.frozen
        else:
            told = beat is not None and not beat.frozen and any(run.root for run in beat.runs)
            lost = told or isinstance(message, ms.Ready)
        decides = isinstance(message, (ms.Accept, ms.Accepted, ms.Install))
        return (peer == a and lost) or decides

    cluster.hold = held
    rest = [cluster.host(name) for name in "bcd"]
    cluster.until(lambda: all(number in host.node.follower.held for host in rest), limit_s=5.0)
    cluster.pause("a")
    cluster.until(lambda: rest[0].node.frozen, limit_s=20.0)
    cluster.run(2 * cluster.delay_s)
    cluster.resume("a")
    cluster.until(lambda: lead.roster.heartbeats[peer_id("b")].frozen, limit_s=5.0)
    assert cluster.host("a").round < number
    cluster.hold = lambda source, peer, message: False
    cluster.until_round("abcd", 3, limit_s=30.0)


def test_a_joiner_that_was_dropped_for_its_silence_beats_in_vain() -> None:
    """No view can be made: the one there is names its old incarnation."""
    cluster = Cluster("abc")
    cluster.form("abc")
    lead = lead_of(cluster)
    cluster.kill("b")
    cluster.kill("c")
    cluster.restart("c")
    peer = peer_id("c")
    cluster.until(lambda: peer in lead.admission.joiners, limit_s=5.0)
    cluster.pause("c")
    cluster.until(lambda: peer not in lead.admission.joiners, limit_s=5.0)
    cluster.resume("c")
    cluster.run(0.5)
    assert lead.roster.heartbeats[peer].inc == 1
    assert peer not in lead.roster.alive(cluster.now_s)
    cluster.restart("b")
    cluster.run(10.0)
    assert not cluster.noted("fork")


def test_a_joiner_that_falls_silent_while_its_view_is_voted_on_is_in_it_all_the_same() -> None:
    cluster = Cluster("abcd")
    cluster.form("abc")
    lead, peer = lead_of(cluster), peer_id("d")
    for name in "abc":
        cluster.link(name, "d")
    cluster.until(lambda: lead.proposer is not None, limit_s=10.0)
    cluster.late_s = lambda message: 2.0 if isinstance(message, ms.Accepted) else 0.0
    cluster.pause("d")
    cluster.until(lambda: peer not in lead.admission.joiners, limit_s=5.0)
    assert cluster.in_one_view("abc")
    cluster.late_s = lambda message: 0.0
    cluster.resume("d")
    cluster.until(lambda: cluster.in_one_view("abcd"), limit_s=20.0)
    cluster.until_round("abcd", 2, limit_s=20.0)


# ---------------------------------------------------------------- what a trainer may ask


def test_only_the_one_whose_parameters_init_gives_need_not_offer_them_again() -> None:
    """A session asks so while it waits for the first round."""
    cluster = void("abc")
    cluster.chunk_s = 0.2
    for name in "ba":
        cluster.give(name, ev.Offered(b"spec"))
    cluster.until(lambda: all(cluster.host(name).reducing is not None for name in "abc"))
    contribute = {name for name in "abc" if cluster.host(name).node.follower.contributes}
    (attempt,) = lead_of(cluster).attempts.values()
    assert {peer_id(name) for name in contribute} == {*attempt.begin.counted}
    cluster.until(lambda: all(cluster.host(name).round == 1 for name in "abc"))


# ---------------------------------------------------------------- going back


def one_round_ahead() -> Cluster:
    """Return a run in which a has done a round more than b and c, of which nobody heard.

    a does nothing more. b and c are stopped.
    """
    cluster = Cluster("", replace(Timing(), lost_s=0.5))
    cluster.rules = Rules(on_lost="rollback", policy="majority")
    for name in "abcvw":
        cluster.add(name, WITNESS if name in "vw" else REPLICA)
    cluster.found("a")
    for i, name in enumerate("abcvw"):  # in this order: b stands for election before the others
        for other in "abcvw"[:i]:
            cluster.link(name, other)
        cluster.until(partial(cluster.in_one_view, "abcvw"[: i + 1]))
    for name in "abc":
        cluster.train(name)
    cluster.until(lambda: all(host.round >= 3 for host in cluster.living()))
    cluster.isolate("bc")
    for name in "bc":
        cluster.pause(name)
    cluster.host("a").inner_s = 0.5
    cluster.until_round("a", 1)
    cluster.host("a").hangs = True
    cluster.cut.clear()
    return cluster


def catches_up_after_its_promise(cluster: Cluster) -> None:
    """Let b promise, and have the round of a only when the others have decided to go back."""
    a, c, host = peer_id("a"), peer_id("c"), cluster.host("b")
    left, late, deliver = host.round, list[ev.Event](), cluster.deliver

    def deliver_later(host: Host, event: ev.Event) -> None:
        if host.name == "b" and isinstance(event, ev.CaughtUp):
            late.append(event)
        else:
            deliver(host, event)

    def of_a_or_another(source: bytes, peer: bytes, message: object) -> bool:
        """Return whether it is of a, of another candidate than c, or of a decision, to b."""
        stands = isinstance(message, ms.Prepare) and source != c
        tells = peer == host.peer and not isinstance(message, ms.Prepare)
        return a in (source, peer) or stands or tells

    def has_promised() -> bool:
        return host.node.election is not None and host.node.election.acceptor.frozen

    cluster.hold = lambda source, peer, message: {a, c} == {source, peer}
    cluster.deliver = deliver_later  # type: ignore[method-assign]
    cluster.resume("b")
    cluster.until(lambda: bool(late), limit_s=5.0)
    cluster.hold = of_a_or_another
    cluster.resume("c")
    cluster.until(has_promised, limit_s=30.0)
    cluster.until(lambda: rolled_back(cluster.host("c")), limit_s=30.0)
    assert not rolled_back(host)
    cluster.deliver = deliver  # type: ignore[method-assign]
    cluster.give("b", late[0])
    assert host.round == left + 1


def rolled_back(host: Host) -> bool:
    return host.node.view is not None and host.node.view.rollback


def test_who_gets_a_later_round_after_its_promise_undoes_it() -> None:
    """All count from where the view begins. The undoing takes a while: others go on meanwhile."""
    cluster = one_round_ahead()
    a, host = peer_id("a"), cluster.host("b")
    left = host.round
    catches_up_after_its_promise(cluster)
    undoes: list[tuple[Host, ev.Undo]] = []
    undo = cluster._carry[ev.Undo]
    cluster._carry[ev.Undo] = lambda host, effect: undoes.append((host, effect))
    cluster.stuck = lambda host, donor: host.name == "b"
    cluster.hold = lambda source, peer, message: a in (source, peer)
    cluster.until(lambda: rolled_back(host), limit_s=5.0)
    diverged = [host.node.follower.diverged]
    cluster.until(lambda: cluster.host("c").round > left, limit_s=5.0)
    cluster.run(2 * cluster.delay_s)
    undo(*undoes[0])
    cluster.run(0.002)
    assert (host.round, host.node.follower.unsynced) == (left, True)
    cluster.stuck = lambda host, donor: False
    cluster.until_round("bc", 2, limit_s=20.0)
    assert [*diverged, host.node.follower.diverged] == [True, False]
    cluster.host("a").hangs = False
    cluster.heal()
    cluster.until_round("abc", 2, limit_s=30.0)
