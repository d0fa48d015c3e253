"""Write and parse a checkpoint's manifest: its fields, plain text, tag and signature. Pure.

JSON with sorted keys, one to a line; bytes are hexadecimal, ``blob`` is base64. A text that is not
letter for letter what its fields give is refused, so that no byte can change unseen. ``tag`` is an
HMAC under the run's secret over the text without tag and signature; ``signature`` is the writer's
over the text with the tag.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from atoll.collectives.errors import CheckpointError, ConfigError
from atoll.peer.membership.view import ANCESTORS_MAX, MEMBERS_MAX, Rules, short
from atoll.peer.net.invite import check_run_name

K = TypeVar("K")
FORMAT = "atoll-checkpoint"
FORMAT_VERSION = 2
# What each format has added to the first one. A manifest of an older format has none of it, and the
# defaults of these fields hold; its text is checked without them.
ADDED: dict[int, frozenset[str]] = {2: frozenset({"min_trainers"})}
# A blob of 512 KiB as base64 and 1024 members of 70 characters come to 0.8 MiB.
MANIFEST_BYTES_MAX = 1 << 20
VERSION_CHARACTERS_MAX = 64
_NUMBERS_END = 1 << 63
_HASH_FIELDS = ("lineage", "chain", "digest", "root", "file_sha256", "peer")
_OTHER_FIX = "name another checkpoint; the one before is kept"


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

    @property
    def rules(self) -> Rules:
        """Return the rules of the run.

        Raise ValueError for those that this version does not know.
        """
        return Rules(self.policy, self.on_lost, self.on_fork, self.min_trainers)


def render(manifest: CheckpointManifest, secret: bytes, sign: Callable[[bytes], bytes]) -> bytes:
    """Return the text of manifest.json; ``sign`` makes Ed25519 signatures of ``manifest.peer``."""
    document = _document(manifest, FORMAT_VERSION)
    document["tag"] = _tag(document, secret).hex()
    document["signature"] = sign(_signed(document)).hex()
    return _text(document)


def parse(
    raw: bytes, name: str, *, run: str | None = None, secret: bytes | None = None
) -> CheckpointManifest:
    """Parse what ``render`` gives, from anyone; ``name`` is the checkpoint's, for messages.

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
    return CheckpointManifest(**values)


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


_FIELDS = fields(CheckpointManifest)
_PARSE: dict[str, Callable[[object], object]] = {
    "str": _text_of,
    "int": _number,
    "bytes": lambda value: bytes.fromhex(_text_of(value)),
    "tuple[bytes, ...]": _hashes,
    "blob": lambda value: base64.b64decode(_text_of(value), validate=True),
}
