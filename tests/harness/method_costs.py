"""What each method sends and holds, measured: the numbers of `docs/choosing.md`.

    PYTHONPATH=tests python -m harness.method_costs        prints them

Bytes are counted by a swarm, which encodes what peers would send. Those of a late round count, so
not what happens once. A daemon's host memory is what `host_bytes` says of the run that the swarm
had, for a model of a billion parameters; a trainer's is what the method says (`trainer_bytes`),
which is compared with what numpy allocates (trainer_memory.py) while a larger model is trained.
"""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from atoll.optim import (
    DGC,
    QSDP,
    AsyncDiLoCo,
    DeMo,
    DiLoCo,
    ErrorFeedback,
    GradientAverage,
    LayerBits,
    LocalSGD,
    NoLoCo,
    Population,
    PowerSGD,
    SparseLoCo,
    StreamingDiLoCo,
    Swarm,
    TernGrad,
    ZerothOrder,
)
from atoll.optim.compressors import Compressor
from atoll.optim.every_step.every_step import EveryStep
from atoll.optim.experimental import CO2, EF21, EControl
from atoll.optim.footprint import host_bytes
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import STEPPED, RunSpec
from harness.trainer_memory import OutsideSession, most_of

__all__ = ["COSTS", "Costs", "Memory", "Row", "measure", "measure_memory"]

PEERS = 4
WARM = 2  # rounds before the one whose bytes count
RING_BYTES = 2 * (PEERS - 1) / PEERS * 4  # of a parameter and step: float32 gradients of all
BILLION = 10**9
BLOCKS = 2  # square matrices; of Streaming DiLoCo each is a fragment
MEASURED_H = 2  # bytes of a round do not depend on it; fragments take turns within it

MEMORY_BLOCKS = 48  # so that a copy of one of them is little
MEMORY_STEPS = 2  # rounds for methods that have them

# (model, inner, session, sync_every); of methods of every step it takes check_every, too
Make = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """``per_parameter``: of what is sent; else it does not depend on the model. ``width``: of the
    model's matrices; ``memory_width``, ``memory_h``: where a trainer's memory is measured.
    ``sync_every``: what the document recommends to begin with. ``inner``: of its optimizer."""

    make: Make
    sync_every: int = 1
    width: int = 512
    memory_width: int = 128
    memory_h: int = MEASURED_H
    per_parameter: bool = True
    inner: type[torch.optim.Optimizer] = torch.optim.AdamW


@dataclass(frozen=True)
class Costs:
    """``sent_bytes``: by one of four peers, in a round, encoded, for each parameter or in all.
    ``fewer``: times less than float32 gradients at every step. ``daemon_bytes``: of host memory for
    each parameter, of a method whose run has its parameters."""

    sent_bytes: float
    fewer: float
    daemon_bytes: float | None


@dataclass(frozen=True)
class Memory:
    """Of a trainer's host, for each parameter: what was allocated at most, and what the method says
    it may be."""

    measured: float
    said: float

    @property
    def written(self) -> str:
        """In the document."""
        return str(math.ceil(round(self.said, 1)))


class Model(nn.Module):
    def __init__(self, width: int, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))


def _rounds(method: Callable[..., Any], sync_every: int, width: int = 512, **options: Any) -> Row:
    return Row(
        lambda model, inner, session, h: method(model, inner, h, session, **options),
        sync_every,
        width,
    )


def _streaming(**options: Any) -> Row:
    plain = _rounds(StreamingDiLoCo, 100, blocks_per_fragment=1, **options)
    return replace(plain, memory_h=MEMORY_BLOCKS)  # each of them is a fragment


def _gradients(
    compressor: Callable[[], Compressor] | None = None,
    width: int = 512,
    memory_width: int = 128,
    **options: Any,
) -> Row:
    def make(model: nn.Module, inner: Any, session: Any, h: int, **more: Any) -> GradientAverage:
        made = compressor() if compressor is not None else None
        return GradientAverage(model, inner, session, compressor=made, **options, **more)

    return Row(make, width=width, memory_width=memory_width)


# By what the first column of the document's table says.
COSTS: dict[str, Row] = {
    "DiLoCo": _rounds(DiLoCo, 100),
    'DiLoCo(codec="int4")': _rounds(DiLoCo, 100, codec="int4"),
    'DiLoCo(codec="int2")': _rounds(DiLoCo, 100, codec="int2"),
    'DiLoCo(codec="float32")': _rounds(DiLoCo, 100, codec="float32"),
    'DiLoCo(momentum_codec="dynamic8")': _rounds(DiLoCo, 100, momentum_codec="dynamic8"),
    "StreamingDiLoCo": _streaming(),
    "StreamingDiLoCo(eager=True)": _streaming(eager=True),
    "AsyncDiLoCo": _rounds(AsyncDiLoCo, 100, outer_delay=PEERS),
    "SparseLoCo": _rounds(SparseLoCo, 30, 1024),
    "NoLoCo": _rounds(NoLoCo, 50),
    "CO2": _rounds(CO2, 48),
    "LocalSGD": _rounds(LocalSGD, 4),
    "GradientAverage": _gradients(),
    'GradientAverage(codec="int8")': _gradients(codec="int8"),
    "PowerSGD(rank=4)": _gradients(lambda: PowerSGD(rank=4, start=1)),
    "LayerBits": _gradients(LayerBits),
    "DGC": replace(_gradients(DGC), inner=torch.optim.SGD),
    "EF21": _gradients(EF21),
    "EControl": _gradients(EControl),
    "ErrorFeedback": _gradients(ErrorFeedback),
    "TernGrad": _gradients(TernGrad, width=128, memory_width=64),
    "QSDP": _gradients(QSDP, width=64, memory_width=32),
    "DeMo": Row(lambda model, inner, session, h, **more: DeMo(model, session, **more)),
    "ZerothOrder": Row(
        lambda model, inner, session, h, **more: ZerothOrder(model, session, 1e-6, **more),
        width=8,
        per_parameter=False,
    ),
    "Population": Row(
        lambda model, inner, session, h: Population(
            model, inner, session, lambda: session.number, h, {"lr": (1e-6, 1.0)}
        ),
        sync_every=500,
    ),
}


def measure(row: Row) -> Costs:
    before, _ = _bytes(row, WARM)
    after, spec = _bytes(row, WARM + 1)
    elements = BLOCKS * row.width**2 if row.per_parameter else 1
    sent = (after - before) / PEERS / elements
    held = None
    if spec.method in STEPPED:
        each = BILLION // spec.fragments
        parts = [Parameter(f"{n}", (each,), fragment=n) for n in range(spec.fragments)]
        big = Manifest.of(parts)
        held = host_bytes(spec, big) / big.elements
    return Costs(sent, RING_BYTES * row.sync_every / sent, held)


def _bytes(row: Row, rounds: int) -> tuple[int, RunSpec]:
    swarm = Swarm(PEERS)
    swarm.run(partial(_train, row, rounds))
    return swarm.encoded_bytes, swarm.state.spec


def _train(row: Row, rounds: int, session: Any) -> None:
    torch.manual_seed(0)
    model = Model(row.width)
    inner = row.inner(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
    outer = row.make(model, inner, session, MEASURED_H)
    for step in range(rounds if isinstance(outer, EveryStep) else rounds * MEASURED_H):
        random = torch.Generator().manual_seed(1000 * session.number + step)
        for p in model.parameters():
            p.grad = torch.rand(p.shape, generator=random) - 0.4
        _step(model, inner, outer)
    outer.close()


def _step(model: nn.Module, inner: torch.optim.Optimizer, outer: Any) -> None:
    if isinstance(outer, ZerothOrder):
        outer.step(lambda: sum(float(p.sum()) for p in model.parameters()))
    elif isinstance(outer, DeMo):
        outer.step()
    else:
        inner.step()


def measure_memory(row: Row) -> Memory:
    _memory(row)  # codecs keep some MiB for good, in each thread
    return _memory(row)


def _memory(row: Row) -> Memory:
    torch.manual_seed(0)
    model = Model(row.memory_width, MEMORY_BLOCKS)
    inner = row.inner(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
    for p in model.parameters():
        p.grad = torch.rand(p.shape) - 0.4
    elements = sum(p.numel() for p in model.parameters())
    tracemalloc.start()
    try:
        at_every_step = row.sync_every == 1
        more = {"check_every": 1} if at_every_step else {}
        outer = row.make(model, inner, OutsideSession(), row.memory_h, **more)

        def train() -> None:
            for _ in range(MEMORY_STEPS * (1 if at_every_step else row.memory_h)):
                _step(model, inner, outer)

        train()  # as a newcomer
        if isinstance(outer, GradientAverage):
            outer._forget()  # some compressors begin anew with a sum
        measured = most_of(train)
        if isinstance(outer, Population):  # here nobody is worse than another one
            measured = most_of(lambda: outer._hand_over(OutsideSession.peer_name, False))
        return Memory(measured / elements, outer.trainer_bytes)
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    for name, row in COSTS.items():
        found = measure(row)
        held = f"{found.daemon_bytes:6.1f}" if found.daemon_bytes else "      "
        memory = measure_memory(row)
        taken = f"{memory.measured:6.2f} of {memory.said:5.2f}"
        print(f"{name:32} {found.sent_bytes:10.4g} {found.fewer:10,.4g} {held} {taken}", flush=True)
