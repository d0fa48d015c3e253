"""Check heartbeats that say what the last one has said: named, sent whole, and lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from harness.cluster import Cluster, peer_id
from harness.samples import sample

from atoll.peer.membership import messages as ms
from atoll.peer.membership.heartbeats import NAMED_MAX, HeardBeats, ToldBeats

A, B = peer_id("a"), peer_id("b")
BEAT: ms.CoordinatorBeat = sample("CoordinatorBeat", "full")


def test_a_beat_that_says_the_same_is_named_and_now_and_then_whole() -> None:
    told = ToldBeats()
    sent = [told.next(A, replace(BEAT)) for _ in range(2 * (NAMED_MAX + 1))]
    is_whole = [isinstance(each, ms.CoordinatorBeat) for each in sent]
    assert is_whole == 2 * [True, *[False] * NAMED_MAX]


def test_news_and_new_links_get_a_whole_beat() -> None:
    told = ToldBeats()
    assert told.next(A, BEAT) == BEAT
    assert isinstance(told.next(A, BEAT), ms.SameBeat)
    assert told.next(B, BEAT) == BEAT, "it has not heard any"
    other = replace(BEAT, round=BEAT.round + 1)
    assert told.next(A, other) == other
    assert isinstance(told.next(A, other), ms.SameBeat)
    told.forget(A)
    assert told.next(A, other) == other
    assert told.next(A, BEAT) == BEAT, "it was told that, and something else since"


def test_only_the_last_beat_of_that_peer_is_meant() -> None:
    told, heard = ToldBeats(), HeardBeats()
    told.next(A, BEAT)
    same = told.next(A, BEAT)
    assert isinstance(same, ms.SameBeat)
    assert heard.named(A, same) is None
    heard.note(A, replace(BEAT))
    heard.note(B, replace(BEAT, round=BEAT.round + 1))
    assert heard.named(A, same) == BEAT
    assert heard.named(B, same) is None
    heard.forget(A)
    assert heard.named(A, same) is None


def test_a_run_that_does_nothing_sends_few_whole_beats() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    for name in "abc":
        cluster.detach(name)
    cluster.run(2.0)
    sent: Counter[type] = Counter()
    cluster.hold = lambda source, peer, message: bool(sent.update([type(message)]))
    cluster.run(12.0)
    assert sent[ms.SameBeat] > 4 * (sent[ms.Heartbeat] + sent[ms.CoordinatorBeat])
    assert cluster.in_one_view("abc")


def test_a_whole_beat_that_is_lost_costs_nobody_its_place() -> None:
    """Let the coordinator know that b lives, and none of the beats that b names."""
    cluster = Cluster("abc")
    cluster.form("abc")
    lost: list[bool] = []

    def hold(source: bytes, peer: bytes, message: object) -> bool:
        is_whole = source == B and isinstance(message, ms.Heartbeat)
        if is_whole and not lost:
            lost.append(True)
            return True
        return False

    cluster.hold = hold
    for name in "abc":
        cluster.detach(name)
    cluster.run(3.0)
    assert lost
    assert cluster.in_one_view("abc")
    assert not cluster.noted("dead")
    for name in "abc":
        cluster.train(name)
    cluster.until_round("abc", 3, 5.0)
