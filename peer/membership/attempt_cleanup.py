"""Keep what a broken attempt leaves behind: its finished chunks go into the next one.

Theory. When the coordinator gives an attempt up it asks the living participants which chunks of it
are final (AskFinals), and waits a moment for their answers. A chunk that somebody holds final, with
one digest, is *kept*: the next BEGIN names its digest, its origin (whose submissions, with which
weights, are in its mean) and holders; whoever lacks it fetches it, and only the other chunks are
reduced again. The result is defined by that BEGIN, READY still means "I hold all of it", and
attempts are still totally ordered, so the safety argument is unchanged. Whose submission turned out
to be unusable is not kept: chunks with a part of it are reduced again.

The answers also say whom each participant waited for. When a round stalls a second time and nobody
has reported a broken link, that tells who is to go on without: a peer that sends and cannot receive
looks healthy to everyone until then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from atoll.peer.membership.attempt import Attempt
from atoll.peer.membership.events import Effect, Send
from atoll.peer.membership.kept_chunks import (
    DIGEST_BYTES,
    HOLDERS_MAX,
    KEPT_BYTES_MAX,
    RECORD_BYTES,
    Kept,
    pack_kept,
    parse_kept,
)
from atoll.peer.membership.messages import AskFinals, Finals
from atoll.peer.membership.timing import Timing
from atoll.peer.rounds.entries import ORIGINS_MAX, EntryOrigin

_NAMED_BYTES = 48  # a participant with its weight, packed
_NOT_FINAL = bytes(DIGEST_BYTES)


class AttemptCleanup:
    """Close one attempt that is over, and keep the participants of the next."""

    def __init__(
        self,
        attempt: Attempt,
        participants: tuple[bytes, ...],
        asked: Collection[bytes],
        timing: Timing,
        emit: Callable[[Effect], None],
        now_s: float,
    ) -> None:
        self.attempt = attempt
        self.is_stall = attempt.is_stall
        self._participants = participants
        self._asked = set(asked)
        self._finals: dict[bytes, bytes] = {}
        self._missing: dict[bytes, tuple[bytes, ...]] = {}
        self._until_s = now_s + timing.kept_s
        begin = attempt.begin
        ask = AskFinals(begin.lineage, begin.view, begin.round, begin.attempt)
        for peer in sorted(self._asked):
            emit(Send(peer, ask))

    def on_finals(self, source: bytes, finals: Finals) -> None:
        begin = self.attempt.begin
        if source in self._asked and finals.attempt == begin.attempt:
            self._finals[source] = finals.digests
            self._missing[source] = finals.missing

    def is_done(self, now_s: float, alive: Collection[bytes]) -> bool:
        return now_s >= self._until_s or not (self._asked & set(alive)) - self._finals.keys()

    def participants(self, alive: Collection[bytes], *, excluding: bool) -> tuple[bytes, ...]:
        """Return the participants of the next attempt.

        ``excluding``: without those whom the others waited for, unless nobody would be left.
        """
        cover = self.attempt.cover(self._missing) if excluding else set[bytes]()
        staying = tuple(p for p in self._participants if p in alive and p not in cover)
        return staying or tuple(p for p in self._participants if p in alive)

    def kept(self, alive: Collection[bytes]) -> tuple[tuple[EntryOrigin, ...], bytes]:
        """Return ``past`` and ``kept`` of the next BEGIN; only the living can hand anything out."""
        begin = self.attempt.begin
        view = self.attempt.view
        before = {
            item.chunk: item.origin
            for item in parse_kept(begin.kept, len(view.members), len(begin.origins))
        }
        unusable = {peer for peer, named in self.attempt.misses.items() if peer in named}
        usable = [not unusable & set(origin.participants) for origin in begin.origins]
        position = {peer: index for index, peer in enumerate(view.peers)}
        found: list[Kept] = []
        for chunk, holders in sorted(self._holders(alive).items()):
            origin = before.get(chunk, 0)
            if len(holders) == 1 and usable[origin]:  # of one digest: else it is reduced again
                digest, peers = next(iter(holders.items()))
                named = tuple(position[peer] for peer in peers[:HOLDERS_MAX])
                found.append(Kept(chunk, origin, digest, named))
        used = sorted({item.origin for item in found})[: ORIGINS_MAX - 1]
        renumbered = {origin: index + 1 for index, origin in enumerate(used)}
        past = tuple(begin.origins[origin] for origin in used)
        named_kept = [x._replace(origin=renumbered[x.origin]) for x in found if x.origin in used]
        return past, pack_kept(named_kept[: _room(begin.origins, past)])

    def _holders(self, alive: Collection[bytes]) -> dict[int, dict[bytes, list[bytes]]]:
        """Return who holds each chunk final, by chunk and digest.

        Lists of different lengths are not of one grid: only the longest count.
        """
        lengths = [len(digests) for digests in self._finals.values() if digests]
        found: dict[int, dict[bytes, list[bytes]]] = {}
        for peer, digests in sorted(self._finals.items()):
            whole = len(digests) % DIGEST_BYTES == 0 and len(digests) == max(lengths, default=0)
            if peer not in alive or not whole:
                continue
            for chunk in range(len(digests) // DIGEST_BYTES):
                digest = digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]
                if digest != _NOT_FINAL:
                    found.setdefault(chunk, {}).setdefault(digest, []).append(peer)
        return found


def _room(origins: Sequence[EntryOrigin], past: Sequence[EntryOrigin]) -> int:
    """Return how many records fit into BEGIN beside the participants that it names.

    These are those of its attempt and of the past.
    """
    named = sum(len(origin.participants) for origin in (*origins[:1], *past))
    return max(0, KEPT_BYTES_MAX - _NAMED_BYTES * named) // RECORD_BYTES
