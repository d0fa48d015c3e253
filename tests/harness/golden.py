"""Histories of each method on a model of 1,000 parameters: what `tests/golden/` keeps.

The model is no network. Its gradient is a distance from a target, times 1, 1/2 or 1/4, and inner
learning rates are powers of two, so inner steps are rounded alike by every processor, with fused
multiplications and without. Targets are words of ``counter_rng``. What is left to chance are the
products of matrices in a method itself (DeMo, PowerSGD, Muon).

`make golden-rewrite` writes histories anew: read the difference before you commit it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from atoll.collectives.codecs import F32
from atoll.collectives.counter_rng import derive_key, random_words, unit_floats
from atoll.optim import (
    DGC,
    QSDP,
    QSR,
    AsyncDiLoCo,
    DeMo,
    DiLoCo,
    ErrorFeedback,
    GradientAverage,
    LayerBits,
    LGreCo,
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
from atoll.optim.experimental import CO2, EF21, EControl
from atoll.optim.swarm import SwarmSession

__all__ = ["CASES", "FOLDER", "TOLERANCE", "Case", "History", "Model", "play", "read", "train"]

FOLDER = Path(__file__).parents[1] / "golden"
WORKERS = 3
H = 4  # inner steps between two rows, and of a round where a method has rounds
LR = 2**-3
OUTER: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9}  # whatever the defaults become
# Float32 rounds to 6e-8. Without AVX-512, AVX2 and kernels, histories were found to
# differ by 1e-7 at most, because of products of matrices. A rate that is 0.1 % off moves parameters
# by 1e-4.
TOLERANCE = 1e-5
# Muon orthogonalizes in bfloat16, of 2**-8, and processors differ in where they round: 2e-3.
MUON_TOLERANCE = 1e-2

# [row][worker] -> loss, norm, values of the worker's parameters; and "run" norm, values where a
# method has other ones for evaluation.
History: TypeAlias = list[list[dict[str, Any]]]
Make: TypeAlias = Callable[[nn.Module, Any, SwarmSession], Any]


class Model(nn.Module):
    """Two blocks, a head, and a vector that belongs to no block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(20, 16) for _ in range(2))
        self.head = nn.Linear(16, 20, bias=False)
        self.scale = nn.Parameter(torch.empty(24))
        for number, p in enumerate(self.parameters()):
            p.data.copy_(_numbers(p.shape, b"start", number))

    def distances(self, *key: bytes | int) -> list[torch.Tensor]:
        """Of each parameter from its target, which moves with ``key`` by a quarter at most."""
        parts = enumerate(self.parameters())
        return [
            p.detach() - (_numbers(p.shape, b"goal", n) + _numbers(p.shape, *key, n) / 4)
            for n, p in parts
        ]

    def loss(self, *key: bytes | int) -> float:
        """In float64, so that it is the same however it is added up, but for its last digits."""
        return sum(
            float((d.double().square() * 2.0 ** -(n % 3)).sum()) / 2
            for n, d in enumerate(self.distances(*key))
        )

    def set_gradients(self, *key: bytes | int) -> None:
        for n, (p, d) in enumerate(zip(self.parameters(), self.distances(*key), strict=True)):
            p.grad = d * 2.0 ** -(n % 3)


def _numbers(shape: torch.Size, *key: bytes | int) -> torch.Tensor:
    """In [-1, 1), multiples of 2**-10: sums of a few are exact."""
    words = np.empty(shape.numel(), np.uint32)
    random_words(derive_key(b"golden", *key), 0, words)
    floats: F32 = np.floor(unit_floats(words) * 2048) / 1024 - 1
    return torch.from_numpy(floats.astype(np.float32)).view(shape)


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)]


def plain_sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=LR)]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=LR), torch.optim.SGD(rest, lr=LR)]


@dataclass(frozen=True)
class Case:
    """``make``: the method, on a model, its inner optimizers, a session. ``halved``: the steps
    after which inner rates are halved."""

    make: Make
    inner: Callable[[nn.Module], list[torch.optim.Optimizer]] = sgd
    rows: int = 5
    halved: tuple[int, ...] = ()
    speeds: tuple[float, ...] = ()
    tolerance: float = TOLERANCE


def _rounds(method: Callable[..., Any], **options: Any) -> Make:
    """A method with rounds of H steps."""
    return lambda model, inner, session: method(model, inner, H, session, **options)


def _compressed(make: Callable[[int], Compressor]) -> Case:
    """GradientAverage with a compressor, of the worker's number."""

    def method(model: nn.Module, inner: Any, session: SwarmSession) -> GradientAverage:
        return GradientAverage(model, inner, session, compressor=make(session.number))

    return Case(method, plain_sgd, rows=3)


def _population(model: nn.Module, inner: Any, session: SwarmSession) -> Population:
    """Members with rates of 1/8, 1/16, 1/32."""
    for group in inner[0].param_groups:
        group["lr"] = LR * 2.0**-session.number
    score = partial(_model(model).loss, b"heldout")
    bounds = {"lr": (LR / 8, 2 * LR), "momentum": (0.0, 0.75)}
    return Population(model, inner, session, score, H, bounds, seed=1)


CASES: dict[str, Case] = {
    "diloco_float32": Case(_rounds(DiLoCo, **OUTER, codec="float32")),
    "diloco_int8": Case(_rounds(DiLoCo, **OUTER, codec="int8")),
    "diloco_int4": Case(_rounds(DiLoCo, **OUTER, codec="int4")),
    # With the momentum that DiLoCo takes by itself where an inner optimizer is Muon.
    "diloco_muon": Case(
        _rounds(DiLoCo, outer_lr=0.7, codec="float32"), muon, tolerance=MUON_TOLERANCE
    ),
    "streaming_diloco": Case(
        _rounds(StreamingDiLoCo, blocks_per_fragment=1, delay=1, outer_lr=0.4, codec="fp4_e3m0")
    ),
    "streaming_eager": Case(
        _rounds(StreamingDiLoCo, blocks_per_fragment=1, eager=True, outer_lr=0.4)
    ),
    "async_diloco": Case(
        _rounds(AsyncDiLoCo, **OUTER, outer_delay=2, codec="float32"), speeds=(1.0, 2.0, 4.0)
    ),
    # 2 steps in a round at the first rate, 9 at the second, 12 at the third.
    "local_sgd_qsr": Case(
        lambda model, inner, session: LocalSGD(
            model, inner, QSR(a=0.1875, peak_lr=LR, base=2, most=12), session, codec="float32"
        ),
        rows=8,
        halved=(5, 13),
    ),
    "co2": Case(_rounds(CO2, outer_momentum=0.5, clip=0.25, codec="float32")),
    "sparse_loco_senders": Case(_rounds(SparseLoCo)),
    "sparse_loco_all": Case(_rounds(SparseLoCo, aggregate="all")),
    "noloco": Case(_rounds(NoLoCo)),
    "demo": Case(
        lambda model, inner, session: DeMo(model, session, lr=2**-6, decay=0.9, topk=8), rows=3
    ),
    "zeroth_order": Case(
        lambda model, inner, session: ZerothOrder(
            model, session, 2**-8, epsilon=2**-4, samples=3, seed=7
        ),
        rows=3,
    ),
    "population": Case(_population),
    "gradient_average": Case(lambda *given: GradientAverage(*given), rows=3),
    "power_sgd": _compressed(lambda _: PowerSGD(rank=2, start=3)),
    "dgc": _compressed(lambda _: DGC(density=0.05, momentum=0.5)),
    "tern_grad": _compressed(lambda _: TernGrad()),
    "qsdp": _compressed(lambda _: QSDP(bits=4)),
    "ef21": _compressed(lambda _: EF21(eta=0.5)),
    "ef21_weighted": _compressed(lambda number: EF21(smoothness=1.0 + number)),
    "econtrol": _compressed(lambda _: EControl(eta=0.25)),
    "error_feedback": _compressed(lambda _: ErrorFeedback(decay=0.9)),
    "layer_bits": _compressed(lambda _: LayerBits(choice=LGreCo(every=3, alpha=3.0))),
    "power_sgd_l_greco": _compressed(lambda _: PowerSGD(rank=2, start=1, choice=LGreCo(every=3))),
}


def play(case: Case, workers: int = WORKERS) -> History:
    """Of a swarm, as it is now."""
    found = Swarm(workers, speeds=case.speeds).run(partial(train, case))
    return [list(row) for row in zip(*found, strict=True)]


def train(case: Case, session: SwarmSession) -> list[dict[str, Any]]:
    """Rows of one worker."""
    model = Model()
    inner = case.inner(model)
    outer = case.make(model, inner, session)
    rows = []
    for step in range(case.rows * H):
        key = (b"batch", session.number, step)
        model.set_gradients(*key)
        if isinstance(outer, ZerothOrder):
            outer.step(partial(model.loss, *key))
        elif isinstance(outer, DeMo):
            outer.step()
        else:
            for one in inner:
                one.step()
        for group in (g for one in inner for g in one.param_groups if step + 1 in case.halved):
            group["lr"] /= 2
        if (step + 1) % H == 0:
            rows.append(_row(model, outer))
    outer.close()
    return rows


def _row(model: Model, outer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"loss": model.loss(b"heldout"), **_shown(model)}
    if hasattr(outer, "outer_parameters"):
        with outer.outer_parameters():
            run = _shown(model)
        if run != _shown(model):
            found |= {f"run_{name}": value for name, value in run.items()}
    return found


def _shown(model: nn.Module) -> dict[str, Any]:
    """The norm of all parameters, and the last value of each."""
    norm = sum(float(p.detach().double().square().sum()) for p in model.parameters()) ** 0.5
    return {"norm": norm, "values": [float(p.detach().flatten()[-1]) for p in model.parameters()]}


def _model(model: nn.Module) -> Model:
    assert isinstance(model, Model)
    return model


# ---------------------------------------------------------------- files


def read(name: str) -> History:
    history: History = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))["rows"]
    return history


def written(history: History) -> str:
    """A line for each worker's row, in nine digits, which tell any two float32 apart."""
    rows = [",\n    ".join(json.dumps(_rounded(worker)) for worker in row) for row in history]
    return '{"rows": [\n  [' + "],\n  [".join(rows) + "]\n]}\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.9g}")


def rewrite() -> None:
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for name, case in CASES.items():
        (FOLDER / f"{name}.json").write_text(written(play(case)), "utf-8")
        print(name)


if __name__ == "__main__":
    rewrite()
