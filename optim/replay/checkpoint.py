"""Hold what the next local steps of a trainer depend on, as bytes and as a digest. Pure.

Named tensors are turned into bytes and back, for hashes, files and those who replay steps. The
bytes are a safetensors file: 8 bytes that say how long the header is, a header in JSON, and the
values end to end, wide dtypes first, then by name. A digest is over names, dtypes, shapes and
values only: however a header is written, equal tensors have equal digests.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim.manifest import DIMENSIONS_MAX, ELEMENTS_MAX, PARAMETERS_MAX, Manifest
from atoll.optim.pseudo_gradient import pseudo_gradient, rounded_to_working

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
    if not all(map(is_name, tensors)):
        raise ConfigError(f"a tensor's name is empty, unprintable or over {NAME_BYTES_MAX} bytes")
    head = "\n".join(lines).encode()
    text.update(len(head).to_bytes(LENGTH_BYTES, "little") + head)
    for _, array in sorted(tensors.items()):
        text.update(array.data.data)
    return text.digest()


def header(tensors: Tensors, metadata: Mapping[str, str]) -> tuple[bytes, list[Array]]:
    """Return how a safetensors file begins, and the arrays whose bytes follow in this order.

    ConfigError for more tensors, or longer names, than are read.
    """
    entries: dict[str, object] = {METADATA: dict(metadata)}
    ordered = sorted(tensors.items(), key=lambda item: (-DTYPE_BYTES[item[1].dtype], item[0]))
    end = 0
    for name, array in ordered:
        offsets = [end, end + array.data.size]
        end += array.data.size
        entries[name] = {"dtype": CODES[array.dtype], "shape": array.shape, "data_offsets": offsets}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > HEADER_BYTES_MAX or len(tensors) > TENSORS_MAX:
        raise ConfigError(
            f"{len(tensors):,} tensors have a header of {len(text):,} bytes; at most "
            f"{TENSORS_MAX:,} and {HEADER_BYTES_MAX:,} can be kept",
            fix="train a model with fewer parameter tensors or shorter names",
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, [array for _, array in ordered]


def encode(tensors: Tensors, metadata: Mapping[str, str]) -> bytearray:
    """Return tensors and metadata as a safetensors file; ConfigError as for ``header``."""
    begin, ordered = header(tensors, metadata)
    file = bytearray(len(begin) + sum(array.data.size for array in ordered))
    file[: len(begin)] = begin
    values = np.frombuffer(file, np.uint8)[len(begin) :]
    for array in ordered:
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
    text = bytes(data[LENGTH_BYTES:start])
    # Limit how many objects are made of it: a tensor has one dictionary and two lists.
    if max(text.count(b"{"), text.count(b"[") // 2) > TENSORS_MAX + 2:
        raise ValueError("too many tensors")
    if text.count(b",") > (5 + DIMENSIONS_MAX) * (TENSORS_MAX + 2):
        raise ValueError("too many values")
    entries = json.loads(text)
    metadata = entries.pop(METADATA)
    if not all(type(v) is str for v in metadata.values()):
        raise ValueError("metadata that is no text")
    tensors: dict[str, Array] = {}
    values, end = np.frombuffer(data, np.uint8)[start:], 0
    for name, entry in entries.items():
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        if not is_name(name) or len(shape) > DIMENSIONS_MAX:
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


def is_name(name: str) -> bool:
    """Return whether a tensor in a file may have this name."""
    return name.isprintable() and 0 < len(name.encode()) <= NAME_BYTES_MAX


# ---------------------------------------------------------------- checkpoints
#
# A checkpoint has four parts, each with a digest of its own, so that one of them can be compared
# with that of another checkpoint without the rest: the inner optimizers' state goes on over the
# end of a round, where parameters and buffers become the group's.


DIGEST_BYTES = 32
DIGESTS_BYTES = 4 * DIGEST_BYTES
VALUES_AT = 3 * DIGEST_BYTES  # where the digest of the values begins, and that of inner optimizers
INNER_AT = slice(2 * DIGEST_BYTES, VALUES_AT)
PARTS = ("parameters", "buffers", "inner")
VALUES = "values"
VALUES_BYTES_MAX = 16 << 20  # two numbers for each of 65,536 parameters, with their names
VALUES_MAX = 1 << 19  # how many values there may be
BYTES_PER_ELEMENT_MAX = 40  # a parameter and four numbers that are kept of it, all of them float64
REST_BYTES_MAX = 128 << 20  # header and values, and buffers, of which few models have many

Plain: TypeAlias = bool | int | float | str | list[Any] | dict[str, Any] | None


@dataclass(frozen=True)
class WorkCheckpoint:
    """Hold what the next local steps of a trainer depend on.

    ``inner``: tensors ``OPTIMIZER.PARAMETER.KEY``, counted from 0 in the order in which the
    optimizers hold them. ``values``: numbers of theirs and of a GradScaler and the like.
    """

    parameters: Tensors
    buffers: Tensors
    inner: Tensors
    values: Mapping[str, Plain]

    @property
    def is_fresh(self) -> bool:
        """Return whether the inner optimizers have taken no step.

        Nobody can know if a trainer has come by a state honestly that it brings along to its first
        round.
        """
        return not self.inner and not self.values.get("inner")

    def digests(self) -> bytes:
        """Return the digests of parameters, buffers, inner optimizers and values, 32 bytes each."""
        values = hashlib.sha256(_text_of(self.values)).digest()
        return b"".join(digest(getattr(self, part)) for part in PARTS) + values

    def encode(self) -> bytearray:
        """Return the checkpoint as a safetensors file."""
        tensors = {f"{part}.{n}": a for part in PARTS for n, a in getattr(self, part).items()}
        return encode(tensors, {VALUES: _text_of(self.values).decode()})

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> WorkCheckpoint:
        """Read a checkpoint from bytes of anyone: the inverse of ``encode``.

        RemoteProtocolError for bytes that are none.
        """
        tensors, metadata = decode(data)
        parts: dict[str, dict[str, Array]] = {part: {} for part in PARTS}
        for name, array in tensors.items():
            part, _, rest = name.partition(".")
            if part not in parts or not rest:
                raise RemoteProtocolError(f"a checkpoint of local steps has a tensor {name[:80]!r}")
            parts[part][rest] = array
        values = _values_of(metadata.get(VALUES, ""))
        try:
            _text_of(values)
        except ConfigError as error:  # numbers that are none
            raise RemoteProtocolError(f"values of a checkpoint: {error.what}") from error
        return cls(**parts, values=values)

    def flat(self, manifest: Manifest) -> F32:
        """Return the parameters as their trainer submits them, float32[elements].

        RemoteProtocolError if they are not those of the run.
        """
        flat: F32 = np.zeros(manifest.elements, np.float32)
        wanted = {p.name: p for p in manifest.parameters if not p.is_padding}
        if wanted.keys() != self.parameters.keys():
            raise RemoteProtocolError("a checkpoint has other parameters than the run")
        for name, p in wanted.items():
            array = self.parameters[name]
            if (array.dtype, array.shape) != (p.dtype, p.shape):
                raise RemoteProtocolError(
                    f"a checkpoint has {name} as {array.shape} {array.dtype}, the run as {p}"
                )
            lo, hi = manifest.offsets[name]
            with np.errstate(over="ignore"):  # as torch does it where a float64 is too large
                flat[lo:hi] = array.values()
        return flat

    def starts_at(self, outer: F32, manifest: Manifest) -> bool:
        """Return whether the parameters are those of the group, to the bit.

        ``outer``: the group's, float32[elements].
        """
        return np.array_equal(rounded_to_working(outer, manifest), self.flat(manifest))

    def pseudo_gradient(self, outer: F32, manifest: Manifest) -> F32:
        """Return what a trainer that ends here contributes to a round from ``outer``.

        The codec sees these values, so with its key they give the bytes that were sent, all but
        those of codecs with error feedback.
        """
        delta: F32 = np.empty_like(outer)
        pseudo_gradient(outer, self.flat(manifest), delta, manifest, 0, manifest.elements)
        return delta

    def ends_in(self, sent: F32, outer: F32, manifest: Manifest, tolerance: float) -> bool:
        """Return whether ``sent`` is the contribution of a trainer that ends here.

        ``sent`` was encoded and decoded, so it is if ``||sent - Δ|| <= tolerance ||Δ||``, where the
        tolerance is the codec's error.
        """
        delta = self.pseudo_gradient(outer, manifest).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            away = float(np.linalg.norm(sent - delta))
            return away <= tolerance * float(np.linalg.norm(delta))


def plain(values: Mapping[str, Any]) -> dict[str, Plain]:
    """Return values as they are when written and read; ConfigError for values that cannot be."""
    return _values_of(_text_of(values).decode())


def leaf_of(digests: bytes) -> bytes:
    """Return the leaf in the tree for the digests of a checkpoint."""
    return hashlib.sha256(b"atoll local checkpoint" + digests).digest()


def checkpoint_bytes_max(manifest: Manifest) -> int:
    """Return the most bytes of an encoded checkpoint of a run; a reader refuses more."""
    return BYTES_PER_ELEMENT_MAX * manifest.elements + REST_BYTES_MAX


def _text_of(values: Mapping[str, Plain]) -> bytes:
    """Return values as JSON; ConfigError for values that are not plain, or too long."""
    try:
        text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a state has values that cannot be kept for a replay: {error}",
            fix="use objects whose state_dict() has finite numbers, texts, lists and dictionaries",
        ) from error
    if len(text) > VALUES_BYTES_MAX:
        raise ConfigError(f"{len(text):,} bytes of values; at most {VALUES_BYTES_MAX:,} are kept")
    return text.encode()


def _values_of(text: str) -> dict[str, Plain]:
    if len(text) > VALUES_BYTES_MAX or max(map(text.count, ",{[")) > VALUES_MAX:
        raise RemoteProtocolError(f"a checkpoint with {len(text):,} letters of values")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"values that cannot be read: {str(error)[:200]}") from error
    if not isinstance(values, dict):
        raise RemoteProtocolError("values of a checkpoint that have no names")
    return values
