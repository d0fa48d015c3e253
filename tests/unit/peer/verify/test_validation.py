"""Words about local steps that come before the round is over here."""

from __future__ import annotations

from dataclasses import replace

from simulation.audit_options import Key
from simulation.validations import CHEATS, Options, World

from atoll.peer.verify.statement import (
    Judgement,
    Replayed,
    SignedStatement,
    StatementPhase,
    sign_statement,
)
from atoll.peer.verify.terms import AuditTerms
from atoll.peer.verify.validation import WORDS_MAX, draw

SEED = bytes(range(32))


def word(key: Key, terms: bytes, target: bytes) -> SignedStatement:
    body = Replayed(target, int(Judgement.WRONG), "")
    return sign_statement(terms, StatementPhase.REPLAYED, b"", body, key.me, key)


def begun() -> tuple[World, AuditTerms, bytes, bytes, bytes]:
    """A round, its target and its validator, and somebody else."""
    world = World(Options(3, 5, {0: CHEATS}))
    terms = world._terms()
    (drawn,) = draw(terms, SEED)
    me = next(p for p in terms.participants if p not in (drawn.target, drawn.validator))
    return world, terms, drawn.target, drawn.validator, me


def test_what_comes_early_counts_later_and_no_flood_pushes_it_out() -> None:
    world, terms, target, validator, me = begun()
    machine = world.machines[me]
    machine.hear(word(world.keys[validator], terms.digest, target), validator)
    for number in range(3 * WORDS_MAX):  # from one that is linked, and signs for any number
        machine.hear(word(Key(world.rng), number.to_bytes(32, "big"), target), b"f" * 32)
    machine.committed(terms, SEED, dict.fromkeys(terms.participants, b"w" * 32))
    assert [task.target for task in machine.tasks()] == [target]
    kept = [*machine._early.values(), *machine._earlier.values()]
    assert max(map(len, kept)) == WORDS_MAX
    for number in (1, 2):  # what nobody ever hears of is forgotten
        later = replace(terms, round=terms.round + number, attempt=terms.attempt + number)
        machine.committed(later, SEED, dict.fromkeys(terms.participants, b"w" * 32))
    assert not machine._early
    assert not machine._earlier


def test_the_accused_speaks_for_itself() -> None:
    world, terms, target, validator, _ = begun()
    machine = world.machines[target]
    machine.committed(terms, SEED, dict.fromkeys(terms.participants, b"w" * 32))
    machine.hear(word(world.keys[validator], terms.digest, target), validator)
    assert len(machine.take()) == 1  # right, to all
    machine.hear(word(world.keys[validator], terms.digest, target), validator)
    assert machine.take() == []
