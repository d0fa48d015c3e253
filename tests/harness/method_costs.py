"""What each method sends and holds, measured: the numbers of `docs/choosing.md`.

    PYTHONPATH=tests python -m harness.method_costs        prints them

Bytes are counted by a swarm, which encodes what peers would send. Those of a late round count, so
not what happens once. Host memory is what `host_bytes` says of the run that the swarm had, for a
model of a billion parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from atoll.optim import (
    CO2,
    DGC,
    EF21,
    QSDP,
    AsyncDiLoCo,
    DeMo,
    DiLoCo,
    EControl,
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
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.spec import STEPPED, RunSpec, host_bytes

__all__ = ["COSTS", "Costs", "Row", "measure"]

PEERS = 4
WARM = 2  # rounds before the one whose bytes count
RING_BYTES = 2 * (PEERS - 1) / PEERS * 4  # of a parameter and step: float32 gradients of all
BILLION = 10**9
BLOCKS = 2  # square matrices; of Streaming DiLoCo each is a fragment
MEASURED_H = 2  # bytes of a round do not depend on it; fragments take turns within it

Make = Callable[[nn.Module, torch.optim.Optimizer, Any], Any]


@dataclass(frozen=True)
class Row:
    """``per_parameter``: of what is sent; else it does not depend on the model. ``width``: of the
    model's matrices. ``sync_every``: what the document recommends to begin with."""

    make: Make
    sync_every: int = 1
    width: int = 512
    per_parameter: bool = True


@dataclass(frozen=True)
class Costs:
    """``sent_bytes``: by one of four peers, in a round, encoded, for each parameter or in all.
    ``fewer``: times less than float32 gradients at every step. ``daemon_bytes``: of host memory for
    each parameter, of a method whose run has its parameters."""

    sent_bytes: float
    fewer: float
    daemon_bytes: float | None


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(BLOCKS))


def _rounds(method: Callable[..., Any], sync_every: int, width: int = 512, **options: Any) -> Row:
    return Row(
        lambda model, inner, session: method(model, inner, MEASURED_H, session, **options),
        sync_every,
        width,
    )


def _gradients(
    compressor: Callable[[], Compressor] | None = None, width: int = 512, **options: Any
) -> Row:
    def make(model: nn.Module, inner: Any, session: Any) -> GradientAverage:
        made = compressor() if compressor is not None else None
        return GradientAverage(model, inner, session, compressor=made, **options)

    return Row(make, width=width)


# By what the first column of the document's table says.
COSTS: dict[str, Row] = {
    "DiLoCo": _rounds(DiLoCo, 100),
    'DiLoCo(codec="int4")': _rounds(DiLoCo, 100, codec="int4"),
    'DiLoCo(codec="float32")': _rounds(DiLoCo, 100, codec="float32"),
    "StreamingDiLoCo": _rounds(StreamingDiLoCo, 100, blocks_per_fragment=1),
    "StreamingDiLoCo(eager=True)": _rounds(StreamingDiLoCo, 100, blocks_per_fragment=1, eager=True),
    "AsyncDiLoCo": _rounds(AsyncDiLoCo, 100, outer_delay=PEERS),
    "SparseLoCo": _rounds(SparseLoCo, 30, 1024),
    "NoLoCo": _rounds(NoLoCo, 50),
    "CO2": _rounds(CO2, 48),
    "LocalSGD": _rounds(LocalSGD, 4),
    "GradientAverage": _gradients(),
    'GradientAverage(codec="int8")': _gradients(codec="int8"),
    "PowerSGD(rank=4)": _gradients(lambda: PowerSGD(rank=4, start=1)),
    "LayerBits": _gradients(LayerBits),
    "DGC": _gradients(DGC),
    "EF21": _gradients(EF21),
    "EControl": _gradients(EControl),
    "TernGrad": _gradients(TernGrad, width=128),
    "QSDP": _gradients(QSDP, width=64),
    "DeMo": Row(lambda model, inner, session: DeMo(model, session)),
    "ZerothOrder": Row(
        lambda model, inner, session: ZerothOrder(model, session, 1e-6),
        width=8,
        per_parameter=False,
    ),
    "Population": Row(
        lambda model, inner, session: Population(
            model, inner, session, lambda: session.number, MEASURED_H, {"lr": (1e-6, 1.0)}
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
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = row.make(model, inner, session)
    at_every_step = isinstance(outer, DeMo | ZerothOrder | GradientAverage)
    for step in range(rounds if at_every_step else rounds * MEASURED_H):
        random = torch.Generator().manual_seed(1000 * session.number + step)
        for p in model.parameters():
            p.grad = torch.rand(p.shape, generator=random) - 0.4
        if isinstance(outer, ZerothOrder):
            outer.step(lambda: sum(float(p.sum()) for p in model.parameters()))
        elif isinstance(outer, DeMo):
            outer.step()
        else:
            inner.step()
    outer.close()


if __name__ == "__main__":
    for name, row in COSTS.items():
        found = measure(row)
        held = f"{found.daemon_bytes:6.1f}" if found.daemon_bytes else "      "
        print(f"{name:32} {found.sent_bytes:10.4g} {found.fewer:10,.4g} {held}", flush=True)
