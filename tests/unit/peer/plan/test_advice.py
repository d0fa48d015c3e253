"""Which candidate is recommended, and what is said to help."""

from __future__ import annotations

import math

import pytest
from harness.plans import sketch

from atoll.collectives.errors import ConfigError
from atoll.peer.cli.plan import read_losses
from atoll.peer.plan.advice import (
    DEFAULT_VARIANTS,
    SAME,
    PlanAdvice,
    advise,
    without,
)
from atoll.peer.plan.losses import LossTable
from atoll.peer.plan.model import METHOD_FACTS, RunSketch, Variant, forecast

LOSSES = read_losses()


def advice_of(run: RunSketch, *variants: Variant) -> PlanAdvice:
    return advise(run, LOSSES, variants or DEFAULT_VARIANTS)


def test_one_worker_is_worth_a_quarter_of_four() -> None:
    alone = LOSSES.nearest("one-worker", 1)
    assert alone is not None
    assert LOSSES.worth(alone.above) == pytest.approx(1 / LOSSES.workers)
    assert LOSSES.worth(0.0) == LOSSES.worth(-0.1) == 1.0
    assert LOSSES.exponent == pytest.approx(math.log1p(alone.above) / math.log(4))


def test_the_nearest_row_is_taken() -> None:
    nearest = LOSSES.nearest("diloco", 80)
    assert nearest is not None
    assert (nearest.sync_every, nearest.start) == (100, "warm")
    assert LOSSES.nearest("no-such-method", 30) is None
    with pytest.raises(ConfigError, match="one worker"):
        _ = LossTable("0.8M", 4, ()).exponent


def test_every_method_has_measured_losses() -> None:
    for facts in METHOD_FACTS.values():
        assert all(LOSSES.nearest(name, 30) for name in facts.documented.values())


def test_a_fast_network_is_for_gradients_and_a_slow_one_is_not() -> None:
    fast = advice_of(sketch([10_000] * 4, 0.2, 2.0, 1e6))
    assert fast.best.variant.method == "gradient_average"
    slow = advice_of(sketch([20] * 4, 60, 0.5, 1e8))
    assert slow.best.variant.method in ("streaming", "sparse_loco")
    assert slow.judged[0].forecast.training < 0.05


@pytest.mark.parametrize("mbit", [2, 20, 200, 2000])
def test_nothing_at_no_worse_loss_is_faster_than_what_is_recommended(mbit: float) -> None:
    found = advice_of(sketch([mbit] * 4, 40, 0.5, 1e7))
    best = found.best
    for each in found.judged:
        if each.loss.above <= best.loss.above:
            faster = each.forecast.samples_per_s / best.forecast.samples_per_s
            assert faster <= 1 / (1 - SAME)


def test_of_equal_ones_that_which_sends_least_is_taken() -> None:
    """Where links are no limit, eight bits and four are equally fast."""
    run = sketch([1000] * 4, 5, 2.0, 1e6)
    found = advice_of(run, Variant("diloco", 30, "int8"), Variant("diloco", 30, "int4"))
    assert found.best.variant.codec == "int4"


def test_a_slow_uplink_is_named_and_leaving_it_out_is_weighed() -> None:
    run = sketch([100, 100, 100, 5], 40, 0.5, 3e7)
    found = advice_of(run, Variant("diloco", 30, "int8"))
    texts = {change.text: change for change in found.improvements}
    assert texts["d with twice its link, both ways"].speed > 0.3
    assert "d with twice its uplink" not in texts  # its downlink is as slow
    assert texts["without d"].speed > 0.3
    leads = [change.lead for change in found.improvements]
    assert leads == sorted(leads, reverse=True)


def test_a_slow_machine_is_named_and_own_steps_are_weighed() -> None:
    """One of three takes four times as long: with steps of their own 4 + 4 + 1 for 1 + 1 + 1."""
    run = sketch([1000] * 3, 5, [0.1, 0.1, 0.4], 1e5)
    found = advice_of(run, Variant("diloco", 30, "int8"))
    (own,) = (change for change in found.improvements if change.text.startswith("round_s="))
    assert own.speed == pytest.approx(2.0)
    (left,) = (change for change in found.improvements if change.text == "without c")
    assert left.speed > 1.5  # two of four times the speed, where three were


def test_what_is_only_faster_is_not_said_to_help() -> None:
    """More steps in a round are faster on slow links, and their loss is higher."""
    run = sketch([20] * 4, 40, 0.5, 3e7)
    found = advice_of(run, Variant("diloco", 30, "int4"), Variant("diloco", 100, "int4"))
    best, other = found.judged
    assert found.best is best
    assert other.forecast.samples_per_s > (1 + SAME) * best.forecast.samples_per_s
    assert found.improvements
    assert all(change.lead > 0 for change in found.improvements)
    assert not any(change.text.startswith("diloco") for change in found.improvements)


def test_it_is_said_when_one_machine_gets_further() -> None:
    assert not advice_of(sketch([1, 1], 200, 0.1, 1e8)).is_worth_it
    assert advice_of(sketch([1000] * 4, 5, 1.0, 1e6)).is_worth_it


def test_a_run_without_one_host_is_the_others() -> None:
    run = sketch([100, 20, 50], 40, [0.1, 0.2, 0.3], 1e6)
    rest = without(run, 1)
    assert [host.name for host in rest.hosts] == ["a", "c"]
    assert rest.network.up.tolist() == [12.5e6, 6.25e6]
    assert forecast(rest, DEFAULT_VARIANTS[1]).round_s > 0
    assert without(run, 0).coordinator == 0


def test_candidates_are_few() -> None:
    with pytest.raises(ConfigError, match="0 candidates"):
        advise(sketch([1, 1], 20, 0.1, 1e6), LOSSES, ())
    assert len(DEFAULT_VARIANTS) <= 8
