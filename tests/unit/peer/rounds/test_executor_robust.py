"""Rounds with a robust rule over real TLS links: their bits, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness.runner_sites import Site, begin_of, eventually, prepare, scenario

from atoll.optim.swarm_state import SwarmState, SwarmSubmission
from atoll.peer.membership import events as ev

ELEMENTS = 60_000
CHAIN = b"c" * 32


def refusals(site: Site) -> list[str]:
    return [event.why for event in site.fed if isinstance(event, ev.ReduceFailed)]


@pytest.mark.parametrize("rule", ["trimmed(f=1)", "nnm+trimmed(f=1)"])
def test_rounds_give_the_bits_of_a_swarm(tmp_path: Path, rule: str) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, aggregate=rule)
        state = sites[0].state
        truth = SwarmState(state.spec, state.manifest, lambda flat: np.copyto(flat, state.theta))
        for number, weights in ((2, (1.0, 5.0, 1.0, 2.0)), (3, (1.0, 1.0, 0.0, 1.0))):
            given = [
                SwarmSubmission(n, site.inputs.copy(), weight)
                for n, (site, weight) in enumerate(zip(sites, weights, strict=True))
            ]
            begin = replace(begin_of(sites, 1, number), weights=weights)
            truth.commit(given)
            for site in sites:
                site.carry_out(ev.Reduce(begin))
            await eventually(lambda b=begin: all(site.reduced(1, b.round) for site in sites))
            for site in sites:
                site.carry_out(ev.Apply(begin, CHAIN))
            await eventually(lambda b=begin: all(site.applied(b.round) for site in sites))
            for site in sites:
                assert site.state.theta.tobytes() == truth.theta.tobytes()

    scenario(tmp_path, "abcd", play)


def test_too_few_neither_reduce_nor_copy(tmp_path: Path) -> None:
    """A result that one peer made alone is not taken, whoever says that it is the round's."""

    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, aggregate="trimmed(f=1)")
        begin = replace(begin_of(sites, 1), weights=(1.0, 1.0, 0.0))
        sites[0].carry_out(ev.Reduce(begin))
        await eventually(lambda: refusals(sites[0]))
        assert "needs at least 3 peers, and here are 2" in refusals(sites[0])[0]
        alone = replace(begin, attempt=2, participants=begin.participants[:1], weights=(1.0,))
        sites[1].carry_out(ev.Fetch(alone, begin.participants[0]))
        await eventually(lambda: any("here are 1" in line for line in sites[1].logs))
        assert sites[1].executor.attempts.get(begin.round) is None

    scenario(tmp_path, "abc", play)
