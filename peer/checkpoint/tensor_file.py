"""Lay out every byte of a checkpoint's state file. The format is safetensors. Pure.

::

    8 bytes     length of the header, little-endian
    header      JSON, filled up with blanks to a multiple of 8
    theta.*     the outer parameters in the order of the run's manifest: θ, float32, end to end
    momentum.*  the same for the outer momentum
    leaves      uint8[chunks, 32]: the digest of each chunk's parameters and momentum

Nothing in it is chosen by the writer: who knows manifest, round and chain knows the header byte for
byte and the length of the file. So a reader compares, and parses nothing that came from the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from atoll.collectives.chunks import ChunkGrid
from atoll.collectives.errors import CheckpointError
from atoll.collectives.merkle import LEAF_BYTES
from atoll.optim.manifest import Manifest, Parameter

LENGTH_BYTES = 8
# 65,536 parameters, each named twice, with names of the usual length. (safetensors' own is 100 MB.)
HEADER_BYTES_MAX = 16 << 20
LEAVES = "leaves"
# Always as many, so that a writer knows where all lies before it knows of which round it will be.
ROUND_DIGITS = 12
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "uint8": "U8"}
_METADATA = "__metadata__"


class ChunkPlace(NamedTuple):
    """Say where one chunk lies in the file: ``nbytes`` of parameters and as many of momentum."""

    theta_at: int
    momentum_at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Describe the layout of a state file.

    ``prefix`` is the length and the header; offsets are from the start of the file.
    """

    manifest: Manifest
    grid: ChunkGrid
    prefix: bytes

    @classmethod
    def of(cls, manifest: Manifest, round_number: int, chain: bytes) -> StateLayout:
        """Return the layout of a model's state after one round.

        Raises CheckpointError for a model with so many names that the header has no room for them.
        """
        grid = manifest.grid
        tensors = [
            (f"{part}.{p.name}", "float32", p.shape, 4 * p.size)
            for part in ("theta", "momentum")
            for p in manifest.parameters
        ]
        tensors.append((LEAVES, "uint8", (grid.count, LEAF_BYTES), LEAF_BYTES * grid.count))
        metadata = {"round": f"{round_number:0{ROUND_DIGITS}d}", "chain": chain.hex()}
        return cls(manifest, grid, header_bytes(tensors, metadata))

    @property
    def leaves_at(self) -> int:
        return len(self.prefix) + 8 * self.grid.total

    @property
    def total_bytes(self) -> int:
        return self.leaves_at + LEAF_BYTES * self.grid.count

    def theta_at(self, element: int) -> int:
        return len(self.prefix) + 4 * element

    def place(self, chunk: int) -> ChunkPlace:
        lo, hi = self.grid.bounds(chunk)
        return ChunkPlace(self.theta_at(lo), self.theta_at(self.grid.total + lo), 4 * (hi - lo))

    def describe(self, chunk: int) -> str:
        """Name a chunk and the parameters that lie in it, for people: ``chunk 3 (w1, w2)``."""
        lo, hi = self.grid.bounds(chunk)
        names = [name for name, (a, b) in self.manifest.offsets.items() if max(a, lo) < min(b, hi)]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"chunk {chunk} ({', '.join(names[:3])}{more})"


def header_bytes(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: dict[str, str]
) -> bytes:
    """Return the start of a safetensors file of ``tensors``, which lie end to end.

    Each is (name, dtype, shape, bytes). Raises CheckpointError for two of one name, and for more
    names than the header has room for.
    """
    entries: dict[str, object] = {_METADATA: metadata}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        if name in entries:
            raise CheckpointError(f"no file can hold two tensors that are called {name}")
        offsets = [end, end + nbytes]
        entries[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": offsets}
        end += nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES_MAX:
        raise CheckpointError(
            f"the names of {len(entries)} tensors take {len(text):,} bytes, a checkpoint's header"
            f" has room for {HEADER_BYTES_MAX:,}",
            fix="train a model with fewer or shorter parameter names",
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def export_order(manifest: Manifest) -> list[Parameter]:
    """Return the parameters in the order of an export: wide dtypes first, then by name.

    So every tensor is aligned to its own dtype, as torch needs.
    """
    return sorted(
        (p for p in manifest.parameters if not p.is_padding),
        key=lambda p: (-DTYPE_BYTES[p.dtype], p.name),
    )


def export_header(manifest: Manifest, round_number: int) -> bytes:
    """Return the start of a file with the run's parameters, in their own dtypes.

    They come in ``export_order``.
    """
    tensors = (
        (p.name, p.dtype, p.shape, DTYPE_BYTES[p.dtype] * p.size) for p in export_order(manifest)
    )
    # transformers reads no file that does not say which framework it is for: pt is PyTorch.
    return header_bytes(tensors, {"format": "pt", "round": str(round_number)})
