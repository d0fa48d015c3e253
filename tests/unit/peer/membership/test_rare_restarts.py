"""Processes with durable homes that come back at a rare moment, or with a rare home."""

from __future__ import annotations

import random

import pytest
from harness.cluster import Cluster, peer_id
from harness.disks import Disk
from harness.faults import begins_of, busy_with, lose
from harness.host import Host

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.coordinator import Coordinator
from atoll.peer.membership.operations import Call, Operation
from atoll.peer.membership.view import REPLICA, WITNESS
from atoll.peer.membership.witness_owners import Work
from atoll.peer.rounds.entries import GATHER, REDUCE

SUM = Operation(REDUCE, 1000, "sum", "float32")


def durable(names: str, witnesses: str = "") -> Cluster:
    """Return peers with homes that have not founded anything yet."""
    cluster = Cluster("")
    cluster.is_durable = True
    for name in names:
        cluster.add(name, WITNESS if name in witnesses else REPLICA)
    return cluster


def formed(names: str = "abc", witnesses: str = "") -> Cluster:
    cluster = durable(names, witnesses)
    cluster.form(names)
    return cluster


def lead_of(cluster: Cluster, name: str = "a") -> Coordinator:
    lead = cluster.host(name).node.coordinator
    assert lead is not None
    return lead


def incarnations(cluster: Cluster, name: str = "a") -> set[int]:
    view = cluster.host(name).node.view
    assert view is not None
    return {member.inc for member in view.members}


def restart(cluster: Cluster, name: str) -> Host:
    cluster.kill(name)
    return cluster.restart(name)


# ---------------------------------------------------------------- words of former processes


def test_a_heartbeat_of_the_process_before_says_nothing_of_the_one_that_runs() -> None:
    cluster = formed()
    peer, kept = peer_id("b"), list[ms.Heartbeat]()

    def keep(source: bytes, to: bytes, message: object) -> bool:
        if source == peer and isinstance(message, ms.Heartbeat):
            kept.append(message)
        return False

    cluster.hold = keep
    cluster.until(lambda: bool(kept))
    cluster.hold = lambda source, to, message: False
    restart(cluster, "b")
    lead = lead_of(cluster)
    cluster.until(lambda: lead.roster.life(peer) == 2)
    heard = lead.roster.heartbeats[peer]
    cluster.give("a", ev.Received(peer, kept[0]))
    assert lead.roster.heartbeats[peer] is heard
    cluster.until_round("abc", 2)
    assert incarnations(cluster) == {1}


def test_a_wish_to_leave_ends_with_its_process() -> None:
    cluster = formed()
    peer, kept = peer_id("c"), list[object]()

    def keep(source: bytes, to: bytes, message: object) -> bool:
        if isinstance(message, ms.Leave):
            kept.append(message)
        return isinstance(message, ms.Leave)

    cluster.hold = keep
    cluster.leave("c")
    cluster.until(lambda: bool(kept))
    restart(cluster, "c")
    lead = lead_of(cluster)
    cluster.until(lambda: lead.roster.life(peer) == 2)
    cluster.give("a", ev.Received(peer, kept[0]))
    cluster.hold = lambda source, to, message: False
    cluster.until_round("abc", 3)
    assert cluster.in_one_view("abc")
    assert cluster.host("c").alive


def test_a_ready_counts_once_a_heartbeat_has_shown_its_process() -> None:
    """A BEGIN with all objects is all that b needs to be READY, before anybody has heard of it."""
    cluster = formed()
    cluster.call_of = lambda host: Operation(GATHER)
    cluster.until_round("abc", 2)
    peer, lead = peer_id("b"), lead_of(cluster)
    said: list[ms.Ready] = []

    def hold(source: bytes, to: bytes, message: object) -> bool:
        if source == peer and to == peer_id("a") and isinstance(message, ms.Ready):
            said.append(message)
        return source == peer and isinstance(message, ms.Heartbeat | ms.SameBeat)

    cluster.hold = hold
    cluster.kill("b")
    said.clear()
    cluster.restart("b")
    counted: list[bool] = []

    def heard() -> bool:
        counted.extend(peer in attempt.ready for attempt in lead.attempts.values())
        return len(said) > 1

    cluster.until(heard)
    cluster.run(2 * cluster.delay_s)
    assert {ready.life for ready in said} == {2}
    assert lead.roster.life(peer) == 1
    assert not any(counted)
    cluster.hold = lambda source, to, message: False
    cluster.until_round("abc", 2)


def test_who_wants_to_leave_goes_though_its_coordinator_was_restarted() -> None:
    """The one that it asks coordinates no more."""
    cluster = formed()
    restart(cluster, "a")
    cluster.leave("c")
    cluster.until(lambda: not cluster.host("c").alive, limit_s=5.0)
    cluster.until_round("ab", 2)
    assert cluster.in_one_view("ab")


# ---------------------------------------------------------------- while it leaves


def test_who_is_leaving_goes_when_its_ledger_fails() -> None:
    """It does not come back as somebody new."""
    cluster = formed()
    lose(cluster, ms.Leave)
    cluster.leave("c")
    assert cluster.host("c").alive
    cluster.homes["c"].fails = True
    cluster.until(lambda: not cluster.host("c").alive, limit_s=1.0)
    assert "amnesia" not in cluster.host("c").notes
    cluster.hold = lambda source, to, message: False
    cluster.until_round("ab", 2)


def test_a_coordinator_with_a_slow_disk_leaves_once_its_vote_is_synced() -> None:
    """Its votes for the view without it were repeated, and are all free at once."""
    cluster = formed("ab")
    cluster.homes["a"].sync_s = 1.0
    cluster.leave("a")
    cluster.until(lambda: not cluster.host("a").alive, limit_s=3.9)
    cluster.until_round("b", 2)
    assert cluster.in_one_view("b")


# ---------------------------------------------------------------- founding


@pytest.mark.parametrize("name", ["a", "c"])
def test_a_founder_that_dies_before_the_first_view_takes_its_place_again(name: str) -> None:
    cluster = durable("abc")
    named = ms.BootstrapConfig(founders=tuple(f"{each}:1" for each in "abc"))
    cluster.hold = lambda source, to, message: isinstance(message, ms.Promise)
    for each in "abc":
        cluster.give(each, named)
    for one, other in ("ab", "ac", "bc"):
        cluster.link(one, other)
    nodes = [cluster.host(each).node for each in "abc"]
    cluster.until(lambda: all(node.view is not None for node in nodes), limit_s=20.0)
    cluster.kill(name)
    host = cluster.restart(name)
    assert host.node.view is not None
    assert host.node.view.number == 0
    cluster.hold = lambda source, to, message: False
    cluster.until(lambda: cluster.in_one_view("abc"), limit_s=20.0)
    assert incarnations(cluster) == {1}


# ---------------------------------------------------------------- what a trainer may ask


def test_a_process_knows_whether_it_may_be_behind() -> None:
    cluster = formed()
    node = cluster.host("c").node
    assert not node.may_be_behind()
    cluster.kill("c")
    cluster.until_round("ab", 3)
    reached = cluster.committed
    node = cluster.restart("c").node
    assert node.may_be_behind()
    cluster.until(lambda: not node.may_be_behind(), limit_s=10.0)
    assert node.follower.round >= reached


# ---------------------------------------------------------------- homes that are not whole


@pytest.mark.parametrize("read_s", [0.0, 0.5])
def test_a_file_turns_out_bad_where_another_is_gone_already(read_s: float) -> None:
    """It is behind from the start, or has caught up before the bad one is read."""
    cluster = formed()
    cluster.save_every = 1000
    cluster.read_s = read_s
    cluster.until_round("abc", 4)
    cluster.kill("c")
    disk = cluster.homes["c"]
    last = max(disk.rounds, key=lambda place: place[2])
    del disk.rounds[last]
    disk.rotten |= {*disk.rounds}
    host = cluster.restart("c")
    assert host.node.follower.unsynced
    cluster.run(read_s)
    cluster.until_round("abc", 2, limit_s=10.0)
    assert incarnations(cluster) == {1}


def test_a_restarted_witness_has_no_say_in_which_state_is_right() -> None:
    """It finds where it stood in its home, as a replica does, and no state."""
    cluster = formed("abw", "w")
    for name in "ab":
        cluster.host(name).hangs = True
    cluster.run(1.0)
    cluster.kill("w")
    host = cluster.restart("w")
    own = host.node.follower
    assert own.round == cluster.committed
    cluster.give("w", ev.HomeRead(own.round, own.chain, b"", True))
    cluster.run(2.0)
    beat = lead_of(cluster).roster.heartbeats[peer_id("w")]
    assert (beat.round, beat.digest) == (cluster.committed, b"")
    assert not cluster.noted("diverged")
    for name in "ab":
        cluster.host(name).hangs = False
    cluster.until_round("ab", 2)


def test_a_vote_without_its_result_is_completed_from_another_copy() -> None:
    """b keeps votes only; its machine loses its power when it has voted."""
    cluster = Cluster("")
    cluster.is_durable, cluster.save_every = True, 1
    cluster.homes["b"] = Disk(keeps_rounds=False)
    for name in "ab":
        cluster.add(name)
    cluster.form("ab")
    peer = peer_id("b")
    host = cluster.host("b")
    number = cluster.committed + 2
    cluster.until(lambda: number - 1 == host.round)
    cluster.hold = lambda source, to, message: (
        source == peer
        and (
            (isinstance(message, ms.Ready) and not message.pending)
            or (isinstance(message, ms.Heartbeat) and bool(message.runs) and not message.pending)
        )
    )
    own = host.node.follower
    cluster.until(lambda: number in own.held and own.held[number].durable)
    host.off = True
    cluster.kill("b")
    cluster.hold = lambda source, to, message: (  # its state is read in no time
        isinstance(message, ms.Heartbeat) and message.loading
    )
    own = cluster.restart("b").node.follower
    assert (own.round, own.unsynced) == (number - 1, False)
    assert not own.held[number].is_here
    cluster.until(lambda: number not in own.held or own.held[number].is_here, limit_s=5.0)
    assert number in own.held
    assert cluster.committed < number
    cluster.until(lambda: own.round >= number, limit_s=5.0)
    cluster.until_round("ab", 2)
    assert incarnations(cluster) == {1}


# ---------------------------------------------------------------- slow disks


def test_a_vote_for_an_attempt_that_is_over_is_synced_too_late_to_count() -> None:
    """c's result was another one; the others have gone on without it meanwhile."""
    cluster = formed()
    cluster.homes["b"].sync_s = 0.5
    cluster.until_round("abc", 1)
    number = cluster.committed + 1
    cluster.host("c").garbles = True
    lose(cluster, ms.Repair)  # so that the vote of b is needed
    own = cluster.host("b").node.follower
    begins = begins_of(cluster)
    cluster.until(lambda: bool(cluster.noted("retry")), limit_s=5.0)
    cluster.host("c").garbles = False
    last = begins[-1]
    cluster.until(
        lambda: last.round in own.held and own.held[last.round].run.attempt >= last.attempt
    )
    assert not own.held[last.round].durable
    cluster.until_round("abc", 2)
    assert last.round >= number
    assert incarnations(cluster) == {1}


# ---------------------------------------------------------------- operations


def takes_back(seed: int, *, waits: bool) -> tuple[Cluster, bool]:
    """Let b and c lose operations in a power cut; return also whether any were lost.

    ``waits``: a's trainer wants a step, and waits for it, when a hears so.
    """
    cluster = formed()
    cluster.disk_dice = random.Random(seed)
    cluster.save_every = 1000
    calls: dict[str, Call] = dict.fromkeys("abc", SUM)
    cluster.call_of = lambda host: calls[host.name]
    cluster.until_round("abc", 6)
    for name in "bc" if waits else "abc":
        cluster.host(name).hangs = True
    calls["a"] = None
    cluster.run(1.0)
    for name in "bc":
        cluster.host(name).off = True
        cluster.kill(name)
    cluster.pause("a")
    for name in "bc":
        cluster.restart(name)
        cluster.link("a", name)
    cluster.until(lambda: any(cluster.host(name).leads for name in "bc"), limit_s=10.0)
    assert bool(cluster.host("a").node.follower.submissions) == waits
    cluster.host("a").told.clear()
    cluster.resume("a")
    cluster.until(lambda: cluster.in_one_view("abc"), limit_s=5.0)
    lost = "lost-calls" in cluster.host("a").notes
    cluster.host("a").hangs = False
    cluster.until_round("abc", 2)
    calls["a"] = SUM
    cluster.until_round("abc", 3)
    return cluster, lost


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("seed", "are_lost"), [(0, False), (1, True), (3, True)])
def test_lost_operations_are_told_with_the_next_call_though_a_step_comes_before_it(
    seed: int, *, are_lost: bool, waits: bool
) -> None:
    """The trainer takes the state anew, and goes on."""
    cluster, lost = takes_back(seed, waits=waits)
    assert lost == are_lost
    kinds = [kind for kind, _ in cluster.host("a").told]
    assert kinds.count("lost") == lost
    assert not lost or kinds.index("reload") < kinds.index("lost")
    assert not any(view.rollback for view in cluster.checker.views.values())


def test_who_reads_its_home_attests_no_operation_meanwhile() -> None:
    """It has voted for it, and nobody has heard so: it says it once its state is here."""
    cluster = formed()
    cluster.call_of = lambda host: SUM
    cluster.until_round("abc", 2)
    cluster.detach("c")
    cluster.until_round("abc", 2)
    cluster.kill("b")
    lead, own = lead_of(cluster), cluster.host("c").node.follower
    peer = peer_id("c")
    cluster.hold = lambda source, to, message: (
        source == peer and isinstance(message, ms.Ready | ms.Heartbeat)
    )
    cluster.until(lambda: bool(own.held), limit_s=2.0)
    (number,) = own.held
    cluster.read_s = 1.5
    cluster.kill("c")
    own = cluster.restart("c").node.follower
    cluster.hold = lambda source, to, message: False
    assert number in own.begins
    noticed: list[int] = []

    def note(source: bytes, to: bytes, message: object) -> bool:
        if isinstance(message, ms.Notice) and to == peer and own.loading:
            noticed.append(message.round)
        return False

    cluster.hold = note
    cluster.until(lambda: not own.loading)
    assert noticed
    assert lead.roster.life(peer) == 2
    cluster.until(lambda: cluster.host("a").round >= number, limit_s=5.0)
    cluster.until_round("ac", 2)


# ---------------------------------------------------------------- a witness that owns


def test_a_witness_that_was_restarted_owns_nothing_of_the_attempt_before() -> None:
    """What it had been sent is gone with its process; it owns the results of the next one."""
    cluster = durable("")
    cluster.outbound |= {*"bc"}
    terms = ms.Terms(work=Work((1_000,), 250, "float32"))
    for name in "avbc":
        cluster.add(name, WITNESS if name == "v" else REPLICA)
        if name != "v":
            cluster.give(name, ev.Configured("spec", 1, 1, terms))
    cluster.form("avbc")
    cluster.detach("a")
    cluster.run(cluster.timing.linking_s + 1.0)
    begins = begins_of(cluster)
    cluster.chunk_s = 0.3
    cluster.until(lambda: bool(begins) and busy_with(cluster, "v")())
    first = begins[-1]
    assert first.owners is not None
    assert (first.helpers, first.owners.lives) == ((peer_id("v"),), (1,))
    restart(cluster, "v")
    cluster.until_round("bc", 2)
    last = begins[-1]
    assert last.owners is not None
    assert (last.helpers, last.owners.lives) == ((peer_id("v"),), (2,))
    assert incarnations(cluster, "b") == {1}
