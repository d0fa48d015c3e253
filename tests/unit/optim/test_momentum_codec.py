"""The outer momentum in 8 bits: the same bits everywhere, near those of float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll.collectives import get_codec, grid_for
from atoll.collectives.codecs import F32, U8
from atoll.collectives.errors import CodecError, ConfigError, IncompatibleRunError
from atoll.optim import AsyncDiLoCo, DiLoCo, LocalSGD, StreamingDiLoCo, Swarm
from atoll.optim import outer_step as module
from atoll.optim.experimental import CO2
from atoll.optim.footprint import host_bytes
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.outer_step import OuterStep, momentum_layout, outer_step
from atoll.optim.run_spec import RunSpec, blob, check_same, parse_blob

CODECS = ("float32", "dynamic8")
EIGHT = get_codec("dynamic8")
COUNT = 4096 + 300  # the last block is a short one


def run_spec(**options: Any) -> RunSpec:
    return RunSpec(sync_every=1, codec="float32", momentum_codec="dynamic8", **options)


def begun(steps: OuterStep, count: int = COUNT) -> U8:
    kept = np.full(EIGHT.encoded_bytes(count), 255, np.uint8)
    steps.begin(kept, count)
    return kept


def moved(steps: OuterStep, theta: F32, kept: U8, delta: F32, number: int = 2) -> None:
    float32 = get_codec("float32")
    steps(float32, delta.view(np.uint8), theta, kept, round_number=number, contributors=1)


def deltas(rounds: int) -> F32:
    """Values of very different sizes, with a steady part as gradients have."""
    rng = np.random.default_rng(3)
    scale = np.exp(rng.normal(0, 2, COUNT)).astype(np.float32)
    noise = rng.standard_normal((rounds, COUNT)).astype(np.float32)
    return (noise + rng.standard_normal(COUNT).astype(np.float32)) * scale


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"outer": "heavy_ball"}, {"outer": "heavy_ball", "outer_clip": 0.5}, {"outer_delay": 3}],
    ids=["nesterov", "heavy ball", "clipped", "delayed"],
)
def test_a_step_is_that_of_float32_between_decoding_and_encoding(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], kernels: bool
) -> None:
    if not kernels:
        monkeypatch.setattr(module, "KERNELS", None)
    steps = OuterStep(run_spec(**options), COUNT)
    plain = OuterStep(RunSpec(sync_every=1, codec="float32", **options), COUNT)
    theta, kept = np.ones(COUNT, np.float32), begun(steps)
    expected, momentum = theta.copy(), np.zeros(COUNT, np.float32)
    for number, delta in enumerate(deltas(7), 2):
        moved(steps, theta, kept, delta, number)
        moved(plain, expected, momentum.view(np.uint8), delta, number)
        encoded = np.empty_like(kept)
        EIGHT.encode(momentum, encoded)
        assert theta.tobytes() == expected.tobytes()
        assert kept.tobytes() == encoded.tobytes()
        EIGHT.decode(encoded, momentum)


def test_what_eight_bits_leave_out_stays_small_over_many_rounds() -> None:
    """The error of the momentum is not added up: each round forgets a tenth of it."""
    steps, plain = OuterStep(run_spec(), COUNT), OuterStep(RunSpec(sync_every=1), COUNT)
    theta, kept = np.zeros(COUNT, np.float32), begun(steps)
    expected, momentum, found = theta.copy(), np.zeros(COUNT, np.float32), theta.copy()
    for delta in deltas(200):
        moved(steps, theta, kept, delta)
        moved(plain, expected, momentum.view(np.uint8), delta)
    EIGHT.decode(kept, found)
    assert np.linalg.norm(found - momentum) < 0.03 * np.linalg.norm(momentum)
    assert np.linalg.norm(theta - expected) < 0.01 * np.linalg.norm(expected)


def test_malformed_bytes_change_nothing() -> None:
    steps = OuterStep(run_spec(), COUNT)
    theta, kept = np.ones(COUNT, np.float32), begun(steps)
    moved(steps, theta, kept, deltas(1)[0])
    before = theta.tobytes(), kept.tobytes()
    for wrong in (np.full(COUNT, np.nan, np.float32), np.full(COUNT, np.inf, np.float32)):
        with pytest.raises(CodecError):
            moved(steps, theta, kept, wrong)
        assert (theta.tobytes(), kept.tobytes()) == before


def test_a_momentum_beyond_float32_is_the_largest_that_there_is() -> None:
    steps = OuterStep(run_spec(outer_momentum=0.99), COUNT)
    theta, kept = np.zeros(COUNT, np.float32), begun(steps)
    most = np.float32(np.finfo(np.float32).max)
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(2):
            moved(steps, theta, kept, np.full(COUNT, most))
    found = np.empty(COUNT, np.float32)
    EIGHT.decode(kept, found)
    assert (found == most).all()


# ---------------------------------------------------------------- in a run


def test_it_is_of_the_run_and_older_versions_can_join_one_without_it() -> None:
    manifest = Manifest.of([Parameter("w", (COUNT,))])
    plain, packed = RunSpec(sync_every=1), RunSpec(sync_every=1, momentum_codec="dynamic8")
    assert "momentum_codec" not in plain.to_wire()
    assert parse_blob(blob(plain, manifest))[0] == plain
    assert parse_blob(blob(packed, manifest))[0] == packed
    with pytest.raises(IncompatibleRunError, match="momentum_codec: yours float32, run dynamic8"):
        check_same((plain, manifest), (packed, manifest), "demo")


def test_only_a_run_with_momentum_keeps_one_and_in_known_codecs() -> None:
    with pytest.raises(ConfigError, match="one of float32, dynamic8"):
        RunSpec(sync_every=1, momentum_codec="int8")
    with pytest.raises(ConfigError, match="float32, as there is no momentum"):
        RunSpec(sync_every=1, momentum_codec="dynamic8", outer_momentum=0.0)


def test_it_takes_three_bytes_less_of_each_parameter() -> None:
    manifest = Manifest.of([Parameter("w", (1_000_000,))])
    sizes = [host_bytes(RunSpec(sync_every=1, momentum_codec=c), manifest) for c in CODECS]
    assert 2.95 < (sizes[0] - sizes[1]) / manifest.elements < 3
    assert momentum_layout(run_spec(), grid_for(COUNT)).total_bytes == EIGHT.encoded_bytes(COUNT)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (DiLoCo, {}),
        (StreamingDiLoCo, {}),
        (CO2, {"outer_momentum": 0.5}),
        (AsyncDiLoCo, {"outer_delay": 1}),
    ],
)
def test_methods_with_momentum_take_it_and_end_near_those_of_float32(
    method: Any, options: dict[str, Any]
) -> None:
    def train(session: Any) -> None:
        torch.manual_seed(0)
        model = nn.Linear(40, 30)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = method(model, inner, 2, session, **options)
        torch.manual_seed(session.number)
        for _ in range(8):
            features = torch.randn(8, 40)
            model(features).square().mean().backward()
            inner.step()
            inner.zero_grad()
        assert outer.spec.momentum_codec == options["momentum_codec"]

    found = []
    for codec in CODECS:
        options["momentum_codec"] = codec
        swarm = Swarm(2)
        swarm.run(train)
        found.append((swarm.state.theta.copy(), swarm.state.momentum.nbytes))
    (plain, plain_bytes), (packed, packed_bytes) = found
    assert plain_bytes > 3.5 * packed_bytes
    assert packed.tobytes() != plain.tobytes()
    np.testing.assert_allclose(packed, plain, atol=0.02)


def test_methods_without_momentum_know_no_such_option() -> None:
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="momentum_codec"):
        Swarm(1).run(lambda session: LocalSGD(model, inner, 2, session, momentum_codec="dynamic8"))


def test_plain_arrays_say_the_same_of_float32() -> None:
    """Without a codec the bytes are the values themselves, and nothing is copied."""
    steps = OuterStep(RunSpec(sync_every=1, codec="float32"), COUNT)
    delta, theta, momentum = deltas(1)[0], np.ones(COUNT, np.float32), np.zeros(COUNT, np.float32)
    expected = theta.copy(), momentum.copy()
    moved(steps, theta, momentum.view(np.uint8), delta)
    outer_step(
        "nesterov",
        *expected,
        delta,
        lr=0.7,
        mu=0.9,
        out_theta=expected[0],
        out_momentum=expected[1],
        scratch=np.empty_like(delta),
    )
    assert (theta.tobytes(), momentum.tobytes()) == tuple(part.tobytes() for part in expected)
