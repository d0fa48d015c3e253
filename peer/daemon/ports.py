"""State what each component may ask of the daemon that it is a part of.

One Protocol for each component, which is given the whole of it; ``Daemon`` implements them all, and
the tests of a component implement its own. What two components ask of each other is in their files.
"""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from atoll.collectives.codecs import U8
    from atoll.collectives.errors import AtollError, ConnectError, IdentityInUseError
    from atoll.peer.durable.disk import Room
    from atoll.peer.membership import events as ev
    from atoll.peer.membership.durable_records import ReadyRecord
    from atoll.peer.membership.messages import Begin
    from atoll.peer.membership.view import View
    from atoll.peer.net.examination import RunOutline
    from atoll.peer.streams.stream import DataStream
    from atoll.peer.telemetry.rows import LinkSeen
    from atoll.peer.verify.evidence import Evidence


class Log(Protocol):
    """Write the log of a daemon."""

    def note(self, kind: str, text: str, **fields: object) -> None:
        """Add a line of this kind; ``fields`` are for programs that read it."""


class Messenger(Log, Protocol):
    """Send messages on control links."""

    def send(self, peer: bytes, message: object, /) -> bool:
        """Send without blocking; return False if there is no control link to ``peer``."""


class Life(Protocol):
    """Keep a daemon going, or end it."""

    def spawn(self, work: Coroutine[Any, Any, None], /) -> None:
        """Run ``work`` as a task of the daemon, whose end ends it."""

    def stop(self, error: AtollError | None = None, /) -> None:
        """End the daemon, with this error as its reason."""


class ConnectionPort(Log, Protocol):
    """Hear what the connections of a daemon report, all in the event loop.

    ``on_up`` and ``on_down`` alternate for each peer, and ``on_message`` comes only between the
    two: raising RemoteProtocolError in it ends the link, and so does any other exception, which is
    our defect and is logged as one.
    """

    def life(self) -> int:
        """Return the number of this process: higher with every start of this peer's daemon."""

    def incarnation(self) -> int:
        """Return which memory of this peer it is, as a member."""

    def advertised(self) -> str:
        """Return the address at which others can dial this peer, for hellos."""

    def outline(self) -> RunOutline:
        """Return what the run trains, for `atoll doctor` on machines that may join it."""

    def member_peers(self) -> Collection[bytes]:
        """Return the members of the view that this peer is in, not of one it was told of."""

    def on_message(self, peer: bytes, message: object, /) -> None:
        """Take a message of a linked peer."""

    def on_up(self, peer: bytes, address: str, inc: int, /) -> None:
        """Hear of a new control link; ``address``: "" if the peer cannot be dialled."""

    def on_down(self, peer: bytes, why: str, /) -> None:
        """Hear that there is no control link to ``peer`` any more."""

    def on_data(self, peer: bytes, stream: DataStream, /) -> None:
        """Take a stream that ``peer`` has opened, which this side reads and must close."""

    def on_conflict(self, life: int, /) -> None:
        """Hear that our own identity runs elsewhere, as the process with a higher ``life``."""


class AdmissionPort(Messenger, Life, Protocol):
    """Serve the judge of passes."""

    def link_peers(self) -> Sequence[bytes]:
        """Return the peers with a control link."""

    def expel(self, peer: bytes, why: str, /) -> None:
        """End the link to ``peer`` and all its data streams."""

    def is_outside(self) -> bool:
        """Return whether this peer is in no view."""


class BanPort(Messenger, Life, Protocol):
    """Serve the keeper of bans."""

    def link_peers(self) -> Sequence[bytes]:
        """Return the peers with a control link."""

    def member_peers(self) -> Collection[bytes]:
        """Return the members of the view that this peer is in, not of one it was told of."""

    def expel(self, peer: bytes, why: str, /) -> None:
        """End the link to ``peer`` and all its data streams."""

    def banned(self, peers: Collection[bytes], /) -> None:
        """Tell the running attempts who is banned."""

    def took_part(self, terms: bytes, /) -> bool:
        """Return whether this peer took part in the attempt with these terms."""

    def feed(self, event: ev.Event, /) -> None:
        """Give the membership machine what is believed now."""


class AuditPort(Messenger, Protocol):
    """Serve audited attempts."""

    def life(self) -> int:
        """Return the number of this process."""

    def linked_life(self, peer: bytes, /) -> int:
        """Return to which process of a peer there is a control link; -1 without one."""

    def is_relayed(self, peer: bytes, /) -> bool:
        """Return whether the link to a peer leads through a third one."""

    def convict(self, evidence: Evidence, /) -> None:
        """Take evidence that was found here."""


class LinkMonitorPort(Messenger, Protocol):
    """Serve whoever measures links."""

    def view(self) -> View | None:
        """Return the view that this peer is in."""

    def begins(self) -> Iterable[Begin]:
        """Return the reductions that are under way, here or elsewhere in the view."""

    def link_peers(self) -> Sequence[bytes]:
        """Return the peers with a control link."""

    def is_local(self, peer: bytes, /) -> bool:
        """Return whether ``peer`` runs on this machine: nobody measures such a link."""

    def least_rtt_s(self, peer: bytes, /) -> float:
        """Return the least round trip over the control link to ``peer``; 0 if none is known."""

    def round_bytes(self, peers: int, /) -> int:
        """Return what this peer sends in one round with so many peers, as far as is known."""


class PlannerPort(Messenger, Protocol):
    """Serve whoever plans rounds."""

    def feed(self, event: ev.Event, /) -> None:
        """Give the membership machine the layout of a plan."""

    def relays(self) -> Mapping[bytes, float]:
        """Return what this peer and those linked to it carry of others' data, in bytes/s."""


class RoundsPort(Log, Protocol):
    """Serve the executor of rounds."""

    def feed(self, event: ev.Event, /) -> None:
        """Tell the membership machine what has come of an order."""

    def awaited_call(self, fragment: int, /) -> int | None:
        """Return the number of the trainer's call that waits for an answer; None if none does."""

    def tell_trainer(self, effect: ev.TellTrainer, call: int | None, /) -> None:
        """Tell the trainer what this call has come to, if it is still there and waits for it."""

    def round_committed(self, begin: Begin, took_s: float, tries: int, /) -> None:
        """Hear that a round is over, how long since its first BEGIN, and after how many tries."""


class CheckpointPort(Log, Protocol):
    """Serve whoever writes checkpoints."""

    def incarnation(self) -> int:
        """Return the number of this peer's memory."""

    def checkpointed(self, round_number: int, /) -> None:
        """Hear that a checkpoint of the state after this round is on the disk."""


class DurabilityPort(Log, Protocol):
    """Serve whoever writes down what is to be remembered."""

    def feed(self, event: ev.Event, /) -> None:
        """Tell the membership machine how far that is on the disk."""

    def lend_result(self, ready: ReadyRecord, /) -> AbstractContextManager[U8 | None]:
        """Give R of this READY, whose memory stays as it is meanwhile; None if it is gone."""

    def checkpoint_rounds(self) -> Collection[int]:
        """Return the rounds of the checkpoints of this history that are on the disk."""

    def writing_since(self) -> int | None:
        """Return the round from which on a checkpoint is being copied; None if none is."""

    def room(self) -> Room:
        """Return the room there is for checkpoints and rounds, and what these take. OSError."""

    def want_checkpoint(self) -> None:
        """Have a checkpoint written as soon as a round is committed."""


class ReconnectPort(Life, Protocol):
    """Serve whoever keeps links."""

    def dial_failed(self, error: ConnectError | IdentityInUseError, /) -> None:
        """Hear that a dial in the background has failed, and why."""


class ReachPort(Messenger, Life, Protocol):
    """Serve whoever finds out whether this peer can be dialled."""

    def feed(self, event: ev.Event, /) -> None:
        """Tell the membership machine whether this peer is outbound."""


class AdminPort(Protocol):
    """Serve the commands of people."""

    def leave(self) -> None:
        """Leave the run, and end then."""

    def feed(self, event: ev.Event, /) -> None:
        """Tell the membership machine what a person asks for."""


class RoundLinesPort(Log, Protocol):
    """Serve the lines of committed rounds."""

    def sent_for_rounds_bytes(self) -> int:
        """Return the bytes that this daemon has sent for rounds so far."""

    def new_loss(self) -> float | None:
        """Return the loss that the trainer has reported since the last call, if any."""


class RowsPort(Messenger, Protocol):
    """Serve whoever reports rounds to all (telemetry/reporter.py)."""

    def link_peers(self) -> Sequence[bytes]:
        """Return the peers with a control link."""

    def view(self) -> View | None:
        """Return the view that this peer is in."""

    def trainer_figures(self) -> Mapping[str, float]:
        """Return what the trainer has reported; nothing without one."""

    def new_heldout_loss(self) -> float | None:
        """Return the held-out loss that the trainer has reported since the last call, if any."""

    def links_seen(self) -> tuple[LinkSeen, ...]:
        """Return what was measured of the links to the other members."""

    def own_rates(self) -> tuple[int, int]:
        """Return what this peer's links carry, up and down, in bytes per second; 0: unknown."""

    def standing(self) -> tuple[str, str]:
        """Return the phase of this peer, and its last error."""

    def predicted_s(self) -> float:
        """Return what the plan has promised for the next exchange, in seconds; 0: nothing."""

    def last_round(self) -> int | None:
        """Return the run's last round; None while this peer is behind, and does not know."""


class DaemonPort(
    CheckpointPort,
    DurabilityPort,
    ConnectionPort,
    AdmissionPort,
    BanPort,
    AuditPort,
    LinkMonitorPort,
    PlannerPort,
    RoundsPort,
    RoundLinesPort,
    RowsPort,
    ReconnectPort,
    ReachPort,
    Protocol,
):
    """Serve every component."""
