"""Define the demo's small byte-level language model, its batches and its held-out loss.

Shape suffixes: B sequences, T bytes of context, C channels, H heads, D channels per head, V = 256.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.collectives.errors import DataError
from atoll.peer.demo.text import Text

VOCABULARY = 256
HELDOUT_WINDOWS = 64  # 4 to 8 KiB of text: a standard error of about 0.03 nats, in 0.1 s


class ByteTransformer(nn.Module):
    """Predict each next byte with a decoder-only transformer.

    It is pre-norm, has learned positions, and its embedding is tied to its head.
    """

    def __init__(
        self, *, width: int = 128, depth: int = 2, heads: int = 4, context: int = 64
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # 0.02 as in GPT-2; branches add up, so they start smaller
                branch = name.endswith("out.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth if branch else 1))

    def forward(self, bytes_BT: Tensor) -> Tensor:
        """Return the logits of the byte after each position, float (B, T, V).

        ``bytes_BT``: int64 (B, T), T at most ``context``.
        """
        x_BTC = self.embedding(bytes_BT) + self.position[: bytes_BT.shape[1]]
        logits_BTV: Tensor = self.head(self.norm(self.blocks(x_BTC)))
        return logits_BTV

    def loss(self, bytes_BT: Tensor, next_BT: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte, on the model's device."""
        device = self.position.device
        logits_BTV: Tensor = self(bytes_BT.to(device))
        loss: Tensor = F.cross_entropy(logits_BTV.flatten(0, 1), next_BT.to(device).flatten())
        return loss


class Block(nn.Module):
    """Apply causal self-attention and a four times wider perceptron, each added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        qkv_BTC = self.attention_in(self.attention_norm(x_BTC)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv_BTC)
        mixed_BHTD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.attention_out(mixed_BHTD.transpose(1, 2).flatten(2))
        hidden_BTC = F.gelu(self.mlp_in(self.mlp_norm(x_BTC)))
        out_BTC: Tensor = x_BTC + self.mlp_out(hidden_BTC)
        return out_BTC


class TextBatches:
    """Draw random windows of the training text without end; another ``seed`` is another order.

    ``next()`` gives (bytes, next bytes), each int64 (batch, context).
    """

    def __init__(self, text: Text, *, context: int, batch: int = 8, seed: int = 0) -> None:
        self._bytes = text.train
        self._span = np.arange(context + 1)
        self._batch = batch
        self._last = _last_start(text.train, context)
        self._random = np.random.default_rng(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        starts = self._random.integers(self._last + 1, size=self._batch)
        return _windows(self._bytes, starts, self._span)


@torch.no_grad()
def heldout_loss(model: ByteTransformer, text: Text) -> float:
    """Return the nats per byte over fixed, evenly spaced windows of the held-out text.

    The windows are the same on all peers that have the same text, so their figures compare.
    """
    span = np.arange(model.context + 1)
    last = _last_start(text.heldout, model.context)
    starts = np.linspace(0, last, HELDOUT_WINDOWS).astype(np.int64)
    return float(model.loss(*_windows(text.heldout, starts, span)))


def _last_start(data: NDArray[np.uint8], context: int) -> int:
    if len(data) <= context:
        raise DataError(
            f"{len(data)} bytes of text do not fill a context of {context}",
            fix="give a larger folder of text",
        )
    return len(data) - context - 1


def _windows(
    data: NDArray[np.uint8], starts: NDArray[np.int64], span: NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    windows = torch.from_numpy(data[starts[:, None] + span].astype(np.int64))
    return windows[:, :-1], windows[:, 1:]
