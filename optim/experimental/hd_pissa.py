"""Fine-tune along other directions on each peer: HD-PiSSA (arXiv 2505.18777).

Of each matrix W (m, n) = U S V^T, as it was when the run began, part p of ``parts`` has the
``rank`` singular directions from p rank on, which never change::

    B_p = U_p sqrt(S_p)  (m, rank)        A_p = sqrt(S_p) V_p^T  (rank, n)

A peer of part p takes Adam's steps of adapters whose place is W itself, and gives them to all::

    dA_p = Adam(B_p^T G)      dB_p = Adam(G A_p^T)      with its own gradient G of W
    all    W = W - lr sum_p (dB_p A_p + B_p dA_p)

So K peers move W in 2 K rank directions, where equal adapters on all of them move it in 2 rank.
What each gives is gathered, as there, in a codec. The authors subtract lr^2 dB_p dA_p as well,
which is of second order and left out here.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import nn

from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.errors import CodecError
from atoll.optim.compressors.base import Compressor, check, malformed
from atoll.optim.compressors.layers import Layer, Layers
from atoll.optim.compressors.orthogonal import product
from atoll.optim.every_step.exchange import Exchange, Given
from atoll.optim.manifest import Manifest
from atoll.optim.model_io import trainable

RANK_MAX = 128  # a step takes 2 rank passes over each matrix for every part
EPSILON = 1e-8  # Adam's
_PART: Final = struct.Struct("<H")  # before the step of a peer


@dataclass(kw_only=True)
class HDPiSSA(Compressor):
    """Average gradients to steps along the singular directions that peers have divided up.

    Give it to ``GradientAverage`` with ``torch.optim.SGD(lr=...)`` without momentum; the rate is
    that of Adam for adapters. ``model``: the same one, before its first step. ``part``: which of
    ``parts`` this peer has, from 0; of several with one part the mean is taken, and the directions
    of a part that nobody has rest. ``rank``: directions of each part and matrix, fewer where the
    matrix is smaller. ``beta1``, ``beta2``: Adam's. Vectors (biases, scales) are left alone.

    When it helps: fine-tuning over slow links, at every step, of models whose adapters are too
    narrow. Each peer sends rank (m + n) elements for m n, and to all others: of few peers. The
    codec is that of ``GradientAverage``. Gradients of the matrices themselves are computed here, so
    it saves bytes and the moments' memory, not that of the gradients. To train from scratch it is
    nothing: the directions are those of the beginning. On the convergence bench, where a quarter of
    the training is done before, it ended 17.6 % above data-parallel AdamW with 6 times fewer bytes,
    no better than one worker alone (rank 8, one seed, its rate not tuned).
    """

    wire: ClassVar[str] = "HDPiSSA"
    has_momentum: ClassVar[bool] = True
    model: nn.Module = field(repr=False)
    part: int = field(repr=False)
    parts: int
    rank: int = 16
    beta1: float = 0.9
    beta2: float = 0.999

    def __post_init__(self) -> None:
        check(
            0 <= self.part < self.parts
            and 0 < self.rank <= RANK_MAX
            and 0 <= self.beta1 < 1
            and 0 <= self.beta2 < 1,
            self,
            f"a part from 0 up to parts - 1, a rank of 1 to {RANK_MAX}, betas in [0, 1)",
        )

    def _allocate(self, manifest: Manifest) -> None:
        self._encoding = get_codec(self._codec)
        check(not self._encoding.contract.keyed, self, "a codec without a key: float32 or int8")
        self._layers = Layers(manifest, wanted=lambda layer: self._rank_of(layer) > 0).matrices
        sizes = [self._rank_of(one) * (one.rows + one.columns) for one in self._layers]
        check(bool(sizes), self, "a matrix with as many rows and columns as there are parts")
        self._ends = np.cumsum(sizes)
        self._directions: F32 = np.zeros((self.parts, self._ends[-1]), np.float32)
        self._moments: F32 = np.zeros((2, self._ends[-1]), np.float32)
        self._taken = 0  # of Adam's steps
        tensors = trainable(self.model)
        for number, layer in enumerate(self._layers):
            weight = tensors[layer.name].detach().double().reshape(layer.rows, layer.columns)
            u, s, vt = (x.cpu().numpy() for x in torch.linalg.svd(weight, full_matrices=False))
            for part, flat in enumerate(self._directions):
                rank = self._rank_of(layer)
                mine = slice(part * rank, (part + 1) * rank)
                left, right = self._pair(flat, number)
                left[:] = (u[:, mine] * np.sqrt(s[mine])).T
                right[:] = np.sqrt(s[mine])[:, None] * vt[mine]

    @property
    def trainer_bytes(self) -> float:
        """Return the bytes of host memory for each parameter, at most.

        They are the step, and of the thin matrices the directions, the moments before and after
        the step and what it gives.
        """
        elements = sum(layer.size for layer in self._layers)
        return 4.0 + 4.0 * (self.parts + 6) * float(self._ends[-1]) / elements

    @property
    def shared(self) -> list[F32]:
        return [self._directions.reshape(-1)]

    def forget(self) -> None:
        self._moments.fill(0)
        self._taken = 0

    def kept(self) -> dict[str, Any]:
        return {"moments": self._moments, "taken": self._taken}

    def restore(self, kept: Mapping[str, Any]) -> None:
        np.copyto(self._moments, kept["moments"])
        self._taken = int(kept["taken"])

    def average(self, gradient: F32, step: int, exchange: Exchange) -> F32 | None:
        moments, taken, message = self._moments, self._taken, b""
        if exchange.counts:
            moments, taken = self._next_moments(gradient), taken + 1
            data = np.empty(self._encoding.encoded_bytes(self._ends[-1]), np.uint8)
            self._encoding.encode(self._adam(moments, taken), data, 0)
            message = _PART.pack(self.part) + data.tobytes()
        given = [one for one in exchange.gather(message) if one.counts]
        if not given:
            return None
        read = [self._read(one) for one in given]
        done: F32 = np.zeros_like(gradient)
        for part, direction in enumerate(self._directions):
            steps = [values for of, values in read if of == part]
            if steps:
                total = steps[0]
                for values in steps[1:]:
                    total += values
                self._add(total / np.float32(len(steps)), direction, done)
        self._moments, self._taken = moments, taken
        return done

    def _read(self, given: Given) -> tuple[int, F32]:
        """Return the part of a peer, and its step, float32[thin]."""
        size = _PART.size + self._encoding.encoded_bytes(self._ends[-1])
        if len(given.data) != size:
            raise malformed(given, f"{len(given.data):,} bytes instead of {size:,}")
        (part,) = _PART.unpack_from(given.data)
        if part >= self.parts:
            raise malformed(given, f"part {part} of {self.parts}")
        values: F32 = np.empty(self._ends[-1], np.float32)
        try:
            self._encoding.decode(np.frombuffer(given.data, np.uint8, offset=_PART.size), values)
        except CodecError as error:
            raise malformed(given, error.what) from error
        return part, values

    def _next_moments(self, gradient: F32) -> F32:
        """Return Adam's moments, (2, thin), after the gradients of this peer's adapters."""
        thin: F32 = np.empty_like(self._moments[0])
        for number, layer in enumerate(self._layers):
            of_left, of_right = self._pair(thin, number)
            left, right = self._pair(self._directions[self.part], number)
            whole = layer.of(gradient)
            np.matmul(right, whole.T, out=of_left)
            np.matmul(left, whole, out=of_right)
        betas: F32 = np.array([[self.beta1], [self.beta2]], np.float32)
        moments: F32 = self._moments * betas
        moments += np.stack([thin, thin * thin]) * (np.float32(1) - betas)
        return moments

    def _adam(self, moments: F32, taken: int) -> F32:
        first, second = moments
        mean = first / np.float32(1 - self.beta1**taken)
        scale = np.sqrt(second / np.float32(1 - self.beta2**taken))
        found: F32 = mean / (scale + np.float32(EPSILON))
        return found

    def _add(self, step: F32, direction: F32, done: F32) -> None:
        """Add dB A + B dA of one part to ``done``, with the same bits on every processor."""
        for number, layer in enumerate(self._layers):
            (of_left, of_right), (left, right) = (
                self._pair(step, number),
                self._pair(direction, number),
            )
            whole = layer.of(done)
            whole += product(of_left.T, right.T)
            whole += product(left.T, of_right.T)

    def _pair(self, thin: F32, number: int) -> tuple[F32, F32]:
        """Return views of layer ``number``: (rank, rows) of the left, (rank, columns)."""
        layer = self._layers[number]
        rank, end = self._rank_of(layer), self._ends[number]
        middle = end - rank * layer.columns
        left = thin[middle - rank * layer.rows : middle].reshape(rank, layer.rows)
        return left, thin[middle:end].reshape(rank, layer.columns)

    def _rank_of(self, layer: Layer) -> int:
        return min(self.rank, min(layer.rows, layer.columns) // self.parts)
