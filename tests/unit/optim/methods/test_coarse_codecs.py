"""Train in one bit and in two: what DiLoCo leaves out of a round goes with the next."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll.collectives.chunks import grid_for
from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.errors import ConfigError
from atoll.optim import (
    DiLoCo,
    ErrorFeedback,
    GradientAverage,
    LocalSGD,
    StreamingDiLoCo,
    Swarm,
)
from atoll.optim.footprint import host_bytes
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.outer_step import outer_step
from atoll.optim.run_spec import RunSpec
from atoll.optim.swarm_state import SwarmState, SwarmSubmission

ELEMENTS, ROUNDS, H, RATE = 9000, 5, 2, 0.05
INT4 = get_codec("int4")


def start() -> torch.Tensor:
    return torch.linspace(-1, 1, ELEMENTS)


def gradient(values: torch.Tensor, worker: int, step: int) -> torch.Tensor:
    return (1 + worker) * torch.cos(values * (3 * step + 1)) + 0.3 * worker


def trained(session: Any, **options: Any) -> F32:
    parameter = nn.Parameter(start())
    inner = torch.optim.SGD([parameter], lr=RATE)
    DiLoCo(nn.ParameterList([parameter]), inner, H, session, **options)
    for step in range(ROUNDS * H):
        parameter.grad = gradient(parameter.detach(), session.number, step)
        inner.step()
    return parameter.detach().numpy().copy()


def coded(codec: Any, values: F32) -> F32:
    """Return what comes back of a vector, chunk by chunk."""
    grid, found = grid_for(values.size), np.empty_like(values)
    for chunk in range(grid.count):
        part = slice(*grid.bounds(chunk))
        data = np.empty(codec.encoded_bytes(part.stop - part.start), np.uint8)
        codec.encode(np.ascontiguousarray(values[part]), data)
        codec.decode(data, found[part])
    return found


def told_slowly(workers: int, name: str, decay: float) -> F32:
    theta, momentum = start().numpy().copy(), np.zeros(ELEMENTS, np.float32)
    kept = np.zeros((workers, ELEMENTS), np.float32)
    for number in range(ROUNDS):
        total = np.zeros(ELEMENTS, np.float32)
        for worker in range(workers):
            local = torch.from_numpy(theta.copy())
            for step in range(number * H, (number + 1) * H):
                local -= RATE * gradient(local, worker, step)
            message = np.float32(decay) * kept[worker] + (theta - local.numpy())
            sent = coded(get_codec(name), message)
            kept[worker] = message - sent
            total += np.float32(1 / workers) * sent
        mean = coded(INT4, total)
        outer_step(
            "nesterov",
            theta,
            momentum,
            mean,
            lr=0.7,
            mu=0.9,
            out_theta=theta,
            out_momentum=momentum,
            scratch=np.empty_like(theta),
        )
    return theta


@pytest.mark.parametrize(("name", "decay"), [("int2", None), ("int2", 0.9), ("sign", None)])
def test_rounds_of_coarse_parts_are_the_method_told_slowly(name: str, decay: float | None) -> None:
    found = Swarm(3).run(lambda s: trained(s, codec=name, error_feedback=decay))
    expected = told_slowly(3, name, 1.0 if decay is None else decay)
    for each in found:
        np.testing.assert_allclose(each, expected, rtol=0, atol=2e-6)


def moved(session: Any, **options: Any) -> F32:
    """Return how far rounds have come whose steps always go the same way."""
    parameter = nn.Parameter(torch.zeros(ELEMENTS))
    inner = torch.optim.SGD([parameter], lr=RATE)
    mean = {"outer_lr": 1.0, "outer_momentum": 0.0}
    DiLoCo(nn.ParameterList([parameter]), inner, H, session, **mean, **options)
    for _ in range(20 * H):
        parameter.grad = torch.cos(torch.arange(ELEMENTS) * (1.0 + session.number))
        inner.step()
    return parameter.detach().numpy().copy()


def test_feedback_makes_up_for_what_two_bits_leave_out() -> None:
    exact, with_all, without = (
        Swarm(3).run(lambda s, o=options: moved(s, **o))[0]
        for options in (
            {"codec": "float32"},
            {"codec": "int2"},
            {"codec": "int2", "error_feedback": 1e-6},
        )
    )
    errors = [np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in (with_all, without)]
    assert errors[0] < 0.3 * errors[1]


def test_two_bits_send_three_quarters_of_what_four_do() -> None:
    sent = {}
    for name in ("int2", "int4"):
        swarm = Swarm(4)
        swarm.run(lambda s, codec=name: trained(s, codec=codec))
        sent[name] = swarm.encoded_bytes
    assert sent["int2"] / sent["int4"] == pytest.approx((2.125 + 4.5) / (2 * 4.5), rel=0.01)


def test_who_asks_for_a_coarse_codec_gets_feedback_and_others_do_not() -> None:
    manifest = Manifest.of([Parameter("w", (1 << 20,))])
    coarse = RunSpec(sync_every=1, codec="int2", error_feedback=1.0)
    fine = RunSpec(sync_every=1, codec="int4", error_feedback=1.0)
    assert host_bytes(coarse, manifest) == host_bytes(fine, manifest)
    for name, kept in (("int2", 1.0), ("sign", 1.0), ("int4", 0.0), ("float32", 0.0)):
        swarm = Swarm(1)
        swarm.run(lambda s, codec=name: trained(s, codec=codec))
        assert swarm.state.spec.error_feedback == kept


def test_each_fragment_keeps_what_it_has_left_out() -> None:
    elements, random = 3 * 4096, np.random.default_rng(1)
    mean = {"outer": "sgd", "outer_lr": 1.0, "outer_momentum": 0.0}
    spec = RunSpec(sync_every=1, codec="int2", error_feedback=1.0, fragments=2, **mean)
    manifest = Manifest.of([Parameter("w", (elements,))])
    state = SwarmState(spec, manifest, lambda flat: flat.fill(0))
    kept = np.zeros(elements, np.float32)
    for number in range(6):
        values = random.standard_normal(elements).astype(np.float32)
        expected = state.theta.copy()
        for chunk in range(*manifest.chunks_of(number % 2, 2)):
            part = slice(*state.grid.bounds(chunk))
            message = kept[part] + (state.theta[part] - values[part])
            sent = coded(get_codec("int2"), message)
            kept[part] = message - sent
            expected[part] -= coded(INT4, sent)
        state.commit([SwarmSubmission(0, values, 1.0)], fragment=number % 2)
        assert state._feedback[0].arrays["residual"].tobytes() == kept.tobytes()
        assert state.theta.tobytes() == expected.tobytes()


def test_streaming_learns_in_two_bits() -> None:
    def streaming(session: Any) -> tuple[float, float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(100 + session.number)
        outer = StreamingDiLoCo(model, inner, 12, session, delay=1, codec="int2")
        losses = []
        for _ in range(240):
            features = torch.randn(32, 16)
            loss = (model(features) - features.roll(1, 1)).square().mean()
            losses.append(float(loss.detach()))
            loss.backward()
            inner.step()
            inner.zero_grad()
        assert outer.spec.error_feedback == 1.0
        return losses[0], losses[-1]

    first, last = Swarm(3).run(streaming)[0]
    assert last < 0.5 * first


def test_eager_updates_refuse_feedback() -> None:
    def eager(session: Any) -> None:
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        StreamingDiLoCo(model, inner, 12, session, eager=True, codec="int2")

    with pytest.raises(ConfigError, match="its daemon alone knows what it has left out"):
        Swarm(1).run(eager)


@pytest.mark.parametrize("given", [None, 0.0, 1.0])
def test_audits_refuse_coarse_codecs(given: float | None) -> None:
    with pytest.raises(ConfigError, match="codec 'int2' with audit=True: audited") as raised:
        Swarm(1).run(lambda s: trained(s, codec="int2", error_feedback=given, audit=True))
    assert "float32" in raised.value.fix
    assert raised.value.fix.endswith("or leave audit out")


def test_who_takes_feedback_is_said_to_those_who_do_not() -> None:
    parameter = nn.Parameter(start())
    inner, model = torch.optim.SGD([parameter], lr=RATE), nn.ParameterList([parameter])
    with pytest.raises(ConfigError, match="DiLoCo and StreamingDiLoCo take it"):
        Swarm(1).run(lambda s: LocalSGD(model, inner, H, s, codec="int2"))
    with pytest.raises(ConfigError, match="needs error_feedback") as raised:
        Swarm(1).run(lambda s: GradientAverage(model, inner, s, codec="sign"))
    assert "compressor=ErrorFeedback(codec='sign')" in raised.value.fix
    Swarm(1).run(lambda s: GradientAverage(model, inner, s, compressor=ErrorFeedback(codec="sign")))


def test_a_mean_of_so_little_is_refused() -> None:
    with pytest.raises(ConfigError, match="as of SparseLoCo: so little of it is sent"):
        Swarm(1).run(lambda s: trained(s, codec="topk"))
