"""What workers of a swarm keep of their rounds: the honest pass in every segment, cheats do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from harness.replay_loops import LOOPS, Make, noisy, plain, skipping
from harness.replay_ways import CHEATS
from harness.replaying import Loop, sampled

from atoll.collectives.codecs import F32
from atoll.optim import DiLoCo, LocalSGD, Replay, SparseLoCo, Swarm
from atoll.optim.replay.difference import ReplayVerdict
from atoll.optim.replay.replaying import replay
from atoll.optim.replay.step_disclosure import Opened, StepDisclosure, WorkCommitment

SYNC_EVERY, SEGMENT, ROUNDS = 7, 3, 3


@dataclass
class Audited:
    """Of one round of one worker: what it has told, and θ before and after its steps."""

    round: int
    commitment: WorkCommitment
    openings: list[bytes]
    outer: F32
    submitted: F32


@dataclass
class Worker:
    outer: DiLoCo
    audits: list[Audited] = field(default_factory=list)


def trained(
    make: Make,
    *,
    workers: int = 2,
    rounds: int = ROUNDS,
    cheat: Callable[[int, Loop], None] = lambda worker, loop: None,
    method: Any = DiLoCo,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> list[Worker]:
    """Workers of a swarm whose every round is opened as a whole."""

    def train(session: Any) -> Worker:
        loop = make()
        stateful = {"scaler": loop.scaler} if loop.scaler else {}
        kept = Replay(segment_steps=SEGMENT, stateful=stateful, **settings)
        outer = method(loop.model, loop.inner, SYNC_EVERY, session, replay=kept, **(options or {}))
        torch.manual_seed(session.number)
        worker, starts, ends, told = Worker(outer), [pulled(session)], [], []
        submit = session.submit

        def remembered(fill: Any, weight: float, fragment: int = 0) -> None:
            ends.append(np.zeros(outer.manifest.elements, np.float32))
            fill(ends[-1], 0)
            told.append(outer.recorder.commitment())
            submit(fill, weight, fragment)

        session.submit = remembered
        cheat(session.number, loop)

        def noted() -> Iterator[Any]:
            for batch in sampled(session.number):
                if len(ends) > len(worker.audits):
                    worker.audits.append(audited(outer, starts[-1], ends[-1]))
                    starts.append(pulled(session))
                    assert worker.audits[-1].commitment is told[-1]  # known before the round is
                if len(worker.audits) == rounds:
                    return
                outer.note_batch(batch)
                yield batch

        loop(noted())
        return worker

    return Swarm(workers).run(train)


def pulled(session: Any) -> F32:
    found: list[F32] = []
    session.pull(lambda flat: found.append(flat.copy()))
    return found[0]


def audited(outer: DiLoCo, start: F32, end: F32) -> Audited:
    recorder, number = outer.recorder, outer.peer.round
    assert recorder is not None
    commitment = recorder.commitment(number)
    assert commitment is not None
    every = range(commitment.extent.segments)
    openings = [recorder.opening(number, segment).encode() for segment in every]
    return Audited(number, commitment, openings, start, end)


def opened(worker: Worker, audit: Audited, segment: int) -> Opened:
    opening = StepDisclosure.decode(audit.openings[segment], worker.outer.manifest)
    return opening.open(audit.commitment.digest)


def verdicts(worker: Worker, make: Make) -> list[list[ReplayVerdict]]:
    task = make().task()
    return [
        [replay(opened(worker, audit, n), task) for n in range(len(audit.openings))]
        for audit in worker.audits
    ]


@pytest.mark.parametrize("loop", LOOPS)
def test_honest_workers_pass_in_every_segment_of_every_round(loop: str) -> None:
    workers = trained(LOOPS[loop])
    for worker in workers:
        found = verdicts(worker, LOOPS[loop])
        assert [len(row) for row in found] == [3] * ROUNDS
        for verdict in chain.from_iterable(found):
            assert verdict.passed, verdict
            assert verdict.difference == 0.0
    worker = workers[0]
    segments = [opened(worker, audit, n) for audit in worker.audits for n in range(3)]
    batches = {len(step) for segment in segments for step in segment.steps}
    each = LOOPS[loop]().accumulate
    assert batches == ({each, 2 * each} if "skipping" in loop else {each})


def test_what_was_kept_is_where_the_run_was() -> None:
    (worker,) = trained(plain, workers=1)
    manifest = worker.outer.manifest
    before = None
    for number, audit in enumerate(worker.audits):
        extent = audit.commitment.extent
        assert extent.first_step == number * SYNC_EVERY
        assert (extent.steps, extent.base) == (SYNC_EVERY, audit.round - 1)
        first, last = (opened(worker, audit, segment) for segment in (0, 2))
        assert first.is_first
        assert first.start.starts_at(audit.outer, manifest)
        assert not first.start.starts_at(audit.submitted, manifest)
        assert last.is_last
        assert last.end is not None
        assert np.array_equal(last.end.flat(manifest), audit.submitted)
        delta = audit.outer - audit.submitted
        assert np.array_equal(last.end.pseudo_gradient(audit.outer, manifest), delta)
        assert last.end.ends_in(delta, audit.outer, manifest, 1e-6)
        assert (first.before is not None) == (before is not None)
        if before is not None:
            assert first.carries_over(before.commitment.digest)
            assert not last.carries_over(before.commitment.digest)
        before = audit


def test_the_end_of_a_segment_may_be_its_digests() -> None:
    (worker,) = trained(plain, workers=1, rounds=1)
    recorder, audit = worker.outer.recorder, worker.audits[0]
    assert recorder is not None
    short = recorder.opening(audit.round, 1, whole=False).encode()
    assert len(short) < 0.6 * len(audit.openings[1])
    opening = StepDisclosure.decode(short, worker.outer.manifest).open(audit.commitment.digest)
    assert replay(opening, plain().task()).passed


# Steps that are not taken are no steps to a worker that counts them.
UNSEEN = ("one step skipped", "no steps")


@pytest.mark.parametrize("cheat", [name for name in CHEATS if name not in UNSEEN])
def test_a_cheating_worker_is_found_and_no_other(cheat: str) -> None:
    workers = trained(
        plain, rounds=2, cheat=lambda n, loop: CHEATS[cheat](loop) if n == 1 else None
    )
    honest, liar = (list(chain.from_iterable(verdicts(worker, plain))) for worker in workers)
    assert all(verdict.passed for verdict in honest)
    assert not all(verdict.passed for verdict in liar)


# ------------------------------------------------------------ dropout


@pytest.mark.parametrize("rng", [True, False])
def test_dropout_is_repeated_where_random_states_are_kept(rng: bool) -> None:
    workers = trained(noisy, rng=rng)
    found = [verdict.passed for w in workers for row in verdicts(w, noisy) for verdict in row]
    assert all(found) if rng else not any(found)


# ------------------------------------------------------------ other methods, other endings


@pytest.mark.parametrize("method", [LocalSGD, SparseLoCo])
def test_other_methods_that_wait_for_rounds_keep_theirs(method: Any) -> None:
    for worker in trained(plain, method=method):
        assert all(verdict.passed for row in verdicts(worker, plain) for verdict in row)


def test_training_is_the_same_with_and_without() -> None:
    def train(session: Any, replay: Replay | None) -> torch.Tensor:
        loop = skipping()
        outer = DiLoCo(loop.model, loop.inner, 4, session, replay=replay)

        def noted() -> Iterator[Any]:
            for batch in sampled(session.number):
                outer.note_batch(batch)
                yield batch
                if outer.metrics()["rounds"] == 3:
                    return

        loop(noted())
        return torch.cat([p.detach().flatten() for p in loop.model.parameters()])

    one = Swarm(2).run(lambda s: train(s, None))
    other = Swarm(2).run(lambda s: train(s, Replay(segment_steps=2, rng=True)))
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)
