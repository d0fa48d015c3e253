"""Validators find who did other local steps, as often as the formula says, and nobody else."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean

import pytest
from harness.grids import rest_is_slow

from atoll.optim.replay.difference import detection
from atoll.peer.verify.validation import WITHHELD_MAX, draw
from simulation.validations import CHEATS, CHOOSES, COVERS, FAVOURS, HIDES, SLANDERS, Options, World

KINDS = (CHEATS, SLANDERS, COVERS, HIDES, CHOOSES, FAVOURS)


def any_options(seed: int) -> Options:
    rng = random.Random(seed)
    peers = rng.randint(3, 12)
    liars = rng.sample(range(peers), rng.randint(0, (peers - 1) // 2))
    segments = rng.randint(1, 10)
    return Options(
        seed=seed,
        peers=peers,
        liars={index: rng.choice(KINDS) for index in liars},
        validators=rng.randint(1, peers // 2),
        segments=segments,
        cheated=rng.randint(1, segments),
    )


@pytest.mark.parametrize("first", rest_is_slow(range(0, 200, 50), 1))
def test_nobody_honest_is_ever_banned(first: int) -> None:
    kinds = set()
    for seed in range(first, first + 50):
        world = World(any_options(seed))
        for _ in world.play(20):
            pass
        kinds |= {evidence.kind for evidence in world.banned.values()}
    assert kinds == {"work", "slander"}


@pytest.mark.parametrize(("cheated", "validators"), rest_is_slow([(10, 1), (10, 2), (5, 2)], 1))
def test_cheats_last_as_long_as_the_formula_says(cheated: int, validators: int) -> None:
    expected = detection(10, cheated, 1, validators, 8, 3).expected_rounds
    lasted = []
    for seed in range(250):
        liars = {0: CHEATS, 1: COVERS, 2: COVERS}
        world = World(Options(seed, 8, liars, validators=validators, cheated=cheated))
        (cheat,) = (peer for peer, kind in world.liars.items() if kind == CHEATS)
        number = next(n for n in world.play(400) if cheat in world.banned)
        lasted.append(number - 1)
    assert mean(lasted) == pytest.approx(expected, rel=0.2)  # three standard deviations


def test_who_slanders_is_banned_as_soon_as_all_have_heard_it() -> None:
    rounds = []
    for seed in range(50):
        world = World(Options(seed, 5, {2: SLANDERS}, validators=2))
        rounds.append(next(n for n in world.play(60) if world.banned))
        assert [each.kind for each in world.banned.values()] == ["slander"]
    assert mean(rounds) < 6


def test_who_shows_nothing_is_banned_and_who_has_lost_it_once_is_not() -> None:
    for seed in range(30):
        world = World(Options(seed, 6, {2: HIDES}, validators=3))
        numbers = [n for n in world.play(60) if not world.banned]
        assert [each.kind for each in world.banned.values()] == ["work"]
        assert len(numbers) >= WITHHELD_MAX - 1
        unlucky = World(Options(seed, 6, {}, validators=1, lost=0.02))
        for _ in unlucky.play(30):
            pass
        assert not unlucky.banned


def test_the_draw_names_each_once_and_reaches_all() -> None:
    world = World(Options(1, 7, {}, validators=3))
    seen = set()
    for number in range(100):
        pairs = draw(world._terms(), number.to_bytes(32, "big"))
        assert len({peer for each in pairs for peer in (each.validator, each.target)}) == 6
        seen |= {(each.validator, each.target) for each in pairs}
    assert len(seen) == 7 * 6
    terms = replace(world._terms(), counted=(True, False, True, False, False, True, True))
    for number in range(100):  # of four that count
        pairs = draw(terms, number.to_bytes(32, "big"))
        assert {p for each in pairs for p in (each.validator, each.target)} == {*terms.jury}
    lonely = World(Options(1, 1, {}, validators=3))
    assert draw(lonely._terms(), bytes(32)) == []


def test_who_hides_only_what_is_wrong_is_found_in_the_end() -> None:
    lasted = []
    for seed in range(20):
        world = World(Options(seed, 6, {2: CHOOSES}, validators=3, cheated=2))
        lasted.append(next(n for n in world.play(400) if world.banned))
    assert mean(lasted) < 100  # 10 if it had shown them


def test_nobody_is_banned_because_it_alone_was_shown_nothing() -> None:
    for seed in range(20):
        world = World(Options(seed, 6, {2: FAVOURS}, validators=3))
        for _ in world.play(60):
            pass
        assert not world.banned
