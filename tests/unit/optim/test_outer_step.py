from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from atoll.optim.outer_step import outer_step

RATES = [(0.7, 0.9), (0.4, 0.9), (1.0, 0.0), (0.7, 0.6), (1.0, 0.5)]


def steps(theta, deltas, lr, mu):
    """Double-buffered, as a daemon does it: yields θ after each step."""
    momentum, scratch = np.zeros_like(theta), np.empty_like(theta)
    for delta in deltas:
        new_theta, new_momentum = np.empty_like(theta), np.empty_like(theta)
        outer_step(
            "nesterov",
            theta,
            momentum,
            delta,
            lr=lr,
            mu=mu,
            out_theta=new_theta,
            out_momentum=new_momentum,
            scratch=scratch,
        )
        theta, momentum = new_theta, new_momentum
        yield theta


@pytest.mark.parametrize(("lr", "mu"), RATES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (np.float32, 2e-6),
        (np.float64, 1e-12),
    ],
)
@pytest.mark.parametrize("constant", [True, False])
def test_equals_torch_sgd_nesterov(lr, mu, dtype, tolerance, constant):
    """Acceptance test 3."""
    rng = np.random.default_rng(1)
    theta = rng.standard_normal(257).astype(dtype)
    deltas = [rng.standard_normal(257).astype(dtype) for _ in range(12)]
    if constant:
        deltas = deltas[:1] * len(deltas)
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    sgd = torch.optim.SGD([parameter], lr=lr, momentum=mu, nesterov=mu > 0)
    for ours, delta in zip(steps(theta, deltas, lr, mu), deltas, strict=True):
        parameter.grad = torch.from_numpy(delta)
        sgd.step()
        expected = parameter.detach().numpy()
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(("lr", "mu"), RATES)
def test_first_step_is_lr_times_one_plus_mu(lr, mu):
    delta = np.array([1.0, -2.0, 0.0, 1e-3])
    (theta,) = steps(np.zeros(4), [delta], lr, mu)
    np.testing.assert_allclose(theta, -lr * (1 + mu) * delta, rtol=1e-15)


def test_constant_delta_tends_to_the_geometric_limit():
    *_, before, after = steps(np.zeros(1), [np.ones(1)] * 400, 0.7, 0.9)
    np.testing.assert_allclose(before - after, 7.0, rtol=1e-12)


def test_rate_one_without_momentum_replaces_theta_by_the_mean():
    theta, mean = np.array([3.0, -1.0]), np.array([2.5, 4.0])
    (new,) = steps(theta, [theta - mean], 1.0, 0.0)
    np.testing.assert_array_equal(new, mean)


def test_chunks_and_in_place_give_the_same_bits_and_leave_inputs_alone():
    rng = np.random.default_rng(2)
    theta, momentum, delta = rng.standard_normal((3, 1000)).astype(np.float32)
    before = theta.copy(), momentum.copy(), delta.copy()
    new = np.empty((2, 1000), np.float32)
    args = {"lr": 0.7, "mu": 0.9}
    for lo, hi in [(0, 256), (256, 999), (999, 1000)]:
        outer_step(
            "nesterov",
            theta[lo:hi],
            momentum[lo:hi],
            delta[lo:hi],
            **args,
            out_theta=new[0, lo:hi],
            out_momentum=new[1, lo:hi],
            scratch=np.empty(hi - lo, np.float32),
        )
    for array, copy in zip((theta, momentum, delta), before, strict=True):
        np.testing.assert_array_equal(array, copy)
    outer_step(
        "nesterov",
        theta,
        momentum,
        delta,
        **args,
        out_theta=theta,
        out_momentum=momentum,
        scratch=np.empty_like(theta),
    )
    np.testing.assert_array_equal(theta, new[0])
    np.testing.assert_array_equal(momentum, new[1])


def test_allocates_nothing_of_the_size_of_a_chunk():
    arrays = np.zeros((6, 262_144), np.float32)
    theta, momentum, delta, out_theta, out_momentum, scratch = arrays
    tracemalloc.start()
    outer_step(
        "nesterov",
        theta,
        momentum,
        delta,
        lr=0.7,
        mu=0.9,
        out_theta=out_theta,
        out_momentum=out_momentum,
        scratch=scratch,
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 1024
