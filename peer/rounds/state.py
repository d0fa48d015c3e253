"""Hold the replicated state of a run, outer parameters and momentum, and commit rounds to it.

There is one buffer, and a commit changes it in its place, chunk by chunk: a second one would be as
large as the parameters and momentum again. Readers do not wait for each other. Each chunk has a
*sequence number*, which is odd from the moment in which a commit begins to write to it until the
commit is complete: who copies a chunk looks at the number before and after, and copies again if it
has changed. Who needs the whole of one round looks at the state's ``generation`` in the same way
(as in a seqlock, Boehm, "Can seqlocks get along with programming language memory models?", 2012).

Each chunk has a *leaf*, the digest of its parameters and momentum; the digest of the state covers
the run's specification and the Merkle root of the leaves, so equal digests mean equal runs, bit for
bit.

A commit cannot be taken back here: the outer step has no inverse in floating point. The state of a
round before is that of a checkpoint and the rounds since (rewinding.py), or comes from others.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll.collectives import ChunkGrid, EncodedLayout, encoded_layout, get_codec
from atoll.collectives.chunks import CHUNK_ELEMENTS_MAX
from atoll.collectives.codecs import Decoder
from atoll.collectives.digests import strong_digest
from atoll.collectives.errors import StateError
from atoll.collectives.merkle import MerkleTree
from atoll.optim.manifest import Manifest, fragment_grid
from atoll.optim.outer_step import OuterStep, momentum_layout
from atoll.optim.pseudo_gradient import delta_source
from atoll.optim.run_spec import RunSpec, parse_blob
from atoll.peer.client.shared_memory import Region
from atoll.peer.rounds.entries import INIT, OPERATIONS, STEP, EntryHead

Floats: TypeAlias = NDArray[np.float32]
U8: TypeAlias = NDArray[np.uint8]
Bytes: TypeAlias = bytes | bytearray | memoryview | U8
CHUNK_COPY_BYTES_MAX = 8 * CHUNK_ELEMENTS_MAX  # parameters and momentum, however it is kept
READ_TRIES = 8  # a copy takes under a millisecond, a commit that changes the chunk much longer
COMMIT_WAIT_S = 60.0  # for a commit to be complete: 1B parameters take 5 s, on a busy machine more
_FLOAT32 = get_codec("float32")  # of INIT, whatever the run's codec
_serials = itertools.count(1)  # tells a trainer that it has to map another state


def state_digest(blob: bytes, root: bytes) -> bytes:
    """Return the digest of a state.

    ``root`` is the Merkle root of the leaves, ``blob`` the run's specification.
    """
    return hashlib.sha256(hashlib.sha256(blob).digest() + root).digest()


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """Describe what ``read_chunk`` has copied: a chunk of the state after ``round``.

    ``proof`` leads from ``leaf`` to the Merkle root in that state's digest (collectives/merkle.py).
    """

    round: int
    leaf: bytes
    proof: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Position:
    """Describe a state: replaced in one step, so that readers see what belongs together."""

    round: int
    versions: tuple[int, ...]  # of each chunk: the round that it is of
    tree: MerkleTree | None  # None before INIT
    digest: bytes


class ReplicatedState:
    """Hold the outer parameters θ and the momentum b of a run.

    ``shared`` holds θ, float32[elements], for the trainer to map, and after it b in the bytes that
    the run keeps of it (``momentum_layout``). It is another memory,
    with another ``serial``, after a load. ``generation`` is counted up when a commit begins and
    when it ends: it is odd in between.

    Any thread may read; whoever reads in place checks serial and ``generation`` before and after.
    One thread at a time commits (``apply``) or loads.
    """

    def __init__(self, blob: bytes, progress: Callable[[int], None] | None = None) -> None:
        self.blob = blob
        self.serial = next(_serials)
        self.spec, self.manifest = parse_blob(blob)
        self.grid = self.manifest.grid
        self._buffers = StateBuffers(self.spec, self.manifest, progress)
        self.generation = 0
        self._sequence = [0] * self.grid.count  # of each chunk
        self._complete = threading.Event()  # no commit is under way
        self._complete.set()
        self._now = _Position(0, (0,) * self.grid.count, None, b"")
        self._writing = threading.Lock()
        self._load: StateLoad | None = None

    # ------------------------------------------------------------ what it is

    @property
    def round(self) -> int:
        return self._now.round

    @property
    def shared(self) -> Region:
        return self._buffers.shared

    @property
    def theta(self) -> Floats:
        return self._buffers.theta

    @property
    def momentum(self) -> U8:
        return self._buffers.momentum

    @property
    def digest(self) -> bytes:
        """Return the digest of the state; empty before INIT, as are ``root`` and ``leaves``."""
        return self._now.digest

    @property
    def root(self) -> bytes:
        tree = self._now.tree
        return tree.root if tree else b""

    @property
    def place(self) -> tuple[int, bytes] | None:
        """Return round and root, which belong together; None before INIT."""
        now = self._now
        return (now.round, now.tree.root) if now.tree is not None else None

    @property
    def leaves(self) -> tuple[bytes, ...]:
        tree = self._now.tree
        return tree.leaves if tree else ()

    def version(self, chunk: int) -> int:
        """Return the round that last changed the chunk, or a later one that did not."""
        return self._now.versions[chunk]

    def chunks_of(self, fragment: int) -> tuple[int, int]:
        """Return the chunks [first, end) of a fragment."""
        return self.manifest.chunks_of(fragment, self.spec.fragments)

    def chunks_in(self, head: EntryHead) -> range:
        """Return the chunks that an entry changes."""
        if head.kind == STEP:
            return range(*self.chunks_of(head.fragment))
        return range(self.grid.count if head.kind == INIT else 0)

    def fragment_grid(self, fragment: int) -> ChunkGrid:
        """Return the grid of a fragment's reduction; its chunk 0 is ``chunks_of(fragment)[0]``."""
        return fragment_grid(self.grid, *self.chunks_of(fragment))

    def codec_of(self, head: EntryHead) -> Decoder:
        """Return the decoder of the bytes of an entry."""
        return self._buffers.codec(head)

    def layout(self, head: EntryHead) -> EncodedLayout:
        """Return where the chunks that an entry changes lie in R, counted from 0."""
        return self._buffers.layout(head, self.chunks_in(head))

    @property
    def result_bytes(self) -> int:
        """Return about how many bytes R of a round has, of the largest fragment."""
        codec = self.spec.result_codec((1.0,))
        return encoded_layout(self.fragment_grid(0), codec).total_bytes

    def chunk_bytes(self, chunk: int) -> int:
        """Return the size of a chunk's parameters and momentum in bytes."""
        return self._buffers.chunk_bytes(chunk)

    def close(self) -> None:
        self.shared.close()

    # ------------------------------------------------------------ reading

    def delta_of(self, submission: Floats, fragment: int = 0) -> Callable[[int, Floats], None]:
        """Return the source of a reduction: it gives Δ of one chunk of a fragment.

        Chunks are counted from 0. Δ is computed from the state as it is now; valid until a later
        round of this fragment is applied.
        """
        return delta_source(self.spec, self.manifest, self.theta, submission, fragment)

    def read_chunk(self, chunk: int, out: memoryview) -> ChunkCopy:
        """Copy a chunk's parameters, then its momentum, to the beginning of ``out``.

        Commits may happen meanwhile: this waits for the end of one that has begun with the chunk,
        so it is not for the event loop. StateError if there is no state yet, or if no copy is
        whole.
        """
        nbytes = self.chunk_bytes(chunk)
        if out.nbytes < nbytes:
            raise StateError(f"chunk {chunk} has {nbytes} bytes, the memory for it {out.nbytes}")
        target = np.frombuffer(out, np.uint8)[:nbytes]
        for _ in range(READ_TRIES):
            sequence = self._sequence[chunk]  # before the rest, which may be newer but not older
            buffers, now = self._buffers, self._now
            if now.tree is None:
                raise StateError("there is no state to read yet", fix="wait for the first round")
            if sequence % 2:
                self.wait_complete()
                continue
            np.concatenate(buffers.parts(chunk), out=target)
            if self._sequence[chunk] == sequence:
                return ChunkCopy(now.round, now.tree.leaves[chunk], now.tree.proof(chunk), nbytes)
        raise StateError(
            f"chunk {chunk} of round {self.round} was overwritten in each of {READ_TRIES} reads",
            fix="read it again; rounds commit faster than memory can be copied",
        )

    def mark_of(self, fragment: int) -> int:
        """Return a number that is another one after each commit of a fragment; odd during one."""
        return self._sequence[self.chunks_of(fragment)[0]]

    @property
    def is_changing(self) -> bool:
        """Return whether a commit is under way."""
        return self.generation % 2 == 1

    def wait_complete(self) -> None:
        """Wait until no commit is under way. StateError if one does not end."""
        if not self._complete.wait(COMMIT_WAIT_S):
            raise StateError(
                f"the commit of round {self.round + 1} has not ended for {COMMIT_WAIT_S:.0f} s",
                fix="start this peer again if its log says no more: it goes on from its disk",
            )

    # ------------------------------------------------------------ commits

    def apply(
        self, head: EntryHead, encoded: U8, applied: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Do the outer step of a committed round, from the exact bytes that everyone holds.

        Or log entry 1: the first trainer's θ as float32, and momentum is zero.

        StateError if it is not the next round or of another size; then the state stays what it was.
        CodecError for malformed bytes, which were checked when they came: then it is torn, and what
        the round would have changed can be read no more until a load. A load that is under way is
        given up. ``applied`` is told the bytes of each chunk that is done.
        """
        with self._writing:
            self._commit(head, encoded, applied)

    @property
    def is_written(self) -> bool:
        """Return whether somebody changes the state at this moment."""
        return self._writing.locked()

    def rename(self, round_number: int) -> None:
        """Be the state after another round: between the two there were operations only."""
        with self._writing:
            self._end_load()
            self._now = replace(self._now, round=round_number)

    # ------------------------------------------------------------ with the lock held

    def _commit(self, head: EntryHead, encoded: U8, applied: Callable[[int], None]) -> None:
        now, number = self._now, head.round
        if number != now.round + 1 or (head.kind == INIT) != (now.tree is None):
            raise StateError(f"{head.kind} of round {number} does not follow {now.round}")
        if head.kind in OPERATIONS:
            self._end_load()
            self._now = replace(now, round=number)
            return
        buffers, chunks, layout = self._buffers, self.chunks_in(head), self.layout(head)
        if encoded.nbytes != layout.total_bytes:
            raise StateError(f"round {number} has {encoded.nbytes} bytes, not {layout.total_bytes}")
        self._end_load()
        leaves = list(self.leaves) or [b""] * self.grid.count
        versions = list(now.versions)
        self._begin_change()
        for chunk in chunks:
            start, end = layout.slice(chunk - chunks.start)
            self._sequence[chunk] += 1 + self._sequence[chunk] % 2  # odd after a failed one
            buffers.step(head, chunk, encoded[start:end])
            leaves[chunk] = buffers.leaf(chunk)
            versions[chunk] = number
            applied(self.chunk_bytes(chunk))
        self._now = self._position(number, versions, leaves)
        self._end_change()

    def _position(self, number: int, versions: list[int], leaves: list[bytes]) -> _Position:
        tree = MerkleTree(leaves)
        return _Position(number, tuple(versions), tree, state_digest(self.blob, tree.root))

    def _begin_change(self) -> None:
        self._complete.clear()
        self.generation += 1 + self.generation % 2  # odd already where a commit has failed

    def _end_change(self) -> None:
        """Let readers in, once the position is the new one: see read_chunk."""
        self._sequence = [number + number % 2 for number in self._sequence]
        self.generation += 1
        self._complete.set()

    def _take_over(self, buffers: StateBuffers, position: _Position) -> None:
        """Go on with what was loaded, in its own memory."""
        self._begin_change()
        self._sequence = [number + 1 + number % 2 for number in self._sequence]
        if buffers is not self._buffers:
            self._buffers, self.serial = buffers, next(_serials)
        self._now = position
        self._end_change()

    def _end_load(self) -> None:
        """Give up the load that is under way, and its memory."""
        load, self._load = self._load, None
        if load is not None:
            load.let_go()


class StateLoad:
    """Put a state together, chunk by chunk, beside the one that stays in use meanwhile.

    Chunks may be of different rounds; ``replay`` brings them forward. Who fills it checks what it
    gets; here only the whole is compared with a digest. Any thread may call it. A commit and a
    newer load end it: then every method that writes raises StateError.

    It takes the memory of a second state, unless there is none yet. Raises ConfigError without it.
    """

    def __init__(self, state: ReplicatedState) -> None:
        self._state = state
        self._versions = [-1] * state.grid.count
        self._cancelled = False
        with state._writing:
            is_first = not state.leaves
            state._end_load()
            beside = None if is_first else StateBuffers(state.spec, state.manifest)
            self._buffers = beside or state._buffers
            state._load = self

    @property
    def is_open(self) -> bool:
        """Return whether it goes on: no commit, newer load or ``cancel`` has ended it."""
        return not self._cancelled and self._state._load is self

    def has(self, chunk: int) -> bool:
        return self._versions[chunk] >= 0

    def leaf(self, chunk: int) -> bytes:
        """Return the hash of a chunk's bytes as they are; may be empty.

        Of what was put, else of the current state's.
        """
        state = self._state
        if not self.has(chunk) and not state.leaves:
            return b""
        return (self._buffers if self.has(chunk) else state._buffers).leaf(chunk)

    def confirm(self, chunk: int, version: int) -> None:
        """Declare the chunk that was put that of round ``version``, whatever it was said to be."""
        with self._state._writing:
            self._check_open()
            if not self.has(chunk):
                raise StateError(f"chunk {chunk} is missing and cannot be of round {version}")
            self._versions[chunk] = version

    def version(self, chunk: int) -> int:
        """Return the round that the chunk is of; -1 while it is missing."""
        return self._versions[chunk]

    def put(self, chunk: int, version: int, data: Bytes) -> None:
        """Take a chunk as ``read_chunk`` copies it, of the state after round ``version``."""
        values = np.frombuffer(data, np.uint8)
        if values.size != self._state.chunk_bytes(chunk):
            expected = self._state.chunk_bytes(chunk)
            raise StateError(f"chunk {chunk} has {values.size} bytes, not {expected}")
        theta, momentum = np.split(values, [4 * self._state.grid.size(chunk)])
        self._fill(chunk, version, (theta, momentum))

    def keep(self, chunk: int, version: int) -> None:
        """Take the current state's own chunk: in round ``version`` it was the same."""
        if not self._state.leaves:
            raise StateError("there is no state to keep chunks of")
        state = self._state
        self._fill(chunk, version, state._buffers.parts(chunk))

    def replay(self, head: EntryHead, encoded_chunk: Bytes, chunk: int) -> bool:
        """Bring ``chunk`` (of the whole vector) to the entry's round; False if it is there already.

        The caller replays every entry of the chunk's fragment in order; INIT needs no chunk.
        CodecError for malformed bytes.
        """
        state = self._state
        chunks = state.chunks_in(head)
        data = np.frombuffer(encoded_chunk, np.uint8)
        with state._writing:
            self._check_open()
            if chunk not in chunks or not (self.has(chunk) or head.kind == INIT):
                raise StateError(f"round {head.round} cannot be replayed on chunk {chunk}")
            if self._versions[chunk] >= head.round:
                return False
            expected = state.layout(head).size(chunk - chunks.start)
            if data.size != expected:
                raise StateError(f"chunk {chunk} takes {expected} encoded bytes, not {data.size}")
            self._buffers.step(head, chunk, data)
            self._versions[chunk] = head.round
        return True

    def finish(self, round_number: int, digest: bytes = b"") -> None:
        """Make the load the current state, of that round, with the leaves of what is there.

        StateError while a chunk is missing or newer, or if ``digest`` is given and not the state's;
        then nothing has happened, and chunks may be put again.
        """
        state = self._state
        with state._writing:
            self._check_open()
            wrong = [c for c, v in enumerate(self._versions) if not 0 <= v <= round_number]
            if wrong:
                raise StateError(
                    f"{len(wrong)} chunks are not of round {round_number} or before, the first is"
                    f" {wrong[0]} of round {self._versions[wrong[0]]}"
                )
            leaves = [self._buffers.leaf(chunk) for chunk in range(state.grid.count)]
            self._check_open()  # hashing takes a second per 2 GB: it may have been cancelled
            loaded = state._position(round_number, self._versions, leaves)
            if digest and loaded.digest != digest:
                raise StateError(
                    f"the state of round {round_number} has digest {loaded.digest.hex()[:16]},"
                    f" not {digest.hex()[:16]}"
                )
            state._take_over(self._buffers, loaded)
            state._load = None

    def let_go(self) -> None:
        """Drop the memory of a load that has ended: nothing is written any more."""
        self._buffers = self._state._buffers

    def cancel(self) -> None:
        """Give up the load without waiting.

        What is being written ends before the next commit begins.
        """
        self._cancelled = True

    def _fill(self, chunk: int, version: int, parts: tuple[U8, U8]) -> None:
        state = self._state
        with state._writing:
            self._check_open()
            self._buffers.fill(chunk, parts)
            self._versions[chunk] = version

    def _check_open(self) -> None:
        if self._cancelled or self._state._load is not self:
            raise StateError("this load of the state was given up", fix="begin another one")


class StateBuffers:
    """Hold parameters θ and momentum b. One thread at a time writes.

    ``shared`` holds θ, float32[elements], and the bytes of b. ``progress``: see ``Region``.
    """

    def __init__(
        self, spec: RunSpec, manifest: Manifest, progress: Callable[[int], None] | None = None
    ) -> None:
        count = manifest.elements
        self.grid, self._manifest = manifest.grid, manifest
        self._spec, self._step = spec, OuterStep(spec, self.grid.chunk_elements)
        self._kept = momentum_layout(spec, self.grid)
        self.shared = Region("state", count + -(-self._kept.total_bytes // 4), progress)
        self.theta = self.shared.floats[:count]
        self.momentum: U8 = self.shared.floats[count:].view(np.uint8)[: self._kept.total_bytes]

    def codec(self, head: EntryHead) -> Decoder:
        """Return the decoder of the bytes of an entry.

        Where every participant has a slot in them, they are of one attempt: such rounds keep no
        chunks.
        """
        return _FLOAT32 if head.kind == INIT else self._spec.result_codec(head.origin(0).weights)

    def layout(self, head: EntryHead, chunks: range) -> EncodedLayout:
        """Return where ``chunks`` lie in the encoded bytes of an entry that consists of them."""
        lo, hi = self.grid.bounds(chunks.start)[0], self.grid.bounds(chunks.stop - 1)[1]
        return encoded_layout(ChunkGrid(hi - lo, self.grid.chunk_elements), self.codec(head))

    def step(self, head: EntryHead, chunk: int, encoded: U8) -> None:
        """Apply one chunk of an entry, in its place.

        CodecError for malformed bytes; then nothing is written.
        """
        theta, momentum = self._theta(chunk), self._momentum(chunk)
        if head.kind != INIT:
            first, _ = self._manifest.chunks_of(head.fragment, self._spec.fragments)
            self._step(
                self.codec(head),
                encoded,
                theta,
                momentum,
                round_number=head.round,
                contributors=head.origin(chunk - first).contributors,
            )
            return
        if not np.may_share_memory(encoded, theta):  # else it was received where it belongs
            _FLOAT32.decode(encoded, theta)
        self._step.begin(momentum, theta.size)

    def leaf(self, chunk: int) -> bytes:
        """Return the digest of a chunk's parameters and momentum."""
        theta, momentum = self.parts(chunk)
        return strong_digest(theta, momentum)

    def parts(self, chunk: int) -> tuple[U8, U8]:
        """Return the bytes of a chunk's parameters and of its momentum, in place."""
        return self._theta(chunk).view(np.uint8), self._momentum(chunk)

    def chunk_bytes(self, chunk: int) -> int:
        """Return how many these are."""
        return 4 * self.grid.size(chunk) + self._kept.size(chunk)

    def fill(self, chunk: int, parts: tuple[U8, U8]) -> None:
        """Overwrite a chunk with the bytes of parameters and momentum, as ``parts`` gives them."""
        for target, source in zip(self.parts(chunk), parts, strict=True):
            np.copyto(target, source)

    def _theta(self, chunk: int) -> Floats:
        lo, hi = self.grid.bounds(chunk)
        return self.theta[lo:hi]

    def _momentum(self, chunk: int) -> U8:
        start, end = self._kept.slice(chunk)
        return self.momentum[start:end]
