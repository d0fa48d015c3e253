"""Deal the samples of a data set to trainers that come and go, so that each is used once an epoch.

Theory. The samples of all epochs stand in one line of *positions*. In each epoch the blocks of the
data set are permuted, and a block is read from its beginning. What no trainer has used is the
*pool*; what one has drawn and not finished is *kept* for it. After each round all trainers tell how
far they have come (``HandReport``), and everybody computes the same next ``Deal`` (``advance``):
what is done is gone for good, what was drawn is kept for whom has drawn it, and the pool is dealt
anew.
Of W trainers the one in place p gets the blocks p, p+W, p+2W, ... of the pool, without an end, so
that nobody runs dry before the next deal, however fast it is: what it does not use is in the next
pool by itself.

A trainer that is not in a deal is late or dead, and nobody knows which. Its hand, twice as much as
anybody has used since the last deal, is kept for it for one deal more. If it is back by then, it
tells what it has used, as all do. If it is not, all of it is dealt again.

So what counts as used is what trainers have said is in a committed round. Of a trainer that dies
nothing is lost, because what it had not told is dealt again: what it has used between a commit and
the deal that follows is used twice.

Everything here is pure. Who gathers the reports is in shards.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from typing import Any, Final, Self

from atoll.collectives.counter_rng import derive_key, random_word
from atoll.collectives.errors import ConfigError, RemoteProtocolError

Span = tuple[int, int]  # positions, or indices, from one up to another
Spans = tuple[Span, ...]

SAMPLES_MAX: Final = 1 << 48  # so that 16,384 epochs of them have positions
POSITIONS_MAX: Final = 1 << 62  # of a deck without an end; JSON readers of others take 63 bits
BLOCKS_USUAL: Final = 1 << 16  # of an epoch: larger blocks only where there are more samples
BLOCK_USUAL_MAX: Final = 1024
ROUNDS: Final = 6  # of the Feistel network; four hide its structure, and small ones need more
# A trainer that is late for one deal may have used as much again as the fastest between two deals.
HOLD: Final = 2
HOLD_BLOCKS_MAX: Final = 1024  # they are told one by one
DRAWN_BLOCKS_MAX: Final = 1 << 18  # between two deals; each is looked at in the next one
LOST_MAX: Final = 64  # times that local work is dropped between two deals; two are many
STATE_BYTES_MAX: Final = 64 * 1024  # a deal as text; newcomers get it as one small vector
REPORT_BYTES_MAX: Final = 4096  # a report has 150, and more where work was lost
NAME_CHARACTERS_MAX: Final = 64  # a peer's name has eight


@dataclass(frozen=True, slots=True)
class Deck:
    """Describe the samples that are dealt: all trainers of a run give the same numbers.

    ``block`` samples that follow each other are dealt together. ``epochs``: 0 has no end.
    """

    samples: int
    block: int
    epochs: int
    seed: int

    def __post_init__(self) -> None:
        fine = 0 < self.samples <= SAMPLES_MAX and 0 < self.block <= self.samples
        if not fine or not 0 <= self.epochs <= POSITIONS_MAX // self.samples:
            raise ConfigError(
                f"shards of {self}",
                fix="give it at least one sample, blocks no larger than that, and epochs=None or "
                "a number of them",
            )

    def __str__(self) -> str:
        epochs = self.epochs or "endless"
        return f"{self.samples} samples, block={self.block}, epochs={epochs}, seed={self.seed}"

    @property
    def end(self) -> int:
        """Return the position after the last one."""
        return self.epochs * self.samples or POSITIONS_MAX

    def block_end(self, position: int) -> int:
        """Return where the block at this position ends."""
        epoch, within = divmod(position, self.samples)
        return epoch * self.samples + min((within // self.block + 1) * self.block, self.samples)

    def indices(self, span: Span) -> range:
        """Return the samples at positions that lie within one block.

        What is left over beside whole blocks comes last in each epoch.
        """
        epoch, within = divmod(span[0], self.samples)
        place, offset = divmod(within, self.block)
        whole = self.samples // self.block
        number = permuted(place, whole, epoch_key(self.seed, epoch)) if place < whole else place
        first = number * self.block + offset
        return range(first, first + span[1] - span[0])


def usual_block(samples: int) -> int:
    """Return how many samples are dealt together if nothing is said: one, up to 65,536 samples."""
    return min(max(1, samples // BLOCKS_USUAL), BLOCK_USUAL_MAX)


@lru_cache(maxsize=16)
def epoch_key(seed: int, epoch: int) -> int:
    return derive_key(b"order of blocks", seed, epoch)


@lru_cache(maxsize=64)
def permuted(place: int, count: int, key: int) -> int:
    """Return where a permutation of ``count`` numbers, drawn by the key, puts ``place``.

    It is a Feistel network over a power of four, walked until it comes to a number below ``count``:
    so nothing has to be kept, however many blocks there are.
    """
    half = max(1, (count.bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ (random_word(key + turn, right) & mask)
        place = left << half | right
        if place < count:
            return place


# ---------------------------------------------------------------- state and reports


@dataclass(frozen=True, slots=True)
class Seat:
    """Hold what is kept for one trainer: drawn by it and not done yet.

    ``number``: the deal that its hand is of; the last but one, where it was not in the last.
    """

    name: str
    number: int
    kept: Spans = ()


@dataclass(frozen=True, slots=True)
class Deal:
    """Hold what all trainers know after deal ``number``.

    ``free``: spans of the pool, ascending, before ``fresh``, from where nothing was ever dealt.
    ``reach``: how much the fastest had drawn before the last deals.
    """

    number: int
    reach: int
    fresh: int = 0
    free: Spans = ()
    seats: tuple[Seat, ...] = ()

    @classmethod
    def first(cls, deck: Deck) -> Self:
        """Return what a run begins with: nothing is dealt, nor known about speeds."""
        return cls(0, deck.samples // 4)

    @property
    def seated(self) -> tuple[Seat, ...]:
        """Return the seats of those who were in the deal, in the order of their places."""
        return tuple(seat for seat in self.seats if seat.number == self.number)

    def seat_of(self, name: str) -> Seat | None:
        return next((seat for seat in self.seats if seat.name == name), None)

    def is_over(self, deck: Deck) -> bool:
        """Return whether nothing is left but what those who were in the deal have drawn."""
        absent = any(seat.kept for seat in self.seats if seat.number != self.number)
        return self.fresh >= deck.end and not self.free and not absent

    def to_bytes(self) -> bytes:
        """Return it as text; ConfigError if it has become too long."""
        seats = [[seat.name, seat.number, _deltas(seat.kept)] for seat in self.seats]
        whole = [self.number, self.reach, self.fresh, _deltas(self.free), seats]
        text = json.dumps(whole, separators=(",", ":")).encode()
        if len(text) > STATE_BYTES_MAX:
            raise ConfigError(
                f"what is left of the samples takes {len(text):,} bytes to tell after deal "
                f"{self.number}, of at most {STATE_BYTES_MAX:,}",
                fix="deal larger blocks: Shards(block=...), the same for all trainers",
            )
        return text

    @classmethod
    def from_bytes(cls, text: bytes) -> Self:
        """Return what ``to_bytes`` gave; RemoteProtocolError for anything else."""
        try:
            if len(text) > STATE_BYTES_MAX:
                raise ValueError(f"{len(text)} bytes")
            number, reach, fresh, free, seats = json.loads(text)
            every = tuple(
                Seat(_name(name), _whole(last), _spans(kept)) for name, last, kept in seats
            )
            return cls(_whole(number), _whole(reach), _whole(fresh), _spans(free), every)
        except (ValueError, TypeError, RecursionError) as error:
            raise RemoteProtocolError(
                f"what should be a deal of samples is none: {str(error)[:100]}",
                fix="run the same version of atoll on all peers",
            ) from error

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class HandReport:
    """Say what one trainer has to say to a deal.

    ``number`` and ``digest`` are of the deal that it knows, 0 for none; ``seated`` and ``seats``:
    whether it has a hand of that deal, and how many have. Of its hand it has drawn the first
    ``drawn`` samples; the first ``done`` are in committed rounds, but for ``lost`` ones, which are
    in none: their local steps were dropped. ``takes``: it wants a hand. ``waits``: it comes because
    it has nothing to draw, and not because it is time; it has come so for ``tries`` times in a row.
    ``looked``: it has found no deal that anybody has published.
    """

    number: int = 0
    digest: str = ""
    seated: bool = False
    seats: int = 0
    done: int = 0
    drawn: int = 0
    lost: Spans = ()
    takes: bool = True
    waits: bool = False
    tries: int = 0
    looked: bool = False

    def to_bytes(self, deck: Deck) -> bytes:
        counts = [self.number, self.seats, self.done, self.drawn, self.tries]
        flags = [self.seated, self.takes, self.waits, self.looked]
        lost = [list(span) for span in self.lost]
        return json.dumps(
            [counts, flags, self.digest, lost, str(deck)], separators=(",", ":")
        ).encode()

    @classmethod
    def from_bytes(cls, name: str, text: bytes, deck: Deck) -> Self:
        """Return what trainer ``name`` gave; ConfigError if it deals another deck.

        RemoteProtocolError for what is no report.
        """
        try:
            if len(text) > REPORT_BYTES_MAX:
                raise ValueError(f"{len(text)} bytes")
            counts, flags, digest, lost, theirs = json.loads(text)
            number, seats, done, drawn, tries = map(_whole, counts)
            seated, takes, waits, looked = map(bool, flags)
            spans = tuple((_whole(begin), _whole(end)) for begin, end in lost)
            if drawn > DRAWN_BLOCKS_MAX * deck.block or done > drawn or len(spans) > LOST_MAX:
                raise ValueError(f"{done} done of {drawn} drawn, {len(spans)} times lost")
        except (ValueError, TypeError, RecursionError) as error:
            raise RemoteProtocolError(
                f"what {name} tells of its samples is no report: {str(error)[:100]}",
                fix="run the same version of atoll on all peers",
            ) from error
        if theirs != str(deck):
            raise ConfigError(
                f"the trainer of {name} deals {str(theirs)[:200]}, and this one {deck}",
                fix="give Shards the same numbers at all trainers",
            )
        return cls(
            number, str(digest), seated, seats, done, drawn, spans, takes, waits, tries, looked
        )


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= POSITIONS_MAX:
        raise ValueError(f"{str(value)[:40]} is no count")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > NAME_CHARACTERS_MAX:
        raise ValueError(f"{str(value)[:40]} is no name")
    return value


def _deltas(spans: Spans) -> list[int]:
    """Return the ends of spans as distances, which are short; spans may go back."""
    ends = list(chain.from_iterable(spans))
    return [end - before for before, end in zip([0, *ends], ends, strict=False)]


def _spans(deltas: Any) -> Spans:
    ends: list[int] = []
    at = 0
    for delta in deltas:
        at = _whole(at + delta)
        ends.append(at)
    spans = tuple(zip(ends[::2], ends[1::2], strict=True))
    if any(begin >= end for begin, end in spans):
        raise ValueError("a span has no samples")
    return spans


# ---------------------------------------------------------------- hands


def pool(deck: Deck, deal: Deal) -> Iterator[Span]:
    """Return the blocks of the pool, or what is left of each, in order."""
    return blocks(deck, chain(deal.free, [(deal.fresh, deck.end)]))


def blocks(deck: Deck, spans: Iterator[Span] | Sequence[Span]) -> Iterator[Span]:
    """Cut spans at the ends of blocks."""
    for begin, end in spans:
        while begin < end:
            cut = min(end, deck.block_end(begin))
            yield begin, cut
            begin = cut


def hand_of(deck: Deck, deal: Deal, name: str, drawn: int = 0) -> Iterator[Span]:
    """Return what a trainer draws, after the first ``drawn`` samples, each span within a block.

    First comes what is kept for it. Nothing for whom has no seat.
    """
    seat, names = deal.seat_of(name), [seat.name for seat in deal.seated]
    if seat is None:
        return
    own: Iterator[Span] = iter(())
    if name in names:
        own = islice(pool(deck, deal), names.index(name), None, len(names))
    for begin, end in chain(blocks(deck, seat.kept), own):
        passed = min(drawn, end - begin)
        drawn -= passed
        if begin + passed < end:
            yield begin + passed, end


# ---------------------------------------------------------------- the next deal


def makes_deal(reports: Sequence[HandReport], tries_max: int) -> bool:
    """Return whether a gather of these reports is a deal.

    It is none as long as only such are in it that wait for one, and some that have a hand are not:
    these would seem to be dead. It is all the same once somebody has tried ``tries_max`` times.
    """
    newest = max(report.number for report in reports)
    knowing = [report for report in reports if report.number == newest]
    seated = sum(report.seated for report in knowing)
    return (
        not newest
        or any(not report.waits for report in reports)
        or max(report.tries for report in reports) >= tries_max
        or seated == max(report.seats for report in knowing)
    )


@dataclass(slots=True)
class _Hand:
    """Hold what has become of the hand of one seat."""

    seat: Seat
    size: int  # of what is kept
    wanted: int = 0  # of its column in the pool
    column: list[Span] = field(default_factory=list)


def advance(
    deck: Deck, deal: Deal, reports: Mapping[str, HandReport]
) -> tuple[Deal, dict[str, int]]:
    """Return the next deal, and how many samples trainers have used that were dealt again.

    ``reports``: of all that are in the gather, in the order that all see.
    """
    number = deal.number + 1
    told = {
        seat.name: reports[seat.name]
        for seat in deal.seats
        if seat.name in reports and reports[seat.name].number == seat.number
    }
    used = [report.drawn for report in told.values()]
    reach = max(*used, deal.reach // 2) if used else deal.reach
    hold = min(HOLD * reach, HOLD_BLOCKS_MAX * deck.block)
    hands = [_Hand(seat, _total(seat.kept)) for seat in deal.seats]
    for hand in hands:
        name = hand.seat.name
        if hand.seat.number != deal.number:
            continue
        if name in told:
            hand.wanted = max(0, told[name].drawn - hand.size)
        elif name not in reports:
            hand.wanted = hold
    taken = _take_columns(deck, deal, [h for h in hands if h.seat.number == deal.number])

    kept: dict[str, Spans] = {}
    away: list[Seat] = []
    back: list[Span] = []
    twice: dict[str, int] = {}
    for hand in hands:
        name, whole = hand.seat.name, (*hand.seat.kept, *hand.column)
        report = told.get(name)
        if report is not None:
            keeps, returned = _split(whole, report)
            back += returned if report.takes else [*returned, *keeps]
            kept[name] = keeps if report.takes else ()
            if report.drawn > _total(whole) and hand.seat.number != deal.number:
                twice[name] = report.drawn - _total(whole)
        elif name not in reports and hand.seat.number == deal.number:
            away.append(Seat(name, hand.seat.number, _joined(whole)))
        else:
            back += whole
    seats = [Seat(name, number, kept.get(name, ())) for name, r in reports.items() if r.takes]
    pieces = without([*deal.free, (deal.fresh, deck.end)], sorted(taken))
    left = _merged([*pieces, *back])
    ends = bool(left) and left[-1][1] == deck.end
    fresh, free = (left[-1][0], left[:-1]) if ends else (deck.end, left)
    return Deal(number, reach, fresh, tuple(free), (*seats, *away)), twice


def _take_columns(deck: Deck, deal: Deal, hands: list[_Hand]) -> list[Span]:
    """Give each of these hands what it wants of its column; return all that was given."""
    taken: list[Span] = []
    open_hands = sum(hand.wanted > 0 for hand in hands)
    for place, (begin, end) in enumerate(pool(deck, deal)):
        if not open_hands:
            break
        hand = hands[place % len(hands)]
        count = min(hand.wanted, end - begin)
        if count:
            hand.column.append((begin, begin + count))
            taken.append((begin, begin + count))
            hand.wanted -= count
            open_hands -= not hand.wanted
    return taken


def _split(whole: Spans, report: HandReport) -> tuple[Spans, list[Span]]:
    """Return what a trainer keeps of its hand, and what goes back into the pool."""
    keeps: list[Span] = []
    back = [*_part(whole, report.drawn, _total(whole))]
    at = report.done
    for begin, end in sorted(report.lost):
        back += _part(whole, begin, min(end, report.drawn))
        keeps += _part(whole, at, begin)
        at = max(at, end)
    keeps += _part(whole, at, report.drawn)
    return _joined(keeps), back


def _part(spans: Spans, first: int, last: int) -> Iterator[Span]:
    """Return the samples number ``first`` to ``last`` of spans."""
    at = 0
    for begin, end in spans:
        low, high = max(first, at), min(last, at + end - begin)
        if low < high:
            yield begin + low - at, begin + high - at
        at += end - begin


def _total(spans: Spans) -> int:
    return sum(end - begin for begin, end in spans)


def _joined(spans: Sequence[Span]) -> Spans:
    """Join spans that follow each other, and leave them in their order."""
    found: list[Span] = []
    for begin, end in spans:
        if found and found[-1][1] == begin:
            found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return tuple(found)


def _merged(spans: Sequence[Span]) -> list[Span]:
    return list(_joined(sorted(span for span in spans if span[0] < span[1])))


def without(spans: Sequence[Span], taken: Sequence[Span]) -> Iterator[Span]:
    """Return what is left of ascending spans without others, which ascend too.

    None of the others reaches from one span into the next.
    """
    left = iter(taken)
    next_taken = next(left, None)
    for begin, end in spans:
        while next_taken is not None and next_taken[0] < end:
            if begin < next_taken[0]:
                yield begin, next_taken[0]
            begin, next_taken = max(begin, next_taken[1]), next(left, None)
        if begin < end:
            yield begin, end
