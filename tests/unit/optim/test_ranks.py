"""Which sessions, groups and models go together; ranks by themselves are in tests/processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from atoll.collectives.errors import ConfigError
from atoll.optim import (
    AsyncDiLoCo,
    DeMo,
    DiLoCo,
    GradientAverage,
    LocalSGD,
    NoLoCo,
    Population,
    RankSession,
    SparseLoCo,
    StreamingDiLoCo,
    Swarm,
    ZerothOrder,
    attach,
)
from atoll.optim.experimental import CO2
from atoll.optim.model_io import ModelVector
from atoll.optim.ranks import _mapped
from atoll.peer.client.shared_memory import Region

Make = Callable[[nn.Module, torch.optim.Optimizer, Any], Any]
WITH_ROUNDS: dict[str, Make] = {
    "DiLoCo": lambda m, i, s: DiLoCo(m, i, 2, s),
    "LocalSGD": lambda m, i, s: LocalSGD(m, i, 2, s),
    "StreamingDiLoCo": lambda m, i, s: StreamingDiLoCo(m, i, 2, s),
    "CO2": lambda m, i, s: CO2(m, i, 2, s),
    "SparseLoCo": lambda m, i, s: SparseLoCo(m, i, 2, s),
    "AsyncDiLoCo": lambda m, i, s: AsyncDiLoCo(m, i, 2, s, outer_delay=1),
}
OF_ONE_PROCESS: dict[str, Make] = {
    "GradientAverage": lambda m, i, s: GradientAverage(m, i, s),
    "DeMo": lambda m, i, s: DeMo(m, s),
    "ZerothOrder": lambda m, i, s: ZerothOrder(m, s, 0.1),
    "NoLoCo": lambda m, i, s: NoLoCo(m, i, 2, s),
    "Population": lambda m, i, s: Population(m, i, s, lambda: 0.0, 2, {"lr": (0.0, 1.0)}),
}


@contextmanager
def group(backend: str, world_size: int = 1) -> Iterator[None]:
    """A fake one lets this process be the first of several."""
    store = FakeStore() if "fake" in backend else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def made(make: Make, net: nn.Module, session: Any) -> Any:
    return make(net, torch.optim.SGD(net.parameters(), lr=0.1), session)


def sharded(ranks: int = 2) -> nn.Module:
    from torch.distributed.fsdp import fully_shard  # takes a second

    return fully_shard(nn.Linear(4, 3), mesh=dist.device_mesh.init_device_mesh("cpu", (ranks,)))


@pytest.mark.parametrize("name", WITH_ROUNDS)
def test_a_sharded_model_needs_the_session_of_ranks(name: str) -> None:
    with group("fake", 2), pytest.raises(ConfigError, match="sharded over 2 ranks") as raised:
        made(WITH_ROUNDS[name], sharded(), object())
    assert raised.value.fix == "give it RankSession(session)"


def test_ranks_that_share_a_model_share_the_session() -> None:
    session: Any = object()
    with group("fake", 4):
        net, few = sharded(4), dist.new_group([0, 1])
        with pytest.raises(ConfigError, match="over 4 ranks, and this session is of 2") as raised:
            made(WITH_ROUNDS["DiLoCo"], net, RankSession(session, few))
    assert "the group of all ranks" in raised.value.fix


@pytest.mark.parametrize("name", OF_ONE_PROCESS)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_methods_of_one_process_refuse_ranks(name: str, is_sharded: bool) -> None:
    with group("fake", 2):
        session: Any = object()
        net, peer = (sharded(), session) if is_sharded else (nn.Linear(4, 3), RankSession(session))
        with pytest.raises(ConfigError, match=f"{name} is for trainers of one process") as raised:
            made(OF_ONE_PROCESS[name], net, peer)
    assert "a method with rounds" in raised.value.fix


def test_the_group_must_exchange_tensors_of_the_cpu() -> None:
    session: Any = object()
    with pytest.raises(ConfigError, match="no process group"):
        RankSession(session)
    with group("cuda:fake"), pytest.raises(ConfigError, match="no tensors of the CPU") as raised:
        RankSession(session)
    assert 'new_group(backend="gloo")' in raised.value.fix


def test_the_first_rank_has_the_session() -> None:
    with group("gloo"), pytest.raises(ConfigError, match="rank 0 has no session"):
        RankSession(None)


def test_collectives_of_the_first_rank_count_as_no_round_of_the_method() -> None:
    """They may be made after the last pull, on the session itself."""

    def train(session: Any) -> tuple[int, int]:
        net = nn.Linear(4, 3)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        with group("gloo"):
            outer = CO2(net, inner, 2, RankSession(session))
            for _ in range(8):
                net(torch.ones(2, 4)).sum().backward()
                session.barrier()
                inner.step()
            return outer.global_step, outer.peer.operations

    assert Swarm(1).run(train) == [(8, 8)]


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_one_process_of_torchrun_has_a_group_too(
    by_torchrun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts that are written for several go on with it: DDP, meshes, ``dist.get_rank()``."""
    session = object()
    monkeypatch.setattr("atoll.optim.ranks.connect", lambda *_, **__: session)
    by = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    by |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in by.items():
        if by_torchrun:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    try:
        assert attach() is session
        assert dist.is_initialized() == by_torchrun
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_memory_is_mapped_if_it_is_what_was_meant() -> None:
    region = Region("ranks", 3)
    inode = os.fstat(region.fd).st_ino
    found = _mapped([os.getpid(), region.fd, inode], 3)
    assert found is not None
    region.floats[:] = 1.0, 2.0, 3.0
    assert found.tolist() == [1.0, 2.0, 3.0]
    assert _mapped([os.getpid(), region.fd, inode + 1], 3) is None
    fd = region.fd
    region.close()
    assert _mapped([os.getpid(), fd, inode], 3) is None


def test_nothing_but_the_difference_is_ever_written() -> None:
    """Ranks of DDP write it to the same memory, and one may be through before another begins: here
    what they read lies there too, so a step in between would be seen."""
    net = nn.Linear(4, 3)
    vector = ModelVector(net)
    base = np.arange(15, dtype=np.float32)
    model = np.empty(15, np.float32)
    vector.write(model)
    expected = base - model
    vector.write_delta(base, base, 0)
    assert np.array_equal(base, expected)
