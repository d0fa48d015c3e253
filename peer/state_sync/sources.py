"""Know who can give what: donors, their links, what they say they have, whom not to believe.

Sans-I/O; a part of the machine in machine.py, whose effects it appends to ``out``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from atoll.peer.membership.events import Goal
from atoll.peer.membership.view import ARCHIVE, WITNESS, Member, short
from atoll.peer.state_sync import events as ln
from atoll.peer.state_sync import messages as ft
from atoll.peer.state_sync.pull import Pull
from atoll.peer.state_sync.verification import Attestation

DONORS_MAX = 16  # each costs a stream with a thread and a chunk of memory; three fill most links
POLL_S = 1.0  # how old knowledge about donors may be
SOON_S = 0.05  # ... while there is nothing to do without it: they apply a commit within moments
# So many are asked at that pace, and of more each as much less often, but the coordinator, without
# whose voice nothing is agreed: many that are behind would keep everybody busy with answers.
SOON_DONORS = 4
DIAL_S = 2.0  # between two attempts to reach a donor
GATHER_S = 3.0  # members that have no link by then are not waited for in an attestation
VOICE_S = (
    1.5  # ... nor those that leave a question open for so long, but the coordinator: they hang
)
MUTE_MAX = 2  # questions about a donor's log without an answer: then it has none
_SILENT = 1 << 62  # as the round of a member: of what it has not named yet it will name nothing


def digest_of(has: ft.StateIs) -> bytes:
    """Return the state digest, from the two things that it covers."""
    return hashlib.sha256(has.blob_digest + has.root).digest()


@dataclass(slots=True)
class _KnownDonor:
    member: Member
    dialled_s: float = float("-inf")
    polled_s: float = float("-inf")
    open_s: float = float("inf")  # when the first question after its last answer was asked
    has: ft.StateIs | None = None
    mute: int = 0  # questions about its log that it left open, or answered with nothing
    empty: bool = False  # it said that it has no state to give

    def stands_at(self, now_s: float) -> int:
        """Return the round of a donor, for counting voices; -1 if that is not known."""
        if now_s > self.open_s + VOICE_S:
            return _SILENT
        return self.has.round if self.has is not None else -1


class Supply:
    def __init__(self, out: list[ln.Effect]) -> None:
        self.pull = Pull()
        self.attestation = Attestation()
        self.excluded: dict[bytes, str] = {}
        self._out = out
        self._coordinator = b""
        self._gathers_until_s = 0.0
        self.linked: frozenset[bytes] = frozenset()
        self._donors: dict[bytes, _KnownDonor] = {}

    def begin(self, now_s: float) -> None:
        """Begin a new task: members that have no link yet are waited for again."""
        self._gathers_until_s = now_s + GATHER_S
        for donor in self._donors.values():
            donor.open_s = float("inf")
            donor.mute = donor.mute if donor.mute >= MUTE_MAX else 0

    def set_goal(self, goal: Goal) -> None:
        """Set who may give; the coordinator first, if there are more than enough."""
        self._coordinator = goal.coordinator
        able = sorted(
            (m for m in goal.donors if m.role != WITNESS), key=lambda m: m.peer != goal.coordinator
        )[:DONORS_MAX]
        known = self._donors
        self._donors = {}
        for member in able:
            donor = known.get(member.peer)
            same_life = donor is not None and donor.member.inc == member.inc
            self._donors[member.peer] = donor if donor and same_life else _KnownDonor(member)
        for peer in known:
            if peer not in self._donors:
                self.pull.lose(peer)
                self.attestation.forget(peer)

    def discount_pause(self) -> None:
        """Forget whom not to believe: on another history they may be right."""
        self.excluded.clear()
        self.attestation = Attestation()
        for donor in self._donors.values():
            donor.polled_s = float("-inf")
            donor.mute = 0

    def release(self) -> None:
        """Stop taking what was asked for."""
        for peer in self.pull.donors:
            self.pull.lose(peer)

    # ------------------------------------------------------------ what donors say

    def set_linked(self, peers: frozenset[bytes]) -> bool:
        """Set which peers have a control link; return whether that is news."""
        changed = peers != self.linked
        for peer in self.linked - peers:
            self.pull.lose(peer)
            self.attestation.forget(peer)
            if peer in self._donors:
                self._donors[peer] = _KnownDonor(self._donors[peer].member)
        self.linked = peers
        return changed

    def knows(self, peer: bytes) -> bool:
        return peer in self._donors and peer not in self.excluded

    def said(self, peer: bytes) -> ft.StateIs | None:
        """Return what this donor has, as far as it is counted on."""
        return self._donors[peer].has if peer in self.pull.donors else None

    def hear(self, source: bytes, has: ft.StateIs) -> None:
        donor = self._donors[source]
        if donor.mute >= MUTE_MAX:
            has = replace(has, log_first=max(0, has.round + 1))
        donor.open_s = float("inf")
        donor.empty, donor.has = has.round < 0, has if has.round >= 0 else None
        self.attestation.forget(source)
        if donor.empty:
            self.pull.lose(source)
            return
        self.attestation.hear(source, has.first, has.digests)
        self.attestation.hear(source, has.round, digest_of(has))
        self.pull.offer(source, has.log_first, has.round)

    def settle(self, now_s: float) -> bool:
        """Count who names what, and leave out whoever is alone with it.

        Return whether that is news.
        """
        if not self.attestation.settle(self._coordinator, self._members(now_s), now_s):
            return False
        for peer, number in self.attestation.dissenters().items():
            said = self.attestation.describe(number)
            self.exclude(peer, f"it names another state of round {number} ({said})")
        return True

    def exclude(self, peer: bytes, why: str) -> None:
        if peer in self.excluded:
            return
        self.excluded[peer] = why
        self.pull.lose(peer)
        self.attestation.forget(peer)
        self._out.append(ln.Say(f"{short(peer)} is not asked for the state any more: {why}"))

    def gave_no_heads(self, peer: bytes) -> bool:
        """Count a question about its log that this donor has answered with nothing, or not at all.

        Return whether it counts as a donor of chunks only from now on, whatever it says it has.
        """
        donor = self._donors.get(peer)
        if donor is None or donor.has is None or donor.mute >= MUTE_MAX:
            return False
        donor.mute += 1
        if donor.mute < MUTE_MAX:
            return False
        donor.has = replace(donor.has, log_first=donor.has.round + 1)
        self.pull.offer(peer, donor.has.log_first, donor.has.round)
        self._out.append(ln.Say(f"{short(peer)} does not send the rounds that it says it has"))
        return True

    def usable(self) -> list[tuple[bytes, ft.StateIs]]:
        return [
            (peer, donor.has)
            for peer, donor in self._donors.items()
            if donor.has is not None and peer in self.linked and peer not in self.excluded
        ]

    def newest(self) -> int:
        return max((has.round for _, has in self.usable()), default=-1)

    def _members(self, now_s: float) -> dict[bytes, int]:
        """Return whose word on digests is waited for, and at which round they are (-1: unknown)."""
        return {
            peer: donor.stands_at(now_s)
            for peer, donor in self._donors.items()
            if donor.member.role != ARCHIVE
            and peer not in self.excluded
            and not donor.empty
            and (now_s < self._gathers_until_s or peer in self.linked)
        }

    # ------------------------------------------------------------ asking

    def ask(self, first: int, now_s: float, *, soon: bool) -> None:
        """Dial and poll whoever it is time for; ``first``: the oldest round whose digest counts."""
        asked = sum(peer in self.linked and peer not in self.excluded for peer in self._donors)
        soon_s = SOON_S * max(1.0, asked / SOON_DONORS)
        for peer, donor in self._donors.items():
            if peer in self.excluded:
                continue
            if peer not in self.linked:
                if now_s >= donor.dialled_s + DIAL_S and donor.member.address:
                    donor.dialled_s = now_s
                    self._out.append(ln.DialDonor(donor.member))
                continue
            pause_s = (SOON_S if peer == self._coordinator else soon_s) if soon else POLL_S
            if now_s >= donor.polled_s + pause_s:
                donor.polled_s = now_s
                donor.open_s = min(donor.open_s, now_s)
                self._out.append(ln.TellDonor(peer, ft.AskState(first)))

    def tell(self, peer: bytes, message: object) -> None:
        self._out.append(ln.TellDonor(peer, message))

    def describe(self) -> str:
        """Describe for an error who is there."""
        names = [f"{short(peer)} at round {has.round}" for peer, has in self.usable()]
        left_out = [f"{short(peer)} left out" for peer in self.excluded]
        return f"from {', '.join(names + left_out)}" if names or left_out else "no donor answers"
