"""How many trainers a round needs: what the run's specification and the view's rules say of it, who
counts, who is told, and how members change it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.cluster import Cluster, peer_id
from harness.newcomers import held, running, view_of

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.messages import Terms
from atoll.peer.membership.operations import BARRIER, Call, Operation
from atoll.peer.membership.view import Ballot, Rules, short
from atoll.peer.rounds.entries import GATHER, REDUCE

TWO = Terms(min_trainers=2)
A, B = peer_id("a"), peer_id("b")
SUM, BARRIERS = Operation(REDUCE, 1000, "sum", "float32"), Operation(GATHER, op=BARRIER)


def stays(cluster: Cluster, seconds: float = 3.0) -> bool:
    """Whether nothing is committed for so long."""
    before = cluster.committed
    cluster.run(seconds)
    return cluster.committed == before


@pytest.mark.parametrize("by_rules", [False, True], ids=["by the specification", "by the rules"])
def test_a_round_waits_for_trainers_and_says_for_whom(by_rules: bool) -> None:
    cluster = Cluster("abc")
    terms = Terms() if by_rules else TWO
    cluster.rules = Rules(min_trainers=2) if by_rules else Rules()
    cluster.checker.min_trainers = terms.min_trainers
    for name in "abc":
        cluster.give(name, ev.Configured("spec", 1, 1, terms))
    cluster.form("abc")
    for name in "bc":
        cluster.detach(name)
    cluster.until(lambda: bool(held(cluster, "c")))
    assert stays(cluster)
    text = (
        f"round {cluster.committed + 1} waits for 1 more trainer: min_trainers is 2, attached:"
        f" {short(A)}; start another (python train.py) or lower it: atoll min-trainers 1"
    )
    assert [held(cluster, name) for name in "abc"] == [text] * 3
    assert not cluster.noted("rejected")
    cluster.train("b")
    cluster.until_round("abc")
    assert held(cluster, "c") == ""


def test_a_retry_of_too_few_is_not_begun() -> None:
    """b dies in the middle of a round: a has its submission, and waits with it until b is back."""
    cluster = running("abw", TWO, "abw")
    cluster.detach("w")
    cluster.chunk_s = 0.2
    lead = cluster.host("a").node.coordinator
    assert lead is not None
    cluster.until(lambda: any(A in x.begin.participants for x in lead.attempts.values()))
    cluster.run(0.05)
    cluster.kill("b")
    cluster.until(lambda: "waits for 1 more trainer" in held(cluster))
    assert stays(cluster, 5.0)
    cluster.restart("b")
    for other in "aw":
        cluster.link(other, "b")
    cluster.give("b", ev.Configured("spec", 1, 1, TWO))
    cluster.until_round("ab")


def test_a_lone_fork_does_not_train_until_fewer_are_enough() -> None:
    cluster = running("ab", TWO, "ab")
    cluster.kill("a")
    cluster.until(lambda: cluster.in_one_view("b"))
    assert view_of(cluster).fork
    assert stays(cluster)
    cluster.give("b", ev.TrainersAsked(1))
    cluster.until_round("b")
    assert view_of(cluster).rules.min_trainers == 1


def test_any_member_may_ask_and_all_views_keep_it() -> None:
    """Views, elections, restarts; and the request survives the loss of its coordinator."""
    cluster = running("abc", Terms(), "abc")
    cluster.give("c", ev.TrainersAsked(2))
    cluster.until(lambda: view_of(cluster).rules.min_trainers == 2)
    cluster.until_round("abc")
    cluster.kill("a")
    cluster.give("c", ev.TrainersAsked(3))
    cluster.until(lambda: view_of(cluster).rules.min_trainers == 3)
    assert view_of(cluster).coordinator != A
    cluster.restart("a")
    for other in "bc":
        cluster.link(other, "a")
    cluster.until(lambda: cluster.in_one_view("abc"))
    cluster.until_round("abc")
    assert view_of(cluster).rules.min_trainers == 3


def test_who_asked_first_does_not_ask_the_second_back() -> None:
    cluster = running("abc", Terms(), "abc")
    for name, count in (("c", 2), ("b", 3), ("c", 1)):
        cluster.give(name, ev.TrainersAsked(count))
        cluster.until(lambda count=count: view_of(cluster).rules.min_trainers == count)
    number = view_of(cluster).number
    cluster.run(2 * cluster.host("a").node.timing.ask_s)
    assert view_of(cluster).number == number
    assert view_of(cluster).rules.min_trainers == 1


def test_a_wait_for_trainers_is_no_inner_phase() -> None:
    """Or the next hung trainer would be waited for as long as they took to come."""
    cluster = running("ab", TWO, "ab")
    cluster.detach("b")
    cluster.until(lambda: "waits for 1 more trainer" in held(cluster))
    lead = cluster.host("a").node.coordinator
    assert lead is not None
    phases_s = list(lead.barrier._phases.lasted_s)
    assert phases_s
    assert stays(cluster, 60.0)
    cluster.train("b")
    cluster.until_round("ab")
    assert max(lead.barrier._phases.lasted_s) < 30.0


def test_a_hung_trainer_is_waited_for_by_name() -> None:
    cluster = running("ab", TWO, "ab")
    cluster.host("b").hangs = True
    cluster.until(lambda: "which is attached" in held(cluster))
    expected = f"waits for the trainer of {short(B)}, which is attached: min_trainers is 2"
    assert expected in held(cluster)
    assert stays(cluster)
    cluster.host("b").hangs = False
    cluster.until_round("ab")


def test_of_an_asynchronous_run_attached_trainers_count() -> None:
    """Rounds are of whoever has submitted; but nobody trains where too few are attached."""
    terms = Terms(min_trainers=2, asynchronous=True)
    cluster = Cluster("ab")
    for name in "ab":
        cluster.give(name, ev.Configured("spec", 1, 1, terms))
    cluster.form("ab", rounds=2)
    cluster.detach("b")
    cluster.until(lambda: "waits for 1 more trainer" in held(cluster))
    assert stays(cluster)
    cluster.give("b", ev.Attached(waits=False))  # it computes
    cluster.until_round("ab")
    assert [len(entry.begin.participants) for entry in cluster.host("a").log][-1] == 1


def test_who_calls_something_else_is_there_and_is_told() -> None:
    """Or who has come to the second of several calls could never be joined."""
    cluster = running("ab", TWO, "ab")
    calls: dict[str, Call] = {"a": BARRIERS, "b": SUM}
    cluster.call_of = lambda host: calls[host.name]
    since = {name: cluster.host(name).node.follower.since for name in "ab"}
    assert since == {"a": 1, "b": 1}
    cluster.detach("a")
    cluster.run(1.0)
    cluster.train("a")  # so it has come later than b
    cluster.until(lambda: "mismatch" in [kind for kind, _ in cluster.host("a").told])
    assert "mismatch" not in [kind for kind, _ in cluster.host("b").told]
    cluster.until_round("ab")
    begins = [entry.begin for entry in cluster.host("a").log]
    lone = [begin for begin in begins if begin.operation == SUM and begin.participants == (B,)]
    assert lone
    assert all(begin.aside == begin.without == (A,) for begin in lone)


def test_a_member_takes_no_part_in_a_round_of_too_few() -> None:
    cluster = running("abc", TWO, start="abc")
    cluster.alarms = frozenset()
    lead = cluster.host("a").node.coordinator
    assert lead is not None
    lead.eligibility.has_trainers = lambda *_: True  # type: ignore[method-assign]
    for name in "bc":
        cluster.detach(name)
    cluster.until(lambda: bool(cluster.noted("rejected")))
    cluster.run(1.0)
    before = cluster.committed
    assert stays(cluster)
    assert cluster.committed == before
    assert {"a", "b", "c"} <= set(cluster.noted("rejected"))


def test_nobody_votes_for_other_rules() -> None:
    """Only ``min_trainers`` may change."""
    cluster = running("abc", Terms(), start="abc")
    cluster.alarms = frozenset()
    view, host = view_of(cluster), cluster.host("b")
    following = replace(
        view, number=view.number + 1, base_round=host.round, base_chain=host.node.follower.chain
    )
    for rules, votes in ((Rules("any"), False), (Rules(min_trainers=3), True)):
        before = len(cluster.noted("rejected"))
        proposal = replace(following, rules=rules)
        accept = ms.Accept(view.lineage, view.number, Ballot(0, A), proposal)
        cluster.checker.decisions.asked.add(3)
        cluster.give("b", ev.Received(A, accept))
        assert (len(cluster.noted("rejected")) == before) == votes
