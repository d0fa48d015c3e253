"""What a trainer keeps of its rounds, also of missed and dropped ones, and how much of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.replay_loops import SIZES, plain
from harness.replaying import Loop, adamw, sampled, text_model

from atoll.collectives.errors import CheckpointError, ConfigError
from atoll.optim import DiLoCo, Replay
from atoll.optim.replay.replaying import replay
from atoll.optim.replay.step_disclosure import StepDisclosure
from atoll.peer.client.trainer_channel import Outcome


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
        assert opening.start.is_fresh == (number == 1)
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
        opening = StepDisclosure.decode(data, outer.manifest).open(both.digest)
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
