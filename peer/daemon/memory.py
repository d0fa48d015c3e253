"""Open what a peer's home remembers, and decide whether it is the same voter as before.

A voter's memory has a number, its *incarnation*, which stands in views; a process has another, its
*life*. A restart is another life of the same incarnation, as long as the ledger is there and whole.
A home that is new, damaged, copied, or that takes another role, begins a new one: without a vote,
until the group has let it in.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from atoll.peer.checkpoint.schedule import Checkpointer, checkpoint_bytes
from atoll.peer.daemon.options import DaemonOptions
from atoll.peer.durable import (
    CHECKPOINT_FOLDER,
    CHECKPOINTS_KEPT,
    OFF,
    ROUNDS,
    ROUNDS_FOLDER,
    ROUNDS_KEPT,
)
from atoll.peer.durable.disk import RealDisk, Room
from atoll.peer.durable.ledger import DurableLedger, open_ledger
from atoll.peer.durable.ledger_format import LedgerVerdict
from atoll.peer.durable.round_files import RoundFiles
from atoll.peer.membership.durable_records import Recovered, recovered
from atoll.peer.membership.view import REPLICA
from atoll.peer.net.identity import Home
from atoll.peer.rounds.recovery import HomeReader
from atoll.peer.rounds.state import ReplicatedState


@dataclass(slots=True)
class HomeMemory:
    """Hold what a home remembers, and the files in which that goes on.

    ``lines`` say for people what became of its ledger.
    """

    recovered: Recovered
    reader: HomeReader | None  # of the state that goes with it; None: a new memory begins
    ledger: DurableLedger
    rounds: RoundFiles | None
    lines: tuple[str, ...] = ()

    def incarnation(self, life: int) -> int:
        """Return the incarnation that goes on here; the number of this life if none does."""
        return self.recovered.inc or life


def checkpoint_folder(home: Home, options: DaemonOptions) -> Path | None:
    """Return where the checkpoints are that stand for rounds; None where none are written."""
    if options.checkpoint is not None:
        return options.checkpoint
    keeps = options.durable == ROUNDS and options.role == REPLICA
    return home.path / CHECKPOINT_FOLDER if keeps else None


def open_memory(home: Home, options: DaemonOptions) -> HomeMemory | None:
    """Read the ledger of a home, and which rounds and checkpoints it has.

    None with ``--durable off``. Raises OSError, DiskError or ConfigError where the ledger cannot be
    opened. For a worker thread.
    """
    if options.durable == OFF:
        return None
    disk = RealDisk()
    opened = open_ledger(disk, home.path)
    holds_state = options.role == REPLICA
    keeps = holds_state and options.durable == ROUNDS
    rounds = RoundFiles(disk, home.path / ROUNDS_FOLDER) if keeps else None
    folder = checkpoint_folder(home, options)
    reader = HomeReader(
        opened, rounds, folder, options.run, options.secret, holds_state=holds_state
    )
    is_news = opened.verdict not in (LedgerVerdict.NEW, LedgerVerdict.WHOLE)
    lines = (opened.text,) if is_news else ()
    if _is_same_voter(home, options, reader.recovered):
        return HomeMemory(reader.recovered, reader, opened.ledger, rounds, lines)
    opened.ledger.compact((), opened.position)  # a new memory begins; positions go on
    return HomeMemory(recovered((), opened.position), None, opened.ledger, rounds, lines)


def room_of(home: Home, checkpointer: Checkpointer | None, state: ReplicatedState | None) -> Room:
    """Return the room of a home for what rounds that survive a restart take. OSError.

    What it has of them already counts as room. Checkpoints that lie elsewhere count nothing.
    """
    folder = home.path / ROUNDS_FOLDER
    space = os.statvfs(home.path)
    has_bytes = space.f_bavail * space.f_frsize
    with os.scandir(folder) as files:
        has_bytes += sum(file.stat().st_size for file in files)
    if state is None:
        return Room(has_bytes, 0)
    needs_bytes = ROUNDS_KEPT * state.result_bytes
    if checkpointer is not None and checkpointer.folder == home.path / CHECKPOINT_FOLDER:
        has_bytes += checkpointer.taken_bytes()
        needs_bytes += CHECKPOINTS_KEPT * checkpoint_bytes(state)
    return Room(has_bytes, needs_bytes)


def _is_same_voter(home: Home, options: DaemonOptions, known: Recovered) -> bool:
    """Return whether what the ledger remembers goes on in this process."""
    if options.resume is not None:
        return False  # a history of its own begins
    if options.founds:
        return False
    view = known.view
    mine = view.member(home.peer_id) if view is not None else None
    return view is None or (mine is not None and mine.role == options.role)
