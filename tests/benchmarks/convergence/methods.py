"""The methods that are compared: to add one is to add an entry to METHODS.

An entry makes the method from (model, inner optimizer, session of a swarm, case), where the case
has what a schedule may need. What it makes has ``close()``, and ``outer_parameters()`` where a run
has parameters other than the worker's. The inner optimizer is AdamW at the row's learning rate,
or with ``muon`` those of ``muon_and_adamw`` (a list of both);
where ``uses_inner`` is false, what the entry makes is itself the optimizer that is stepped, and
the row's learning rate is its own (its ``lr``, or that of its groups). ``step`` takes one local
step; an entry may bring one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.optim import (
    QSR,
    AsyncDiLoCo,
    DeMo,
    DiLoCo,
    GradientAverage,
    LocalSGD,
    NoLoCo,
    Population,
    SparseLoCo,
    StreamingDiLoCo,
    ZerothOrder,
)
from atoll.optim.compressors import Compressor, ErrorFeedback, PowerSGD
from atoll.optim.experimental import (
    CO2,
    EF21,
    CountSketch,
    EControl,
    EvolutionStrategy,
    HDPiSSA,
    MajorityLion,
    PrivateDiLoCo,
)
from atoll.optim.swarm import SwarmSession
from benchmarks.convergence.sizes import WEIGHT_DECAY

__all__ = [
    "CEILING",
    "FLOOR",
    "METHODS",
    "QUICK_MARGIN",
    "BytesBar",
    "Case",
    "Entry",
    "LossBar",
    "after_backward",
    "with_closure",
]

FLOOR, CEILING = "one-worker", "data-parallel"  # plain training, which training.py does itself
# Nats per byte by which `--quick` must beat the untrained model, which has 5.34: with 60 steps most
# methods come down to 3.3 to 3.5, about the entropy of single bytes.
QUICK_MARGIN = 1.5


@dataclass(frozen=True, kw_only=True)
class Case:
    """Of a row, for factories: ``steps`` are the method's own, without those of a warm start."""

    sync_every: int
    lr: float  # the peak of the inner rate
    steps: int
    warmup_steps: int  # of the inner rate that are among the method's own
    workers: int
    # The model's loss on a batch of the training text, the same one in all calls and workers.
    score: Callable[[], Tensor] = field(compare=False)


@dataclass(frozen=True)
class LossBar:
    """At most ``percent`` above the loss of ``against``, or ``errors`` standard errors of what is
    compared: the mean over paired seeds."""

    percent: float
    against: str
    errors: float = 0.0
    from_scratch: bool = False  # at twice the steps, and else after the warm start


@dataclass(frozen=True)
class BytesBar:
    """So many times fewer bytes per peer than a float32 ring at every step."""

    factor: float


Make = Callable[[nn.Module, Any, SwarmSession, Case], Any]  # Any: one optimizer, or several
# What steps (the inner optimizer, or the method itself), the loss of the step's batch, and what
# clips the gradients.
StepRule = Callable[[Any, Callable[[], Tensor], Callable[[], None]], None]


def after_backward(optimizer: Any, loss: Callable[[], Tensor], clip: Callable[[], None]) -> None:
    """Take an ordinary training step."""
    loss().backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    clip()
    optimizer.step()
    optimizer.zero_grad()


def with_closure(optimizer: Any, loss: Callable[[], Tensor], clip: Callable[[], None]) -> None:
    """Take a step of a method that asks for losses and needs no gradients."""
    optimizer.step(loss)


@dataclass(frozen=True, kw_only=True)
class Entry:
    name: str  # in the names of rows: never change it, or what was measured is measured again
    label: str
    make: Make | None = None  # None: plain training, without a swarm
    step: StepRule = after_backward
    uses_inner: bool = True
    muon: bool = False
    every_step: bool = False  # there are no rounds of H steps
    accumulates: bool = False  # plain training that steps once in H, on the batches of all of them
    # Local steps of the slowest worker while the fastest takes one; the others lie between. As all
    # take as many steps, the fastest is evaluated last when the slowest still has some to take.
    slowest: float = 1.0
    rates: tuple[float, ...] = ()  # the grid of its learning rate, where the model's does not fit
    tuned_as: str = ""  # takes the learning rate that was found for this one
    one_line: bool = False  # only after the warm start, at the smaller H
    bars_only: bool = False  # only the lines of its bars
    bars: tuple[LossBar | BytesBar, ...] = ()  # at the smaller H
    quick_margin: float = QUICK_MARGIN
    limits: str = ""  # for docs/choosing.md


def diloco(codec: str, **options: Any) -> Make:
    return lambda model, inner, session, case: DiLoCo(
        model, inner, case.sync_every, session, codec=codec, **options
    )


def warm_diloco(codec: str) -> Make:
    """The first quarter of the steps in rounds of two."""
    return lambda model, inner, session, case: DiLoCo(
        model, inner, case.sync_every, session, codec=codec, warm_start=case.steps // 4
    )


def local_sgd(model: nn.Module, inner: Optimizer, session: SwarmSession, case: Case) -> LocalSGD:
    return LocalSGD(model, inner, case.sync_every, session)


def qsr(model: nn.Module, inner: Optimizer, session: SwarmSession, case: Case) -> LocalSGD:
    """H at the peak, from where it grows to at most ten times as much."""
    rule = QSR(
        a=case.lr * case.sync_every**0.5,
        peak_lr=case.lr,
        base=case.sync_every,
        warmup_steps=case.warmup_steps,
        most=10 * case.sync_every,
        total_steps=case.steps,
    )
    return LocalSGD(model, inner, rule, session)


def streaming(*, local: float = 0.5, outer_lr: float = 0.4, **options: Any) -> Make:
    """Results are merged after one step, as in the paper's main runs: no clock decides. What has
    been measured keeps its numbers, whatever the defaults of the class become."""
    options = {"delay": 1} | options | {"local": local, "outer_lr": outer_lr}
    return lambda model, inner, session, case: StreamingDiLoCo(
        model, inner, case.sync_every, session, **options
    )


def sparse_loco(model: nn.Module, inner: Optimizer, session: SwarmSession, case: Case) -> Any:
    return SparseLoCo(model, inner, case.sync_every, session)


def co2(model: nn.Module, inner: Optimizer, session: SwarmSession, case: Case) -> CO2:
    return CO2(model, inner, case.sync_every, session)


def async_diloco(
    model: nn.Module, inner: Optimizer, session: SwarmSession, case: Case
) -> AsyncDiLoCo:
    return AsyncDiLoCo(model, inner, case.sync_every, session, outer_delay=case.workers)


def noloco(outer_lr: float) -> Make:
    """Its loss is the mean over replicas, as in the paper: each evaluates a part of the text."""
    return lambda model, inner, session, case: NoLoCo(
        model, inner, case.sync_every, session, outer_lr=outer_lr
    )


def demo(model: nn.Module, inner: Optimizer, session: SwarmSession, case: Case) -> DeMo:
    return DeMo(model, session, lr=case.lr, weight_decay=WEIGHT_DECAY)


def zeroth_order(
    model: nn.Module, inner: Optimizer, session: SwarmSession, case: Case
) -> ZerothOrder:
    """One sample for each step: two forward passes, less work than a step with gradients."""
    return ZerothOrder(model, session, case.lr, samples=1)


def population(model: nn.Module, inner: Optimizer, session: SwarmSession, case: Case) -> Population:
    """What is explored is the weight decay: the learning rate has its schedule."""
    bounds = {"weight_decay": (0.1 * WEIGHT_DECAY, 10 * WEIGHT_DECAY)}
    return Population(model, inner, session, case.score, case.sync_every, bounds)


def gradient_average(codec: str, compressor: Callable[[], Compressor] | None = None) -> Make:
    return lambda model, inner, session, case: GradientAverage(
        model, inner, session, codec=codec, compressor=compressor and compressor()
    )


def with_sgd(
    compressor: Callable[[nn.Module, SwarmSession, Case], Compressor], decays: float = 0.0
) -> Make:
    """Return what makes the SGD that is stepped; ``decays``: times AdamW's weight decay."""

    def make(model: nn.Module, inner: Optimizer, session: SwarmSession, case: Case) -> Optimizer:
        decay = decays * WEIGHT_DECAY
        stepped = torch.optim.SGD(model.parameters(), lr=case.lr, weight_decay=decay)
        average = GradientAverage(
            model, stepped, session, compressor=compressor(model, session, case)
        )
        stepped.close = average.close  # type: ignore[attr-defined]  # the bench closes what it steps
        return stepped

    return make


def evolution(
    model: nn.Module, inner: Optimizer, session: SwarmSession, case: Case
) -> EvolutionStrategy:
    return EvolutionStrategy(model, session, case.lr, samples=1)


def private_diloco(
    model: nn.Module, inner: Optimizer, session: SwarmSession, case: Case
) -> PrivateDiLoCo:
    """Return one with a noise multiplier of 1: epsilon 40 at delta 1e-5 for thirty rounds."""
    return PrivateDiLoCo(model, inner, case.sync_every, session, clip=0.01, noise=1.0, codec="int8")


def compressed(
    name: str,
    label: str,
    compressor: Callable[[], Compressor],
    limits: str,
    quick_margin: float = QUICK_MARGIN,
) -> Entry:
    return Entry(
        name=name,
        label=label,
        make=gradient_average("float32", compressor),
        every_step=True,
        tuned_as=CEILING,
        one_line=True,
        quick_margin=quick_margin,
        limits=limits,
    )


def with_muon(name: str, label: str, make: Make, *bars: LossBar | BytesBar) -> Entry:
    return Entry(
        name=name,
        label=label,
        make=make,
        muon=True,
        tuned_as=CEILING,
        one_line=True,
        bars=bars,
        limits=UNTUNED,
    )


BETTER = LossBar(0.0, CEILING)  # of AdamW at every step
SHORT_DELAY = {"local": 0.0, "outer_lr": 0.7}  # of Streaming, where results come at once
UNTUNED = "at AdamW's rate, not tuned"
WAITS = "every step waits for the slowest"
WITHIN_5 = LossBar(5.0, CEILING)
LOSSLESS = LossBar(0.3, "diloco-float32", errors=2.0)
_ENTRIES = (
    Entry(name=FLOOR, label="one worker", limits="what a machine reaches without the others"),
    Entry(name=CEILING, label="data-parallel", limits=WAITS),
    Entry(
        name="large-batch",
        label="data-parallel, batches of H steps",
        accumulates=True,
        rates=(4e-3, 8e-3, 1.6e-2),
        quick_margin=0.3,  # six steps
        limits="the same tokens in H times fewer steps",
    ),
    Entry(
        name="data-parallel-int8",
        label="GradientAverage int8",
        make=gradient_average("int8"),
        every_step=True,
        tuned_as=CEILING,
        one_line=True,
        limits=WAITS,
    ),
    Entry(
        name="data-parallel-bf16",
        label="GradientAverage bfloat16",
        make=gradient_average("bfloat16"),
        every_step=True,
        tuned_as=CEILING,
        one_line=True,
        limits=WAITS,
    ),
    # DGC has no row: its momentum takes the place of an inner SGD's, and here is AdamW.
    compressed("powersgd", "PowerSGD rank 4", lambda: PowerSGD(rank=4, start=0), WAITS),
    # It comes down to 3.94 in the quick run: its estimate follows the gradients slowly.
    compressed(
        "ef21",
        "EF21 top-k, eta 0.1",
        lambda: EF21(eta=0.1),
        "far worse than one worker here: its estimate follows the gradients too slowly",
        quick_margin=1.0,
    ),
    compressed("econtrol", "EControl top-k", EControl, "far worse than one worker here"),
    Entry(
        name="diloco",
        label="DiLoCo int8",
        make=diloco("int8"),
        limits="from scratch it needs more steps than these",
        bars=(WITHIN_5, LossBar(3.0, CEILING, from_scratch=True), BytesBar(50.0)),
    ),
    Entry(
        name="diloco-warm",
        label="DiLoCo int4, warm_start of a quarter",
        make=warm_diloco("int4"),
        tuned_as="diloco",
        bars=(LossBar(6.0, CEILING, from_scratch=True),),
        bars_only=True,
        limits="all its bytes are counted, those of the warm start too",
    ),
    Entry(
        name="ef-topk",
        label="ErrorFeedback top-k",
        make=gradient_average("float32", ErrorFeedback),
        every_step=True,
        tuned_as=CEILING,
        one_line=True,
        bars=(LossBar(11.0, CEILING), BytesBar(48.0)),
        limits=WAITS,
    ),
    Entry(
        name="majority-lion",
        label="MajorityLion",
        # Its weight decay is ten times AdamW's, as its rate is a tenth.
        make=with_sgd(lambda model, session, case: MajorityLion(), decays=10.0),
        uses_inner=False,
        every_step=True,
        rates=(4e-4,),
        one_line=True,
        limits=f"{WAITS}; its rate is a tenth of AdamW's, not tuned",
    ),
    compressed(
        "count-sketch",
        "CountSketch",
        CountSketch,
        "diverges here: few elements of these gradients stand out",
        quick_margin=0.5,
    ),
    Entry(
        name="hd-pissa",
        label="HDPiSSA rank 8",
        make=with_sgd(
            lambda model, session, case: HDPiSSA(
                model=model, part=session.number, parts=case.workers, rank=8
            )
        ),
        uses_inner=False,
        every_step=True,
        rates=(2e-3,),
        one_line=True,
        quick_margin=0.0,  # a model of random numbers has no directions of its own
        limits=f"{WAITS}; not tuned, and it is for fine-tuning",
    ),
    Entry(
        name="private-diloco",
        label="PrivateDiLoCo int8, noise 1",
        make=private_diloco,
        tuned_as="diloco",
        one_line=True,
        quick_margin=-10.0,  # noise alone, wherever it leads
        limits="a model of this size gets no signal: it is for adapters",
    ),
    Entry(
        name="diloco-float32",
        label="DiLoCo float32",
        make=diloco("float32"),
        tuned_as="diloco",
        one_line=True,
    ),
    Entry(
        name="diloco-int4",
        label="DiLoCo int4",
        make=diloco("int4"),
        tuned_as="diloco",
        bars=(LOSSLESS, BytesBar(200.0)),
    ),
    Entry(
        name="diloco-fp4",
        label="DiLoCo E3M0",
        make=diloco("fp4_e3m0"),
        tuned_as="diloco",
        one_line=True,
        bars=(LOSSLESS, BytesBar(200.0)),
    ),
    Entry(
        name="diloco-momentum8",
        label="DiLoCo int8, momentum in 8 bits",
        make=diloco("int8", momentum_codec="dynamic8"),
        tuned_as="diloco",
        one_line=True,
        bars=(LossBar(0.3, "diloco", errors=2.0),),
    ),
    Entry(
        name="streaming",
        label="Streaming E3M0",
        make=streaming(),
        bars=(WITHIN_5, BytesBar(200.0)),
        limits="merged one step late, with local 0.5 and an outer rate of 0.4",
    ),
    # What a trainer did in the delay is dropped: of one step or two it is little.
    Entry(
        name="streaming-local0-outer0.7",
        label="Streaming E3M0, local 0, outer rate 0.7",
        make=streaming(**SHORT_DELAY),
        tuned_as="streaming",
        one_line=True,
        bars=(LossBar(0.0, "streaming"), LossBar(0.0, "streaming", from_scratch=True)),
        limits="merged one step late; at ten steps it drops a third of them",
    ),
    Entry(
        name="eager",
        label="Streaming eager E3M0",
        make=streaming(eager=True),
        quick_margin=1.0,  # it comes down to 4.03: of six rounds the first steps are small
        limits="worse than one worker here; the paper has two workers, and these are four",
    ),
    Entry(
        name="sparseloco",
        label="SparseLoCo",
        make=sparse_loco,
        bars=(LossBar(20.0, CEILING), BytesBar(1000.0)),
        limits="each peer receives parts of all others",
        quick_margin=0.5,  # a round sends one value in 64; the others wait for later rounds
    ),
    Entry(
        name="co2",
        label="CO2 int8",
        make=co2,
        limits="no better than one worker after a warm start: an update comes a round late",
    ),
    Entry(
        name="async-diloco",
        label="AsyncDiLoCo int8",
        make=async_diloco,
        slowest=0.9,  # so hardly ever two come together
        limits="hardly ever two peers in a round: speeds are 0.9 to 1",
    ),
    Entry(
        name="noloco",
        label="NoLoCo bfloat16",
        make=noloco(0.7),
        bars=(LossBar(2.0, "diloco"),),
        limits="the mean of the replicas' losses",
    ),
    Entry(
        name="noloco-outer1.2",
        label="NoLoCo bfloat16, outer rate 1.2",
        make=noloco(1.2),
        tuned_as="noloco",
        one_line=True,
        bars=(LossBar(0.0, "noloco"), LossBar(0.0, "noloco", from_scratch=True)),
        limits="the mean of the replicas' losses",
    ),
    Entry(
        name="demo",
        label="DeMo",
        make=demo,
        uses_inner=False,
        every_step=True,
        rates=(5e-4, 1e-3, 2e-3),  # of steps by sign, which are longer than AdamW's
        limits=WAITS + "; the rate is at the edge of its grid",
    ),
    Entry(
        name="zeroth-order",
        label="ZerothOrder",
        make=zeroth_order,
        step=with_closure,
        uses_inner=False,
        every_step=True,
        rates=(1e-4, 3e-4, 1e-3),
        one_line=True,  # it is for fine-tuning
        quick_margin=0.2,  # it comes down to 4.88
        limits="far worse than one worker here: it is for fine-tuning",
    ),
    Entry(
        name="evolution",
        label="EvolutionStrategy",
        make=evolution,
        step=with_closure,
        uses_inner=False,
        every_step=True,
        rates=(3e-4,),
        one_line=True,  # it is for fine-tuning, as ZerothOrder
        quick_margin=0.0,
        limits="far worse than one worker here: it is for fine-tuning",
    ),
    Entry(
        name="population",
        label="Population",
        make=population,
        limits="no better than one worker after a warm start: nobody uses another's gradients",
    ),
    Entry(name="local-sgd", label="LocalSGD int8", make=local_sgd),
    Entry(name="local-sgd-qsr", label="LocalSGD QSR int8", make=qsr, tuned_as="local-sgd"),
)
_ENTRIES += (
    Entry(
        name="data-parallel-muon",
        label="data-parallel, Muon",
        muon=True,
        tuned_as=CEILING,
        one_line=True,
        bars=(BETTER,),
        limits=UNTUNED,
    ),
    with_muon("diloco-muon-int8", "DiLoCo int8, Muon", diloco("int8"), BETTER),
    with_muon(
        "diloco-muon-int4",
        "DiLoCo int4, Muon",
        diloco("int4"),
        LossBar(0.3, "diloco-muon-int8", errors=2.0),
    ),
    with_muon(
        "streaming-muon-int8",
        "Streaming int8, Muon",
        streaming(codec="int8", **SHORT_DELAY),
        BETTER,
    ),
    with_muon(
        "streaming-muon-int4",
        "Streaming int4, Muon",
        streaming(codec="int4", **SHORT_DELAY),
        BETTER,
    ),
)
METHODS = {entry.name: entry for entry in _ENTRIES}
