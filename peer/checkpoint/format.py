"""Define every byte of a checkpoint's two files: its manifest, and the tensors of the state. Pure.

``manifest.json`` is JSON with sorted keys, one to a line; bytes are hexadecimal, ``blob`` is
base64. A text that is not letter for letter what its fields give is refused, so that no byte can
change unseen. ``tag`` is an HMAC under the run's secret over the text without tag and signature;
``signature`` is the writer's over the text with the tag.

``state.safetensors`` is in the safetensors format::

    8 bytes     length of the header, little-endian
    header      JSON, filled up with blanks to a multiple of 8
    theta.*     the outer parameters in the order of the run's manifest: θ, float32, end to end
    momentum.*  the same for the outer momentum; or momentum alone, uint8, as the run encodes it
    leaves      uint8[chunks, 32]: the digest of each chunk's parameters and momentum

Nothing in it is chosen by the writer: who knows manifest, round and chain knows the header byte for
byte and the length of the file. So a reader compares, and parses nothing that came from the file.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, NamedTuple, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from atoll.collectives.chunks import ChunkGrid, EncodedLayout
from atoll.collectives.errors import CheckpointError, ConfigError
from atoll.collectives.merkle import LEAF_BYTES
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.outer_step import momentum_layout
from atoll.optim.run_spec import MOMENTUM_CODECS, RunSpec
from atoll.peer.membership.view import ANCESTORS_MAX, MEMBERS_MAX, Rules, short
from atoll.peer.net.invite import check_run_name

K = TypeVar("K")
FORMAT = "atoll-checkpoint"
FORMAT_VERSION = 3
# Until here chunks have SHA-256 digests, and the digest of the state is one over these: it is not
# the one that the state has in a run of today.
SHA256_FORMAT_MAX = 2
# What each format has added to the first one. A manifest of an older format has none of it, and the
# defaults of these fields hold; its text is checked without them.
ADDED: dict[int, frozenset[str]] = {2: frozenset({"min_trainers"})}
# A blob of 512 KiB as base64 and 1024 members of 70 characters come to 0.8 MiB.
MANIFEST_BYTES_MAX = 1 << 20
VERSION_CHARACTERS_MAX = 64
UNIX_S_MAX = 253_402_300_799  # the end of the year 9999: datetime has no later second
_NUMBERS_END = 1 << 63
_HASH_FIELDS = ("lineage", "chain", "digest", "root", "file_sha256", "peer")
_OTHER_FIX = "name another checkpoint; the one before is kept"
LENGTH_BYTES = 8
# 65,536 parameters, each named twice, with names of the usual length. (safetensors' own is 100 MB.)
HEADER_BYTES_MAX = 16 << 20
LEAVES = "leaves"
MOMENTUM = "momentum"
# Always as many, so that a writer knows where all lies before it knows of which round it will be.
ROUND_DIGITS = 12
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "uint8": "U8"}
_METADATA = "__metadata__"


# ---------------------------------------------------------------- manifest.json


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """Say what a state file is.

    ``view``, ``members`` (peer ids), ``ancestors`` and the rules are those of the writer's view;
    ``root`` is over the digests of the ``chunks``, ``digest`` the state's; ``peer`` is the writer.
    """

    run: str
    lineage: bytes
    ancestors: tuple[bytes, ...]
    view: int
    members: tuple[bytes, ...]
    policy: str
    on_lost: str
    on_fork: str
    round: int
    chain: bytes
    digest: bytes
    root: bytes
    chunks: int
    blob: bytes
    file_bytes: int
    file_sha256: bytes
    peer: bytes
    incarnation: int
    unix_s: int
    version: str  # of atoll, for people
    min_trainers: int = 0  # of the rules; older checkpoints say nothing of it
    format_version: int = FORMAT_VERSION  # not one of the fields of the text

    def __post_init__(self) -> None:
        """Raise ValueError for what no writer says."""
        check_run_name(self.run)
        hashes = [getattr(self, name) for name in _HASH_FIELDS]
        if any(len(value) != 32 for value in (*hashes, *self.members, *self.ancestors)):
            raise ValueError("a hash or peer id does not have 32 bytes")
        if not 0 < len(self.members) <= MEMBERS_MAX or self.round < 1 or self.chunks < 1:
            raise ValueError("there is no member, no round or no chunk")
        if len(self.ancestors) > ANCESTORS_MAX:
            raise ValueError(f"there are more than {ANCESTORS_MAX} ancestors")
        _ = self.rules
        if len(self.version) > VERSION_CHARACTERS_MAX:
            raise ValueError("the version of atoll is a long story")
        if self.unix_s > UNIX_S_MAX:
            raise ValueError("it says that it was written after the year 9999")

    @property
    def rules(self) -> Rules:
        """Return the rules of the run.

        Raise ValueError for those that this version does not know.
        """
        return Rules(self.policy, self.on_lost, self.on_fork, self.min_trainers)


def render_manifest(
    manifest: CheckpointManifest, secret: bytes, sign: Callable[[bytes], bytes]
) -> bytes:
    """Return the text of manifest.json; ``sign`` makes Ed25519 signatures of ``manifest.peer``."""
    document = _document(manifest, FORMAT_VERSION)
    document["tag"] = _tag(document, secret).hex()
    document["signature"] = sign(_signed(document)).hex()
    return _text(document)


def parse_manifest(
    raw: bytes, name: str, *, run: str | None = None, secret: bytes | None = None
) -> CheckpointManifest:
    """Parse what ``render_manifest`` gives, from anyone; ``name`` is the checkpoint's, for people.

    Raises CheckpointError: not a manifest, of a newer format, unsigned, changed since it was
    signed, of another run than ``run`` (if given) or of one with another ``secret`` (if given).
    """
    document, format_version = _load(raw, name)
    tag, signature = document.get("tag"), document.get("signature")
    try:
        manifest = _manifest(document, format_version)
        if not tag or not signature:
            raise CheckpointError(f"{name} is unsigned: anyone may have made it", fix=_OTHER_FIX)
        plain = _document(manifest, format_version) | {"tag": tag, "signature": signature}
        if _text(plain) != raw:
            raise ValueError("it is not in its plain form")
        claimed, signed = bytes.fromhex(str(tag)), bytes.fromhex(str(signature))
        if (claimed.hex(), signed.hex()) != (tag, signature):
            raise ValueError("tag and signature are not in their plain form")
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{name} is damaged: its manifest cannot be read: {str(error)[:200]}", fix=_OTHER_FIX
        ) from error
    try:
        Ed25519PublicKey.from_public_bytes(manifest.peer).verify(signed, _signed(document))
    except (InvalidSignature, ValueError) as error:
        raise CheckpointError(
            f"{name} has a wrong signature: its manifest is not as peer {short(manifest.peer)},"
            " who is said to have written it, has signed it",
            fix=_OTHER_FIX,
        ) from error
    if run is not None and manifest.run != run:
        raise CheckpointError(
            f"{name} belongs to run {manifest.run}, not {run}",
            fix=f"use run {manifest.run}, or name a checkpoint of run {run}",
        )
    if secret is not None and not hmac.compare_digest(_tag(document, secret), claimed):
        raise CheckpointError(
            f"{name} belongs to another run that is also called {manifest.run}:"
            " whoever wrote it did not know the secret of this one",
            fix="resume it in a home of its own, or name a checkpoint of this run",
        )
    return manifest


def latest_first(manifests: Mapping[K, CheckpointManifest]) -> list[K]:
    """Return the keys in order, beginning with the one to go on from.

    A lineage that another one continues comes after it, however high its rounds: they were given
    up. Of lineages that have nothing to do with each other, the one written to last comes first.
    """
    lineages: dict[bytes, list[K]] = {}
    for key, manifest in manifests.items():
        lineages.setdefault(manifest.lineage, []).append(key)

    def written(lineage: bytes) -> tuple[int, int]:
        """Return when a lineage was last written, and, within the same second, how far."""
        return max((manifests[key].unix_s, manifests[key].round) for key in lineages[lineage])

    ordered: list[K] = []
    rest = sorted(lineages, key=lambda lineage: (written(lineage), lineage), reverse=True)
    while rest:
        continued = {
            ancestor
            for lineage in rest
            for key in lineages[lineage]
            for ancestor in manifests[key].ancestors
            if ancestor != lineage
        }
        newest = next((lineage for lineage in rest if lineage not in continued), rest[0])
        rest.remove(newest)
        ordered += sorted(lineages[newest], key=lambda key: manifests[key].round, reverse=True)
    return ordered


# ---------------------------------------------------------------- text


def _load(raw: bytes, name: str) -> tuple[dict[str, object], int]:
    """Return the document and the version of its format, one that is known.

    Raises CheckpointError.
    """
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(
            f"{name} is not a checkpoint: its manifest is not one of atoll, or is cut short",
            fix=_OTHER_FIX,
        )
    version = document.get("format_version")
    if type(version) is not int or version < 1:
        what = f"{name} is damaged: its manifest cannot be read: it has no format version"
        raise CheckpointError(what, fix=_OTHER_FIX)
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{name} has format {str(version)[:20]}; this version of atoll reads {FORMAT_VERSION}",
            fix="use the version of atoll that wrote it, or a newer one",
        )
    return document, version


def _fields(format_version: int) -> list[Field[Any]]:
    """Return the fields that a manifest of this format has."""
    later = {name for version, names in ADDED.items() if version > format_version for name in names}
    return [field for field in _FIELDS if field.name not in later]


def _manifest(document: dict[str, object], format_version: int) -> CheckpointManifest:
    values: dict[str, Any] = {}
    for field in _fields(format_version):
        kind = "blob" if field.name == "blob" else str(field.type)
        values[field.name] = _PARSE[kind](document[field.name])
    return CheckpointManifest(**values, format_version=format_version)


def _document(manifest: CheckpointManifest, format_version: int) -> dict[str, object]:
    document: dict[str, object] = {"format": FORMAT, "format_version": format_version}
    for field in _fields(format_version):
        value = getattr(manifest, field.name)
        if isinstance(value, tuple):
            value = [each.hex() for each in value]
        document[field.name] = value.hex() if isinstance(value, bytes) else value
    document["blob"] = base64.b64encode(manifest.blob).decode()
    return document


def _text(document: dict[str, object]) -> bytes:
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


def _tag(document: dict[str, object], secret: bytes) -> bytes:
    rest = {key: value for key, value in document.items() if key not in ("tag", "signature")}
    return hmac.digest(secret, b"atoll-checkpoint-tag\0" + _text(rest), hashlib.sha256)


def _signed(document: dict[str, object]) -> bytes:
    rest = {key: value for key, value in document.items() if key != "signature"}
    return b"atoll-checkpoint\0" + _text(rest)


def _text_of(value: object) -> str:
    if type(value) is not str:
        raise TypeError("a text is missing")
    return value


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < _NUMBERS_END:
        raise TypeError("a number is missing or out of range")
    return value


def _hashes(value: object) -> tuple[bytes, ...]:
    if type(value) is not list:
        raise TypeError("a list is missing")
    return tuple(bytes.fromhex(_text_of(each)) for each in value)


_FIELDS = [field for field in fields(CheckpointManifest) if field.name != "format_version"]
_PARSE: dict[str, Callable[[object], object]] = {
    "str": _text_of,
    "int": _number,
    "bytes": lambda value: bytes.fromhex(_text_of(value)),
    "tuple[bytes, ...]": _hashes,
    "blob": lambda value: base64.b64decode(_text_of(value), validate=True),
}


# ---------------------------------------------------------------- state.safetensors


class ChunkPlace(NamedTuple):
    """Say where the parameters and the momentum of one chunk lie in the file."""

    theta_at: int
    momentum_at: int
    theta_bytes: int
    momentum_bytes: int

    @property
    def nbytes(self) -> int:
        return self.theta_bytes + self.momentum_bytes

    def parts(self, data: memoryview) -> tuple[tuple[int, memoryview], ...]:
        """Return each part of a chunk's memory with its place in the file."""
        theta, momentum = data[: self.theta_bytes], data[self.theta_bytes : self.nbytes]
        return (self.theta_at, theta), (self.momentum_at, momentum)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Describe the layout of a state file.

    ``prefix`` is the length and the header; offsets are from the start of the file.
    """

    manifest: Manifest
    grid: ChunkGrid
    momentum: EncodedLayout
    prefix: bytes

    @classmethod
    def of(cls, spec: RunSpec, manifest: Manifest, round_number: int, chain: bytes) -> StateLayout:
        """Return the layout of a run's state after one round.

        Raises CheckpointError for a model with so many names that the header has no room for them.
        """
        grid, kept = manifest.grid, momentum_layout(spec, manifest.grid)
        as_values = spec.momentum_codec == MOMENTUM_CODECS[0]
        tensors = [
            (f"{part}.{p.name}", "float32", p.shape, 4 * p.size)
            for part in ("theta", "momentum")[: 1 + as_values]
            for p in manifest.parameters
        ]
        if not as_values:
            tensors.append((MOMENTUM, "uint8", (kept.total_bytes,), kept.total_bytes))
        tensors.append((LEAVES, "uint8", (grid.count, LEAF_BYTES), LEAF_BYTES * grid.count))
        metadata = {"round": f"{round_number:0{ROUND_DIGITS}d}", "chain": chain.hex()}
        return cls(manifest, grid, kept, header_bytes(tensors, metadata))

    @property
    def leaves_at(self) -> int:
        return self.theta_at(self.grid.total) + self.momentum.total_bytes

    @property
    def total_bytes(self) -> int:
        return self.leaves_at + LEAF_BYTES * self.grid.count

    def theta_at(self, element: int) -> int:
        return len(self.prefix) + 4 * element

    def place(self, chunk: int) -> ChunkPlace:
        lo, hi = self.grid.bounds(chunk)
        start, end = self.momentum.slice(chunk)
        momentum_at = self.theta_at(self.grid.total) + start
        return ChunkPlace(self.theta_at(lo), momentum_at, 4 * (hi - lo), end - start)

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
