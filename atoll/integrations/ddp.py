"""Average the gradients of a DistributedDataParallel model over all peers, at every step.

    model = DistributedDataParallel(model)
    average_gradients(model, atoll.connect())

This is DDP's communication hook: the loop stays as it was, and ``no_sync()`` accumulates as ever.
Every step sends all gradients, so it is for networks that bear that; over the internet take a
method with rounds. The process group is of this process alone; the other trainers are other peers.

The gradients of a step travel together, in the order of the model's parameters: DDP changes its
buckets after the first step, and a newcomer's are not those of the others. Trainers must have begun
with the same parameters, and take the same steps: ``GradientAverage`` sees to that and gives a
newcomer what the others have; this hook is for loops that do so themselves.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from atoll.collectives.errors import ConfigError


class Reducing(Protocol):
    """Describe the session that averages: atoll.connect() gives one."""

    def all_reduce(self, tensor: Any, op: str = "mean", *, codec: str = "float32") -> Any: ...


def average_gradients(
    model: DistributedDataParallel, session: Reducing, *, codec: str = "float32"
) -> None:
    """Let every backward pass of ``model`` end with the mean gradients of all peers.

    ``codec``: how they travel; "int8" sends a quarter. Errors of ``session.all_reduce`` come out of
    ``backward()``; DDP cannot go on then, so make it anew around its module. ConfigError for a
    process group of more than this process, and for ``skip_all_reduce_unused_params``.
    """
    ranks = dist.get_world_size(model.process_group)
    if ranks > 1:
        raise ConfigError(
            f"the process group of this model has {ranks} ranks, and a session is of one process",
            fix="give each process a daemon and a group of its own, or take DiLoCo, where "
            "atoll.attach() makes the ranks of a machine one trainer",
        )
    if getattr(model, "skip_all_reduce_unused_params", False):  # as of newer torch
        raise ConfigError(
            "this model skips parameters without a gradient, and peers need not have the same ones",
            fix="make DistributedDataParallel without skip_all_reduce_unused_params",
        )
    # DDP compares annotations of a hook with classes: so it has none.
    model.register_comm_hook(_Step(model, session, codec), lambda step, bucket: step.add(bucket))


class _Step:
    """Collect the gradients of one backward pass until all buckets have come.

    It counts parameters, because with a static graph DDP numbers the buckets of the first pass as
    if each were the first, and none the last.
    """

    def __init__(self, model: DistributedDataParallel, session: Reducing, codec: str) -> None:
        self._places = {id(p): number for number, p in enumerate(model.module.parameters())}
        # What DDP reduces: neither what was frozen when it was made, nor what it was to ignore.
        # (torch leaves this function untyped.)
        known = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        self._all = int(known["num_parameter_tensors"])
        self._session, self._codec = session, codec
        self._found: dict[int, Tensor] = {}  # views of buckets, by the parameter's place
        self._waiting: list[tuple[Future[Tensor], Tensor]] = []

    def add(self, bucket: Any) -> Future[Tensor]:
        """Take a bucket; with the last one all futures have their results."""
        future: Future[Tensor] = Future()
        self._waiting.append((future, bucket.buffer()))
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._found[self._places[id(parameter)]] = gradient
        if len(self._found) == self._all:
            self._average()
            self._found, self._waiting = {}, []
        return future

    def _average(self) -> None:
        gradients = [self._found[place] for place in sorted(self._found)]
        flat = torch.cat([each.reshape(-1) for each in gradients])
        mean = self._session.all_reduce(flat, codec=self._codec).value
        for each, part in zip(gradients, mean.split([g.numel() for g in gradients]), strict=True):
            each.copy_(part.view_as(each))
        for future, buffer in self._waiting:
            future.set_result(buffer)
