"""Encode values in torch where they are, so that only the bytes are copied to the host.

The bytes are those of the numpy forms in ``collectives.codecs``, bit for bit, on the CPU and on
CUDA devices. So every step is an operation whose result IEEE 754 fixes, rounded by itself:
magnitudes, maxima, one division for each scale and one for each value, rounding to the nearest with
ties to even, comparisons. Nothing is multiplied and added, so nothing can be fused. Divisors are
tensors on the device, because CUDA multiplies with the reciprocal of a plain number instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from atoll.collectives.chunks import ChunkGrid, encoded_layout
from atoll.collectives.codecs import Codec, get_codec
from atoll.collectives.codecs.base import tiles
from atoll.collectives.codecs.blocks import BlockCodec
from atoll.collectives.codecs.levels import LevelCodec
from atoll.collectives.codecs.plain import BFLOAT16_MAX, FLOAT16_MAX
from atoll.collectives.codecs.scales import FloatScales
from atoll.collectives.errors import CodecError

_HALVES: Final = {
    "bfloat16": (torch.bfloat16, BFLOAT16_MAX),
    "float16": (torch.float16, FLOAT16_MAX),
}
_BLOCKS: Final = ("int8", "int4", "fp4_e3m0")
DEVICE_CODECS: Final = (*_HALVES, *_BLOCKS)
# How many elements of whole chunks are encoded at a time: enough to keep a device busy, and what is
# allocated on it meanwhile, up to 20 bytes for each, is 160 MiB.
PIECE_ELEMENTS: Final = 1 << 23
# Other devices may divide with less than float32's precision (Metal does).
_DEVICES: Final = ("cpu", "cuda")


def encode_on_device(
    codec_name: str, values: torch.Tensor, grid: ChunkGrid | None = None
) -> torch.Tensor:
    """Encode float32[n] as ``get_codec(codec_name)`` does, into uint8 on the host.

    With a ``grid`` of n elements each of its chunks is encoded by itself, and the bytes lie as
    ``encoded_layout`` says; without one the whole vector is one chunk, ``encoded_bytes(n)`` long.
    It waits for the device. CodecError on NaN or infinity, for a codec that is not one of
    ``DEVICE_CODECS``, and for a tensor that is not flat, contiguous and float32 on the CPU or a
    CUDA device.
    """
    codec = get_codec(codec_name)
    if codec_name not in DEVICE_CODECS:
        raise CodecError(
            f"there is no form of {codec_name} for devices",
            fix=f"copy the values to the host first, or use one of: {', '.join(DEVICE_CODECS)}",
        )
    _check(values, grid)
    if grid is None:
        size = codec.encoded_bytes(values.numel())
    else:
        size = encoded_layout(grid, codec).total_bytes
    encoded = torch.empty(size, dtype=torch.uint8)
    at = 0
    with torch.no_grad():
        for chunks in _pieces(values, grid):
            data = _encode_chunks(codec, chunks).flatten()
            encoded[at : at + data.numel()].copy_(data)
            at += data.numel()
    return encoded


def _check(values: torch.Tensor, grid: ChunkGrid | None) -> None:
    if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous():
        raise CodecError(
            "what is encoded is flat, contiguous and float32, not "
            f"{values.dtype} of shape {tuple(values.shape)} and strides {values.stride()}"
        )
    if values.device.type not in _DEVICES:
        raise CodecError(
            f"values on a {values.device.type} device cannot be encoded there",
            fix="copy them to the host first",
        )
    if grid is not None and grid.total != values.numel():
        raise CodecError(f"a grid of {grid.total} elements for {values.numel()} values")


def _pieces(values: torch.Tensor, grid: ChunkGrid | None) -> Iterator[torch.Tensor]:
    """Yield some whole chunks at a time as (chunks, elements of each), then a short last one."""
    count = values.numel()
    chunk = count if grid is None else grid.chunk_elements
    if not count:
        return
    yield from (
        values[lo:hi].view(-1, width)
        for lo, hi, width in tiles(count, chunk, chunk * max(1, PIECE_ELEMENTS // chunk))
    )


def _encode_chunks(codec: Codec, chunks: torch.Tensor) -> torch.Tensor:
    """Encode float32(chunks, n) into uint8(chunks, encoded_bytes(n)), on the device."""
    if codec.name in _HALVES:
        dtype, value_max = _HALVES[codec.name]
        _refuse_unless(chunks.isfinite())
        return chunks.clamp(-value_max, value_max).to(dtype).view(torch.uint8)
    assert isinstance(codec, BlockCodec)
    assert isinstance(codec.scales, FloatScales)
    scales, codes = [], []
    count = chunks.shape[1]
    for lo, hi, width in tiles(count, codec.contract.block, count):
        rows = chunks[:, lo:hi].reshape(len(chunks), -1, width)
        fitted, divisors = _fit(codec.scales, rows)
        scales.append(fitted)
        codes.append(_codes(codec, rows / divisors[:, :, None]).flatten(1))
    packed = torch.cat(codes, 1)
    if codec.bits == 4:
        packed = _pack(packed)
    return torch.cat([torch.cat(scales, 1).view(torch.uint8), packed], 1)


def _fit(scales: FloatScales, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and divisors for float32(chunks, blocks, width), (chunks, blocks) each."""
    largest = rows.abs().amax(2)  # NaN if there is one
    _refuse_unless(largest.isfinite())
    raw = largest / largest.new_full((), float(scales.divisor))
    raw = raw.clamp(max=float(scales.high))
    flushed = raw < float(scales.low)
    return raw.masked_fill(flushed, 0), raw.masked_fill(flushed, 1)


def _codes(codec: BlockCodec, scaled: torch.Tensor) -> torch.Tensor:
    """Return codes as uint8, a byte for each value; of 4-bit ones the lower half counts.

    ``scaled`` may be overwritten.
    """
    if not isinstance(codec, LevelCodec):
        return scaled.round_().to(torch.int8).view(torch.uint8)
    levels = codec.levels
    thresholds = torch.from_numpy(levels.thresholds[: levels.count - 1]).to(scaled.device)
    signs = scaled.view(torch.int32) >> 31 & 1 << levels.bits - 1
    # How many thresholds each magnitude exceeds.
    return (torch.bucketize(scaled.abs(), thresholds, out_int32=True) | signs).to(torch.uint8)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes (chunks, n) into (chunks, ceil(n / 2)), the first of two in the low bits."""
    packed = codes[:, ::2] & 15
    packed[:, : codes.shape[1] // 2] |= codes[:, 1::2] << 4
    return packed


def _refuse_unless(finite: torch.Tensor) -> None:
    if not bool(finite.all()):
        raise CodecError("NaN or infinity cannot be encoded")
