"""A small byte transformer under DiLoCo whose local steps are kept, and the task that repeats them.

The text is made up, so nothing is read; a sample's number is where its window begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.optim import ByteTransformer
from atoll.optim.replay.replaying import ReplayTask

__all__ = [
    "CONTEXT",
    "I64",
    "OPTIMIZERS",
    "SAMPLES",
    "Loop",
    "Optimizers",
    "biased_model",
    "sampled",
    "text_model",
]

CONTEXT, SAMPLES = 16, 4096
I64 = NDArray[np.int64]
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def _text() -> Tensor:
    """Bytes with something to learn: words of a small vocabulary, in random order."""
    random = np.random.default_rng(5)
    words = [bytes(random.integers(97, 123, size=length)) for length in range(2, 9)]
    chosen = random.integers(len(words), size=SAMPLES)
    joined = b" ".join(words[n] for n in chosen)[: SAMPLES + CONTEXT + 1]
    return torch.from_numpy(np.frombuffer(joined, np.uint8).astype(np.int64))


TEXT = _text()


def windows(indices: I64) -> tuple[Tensor, Tensor]:
    rows = TEXT[torch.from_numpy(np.asarray(indices))[:, None] + torch.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, 1:]


def text_model(**sizes: int) -> ByteTransformer:
    torch.manual_seed(0)
    return ByteTransformer(**({"width": 32, "depth": 1, "heads": 2, "context": CONTEXT} | sizes))


class Biased(nn.Module):
    """Attention with biases: those of keys have gradients of nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 256)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        logits = self.head(self.block(self.embedding(x), src_mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def biased_model() -> Biased:
    torch.manual_seed(0)
    return Biased()


def sampled(seed: int, size: int = 8) -> Iterator[I64]:
    """Endless batches of a trainer's."""
    random = np.random.default_rng(seed)
    while True:
        yield random.integers(SAMPLES - CONTEXT, size=size)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


OPTIMIZERS: dict[str, Optimizers] = {"AdamW": adamw, "SGD": sgd}


@dataclass
class Loop:
    """One training loop for whoever trains and whoever repeats it; fields say how it differs."""

    model: nn.Module
    inner: torch.optim.Optimizer
    scheduler: Any = None
    scaler: Any = None
    accumulate: int = 1
    context: Callable[[], AbstractContextManager[Any]] = nullcontext  # of a forward pass
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # of the whole loop
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = field(
        default=lambda model, x, y: model.loss(x, y)  # type: ignore[operator]
    )

    def __call__(self, batches: Iterable[I64], step: int = 0) -> None:
        with self.around():
            self.train(batches)

    def train(self, batches: Iterable[I64]) -> None:
        for number, indices in enumerate(batches, 1):
            x, y = windows(indices)
            with self.context():
                loss = self.loss(self.model, x, y) / self.accumulate
            (self.scaler.scale(loss) if self.scaler else loss).backward()
            if number % self.accumulate:
                continue
            if self.scaler:
                self.scaler.step(self.inner)
                self.scaler.update()
            else:
                self.inner.step()
            if self.scheduler:
                self.scheduler.step()
            self.inner.zero_grad()

    def task(self) -> ReplayTask:
        return ReplayTask(
            self.model,
            self.inner,
            self,
            schedulers=[self.scheduler] if self.scheduler else [],
            stateful={"scaler": self.scaler} if self.scaler else {},
        )
