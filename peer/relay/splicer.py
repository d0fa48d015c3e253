"""Move the bytes of circuits from one connection to the other, inside the kernel: one thread.

Bytes go from a socket into a pipe and from the pipe into the other socket (splice(2)) and never
pass through this process. A direction reads only when what it has read before is gone, so that
whoever receives slowly slows down its sender, as on one connection.

All bulk circuits share the rate that the operator allows, a quantum each in turn; the control
circuits of each pair have a rate of their own, which leaves room for a burst: rounds begin with
messages that are as large as kept chunks. It outlives the circuits, or a pair that opens one after
the other would carry its data at no charge.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Final, Protocol

from atoll.collectives.threads import worker

# What one direction may move before the next has its turn.
QUANTUM_BYTES: Final = 64 << 10
# The pipe between the two sockets; a packet of 1,448 bytes takes one of its pages.
PIPE_BYTES: Final = 256 << 10
# Of the control circuits of a pair, both directions together: heartbeats and votes take a twentieth
# of it, and the largest message of a round fits into the burst.
CONTROL_BYTES_PER_S: Final = 64_000 / 8
CONTROL_BURST_BYTES: Final = 1 << 20
CONTROL_PAIRS_MAX: Final = 1024  # whose rates are remembered: twice the circuits of a relay
# Of all bulk circuits: what the rate gives in this time may come at once.
BULK_BURST_S: Final = 0.1
BULK_BURST_BYTES_MIN: Final = 2 * QUANTUM_BYTES
# Less is not worth a turn: a packet.
TAKEN_BYTES_MIN: Final = 1448
# Between two looks for circuits on which nothing has moved for IDLE_S: a data stream that a round
# needs again is opened again, in three round trips.
LOOK_S: Final = 5.0
IDLE_S: Final = 60.0
# A direction that could not be emptied waits for its socket; one without tokens so long.
TOKENS_WAIT_S: Final = 0.01


def can_splice() -> bool:
    """Return whether this system moves bytes between sockets in the kernel."""
    return hasattr(os, "splice")


class Bucket:
    """Hold the tokens of a rate: one for each byte that may move now."""

    def __init__(self, bytes_per_s: float, burst_bytes: float, now_s: float) -> None:
        self._bytes_per_s, self._burst_bytes = bytes_per_s, burst_bytes
        self._level, self._at_s = burst_bytes, now_s

    def level(self, now_s: float) -> int:
        new = max(0.0, now_s - self._at_s) * self._bytes_per_s
        self._level, self._at_s = min(self._burst_bytes, self._level + new), now_s
        return int(self._level)

    def take(self, count: int) -> None:
        self._level -= count


class SpliceReport(Protocol):
    """Hear what a splicer does; called in its thread."""

    def moved(self, number: int, count: int, /) -> None:
        """Count bytes that a circuit has carried on."""

    def over(self, number: int, why: str, /) -> None:
        """Hear that a circuit has ended, by itself or because it was idle."""


class _Flow:
    """Carry bytes one way, from one socket to the other."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.pipe_out, self.pipe_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a user may have only so much of pipes
            fcntl.fcntl(self.pipe_in, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.held = 0  # bytes in the pipe
        self.is_full = False  # the sink takes nothing more at present
        self.at_end = False  # the source will bring nothing more
        self.is_done = False  # ... and the sink has been told

    def read(self, most: int) -> int:
        """Take bytes out of the source; return how many. Raises OSError if it has broken."""
        flags = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK
        try:
            count = os.splice(self.source.fileno(), self.pipe_in, most, flags=flags)
        except BlockingIOError:
            return 0
        self.at_end = count == 0
        self.held += count
        return count

    def write(self) -> int:
        """Give the sink what is held; return how much it took. Raises OSError if it has broken."""
        count = 0
        flags = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK
        try:
            while self.held:
                taken = os.splice(self.pipe_out, self.sink.fileno(), self.held, flags=flags)
                self.held -= taken
                count += taken
        except BlockingIOError:
            self.is_full = True
        if self.at_end and not self.held and not self.is_done:
            self.is_done = True
            self.sink.shutdown(socket.SHUT_WR)
        return count

    def close(self) -> None:
        os.close(self.pipe_in)
        os.close(self.pipe_out)


class _Splice:
    """Hold the two directions of one circuit."""

    def __init__(
        self, number: int, one: socket.socket, two: socket.socket, bucket: Bucket, *, bulk: bool
    ) -> None:
        self.number, self.bulk, self.bucket = number, bulk, bucket
        self.sockets = (one, two)
        there = _Flow(one, two)
        try:
            self.directions = (there, _Flow(two, one))
        except OSError:
            there.close()
            raise
        self.moved_s = time.monotonic()

    def interest(self, sock: socket.socket, *, may_read: bool) -> int:
        """Return what to wait for on a socket of it: a mask of selectors."""
        mask = 0
        for direction in self.directions:
            reads = may_read and not direction.at_end and not direction.held
            if direction.source is sock and reads:
                mask |= selectors.EVENT_READ
            if direction.sink is sock and direction.held:
                mask |= selectors.EVENT_WRITE
        return mask

    def close(self) -> None:
        for direction in self.directions:
            direction.close()
        for sock in self.sockets:
            sock.close()


class Splicer:
    """Carry circuits in a thread of its own, which begins with the first one.

    ``bulk_bytes_per_s``: the rate of all bulk circuits together, each byte counted once.
    """

    def __init__(self, bulk_bytes_per_s: float, report: SpliceReport) -> None:
        burst_bytes = max(BULK_BURST_BYTES_MIN, bulk_bytes_per_s * BULK_BURST_S)
        self._bulk = Bucket(bulk_bytes_per_s, burst_bytes, time.monotonic())
        self._control: OrderedDict[Hashable, Bucket] = OrderedDict()  # by pair
        self._report = report
        self._todo: deque[Callable[[], None]] = deque()
        self._splices: dict[int, _Splice] = {}
        self._turns: deque[int] = deque()  # whose turn it is to read, of those that have bytes
        self._waker, self._woken = socket.socketpair()
        for sock in (self._waker, self._woken):
            sock.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._masks: dict[socket.socket, int] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self._looked_s = 0.0

    # ------------------------------------------------------------ called by the event loop

    def add(
        self, number: int, one: socket.socket, two: socket.socket, pair: Hashable, *, bulk: bool
    ) -> None:
        """Carry bytes between two connected sockets, which are the splicer's from here on.

        ``pair``: whose they are, whoever of the two has asked.
        """
        self._do(lambda: self._add(number, one, two, pair, bulk=bulk))
        if self._thread is None:
            thread = worker(self._run, "relay")
            thread.start()  # raises where the machine has no thread left
            self._thread = thread

    def cut(self, number: int) -> None:
        """End a circuit; nothing is reported."""
        self._do(lambda: self._end(number))

    def close(self) -> None:
        """End all circuits and the thread, and wait for it."""
        self._closing = True
        self._wake()
        if self._thread is not None:
            self._thread.join()
        self._selector.close()
        self._waker.close()
        self._woken.close()

    def _do(self, task: Callable[[], None]) -> None:
        self._todo.append(task)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has been woken already
            self._waker.send(b"\0")

    # ------------------------------------------------------------ in its thread

    def _run(self) -> None:
        while not self._closing:
            while self._todo:
                self._todo.popleft()()
            for number in self._wait():
                self._turn(number)
            self._end_idle()
        for number in tuple(self._splices):
            self._end(number)

    def _wait(self) -> list[int]:
        """Return which circuits have something to move, in the order of their turns."""
        now_s = time.monotonic()
        is_short = self._watch(now_s)
        ready = self._selector.select(TOKENS_WAIT_S if is_short else LOOK_S)
        numbers = {key.data for key, _ in ready if key.data is not None}
        if any(key.data is None for key, _ in ready):
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        for key, mask in ready:
            splice = self._splices.get(key.data)
            if splice is not None and mask & selectors.EVENT_WRITE:
                for direction in splice.directions:
                    direction.is_full &= direction.sink is not key.fileobj
        return [number for number in tuple(self._turns) if number in numbers]

    def _watch(self, now_s: float) -> bool:
        """Wait for what can be used; return whether some circuit lacks tokens."""
        is_short = False
        for splice in self._splices.values():
            may_read = splice.bucket.level(now_s) >= TAKEN_BYTES_MIN
            is_short |= not may_read
            for sock in splice.sockets:
                mask = splice.interest(sock, may_read=may_read)
                if mask == self._masks.get(sock, 0):
                    continue
                if not mask:
                    self._selector.unregister(sock)
                elif self._masks.get(sock, 0):
                    self._selector.modify(sock, mask, splice.number)
                else:
                    self._selector.register(sock, mask, splice.number)
                self._masks[sock] = mask
        return is_short

    def _turn(self, number: int) -> None:
        splice = self._splices.get(number)
        if splice is None:
            return
        self._turns.remove(number)
        self._turns.append(number)
        try:
            for direction in splice.directions:
                self._move(splice, direction)
        except OSError as error:
            self._over(number, os.strerror(error.errno or 0).lower())
            return
        if all(direction.is_done for direction in splice.directions):
            self._over(number, "both ends have closed it")

    def _move(self, splice: _Splice, direction: _Flow) -> None:
        now_s = time.monotonic()
        if not (direction.held or direction.at_end):
            most = min(QUANTUM_BYTES, splice.bucket.level(now_s))
            if most >= TAKEN_BYTES_MIN:
                splice.bucket.take(direction.read(most))
        if not direction.is_full and (direction.held or direction.at_end):
            count = direction.write()
            if count:
                splice.moved_s = now_s
                self._report.moved(splice.number, count)

    def _add(
        self, number: int, one: socket.socket, two: socket.socket, pair: Hashable, *, bulk: bool
    ) -> None:
        bucket = self._bulk if bulk else self._control_of(pair)
        try:
            splice = _Splice(number, one, two, bucket, bulk=bulk)
        except OSError as error:
            one.close()
            two.close()
            self._report.over(number, f"no pipe: {os.strerror(error.errno or 0).lower()}")
            return
        self._splices[number] = splice
        self._turns.append(number)

    def _control_of(self, pair: Hashable) -> Bucket:
        """Return the rate of a pair's control circuits, those before this one included."""
        bucket = self._control.get(pair)
        if bucket is None:
            bucket = Bucket(CONTROL_BYTES_PER_S, CONTROL_BURST_BYTES, time.monotonic())
            self._control[pair] = bucket
        self._control.move_to_end(pair)
        if len(self._control) > CONTROL_PAIRS_MAX:
            self._control.popitem(last=False)
        return bucket

    def _end_idle(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        for number, splice in tuple(self._splices.items()):
            if splice.bulk and now_s - splice.moved_s >= IDLE_S:
                self._over(number, f"nothing has moved on it for {IDLE_S:.0f} s")

    def _over(self, number: int, why: str) -> None:
        self._end(number)
        self._report.over(number, why)

    def _end(self, number: int) -> None:
        splice = self._splices.pop(number, None)
        if splice is None:
            return
        self._turns.remove(number)
        for sock in splice.sockets:
            if self._masks.pop(sock, 0):
                self._selector.unregister(sock)
        splice.close()
