"""Audited attempts with liars below one half, in every seed: see audits.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.grids import rest_is_slow

from simulation.audit_options import Options, expand, keys
from simulation.audits import World, run
from simulation.framers import OneFramer
from simulation.gram_liars import EvenGram, FarGram, OneGram, StretchedGram, TwoGrams
from simulation.liars import KINDS

ALONE = Options(
    seed=5,
    peers=5,
    liars={},
    rule="mean",
    codec="int8",
    blocks=2,
    chunks=12,
    delay_s=0.05,
    pauses=0,
    deaf_pair=False,
)
# What these do is not against anybody, or cannot be told from a slow machine.
HARMLESS = ("slow", "slow reading", "replay", "forgery")
FRAMING = "framing"
NEEDS_GRAM = {each.kind for each in (EvenGram, OneGram, StretchedGram, FarGram, TwoGrams)}


@pytest.mark.parametrize("first", rest_is_slow(range(0, 100, 20), 1))
def test_no_liar_passes_and_nobody_honest_is_banned(first: int) -> None:
    for seed in range(first, first + 20):
        run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 3000, 100))
def test_many_more_seeds(first: int) -> None:
    for seed in range(first, first + 100):
        run(seed)


def test_seeds_reach_every_lie_rule_and_codec() -> None:
    options = [expand(seed) for seed in range(100)]
    assert {kind for each in options for kind in each.liars.values()} == set(KINDS)
    assert {each.codec for each in options} >= {"int8", "int4", "bfloat16", "float32"}
    names = ("mean", "trimmed", "multi_krum", "gm", "nnm+trimmed")
    many = [expand(seed).rule.partition("(")[0] for seed in range(600)]
    assert set(names) <= set(many)


def play(options: Options) -> World:
    world = World(options, keys(options))
    world.attempts = world.play()
    return world


@pytest.mark.parametrize("rule", ["mean", "trimmed(f=1)", "gm(f=1)", "nnm+trimmed(f=1)"])
@pytest.mark.parametrize("codec", ["int8", "float32", "bfloat16", "int4", "fp4_e3m0"])
def test_honest_participants_pass_at_once_and_open_nothing(rule: str, codec: str) -> None:
    world = play(replace(ALONE, rule=rule, codec=codec))
    assert world.attempts == 1
    audits = [peer.audit for peer in world.peers.values()]
    assert not any(audit is None or audit.disclosure.opened or audit._in_doubt for audit in audits)
    assert not any(peer.banned for peer in world.peers.values())


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {*HARMLESS, FRAMING, *NEEDS_GRAM}))
def test_each_lie_costs_its_author_the_run(kind: str) -> None:
    """In a few attempts, in some of which it may not have had an occasion."""
    world = play(replace(ALONE, liars={1: kind}))
    (liar,) = [peer.name for peer in world.peers.values() if not peer.liar.honest]
    banned = {name for peer in world.honest for name in peer.banned}
    assert liar in banned
    paired = kind in ("two results", "wrong part")
    assert len(banned) == (2 if paired else 1)
    assert world.attempts == 2


@pytest.mark.parametrize("kind", HARMLESS)
def test_noise_harms_nobody(kind: str) -> None:
    world = play(replace(ALONE, liars={1: kind}))
    assert world.attempts == 1
    assert not any(peer.banned for peer in world.peers.values())


@pytest.mark.parametrize(
    "rule", rest_is_slow(["multi_krum(f=1)", "gm(f=1)", "nnm+trimmed(f=1)"], 1)
)
@pytest.mark.parametrize("kind", sorted(NEEDS_GRAM))
def test_who_lies_about_inner_products_is_banned_in_that_attempt(kind: str, rule: str) -> None:
    for seed in range(5):
        world = play(replace(ALONE, seed=seed, peers=7, chunks=21, rule=rule, liars={1: kind}))
        if kind == StretchedGram.kind and "trimmed" in rule:
            assert world.kinds_of_bans() <= {"gram"}  # it may pass: docs/audit.md says how far
            continue
        assert world.attempts == 2
        assert world.kinds_of_bans() == {"pair" if kind == TwoGrams.kind else "gram"}


def test_two_liars_who_cover_each_other_are_both_banned() -> None:
    """One lies in its numbers of a chunk that the other owns, who keeps silent."""
    for seed in range(40):
        world = play(replace(ALONE, seed=seed, liars={1: "silent owner", 3: "silent owner"}))
        if "silent" in world.kinds_of_bans():
            return
    pytest.fail("in no seed was one silent for the other")


def test_who_frames_many_takes_one_along_at_most() -> None:
    """Those whom it contradicts before different others, and one after another, stay."""
    kinds = set[str]()
    for seed in range(20):
        world = play(replace(ALONE, seed=seed, peers=7, chunks=14, liars={1: "framing"}))
        honest = {name for p in world.honest for name in p.banned if world.peers[name].liar.honest}
        assert len(honest) <= 1
        kinds |= world.kinds_of_bans()
    assert "equivocation" in kinds


def test_an_owner_that_names_another_chunk_is_not_silent_but_malformed() -> None:
    for seed in range(40):
        liars = {1: "wrong sketch", 3: "deflecting owner"}
        world = play(replace(ALONE, seed=seed, liars=liars))
        if "malformed" in world.kinds_of_bans():
            return
    pytest.fail("in no seed did it have to accuse anybody")


@pytest.mark.parametrize("places", [(1,), (1, 3)])
def test_who_is_on_probation_takes_nobody_along(places: tuple[int, ...]) -> None:
    """It has shown nothing yet, so a new identity for each member would empty the run."""
    options = replace(ALONE, peers=7, chunks=14, liars=dict.fromkeys(places, "framing"))

    def framed(newcomers: tuple[int, ...]) -> World:
        signers = keys(options)
        world = World(replace(options, newcomers=newcomers), signers)
        for place in places:
            world.peers[signers[place].me].liar = OneFramer(world.rng)
        world.attempts = world.play()
        return world

    world = framed(places)
    assert not world.kinds_of_bans()
    assert world.attempts == 1 + len(places)  # one after another is left out
    if len(places) == 1:
        assert framed(()).kinds_of_bans() == {"pair"}


def test_nobody_is_banned_for_a_restart() -> None:
    """Its BEGIN is repeated to it, and it signs nothing more in that attempt."""
    lives = 0
    for seed in range(6):
        world = play(replace(ALONE, seed=seed, restarts=True))
        lives = max(lives, *world.lives.values())
        assert not world.kinds_of_bans()
    assert lives > 1
