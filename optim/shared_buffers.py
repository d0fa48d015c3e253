"""Replace a model's buffers by those of all participants of a round: their mean, their maximum.

Buffers are no state of the run that daemons keep. Each participant publishes its own under the
number of the round, and asks the others for theirs. A trainer that waits for rounds anyway waits
for these too, a few seconds at most; one that does not, looks at the next round, and keeps what has
happened to its own meanwhile. Where those of a peer do not come they are left out: then buffers
differ a little until the next round. A newcomer begins with those of any member.

In an asynchronous run a round has a peer or two. There whoever has had one takes the newest that
each member has published: what it has trained since is not in them yet, as in a pseudo-gradient.
Replicas (noloco.py) share them in the groups that exchange parameters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from atoll.collectives.codecs import F32
from atoll.optim.buffers import merged, moved
from atoll.optim.model_buffers import ModelBuffers
from atoll.optim.sessions import GossipSession, VectorAsked
from atoll.optim.side_channel import OF_PARTNERS, SideChannel
from atoll.optim.trainer import say

NAME = "buffers"
CODEC = "float32"
WAIT_S = 5.0  # for the buffers of all others together: they are a few round trips away
# Rounds for each member of an asynchronous run until the buffers of one that has published none
# since are left out. Its trainer has ended, or is so much slower than the others.
STALE_ROUNDS = 8
NEWEST = 0  # instead of a round's number: whatever there is


class SharedBuffers:
    """Share the buffers of one trainer with the others.

    ``waits``: its rounds end for all at about the same time, or what it needs is there when they
    end; ``of_all``: it takes those of members that are in no round of its own as well.
    """

    def __init__(
        self, peer: object, buffers: ModelBuffers, *, waits: bool, of_all: bool = False
    ) -> None:
        self._buffers, self._waits, self._of_all = buffers, waits, of_all
        self._companions = SideChannel(peer, NAME)
        self._then: F32 | None = None  # what was published last, if nothing has come of it yet
        self._others: list[tuple[int, VectorAsked]] = []  # and whose were asked for: place, vector
        self._mine = 0  # its own place among the participants
        self._said = False

    def take(self, number: int) -> None:
        """Take over the buffers of any member, at the beginning."""
        self._then, self._others = None, []
        found = self._companions.any(number, self._buffers.elements)
        if found is not None:
            self._read(found[1])

    def round_over(self, number: int, peers: Sequence[str], weight: float) -> None:
        """Publish and average the buffers after a round that has been committed.

        ``peers``: its participants in the order of their ids, this one among them with this weight;
        of ranks, each gives its part of the weight.
        """
        if self._then is not None:
            self._finish(0.0)
        self.publish(number, weight)
        self.average(number, peers)

    def publish(self, number: int, weight: float = 1.0) -> None:
        """Publish the buffers as they are now, for whoever needs them."""
        self._then = self._buffers.vector(self._companions.total(weight))
        then = self._then

        def publish(session: GossipSession) -> F32:
            try:
                session.publish(NAME, number, then.copy(), CODEC)
            except OF_PARTNERS as error:  # NaN: others are better off without, as this trainer is
                self._say(f"the buffers of this trainer were not published: {error.what}")
            return np.zeros(0, np.float32)

        self._companions.lead(publish, 0)

    def average(self, number: int, peers: Sequence[str]) -> None:
        """Average what was published under this number with the buffers of these peers."""

        def ask(session: GossipSession) -> F32:
            self._ask(session, number, peers)
            return np.zeros(0, np.float32)

        self._companions.lead(ask, 0)
        if self._waits:
            self._finish(WAIT_S)

    def own(self) -> F32:
        """Return the buffers of this trainer, for ``show``."""
        return self._buffers.vector()

    def show(self, names: Sequence[str], own: F32) -> None:
        """Put into the model the mean of the buffers that these have published last.

        ``own`` are those of this trainer; they alone if there is nothing of the others.
        """

        def look(session: GossipSession) -> F32:
            self._ask(session, NEWEST, names)
            return self._mean(own, WAIT_S)

        self._read(self._companions.lead(look, own.size))

    def _ask(self, session: GossipSession, number: int, peers: Sequence[str]) -> None:
        self._others, self._mine = [], -1
        peers = session.members().names if self._of_all else peers
        for place, name in enumerate(peers):
            if name == session.peer_name:
                self._mine = place
                continue
            try:
                is_newest = self._of_all or number == NEWEST
                which = session.newest(name, NAME) if is_newest else number
                if which and which >= number - STALE_ROUNDS * len(peers):
                    elements = self._buffers.elements
                    asked = session.ask_vector(name, NAME, which, elements, CODEC)
                    self._others.append((place, asked))
            except OF_PARTNERS as error:
                self._say(f"the buffers of {name} were left out: {error.what}")

    def _finish(self, wait_s: float) -> None:
        """Finish the average with the buffers that are here after so many seconds."""
        then, self._then = self._then, None
        assert then is not None
        mean = self._companions.lead(lambda _: self._mean(then, wait_s), then.size)
        now = self._buffers.vector()
        self._read(mean if self._waits else moved(now, then, mean, self._buffers.floats))

    def _mean(self, then: F32, wait_s: float) -> F32:
        until_s = time.monotonic() + wait_s
        is_one = self._mine >= 0 and bool(np.isfinite(then).all())
        parts = {self._mine: then} if is_one else {}
        for place, asked in self._others:
            try:
                asked.wait(max(0.0, until_s - time.monotonic()))
                values = asked.read().copy()
                asked.drop()
                merged([values], self._buffers.floats)  # raises for what cannot be
            except OF_PARTNERS as error:
                self._say(f"{asked} was left out: {error.what}")
            else:
                parts[place] = values
        self._others = []
        if not parts:
            return then
        return merged([parts[place] for place in sorted(parts)], self._buffers.floats)

    def _read(self, flat: F32) -> None:
        if np.isfinite(flat).all():
            self._buffers.read(flat)

    def _say(self, what: str) -> None:
        if not self._said:
            self._said = True  # once: it is no more than a little less of a mean
            say(f"{what}")
