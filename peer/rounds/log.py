"""Keep the last committed rounds: what laggards, joiners and checkpoints replay.

Entries are contiguous, oldest first. Where this peer keeps R of its rounds on its disk, that is
where R is read from as soon as it is there, and the log reaches back as far as the files do:
whoever was away for a while gets the rounds that it has missed, and need not fetch the state. What
is in memory only goes when the cap is reached, the oldest first. Every method may be called in any
thread.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.optim.footprint import (
    LOG_BYTES_DEFAULT,
    LOG_ENTRIES_MAX,
    LOG_ENTRIES_MIN,
    PINNED_FACTOR,
    SPARES_MAX,
)
from atoll.peer.durable.round_files import RoundFiles, RoundName
from atoll.peer.rounds.entries import STEP, EntryHead

U8 = NDArray[np.uint8]
DIGESTS_MAX = 1024  # rounds whose state digest is remembered, also when the entry is gone


@dataclass(slots=True)
class _LoggedRound:
    """Keep one entry of the log with its bytes; without them where only the disk has them."""

    head: EntryHead
    encoded: U8 | None
    lent: bool = False  # somebody outside may read it: its memory is not used again

    @property
    def nbytes(self) -> int:
        named = sum(len(origin.participants) for origin in self.head.origins)
        nbytes = self.encoded.nbytes if self.encoded is not None else 0
        return nbytes + len(self.head.origin_of) + len(self.head.blob) + 40 * named

    @property
    def place(self) -> tuple[int, bytes]:
        return self.head.round, self.head.root


class RoundLog:
    """Keep the entries ``first`` to ``last``.

    There are none if ``first`` is ``last + 1``, as at the beginning. ``cap_bytes`` may be set at
    any time (``optim.spec.log_cap_bytes`` when the model is known). ``files``: where this peer
    keeps R of its rounds, if it does.
    """

    def __init__(self, cap_bytes: int = LOG_BYTES_DEFAULT, files: RoundFiles | None = None) -> None:
        self.cap_bytes = cap_bytes
        self._files = files
        self._stored: dict[tuple[int, bytes], RoundName] = {}  # (round, root) -> its file
        self._lock = threading.Lock()
        self._entries: deque[_LoggedRound] = deque()
        self._last = 0
        self._nbytes = 0
        self._digests: dict[int, bytes] = {}  # in the order of rounds
        self._before = b""  # the chain before the first entry; empty where it is not known
        self._pins: Counter[int] = Counter()
        self._spares: deque[U8] = deque(maxlen=SPARES_MAX)

    # ------------------------------------------------------------ reading

    @property
    def first(self) -> int:
        with self._lock:
            return self._first()

    @property
    def last(self) -> int:
        return self._last

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def head(self, round_number: int) -> EntryHead | None:
        """Return the head of a round's entry; None if it is not here (any more)."""
        with self._lock:
            entry = self._find(round_number)
            return entry.head if entry else None

    def encoded(self, round_number: int) -> U8 | None:
        """Return R of a round, to be read only; None if it is not in memory.

        It stays as it is as long as anybody holds it.
        """
        with self._lock:
            entry = self._find(round_number)
            if entry is None:
                return None
            entry.lent = True
            return entry.encoded

    def part(self, round_number: int, lo: int, hi: int) -> memoryview | None:
        """Return these bytes of R of a round, to be read only; None if they are not here.

        They may come from the disk, and are not checked: it may be failing.
        """
        encoded = self.encoded(round_number)
        if encoded is not None:
            return encoded[lo:hi].data
        with self._lock:
            entry = self._find(round_number)
            name = self._stored.get(entry.place) if entry is not None else None
        if name is None or self._files is None:
            return None
        try:
            reader = self._files.open(name)
        except OSError:
            return None  # it has just been removed
        try:
            data = reader.read(lo, hi)
        finally:
            reader.close()
        return memoryview(data) if len(data) == hi - lo else None

    def chain_after(self, round_number: int) -> bytes:
        """Return the chain after a round of the log, or after the one before it; else empty."""
        with self._lock:
            entry = self._find(round_number)
            if entry is not None:
                return entry.head.chain
            return self._before if round_number == self._first() - 1 else b""

    def digest_after(self, round_number: int) -> bytes | None:
        """Return the state digest after a round, of the last DIGESTS_MAX rounds; else None."""
        with self._lock:
            return self._digests.get(round_number)

    def pin(self, round_number: int) -> bool:
        """Keep the entries from this round on (at most 2 x cap); return whether none is missing.

        Give it back with ``unpin`` in any case.
        """
        with self._lock:
            self._pins[round_number] += 1
            return self._first() <= round_number <= self._last + 1

    def unpin(self, round_number: int) -> None:
        with self._lock:
            self._pins[round_number] -= 1
            self._pins += Counter()  # forget zeros
            self._shrink()

    # ------------------------------------------------------------ writing

    def append(
        self, head: EntryHead, encoded: U8 | None, digest: bytes, *, lent: bool = False
    ) -> None:
        """Take over a committed round and ``encoded``, which nobody may write any more.

        None: only the disk has it. ``digest`` is the state's after it. ``lent``: somebody may still
        read it. An entry that does not continue the last one begins the log anew.
        """
        with self._lock:
            if head.round != self._last + 1:
                self._clear()
            entry = _LoggedRound(head, encoded, lent)
            self._entries.append(entry)
            self._nbytes += entry.nbytes
            self._settle(head.round, digest)
            self._free(entry)
            self._shrink()

    def append_stored(self, head: EntryHead, name: RoundName, digest: bytes) -> None:
        """Take over a committed round of which R is on the disk, and nowhere else."""
        self.stored(name, head.root)
        self.append(head, None, digest)

    def stored(self, name: RoundName, root: bytes) -> None:
        """Hear that R with this root is on the disk, before or after its round is committed."""
        with self._lock:
            self._stored[name.round, root] = name
            self._free(self._find(name.round))

    def is_stored(self, round_number: int, root: bytes) -> bool:
        """Return whether R with this root is on the disk."""
        with self._lock:
            return (round_number, root) in self._stored

    def kept(self, names: Collection[RoundName]) -> None:
        """Hear which files there are still: what was in others only can be had no more."""
        with self._lock:
            self._stored = {place: n for place, n in self._stored.items() if n in names}
            self._trim()

    def lost(self, round_number: int) -> None:
        """Hear that the file of a round is damaged."""
        with self._lock:
            entry = self._find(round_number)
            if entry is not None:
                self._stored.pop(entry.place, None)
                self._trim()

    def restart(self, round_number: int, digest: bytes, chain: bytes = b"") -> None:
        """Begin anew with a state that was loaded: the next entry is that of the round after it."""
        with self._lock:
            self._clear()
            self._before = chain
            self._settle(round_number, digest)

    def cut_after(self, round_number: int) -> None:
        """Forget what came after a round: it was undone."""
        with self._lock:
            if round_number < self._first() - 1:
                self._before = b""
            while self._entries and self._entries[-1].head.round > round_number:
                self._nbytes -= self._entries.pop().nbytes
            self._last = min(self._last, round_number)
            self._digests = {k: d for k, d in self._digests.items() if k <= round_number}

    def spare(self, nbytes: int) -> U8:
        """Return memory for a result, uint8[nbytes] of any contents: a dropped entry's or new."""
        with self._lock:
            for i, array in enumerate(self._spares):
                if array.nbytes == nbytes:
                    del self._spares[i]
                    return array
        return np.empty(nbytes, np.uint8)

    def give_back(self, array: U8) -> None:
        """Take back memory from ``spare`` that did not get into the log."""
        with self._lock:
            self._spares.append(array)

    # ------------------------------------------------------------ with the lock held

    def _first(self) -> int:
        return self._last + 1 - len(self._entries)

    def _find(self, round_number: int) -> _LoggedRound | None:
        index = round_number - self._first()
        return self._entries[index] if 0 <= index < len(self._entries) else None

    def _clear(self) -> None:
        self._entries.clear()
        self._digests.clear()
        self._nbytes = 0
        self._before = b""

    def _settle(self, round_number: int, digest: bytes) -> None:
        self._last = round_number
        self._digests[round_number] = digest
        if len(self._digests) > DIGESTS_MAX:
            del self._digests[next(iter(self._digests))]

    def _free(self, entry: _LoggedRound | None) -> None:
        """Let the memory of R go, if it is on the disk."""
        if entry is None or entry.encoded is None or entry.place not in self._stored:
            return
        array, entry.encoded = entry.encoded, None
        self._nbytes -= array.nbytes
        self._use_again(entry, array)

    def _use_again(self, entry: _LoggedRound, array: U8 | None) -> None:
        # The parameters are as large as no result, unless by luck: they would stay for ever.
        if array is not None and not entry.lent and entry.head.kind == STEP:
            self._spares.append(array)

    def _trim(self) -> None:
        """Drop the entries up to the last one that can be read nowhere."""
        gone = [
            number
            for number, entry in enumerate(self._entries, 1)
            if entry.encoded is None and entry.place not in self._stored
        ]
        for _ in range(max(gone, default=0)):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = self._entries.popleft()
        self._before = oldest.head.chain
        self._nbytes -= oldest.nbytes
        self._use_again(oldest, oldest.encoded)

    def _shrink(self) -> None:
        while len(self._entries) > LOG_ENTRIES_MIN and self._is_over(1):
            pinned = any(pin <= self._entries[0].head.round for pin in self._pins)
            if pinned and not self._is_over(PINNED_FACTOR):
                return
            self._drop_oldest()

    def _is_over(self, factor: int) -> bool:
        too_many = len(self._entries) > factor * LOG_ENTRIES_MAX
        return too_many or self._nbytes > factor * self.cap_bytes
