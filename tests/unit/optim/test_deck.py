"""Dealing samples: whoever comes, goes, is late or dies, each is used once an epoch."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim.deck import (
    DRAWN_BLOCKS_MAX,
    HOLD,
    Deal,
    Deck,
    HandReport,
    Span,
    advance,
    hand_of,
    makes_deal,
    permuted,
    pool,
    usual_block,
)


class Player:
    """A trainer, without a network: it draws, it is in rounds, it tells."""

    def __init__(self, name: str) -> None:
        self.name, self.deal = name, Deal(0, 0)
        self.forget()

    def forget(self) -> None:
        self.drawn: list[int] = []  # positions of its hand
        self.done = 0
        self.lost: tuple[Span, ...] = ()
        self.hand: Iterator[Span] | None = None

    def draw(self, deck: Deck, count: int) -> bool:
        """False at the end of the data."""
        if self.hand is None:
            return True
        while count > 0:
            span = next(self.hand, None)
            if span is None:
                return False
            self.drawn += range(*span)
            count -= 1
        return True

    @property
    def open(self) -> list[int]:
        """What is in no committed round yet."""
        lost = {n for begin, end in self.lost for n in range(begin, end)}
        return [p for n, p in enumerate(self.drawn) if n >= self.done and n not in lost]

    def report(self, *, takes: bool = True) -> HandReport:
        seats = [seat.name for seat in self.deal.seated]
        return HandReport(
            self.deal.number, "", self.name in seats, len(seats), self.done, len(self.drawn),
            self.lost, takes,
        )  # fmt: skip

    def begin(self, deck: Deck, deal: Deal) -> None:
        self.deal = deal
        self.forget()
        seat = deal.seat_of(self.name)
        if seat is not None:
            self.drawn = [p for span in seat.kept for p in range(*span)]
            self.hand = hand_of(deck, deal, self.name, len(self.drawn))


class World:
    """Trainers and their deals; ``used`` counts the samples that are in committed rounds."""

    def __init__(self, deck: Deck, names: str) -> None:
        self.deck, self.deal = deck, Deal.first(deck)
        self.players = {name: Player(name) for name in names}
        self.used: Counter[int] = Counter()
        self.excused: set[int] = set()  # used twice, as is said
        self.told: set[int] = set()  # of these: a deal has said so
        self.make_deal(names)

    def commit(self, names: str) -> None:
        """A round of these: all that they have trained so far is in it."""
        for player in map(self.players.__getitem__, names):
            self.used.update(player.open)
            player.done = len(player.drawn)

    def make_deal(self, names: str, leaving: str = "") -> dict[str, int]:
        told = {name: self.players[name].report(takes=name not in leaving) for name in names}
        for name, report in told.items():
            seat = self.deal.seat_of(name)
            if seat is None or seat.number != report.number:  # it has missed two deals
                self.excused |= {*self.players[name].drawn}
        self.deal, twice = advance(self.deck, self.deal, told)
        self.deal = Deal.from_bytes(self.deal.to_bytes())
        for name, count in twice.items():
            self.told |= {*self.players[name].drawn[-count:]}
        self.excused |= self.told
        for name in names:
            self.players[name].begin(self.deck, self.deal)
        self.check()
        return twice

    def check(self) -> None:
        """What is in the pool and what is kept never overlap, nor does the pool with itself."""
        there = Counter[int]()
        for begin, end in [*pool(self.deck, self.deal)]:
            there.update(range(begin, end))
        for seat in self.deal.seats:
            for begin, end in seat.kept:
                there.update(range(begin, end))
        assert max(there.values(), default=1) == 1
        for position in range(self.deck.end):
            assert there[position] or self.used[position], position

    def die(self, name: str) -> None:
        """What it has in committed rounds and has not told of yet is used twice."""
        player = self.players.pop(name)
        self.excused |= {*player.drawn[: player.done]}

    def finish(self) -> None:
        """The trainers that are left use all that is left."""
        for _ in range(10_000):
            for player in self.players.values():
                player.draw(self.deck, 3)
            names = "".join(self.players)
            self.commit(names)
            self.make_deal(names)
            if self.deal.is_over(self.deck) and not any(s.kept for s in self.deal.seats):
                break
        assert {*range(self.deck.end)} == {*self.used}
        assert {position for position, times in self.used.items() if times > 1} <= self.excused


def turn(world: World, dice: random.Random, faults: tuple[str, ...]) -> None:
    """One round, with something that happens in it to somebody."""
    fault, names = dice.choice(faults), sorted(world.players)
    who = dice.choice(names)
    for player in world.players.values():
        player.draw(world.deck, dice.choice((0, 1, 2, 7)))
    alone = len(names) == 1
    in_round = "".join(n for n in names if n != who or alone or fault not in ("late", "dies"))
    leaving = who if fault == "leaves" and not alone else ""
    if fault == "dies" and not alone:
        world.die(who)
    if fault == "drops":  # its daemon got another state
        player = world.players[who]
        player.lost = (*player.lost, (player.done, len(player.drawn)))
        player.lost = tuple(span for span in player.lost if span[0] < span[1])
        player.done = len(player.drawn)
        in_round = in_round.replace(who, "") or in_round
    if fault == "all die":
        for name, player in world.players.items():
            world.players[name] = again = Player(name)
            again.deal = player.deal  # from its file
    world.commit(in_round)
    if fault == "dies in between" and not alone:
        world.die(who)
    comes = dice.choice("nopqrst")
    if fault == "comes" and comes not in world.players:
        world.players[comes] = Player(comes)
    late = who if fault == "late" and not alone else ""
    if world.players.keys() == {late}:
        late = ""
    world.make_deal("".join(n for n in world.players if n != late), leaving)
    if leaving:
        del world.players[leaving]


FAULTS = ("", "", "late", "dies", "drops", "all die", "comes", "comes", "leaves")
decks = st.builds(
    lambda samples, block, epochs: Deck(samples, min(block, samples), epochs, 1),
    st.integers(1, 150), st.integers(1, 9), st.integers(1, 3),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(decks, st.integers(0, 10**6), st.integers(0, 25))
def test_every_sample_is_used_once_an_epoch(deck: Deck, seed: int, turns: int) -> None:
    """Nobody that dies has told less than what is committed, and nobody misses two deals."""
    dice, world = random.Random(seed), World(deck, "abc")
    was_late = False
    for _ in range(turns):
        faults = tuple(f for f in FAULTS if f != "late") if was_late else FAULTS
        before = world.deal.number
        turn(world, dice, faults)
        was_late = any(p.deal.number <= before for p in world.players.values())
    assert world.excused == world.told  # who is late and fast may have used more than was kept
    world.finish()


@settings(max_examples=100, deadline=None)
@given(decks, st.integers(0, 10**6), st.integers(0, 25))
def test_nothing_is_skipped_and_only_what_is_said_is_used_twice(
    deck: Deck, seed: int, turns: int
) -> None:
    dice, world = random.Random(seed), World(deck, "abc")
    for _ in range(turns):
        turn(world, dice, (*FAULTS, "dies in between"))
        for player in world.players.values():
            if player.deal.number < world.deal.number - 1:
                world.excused |= {*player.drawn}
    world.finish()


def test_ten_trainers_that_come_and_go_over_three_epochs() -> None:
    """Of a hundred rounds; those that die lose nothing but time."""
    dice, world = random.Random(7), World(Deck(6_007, 4, 3, 5), "abcdefghij")
    gone: list[str] = []
    rounds = 0
    while not world.deal.is_over(world.deck):
        rounds += 1
        dying = dice.choice([*world.players]) if len(world.players) > 4 else ""
        for name, player in world.players.items():
            player.draw(world.deck, dice.choice((3, 5, 9)) if name != "a" else 20)  # a is fast
        if dying and rounds % 4 == 0:
            world.die(dying)
            gone.append(dying)
        names = "".join(world.players)
        world.commit(names)
        coming = gone.pop(0) if gone and dice.random() < 0.4 else ""
        if coming:
            world.players[coming] = Player(coming)
        world.make_deal("".join(world.players))
    world.finish()
    assert rounds > 50
    assert not world.excused
    assert set(world.used.values()) == {1}
    assert len(world.used) == 3 * 6_007


def test_epochs_have_other_orders_and_each_has_every_sample() -> None:
    deck = Deck(1_003, 10, 2, 3)
    orders = []
    for epoch in range(2):
        span = (epoch * 1_003, (epoch + 1) * 1_003)
        deal = Deal(1, 0, span[0])
        found = [deck.indices(s) for s in pool(deck, deal) if s[1] <= span[1]]
        orders.append([n for indices in found for n in indices])
        assert sorted(orders[-1]) == list(range(1_003))
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])
    assert orders[0][-3:] == [1_000, 1_001, 1_002]  # what is left over beside blocks


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 100, 1_000])
def test_permutations_are_permutations(count: int) -> None:
    orders = {tuple(permuted(place, count, key) for place in range(count)) for key in range(8)}
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert len(orders) > min(count - 1, 5)


def test_a_billion_samples_cost_no_more() -> None:
    deck = Deck(10**9, usual_block(10**9), 0, 1)
    assert deck.block == 1024
    world_of, _ = advance(deck, Deal.first(deck), {name: HandReport() for name in "abcd"})
    first = {name: next(hand_of(deck, world_of, name)) for name in "abcd"}
    assert len({deck.indices(span).start for span in first.values()}) == 4
    assert all(0 <= deck.indices(span).start < 10**9 for span in first.values())
    assert len(world_of.to_bytes()) < 200


def at_speed(blocks: int) -> World:
    """Two trainers that have used so many blocks between deals for a while."""
    world = World(Deck(1_000, 1, 1, 0), "ab")
    for _ in range(8):
        for player in world.players.values():
            player.draw(world.deck, blocks)
        world.commit("ab")
        world.make_deal("ab")
    assert world.deal.reach == blocks
    return world


def test_a_late_hand_is_kept_for_one_deal() -> None:
    world = at_speed(10)
    for player in world.players.values():
        player.draw(world.deck, 10)
    late = world.players["b"]
    drawn = [*late.drawn]
    world.commit("a")
    world.make_deal("a")
    seat = world.deal.seat_of("b")
    assert seat is not None
    assert [p for span in seat.kept for p in range(*span)][:10] == drawn
    assert sum(end - begin for begin, end in seat.kept) == HOLD * 10
    world.make_deal("a")
    assert world.deal.seat_of("b") is None
    late.done = 10
    assert world.make_deal("ab") == {}  # it hears of it by itself: nobody knows its hand any more


def test_who_used_more_than_was_kept_is_told() -> None:
    world = at_speed(2)
    world.players["a"].draw(world.deck, 2)
    world.players["b"].draw(world.deck, 30)
    world.commit("a")
    world.make_deal("a")
    assert world.make_deal("ab") == {"b": 30 - HOLD * 2}


def test_who_waits_alone_makes_no_deal_of_those_that_train() -> None:
    waits = HandReport(3, "x", seats=2, waits=True)
    seated = dataclasses.replace(waits, seated=True)
    assert not makes_deal([waits], 3)
    assert not makes_deal([seated, waits], 3)
    assert makes_deal([seated, seated], 3)
    assert makes_deal([waits, dataclasses.replace(seated, waits=False)], 3)
    assert makes_deal([waits, dataclasses.replace(waits, tries=3)], 3)
    assert makes_deal([HandReport(waits=True)], 3)  # the first of all


@given(decks, st.integers(0, 10**6))
def test_deals_and_reports_travel_whole(deck: Deck, seed: int) -> None:
    dice, world = random.Random(seed), World(deck, "abc")
    for _ in range(5):
        turn(world, dice, FAULTS)
    assert Deal.from_bytes(world.deal.to_bytes()) == world.deal
    for player in world.players.values():
        report = player.report()
        assert HandReport.from_bytes("a", report.to_bytes(deck), deck) == report


NOT_THESE = (
    b"[]",
    b"[1,2,3,[4],[]]",
    b'[[1,0,5,4,0],[0,1,0,0],"",[],""]',
    b"[-1,0,0,[],[]]",
    b'[1,0,0,[],[["a",1,[3,-1]]]]',
    b'[1,0,0,["x"],[]]',
)


@given(st.binary(max_size=60) | st.sampled_from(NOT_THESE))
def test_what_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Deal.from_bytes(text)
    with pytest.raises(RemoteProtocolError):
        HandReport.from_bytes("a", text, Deck(10, 1, 1, 0))


def test_numbers_that_differ_are_named() -> None:
    deck = Deck(10, 1, 1, 0)
    with pytest.raises(ConfigError, match="deals 11 samples, block=1, epochs=1, seed=0, and this"):
        HandReport.from_bytes("ab12", HandReport().to_bytes(Deck(11, 1, 1, 0)), deck)
    far = HandReport(drawn=DRAWN_BLOCKS_MAX + 1)
    with pytest.raises(RemoteProtocolError):
        HandReport.from_bytes("ab12", far.to_bytes(deck), deck)


@pytest.mark.parametrize(
    "numbers", [(0, 1, 1), (10, 0, 1), (10, 11, 1), (10, 1, -1), (1 << 50, 1, 0)]
)
def test_numbers_that_cannot_be_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError):
        Deck(*numbers, 0)


def test_a_deal_that_is_too_long_says_what_to_do() -> None:
    free = tuple((3_000 * n, 3_000 * n + 1) for n in range(10_000))
    with pytest.raises(ConfigError, match="larger blocks"):
        Deal(1, 0, 10**9, free).to_bytes()
