"""Peers with durable homes are the same voters after a restart, whoever and how many they are."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
from harness.cluster import LINEAGE, Cluster, peer_id
from harness.grids import rest_is_slow
from harness.host import Host
from simulation.seal import Seal

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.consensus import Acceptor
from atoll.peer.membership.durable_records import (
    AcceptedRecord,
    CommitRecord,
    IncarnationRecord,
    PromiseRecord,
    ReadyRecord,
    ViewRecord,
    recovered,
)
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.node import Node
from atoll.peer.membership.operations import Operation
from atoll.peer.membership.outbox import Outbox
from atoll.peer.membership.signing import Signatures
from atoll.peer.membership.view import (
    WITNESS,
    Ballot,
    Member,
    Rules,
    View,
    chain_after,
    short,
)
from atoll.peer.rounds.entries import REDUCE, STEP

NAMES = "abcde"


def formed(names: str = NAMES, policy: str = "majority") -> Cluster:
    cluster = Cluster("")
    cluster.rules = Rules(policy)
    cluster.is_durable = True
    for name in names:
        cluster.add(name)
    cluster.form(names)
    return cluster


def incarnations(cluster: Cluster, names: str = NAMES) -> set[int]:
    view = cluster.host(names[0]).node.view
    assert view is not None
    return {member.inc for member in view.members}


def test_an_operation_waits_for_no_disk_that_still_writes_a_step() -> None:
    """No disk keeps what it reduces: READY leaves at once, and not with the next heartbeat."""
    cluster = formed("abc")
    for host in cluster.living():
        host.inner_s = 0.01
    follower = cluster.host("b").node.follower
    cluster.until(lambda: bool(follower.begins) and not follower.held)
    cluster.homes["b"].sync_s = 5.0
    step = follower.round + 1
    sums = ms.Operation(REDUCE, 1000, "sum", "float32")
    cluster.call_of = lambda host: sums if host.round >= step else None
    cluster.until(lambda: cluster.committed >= step)  # two have it on their disks, b has not
    five_s = cluster.until(lambda: cluster.committed >= step + 5)
    assert five_s < cluster.timing.heartbeat_s


def test_a_coordinator_that_is_back_after_the_removal_time_stays() -> None:
    """It says that it was started again, so it lives, however long it was silent (seed 25)."""
    cluster = formed()
    for name in "ade":
        cluster.kill(name)
    remove_s = cluster.host("b").node.timing.remove_s
    cluster.run(remove_s + 1.0)
    cluster.hold = lambda source, peer, message: (
        source == peer_id("a") and isinstance(message, ms.Promise | ms.Prepare)
    )
    for name in "ad":
        cluster.restart(name)
    cluster.until(lambda: cluster.checker.latest.coordinator != peer_id("a"), 20.0)
    assert peer_id("a") in cluster.checker.latest.peers


@pytest.mark.parametrize("dead", ["abc", "cde", "ade"])
def test_three_of_five_killed_and_restarted_go_on(dead: str) -> None:
    """Observed with real daemons: that run stayed dead for ever."""
    cluster = formed()
    before = cluster.committed
    for name in dead:
        cluster.kill(name)
    cluster.run(2.0)
    for name in dead:
        cluster.restart(name)
    assert cluster.until_round(NAMES) < 5.0
    assert cluster.host("d").round > before
    assert incarnations(cluster) == {1}
    assert cluster.host("a").loads <= 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("is_power", [False, True])
def test_all_at_once_in_any_order_and_only_joiners_come_back(seed: int, is_power: bool) -> None:
    """Nobody has to be the founder."""
    cluster = formed()
    dice = random.Random(seed)
    cluster.disk_dice = dice
    cluster.run(dice.random())
    for name in NAMES:
        cluster.host(name).off = is_power
        cluster.kill(name)
    order = list("bcde" if seed % 2 else NAMES)
    dice.shuffle(order)
    for name in order:
        cluster.run(dice.choice((0.0, 0.2, 2.0)))
        cluster.restart(name)
    assert cluster.until_round("".join(order)) < 5.0
    view = cluster.host(order[0]).node.view
    assert view is not None
    assert not view.rollback
    assert view.lineage == cluster.checker.latest.lineage


SUBSETS = ["".join(chosen) for n in range(1, 6) for chosen in combinations(NAMES, n)]
AWAY_S = (0.0, 3.0, 30.0)


@pytest.mark.parametrize(
    ("away_s", "dead"), rest_is_slow([(s, dead) for s in AWAY_S for dead in SUBSETS], len(SUBSETS))
)
def test_every_subset_may_be_restarted(away_s: float, dead: str) -> None:
    """Also who has been voted out meanwhile is back in, as somebody new with its old state."""
    cluster = formed()
    before = cluster.committed
    order = list(dead)
    random.Random(dead).shuffle(order)
    for name in dead:
        cluster.kill(name)
    cluster.run(away_s)
    for name in order:
        cluster.restart(name)
    assert cluster.until(lambda: cluster.committed > before) < 5.0
    assert cluster.until_round(NAMES) < 10.0
    assert not any(view.rollback or view.fork for view in cluster.checker.views.values())


def test_a_restarted_coordinator_resigns() -> None:
    cluster = formed("abc")
    view = cluster.host("a").node.view
    cluster.kill("a")
    cluster.restart("a")
    assert not cluster.host("a").leads
    assert cluster.until_round("abc") < 5.0
    later = cluster.host("a").node.view
    assert view is not None
    assert later is not None
    assert later.number == view.number + 1
    assert later.coordinator != peer_id("a")


# ---------------------------------------------------------------- homes that forget


def test_a_restored_image_loses_no_round() -> None:
    """c's READY went to a, which dies; c comes back from an image taken before. b, which has only
    heard how long c's ledger was, does not count what c says."""
    cluster = formed("abc")
    image = cluster.homes["c"].image()
    cluster.data_cut |= {frozenset((peer_id("b"), peer_id(name))) for name in "ac"}
    before = cluster.committed
    cluster.until(lambda: cluster.committed > before + 2, limit_s=30.0)
    cluster.run(0.5)
    cluster.kill("a")
    cluster.kill("c")
    cluster.homes["c"] = image
    cluster.data_cut.clear()
    cluster.restart("c")
    cluster.run(6.0)
    assert cluster.host("b").round <= before + 1
    cluster.restart("a")
    assert cluster.until_round("ab", limit_s=20.0) < 15.0
    cluster.until(lambda: cluster.in_one_view("abc"), limit_s=20.0)
    assert "amnesia" in cluster.host("c").notes


def test_who_comes_back_with_an_older_home_is_no_voter() -> None:
    cluster = formed("abc")
    image = cluster.homes["c"].image()
    cluster.until_round("abc", 3)
    cluster.kill("c")
    cluster.homes["c"] = image
    cluster.restart("c")
    cluster.until(lambda: cluster.host("c").node.me.inc == 2, limit_s=5.0)
    assert cluster.until_round("abc") < 5.0
    assert "amnesia" in cluster.host("c").notes


def test_nobody_loses_its_vote_by_what_others_claim_to_remember() -> None:
    members = tuple(Member(peer_id(name), 1) for name in "abc")
    view, me = View(LINEAGE, 1, members, members[0].peer, 3, b"3" * 32), members[2]
    ledger = [IncarnationRecord(1), ViewRecord(view), CommitRecord(3, b"3" * 32)]
    node = Node(me, life=2, signer=Seal(me.peer), recovered=recovered(ledger, 3))
    node.handle(ev.Tick(), 0.5)

    def tell(told: ms.Remembered) -> None:
        beat = ms.CoordinatorBeat(LINEAGE, 1, 3, b"3" * 32, remembered=(told,))
        node.handle(ev.Received(members[0].peer, beat), node.now_s + 0.1)

    claimed = ms.Remembered(me.peer, 1, 1, 99)
    tell(claimed)
    tell(Signatures(members[0].peer, Seal(members[0].peer), print).signed_position(claimed))
    assert node.view == view
    tell(Signatures(me.peer, Seal(me.peer), print).signed_position(claimed))
    assert node.view is None


def test_who_cannot_write_comes_back_as_somebody_new() -> None:
    cluster = formed("abc")
    cluster.homes["b"].fails = True
    cluster.until(lambda: cluster.host("b").node.me.inc == 2, limit_s=5.0)
    assert cluster.until_round("abc") < 5.0
    assert cluster.in_one_view("abc")


def test_nobody_joins_under_a_number_that_its_disk_may_forget() -> None:
    node = Node(Member(peer_id("d"), 7, address="d:1"), life=1, recovered=recovered((), 0))
    said = node.handle(ev.LinkUp(peer_id("a")), 1.0)
    written = [effect for effect in said if isinstance(effect, ev.Persist)]
    assert [effect.record for effect in written] == [IncarnationRecord(7)]
    assert not any(isinstance(effect, ev.Send) for effect in said)
    said = node.handle(ev.Durable(written[0].position), 1.1)
    assert [type(e.message) for e in said if isinstance(e, ev.Send)] == [ms.Join]


# ---------------------------------------------------------------- what waits for a disk


def test_a_report_names_no_ready_that_is_not_on_the_disk() -> None:
    effects: list[ev.Effect] = []
    me = Member(peer_id("a"), 1)
    own = MemberState(me, effects.append, Outbox(0))
    own.on_install(View(LINEAGE, 1, (me,), me.peer, 3, b"3" * 32))
    own.move_to(3, b"3" * 32)
    own.on_begin(ms.Begin(LINEAGE, 1, 4, 1, ms.STEP, (me.peer,), (1.0,)))
    said = own.on_reduced(4, 1, b"r" * 32)
    assert said is not None
    assert said.pending
    assert own.pending
    assert own.report().runs == ()
    (record,) = [
        e.record for e in effects if isinstance(e, ev.Persist) and isinstance(e.record, ReadyRecord)
    ]
    said = own.on_durable(record)
    assert said is not None
    assert not said.pending
    assert [run.round for run in own.report().runs] == [4]


@pytest.mark.parametrize("slow", "ab")
def test_one_slow_disk_delays_nobody(slow: str) -> None:
    cluster = formed("abc")
    usual_s = cluster.until_round("abc", 5)
    cluster.homes[slow].sync_s = 10.0
    assert cluster.until_round("abc", 5) < 2 * usual_s


def test_a_second_value_at_one_ballot_is_refused() -> None:
    said: list[ev.Effect] = []
    members = tuple(Member(peer_id(name), 1) for name in "abc")
    view = View(LINEAGE, 1, members, members[0].peer, 3, b"3" * 32)
    one, other = (replace(view, number=2, base_round=r, base_chain=b"c" * 32) for r in (3, 4))
    acceptor = Acceptor(view, said.append)
    ballot = Ballot(2, peer_id("b"), 1)
    acceptor.on_accept(ms.Accept(LINEAGE, 1, ballot, one))
    said.clear()
    acceptor.on_accept(ms.Accept(LINEAGE, 1, ballot, other))
    assert not said
    acceptor.on_accept(ms.Accept(LINEAGE, 1, replace(ballot, life=2), other))
    assert said


def test_ballots_of_two_lives_differ() -> None:
    cluster = formed("abc")
    cluster.kill("b")
    cluster.restart("b")
    cluster.until_round("abc")
    cluster.kill("a")
    standing = cluster.host("b").node
    cluster.until(lambda: standing.election is not None and standing.election.candidate is not None)
    assert standing.election is not None
    assert standing.election.candidate is not None
    assert standing.election.candidate.ballot.life == cluster.host("b").life == 2


# ---------------------------------------------------------------- attempts and forks


def test_a_fast_restart_ends_the_attempt_as_a_death_would() -> None:
    """It is back before anybody has missed it, and has other inputs."""
    cluster = formed("abc")
    cluster.chunk_s = 0.5
    node = cluster.host("a").node
    cluster.until(lambda: "b" in busy(cluster))
    assert node.coordinator is not None
    attempt = max(a.begin.attempt for a in node.coordinator.attempts.values())
    send = cluster.send

    def send_when_read(host: Host, peer: bytes, message: object) -> None:
        if not (isinstance(message, ms.Heartbeat) and message.loading):
            send(host, peer, message)

    cluster.send = send_when_read  # type: ignore[method-assign]  # its state is read in no time
    cluster.kill("b")
    cluster.restart("b")

    def begun_again() -> bool:
        lead = node.coordinator
        return lead is not None and any(
            a.begin.attempt > attempt and peer_id("b") not in a.begin.participants
            for a in lead.attempts.values()
        )

    assert cluster.until(begun_again) < 1.0
    assert cluster.until_round("abc") < 10.0


def busy(cluster: Cluster) -> str:
    return "".join(host.name for host in cluster.living() if host.reducing is not None)


def test_who_was_restarted_does_not_go_on_alone() -> None:
    """After a power cut two machines are back seconds apart; one of them waits for the other."""
    cluster = formed("ab", policy="any")
    for name in "ab":
        cluster.kill(name)
    cluster.restart("b")
    cluster.run(20.0)
    assert not any(view.fork for view in cluster.checker.views.values())
    cluster.restart("a")
    assert cluster.until_round("ab") < 5.0
    assert not any(view.fork for view in cluster.checker.views.values())


def test_a_vote_counts_once_it_is_on_the_disk() -> None:
    """Two of three have slow disks: their READY, also in their heartbeats, is none for so long."""
    cluster = formed("abc")
    for name in "bc":
        cluster.homes[name].sync_s = 3.0
    cluster.run(0.5)
    before = cluster.committed
    cluster.run(2.0)
    assert cluster.committed <= before + 1
    cluster.until(lambda: cluster.committed > before + 1, limit_s=10.0)


def test_a_coordinator_says_nothing_before_its_view_is_on_its_disk() -> None:
    """It would not know after a restart that it has begun rounds there."""
    cluster = formed("abc")
    for disk in cluster.homes.values():
        disk.sync_s = 0.1
    begun: list[int] = []

    def look(source: bytes, peer: bytes, message: object) -> bool:
        if isinstance(message, ms.Begin):
            disk = cluster.hosts[source].disk
            assert disk is not None
            views = [
                r.view for n, r in disk.records if isinstance(r, ViewRecord) and n <= disk.synced
            ]
            assert message.view in [view.number for view in views]
            begun.append(message.view)
        return False

    cluster.hold = look
    cluster.kill("a")
    cluster.until(lambda: len(set(begun)) > 1, limit_s=10.0)


def test_a_promise_and_a_vote_outlive_the_process() -> None:
    members = tuple(Member(peer_id(name), 1) for name in "abc")
    view = View(LINEAGE, 1, members, members[0].peer, 3, b"3" * 32)
    ballot, proposal = Ballot(5, peer_id("b"), 1), replace(view, number=2)
    ledger = [
        IncarnationRecord(1),
        ViewRecord(view),
        CommitRecord(3, b"3" * 32),
        PromiseRecord(LINEAGE, 1, ballot),
        AcceptedRecord(ms.Accepted(LINEAGE, 1, ballot, proposal.digest, 1), proposal),
    ]
    node = Node(members[2], life=2, recovered=recovered(ledger, 5))
    lower = ms.Prepare(LINEAGE, 1, Ballot(4, peer_id("a"), 1))  # of a coordinator, which may ask
    said = node.handle(ev.Received(peer_id("a"), lower), 1.0)
    said += node.handle(ev.Durable(node._here.outbox.position), 1.1)
    assert node.frozen
    assert not promises(said)
    higher = ms.Prepare(LINEAGE, 1, Ballot(6, peer_id("a"), 1))
    said = node.handle(ev.Received(peer_id("a"), higher), 1.2)
    assert not promises(said)  # not before it is synced
    (promise,) = promises(node.handle(ev.Durable(node._here.outbox.position), 1.3))
    assert (promise.accepted_ballot, promise.accepted_view) == (ballot, proposal)


def promises(effects: list[ev.Effect]) -> list[ms.Promise]:
    sent = [effect.message for effect in effects if isinstance(effect, ev.Send)]
    return [message for message in sent if isinstance(message, ms.Promise)]


def test_a_later_life_takes_no_part_in_an_attempt_that_names_another() -> None:
    effects: list[ev.Effect] = []
    me = Member(peer_id("a"), 1)
    own = MemberState(me, effects.append, Outbox(0), life=2)
    own.on_install(View(LINEAGE, 1, (me,), me.peer, 3, b"3" * 32))
    own.move_to(3, b"3" * 32)
    begin = ms.Begin(LINEAGE, 1, 4, 1, ms.STEP, (me.peer,), (1.0,), lives=(1,))
    own.on_begin(begin)
    assert not any(isinstance(effect, ev.Reduce) for effect in effects)
    own.on_begin(replace(begin, attempt=2, lives=(2,)))
    assert any(isinstance(effect, ev.Reduce) for effect in effects)


# ---------------------------------------------------------------- reading what the disk has


def test_who_reads_its_state_for_long_keeps_its_place_and_its_vote() -> None:
    """As a large model takes, longer than the silent are kept: it answers all the while."""
    cluster = formed("abc")
    cluster.read_s = 3 * cluster.timing.remove_s
    cluster.kill("c")
    cluster.restart("c")
    assert cluster.until_round("ab", 2) < 3.0
    cluster.kill("b")  # a and c are a quorum: an election needs the ledger of c, not its state
    cluster.kill("a")
    cluster.restart("a", lambda host: None)
    cluster.until(lambda: cluster.host("a").leads or cluster.host("c").leads, limit_s=5.0)
    cluster.until_round("ac", 2, limit_s=cluster.read_s + 5.0)
    assert incarnations(cluster, "abc") == {1}
    assert not cluster.noted("excluded")


@pytest.mark.parametrize("read_s", [0.0, 2.0])
def test_a_file_that_turns_out_bad_costs_a_transfer_and_no_vote(read_s: float) -> None:
    """The peer has said where it stands by then, and may have moved on."""
    cluster = formed("abc")
    cluster.read_s = read_s
    cluster.until_round("abc", 4)
    cluster.kill("c")
    disk = cluster.homes["c"]
    disk.rotten |= {*disk.rounds, *(state.chain for state in disk.checkpoints)}
    cluster.restart("c")
    assert cluster.until_round("abc", 2, limit_s=read_s + 5.0)
    assert incarnations(cluster, "abc") == {1}


def test_all_are_back_at_once_and_some_files_are_bad() -> None:
    cluster = formed("abc")
    cluster.read_s = 1.0
    cluster.until_round("abc", 4)
    for name in "abc":
        cluster.kill(name)
    disk = cluster.homes["b"]
    disk.rotten |= {max(disk.rounds, key=lambda place: place[2])}
    for name in "abc":
        cluster.restart(name)
    assert cluster.until_round("abc", 2, limit_s=cluster.read_s + 5.0)
    assert not any(view.rollback for view in cluster.checker.views.values())


@pytest.mark.parametrize("is_rotten", [False, True], ids=["whole", "rotten"])
def test_all_lose_power_between_ready_and_the_first_commit(is_rotten: bool) -> None:
    """The first parameters are held, and no state: they are read before anything else happens."""
    cluster = Cluster("")
    cluster.is_durable, cluster.read_s = True, 1.0
    for name in "abc":
        cluster.add(name)
    cluster.found("a")
    for one, other in ("ba", "ca", "cb"):
        cluster.link(one, other)
    cluster.until(lambda: cluster.in_one_view("abc"))
    cluster.hold = lambda source, peer, message: isinstance(message, (ms.Ready, ms.Heartbeat))
    for name in "abc":
        cluster.train(name)
    owns = [cluster.host(name).node.follower for name in "abc"]
    cluster.until(lambda: all(1 in own.held and own.held[1].durable for own in owns))
    for name in "abc":
        cluster.kill(name)
    if is_rotten:
        disk = cluster.homes["b"]
        disk.rotten |= {*disk.rounds}
    cluster.hold = lambda source, peer, message: False
    for name in "abc":
        own = cluster.restart(name).node.follower
        assert (own.round, own.loading) == (0, True)
    cluster.until_round("abc", 3, limit_s=20.0)
    assert incarnations(cluster, "abc") == {1}


def test_a_result_that_is_fetched_for_a_damaged_file_is_in_memory_only() -> None:
    chain, me, other = b"c" * 32, b"p" * 32, b"q" * 32
    view = View(LINEAGE, 1, (Member(me, 1), Member(other, 1)), other, 5, chain)
    begin = ms.Begin(LINEAGE, 1, 6, 1, STEP, (me, other), (1.0, 1.0))
    ready = ReadyRecord(LINEAGE, 1, ms.Run(6, 1, 0, b"r" * 32), chain, begin)
    records = [IncarnationRecord(1), ViewRecord(view), ready]
    effects: list[ev.Effect] = []
    own = MemberState(Member(me, 1), effects.append, Outbox(3), life=2)
    own.recover(recovered(records, 3, [(5, chain)], {ready.place}))
    own.on_home_read(ev.HomeRead(5, chain, b"d" * 32, False, frozenset({6})))
    assert own.ready() is None
    said = own.on_reduced(6, 1, b"r" * 32)
    assert said is not None
    assert not said.keeps_rounds


# ---------------------------------------------------------------- operations


def test_operations_that_others_have_lost_are_taken_back_by_name() -> None:
    """The state is the same: nothing is fetched, and the trainer hears of it."""
    lost, named = 0, list[str]()
    for seed in range(8):
        cluster = formed("abc")
        cluster.disk_dice = random.Random(seed)
        cluster.call_of = lambda host: Operation(REDUCE, 1000, "sum", "float32")
        cluster.until_round("abc", 6)
        loads = cluster.host("a").loads
        for name in "bc":
            cluster.host(name).off = True
            cluster.kill(name)
        cluster.pause("a")
        for name in "bc":
            cluster.restart(name)
            cluster.link("a", name)  # the kernel of a stopped process takes it
        cluster.until(partial(is_led_by, cluster, "bc"), limit_s=10.0)
        cluster.resume("a")
        assert cluster.until_round("abc", 2) < 10.0
        assert (cluster.host("a").node.me.inc, cluster.host("a").loads) == (1, loads)
        lost += "lost" in [kind for kind, _ in cluster.host("a").told]
        named += [line for line in cluster.trace if "were lost when" in line]
        assert not any(view.rollback for view in cluster.checker.views.values())
    assert lost
    assert named
    peers = [short(peer_id(name)) for name in "bc"]
    assert all(f"when {peers[0]} and {peers[1]} lost power" in text for text in named), named


@pytest.mark.parametrize("seed", range(6))
def test_operations_of_which_a_witness_alone_knows_stop_nobody(seed: int) -> None:
    """Two machines lose their power, and a witness elsewhere has heard what nobody has any more.

    It was no step, so the run goes on from the last round that somebody has.
    """
    cluster = Cluster("")
    cluster.is_durable, cluster.save_every = True, 1000
    for name in "ab":
        cluster.add(name)
    cluster.add("w", WITNESS)
    cluster.form("abw")
    cluster.disk_dice = random.Random(seed)
    cluster.call_of = lambda host: Operation(REDUCE, 1000, "sum", "float32")
    cluster.until_round("ab", 6)
    for name in "ab":
        cluster.host(name).off = True
        cluster.kill(name)
    for name in "ab":
        cluster.restart(name)
    assert cluster.until_round("ab", 2) < 3.0
    assert not any(view.rollback for view in cluster.checker.views.values())


def replicas_that_have_forgotten() -> Cluster:
    """Return a run of a, b and w, of whose last step the witness alone knows."""
    cluster = Cluster("")
    cluster.is_durable, cluster.save_every = True, 1000
    for name in "ab":
        cluster.add(name)
        cluster.homes[name].keeps_rounds = False
    cluster.add("w", WITNESS)
    cluster.form("abw")
    for name in "ab":
        cluster.kill(name)
    for name in "ab":
        cluster.restart(name)
    return cluster


def test_a_step_of_which_a_witness_alone_knows_stops_everybody() -> None:
    cluster = replicas_that_have_forgotten()
    cluster.run(20.0)
    assert cluster.noted("base-lost")


def test_who_was_stopped_while_the_base_is_waited_for_does_not_count_that_time() -> None:
    cluster = replicas_that_have_forgotten()

    def waiting() -> list[tuple[str, float]]:
        found = [(name, cluster.host(name).node.election) for name in "abw"]
        waits = [(name, election._base_wait.since_s) for name, election in found if election]
        return [(name, since_s) for name, since_s in waits if since_s is not None]

    cluster.until(lambda: bool(waiting()), limit_s=20.0)
    [(name, since_s), *_] = waiting()
    cluster.pause(name)
    cluster.run(3.0)
    cluster.resume(name)
    cluster.run(0.1)
    assert dict(waiting())[name] > since_s + 2.0
    cluster.run(20.0)
    assert cluster.noted("base-lost")


def is_led_by(cluster: Cluster, names: str) -> bool:
    return any(cluster.host(name).leads for name in names)


def test_a_step_is_not_taken_back_by_name() -> None:
    effects: list[ev.Effect] = []
    me = Member(peer_id("a"), 1)
    own = MemberState(me, effects.append, Outbox(0))
    view = View(LINEAGE, 1, (me,), me.peer, 3, b"3" * 32)
    own.on_install(view)
    own.move_to(3, b"3" * 32)
    chains = {3: own.chain}
    called = Operation(REDUCE, 1000, "sum", "float32")
    for number, operation in ((4, None), (5, called), (6, called)):
        kind = ms.STEP if operation is None else REDUCE
        own.on_begin(ms.Begin(LINEAGE, 1, number, 1, kind, (me.peer,), (1.0,), operation=operation))
        own.on_reduced(number, 1, b"r" * 32)
        chains[number] = chain_after(own.chain, number, 0, b"r" * 32)
        own.committed(number, chains[number])
    effects.clear()
    own.on_install(replace(view, number=2, base_round=4, base_chain=chains[4]))
    assert ev.TakeBack(4, chains[4]) in effects
    assert (own.round, own.unsynced) == (4, False)
    own.submitted(ev.Submitted(4, own.epoch, 1.0, 0, called))
    (told,) = [e for e in effects if isinstance(e, ev.TellTrainer) and e.kind == "lost"]
    assert "rounds 5 to 6" in told.text
    own.on_install(replace(view, number=3, base_round=3, base_chain=chains[3]))
    assert own.unsynced


def test_who_was_voted_out_while_it_was_away_fetches_the_rounds_it_has_missed_only() -> None:
    """It is no voter any more, and keeps its state and the position of its ledger."""
    cluster = formed("abc")
    for name in "abc":
        cluster.host(name).inner_s = 1.0
    cluster.log_rounds = 100
    cluster.kill("c")
    before, state = cluster.homes["c"].position, cluster.host("c").round
    cluster.run(cluster.timing.remove_s + 4.0)
    assert not cluster.in_one_view("abc")
    host = cluster.restart("c")
    assert host.round == state
    cluster.until(lambda: cluster.in_one_view("abc"), limit_s=20.0)
    assert cluster.until_round("abc", limit_s=20.0) < 15.0
    fetched = [entry.round for entry in host.log]
    assert fetched == [*range(1, host.round + 1)]  # none by its state
    assert cluster.homes["c"].position > before
    assert host.node.me.inc == 2


@pytest.mark.parametrize("others", ["", "a"], ids=["same view", "its coordinator is gone"])
@pytest.mark.parametrize("away_s", [0.5, 3.0])
def test_a_trainer_that_attaches_after_a_restart_finds_the_run_where_it_is(
    others: str, away_s: float
) -> None:
    """Whatever comes first: the word of a coordinator, another view, or what was on the disk."""
    cluster = formed()
    for name in "e" + others:
        cluster.kill(name)
    cluster.run(away_s)
    cluster.until_round("bcd")
    reached = cluster.committed
    cluster.restart("e")
    host = cluster.host("e")
    for _ in range(200_000):
        node = host.node
        own = node.follower
        syncing = node.view is None or own.loading or own.unsynced or node.may_be_behind()
        if not syncing:
            break
        cluster.advance()
    assert host.node.follower.round >= reached
