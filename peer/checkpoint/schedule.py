"""Write checkpoints in the background: when due, how many are kept, and what is said of them.

Peers take turns (``is_due``), so that a run of eight with ``--every 40`` has a new checkpoint
somewhere every five rounds. One is written at a time, by a worker thread (of the usual priority: a
thread that waits for its turn with the interpreter's lock in hand would stop the event loop).
Whatever goes wrong there is a line in the event log and never an error of the daemon: the next due
round is the next try.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import stat
import threading
import time
from pathlib import Path

from atoll.collectives.errors import AtollError, CheckpointError, ConfigError, StateError
from atoll.collectives.threads import worker
from atoll.collectives.units import duration, size
from atoll.peer.checkpoint.format import StateLayout, latest_first
from atoll.peer.checkpoint.reader import STATE_FILE, candidates, open_checkpoint, readable
from atoll.peer.checkpoint.writer import CheckpointWriter, WrittenCheckpoint, make_private
from atoll.peer.daemon.ports import CheckpointPort
from atoll.peer.durable.disk import DISK_FULL
from atoll.peer.membership.view import View
from atoll.peer.net.identity import Home
from atoll.peer.rounds.log import RoundLog
from atoll.peer.rounds.state import ReplicatedState

KEPT = 2  # if the disk loses the last one, there is another
TRIES = 3  # a write begins anew at most twice when rounds overtake it
CLOSE_TIMEOUT_S = 2.0  # a peer that ends does not wait for its disk for longer
# Digests are compared with every heartbeat, where no round is between READY and its commit: what is
# older than this was written before the bytes went wrong that are in doubt now.
DOUBT_S = 10.0


def is_due(
    round_number: int, every: int, rank: int, members: int, last: int = 0, step: int = 1
) -> bool:
    """Return whether the peer at place ``rank`` of ``members`` writes a checkpoint now.

    ``round_number`` is the round that has just been committed. Each peer writes once in ``every``
    rounds, shifted by its place. ``last`` is the round of its latest one: places move when views
    change, so a peer may miss its turn, but not twice. ``step`` is how many rounds it has just
    moved on: one that catches up may jump over its turn.
    """
    turn = rank * every // members
    return (round_number - turn) % every < step or round_number - last >= 2 * every


class Checkpointer:
    """Write checkpoints when they are due, in a worker thread of its own.

    All but that thread lives in the event loop. Events are of kind "checkpoint" (written, or
    overtaken by rounds) and "disk" (what the disk did not do).
    """

    def __init__(
        self,
        folder: Path | str,
        every: int,
        *,
        run: str,
        secret: bytes,
        home: Home,
        daemon: CheckpointPort,
        quiet: bool = False,
    ) -> None:
        """Prepare the folder. Raise ConfigError if it cannot be made or written to.

        ``quiet``: only the first one that is written has a line in the log, and what goes wrong.
        """
        self._writer = CheckpointWriter(
            Path(folder).absolute(), run, secret, home.peer_id, home.sign
        )
        self._every = every
        self._daemon, self._quiet = daemon, quiet
        self._view: View | None = None
        self._thread: threading.Thread | None = None
        self.idle = asyncio.Event()  # set while none is being written
        self.idle.set()
        self._began_s = 0.0  # the one that is being written
        self._folder = CheckpointFolder(self._writer)
        self._last_round = 0  # of the last try ...
        self._last_digest = b""  # ... and what the state was then
        self._wanted = False  # one that is not due
        self._round = 0  # that we were told of last
        self.latest: WrittenCheckpoint | None = None
        self._ended_s = -math.inf  # when that was written
        self._is_doubted = False  # the state; nothing is written until it is another one
        self._spoilt = False  # what is being written just now
        self._suspects: list[WrittenCheckpoint] = []  # to be removed when nothing is written
        try:
            self._writer.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._writer.clean()
            self._keep_private()
        except OSError as error:
            raise ConfigError(
                f"no checkpoints can be written to {folder}: {error.strerror}",
                fix="choose a writable folder with --checkpoint",
            ) from error

    def _keep_private(self) -> None:
        """Close what earlier versions left open to all users.

        The folder itself may be anything, so its permissions are spoken of and not changed.
        """
        for path in candidates(self._writer.folder, self._writer.run):
            with contextlib.suppress(OSError):  # another user's, or not a checkpoint
                make_private(path)
        mode = stat.S_IMODE(self._writer.folder.stat().st_mode)
        if mode & 0o077:
            folder = self._writer.folder
            what = f"other users may enter {folder} (mode {mode:04o}), not the checkpoints in it"
            self._daemon.note("checkpoint", f"{what}; to hide their names too: chmod 700 {folder}")

    async def look_for_room(self, state: ReplicatedState) -> None:
        """Warn before hours of training if the disk is too small for checkpoints of ``state``."""
        nbytes = checkpoint_bytes(state)
        try:
            room = await asyncio.to_thread(self._folder.room_bytes)
        except OSError:
            return  # a broken disk is spoken of when a checkpoint is written
        takes = f"one takes {size(nbytes)}, and there are {size(room)} for checkpoints of this run"
        what, fix = "", "make room, or name another folder with --checkpoint"
        if room < nbytes:
            what = f"the disk of {self._writer.folder} is too small for a checkpoint"
        elif room < 2 * nbytes:
            what = f"the disk of {self._writer.folder} has room for one checkpoint, and for no next"
        if what:
            self._daemon.note("disk", f"{what}: {takes}; {fix}")
        elif room < (KEPT + 1) * nbytes:
            what = f"the disk of {self._writer.folder} has no room for {KEPT + 1} checkpoints"
            self._daemon.note(
                "checkpoint", f"{what}: {takes}; the older one goes before one is written"
            )

    @property
    def folder(self) -> Path:
        return self._writer.folder

    def taken_bytes(self) -> int:
        """Return the bytes that the checkpoints of this run take."""
        return self._folder.taken_bytes()

    def want(self) -> None:
        """Write one as soon as a round is committed, whoever's turn it is."""
        self._wanted = True

    @property
    def writing(self) -> bool:
        return not self.idle.is_set()

    @property
    def writing_since(self) -> int | None:
        """Return the round from which on a checkpoint is being copied; None if none is."""
        return self._last_round if self.writing else None

    def describe_writing(self) -> str:
        """Say for people since when one is being written, and what that waits for; or ""."""
        if self.idle.is_set():
            return ""
        so_far = duration(time.monotonic() - self._began_s)
        return f"one is being written ({so_far} so far): {self._writer.doing or 'beginning'}"

    def committed(
        self, round_number: int, view: View, state: ReplicatedState, log: RoundLog
    ) -> None:
        """Begin a checkpoint, if this peer's is due.

        Called when a round has been applied and is in the log.
        """
        self._view = view
        peer = self._writer.peer
        writers = view.replicas if peer in view.replicas else (*view.replicas, peer)  # an archive
        if not self._last_round:  # what came before this process does not count
            self._last_round = self._round = round_number - 1
        rank, step = writers.index(peer), round_number - self._round
        self._round = round_number
        due = is_due(round_number, self._every, rank, len(writers), self._last_round, step)
        due &= state.digest != self._last_digest  # rounds that change nothing need none
        if not (due or self._wanted) or self.writing or self._writer.stopped.is_set():
            return
        if self._is_doubted:
            return
        self._wanted = False
        self._last_round, self._last_digest = round_number, state.digest
        self._began_s = time.monotonic()
        self.idle.clear()
        work = functools.partial(
            self._work, asyncio.get_running_loop(), state, log, self._daemon.incarnation()
        )
        self._thread = worker(work, "checkpoint")  # a disk that hangs does not keep the process
        self._thread.start()

    def doubt(self) -> None:
        """Take back what may have been copied from a state that is not that of most others.

        That is what is being written, and what was written within DOUBT_S: a process that begins
        with it would have the wrong bytes again. Nothing is written until `trust` is called.
        """
        self._is_doubted, self._spoilt = True, self.writing
        if self.latest is not None and time.monotonic() - self._ended_s < DOUBT_S:
            self._suspects.append(self.latest)
            self.latest = None
        if not self.writing:  # else the thread that writes may be removing others
            self._take_back()

    def trust(self) -> None:
        """Write checkpoints again: state has come from the others; if it is wrong, they say so."""
        self._is_doubted = False

    def _take_back(self) -> None:
        suspects, self._suspects = self._suspects, []
        for written in suspects:
            self._last_digest = b""
            text = f"round {written.round} is taken back: it may have a copy of wrong bytes"
            try:
                self._writer.remove(written.path)
            except OSError as error:
                why = f"{written.path} may have wrong bytes and cannot be removed: {error.strerror}"
                self._daemon.note("disk", f"{why}; remove it, or a restart may begin with it")
            else:
                self._daemon.note("checkpoint", text)

    async def close(self) -> None:
        """Give up what is being written; a second call does no harm."""
        self._writer.stopped.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.idle.wait(), CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------ in the worker thread

    def _work(
        self,
        loop: asyncio.AbstractEventLoop,
        state: ReplicatedState,
        log: RoundLog,
        incarnation: int,
    ) -> None:
        written: WrittenCheckpoint | None = None
        kind, text = "disk", "the checkpoint ended by a defect: see the log"
        try:
            written = self._write(state, log, incarnation)
            kind, text = "checkpoint", _describe(written)
            if not self._spoilt:  # else older ones are all that is left
                self._folder.prune(written.path)
        except CheckpointError as error:
            kind, text = "disk", f"no checkpoint: what was written cannot be read: {error.what}"
        except (AtollError, MemoryError) as error:
            kind, text = "checkpoint", f"no checkpoint this time: {_reason(error)}"
        except OSError as error:
            what = "old checkpoints were not removed" if written else "no checkpoint"
            why = self._full(state) if error.errno in DISK_FULL else _reason(error)
            kind, text = "disk", f"{what}: {why}; next try when it is due again"
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended before us
                loop.call_soon_threadsafe(self._finished, written, kind, text)

    def _write(self, state: ReplicatedState, log: RoundLog, incarnation: int) -> WrittenCheckpoint:
        tries = 0
        while True:
            try:
                return self._writer.write(state, log, self._current_view, incarnation)
            except CheckpointError:
                raise
            except StateError:
                tries += 1
                if tries == TRIES or self._writer.stopped.is_set():
                    raise
            except OSError as error:
                view = self._current_view()
                if error.errno not in DISK_FULL or not self._folder.make_room(view):
                    raise

    def _full(self, state: ReplicatedState) -> str:
        """Return why there is no checkpoint on a full disk, with numbers."""
        space = os.statvfs(self._writer.folder)
        free = size(space.f_bavail * space.f_frsize)
        return (
            f"it takes {size(checkpoint_bytes(state))}, and {self._writer.folder} has {free} free"
        )

    def _current_view(self) -> View:
        assert self._view is not None  # committed() has set it
        return self._view

    # ------------------------------------------------------------ in the event loop again

    def _finished(self, written: WrittenCheckpoint | None, kind: str, text: str) -> None:
        spoilt, self._spoilt = self._spoilt, False
        if spoilt:
            self._suspects += [written] if written else []
            self._take_back()
        if spoilt and written:
            self.idle.set()
            return
        is_news = kind != "checkpoint" or self.latest is None or not self._quiet
        self.latest = written or self.latest
        self._ended_s = time.monotonic() if written else self._ended_s
        self._last_digest = self._last_digest if written else b""
        self.idle.set()
        if is_news and (written or not self._writer.stopped.is_set()):
            self._daemon.note(kind, text)
        elif written:
            self._daemon.note("saved", text)
        if written:
            self._daemon.checkpointed(written.round)

    def rounds(self, known: View | None) -> list[int]:
        """Return the rounds of the checkpoints of this history that are in the folder.

        ``known``: the view that names it while this process has committed nothing yet.
        """
        view = self._view or known
        history = (view.lineage, *view.ancestors) if view is not None else ()
        found = candidates(self._writer.folder, self._writer.run)
        manifests = readable(found, run=self._writer.run, secret=self._writer.secret)
        return [m.round for m in manifests.values() if m.lineage in history]


class CheckpointFolder:
    """Keep the finished checkpoints in a folder. Only those of this very run are ever removed."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer = writer
        self._whole: set[str] = set()  # names of those that this process has verified

    def prune(self, newest: Path) -> None:
        """Delete what is before the last KEPT whole ones of this lineage; ``newest`` is one.

        Lineages that it does not continue lose what has lower rounds than those, lest a mistake
        costs all.
        """
        self._whole.add(newest.name)
        run, secret = self._writer.run, self._writer.secret
        manifests = readable(candidates(newest.parent, run), run=run, secret=secret)
        if newest not in manifests:
            return  # somebody has taken it away
        mine, ordered, kept = manifests[newest], latest_first(manifests), 1
        oldest = mine.round
        for path in ordered[ordered.index(newest) + 1 :]:
            found = manifests[path]
            if kept < KEPT:
                if found.lineage == mine.lineage and self._is_whole(path):
                    kept, oldest = kept + 1, found.round
            elif found.lineage in (mine.lineage, *mine.ancestors) or found.round < oldest:
                self._writer.remove(path)
                self._whole.discard(path.name)

    def make_room(self, view: View) -> bool:
        """Delete the oldest checkpoint of this history, if a later one is whole.

        That one is read for it, since it may be all that is left. Returns whether there was one to
        delete.
        """
        run, secret = self._writer.run, self._writer.secret
        manifests = readable(candidates(self._writer.folder, run), run=run, secret=secret)
        history = (view.lineage, *view.ancestors)
        ordered = [path for path in latest_first(manifests) if manifests[path].lineage in history]
        self._whole.clear()
        newest = next((path for path in ordered if self._is_whole(path)), None)
        if newest is None or newest == ordered[-1]:
            return False
        self._writer.remove(ordered[-1])
        return True

    def room_bytes(self) -> int:
        """Return the bytes that this run's checkpoints have, and may have beside, on their disk."""
        space = os.statvfs(self._writer.folder)
        return space.f_bavail * space.f_frsize + self.taken_bytes()

    def taken_bytes(self) -> int:
        """Return the bytes that this run's checkpoints have."""
        taken = 0
        for path in candidates(self._writer.folder, self._writer.run):
            with contextlib.suppress(OSError):  # not whole
                taken += os.stat(path / STATE_FILE).st_size
        return taken

    def _is_whole(self, path: Path) -> bool:
        if path.name not in self._whole:
            try:
                with open_checkpoint(path) as checkpoint:
                    checkpoint.check_chunks()
            except CheckpointError:
                return False
            self._whole.add(path.name)
        return True


def checkpoint_bytes(state: ReplicatedState) -> int:
    """Return the bytes of a checkpoint of ``state``; its manifest has some KiB on top."""
    return StateLayout.of(state.spec, state.manifest, 0, bytes(32)).total_bytes


def _describe(written: WrittenCheckpoint) -> str:
    return (
        f"round {written.round} is in {written.path}: {size(written.nbytes)}, verified, in"
        f" {duration(written.elapsed_s)}"
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, AtollError):
        return error.what
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
