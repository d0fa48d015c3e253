"""NoLoCo's arithmetic (acceptance test 6), and who is in which group."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from atoll.collectives.errors import ConfigError
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.methods.gossip import (
    GossipState,
    always_stable,
    check_stable,
    gossip_bound,
    group_of,
    groups,
    local_change,
)

F32 = NDArray[np.float32]

# ---------------------------------------------------------------- groups


@pytest.mark.parametrize("members", [1, 2, 3, 5, 8, 17])
@pytest.mark.parametrize("size", [1, 2, 3, 32])
def test_groups_are_a_partition_of_which_the_last_may_be_smaller(members: int, size: int) -> None:
    for step in range(1, 30):
        found = groups(members, size, step)
        assert sorted(member for group in found for member in group) == list(range(members))
        assert all(list(group) == sorted(group) for group in found)
        sizes = [len(group) for group in found]
        assert sizes == [size] * (members // size) + [members % size] * (members % size > 0)


@pytest.mark.parametrize("members", [6, 7])
def test_every_pair_meets_about_equally_often(members: int) -> None:
    steps = 4000
    met = Counter(
        pair
        for step in range(steps)
        for group in groups(members, 2, step)
        for pair in combinations(group, 2)
    )
    pairs = list(combinations(range(members), 2))
    expected = steps * (members // 2) / len(pairs)
    assert met.keys() == set(pairs)
    assert all(0.8 * expected < met[pair] < 1.2 * expected for pair in pairs)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("members", [1, 2, 5, 8])
def test_no_group_has_two_that_cannot_be_dialled(members: int, size: int) -> None:
    for outbound in (set(range(count)) for count in range(members + 1)):
        for step in range(1, 20):
            found = groups(members, size, step, outbound)
            assert sorted(member for group in found for member in group) == list(range(members))
            assert all(len(group) <= size for group in found)
            assert all(len(outbound.intersection(group)) <= 1 for group in found)
            mixed = sum(len(group) > 1 for group in found)
            assert mixed >= min(len(outbound), members - len(outbound)) * (size == 2)


def test_those_who_cannot_be_dialled_take_turns_with_those_who_can() -> None:
    steps, outbound = 3000, {0, 1, 2}
    met = Counter(group for step in range(steps) for group in groups(5, 2, step, outbound))
    pairs = [(one, other) for one in outbound for other in (3, 4)]
    assert all(0.8 * steps / 3 < met[pair] < 1.2 * steps / 3 for pair in pairs)
    assert (3, 4) not in met  # both are wanted by others in every step


def test_one_who_cannot_be_dialled_meets_all_others_and_these_each_other() -> None:
    met = Counter(group for step in range(3000) for group in groups(4, 2, step, {2}))
    assert met.keys() == set(combinations(range(4), 2))
    assert all(800 < count < 1200 for count in met.values())


def test_with_an_odd_number_everybody_is_alone_in_its_turn() -> None:
    alone = Counter(groups(5, 2, step)[-1] for step in range(2000))
    assert alone.keys() == {(member,) for member in range(5)}
    assert all(300 < count < 500 for count in alone.values())


def test_groups_are_the_same_everywhere_and_for_ever() -> None:
    """A change would split a run whose peers have different versions."""
    assert groups(8, 2, 1) == [(1, 6), (3, 4), (0, 2), (5, 7)]
    assert groups(8, 2, 1) != groups(8, 2, 2)


def test_a_group_is_named_in_the_order_of_the_members() -> None:
    names = ["d", "b", "a", "c"]  # in the order of their ids
    by_name = {me: group_of(me, names, 2, 7) for me in names}
    assert all(by_name[other] == group for group in by_name.values() for other in group)
    assert set(by_name.values()) == {tuple(names[i] for i in group) for group in groups(4, 2, 7)}
    assert group_of("x", names, 2, 7) == ("x",)  # in no view


# ---------------------------------------------------------------- acceptance test 6


def heavy_ball(phi: F32, deltas: list[F32], lr: float, mu: float) -> F32:
    """torch's, with old minus new as the gradient."""
    parameter = torch.nn.Parameter(torch.from_numpy(phi.copy()))
    outer = torch.optim.SGD([parameter], lr=lr, momentum=mu)
    for delta in deltas:
        parameter.grad = torch.from_numpy(-delta)
        outer.step()
    return parameter.detach().numpy()


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.7, 1.4])
def test_6_one_group_of_equals_is_heavy_ball_diloco_whatever_gamma_is(gamma: float) -> None:
    random = np.random.default_rng(0)
    start = random.standard_normal(50, np.float32)
    states = [state_of(start, gamma=gamma) for _ in range(4)]
    means = []
    for _ in range(12):
        deltas = [random.standard_normal(50, np.float32) for _ in states]
        means.append(np.mean(deltas, axis=0, dtype=np.float32))
        phis = [state.phi.copy() for state in states]
        for state, own in zip(states, phis, strict=True):
            assert state.step(deltas, phis, lambda own=own: own) == 0.0  # type: ignore[misc]
    expected = heavy_ball(start, means, lr=0.7, mu=0.5)
    for state in states:
        np.testing.assert_array_equal(state.phi, states[0].phi)
        np.testing.assert_allclose(state.phi, expected, rtol=0, atol=2e-5)


def test_6_alone_and_without_gamma_it_is_heavy_ball() -> None:
    random = np.random.default_rng(1)
    start = random.standard_normal(50, np.float32)
    deltas = [random.standard_normal(50, np.float32) for _ in range(12)]
    with_itself, without = state_of(start, gamma=0.0), state_of(start, gamma=0.0)
    for delta in deltas:
        own = with_itself.phi.copy()
        with_itself.step([delta], [own], lambda own=own: own)  # type: ignore[misc]
        without.step([delta])
    np.testing.assert_array_equal(with_itself.phi, without.phi)
    expected = heavy_ball(start, deltas, lr=0.7, mu=0.5)
    np.testing.assert_allclose(without.phi, expected, rtol=0, atol=2e-5)


def test_6_the_mean_of_all_replicas_does_not_depend_on_gamma() -> None:
    def means(gamma: float) -> NDArray[Any]:
        random = np.random.default_rng(2)
        states = [state_of(random.standard_normal(40, np.float32), gamma) for _ in range(6)]
        found = []
        for step in range(15):
            exchange(states, step, [random.standard_normal(40, np.float32) for _ in states])
            found.append(np.mean([state.phi for state in states], axis=0))
        return np.array(found)

    with_it, without = means(0.7), means(0.0)
    np.testing.assert_allclose(with_it, without, rtol=0, atol=1e-5)
    assert np.abs(without).max() > 1.0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_6_it_descends_and_the_sign_of_the_paper_s_equation_2_does_not(sign: float) -> None:
    """Replicas of f(x) = |x - target|^2 / 2, ten local steps of gradient descent each."""
    target, replicas = np.float32(3.0), 8
    random = np.random.default_rng(3)
    states = [state_of(random.standard_normal(4, np.float32), 0.7) for _ in range(replicas)]
    for step in range(60):
        moved = []
        for state in states:
            theta = state.phi.copy()
            for _ in range(10):
                theta -= np.float32(0.05) * (theta - target)
            moved.append(np.float32(sign) * (theta - state.phi))
        exchange(states, step, moved)
    worst = max(float(np.abs(state.phi - target).max()) for state in states)
    assert worst < 1e-3 if sign > 0 else worst > 1e3


@pytest.mark.parametrize(
    ("alpha", "size"), [(0.0, 2), (0.5, 2), (0.9, 2), (0.5, 4), (0.8, 3), (0.5, 1)]
)
def test_6_the_bound_is_where_the_disagreement_stops_to_shrink(alpha: float, size: int) -> None:
    """Its second moments (of φ, φ with δ, and δ) follow a linear map, whose largest eigenvalue is 1
    just there. For groups of one: as groups come to be nearly always of one."""
    bound = gossip_bound(alpha, size)
    share = 1 - 1 / size if size > 1 else 1e-4  # of a replica's deviation that its group sees
    assert growth(alpha, 0.98 * bound, share) < 1.0
    assert growth(alpha, bound, share) == pytest.approx(1.0, abs=1e-3)
    assert growth(alpha, 1.02 * bound, share) > 1.0


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.7, 0.9])
def test_6_so_it_is_in_a_simulation_of_many_replicas(alpha: float) -> None:
    bound = 2 * (1 - alpha**2)
    assert gossip_bound(alpha, 2) == pytest.approx(bound)
    assert simulated(alpha, 0.85 * bound) < 1e-3
    assert simulated(alpha, 1.15 * bound) > 1e3


def test_6_what_the_paper_allows_may_diverge() -> None:
    """Equation 74 would have alpha < gamma < sqrt(2 + alpha^2), whatever alpha is."""
    assert simulated(0.9, 0.95) > 1e3
    assert simulated(0.9, 0.3) < 1e-3  # which it refuses


def test_below_the_lowest_bound_replicas_stay_together_though_partners_fail() -> None:
    assert always_stable(0.5, 0.7)
    assert not always_stable(0.5, 1.1)
    assert simulated(0.5, 0.9, fails=0.9) < 1e-3
    assert simulated(0.5, 1.4) < 1e-3
    assert simulated(0.5, 1.4, fails=0.9) > 1e3


def test_what_diverges_is_refused_with_the_bound() -> None:
    check_stable(0.5, 0.7, 2)
    check_stable(0.9, 0.3, 2)
    check_stable(0.9, 0.7, 1)  # nobody to drift apart from
    check_stable(0.5, 1.6, 4)
    with pytest.raises(ConfigError, match=r"gossip=0.7 .* between 0 and 0.38,"):
        check_stable(0.9, 0.7, 2)
    with pytest.raises(ConfigError, match=r"between 0 and 1.5,"):
        check_stable(0.5, 1.5, 2)
    with pytest.raises(ConfigError, match="apart"):
        check_stable(0.5, 0.0, 2)


# ---------------------------------------------------------------- the rest


def test_the_difference_is_new_minus_old_as_the_model_has_rounded_it() -> None:
    manifest = Manifest.of([Parameter("a", (3, 2)), Parameter("b", (5,), "bfloat16")])
    phi = np.linspace(0.1, 2.0, 11, dtype=np.float32)
    rounded = phi.copy()
    rounded[6:] = torch.from_numpy(phi[6:]).bfloat16().float().numpy()
    theta = rounded.copy()
    local_change(manifest, phi, theta)
    assert not theta.any()
    theta = rounded + np.float32(0.5)
    local_change(manifest, phi, theta)
    np.testing.assert_allclose(theta, 0.5, rtol=1e-6)


@pytest.mark.parametrize("count", [2, 3, 16])
def test_the_deviation_between_replicas_is_estimated_from_a_group(count: int) -> None:
    random = np.random.default_rng(4)
    phis = list(0.25 * random.standard_normal((count, 200_000), np.float32))
    state = state_of(phis[0], 0.7)
    zeros = [np.zeros_like(phi) for phi in phis]
    spread = state.step(zeros, phis, lambda: phis[0])
    assert spread == pytest.approx(0.25, rel=0.02)


def test_the_order_of_a_group_decides_the_bits() -> None:
    parts = [np.array([x], np.float32) for x in (1e8, 1.0, -1e8)]
    forth, back = state_of(np.zeros(1, np.float32), 0.7), state_of(np.zeros(1, np.float32), 0.7)
    forth.step(parts)
    back.step(parts[::-1])
    assert forth.phi[0] == 0.0
    assert back.phi[0] == 0.0
    forth.step([parts[0], parts[2], parts[1]])
    assert forth.phi[0] > 0.2


def test_a_step_needs_somebody() -> None:
    with pytest.raises(ConfigError, match="nothing"):
        state_of(np.zeros(1, np.float32), 0.7).step([])


def state_of(phi: F32, gamma: float, alpha: float = 0.5) -> GossipState:
    state = GossipState(phi.size, momentum=alpha, lr=0.7, gossip=gamma)
    state.phi[:] = phi
    return state


def exchange(states: list[GossipState], step: int, deltas: list[F32]) -> None:
    before = [state.phi.copy() for state in states]
    for group in groups(len(states), 2, step):
        for member in group:
            parts = [deltas[i] for i in group], [before[i] for i in group]
            states[member].step(*parts, lambda own=before[member]: own)  # type: ignore[misc]


def growth(alpha: float, gamma: float, share: float) -> float:
    """The largest eigenvalue of the map of (E φ², E φδ, E δ²) from step to step, for deviations
    from the mean of infinitely many replicas."""
    s, g = share, gamma
    momentum = np.array([g * g * s, -2 * alpha * g * s, alpha**2])
    mixed = np.array([-g * s, alpha, 0.0])  # E φ δ', with the old φ
    phi = np.array([1.0, 0.0, 0.0]) + 2 * mixed + momentum
    return float(np.abs(np.linalg.eigvals(np.stack([phi, mixed + momentum, momentum]))).max())


def simulated(alpha: float, gamma: float, fails: float = 0.0) -> float:
    """How the mean square distance of 128 replicas from their mean has changed after many steps in
    pairs, of which a part ``fails``."""
    random = np.random.default_rng(5)
    members, numbers = 128, 64
    phi = random.standard_normal((members, numbers))
    momentum = np.zeros_like(phi)
    before = np.square(phi - phi.mean(0)).mean()
    for step in range(1500):
        pulled = np.zeros_like(phi)
        for one, other in groups(members, 2, step):
            if random.random() >= fails:
                half = (phi[one] - phi[other]) / 2
                pulled[one], pulled[other] = half, -half
        momentum = alpha * momentum - gamma * pulled
        phi = phi + momentum
        now = np.square(phi - phi.mean(0)).mean()
        if not 1e-6 < now / before < 1e6:
            break
    return float(now / before)
