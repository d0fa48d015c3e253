"""What comes out of the membership machine: orders to its shell, in order (events.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.peer.group.messages import Begin
from atoll.peer.group.views import Member, View

__all__ = [
    "Abort",
    "Apply",
    "CatchUp",
    "Connect",
    "Effect",
    "Fetch",
    "Goal",
    "Installed",
    "Left",
    "ListFinal",
    "Note",
    "Probe",
    "Reduce",
    "Renew",
    "Send",
    "TellTrainer",
    "Undo",
]


@dataclass(frozen=True, slots=True)
class Send:
    peer: bytes
    message: object


@dataclass(frozen=True, slots=True)
class Connect:
    """Have a control link to this peer."""

    peer: bytes
    address: str


@dataclass(frozen=True, slots=True)
class Probe:
    peer: bytes
    address: str


@dataclass(frozen=True, slots=True)
class Reduce:
    """Take part in this attempt."""

    begin: Begin


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the result of this attempt from ``holder``."""

    begin: Begin
    holder: bytes


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop the attempt: its frames no longer count."""

    round: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Apply:
    """The round is committed: apply its result. Inputs are free again afterwards."""

    begin: Begin
    chain: bytes
    root: bytes = b""  # of the result; operations may be applied by who does not hold it


@dataclass(frozen=True, slots=True)
class ListFinal:
    """Which chunks of this attempt's result are final here? The attempt has ended."""

    round: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Goal:
    """The state that a peer should reach, and from whom.

    ``donors`` are members of the view and archives, the coordinator among them. ``doubtful``: our
    own bytes may be wrong although the chain agrees, so they count only where a donor confirms.
    """

    round: int
    chain: bytes
    coordinator: bytes
    donors: tuple[Member, ...]
    doubtful: bool = False


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Bring the state to the goal: by log entries, or by chunks and entries. A newer goal takes the
    place of the one under way, which keeps what it has received."""

    goal: Goal


@dataclass(frozen=True, slots=True)
class Undo:
    """Take back the last commit: the view builds on the round before. Answered like CatchUp."""

    round: int  # the one to go back to
    chain: bytes


@dataclass(frozen=True, slots=True)
class Installed:
    """A view is in force from now on: data streams to its members are wanted."""

    view: View


@dataclass(frozen=True, slots=True)
class TellTrainer:
    """What became of a submission. ``begin``: of the operation that was committed; ``text``: why
    an operation was not."""

    kind: str  # "committed", "missed" or "reload"; of operations also "mismatch" and "failed"
    round: int
    epoch: int
    fragment: int = 0
    begin: Begin | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Renew:
    """This incarnation is out of the run: store a new number and answer with Incarnated."""


@dataclass(frozen=True, slots=True)
class Left:
    """The others have agreed to our leave, or need not: the daemon may end."""


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the event log: an automatic decision and its reason."""

    kind: str
    text: str
    peer: bytes = b""
    fields: dict[str, object] = field(default_factory=dict)


Effect = (
    Send
    | Connect
    | Probe
    | Reduce
    | Fetch
    | Abort
    | Apply
    | ListFinal
    | CatchUp
    | Undo
    | Installed
    | TellTrainer
    | Renew
    | Left
    | Note
)
