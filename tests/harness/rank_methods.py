"""Methods with rounds on two ranks of one peer beside a second peer, and the same without ranks.

Both ranks have the whole batch: the mean of two equal gradients is that gradient, to the last bit,
so what ranks come to can be compared with what a single process comes to, whatever codecs round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.optim import (
    AsyncDiLoCo,
    DiLoCo,
    LocalSGD,
    RankSession,
    SparseLoCo,
    StreamingDiLoCo,
    Swarm,
)
from atoll.optim.experimental import CO2

__all__ = [
    "EVALUATES",
    "METHODS",
    "RESTARTS",
    "SCHEMES",
    "Found",
    "Net",
    "run_ranks",
    "sharded",
    "train",
]

STEPS, H, WIDTH = 14, 4, 9
RESTART_AT, EVALUATE_AT = 6, (2, 7, 10)  # within rounds
SCHEMES = ("ddp", "fsdp2")
Found = dict[str, Any]

Make = Callable[[nn.Module, torch.optim.Optimizer, Any], Any]
_STREAMING: dict[str, Any] = {"blocks_per_fragment": 1, "codec": "int8"}
METHODS: dict[str, Make] = {
    "diloco": lambda m, i, s: DiLoCo(m, i, H, s),
    "local sgd": lambda m, i, s: LocalSGD(m, i, H, s, codec="bfloat16"),
    "streaming": lambda m, i, s: StreamingDiLoCo(m, i, H, s, delay=1, **_STREAMING),
    "eager": lambda m, i, s: StreamingDiLoCo(m, i, H, s, eager=True, **_STREAMING),
    "co2": lambda m, i, s: CO2(m, i, H, s, outer_momentum=0.2),
    "sparse loco": lambda m, i, s: SparseLoCo(m, i, H, s),
    "async diloco": lambda m, i, s: AsyncDiLoCo(m, i, H, s, outer_delay=2),
}
EVALUATES = ("diloco", "streaming")
RESTARTS = ("diloco", "eager", "co2", "async diloco")


class Net(nn.Module):
    """Numbered blocks, buffers, and odd numbers of rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.head = nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        found: Tensor = self.head(self.norm(x))
        return found


def sharded(scheme: str, net: nn.Module) -> nn.Module:
    if scheme == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    from torch.distributed.fsdp import fully_shard  # takes a second

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for block in filter(lambda module: isinstance(module, nn.Linear), net.modules()):
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def loss_of(net: nn.Module, peer: int, step: int) -> Tensor:
    random = torch.Generator().manual_seed(1000 * peer + step)
    x = peer + torch.randn(8, WIDTH, generator=random)
    loss: Tensor = (net(x) - x[:, :3].sin()).square().mean()
    return loss


class _Loop:
    def __init__(self, make: Make, session: Callable[[], Any], scheme: str = "") -> None:
        net = Net()
        self.net = sharded(scheme, net) if scheme else net
        self.inner = torch.optim.AdamW(self.net.parameters(), lr=0.02)
        self.outer = make(self.net, self.inner, session())


def train(
    method: str,
    session: Any,
    peer: int,
    *,
    rank: int | None = None,
    scheme: str = "",
    evaluates: bool = False,
    restarts: bool = False,
    folder: str = "",
    lr: float | None = None,
    steps: int = STEPS,
) -> Found:
    """Parameters and buffers at the end, what was evaluated, and how many rounds there were.

    ``restarts``: through files in ``folder``, if one is given. ``lr``: of all steps; with 0 the
    parameters stay, and ranks may have batches of their own.
    """

    def connect() -> Any:
        return session if rank is None else RankSession(session if rank == 0 else None)

    # Each peer's steps weigh three times as much as those of the one before; ranks' add up.
    share = 1 if rank is None else (0.25, 0.75)[rank]
    loop, evaluated = _Loop(METHODS[method], connect, scheme), []
    for step in range(steps):
        if restarts and step == RESTART_AT:
            own = f"{folder}/{peer}" if folder else ""
            loop = _begun_anew(loop, lambda: _Loop(METHODS[method], connect, scheme), own)
        if evaluates and step in EVALUATE_AT:
            evaluated += _evaluated(loop, peer)
        for group in loop.inner.param_groups:
            group["lr"] = group["lr"] if lr is None else lr
        loop.outer.count(int(4 * 3**peer * share))
        loss_of(loop.net, peer if lr is None or not rank else 7, step).backward()
        loop.inner.step()
        loop.inner.zero_grad()
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in loop.net.parameters()]
    return {
        "parameters": torch.cat([p.detach().flatten() for p in full]).tolist(),
        "buffers": torch.cat([b.flatten().float() for b in loop.net.buffers()]).tolist(),
        "evaluated": evaluated,
        "rounds": loop.outer.metrics()["rounds"],
    }


def _begun_anew(loop: _Loop, make: Callable[[], _Loop], folder: str) -> _Loop:
    if folder:
        loop.outer.save(folder)
        loop.outer.close()
        anew = make()
        assert anew.outer.load(folder)
        return anew
    saved = [one.state_dict() for one in (loop.outer, loop.net, loop.inner)]
    loop.outer.close()
    anew = make()
    for one, state in zip((anew.net, anew.inner, anew.outer), saved[1:] + saved[:1], strict=True):
        one.load_state_dict(state)
    return anew


@torch.no_grad()
def _evaluated(loop: _Loop, peer: int) -> list[float]:
    """With the local parameters, with the run's, and with the local ones again."""
    loop.net.train(False)
    losses = [float(loss_of(loop.net, peer, STEPS))]
    with loop.outer.outer_parameters():
        losses.append(float(loss_of(loop.net, peer, STEPS)))
    losses.append(float(loss_of(loop.net, peer, STEPS)))
    loop.net.train()
    return losses


def run_ranks(rank: int, scheme: str, runs: dict[str, dict[str, Any]]) -> dict[str, Found]:
    """In the processes of both ranks; that of rank 0 also has the other peer. ``runs``: by name,
    the arguments of ``train``."""
    found = {}
    for name, options in runs.items():
        as_rank = {**options, "rank": rank, "scheme": scheme}
        if rank:
            found[name] = train(session=None, peer=0, **as_rank)
        else:
            found[name] = Swarm(2).run(partial(_first_rank_and_other, options, as_rank))[0]
    return found


def _first_rank_and_other(options: Found, as_rank: Found, session: Any) -> Found:
    number = session.number
    return train(session=session, peer=number, **(options if number else as_rank))
