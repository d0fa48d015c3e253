"""Audited rounds of several fragments at a time, between real daemons, one of which may lie."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from harness.callers import callers
from harness.processes import WAIT_S, fleet
from torch import nn

from atoll.optim import StreamingDiLoCo
from atoll.peer.client.session import Session

NAMES = "abcd"
ROUNDS = 12  # of four fragments
SYNC_EVERY = 4
WIDTH = 120

Make = Callable[[nn.Module, torch.optim.Optimizer, Session], StreamingDiLoCo]
METHODS: dict[str, Make] = {
    "streaming": lambda m, i, s: StreamingDiLoCo(
        m, i, SYNC_EVERY, s, blocks_per_fragment=1, delay=3, codec="int8", audit=True
    ),
    "fp4": lambda m, i, s: StreamingDiLoCo(
        m, i, SYNC_EVERY, s, blocks_per_fragment=1, delay=3, audit=True, aggregate="gm(f=1)"
    ),
    "eager": lambda m, i, s: StreamingDiLoCo(
        m, i, SYNC_EVERY, s, blocks_per_fragment=1, eager=True, codec="int8", audit=True
    ),
}
# What the liar does, and what convicts it. What E3M0 may round a result by hides small shifts.
LIES = {
    "streaming": ("result", "result"),
    "fp4": ("two", "equivocation"),
    "eager": ("result", "result"),
}


def train(session: Session, worker: int, make: Make, start: threading.Barrier) -> int:
    random = torch.Generator().manual_seed(7)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=random) / 8)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    make(model, inner, session)
    while not all(member.get("attached", True) for member in session.status()["members"]):
        time.sleep(0.05)
    start.wait(WAIT_S)
    random.manual_seed(100 + worker)
    while session.round < 1 + ROUNDS:
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=random) / 8 - 1.0
        inner.step()
    return session.round


@pytest.mark.parametrize(
    ("method", "lies"),
    [
        ("streaming", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("streaming", False),
                ("fp4", False),
                ("fp4", True),
                ("eager", False),
                ("eager", True),
            )
        ),
    ],
)
def test_the_honest_agree_and_a_liar_is_banned(tmp_path: Path, method: str, lies: bool) -> None:
    honest = NAMES[:3] if lies else NAMES
    with fleet(tmp_path) as run:
        run.odd |= {"d": f"audit:{LIES[method][0]}"} if lies else {}
        run.form(NAMES)
        start, ends = threading.Barrier(len(NAMES)), {}
        with callers(run, NAMES) as trainers:
            for i, (name, session) in enumerate(trainers.sessions.items()):
                work = partial(train, session, i, METHODS[method], start)
                ends[name] = trainers.start(name, work)
            found = {name: ends[name].result(WAIT_S) for name in honest}
            if lies:
                assert run.peers["d"].ends(WAIT_S) == 11
        rows = {name: run.peers[name].status()["admission"]["banned"] for name in honest}
        for name in honest:
            assert [row["kind"] for row in rows[name]] == ([LIES[method][1]] if lies else [])
        assert run.agree(honest) >= ROUNDS
    assert all(number >= 1 + ROUNDS for number in found.values())
