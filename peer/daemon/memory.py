"""Open what a peer's home remembers, and decide whether it is the same voter as before.

A voter's memory has a number, its *incarnation*, which stands in views; a process has another, its
*life*. A restart is another life of the same incarnation, as long as the ledger is there and whole.
A home that is new, damaged, copied, or that takes another role, begins a new one: without a vote,
until the group has let it in.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atoll.peer.daemon.options import DaemonOptions
from atoll.peer.durable import OFF, ROUNDS
from atoll.peer.durable.disk import RealDisk
from atoll.peer.durable.ledger import DurableLedger, OpenedLedger, open_ledger
from atoll.peer.durable.ledger_format import LedgerVerdict
from atoll.peer.durable.round_files import RoundFiles
from atoll.peer.membership.durable_records import recovered
from atoll.peer.membership.view import REPLICA
from atoll.peer.net.identity import Home
from atoll.peer.rounds.recovery import HomeContents, read_home

ROUNDS_FOLDER = "rounds"
CHECKPOINT_FOLDER = "checkpoint"


@dataclass(slots=True)
class HomeMemory:
    """Hold what a home remembers, and the files in which that goes on."""

    contents: HomeContents
    ledger: DurableLedger
    rounds: RoundFiles | None

    def incarnation(self, life: int) -> int:
        """Return the incarnation that goes on here; the number of this life if none does."""
        return self.contents.recovered.inc or life


def checkpoint_folder(home: Home, options: DaemonOptions) -> Path | None:
    """Return where the checkpoints are that stand for rounds; None where none are written."""
    if options.checkpoint is not None:
        return options.checkpoint
    keeps = options.durable == ROUNDS and options.role == REPLICA
    return home.path / CHECKPOINT_FOLDER if keeps else None


def open_memory(home: Home, options: DaemonOptions) -> HomeMemory | None:
    """Read the ledger, the rounds and the checkpoints of a home; None with ``--durable off``.

    Raises OSError, DiskError or ConfigError where the ledger cannot be opened. For a worker thread.
    """
    if options.durable == OFF:
        return None
    disk = RealDisk()
    opened = open_ledger(disk, home.path)
    holds_state = options.role == REPLICA
    keeps = holds_state and options.durable == ROUNDS
    rounds = RoundFiles(disk, home.path / ROUNDS_FOLDER) if keeps else None
    folder = checkpoint_folder(home, options)
    contents = read_home(
        opened, rounds, folder, options.run, options.secret, holds_state=holds_state
    )
    if opened.verdict not in (LedgerVerdict.NEW, LedgerVerdict.WHOLE):
        contents.lines.insert(0, opened.text)
    if not _is_same_voter(home, options, contents):
        _forget(contents, opened)
    return HomeMemory(contents, opened.ledger, rounds)


def _is_same_voter(home: Home, options: DaemonOptions, contents: HomeContents) -> bool:
    """Return whether what the ledger remembers goes on in this process."""
    if options.resume is not None:
        return False  # a history of its own begins
    if options.founds:
        return False
    view = contents.recovered.view
    mine = view.member(home.peer_id) if view is not None else None
    return view is None or (mine is not None and mine.role == options.role)


def _forget(contents: HomeContents, opened: OpenedLedger) -> None:
    """Begin a new memory; positions go on."""
    contents.recovered = recovered((), opened.position)
    contents.records.clear()
    contents.replayed.clear()
    contents.held.clear()
    if contents.state is not None:
        contents.state.close()
        contents.state = None
