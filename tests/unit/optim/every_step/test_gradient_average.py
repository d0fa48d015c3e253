"""Data-parallel training through a run: what is averaged when, and with which compressors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import gradients
from torch import nn

from atoll.collectives.errors import CodecError, ConfigError, IncompatibleRunError
from atoll.optim import (
    DGC,
    QSDP,
    ErrorFeedback,
    GradientAverage,
    LayerBits,
    LGreCo,
    PowerSGD,
    Swarm,
    TernGrad,
)
from atoll.optim.compressors import Compressor
from atoll.optim.experimental import EF21, EControl

STEPS, WORKERS = 5, 3


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(net: nn.Module, worker: int, step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(5, 6, generator=random)
    return (net(x) - x[:, :3].sin()).square().mean()


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def train(session: Any, optimizer: type[torch.optim.Optimizer], **options: Any) -> torch.Tensor:
    torch.manual_seed(session.number)  # all but the first take over another's parameters
    net = model()
    inner = optimizer(net.parameters(), lr=0.05)
    with GradientAverage(net, inner, session, **options) as outer:
        for step in range(STEPS):
            inner.zero_grad()
            loss_of(net, session.number, step).backward()
            inner.step()
        metrics = outer.metrics()
        assert (metrics["steps"], metrics["missed"]) == (STEPS, 0)
    return flat(net)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_it_is_training_on_the_mean_gradient(optimizer: type[torch.optim.Optimizer]) -> None:
    """All begin with the parameters of the first, whose first gradient counts alone."""
    found = Swarm(WORKERS).run(lambda session: train(session, optimizer))
    assert all(torch.equal(found[0], other) for other in found[1:])
    torch.manual_seed(0)
    net = model()
    inner = optimizer(net.parameters(), lr=0.05)
    for step in range(STEPS):
        workers = range(WORKERS if step else 1)
        inner.zero_grad()
        (sum(loss_of(net, worker, step) for worker in workers) / len(workers)).backward()
        inner.step()
    torch.testing.assert_close(found[0], flat(net), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_with_equal_parameters_every_first_gradient_counts(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    def each(session: Any) -> torch.Tensor:
        net = gradients.model()
        inner = optimizer(net.parameters(), lr=0.05)
        with GradientAverage(net, inner, session):
            gradients.loss_of(net, session.number, 0).backward()
            inner.step()
        return flat(net)

    found = Swarm(WORKERS).run(each)
    assert all(torch.equal(found[0], other) for other in found[1:])
    net = gradients.model()
    inner = optimizer(net.parameters(), lr=0.05)
    (sum(gradients.loss_of(net, worker, 0) for worker in range(WORKERS)) / WORKERS).backward()
    inner.step()
    torch.testing.assert_close(found[0], flat(net), rtol=1e-4, atol=1e-5)


def test_codecs_lose_what_they_lose_alike() -> None:
    exact = Swarm(WORKERS).run(lambda session: train(session, torch.optim.SGD))
    found = Swarm(WORKERS).run(lambda session: train(session, torch.optim.SGD, codec="int8"))
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert 0 < (found[0] - exact[0]).norm() < 0.01 * exact[0].norm()


def test_other_numbers_or_another_model_are_refused() -> None:
    def other_codec(session: Any) -> None:
        train(session, torch.optim.SGD, codec=["float32", "int8"][session.number])

    with pytest.raises(IncompatibleRunError, match="codec"):
        Swarm(2).run(other_codec)

    def other_model(session: Any) -> None:
        net = nn.Linear(6, 2) if session.number else nn.Linear(13, 1)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        GradientAverage(net, inner, session)
        inner.step()

    with pytest.raises(IncompatibleRunError, match="names, shapes"):
        Swarm(2).run(other_model)


# ---------------------------------------------------------------- loops


def train_as(session: Any, loop: str) -> torch.Tensor:
    """Two backward passes before each step, a compiled model, or tied weights."""
    net = gradients.model(session.number)
    if loop == "tied":
        net = nn.Sequential(net[0], nn.Tanh(), nn.Linear(24, 12), net[0], nn.Linear(24, 6))
        net[2].weight = nn.Parameter(net[0].weight.detach().T.contiguous())
    used = torch.compile(net, backend="eager") if loop == "compiled" else net
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    with GradientAverage(used, inner, session) as outer:
        for step in range(STEPS):
            inner.zero_grad()
            for half in range(2):
                loss = gradients.loss_of(used, session.number, 2 * step + half) / 2
                loss.backward()
            inner.step()
        assert outer.metrics()["steps"] == STEPS
    return flat(net)


@pytest.mark.parametrize("loop", ["accumulated", "compiled", "tied"])
def test_loops_of_all_kinds_train_on_the_mean(loop: str) -> None:
    found = Swarm(WORKERS).run(lambda session: train_as(session, loop))
    assert all(torch.equal(found[0], other) for other in found)
    if loop == "compiled":
        eager = Swarm(WORKERS).run(lambda s: train_as(s, ""))
        torch.testing.assert_close(found[0], eager[0])
    alone = Swarm(1).run(lambda session: train_as(session, loop))
    assert not torch.equal(alone[0], found[0])


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")  # torch's own, when it compiles
def test_a_step_that_is_compiled() -> None:
    def work(session: Any, compiled: bool) -> torch.Tensor:
        net = gradients.model()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        with GradientAverage(net, inner, session):
            step = torch.compile(lambda: inner.step(), backend="eager") if compiled else inner.step
            for number in range(STEPS):
                inner.zero_grad()
                gradients.loss_of(net, session.number, number).backward()
                step()
        return flat(net)

    plain = Swarm(2).run(lambda session: work(session, compiled=False))
    found = Swarm(2).run(lambda session: work(session, compiled=True))
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], plain[0])


def test_parameters_that_one_trainer_has_not_used() -> None:
    """As experts that none of its data went to: they get the gradient of the others."""

    def work(session: Any) -> torch.Tensor:
        net = gradients.model()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        with GradientAverage(net, inner, session):
            for step in range(3):
                inner.zero_grad()
                gradients.loss_of(net, session.number, step).backward()
                if session.number:
                    net[0].weight.grad = None
                inner.step()
        return flat(net)

    first, second = Swarm(2).run(work)
    assert torch.equal(first, second)


def test_a_closure_is_refused() -> None:
    def work(session: Any) -> None:
        net = gradients.model()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        with GradientAverage(net, inner, session):
            gradients.loss_of(net, 0, 0).backward()
            inner.step(lambda: gradients.loss_of(net, 0, 0))

    with pytest.raises(ConfigError, match="closure"):
        Swarm(1).run(work)


def test_inner_optimizers_that_cannot_be() -> None:
    def other(session: Any) -> None:
        GradientAverage(model(), torch.optim.SGD(model().parameters(), lr=0.1), session)

    with pytest.raises(ConfigError, match="holds no trainable parameter"):
        Swarm(1).run(other)


def with_dgc(kind: type[torch.optim.Optimizer], **options: Any) -> Any:
    def make(session: Any) -> None:
        net = nn.Linear(5, 4, bias=False)
        inner = kind(net.parameters(), lr=0.1, **options)
        GradientAverage(net, inner, session, compressor=DGC()).close()

    return make


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Muon"])
def test_momentum_is_not_applied_twice(name: str) -> None:
    with pytest.raises(ConfigError, match=f"DGC has momentum, and the inner {name} has it too"):
        Swarm(1).run(with_dgc(getattr(torch.optim, name)))


@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
def test_momentum_that_was_asked_for_is_not_either(name: str) -> None:
    kind = getattr(torch.optim, name)
    with pytest.raises(ConfigError, match="SGD with momentum=0"):
        Swarm(1).run(with_dgc(kind, momentum=0.9))
    Swarm(1).run(with_dgc(kind))


def test_without_momentum_any_optimizer_will_do() -> None:
    Swarm(1).run(with_dgc(torch.optim.AdamW, betas=(0.0, 0.95)))
    Swarm(1).run(with_dgc(torch.optim.Adagrad))


# ---------------------------------------------------------------- compressors

COMPRESSORS: dict[str, Callable[[], Compressor | None]] = {
    "none": lambda: None,
    "power_sgd": lambda: PowerSGD(rank=2, start=10),
    "ranks": lambda: PowerSGD(rank=2, start=20, choice=LGreCo(every=20)),
    "bits": lambda: LayerBits(choice=LGreCo(every=20)),
    "dgc": lambda: DGC(density=0.05, warm_up=5),
    "terngrad": TernGrad,
    "qsdp8": lambda: QSDP(bits=8),
    "qsdp4": lambda: QSDP(bits=4),
    "ef21": lambda: EF21(codec="sign", eta=0.5),
    "econtrol": lambda: EControl(codec="int2", eta=0.05),
    "error_feedback": lambda: ErrorFeedback(codec="int2"),
}
LOSS_STEPS = 80


def losses(session: Any, name: str) -> tuple[list[torch.Tensor], float]:
    """The parameters after each step, and the mean loss on data of nobody's."""
    net = gradients.model(session.number)
    momentum = 0.0 if name == "dgc" else 0.9
    inner = torch.optim.SGD(net.parameters(), lr=0.05, momentum=momentum)
    after = []
    with GradientAverage(net, inner, session, compressor=COMPRESSORS[name]()):
        for step in range(LOSS_STEPS):
            inner.zero_grad()
            gradients.loss_of(net, session.number, step).backward()
            inner.step()
            after.append(flat(net))
    with torch.no_grad():
        loss = sum(gradients.loss_of(net, 100, step) for step in range(20)) / 20
    return after, float(loss)


@pytest.fixture(scope="module")
def uncompressed() -> float:
    return Swarm(WORKERS).run(lambda session: losses(session, "none"))[0][1]


@pytest.mark.parametrize("name", list(COMPRESSORS))
def test_compressors_train_and_all_agree_after_every_step(name: str, uncompressed: float) -> None:
    found = Swarm(WORKERS).run(lambda session: losses(session, name))
    for step in range(LOSS_STEPS):
        first = found[0][0][step]
        assert all(torch.equal(first, after[step]) for after, _ in found), step
    with torch.no_grad():
        net = gradients.model()
        begun = float(sum(gradients.loss_of(net, 100, step) for step in range(20)) / 20)
    loss = found[0][1]
    assert uncompressed < 0.1 * begun
    assert loss < 1.3 * uncompressed


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("none", 4 * 4096),  # in a butterfly of two one half goes, and the other comes back
        ("power_sgd", 4 * (64 + 64)),
        ("dgc", 8 * 41),
        ("terngrad", 1024 + 4),
        ("qsdp4", 8 + 2048 + 4 * 64),
        ("ef21", 512 + 4 * 16),
    ],
)
def test_what_compressors_send(name: str, nbytes: int) -> None:
    """Of 64 x 64 elements, each of two workers, and at most 200 bytes of flags."""

    def work(session: Any) -> None:
        net = nn.Linear(64, 64, bias=False)
        inner = torch.optim.SGD(net.parameters(), lr=0.01)
        with GradientAverage(net, inner, session, compressor=makers[name]()):
            for step in range(6):
                inner.zero_grad()
                net(torch.ones(2, 64) * step).square().mean().backward()
                inner.step()
                sent.append(swarm.encoded_bytes)

    makers = {
        **COMPRESSORS,
        "dgc": lambda: DGC(density=0.01),
        "power_sgd": lambda: PowerSGD(start=0),
    }
    swarm, sent = Swarm(2), []
    swarm.run(work)
    assert 2 * nbytes <= sent[-1] - sent[-3] <= 2 * (nbytes + 200)


# ---------------------------------------------------------------- states for newcomers


def test_a_state_that_cannot_be_handed_over_ends_its_trainer_at_the_second_step() -> None:
    taken = []

    def each(session: Any) -> None:
        net = gradients.model()
        inner = torch.optim.SGD(net.parameters(), lr=0.05)
        state = {"quantized": torch.zeros(4, dtype=torch.uint8)}  # as optimizers of 8 bits have it
        first = next(net.parameters())
        inner.register_step_post_hook(lambda *_: inner.state.update({first: state}))
        GradientAverage(net, inner, session)
        for step in range(3):
            gradients.loss_of(net, session.number, step).backward()
            inner.step()
            taken.append(step)

    with pytest.raises(ConfigError, match="keeps 'quantized', a uint8 tensor") as raised:
        Swarm(1).run(each)
    assert taken == [0]
    assert "float32, bfloat16" in raised.value.fix


class Masked(nn.Module):
    """Have batch statistics, and an attention mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.norm(self.linear(x)).unsqueeze(1) + self.mask
        return scores.softmax(-1)


def masked(session: Any, spoil: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(session.number)
    net = Masked()
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    outer = GradientAverage(net, inner, session, check_every=2)
    for step in range(5):
        if spoil:
            net.norm.running_var.fill_(torch.inf)  # type: ignore[union-attr]
            net.train(False)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * session.number + step))
        net(x).square().sum().backward()
        inner.step()
        inner.zero_grad()
    assert outer.steps == 5
    return [net.norm.running_mean.clone(), net.mask]  # type: ignore[union-attr, list-item, operator]


def test_a_mask_is_a_constant_and_statistics_are_shared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = Swarm(2).run(masked)
    assert all(torch.equal(mask, Masked().mask) for _, mask in found)  # type: ignore[arg-type]
    assert torch.equal(found[0][0], found[1][0])
    assert "infinities in 1 buffer of the model (mask): taken for con" in capsys.readouterr().err


def test_a_buffer_that_has_gone_mad_is_named() -> None:
    with pytest.raises(CodecError, match=r"NaN or Inf in norm\.running_var at step 0"):
        Swarm(1).run(lambda session: masked(session, spoil=True))
