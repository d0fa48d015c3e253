"""Two ranks as one of two peers, with every method with rounds, beside the same without ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from harness.rank_methods import EVALUATES, METHODS, RESTARTS, SCHEMES, Found, train
from harness.rank_processes import two_ranks

from atoll.optim import Swarm

RUNS: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in METHODS},
    **{f"{name}, evaluated": {"method": name, "evaluates": True} for name in EVALUATES},
    **{f"{name}, begun anew": {"method": name, "restarts": True} for name in RESTARTS},
    "buffers": {"method": "diloco", "lr": 0.0, "steps": 12},  # three rounds
}


@pytest.fixture(
    scope="module",
    # DDP is the simpler one of both: quick tests have it with real daemons (test_ranks.py).
    params=[pytest.param(s, marks=[pytest.mark.slow] * (s == "ddp")) for s in SCHEMES],
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """By name of the run, of either rank. One pair of processes makes them all."""
    folder = tmp_path_factory.mktemp("ranks")
    runs = {
        name: {**run, "folder": str(folder / run["method"])} if "restarts" in run else run
        for name, run in RUNS.items()
    }
    return two_ranks(folder, "rank_methods", "run_ranks", request.param, runs)


@cache
def expected(method: str, **options: Any) -> Found:
    """Of the first of two peers without ranks, with as many threads as a rank has: others add up
    in another order, and a codec makes a step of the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = Swarm(2).run(lambda session: train(method, session, session.number, **options))
    finally:
        torch.set_num_threads(before)
    return found[0]


def assert_close(found: Found, wanted: Found, *names: str) -> None:
    for name in names:
        values, right = torch.tensor(found[name]), torch.tensor(wanted[name])
        torch.testing.assert_close(values, right, rtol=0, atol=2e-6)


@pytest.mark.parametrize("method", METHODS)
def test_ranks_come_to_what_one_process_comes_to(ranks: list[Found], method: str) -> None:
    wanted = expected(method)
    for found in ranks:
        assert found[method]["rounds"] == wanted["rounds"] >= 2
        assert_close(found[method], wanted, "parameters", "buffers")


@pytest.mark.parametrize("method", EVALUATES)
def test_who_evaluates_trains_on_undisturbed(ranks: list[Found], method: str) -> None:
    """FSDP2 keeps whole copies of what was evaluated."""
    wanted, evaluated = expected(method), expected(method, evaluates=True)
    for run in ranks:
        found = run[f"{method}, evaluated"]
        assert_close(found, wanted, "parameters", "buffers")
        assert_close(found, evaluated, "evaluated")
        local, outer, again = found["evaluated"][:3]
        assert local == again != outer


@pytest.mark.parametrize("method", RESTARTS)
def test_ranks_go_on_from_their_saved_states(ranks: list[Found], method: str) -> None:
    """In the middle of a round, each from its own."""
    alone = expected(method, restarts=True)  # what streaming has asked of buffers is not saved
    for run in ranks:
        found = run[f"{method}, begun anew"]
        assert_close(found, expected(method), "parameters")
        assert_close(found, alone, "parameters", "buffers")


def test_buffers_are_those_of_the_first_rank_with_the_weight_of_all(ranks: list[Found]) -> None:
    """The second rank has batches of its own; nobody's parameters move."""
    wanted = expected("diloco", lr=0.0, steps=12)
    for run in ranks:
        assert_close(run["buffers"], wanted, "parameters", "buffers")
