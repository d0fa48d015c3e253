"""Sum gradients as sketches, which any ring adds: FetchSGD (arXiv 2007.07682).

A count sketch has a few rows of cells. In each row j hashes give every element i a cell h_j(i) and
a sign s_j(i), and a vector x becomes::

    S_j[c] = sum of s_j(i) x_i over all i with h_j(i) = c          linear in x: sketches add up
    x_i is about the median over j of s_j(i) S_j[h_j(i)]           large elements come out whole

The sum of all trainers' sketches is the sketch of their sum, so it travels through ordinary
all-reduces, of any shape, at one size however many trainers there are. Then all do the same::

    E = E + mean of the sketches      u = the largest elements that E shows      E = E - sketch(u)

u is the step's gradient, and E what is left for later: error feedback, kept as a sketch and equal
on all. So nothing is a trainer's own, and newcomers are given E.

TAGC (2504.05638) sums such sketches too, and beside them the bitmaps of what each has sent: whoever
knows the union can peel its values out of the cells exactly, up to 0.8 values in a cell. But they
can as well be added up in the order of the union, in 0.8 times the bytes and without a hash, so
that is not done here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.codecs import F32
from atoll.optim.compressors.base import Compressor, check, mean_of
from atoll.optim.compressors.layers import Layers
from atoll.optim.every_step.exchange import Exchange
from atoll.optim.manifest import Manifest

ROWS_MAX: Final = 15  # a median of more says little more
# Of SplitMix64 (Steele et al. 2014): every output bit depends on every input bit.
_ADD, _FIRST, _SECOND = (
    np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


@dataclass(kw_only=True)
class CountSketch(Compressor):
    """Average gradients as count sketches, and step with the largest elements that they show.

    ``width``: cells in each of ``rows`` rows, as a part of the matrices' elements: ``rows * width``
    of a float32 gradient's bytes travel. ``keep``: the part of the elements that a step moves.
    ``dense``: the beginnings of names of parameters that travel whole, as all vectors do.

    When it helps: where sums are made on their way (rings and trees of many trainers, or a switch),
    which a gather of top-k parts does not allow, and a few elements are much larger than the rest.
    A sketch of a tenth of the bytes shows only elements that stand out from a norm a hundred times
    as large; ``ErrorFeedback`` with "topk" loses nothing of what it chooses and has 0.22 bit of
    each element, so for some dozens of trainers it is the better one. Every element is hashed
    ``2 * rows`` times in a step. On the convergence bench it diverged after 178 steps, with AdamW
    and these defaults: few elements of a small transformer's gradients stand out, so collisions are
    taken for elements and fed back.
    """

    wire: ClassVar[str] = "CountSketch"
    rows: int = 5
    width: float = 0.02
    keep: float = 0.005
    dense: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(
            0 < self.rows <= ROWS_MAX and self.rows % 2 == 1 and 0 < self.width <= 1,
            self,
            f"an odd number of rows, {ROWS_MAX} at most, and a width in (0, 1]",
        )
        check(0 < self.keep <= 1, self, "a keep in (0, 1]")

    def _allocate(self, manifest: Manifest) -> None:
        self._layers = Layers(manifest, self.dense)
        self._count = sum(layer.size for layer in self._layers.matrices)
        self._cells = max(1, math.ceil(self.width * self._count))
        self._left: F32 = np.zeros((self.rows, self._cells), np.float32)

    @property
    def trainer_bytes(self) -> float:
        # The matrices, hashes and signs of a row, estimates of all rows, and their order.
        return 40.0 + 4.0 * self.rows + 12.0 * self.rows * self.width

    @property
    def shared(self) -> list[F32]:
        return [self._left.reshape(-1)]

    def forget(self) -> None:
        """Forget nothing: what is left is of all."""

    def average(self, gradient: F32, step: int, exchange: Exchange) -> F32 | None:
        found = exchange.total(self._sketch(self._matrices(gradient)).reshape(-1))
        rest = mean_of(exchange.total(self._layers.rest_of(gradient), self._codec))
        mean = mean_of(found)
        if mean is None or rest is None:
            return None
        self._left += mean.reshape(self._left.shape)
        chosen = self._largest()
        self._left -= self._sketch(chosen)
        result: F32 = np.zeros_like(gradient)
        self._layers.put_rest(rest, result)
        at = 0
        for layer in self._layers.matrices:
            result[layer.lo : layer.hi] = chosen[at : at + layer.size]
            at += layer.size
        return result

    # ------------------------------------------------------------ inside

    def _matrices(self, flat: F32) -> F32:
        parts = [flat[layer.lo : layer.hi] for layer in self._layers.matrices]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def _sketch(self, values: F32) -> F32:
        """Return the sketch of float32[n]; sums are in float64 and in the order of elements."""
        sketch = np.empty((self.rows, self._cells), np.float32)
        for row in range(self.rows):
            cells, signs = places(row, self._count, self._cells)
            sketch[row] = np.bincount(cells, signs * values, self._cells)
        return sketch

    def _largest(self) -> F32:
        """Return the largest elements that the sketch shows, and zero for all others."""
        estimates: F32 = np.empty((self.rows, self._count), np.float32)
        for row in range(self.rows):
            cells, signs = places(row, self._count, self._cells)
            np.multiply(signs, self._left[row][cells], out=estimates[row])
        shown = np.median(estimates, axis=0)
        kept = math.ceil(self.keep * self._count)
        order = np.argsort(-np.abs(shown), kind="stable")[:kept]  # equal ones in their own order
        chosen: F32 = np.zeros(self._count, np.float32)
        chosen[order] = shown[order]
        return chosen


def places(row: int, count: int, cells: int) -> tuple[NDArray[np.int64], F32]:
    """Return the cell and the sign, +-1, of each of ``count`` elements in a row."""
    first = row * int(_ADD) * (count | 1) % 2**64
    with np.errstate(over="ignore"):
        hashed = np.arange(count, dtype=np.uint64) + np.uint64(first)
        hashed += _ADD
        hashed = (hashed ^ (hashed >> np.uint64(30))) * _FIRST
        hashed = (hashed ^ (hashed >> np.uint64(27))) * _SECOND
    hashed ^= hashed >> np.uint64(31)
    signs = (hashed >> np.uint64(63)).astype(np.float32) * 2 - 1
    where = (hashed & np.uint64(2**62 - 1)) % np.uint64(cells)
    return where.astype(np.int64), signs
