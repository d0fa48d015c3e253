"""Broken paths between hosts: silence, partitions of several shapes, half-open connections.

Five daemons, each in a network namespace. Nothing resets a connection here: packets vanish.
"""

from __future__ import annotations

import signal
import sys

import pytest
from harness.health import assert_healthy
from harness.netns import Net
from harness.processes import NET_PORT, Fleet, Process, until

EVERYBODY = "abcde"
# Takes connections and never says a word, as another program on that port might.
MUTE = (
    "import socket, sys, time\n"
    "taken = []\n"
    "listener = socket.create_server((sys.argv[1], int(sys.argv[2])))\n"
    "print('listening', flush=True)\n"
    "while True:\n    taken.append(listener.accept())\n"
)


def net_of(run: Fleet) -> Net:
    assert run.net is not None
    return run.net


def round_of(run: Fleet, names: str) -> int:
    return max(run.peers[name].status()["round"] for name in names)


def go_on(run: Fleet, names: str, rounds: int = 2) -> None:
    """These commit more rounds, whatever the others do."""
    number = round_of(run, names)
    for name in names:
        run.peers[name].reaches(number + rounds)


def parted(run: Fleet, leader_in_minority: bool) -> tuple[str, str]:
    """(two, three) names, with the coordinator where it is asked to be."""
    leader = run.coordinator
    rest = EVERYBODY.replace(leader, "")
    if leader_in_minority:
        return leader + rest[0], rest[1:]
    return rest[:2], leader + rest[2:]


def quorums_missed(run: Fleet) -> dict[str, int]:
    return {name: run.peers[name].said("no-quorum") for name in EVERYBODY}


def without_quorum(run: Fleet, names: str, before: dict[str, int]) -> bool:
    """One of these has said so; the others of its part follow it."""
    return any(run.peers[name].said("no-quorum") > before[name] for name in names)


@pytest.mark.parametrize("leads", [False, True], ids=["member", "coordinator"])
def test_a_silent_host(five: Fleet, leads: bool) -> None:
    leader = five.coordinator
    silent = leader if leads else EVERYBODY.replace(leader, "")[0]
    cut = net_of(five).silence(silent)
    go_on(five, EVERYBODY.replace(silent, ""))
    cut.undo()
    assert_healthy(five)


@pytest.mark.parametrize("leads", [False, True], ids=["member", "coordinator"])
def test_a_host_dies_without_a_word(five: Fleet, leads: bool) -> None:
    """No reset ever comes: to the others its connections are half open until they see through."""
    leader = five.coordinator
    dead = leader if leads else EVERYBODY.replace(leader, "")[0]
    cut = net_of(five).silence(dead)
    five.peers[dead].kill()
    go_on(five, EVERYBODY.replace(dead, ""))
    cut.undo()
    five.peers[dead].ends()
    five.restart(dead)
    assert_healthy(five)


@pytest.mark.parametrize("leads", [False, True], ids=["majority_leads", "minority_leads"])
def test_two_against_three(five: Fleet, leads: bool) -> None:
    two, three = parted(five, leads)
    lineage = five.peers["a"].status()["lineage"]
    said = quorums_missed(five)
    cut = net_of(five).split(two, three)
    go_on(five, three)
    until(lambda: without_quorum(five, two, said), f"one of {two} says that it has no quorum")
    number = round_of(five, two)
    go_on(five, three, 3)
    assert round_of(five, two) == number  # the minority commits nothing
    cut.undo()
    assert_healthy(five)
    assert five.peers["a"].status()["lineage"] == lineage


def test_nobody_reaches_a_quorum(five: Fleet) -> None:
    """Three parts of 2, 2 and 1: all stop. Then they go on as if nothing had been."""
    lineage = five.peers["a"].status()["lineage"]
    said = quorums_missed(five)
    parts = ("ab", "cd", "e")
    cut = net_of(five).split(*parts)
    for part in parts:
        until(lambda p=part: without_quorum(five, p, said), f"one of {part} says: no quorum")
    cut.undo()
    assert_healthy(five)
    assert five.peers["a"].status()["lineage"] == lineage


def test_a_bridge(five: Fleet) -> None:
    """Two halves that hear each other only through one host, which hears everybody."""
    leader = five.coordinator
    rest = EVERYBODY.replace(leader, "")
    cut = net_of(five).split(leader + rest[0], rest[1:3])
    go_on(five, leader + rest[0] + rest[3])
    cut.undo()
    assert_healthy(five)


@pytest.mark.parametrize("way", ["to_the_coordinator", "from_the_coordinator", "between_members"])
def test_a_cut_one_way(five: Fleet, way: str) -> None:
    leader = five.coordinator
    one, other, *rest = EVERYBODY.replace(leader, "")
    ends = {
        "to_the_coordinator": (one, leader),
        "from_the_coordinator": (leader, one),
        "between_members": (one, other),
    }[way]
    cut = net_of(five).cut(*ends)
    go_on(five, "".join(rest) + (leader if way == "between_members" else other))
    cut.undo()
    assert_healthy(five)


@pytest.mark.parametrize("leads", [False, True], ids=["members", "coordinator"])
def test_half_open_connections(five: Fleet, leads: bool) -> None:
    """What exists carries nothing any more, without a reset; new connections work. So the fleet
    must be whole again although nothing is repaired."""
    leader = five.coordinator
    one, other, *_ = EVERYBODY.replace(leader, "")
    pair = (leader, one) if leads else (one, other)
    assert net_of(five).connections(*pair)
    cut = net_of(five).half_open(*pair)
    go_on(five, EVERYBODY)
    assert_healthy(five)
    cut.undo()


def test_a_port_in_use(five: Fleet) -> None:
    """Another program has taken a dead daemon's port: it is told so, takes another one and is
    found; whoever calls the old address meets somebody who never speaks."""
    net = net_of(five)
    five.peers["e"].kill(signal.SIGKILL)
    five.peers["e"].ends()
    five.trainers["e"].ends()
    command = net.command("e", [sys.executable, "-c", MUTE, net.address("e"), str(NET_PORT)])
    squatter = Process(command, five.folder / "squatter.log")
    try:
        until(lambda: "listening" in squatter.text, "the port is taken", squatter)
        refused = five.start("e", "up", "--run", "demo")
        assert refused.ends() == 2
        assert "ATOLL-E" in refused.text
        assert str(NET_PORT) in refused.text
        five.restart("e", port=0)
        assert_healthy(five)
    finally:
        squatter.kill()
        squatter.ends()
