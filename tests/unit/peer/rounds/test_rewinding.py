"""A commit is taken back by a checkpoint and the rounds since, or the state comes from others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from harness.checkpoints import RUN, SECRET, write, writer_for
from harness.runner_sites import Site, eventually, scenario
from harness.tinyrun import TinyRun

from atoll.peer.checkpoint.reader import STATE_FILE
from atoll.peer.membership import events as ev
from atoll.peer.net.identity import Home
from atoll.peer.rounds.rewinding import Checkpoints, rewound

ROUNDS = 6


@pytest.fixture(params=["float32", "dynamic8"])
def run(request: pytest.FixtureRequest) -> Iterator[TinyRun]:
    run = TinyRun(b"p" * 32, momentum_codec=request.param)
    yield run
    run.state.close()


@pytest.fixture
def checkpoints(tmp_path: Path, run: TinyRun) -> Checkpoints:
    """Write checkpoints of rounds 2 and 4 of a run of six, the fifth of which is a GATHER."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    with Home.open(tmp_path / "writer") as home:
        for number in range(2, ROUNDS + 1):
            _ = run.operate() if number == 5 else run.commit()
            if number in (2, 4):
                write(writer_for(folder, home), run)
    return Checkpoints(folder, RUN, SECRET)


def bits(state: object) -> tuple[bytes, bytes]:
    return state.theta.tobytes(), state.momentum.tobytes()  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_the_state_of_an_earlier_round_is_the_same_bit_for_bit(
    run: TinyRun, checkpoints: Checkpoints, number: int
) -> None:
    state = rewound(run.log, checkpoints, number)
    assert state is not None
    assert (state.round, bits(state)) == (number, run.after[number])
    assert state.digest == run.log.digest_after(number)
    state.close()


def test_what_is_before_every_checkpoint_is_not_here(
    run: TinyRun, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    assert rewound(run.log, checkpoints, 1) is None
    assert rewound(run.log, checkpoints._replace(folder=tmp_path / "none"), 5) is None
    assert rewound(run.log, checkpoints._replace(run="other"), 5) is None


def test_a_damaged_checkpoint_is_passed_over(run: TinyRun, checkpoints: Checkpoints) -> None:
    path = max(checkpoints.folder.iterdir()) / STATE_FILE
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    state = rewound(run.log, checkpoints, 5)  # from the one of round 2
    assert state is not None
    assert bits(state) == run.after[5]
    state.close()


def test_damaged_rounds_lead_nowhere(run: TinyRun, checkpoints: Checkpoints) -> None:
    encoded = run.log.encoded(3)
    assert encoded is not None
    encoded[0] ^= 1
    assert rewound(run.log, checkpoints, 3) is None
    state = rewound(run.log, checkpoints, 5)  # which needs them not
    assert state is not None
    state.close()


def test_a_checkpoint_of_another_history_is_not_used(
    run: TinyRun, checkpoints: Checkpoints
) -> None:
    other = TinyRun(b"q" * 32, seed=1)
    for _ in range(2, ROUNDS + 1):
        other.commit()
    assert rewound(other.log, checkpoints, 5) is None
    other.state.close()


def test_an_undo_gives_the_state_back_and_ends_a_catch_up(
    run: TinyRun, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    before, digest, serial = run.chain_after[ROUNDS - 1], run.log.digest_after(5), run.state.serial

    async def play(sites: list[Site]) -> None:
        [site] = sites
        executor = site.executor
        executor.state, executor.replica.log = run.state, run.log
        executor._checkpoints = checkpoints
        site.carry_out(ev.StartSync(ev.Goal(9, b"9" * 32, b"", ())))
        await eventually(lambda: executor.sync.is_working)
        assert not executor.donor.is_open
        site.carry_out(ev.Undo(ROUNDS - 1, before))
        await eventually(lambda: bool(site.fed))
        assert site.fed[-1] == ev.CaughtUp(ROUNDS - 1, before, digest)
        assert (site.state.round, bits(site.state)) == (ROUNDS - 1, run.after[ROUNDS - 1])
        assert site.state.serial != serial  # trainers map it anew
        assert run.log.head(ROUNDS) is None
        assert executor.donor.is_open
        assert not executor.sync.is_working
        # The round before was an operation: what it has left is the state before it, too.
        state = site.state
        site.carry_out(ev.Undo(ROUNDS - 2, run.chain_after[ROUNDS - 2]))
        await eventually(lambda: len(site.fed) == 2)
        assert isinstance(site.fed[-1], ev.CaughtUp)
        assert site.state is state
        assert state.round == ROUNDS - 2

    scenario(tmp_path, "a", play)


def test_an_undo_that_cannot_be_had_says_so_and_leaves_the_state(
    run: TinyRun, tmp_path: Path
) -> None:
    run.commit()
    chain = run.chain_after[1]

    async def play(sites: list[Site]) -> None:
        [site] = sites
        site.executor.state, site.executor.replica.log = run.state, run.log
        for undo in (ev.Undo(1, chain), ev.Undo(1, b"x" * 32)):
            site.fed.clear()
            site.carry_out(undo)
            await eventually(lambda: bool(site.fed))
            assert site.fed == [ev.CatchUpFailed("the state after round 1 is not here")]
        assert (site.state.round, bits(site.state)) == (2, run.after[2])
        np.testing.assert_array_equal(site.state.theta, run.state.theta)

    scenario(tmp_path, "a", play)
