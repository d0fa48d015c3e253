"""Bring the buffers of all trainers' models together: their mean, their maximum.

Float buffers (BatchNorm statistics and the like) become the weighted mean over those who trained
them, integers the maximum: a counter of batches is to go on, not to be an average. Floats that are
the same for all, as those of a table, keep their bits: a mean of equal values is rounded, and would
drift. No paper on methods with local steps says what to do with buffers; most reference code leaves
them alone, and then no two replicas evaluate alike.

Buffers are no state of the run that daemons keep. Each participant of a round publishes its own
under the number of the round, and asks the others for theirs (``SharedBuffers``). A trainer that
waits for rounds anyway waits for these too, a few seconds at most; one that does not, looks at the
next round, and keeps what has happened to its own meanwhile. Where those of a peer do not come they
are left out: then buffers differ a little until the next round. A newcomer begins with those of any
member. In an asynchronous run a round has a peer or two. There whoever has had one takes the newest
that each member has published: what it has trained since is not in them yet, as in a
pseudo-gradient. Replicas (noloco.py) share them in the groups that exchange parameters.

Where trainers exchange something at every step anyway, they do so now and then (``StepBuffers``).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from atoll.collectives.codecs import F32
from atoll.collectives.errors import RemoteProtocolError
from atoll.optim.every_step.exchange import Exchanged
from atoll.optim.model_io import PIECES, ModelBuffers, join, split
from atoll.optim.sessions import VectorAsked, VectorChannel
from atoll.optim.side_channel import OF_PARTNERS, SideChannel
from atoll.peer.client.console import say

NAME = "buffers"
CODEC = "float32"
WAIT_S = 5.0  # for the buffers of all others together: they are a few round trips away
# Rounds for each member of an asynchronous run until the buffers of one that has published none
# since are left out. Its trainer has ended, or is so much slower than the others.
STALE_ROUNDS = 8
NEWEST = 0  # instead of a round's number: whatever there is
INTEGERS_MAX = 4096  # 32 KiB of what a trainer gathers at a step; BatchNorm has one for each layer
DIGEST_BYTES = 8  # of each float buffer, in the same gather


class SharedBuffers:
    """Share the buffers of one trainer with the others.

    ``waits``: its rounds end for all at about the same time, or what it needs is there when they
    end; ``of_all``: it takes those of members that are in no round of its own as well.
    """

    def __init__(
        self, channel: object, buffers: ModelBuffers, *, waits: bool, of_all: bool = False
    ) -> None:
        self._buffers, self._waits, self._of_all = buffers, waits, of_all
        self._side = SideChannel(channel, NAME)
        self._then: F32 | None = None  # what was published last, if nothing has come of it yet
        self._others: list[tuple[int, VectorAsked]] = []  # and whose were asked for: place, vector
        self._mine = 0  # its own place among the participants
        self._said = False

    def take(self, number: int) -> None:
        """Take over the buffers of any member, at the beginning."""
        self._then, self._others = None, []
        found = self._side.any(number, self._buffers.elements)
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
        self._then = self._buffers.vector(self._side.total(weight))
        then = self._then

        def publish(session: VectorChannel) -> F32:
            try:
                session.publish(NAME, number, then.copy(), CODEC)
            except OF_PARTNERS as error:  # NaN: others are better off without, as this trainer is
                bad = ", ".join(self._buffers.not_finite()[:5])
                why = f"NaN or Inf in {bad}" if bad else error.what
                self._say(f"the buffers of this trainer were not published: {why}")
            return np.zeros(0, np.float32)

        self._side.lead(publish, 0)

    def average(self, number: int, peers: Sequence[str]) -> None:
        """Average what was published under this number with the buffers of these peers."""

        def ask(session: VectorChannel) -> F32:
            self._ask(session, number, peers)
            return np.zeros(0, np.float32)

        self._side.lead(ask, 0)
        if self._waits:
            self._finish(WAIT_S)

    def own(self) -> F32:
        """Return the buffers of this trainer, for ``show``."""
        return self._buffers.vector()

    def show(self, names: Sequence[str], own: F32) -> None:
        """Put into the model the mean of the buffers that these have published last.

        ``own`` are those of this trainer; they alone if there is nothing of the others.
        """

        def look(session: VectorChannel) -> F32:
            self._ask(session, NEWEST, names)
            return self._mean(own, WAIT_S)

        self._read(self._side.lead(look, own.size))

    def _ask(self, session: VectorChannel, number: int, peers: Sequence[str]) -> None:
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
        mean = self._side.lead(lambda _: self._mean(then, wait_s), then.size)
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


def merged(parts: Sequence[F32], floats: int) -> F32:
    """Merge the vectors of several trainers: float buffers by weighted mean, integers by maximum.

    A float that is the same in all parts stays as it is, as its mean would be rounded.

    ``parts`` come in one order everywhere; ``floats``: how many elements of each are float buffers.
    The weight of the result is the sum. Raise RemoteProtocolError for what is no such vector.
    """
    weights = [float(part[0]) for part in parts]
    if not all(np.isfinite(part).all() for part in parts) or not all(w > 0 for w in weights):
        raise RemoteProtocolError("what came of buffers has a weight or a value that cannot be")
    total = sum(weights)
    mean: F32 = np.zeros(floats, np.float32)
    for part, weight in zip(parts, weights, strict=True):
        mean += np.float32(weight / total) * part[1 : 1 + floats]
    bits = [part[1 : 1 + floats].view(np.int32) for part in parts]
    are_same = np.all([each == bits[0] for each in bits], axis=0)
    np.copyto(mean, parts[0][1 : 1 + floats], where=are_same)
    whole = np.max([join(part[1 + floats :]) for part in parts], axis=0)
    return np.concatenate([np.array([total], np.float32), mean, split(whole)])


def moved(now: F32, then: F32, mean: F32, floats: int) -> F32:
    """Return ``mean``, to which ``then`` has contributed, with the changes made here since.

    All are vectors, ``now`` the one of the present; ``floats`` as for ``merged``. Float buffers
    move by ``now - then``, of integers the larger one counts.
    """
    changed = mean.copy()
    part = slice(1, 1 + floats)
    moves = now[part] != then[part]  # where not, a -0.0 is to stay one
    np.add(changed[part], now[part] - then[part], out=changed[part], where=moves)
    changed[1 + floats :] = split(np.maximum(join(now[1 + floats :]), join(mean[1 + floats :])))
    return changed


class StepBuffers:
    """Bring the buffers of all trainers together now and then.

    Float ones become the mean of all trainers', but for such as are the same everywhere; integers
    their maximum; of more than INTEGERS_MAX integers each trainer keeps its own.
    """

    def __init__(self, buffers: ModelBuffers) -> None:
        self._buffers = buffers
        self._whole_at = 1 + buffers.floats
        count = (buffers.elements - self._whole_at) // PIECES
        self._shares_integers = 0 < count <= INTEGERS_MAX
        self._digest_bytes = DIGEST_BYTES * len(buffers.float_parts(buffers.vector()))

    def told(self) -> bytes:
        """Return what is to be gathered: digests of float buffers, then integers if it shares any.

        A sum does not show whether all that is in it was the same.
        """
        mine = self._buffers.vector()
        digests = [
            hashlib.blake2b(part.tobytes(), digest_size=DIGEST_BYTES).digest()
            for part in self._buffers.float_parts(mine)
        ]
        whole = join(mine[self._whole_at :]).astype("<i8").tobytes()
        return b"".join(digests) + (whole if self._shares_integers else b"")

    def share(self, total: Callable[[F32, bool], Exchanged], gathered: Sequence[bytes]) -> None:
        """Replace the buffers by the mean of all trainers' float ones, and the maximum of integers.

        ``total``: a sum over all trainers, of those whose flag is true. ``gathered``: what ``told``
        has given at each of them; where integers have another length they are of a newcomer.
        """
        mine = self._buffers.vector()
        floats = mine[1 : self._whole_at]
        is_finite = bool(np.isfinite(floats).all())
        found = total(floats if is_finite else np.zeros_like(floats), is_finite)
        if found.count:
            mean = mine.copy()
            np.divide(found.total, np.float32(found.count), out=mean[1 : self._whole_at])
            pairs = zip(
                self._buffers.float_parts(mine), self._buffers.float_parts(mean), strict=True
            )
            for number, (own, of_all) in enumerate(pairs):
                at = DIGEST_BYTES * number
                if len({each[at : at + DIGEST_BYTES] for each in gathered}) != 1:
                    own[:] = of_all
        if self._shares_integers:
            whole = join(mine[self._whole_at :])
            told = [each[self._digest_bytes :] for each in gathered]
            alike = [np.frombuffer(each, "<i8") for each in told if len(each) == whole.nbytes]
            mine[self._whole_at :] = split(np.max([whole, *alike], axis=0))
        if np.isfinite(mine).all():
            self._buffers.read(mine)
