"""Commit the rounds of a session's own collectives."""

from __future__ import annotations

import numpy as np

from atoll.peer.membership import events as ev
from atoll.peer.rounds.attempt_table import AttemptRun
from atoll.peer.rounds.entries import EntryHead
from atoll.peer.rounds.replica import Replica
from atoll.peer.rounds.state import ReplicatedState


def commit_operation(replica: Replica, effect: ev.Apply, job: AttemptRun | None) -> ReplicatedState:
    """Hand the result of a REDUCE to our trainer, and move the state on by a round.

    The round changes nothing in the state. ``job``: None if this peer takes no part in a REDUCE. In
    a worker thread.

    The log keeps the entry without its bytes: laggards need its place in the history only.
    CodecError if the result does not decode.
    """
    state, out, begin = replica.state, replica.outputs, effect.begin
    assert state is not None
    if job is not None:
        result = job.result
        if out is not None and out.size == result.grid.total:
            for chunk in range(result.grid.count):
                lo, hi = result.grid.bounds(chunk)
                result.codec.decode(result.view(chunk), out[lo:hi])
        if not job.is_read:
            replica.log.give_back(result.array)
    head = EntryHead(begin.round, begin.kind, 0, begin.origins, b"", effect.root, effect.chain)
    nothing = np.empty(0, np.uint8)
    state.apply(head, nothing)
    replica.log.append(head, nothing, state.digest)
    return state
