"""Delayed Nesterov: acceptance test 11, the paper's algorithm, and joiners within a window."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest

from atoll.collectives.codecs import get_codec
from atoll.optim.outer_step import OuterStep, delayed_step, outer_step
from atoll.optim.run_spec import RunSpec

LR, MU = 0.7, 0.9


def delayed(theta, momentum, deltas, delay, first=0, lr=LR, mu=MU):
    """In place, from place ``first`` of a window on."""
    for place, delta in enumerate(deltas, first):
        delayed_step(
            theta,
            momentum,
            delta,
            lr=lr,
            mu=mu,
            delay=delay,
            place=place % delay,
            out_theta=theta,
            out_momentum=momentum,
            scratch=np.empty_like(theta),
        )


def nesterov(theta, momentum, delta):
    outer_step(
        "nesterov",
        theta,
        momentum,
        delta,
        lr=LR,
        mu=MU,
        out_theta=theta,
        out_momentum=momentum,
        scratch=np.empty_like(theta),
    )


@pytest.mark.parametrize("peers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 2e-15)])
def test_11_arrivals_of_one_theta_are_one_synchronous_step(peers, dtype, tolerance):
    rng = np.random.default_rng(peers)
    theta, momentum = rng.standard_normal((2, 1000)).astype(dtype)
    other, of_other = theta.copy(), momentum.copy()
    for _ in range(3):
        deltas = rng.standard_normal((peers, 1000)).astype(dtype)
        delayed(theta, momentum, deltas, peers)
        nesterov(other, of_other, deltas.mean(0, dtype=dtype))
        np.testing.assert_allclose(theta, other, rtol=0, atol=tolerance * 20)
        np.testing.assert_allclose(momentum, of_other, rtol=0, atol=tolerance * 20)


@pytest.mark.parametrize("peers", [1, 2, 4, 8])
def test_11_is_exact_where_numbers_are(peers):
    """Halves and whole numbers: nothing is rounded, so both come to the same bits."""
    rng = np.random.default_rng(peers)
    theta, momentum = rng.integers(-64, 64, (2, 500)).astype(np.float64)
    deltas = peers * rng.integers(-64, 64, (peers, 500)).astype(np.float64)
    other, of_other = theta.copy(), momentum.copy()
    delayed(theta, momentum, deltas, peers, lr=0.5, mu=0.25)
    of_other = 0.25 * of_other + deltas.mean(0)
    other -= 0.5 * (deltas.mean(0) + 0.25 * of_other)
    np.testing.assert_array_equal(theta, other)
    np.testing.assert_array_equal(momentum, of_other)


def test_the_algorithm_of_the_paper_in_fractions():
    """Its buffer of N pseudo-gradients is kept apart there; here it is in the momentum."""
    delay, lr, mu = 3, Fraction(7, 10), Fraction(9, 10)
    deltas = [Fraction(n * n % 11 - 5, 3) for n in range(14)]
    theta, m, buffer = Fraction(2), Fraction(0), Fraction(0)
    ours, momentum = np.array([2.0]), np.array([0.0])
    for number, g in enumerate(deltas):
        buffer += g
        if number % delay == delay - 1:
            m, buffer = mu * m + buffer / delay, Fraction(0)
            theta -= lr * (mu * m + g / delay)
        else:
            theta -= lr * g / delay
        delayed(ours, momentum, [np.array([float(g)])], delay, first=number)
        assert ours[0] == pytest.approx(float(theta), abs=1e-13)
        if number % delay == delay - 1:
            assert momentum[0] == pytest.approx(float(m), abs=1e-13)


def test_the_place_in_the_window_is_that_of_the_rounds_number():
    """Also of somebody who begins in the middle, with the state of theta and momentum alone."""
    spec, codec = RunSpec(sync_every=1, outer_delay=3, codec="float32"), get_codec("float32")
    rng = np.random.default_rng(5)
    deltas = rng.standard_normal((9, 40)).astype(np.float32)
    theta, momentum = np.ones((2, 40), np.float32)
    expected = theta.copy(), momentum.copy()
    delayed(*expected, deltas, 3)
    steps = OuterStep(spec, 40)
    for number, delta in enumerate(deltas, 2):  # round 1 is INIT
        steps(
            codec,
            delta.view(np.uint8),
            theta,
            momentum.view(np.uint8),
            round_number=number,
            contributors=1,
        )
        if number == 6:
            joined = theta.copy(), momentum.copy()
    late = OuterStep(spec, 40)
    for number, delta in enumerate(deltas[5:], 7):
        part, kept = joined[0], joined[1].view(np.uint8)
        late(codec, delta.view(np.uint8), part, kept, round_number=number, contributors=1)
    for mine, other, plain in zip((theta, momentum), joined, expected, strict=True):
        assert mine.tobytes() == other.tobytes() == plain.tobytes()


def test_each_fragment_has_windows_of_its_own():
    spec = RunSpec(sync_every=1, outer_delay=2, fragments=3, codec="float32")
    codec, one = get_codec("float32"), np.ones(1, np.float32)
    found = []
    for number in range(2, 2 + 6):
        theta, momentum = np.zeros((2, 1), np.float32)
        kept = momentum.view(np.uint8)
        OuterStep(spec, 1)(
            codec, one.view(np.uint8), theta, kept, round_number=number, contributors=1
        )
        found.append(theta[0] < -0.5)  # with momentum: 0.35 and 0.315
    assert found == [False] * 3 + [True] * 3


@pytest.mark.parametrize("place", range(3))
def test_other_buffers_get_the_same_bits_and_nothing_is_allocated(place):
    arrays = np.random.default_rng(6).standard_normal((6, 262_144)).astype(np.float32)
    theta, momentum, delta, out_theta, out_momentum, scratch = arrays
    before = arrays[:3].copy()
    options = {"lr": LR, "mu": MU, "delay": 3, "place": place, "scratch": scratch}
    tracemalloc.start()
    delayed_step(theta, momentum, delta, out_theta=out_theta, out_momentum=out_momentum, **options)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 1024
    np.testing.assert_array_equal(arrays[:3], before)
    delayed_step(theta, momentum, delta, out_theta=theta, out_momentum=momentum, **options)
    np.testing.assert_array_equal(theta, out_theta)
    np.testing.assert_array_equal(momentum, out_momentum)


@pytest.mark.parametrize(("delay", "converges"), [(4, True), (1, False)])
def test_of_peers_that_come_in_turn_one_momentum_for_all_is_stable(delay, converges):
    """Each of four goes 0.3 of the way from where it began to the optimum, which is 0. With a
    momentum in every round that diverges from 0.07 on, while DiLoCo converges for all up to 1."""
    theta, momentum = np.array([1.0]), np.array([0.0])
    anchors = [1.0] * 4
    for number in range(400):
        delayed(theta, momentum, [np.array([0.3 * anchors[number % 4]])], delay, first=number)
        anchors[number % 4] = theta[0]
    assert (abs(theta[0]) < 0.01) == converges
