"""Keep what is needed of local steps, so that others can take them again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from atoll.collectives.errors import CheckpointError, ConfigError
from atoll.optim.replay.checkpoint import WorkCheckpoint, leaf_of
from atoll.optim.replay.difference import Tolerance
from atoll.optim.replay.replaying import ReplayTask, TrainingState
from atoll.optim.replay.step_disclosure import (
    SEGMENTS_MAX,
    Batch,
    Extent,
    RoundEnding,
    StepDisclosure,
    Steps,
    WorkCommitment,
    batches_leaf,
    check_step,
    pack,
)
from atoll.optim.run_spec import SYNC_EVERY_MAX
from atoll.optim.saved_values import Stateful
from atoll.peer.client.console import say

KEPT = 2  # rounds: the one that is audited, and the one under way, whose start it must fit
# Enough for rounds of 100 steps of a model of 8 million parameters with AdamW, in segments of 10.
MEMORY_BYTES = 2 << 30


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Keep each round's work for ``replay()``; ``DiLoCo.note_batch`` is to be called then.

    ``segment_steps``: local steps between two checkpoints. Fewer are replayed sooner, and agree on
    machines that differ: take 20 at most there, and 5 in mixed precision. But each checkpoint takes
    room. ``stateful``: by name, what else the steps depend on: a GradScaler. A scheduler is
    not among them, because rates follow from ``global_step``. ``rng``: keep the states of torch's
    random numbers at each batch, for models with dropout; 5 KB each.

    ``task`` makes what takes steps of others again, in a run with validators, and ``tolerance``
    says how far they may differ then; ``segment_steps`` and ``tolerance`` must be equal on all
    peers of such a run.

    Checkpoints are in memory, at most ``memory_bytes`` of them, or in a ``folder`` of this
    trainer's own.
    """

    segment_steps: int = 10
    task: Callable[[], ReplayTask] | None = None
    tolerance: Tolerance = field(default_factory=Tolerance)
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    rng: bool = False
    folder: Path | str | None = None
    memory_bytes: int = MEMORY_BYTES

    def check(self, sync_every: int) -> None:
        """Raise ConfigError if it does not suit rounds of so many steps."""
        if not 0 < self.segment_steps <= SYNC_EVERY_MAX:
            raise ConfigError(f"segment_steps={self.segment_steps}", fix="give 1 or more steps")
        if self.segments(sync_every) > SEGMENTS_MAX:
            raise ConfigError(
                f"{sync_every} steps in segments of {self.segment_steps} are "
                f"{self.segments(sync_every)} segments; at most {SEGMENTS_MAX} are kept",
                fix="give larger segment_steps",
            )

    def segments(self, sync_every: int) -> int:
        return -(-sync_every // self.segment_steps)

    def store(self) -> WorkStore:
        if self.folder is not None:
            return FolderStore(Path(self.folder))
        return MemoryStore(self.memory_bytes)


@dataclass
class RecordedWork:
    """Hold the steps of a round: a checkpoint before each segment, and one at the end.

    Of each checkpoint the digests of its parts are here.
    """

    number: int
    base: int
    first_step: int
    digests: list[bytes] = field(default_factory=list)
    segments: list[Steps] = field(default_factory=list)
    commitment: WorkCommitment | None = None
    misses: int = 0


class Recorder:
    """Record the local steps of one trainer, which tells it what happens.

    The trainer calls ``begin`` for a round from the run's parameters, ``note`` for a batch,
    ``stepped``, and after a submission ``committed`` or ``missed``.

    ``planned``: how many checkpoints it keeps where no round is missed.
    """

    def __init__(self, replay: Replay, state: TrainingState, sync_every: int) -> None:
        replay.check(sync_every)
        self._replay, self._state = replay, state
        self.planned = KEPT * (replay.segments(sync_every) + 1)  # checkpoints
        self._store = replay.store()
        self._works = 0
        self._now: RecordedWork | None = None  # None: it was given up
        self._last: RecordedWork | None = None  # the round before, until it is committed
        self._kept: dict[
            int, tuple[RecordedWork, RecordedWork | None]
        ] = {}  # by round; the one before it
        self._batches: list[Batch] = []  # since the last step
        self._at_boundary = True

    # ------------------------------------------------------------ what the trainer tells

    def begin(self, base: int, first_step: int) -> None:
        """Begin a round: the model has the run's parameters after round ``base``."""
        if self._now is not None and not self._is_kept(self._now):
            self._store.drop(self._now.number)
        self._works += 1
        self._now = RecordedWork(self._works, base, first_step)
        self._batches.clear()
        self._at_boundary = True

    def rewind(self) -> None:
        """Drop the steps since ``begin``.

        Inner optimizers, buffers and ``stateful`` objects are as they were before them, so that the
        next round goes on from the last one that counted. The parameters as well, but those are the
        run's in a moment.
        """
        if self._now is not None and self._now.digests and not self._is_kept(self._now):
            self._state.load(WorkCheckpoint.decode(self._store.get(self._now.number, 0)))

    def forget(self) -> None:
        """Forget the last round, from which nothing goes on.

        Somebody has loaded another state.
        """
        if self._now is not None and not self._is_kept(self._now):
            self._store.drop(self._now.number)
        self._now = self._last = None

    def note(self, indices: Iterable[int] | np.ndarray | Tensor) -> None:
        """Note the batch whose forward pass comes next; ConfigError for what is not kept."""
        values = indices.cpu().numpy() if isinstance(indices, Tensor) else indices
        array = np.asarray(values if isinstance(values, np.ndarray) else list(values)).reshape(-1)
        if array.size and not np.issubdtype(array.dtype, np.integer):
            raise ConfigError(
                f"note_batch() with values of {array.dtype}", fix="give the integers of its samples"
            )
        rng = self._state.random_states() if self._replay.rng else (b"", b"")
        self._batches.append(Batch(array.astype(np.int64), rng))
        check_step(tuple(self._batches))
        if self._at_boundary and self._now is not None:
            # Only now: after the last step its scheduler and GradScaler have moved on.
            self._take_checkpoint()
            if self._now is not None:
                self._now.segments.append([])
        self._at_boundary = False

    def stepped(self, is_last: bool) -> None:
        """Note that a local step is complete, and the round's steps are, if it was the last.

        ConfigError if nobody has noted its batch.
        """
        if not self._batches:
            raise ConfigError(
                "a local step without note_batch(): it could not be replayed",
                fix="call note_batch(indices) before the forward pass of each batch",
            )
        step, self._batches = tuple(self._batches), []
        if self._now is None:
            return
        segment = self._now.segments[-1]
        segment.append(step)
        self._at_boundary = len(segment) == self._replay.segment_steps
        if is_last:
            self._take_checkpoint()
            self._commit()

    def missed(self) -> None:
        """Note that a round went on without it; its steps will count for the next one."""
        if self._now is None:
            return
        self._now.misses += 1
        self._now.commitment = None
        self._now.digests.pop()
        self._store.drop(self._now.number, len(self._now.digests))
        self._at_boundary = len(self._now.segments[-1]) == self._replay.segment_steps

    def committed(self, round_number: int) -> None:
        """Note that what was submitted is in this round; older ones are forgotten."""
        if self._now is not None:
            for work, _ in self._kept.values():  # also of later rounds, if some were undone
                self._store.drop(work.number)
            self._kept = {round_number: (self._now, self._last)}
        self._last = self._now

    # ------------------------------------------------------------ what validators are told

    def commitment(self, round_number: int | None = None) -> WorkCommitment | None:
        """Return the commitment to what was submitted last, or to what is in a round.

        None if it is not kept.
        """
        if round_number is None:
            return None if self._now is None else self._now.commitment
        work = self._kept.get(round_number)
        return None if work is None else work[0].commitment

    def opening(self, round_number: int, segment: int, *, whole: bool = True) -> StepDisclosure:
        """Return the opening of a segment of a round that is kept.

        ``whole``: with all of the segment's end, not its digests only. ConfigError if there is
        none, CheckpointError if it cannot be read.
        """
        work, before = self._kept.get(round_number, (None, None))
        commitment = work.commitment if work is not None else None
        if work is None or commitment is None or not 0 <= segment < commitment.extent.segments:
            raise ConfigError(
                f"segment {segment} of round {round_number} is not kept; rounds "
                f"{sorted(self._kept)} are"
            )
        number, at = work.number, 2 * segment
        return StepDisclosure(
            commitment.extent,
            segment,
            self._store.get(number, segment),
            commitment.proof(at),
            pack(work.segments[segment]),
            commitment.proof(at + 1),
            self._store.get(number, segment + 1) if whole else work.digests[segment + 1],
            commitment.proof(at + 2),
            _ending(before) if segment == 0 else None,
        )

    def close(self) -> None:
        """Drop all checkpoints: nobody asks any more."""
        for number in range(1, self._works + 1):
            self._store.drop(number)

    # ------------------------------------------------------------ inside

    def _is_kept(self, work: RecordedWork) -> bool:
        return any(work is kept for kept, _ in self._kept.values())

    def _take_checkpoint(self) -> None:
        work = self._now
        assert work is not None
        checkpoint = self._state.capture()
        data = checkpoint.encode()
        if isinstance(self._store, MemoryStore) and not work.misses:
            self._check_room(len(data))
        if work.misses and not self._has_room(work, len(data)):
            # Steps of several rounds are more than was planned, and no reason to end a trainer.
            say(
                "the steps of several missed rounds take too much room to be kept; this "
                "trainer cannot be audited until its next round begins"
            )
            self._store.drop(work.number)
            self._now = None
            return
        self._store.put(work.number, len(work.digests), data)
        work.digests.append(checkpoint.digests())

    def _has_room(self, work: RecordedWork, nbytes: int) -> bool:
        store = self._store
        too_much = isinstance(store, MemoryStore) and store.used_bytes + nbytes > store.bytes_max
        return not too_much and len(work.digests) <= SEGMENTS_MAX

    def _check_room(self, nbytes: int) -> None:
        """Raise ConfigError early, and not when memory is full."""
        planned = self.planned * nbytes
        if planned > self._replay.memory_bytes:
            raise ConfigError(
                f"{self.planned} checkpoints of {nbytes:,} bytes, those of {KEPT} rounds, take "
                f"{planned:,} bytes; replay may take {self._replay.memory_bytes:,} of memory",
                fix="give Replay a folder, larger segment_steps, or a larger memory_bytes",
            )

    def _commit(self) -> None:
        work = self._now
        if work is None:
            return
        steps = sum(map(len, work.segments))
        extent = Extent(work.base, work.first_step, steps, self._replay.segment_steps)
        leaves = [leaf_of(work.digests[0])]
        for segment, digests in zip(work.segments, work.digests[1:], strict=True):
            leaves += [batches_leaf(pack(segment)), leaf_of(digests)]
        work.commitment = WorkCommitment(extent, leaves)


def _ending(work: RecordedWork | None) -> RoundEnding | None:
    if work is None or work.commitment is None:
        return None
    commitment = work.commitment
    proof = commitment.proof(commitment.extent.leaves - 1)
    return RoundEnding(commitment.extent, work.digests[-1], proof)


# ---------------------------------------------------------------- stores of checkpoints


class WorkStore(Protocol):
    """Keep encoded checkpoints of works, by their numbers."""

    def put(self, work: int, number: int, data: bytearray, /) -> None: ...

    def get(self, work: int, number: int, /) -> bytes | bytearray: ...

    def drop(self, work: int, number: int | None = None, /) -> None:
        """Drop one checkpoint, or all of a work, if they are there."""
        ...


class MemoryStore:
    """Keep checkpoints in memory; ``used_bytes`` never exceed ``bytes_max``."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max, self.used_bytes = bytes_max, 0
        self._kept: dict[tuple[int, int], bytearray] = {}

    def put(self, work: int, number: int, data: bytearray) -> None:
        """Keep a checkpoint; ConfigError if there is no room for it."""
        if self.used_bytes + len(data) > self.bytes_max:
            raise ConfigError(
                f"checkpoints for replays take more than {self.bytes_max:,} bytes of memory",
                fix="give Replay a folder, a larger memory_bytes, or larger segment_steps",
            )
        self._kept[work, number] = data
        self.used_bytes += len(data)

    def get(self, work: int, number: int) -> bytearray:
        return self._kept[work, number]

    def drop(self, work: int, number: int | None = None) -> None:
        for key in [k for k in self._kept if k[0] == work and number in (None, k[1])]:
            self.used_bytes -= len(self._kept.pop(key))


class FolderStore:
    """Keep checkpoints in files like ``folder/work-000012/003.safetensors``.

    The folder belongs to one trainer: what an earlier one has left there is removed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for old in folder.glob("work-*"):
                shutil.rmtree(old)
        except OSError as error:
            raise ConfigError(
                f"the folder for replays, {folder}, cannot be used: {error}",
                fix="give one that this trainer alone may write to",
            ) from error

    def put(self, work: int, number: int, data: bytearray) -> None:
        """Write a checkpoint; CheckpointError if it cannot be written."""
        path = self._path(work, number)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)  # they are the model: for its user alone
            path.write_bytes(data)
        except OSError as error:
            raise CheckpointError(
                f"a checkpoint for replays cannot be written: {error}",
                fix="free some space there, or give Replay another folder",
            ) from error

    def get(self, work: int, number: int) -> bytes:
        """Read a checkpoint; CheckpointError if it cannot be read."""
        try:
            return self._path(work, number).read_bytes()
        except OSError as error:
            raise CheckpointError(f"a checkpoint for replays cannot be read: {error}") from error

    def drop(self, work: int, number: int | None = None) -> None:
        if number is None:
            shutil.rmtree(self._path(work, 0).parent, ignore_errors=True)
        else:
            self._path(work, number).unlink(missing_ok=True)

    def _path(self, work: int, number: int) -> Path:
        return self._folder / f"work-{work:06d}" / f"{number:03d}.safetensors"
