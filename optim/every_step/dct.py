"""Compute the cosine transform of tiles, and signs of its inverse, the same on any machine.

DCT-II, orthonormal, of each tile: ``X = C_h x C_w^T``, and the inverse ``x = C_h^T X C_w``, with
``C[k, i] = s_k cos(pi (2 i + 1) k / 2n)``, ``s_0 = sqrt(1 / n)`` and else ``s_k = sqrt(2 / n)``.

A matrix product adds in an order that depends on the library, the processor and the number of
threads. ``inverse_signs`` is exact in any order: coefficients and matrices are rounded to integers,
so small that all products and sums are integers below 2**53, which float64 holds. With
``|q| <= 2**23`` and C in units of ``2**-22``, a sum over at most 64 is, by Cauchy and Schwarz, at
most ``8 * 2**23 * 2**22 = 2**48``, and so is any part of it; rounded to ``2**27``, the second sum
is at most ``8 * 2**27 * 2**22 = 2**52``.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from atoll.optim.every_step.tiles import Tiling

MATRIX_BITS = 22
COEFFICIENT_BITS = 23
BETWEEN_BITS = 21  # dropped after the first product


def tiles_of(tensor: Tensor, tiling: Tiling) -> Tensor:
    """Cut a tensor into tiles: return [tiles, height, width], a copy or a view."""
    across = tiling.columns // tiling.width
    grid = tensor.reshape(-1, tiling.height, across, tiling.width)
    return grid.transpose(1, 2).reshape(-1, tiling.height, tiling.width)


def untiled(tiles: Tensor, tiling: Tiling) -> Tensor:
    """Join what ``tiles_of`` has cut; return it flat."""
    across = tiling.columns // tiling.width
    grid = tiles.reshape(-1, across, tiling.height, tiling.width)
    return grid.transpose(1, 2).reshape(-1)


def dct(tiles: Tensor) -> Tensor:
    """Return the coefficients of float32[tiles, height, width], in the same shape."""
    down, across = (_matrix(n).to(tiles) for n in tiles.shape[1:])
    coefficients: Tensor = down @ tiles @ across.T
    return coefficients


def inverse_dct(coefficients: Tensor) -> Tensor:
    down, across = (_matrix(n).to(coefficients) for n in coefficients.shape[1:])
    tiles: Tensor = down.T @ coefficients @ across
    return tiles


def inverse_signs(coefficients: Tensor) -> Tensor:
    """Return the sign of each element of the inverse: -1, 0 or 1.

    ``coefficients``: float64, finite. They are taken as multiples of 2**-23 of the largest of their
    tile, so an element that is less than some 2**-19 of it may get any sign, or 0: the same one
    everywhere. The result is float32[tiles, height, width].
    """
    largest = coefficients.abs().amax((1, 2), keepdim=True)
    scaled = coefficients / largest.masked_fill(largest == 0, 1) * 2**COEFFICIENT_BITS
    integers = scaled.round_()
    down, across = (_integers(n).to(coefficients.device) for n in coefficients.shape[1:])
    between = ((down.T @ integers) * 2**-BETWEEN_BITS).round_()
    signs: Tensor = (between @ across).sign_()
    return signs.float()


@functools.cache
def _matrix(n: int) -> Tensor:
    """Return the matrix C of the transform, float64[n, n]."""
    angles = torch.arange(n)[:, None] * (2 * torch.arange(n) + 1) % (4 * n)
    matrix = torch.cos(angles.double() * (math.pi / (2 * n))) * math.sqrt(2 / n)
    matrix[0] = math.sqrt(1 / n)
    return matrix


@functools.cache
def _integers(n: int) -> Tensor:
    """Return C in units of 2**-22, rounded.

    Its elements are far enough from halves that every library's cosine gives the same.
    """
    scaled: Tensor = _matrix(n) * 2**MATRIX_BITS
    return scaled.round()
