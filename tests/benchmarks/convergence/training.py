"""One row: what it trains, from where it begins, and its held-out loss on the way.

*Equal tokens*: each worker takes the same number of steps with the same windows per step, whatever
the method, in the order of the row's seed; rows of one seed begin with the same parameters. The one
worker of the floor sees what worker 0 sees: it is what a machine reaches without the others.

*Warm start*: the first quarter of the steps is data-parallel, with the row's own learning rate,
and is the same for all rows of a seed and rate, which share it. A method takes over the parameters
and AdamW's moments and count of steps, each worker a copy, and the schedule of the learning rate
goes on. So the ceiling is one uninterrupted run, and a row differs from it in nothing but what its
method does from there on. (A method with a rate of its own begins from the middle of the model's
grid.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch

from atoll.collectives.errors import CodecError
from atoll.optim import ByteTransformer, Swarm, TextBatches
from atoll.optim.swarm import SwarmSession
from atoll.peer.demo.text import Text
from benchmarks.convergence.heldout import ON_THE_WAY, HeldOut
from benchmarks.convergence.methods import FLOOR, METHODS, Case, Entry
from benchmarks.convergence.results import Point, Result
from benchmarks.convergence.row import WARM, Row
from benchmarks.convergence.sizes import (
    SIZES,
    Size,
    Together,
    adamw,
    muon,
    rate_at,
    set_rate,
    warmup_steps,
)
from benchmarks.convergence.warm import made_with, warm_start

__all__ = [
    "Divergence",
    "Run",
    "clipping",
    "ring_bytes",
    "run_row",
    "speeds",
    "train_plainly",
]

SCORE_WINDOWS, SCORE_SEED = 64, 2**31  # of methods that ask how well a worker does
EVALUATIONS = 4  # evenly over the steps of a row with those of the warm start; H divides them


class Divergence(Exception):
    """The parameters or the loss are not finite any more."""


def run_row(
    row: Row, text: Text, cache: Path, each_step: Callable[[], None] = lambda: None
) -> Result:
    """``cache``: the folder of warm starts. ``each_step`` is called often and may raise."""
    return Run(row, text, cache, each_step).result()


def ring_bytes(elements: int, workers: int, steps: int) -> float:
    """What a peer sends in float32 all-reduces on a ring: 2 (n-1)/n of 4 bytes each, every step."""
    return 2 * (workers - 1) / workers * 4 * elements * steps


def speeds(slowest: float, workers: int) -> list[float]:
    """Of the workers, evenly from 1 to ``slowest``."""
    return [1.0 - (1.0 - slowest) * n / max(1, workers - 1) for n in range(workers)]


def where_is(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def clipping(model: torch.nn.Module, most: float) -> Callable[[], None]:
    """Return what clips the norm of a model's gradients to ``most``; 0: it does nothing."""

    def clip() -> None:
        if most > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), most)

    return clip


def run_parameters(stepped: Any) -> AbstractContextManager[None]:
    """Let the model have the run's parameters meanwhile, where they are not those of a worker."""
    found: Callable[[], AbstractContextManager[None]] = getattr(
        stepped, "outer_parameters", nullcontext
    )
    return found()


def train_plainly(
    model: ByteTransformer,
    inner: torch.optim.Optimizer | Together,
    batches: Sequence[TextBatches],
    rates: Sequence[float],
    *,
    clip: float = 0.0,
    accumulated: int = 1,
) -> None:
    """Take a step for each rate, on the batches of all these workers as one.

    That is the mean of their gradients, because they are equally large; with ``accumulated`` of so
    many batches of each worker.
    """
    where = where_is(model)
    clipped = clipping(model, clip)
    for rate in rates:
        set_rate(inner, rate)
        for _ in range(accumulated):
            parts = [each.next() for each in batches]
            bytes_BT, next_BT = (torch.cat(part).to(where) for part in zip(*parts, strict=True))
            (model.loss(bytes_BT, next_BT) / accumulated).backward()
        clipped()
        inner.step()
        inner.zero_grad()


class _Curve:
    """Held-out loss at some steps; at each of them every worker reads its part of the windows.

    So a method whose peers differ is judged by the mean of all, at the cost of one.
    """

    def __init__(self, heldout: HeldOut, last_step: int, final_windows: int) -> None:
        self._heldout, self._last_step = heldout, last_step
        self._final_windows = final_windows
        self._read: dict[int, tuple[float, int, float]] = {}  # step -> sum, windows, bytes

    def read(
        self, step: int, model: ByteTransformer, part: int, parts: int, sent_bytes: float
    ) -> None:
        """Divergence."""
        most = self._final_windows
        if step != self._last_step:
            most = min(most or ON_THE_WAY, ON_THE_WAY)
        starts = self._heldout.windows(most)[part::parts]
        total = self._heldout.total(model, starts)
        if not math.isfinite(total):
            raise Divergence(f"the held-out loss is {total} after step {step}")
        before, windows, _ = self._read.get(step, (0.0, 0, 0.0))
        self._read[step] = before + total, windows + len(starts), sent_bytes

    def points(self) -> list[Point]:
        return [
            Point(step, round(total / windows, 6), sent)
            for step, (total, windows, sent) in sorted(self._read.items())
        ]


class Run:
    """Other benchmarks change what a row's method is, its swarm, and what its workers read."""

    def __init__(self, row: Row, text: Text, cache: Path, each_step: Callable[[], None]) -> None:
        self.row, self.line = row, row.line
        self.entry = self.entry_of(row.line.method)
        self.size: Size = SIZES[row.line.size]
        self._text, self._cache, self._each_step = text, cache, each_step
        self.elements = sum(p.numel() for p in self.size.model(row.seed).parameters())
        heldout = HeldOut(text, self.size.context)
        self.curve = _Curve(heldout, self.line.steps, self.size.final_windows)
        quarters = range(1, EVALUATIONS + 1)
        self.evaluated = {self.line.steps * quarter // EVALUATIONS for quarter in quarters}
        self._warm: dict[str, Any] | None = None

    def entry_of(self, method: str) -> Entry:
        return METHODS[method]

    @property
    def inner_name(self) -> str:
        """Return what the warm start is made with; "" for AdamW."""
        return "muon" if self.entry.muon else ""

    def inner_of(self, model: ByteTransformer) -> torch.optim.Optimizer | Together:
        return (muon if self.entry.muon else adamw)(model, self.row.lr)

    def wrapped(
        self, model: ByteTransformer, inner: torch.optim.Optimizer | Together
    ) -> torch.optim.Optimizer | Together:
        """Return what data-parallel steps after the warm start: the inner optimizer."""
        return inner

    def sent_elements(self, model: ByteTransformer) -> int:
        """Return how many elements each step of data-parallel averages."""
        return self.elements

    def swarm(self) -> Swarm:
        return Swarm(self.line.workers, speeds(self.entry.slowest, self.line.workers))

    def result(self) -> Result:
        wall_s, cpu_s = time.monotonic(), time.process_time()
        failed = ""
        try:
            self.train()
        except Divergence as error:
            failed = str(error)
        return Result(
            row=self.row,
            points=tuple(self.curve.points()),
            elements=self.elements,
            wall_s=round(time.monotonic() - wall_s, 1),
            cpu_s=round(time.process_time() - cpu_s, 1),
            made_with=made_with(self._text),
            failed=failed,
        )

    def train(self) -> None:
        """Divergence."""
        if self.line.start == WARM:
            self._warm = self._warm_start()
        if self.entry.make is None:
            self._plain(1 if self.entry.name == FLOOR else self.line.workers)
            return
        swarm = self.swarm()
        try:
            swarm.run(lambda session: self._work(session, swarm))
        except CodecError as error:
            raise Divergence(error.what) from error

    def _warm_start(self) -> dict[str, Any]:
        own = self.entry.uses_inner
        lr = self.row.lr if own else self.size.rates[len(self.size.rates) // 2]

        def train() -> dict[str, Any]:
            model, inner = self._fresh()
            rates = [rate_at(step, self.line.steps, lr) for step in range(self.line.first_step)]
            everybody = [self.batches(worker, 0) for worker in range(self.line.workers)]
            for rate in rates:
                self._each_step()
                train_plainly(model, inner, everybody, [rate], clip=self.size.clip)
            return {"model": model.state_dict(), "inner": inner.state_dict()}

        made_from = {
            "size": str(self.size),
            "steps": [self.line.first_step, self.line.steps],
            "workers": self.line.workers,
            "lr": lr,
            "seed": self.row.seed,
            "made_with": made_with(self._text),
        }
        if self.inner_name:
            made_from["inner"] = self.inner_name
        return warm_start(self._cache, made_from, train)

    def _fresh(self) -> tuple[ByteTransformer, torch.optim.Optimizer | Together]:
        model = self.size.model(self.row.seed)
        inner = self.inner_of(model)
        if self._warm is not None:
            model.load_state_dict(self._warm["model"])
            inner.load_state_dict(deepcopy(self._warm["inner"]))  # which it would else share
        return model, inner

    def batches(self, worker: int, first_step: int) -> TextBatches:
        seed = 1000 * self.row.seed + worker
        size = self.size
        batches = TextBatches(self._text, context=size.context, batch=size.batch, seed=seed)
        for _ in range(first_step):
            batches.next()  # the warm start has had it
        return batches

    def _score_of(self, model: ByteTransformer) -> Callable[[], torch.Tensor]:
        batches = TextBatches(
            self._text, context=self.size.context, batch=SCORE_WINDOWS, seed=SCORE_SEED
        )
        bytes_BT, next_BT = (part.to(where_is(model)) for part in batches.next())

        @torch.no_grad()
        def score() -> torch.Tensor:
            return model.loss(bytes_BT, next_BT)

        return score

    def _rate(self, step: int) -> float:
        return rate_at(step, self.line.steps, self.row.lr)

    def _plain(self, workers: int) -> None:
        """Train one model, whose batch is that of all workers; bytes as of a ring."""
        model, inner = self._fresh()
        inner = self.wrapped(model, inner)
        first, clip = self.line.first_step, self.size.clip
        each = self.line.sync_every if self.entry.accumulates else 1
        batches = [self.batches(worker, first) for worker in range(workers)]
        self.curve.read(first, model, 0, 1, 0.0)
        for step in range(first, self.line.steps, each):
            self._each_step()
            rates = [self._rate(step)]
            train_plainly(model, inner, batches, rates, clip=clip, accumulated=each)
            if step + each in self.evaluated:
                elements = self.sent_elements(model)
                sent = ring_bytes(elements, workers, (step + each - first) // each)
                with run_parameters(inner):
                    self.curve.read(step + each, model, 0, 1, sent)

    def _work(self, session: SwarmSession, swarm: Swarm) -> None:
        """One worker of a swarm."""
        model, inner = self._fresh()
        first, workers = self.line.first_step, self.line.workers
        set_rate(inner, self._rate(first))  # a schedule of rounds may ask for it at once
        case = Case(
            sync_every=self.line.sync_every,
            lr=self.row.lr,
            steps=self.line.steps - first,
            warmup_steps=max(0, warmup_steps(self.line.steps) - first),
            workers=workers,
            score=self._score_of(model),
        )
        assert self.entry.make is not None
        outer = self.entry.make(model, inner, session, case)
        stepped = inner if self.entry.uses_inner else outer
        batches = self.batches(session.number, first)
        where, clip = where_is(model), clipping(model, self.size.clip)

        def read(step: int) -> None:
            with run_parameters(outer):
                sent = swarm.encoded_bytes / workers
                self.curve.read(step, model, session.number, workers, sent)

        read(first)
        for step in range(first, self.line.steps):
            self._each_step()
            set_rate(stepped, self._rate(step))
            bytes_BT, next_BT = (part.to(where) for part in batches.next())
            loss = partial(model.loss, bytes_BT, next_BT)
            self.entry.step(stepped, loss, clip)
            if step + 1 in self.evaluated:
                read(step + 1)
        outer.close()
