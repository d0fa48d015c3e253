"""What strangers and single members may not do: count, end a member, or fill its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.cluster import LINEAGE, Cluster, Host, peer_id

from atoll.collectives.errors import IncompatibleRunError
from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.admission import DROPPED_MAX, JOINERS_MAX
from atoll.peer.membership.coordinator import OFFERS_MAX, Coordinator
from atoll.peer.membership.forks import STRANGERS_MAX
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.participation import wrong_owners
from atoll.peer.membership.roster import Roster
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import Ballot, Member, View
from atoll.peer.membership.witness_owners import Owners

MANY = 2000
STRANGER = peer_id("stranger")


def some_id(number: int) -> bytes:
    return number.to_bytes(32, "big")


def formed(names: str = "abc") -> tuple[Cluster, Host, View]:
    cluster = Cluster(names)
    cluster.form(names)
    host = cluster.host("a")
    assert host.node.view is not None
    return cluster, host, host.node.view


def hear(host: Host, source: bytes, message: object) -> list[ev.Effect]:
    return host.node.handle(ev.Received(source, message), host.node.now_s)


def lead_of(host: Host) -> Coordinator:
    assert host.node.coordinator is not None
    return host.node.coordinator


# ---------------------------------------------------------------- strangers


def test_what_strangers_say_inside_a_view_does_not_count() -> None:
    cluster, host, view = formed()
    lead = lead_of(host)
    cluster.until(lambda: bool(lead.attempts))
    (attempt,) = lead.attempts.values()
    begin, tag = attempt.begin, (view.lineage, view.number)
    ballot = Ballot(1, STRANGER)
    later = replace(view, number=view.number + 1, members=view.members[:1])
    for message in (
        ms.Ready(*tag, begin.round, begin.attempt, b"x" * 32),
        ms.Miss(*tag, begin.round, begin.attempt, begin.participants),
        ms.Accepted(*tag, ballot, later.digest),
        ms.Accept(*tag, ballot, later),
        ms.Prepare(*tag, ballot),
        ms.Promise(*tag, ballot, ms.Report(begin.round, b"x" * 32, True)),
        ms.Finals(*tag, begin.round, begin.attempt, b"x" * 32),
        ms.AskFinals(*tag, begin.round, begin.attempt),
        ms.Notice(*tag, begin.round, begin.attempt, 0, b"x" * 32),
        ms.Yield(*tag, ms.Meet(b"W" * 32, 99, Member(STRANGER, 1))),
        ms.Offer(*tag, b"blob"),
        ms.Commit(*tag, begin.round, begin.attempt, b"x" * 32),
        ms.Leave(*tag, 1),
    ):
        assert hear(host, STRANGER, message) == []
    election = host.node.election
    assert election is not None
    assert STRANGER not in attempt.ready
    assert not attempt.misses
    assert not election.acceptor._votes
    assert election.acceptor.accepted is None
    assert election._highest_ballot == 0
    assert host.node.phase.value == "coordinator"


def test_offers_and_votes_of_strangers_do_not_count_in_a_void_run() -> None:
    cluster = Cluster("ab")
    cluster.found("a")
    cluster.link("a", "b")
    cluster.until(lambda: cluster.in_one_view("ab"))
    host = cluster.host("a")
    assert host.node.view is not None
    hear(host, STRANGER, ms.Offer(LINEAGE, host.node.view.number, b"blob"))
    assert not lead_of(host).offers


@pytest.mark.parametrize("name", ["a", "b"])
def test_join_refused_ends_nobody_who_is_in_the_view(name: str) -> None:
    """The shell stops the daemon on "refused"; any linked peer can send the message."""
    cluster, _, _ = formed()
    host = cluster.host(name)
    assert hear(host, peer_id("c"), ms.JoinRefused("E40", "go away")) == []
    joiner = cluster.add("d")
    told = hear(joiner, peer_id("c"), ms.JoinRefused("E40", "go away"))
    assert [e.text for e in told if isinstance(e, ev.Note)] == ["go away"]


# ---------------------------------------------------------------- the specification


def test_a_rejoining_peer_of_another_specification_is_refused_with_both_values() -> None:
    """c was cut off; it comes back with its state, of a run that now trains something else."""
    cluster, _, _ = formed()
    cluster.isolate("c")
    cluster.until(lambda: cluster.in_one_view("ab"), limit_s=15.0)
    for name, spec in (("a", "{'sync_every': 500}"), ("b", "{'sync_every': 500}")):
        cluster.host(name).node.follower.spec = spec
    cluster.host("c").node.follower.spec = "{'sync_every': 400}"
    cluster.heal()
    cluster.until(lambda: "refused" in cluster.host("c").notes, limit_s=5.0)
    assert "yours {'sync_every': 400}, run {'sync_every': 500}" in cluster.tail(10_000)
    assert cluster.in_one_view("ab")
    cluster.host("c").node.follower.spec = "{'sync_every': 500}"
    cluster.until_round("abc", limit_s=5.0)


def test_join_refused_carries_the_stable_code() -> None:
    _, host, _ = formed()
    host.node.follower.spec = "run's"
    join = ms.Join(Member(STRANGER, 1, address="s:1"), spec="mine")
    sent = [e.message for e in hear(host, STRANGER, join) if isinstance(e, ev.Send)]
    what = "run specification differs: yours mine, run run's"
    assert sent == [ms.JoinRefused(IncompatibleRunError.code, what)]


# ---------------------------------------------------------------- memory


def test_many_hostile_messages_leave_everything_small() -> None:
    cluster, host, view = formed()
    lead, source, tag = lead_of(host), peer_id("b"), (view.lineage, view.number)
    cluster.until(lambda: bool(lead.attempts))
    (attempt,) = lead.attempts.values()
    election = host.node.election
    assert election is not None
    begin = attempt.begin
    for n in range(MANY):
        proposal = replace(view, number=view.number + 1, base_round=n)
        stranger = some_id(n)
        hear(host, source, ms.Accepted(*tag, Ballot(n, source), proposal.digest))
        hear(host, source, ms.Miss(*tag, begin.round, begin.attempt, (stranger,)))
        hear(host, stranger, ms.Ready(*tag, begin.round, begin.attempt, stranger))
        hear(host, stranger, ms.Offer(*tag, b"blob"))
        hear(host, stranger, ms.Finals(*tag, begin.round, begin.attempt, stranger))
        hear(host, stranger, ms.BootstrapHello(Member(stranger, 1), ms.BootstrapConfig()))
        hear(host, stranger, ms.Meet(stranger, 0, Member(stranger, 1)))
        hear(host, stranger, ms.Leave(*tag, 1))
        hear(host, stranger, ms.Join(Member(stranger, 1, address=f"h:{n}")))
        host.node.handle(ev.Probed(stranger, "refused"), host.node.now_s)
    assert len(election.acceptor._votes) <= 3
    assert set(attempt.ready) <= set(view.peers)
    assert set(attempt.misses) <= set(view.peers)
    assert not any(attempt.misses.values())
    assert not lead.offers
    assert lead.admission.leaving <= set(view.peers)
    assert len(lead.admission.joiners) <= JOINERS_MAX
    assert set(lead.roster.heartbeats) <= set(view.peers)
    assert host.node.refused <= set(view.peers)
    assert not host.node.bootstrap.hellos
    assert len(host.node.forks._met) <= STRANGERS_MAX
    assert len(host.node.forks._strangers) <= STRANGERS_MAX


def test_dropped_joiners_are_remembered_for_a_while_and_not_all() -> None:
    _, host, _ = formed()
    admission = lead_of(host).admission
    for wave in range(0, 2 * DROPPED_MAX, JOINERS_MAX):
        for n in range(wave, wave + JOINERS_MAX):
            admission.on_join(Member(some_id(n), 1), 100.0)
        admission.announce(102.0)  # nobody was heard since
    assert not admission.joiners
    assert len(admission._not_before_s) == DROPPED_MAX
    admission.on_join(Member(some_id(n), 1), 102.1)  # the latest are held to their pause
    assert not admission.joiners
    admission.on_join(Member(some_id(0), 1), 102.1)
    assert len(admission.joiners) == 1
    admission.announce(300.0)
    assert len(admission._not_before_s) == 1
    assert len(admission._stalls) <= 1


def test_digests_that_change_with_every_beat_are_answered_and_forgotten() -> None:
    members = tuple(Member(peer_id(name), 1) for name in "abc")
    view = View(LINEAGE, 1, members, members[0].peer, 0, b"")
    roster = Roster(view, members[0].peer, Timing(), 0.0)
    for n in range(MANY):
        roster.doubt(members[1].peer, some_id(n))
        assert roster.is_doubted(members[1].peer, some_id(n))
        assert not roster.is_doubted(members[2].peer, some_id(n))
    assert len(roster._doubted) == 1


def test_offers_of_few_are_kept_and_the_dead_make_room() -> None:
    members = tuple(Member(some_id(n), 1) for n in range(3 * OFFERS_MAX))
    view = View(LINEAGE, 1, members, members[0].peer, 0, b"")
    me = members[0].peer
    lead = Coordinator(
        view, me, MemberState(members[0], lambda e: None), Timing(), lambda e: None, 0.0
    )
    for member in members:
        lead.on_offer(member.peer, b"blob", 0.5)
    assert list(lead.offers) == [member.peer for member in members[:OFFERS_MAX]]
    last = members[-1].peer
    lead.roster.heard(last, None, 2.0)
    lead.on_offer(last, b"blob", 2.0)
    assert list(lead.offers) == [me, last]


def test_who_is_no_member_any_more_is_forgotten() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    for _ in range(3):
        cluster.kill("c")
        cluster.until(lambda: cluster.in_one_view("ab"), limit_s=15.0)
        assert not cluster.host("a").node.refused
        cluster.restart("c")
        cluster.until(lambda: cluster.in_one_view("abc"), limit_s=5.0)


# ---------------------------------------------------------------- a coordinator that lies


def test_a_witness_is_told_of_no_state_that_it_should_load() -> None:
    effects: list[ev.Effect] = []
    own = MemberState(Member(peer_id("w"), 1, "witness"), effects.append)
    own.round, own.chain = 3, b"3" * 32
    assert not own.on_resync()
    assert not own.unsynced


def test_owners_who_are_no_witnesses_of_the_view_are_refused() -> None:
    _, host, view = formed()
    member = view.replicas[0]
    others = tuple(peer for peer in view.replicas if peer != member)
    begin = ms.Begin(view.lineage, view.number, 9, 1, ms.STEP, others, (1.0,) * len(others))
    for owner in (member, STRANGER):
        wrong = replace(begin, owners=Owners((owner,), (0,)))
        assert "nor is a witness" in wrong_owners(wrong, view, host.node.follower.terms)
