"""Turn named tensors into bytes and back, for hashes, files and those who replay steps. Pure.

The bytes are a safetensors file: 8 bytes that say how long the header is, a header in JSON, and the
values end to end, wide dtypes first, then by name. A digest is over names, dtypes, shapes and
values only: however a header is written, equal tensors have equal digests.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim.manifest import DIMENSIONS_MAX, ELEMENTS_MAX, PARAMETERS_MAX

U8 = NDArray[np.uint8]
F64 = NDArray[np.float64]
LENGTH_BYTES = 8
# 65,536 parameters, for each of which Adam keeps three tensors, with names of the usual length.
HEADER_BYTES_MAX = 32 << 20
TENSORS_MAX = 4 * PARAMETERS_MAX
NAME_BYTES_MAX = 1024  # a parameter's, and what it is that is kept of it
METADATA = "__metadata__"
CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "float32": "F32",
    "int64": "I64",
    "float64": "F64",
}
DTYPES = {code: name for name, code in CODES.items()}
DTYPE_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "float16": 2, "bfloat16": 2}
DTYPE_BYTES |= {"int32": 4, "float32": 4, "int64": 8, "float64": 8}


@dataclass(frozen=True, slots=True)
class Array:
    """Hold a tensor's values as bytes, in C order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: U8

    def values(self) -> F64:
        """Return the values as float64[elements]; of int64 the first 53 bits."""
        if self.dtype == "bfloat16":  # the upper half of a float32
            wide = self.data.view("<u2").astype(np.uint32) << np.uint32(16)
            return wide.view(np.float32).astype(np.float64)
        dtype = np.dtype(self.dtype).newbyteorder("<")
        return self.data.view(dtype).astype(np.float64)

    def like(self, other: Array) -> bool:
        """Return whether dtype and shape are the same."""
        return (self.dtype, self.shape) == (other.dtype, other.shape)


Tensors = Mapping[str, Array]


def digest(tensors: Tensors) -> bytes:
    """Return the SHA-256 of names, dtypes, shapes and values.

    ConfigError for a name that no file takes.
    """
    text = hashlib.sha256()
    lines = [f"{name}\t{a.dtype}\t{a.shape}" for name, a in sorted(tensors.items())]
    if not all(map(_is_name, tensors)):
        raise ConfigError(f"a tensor's name is empty, unprintable or over {NAME_BYTES_MAX} bytes")
    head = "\n".join(lines).encode()
    text.update(len(head).to_bytes(LENGTH_BYTES, "little") + head)
    for _, array in sorted(tensors.items()):
        text.update(array.data.data)
    return text.digest()


def encode(tensors: Tensors, metadata: Mapping[str, str]) -> bytearray:
    """Return tensors and metadata as a safetensors file.

    ConfigError for more tensors, or longer names, than are read.
    """
    entries: dict[str, object] = {METADATA: dict(metadata)}
    ordered = sorted(tensors.items(), key=lambda item: (-DTYPE_BYTES[item[1].dtype], item[0]))
    end = 0
    for name, array in ordered:
        offsets = [end, end + array.data.size]
        end += array.data.size
        entries[name] = {"dtype": CODES[array.dtype], "shape": array.shape, "data_offsets": offsets}
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)
    if len(header) > HEADER_BYTES_MAX or len(tensors) > TENSORS_MAX:
        raise ConfigError(
            f"{len(tensors):,} tensors have a header of {len(header):,} bytes; at most "
            f"{TENSORS_MAX:,} and {HEADER_BYTES_MAX:,} can be kept for a replay",
            fix="train a model with fewer parameter tensors or shorter names",
        )
    start = LENGTH_BYTES + len(header)
    file = bytearray(start + end)
    file[:start] = len(header).to_bytes(LENGTH_BYTES, "little") + header
    values = np.frombuffer(file, np.uint8)[start:]
    for _, array in ordered:
        values[: array.data.size] = array.data
        values = values[array.data.size :]
    return file


def decode(data: bytes | bytearray | memoryview) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the tensors of a file, and the metadata, which is what is said of them.

    The values stay where they are in ``data``. RemoteProtocolError for bytes of anyone that are no
    such file.
    """
    try:
        return _decoded(memoryview(data))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        text = f"a checkpoint of local steps cannot be read: {str(error)[:200]}"
        raise RemoteProtocolError(text, fix="let both peers run the same version") from error


def _decoded(data: memoryview) -> tuple[dict[str, Array], dict[str, str]]:
    nbytes = int.from_bytes(data[:LENGTH_BYTES], "little")
    start = LENGTH_BYTES + nbytes
    if nbytes > HEADER_BYTES_MAX or start > len(data):
        raise ValueError(f"a header of {nbytes} bytes in {len(data)}")
    header = bytes(data[LENGTH_BYTES:start])
    # Limit how many objects are made of it: a tensor has one dictionary and two lists.
    if max(header.count(b"{"), header.count(b"[") // 2) > TENSORS_MAX + 2:
        raise ValueError("too many tensors")
    if header.count(b",") > (5 + DIMENSIONS_MAX) * (TENSORS_MAX + 2):
        raise ValueError("too many values")
    entries = json.loads(header)
    metadata = entries.pop(METADATA)
    if not all(type(v) is str for v in metadata.values()):
        raise ValueError("metadata that is no text")
    tensors: dict[str, Array] = {}
    values, end = np.frombuffer(data, np.uint8)[start:], 0
    for name, entry in entries.items():
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        if not _is_name(name) or len(shape) > DIMENSIONS_MAX:
            raise ValueError(f"no tensor: {name[:80]!r}")
        if not all(type(n) is int and 0 <= n <= ELEMENTS_MAX for n in shape):
            raise ValueError(f"no shape: {shape!r:.80}")
        size = DTYPE_BYTES[dtype] * math.prod(shape)
        if entry["data_offsets"] != [end, end + size] or end + size > values.size:
            raise ValueError(f"{name[:80]!r} does not lie where it should")
        tensors[name] = Array(dtype, shape, _aligned(values[end : end + size], dtype))
        end += size
    if end != values.size:
        raise ValueError(f"{values.size - end} bytes too many")
    return tensors, metadata


def _aligned(data: U8, dtype: str) -> U8:
    """Return the values, copied where they would not lie as numpy and torch need them."""
    return data if data.ctypes.data % DTYPE_BYTES[dtype] == 0 else data.copy()


def _is_name(name: str) -> bool:
    return name.isprintable() and 0 < len(name.encode()) <= NAME_BYTES_MAX
