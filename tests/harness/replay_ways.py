"""The same local steps on machines that compute otherwise, and trainers that do not take them.

A way or a cheat changes a ``Loop``. What other processors do is emulated: sums in another order,
other kernels, more threads, other precisions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from atoll.optim.replay.checkpoint import WorkCheckpoint
from atoll.optim.replay.step_disclosure import Batch, Extent, Opened
from harness.replaying import I64, Loop, Optimizers, sampled, text_model

__all__ = ["CHEATS", "MIXED", "MIXED_WAYS", "WAYS", "Change", "segment", "segments"]

Change = Callable[[Loop], None]
LABELS = 256


def segment(
    optimizer: Optimizers,
    steps: int,
    *,
    warm: int = 10,
    way: Change | None = None,
    cheat: Change | None = None,
    make: Callable[..., nn.Module] = text_model,
    **sizes: int,
) -> Opened:
    """Of a trainer that has taken ``warm`` steps before it; in the segment it may cheat."""
    loop, batches = _begun(optimizer, way, make(**sizes))
    loop(next(batches) for _ in range(warm))
    return _next(loop, batches, warm, steps, cheat)


def segments(
    optimizer: Optimizers, steps: int, count: int, *, way: Change | None = None, **sizes: int
) -> Iterator[Opened]:
    """One after the other, of a trainer's first ``count`` steps."""
    loop, batches = _begun(optimizer, way, text_model(**sizes))
    for step in range(0, count, steps):
        yield _next(loop, batches, step, steps)


def _begun(
    optimizer: Optimizers, way: Change | None, model: nn.Module
) -> tuple[Loop, Iterator[I64]]:
    loop = Loop(model, optimizer(model))
    if way is not None:
        way(loop)
    return loop, sampled(1)


def _next(
    loop: Loop, batches: Iterator[I64], step: int, steps: int, cheat: Change | None = None
) -> Opened:
    state = loop.task().state
    start = _copied(state.capture())
    noted = [next(batches) for _ in range(steps)]
    if cheat is not None:
        cheat(loop)
    loop(noted)
    end = _copied(state.capture())
    extent = Extent(1, step, steps, steps)
    return Opened(extent, 0, start, [(Batch(b),) for b in noted], end, end.digests(), None)


def _copied(checkpoint: WorkCheckpoint) -> WorkCheckpoint:
    return WorkCheckpoint.decode(checkpoint.encode())


# ------------------------------------------------------------ ways to compute


def _nothing(loop: Loop) -> None:
    """The same machine."""


def _halves(loop: Loop) -> None:
    """Gradients of two halves of the batch, added up."""
    whole = loop.loss

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        half = len(x) // 2
        return (whole(model, x[half:], y[half:]) + whole(model, x[:half], y[:half])) / 2

    loop.loss = loss


def _reversed(loop: Loop) -> None:
    """The samples of a batch from the last to the first."""
    whole = loop.loss
    loop.loss = lambda model, x, y: whole(model, x.flip(0), y.flip(0))


def _double(loop: Loop) -> None:
    """Forward and backward pass in float64; gradients rounded once."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        wide = {name: p.double() for name, p in model.named_parameters()}
        wide["head.weight"] = wide["embedding.weight"]
        logits = torch.func.functional_call(model, wide, (x,), tie_weights=False)
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    loop.loss = loss


def _in_context(context: Callable[[], Any]) -> Change:
    def change(loop: Loop) -> None:
        loop.context = context

    return change


def _threads(count: int) -> Change:
    @contextmanager
    def several() -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def change(loop: Loop) -> None:
        loop.around = several

    return change


def _kernels() -> Any:
    """Attention as products and a softmax."""
    return sdpa_kernel(SDPBackend.MATH)


def _compiled(loop: Loop) -> None:
    compiled = torch.compile(loop.model)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(compiled(x).flatten(0, 1), y.flatten())

    loop.loss = loss


def _halved_precision() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


WAYS: dict[str, Change] = {
    "the same machine": _nothing,
    "two threads": _threads(2),
    "batch reversed": _reversed,
    "halves of the batch": _halves,
    "other attention": _in_context(_kernels),
    "float64": _double,
    "compiled": _compiled,
}
# Of runs in mixed precision, whose trainers compute like this.
MIXED = _in_context(_halved_precision)


def _both(one: Change, other: Change) -> Change:
    def change(loop: Loop) -> None:
        one(loop)
        other(loop)

    return change


MIXED_WAYS: dict[str, Change] = {
    "bfloat16 on both": MIXED,
    "... batch reversed": _both(MIXED, _reversed),
    "... halves of the batch": _both(MIXED, _halves),
    "... and float32 here": _nothing,
}


# ------------------------------------------------------------ cheats


class _Stepping:
    """Counts an optimizer's steps from now on."""

    def __init__(self, loop: Loop) -> None:
        self.inner, self.plain, self.count = loop.inner, loop.inner.step, 0
        self.inner.step = self.step  # type: ignore[method-assign]

    def step(self) -> None:
        self.count += 1
        self.take()

    def take(self) -> None:
        self.plain()


def _skip(loop: Loop) -> None:
    """The first step of a segment is not taken."""

    class Skipping(_Stepping):
        def take(self) -> None:
            if self.count > 1:
                self.plain()

    Skipping(loop)


def _rate(factor: float) -> Change:
    def change(loop: Loop) -> None:
        for group in loop.inner.param_groups:
            group["lr"] *= factor

    return change


def _gradients(factor: float) -> Change:
    def change(loop: Loop) -> None:
        whole = loop.loss
        loop.loss = lambda model, x, y: factor * whole(model, x, y)

    return change


def _labels(loop: Loop) -> None:
    """Every label flipped."""
    whole = loop.loss
    loop.loss = lambda model, x, y: whole(model, x, LABELS - 1 - y)


def _one_sample(loop: Loop) -> None:
    """One sample of the first batch is another one."""
    whole, seen = loop.loss, []

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(len(x))
        x, y = (x.clone(), y.clone())
        if len(seen) == 1:
            x[0], y[0] = x[1], y[1]
        return whole(model, x, y)

    loop.loss = loss


def _one_batch(loop: Loop) -> None:
    """The first batch is other data."""
    whole, seen = loop.loss, []

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(len(x))
        return whole(model, x, y) if len(seen) > 1 else whole(model, x.roll(3, 1), y.roll(3, 1))

    loop.loss = loss


def _stale(loop: Loop) -> None:
    """Gradients of the parameters with which the segment began."""
    old, whole = copy.deepcopy(loop.model), loop.loss

    class Copying(_Stepping):
        def take(self) -> None:
            for p, stale in zip(loop.model.parameters(), old.parameters(), strict=True):
                p.grad = stale.grad
            self.plain()
            old.zero_grad()

    Copying(loop)
    loop.loss = lambda _, x, y: whole(old, x, y)


def _no_steps(loop: Loop) -> None:
    """A free rider's: nothing moves."""

    class Nothing(_Stepping):
        def take(self) -> None:
            """No step."""

    Nothing(loop)


def _at_the_end(poison: Callable[[Loop], None]) -> Change:
    """Honest steps, and after each the poison."""

    def change(loop: Loop) -> None:
        class Poisoning(_Stepping):
            def take(self) -> None:
                self.plain()
                poison(loop)

        Poisoning(loop)

    return change


@torch.no_grad()
def _push(loop: Loop) -> None:
    """One tensor, by a hundredth of its length."""
    p = loop.model.get_parameter("blocks.0.mlp_out.weight")
    p += 0.01 * p.norm() / p.numel() ** 0.5


@torch.no_grad()
def _momentum(loop: Loop) -> None:
    """What the optimizer keeps, for the next segment."""
    for kept in loop.inner.state.values():
        for key in ("exp_avg", "momentum_buffer"):
            if key in kept:
                kept[key] *= 1.05


CHEATS: dict[str, Change] = {
    "one step skipped": _skip,
    "no steps": _no_steps,
    "rate 0": _rate(0.0),
    "rate + 10 %": _rate(1.1),
    "rate + 1 %": _rate(1.01),
    "one batch is other data": _one_batch,
    "one sample is another": _one_sample,
    "labels flipped": _labels,
    "gradients x 1.5": _gradients(1.5),
    "stale gradients": _stale,
    "one tensor pushed": _at_the_end(_push),
    "momentum x 1.05": _at_the_end(_momentum),
}
