"""Compare state digests as the coordinator: equal rounds must mean equal bytes (invariant 3).

Every heartbeat carries the digest of the state after the last commit. A replica in the minority is
told to take the state again (RESYNC) and says so; without a majority the run halts with the values
shown, because nobody can say which one is right. A majority of everyone who has a say, so that the
first reports do not pass for all.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.peer.membership.events import Effect, Note, Send
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.messages import Resync
from atoll.peer.membership.roster import Roster
from atoll.peer.membership.view import View, short


class Comparison:
    """Keep what the comparison of digests has shown in one view.

    ``halted`` says why no round may begin, or nothing. Who was catching up meanwhile may bring a
    majority about; then the run goes on.
    """

    def __init__(self, view: View, me: bytes, emit: Callable[[Effect], None]) -> None:
        self._view, self._me, self._emit = view, me, emit
        self.halted = ""

    def step(self, own: MemberState, roster: Roster, alive: set[bytes]) -> None:
        """Halt, go on, or send RESYNC to a minority."""
        digests = roster.digests(own.round)
        doubted = own.unsynced or roster.is_doubted(self._me, own.digest)
        if own.digest_round == own.round and own.holds and not doubted:
            digests[self._me] = own.digest
        groups: dict[bytes, list[bytes]] = {}
        for peer, digest in digests.items():
            groups.setdefault(digest, []).append(peer)
        largest = max(map(len, groups.values()), default=0)
        silent = roster.undigested(alive, own.round) - {self._me}
        if 2 * largest <= len(digests) + len(silent):
            if len(groups) > 1 and not silent and not self.halted:
                self._halt(_shown(own.round, groups, " without a majority"))
            return
        if self.halted:
            self.halted = ""
            text = f"state after round {own.round}: a majority agrees now, the run goes on"
            self._emit(Note("agreed", text))
        if len(groups) > 1:
            self._resync(own.round, groups, roster)

    def _halt(self, why: str) -> None:
        self.halted = f"{why}; no more rounds until one of them leaves or a majority agrees"
        self._emit(Note("diverged", self.halted))

    def _resync(self, number: int, groups: dict[bytes, list[bytes]], roster: Roster) -> None:
        majority = max(groups, key=lambda digest: len(groups[digest]))
        text = f"{_shown(number, groups)}; the minority downloads the others' state"
        view = self._view
        for digest, peers in groups.items():
            for peer in peers if digest != majority else ():
                self._emit(Note("diverged", text, peer))
                roster.doubt(peer, digest)
                self._emit(Send(peer, Resync(view.lineage, view.number, number, majority)))


def _shown(number: int, groups: dict[bytes, list[bytes]], how: str = "") -> str:
    shown = "; ".join(
        f"{digest.hex()[:16]} on {', '.join(short(p) for p in peers)}"
        for digest, peers in sorted(groups.items())
    )
    return f"state after round {number} differs{how}: {shown}"
