"""Read checkpoints on disk: what one is, how it is read, and every reason to refuse it.

A checkpoint is a folder ``<run>-<round>-<chain>/`` with two files: ``state.safetensors``
(format.py), which any safetensors reader opens, and ``manifest.json``, which says what
that state is. It is exactly the state after one round.

The manifest is in one plain form, so that no byte of it can change unseen: its writer signs all
other fields with its Ed25519 identity, and ``tag`` is an HMAC under the run's secret, which only
members have. The Merkle root in it covers every chunk; the file's header follows from the manifest
itself. Sizes are compared with what the manifest implies before memory is taken, and nothing is
used that has not been hashed in the memory from which it is used.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from atoll.collectives.digests import strong_digest
from atoll.collectives.errors import AtollError, CheckpointError
from atoll.collectives.merkle import LEAF_BYTES, merkle_root
from atoll.optim.run_spec import parse_blob
from atoll.peer.checkpoint.format import (
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    MANIFEST_BYTES_MAX,
    ROUND_DIGITS,
    SHA256_FORMAT_MAX,
    CheckpointManifest,
    StateLayout,
    latest_first,
    parse_manifest,
)
from atoll.peer.membership.view import Rules
from atoll.peer.rounds.state import ReplicatedState, StateLoad, state_digest

T = TypeVar("T")
STATE_FILE = "state.safetensors"
MANIFEST_FILE = "manifest.json"
CANDIDATES_MAX = 64  # checkpoints of one folder that are tried, the latest first
HASH_BYTES = 1 << 20  # of a file at a time
_NAME = re.compile(r"([A-Za-z0-9._-]{1,64})-(\d{12,19})-([0-9a-f]{8})")
_OTHER_FIX = (
    "name another checkpoint; `atoll checkpoint verify FOLDER` finds the latest that is whole"
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Hold an opened checkpoint, of which all but the chunks has been checked.

    Manifest, signature, sizes and header are right; the chunks are not yet read. ``passed_over``
    has a sentence for each checkpoint of the folder that was refused before it.
    """

    path: Path
    manifest: CheckpointManifest
    layout: StateLayout
    leaves: tuple[bytes, ...]
    fd: int
    passed_over: tuple[str, ...] = ()

    def chunks(self, out: bytearray) -> Iterator[tuple[int, memoryview]]:
        """Yield every chunk's number, and its parameters and momentum in ``out``, each checked.

        Raises CheckpointError, which names the first chunk that is not what its writer signed.
        """
        view = memoryview(out)
        is_old = self.manifest.format_version <= SHA256_FORMAT_MAX
        digest = _sha256 if is_old else strong_digest
        for chunk, leaf in enumerate(self.leaves):
            place = self.layout.place(chunk)
            data = view[: place.nbytes]
            for at, part in place.parts(data):
                read_exactly(self.fd, part, at)
            if digest(data) != leaf:
                what = f"{self.path.name} is damaged: {self.layout.describe(chunk)} is not what"
                raise _refused(f"{what} was written there")
            yield chunk, data

    def buffer(self) -> bytearray:
        return bytearray(self.layout.place(0).nbytes)

    def check_chunks(self) -> None:
        for _ in self.chunks(self.buffer()):
            pass

    def check_hash(self) -> None:
        """Compare the file as a whole with the SHA-256 that `sha256sum` would print.

        Raises CheckpointError if it differs from the manifest's.
        """
        found = file_sha256(self.fd, self.layout.total_bytes)
        if found != self.manifest.file_sha256:
            raise _refused(
                f"{self.path.name} is damaged: {STATE_FILE} has another SHA-256 than its manifest"
            )


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """Hold what a daemon needs to go on from a checkpoint. ``state`` is the caller's to close.

    ``passed_over`` has a sentence for each checkpoint of the folder that was refused before it.
    """

    path: Path
    manifest: CheckpointManifest
    state: ReplicatedState
    passed_over: tuple[str, ...]

    @property
    def round(self) -> int:
        return self.manifest.round

    @property
    def chain(self) -> bytes:
        return self.manifest.chain

    @property
    def lineage(self) -> bytes:
        return self.manifest.lineage

    @property
    def view_number(self) -> int:
        return self.manifest.view

    @property
    def members(self) -> tuple[bytes, ...]:
        return self.manifest.members

    @property
    def ancestors(self) -> tuple[bytes, ...]:
        return self.manifest.ancestors

    @property
    def rules(self) -> Rules:
        return self.manifest.rules

    @property
    def blob(self) -> bytes:
        return self.manifest.blob


# ---------------------------------------------------------------- one checkpoint, or the latest


def load_checkpoint(path: Path | str, *, run: str | None, secret: bytes | None) -> LoadedCheckpoint:
    """Load the state at ``path``, every byte of it checked.

    ``path`` is one checkpoint, or a folder, of which the latest that passes every check is loaded.
    ``run`` None takes any run's; ``secret`` None leaves the run's tag unchecked, for a machine that
    has lost it. Raises CheckpointError, or ConfigError when there is no memory for the state. Runs
    for as long as it takes to read and hash the file: for a worker thread.
    """
    checkpoint, state, passed_over = first_whole(Path(path), run, secret, _load)
    return LoadedCheckpoint(checkpoint.path, checkpoint.manifest, state, passed_over)


@contextmanager
def open_latest(
    path: Path | str, *, run: str | None = None, secret: bytes | None = None
) -> Iterator[Checkpoint]:
    """Open ``path`` itself, or the latest in that folder; every byte of it has been checked."""

    def check(checkpoint: Checkpoint) -> None:
        checkpoint.check_chunks()
        checkpoint.check_hash()

    whole, _, passed_over = first_whole(Path(path), run, secret, check)
    with open_checkpoint(whole.path, run=run, secret=secret) as checkpoint:
        yield replace(checkpoint, passed_over=passed_over)


def candidates(folder: Path, run: str | None = None) -> list[Path]:
    """List the checkpoints in a folder by their names, the highest round first. None is opened."""
    found = []
    for name in os.listdir(folder):
        match = _NAME.fullmatch(name)
        if match and run in (None, match[1]):
            found.append((int(match[2]), name))
    return [folder / name for _, name in sorted(found, reverse=True)]


def folder_name(run: str, round_number: int, chain: bytes) -> str:
    return f"{run}-{round_number:0{ROUND_DIGITS}d}-{chain.hex()[:8]}"


def first_whole(
    path: Path, run: str | None, secret: bytes | None, use: Callable[[Checkpoint], T]
) -> tuple[Checkpoint, T, tuple[str, ...]]:
    """Find the latest checkpoint at ``path`` that ``use`` takes.

    Returns it, closed; what ``use`` gave; and why the ones before it were refused. Raises
    CheckpointError if there is none.
    """
    errors: list[CheckpointError] = []
    for each in _choices(path.absolute(), run, secret):
        try:
            with open_checkpoint(each, run=run, secret=secret) as checkpoint:
                return checkpoint, use(checkpoint), tuple(error.what for error in errors)
        except CheckpointError as error:
            errors.append(error)
    raise _nothing_passed(path, errors)


def _choices(path: Path, run: str | None, secret: bytes | None) -> list[Path]:
    try:
        if (path / MANIFEST_FILE).exists():
            return [path]
        # Another run's are opened only to say that they are another's.
        found = candidates(path, run) or candidates(path)
        manifests = readable(found, run=run, secret=secret)
        refused = [each for each in found if each not in manifests]  # soon, and with a reason
        ordered = latest_first(manifests)[:CANDIDATES_MAX]
        return [*refused, *ordered] or [path]
    except NotADirectoryError:
        return [path]  # which will be refused
    except OSError as error:
        raise _refused(f"{path} cannot be read: {error.strerror}") from error


def _nothing_passed(path: Path, errors: list[CheckpointError]) -> CheckpointError:
    if len(errors) == 1:
        return errors[0]
    reasons = [error.what for error in errors]
    lines = "\n    ".join([f"none of the {len(errors)} checkpoints in {path} passes:", *reasons])
    fixes = {error.fix for error in errors}
    return _refused(lines, fix=fixes.pop() if len(fixes) == 1 else "use another peer's folder")


def _load(checkpoint: Checkpoint) -> ReplicatedState:
    manifest = checkpoint.manifest
    state = ReplicatedState(manifest.blob)
    try:
        load = StateLoad(state)
        for chunk, data in checkpoint.chunks(checkpoint.buffer()):
            load.put(chunk, manifest.round, data)
        load.finish(manifest.round)
        is_old = manifest.format_version <= SHA256_FORMAT_MAX
        if state.digest != manifest.digest and not is_old:  # only a defect gets this far
            raise _refused(f"{checkpoint.path.name} gives another state than it was made of")
    except BaseException:
        state.close()
        raise
    return state


# ---------------------------------------------------------------- opening


@contextmanager
def open_checkpoint(
    path: Path, *, run: str | None = None, secret: bytes | None = None
) -> Iterator[Checkpoint]:
    """Open a checkpoint and check everything but the chunks themselves.

    Takes memory for their digests only.
    """
    manifest = read_manifest(path, run=run, secret=secret)
    layout = _layout_of(manifest, path)
    fd = _open_file(path / STATE_FILE)
    try:
        _check_header(fd, layout, path)
        yield Checkpoint(path, manifest, layout, _read_leaves(fd, layout, manifest, path), fd)
    finally:
        os.close(fd)


def read_manifest(
    path: Path, *, run: str | None = None, secret: bytes | None = None
) -> CheckpointManifest:
    """Return the signed manifest of a checkpoint, whose state file is not looked at."""
    try:
        fd = _open_file(path / MANIFEST_FILE)
    except FileNotFoundError:
        fix = "name a folder that `atoll up --checkpoint` wrote, or one of those in it"
        raise _refused(f"{path} is not a checkpoint: it has no {MANIFEST_FILE}", fix) from None
    try:
        nbytes = os.fstat(fd).st_size
        if nbytes > MANIFEST_BYTES_MAX:
            raise _refused(
                f"{path.name} is not a checkpoint: its {MANIFEST_FILE} has {nbytes:,} bytes,"
                f" at most {MANIFEST_BYTES_MAX:,} are possible"
            )
        raw = bytearray(nbytes)
        read_exactly(fd, memoryview(raw), 0)
    finally:
        os.close(fd)
    return parse_manifest(bytes(raw), path.name, run=run, secret=secret)


def readable(
    paths: Iterable[Path], *, run: str | None = None, secret: bytes | None = None
) -> dict[Path, CheckpointManifest]:
    """Return the manifests of those checkpoints whose manifest is right."""
    found = {}
    for path in paths:
        with suppress(CheckpointError):
            found[path] = read_manifest(path, run=run, secret=secret)
    return found


def _layout_of(manifest: CheckpointManifest, path: Path) -> StateLayout:
    try:
        layout = StateLayout.of(*parse_blob(manifest.blob), manifest.round, manifest.chain)
    except AtollError as error:  # signed, but by a writer that this version does not understand
        raise _refused(f"{path.name} cannot be used here: {error.what}") from error
    sizes = (layout.grid.count, layout.total_bytes)
    digest = state_digest(manifest.blob, manifest.root)
    if sizes != (manifest.chunks, manifest.file_bytes) or digest != manifest.digest:
        raise _refused(f"{path.name} contradicts itself: sizes, parameters or digests differ")
    return layout


def _check_header(fd: int, layout: StateLayout, path: Path) -> None:
    nbytes = os.fstat(fd).st_size
    if nbytes != layout.total_bytes:
        how = "is cut short" if nbytes < layout.total_bytes else "is too long"
        raise _refused(
            f"{path.name} {how}: {STATE_FILE} has {nbytes:,} bytes of {layout.total_bytes:,}"
        )
    found = bytearray(LENGTH_BYTES)
    read_exactly(fd, memoryview(found), 0)
    length = int.from_bytes(found, "little")
    if length > HEADER_BYTES_MAX or length != len(layout.prefix) - LENGTH_BYTES:
        raise _refused(f"{path.name} is damaged: {STATE_FILE} claims a header of {length:,} bytes")
    header = bytearray(length)
    read_exactly(fd, memoryview(header), LENGTH_BYTES)
    if header != layout.prefix[LENGTH_BYTES:]:
        raise _refused(
            f"{path.name} is damaged: the header of {STATE_FILE} is not the one of this state"
        )


def _read_leaves(
    fd: int, layout: StateLayout, manifest: CheckpointManifest, path: Path
) -> tuple[bytes, ...]:
    raw = bytearray(LEAF_BYTES * layout.grid.count)
    read_exactly(fd, memoryview(raw), layout.leaves_at)
    leaves = tuple(bytes(raw[i : i + LEAF_BYTES]) for i in range(0, len(raw), LEAF_BYTES))
    if merkle_root(leaves) != manifest.root:
        raise _refused(
            f"{path.name} is damaged: the digests of its chunks are not those of its manifest"
        )
    return leaves


def _refused(what: str, fix: str = "") -> CheckpointError:
    return CheckpointError(what, fix=fix or _OTHER_FIX)


# ---------------------------------------------------------------- files


def read_exactly(fd: int, out: memoryview, offset: int) -> None:
    """Fill ``out`` from ``offset``.

    Raises CheckpointError if the file ends before or the disk fails.
    """
    while len(out):
        try:
            count = os.preadv(fd, [out], offset)
        except OSError as error:
            why = f"reading at byte {offset:,} failed: {error.strerror}"
            raise _refused(why, fix="look at the disk") from error
        if count == 0:
            raise _refused(f"a file ended at byte {offset:,} while it was read")
        out, offset = out[count:], offset + count


def _sha256(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def file_sha256(fd: int, nbytes: int) -> bytes:
    text, view = hashlib.sha256(), memoryview(bytearray(HASH_BYTES))
    for offset in range(0, nbytes, HASH_BYTES):
        part = view[: min(HASH_BYTES, nbytes - offset)]
        read_exactly(fd, part, offset)
        text.update(part)
    return text.digest()


def _open_file(path: Path) -> int:
    """Open a regular file to read it.

    Raises FileNotFoundError if a manifest is not there, CheckpointError for everything else.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not block us
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) and path.name == MANIFEST_FILE:
            raise FileNotFoundError(path) from error
        raise _refused(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _refused(f"{path} is not a file")
    return fd
