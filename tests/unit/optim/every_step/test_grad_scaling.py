"""GradScalers: who overflows gives nothing and goes on with the others; nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from harness.gradients import flat, loss_of, model, state_of
from torch import nn

from atoll.collectives.errors import CodecError, ConfigError
from atoll.optim import DGC, GradientAverage, PowerSGD, Swarm, TernGrad
from atoll.optim.compressors import Compressor
from atoll.optim.experimental import EF21

STEPS, WORKERS = 6, 3
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "loop": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "fused_sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}
each = pytest.mark.parametrize("name", OPTIMIZERS)


def scaler_of(scale: float = 2.0**10) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)


def overflow(net: nn.Module) -> None:
    for p in net.parameters():
        assert p.grad is not None
        p.grad.flatten()[0] = torch.inf


Found = tuple[torch.Tensor, torch.Tensor, float, float]


def train(
    session: Any,
    make: Make,
    overflows: Callable[[int, int], bool] = lambda worker, step: False,
    scaled: bool = True,
    compressor: Compressor | None = None,
    clip: float = 0.0,
) -> Found:
    """Parameters, inner state, steps that counted and the scale at the end."""
    net = model()
    inner, scaler = make(net.parameters()), scaler_of()
    with GradientAverage(net, inner, session, compressor=compressor) as outer:
        for step in range(STEPS):
            inner.zero_grad()
            loss = loss_of(net, session.number, step)
            if not scaled:
                loss.backward()
                if clip:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
                inner.step()
                continue
            scaler.scale(loss).backward()
            if overflows(session.number, step):
                overflow(net)
            if clip:
                scaler.unscale_(inner)
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            scaler.step(inner)
            scaler.update()
        return flat(net), state_of(inner), outer.metrics()["steps"], scaler.get_scale()


def all_equal(found: list[Found]) -> bool:
    return all(torch.equal(found[0][k], other[k]) for other in found for k in (0, 1))


@each
def test_a_scaler_changes_nothing(name: str) -> None:
    """A scale is a power of two."""
    plain = Swarm(WORKERS).run(lambda s: train(s, OPTIMIZERS[name], scaled=False))
    found = Swarm(WORKERS).run(lambda s: train(s, OPTIMIZERS[name]))
    assert all_equal(found)
    assert torch.equal(plain[0][0], found[0][0])
    assert torch.equal(plain[0][1], found[0][1])
    assert [one[2:] for one in found] == [(STEPS, 2.0**10)] * WORKERS


@each
def test_who_overflows_takes_the_mean_of_the_others(name: str) -> None:
    """As if it had never been there in that step, and only its own scale is halved."""
    found = Swarm(WORKERS).run(
        lambda s: train(s, OPTIMIZERS[name], lambda worker, step: (worker, step) == (1, 3))
    )
    assert all_equal(found)
    assert [one[2:] for one in found] == [(STEPS, 2.0 ** (10 - n % 2)) for n in range(WORKERS)]
    net = model()
    inner = OPTIMIZERS[name](net.parameters())
    for step in range(STEPS):
        workers = [0, 2] if step == 3 else range(WORKERS)
        inner.zero_grad()
        (sum(loss_of(net, worker, step) for worker in workers) / len(workers)).backward()
        inner.step()
    torch.testing.assert_close(found[0][0], flat(net), rtol=1e-2, atol=1e-4)


@each
def test_a_step_that_all_skip_does_not_count(name: str) -> None:
    overflows = {2, 4}
    found = Swarm(WORKERS).run(
        lambda s: train(s, OPTIMIZERS[name], lambda worker, step: step in overflows)
    )
    assert all_equal(found)
    assert [one[2:] for one in found] == [(STEPS - 2, 2.0**8)] * WORKERS

    def without(session: Any) -> Found:
        net = model()
        inner = OPTIMIZERS[name](net.parameters())
        with GradientAverage(net, inner, session):
            for step in (step for step in range(STEPS) if step not in overflows):
                inner.zero_grad()
                loss_of(net, session.number, step).backward()
                inner.step()
            return flat(net), state_of(inner), 0, 0

    plain = Swarm(WORKERS).run(without)
    assert torch.equal(plain[0][0], found[0][0])
    assert torch.equal(plain[0][1], found[0][1])


@pytest.mark.parametrize("name", ["sgd", "fused"])
def test_gradients_are_clipped_after_unscaling(name: str) -> None:
    plain = Swarm(WORKERS).run(lambda s: train(s, OPTIMIZERS[name], scaled=False, clip=0.01))
    found = Swarm(WORKERS).run(lambda s: train(s, OPTIMIZERS[name], clip=0.01))
    assert all_equal(found)
    assert torch.equal(plain[0][0], found[0][0])
    some = Swarm(WORKERS).run(
        lambda s: train(s, OPTIMIZERS[name], lambda w, step: (w, step) == (0, 2), clip=0.01)
    )
    assert all_equal(some)
    assert [one[2:] for one in some] == [(STEPS, 2.0 ** (10 - (n == 0))) for n in range(WORKERS)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: PowerSGD(start=0, rank=2),
        lambda: DGC(density=0.1),
        lambda: TernGrad(),
        lambda: EF21(),
    ],
)
def test_compressors_skip_too(make: Callable[[], Compressor]) -> None:
    def overflows(worker: int, step: int) -> bool:
        return step == 4 or (worker, step) in {(0, 1), (1, 2), (2, 2)}

    found = Swarm(WORKERS).run(lambda s: train(s, OPTIMIZERS["loop"], overflows, compressor=make()))
    assert all_equal(found)
    assert [one[2] for one in found] == [STEPS - 1] * WORKERS


def test_gradients_of_a_skipped_step_are_where_they_were() -> None:
    def work(session: Any) -> None:
        net = model()
        inner, scaler = torch.optim.SGD(net.parameters(), lr=0.1), scaler_of()
        with GradientAverage(net, inner, session):
            scaler.scale(loss_of(net, 0, 0)).backward()
            before = [p.grad for p in net.parameters()]
            overflow(net)
            scaler.step(inner)
            assert all(p.grad is grad for p, grad in zip(net.parameters(), before, strict=True))

    Swarm(1).run(work)


# ---------------------------------------------------------------- several inner optimizers


def two(session: Any, overflows: str = "", unscaled: int = 0) -> tuple[torch.Tensor, list[float]]:
    """Matrices and vectors have optimizers of their own; the one of ``overflows`` has infinities
    in the second worker's third step, and the first ``unscaled`` are unscaled before the step."""
    net = model()
    kinds = {"matrix": lambda p: p.ndim > 1, "vector": lambda p: p.ndim == 1}
    inners = [
        torch.optim.SGD([p for p in net.parameters() if kind(p)], lr=0.1, momentum=0.5)
        for kind in kinds.values()
    ]
    scaler, scales = scaler_of(), []
    with GradientAverage(net, inners, session) as outer:
        for step in range(STEPS):
            net.zero_grad()
            scaler.scale(loss_of(net, session.number, step)).backward()
            if session.number == 1 and step == 2 and overflows:
                for p in filter(kinds[overflows], net.parameters()):
                    assert p.grad is not None
                    p.grad.flatten()[-1] = torch.nan
            for inner in inners[:unscaled]:
                scaler.unscale_(inner)
            for inner in inners:
                scaler.step(inner)
            scaler.update()
            scales.append(scaler.get_scale())
        assert outer.metrics()["steps"] == STEPS
    return flat(net), scales


@pytest.mark.parametrize("overflows", ["", "matrix", "vector"])
@pytest.mark.parametrize("unscaled", [0, 2])
def test_the_gradients_of_all_inner_optimizers_are_one(overflows: str, unscaled: int) -> None:
    found = Swarm(2).run(lambda session: two(session, overflows, unscaled))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == [1024.0] * STEPS
    assert found[1][1] == [1024.0] * 2 + [1024.0 if not overflows else 512.0] * 4


def test_unscaling_only_some_is_refused() -> None:
    with pytest.raises(ConfigError, match="unscaled the gradients of one"):
        Swarm(1).run(lambda session: two(session, unscaled=1))


# ---------------------------------------------------------------- other uses


def test_closing_leaves_optimizers_as_they_were() -> None:
    flag = "_step_supports_amp_scaling"
    for fused in (False, True):
        net = model()
        inner = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
        before = getattr(inner, flag, "none")

        def work(session: Any, net: Any = net, inner: Any = inner) -> None:
            with GradientAverage(net, inner, session) as outer:
                assert getattr(inner, flag)
                outer.close()  # leaving closes it once more

        Swarm(1).run(work)
        assert getattr(inner, flag, "none") == before
        inner.step()


def test_without_a_scaler_what_is_not_finite_is_refused() -> None:
    def work(session: Any) -> None:
        net = model()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        with GradientAverage(net, inner, session, compressor=DGC()):
            loss_of(net, 0, 0).backward()
            overflow(net)
            inner.step()

    with pytest.raises(CodecError, match="NaN or Inf in the gradients of step 0; nothing was sent"):
        Swarm(1).run(work)


def test_a_disabled_scaler_is_none() -> None:
    def work(session: Any) -> torch.Tensor:
        net = model()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        with GradientAverage(net, inner, session):
            scaler.scale(loss_of(net, session.number, 0)).backward()
            scaler.step(inner)
            scaler.update()
        return flat(net)

    first, second = Swarm(2).run(work)
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_a_scale_that_is_too_large_at_first(dtype: torch.dtype) -> None:
    """The scaler finds its scale by skipping steps: in float16 some, in bfloat16 none."""

    def work(session: Any) -> tuple[torch.Tensor, float, float]:
        net = model()
        inner = torch.optim.AdamW(net.parameters(), lr=0.01)
        scaler = scaler_of(2.0**24)
        with GradientAverage(net, inner, session) as outer:
            for step in range(20):
                inner.zero_grad()
                with torch.autocast("cpu", dtype=dtype):
                    loss = loss_of(net, session.number, step)
                scaler.scale(loss).backward()
                scaler.step(inner)
                scaler.update()
            return flat(net), outer.metrics()["steps"], scaler.get_scale()

    first, second = Swarm(2).run(work)
    assert torch.equal(first[0], second[0])
    skipped = dtype == torch.float16
    assert (first[1] < 20) == skipped
    assert (first[2] < 2.0**24) == skipped
    assert first[1] > 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("fused", [False, True])
def test_on_a_gpu(fused: bool) -> None:
    """The second worker is on the host: it takes over from the device, and overflows once."""

    def work(session: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
        device = "cpu" if session.number else "cuda"
        net = model(session.number).to(device)
        inner = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0)
        with GradientAverage(net, inner, session, compressor=PowerSGD(start=2)) as outer:
            for step in range(STEPS):
                inner.zero_grad()
                x = torch.linspace(-1, 1, 48, device=device).view(4, 12) * (step + 1)
                scaler.scale(net(x).square().mean()).backward()
                if session.number and step == 3:
                    overflow(net)
                scaler.step(inner)
                scaler.update()
            return flat(net).cpu(), state_of(inner).cpu(), outer.metrics()["steps"]

    first, second = Swarm(2).run(work)
    assert first[2] == second[2] == STEPS
    torch.testing.assert_close(first[0], second[0])  # arithmetic of steps differs between devices
    torch.testing.assert_close(first[1], second[1])
