"""Hold what the next local steps of a trainer depend on, and its digest. Pure.

A checkpoint has four parts, each with a digest of its own, so that one of them can be compared with
that of another checkpoint without the rest: the inner optimizers' state goes on over the end of a
round, where parameters and buffers become the group's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim.manifest import Manifest
from atoll.optim.pseudo_gradient import pseudo_gradient, rounded_to_working
from atoll.optim.replay.tensors import Array, Tensors, decode, digest, encode

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
