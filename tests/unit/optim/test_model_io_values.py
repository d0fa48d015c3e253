"""Whether a model's values are finite, and how they are read into it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.optim.model_io import ModelVector

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def model_of(*tensors: torch.Tensor) -> nn.Module:
    model = nn.Module()
    for number, tensor in enumerate(tensors):
        model.register_parameter(f"w{number}", nn.Parameter(tensor))
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 5, 11])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(
    dtype: torch.dtype, wrong: float, at: int
) -> None:
    values = torch.full((3, 4), torch.finfo(dtype).max, dtype=dtype)  # whose sum is not finite
    model = model_of(values, torch.ones((), dtype=dtype))
    vector = ModelVector(model)
    assert vector.not_finite() == []
    with torch.no_grad():
        model.w0.view(-1)[at] = wrong
    assert vector.not_finite() == ["w0"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_read_only_values_are_read_into_parameters_of_any_layout(
    dtype: torch.dtype, transposed: bool
) -> None:
    tensor = torch.zeros(4, 3, dtype=dtype).T if transposed else torch.zeros(3, 4, dtype=dtype)
    model = model_of(tensor, torch.zeros((), dtype=dtype))
    flat = np.arange(13, dtype=np.float32)
    flat.flags.writeable = False
    ModelVector(model).read(flat)
    assert model.w0.tolist() == np.arange(12.0).reshape(3, 4).tolist()
    assert model.w1.item() == 12.0


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LazyLinear(2)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Lazy(), r"parameter first\.bias has no shape yet"),
        (nn.Linear(2, 2, device="meta"), "parameter bias is on the meta device"),
        (model_of(torch.zeros(1).expand(4)), "parameter w0 is expanded"),
        (model_of(torch.zeros(3, 1).expand(3, 2)), "parameter w0 is expanded"),
    ],
    ids=["lazy", "meta", "expanded", "expanded in part"],
)
def test_parameters_without_values_of_their_own_are_refused_by_name(
    model: nn.Module, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        ModelVector(model)


def test_parameters_of_one_element_in_a_dimension_are_not_expanded() -> None:
    model = model_of(torch.zeros(4)[:1].expand(1), torch.zeros(2, 3).t()[:, :1], torch.zeros(0, 3))
    assert ModelVector(model).manifest.elements == 4
