"""Define a session's own collectives: what trainers call, what BEGIN says, who is left out.

Theory. An operation is a round of the run's log, ordered with all others, so that membership,
retries, READY and COMMIT hold for it unchanged: the survivors all get the same bytes, or nobody
does. It changes no state. What a trainer wants to do next is its *call*: an operation, or None for
a step of the optimizer. Heartbeats carry it beside what has arrived; at the barrier the call of
most trainers is taken, and of several such the call of the trainer that has been there longest: a
newcomer must not break what others have done for hours. BEGIN names those that wait with another
call, or were waited for in vain (``without``): their trainers hear of it once (member.py),
and the round goes on.

*GATHER*: objects of a few bytes travel to the coordinator beside heartbeats (ObjectIs), and back to
everyone in BEGIN's blob. So whoever has the BEGIN holds the whole result. Objects that do not fit
together are a result too: then the blob has their sizes only, and every trainer is told so.

*REDUCE*: vectors are reduced as updates are, in a shape and codec that the call names. A retry
keeps no chunks of the attempt before, because a sum over other trainers is another sum.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from atoll.optim.manifest import ELEMENTS_MAX
from atoll.optim.run_spec import BLOB_BYTES_MAX
from atoll.peer.net.wire import Within, message
from atoll.peer.rounds.entries import GATHER, OPERATIONS, REDUCE

# Of one trainer. It travels in a control message, and a coordinator holds one of each member; for
# larger things there are vectors.
OBJECT_BYTES_MAX = 64 * 1024
CODEC_BYTES_MAX = 32  # the longest name of a codec has about half of that
BARRIER = "barrier"  # a GATHER of nothing, which is not to be taken for another one
OPS = ("mean", "sum", "max", "min")
REPEAT_S_MIN = 0.5  # links hardly ever lose a message, and an object may take a while on a slow one
REPEAT_S_MAX = 4.0
_LENGTH = struct.Struct(">I")


@message(wire="Operation")
@dataclass(frozen=True, slots=True)
class Operation:
    """Describe what all trainers of a round have to call alike.

    ``elements``, ``op`` and ``codec`` are of a REDUCE; of a GATHER ``op`` says whether it is a
    barrier.
    """

    kind: str
    elements: Annotated[int, Within(0, ELEMENTS_MAX)] = 0
    op: Annotated[str, Within(0, CODEC_BYTES_MAX)] = ""
    codec: Annotated[str, Within(0, CODEC_BYTES_MAX)] = ""

    def __post_init__(self) -> None:
        if self.kind not in OPERATIONS:
            raise ValueError(f"an operation is one of {', '.join(OPERATIONS)}")
        reduces = self.kind == REDUCE
        if reduces != bool(self.codec) or (self.elements and not reduces):
            raise ValueError("a REDUCE has elements and a codec, and nothing else has")
        if self.op not in (OPS if reduces else ("", BARRIER)):
            raise ValueError(f"the op of a REDUCE is one of {', '.join(OPS)}")

    def __str__(self) -> str:
        if self.kind == GATHER:
            return "barrier()" if self.op == BARRIER else "all_gather()"
        return (
            f'all_reduce() of {self.elements:,} elements with op="{self.op}", codec="{self.codec}"'
        )


Call = Operation | None  # None: a step of the optimizer


def agreed(calls: Mapping[bytes, Call], since: Callable[[bytes], int]) -> Call:
    """Return the call of most peers; of several such, that of the trainer that came first.

    ``since`` says at which round a peer's trainer came. Of several that came together the call of
    the smallest peer id is taken.
    """
    voters: dict[Call, list[bytes]] = {}
    for peer in sorted(calls, key=lambda peer: (since(peer), peer)):
        voters.setdefault(calls[peer], []).append(peer)
    return max(voters, key=lambda call: len(voters[call]))  # the first of several


# ---------------------------------------------------------------- objects


def object_digest(data: bytes) -> bytes:
    """Return the SHA-256 by which a heartbeat names an object.

    b"" for an empty one, which need not travel.
    """
    return hashlib.sha256(data).digest() if data else b""


def pack_objects(objects: Sequence[bytes]) -> bytes:
    """Pack the objects' sizes, then the objects themselves.

    The sizes stand alone where that would be too long.
    """
    sizes = b"".join(_LENGTH.pack(len(data)) for data in objects)
    whole = sizes + b"".join(objects)
    return whole if len(whole) <= BLOB_BYTES_MAX else sizes


def object_sizes(blob: bytes, count: int) -> tuple[int, ...]:
    """Return the sizes of the objects that ``blob`` packs, in bytes.

    Raise ValueError unless it packs ``count`` objects.
    """
    head = count * _LENGTH.size
    if len(blob) >= head:
        sizes = tuple(size for (size,) in _LENGTH.iter_unpack(blob[:head]))
        fits = max(sizes, default=0) <= OBJECT_BYTES_MAX
        if fits and len(blob) - head in (0, sum(sizes)):
            return sizes
    raise ValueError(f"{len(blob)} bytes are not {count} objects")


def unpack_objects(blob: bytes, count: int) -> tuple[bytes, ...] | None:
    """Return the objects that ``blob`` packs; None where they did not fit.

    Raise ValueError for anything else.
    """
    sizes = object_sizes(blob, count)
    begin = count * _LENGTH.size
    if len(blob) == begin and any(sizes):
        return None
    objects = []
    for size in sizes:
        objects.append(blob[begin : begin + size])
        begin += size
    return tuple(objects)


def keep_objects(blob: bytes, peers: Sequence[bytes], chosen: Collection[bytes]) -> bytes:
    """Return the blob with which an attempt of some of its peers goes on."""
    staying = [index for index, peer in enumerate(peers) if peer in chosen]
    objects = unpack_objects(blob, len(peers))
    if objects is not None:
        return pack_objects([objects[index] for index in staying])
    sizes = object_sizes(blob, len(peers))
    return b"".join(_LENGTH.pack(sizes[index]) for index in staying)


def without_objects(blob: bytes, count: int) -> bytes:
    """Return the sizes of ``count`` objects, without the objects that may follow in ``blob``."""
    return blob[: count * _LENGTH.size]


class ObjectSender:
    """Decide when a member sends its object to the coordinator.

    It is sent at once, and again with growing pauses, because what is on a link that breaks is lost
    and nothing else says so.
    """

    def __init__(self) -> None:
        self._hashed: tuple[bytes, bytes] = (b"", b"")  # the last object, and its digest
        self._sent: tuple[object, ...] = ()
        self._again_s = 0.0
        self._pause_s = 0.0

    def digest(self, data: bytes) -> bytes:
        if self._hashed[0] is not data:
            self._hashed = (data, object_digest(data))
        return self._hashed[1]

    def is_due(self, data: bytes, path: tuple[object, ...], now_s: float) -> bool:
        """Return whether to send the object now.

        ``path``: to whom, and over which link; over another one it goes at once. Asked with each
        heartbeat: one that names no object makes the coordinator forget the last one.
        """
        if not data:
            self._sent = ()
            return False
        what = (self.digest(data), *path)
        if what != self._sent:
            self._sent, self._pause_s = what, REPEAT_S_MIN
        elif now_s < self._again_s:
            return False
        else:
            self._pause_s = min(2 * self._pause_s, REPEAT_S_MAX)
        self._again_s = now_s + self._pause_s
        return True
