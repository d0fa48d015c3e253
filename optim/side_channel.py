"""Hand small vectors from one trainer of a run to another, beside its rounds.

Each is published under a name and the number of a round, and whoever needs it asks for it
(peer/client/trainer_channel.py). No round needs any of them: where a vector is lacking, a trainer
goes on without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np

from atoll.collectives.codecs import F32
from atoll.collectives.errors import (
    CodecError,
    ConnectError,
    ProtocolError,
    RoundError,
    StateError,
)
from atoll.optim.sessions import LeadingRank, VectorChannel

# What may be wrong with another peer, and is no reason to end.
OF_PARTNERS = (CodecError, ConnectError, ProtocolError, RoundError, StateError)
CODEC = "float32"
ASKED_MAX = 9  # a joiner waits for each in turn; four of them may lie
WAIT_S = 5.0  # for a vector that should be there, or about to come


class SideChannel:
    """Publish vectors of one trainer, and get those of the others.

    In a trainer that consists of several ranks the first one asks, and all have what it hears.
    """

    def __init__(self, channel: object, name: str) -> None:
        self._channel, self._name = channel, name

    def publish(self, number: int, values: F32) -> None:
        """Publish float32[n] under this number, for whoever asks."""

        def publish(session: VectorChannel) -> F32:
            session.publish(self._name, number, values.copy(), CODEC)
            return np.empty(0, np.float32)

        self.lead(publish, 0)

    def any(self, number: int, elements: int, *, most: bool = False) -> tuple[int, F32] | None:
        """Return a vector that some member has published, after its number; None if there is none.

        One of this ``number`` is preferred, else the newest that can be had. What this peer has
        published counts as well: its trainer may have ended since. ``most``: prefer what most of
        the first ``ASKED_MAX`` members that are at this number say, so that no single one can
        mislead.
        """

        def look(session: VectorChannel) -> F32:
            found = _agreed(session, self._name, number, elements) if most else None
            found = found or _look(session, self._name, number, elements)
            # A number has up to 44 bits, of which a float32 holds 24.
            which = [0, 0] if found is None else divmod(found[0], 1 << 20)
            values = np.zeros(elements, np.float32) if found is None else found[1]
            return np.concatenate([np.array(which, np.float32), values])

        answer = self.lead(look, 2 + elements)
        found = (int(answer[0]) << 20) + int(answer[1])
        return (found, answer[2:]) if found else None

    def lead(self, ask: Callable[[VectorChannel], F32], elements: int) -> F32:
        """Return what ``ask`` hears, float32[elements], in every process of this trainer."""
        if isinstance(self._channel, LeadingRank):
            return self._channel.lead(ask, elements)
        return ask(cast(VectorChannel, self._channel))

    def total(self, mine: float) -> float:
        """Return the sum of ``mine`` over the processes of this trainer."""
        return self._channel.total(mine) if isinstance(self._channel, LeadingRank) else mine


def _agreed(session: VectorChannel, name: str, number: int, n: int) -> tuple[int, F32] | None:
    told: list[bytes] = []
    for member in session.members().names:
        if len(told) == ASKED_MAX:
            break
        try:
            if number <= session.newest(member, name) <= number + 1:
                told.append(fetched(session, member, name, number, n).tobytes())
        except OF_PARTNERS:
            continue
    told = [data for data in told if len(data) == 4 * n]
    best = next((data for data in told if 2 * told.count(data) > len(told)), None)
    return None if best is None else (number, np.frombuffer(best, np.float32).copy())


def fetched(session: VectorChannel, member: str, name: str, number: int, n: int) -> F32:
    """Return float32[n] that a member has published, or is about to.

    Raises what may be wrong with others (OF_PARTNERS).
    """
    asked = session.ask_vector(member, name, number, n, CODEC)
    asked.wait(WAIT_S)
    values = asked.read().copy()
    asked.drop()
    return values


def _look(session: VectorChannel, name: str, number: int, elements: int) -> tuple[int, F32] | None:
    newest: dict[str, int] = {}
    for member in session.members().names:
        try:
            newest[member] = session.newest(member, name)
        except OF_PARTNERS:
            continue
    # Who is at this number still has it, and who is a step further too. Then whoever is furthest.
    near = [m for m, n in newest.items() if number <= n <= number + 1]
    wanted = [(m, number) for m in near]
    wanted += sorted(((m, n) for m, n in newest.items() if n), key=lambda one: -one[1])
    for member, which in wanted:
        try:
            values = fetched(session, member, name, which, elements)
        except OF_PARTNERS:
            continue
        if values.size == elements:
            return which, values
    return None
