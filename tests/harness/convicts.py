"""Evidence against liars of the simulator, of every kind, for the tests of what reads it."""

from __future__ import annotations

import functools
from dataclasses import replace

from simulation import validations
from simulation.audit_options import Options, keys
from simulation.audits import World
from simulation.validations import CHEATS, SLANDERS

from atoll.peer.verify.evidence import Evidence

__all__ = ["ALONE", "LIES", "left_behind", "suspects"]

ALONE = Options(
    seed=5, peers=5, liars={1: ""}, rule="mean", codec="int8", blocks=1, chunks=10,
    delay_s=0.01, pauses=0, deaf_pair=False,
)  # fmt: skip
LIES = {
    "equivocation": "equivocation",
    "malformed": "malformed",
    "draw abort": "draw",
    "wrong seed": "seed",
    "wrong sketch": "sketch",
    "false accusation": "false",
    "dense shift": "result",
    "withholding": "withheld",
    "wrong part": "pair",
    "other steps": "work",
    "false replay": "slander",
    "wrong inner products of a chunk": "gram",
}
STEPS = {"other steps": CHEATS, "false replay": SLANDERS}  # after the round
RULES = {"wrong inner products of a chunk": "gm(f=1)"}  # others are of the mean


def suspects() -> set[bytes]:
    """All whom evidence of this module may be about."""
    return {peer for lie in LIES for peer in left_behind(lie).terms.participants}


@functools.cache
def left_behind(lie: str) -> Evidence:
    kind = LIES.get(lie, lie)
    if lie in STEPS:
        world = validations.World(validations.Options(ALONE.seed, ALONE.peers, {1: STEPS[lie]}, 2))
        next(number for number in world.play(100) if world.banned)
        (evidence,) = world.banned.values()
        return evidence
    for seed in range(40):
        liars = {1: "silent owner", 3: "silent owner"} if lie == "silent" else {1: lie}
        options = replace(ALONE, seed=seed, liars=liars, rule=RULES.get(lie, "mean"))
        world = World(options, keys(options))
        world.play()
        for peer in world.honest:
            for each in peer.banned.values():
                if each.kind == kind:
                    return each
    raise AssertionError(f"no evidence of {kind}")
