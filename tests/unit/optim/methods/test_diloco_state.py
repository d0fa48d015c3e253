"""What DiLoCo keeps and gives back: evaluation, state_dict, NaN, closing, compiled steps."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from harness.diloco import flat, linear, step, theta, wrap

from atoll.collectives.errors import CodecError, ConfigError


def test_outer_parameters_swaps_and_puts_back(local_run):
    run, model = local_run(), linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = wrap(model, run, inner=inner)
    step(model, inner)
    local = flat(model)
    with outer.outer_parameters():
        assert torch.equal(flat(model), theta(run))
        assert not torch.equal(flat(model), local)
        with pytest.raises(ConfigError, match="thrown away"):
            step(model, inner)
        with pytest.raises(ConfigError, match=r"state_dict\(\) inside outer_parameters"):
            outer.state_dict()  # beside the run's values these would be no trainer's own
        with pytest.raises(ConfigError, match="inside"), outer.outer_parameters():
            pass
    assert torch.equal(flat(model), local)
    with pytest.raises(ZeroDivisionError), outer.outer_parameters():
        _ = 1 / 0
    assert torch.equal(flat(model), local)
    step(model, inner)
    assert run.round == 1


def test_a_new_epoch_seen_while_evaluating_drops_local_work(local_run):
    """Else the next submission would carry work on undone rounds under the new epoch's number."""
    run, model = local_run(), linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = wrap(model, run, inner=inner)
    step(model, inner)
    run.epoch += 1
    with outer.outer_parameters():
        pass
    assert torch.equal(flat(model), theta(run))
    step(model, inner)
    assert run.round == 0
    step(model, inner)
    assert run.weights == [{0: 2.0}]


def test_a_submission_that_failed_is_not_waited_for(local_run, monkeypatch):
    run, model = local_run(), linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = wrap(model, run, inner=inner)

    def refuse(*_):
        raise CodecError("refused")

    step(model, inner)
    with monkeypatch.context() as patch:
        patch.setattr(run.sessions[0], "submit", refuse)
        with pytest.raises(CodecError, match="refused"):
            step(model, inner)
    assert outer.state_dict()["submitted"] == []
    step(model, inner)
    assert run.weights == [{0: 3.0}]


@pytest.mark.parametrize("goes_on", [False, True])
def test_state_dict_round_trip_and_the_runs_parameters_win(local_run, goes_on):
    """If the run has gone on: else the middle of the round is where it was."""
    run, model = local_run(peers=1), linear()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    outer = wrap(model, run, inner=inner)
    for _ in range(5):
        outer.count(10)
        step(model, inner)
    saved = outer.state_dict()
    in_model, in_inner = copy.deepcopy([model.state_dict(), inner.state_dict()])
    in_outer = json.loads(json.dumps(saved))  # plain values: any file format will do
    outer.close()

    if goes_on:
        run.theta += 1.0
    model = linear()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    outer = wrap(model, run, inner=inner)
    model.load_state_dict(in_model)
    inner.load_state_dict(in_inner)
    assert not torch.equal(flat(model), theta(run))
    outer.load_state_dict(in_outer)
    assert torch.equal(flat(model), theta(run)) == goes_on
    assert (outer.state_dict() == saved) != goes_on
    for _ in range(2 if goes_on else 1):  # a whole new round: its weight is of its own steps only
        step(model, inner)
    assert run.weights[-1] == {0: 2.0 if goes_on else 10.0}
    assert outer.metrics()["steps"] == (7 if goes_on else 6)


def test_a_state_whose_model_was_not_loaded_begins_the_round_anew(local_run, capsys):
    run, model = local_run(), linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = wrap(model, run, inner=inner)
    step(model, inner)
    saved = outer.state_dict()
    outer.close()
    model = linear()
    outer = wrap(model, run, inner=torch.optim.SGD(model.parameters(), lr=0.1))
    outer.load_state_dict(saved)
    assert torch.equal(flat(model), theta(run))
    assert "load its state after the method is made" in capsys.readouterr().err


@pytest.mark.parametrize("state", [{}, {"version": 2}, {"version": 1}])
def test_a_foreign_state_dict_is_refused(local_run, state):
    outer = wrap(linear(), local_run())
    with pytest.raises(ConfigError, match="not a DiLoCo state"):
        outer.load_state_dict(state)


def test_nan_is_named_and_not_submitted(local_run):
    run, model = local_run(), linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrap(model, run, inner=inner, sync_every=1)
    with pytest.raises(CodecError, match="NaN or Inf in bias, weight"):
        step(model, inner, scale=float("nan"))
    assert not run.submitted
    assert run.round == 0
    model.bias.data.zero_()
    model.bias.grad = None
    with pytest.raises(CodecError, match=r"in weight \(1 of 2"):
        inner.step()


def test_close_unhooks_and_closes_the_session(local_run):
    run, model = local_run(), linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with wrap(model, run, inner=inner, sync_every=1) as outer:
        step(model, inner)
    step(model, inner)
    outer.close()
    assert run.round == 1
    assert run.sessions[0].closed


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")  # torch's own, when it compiles
def test_a_compiled_step_still_syncs(local_run):
    run, model = local_run(), linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrap(model, run, inner=inner)
    compiled = torch.compile(lambda: inner.step(), backend="eager")
    for _ in range(2):
        model(torch.ones(4, 3)).square().mean().backward()
        compiled()
    assert run.round == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_with_a_grad_scaler(local_run):
    run, model = local_run(), linear().cuda()
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    outer = wrap(model, run, inner=inner)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for scale in (1.0, float("inf"), 1.0):
        inner.zero_grad()
        loss = scale * model(torch.ones(4, 3, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.step(inner)
        scaler.update()
    assert outer.metrics()["steps"] == 2
    assert run.round == 1
    assert torch.equal(flat(model).cpu(), theta(run))
