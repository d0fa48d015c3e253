"""Define the messages between a peer that lacks state or a result and those that have it.

Whoever lacks it asks over the control link; small answers come back there, pieces as frames of the
donor's data stream. A *piece* is a chunk of the state, or the same chunk's parts of committed
rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from atoll.peer.membership.kept_chunks import KEPT_MAX
from atoll.peer.membership.view import Attempts, Digest, Lineage, Rounds, Views
from atoll.peer.net.wire import CONTROL_FRAME_BYTES_MAX, Within, message
from atoll.peer.rounds.entries import CHUNKS_MAX, Blob, EntryHead

DIGESTS_MAX = 1024  # rounds whose digest one answer names, as many as a log remembers: 32 KiB
HEADS_MAX = 1024  # in one answer, if they fit
# An answer ends before the head that would exceed it, unless that is its first.
HEADS_BYTES_MAX = CONTROL_FRAME_BYTES_MAX // 2
ASKED_MAX = 8  # pieces that one peer may have asked of one donor

Ticket = Annotated[int, Within(1, (1 << 32) - 1)]  # names one request: its frame's ``attempt``


@message(wire="AskState")
@dataclass(frozen=True, slots=True)
class AskState:
    """Ask which state a donor holds, and the digests of the states from round ``first`` on."""

    first: Rounds


@message(wire="StateIs")
@dataclass(frozen=True, slots=True)
class StateIs:
    """Say which state a donor holds, and which digests states have had.

    ``round`` -1: there is none that others may have. The state's digest is that of ``blob_digest``
    and Merkle ``root``; ``digests`` has 32 bytes for each round from ``first`` on, zeros for
    unknown.

    Entries from ``log_first`` to ``round`` can be had.
    """

    round: Annotated[int, Within(-1, (1 << 62) - 1)]
    root: Digest = b""
    blob_digest: Digest = b""
    log_first: Rounds = 0
    first: Rounds = 0
    digests: Annotated[bytes, Within(0, 32 * DIGESTS_MAX)] = b""


@message(wire="AskBlob")
@dataclass(frozen=True, slots=True)
class AskBlob:
    """Ask for the run's specification and manifest."""


@message(wire="BlobIs")
@dataclass(frozen=True, slots=True)
class BlobIs:
    blob: Blob


@message(wire="AskHeads")
@dataclass(frozen=True, slots=True)
class AskHeads:
    """Ask for the heads of the log's entries ``first`` to ``last``."""

    first: Rounds
    last: Rounds


@message(wire="HeadsAre")
@dataclass(frozen=True, slots=True)
class HeadsAre:
    """Give as many heads as fit, from ``first`` on, and the chain ``before`` the first.

    None: they are gone.
    """

    first: Rounds
    before: Digest
    heads: Annotated[tuple[EntryHead, ...], Within(0, HEADS_MAX)]


@message(wire="FetchPiece")
@dataclass(frozen=True, slots=True)
class FetchPiece:
    """Ask for a chunk of the state, or for its parts of committed rounds.

    ``entry`` 0: the chunk as it is now; else its parts of the entries ``entry`` to ``last`` that
    have one, from the first on as many as are here.

    ``have`` is the leaf of what whoever asks has: an equal chunk is confirmed, not sent.
    """

    ticket: Ticket
    chunk: Annotated[int, Within(0, CHUNKS_MAX)]
    entry: Rounds = 0
    last: Rounds = 0
    have: Digest = b""


@message(wire="NoPiece")
@dataclass(frozen=True, slots=True)
class NoPiece:
    """Refuse a piece: ask somebody else for it, or this donor again later.

    ``unreachable``: whoever asks cannot be connected to.
    """

    ticket: Ticket
    why: Annotated[str, Within(0, 300)]
    unreachable: bool = False


@message(wire="DropPieces")
@dataclass(frozen=True, slots=True)
class DropPieces:
    """Take requests back, because others were faster: what has not been sent need not be."""

    tickets: Annotated[tuple[Ticket, ...], Within(0, ASKED_MAX)]


@message(wire="FetchResult")
@dataclass(frozen=True, slots=True)
class FetchResult:
    """Ask a holder for the result of this attempt. Answer: RESULT_HEAD and data frames.

    ``chunks``: the numbers of those that are lacking, u32 each; empty for all.
    """

    lineage: Lineage
    view: Views
    round: Rounds
    attempt: Attempts
    chunks: Annotated[bytes, Within(0, 4 * KEPT_MAX)] = b""


@message(wire="ResultHead")
@dataclass(frozen=True, slots=True)
class ResultHead:
    """Say whether the result is here; if it is not ``found``, ask somebody else."""

    round: Rounds
    attempt: Attempts
    found: bool


# Who hears what: the daemon gives the first kind to its SyncServer, the second to SyncClient.
ASKED_OF_DONORS = AskState | AskBlob | AskHeads | FetchPiece | DropPieces | FetchResult
ANSWERED_BY_DONORS = StateIs | BlobIs | HeadsAre | NoPiece
