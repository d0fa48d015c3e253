"""Flipped bits, on the way between peers and in a machine's memory; and readers that stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.bad_path import BadPath, flip_state, listening_port
from harness.health import assert_healthy
from harness.processes import WAIT_S, Fleet, fleet, until

from atoll.collectives.errors import DivergedError

LARGE = 4e6  # a state of many chunks, and rounds that a fault can meet half-way
FLIPS = 12


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[tuple[Fleet, dict[str, BadPath]]]:
    """Three daemons that know each other by the addresses of paths in front of them."""
    made = {name: BadPath() for name in "abc"}
    try:
        with fleet(tmp_path) as run:
            for name, path in made.items():
                verb = ["join", run.invite] if run.invite else ["up", "--run", "demo"]
                peer = run.start(name, *verb, "--advertise", path.address)
                path.target_port = until(
                    lambda p=peer: listening_port(p.pid), f"{name} listens", peer
                )
                run.invite = run.invite or peer.invite
            for name in made:
                run.sees(name, 3)
                run.train(name, LARGE)
            assert_healthy(run)
            yield run, made
    finally:
        for path in made.values():
            path.close()


def test_flipped_bits_in_frames(paths: tuple[Fleet, dict[str, BadPath]]) -> None:
    """The encryption of a link finds each; the link ends and another one takes its place."""
    run, on_the_way = paths
    everyone = run.peers.values()
    for number in range(FLIPS):
        before = sum(path.flipped for path in on_the_way.values())
        turn = ["abc"[(number + i) % 3] for i in range(3)]
        path = until(
            lambda t=turn: next((p for n in t if (p := on_the_way[n]).is_used), None),
            "a path is used",
            *everyone,
        )
        path.flip()
        until(
            lambda n=before: sum(p.flipped for p in on_the_way.values()) > n,
            "a bit is flipped",
            *everyone,
        )
    assert_healthy(run)


def test_a_stopped_reader(paths: tuple[Fleet, dict[str, BadPath]]) -> None:
    """b hears nobody, with its windows full, but its own heartbeats still come."""
    run, on_the_way = paths
    on_the_way["b"].stop_reading()
    number = run.peers["a"].status()["round"]
    for name in "ac":
        run.peers[name].reaches(number + 2)
    on_the_way["b"].read_again()
    assert_healthy(run)


def test_a_learner_that_stops_reading(tmp_path: Path) -> None:
    """A joiner is stopped while it gets the state: rounds wait for a moment, not for good."""
    with fleet(tmp_path) as run:
        run.form("abc")
        for name in "abc":
            run.train(name, 4 * LARGE)
        run.peers["a"].reaches(2)
        joiner = run.join("d")
        until(lambda: joiner.try_status().get("phase") == "learner", "d is a learner", joiner)
        joiner.kill(signal.SIGSTOP)
        number = max(run.peers[name].status()["round"] for name in "abc")
        for name in "abc":
            run.peers[name].reaches(number + 2)
        joiner.kill(signal.SIGCONT)
        assert_healthy(run)


@pytest.mark.parametrize("leads", [False, True], ids=["member", "coordinator"])
def test_a_bit_turns_in_a_daemons_memory(four: Fleet, leads: bool) -> None:
    """The digests of the next commit differ: the minority says so and loads the state."""
    leader = four.coordinator
    victim = leader if leads else "abcd".replace(leader, "")[0]
    peer = four.peers[victim]
    parameters = peer.status()["parameters"]
    before = noticed(four)
    peer.kill(signal.SIGSTOP)
    flip_state(peer.pid, parameters // 2, parameters)
    peer.kill(signal.SIGCONT)
    until(lambda: noticed(four) > before, "it is noticed", *four.peers.values())
    assert_healthy(four, diverged=True)


def test_two_states_without_a_majority_halt_the_run_and_both_are_shown(tmp_path: Path) -> None:
    """Nobody can say which of two is right: the daemons stay, nothing more is committed, and who
    trains at the coordinator is told at the next look instead of after the round deadline."""
    with fleet(tmp_path) as run:
        run.form("ab")
        for name in "ab":
            run.train(name)
        assert_healthy(run)
        leader = run.coordinator
        peer = run.peers["ab".replace(leader, "")]
        parameters = peer.status()["parameters"]
        peer.kill(signal.SIGSTOP)
        flip_state(peer.pid, parameters // 2, parameters)
        peer.kill(signal.SIGCONT)
        trainer = run.trainers[leader]
        assert trainer.ends(WAIT_S) == DivergedError.exit_code
        assert trainer.lines[-1]["error"] == DivergedError.code
        statuses = [run.peers[name].status() for name in "ab"]
        assert len({status["round"] for status in statuses}) == 1
        digests = {status["digest"][:16] for status in statuses}
        assert len(digests) == 2
        shown = run.peers[leader].status()["waiting"]
        for text in (trainer.lines[-1]["what"], shown):
            assert "differs without a majority" in text
            assert all(digest in text for digest in digests)


def noticed(run: Fleet) -> int:
    return sum(peer.said("diverged") for peer in run.peers.values())
