"""Collectives of trainers in a group of machines: who takes part, who is told what."""

from __future__ import annotations

from collections import Counter

from harness.cluster import Cluster, Host, peer_id
from harness.values import giver_of

from atoll.peer.membership import events as ev
from atoll.peer.membership.messages import Begin, Commit, Heartbeat, Notice, ObjectIs
from atoll.peer.membership.operations import Call, Operation, unpack_objects
from atoll.peer.rounds.entries import GATHER, REDUCE, STEP

GATHERS, SUM = Operation(GATHER), Operation(REDUCE, 1000, "sum", "float32")


def formed(names: str = "abc", calls: dict[str, Call] | None = None) -> Cluster:
    """A run in which all trainers make these calls, or ``calls``, by name, from round 3 on."""
    cluster = Cluster(names)
    cluster.form(names)
    made = calls or dict.fromkeys(names, GATHERS)
    cluster.call_of = lambda host: made.get(host.name, GATHERS) if host.round >= 2 else None
    return cluster


def results(cluster: Cluster, name: str) -> list[Begin]:
    """The operations whose results its trainer got; recorded from now on."""
    got: list[Begin] = []
    before = cluster._carry[ev.TellTrainer]

    def tell(host: Host, effect: ev.TellTrainer) -> None:
        if host.name == name and effect.begin is not None:
            got.append(effect.begin)
        before(host, effect)

    cluster._carry[ev.TellTrainer] = tell
    return got


def told(cluster: Cluster, name: str) -> list[str]:
    return [kind for kind, _ in cluster.host(name).told]


def test_gathers_are_committed_like_any_round_and_change_nothing() -> None:
    cluster = formed()
    cluster.until(lambda: cluster.committed >= 3)
    got = results(cluster, "b")
    digest = cluster.host("a").state.digest
    cluster.until_round("abc", 5)
    assert {host.state.digest for host in cluster.living()} == {digest}
    assert len(got) >= 4
    for begin in got:
        objects = unpack_objects(begin.blob, 3)
        assert objects is not None
        assert [giver_of(data)[0] for data in objects] == [peer_id(name) for name in "abc"]


def test_a_lost_object_is_sent_again() -> None:
    cluster = formed()
    lost = []

    def hold(source: bytes, peer: bytes, message: object) -> bool:
        first = isinstance(message, ObjectIs) and source == peer_id("c") and len(lost) < 2
        if first:
            lost.append(message)
        return first

    cluster.hold = hold
    took_s = cluster.until_round("abc", 2)
    assert len(lost) == 2
    assert took_s < 3.0


def test_an_old_object_is_not_taken_for_a_new_one() -> None:
    """The heartbeat names the object: another one from the same peer does not open the round."""
    cluster = formed("ab")
    cluster.until(lambda: cluster.committed >= 3)
    held: list[ObjectIs] = []

    def hold(source: bytes, peer: bytes, message: object) -> bool:
        if isinstance(message, ObjectIs):
            held.append(message)
        return isinstance(message, ObjectIs)

    cluster.hold = hold
    cluster.run(1.0)
    before = cluster.committed
    old = ObjectIs(held[-1].lineage, held[-1].view, b"an older one")
    cluster.give("a", ev.Received(peer_id("b"), old))
    cluster.run(1.0)
    assert cluster.committed == before
    cluster.give("a", ev.Received(peer_id("b"), held[-1]))
    cluster.run(0.2)
    assert cluster.committed == before + 1


def test_who_calls_something_else_hears_of_it_and_the_others_go_on() -> None:
    cluster = formed("abc", {"a": GATHERS, "b": SUM, "c": SUM})
    got = results(cluster, "b")
    cluster.until_round("abc", 3)
    assert told(cluster, "a")[-1] == "mismatch"
    assert {begin.operation for begin in got} == {SUM}
    assert all(begin.participants == (peer_id("b"), peer_id("c")) for begin in got)
    assert all(peer_id("a") in begin.without for begin in got)


def test_of_two_that_differ_the_smaller_one_decides() -> None:
    cluster = formed("ab", {"a": GATHERS, "b": SUM})
    got = results(cluster, "a")
    cluster.until_round("ab", 3)
    assert {begin.operation for begin in got} == {GATHERS}
    assert "mismatch" in told(cluster, "b")


def test_a_step_among_operations_is_missed_not_refused() -> None:
    """Its trainer keeps its parameters and goes on, as when its submission was late."""
    cluster = formed("abc", {"a": GATHERS, "b": GATHERS, "c": None})
    before = len(told(cluster, "c"))
    cluster.until_round("abc", 3)
    assert set(told(cluster, "c")[before:]) <= {"committed", "missed"}
    assert told(cluster, "c")[-1] == "missed"
    assert cluster.noted("mismatch")


def test_a_joiner_is_in_the_next_one_and_hears_of_no_other() -> None:
    cluster = formed("ab")
    cluster.add("c")
    for name in "ab":
        cluster.link("c", name)
    cluster.until(
        lambda: cluster.in_one_view("abc") and not cluster.host("c").node.follower.unsynced
    )
    got = results(cluster, "c")
    cluster.train("c")
    cluster.until_round("abc", 3)
    assert got
    assert told(cluster, "c") == ["reload"] + ["committed"] * len(got)


def test_who_comes_with_a_call_of_its_own_is_not_alone_in_it() -> None:
    """The others are in a phase of a minute: they are not late, and nobody misses a round."""
    cluster = formed("abc", dict.fromkeys("abc"))
    for name in "abc":
        cluster.host(name).inner_s = 60.0
    cluster.until_round("abc", 6, limit_s=400.0)
    cluster.detach("c")
    cluster.until_round("ab", 1, limit_s=90.0)
    cluster.call_of = lambda host: GATHERS if host.name == "c" else None
    cluster.host("c").inner_s = 0.05
    counts = {name: len(told(cluster, name)) for name in "abc"}
    cluster.train("c")
    cluster.until_round("ab", 3, limit_s=200.0)
    kinds = {name: set(told(cluster, name)[count:]) for name, count in counts.items()}
    assert kinds == {"a": {"committed"}, "b": {"committed"}, "c": {"mismatch"}}
    assert not cluster.noted("stragglers")


def test_a_call_after_each_round_says_nothing_about_phases() -> None:
    """Or a slow trainer would be waited for as if the others took no time for a round."""

    def call_of(host: Host) -> Call:
        is_step = host.round % 2 == 0
        host.inner_s = 0.05 if is_step else 20.0
        return None if is_step else GATHERS

    cluster = formed("abc")
    cluster.call_of = call_of
    cluster.until_round("abc", 24, limit_s=400.0)
    lead = cluster.host("a").node.coordinator
    assert lead is not None
    assert min(lead.barrier._phases.lasted_s) > 19.0


def test_a_straggler_is_told_once_and_is_in_the_next_one() -> None:
    cluster = formed()
    cluster.until(lambda: cluster.committed >= 3)
    straggler = cluster.host("c")
    straggler.hangs = True
    before = cluster.committed
    cluster.until(lambda: cluster.committed >= before + 3, limit_s=90.0)
    count = len(straggler.told)
    straggler.hangs = False
    cluster.until_round("abc", 4)
    kinds = told(cluster, "c")[count:]
    assert kinds[0] == "missed"
    assert set(kinds[1:]) == {"committed"}


def test_a_death_in_a_reduction_leaves_nothing_of_the_dead() -> None:
    """A retry keeps no chunk: a sum over three is not a sum over two."""
    cluster = formed("abc", dict.fromkeys("abc", SUM))
    cluster.chunk_s = 0.05
    cluster.until(lambda: cluster.committed >= 3)
    got = results(cluster, "a")
    cluster.until(lambda: any(0 < len(j.finals) < 4 for j in cluster.host("c").jobs.values()))
    cluster.kill("c")
    cluster.until_round("ab", 2)
    assert got[0].participants in ((peer_id("a"), peer_id("b")), tuple(map(peer_id, "abc")))
    assert got[-1].participants == (peer_id("a"), peer_id("b"))
    assert not any(begin.kept or begin.past for begin in got)


def test_who_trains_nothing_attests_an_all_reduce_and_copies_nothing() -> None:
    """Its vectors are for the trainers that gave them; the others move on with the commit."""
    cluster = formed("abcd", dict.fromkeys("abcd", SUM))
    cluster.detach("b")
    cluster.detach("d")
    cluster.until_round("abcd", 2)
    fetched: list[str] = []
    before = cluster._carry[ev.Fetch]

    def fetch(host: Host, effect: ev.Fetch) -> None:
        fetched.append(host.name)
        before(host, effect)

    cluster._carry[ev.Fetch] = fetch
    got = results(cluster, "c")
    cluster.until_round("abcd", 5)
    assert all(begin.participants == (peer_id("a"), peer_id("c")) for begin in got)
    assert not fetched
    assert not cluster.noted("unsynced")
    assert {host.round for host in cluster.living()} == {cluster.committed}


def test_an_attester_that_has_voted_is_not_asked_again() -> None:
    """Four of seven votes are needed, and the others have not heard that there is something."""
    cluster = formed("abcdefg", dict.fromkeys("abcdefg", SUM))
    for name in "cdefg":
        cluster.detach(name)
    cluster.until_round("abcdefg", 3)
    asked: Counter[str] = Counter()

    def hold(source: bytes, peer: bytes, message: object) -> bool:
        name = cluster.hosts[peer].name
        if isinstance(message, Notice):
            asked[name] += 1
        return isinstance(message, Notice) and name != "c"

    cluster.hold = hold
    cluster.until(lambda: asked["d"] >= 3)
    assert asked["c"] <= asked["d"] - 2
    cluster.hold = lambda source, peer, message: False
    cluster.until_round("abcdefg", 2)


def test_a_coordinator_without_a_trainer_commits_what_others_hold() -> None:
    cluster = formed("abc", dict.fromkeys("abc", SUM))
    lead = next(host.name for host in cluster.living() if host.leads)
    cluster.detach(lead)
    got = results(cluster, "c" if lead != "c" else "b")
    cluster.until_round("abc", 4)
    assert got
    assert peer_id(lead) not in got[-1].participants
    cluster.kill(lead)
    cluster.until_round("abc".replace(lead, ""), 3)


def test_the_base_may_be_an_all_reduce_that_only_an_attester_knows_of() -> None:
    """Both trainers' daemons die as they commit; who attested it goes on from there."""
    cluster = formed("abcde", dict.fromkeys("abcde", SUM))
    for name in "cde":
        cluster.detach(name)
    cluster.until_round("abcde", 2)
    noticed: list[str] = []

    def hold(source: bytes, peer: bytes, message: object) -> bool:
        if isinstance(message, Notice):
            noticed.append(cluster.hosts[peer].name)
        return isinstance(message, Commit)

    cluster.hold = hold
    cluster.until(lambda: {"c", "d", "e"} <= set(noticed))
    cluster.run(0.01)
    attested = {host.round for host in cluster.living() if host.name in "cde"}
    cluster.kill("a")
    cluster.kill("b")
    cluster.hold = lambda source, peer, message: False
    cluster.train("c")
    cluster.until_round("cde", 2)
    assert not cluster.noted("base-lost")
    assert attested == {min(attested)}


def test_who_is_left_out_of_a_retry_hears_of_it_at_once() -> None:
    cluster = formed("abc", dict.fromkeys("abc", SUM))
    cluster.until(lambda: cluster.committed >= 3)
    cluster.unusable = "b"
    cluster.until(lambda: "failed" in told(cluster, "b"))
    first = told(cluster, "b").index("failed")
    cluster.until_round("ac", 2)
    assert set(told(cluster, "b")[first:]) == {"failed"}
    cluster.unusable = ""
    cluster.until_round("abc", 2)
    assert told(cluster, "b")[-1] == "committed"


def test_who_is_alone_and_failed_may_call_again() -> None:
    """Seed 787: the round was given up, and nothing was left that a new call could wait for."""
    cluster = formed("a", {"a": SUM})
    cluster.until(lambda: cluster.committed >= 3)
    cluster.unusable = "a"
    cluster.until(lambda: told(cluster, "a")[-2:] == ["failed", "failed"])
    cluster.unusable = ""
    cluster.until_round("a", 2)


def test_the_coordinator_dies_with_the_objects() -> None:
    cluster = formed()
    cluster.until(lambda: cluster.committed >= 3)
    lead = next(host.name for host in cluster.living() if host.leads)
    cluster.kill(lead)
    rest = "abc".replace(lead, "")
    cluster.until_round(rest, 3)
    for name in rest:
        assert told(cluster, name)[-1] == "committed"


def test_who_missed_the_commit_hears_that_it_missed_the_round() -> None:
    cluster = formed()
    cluster.until(lambda: cluster.committed >= 3)
    deaf = cluster.host("c")

    def hold(source: bytes, peer: bytes, message: object) -> bool:
        return peer == deaf.peer and isinstance(message, Begin)

    cluster.hold = hold
    cluster.until_round("ab", 2)
    cluster.hold = lambda source, peer, message: False
    cluster.until_round("abc", 3)
    assert {"missed", "reload"} & set(told(cluster, "c")[1:])  # the first is of INIT
    assert told(cluster, "c")[-1] == "committed"


def test_steps_and_operations_take_turns() -> None:
    cluster = formed()
    cluster.call_of = lambda host: GATHERS if host.round % 2 else None
    kinds: list[str] = []
    before = cluster._carry[ev.Apply]

    def apply(host: Host, effect: ev.Apply) -> None:
        if host.name == "a":
            kinds.append(effect.begin.kind)
        before(host, effect)

    cluster._carry[ev.Apply] = apply
    cluster.until_round("abc", 6)
    assert kinds[-4:] in ([STEP, GATHER] * 2, [GATHER, STEP] * 2)


def test_a_heartbeat_says_what_waits() -> None:
    cluster = formed("ab")
    heartbeats: list[Heartbeat] = []

    def hold(source: bytes, peer: bytes, message: object) -> bool:
        if isinstance(message, Heartbeat):
            heartbeats.append(message)
        return False

    cluster.hold = hold
    cluster.until_round("ab", 2)
    waiting = [beat for beat in heartbeats if beat.arrived]
    assert waiting
    assert all(beat.operation == GATHERS and beat.given for beat in waiting if beat.round > 2)
    assert all(beat.operation is None and not beat.given for beat in heartbeats if not beat.arrived)
