"""Peers with durable homes are the same voters after a restart, whoever and how many they are."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from harness.cluster import Cluster, peer_id

from atoll.peer.membership.view import Rules

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


@pytest.mark.parametrize("dead", ["".join(c) for n in range(1, 6) for c in combinations(NAMES, n)])
def test_every_subset_may_be_restarted(dead: str) -> None:
    cluster = formed()
    for name in dead:
        cluster.kill(name)
    cluster.run(0.1)
    for name in reversed(dead):
        cluster.restart(name)
    assert cluster.until_round(NAMES) < 5.0


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
