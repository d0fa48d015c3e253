"""Three real peers, and a swarm of three: the same loop ends with the same bits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.callers import callers
from harness.processes import WAIT_S, fleet, peer_id
from torch import nn

from atoll.optim import DiLoCo, LocalSGD, SparseLoCo, StreamingDiLoCo, Swarm
from atoll.optim.experimental import CO2
from atoll.peer.client.session import Session

ROUNDS, SYNC_EVERY = 4, 4
START = threading.Barrier(3)  # real trainers are threads of this process


Make = Callable[[nn.Module, torch.optim.Optimizer, Any], Any]
METHODS: dict[str, Make] = {
    "diloco int8": lambda m, i, s: DiLoCo(m, i, SYNC_EVERY, s, codec="int8"),
    "diloco int4": lambda m, i, s: DiLoCo(m, i, SYNC_EVERY, s, codec="int4"),
    "diloco by peers": lambda m, i, s: DiLoCo(m, i, SYNC_EVERY, s, outer_lr="by_peers"),
    "trimmed": lambda m, i, s: DiLoCo(m, i, SYNC_EVERY, s, aggregate="trimmed(f=1)"),
    "nnm and median": lambda m, i, s: DiLoCo(m, i, SYNC_EVERY, s, aggregate="nnm+median(f=1)"),
    "local sgd": lambda m, i, s: LocalSGD(m, i, SYNC_EVERY, s, codec="bfloat16"),
    "streaming": lambda m, i, s: StreamingDiLoCo(
        m, i, SYNC_EVERY, s, blocks_per_fragment=1, delay=1, codec="fp4_e3m0"
    ),
    "eager": lambda m, i, s: StreamingDiLoCo(
        m, i, SYNC_EVERY, s, blocks_per_fragment=1, eager=True, codec="int8"
    ),
    "co2": lambda m, i, s: CO2(m, i, SYNC_EVERY, s, outer_momentum=0.5),
    "sparse": lambda m, i, s: SparseLoCo(m, i, SYNC_EVERY, s),
    "sparse, all": lambda m, i, s: SparseLoCo(
        m, i, SYNC_EVERY, s, aggregate="all", outer_lr=0.8, decay=0.9
    ),
}


def train(session: Any, worker: int, make: Make) -> torch.Tensor:
    """Without the global generators: real trainers share a process here."""
    random = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 10))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=random) / 8)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = make(model, inner, session)
    while isinstance(session, Session) and not all_attached(session):
        time.sleep(0.05)
    if isinstance(session, Session):
        START.wait(WAIT_S)  # a round that one of them opened would be without the others
    random.manual_seed(100 + worker)
    for _ in range(ROUNDS * SYNC_EVERY):
        features = torch.randn(8, 40, generator=random)
        outer.count(worker)
        (model(features) - features[:, :10]).square().mean().backward()
        inner.step()
        inner.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def all_attached(session: Session) -> bool:
    """As far as is known here: only the coordinator knows of the others."""
    members = session.status()["members"]
    return all(member.get("attached", True) for member in members)


# Beside these, others have what is special in them: another codec, rule, delay or aggregate.
LONG = ("diloco int4", "trimmed", "eager", "sparse, all")


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[pytest.mark.slow] * (m in LONG)) for m in METHODS]
)
def test_three_peers_and_a_swarm_of_three_agree_bit_for_bit(tmp_path: Path, method: str) -> None:
    make = METHODS[method]
    with fleet(tmp_path) as run:
        run.form("abc")
        with callers(run, "abc") as trainers:
            found = trainers.each_own({n: lambda s, n=n: train(s, ord(n), make) for n in "abc"})
        homes = {name: run.peers[name].home for name in "abc"}
    order = sorted("abc", key=lambda name: peer_id(homes[name]))
    swarm = Swarm(3).run(lambda session: train(session, ord(order[session.number]), make))
    for name, expected in zip(order, swarm, strict=True):
        assert torch.equal(found[name], expected)
