"""Define what the membership machine returns: orders to its shell, in order (events.py).

``trace`` is what the traces of the simulator call an effect (tests/harness/tracing.py), whatever
its class is called: renaming one must not look like another protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from atoll.peer.membership.messages import Begin
from atoll.peer.membership.view import Member, View


@dataclass(frozen=True, slots=True)
class Send:
    trace: ClassVar[str] = "Send"
    peer: bytes
    message: object


@dataclass(frozen=True, slots=True)
class Connect:
    """Have a control link to this peer."""

    trace: ClassVar[str] = "Connect"
    peer: bytes
    address: str


@dataclass(frozen=True, slots=True)
class ProbePeer:
    trace: ClassVar[str] = "Probe"
    peer: bytes
    address: str


@dataclass(frozen=True, slots=True)
class Reduce:
    """Take part in this attempt."""

    trace: ClassVar[str] = "Reduce"
    begin: Begin


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the result of this attempt from ``holder``."""

    trace: ClassVar[str] = "Fetch"
    begin: Begin
    holder: bytes


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop the attempt: its frames no longer count."""

    trace: ClassVar[str] = "Abort"
    round: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the result of a round that is committed.

    Its inputs are free again afterwards.
    """

    trace: ClassVar[str] = "Apply"
    begin: Begin
    chain: bytes
    root: bytes = b""  # of the result; operations may be applied by who does not hold it


@dataclass(frozen=True, slots=True)
class ListFinal:
    """List the chunks of this attempt's result that are final here; the attempt has ended."""

    trace: ClassVar[str] = "ListFinal"
    round: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Goal:
    """Name the state that a peer should reach, and from whom.

    ``donors`` are members of the view and archives, the coordinator among them. ``suspect``: our
    own bytes may be wrong although the chain agrees, so they count only where a donor confirms.
    """

    trace: ClassVar[str] = "Goal"
    round: int
    chain: bytes
    coordinator: bytes
    donors: tuple[Member, ...]
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class StartSync:
    """Bring the state to the goal: by log entries, or by chunks and entries.

    A newer goal takes the place of the one under way, which keeps what it has received.
    """

    trace: ClassVar[str] = "CatchUp"
    goal: Goal


@dataclass(frozen=True, slots=True)
class Undo:
    """Take back the last commit: the view builds on the round before.

    It is answered like StartSync.
    """

    trace: ClassVar[str] = "Undo"
    round: int  # the one to go back to
    chain: bytes


@dataclass(frozen=True, slots=True)
class Installed:
    """Announce that a view is in force from now on: data streams to its members are wanted."""

    trace: ClassVar[str] = "Installed"
    view: View


@dataclass(frozen=True, slots=True)
class TellTrainer:
    """Tell the trainer what became of a submission.

    ``begin`` is of the operation that was committed; ``text`` says why an operation was not.
    """

    trace: ClassVar[str] = "TellTrainer"
    kind: str  # "committed", "missed" or "reload"; of operations also "mismatch" and "failed"
    round: int
    epoch: int
    fragment: int = 0
    begin: Begin | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Renew:
    """Store a new number and answer with Incarnated: this incarnation is out of the run."""

    trace: ClassVar[str] = "Renew"


@dataclass(frozen=True, slots=True)
class Left:
    """Let the daemon end: the others have agreed to our leave, or need not."""

    trace: ClassVar[str] = "Left"


@dataclass(frozen=True, slots=True)
class Note:
    """Write one line for the event log: an automatic decision and its reason."""

    trace: ClassVar[str] = "Note"
    kind: str
    text: str
    peer: bytes = b""
    fields: dict[str, object] = field(default_factory=dict)


Effect = (
    Send
    | Connect
    | ProbePeer
    | Reduce
    | Fetch
    | Abort
    | Apply
    | ListFinal
    | StartSync
    | Undo
    | Installed
    | TellTrainer
    | Renew
    | Left
    | Note
)
