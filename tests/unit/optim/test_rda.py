"""RDA (acceptance test 12): alone, and as a collective of the workers of a swarm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, StateError
from atoll.optim import Swarm, rda, rda_all_reduce
from atoll.optim.rda import TRIES_MAX
from atoll.peer.client.session import Reduced

SHAPES = {"embedding.weight": (8, 5), "blocks.0.weight": (30, 7), "head": (11,), "scalar": ()}


def normal(seed: int, shape: tuple[int, ...] = (200,)) -> F32:
    values: F32 = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return values


def test_12_one_learner_is_the_identity() -> None:
    for weight in (1.0, 37.5):
        np.testing.assert_allclose(rda([normal(0)], [weight]), normal(0), rtol=3e-7)


def test_12_two_orthogonal_ones_of_norm_two_have_norm_two() -> None:
    a, b = np.zeros((2, 4), np.float32)
    a[0], b[2] = 2.0, -2.0
    found = rda([a, b], [1.0, 1.0])
    np.testing.assert_allclose(found, np.array([1, 0, -1, 0]) * np.sqrt(2), rtol=1e-6)
    assert np.linalg.norm((a + b) / 2) < 1.5  # which the mean has not


@pytest.mark.parametrize(("factor", "rest"), [(-1.0, 0.0), (-0.5, 0.25)])
def test_12_of_opposite_ones_it_is_the_average(factor: float, rest: float) -> None:
    found = rda([normal(0), np.float32(factor) * normal(0)], [1.0, 1.0])
    np.testing.assert_allclose(found, np.float32(rest) * normal(0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [5.0, 1.0, 0.25], [1.0, 0.0, 2.0]])
def test_it_is_the_formula(weights: list[float]) -> None:
    parts = [normal(n) * np.float32(1 + 3 * n) for n in range(3)]
    wide = [part.astype(np.float64) for part in parts]
    lengths = [np.linalg.norm(part) for part in wide]
    directions = sum(w * v / n for w, v, n in zip(weights, wide, lengths, strict=True))
    length = np.dot(weights, lengths) / sum(weights)
    expected = length * directions / np.linalg.norm(directions)
    np.testing.assert_allclose(rda(parts, weights), expected, rtol=2e-6, atol=1e-6)


def test_its_length_does_not_fall_with_the_number_of_peers() -> None:
    for peers in (2, 8, 32):
        parts = [normal(n, (4000,)) for n in range(peers)]
        mean = np.linalg.norm(np.mean(parts, axis=0))
        assert np.linalg.norm(rda(parts, [1.0] * peers)) == pytest.approx(4000**0.5, rel=0.02)
        assert mean == pytest.approx((4000 / peers) ** 0.5, rel=0.1)


def test_who_has_nothing_to_say_has_no_direction() -> None:
    nothing = np.zeros(200, np.float32)
    np.testing.assert_allclose(rda([normal(0), nothing], [1.0, 1.0]), normal(0) / 2, rtol=1e-6)
    np.testing.assert_array_equal(rda([nothing, nothing], [1.0, 1.0]), nothing)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [1.0, np.inf], [np.nan, 1.0]])
def test_weights_that_give_no_mean_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="weight"):
        rda([normal(0), normal(1)], weights)


# ---------------------------------------------------------------- as a collective


def tensors_of(worker: int) -> dict[str, F32]:
    found = {
        name: np.array(normal(10 * worker + n, s)) for n, (name, s) in enumerate(SHAPES.items())
    }
    found["head"] = normal(7, SHAPES["head"]) * np.float32((-1) ** worker)  # which cancel
    return found


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_workers_of_a_swarm_get_it_of_each_tensor(codec: str) -> None:
    weights = [1.0, 3.0, 1.0, 1.0]
    swarm = Swarm(4)
    found = swarm.run(
        lambda s: rda_all_reduce(
            s, tensors_of(s.number), weights[s.number], plain=("embedding",), codec=codec
        )
    )
    every = [tensors_of(worker) for worker in range(4)]
    error = 1e-6 if codec == "float32" else 0.02
    for name, shape in SHAPES.items():
        parts = [np.atleast_1d(tensors[name]) for tensors in every]
        expected = rda(parts, weights)
        if name == "embedding.weight":
            expected = np.average(parts, axis=0, weights=weights)
        for mine in found:
            assert mine[name].tobytes() == found[0][name].tobytes()
            assert mine[name].shape == shape
            np.testing.assert_allclose(np.atleast_1d(mine[name]), expected, rtol=0, atol=3 * error)


def test_one_whose_directions_cancel_is_averaged() -> None:
    """It costs one more all-reduce, of such tensors only."""

    def each(session: Any) -> tuple[dict[str, F32], int]:
        found = rda_all_reduce(session, tensors_of(session.number))
        return found, session.round

    ((first, rounds), _) = Swarm(2).run(each)
    assert rounds == 3
    np.testing.assert_array_equal(first["head"], np.zeros(SHAPES["head"], np.float32))
    assert np.abs(first["blocks.0.weight"]).max() > 0.1

    swarm = Swarm(2)
    swarm.run(lambda s: rda_all_reduce(s, {"w": normal(s.number)}))
    assert swarm.round == 2
    assert swarm.encoded_bytes == 2 * 4 * (200 + 2)  # as for a mean, and two numbers


class Leaving:
    """A session of which another trainer goes in the middle of the first ``times`` averages."""

    def __init__(self, session: Any, times: int) -> None:
        self._session, self._left, self.calls = session, times, 0

    def all_reduce(self, tensor: Any, op: str = "mean", *, codec: str = "float32") -> Reduced:
        self.calls += 1
        reduced = self._session.all_reduce(tensor, op, codec=codec)
        if self.calls % 2 and self._left:
            self._left -= 1
            return Reduced(reduced.value, (*reduced.peers, "gone"), reduced.round)
        return reduced


def test_if_somebody_goes_in_between_all_begin_anew() -> None:
    def each(session: Any, times: int) -> tuple[F32, int]:
        leaving: Any = Leaving(session, times)
        return rda_all_reduce(leaving, {"w": normal(session.number)})["w"], leaving.calls

    ((found, calls), _) = Swarm(2).run(lambda session: each(session, 2))
    assert calls == 6
    ((expected, _), _) = Swarm(2).run(lambda session: each(session, 0))
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(StateError, match="in a row"):
        Swarm(2).run(lambda session: each(session, TRIES_MAX))
