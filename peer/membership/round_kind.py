"""Decide how the coordinator opens a round: of which call, with which objects, without whom."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from atoll.peer.membership.messages import Begin
from atoll.peer.membership.operations import Call, agreed, keep_objects, pack_objects
from atoll.peer.membership.roster import Roster
from atoll.peer.rounds.entries import GATHER, INIT, STEP


@dataclass(frozen=True, slots=True)
class RoundKind:
    """Hold what BEGIN says beside participants and weights."""

    operation: Call = None
    blob: bytes = b""
    without: tuple[bytes, ...] = ()
    aside: tuple[bytes, ...] = ()


def choose(arrived: Collection[bytes], roster: Roster) -> tuple[str, tuple[bytes, ...]]:
    """Return the kind of the next round, and who of those that have arrived wants just that."""
    calls = {peer: roster.heartbeats[peer].operation for peer in arrived}
    call = agreed(calls, roster.since)
    return call.kind if call else STEP, tuple(peer for peer in arrived if calls[peer] == call)


def opening(
    kind: str,
    chosen: tuple[bytes, ...],
    before: Begin | None,
    roster: Roster,
    left_out: Collection[bytes],
) -> RoundKind:
    """Return what BEGIN says of an attempt beside its participants and weights.

    It is the attempt that follows ``before``, or the first one at a round. ``left_out``: peers
    whose trainers were waited for, or want another round than this.
    """
    if kind == INIT:
        return RoundKind()
    if before is not None:
        without = {*before.without, *before.participants}.difference(chosen)
        kept = keep_objects(before.blob, before.participants, chosen) if kind == GATHER else b""
        there = tuple(peer for peer in before.aside if peer in roster.view.peers)
        return RoundKind(before.operation, kept, tuple(sorted(without)), there)
    given = [roster.given(peer) for peer in chosen]
    operation = None if kind == STEP else roster.heartbeats[chosen[0]].operation
    others = tuple(sorted(set(left_out).difference(chosen)))
    aside = [p for p in others if (b := roster.heartbeats.get(p)) and b.arrived]
    return RoundKind(
        operation,
        pack_objects(given) if kind == GATHER else b"",
        others,
        tuple(p for p in aside if roster.heartbeats[p].operation != operation),
    )
