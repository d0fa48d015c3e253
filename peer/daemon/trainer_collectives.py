"""Do the daemon's side of a session's own collectives: take calls in, hand results out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import ConfigError, SessionError
from atoll.optim.run_spec import check_collectives
from atoll.peer.client.shared_memory import Region
from atoll.peer.membership import events as ev
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.messages import GATHER, REDUCE, Begin
from atoll.peer.membership.operations import (
    OBJECT_BYTES_MAX,
    Operation,
    object_sizes,
    unpack_objects,
)
from atoll.peer.membership.view import short
from atoll.peer.rounds.state import ReplicatedState

Floats = NDArray[np.float32]


def call_of(arguments: dict[str, Any], own: MemberState) -> ev.Submitted:
    """Return what the trainer has called. Raise ConfigError if that cannot be."""
    given = bytes(arguments.get("given", b""))
    if len(given) > OBJECT_BYTES_MAX:
        raise ConfigError(
            f"an object of {len(given):,} bytes; at most {OBJECT_BYTES_MAX:,}",
            fix="gather less, or use all_reduce for vectors",
        )
    try:
        operation = Operation(
            str(arguments["kind"]),
            int(arguments.get("elements", 0)),
            str(arguments.get("op", "")),
            str(arguments.get("codec", "")),
        )
    except ValueError as error:
        raise ConfigError(f"no such collective: {error}") from error
    return ev.Submitted(own.round, own.epoch, 1.0, 0, operation, given)


def halves_of(region: Region | None, operation: Operation | None) -> tuple[Floats, Floats] | None:
    """Return where the vector lies, and where its result goes; None for other operations.

    Raises SessionError if there is no memory for it.
    """
    if operation is None or operation.kind != REDUCE:
        return None
    elements, half = operation.elements, region.count // 2 if region is not None else 0
    if region is None or not 0 < elements <= half:
        raise SessionError(
            f"no memory was asked for {elements:,} elements",
            fix="call session.all_reduce(), which asks for it",
        )
    return region.floats[:elements], region.floats[half : half + elements]


def why_not_now(own: MemberState, state: ReplicatedState | None, *, in_view: bool) -> str:
    """Return why the call has to wait; "" if it need not.

    Raises ConfigError if waiting would not help.
    """
    if state is not None:
        check_collectives(state.spec)
    if own.unsynced or not in_view:
        return "this peer is catching up with the others"
    if own.contributes:  # what a trainer before this one has submitted
        return "a round is under way in which this peer takes part already"
    return ""


def outcome_of(effect: ev.TellTrainer, call: int) -> dict[str, Any]:
    """Return what the trainer hears, with the number of its call."""
    told = {"kind": effect.kind, "round": effect.round, "call": call, "text": effect.text}
    begin = effect.begin
    return told if begin is None else told | _result(begin)


def _result(begin: Begin) -> dict[str, Any]:
    names = [short(peer) for peer in begin.participants]
    if begin.kind != GATHER:
        return {"peers": names}
    objects = unpack_objects(begin.blob, len(names))
    if objects is None:
        return {"sizes": list(zip(names, object_sizes(begin.blob, len(names)), strict=True))}
    return {"objects": list(zip(names, objects, strict=True)), "sizes": []}
