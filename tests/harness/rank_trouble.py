"""What goes wrong on one of two FSDP2 ranks, and what each of them hears of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from atoll.collectives.errors import AtollError, ConfigError
from atoll.optim import DiLoCo, RankSession, Swarm, ranks
from harness.rank_methods import Net, loss_of, sharded

__all__ = ["in_trouble"]

Heard = dict[str, list[str]]


def in_trouble(rank: int) -> Heard:
    """By what has happened: the code of the error, what it says, and what to do."""
    return {
        "a NaN in rows of rank 1": _heard(rank, _diverge),
        "no memory": _heard(rank, _without_memory),
        "another container": _heard(rank, _apart),
        "nothing": _heard(rank, _train),
    }


def _heard(rank: int, work: Callable[[int, Any], None]) -> list[str]:
    try:
        if rank == 0:
            Swarm(1).run(lambda session: work(rank, session))
        else:
            work(rank, None)
    except AtollError as error:
        return [error.code, error.what, error.fix]
    return []


def _train(rank: int, session: Any, spoil: Callable[[Any], None] = lambda net: None) -> None:
    net = sharded("fsdp2", Net())
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    DiLoCo(net, inner, 1, RankSession(session))
    for step in range(2):
        loss_of(net, 0, step).backward()
        spoil(net)
        inner.step()
        inner.zero_grad()


def _diverge(rank: int, session: Any) -> None:
    def spoil(net: Any) -> None:
        if rank == 1:
            net.head.weight.grad.to_local().fill_(float("nan"))

    _train(rank, session, spoil)


def _without_memory(rank: int, session: Any) -> None:
    def none(name: str, count: int) -> None:
        raise ConfigError(f"no memory for {name}", fix="free some")

    _patched("Region", none, rank, session)


def _apart(rank: int, session: Any) -> None:
    _patched("_mapped", lambda place, elements: None, rank, session)


def _patched(name: str, value: Any, rank: int, session: Any) -> None:
    before = getattr(ranks, name)
    setattr(ranks, name, value)
    try:
        _train(rank, session)
    finally:
        setattr(ranks, name, before)
