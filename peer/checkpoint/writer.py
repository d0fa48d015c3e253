"""Write one checkpoint: exactly the state after one round, although rounds commit meanwhile.

1. Copy every chunk as it is now. Rounds go on, so chunks come to be of different rounds.
2. Bring the older ones forward to the latest of these rounds with the log, which is pinned.
3. Compare the digest with the one that the log remembers of that round.
4. Sync, read back and compare; write the manifest; sync; rename the folder into its place; sync.

All of it happens in a temporary folder, so a crash at any step leaves the checkpoints of before, or
one more. Runs in a worker thread; its memory is two chunks with their momentum, and some 100 bytes
for the digest and the round of each chunk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from atoll.collectives.digests import strong_digest
from atoll.collectives.errors import CheckpointError, StateError
from atoll.collectives.merkle import merkle_root
from atoll.collectives.version import VERSION
from atoll.optim.outer_step import OuterStep
from atoll.peer.checkpoint.format import CheckpointManifest, StateLayout, render_manifest
from atoll.peer.checkpoint.reader import (
    MANIFEST_FILE,
    STATE_FILE,
    file_sha256,
    folder_name,
    open_checkpoint,
    read_exactly,
)
from atoll.peer.membership.view import View, short
from atoll.peer.rounds.log import RoundLog
from atoll.peer.rounds.state import CHUNK_COPY_BYTES_MAX, ReplicatedState, state_digest

TEMPORARY = ".atoll-unfinished-"
APPEND_TIMEOUT_S = 10.0  # the log follows the state within milliseconds
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    path: Path
    round: int
    nbytes: int
    elapsed_s: float
    unix_s: int


@dataclass(slots=True)
class CheckpointWriter:
    """Write a peer's checkpoints to a folder. ``sign`` makes Ed25519 signatures of ``peer``."""

    folder: Path
    run: str
    secret: bytes = field(repr=False)
    peer: bytes
    sign: Callable[[bytes], bytes]
    stopped: threading.Event = field(default_factory=threading.Event)
    doing: str = ""  # for people: the step that is under way

    @property
    def temporary(self) -> Path:
        return self.folder / f"{TEMPORARY}{short(self.peer)}"

    def clean(self) -> None:
        """Remove what a crash of this peer has left."""
        remove_folder(self.temporary)
        remove_folder(self.temporary.with_suffix(".old"))

    def write(
        self, state: ReplicatedState, log: RoundLog, view: Callable[[], View], incarnation: int
    ) -> WrittenCheckpoint:
        """Write one checkpoint and return what was written.

        Raises OSError (the disk), CheckpointError (it does not read back) or another StateError:
        the rounds have overtaken it, or ``stopped`` is set. Nothing of the attempt is left then.
        """
        began_s = time.monotonic()
        self.doing = "removing what an earlier try has left"
        self.clean()
        try:
            os.mkdir(self.temporary, 0o700)  # a checkpoint is the model: for its user alone
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(self.temporary / STATE_FILE, flags, 0o600)
            try:
                manifest = self._write_state(fd, state, log, view, incarnation)
            finally:
                os.close(fd)
            self._write_manifest(manifest)
            self.doing = f"reading back round {manifest.round}"
            with open_checkpoint(self.temporary, run=self.run, secret=self.secret) as checkpoint:
                for _ in checkpoint.chunks(checkpoint.buffer()):
                    self._go_on()
            sync(self.temporary)
            path = self.folder / folder_name(self.run, manifest.round, manifest.chain)
            self._put_in_place(path)
        finally:
            self.doing = ""
            with contextlib.suppress(OSError):  # then it is tried again before the next one
                remove_folder(self.temporary)
        elapsed_s = time.monotonic() - began_s
        return WrittenCheckpoint(
            path, manifest.round, manifest.file_bytes, elapsed_s, manifest.unix_s
        )

    def remove(self, path: Path) -> None:
        """Delete a checkpoint so that a crash leaves all of it or nothing under its name."""
        aside = self.temporary.with_suffix(".old")
        remove_folder(aside)
        os.rename(path, aside)
        sync(self.folder)
        remove_folder(aside)

    # ------------------------------------------------------------ the state file

    def _write_state(
        self,
        fd: int,
        state: ReplicatedState,
        log: RoundLog,
        view: Callable[[], View],
        incarnation: int,
    ) -> CheckpointManifest:
        layout = StateLayout.of(state.spec, state.manifest, state.round, bytes(32))
        os.posix_fallocate(fd, 0, layout.total_bytes)  # a full disk says so now, not in an hour
        lineage, pinned = view().lineage, log.last + 1  # what will be committed meanwhile
        try:
            log.pin(pinned)
            copy = _StateCopy(fd, state, log, layout, self._go_on, self._tell)
            copy.read_all()
            round_number = copy.bring_forward()
            chain = log.chain_after(round_number)
        finally:
            log.unpin(pinned)
        root = merkle_root(copy.leaves)
        digest = state_digest(state.blob, root)
        if not chain or digest != log.digest_after(round_number):
            raise StateError(f"round {round_number} was taken back while it was copied")
        layout = StateLayout.of(state.spec, state.manifest, round_number, chain)
        write_exactly(fd, layout.prefix, 0)
        write_exactly(fd, b"".join(copy.leaves), layout.leaves_at)
        self.doing = f"waiting for the disk to sync round {round_number}"
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what is read back comes from the disk
        self.doing = f"hashing the file of round {round_number}"
        now = view()
        if now.lineage != lineage:
            raise StateError("the run went on in another lineage meanwhile")
        return CheckpointManifest(
            run=self.run,
            lineage=lineage,
            ancestors=now.ancestors,
            view=now.number,
            members=now.peers,
            policy=now.rules.policy,
            on_lost=now.rules.on_lost,
            on_fork=now.rules.on_fork,
            min_trainers=now.rules.min_trainers,
            round=round_number,
            chain=chain,
            digest=digest,
            root=root,
            chunks=layout.grid.count,
            blob=state.blob,
            file_bytes=layout.total_bytes,
            file_sha256=file_sha256(fd, layout.total_bytes),
            peer=self.peer,
            incarnation=incarnation,
            unix_s=int(time.time()),
            version=VERSION,
        )

    def _write_manifest(self, manifest: CheckpointManifest) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(self.temporary / MANIFEST_FILE, flags, 0o600)
        try:
            write_exactly(fd, render_manifest(manifest, self.secret, self.sign), 0)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _put_in_place(self, path: Path) -> None:
        try:
            os.rename(self.temporary, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # A peer that shares this folder has written the same state, or it is damaged.
            if not self._is_whole(path):
                self.remove(path)
                os.rename(self.temporary, path)
        sync(self.folder)

    def _is_whole(self, path: Path) -> bool:
        try:
            with open_checkpoint(path, run=self.run, secret=self.secret) as checkpoint:
                checkpoint.check_chunks()
        except CheckpointError:
            return False
        return True

    def _tell(self, doing: str) -> None:
        self.doing = doing

    def _go_on(self) -> None:
        if self.stopped.is_set():
            raise StateError("the peer is ending")


class _StateCopy:
    """Hold the chunks of a state in a file, at first each of the round at which it was copied."""

    def __init__(
        self,
        fd: int,
        state: ReplicatedState,
        log: RoundLog,
        layout: StateLayout,
        go_on: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        self.leaves: list[bytes] = []
        self._fd, self._state, self._log, self._layout = fd, state, log, layout
        self._go_on, self._tell = go_on, tell
        self._rounds: list[int] = []  # that each chunk is of
        self._buffer = memoryview(bytearray(CHUNK_COPY_BYTES_MAX))
        self._outer_step = OuterStep(state.spec, state.grid.chunk_elements)

    def read_all(self) -> None:
        self._tell(f"copying the state, from round {self._state.round} on")
        for chunk in range(self._state.grid.count):
            self._go_on()
            copy = self._state.read_chunk(chunk, self._buffer)
            self._write(chunk, self._buffer[: copy.nbytes])
            self._rounds.append(copy.round)
            self.leaves.append(copy.leaf)

    def bring_forward(self) -> int:
        """Make all chunks those of one round, and return that round."""
        latest = max(self._rounds)
        self._tell(f"waiting for round {latest} to be in the log")
        self._await(latest)
        self._tell(f"bringing all chunks to round {latest}")
        for chunk, copied in enumerate(self._rounds):
            if copied < latest:
                self._go_on()
                self._replay(chunk, range(copied + 1, latest + 1))
        return latest

    def _await(self, round_number: int) -> None:
        deadline_s = time.monotonic() + APPEND_TIMEOUT_S
        while self._log.last < round_number:
            self._go_on()
            if time.monotonic() > deadline_s:
                raise StateError(f"round {round_number} did not get into the log")
            time.sleep(POLL_S)

    def _replay(self, chunk: int, rounds: range) -> None:
        place = self._layout.place(chunk)
        data = self._buffer[: place.nbytes]
        for at, piece in place.parts(data):
            read_exactly(self._fd, piece, at)
        changed = False
        for round_number in rounds:
            head = self._log.head(round_number)
            if head is None:
                raise StateError(f"round {round_number} is not in the log any more")
            chunks = self._state.chunks_in(head)
            if chunk not in chunks:
                continue
            index = chunk - chunks.start
            part = self._log.part(round_number, *self._state.layout(head).slice(index))
            if part is None:
                raise StateError(f"round {round_number} is not in the log any more")
            encoded, contributors = np.frombuffer(part, np.uint8), head.origin(index).contributors
            theta, momentum = (np.frombuffer(each, np.uint8) for _, each in place.parts(data))
            self._outer_step(  # as ReplicatedState takes it
                self._state.codec_of(head),
                encoded,
                theta.view(np.float32),
                momentum,
                round_number=head.round,
                contributors=contributors,
            )
            changed = True
        if changed:
            self.leaves[chunk] = strong_digest(data)
            self._write(chunk, data)

    def _write(self, chunk: int, data: memoryview) -> None:
        for at, part in self._layout.place(chunk).parts(data):
            write_exactly(self._fd, part, at)


# ---------------------------------------------------------------- files


def write_exactly(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def sync(folder: Path) -> None:
    """Sync a folder: what it lists is on the disk when this returns."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_private(path: Path) -> None:
    """Close a checkpoint, and the files in it, to other users.

    Links are not followed. Raises OSError.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    folder = os.open(path, flags | os.O_DIRECTORY)
    try:
        os.fchmod(folder, 0o700)
        for name in (STATE_FILE, MANIFEST_FILE):
            fd = os.open(name, flags, dir_fd=folder)
            try:
                os.fchmod(fd, 0o600)
            finally:
                os.close(fd)
    finally:
        os.close(folder)


def remove_folder(path: Path) -> None:
    """Delete a folder of files; do nothing if it is not there."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return
    for name in names:
        os.unlink(path / name)
    os.rmdir(path)
