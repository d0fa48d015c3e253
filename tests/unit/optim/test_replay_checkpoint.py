"""A checkpoint of local steps: its parts, and whether it is where the run is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from atoll.collectives.codecs import get_codec
from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim.model_io import ModelVector
from atoll.optim.pseudo_gradient import delta_source
from atoll.optim.replay import checkpoint as module
from atoll.optim.replay.checkpoint import (
    WorkCheckpoint,
    checkpoint_bytes_max,
    encode,
    leaf_of,
    plain,
)
from atoll.optim.replay.replaying import TrainingState
from atoll.optim.run_spec import RunSpec


def made(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, TrainingState]:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).to(dtype)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 5, dtype=dtype)).square().mean().backward()
    inner.step()
    return model, TrainingState(model, inner, {})


def test_what_was_written_is_read() -> None:
    _, state = made()
    one = state.capture()
    read = WorkCheckpoint.decode(bytes(one.encode()))
    assert read.digests() == one.digests()
    assert read.values == one.values
    assert {"1.running_mean", "1.num_batches_tracked"} < read.buffers.keys()
    assert {"0.0.exp_avg", "0.0.step"} < read.inner.keys()


def test_each_part_has_a_digest_of_its_own() -> None:
    model, state = made()
    before = WorkCheckpoint.decode(state.capture().encode())
    with torch.no_grad():
        model[1].running_mean += 1
    digests = [one.digests() for one in (before, state.capture())]
    parts = [[d[i : i + 32] for i in range(0, 128, 32)] for d in digests]
    assert [a == b for a, b in zip(*parts, strict=True)] == [True, False, True, True]
    others = replace(before, values={"other": 1})
    assert [others.digests()[i] == digests[0][i] for i in (0, 95)] == [True, True]
    assert others.digests()[96:] != digests[0][96:]
    assert len({leaf_of(d) for d in [*digests, others.digests()]}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_it_starts_where_the_run_is_and_ends_in_what_is_submitted(dtype: torch.dtype) -> None:
    """The bits that a daemon makes of a submission."""
    model, state = made(dtype)
    vector = ModelVector(model)
    manifest = vector.manifest
    random = np.random.default_rng(0)
    outer = random.standard_normal(manifest.elements).astype(np.float32)
    vector.read(outer)
    assert state.capture().starts_at(outer, manifest)
    with torch.no_grad():
        model[0].weight[2, 3] *= 1.01
    moved = state.capture()
    assert not moved.starts_at(outer, manifest)

    submitted = np.empty_like(outer)
    vector.write(submitted)
    assert np.array_equal(moved.flat(manifest), submitted)
    expected = np.empty_like(outer)
    fill = delta_source(RunSpec(sync_every=1), manifest, outer, submitted, 0)
    for chunk in range(manifest.grid.count):
        fill(chunk, expected[slice(*manifest.grid.bounds(chunk))])
    assert np.array_equal(moved.pseudo_gradient(outer, manifest), expected)


def test_a_contribution_is_compared_within_the_error_of_its_codec() -> None:
    model, state = made()
    vector = ModelVector(model)
    outer = np.random.default_rng(0).standard_normal(vector.manifest.elements).astype(np.float32)
    one = state.capture()
    delta = one.pseudo_gradient(outer, vector.manifest)
    codec = get_codec("int8")
    encoded = np.empty(codec.encoded_bytes(delta.size), np.uint8)
    codec.encode(delta, encoded)
    sent = np.zeros_like(delta)
    codec.decode_add(encoded, 1.0, sent)
    assert not np.array_equal(sent, delta)
    assert one.ends_in(sent, outer, vector.manifest, 0.02)
    for factor in (1.1, -1.0, 0.0, float("nan"), 1e38):
        assert not one.ends_in(np.float32(factor) * sent, outer, vector.manifest, 0.02)


def test_another_models_parameters_are_refused() -> None:
    _, state = made()
    one = state.capture()
    for other in (nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))):
        with pytest.raises(RemoteProtocolError, match="other parameters"):
            one.flat(ModelVector(other).manifest)
    model, _ = made(torch.bfloat16)
    with pytest.raises(RemoteProtocolError, match="the run as"):
        one.flat(ModelVector(model).manifest)


@pytest.mark.parametrize("name", ["other.weight", "parameters", "parameters.", ".weight"])
def test_a_tensor_of_no_part_is_refused(name: str) -> None:
    _, state = made()
    array = next(iter(state.capture().parameters.values()))
    with pytest.raises(RemoteProtocolError, match="has a tensor"):
        WorkCheckpoint.decode(encode({name: array}, {"values": "{}"}))


@pytest.mark.parametrize("text", ["", "[]", "nothing", "[" * 50_000, "0," * (1 << 20)])
def test_values_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match="values"):
        WorkCheckpoint.decode(encode({}, {"values": text}))


def test_only_plain_values_are_kept(monkeypatch) -> None:
    kept = {"a": [1, 2.5, None, True, "x"], "b": {"c": -0.1}}
    assert plain(kept) == kept
    for bad in (float("nan"), object(), torch.ones(1)):
        with pytest.raises(ConfigError, match="values that cannot be kept"):
            plain({"a": bad})
    monkeypatch.setattr(module, "VALUES_BYTES_MAX", 10)
    with pytest.raises(ConfigError, match="at most 10"):
        plain(kept)


def test_the_limit_leaves_room_for_real_states() -> None:
    model, state = made(torch.float64)
    assert len(state.capture().encode()) < checkpoint_bytes_max(ModelVector(model).manifest)
