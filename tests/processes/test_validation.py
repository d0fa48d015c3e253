"""Real daemons and trainers with local steps, one of which did other steps than it says."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.callers import callers
from harness.processes import WAIT_S, fleet
from numpy.typing import NDArray
from torch import nn

from atoll.collectives.errors import AtollError
from atoll.optim import DiLoCo, Replay
from atoll.optim.replay.replaying import ReplayTask
from atoll.optim.replay.validating import RIGHT
from atoll.peer.client.session import Session

NAMES = "abcd"
STEPS = 4  # in a round, in segments of two
HONEST_ROUNDS = 8
LR = 1e-2
Made = tuple[nn.Module, torch.optim.Optimizer]


def made(lr: float) -> Made:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def step(model: nn.Module, inner: torch.optim.Optimizer, index: int) -> None:
    inner.zero_grad()
    rng = torch.Generator().manual_seed(index)
    inputs = torch.randn(16, 20, generator=rng)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    torch.Tensor.backward(loss)
    inner.step()


def task(lr: float) -> Callable[[], ReplayTask]:
    def make() -> ReplayTask:
        model, inner = made(lr)

        def train(batches: Iterator[NDArray[np.int64]], _: int) -> None:
            for indices in batches:
                step(model, inner, int(indices[0]))

        return ReplayTask(model, inner, train)

    return make


def move_after_commitment(outer: DiLoCo, model: nn.Module, shift: float) -> None:
    """What it submits then is not where its steps have led."""
    assert outer.recorder is not None
    commit = outer.recorder._commit

    def moved() -> None:
        commit()
        with torch.no_grad():
            next(model.parameters()).add_(shift)

    outer.recorder._commit = moved  # type: ignore[method-assign]


def train(
    session: Session,
    number: int,
    start: threading.Barrier,
    until: Callable[[int], bool],
    lr: float = LR,
    shift: float = 0.0,
) -> int:
    """Rounds until it is enough; the last one. ``shift``: what is added to the parameters behind
    the back of everything that keeps steps."""
    model, inner = made(lr)
    outer = DiLoCo(
        model,
        inner,
        STEPS,
        session,
        audit=True,
        validators=2,
        replay=Replay(segment_steps=2, task=task(lr)),
    )
    if lr != LR:  # else it would be found out by what it says of others
        judged = session.channel.judged
        session.channel.judged = lambda each, _, why: judged(each, RIGHT, why)  # type: ignore[method-assign]
    if shift:
        move_after_commitment(outer, model, shift)
    start.wait(WAIT_S)
    count = 0
    while not until(session.round):
        count += 1
        index = 1_000_000 * number + count
        outer.note_batch([index])
        step(model, inner, index)
    return session.round


def test_honest_trainers_pass(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form(NAMES)
        start = threading.Barrier(len(NAMES))
        enough = lambda round_number: round_number > HONEST_ROUNDS  # noqa: E731
        with callers(run, NAMES) as trainers:
            calls = [
                trainers.start(n, lambda n=n, i=i: train(trainers.sessions[n], i, start, enough))
                for i, n in enumerate(NAMES)
            ]
            assert {call.result(WAIT_S) for call in calls} == {HONEST_ROUNDS + 1}
        assert not run.peers["a"].status()["admission"]["banned"]


@pytest.mark.parametrize(
    "cheat", [{"lr": 2e-2}, pytest.param({"shift": 0.1}, marks=pytest.mark.slow)]
)
def test_who_did_other_steps_is_banned(tmp_path: Path, cheat: dict[str, float]) -> None:
    with fleet(tmp_path) as run:
        run.form(NAMES)
        start = threading.Barrier(len(NAMES))
        with callers(run, NAMES) as trainers:
            last: list[int] = []  # a round that no other has ended yet when this is said

            def is_found(round_number: int) -> bool:
                if not last and run.peers["d"].popen.poll() is not None:
                    last.append(round_number + 2)
                return bool(last) and round_number >= last[0]

            calls = {
                n: trainers.start(
                    n,
                    lambda n=n, i=i: train(
                        trainers.sessions[n], i, start, is_found, **(cheat if n == "d" else {})
                    ),
                )
                for i, n in enumerate(NAMES)
            }
            assert run.peers["d"].ends(WAIT_S) == 11
            assert "ATOLL-E34" in run.peers["d"].text
            with pytest.raises(AtollError):
                calls["d"].result(WAIT_S)
            for name in "abc":
                calls[name].result(WAIT_S)
        for name in "abc":
            rows = run.peers[name].status()["admission"]["banned"]
            assert [row["kind"] for row in rows] == ["work"]
        (file,) = (run.peers["a"].home / "evidence").iterdir()
        atoll = [sys.executable, "-m", "atoll.peer.cli", "verify", str(file), "--json"]
        found = json.loads(subprocess.run(atoll, capture_output=True, check=True).stdout)
        assert found["kind"] == "work"
