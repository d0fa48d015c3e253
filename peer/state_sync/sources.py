"""Know who can give what, and decide who sends which piece. Sans-I/O; a part of machine.py.

``DonorTable`` has the donors: their links, what they say they have, whom not to believe.

``PieceScheduler`` shares the work among donors of different speed. A piece that is wanted is *open*
until it is asked of a donor. Entries come first, those that the fewest donors offer before the
others and the oldest of these first (rarest first: logs drop their oldest entries), then chunks of
the state, which every donor has. A donor with nothing open left to send takes over, from the donor
that would deliver last, what it can deliver in less than half that time; so the end does not wait
for the slowest. What a donor sends first may be on its way, and is asked of another one only when
nothing has come for a while: a donor that hangs costs nothing but patience.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from atoll.peer.membership.events import Goal
from atoll.peer.membership.view import ARCHIVE, WITNESS, Member, short
from atoll.peer.state_sync import events as ev
from atoll.peer.state_sync import messages as msg
from atoll.peer.state_sync.verification import Attestation

DONORS_MAX = 16  # each costs a stream with a thread and a chunk of memory; three fill most links
POLL_S = 1.0  # how old knowledge about donors may be
SOON_S = 0.05  # ... while there is nothing to do without it: they apply a commit within moments
# So many are asked at that pace, and of more each as much less often, but the coordinator, without
# whose voice nothing is agreed: many that are behind would keep everybody busy with answers.
SOON_DONORS = 4
DIAL_S = 2.0  # between two attempts to reach a donor, at first ...
DIAL_MAX_S = 8.0  # ... and when it does not answer: each costs both sides a handshake
GATHER_S = 3.0  # members that have no link by then are not waited for in an attestation
# ... nor those that leave a question open for so long, but the coordinator: they hang.
VOICE_S = 1.5
MUTE_MAX = 2  # questions about a donor's log without an answer: then it has none
_SILENT = 1 << 62  # as the round of a member: of what it has not named yet it will name nothing
HOLDERS_MAX = 2  # donors that the same piece is asked of at a time
STEAL_FACTOR = 2.0  # estimates are rough: take over only what comes in half the time
STEAL_MARGIN_S = 0.05  # ... and not for less than asking costs
HANG_S = 2.0  # a donor that sends nothing for so long may be relieved by one not tried yet
# A piece that has begun to arrive may take so long: rounds have most of the link meanwhile, and a
# stream on which nothing moves ends sooner.
ARRIVAL_S = 15.0
REST_S = 0.5  # of a donor that could not give a piece: until it is worth asking again
RATE_WEIGHT = 0.25  # of the newest piece in the estimate of a donor's speed


def digest_of(has: msg.StateIs) -> bytes:
    """Return the state digest, from the two things that it covers."""
    return hashlib.sha256(has.blob_digest + has.root).digest()


@dataclass(slots=True)
class _KnownDonor:
    member: Member
    dialled_s: float = float("-inf")
    dial_pause_s: float = DIAL_S
    polled_s: float = float("-inf")
    open_s: float = float("inf")  # when the first question after its last answer was asked
    has: msg.StateIs | None = None
    mute: int = 0  # questions about its log that it left open, or answered with nothing
    empty: bool = False  # it said that it has no state to give

    def stands_at(self, now_s: float) -> int:
        """Return the round of a donor, for counting voices; -1 if that is not known."""
        if now_s > self.open_s + VOICE_S:
            return _SILENT
        return self.has.round if self.has is not None else -1


class DonorTable:
    """Keep what is known of the donors, and ask them; effects go to ``out``, the machine's."""

    def __init__(self, out: list[ev.Effect]) -> None:
        self.pieces = PieceScheduler()
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
        """Set who may give; of too many the coordinator, and then those with a link."""
        self._coordinator = goal.coordinator
        able = sorted(
            (m for m in goal.donors if m.role != WITNESS),
            key=lambda m: (m.peer != goal.coordinator, m.peer not in self.linked),
        )[:DONORS_MAX]
        known = self._donors
        self._donors = {}
        for member in able:
            donor = known.get(member.peer)
            same_life = donor is not None and donor.member.inc == member.inc
            self._donors[member.peer] = donor if donor and same_life else _KnownDonor(member)
        for peer in known:
            if peer not in self._donors:
                self.pieces.lose(peer)
                self.attestation.forget(peer)

    def forget_exclusions(self) -> None:
        """Forget whom not to believe: on another history they may be right."""
        self.excluded.clear()
        self.attestation = Attestation()
        for donor in self._donors.values():
            donor.polled_s = float("-inf")
            donor.mute = 0

    def release(self) -> None:
        """Stop taking what was asked for."""
        for peer in self.pieces.donors:
            self.pieces.lose(peer)

    # ------------------------------------------------------------ what donors say

    def set_linked(self, peers: frozenset[bytes]) -> bool:
        """Set which peers have a control link; return whether that is news."""
        changed = peers != self.linked
        for peer in self.linked - peers:
            self.pieces.lose(peer)
            self.attestation.forget(peer)
            if peer in self._donors:
                self._donors[peer] = _KnownDonor(self._donors[peer].member)
        self.linked = peers
        return changed

    def knows(self, peer: bytes) -> bool:
        return peer in self._donors and peer not in self.excluded

    def reported(self, peer: bytes) -> msg.StateIs | None:
        """Return what this donor has, as far as it is counted on."""
        return self._donors[peer].has if peer in self.pieces.donors else None

    def note_state(self, source: bytes, has: msg.StateIs) -> None:
        donor = self._donors[source]
        if donor.mute >= MUTE_MAX:
            has = replace(has, log_first=max(0, has.round + 1))
        donor.open_s = float("inf")
        donor.empty, donor.has = has.round < 0, has if has.round >= 0 else None
        self.attestation.forget(source)
        if donor.empty:
            self.pieces.lose(source)
            return
        self.attestation.record(source, has.first, has.digests)
        self.attestation.record(source, has.round, digest_of(has))
        self.pieces.offer(source, has.log_first, has.round)

    def recount(self, now_s: float) -> bool:
        """Count who names what, and leave out whoever is alone with it.

        Return whether that is news.
        """
        if not self.attestation.recount(self._coordinator, self._members(now_s), now_s):
            return False
        for peer, number in self.attestation.dissenters().items():
            said = self.attestation.describe(number)
            self.exclude(peer, f"it names another state of round {number} ({said})")
        return True

    def exclude(self, peer: bytes, why: str) -> None:
        if peer in self.excluded:
            return
        self.excluded[peer] = why
        self.pieces.lose(peer)
        self.attestation.forget(peer)
        self._out.append(ev.LogLine(f"{short(peer)} is not asked for the state any more: {why}"))

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
        self.pieces.offer(peer, donor.has.log_first, donor.has.round)
        self._out.append(ev.LogLine(f"{short(peer)} does not send the rounds that it says it has"))
        return True

    def usable(self) -> list[tuple[bytes, msg.StateIs]]:
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
                if now_s >= donor.dialled_s + donor.dial_pause_s and donor.member.address:
                    if donor.dialled_s > float("-inf"):
                        donor.dial_pause_s = min(DIAL_MAX_S, 2 * donor.dial_pause_s)
                    donor.dialled_s = now_s
                    self._out.append(ev.DialDonor(donor.member))
                continue
            donor.dial_pause_s = DIAL_S
            pause_s = (SOON_S if peer == self._coordinator else soon_s) if soon else POLL_S
            if now_s >= donor.polled_s + pause_s:
                donor.polled_s = now_s
                donor.open_s = min(donor.open_s, now_s)
                self._out.append(ev.SendToDonor(peer, msg.AskState(first)))

    def send(self, peer: bytes, message: object) -> None:
        self._out.append(ev.SendToDonor(peer, message))

    def describe(self) -> str:
        """Describe for an error who is there."""
        names = [f"{short(peer)} at round {has.round}" for peer, has in self.usable()]
        left_out = [f"{short(peer)} left out" for peer in self.excluded]
        return f"from {', '.join(names + left_out)}" if names or left_out else "no donor answers"


# ---------------------------------------------------------------- who sends which piece


class Piece(NamedTuple):
    chunk: int
    entry: int  # 0: the chunk of the state as the donor has it now; else the first ...
    last: int = 0  # ... and the last of the entries that are wanted of it


class Ask(NamedTuple):
    peer: bytes
    ticket: int
    piece: Piece


class Drop(NamedTuple):
    peer: bytes
    ticket: int


class _Asked(NamedTuple):
    piece: Piece
    nbytes: int
    since_s: float


@dataclass(slots=True)
class _DonorQueue:
    first: int = 0  # entries that it can send
    last: int = -1
    asked: dict[int, _Asked] = field(default_factory=dict)  # by ticket, in its order of sending
    rate: float = 0.0  # bytes per second; 0 until the first piece is here
    idle_until_s: float = 0.0  # its last piece, or its being asked when it had nothing to do
    arriving: int = 0  # the ticket of what has begun to arrive last
    rests_until_s: float = 0.0

    def offers(self, piece: Piece) -> bool:
        return not piece.entry or self.first <= piece.entry <= self.last

    def speed(self, now_s: float) -> float:
        """Return bytes per second, no more than what a wait that still goes on allows."""
        head = next(iter(self.asked.values()), None)
        if head is None:
            return self.rate
        allowed = head.nbytes / max(now_s - self.idle_until_s, 1e-3)
        return min(self.rate or allowed, allowed)


class PieceScheduler:
    """Share wanted pieces among donors.

    Steered by machine.py, which says what is wanted and who is there.
    """

    def __init__(self) -> None:
        self._donors: dict[bytes, _DonorQueue] = {}
        self._open: dict[int, dict[int, int]] = {}  # entry -> chunk -> bytes
        self._wanted: dict[int, Piece] = {}  # by chunk
        self._holders: dict[Piece, dict[bytes, int]] = {}  # of whom it is asked, with the ticket
        self._ticket = 0

    # ------------------------------------------------------------ donors

    @property
    def donors(self) -> tuple[bytes, ...]:
        return tuple(self._donors)

    def offer(self, peer: bytes, first: int, last: int) -> None:
        """Count on this donor for the state, and for entries ``first`` to ``last``."""
        donor = self._donors.setdefault(peer, _DonorQueue())
        donor.first, donor.last = first, last

    def reaches_back(self, entry: int) -> bool:
        """Return whether the log of any donor has this entry, or will have it.

        It will have one that is newer than all.
        """
        newest = max((donor.last for donor in self._donors.values()), default=-1)
        return any(
            donor.first <= entry and (entry <= donor.last or entry > newest)
            for donor in self._donors.values()
        )

    def lose(self, peer: bytes) -> None:
        """Forget a donor that is gone; what was asked of it is asked of others."""
        self.interrupt(peer)
        self._donors.pop(peer, None)

    def interrupt(self, peer: bytes) -> None:
        """Give up what was asked of a donor: it will not come, though it may be asked again."""
        donor = self._donors.get(peer)
        for ticket in list(donor.asked) if donor else ():
            self._give_up(peer, ticket)

    def refuse(self, peer: bytes, ticket: int, now_s: float) -> None:
        donor = self._donors.get(peer)
        if donor is not None and ticket in donor.asked:
            donor.rests_until_s = now_s + REST_S
            self._give_up(peer, ticket)

    # ------------------------------------------------------------ pieces

    def want(self, piece: Piece, nbytes: int) -> list[Drop]:
        """Want a piece; return the requests for its chunk that are void now.

        Whatever else of its chunk was wanted is not any more, but what has been asked of somebody
        and begins as this does: more entries can be had when those are here.
        """
        before = self._wanted.get(piece.chunk)
        if before == piece:
            return []
        if before in self._holders and before.entry == piece.entry and before.last <= piece.last:
            return []
        drops = self.forget(piece.chunk)
        self._wanted[piece.chunk] = piece
        self._open.setdefault(piece.entry, {})[piece.chunk] = nbytes
        return drops

    def forget(self, chunk: int) -> list[Drop]:
        """Want nothing of this chunk any more; return the requests that are void now."""
        piece = self._wanted.pop(chunk, None)
        if piece is None:
            return []
        self._close(piece)
        holders = self._holders.pop(piece, {})
        for peer, ticket in holders.items():
            self._donors[peer].asked.pop(ticket, None)
        return [Drop(peer, ticket) for peer, ticket in holders.items()]

    def expects(self, peer: bytes, ticket: int) -> Piece | None:
        """Return the piece that this ticket was for, if it is still wanted of this donor."""
        donor = self._donors.get(peer)
        asked = donor.asked.get(ticket) if donor else None
        return asked.piece if asked else None

    def arrives(self, peer: bytes, ticket: int) -> None:
        """Note that a piece has begun to arrive."""
        if self.expects(peer, ticket) is not None:
            self._donors[peer].arriving = ticket

    def arrived(self, peer: bytes, ticket: int, now_s: float) -> list[Drop]:
        """Note that a wanted piece is here; return the requests for it to others.

        They need not send it.
        """
        donor = self._donors[peer]
        asked = donor.asked[ticket]
        begun_s = max(donor.idle_until_s, asked.since_s)
        rate = asked.nbytes / max(now_s - begun_s, 1e-6)
        donor.rate = rate if not donor.rate else donor.rate + RATE_WEIGHT * (rate - donor.rate)
        donor.idle_until_s = now_s
        drops = self.forget(asked.piece.chunk)
        return [drop for drop in drops if drop.peer != peer]

    def asked(self, chunk: int, now_s: float) -> Piece | None:
        """Return what of this chunk has been asked of somebody who does not seem to hang."""
        piece = self._wanted.get(chunk)
        for peer, ticket in self._holders.get(piece, {}).items() if piece is not None else ():
            donor = self._donors[peer]
            if now_s <= max(donor.idle_until_s, donor.asked[ticket].since_s) + HANG_S:
                return piece
        return None

    @property
    def wanted(self) -> int:
        return len(self._wanted)

    def outstanding(self, peer: bytes) -> int:
        donor = self._donors.get(peer)
        return len(donor.asked) if donor else 0

    # ------------------------------------------------------------ who sends what

    def plan(self, now_s: float) -> tuple[list[Ask], list[Drop]]:
        """Decide what to ask of whom now; return requests to make, and others to take back.

        Until everybody has as much as one may have asked of a donor.
        """
        asks: list[Ask] = []
        drops: list[Drop] = []
        ready = [p for p, d in self._donors.items() if d.rests_until_s <= now_s]
        ready.sort(key=lambda peer: len(self._donors[peer].asked))
        idle: set[bytes] = set()  # for whom there is nothing; one more thing asked changes nothing
        for depth in range(msg.ASKED_MAX):  # one each in turn: the first pieces come from everybody
            for peer in ready:
                donor = self._donors[peer]
                if len(donor.asked) > depth or peer in idle:
                    continue
                piece = self._next_open(donor)
                if piece is not None:
                    asks.append(self._ask(peer, piece, self._open[piece.entry][piece.chunk], now_s))
                    self._close(piece)
                elif (found := self._worth_stealing(peer, now_s)) is not None:
                    asked, drop = found
                    drops += drop
                    asks.append(self._ask(peer, asked.piece, asked.nbytes, now_s))
                else:
                    idle.add(peer)
        return asks, drops

    def next_deadline_s(self, now_s: float) -> float | None:
        """Return when a resting donor may be asked again; None if none rests."""
        rests = [d.rests_until_s for d in self._donors.values() if d.rests_until_s > now_s]
        return min(rests, default=None)

    def _next_open(self, donor: _DonorQueue) -> Piece | None:
        entries = [entry for entry in self._open if entry and donor.first <= entry <= donor.last]
        if entries:
            entry = min(entries, key=lambda entry: (self._offered_by(entry), entry))
        elif 0 in self._open:
            entry = 0
        else:
            return None
        return self._wanted[next(iter(self._open[entry]))]

    def _offered_by(self, entry: int) -> int:
        return sum(donor.first <= entry <= donor.last for donor in self._donors.values())

    def _worth_stealing(self, thief: bytes, now_s: float) -> tuple[_Asked, list[Drop]] | None:
        """Return the request that would be answered last, if ``thief`` is so much faster.

        With it, what its donor need not send any more.
        """
        mine = self._donors[thief]
        if not mine.rate and mine.asked:
            return None  # its first piece will tell
        queued = sum(asked.nbytes for asked in mine.asked.values())
        late_s, found, victim = 0.0, 0, b""
        for peer, donor in self._donors.items():
            if peer == thief or not donor.asked:
                continue
            ticket = self._last_unshared(donor, mine)
            if ticket:
                ahead = sum(a.nbytes for t, a in donor.asked.items() if t <= ticket)
                wait_s = ahead / max(donor.speed(now_s), 1e-9)
                if wait_s > late_s:
                    late_s, found, victim = wait_s, ticket, peer
        if not found:
            return None
        donor = self._donors[victim]
        asked = donor.asked[found]
        if not mine.rate:  # nobody knows its speed: it may try its hand at what seems to hang
            worth = now_s > donor.idle_until_s + HANG_S
        else:
            mine_s = (queued + asked.nbytes) / max(mine.speed(now_s), 1e-9)
            worth = late_s > STEAL_FACTOR * mine_s + STEAL_MARGIN_S
        if not worth:
            return None
        if next(iter(donor.asked)) == found:
            # It may be on its way, and costs its bytes twice: only where nothing comes any more.
            patience_s = ARRIVAL_S if donor.arriving == found else HANG_S
            return (asked, []) if now_s > donor.idle_until_s + patience_s else None
        self._holders[asked.piece].pop(victim)
        del donor.asked[found]
        return asked, [Drop(victim, found)]

    def _last_unshared(self, donor: _DonorQueue, thief: _DonorQueue) -> int:
        """Return the last of its requests that the other could take over; 0 for none."""
        for ticket in reversed(donor.asked):
            piece = donor.asked[ticket].piece
            if len(self._holders[piece]) < HOLDERS_MAX and thief.offers(piece):
                return ticket
        return 0

    def _ask(self, peer: bytes, piece: Piece, nbytes: int, now_s: float) -> Ask:
        self._ticket += 1
        donor = self._donors[peer]
        if not donor.asked:
            donor.idle_until_s = max(donor.idle_until_s, now_s)
        donor.asked[self._ticket] = _Asked(piece, nbytes, now_s)
        self._holders.setdefault(piece, {})[peer] = self._ticket
        return Ask(peer, self._ticket, piece)

    def _give_up(self, peer: bytes, ticket: int) -> None:
        """Open a piece again that one donor will not send, unless another one does."""
        asked = self._donors[peer].asked.pop(ticket)
        holders = self._holders[asked.piece]
        holders.pop(peer, None)
        if not holders:
            del self._holders[asked.piece]
            self._open.setdefault(asked.piece.entry, {})[asked.piece.chunk] = asked.nbytes

    def _close(self, piece: Piece) -> None:
        chunks = self._open.get(piece.entry, {})
        chunks.pop(piece.chunk, None)
        if not chunks:
            self._open.pop(piece.entry, None)
