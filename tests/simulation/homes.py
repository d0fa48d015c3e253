"""Keep what a search of all orders of events knows of each peer's disk; bring peers back from it.

A record that is to be synced is, at once: that the disk takes its time is for seeds (durable.py).
What need not be synced is there or not after a power cut: both are tried. R of a round is there if
its READY is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.bounded import BoundedNode

from atoll.peer.membership.durable_records import ReadyRecord, Record, Recovered, recovered
from atoll.peer.membership.node import Node
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import Member

__all__ = ["Home"]


@dataclass(frozen=True, eq=False)
class Home:
    """One peer's disk, and who has written it last. It is never changed in place."""

    member: Member
    life: int  # of the last process
    records: tuple[Record, ...]
    synced: int  # how many of these no power cut takes
    mark: int = 0  # of the records: to hash all of them each time would take long

    def written(self, record: Record, *, synced: bool) -> Home:
        records = (*self.records, record)
        count = len(records) if synced else self.synced
        return replace(self, records=records, synced=count, mark=hash((self.mark, record)))

    def after_cut(self, lost: int) -> Home:
        """Without the last so many records."""
        records = self.records[: len(self.records) - lost]
        mark = hash((self.mark, lost)) if lost else self.mark
        return replace(self, records=records, synced=len(records), mark=mark, life=self.life + 1)

    @property
    def found(self) -> Recovered:
        stored = {record.place for record in self.records if isinstance(record, ReadyRecord)}
        return recovered(self.records, len(self.records), (), stored)

    def process(self, timing: Timing) -> Node:
        return BoundedNode(self.member, timing, life=self.life, recovered=self.found)
