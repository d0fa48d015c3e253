"""Hold trials of the newest papers to what these say, where the answer is known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.convergence.newest import (
    OWN_STEPS,
    TRIALS,
    Averaged,
    Dion,
    PrimalAveraging,
    Snoo,
    document,
    key_of,
    rounds_between,
)
from benchmarks.convergence.results import Results
from benchmarks.convergence.row import Row
from benchmarks.convergence.sizes import WEIGHT_DECAY
from harness.convergence import result_of
from torch import nn

RATE = 0.1


class Point(nn.Module):
    """Hold one number, which a loss of half its square pulls towards zero."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))

    def pull(self) -> None:
        self.x.grad = self.x.detach().clone()


def iterates(wrapped: object, model: Point, steps: int) -> list[float]:
    """Return what is evaluated after each step."""
    found = []
    for _ in range(steps):
        model.pull()
        wrapped.step()
        with wrapped.outer_parameters():
            found.append(model.x.item())
    return found


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), RATE)


def test_an_average_of_iterates_leaves_training_as_it_was() -> None:
    model = Point()
    found = iterates(Averaged(model, sgd(model), decay=0.5), model, 3)
    plain = [0.9, 0.81, 0.729]
    assert model.x.item() == pytest.approx(plain[-1])
    average, expected = 1.0, []
    for value in plain:
        average = 0.5 * average + 0.5 * value
        expected.append(average)
    assert found == pytest.approx(expected)


def test_primal_averaging_takes_gradients_between_average_and_iterate() -> None:
    model = Point()
    found = iterates(PrimalAveraging(model, sgd(model), mu_x=0.8, mu_y=0.6), model, 4)
    x = y = z = 1.0
    expected = []
    for _ in range(4):
        z -= RATE * y
        x = 0.8 * x + 0.2 * z
        y = 0.6 * x + 0.4 * z
        expected.append(x)
    assert found == pytest.approx(expected)
    assert model.x.item() == pytest.approx(y)


def test_snoo_is_torch_nesterov_on_what_some_steps_have_moved() -> None:
    model = Point()
    snoo = Snoo(model, sgd(model), every=2, outer_lr=0.7, momentum=0.5)
    found = iterates(snoo, model, 6)
    slow = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    outer = torch.optim.SGD([slow], 0.7, momentum=0.5, nesterov=True)
    expected = []
    for _ in range(3):
        expected.append(slow.item())
        slow.grad = slow.detach() * (1 - (1 - RATE) ** 2)
        outer.step()
        expected.append(slow.item())
    assert found == pytest.approx(expected)


def test_dion_of_full_rank_takes_orthonormal_steps_and_of_low_rank_keeps_what_is_left() -> None:
    torch.manual_seed(0)
    for rank in (6, 2):
        matrix = nn.Parameter(torch.randn(8, 6))
        before, grad = matrix.detach().clone(), torch.randn(8, 6)
        matrix.grad = grad.clone()
        dion = Dion([matrix], RATE, rank, momentum=0.95)
        dion.step()
        moved = (before * (1 - RATE * WEIGHT_DECAY) - matrix.detach()) / RATE
        values = torch.linalg.svdvals(moved)
        assert int((values > 1e-4).sum()) == rank
        assert (moved**2).mean().sqrt().item() == pytest.approx(0.2, rel=0.2)
        left = dion.state[matrix]["momentum"]
        part = grad - left  # 5 % of the part of this rank is taken out of the momentum
        assert int((torch.linalg.svdvals(part) > 1e-5).sum()) == rank
        assert (moved * grad).sum() > 0


def test_rounds_grow_or_shrink_and_are_as_many_steps_in_all() -> None:
    growing = rounds_between(15, 45, 30, OWN_STEPS)
    assert sum(growing) == OWN_STEPS
    assert len(growing) == 30
    assert (growing[0], growing[-1]) == (15, 45)
    assert sorted(growing) == growing
    assert rounds_between(30, 30, 30, OWN_STEPS) == [30] * 30


def test_every_trial_has_a_row_of_its_own_and_stands_beside_another(tmp_path: Path) -> None:
    rows = [trial.row for trial in TRIALS.values()]
    assert len({row.name for row in rows}) == len(rows)
    assert all(Row.of(row.name) == row for row in rows)
    assert all(not trial.beside or trial.beside in TRIALS for trial in TRIALS.values())
    results = Results(tmp_path / "results.jsonl")
    for trial in TRIALS.values():
        results.add(result_of(trial.row, loss=2.1 if trial.beside else 2.0))
    text = document(results)
    assert text.count("+5.0 %") == sum(bool(trial.beside) for trial in TRIALS.values())
    assert all(key_of(trial) == key for key, trial in TRIALS.items())
