"""What is predicted of a round: by hand, beside what was measured, and what must always hold."""

from __future__ import annotations

import pytest
from harness.plans import sketch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.codecs import get_codec
from atoll.collectives.errors import AtollError, ConfigError
from atoll.collectives.planning.choice import MARGIN
from atoll.collectives.planning.cost_model import LINK_OVERHEAD
from atoll.peer.plan.losses import parse_losses
from atoll.peer.plan.model import (
    CONTROL_BYTES_PER_S,
    DAY_S,
    RoundForecast,
    RunSketch,
    TrainingHost,
    Variant,
    forecast,
    slow_start_s,
)

DILOCO, INT4 = Variant("diloco", 30, "int8"), Variant("diloco", 30, "int4")
STREAMING = Variant("streaming", 30, "fp4_e3m0")
VARIANTS = (
    DILOCO,
    INT4,
    STREAMING,
    Variant("sparse_loco", 30, "topk"),
    Variant("gradient_average", 1, "int8"),
)


def part(found: RoundForecast, name: str) -> float:
    (seconds,) = (each.seconds for each in found.parts if each.name == name)
    return seconds


# ---------------------------------------------------------------- by hand


def test_a_round_is_the_sum_of_its_parts() -> None:
    """Four hosts of 100 Mbit/s and 50 ms; 4 million float32, of which each sends one and a half."""
    found = forecast(sketch([100] * 4, 50, 0.1, 4e6), Variant("diloco", 40, "float32"))
    assert part(found, "training") == pytest.approx(4.0)
    assert part(found, "begin") == part(found, "commit") == pytest.approx(0.05)
    assert part(found, "apply") == pytest.approx(4e6 * 12e-9 + 0.02 + 4e6 * 3e-9)
    assert part(found, "copies") == pytest.approx(0.04)
    line_s = 1.5 * 16e6 / 12.5e6 / (1 - LINK_OVERHEAD)
    assert part(found, "exchange") == pytest.approx(line_s + 0.025, rel=0.02)
    assert found.round_s == pytest.approx(sum(each.seconds for each in found.parts))
    assert found.training == pytest.approx(4.0 / found.round_s)
    assert found.samples_per_s == pytest.approx(4 * 40 / found.round_s)  # steps of all


def test_streams_that_were_idle_double_their_windows() -> None:
    """16 MB in 2 s over 100 ms: 552 segments in a round trip; from 10 that is 5.8 doublings."""
    run = sketch([100, 100], 100, 1.0, 1e6)
    carried = run.network.latency_s * 0
    carried[0, 1] = 2 * 8e6
    window = 16e6 / 1448 / 20
    lost = 0.1 * (5.7877 - 1 + 10 / window)
    assert slow_start_s(run.network, carried, 2.0, idle_s=60.0) == pytest.approx(lost, rel=1e-3)
    assert slow_start_s(run.network, carried, 2.0, idle_s=0.0) == 0.0
    some = slow_start_s(run.network, carried, 2.0, idle_s=0.9)  # three timeouts of 0.3 s
    assert some == pytest.approx(0.1 * (3 - 1 + 1 / 8), rel=1e-3)


def test_bytes_are_those_of_the_codec_with_headers() -> None:
    run = sketch([50] * 4, 20, 0.5, 4e6, price_gb=2.0, price_hour=0.5)
    found = forecast(run, DILOCO)
    encoded = get_codec("int8").encoded_bytes(4_000_000)
    assert found.sent_bytes.sum() == pytest.approx(2 * 3 * encoded / (1 - LINK_OVERHEAD))
    day = found.sent_bytes.sum() * DAY_S / found.round_s + 4 * DAY_S * CONTROL_BYTES_PER_S
    assert found.day_bytes().sum() == pytest.approx(day)
    assert found.day_cost(run) == pytest.approx(4 * 0.5 * 24 + day / 1e9 * 2.0)
    assert found.cost_of(run, found.samples_per_s * DAY_S) == pytest.approx(found.day_cost(run))


def test_gathered_parts_grow_with_the_peers() -> None:
    """Of c bytes each sends (n-1)/n c to the owners, and owners send n parts to all others."""
    count = 4
    run = sketch([50] * count, 20, 0.5, 4 * 2**20)
    c = get_codec("topk").encoded_bytes(4 * 2**20)
    sent = forecast(run, Variant("sparse_loco", 30, "topk")).sent_bytes.mean()
    expected = ((count - 1) / count + (count - 1)) * c / (1 - LINK_OVERHEAD)
    assert sent == pytest.approx(expected, rel=0.01)


def test_fragments_are_hidden_until_links_are_full_or_rounds_too_long() -> None:
    fast = forecast(sketch([100] * 4, 20, 0.5, 1e6), STREAMING)
    assert part(fast, "waiting") == 0
    assert 1 <= fast.delay_steps <= 2
    full = forecast(sketch([1] * 4, 20, 0.1, 1e6), STREAMING)
    line_s = 1.5 * 5 * get_codec("fp4_e3m0").encoded_bytes(200_000) / 125e3 / (1 - LINK_OVERHEAD)
    assert full.round_s >= line_s
    assert full.training == pytest.approx(3.0 / full.round_s)
    late = forecast(sketch([100] * 4, 4000, 0.1, 1e6), STREAMING)
    assert part(late, "waiting") > 5 * (2 * 4.0 - 1.0)  # two round trips of each, ten steps hidden


# ---------------------------------------------------------------- beside what was measured


@pytest.mark.parametrize(
    ("variant", "measured_s"),
    [(DILOCO, 6 / 0.697), (STREAMING, 6 / 0.986)],  # make bench ARGS="--only utilization"
)
def test_rounds_of_the_utilization_benchmark(variant: Variant, measured_s: float) -> None:
    """Four hosts, 50 Mbit/s, 80 ms, eight million parameters, 30 steps of 0.2 s (docs/log.md)."""
    found = forecast(sketch([50] * 4, 80, 0.2, 8e6), variant)
    assert found.round_s == pytest.approx(measured_s, rel=0.05)


@pytest.mark.parametrize(("mib", "measured_s"), [(16, 2.43), (4, 0.763)])
def test_exchanges_of_the_planned_benchmark(mib: int, measured_s: float) -> None:
    """Four hosts, 100 Mbit/s, 50 ms, float32: from BEGIN to the applied result (docs/log.md)."""
    run = sketch([100] * 4, 50, 4.0, mib * 2**18)
    found = forecast(run, Variant("diloco", 1, "float32"))
    rest_s = sum(part(found, name) for name in ("training", "begin", "copies"))
    assert found.round_s - rest_s == pytest.approx(measured_s, rel=0.05)


# ---------------------------------------------------------------- what must always hold

RUNS = st.builds(
    sketch,
    st.lists(st.sampled_from([5, 20, 50, 200, 1000]), min_size=2, max_size=4),
    st.sampled_from([1, 20, 80, 300]),
    st.sampled_from([0.05, 0.5, 2.0]),
    st.sampled_from([1e5, 3e6, 1e8]),
)
FEW = settings(max_examples=40, deadline=None)


@FEW
@given(run=RUNS, variant=st.sampled_from(VARIANTS), factor=st.sampled_from([1.3, 4.0]))
def test_faster_links_never_make_a_round_slower(
    run: RunSketch, variant: Variant, factor: float
) -> None:
    """But for what the planner of rounds may be wrong by, which keeps it to the butterfly."""
    network = run.network
    rates = [factor * 8e-6 * rate for rate in network.up.tolist()]
    trip_ms = 2e3 * float(network.latency_s[0, 1])
    faster = sketch(rates, trip_ms, run.hosts[0].step_s, run.parameters)
    slack_s = MARGIN * forecast(run, variant).round_s
    assert forecast(faster, variant).round_s <= forecast(run, variant).round_s + slack_s


@FEW
@given(run=RUNS, variant=st.sampled_from(VARIANTS[:4]), more=st.integers(2, 10))
def test_more_steps_in_a_round_never_cost_training_time(
    run: RunSketch, variant: Variant, more: int
) -> None:
    """Leave out streaming whose connections begin slowly again after longer pauses: its delay is
    limited, and may hide a fragment's round before and not after."""
    longer = Variant(variant.method, more * variant.sync_every, variant.codec)
    before, after = forecast(run, variant), forecast(run, longer)
    waits = any(part.seconds for part in after.parts if part.name == "waiting")
    if not (variant.facts.streams and waits):
        assert after.training >= before.training * (1 - 1e-9)
    assert after.day_bytes().sum() <= before.day_bytes().sum() * (1 + 1e-9)


@FEW
@given(run=RUNS)
def test_four_bits_send_less_than_eight(run: RunSketch) -> None:
    coarse, fine = forecast(run, INT4), forecast(run, DILOCO)
    assert coarse.sent_bytes.sum() < fine.sent_bytes.sum()
    assert 0 < coarse.training <= 1 + 1e-9


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("method", "steps", "codec"),
    [
        ("dilocoo", 30, "int8"),
        ("diloco", 0, "int8"),
        ("diloco", 30, "int3000"),
        ("diloco", 30, "topk"),
        ("gradient_average", 30, "int8"),
    ],
)
def test_candidates_that_cannot_be(method: str, steps: int, codec: str) -> None:
    with pytest.raises(AtollError):
        Variant(method, steps, codec)


def test_runs_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="step_s"):
        TrainingHost("a", 0.0)
    with pytest.raises(ConfigError, match="2 to 64 hosts"):
        sketch([100], 20, 0.1, 1e6)
    with pytest.raises(ConfigError, match="0 parameters"):
        sketch([100, 100], 20, 0.1, 0)
    with pytest.raises(ConfigError, match="damaged"):
        parse_losses("{}")
