"""AsyncDiLoCo with real daemons: nobody waits for the slow, nobody's work is lost, all agree."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.callers import callers
from harness.processes import Fleet, Process, fleet, until
from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.optim import AsyncDiLoCo

SLOW_S, FAST_S = 2.0, 0.02
NEVER_S = 3600.0


def train(run: Fleet, name: str, inner_s: float = FAST_S) -> Process:
    return run.train(name, inner_s=inner_s, method="async_diloco")


def outcomes(trainer: Process) -> list[dict[str, Any]]:
    return [line for line in trainer.lines if "kind" in line]


def commits(trainer: Process, rounds: int) -> list[dict[str, Any]]:
    """Its commits, once there are so many. It misses none.

    Whose daemon falls behind, as on a busy machine, has to load the state instead, and hears that.
    """

    def there() -> list[dict[str, Any]]:
        found = [line for line in outcomes(trainer) if line["kind"] == "committed"]
        return found if len(found) >= rounds else []

    found = until(there, f"it contributes to {rounds} rounds", trainer)
    assert {line["kind"] for line in outcomes(trainer)} <= {"committed", "reload"}
    return found


def settled(run: Fleet, names: str) -> None:
    """Without trainers: all come to the same round, with the same bits."""
    for name in names:
        if name in run.trainers:
            run.trainers[name].kill()
            run.trainers[name].ends()

    def same() -> bool:
        found = [run.peers[name].try_status() for name in names]
        digests = {status.get("digest") for status in found}
        rounds = {status.get("round") for status in found}
        return len(digests) == len(rounds) == 1 and None not in digests

    until(same, "all are in the same state", *(run.peers[name] for name in names))
    assert run.agree(names) >= 1


@pytest.mark.slow
def test_fast_peers_go_on_while_a_slow_one_computes(tmp_path: Path) -> None:
    """Whose work counts all the same, though many rounds have gone by since it began."""
    with fleet(tmp_path) as run:
        run.form("abc")
        for name in "ab":
            train(run, name)
        slow = train(run, "c", SLOW_S)
        mine = commits(slow, 3)
        rounds = [line["round"] for line in mine]
        assert all(later - earlier > 4 for earlier, later in itertools.pairwise(rounds))
        for name in "ab":
            assert len(commits(run.trainers[name], 10)) > len(outcomes(slow))
        settled(run, "abc")


@pytest.mark.slow
def test_all_coordinate_well_whoever_is_slow(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        slow = run.coordinator
        train(run, slow, SLOW_S)
        for name in "abc".replace(slow, ""):
            train(run, name)
        rounds = [line["round"] for line in commits(run.trainers[slow], 2)]
        assert rounds[1] - rounds[0] > 4
        settled(run, "abc")


def test_a_trainer_that_is_stopped_or_killed_is_not_waited_for(tmp_path: Path) -> None:
    """The others' limit for stragglers is half a minute; here they never come to it."""
    with fleet(tmp_path) as run:
        run.form("abc")
        for name in "ab":
            train(run, name)
        commits(train(run, "c"), 2)
        run.trainers["c"].kill(signal.SIGSTOP)
        for name in "ab":
            commits(run.trainers[name], len(outcomes(run.trainers[name])) + 5)
        run.trainers["c"].kill()
        for name in "ab":
            commits(run.trainers[name], len(outcomes(run.trainers[name])) + 5)
        commits(train(run, "c"), 2)  # another one takes its place
        assert not any(run.peers[name].said("stragglers") for name in "abc")
        settled(run, "abc")


@pytest.mark.slow
def test_a_joiner_in_the_middle_of_a_window_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Of three rounds; and so does a daemon that is killed, whichever round it is in."""
    with fleet(tmp_path) as run:
        run.form("abc")
        for name in "abc":
            train(run, name)
        number = run.peers["b"].reaches(5)["round"]
        run.join("d")
        run.peers["d"].reaches(number)
        commits(train(run, "d"), 3)
        run.peers["a"].kill()
        for name in "bcd":
            commits(run.trainers[name], len(outcomes(run.trainers[name])) + 4)
        settled(run, "bcd")


def test_one_peer_trains_while_another_holds_the_state_only(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("ab")
        commits(train(run, "b"), 6)
        train(run, "a", NEVER_S)
        until(lambda: run.trainers["a"].lines, "it is attached", run.trainers["a"])
        commits(run.trainers["b"], len(outcomes(run.trainers["b"])) + 6)
        settled(run, "ab")


def test_collectives_are_refused(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("a")
        with callers(run, "a") as trainers:

            def refused(session: Any) -> str:
                model = nn.Linear(2, 2)
                inner = torch.optim.SGD(model.parameters(), lr=0.1)
                AsyncDiLoCo(model, inner, 1, session, outer_delay=2)
                try:
                    session.barrier()
                except ConfigError as error:
                    return error.what
                return ""

            (said,) = trainers.each(refused).values()
    assert "async_diloco" in said
