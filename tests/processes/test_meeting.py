"""Trainers that are to train together: rounds that wait for enough of them, and what people see of
it. Who comes later in the middle of calls breaks nothing.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.callers import Callers, callers
from harness.processes import DAEMON, WAIT_S, Fleet, Peer, fleet, until

from atoll.collectives.errors import CollectiveMismatchError, ConfigError
from atoll.optim import DiLoCo
from atoll.peer.client.session import Session
from atoll.peer.daemon.status import render

ROUNDS = 4
SIZE = 12


class Trainer:
    """DiLoCo with one local step a round, whose closure returns the loss."""

    def __init__(self, session: Session, **terms: int) -> None:
        self.session = session
        self._model = torch.nn.Linear(SIZE, 1, bias=False)
        self._inner = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self.outer = DiLoCo(self._model, self._inner, 1, session, **terms)  # type: ignore[arg-type]
        self.rounds: list[int] = []

    def _loss(self) -> torch.Tensor:
        self._inner.zero_grad()
        loss = (self._model.weight - 1).square().mean()
        loss.backward()
        return loss

    def train(self, rounds: int = ROUNDS) -> list[int]:
        """The numbers of the rounds that were committed with it, and no others."""
        for _ in range(rounds):
            self._inner.step(self._loss)
            self.rounds.append(int(self.outer.metrics()["round"]))
        return self.rounds


def waits(peer: Peer, pattern: str) -> str:
    """What its status says, once that is this."""

    def said() -> str:
        text = str(peer.try_status().get("waiting", ""))
        return text if re.fullmatch(pattern, text) else ""

    return until(said, f"{peer.name} waits: {pattern}", peer)


def started(trainers: Callers, name: str, **terms: int) -> Trainer:
    session = trainers.sessions[name]
    return trainers.start(name, lambda: Trainer(session, **terms)).result(WAIT_S)


def atoll(peer: Peer, *words: str) -> str:
    command = [sys.executable, *DAEMON, *words, "--home", str(peer.home)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_trainers_that_start_apart_share_every_round(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("ab")
        with callers(run, "ab") as trainers:
            a, names = run.peers["a"], trainers.names
            first = started(trainers, "a", min_trainers=2)
            alone = trainers.start("a", first.train)
            text = waits(a, "round 2 waits for 1 more trainer: .*")
            assert text == (
                f"round 2 waits for 1 more trainer: min_trainers is 2, attached: {names['a']};"
                " start another (python train.py) or lower it: atoll min-trainers 1"
            )
            assert waits(run.peers["b"], "round 2 waits for 1 more trainer: .*") == text
            assert text in a.text  # its log says so too
            assert "at least 2: with fewer no round begins" in render(a.status())
            assert not alone.done()
            second = started(trainers, "b", min_trainers=2)
            together = trainers.start("b", second.train)
            assert alone.result(WAIT_S) == together.result(WAIT_S) == [2, 3, 4, 5]
            for trainer in (first, second):
                figures = trainer.outer.metrics()
                assert (figures["peers"], figures["rounds_alone"]) == (2, 0)
            shows_each_round(run, names)


def shows_each_round(run: Fleet, names: dict[str, str]) -> None:
    """Who was in it, seconds, bytes, and the loss that the closures have returned."""
    both = ", ".join(sorted(names.values()))
    for peer in run.peers.values():
        lines = re.findall(r"^[0-9:]{8} round      (.*)$", peer.text, re.MULTILINE)
        assert re.fullmatch(r"1  first parameters  1 peer \(.*\)  .*", lines[0])
        assert len(lines) == 1 + ROUNDS
        for number, line in enumerate(lines[1:], 2):
            found = re.fullmatch(
                rf"{number}  2 peers \((.*?)\)  [0-9.]+ s \((?:compute [0-9.]+, )?exchange [0-9.]+"
                r"(?:, wait [0-9.]+(?: for \w+)?)?\)"  # where the machine is busy
                r"  [0-9.]+ [kM]?B sent  loss ([0-9.]+)",
                line,
            )
            assert found is not None, line
            assert ", ".join(sorted(found[1].split(", "))) == both
        shown = peer.status()["trainer"]["metrics"]["loss"]
        assert float(found[2]) == pytest.approx(shown, rel=1e-3)
        kinds = {event["kind"] for event in peer.status()["events"]}
        assert "round" not in kinds  # or nothing else would be left there


def test_figures_travel_with_the_submission_as_means_of_the_round(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.up("a")
        a = run.peers["a"]
        with callers(run, "a") as trainers:

            def train(session: Session) -> None:
                model = torch.nn.Linear(SIZE, 1)
                inner = torch.optim.SGD(model.parameters(), lr=0.01)
                outer = DiLoCo(model, inner, 2, session)
                for number, losses in enumerate(((1.0, 3.0), (5.0, 9.0)), 1):
                    for loss in losses:
                        model(torch.ones(1, SIZE)).sum().backward()
                        outer.report(loss=torch.tensor(loss, requires_grad=True), accuracy=0.5)
                        inner.step()
                    metrics = session.status()["trainer"]["metrics"]
                    mean = {"loss": sum(losses) / 2, "accuracy": 0.5}
                    assert metrics == mean | {"steps": 2.0 * number}
                with pytest.raises(ConfigError, match="loss is not one number"):
                    outer.report(loss=torch.ones(2))

            trainers.each(train)
        assert re.search(r" round +2 .* loss 2$", a.text, re.MULTILINE)
        assert re.search(r" round +3 .* loss 7$", a.text, re.MULTILINE)


def test_after_a_death_the_run_waits_until_fewer_are_enough(tmp_path: Path) -> None:
    """Two of three die, one after the other; the last one is a fork, which trains no round either
    before its members agree that one trainer is enough."""
    with fleet(tmp_path) as run:
        run.up("a", "--min-trainers", "2", "--policy", "any")
        for name in "bc":
            run.join(name)
        for name in "abc":
            run.sees(name, 3)
        with callers(run, "abc") as trainers:
            made = {name: started(trainers, name) for name in "abc"}  # the script says nothing
            calls = {n: trainers.start(n, made[n].train) for n in "abc"}
            assert {call.result(WAIT_S)[-1] for call in calls.values()} == {1 + ROUNDS}
            a, names = run.peers["a"], trainers.names
            alone = trainers.start("a", made["a"].train)
            for name in "bc":
                run.peers[name].kill()
            run.sees("a", 1)
            assert a.status()["fork"]
            waits(a, f"round 6 waits for 1 more trainer: .* attached: {names['a']};.*")
            assert a.status()["round"] == 5
            assert not alone.done()
            said = atoll(a, "min-trainers", "1")
            assert re.match(r"min_trainers is 1 from view \d+ on: a round needs 1 trainer", said)
            assert alone.result(WAIT_S)[-1] == 5 + ROUNDS
            assert made["a"].outer.metrics()["rounds_alone"] == ROUNDS


def test_any_member_changes_it_and_a_restart_keeps_it(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        member = next(name for name in "abc" if name != run.coordinator)
        atoll(run.peers[member], "min-trainers", "3")
        for name in "abc":
            peer = run.peers[name]
            until(lambda p=peer: p.status()["min_trainers"] == 3, f"{name} knows", peer)
        run.peers[member].kill()
        run.peers[member].ends()
        run.restart(member)
        back = run.peers[member]
        until(lambda: back.try_status().get("min_trainers") == 3, "it is told", back)


def test_who_has_been_there_longer_wins_a_tie_between_calls(tmp_path: Path) -> None:
    """The shape of a DDP communication hook: a loop of all_reduce, and a newcomer that would meet
    the others first. The newcomer has the smaller id, which used to win."""
    with fleet(tmp_path) as run:
        run.form("ab")
        newcomer, incumbent = sorted("ab", key=lambda name: run.peers[name].status()["id"])
        with callers(run, incumbent) as trainers:
            stop: list[bool] = []

            def hook(session: Session) -> int:
                calls = 0
                while not stop:
                    session.all_reduce(np.ones(SIZE, np.float32))
                    calls += 1
                session.close()
                return calls

            going = trainers.start(incumbent, lambda: hook(trainers.sessions[incumbent]))
            peer = run.peers[incumbent]
            peer.reaches(10)
            late = trainers.add(newcomer)
            with pytest.raises(CollectiveMismatchError) as caught:
                trainers.start(newcomer, late.barrier).result(WAIT_S)
            assert re.search(
                r"this trainer called barrier\(\), and the others all_reduce\(\) of 12 elements"
                r' with op="mean", codec="float32" \(round \d+\)',
                str(caught.value),
            )
            joins = partial(late.all_reduce, np.ones(SIZE, np.float32))
            assert len(trainers.start_until_in(newcomer, joins).result(WAIT_S).peers) == 2
            trainers.end(newcomer)
            stop.append(True)
            assert going.result(WAIT_S) > 10
        summed_up = re.compile(r" rounds \d+ to \d+  \d+ collectives  [12] peers? ")
        until(lambda: summed_up.search(peer.text), "they are summed up", peer)
        lines = len(re.findall(r"^[0-9:]{8} round ", peer.text, re.MULTILINE))
        assert lines < peer.status()["round"] / 2
