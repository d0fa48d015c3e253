"""Buffers of a model as vectors, and what becomes of several."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim.buffer_sync import merged, moved
from atoll.optim.model_io import PIECES, ModelBuffers, join, split

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(INT64, max_size=5))
def test_any_integers_come_back(whole: list[int]) -> None:
    pieces = split(np.array(whole, np.int64))
    assert pieces.dtype == np.float32
    assert pieces.size == PIECES * len(whole)
    assert join(pieces).tolist() == whole


@pytest.mark.parametrize(
    "pieces",
    [
        [0.5, 0, 0],
        [0, -1, 0],
        [0, 0, 2.0**22],
        [0, 2.0**22, 0],
        [2.0**19, 0, 0],
        [-(2.0**19) - 1, 0, 0],
        [np.nan, 0, 0],
        [0, np.inf, 0],
    ],
)
def test_pieces_that_are_none_are_refused(pieces: list[float]) -> None:
    with pytest.raises(RemoteProtocolError, match="no whole numbers"):
        join(np.array(pieces, np.float32))


def vector(weight: float, floats: list[float], whole: list[int]) -> np.ndarray:
    head = np.array([weight, *floats], np.float32)
    return np.concatenate([head, split(np.array(whole, np.int64))])


def test_the_weighted_mean_and_the_maximum() -> None:
    parts = [vector(1, [1, -8], [5, 2**40]), vector(3, [5, 8], [7, -1])]
    found = merged(parts, 2)
    assert found[:3].tolist() == [4, 4, 4]
    assert join(found[3:]).tolist() == [7, 2**40]
    changed = moved(vector(1, [1.5, -8], [5, 2**41]), parts[0], found, 2)
    assert changed[1:3].tolist() == [4.5, 4]
    assert join(changed[3:]).tolist() == [7, 2**41]


def test_what_is_the_same_for_all_keeps_its_bits_and_the_rest_becomes_the_mean() -> None:
    table = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    table[:2] = -0.0, 0.1
    parts = [vector(w, [*table, n], []) for n, w in enumerate([100, 97, 101])]
    found = merged(parts, 1001)
    assert found[1:1001].tobytes() == table.tobytes()
    assert found[1001] == pytest.approx((97 + 2 * 101) / 298)
    now = parts[1].copy()
    now[2] += 1
    changed = moved(now, parts[1], found, 1001)
    assert changed[3:1001].tobytes() == table[2:].tobytes()
    assert np.signbit(changed[1])
    assert changed[2] == np.float32(1.1)


def test_what_is_the_same_for_some_becomes_the_mean_too() -> None:
    """Show that all have the same in the end: also a zero of another sign."""
    some, other = vector(1, [0.1, -0.0], []), vector(1, [0.4, 0.0], [])
    found = merged([some, some, other], 2)
    assert found[1] == pytest.approx(0.2)
    assert not np.signbit(found[2])


@pytest.mark.parametrize("weight", [0.0, -1.0, np.nan, np.inf])
def test_a_weight_that_cannot_be(weight: float) -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be"):
        merged([vector(1, [0], []), vector(weight, [0], [])], 1)


class Odd(nn.Module):
    """Buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("coarse", torch.tensor([0.5, 0.25], dtype=torch.bfloat16))
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("cache", torch.ones(4), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("wave", torch.ones(1, dtype=torch.complex64))
        self.tied = self.norm


def test_a_models_buffers_come_back_in_their_dtypes() -> None:
    model = Odd()
    model.norm.running_mean.copy_(torch.tensor([1.0, 2.0, 3.0]))  # type: ignore[union-attr]
    model.norm.num_batches_tracked.fill_(2**30 + 1)  # type: ignore[union-attr, operator]
    buffers = ModelBuffers(model)
    assert buffers.floats == 3 + 3 + 2
    assert buffers.elements == 1 + 8 + PIECES * (1 + 2)
    flat = buffers.vector(7.0)
    assert flat[0] == 7.0
    other = Odd()
    ModelBuffers(other).read(flat)
    for (name, mine), theirs in zip(model.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(mine, theirs), name
        assert mine.dtype == theirs.dtype
    assert ModelBuffers(nn.Sequential(model)).outline != buffers.outline
    wrapped = torch.nn.Module()
    wrapped.add_module("module", model)
    assert ModelBuffers(wrapped).outline == buffers.outline


def test_without_floats_that_are_saved_there_is_nothing_to_share() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("steps", torch.zeros(1, dtype=torch.long))
    model.register_buffer("mask", torch.ones(3), persistent=False)
    assert ModelBuffers(model).outline == ""


def test_a_buffer_of_float64_keeps_the_digits_that_no_vector_has() -> None:
    model = nn.BatchNorm1d(2)
    table = torch.tensor([1.7e9 + 0.123, -0.0], dtype=torch.float64)
    model.register_buffer("table", table.clone())
    there = model.get_buffer("table")
    buffers = ModelBuffers(model)
    flat = buffers.vector()
    buffers.read(flat)
    assert torch.equal(there, table)
    assert torch.signbit(there[1])
    buffers.read(np.abs(flat))  # the zero has another sign: it is what all others have now
    assert there.tolist() == [1.7e9, 0.0]
    assert not torch.signbit(there[1])


def test_a_buffer_that_was_replaced_is_found() -> None:
    model = nn.BatchNorm1d(2)
    buffers = ModelBuffers(model)
    model.running_mean = torch.tensor([3.0, 4.0])
    flat = buffers.vector()
    assert 3.0 in flat
    buffers.read(2 * flat - flat)
    assert model.running_mean.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("now", [torch.zeros(3), torch.zeros(2, 1), None])
def test_a_buffer_that_changes_its_shape_is_named(now: torch.Tensor | None) -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("seen", torch.zeros(2))
    buffers = ModelBuffers(model)
    flat = buffers.vector()
    model.seen = now
    with pytest.raises(ConfigError, match=r"buffer seen .*it had \(2,\)") as caught:
        buffers.vector()
    assert "persistent=False" in str(caught.value)
    with pytest.raises(ConfigError, match="buffer seen"):
        buffers.read(flat)
