"""Deep gradient compression: against a loop over elements, against SGD, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from harness.gradients import averages, manifest_of

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim import DGC
from atoll.optim.every_step.exchange import Exchanged, Given
from atoll.optim.manifest import Manifest, Parameter

SIZE = 10 * 20
ONE = manifest_of((10, 20))
BOTH = Manifest.of([Parameter("bias", (30,)), Parameter("weight", (10, 20))])


def normal(n: int, s: int, size: int = SIZE) -> F32:
    return np.random.default_rng((n, s)).standard_normal(size).astype(np.float32)


def plainly(workers: int, steps: int, m: float, kept: int, nesterov: bool) -> list[F32]:
    """The same, one element after the other."""
    u, v = np.zeros((2, workers, SIZE), np.float32)
    means = []
    for step in range(steps):
        mean = np.zeros(SIZE, np.float32)
        for n in range(workers):
            g = normal(n, step)
            for i in range(SIZE):
                if nesterov:
                    u[n, i] = np.float32(m) * (u[n, i] + g[i])
                    v[n, i] = v[n, i] + u[n, i] + g[i]
                else:
                    u[n, i] = np.float32(m) * u[n, i] + g[i]
                    v[n, i] = v[n, i] + u[n, i]
            for i in sorted(range(SIZE), key=lambda i: -abs(v[n, i]))[:kept]:
                mean[i] += v[n, i]
                u[n, i] = v[n, i] = 0
        means.append(mean / np.float32(workers))
    return means


@pytest.mark.parametrize("nesterov", [False, True])
def test_it_is_the_plain_loop(nesterov: bool) -> None:
    found = averages(
        lambda worker: DGC(density=0.05, momentum=0.9, nesterov=nesterov), ONE, normal, range(12), 3
    )
    for mine, expected in zip(found[0], plainly(3, 12, 0.9, 10, nesterov), strict=True):
        assert mine.tobytes() == expected.tobytes()
        assert 10 <= np.count_nonzero(mine) <= 30
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found[0], found[2], strict=True))


def test_all_of_it_is_the_mean_without_momentum() -> None:
    """What is sent is forgotten, so where everything is sent there is no momentum."""
    found = averages(lambda worker: DGC(density=1.0), ONE, normal, range(4))
    for step, mean in enumerate(found[0]):
        np.testing.assert_allclose(mean, (normal(0, step) + normal(1, step)) / 2, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_what_is_sent_late_has_the_momentum_that_it_would_have_had(nesterov: bool) -> None:
    """Ten elements are so large that only they are sent, until all gradients are zero. Then each of
    the others is sent once, and is what SGD with momentum has moved it by."""
    busy, quiet = 40, 65

    def gradient(n: int, s: int) -> F32:
        values = normal(n, s)
        values[:10] = 1e4
        return values * np.float32(s < busy)

    found = averages(
        lambda worker: DGC(density=0.05, momentum=0.5, nesterov=nesterov),
        ONE,
        gradient,
        range(quiet),
        workers=1,
    )
    parameter = torch.zeros(SIZE, requires_grad=True)
    sgd = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, nesterov=nesterov)
    for step in range(quiet):
        parameter.grad = torch.from_numpy(gradient(0, step))
        sgd.step()
    sent = np.array(found[0])
    assert (np.count_nonzero(sent[:, 10:], axis=0) == 1).all()
    late = np.argmax(sent != 0, axis=0) >= busy + 12  # when nothing is left of the velocity
    assert late.sum() > 50
    moved = -parameter.detach().numpy()
    np.testing.assert_allclose(sent.sum(axis=0)[late], moved[late], atol=1e-3)


@pytest.mark.parametrize("nesterov", [False, True])
def test_vectors_have_momentum_after_the_mean(nesterov: bool) -> None:
    size = BOTH.elements

    def gradient(n: int, s: int) -> F32:
        return normal(n, s, size)

    found = averages(lambda worker: DGC(nesterov=nesterov), BOTH, gradient, range(5))
    parameter = torch.zeros(30, requires_grad=True)
    sgd = torch.optim.SGD([parameter], lr=1.0, momentum=0.9, nesterov=nesterov)
    for step in range(5):
        mean = (gradient(0, step) + gradient(1, step)) / 2
        before = parameter.detach().clone()
        parameter.grad = torch.from_numpy(mean[:30].copy())
        sgd.step()
        moved = (before - parameter.detach()).numpy()
        np.testing.assert_allclose(found[0][step][:30], moved, atol=1e-5)


def test_each_trainer_clips_to_its_share() -> None:
    """A norm of 2 for all four, so 1 for each; before there was anybody else, 2."""
    large = averages(
        lambda worker: DGC(density=1.0, clip=2.0), ONE, lambda n, s: 50 * normal(n, s), range(3), 4
    )
    for step, most in [(0, 2.0), (1, 1.0), (2, 1.0)]:
        expected = np.mean(
            [normal(n, step) / np.linalg.norm(normal(n, step)) * most for n in range(4)], axis=0
        )
        np.testing.assert_allclose(large[0][step], expected, atol=1e-6)
    small = averages(lambda n: DGC(density=1.0, clip=1e3), ONE, normal, range(2))
    np.testing.assert_allclose(small[0][1], (normal(0, 1) + normal(1, 1)) / 2, atol=1e-6)


def test_the_warm_up_is_that_of_the_paper() -> None:
    dgc = DGC(density=0.001, warm_up=10)
    found = [dgc.density_at(step) for step in (0, 9, 10, 20, 30, 39, 40, 1000)]
    assert found == [0.25, 0.25, 1 / 16, 1 / 64, 1 / 256, 1 / 256, 0.001, 0.001]
    assert DGC(density=0.1, warm_up=5).density_at(5) == 0.1
    assert DGC(density=0.1).density_at(0) == 0.1
    sent = averages(lambda n: DGC(density=0.01, warm_up=1), ONE, normal, range(6), workers=1)
    assert [np.count_nonzero(mean) for mean in sent[0]] == [50, 12, 3, 2, 2, 2]


def test_who_has_nothing_to_give_keeps_what_it_has() -> None:
    workers = [DGC(density=0.05) for _ in range(2)]
    kept: list[bytes] = []

    def gradient(n: int, s: int) -> F32:
        if n == 1:
            kept.append(workers[1]._u.tobytes() + workers[1]._v.tobytes())
        return normal(n, s)

    found = averages(lambda n: workers[n], ONE, gradient, range(3), absent=[(1, 1)])
    assert kept[0] != kept[1] == kept[2]
    assert np.count_nonzero(found[0][1]) == 10
    nobody = averages(lambda n: DGC(), ONE, normal, [0], absent=[(0, 0), (1, 0)])
    assert nobody == [[None], [None]]
    workers[0].forget()
    assert not workers[0]._u.any()
    assert not workers[0]._v.any()


# ---------------------------------------------------------------- from others


class Alone:
    """An exchange in which somebody else gives these bytes."""

    counts = True

    def __init__(self, data: bytes) -> None:
        self.data = data

    def gather(self, data: bytes) -> list[Given]:
        return [Given("me", data, True), Given("other", self.data, True)]

    def total(self, vector: F32, codec: str = "float32") -> Exchanged:
        return Exchanged(vector, 2)


def test_malformed_parts_are_refused_and_change_nothing() -> None:
    places, values = np.arange(4, dtype="<u4"), np.ones(4, "<f4")
    fine = places.tobytes() + values.tobytes()
    dgc = DGC(density=0.02)
    dgc.begin(ONE, "float32", "me")
    assert dgc.average(normal(0, 0), 0, Alone(fine)) is not None
    kept = dgc._v.tobytes()
    for wrong, why in [
        (b"", "0 bytes instead of 32"),
        (fine[:-1], "31 bytes"),
        (places[::-1].tobytes() + values.tobytes(), "repeated"),
        (np.array([0, 1, 1, 2], "<u4").tobytes() + values.tobytes(), "repeated"),
        (np.array([0, 1, 2, 200], "<u4").tobytes() + values.tobytes(), "not there"),
        (places.tobytes() + np.array([1, math.nan, 1, 1], "<f4").tobytes(), "NaN"),
        (places.tobytes() + np.array([1, math.inf, 1, 1], "<f4").tobytes(), "infinity"),
    ]:
        with pytest.raises(RemoteProtocolError, match=why):
            dgc.average(normal(0, 1), 1, Alone(wrong))
    assert dgc._v.tobytes() == kept


def test_numbers_that_cannot_be_are_refused() -> None:
    for wrong in [{"density": 0.0}, {"momentum": 1.0}, {"clip": -1.0}, {"warm_up": -1}]:
        with pytest.raises(ConfigError, match="DGC"):
            DGC(**wrong)
