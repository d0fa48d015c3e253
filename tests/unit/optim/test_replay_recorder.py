"""What DiLoCo keeps of its rounds: honest workers pass in every segment, cheats are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.replay_ways import CHEATS
from harness.replaying import Loop, adamw, sampled, text_model
from torch import nn

from atoll.collectives.codecs import F32
from atoll.collectives.errors import CheckpointError, ConfigError
from atoll.optim import DiLoCo, LocalSGD, Replay, SparseLoCo, Swarm
from atoll.optim.replay.commitment import Commitment
from atoll.optim.replay.difference import Verdict
from atoll.optim.replay.opening import Opened, Opening
from atoll.optim.replay.replaying import replay
from atoll.peer.session import Outcome

SYNC_EVERY, SEGMENT, ROUNDS = 7, 3, 3
SIZES = {"width": 16, "depth": 1, "heads": 2}
Make = Callable[[], Loop]


def plain() -> Loop:
    model = text_model(**SIZES)
    return Loop(model, adamw(model))


def accumulated() -> Loop:
    loop = plain()
    loop.accumulate = 3
    return loop


def scheduled() -> Loop:
    loop = plain()
    loop.scheduler = torch.optim.lr_scheduler.LambdaLR(loop.inner, lambda n: 1 / (1 + n / 5))
    return loop


def skipping() -> Loop:
    """Scales that begin too large and grow again, so that steps are skipped all the time."""
    loop = plain()
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)
    return loop


def skipping_accumulated() -> Loop:
    loop = skipping()
    loop.accumulate = 2
    return loop


def normalized() -> Loop:
    """With buffers that every forward pass changes."""

    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = text_model(**SIZES)
            self.norm = nn.BatchNorm1d(256)

        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = self.norm(self.inside(x).flatten(0, 1))
            return nn.functional.cross_entropy(logits, y.flatten())

    model = Normalized()
    return Loop(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@dataclass
class Audited:
    """Of one round of one worker: what it has told, and θ before and after its steps."""

    round: int
    commitment: Commitment
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
        worker, starts, ends = Worker(outer), [pulled(session)], []
        submit = session.submit

        def remembered(fill: Any, weight: float, fragment: int = 0) -> None:
            ends.append(np.zeros(outer.manifest.elements, np.float32))
            fill(ends[-1])
            submit(fill, weight, fragment)

        session.submit = remembered
        cheat(session.number, loop)

        def noted() -> Iterator[Any]:
            for batch in sampled(session.number):
                if len(ends) > len(worker.audits):
                    worker.audits.append(audited(outer, starts[-1], ends[-1]))
                    starts.append(pulled(session))
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
    opening = Opening.decode(audit.openings[segment], worker.outer.manifest)
    return opening.open(audit.commitment.digest)


def verdicts(worker: Worker, make: Make) -> list[list[Verdict]]:
    task = make().task()
    return [
        [replay(opened(worker, audit, n), task) for n in range(len(audit.openings))]
        for audit in worker.audits
    ]


LOOPS: dict[str, Make] = {
    "plain": plain,
    "accumulated": accumulated,
    "scheduled": scheduled,
    "skipping": skipping,
    "skipping and accumulated": skipping_accumulated,
    "normalized": normalized,
}


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
    opening = Opening.decode(short, worker.outer.manifest).open(audit.commitment.digest)
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


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = text_model(**SIZES)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = nn.functional.dropout(self.inside(x), 0.3)
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def noisy() -> Loop:
    model = Noisy()
    return Loop(model, adamw(model))


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


@pytest.fixture
def in_run(local_run: Any) -> Callable[..., tuple[Any, Loop, DiLoCo, Iterator[Any]]]:
    """A worker of a run whose rounds may be missed."""

    def make(run: Any = None, **settings: Any) -> tuple[Any, Loop, DiLoCo, Iterator[Any]]:
        run, loop = run or local_run(), plain()
        options = {"segment_steps": 2} | settings
        outer = DiLoCo(loop.model, loop.inner, 5, run.sessions[0], replay=Replay(**options))

        def noted() -> Iterator[Any]:
            for batch in sampled(3):
                outer.note_batch(batch)
                yield batch

        return run, loop, outer, noted()

    return make


def steps(loop: Loop, batches: Iterator[Any], count: int) -> None:
    loop(next(batches) for _ in range(count))


def test_what_was_changed_between_rounds_is_found(in_run: Any) -> None:
    """Each segment is honest, but some begin elsewhere than the last round has ended."""
    run, loop, outer, batches = in_run()
    recorder, ends, thetas = outer.recorder, [], []
    for number in (1, 2, 3):
        thetas.append(run.theta.copy())
        if number == 2:
            for kept in loop.inner.state.values():
                kept["exp_avg"] *= 1.001
        if number == 3:
            with torch.no_grad():
                loop.model.norm.bias += 0.001
        steps(loop, batches, 5)
        ends.append(recorder.commitment(number).digest)
        opening = recorder.opening(number, 0).open(ends[-1])
        assert replay(opening, plain().task()).passed
        assert opening.start.starts_at(thetas[-1], outer.manifest) == (number != 3)
        if number > 1:
            assert opening.carries_over(ends[-2]) == (number != 2)


def test_a_missed_round_goes_on_with_the_same_steps(local_run: Any, in_run: Any) -> None:
    """The others go on without it, and then it submits the steps of both rounds."""
    run, loop, outer, batches = in_run(local_run(late=[(0, 2)]))
    recorder = outer.recorder
    run.commit = _committing_nothing(run)
    steps(loop, batches, 5)
    first = recorder.commitment(1)
    steps(loop, batches, 5)
    assert recorder.commitment(2) is None
    assert recorder.commitment() is None
    assert recorder.commitment(1) is first
    steps(loop, batches, 5)
    both = recorder.commitment(3)
    assert (both.extent.steps, both.extent.base, both.extent.segments) == (10, 1, 5)
    task = plain().task()
    for segment in range(5):
        data = recorder.opening(3, segment).encode()
        opening = Opening.decode(data, outer.manifest).open(both.digest)
        assert replay(opening, task).passed
        assert opening.carries_over(first.digest) == (segment == 0)


def _committing_nothing(run: Any) -> Callable[[], None]:
    """Its commit, which also bears rounds that nobody is in."""
    commit = type(run).commit

    def either() -> None:
        if (0, run.round + 1) not in run.late:
            commit(run)
            return
        run.round += 1
        run.submitted.clear()
        run.outcomes[0] = _missed(run.round)

    return either


def _missed(number: int) -> Any:
    return Outcome("missed", number, 0.0, 0.0, ())


def test_steps_that_a_reload_drops_are_dropped(in_run: Any) -> None:
    run, loop, outer, batches = in_run()
    recorder = outer.recorder
    run.reload.add(0)
    steps(loop, batches, 5)
    assert recorder.commitment(1) is None
    steps(loop, batches, 5)
    kept = recorder.commitment(2)
    assert kept.extent.steps == 5
    opening = recorder.opening(2, 0).open(kept.digest)
    assert opening.before is None
    assert replay(opening, plain().task()).passed


def test_a_step_without_its_samples_is_an_error(in_run: Any) -> None:
    _, loop, _, batches = in_run()
    steps(loop, batches, 1)
    with pytest.raises(ConfigError, match="call note_batch"):
        loop([np.arange(8)])


@pytest.mark.parametrize("indices", [[1.5], np.ones(3), ["a"], torch.ones(2)])
def test_samples_that_are_no_integers_are_refused(in_run: Any, indices: Any) -> None:
    _, _, outer, _ = in_run()
    with pytest.raises(ConfigError, match="integers"):
        outer.note_batch(indices)


def test_samples_may_come_in_any_form(in_run: Any) -> None:
    _, loop, outer, _ = in_run()
    for form in (list, tuple, np.array, torch.tensor, lambda x: np.array(x, np.uint8)):
        outer.note_batch(form([1, 2, 3]))
        loop([np.array([1, 2, 3])])
    opening = outer.recorder.opening(1, 0)
    opened_one = opening.open(outer.recorder.commitment(1).digest)
    assert [b.indices.tolist() for step in opened_one.steps for b in step] == [[1, 2, 3]] * 2


def test_nothing_is_kept_unless_it_is_asked_for(local_run: Any) -> None:
    run, model = local_run(), text_model(**SIZES)
    outer = DiLoCo(model, adamw(model), 5, run.sessions[0])
    outer.note_batch(["anything"])
    assert outer.recorder is None


def test_a_loaded_state_begins_the_round_anew(in_run: Any) -> None:
    run, loop, outer, batches = in_run()
    steps(loop, batches, 7)
    saved = outer.state_dict(), loop.model.state_dict(), loop.inner.state_dict()
    _, loop, outer, batches = in_run(run)
    loop.model.load_state_dict(saved[1])
    loop.inner.load_state_dict(saved[2])
    outer.load_state_dict(saved[0])
    begun_at = outer.global_step
    steps(loop, batches, 5)
    extent = outer.recorder.commitment(2).extent
    assert (extent.steps, extent.first_step) == (5, begun_at)
    for segment in range(3):
        opening = outer.recorder.opening(2, segment)
        assert replay(opening.open(outer.recorder.commitment(2).digest), plain().task()).passed


# ------------------------------------------------------------ room


def test_only_the_last_round_and_the_one_under_way_are_kept(in_run: Any) -> None:
    _, loop, outer, batches = in_run()
    recorder, used = outer.recorder, []
    for _ in range(6):
        steps(loop, batches, 5)
        used.append(recorder._store.used_bytes)
    assert len(set(used[1:])) == 1
    assert recorder.planned == 8
    assert recorder.commitment(5) is None
    assert recorder.commitment(6) is not None
    with pytest.raises(ConfigError, match=r"segment 0 of round 5 is not kept; rounds \[6\] are"):
        recorder.opening(5, 0)
    with pytest.raises(ConfigError, match="is not kept"):
        recorder.opening(6, 3)
    outer.close()
    assert recorder._store.used_bytes == 0


def test_too_little_memory_is_an_error_at_the_start(in_run: Any, capsys: Any) -> None:
    _, loop, _, batches = in_run(memory_bytes=200_000)
    assert "8 checkpoints are kept" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="give Replay a folder"):
        steps(loop, batches, 5)


def test_steps_of_many_missed_rounds_are_given_up(local_run: Any, in_run: Any, capsys: Any) -> None:
    run, loop, outer, batches = in_run(local_run(late=[(0, n) for n in range(1, 9)]))
    run.commit = _committing_nothing(run)
    outer.recorder._store.bytes_max = 1_000_000
    steps(loop, batches, 40)
    assert "cannot be audited until its next round begins" in capsys.readouterr().err
    steps(loop, batches, 5)
    assert run.round == 9
    assert outer.recorder.commitment(9) is None
    steps(loop, batches, 5)
    assert outer.recorder.commitment(10).extent.steps == 5


def test_a_folder_holds_the_same(in_run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    (folder / "work-000007").mkdir(parents=True)
    _, loop, outer, batches = in_run(folder=folder)
    recorder = outer.recorder
    for _ in range(3):
        steps(loop, batches, 5)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors"))
    assert names == [f"work-000003/{n:03d}.safetensors" for n in range(4)]
    opening = recorder.opening(3, 1)
    assert replay(opening.open(recorder.commitment(3).digest), plain().task()).passed
    (folder / names[1]).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        recorder.opening(3, 1)
    outer.close()
    assert not list(folder.rglob("*.safetensors"))


def test_a_folder_that_cannot_be_used_is_an_error(in_run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match="alone may write to"):
        in_run(folder=tmp_path / "file")


@pytest.mark.parametrize(("every", "wrong"), [(0, "segment_steps=0"), (1, "at most 1024")])
def test_segments_that_cannot_be_are_refused(local_run: Any, every: int, wrong: str) -> None:
    run, model = local_run(), text_model(**SIZES)
    with pytest.raises(ConfigError, match=wrong):
        DiLoCo(model, adamw(model), 2000, run.sessions[0], replay=Replay(segment_steps=every))
