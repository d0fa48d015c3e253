"""Send gradients as products of two thin matrices: PowerSGD (arXiv 1905.13727).

M_i is what trainer i has of a layer, its gradient and what was left out before, as (n, m)::

    Q <- orthonormal(Q of the last step)        P <- orthonormal(sum_i M_i Q)
    Q <- mean_i M_i^T P                         G = P Q^T            E_i = M_i - G

Sums travel as vectors, so any all-reduce will do: r (n + m) elements for n m. Q is equal on all
peers, and newcomers are given it. Layers that would hardly get smaller, and vectors, travel as they
are. A step makes three calls: the rest, the P of all layers, the Q of all layers.

Against torch's hook: columns of zeros are replaced (orthogonal.py) where that divides by zero, and
the first Q are not Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.codecs import F32
from atoll.optim.compressors.base import Compressor, check, mean_of
from atoll.optim.compressors.l_greco import LGreCo
from atoll.optim.compressors.layers import Layer, Layers
from atoll.optim.compressors.orthogonal import orthonormal, product, random_matrix
from atoll.optim.every_step.exchange import Exchange
from atoll.optim.manifest import Manifest

RANK_MAX = 128  # Gram-Schmidt takes rank^2 passes; published runs use at most 32
ITERATIONS = 5  # steps of the power method that estimates the errors of all ranks


@dataclass(kw_only=True)
class PowerSGD(Compressor):
    """Compress each layer to a low rank.

    ``rank`` of each layer, from step ``start`` on: a model is most sensitive at the beginning. A
    layer is compressed if it becomes more than ``min_rate`` times as small. ``choice`` lets the
    ranks of layers differ, from half to twice ``rank``. The codec loses nothing for good here: what
    it leaves out of a layer is kept with the rest of the error.

    Tuning: raise the rank by factors of two until the loss is that of no compression; ``start``
    about a tenth of all steps, and at least the warm-up of the learning rate.
    """

    wire: ClassVar[str] = "PowerSGD"
    rank: int = 1
    start: int = 1000
    min_rate: float = 2.0
    choice: LGreCo | None = None

    def __post_init__(self) -> None:
        check(
            0 < self.rank <= RANK_MAX and self.start >= 0 and self.min_rate >= 1,
            self,
            f"a rank of 1 to {RANK_MAX}, a start of 0 or more, a min_rate of 1 or more",
        )

    def _allocate(self, manifest: Manifest) -> None:
        self._layers = Layers(manifest, wanted=self._pays)
        matrices = self._layers.matrices
        self._first = np.array([self._rank_of(layer) for layer in matrices], np.float32)
        self._ranks: F32 = self._first.copy()
        highest = [self._ranks_of(layer)[-1] for layer in matrices]
        sizes = [layer.columns * most for layer, most in zip(matrices, highest, strict=True)]
        self._q: F32 = np.zeros(sum(sizes), np.float32)
        parts = np.split(self._q, np.cumsum(sizes)[:-1]) if sizes else []
        # Columns beyond the rank of now keep what they were, for when the rank rises again.
        self._qs = [q.reshape(-1, layer.columns) for q, layer in zip(parts, matrices, strict=True)]
        for number, (q, layer) in enumerate(zip(self._qs, matrices, strict=True)):
            q[:] = random_matrix(layer.columns, len(q), b"atoll powersgd", number).T
        self._errors = [np.zeros((layer.rows, layer.columns), np.float32) for layer in matrices]
        self._seen = np.zeros(manifest.elements if self.choice else 0, np.float32)

    @property
    def trainer_bytes(self) -> float:
        """Return the bytes of host memory for each parameter, at most.

        Before ``start`` they are the errors, then all layers end to end, summed up, and the mean.
        Later they are errors, layers with them, the mean, and some five copies of thin matrices.
        """
        elements = sum(layer.size for layer in self._layers.matrices)
        thin = sum(
            (layer.rows + layer.columns) * self._ranks_of(layer)[-1]
            for layer in self._layers.matrices
        )
        before = 16.0 if self.start else 0.0
        later = 12.0 + 20.0 * thin / max(1, elements) + (8.0 if self.choice else 0.0)
        return max(before, later, 8.0)

    @property
    def shared(self) -> list[F32]:
        return [self._q, self._ranks]

    def forget(self) -> None:
        for error in self._errors:
            error.fill(0)
        self._seen.fill(0)

    def kept(self) -> dict[str, Any]:
        return {"errors": _joined(self._errors), "seen": self._seen}

    def restore(self, kept: Mapping[str, Any]) -> None:
        ends = np.cumsum([error.size for error in self._errors])[:-1]
        for error, saved in zip(self._errors, np.split(kept["errors"], ends), strict=False):
            np.copyto(error, saved.reshape(error.shape))
        np.copyto(self._seen, kept["seen"])

    def average(self, gradient: F32, step: int, exchange: Exchange) -> F32 | None:
        rest = mean_of(exchange.total(self._layers.rest_of(gradient), self._codec))
        if step < self.start:
            done = self._uncompressed(gradient, exchange)
        else:
            done = self._compressed(gradient, step, exchange)
        if rest is None or done is None:
            return None
        self._layers.put_rest(rest, done)
        return done

    # ------------------------------------------------------------ inside

    def _uncompressed(self, gradient: F32, exchange: Exchange) -> F32 | None:
        layers = self._layers.matrices
        parts = [gradient[layer.lo : layer.hi] for layer in layers]
        found = mean_of(exchange.total(_joined(parts), self._codec))
        if found is None:
            return None
        done: F32 = np.zeros_like(gradient)
        for layer, part in zip(layers, _parted(found, [p.shape for p in parts]), strict=True):
            done[layer.lo : layer.hi] = part
        return done

    def _compressed(self, gradient: F32, step: int, exchange: Exchange) -> F32 | None:
        layers, seen = self._layers.matrices, self._seen
        if self.choice:
            seen = seen + gradient
        ranks = self._choose(seen, exchange) if self._is_due(step) else self._ranks_now()
        wholes = [layer.of(gradient) + e for layer, e in zip(layers, self._errors, strict=True)]
        qs: list[F32] = [orthonormal(q[:rank].T) for q, rank in zip(self._qs, ranks, strict=True)]
        ps: list[F32] = [np.matmul(whole, q) for whole, q in zip(wholes, qs, strict=True)]
        found = exchange.total(_joined(ps), self._codec)
        ps = [orthonormal(p) for p in _parted(found.total, [p.shape for p in ps])]
        qs = [np.matmul(whole.T, p) for whole, p in zip(wholes, ps, strict=True)]
        mean = mean_of(exchange.total(_joined(qs), self._codec))
        if mean is None or not found.count:
            return None
        qs = _parted(mean, [q.shape for q in qs])
        done: F32 = np.zeros_like(gradient)
        for number, layer in enumerate(layers):
            np.copyto(layer.of(done), product(ps[number], qs[number]))
            self._qs[number][: ranks[number]] = qs[number].T
            if exchange.counts:
                np.subtract(wholes[number], layer.of(done), out=self._errors[number])
        self._ranks[:] = ranks
        if self.choice:
            self._seen[:] = 0 if self._is_due(step) else seen
        return done

    def _choose(self, seen: F32, exchange: Exchange) -> list[int]:
        """Choose ranks by the errors that all measured on their own gradients, summed up."""
        layers = self._layers.matrices
        choices = [self._ranks_of(layer) for layer in layers]
        table = np.zeros((len(layers), max((c[-1] for c in choices), default=0)), np.float32)
        for row, layer, ranks in zip(table, layers, choices, strict=True):
            row[: ranks[-1]] = rank_errors(layer.of(seen), ranks[-1])
        found = exchange.total(table.reshape(-1)).total.reshape(table.shape)
        sizes = np.zeros(table.shape, np.int64)
        for number, (layer, ranks) in enumerate(zip(layers, choices, strict=True)):
            sizes[number] = (layer.rows + layer.columns) * np.arange(1, table.shape[1] + 1)
            found[number, : ranks[0] - 1] = found[number, ranks[-1] :] = np.inf
        assert self.choice is not None
        chosen = self.choice.choose(found, sizes, self._first.astype(np.intp) - 1)
        return [int(rank) + 1 for rank in chosen]

    def _is_due(self, step: int) -> bool:
        return self.choice is not None and self.choice.is_due(step)

    def _ranks_now(self) -> list[int]:
        """Return the ranks of now; whatever a donor has given, they are among the choices."""
        limits = [self._ranks_of(layer) for layer in self._layers.matrices]
        ranks = np.nan_to_num(self._ranks, nan=1)
        return [int(min(max(r, lim[0]), lim[-1])) for r, lim in zip(ranks, limits, strict=True)]

    def _pays(self, layer: Layer) -> bool:
        thin = (layer.rows + layer.columns) * self._rank_of(layer)
        return thin * self.min_rate < layer.size

    def _rank_of(self, layer: Layer) -> int:
        return min(self.rank, layer.rows, layer.columns)

    def _ranks_of(self, layer: Layer) -> range:
        """Return the ranks that may be chosen for a layer."""
        rank = self._rank_of(layer)
        if self.choice is None:
            return range(rank, rank + 1)
        return range(max(1, rank // 2), min(2 * rank, layer.rows, layer.columns) + 1)


def rank_errors(matrix: F32, most: int) -> NDArray[np.float64]:
    """Return what the best approximations of ranks 1 to ``most`` leave of (n, m), float64[most].

    They are Frobenius norms, estimated by a power method. Use them on one peer: their bits may
    differ elsewhere.
    """
    exact = matrix.astype(np.float64)
    basis = random_matrix(matrix.shape[1], most, b"atoll rank errors").astype(np.float64)
    for _ in range(ITERATIONS):
        basis = exact.T @ np.linalg.qr(exact @ basis)[0]
    thin = np.linalg.qr(exact @ basis)[0].T @ exact
    kept = np.cumsum(np.linalg.svd(thin, compute_uv=False) ** 2)
    found: NDArray[np.float64] = np.sqrt(np.maximum(0, np.square(exact).sum() - kept[:most]))
    return found


def _joined(parts: Sequence[F32]) -> F32:
    flat = [part.reshape(-1) for part in parts]
    return np.concatenate(flat) if flat else np.empty(0, np.float32)


def _parted(flat: F32, shapes: Sequence[tuple[int, ...]]) -> list[F32]:
    """Return views of the parts that ``_joined`` has joined."""
    parts, lo = [], 0
    for shape in shapes:
        hi = lo + math.prod(shape)
        parts.append(flat[lo:hi].reshape(shape))
        lo = hi
    return parts
