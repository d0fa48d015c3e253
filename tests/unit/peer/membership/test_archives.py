"""Archives on a virtual clock: they follow whoever coordinates, and help those who come."""

from __future__ import annotations

from harness.cluster import Cluster
from harness.world import peer_id

from atoll.peer.membership import messages as ms
from atoll.peer.membership.phase import Phase
from atoll.peer.membership.view import ARCHIVE


def with_archive(names: str = "ab") -> Cluster:
    cluster = Cluster(names)
    cluster.form(names)
    cluster.add("f", ARCHIVE)
    for name in names:
        cluster.link("f", name)
    cluster.until(lambda: cluster.host("f").round >= 5)
    return cluster


def test_an_archive_follows_without_a_vote_and_without_asking_again() -> None:
    cluster = with_archive()
    asked: list[object] = []

    def listen(source: bytes, peer: bytes, message: object) -> bool:
        if isinstance(message, ms.Join | ms.Redirect):
            asked.append(message)
        return False

    cluster.hold = listen
    number = cluster.host("f").round
    cluster.until(lambda: cluster.host("f").round >= number + 20)
    assert not asked
    assert cluster.in_one_view("ab")
    node = cluster.host("f").node
    assert (node.view, node.phase, node.joining.is_followed) == (None, Phase.LEARNER, True)
    assert node.syncing.rounds_behind <= 5


def test_an_archive_finds_the_next_coordinator() -> None:
    cluster = with_archive("abc")
    view = cluster.host("a").node.view
    assert view is not None
    leader = next(n for n in "abc" if peer_id(n) == view.coordinator)
    cluster.kill(leader)
    number = cluster.committed
    cluster.until(lambda: cluster.host("f").round >= number + 5)
    assert cluster.host("f").node.joining.announcer != peer_id(leader)


def test_learners_are_told_of_archives_and_archives_of_others() -> None:
    cluster = with_archive()
    told: dict[bytes, set[bytes]] = {}

    def listen(source: bytes, peer: bytes, message: object) -> bool:
        if isinstance(message, ms.SyncTarget):
            told.setdefault(peer, set()).update(member.peer for member in message.archives)
        return False

    cluster.hold = listen
    cluster.add("g", ARCHIVE)
    cluster.add("c")
    for name in "gc":
        for member in "ab":
            cluster.link(name, member)
    cluster.until(lambda: cluster.in_one_view("abc"))
    cluster.until(lambda: peer_id("g") in told.get(peer_id("f"), ()))
    assert peer_id("f") in told[peer_id("c")]
    assert peer_id("f") not in told[peer_id("f")]
