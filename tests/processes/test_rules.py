"""What a founder chooses for the worst: two histories that meet, a round whose holders died."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from harness.netns import Net
from harness.processes import Fleet, fleet, until

from atoll.collectives.errors import DivergedError
from atoll.peer.client.ipc_client import ask

WITNESSES = "vwx"


def history(run: Fleet, name: str, kind: str) -> list[str]:
    """What its status tells of forks and rollbacks long after."""
    return [e["text"] for e in run.peers[name].status()["history"] if e["kind"] == kind]


@pytest.mark.slow  # the seeds have it too
def test_where_the_rules_say_so_both_sides_of_a_fork_halt(tmp_path: Path) -> None:
    with fleet(tmp_path, Net("ab")) as run:
        assert run.net is not None
        run.up("a", "--on-fork", "halt")
        run.join("b")
        for name in "ab":
            run.sees(name, 2)
            run.train(name, inner_s=0.1)
        run.peers["b"].reaches(3)
        run.net.split("a", "b")
        run.sees("a", 1)  # the tie-breaker: it has a quorum by itself
        fork = run.sees("b", 1)
        assert fork["fork"]
        number = run.peers["b"].reaches(fork["round"] + 2)["round"]
        run.net.heal()

        def halted(name: str) -> dict[str, Any] | None:
            status = run.peers[name].try_status()
            return status if "two lineages live" in status.get("waiting", "") else None

        stands = {n: until(lambda n=n: halted(n), f"{n} halts", run.peers[n]) for n in "ab"}
        assert stands["a"]["lineage"] != stands["b"]["lineage"] == fork["lineage"]
        assert stands["b"]["round"] >= number
        for name, status in stands.items():
            assert "until the peers of one of them are stopped" in status["waiting"]
            assert status["lineage"] in status["waiting"]
            # Trainers are told instead of waiting for their deadline.
            assert ask(run.peers[name].home, "waiting")["code"] == DivergedError.code
        for name, status in stands.items():  # nobody gave way, and nothing was committed since
            later = run.peers[name].status()
            assert (later["round"], later["lineage"]) == (status["round"], status["lineage"])
            assert not run.peers[name].said("yield")
            assert history(run, name, "met")
        assert history(run, "b", "fork")


@pytest.mark.slow  # the seeds have it too
def test_a_committed_round_whose_last_holder_dies_is_given_up_where_the_rules_say_so(
    tmp_path: Path,
) -> None:
    """Two replicas, three witnesses: a trains alone while b is stopped, and dies before b is back.
    b has neither died nor been voted out, so it has a vote and the last state that anybody has."""
    with fleet(tmp_path) as run:
        run.up("a", "--policy", "majority", "--on-lost", "rollback")
        run.join("b")
        for name in WITNESSES:
            run.start(name, "join", run.invite, "--witness")
        for name in f"ab{WITNESSES}":
            run.sees(name, 5)
        for name in "ab":
            run.train(name, inner_s=0.1)
        run.peers["b"].reaches(3)
        run.peers["b"].kill(signal.SIGSTOP)
        number = run.peers["a"].reaches(run.peers["a"].status()["round"] + 4)["round"]
        assert len(run.peers["a"].status()["members"]) == 5, "b was stopped for too long"
        run.peers["a"].kill()
        run.peers["b"].kill(signal.SIGCONT)
        b = run.peers["b"]
        until(lambda: b.said("rollback"), "b goes back", b)
        [text] = history(run, "b", "rollback")
        back_to = int(text.removeprefix("rounds after ").split()[0])
        assert back_to < number
        for name in f"b{WITNESSES}":
            until(lambda n=name: history(run, n, "rollback"), f"{name} knows", run.peers[name])
        assert f"going back to round {back_to}" in "".join(
            run.peers[name].text for name in f"b{WITNESSES}"
        )
        # The rounds that are lost are made again, and more.
        status = b.reaches(number + 2)
        assert not status["fork"]
        assert b.said("rollback") == 1
        committed = [n["round"] for n in run.trainers["b"].lines if n.get("kind") == "committed"]
        assert set(range(back_to + 1, number + 1)) <= set(committed)
