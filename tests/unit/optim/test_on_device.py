"""Encoding in torch against numpy, bit for bit: on the CPU, and on a CUDA device where one is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness.floats import any_values, around_limits, halfway, near_ties, normal, special_values
from harness.roundtrip import encoded
from hypothesis import HealthCheck, given, settings

from atoll.collectives.chunks import ChunkGrid, encoded_layout, grid_for
from atoll.collectives.codecs import CODECS, F32, NUMPY_CODECS
from atoll.collectives.codecs.blocks import BlockCodec
from atoll.collectives.errors import CodecError
from atoll.optim import on_device
from atoll.optim.on_device import DEVICE_CODECS, encode_on_device

COUNTS = (*range(1, 140), 255, 256, 257, 511, 513, 4095, 4096, 4097, 30_001)
WITH_SCALES = [
    codec
    for codec in NUMPY_CODECS.values()
    if codec.name in DEVICE_CODECS and isinstance(codec, BlockCodec)
]
every_codec = pytest.mark.parametrize("name", DEVICE_CODECS)
checked = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def on(device: str, values: F32) -> torch.Tensor:
    return torch.from_numpy(values.copy()).to(device)


def same_bytes(device: str, name: str, values: F32) -> bool:
    ours = encode_on_device(name, on(device, values))
    assert ours.device.type == "cpu"
    assert ours.dtype == torch.uint8
    return ours.numpy().tobytes() == encoded(NUMPY_CODECS[name], values).tobytes()


# ---------------------------------------------------------------- the same bytes


@every_codec
@given(values=any_values | special_values)
@checked
def test_any_values(device: str, name: str, values: F32) -> None:
    assert same_bytes(device, name, values)


@every_codec
def test_many_blocks_and_short_ones(device: str, name: str) -> None:
    for count in COUNTS:
        assert same_bytes(device, name, normal(count, seed=count)), count


@every_codec
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-39, 1.1754944e-38, 3.4028235e38])
def test_blocks_of_one_value(device: str, name: str, value: float) -> None:
    assert same_bytes(device, name, np.full(300, value, np.float32))


@pytest.mark.parametrize("codec", WITH_SCALES, ids=lambda codec: codec.name)
def test_ties_and_scales_at_their_limits(device: str, codec: BlockCodec) -> None:
    for rows in (list(near_ties(codec)), list(around_limits(codec))):
        # As the chunks of one matrix, because each call waits for the device.
        ours = on_device._encode_chunks(codec, on(device, np.stack(rows))).cpu().numpy()
        for row, data in zip(rows, ours, strict=True):
            assert data.tobytes() == encoded(codec, row).tobytes()


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_every_tie_of_halves(device: str, name: str) -> None:
    for values in halfway(name):
        assert same_bytes(device, name, values)


# ---------------------------------------------------------------- chunks


@every_codec
@pytest.mark.parametrize("pieces", [1, 1024, 1 << 23])
@pytest.mark.parametrize(
    "grid", [ChunkGrid(1, 256), ChunkGrid(5000, 512), ChunkGrid(4096, 1024), grid_for(300_003)]
)
def test_each_chunk_of_a_grid_is_encoded_by_itself(
    device: str, name: str, grid: ChunkGrid, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_device, "PIECE_ELEMENTS", pieces)
    values, codec = normal(grid.total, seed=grid.total), NUMPY_CODECS[name]
    ours = encode_on_device(name, on(device, values), grid).numpy()
    layout = encoded_layout(grid, codec)
    assert ours.size == layout.total_bytes
    for chunk in range(grid.count):
        (lo, hi), (start, end) = grid.bounds(chunk), layout.slice(chunk)
        assert ours[start:end].tobytes() == encoded(codec, values[lo:hi]).tobytes()


@every_codec
def test_what_is_encoded_can_be_decoded(device: str, name: str) -> None:
    values = normal(1000, seed=1)
    CODECS[name].check(encode_on_device(name, on(device, values)).numpy(), 1000)


@every_codec
def test_values_are_left_alone(device: str, name: str) -> None:
    values = on(device, normal(1000, seed=2)).requires_grad_()
    before = values.detach().clone()
    assert not encode_on_device(name, values).requires_grad
    assert torch.equal(values.detach().view(torch.int32), before.view(torch.int32))
    assert values.grad is None


# ---------------------------------------------------------------- refusals


@every_codec
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 255, 256, 299])
def test_nan_and_infinity_are_refused(device: str, name: str, bad: float, at: int) -> None:
    values = np.ones(300, np.float32)
    values[at] = bad
    with pytest.raises(CodecError, match="NaN or infinity"):
        encode_on_device(name, on(device, values))


def test_codecs_without_a_form_in_torch_are_refused() -> None:
    for name in CODECS.keys() - set(DEVICE_CODECS):
        with pytest.raises(CodecError, match="no form of") as caught:
            encode_on_device(name, torch.zeros(3))
        assert "int8" in caught.value.fix
    with pytest.raises(CodecError, match="no codec 'int3'"):
        encode_on_device("int3", torch.zeros(3))


def test_other_tensors_are_refused() -> None:
    for wrong in (
        torch.zeros(8, dtype=torch.float64),
        torch.zeros(8, dtype=torch.bfloat16),
        torch.zeros(2, 4),
        torch.zeros(()),
        torch.zeros(8)[::2],
        torch.zeros(1).expand(8),
    ):
        with pytest.raises(CodecError, match="flat, contiguous and float32"):
            encode_on_device("int8", wrong)
    with pytest.raises(CodecError, match="on a meta device"):
        encode_on_device("int8", torch.zeros(8, device="meta"))
    with pytest.raises(CodecError, match="a grid of 9 elements"):
        encode_on_device("int8", torch.zeros(8), ChunkGrid(9, 256))
