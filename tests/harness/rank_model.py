"""The model and the batches of tests/processes/test_ranks.py, for ranks and for a swarm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import fully_shard

from atoll.optim.frozen import Frozen

__all__ = [
    "BATCH",
    "ROUNDS",
    "SYNC_EVERY",
    "fingerprints",
    "loss_of",
    "model",
]

ROUNDS, SYNC_EVERY, BATCH = 3, 4, 8


def model() -> nn.Sequential:
    """Of odd sizes: one rank has more rows than the other."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(21, 33), nn.Tanh(), nn.Linear(33, 5))


def loss_of(net: nn.Module, peer: int, step: int, rank: int | None = None) -> Tensor:
    """Of a batch; of ``rank``'s half of it if one is named."""
    random = torch.Generator().manual_seed(1000 * peer + step)
    x = torch.randn(BATCH, 21, generator=random)
    if rank is not None:
        x = x[rank * BATCH // 2 : (rank + 1) * BATCH // 2]
    loss: Tensor = (net(x) - x[:, :5].sin()).square().mean()
    return loss


def fingerprints(_rank: int) -> list[list[list[str]]]:
    """Return what peers compare of a frozen layer, whole and then sharded by FSDP2."""
    found = []
    for sharded in (False, True):
        net = model()
        net[0].requires_grad_(False)
        if sharded:
            mesh = device_mesh.init_device_mesh("cpu", (2,))
            for layer in net:
                fully_shard(layer, mesh=mesh)
        tensors = Frozen(net).fingerprint("refuse") or ()
        found.append([[one.name, one.outline, one.digest] for one in tensors])
    return found
