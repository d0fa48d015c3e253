"""Attempts whose parts a witness owns, over real streams: it has no state, and weighs nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness.runner_sites import Site, begin_of, eventually, prepare, scenario

from atoll.optim.run_spec import feedback_of
from atoll.peer.membership import events as ev
from atoll.peer.membership.messages import Begin
from atoll.peer.membership.witness_owners import Owners

ELEMENTS = 400_000


def owned(trainers: list[Site], witness: Site, attempt: int = 1) -> Begin:
    grid = trainers[0].state.fragment_grid(0)
    codec = trainers[0].state.spec.codec
    owners = Owners((witness.me,), (0,), grid.total, grid.chunk_elements, codec)
    return replace(begin_of(trainers, attempt), owners=owners)


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("codec", ["float32", "int8", "int2"])
def test_trainers_exchange_nothing_with_each_other(place: int, codec: str, tmp_path: Path) -> None:
    """``place``: of the witness among all, who are in the order of their ids."""

    async def play(sites: list[Site]) -> None:
        witness = sites[place]
        trainers = [site for site in sites if site is not witness]
        prepare(trainers, ELEMENTS, codec, error_feedback=feedback_of(codec, None))
        expected = np.mean([site.inputs for site in trainers], axis=0, dtype=np.float64)
        begin = owned(trainers, witness)
        for site in sites:
            site.carry_out(ev.Reduce(begin))
        await eventually(lambda: all(site.reduced(1, 2) for site in sites))
        assert len({site.reduced(1, 2) for site in sites}) == 1
        for site in trainers:
            to = {peer for peer, _ in site.executor.streams.outgoing()}
            assert to == {witness.me}
        witness.carry_out(ev.Abort(2, 1))
        assert not witness.executor.attempts.all, "it keeps nothing"
        for site in trainers:
            site.carry_out(ev.Apply(begin, b"c" * 32))
        await eventually(lambda: all(site.applied(2) for site in trainers))
        assert len({site.state.digest for site in trainers}) == 1
        if codec == "int2":  # of its parts a tenth is left for the next round
            wrong = trainers[0].state.theta - expected
            assert np.linalg.norm(wrong) < 0.5 * np.linalg.norm(expected)
            return
        error = 2e-6 if codec == "float32" else 0.05
        np.testing.assert_allclose(trainers[0].state.theta, expected, rtol=0, atol=error)

    scenario(tmp_path, "abcd", play)


def test_a_witness_owns_the_next_attempt_and_nobody_asks_it_for_what_was_finished(
    tmp_path: Path,
) -> None:
    async def play(sites: list[Site]) -> None:
        witness, *trainers = sites
        prepare(trainers, ELEMENTS, "float32")
        first = owned(trainers, witness)
        for site in (witness, *trainers[:-1]):  # the last one never begins
            site.carry_out(ev.Reduce(first))
        await eventually(lambda: witness.executor.attempts.at(2, 1))
        for site in (witness, *trainers[:-1]):
            site.carry_out(ev.ListFinal(2, 1))
        await eventually(lambda: witness.finals(1) is not None)
        second = owned(trainers, witness, attempt=2)
        for site in sites:
            site.carry_out(ev.Reduce(second))
        await eventually(lambda: all(site.reduced(2, 2) for site in trainers))

    scenario(tmp_path, "abcd", play)
