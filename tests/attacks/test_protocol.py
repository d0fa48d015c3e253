"""Attacks on the protocol of audited rounds: who makes them, and what must follow. A table.

What is sent in them is written down with the liars (simulation/liars.py); they play here against
the machines that ship, for a few seeds each, in rounds one after another. That nobody honest is
banned (but one of each pair that contradicts itself, which nobody else can judge), that no wrong
result passes and that a failed attempt names its culprit is checked in every attempt (audits.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from simulation.audit_options import Options, keys
from simulation.audits import World
from simulation.laggards import Replayer, SlowReader

from atoll.peer.verify.attempt_audit import SILENCE_S
from atoll.peer.verify.statement import SignedStatement
from atoll.peer.verify.terms import AuditTerms

SEEDS, ROUNDS = range(5), 3
FIVE = Options(
    seed=0, peers=5, liars={}, rule="mean", codec="int8", blocks=1, chunks=10,
    delay_s=0.05, pauses=0, deaf_pair=False,
)  # fmt: skip


@dataclass(frozen=True)
class Attack:
    """``by``: the kinds of those who make it together. ``proof``: the evidence that it leaves, of
    one of these kinds in each seed; none: it is harmless, and every round passes at once.

    ``seldom``: in some seeds only. Whoever is silent before the draw is left out of the round
    instead, and who tells one of the others has told all."""

    by: tuple[str, ...]
    proof: tuple[str, ...] = ()
    seldom: bool = False


ATTACKS = {
    "withholding after commitment": Attack(("withholding",), ("withheld",), seldom=True),
    "withholding parts in doubt": Attack(("opens nothing",), ("sketch", "withheld")),
    "wrong shard, for all": Attack(("dense shift",), ("result",)),
    "wrong shard, turned around": Attack(("flipped result",), ("result",)),
    "wrong shard, for one": Attack(("two results",), ("pair",)),
    "wrong part of a shard": Attack(("wrong part",), ("pair",)),
    "false accusation": Attack(("false accusation",), ("false",)),
    "accusations of many": Attack(("framing",), ("equivocation", "pair")),
    "draw abort, by another number": Attack(("draw abort",), ("draw",)),
    "draw abort, by silence": Attack(("draw refused",), ("withheld",)),
    "equivocation": Attack(("equivocation",), ("equivocation", "draw")),
    "replay of old messages": Attack(("replay",)),
    "replay of old messages, of a liar's": Attack(("replay", "draw abort"), ("draw",)),
    "words of others, forged": Attack(("forgery",)),
    "slow answers": Attack(("slow",)),
    "slow reading": Attack(("slow reading",)),
    "slow reading, beside a liar": Attack(("slow reading", "dense shift"), ("result",)),
}


def played(attack: Attack, seed: int, rounds: int = ROUNDS) -> World:
    liars = dict(zip((1, 3), attack.by, strict=False))
    options = replace(FIVE, seed=seed, liars=liars)
    world = World(options, keys(options))
    for _ in range(rounds):
        world.attempts += world.play()
    return world


@pytest.mark.parametrize("name", ATTACKS)
def test_what_follows_of_an_attack(name: str) -> None:
    attack, proven = ATTACKS[name], 0
    for seed in SEEDS:
        world = played(attack, seed)
        banned = {peer for honest in world.honest for peer in honest.banned}
        honest = {peer for peer in banned if world.peers[peer].liar.honest}
        assert world.kinds_of_bans() <= set(attack.proof)
        assert len(honest) <= ("pair" in attack.proof)
        assert bool(banned) or attack.seldom or not attack.proof
        assert world.attempts == ROUNDS or attack.proof
        proven += bool(banned - honest)
    assert bool(proven) == bool(attack.proof)
    assert proven == len(SEEDS) or attack.seldom or not attack.proof


def test_old_messages_are_truly_repeated() -> None:
    """Of earlier rounds, and of an attempt that has failed; its own and those of others."""
    for name in ("replay of old messages", "replay of old messages, of a liar's"):
        world = played(ATTACKS[name], 0)
        (liar,) = (p.liar for p in world.peers.values() if isinstance(p.liar, Replayer))
        assert liar.repeated > 100
        signers = {said.signer for said in liar.past if isinstance(said, SignedStatement)}
        assert signers == set(world.peers)


def test_a_slow_reader_makes_every_step_last_as_long_as_it_may() -> None:
    quick, slow = (played(ATTACKS[name], 0, rounds=1) for name in ("slow answers", "slow reading"))
    steps = 5  # each waits for what it says in answer to the one before
    assert slow.now_s > steps * SlowReader.reads_after_s > quick.now_s


def test_who_reads_a_moment_later_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that says nothing before the draw, when a line may be cut as well: in each round the
    attempt with it fails and names it, and the next one passes."""
    monkeypatch.setattr(SlowReader, "reads_after_s", SILENCE_S + 1)
    for seed in SEEDS:
        world = played(ATTACKS["slow reading"], seed)
        assert not world.kinds_of_bans()
        assert all(peer.outcome == "passed" for peer in world.honest)
        assert world.attempts == 2 * ROUNDS


def test_nobody_withholds_anything_from_whom_it_has_no_link_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Let the attempt fail without the one that was cut off: what one misses may have been said."""
    begin = World._begin

    def without_links(world: World, terms: AuditTerms) -> None:
        begin(world, terms)
        liars = {peer.name for peer in world.peers.values() if not peer.liar.honest}
        for peer in world.honest:
            for liar in liars if peer.audit is not None else ():
                peer.audit.link_lost(liar)

    monkeypatch.setattr(World, "_begin", without_links)
    for seed in SEEDS:
        world = played(ATTACKS["draw abort, by silence"], seed)
        assert not world.kinds_of_bans()
        assert world.attempts > ROUNDS
        assert all(peer.outcome == "passed" for peer in world.honest)
