"""What every integration asks for: a method, what to evaluate, figures, schedules that follow."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

import atoll
from atoll.collectives.errors import ConfigError
from atoll.integrations.methods import evaluating, figures, follow, make_method

SYNC_EVERY = 2


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def steps(
    model: nn.Module, inner: torch.optim.Optimizer, count: int, scheduler: Any = None
) -> None:
    for _ in range(count):
        model(torch.ones(2, 3)).square().mean().backward()
        inner.step()
        inner.zero_grad()
        if scheduler is not None:
            scheduler.step()


def halving(inner: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(inner, lambda step: 0.5**step)


@pytest.mark.parametrize(
    "method",
    [
        "LocalSGD",
        atoll.LocalSGD,
        lambda model, inner, peer, **o: atoll.LocalSGD(model, inner, peer=peer, **o),
    ],
)
def test_a_method_is_a_name_a_class_or_a_function(method: Any) -> None:
    def work(session: Any) -> None:
        outer = make_method(*parts(), method, peer=session, sync_every=SYNC_EVERY)
        assert type(outer) is atoll.LocalSGD
        assert outer.spec.sync_every == SYNC_EVERY

    atoll.Swarm(1).run(work)


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("Adam", "no method 'Adam'"),
        (nn.Linear, "no method"),
        ("TextBatches", "no method 'TextBatches'"),
        ("DeMo", "DeMo follows no optimizer"),
        (atoll.ZerothOrder, "ZerothOrder follows no optimizer"),
    ],
)
def test_others_are_refused(method: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        make_method(*parts(), method, peer=None, home="nowhere")


def test_a_script_with_the_name_of_the_library_is_told_so(tmp_path: Path) -> None:
    """As `atoll example lightning > lightning.py` makes one."""
    script = tmp_path / "lightning.py"
    script.write_text("from atoll.integrations.lightning import AtollCallback\n")
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "E10 lightning cannot be imported" in ended.stderr
    assert f"fix: give {script} another name: it hides the library" in ended.stderr


def test_a_session_is_closed_where_the_method_cannot_be_made() -> None:
    closed = []

    class Session:
        def close(self) -> None:
            closed.append(self)

    def fails(*_: Any, **__: Any) -> Any:
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        make_method(*parts(), fails, peer=Session())  # type: ignore[arg-type]
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("method", "shown"), [("DiLoCo", "outer_parameters()"), ("NoLoCo", "consensus()")]
)
def test_what_is_evaluated_is_the_runs(method: str, shown: str) -> None:
    def work(session: Any) -> None:
        model, inner = parts()
        outer = make_method(model, inner, method, peer=session, sync_every=SYNC_EVERY)
        before = model.weight.detach().clone()  # type: ignore[union-attr]
        steps(model, inner, 1)
        with evaluating(outer):
            assert torch.equal(model.weight, before)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=shown.replace("(", "\\(").replace(")", "\\)")):
                outer.save("nowhere")
        assert not torch.equal(model.weight, before)  # type: ignore[arg-type]

    atoll.Swarm(1).run(work)


@pytest.mark.parametrize("method", ["DiLoCo", "NoLoCo"])
def test_what_is_evaluated_is_so_inside_too_and_until_the_outer_ends(method: str) -> None:
    """Evaluate inside an evaluation, as where a validation saves the model."""

    def work(session: Any) -> None:
        model, inner = parts()
        outer = make_method(model, inner, method, peer=session, sync_every=SYNC_EVERY)
        weight = model.get_parameter("weight")
        before = weight.detach().clone()
        steps(model, inner, 1)
        with evaluating(outer):
            with evaluating(outer):
                assert torch.equal(weight, before)
            assert outer.is_showing
            assert torch.equal(weight, before)
        assert not torch.equal(weight, before)

    atoll.Swarm(1).run(work)


def test_without_a_method_or_with_one_of_every_step_nothing_is_put_in() -> None:
    def work(session: Any) -> None:
        model, inner = parts()
        outer = make_method(model, inner, "GradientAverage", peer=session)
        steps(model, inner, 1)
        with evaluating(outer), evaluating(None):
            assert figures(outer)["atoll/global_step"] == 1.0

    atoll.Swarm(1).run(work)


def test_figures_are_numbers_by_names_for_loggers() -> None:
    def work(session: Any) -> None:
        model, inner = parts()
        outer = make_method(model, inner, peer=session, sync_every=SYNC_EVERY)
        steps(model, inner, SYNC_EVERY)
        found = figures(outer)
        assert found["atoll/round"] == 2.0
        assert found["atoll/global_step"] == 2.0
        assert all(type(value) is float for value in found.values())

    atoll.Swarm(1).run(work)


def test_schedules_follow_the_run_also_from_further_on(capsys: pytest.CaptureFixture[str]) -> None:
    """As one that a checkpoint has brought to step 7, where the run is at 4."""

    def work(session: Any) -> None:
        model, inner = parts()
        steps(model, inner, 0)
        first = make_method(model, inner, peer=session, sync_every=SYNC_EVERY)
        steps(model, inner, 2 * SYNC_EVERY)
        first.close()
        model, inner = parts()
        scheduler = halving(inner)
        steps(model, inner, 7, scheduler)
        second = make_method(model, inner, peer=session, sync_every=SYNC_EVERY)
        assert second.global_step == 2 * SYNC_EVERY
        follow(second, scheduler)
        assert inner.param_groups[0]["lr"] == 0.5 * 0.5**4
        steps(model, inner, 1, scheduler)
        assert inner.param_groups[0]["lr"] == 0.5 * 0.5**5
        follow(second, ReduceLROnPlateau(inner))
        follow(second, object())

    atoll.Swarm(1).run(work)
    said = capsys.readouterr().err
    assert "a ReduceLROnPlateau does not follow the run" in said
    assert "a object does not follow the run" in said


def test_a_schedule_of_a_checkpoint_begins_a_new_run_with_its_first_rate() -> None:
    def work(session: Any) -> None:
        model, inner = parts()
        scheduler = halving(inner)
        steps(model, inner, 3, scheduler)
        follow(make_method(model, inner, peer=session, sync_every=SYNC_EVERY), scheduler)
        assert inner.param_groups[0]["lr"] == 0.5

    atoll.Swarm(1).run(work)


@pytest.mark.parametrize("library", ["accelerate", "lightning", "transformers"])
def test_a_missing_library_says_how_to_install_it(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"atoll.integrations.{library}", raising=False)
    with pytest.raises(ConfigError, match=f"{library} cannot be imported") as caught:
        importlib.import_module(f"atoll.integrations.{library}")
    assert caught.value.fix == f"pip install atoll[{library}]"
