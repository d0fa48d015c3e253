"""A daemon is killed under a living trainer and started again with its line: the script goes on."""

from __future__ import annotations

import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.grids import rest_is_slow
from harness.processes import Fleet, Process, fleet, until

import atoll
from atoll.collectives.errors import CollectiveLostError, DaemonLostError, RoundError
from atoll.optim.experimental import CO2

COUNTED = Path(__file__).parents[1] / "harness" / "counted_trainer.py"
SHARES = (1.0, 1 / 2, 1 / 3)


def train_counted(run: Fleet, name: str, min_trainers: int) -> Process:
    words = [str(run.peers[name].home), str("abc".index(name)), str(min_trainers)]
    command = [sys.executable, str(COUNTED), *words, str(run.folder / "end")]
    run.trainers[name] = Process(command, run.folder / f"trainer-{name}.log")
    return run.trainers[name]


def kill_and_start(run: Fleet, names: str) -> None:
    """Kill these and start them with their own lines, at their own ports."""
    ports = {name: run.peers[name].port for name in names}
    for name in names:
        run.peers[name].kill()
    for name in names:
        run.peers[name].ends()
    for name in names:
        arguments, _ = run._lines[name]
        run.start(name, *arguments, port=ports[name])


@contextmanager
def held(*processes: Process) -> Iterator[None]:
    """Stop these for the length of the block."""
    for process in processes:
        process.kill(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.kill(signal.SIGCONT)


def committed(trainer: Process) -> int:
    return sum(line.get("kind") == "committed" for line in trainer.lines)


def check_counts(trainer: Process) -> int:
    """Return how many steps counted, of which their trainer knows; fail if one counted twice."""
    *lines, end = trainer.lines
    shares = {
        step: line["share"]
        for line in lines
        if line["kind"] == "committed"
        for step in line["steps"]
    }
    outcomes = [line["round"] for line in lines if line["kind"] == "committed"]
    assert len(set(outcomes)) == len(outcomes), "two submissions in one round"
    for step, value in enumerate(end["own"]):
        # A retry may keep a chunk of an attempt with other participants, hence any share; and where
        # that told is of some chunks only, those of this trainer may be the others.
        is_whole = any(shares.get(step) == pytest.approx(share) for share in SHARES)
        usual = SHARES if is_whole else (*SHARES, 0.0)
        assert any(value == pytest.approx(share, abs=1e-5) for share in usual), (step, value)
    return len(shares)


@pytest.mark.parametrize("min_trainers", [1, 3])
def test_each_submission_counts_at_most_once(min_trainers: int, tmp_path: Path) -> None:
    """Daemons are killed at random moments of rounds, one or several at once."""
    draw = random.Random(min_trainers)
    with fleet(tmp_path) as run:
        run.form("abc")
        trainers = {name: train_counted(run, name, min_trainers) for name in "abc"}
        for victims in ("b", "ab", "abc", "a"):
            before = {name: committed(trainers[name]) for name in "abc"}
            until(
                lambda b=before: all(committed(trainers[n]) > b[n] + 2 for n in "abc"),
                "all trainers go on",
                *trainers.values(),
                *run.peers.values(),
            )
            time.sleep(draw.uniform(0.0, 0.1))
            kill_and_start(run, victims)
        before = {name: committed(trainers[name]) for name in "abc"}
        until(
            lambda: all(committed(trainers[n]) > before[n] + 2 for n in "abc"),
            "all trainers go on",
            *trainers.values(),
            *run.peers.values(),
        )
        last = max(peer.status()["round"] for peer in run.peers.values())
        (tmp_path / "end").write_text(str(last + 20))
        for trainer in trainers.values():
            assert trainer.ends() == 0, trainer.text
            assert check_counts(trainer) > 10
        assert run.agree("abc") >= 1


# ---------------------------------------------------------------- the loops of users


class Loop:
    """Of one process; what it does depends on the number of the step alone."""

    def __init__(self, method: str, peer: Any, seed: int = 0) -> None:
        random_numbers = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Linear(6, 4)
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape, generator=random_numbers))
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.outer: Any = METHODS[method](self.model, self.inner, peer)
        self.steps = 0

    def step(self) -> None:
        batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(self.steps))
        (self.model(batch) - batch[:, :4]).square().mean().backward()
        self.inner.step()
        self.inner.zero_grad()
        self.steps += 1

    @property
    def bits(self) -> bytes:
        moments = [self.inner.state[p]["exp_avg"] for p in self.model.parameters()]
        return b"".join(t.detach().numpy().tobytes() for t in [*self.model.parameters(), *moments])


METHODS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "DiLoCo": lambda m, i, s: atoll.DiLoCo(m, i, 4, s),
    "momentum in 8 bits": lambda m, i, s: atoll.DiLoCo(m, i, 4, s, momentum_codec="dynamic8"),
    "CO2": lambda m, i, s: CO2(m, i, 4, s, outer_momentum=0.5),
    "StreamingDiLoCo": lambda m, i, s: atoll.StreamingDiLoCo(m, i, 4, s, delay=2),
    "AsyncDiLoCo": lambda m, i, s: atoll.AsyncDiLoCo(m, i, 4, s, outer_delay=2),
    "NoLoCo": lambda m, i, s: atoll.NoLoCo(m, i, 4, s),
    "GradientAverage": lambda m, i, s: atoll.GradientAverage(
        m, i, s, compressor=atoll.PowerSGD(rank=1, start=2)
    ),
}


def at_once(*works: Callable[[], Any]) -> None:
    """Do each in a thread of its own."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("method", rest_is_slow(METHODS, 2))
def test_a_loop_goes_on_as_if_nothing_had_happened(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the run has not gone on meanwhile: in the middle of a round, and right after one."""
    found = []
    for killed_at in ((), (6, 12)):
        folder = tmp_path / f"{len(killed_at)} kills"
        folder.mkdir()
        with fleet(folder) as run:
            home = run.up("a").home
            loop = Loop(method, atoll.connect(home))
            while loop.steps < 18:
                if loop.steps in killed_at:
                    kill_and_start(run, "a")
                loop.step()
            found.append(loop.bits)
            loop.outer.close()
        said = capsys.readouterr().err
        assert said.count("waiting up to 60 s until it is started again") == len(killed_at)
        assert said.count("attached again after") == len(killed_at)
    assert found[0] == found[1]


def test_who_was_away_for_long_takes_the_runs_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once, and not at the end of the round; and the moments stay."""
    with fleet(tmp_path) as run:
        run.form("abc")
        loops = {n: Loop("DiLoCo", atoll.connect(run.peers[n].home)) for n in "ab"}
        at_once(*(lambda x=loop: [x.step() for _ in range(4)] for loop in loops.values()))
        loop, other = loops["b"], loops["a"]
        loop.step()
        port = run.peers["b"].port
        run.peers["b"].kill()
        run.peers["b"].ends()
        for _ in range(12):
            other.step()
        coming = threading.Thread(target=loop.step)
        with held(run.peers["a"], run.peers["c"]):  # nobody tells b yet how far the run is
            back = run.start("b", *run._lines["b"][0], port=port)
            coming.start()
            until(lambda: "back in view" in back.text, "b is back", back)
            time.sleep(0.3)  # longer than its trainer takes to attach
        coming.join()
        said = capsys.readouterr().err
        assert re.search(r"rounds have gone by.*, so this trainer takes its parameters", said)
        with other.outer.outer_parameters():
            theirs = other.model.weight.detach().clone()
        assert torch.equal(loop.model.weight, theirs)
        assert loop.inner.state[loop.model.weight]["step"] == 6
        for one in loops.values():
            one.outer.close()


def test_who_does_not_come_back_in_time_is_lost(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        loop = Loop("DiLoCo", atoll.connect(run.up("a").home, reconnect_s=0.5))
        run.peers["a"].kill()
        run.peers["a"].ends()
        with pytest.raises(DaemonLostError, match="did not come back within 500 ms"):
            loop.step()
        loop.outer.close()


def test_who_leaves_waits_no_longer_for_a_daemon_that_has_gone_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fleet(tmp_path) as run:
        loop = Loop("DiLoCo", atoll.connect(run.up("a").home))
        loop.outer.leave_on_signal(wait_s=0.5, exits=False)
        run.peers["a"].kill()
        run.peers["a"].ends()
        signal.raise_signal(signal.SIGTERM)
        loop.inner.step()
        assert loop.outer.has_left
        loop.outer.close()
    said = capsys.readouterr().err
    assert "SIGTERM: its steps since the last round are lost" in said
    assert re.search(r"did not come back within \d+ ms", said)


def test_a_signal_ends_a_wait_for_a_daemon_that_is_under_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fleet(tmp_path) as run:
        loop = Loop("DiLoCo", atoll.connect(run.up("a").home))
        loop.outer.leave_on_signal(wait_s=0.2, exits=False)
        run.peers["a"].kill()
        run.peers["a"].ends()
        asking = threading.Timer(0.5, signal.raise_signal, [signal.SIGTERM])
        asking.start()
        loop.step()
        asking.join()
        assert loop.outer.has_left
        loop.outer.close()
    said = capsys.readouterr().err
    assert "SIGTERM: its steps since the last round are lost" in said
    assert "until this script was told to end" in said


def test_a_collective_under_way_ends_and_the_next_one_works(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        peer = run.peers["a"]
        sessions = {name: atoll.connect(run.peers[name].home) for name in "ab"}
        for session in sessions.values():
            session.channel.attach_for_collectives()
        failed: list[Exception] = []

        def reduce() -> None:
            try:
                sessions["a"].all_reduce(np.ones(4, np.float32))
            except CollectiveLostError as error:
                failed.append(error)

        def waits_for_the_other() -> bool:
            text = peer.status()["waiting"]
            return "for the training of" in text and "(this peer)" not in text

        until(lambda: not waits_for_the_other(), "both are attached", peer)
        waits = threading.Thread(target=reduce)
        waits.start()
        until(waits_for_the_other, "it waits", peer)
        kill_and_start(run, "a")
        waits.join()
        assert "was started again while a collective" in str(failed[0])

        def meets(session: atoll.Session) -> None:
            while True:  # until it has come back into the view, rounds are of the other one alone
                with suppress(RoundError):
                    if len(session.barrier()) == 2:
                        return

        at_once(*(partial(meets, session) for session in sessions.values()))
        for session in sessions.values():
            session.close()
