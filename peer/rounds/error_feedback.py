"""Keep the error feedback of this peer: what the codec has left out of its contributions so far.

It is this peer's alone, and is in no checkpoint. An attempt reads it; the commit of a round that
has our part in it moves it on, chunk by chunk. A round that is given up, or goes on without us,
leaves it alone. It belongs to a state that was reached round by round: whoever loads one otherwise
forgets it, because nobody knows any more what of it is in that state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from atoll.collectives import RoundResult
from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.errors import ConfigError
from atoll.collectives.feedback import Compensated, ResidualFeedback
from atoll.peer.membership.messages import Begin
from atoll.peer.rounds.state import ReplicatedState


class Residual:
    """Keep what the codec has left out of the contributions of this peer.

    Takes no memory before it is needed: then 4 bytes per parameter.

    Threads that reduce read it while others commit, but never the chunks of one fragment at once:
    its next round begins after the commit.
    """

    def __init__(self) -> None:
        self.feedback: ResidualFeedback | None = None
        self._rounds = 0  # that are in it

    def source(
        self, state: ReplicatedState, submission: F32, begin: Begin
    ) -> Callable[[int, F32], None]:
        """Return what computes our part of a step: ``state.delta_of``, and what is kept.

        ConfigError for a layout in which parts may not be sent as they are encoded here.
        """
        delta, spec = state.delta_of(submission, begin.fragment), state.spec
        if not spec.error_feedback:
            return delta
        layout = begin.layout
        if layout is not None and (layout.is_pairwise or layout.routes() is not None):
            raise ConfigError(f"a round with error feedback is a butterfly, and no {layout.kind}")
        if self.feedback is None:
            codec, elements = get_codec(spec.codec), state.grid.total
            self.feedback = ResidualFeedback(codec, elements, spec.error_feedback)
        first, _ = state.grid.bounds(state.chunks_of(begin.fragment)[0])
        return Compensated(delta, self.feedback, state.fragment_grid(begin.fragment), first)

    def commit(
        self, source: Compensated, result: RoundResult, index: int, chunks: Iterable[int]
    ) -> None:
        """Take over what the codec leaves out of our part: of ``chunks``, as participant ``index``.

        ``source`` has computed the part. The result is about to be applied, and θ is still the one
        before it.
        """
        source.commit(result, index, chunks)
        self._rounds += 1

    def forget(self) -> int:
        """Begin anew; return how many rounds were in it."""
        rounds, self._rounds, self.feedback = self._rounds, 0, None
        return rounds
