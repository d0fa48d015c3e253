"""Collect what `atoll demo` knows from the daemons' statuses. Pure: no clock, no I/O.

Views draw it, the summary judges it. Times are unix seconds of this machine, on which all daemons
of the demo run, so they compare.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

# Of a daemon's event log, what a spectator wants to see.
SHOWN_KINDS = frozenset(
    [
        "view",
        "dead",
        "retry",
        "miss",
        "give-up",
        "stragglers",
        "unsynced",
        "no-quorum",
        "diverged",
        "base-lost",
    ]
)
STATES = {"out": "joining", "learner": "loading", "candidate": "electing"}


@dataclass(frozen=True, slots=True)
class Happening:
    """Hold one line of the demo's own log; ``kind`` only chooses its colour."""

    at_s: float  # since the start
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class ProcessEnding:
    """Say how a process ended and how it should have; a negative code is a signal's number."""

    process: str
    wanted: int
    got: int | None  # None: it had to be killed


@dataclass(slots=True)
class PeerFigures:
    """Hold what is known of one peer, its daemon and its trainer, as last seen."""

    name: str
    newcomer: bool = False
    killed: bool = False
    ident: str = ""  # the daemon's short id
    state: str = "starting"
    activity: str = "starting"  # of the trainer
    round: int = 0
    digest: str = ""  # of the state after ``round``, empty while it is not known
    sent: dict[str, int] = field(default_factory=dict)  # bytes, by purpose
    received: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    contributed: int = 0  # committed rounds that this peer was part of
    waited_s: float = 0.0
    elapsed_s: float = 0.0
    commits_unix_s: list[float] = field(default_factory=list)
    noticed_unix_s: float | None = None  # first event about the death
    reformed_unix_s: float | None = None  # in a new view after the death

    @property
    def sent_bytes(self) -> int:
        """Return how many bytes the peer has sent, whatever for."""
        return sum(self.sent.values())

    @property
    def received_bytes(self) -> int:
        return sum(self.received.values())


@dataclass(slots=True)
class DemoFigures:
    """Hold what is known of the whole demo. ``observe`` takes one status of one peer."""

    founders: int
    rounds: int  # asked for; the run may go on until the newcomer has contributed
    chaos: bool
    started_unix_s: float = 0.0
    parameters: int = 0
    sync_every: int = 0
    codec: str = ""
    peers: list[PeerFigures] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)  # held-out, by round; 1: untrained
    digests: dict[int, dict[str, str]] = field(default_factory=dict)  # round -> peer -> digest
    happenings: list[Happening] = field(default_factory=list)
    endings: list[ProcessEnding] = field(default_factory=list)
    killed_unix_s: float | None = None
    killed_round: int = 0  # the last that was committed before the kill
    killed_coordinator: bool = False
    orphaned_s: float | None = None  # from the kill until the trainer of the dead daemon ended
    joined_round: int = 0  # of the run when the newcomer was started
    left_s: float = 0.0  # the slowest clean leave
    duration_s: float = 0.0
    doing: str = "starting"  # what the script waits for
    _seen: set[tuple[str, str]] = field(default_factory=set)

    # ------------------------------------------------------------ taking in

    def observe(self, peer: PeerFigures, status: dict[str, Any]) -> None:
        """Take in what ``atoll status --json`` says about ``peer``."""
        peer.ident = status["peer"]
        phase = status["phase"]
        peer.state = "loading" if not status["synced"] else STATES.get(phase, phase)
        peer.round, peer.digest = status["round"], status["digest"]
        moved = status["bytes"]
        peer.sent, peer.received = moved["sent"], moved["received"]
        if status["spec"]:
            self.parameters = status["parameters"]
            self.sync_every, self.codec = status["spec"]["sync_every"], status["spec"]["codec"]
        if peer.digest:
            self.digests.setdefault(peer.round, {})[peer.name] = peer.digest
        commit_unix_s = status["last_commit_unix_s"]
        if commit_unix_s and commit_unix_s not in peer.commits_unix_s[-1:]:
            peer.commits_unix_s.append(commit_unix_s)
        self._observe_trainer(peer, status["trainer"])
        for event in status["events"]:
            self._observe_event(peer, event)

    def _observe_trainer(self, peer: PeerFigures, trainer: dict[str, Any] | None) -> None:
        if trainer is None:
            return
        peer.activity = "waiting" if trainer["waiting"] else "training"
        self.observe_metrics(peer, trainer["metrics"])

    def observe_metrics(self, peer: PeerFigures, metrics: dict[str, float]) -> None:
        """Take in what a trainer has reported."""
        if "untrained_loss" in metrics:
            self.losses[1] = metrics["untrained_loss"]
        if "heldout_round" not in metrics:
            return
        if "heldout_loss" in metrics:  # a daemon keeps none that is no number any more
            self.losses[int(metrics["heldout_round"])] = metrics["heldout_loss"]
        peer.steps, peer.contributed = int(metrics["steps"]), int(metrics["contributed"])
        peer.waited_s, peer.elapsed_s = metrics["waited_s"], metrics["elapsed_s"]

    def _observe_event(self, peer: PeerFigures, event: dict[str, Any]) -> None:
        kind, text, unix_s = event["kind"], event["text"], event["unix_s"]
        if self.killed_unix_s is not None and unix_s > self.killed_unix_s:
            if kind in ("dead", "view") and peer.noticed_unix_s is None:
                peer.noticed_unix_s = unix_s
            if kind == "view" and peer.reformed_unix_s is None:
                peer.reformed_unix_s = unix_s
        if kind in SHOWN_KINDS and (kind, text) not in self._seen:
            self._seen.add((kind, text))  # every daemon says the same about a view
            said = text if kind in ("view", "dead") else f"{peer.name}: {text}"
            self.happenings.append(Happening(unix_s - self.started_unix_s, kind, said))

    def with_names(self, text: str) -> str:
        """Return a happening's text with the demo's names instead of short ids.

        For when it is shown: a daemon may speak of a peer before that one was first asked.
        """
        for peer in self.peers:
            if peer.ident:
                text = text.replace(peer.ident, peer.name)
        return text

    # ------------------------------------------------------------ what follows from it

    @property
    def living(self) -> list[PeerFigures]:
        return [peer for peer in self.peers if not peer.killed]

    @property
    def survivors(self) -> list[PeerFigures]:
        return [peer for peer in self.living if not peer.newcomer]

    @property
    def newcomer(self) -> PeerFigures | None:
        return next((peer for peer in self.peers if peer.newcomer), None)

    @property
    def round(self) -> int:
        return max((peer.round for peer in self.living), default=0)

    @property
    def last_loss(self) -> float | None:
        return self.losses[max(self.losses)] if len(self.losses) > 1 else None

    @property
    def noticed_s(self) -> float | None:
        """Return the seconds from the kill to the first survivor's first event about it."""
        known = [peer.noticed_unix_s for peer in self.survivors if peer.noticed_unix_s]
        return self._since_kill(min(known, default=None))

    @property
    def reformed_s(self) -> float | None:
        """Return the seconds from the kill until the last survivor was in a new view.

        None if there was none yet.
        """
        return self._since_kill(_last([peer.reformed_unix_s for peer in self.survivors]))

    @property
    def committed_s(self) -> float | None:
        """Return the seconds from the kill to the next commit, as the last survivor saw it."""
        return self._since_kill(_last([self._next_commit_unix_s(p) for p in self.survivors]))

    @property
    def usual_s(self) -> float | None:
        """Return the median seconds from commit to commit before the kill."""
        end_unix_s = self.killed_unix_s or float("inf")
        gaps = [
            late - early
            for peer in self.peers
            for early, late in pairwise(peer.commits_unix_s)
            if late < end_unix_s
        ]
        return median(gaps) if gaps else None

    @property
    def waiting_share(self) -> float:
        """Return the share of all trainers' time that went into waiting for commits: 0 to 1."""
        elapsed_s = sum(peer.elapsed_s for peer in self.peers)
        return sum(peer.waited_s for peer in self.peers) / elapsed_s if elapsed_s else 0.0

    def _next_commit_unix_s(self, peer: PeerFigures) -> float | None:
        # A commit that the dead coordinator had already sent is not the survivors' own.
        since_unix_s = peer.noticed_unix_s or self.killed_unix_s
        if since_unix_s is None:
            return None
        return next((at for at in peer.commits_unix_s if at > since_unix_s), None)

    def _since_kill(self, moment_unix_s: float | None) -> float | None:
        if self.killed_unix_s is None or moment_unix_s is None:
            return None
        return moment_unix_s - self.killed_unix_s


def _last(moments: list[float | None]) -> float | None:
    """Return the latest, or None while one is not known."""
    known = [moment for moment in moments if moment is not None]
    return max(known) if known and len(known) == len(moments) else None
