"""The phase table against an independent reading of its theory, and driven by real machines."""

from __future__ import annotations

import pytest
from harness.cluster import Cluster
from harness.faults import busy_with, lose

from atoll.collectives.errors import LocalProtocolError
from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership import node as membership
from atoll.peer.membership.phase import TRANSITIONS, Phase, Trigger, next_phase

OUTSIDE = {Phase.OUT, Phase.LEARNER}
INSIDE = {Phase.MEMBER, Phase.COORDINATOR, Phase.CANDIDATE}


def expected(phase: Phase, trigger: Trigger) -> Phase | None:
    """The theory in phase.py, in other words: None where the trigger cannot happen."""
    if phase is Phase.LEFT:
        return None  # final
    if trigger is Trigger.LEAVE:
        return Phase.LEFT
    if trigger is Trigger.LED:
        return Phase.COORDINATOR
    if trigger is Trigger.FOLLOWED:
        return Phase.MEMBER
    if trigger is Trigger.LEARN:
        return Phase.LEARNER if phase in OUTSIDE else None
    if phase in OUTSIDE:
        return None  # who is in no view cannot lose a coordinator, promise or be excluded
    return {
        Trigger.LOST: Phase.CANDIDATE,
        Trigger.OUTBID: Phase.MEMBER,
        Trigger.EXCLUDED: Phase.OUT,
        Trigger.HEARD: Phase.MEMBER if phase is Phase.CANDIDATE else None,  # others wait for nobody
    }[trigger]


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("trigger", Trigger)
def test_table(phase: Phase, trigger: Trigger) -> None:
    following = expected(phase, trigger)
    if following is None:
        with pytest.raises(LocalProtocolError, match=phase.value):
            next_phase(phase, trigger)
        assert (phase, trigger) not in TRANSITIONS
    else:
        assert next_phase(phase, trigger) is following


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Phase, Trigger]]:
    """The transitions that machines go through from here on."""
    taken: set[tuple[Phase, Trigger]] = set()

    def record(phase: Phase, trigger: Trigger) -> Phase:
        taken.add((phase, trigger))
        return next_phase(phase, trigger)

    monkeypatch.setattr(membership, "next_phase", record)
    return taken


def test_a_life_in_a_run(seen: set[tuple[Phase, Trigger]]) -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    assert seen == {
        (Phase.OUT, Trigger.LED),
        (Phase.OUT, Trigger.LEARN),
        (Phase.LEARNER, Trigger.LEARN),
        (Phase.LEARNER, Trigger.FOLLOWED),
        (Phase.MEMBER, Trigger.FOLLOWED),
        (Phase.COORDINATOR, Trigger.LED),
    }
    seen.clear()
    cluster.kill("a")
    cluster.until_round("bc")
    assert {(Phase.MEMBER, Trigger.LOST), (Phase.CANDIDATE, Trigger.LED)} <= seen
    assert (Phase.MEMBER, Trigger.OUTBID) in seen
    cluster.restart("a")
    cluster.until_round("abc")
    seen.clear()
    cluster.leave("b")  # the coordinator hands over
    cluster.until_round("ac")
    assert {(Phase.COORDINATOR, Trigger.LEAVE), (Phase.MEMBER, Trigger.LED)} <= seen
    cluster.leave("a")
    cluster.until(lambda: not cluster.host("a").alive)
    assert (Phase.MEMBER, Trigger.LEAVE) in seen


def test_cut_off_coordinator_is_excluded_and_comes_back(
    seen: set[tuple[Phase, Trigger]],
) -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.isolate("a")
    cluster.until_round("bc")
    cluster.until(lambda: cluster.in_one_view("bc"))  # it is kept for a while
    cluster.heal()
    cluster.until_round("abc")
    assert (Phase.COORDINATOR, Trigger.EXCLUDED) in seen


def test_cut_off_candidate_is_excluded_and_leaves(seen: set[tuple[Phase, Trigger]]) -> None:
    cluster = Cluster("abcd")
    cluster.form("abcd")
    cluster.isolate("c")
    cluster.isolate("d")
    cluster.until(lambda: cluster.host("c").node.phase is Phase.CANDIDATE)
    cluster.until(lambda: cluster.host("d").node.phase is Phase.CANDIDATE)
    cluster.run(3.0)  # nobody answers, so there is no other ballot
    cluster.leave("d")
    cluster.until(lambda: not cluster.host("d").alive)
    cluster.until_round("ab")
    cluster.heal()
    cluster.until_round("abc")
    assert {(Phase.CANDIDATE, Trigger.LEAVE), (Phase.CANDIDATE, Trigger.EXCLUDED)} <= seen


def test_a_candidate_whom_kernels_answer_calls_again(seen: set[tuple[Phase, Trigger]]) -> None:
    cluster = Cluster("abcd")
    cluster.form("abcd")
    for name in "abc":
        cluster.pause(name)  # their machines live
    cluster.until(lambda: cluster.host("d").node.phase is Phase.CANDIDATE)
    cluster.run(3.0)
    assert (Phase.CANDIDATE, Trigger.LOST) in seen


def test_leaving_before_one_is_in(seen: set[tuple[Phase, Trigger]]) -> None:
    cluster = Cluster("abc")
    cluster.leave("b")
    assert (Phase.OUT, Trigger.LEAVE) in seen
    cluster.form("a")
    cluster.stuck = lambda host, donor: True
    cluster.link("a", "c")
    cluster.until(lambda: cluster.host("c").node.phase is Phase.LEARNER)
    cluster.leave("c")
    assert (Phase.LEARNER, Trigger.LEAVE) in seen
    assert [cluster.host(n).alive for n in "abc"] == [True, False, False]


def test_frozen_voter_makes_the_coordinator_stand(seen: set[tuple[Phase, Trigger]]) -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.until(busy_with(cluster, "b"))
    lose(cluster, ms.Promise)  # b and c stand against a, and come to nothing
    cluster.isolate("a")
    cluster.until(lambda: any(cluster.host(n).node.frozen for n in "bc"), 3.0)
    cluster.heal()
    cluster.until_round("abc")
    assert (Phase.COORDINATOR, Trigger.LOST) in seen


def test_a_coordinator_that_is_heard_again_makes_a_member_of_a_candidate(
    seen: set[tuple[Phase, Trigger]],
) -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.cut.add(frozenset((cluster.host("a").peer, cluster.host("c").peer)))
    cluster.run(2.0)  # c stands against a, which b still hears
    cluster.heal()
    cluster.until_round("abc")
    assert (Phase.CANDIDATE, Trigger.HEARD) in seen
    assert (Phase.COORDINATOR, Trigger.LOST) not in seen


def test_left_is_final() -> None:
    cluster = Cluster("a")
    cluster.form("a")
    node = cluster.host("a").node
    cluster.leave("a")
    assert node.phase is Phase.LEFT
    assert node.handle(ev.Tick(), 100.0) == []
    assert node.handle(ev.Found(b"x" * 32), 100.0) == []
    assert node.next_deadline_s() is None
