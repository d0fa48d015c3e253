"""Three real peers, and a swarm of three: the same loop ends with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.callers import callers
from harness.processes import fleet
from torch import nn

from atoll.optim import DiLoCo, SparseLoCo, Swarm
from atoll.peer.identity import Home

ROUNDS, SYNC_EVERY = 4, 3


METHODS = {
    "int8": partial(DiLoCo, codec="int8"),
    "int4": partial(DiLoCo, codec="int4"),
    "sparse": SparseLoCo,
    "all": partial(SparseLoCo, aggregate="all", outer_lr=0.8, decay=0.9),
}


def train(session: Any, worker: int, method: Callable[..., Any]) -> torch.Tensor:
    """Without the global generators: real trainers share a process here."""
    random = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 10))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=random) / 8)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = method(model, inner, SYNC_EVERY, session)
    while hasattr(session, "barrier") and len(session.barrier()) < 3:
        """The others are still attaching; a swarm's rounds are of all that have not ended."""
    random.manual_seed(100 + worker)
    for _ in range(ROUNDS * SYNC_EVERY):
        features = torch.randn(8, 40, generator=random)
        outer.count(worker)
        (model(features) - features[:, :10]).square().mean().backward()
        inner.step()
        inner.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_three_peers_and_a_swarm_of_three_agree_bit_for_bit(
    tmp_path: Path, method: Callable[..., Any]
) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        with callers(run, "abc") as trainers:
            found = trainers.each_own({n: lambda s, n=n: train(s, ord(n), method) for n in "abc"})
        homes = {name: run.peers[name].home for name in "abc"}
    order = sorted("abc", key=lambda name: peer_id(homes[name]))
    swarm = Swarm(3).run(lambda session: train(session, ord(order[session.number]), method))
    for name, expected in zip(order, swarm, strict=True):
        assert torch.equal(found[name], expected)


def peer_id(home: Path) -> bytes:
    """By which the parts of a round are ordered. Its daemon has ended."""
    with Home.open(home) as identity:
        return identity.peer_id
