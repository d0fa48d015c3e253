"""Keep data streams to and from the other peers, and route the frames that arrive.

A stream has one direction: who opens it sends. Which of the two dials for it is the affair of
opener.py. The first one to a peer is opened when a view names it, so that a round does not wait for
it, and again after it broke. A round opens as many as `widen` was told, for paths that one does not
fill (loss, a long way), and shares its chunks among these *stripes*, which keep to a `pace`
together; transfers use the first. Both are what the plan of the rounds says (links/planner.py).
Each incoming stream has a thread that reads a header, asks the router where the payload belongs,
and receives it straight into the preallocated memory that it is given; what nobody wants is drained
into a scratch buffer and dropped.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Collection
from functools import partial
from typing import NamedTuple, Protocol

from atoll.collectives.engine.send import Receipt
from atoll.collectives.errors import AtollError, ConnectError
from atoll.collectives.planning.pacing import TRIAL_FACTOR, is_trial, stripe_pace
from atoll.collectives.schedule.plan import STREAMS_MAX
from atoll.collectives.schedule.schedule import FrameKind
from atoll.collectives.threads import worker
from atoll.peer.links.messages import PROBE
from atoll.peer.membership.view import short
from atoll.peer.net.byte_counts import CONTROL, PROBES, ROUNDS, STATE
from atoll.peer.rounds.entries import INIT_ROUND
from atoll.peer.streams.congestion import suited
from atoll.peer.streams.frames import DATA_HEADER_BYTES, DataHeader, pack_header, unpack_header
from atoll.peer.streams.sealed import RECORD_BYTES_MAX
from atoll.peer.streams.stream import TELLS_DELIVERY, DataStream
from atoll.peer.streams.transfers import TransferKind

# Scratch of a reader thread for frames that nobody wants: no record of a stream is taken in pieces.
DRAIN_BYTES = RECORD_BYTES_MAX
ADDRESSES_MAX = 8192  # remembered addresses; twice the peers that a run may have
# With more links than this no stream is opened before a round needs it: of 64 daemons that begin
# together on one machine each opened 63, with a reader each, before anybody trained.
WARM_PEERS_MAX = 16
OPEN_TRIES = 3  # a member that cannot be dialled so often is reported to the round
# A stream that another one replaces may still carry a round or a transfer: it is closed when it has
# been idle for so long. Who waits longer than this for a turn has been given up.
RETIRED_IDLE_S = 30.0
# Of a pace: what changes by less is the same one.
PACE_CHANGE = 0.01
REDUCED = frozenset(FrameKind)
# Frames of all other kinds are parts of rounds, vectors that trainers exchange among them.
PURPOSES = {
    PROBE: PROBES,
    TransferKind.RESULT_COPY: STATE,
    TransferKind.STATE: STATE,
    TransferKind.ENTRY: STATE,
}


class FrameSink(Protocol):
    """Take the payloads of incoming frames. Called in the reader threads of the source.

    ``stripe``: which of its streams brings a frame, 0 for the only one.
    """

    def reserve(self, source: bytes, header: DataHeader, stripe: int = 0) -> memoryview | None:
        """Return a buffer of ``header.length`` bytes, or None to drop the frame.

        May wait, bounded.
        """

    def received(self, source: bytes, header: DataHeader, stripe: int = 0) -> None:
        """Take a frame whose reserved buffer is full."""

    def broken_off(self, source: bytes, header: DataHeader, stripe: int = 0) -> None:
        """Give up a reserved frame whose rest will not come on this stream."""

    def broken(self, source: bytes, why: str) -> None:
        """Expect no more frames from this peer, before it opens a stream again."""


class StreamDialer(Protocol):
    """Open streams to linked peers (net/connections.py)."""

    @property
    def bbr(self) -> bool:
        """Return whether losses need not slow what this side sends: see Congestion."""

    def link_peers(self) -> Collection[bytes]:
        """Return the peers with a control link."""

    async def open_data(self, peer: bytes, address: str, /) -> DataStream:
        """Open a stream on which this side sends. Raises ConnectError."""


class StripeId(NamedTuple):
    """Name a stream on which this side sends; the first to a peer is number 0."""

    peer: bytes
    number: int


class StreamPace(NamedTuple):
    """Describe what a plan says of the streams to a peer.

    Bytes per second of all stripes together; 0: no pace. ``lossy``: see StreamPlan.
    """

    bytes_per_s: float = 0.0
    lossy: bool = True  # as long as nobody knows


class FrameOutlet:
    """Send the frames of one attempt to one peer (collectives.senders.Outlet).

    ``aside``: the frames are no part of a round.
    """

    def __init__(self, stream: DataStream, header: DataHeader, *, aside: bool = False) -> None:
        self._stream = stream
        self._header = header
        self._aside = aside

    def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> Receipt | None:
        end = self.send_parts(kind, chunk, payload, offset=offset)
        return partial(self._stream.has_delivered, end) if TELLS_DELIVERY else None

    def send_parts(self, kind: int, chunk: int, *parts: memoryview, offset: int = 0) -> int:
        length = sum(part.nbytes for part in parts)
        header = self._header._replace(kind=kind, chunk=chunk, length=length, offset=offset)
        return self._stream.sendall(
            pack_header(header),
            *parts,
            aside=self._aside,
            urgency=self._header.round,
            purpose=purpose_of(header),
        )


class Streams:
    """Keep the data streams of a daemon.

    Lives in the event loop; only reader threads and senders run elsewhere.
    """

    def __init__(self, host: StreamDialer, sink: FrameSink) -> None:
        self._host = host
        self._sink = sink
        self._addresses: dict[bytes, str] = {}
        self._opening: dict[StripeId, asyncio.Task[DataStream]] = {}
        self._outgoing: dict[StripeId, DataStream] = {}
        self._incoming: dict[DataStream, bytes] = {}  # with the peer that sends on it
        self._numbers = itertools.count(1)  # of incoming streams
        self._stripes: dict[bytes, int] = {}  # where it is not one
        self._paces: dict[bytes, StreamPace] = {}
        # How many times their pace streams may take, in the round at hand and the next.
        self._times = self._times_next = 1.0
        self._sent_before = 0  # bytes of streams that are gone
        self._sent_for_rounds_before = 0
        self._received_before = 0
        self._moved_before = 0
        # Reader threads end while the loop adds up, and the loop opens streams while a donor does.
        self._count_lock = threading.Lock()
        self.reached: set[bytes] = set()  # peers whose advertised address has accepted us

    @property
    def sent_bytes(self) -> int:
        with self._count_lock:
            return self._sent_before + sum(s.sent_bytes for s in self._outgoing.values())

    @property
    def sent_for_rounds_bytes(self) -> int:
        """Return the bytes sent for rounds, as they are on the wire.

        Without pieces for learners, and nothing of what wraps them.
        """
        with self._count_lock:
            found = sum(stream.sent_for_rounds_bytes for stream in self._outgoing.values())
            return self._sent_for_rounds_before + found

    @property
    def received_bytes(self) -> int:
        with self._count_lock:
            return self._received_before + sum(s.received_bytes for s in self._incoming)

    @property
    def moved_bytes(self) -> int:
        """Return the bytes that have come; it only ever grows, and a stall detector looks at it."""
        with self._count_lock:
            return self._moved_before + sum(stream.moved_bytes for stream in self._incoming)

    def ciphers(self) -> dict[str, int]:
        """Return how many streams go with which cipher, both ways."""
        with self._count_lock:
            streams = [*self._outgoing.values(), *self._incoming]
        return dict(Counter(stream.cipher for stream in streams if not stream.closed))

    def outgoing(self) -> list[tuple[bytes, DataStream]]:
        """Return all streams on which this side sends, with their peers."""
        with self._count_lock:
            return [(stripe.peer, stream) for stripe, stream in self._outgoing.items()]

    def outgoing_stripes(self) -> list[tuple[StripeId, DataStream]]:
        with self._count_lock:
            return list(self._outgoing.items())

    def incoming(self) -> list[tuple[bytes, DataStream]]:
        with self._count_lock:
            return [(peer, stream) for stream, peer in self._incoming.items()]

    def know(self, peer: bytes, address: str) -> None:
        if not address:
            return
        if len(self._addresses) >= ADDRESSES_MAX:
            linked = self._host.link_peers()
            self._addresses = {p: a for p, a in self._addresses.items() if p in linked}
        self._addresses[peer] = address

    def address(self, peer: bytes) -> str:
        return self._addresses.get(peer, "")

    @property
    def bbr(self) -> bool:
        """Return whether losses need not slow what this side sends: see Congestion."""
        return self._host.bbr

    def stripes(self, peer: bytes) -> int:
        """Return how many streams a round uses to this peer."""
        return self._stripes.get(peer, 1)

    def widen(self, peer: bytes, count: int) -> None:
        """Use ``count`` streams to this peer from the next round on; what is open stays so."""
        count = min(max(1, count), STREAMS_MAX)
        if count > self.stripes(peer):
            self._times_next = TRIAL_FACTOR
        self._stripes[peer] = count
        self._keep_pace(peer)

    def pace(self, peer: bytes, bytes_per_s: float, *, lossy: bool = False) -> None:
        """Send no faster to this peer, over all stripes together, from now on; 0: no pace."""
        before = self._paces.get(peer, StreamPace()).bytes_per_s
        if not same_pace(before, bytes_per_s):
            self._times_next = TRIAL_FACTOR
        self._paces[peer] = StreamPace(bytes_per_s, lossy)
        self._keep_pace(peer)

    def begin_round(self, number: int) -> None:
        """Set the paces for a round.

        Some rounds are trials: they show what links have gained. So is the first of each plan that
        changes anything: it shows whether the links have more than the plan before has let through.
        """
        before, trial = self._times, TRIAL_FACTOR if is_trial(number) else 1.0
        self._times, self._times_next = max(self._times_next, trial), 1.0
        if before != self._times:
            for peer in self._paces:
                self._keep_pace(peer)

    def _keep_pace(self, peer: bytes) -> None:
        wanted = self._paces.get(peer, StreamPace())
        rate = self._times * stripe_pace(wanted.bytes_per_s, self.stripes(peer))
        for stripe, stream in self._outgoing.items():
            if stripe.peer != peer:
                continue
            # What the kernel lacks has been said when the stream was opened.
            stream.use_congestion(suited(stream, paced=wanted.bytes_per_s > 0, lossy=wanted.lossy))
            if stream.pace_bytes_per_s != rate:
                stream.pace(rate)

    def warm(self, peer: bytes) -> None:
        """Open a stream to this peer soon; failures show when a round needs it.

        Not where there are many: then each waits for the first round that uses it.
        """
        if len(self._host.link_peers()) > WARM_PEERS_MAX:
            return
        stream = self._outgoing.get(StripeId(peer, 0))
        if stream is None or stream.closed:
            self._open(StripeId(peer, 0))

    def renew(self, peer: bytes) -> None:
        """Replace streams through a relay, now that there is a direct way; they work meanwhile."""
        for stripe, stream in self.outgoing_stripes():
            if stripe.peer == peer and stripe.number >= 0 and stream.relay and not stream.closed:
                self._open(stripe)

    async def to(self, peer: bytes, stripe: int = 0) -> DataStream:
        """Return a stream to this peer, the same one for a stripe again.

        ConnectError after OPEN_TRIES.
        """
        stream = self.open_to(peer, stripe)
        if stream is not None:
            return stream
        return await asyncio.shield(self._open(StripeId(peer, stripe)))

    def open_to(self, peer: bytes, stripe: int = 0) -> DataStream | None:
        """Return the stream to this peer that is open and fit to be used; None if there is none."""
        stream = self._outgoing.get(StripeId(peer, stripe))
        return stream if stream is not None and stream.is_fit else None

    def _open(self, stripe: StripeId) -> asyncio.Task[DataStream]:
        task = self._opening.get(stripe)
        if task is None or task.done():
            task = asyncio.get_running_loop().create_task(self._dial(stripe))
            self._opening[stripe] = task
            task.add_done_callback(lambda _: self._opening.pop(stripe, None))
            task.add_done_callback(_retrieve)  # whoever asked may have gone
        return task

    async def _dial(self, stripe: StripeId) -> DataStream:
        peer = stripe.peer
        for attempt in range(OPEN_TRIES):
            try:
                stream = await self._host.open_data(peer, self.address(peer))
            except ConnectError as error:
                if attempt + 1 == OPEN_TRIES or peer not in self._host.link_peers():
                    what = f"data stream to {short(peer)}: {error.what}"
                    raise ConnectError(what, stage=error.stage) from error
                await asyncio.sleep(0.05 * 4**attempt)
                continue
            current = self._outgoing.get(stripe)
            if stream.relay and current is not None and current.is_fit:
                stream.close()  # no better than what there is: see renew
                return current
            self._retire(stripe)
            with self._count_lock:
                self._outgoing[stripe] = stream
            self._keep_pace(peer)
            if not (stream.is_reversed or stream.is_indirect or stream.is_punched):
                self.reached.add(peer)
            return stream
        raise AssertionError("unreachable: the last try returns or raises")

    def _retire(self, stripe: StripeId) -> None:
        """Close the stream that another one replaces; if it still works, when nobody uses it."""
        stream = self._outgoing.get(stripe)
        if stream is None or stream.closed:
            self._close(stripe)
            return
        retired = StripeId(stripe.peer, -next(self._numbers))  # counted still, and never asked for
        with self._count_lock:
            self._outgoing[retired] = self._outgoing.pop(stripe)
        self._close_when_idle(retired, -1)

    def _close_when_idle(self, retired: StripeId, sent_bytes: int) -> None:
        stream = self._outgoing.get(retired)
        if stream is None:
            return
        if stream.closed or stream.sent_bytes == sent_bytes:
            self._close(retired)
            return
        loop = asyncio.get_running_loop()
        loop.call_later(RETIRED_IDLE_S, self._close_when_idle, retired, stream.sent_bytes)

    def close_to(self, peer: bytes) -> None:
        for stripe in [stripe for stripe in self._outgoing if stripe.peer == peer]:
            self._close(stripe)

    def _close(self, stripe: StripeId) -> None:
        with self._count_lock:
            stream = self._outgoing.pop(stripe, None)
            if stream is not None:
                self._sent_before += stream.sent_bytes
                self._sent_for_rounds_before += stream.sent_for_rounds_bytes
        if stream is not None:
            stream.close()

    def forget(self, peer: bytes) -> None:
        """Close the streams to a peer whose process is gone, and forget its stripes and paces."""
        self.close_to(peer)
        self.reached.discard(peer)
        self._stripes.pop(peer, None)
        self._paces.pop(peer, None)

    def close(self) -> None:
        for task in list(self._opening.values()):
            task.cancel()
        for stripe in list(self._outgoing):
            self._close(stripe)
        with self._count_lock:
            incoming = list(self._incoming)
        for stream in incoming:
            stream.close()

    # ------------------------------------------------------------ incoming

    def accept(self, peer: bytes, stream: DataStream) -> None:
        """Read a stream that a peer has opened to us in a thread of its own, until it ends."""
        with self._count_lock:
            self._incoming[stream] = peer
        name = f"read-from-{short(peer)}"
        worker(lambda: self._read(peer, stream), name).start()

    def _read(self, peer: bytes, stream: DataStream) -> None:
        why = ""
        try:
            self._read_all(peer, stream)
        except AtollError as error:
            why = error.what
        except Exception as error:  # a reader that dies in silence is a hang for the others
            why = f"{type(error).__name__}: {error}"
        finally:
            stream.close()
            with self._count_lock:
                self._received_before += stream.received_bytes
                self._moved_before += stream.moved_bytes
                del self._incoming[stream]
                is_last = peer not in self._incoming.values()
        if is_last:  # what the others of its streams bring is still to come
            self._sink.broken(peer, why)

    def _read_all(self, peer: bytes, stream: DataStream) -> None:
        number = next(self._numbers)
        head = memoryview(bytearray(DATA_HEADER_BYTES))
        scratch = memoryview(b"")  # most streams never need it
        counted_bytes, purpose = 0, CONTROL
        try:
            while True:
                stream.recv_into(head, idle=True)
                header = unpack_header(head)
                purpose = stream.arriving = purpose_of(header)
                stripe = number if self._has_several(peer) else 0
                target = self._sink.reserve(peer, header, stripe)
                if target is not None:
                    self._receive(peer, stream, header, stripe, target)
                else:
                    if len(scratch) < (size := min(header.length, DRAIN_BYTES)):
                        scratch = memoryview(bytearray(size))  # of probes alone it stays small
                    _drain(stream, header.length, scratch)
                arrived_bytes = stream.arrived_bytes
                stream.counts.add_received(purpose, arrived_bytes - counted_bytes, asked=True)
                counted_bytes = arrived_bytes
        finally:
            stream.counts.add_received(purpose, stream.arrived_bytes - counted_bytes, asked=True)

    def _receive(
        self, peer: bytes, stream: DataStream, header: DataHeader, stripe: int, target: memoryview
    ) -> None:
        try:
            stream.recv_into(target)
        except BaseException:
            self._sink.broken_off(peer, header, stripe)
            raise
        self._sink.received(peer, header, stripe)

    def _has_several(self, peer: bytes) -> bool:
        with self._count_lock:
            return sum(source == peer for source in self._incoming.values()) > 1


def same_pace(before: float, after: float) -> bool:
    """Return whether two plans ask for the same pace, but for estimates that waver."""
    return abs(after - before) <= PACE_CHANGE * max(before, after)


def purpose_of(header: DataHeader) -> str:
    """Return what the bytes of a frame are counted as: those of INIT bring the first state."""
    if header.round == INIT_ROUND and header.kind in REDUCED:
        return STATE
    return PURPOSES.get(header.kind, ROUNDS)


def reason_of(error: AtollError | MemoryError) -> str:
    return error.what if isinstance(error, AtollError) else "no memory for it"


def _drain(stream: DataStream, length: int, scratch: memoryview) -> None:
    while length > 0:
        part = scratch[: min(length, len(scratch))]
        stream.recv_into(part)
        length -= len(part)


def _retrieve(task: asyncio.Task[DataStream]) -> None:
    """Let the opening of a stream fail in silence where nobody waits for it any more.

    The round that needs the stream asks again and reports.
    """
    if not task.cancelled():
        task.exception()
