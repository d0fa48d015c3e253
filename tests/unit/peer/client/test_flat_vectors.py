"""Arrays and tensors in and out of a flat vector."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from atoll.collectives.errors import CodecError, ConfigError
from atoll.peer.client.flat_vectors import TILE_ELEMENTS, vector_of

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4) / 3


def round_trip(tensor: Any, factor: float = 1.0) -> Any:
    vector = vector_of(tensor)
    flat = np.full(vector.elements, np.nan, np.float32)
    vector.write(flat)
    return vector.read(flat * np.float32(factor))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    "array", [VALUES, VALUES.T, VALUES[:, ::2], VALUES[1, 1], VALUES[::-1]], ids=lambda a: a.shape
)
def test_arrays_of_any_layout(array: Any, dtype: type) -> None:
    given = np.asarray(array, dtype)
    back = round_trip(given, 2.0)
    assert isinstance(back, np.ndarray)
    assert (back.dtype, back.shape) == (given.dtype, given.shape)
    np.testing.assert_array_equal(back, 2 * given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "view", [lambda t: t, lambda t: t.T, lambda t: t[:, ::2], lambda t: t[1, 1]]
)
def test_tensors_of_any_layout(view: Any, dtype: torch.dtype) -> None:
    given = view(torch.from_numpy(VALUES.copy()).to(dtype))
    back = round_trip(given, 2.0)
    assert (back.dtype, back.shape, back.device) == (given.dtype, given.shape, given.device)
    assert torch.equal(back, 2 * given)
    assert back.data_ptr() != given.data_ptr()


LARGE = np.random.default_rng(1).standard_normal(TILE_ELEMENTS + 5, np.float32)


@pytest.mark.parametrize(
    "tensor",
    [
        *(LARGE, LARGE.astype(np.float16), np.flip(LARGE), LARGE[::3], LARGE.reshape(-1, 1)),
        *(torch.from_numpy(LARGE.copy()), torch.from_numpy(LARGE).bfloat16()),
        *(torch.from_numpy(LARGE)[::2], torch.ones(3, requires_grad=True)),
        torch.nn.Parameter(torch.ones(2, 3)),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_finite_values_are_written_as_without_a_check(tensor: Any) -> None:
    vector = vector_of(tensor)
    plain, checked = np.zeros((2, vector.elements), np.float32)
    vector.write(plain)
    assert vector.write_finite(checked)
    assert plain.tobytes() == checked.tobytes()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1.5e30, -1.5e30])
@pytest.mark.parametrize("at", [0, TILE_ELEMENTS - 1, TILE_ELEMENTS, LARGE.size - 1])
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, lambda a: a[::-1]])
def test_values_that_are_not_finite_or_too_large_are_found(
    wrong: float, at: int, kind: Callable[[Any], Any]
) -> None:
    values = LARGE.copy()
    values[at] = wrong
    vector = vector_of(kind(values))
    flat = np.zeros(LARGE.size, np.float32)
    assert not vector.write_finite(flat, 1e30)
    assert vector.write_finite(flat) == math.isfinite(wrong)


def test_parameters_give_plain_tensors() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    back = round_trip(parameter, 3.0)
    assert not back.requires_grad
    assert back.tolist() == [3.0] * 3
    assert parameter.tolist() == [1.0] * 3


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, lambda a: a[:, ::-1]])
def test_a_result_that_the_dtype_cannot_hold_is_refused(kind: Callable[[Any], Any]) -> None:
    given = kind(np.full((2, 3), -40_000.0, np.float16))
    assert (round_trip(given, 1.5) == -60_000.0).all()
    with pytest.raises(CodecError, match="float16 has come to values that its dtype cannot hold"):
        round_trip(given, 2.0)


def test_a_result_that_bfloat16_cannot_hold_is_refused() -> None:
    vector = vector_of(torch.zeros(3, dtype=torch.bfloat16))
    assert vector.read(np.full(3, 3.38e38, np.float32)).isfinite().all()
    with pytest.raises(CodecError, match="bfloat16"):
        vector.read(np.full(3, 3.4e38, np.float32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_on_a_device_come_back_to_it(dtype: torch.dtype) -> None:
    given = torch.randn(1000, 7, device="cuda").to(dtype)
    back = round_trip(given)
    assert back.device == given.device
    assert torch.equal(back, given)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (np.zeros(3), "float64"),
        (np.zeros(3, np.int32), "int32"),
        (torch.zeros(2, dtype=torch.int64), "int64"),
        (torch.zeros(2, dtype=torch.float64), "float64"),
        (np.zeros((0, 5), np.float32), r"shape \(0, 5\)"),
        (torch.zeros(4).to_sparse(), "sparse"),
        ([1.0, 2.0], "list"),
        (1.5, "float"),
        (None, "NoneType"),
    ],
)
def test_everything_else_is_refused_with_a_reason(tensor: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        vector_of(tensor)
    assert caught.value.fix
