"""The cosine transform of tiles, and the signs of its inverse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atoll.optim.every_step.dct import (
    _integers,
    _matrix,
    dct,
    inverse_dct,
    inverse_signs,
    tiles_of,
    untiled,
)
from atoll.optim.every_step.tiles import Tiling

SHAPES = [(128, 192), (64, 64), (100,), (7, 13), (26, 3, 3, 3), (67, 2), (1,), ()]


@pytest.mark.parametrize("shape", SHAPES)
def test_8_the_inverse_of_the_transform_is_what_was_there(shape):
    tiling = Tiling.of(shape, 64, 32)
    tensor = torch.randn(shape)
    tiles = tiles_of(tensor, tiling)
    assert torch.equal(untiled(tiles, tiling).view(shape), tensor)
    found = untiled(inverse_dct(dct(tiles)), tiling).view(shape)
    torch.testing.assert_close(found, tensor, rtol=0, atol=1e-5)
    assert float(dct(tiles).square().sum()) == pytest.approx(float(tensor.square().sum()), rel=1e-5)


def test_tiles_lie_where_they_should():
    tensor = torch.arange(12).view(4, 3)
    tiles = tiles_of(tensor, Tiling.of((4, 3), 2, 1))
    assert tiles.shape == (6, 2, 1)
    assert tiles[:, :, 0].tolist() == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]


def test_a_constant_is_its_first_coefficient():
    found = dct(torch.full((1, 4, 16), 3.0))
    assert float(found[0, 0, 0]) == pytest.approx(3.0 * 8)
    assert float(found.flatten()[1:].abs().max()) < 1e-5


@pytest.mark.parametrize("n", [1, 2, 3, 7, 32, 64])
def test_the_matrix_is_orthonormal(n):
    torch.testing.assert_close(_matrix(n) @ _matrix(n).T, torch.eye(n).double(), rtol=0, atol=1e-13)


def test_no_library_rounds_the_matrix_otherwise():
    """A cosine of double precision is wrong by less than 1e-15, so 4e-9 in these units."""
    for n in range(1, 65):
        scaled = _matrix(n) * 2**22
        assert float((scaled - scaled.floor() - 0.5).abs().min()) > 1e-6
        assert int(_integers(n).abs().max()) <= 2**22


@pytest.mark.parametrize("shape", SHAPES)
def test_signs_of_the_inverse(shape):
    tiling = Tiling.of(shape, 64, 32)
    tensor = torch.randn(shape)
    tensor += 0.01 * tensor.sign()
    found = inverse_signs(dct(tiles_of(tensor, tiling)).double())
    assert torch.equal(untiled(found, tiling).view(shape), tensor.sign())


def test_signs_are_exact_in_any_order_of_additions():
    """Against integers of Python, which have no order: with tiles of all kinds of spectra."""
    dice = np.random.default_rng(0)
    tiles = dice.standard_normal((6, 16, 64)) * np.exp(dice.uniform(-30, 30, (6, 1, 1)))
    tiles[1] *= dice.random((16, 64)) < 0.02
    tiles[2] = np.where(dice.random((16, 64)) < 0.5, 1.0, -1.0)  # as large as can be
    tiles[3] = 1.0
    tiles[4] = 0
    tiles[5] *= np.exp(dice.uniform(-40, 0, (16, 64)))
    found = inverse_signs(torch.from_numpy(tiles))
    down, across = (np.array(_integers(n).tolist(), object).astype(int) for n in (16, 64))
    for tile, signs in zip(tiles, found, strict=True):
        largest = np.abs(tile).max() or 1.0
        integers = np.rint(tile / largest * 2**23).astype(int)
        between = np.rint(down.T @ integers / 2**21).astype(int)  # each is below 2**53
        assert np.abs(between).max(initial=0) <= 2**27
        assert (np.sign(between @ across) == signs.numpy()).all()


def test_nothing_has_no_sign():
    assert not inverse_signs(torch.zeros(2, 8, 8, dtype=torch.float64)).any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_signs_are_the_same_on_a_device():
    tiles = torch.randn(100, 64, 64, dtype=torch.float64)
    assert torch.equal(inverse_signs(tiles), inverse_signs(tiles.cuda()).cpu())
