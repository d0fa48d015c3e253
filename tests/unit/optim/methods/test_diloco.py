from __future__ import annotations

import pytest
import torch
from harness.diloco import flat, linear, step, theta, wrap
from torch import nn

from atoll.collectives.errors import ConfigError, IncompatibleRunError


def test_a_round_every_sync_every_steps_replaces_parameters_and_zeroes_gradients(local_run):
    run, model = local_run(), linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = wrap(model, run, inner=inner, sync_every=3, outer_lr=0.5, outer_momentum=0.0)
    before, storage = flat(model), model.weight.data_ptr()
    rounds = []
    for _ in range(7):
        step(model, inner)
        rounds.append(run.round)
        if run.round == 1 and len(rounds) == 3:
            assert torch.equal(flat(model), theta(run))
            assert not model.weight.grad.any()
    assert rounds == [0, 0, 1, 1, 1, 2, 2]
    assert not torch.equal(flat(model), theta(run))  # one local step since
    assert not torch.equal(before, theta(run))
    assert model.weight.data_ptr() == storage
    assert outer.metrics() == {
        "round": 2,
        "rounds": 2,
        "missed": 0,
        "steps": 7,
        "tokens": 0,
        "waited_s": 1.0,
        "peers": 1,
        "rounds_alone": 2,
    }


def test_a_later_trainer_gets_the_runs_parameters(local_run):
    run, first, second = local_run(peers=2), linear(), linear()
    wrap(first, run, 0)
    assert not torch.equal(flat(first), flat(second))
    wrap(second, run, 1)
    assert torch.equal(flat(first), flat(second))


def test_the_memory_line_comes_before_the_run_is_attached(local_run, capsys):
    run, model = local_run(), linear()
    run.found = lambda *_: pytest.fail("attached") if not capsys.readouterr().err else 1 / 0
    with pytest.raises(ZeroDivisionError):
        wrap(model, run)


def test_tied_parameters_are_one_and_stay_tied(local_run):
    run = local_run()
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = wrap(model, run, inner=inner, sync_every=1)
    assert [p.name for p in outer.manifest.parameters] == ["0.weight"]
    model(torch.arange(5)).square().mean().backward()
    inner.step()
    assert run.round == 1
    assert model[1].weight is model[0].weight
    assert torch.equal(flat(model), theta(run))


def test_frozen_parameters_are_left_out_and_alone(local_run):
    run, model = local_run(), linear()
    model.bias.requires_grad_(False)
    bias = model.bias.clone()
    inner = torch.optim.SGD([model.weight], lr=0.1)
    outer = wrap(model, run, inner=inner, sync_every=1)
    step(model, inner)
    assert outer.manifest.elements == 6
    assert torch.equal(model.bias, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_zero_steps_at_low_precision_change_nothing(local_run, dtype):
    run, model = local_run(), linear().to(dtype)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    outer = wrap(model, run, inner=inner, sync_every=1)
    saved = outer.state_dict()
    run.theta += torch.rand(8).numpy() / 1000  # finer than bfloat16: the run holds more than it
    before = run.theta.copy()
    outer.load_state_dict(saved)
    for _ in range(3):
        inner.step()
    assert run.round == 3
    assert (run.theta == before).all()
    assert not run.momentum.any()


def test_bfloat16_training_moves_the_float32_parameters(local_run):
    run, model = local_run(), linear().to(torch.bfloat16)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrap(model, run, inner=inner, sync_every=1, outer_lr=0.7)
    start = run.theta.copy()
    inner.zero_grad()
    model(torch.ones(4, 3, dtype=torch.bfloat16)).square().mean().backward()
    inner.step()
    assert (run.theta != start).any()
    assert torch.equal(flat(model), theta(run).bfloat16().float())


def test_accumulation_counts_optimizer_steps_only(local_run):
    run, model = local_run(), linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = wrap(model, run, inner=inner)
    for micro in range(8):
        (model(torch.ones(1, 3)).square().mean() / 4).backward()
        if micro % 4 == 3:
            inner.step()
            inner.zero_grad()
    assert outer.metrics()["steps"] == 2
    assert run.round == 1


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_grad_scaler_skips_does_not_count(local_run, fused):
    run, model = local_run(), linear()
    inner = torch.optim.AdamW(model.parameters(), fused=fused)
    outer = wrap(model, run, inner=inner)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for scale in (1.0, float("inf"), 1.0):
        inner.zero_grad()
        scaler.scale(scale * model(torch.ones(4, 3)).square().mean()).backward()
        scaler.step(inner)
        scaler.update()
    assert outer.metrics()["steps"] == 2
    assert run.round == 1


def test_with_several_inner_optimizers_the_last_completes_a_step(local_run):
    run, model = local_run(), linear()
    inners = [
        torch.optim.SGD([model.weight], lr=0.1),
        torch.optim.AdamW([model.bias], lr=0.1),
    ]
    outer = wrap(model, run, inner=inners)
    for _ in range(2):
        model(torch.ones(4, 3)).square().mean().backward()
        inners[0].step()
        assert run.round == 0
        inners[1].step()
    assert outer.metrics()["steps"] == 2
    assert run.round == 1


def test_schedulers_and_closures_keep_working(local_run):
    run, model = local_run(), linear()
    inner = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    wrap(model, run, inner=inner)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)

    def closure():
        inner.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        assert inner.step(closure) is not None
        scheduler.step()
    assert run.round == 2
    assert scheduler.get_last_lr() == [0.5 / 16]


@pytest.mark.parametrize(
    "wrapper",
    [
        nn.DataParallel,
        lambda m: torch.compile(m, backend="eager"),
        lambda m: torch.compile(nn.DataParallel(m), backend="eager"),
        lambda m: nn.Sequential(torch.compile(m[0], backend="eager"), m[1]),
    ],
    ids=["data-parallel", "compiled", "both", "compiled-part"],
)
def test_wrappers_do_not_change_the_manifest(local_run, wrapper):
    run = local_run(peers=2)
    plain = nn.Sequential(linear(), nn.Linear(2, 1))
    wrapped = wrapper(nn.Sequential(linear(), nn.Linear(2, 1)))
    a, b = wrap(plain, run, 0), wrap(wrapped, run, 1)
    assert a.manifest == b.manifest
    assert torch.equal(flat(plain), flat(wrapped))


def test_a_submodule_called_module_is_no_wrapper(local_run):
    model = linear()
    model.module = nn.Linear(1, 1)
    outer = wrap(model, local_run())
    assert "module.weight" in outer.manifest.offsets


def test_names_sort_the_same_with_and_without_separators(local_run):
    model = nn.ModuleDict({"a": nn.ModuleDict({"z": linear()}), "a-b": linear()})
    outer = wrap(model, local_run())
    assert list(outer.manifest.offsets) == ["a-b.bias", "a-b.weight", "a.z.bias", "a.z.weight"]
    outer.peer.pull(lambda values: torch.from_numpy(values.copy()).equal(flat(model)) or 1 / 0)


def test_channels_last_and_empty_and_scalar_parameters(local_run):
    run, model = local_run(), nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    model.scale = nn.Parameter(torch.tensor(2.0))
    model.none = nn.Parameter(torch.empty(0))
    weight = model.weight.detach().clone()
    wrap(model, run)
    assert torch.equal(model.weight, weight)
    assert torch.equal(flat(model), theta(run))


def test_a_model_that_differs_from_the_runs_is_refused_with_the_differences(local_run):
    run = local_run(peers=2)
    wrap(linear(), run, 0)
    with pytest.raises(IncompatibleRunError) as caught:
        wrap(nn.Linear(3, 4, bias=False), run, 1, sync_every=5)
    for line in (
        "sync_every: yours 5, run 2",
        "weight: yours 4x3 float32, run 2x3 float32",
        "bias: yours missing, run 2 float32",
    ):
        assert line in str(caught.value)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (lambda model: [], "no inner optimizer"),
        (lambda model: [model], "not a torch.optim.Optimizer"),
        (lambda model: torch.optim.SGD(linear().parameters()), "no trainable parameter"),
    ],
)
def test_a_wrong_inner_optimizer_is_refused(local_run, inner, message):
    model = linear()
    with pytest.raises(ConfigError, match=message):
        wrap(model, local_run(), inner=inner(model))


def test_weights_are_steps_or_counted_tokens(local_run):
    run, model = local_run(), linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = wrap(model, run, inner=inner)
    for _ in range(2):
        step(model, inner)
    for tokens in (100, 28):
        outer.count(tokens)
        step(model, inner)
    assert run.weights == [{0: 2.0}, {0: 128.0}]
    assert outer.metrics()["tokens"] == 128
    with pytest.raises(ConfigError, match="negative"):
        outer.count(-1)


def test_reload_drops_local_work_and_its_weight(local_run):
    run, model = local_run(), linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = wrap(model, run, inner=inner)
    run.reload.add(0)
    for _ in range(4):
        step(model, inner)
    assert torch.equal(flat(model), theta(run))
    assert run.weights == [{0: 2.0}, {0: 2.0}]
    assert outer.metrics()["rounds"] == 1


def test_with_muon_the_outer_momentum_is_mulocos(local_run):
    run, model = local_run(), linear()
    inners = [torch.optim.Muon([model.weight], lr=0.02), torch.optim.AdamW([model.bias], lr=0.1)]
    outer = wrap(model, run, inner=inners, sync_every=1)
    assert (outer.spec.outer_lr, outer.spec.outer_momentum) == (0.7, 0.6)
    model(torch.ones(4, 3)).square().mean().backward()
    for inner in inners:
        inner.step()
    assert run.round == 1


def test_what_is_said_counts_more_than_what_is_usual(local_run):
    model = linear()
    inner = torch.optim.Muon([model.weight], lr=0.02)
    assert wrap(model, local_run(), inner=inner, outer_momentum=0.8).spec.outer_momentum == 0.8
    assert wrap(linear(), local_run()).spec.outer_momentum == 0.9
