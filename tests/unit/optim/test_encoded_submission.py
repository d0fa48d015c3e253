"""A submission that is encoded when it is handed over is what a round would have made of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from atoll.collectives.codecs import get_codec
from atoll.collectives.errors import CodecError
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.model_io import ModelVector
from atoll.optim.pseudo_gradient import (
    delta_source,
    encode_submission,
    submission_floats,
    submission_layout,
)
from atoll.optim.run_spec import RunSpec

MANIFEST = Manifest.of(
    [
        Parameter("a", (300, 2001), "bfloat16"),
        Parameter("b", (7,), "float16"),
        Parameter("c", (41, 1000), "float32"),
    ]
)


def vectors(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    theta = random.standard_normal(MANIFEST.elements).astype(np.float32)
    return theta, theta + np.float32(0.01) * random.standard_normal(theta.size, np.float32)


@pytest.mark.parametrize("codec", ["int8", "int4", "fp8_e4m3", "dynamic8"])
@pytest.mark.parametrize("submits", ["parameters", "deltas"])
@pytest.mark.parametrize("fragments", [1, 3])
def test_each_chunk_is_what_its_pseudo_gradient_is_encoded_to(
    codec: str, submits: str, fragments: int
) -> None:
    spec = RunSpec(sync_every=1, codec=codec, submits=submits, fragments=fragments)
    assert spec.encodes_submissions
    theta, submitted = vectors(1)
    out = np.full(4 * submission_floats(spec, MANIFEST), 255, np.uint8)
    layout, grid = submission_layout(spec, MANIFEST), MANIFEST.grid
    assert layout.total_bytes <= out.size < layout.total_bytes + 4

    def write(piece: np.ndarray, lo: int) -> None:
        np.copyto(piece, submitted[lo : lo + piece.size])

    for fragment in range(fragments):
        encode_submission(spec, MANIFEST, theta, write, fragment, out)
        fill = delta_source(spec, MANIFEST, theta, submitted, fragment)
        first, end = MANIFEST.chunks_of(fragment, fragments)
        for chunk in range(first, end):
            delta = np.empty(grid.size(chunk), np.float32)
            fill(chunk - first, delta)
            expected = np.empty(get_codec(codec).encoded_bytes(delta.size), np.uint8)
            get_codec(codec).encode(delta, expected)
            np.testing.assert_array_equal(out[slice(*layout.slice(chunk))], expected)


def test_what_nobody_writes_is_nothing() -> None:
    """Count padding, and rows that belong to nobody, as zeros whatever was there before."""
    spec = RunSpec(sync_every=1, submits="deltas")
    out = np.full(4 * submission_floats(spec, MANIFEST), 255, np.uint8)
    encode_submission(spec, MANIFEST, vectors(1)[0], lambda piece, lo: None, 0, out)
    codec, layout = get_codec("int8"), submission_layout(spec, MANIFEST)
    for chunk in range(MANIFEST.grid.count):
        found = np.ones(MANIFEST.grid.size(chunk), np.float32)
        codec.decode(out[slice(*layout.slice(chunk))], found)
        assert not found.any()


def test_what_a_round_cannot_carry_is_refused() -> None:
    spec = RunSpec(sync_every=1)
    theta, submitted = vectors(2)
    submitted[5] = np.nan
    out = np.empty(4 * submission_floats(spec, MANIFEST), np.uint8)

    def write(piece: np.ndarray, lo: int) -> None:
        np.copyto(piece, submitted[lo : lo + piece.size])

    with pytest.raises(CodecError):
        encode_submission(spec, MANIFEST, theta, write, 0, out)


@pytest.mark.parametrize(
    "fields",
    [
        {"codec": "float32"},
        {"aggregate": "trimmed(f=1)"},
        {"aggregate": "senders", "codec": "topk", "error_feedback": 0.95},
        {"error_feedback": 0.9},
        {"audit": True, "aggregate": "mean"},
        {"method": "async_diloco", "submits": "deltas"},
        {"method": "gradient_average"},
    ],
)
def test_where_values_are_needed_they_are_handed_over(fields: dict[str, object]) -> None:
    spec = RunSpec(sync_every=1, **fields)  # type: ignore[arg-type]
    assert not spec.encodes_submissions
    assert submission_floats(spec, MANIFEST) == MANIFEST.elements


def test_a_model_is_written_in_pieces_as_in_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 23), nn.Conv2d(3, 5, 3), nn.Linear(9, 4, bias=False))
    model[1].to(memory_format=torch.channels_last)
    model[0].bfloat16()
    vector = ModelVector(model)
    whole = np.zeros(vector.manifest.elements, np.float32)
    vector.write(whole)
    base = np.random.default_rng(0).standard_normal(whole.size).astype(np.float32)
    for step in (1, 7, 64, 100_000):
        pieces, deltas = np.zeros_like(whole), np.zeros_like(whole)
        for lo in range(0, whole.size, step):
            vector.write_piece(pieces[lo : lo + step], lo)
            vector.write_delta(base, deltas[lo : lo + step], lo)
        np.testing.assert_array_equal(pieces, whole)
        np.testing.assert_array_equal(deltas, base - whole)
