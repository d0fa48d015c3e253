"""Define what goes into the machine of a sync (machine.py) and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from atoll.peer.membership.events import Goal
from atoll.peer.membership.view import Member
from atoll.peer.rounds.entries import EntryHead
from atoll.peer.state_sync.verification import ReceivedPart


class SyncStore(Protocol):
    """Hold the state that is being put together.

    Fast enough for a lock: one chunk at a time.
    """

    @property
    def is_open(self) -> bool:
        """Return whether nothing else has written where it writes."""

    @property
    def chunks(self) -> int: ...

    def state_bytes(self, chunk: int) -> int: ...

    def entry_bytes(self, head: EntryHead, chunk: int) -> int:
        """Return the size of a chunk's part of that entry."""

    def place(self, head: EntryHead, chunk: int) -> tuple[int, int] | None:
        """Return the index of the chunk in the entry, and how many chunks the entry has.

        None if the chunk has no part in it.
        """

    def leaf(self, chunk: int) -> bytes:
        """Return the hash of the bytes here: put or kept, else the own state's.

        Empty if there are none.
        """

    def hint(self, chunk: int) -> bytes:
        """Return ``leaf`` as it was noted, without a look at the bytes; empty if it was not."""

    def keep(self, chunk: int, number: int) -> None:
        """Declare the bytes here those of round ``number``."""

    def put(
        self, chunk: int, number: int, data: memoryview, data_digest: bytes, digest: bytes
    ) -> None:
        """Store a chunk of the state after round ``number``.

        ``data_digest``: of the data; ``digest``: of that state.
        """

    def replay(self, chunk: int, head: EntryHead, data: memoryview) -> None: ...


@dataclass(frozen=True, slots=True)
class OwnState:
    """Describe the state at hand; round 0 and no blob if there is none."""

    round: int = 0
    chain: bytes = b""
    digest: bytes = b""
    blob_digest: bytes = b""


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class SetGoal:
    """Reach this goal. While something is under way, ``own`` is ignored."""

    goal: Goal
    own: OwnState


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop; what has been received stays for the next goal."""


@dataclass(frozen=True, slots=True)
class LinkedPeers:
    """Report which peers have a control link now; no others have."""

    peers: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class DonorMessage:
    """Report an answer of a donor."""

    source: bytes
    message: object


@dataclass(frozen=True, slots=True)
class PieceArrived:
    """Report a piece for a ticket that this donor has.

    ``number``: of the state, or the first entry's.
    """

    source: bytes
    ticket: int
    number: int
    parts: tuple[ReceivedPart, ...]  # none: it cannot be read


@dataclass(frozen=True, slots=True)
class StreamBroken:
    """Report that the donor's data stream broke: what was asked of it does not come."""

    source: bytes


@dataclass(frozen=True, slots=True)
class StoreReady:
    """Report that there is memory for the state."""

    store: SyncStore
    cached: tuple[tuple[int, int, bytes], ...] = ()  # chunk, round, digest: from an earlier life


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """Report that there is no memory for the state, or that it is another's now."""

    why: str


@dataclass(frozen=True, slots=True)
class StateInPlace:
    """Report that the state is in place and has the digest that was asked for."""


@dataclass(frozen=True, slots=True)
class StateRejected:
    """Report that the state is not in place. ``is_mismatch``: it has another digest."""

    why: str
    is_mismatch: bool


Event = (
    SetGoal
    | Cancel
    | LinkedPeers
    | DonorMessage
    | PieceArrived
    | StreamBroken
    | StoreReady
    | StoreFailed
    | StateInPlace
    | StateRejected
)

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class SendToDonor:
    peer: bytes
    message: object


@dataclass(frozen=True, slots=True)
class DialDonor:
    member: Member


@dataclass(frozen=True, slots=True)
class PrepareStore:
    """Make a store: on the state at hand, or with this blob on a new one. Answer: StoreReady."""

    blob: bytes


@dataclass(frozen=True, slots=True)
class InstallState:
    """Put the store in place as the state after this round, if it has this digest."""

    store: SyncStore
    round: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Synced:
    round: int
    chain: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class SyncFailed:
    why: str


@dataclass(frozen=True, slots=True)
class LogLine:
    text: str


Effect = SendToDonor | DialDonor | PrepareStore | InstallState | Synced | SyncFailed | LogLine
