"""One row of the convergence benchmark, with a tiny model."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.convergence import texts
from benchmarks.convergence.heldout import HeldOut
from benchmarks.convergence.methods import CEILING, FLOOR, METHODS, Case, Entry
from benchmarks.convergence.results import Result
from benchmarks.convergence.row import SCRATCH, WARM, Line, Row
from benchmarks.convergence.sizes import SIZES, adamw, rate_at, set_rate
from benchmarks.convergence.training import clipping, ring_bytes, run_row, train_plainly
from benchmarks.convergence.warm import warm_start
from harness.grids import rest_is_slow

from atoll.optim import DiLoCo, GradientAverage, Swarm, TextBatches, heldout_loss
from atoll.optim.swarm import SwarmSession
from atoll.peer.demo.text import Text

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = SIZES["tiny"]
STEPS, WORKERS, H = 24, 3, 3


def words(count: int, seed: int) -> np.ndarray:
    """Something to learn: two words in a random order."""
    picked = np.random.default_rng(seed).integers(2, size=count)
    return np.frombuffer("".join(["import ", "return\n"][k] for k in picked).encode(), np.uint8)


TEXT = Text(train=words(3000, 0), heldout=words(500, 1))


def row(method: str, start: str = SCRATCH, lr: float = 4e-3, h: int = H) -> Row:
    return Row(Line("tiny", start, STEPS, WORKERS, method, h), lr, seed=5)


def run(tmp_path: Path, *args: Any, **kwargs: Any) -> Result:
    return run_row(row(*args, **kwargs), TEXT, tmp_path / "warm")


# ---------------------------------------------------------------- baselines


def test_the_ceiling_is_gradient_average_in_a_swarm() -> None:
    """To the rounding of float32: one model with all batches, and a mean of gradients."""

    def batches(worker: int) -> TextBatches:
        return TextBatches(TEXT, context=TINY.context, batch=TINY.batch, seed=worker)

    rates = [rate_at(step, STEPS, 4e-3) for step in range(STEPS)]

    def train(session: SwarmSession) -> torch.Tensor:
        model = TINY.model(0)
        inner = adamw(model, 4e-3)
        mine = batches(session.number)
        with GradientAverage(model, inner, session):
            for rate in rates:
                set_rate(inner, rate)
                model.loss(*mine.next()).backward()  # type: ignore[no-untyped-call]
                inner.step()
                inner.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    model = TINY.model(0)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    train_plainly(model, adamw(model, 4e-3), [batches(w) for w in range(WORKERS)], rates)
    together = torch.cat([p.detach().flatten() for p in model.parameters()])
    for found in Swarm(WORKERS).run(train):
        assert (found - together).norm() < 1e-4 * (together - before).norm()


def test_the_ceiling_after_a_warm_start_is_one_uninterrupted_run(tmp_path: Path) -> None:
    warm, whole = run(tmp_path, CEILING, WARM, h=1), run(tmp_path, CEILING, SCRATCH, h=1)
    assert warm.points[-1].loss == whole.points[-1].loss
    assert [point.step for point in warm.points] == [6, 12, 18, 24]
    assert [point.step for point in whole.points] == [0, 6, 12, 18, 24]
    assert warm.points[0].sent_bytes == 0
    assert warm.sent_bytes == ring_bytes(warm.elements, WORKERS, 18)
    assert whole.sent_bytes == ring_bytes(warm.elements, WORKERS, 24)


def test_the_floor_sees_what_worker_0_sees_and_sends_nothing(tmp_path: Path) -> None:
    floor, ceiling = run(tmp_path, FLOOR, h=1), run(tmp_path, CEILING, h=1)
    assert floor.sent_bytes == 0
    assert floor.points[0] == ceiling.points[0]
    assert floor.loss != ceiling.loss
    model = TINY.model(5)
    rates = [rate_at(step, STEPS, 4e-3) for step in range(STEPS)]
    batches = TextBatches(TEXT, context=TINY.context, batch=TINY.batch, seed=5000)
    train_plainly(model, adamw(model, 4e-3), [batches], rates)
    heldout = HeldOut(TEXT, TINY.context)
    starts = heldout.windows(TINY.final_windows)
    assert floor.loss == pytest.approx(heldout.total(model, starts) / len(starts), abs=1e-5)


# ---------------------------------------------------------------- methods


@pytest.mark.parametrize(
    "method", rest_is_slow([name for name in METHODS if name not in (FLOOR, CEILING)], 6)
)
@pytest.mark.parametrize("start", [SCRATCH, WARM])
def test_every_method_learns_and_does_so_again(tmp_path: Path, method: str, start: str) -> None:
    h = 1 if METHODS[method].every_step else H
    first, again = run(tmp_path, method, start, h=h), run(tmp_path, method, start, h=h)
    if method == "private-diloco":  # nobody may know what its noise is drawn from
        assert first.points != again.points
    else:
        assert first.points == again.points
    assert not first.failed
    assert first.loss < first.points[0].loss - METHODS[method].quick_margin / 10
    sent = [point.sent_bytes for point in first.points]
    assert sent[0] == 0
    assert sent == sorted(sent)


def test_bytes_of_a_peer_are_those_of_its_rounds(tmp_path: Path) -> None:
    found = run(tmp_path, "diloco-float32", WARM)
    rounds = 18 // H
    assert found.sent_bytes == rounds * ring_bytes(found.elements, WORKERS, 1)


def test_the_outer_parameters_are_judged(tmp_path: Path) -> None:
    """With a round longer than the row they are what they were."""
    found = run(tmp_path, "diloco", h=100)
    assert len({point.loss for point in found.points[:-1]}) == 1
    assert found.sent_bytes == 0


def test_workers_begin_with_equal_states_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inners: list[torch.optim.Optimizer] = []
    seen: list[dict[str, Any]] = []
    scores: list[float] = []

    def make(model: Any, inner: Any, session: SwarmSession, case: Case) -> DiLoCo:
        inners.append(inner)
        state = inner.state_dict()["state"]
        seen.append({k: {n: v.clone() for n, v in each.items()} for k, each in state.items()})
        assert case == Case(
            sync_every=H, lr=4e-3, steps=18, warmup_steps=0, workers=WORKERS, score=case.score
        )
        scores.append(float(case.score()))
        assert scores[-1] == case.score()
        assert inner.param_groups[0]["lr"] == rate_at(6, STEPS, 4e-3)
        return DiLoCo(model, inner, case.sync_every, session)

    monkeypatch.setitem(METHODS, "spy", Entry(name="spy", label="spy", make=make))
    run(tmp_path, "spy", WARM)
    assert len(seen) == WORKERS
    assert len(set(scores)) == 1
    for key, moments in seen[0].items():
        assert moments["step"] == 6
        for other in seen[1:]:
            assert torch.equal(moments["exp_avg"], other[key]["exp_avg"])
    places = {id(p): state for inner in inners for p, state in inner.state.items()}
    moments = [state["exp_avg"].data_ptr() for state in places.values()]
    assert len(set(moments)) == len(moments) == WORKERS * len(seen[0])


def test_a_method_may_be_the_optimizer_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Signs(torch.optim.SGD):
        """Steps by the sign of the mean gradient."""

        def __init__(self, model: Any, session: SwarmSession, lr: float) -> None:
            super().__init__(model.parameters(), lr)
            self.session, self.rates = session, list[float]()

        def step(self, closure: Any = None) -> Any:
            self.rates.append(self.param_groups[0]["lr"])
            for p in self.param_groups[0]["params"]:
                p.grad = self.session.all_reduce(p.grad).value.sign()
            return super().step()

        def close(self) -> None:
            made.append(self.rates)

    made: list[list[float]] = []
    entry = Entry(
        name="signs",
        label="signs",
        make=lambda model, inner, session, case: Signs(model, session, case.lr),
        uses_inner=False,
        every_step=True,
    )
    monkeypatch.setitem(METHODS, "signs", entry)
    found = run(tmp_path, "signs", lr=1e-3, h=1)
    assert found.loss < found.points[0].loss
    assert made == [[rate_at(step, STEPS, 1e-3) for step in range(STEPS)]] * WORKERS


@pytest.mark.parametrize("method", ["diloco", "diloco-float32", "data-parallel-int8", CEILING])
def test_a_row_that_diverges_is_a_result(tmp_path: Path, method: str) -> None:
    h = H if method.startswith("diloco") else 1
    found = run(tmp_path, method, lr=1e30, h=h)
    assert found.failed
    assert found.loss == float("inf")
    assert Result.from_json(found.to_json()) == found
    begun = run(tmp_path, method, WARM, lr=1e30, h=h)  # its warm start has diverged
    assert begun.failed
    assert not begun.points
    assert begun.sent_bytes == 0


def test_other_errors_are_no_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(model: Any, inner: Any, session: SwarmSession, case: Case) -> DiLoCo:
        raise ZeroDivisionError

    monkeypatch.setitem(METHODS, "bad", Entry(name="bad", label="bad", make=make))
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, "bad")


def test_a_row_can_be_ended_at_each_step(tmp_path: Path) -> None:
    for method in ("diloco", CEILING):
        steps = iter(range(5))

        def each_step(steps: Iterator[int] = steps) -> None:
            if next(steps, None) is None:
                raise SystemExit

        with pytest.raises(SystemExit):
            run_row(row(method), TEXT, tmp_path, each_step)


# ---------------------------------------------------------------- warm starts and held-out text


def test_warm_starts_are_trained_once(tmp_path: Path) -> None:
    trained: list[float] = []

    def begin(lr: float) -> dict[str, Any]:
        def train() -> dict[str, Any]:
            trained.append(lr)
            return {"value": torch.tensor(lr)}

        return warm_start(tmp_path, {"lr": lr, "seed": 1}, train)

    assert [float(begin(lr)["value"]) for lr in (0.5, 0.25, 0.5, 0.25)] == [0.5, 0.25, 0.5, 0.25]
    assert trained == [0.5, 0.25]
    (tmp_path / "left over.part").write_bytes(b"half of a file")
    assert float(begin(0.5)["value"]) == 0.5


def test_one_warm_start_for_each_rate_and_seed(tmp_path: Path) -> None:
    for method in ("diloco", "local-sgd", CEILING):
        run(tmp_path, method, WARM, h=1 if method == CEILING else H)
    assert len(list((tmp_path / "warm").glob("*.pt"))) == 1
    run(tmp_path, "diloco", WARM, lr=8e-3)
    assert len(list((tmp_path / "warm").glob("*.pt"))) == 2


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [rate_at(step, 1200, 1.0) for step in range(1200)]
    assert rates[0] == pytest.approx(1 / 50)
    assert max(rates) == rates[49] == rates[50] == 1.0
    assert rates[50:] == sorted(rates[50:], reverse=True)
    assert rates[-1] == pytest.approx(0.05, abs=1e-4)


def test_held_out_windows_in_parts_are_those_of_the_whole() -> None:
    heldout, model = HeldOut(TEXT, TINY.context), TINY.model(3)
    every = heldout.windows(0)
    assert len(every) == (len(TEXT.heldout) - 1) // TINY.context
    assert list(np.diff(every)) == [TINY.context] * (len(every) - 1)
    whole = heldout.total(model, every)
    parts = [heldout.total(model, every[part::3]) for part in range(3)]
    assert sum(parts) == pytest.approx(whole, rel=1e-6)
    some = heldout.windows(10)
    assert len(some) == 10
    assert set(some) <= set(every)
    assert (some[0], some[-1]) == (every[0], every[-1])
    assert whole / len(every) == pytest.approx(heldout_loss(model, TEXT), abs=0.05)


def test_models_of_a_seed_are_equal_and_disturb_no_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, other = TINY.model(7), TINY.model(7)
    assert torch.equal(torch.get_rng_state(), before)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    assert not torch.equal(TINY.model(8).position, one.position)


# ---------------------------------------------------------------- batches and gradients


def test_batches_of_several_steps_are_one_large_batch() -> None:
    """To the rounding of float32: half the mean of each half."""

    def batches(batch: int) -> TextBatches:
        return TextBatches(TEXT, context=TINY.context, batch=batch, seed=0)

    apart, at_once = TINY.model(0), TINY.model(0)
    small, large = batches(TINY.batch), batches(TINY.batch)
    train_plainly(apart, adamw(apart, 4e-3), [small], [4e-3], accumulated=2)
    first, second = large.next(), large.next()
    bytes_BT, next_BT = (torch.cat(pair) for pair in zip(first, second, strict=True))
    inner = adamw(at_once, 4e-3)
    at_once.loss(bytes_BT, next_BT).backward()  # type: ignore[no-untyped-call]
    inner.step()
    for found, wanted in zip(apart.parameters(), at_once.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_large_batch_steps_once_a_round_and_sends_as_often(tmp_path: Path) -> None:
    found = run(tmp_path, "large-batch", WARM)
    assert found.sent_bytes == ring_bytes(found.elements, WORKERS, 18 // H)


@pytest.mark.parametrize("most", [0.0, 0.5])
def test_gradients_are_clipped_to_their_norm(most: float) -> None:
    parameter = torch.nn.Linear(2, 1, bias=False)
    parameter.weight.grad = torch.tensor([[3.0, 4.0]])
    clipping(parameter, most)()
    wanted = [0.3, 0.4] if most else [3.0, 4.0]
    assert parameter.weight.grad[0].tolist() == pytest.approx(wanted, rel=1e-4)


def test_manual_pages_are_read_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "man1").mkdir()
    for name in "abc":
        (tmp_path / f"man1/{name}.1.gz").write_bytes(gzip.compress(name.encode() * 40_000))
    (tmp_path / "man1/broken.1.gz").write_bytes(b"no gzip")
    (tmp_path / "man1/gone.1.gz").symlink_to("nowhere.gz")
    (tmp_path / "man1/alias.1.gz").symlink_to("a.1.gz")  # the same page is not held out as well
    monkeypatch.setattr(texts, "MANUAL", tmp_path)
    found = texts.text_of("manual")
    assert len(found.train) + len(found.heldout) == 120_000
    monkeypatch.setattr(texts, "TEXT_BYTES_MAX", 100_000)
    found = texts.text_of("manual")
    assert len(found.train) + len(found.heldout) == 80_000
