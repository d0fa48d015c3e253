"""Audited rounds over real TLS links: the bits of a swarm, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness.runner_sites import Site, begin_of, eventually, prepare, scenario

from atoll.optim.swarm_state import SwarmState, SwarmSubmission
from atoll.peer.membership import events as ev
from atoll.peer.verify.statement import (
    StatementPhase,
)

ELEMENTS = 60_000
CHAIN = b"c" * 32


@pytest.mark.parametrize("rule", ["mean", "trimmed(f=1)", "nnm+trimmed(f=1)", "gm(f=1)"])
@pytest.mark.parametrize("codec", ["int8", "float32"])
def test_rounds_give_the_bits_of_a_swarm(tmp_path: Path, rule: str, codec: str) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, codec, aggregate=rule, audit=True)
        state = sites[0].state
        truth = SwarmState(state.spec, state.manifest, lambda flat: np.copyto(flat, state.theta))
        for number, weights in ((2, (1.0, 5.0, 1.0, 2.0)), (3, (1.0, 1.0, 0.0, 1.0))):
            given = [
                SwarmSubmission(n, site.inputs.copy(), float(weight > 0))
                for n, (site, weight) in enumerate(zip(sites, weights, strict=True))
            ]
            begin = replace(begin_of(sites, number - 1, number), weights=weights)
            truth.commit(given)
            for site in sites:
                site.carry_out(ev.Reduce(begin))
            await eventually(
                lambda b=begin: all(site.reduced(b.attempt, b.round) for site in sites)
            )
            runs = [site.executor.attempts.get(begin.round) for site in sites]
            assert all(run is not None and run.audit is not None for run in runs)
            for site in sites:
                site.carry_out(ev.Apply(begin, CHAIN))
            await eventually(lambda b=begin: all(site.applied(b.round) for site in sites))
            for site in sites:
                assert site.state.theta.tobytes() == truth.theta.tobytes()
        assert not any(site.audits._attempts for site in sites)

    scenario(tmp_path, "abcd", play)


@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_run_begins_with_one_and_two(tmp_path: Path, names: str) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, audit=True)
        begin = begin_of(sites, 1)
        for site in sites:
            site.carry_out(ev.Reduce(begin))
        await eventually(lambda: all(site.reduced(1) for site in sites))
        assert len({site.reduced(1) for site in sites}) == 1

    scenario(tmp_path, names, play)


def test_nothing_is_sent_before_all_have_committed(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS, audit=True)
        begin = begin_of(sites, 1)
        for site in sites[:-1]:
            site.carry_out(ev.Reduce(begin))
        await eventually(lambda: all(site.audits._attempts for site in sites[:-1]))
        for site in sites[:-1]:
            (attempt,) = site.audits._attempts.values()
            await eventually(lambda a=attempt: len(a.audit.inbox.of(StatementPhase.COMMIT)) == 2)
        assert all(site.executor.streams.moved_bytes == 0 for site in sites)
        sites[-1].carry_out(ev.Reduce(begin))
        await eventually(lambda: all(site.reduced(1) for site in sites))

    scenario(tmp_path, "abc", play)
