"""EF21, weighted EF21 and EControl: what the mean is, that they converge, who comes and goes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from harness.gradients import averages, manifest_of

from atoll.collectives import feedback
from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim.every_step.exchange import Exchanged, Given
from atoll.optim.experimental import EF21, EControl
from atoll.optim.experimental.ef21 import Estimates

SIZE = 128
ONE = manifest_of((8, 16))
MAKERS: dict[str, Callable[[int], Estimates]] = {
    "ef21": lambda n: EF21(),
    "weighted": lambda n: EF21(codec="sign", smoothness=1.0 + n),
    "momentum": lambda n: EF21(eta=0.3),
    "econtrol": lambda n: EControl(eta=0.01),
}
each = pytest.mark.parametrize("name", MAKERS)
of_the_gradient_itself = pytest.mark.parametrize("name", ["ef21", "weighted", "econtrol"])


def normal(n: int, s: int) -> F32:
    return np.random.default_rng((n, s)).standard_normal(SIZE).astype(np.float32)


# ---------------------------------------------------------------- what the mean is


@each
def test_the_mean_is_that_of_the_estimates(name: str) -> None:
    workers = [MAKERS[name](n) for n in range(3)]
    found = averages(lambda n: workers[n], ONE, normal, range(30), 3)
    assert all(a.tobytes() == b.tobytes() == c.tobytes() for a, b, c in zip(*found, strict=True))
    weights = np.array([worker.smoothness for worker in workers])
    estimates = [worker._memory.arrays["estimate"] for worker in workers]
    expected = np.average(estimates, axis=0, weights=weights)
    np.testing.assert_allclose(found[0][-1], expected, atol=1e-5)
    assert found[0][-1].tobytes() == workers[1].shared[0].tobytes()


@each
def test_the_first_step_is_exact(name: str) -> None:
    found = averages(MAKERS[name], ONE, normal, [0], 3)
    exact = np.mean([normal(n, 0) for n in range(3)], axis=0)
    np.testing.assert_allclose(found[0][0], exact, atol=1e-6)


@each
def test_gradients_that_stay_the_same_are_found_out(name: str) -> None:
    """Of other trainers than those of the first step, so that estimates begin far from them."""

    def gradient(n: int, s: int) -> F32:
        return normal(n, 0) if s else normal(n, 1)

    exact = np.mean([normal(n, 0) for n in range(3)], axis=0)
    found = averages(MAKERS[name], ONE, gradient, range(400), 3)
    away = [float(np.linalg.norm(mean - exact)) for mean in found[0]]
    assert away[1] > 3
    assert min(away[-50:]) < 0.02 * away[1]


def test_econtrol_with_eta_0_is_ef21() -> None:
    one = averages(lambda n: EF21(), ONE, normal, range(10))
    other = averages(lambda n: EControl(eta=0.0), ONE, normal, range(10))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(one[0], other[0], strict=True))


def test_equal_weights_are_none() -> None:
    one = averages(lambda n: EF21(), ONE, normal, range(10), 4)
    other = averages(lambda n: EF21(smoothness=8.0), ONE, normal, range(10), 4)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(one[0], other[0], strict=True))


def test_an_average_of_gradients_is_estimated() -> None:
    """EF21 with momentum, and a codec that loses nothing: v <- (1 - eta) v + eta g."""
    found = averages(lambda n: EF21(codec="float32", eta=0.25), ONE, normal, range(20))
    v = [normal(n, 0) for n in range(2)]
    for step in range(1, 20):
        v = [np.float32(0.75) * v[n] + np.float32(0.25) * normal(n, step) for n in range(2)]
        np.testing.assert_allclose(found[1][step], (v[0] + v[1]) / 2, atol=1e-5)


# ---------------------------------------------------------------- step sizes of the papers


class Losses:
    """f_i(x) = 1/2 (x - c_i)^T A_i (x - c_i), with A_i diagonal: L_i is its largest element."""

    def __init__(self, workers: int) -> None:
        random = np.random.default_rng(0)
        scales = 10.0 ** np.arange(workers)
        self.a = random.uniform(0.5, 1, (workers, SIZE)) * scales[:, None]
        self.c = random.standard_normal((workers, SIZE))
        self.best = (self.a * self.c).mean(axis=0) / self.a.mean(axis=0)
        self.smoothness = self.a.max(axis=1)
        self.whole = float(self.a.mean(axis=0).max())

    def gradient(self, n: int, x: F32) -> F32:
        return (self.a[n] * (x - self.c[n])).astype(np.float32)


def descend(
    make: Callable[[int], Estimates], losses: Losses, rate: float, steps: int
) -> list[float]:
    """Distances from the optimum, of gradient descent on the mean of the losses."""
    workers = len(losses.a)
    x = [np.zeros(SIZE, np.float32) for _ in range(workers)]
    away: list[float] = []

    class Descending(EF21 if isinstance(make(0), EF21) else EControl):  # type: ignore[misc]
        def average(self, gradient: F32, step: int, exchange: object) -> F32 | None:
            mean = super().average(gradient, step, exchange)
            n = int(self._name.rpartition("-")[2])
            x[n] = x[n] - np.float32(rate) * mean
            if n == 0:
                away.append(float(np.linalg.norm(x[0] - losses.best)))
            return mean

    def making(n: int) -> Estimates:
        made = make(n)
        return Descending(**{f.name: getattr(made, f.name) for f in dataclasses.fields(made)})

    averages(making, ONE, lambda n, s: losses.gradient(n, x[n]), range(steps), workers)
    return away


def sent_part(codec: str) -> float:
    """alpha, of what a codec makes of Gaussian values."""
    return 1 - get_codec(codec).contract.errors.gauss


def test_weighted_ef21_converges_at_the_step_size_of_the_mean_smoothness() -> None:
    """Three trainers whose losses differ by factors of ten, and 1 / (L + L_AM xi(alpha))."""
    losses, alpha = Losses(3), sent_part("int2")
    xi = (1 + math.sqrt(1 - alpha)) / alpha - 1
    rate = 1 / (losses.whole + float(losses.smoothness.mean()) * xi)
    away = descend(
        lambda n: EF21(codec="int2", smoothness=float(losses.smoothness[n])), losses, rate, 200
    )
    assert away[50] < 1e-2 * away[0]
    assert away[-1] < 1e-4 * away[0]


@pytest.mark.parametrize("name", ["ef21", "econtrol"])
def test_a_64th_of_the_gradient_is_enough(name: str) -> None:
    """Where the largest elements alone, without a memory, never get there."""
    losses = Losses(2)
    rate = 0.02 / losses.whole
    away = descend(MAKERS[name], losses, rate, 600)
    assert away[-1] < 1e-2 * away[0]
    x, memoryless = np.zeros(SIZE, np.float32), get_codec("topk")
    data, part = np.empty(memoryless.encoded_bytes(SIZE), np.uint8), np.empty(SIZE, np.float32)
    for _ in range(600):
        for n in range(2):
            memoryless.encode(losses.gradient(n, x), data)
            memoryless.decode(data, part)
            x = x - np.float32(rate / 2) * part
    assert np.linalg.norm(x - losses.best) > 0.1 * away[0]


def test_the_residual_of_econtrol_stays_bounded() -> None:
    """By the bound of plain feedback, which sends all of its memory at once."""
    workers = [EControl(codec="int4", eta=0.1) for _ in range(2)]
    averages(lambda n: workers[n], ONE, normal, range(200))
    largest = max(float(np.linalg.norm(normal(n, s))) for n in range(2) for s in range(200))
    alpha = get_codec("int4").contract.alpha
    for worker in workers:
        residual = float(np.linalg.norm(worker._memory.arrays["residual"]))
        assert 0 < residual <= feedback.residual_bound(alpha, largest)


# ---------------------------------------------------------------- who comes and goes


@each
def test_who_has_nothing_to_give_stays_in_the_mean_as_it_was(name: str) -> None:
    workers = [MAKERS[name](n) for n in range(3)]
    found = averages(
        lambda n: workers[n], ONE, normal, range(6), 3, absent=[(1, 3), (0, 4), (1, 4), (2, 4)]
    )
    assert found[0][3].tobytes() != found[0][2].tobytes()
    assert found[0][4] is None
    weights = [worker.smoothness for worker in workers]
    estimates = [worker._memory.arrays["estimate"] for worker in workers]
    expected = np.average(estimates, axis=0, weights=weights)
    np.testing.assert_allclose(found[2][5], expected, atol=1e-5)
    assert all(worker._members[0] == 3 for worker in workers)


@of_the_gradient_itself
def test_who_comes_later_makes_all_begin_anew(name: str) -> None:
    workers = [MAKERS[name](n) for n in range(3)]
    late = [(2, 0), (2, 1), (2, 2)]
    found = averages(lambda n: workers[n], ONE, normal, range(6), 3, absent=late)
    two = np.mean([normal(n, 0) for n in range(2)], axis=0)
    three = np.mean([normal(n, 3) for n in range(3)], axis=0)
    np.testing.assert_allclose(found[0][0], two, atol=1e-6)
    np.testing.assert_allclose(found[0][3], three, atol=1e-6)
    assert not np.allclose(found[0][2], (normal(0, 2) + normal(1, 2)) / 2, atol=0.1)
    assert not np.allclose(found[0][4], np.mean([normal(n, 4) for n in range(3)], axis=0), atol=0.1)
    assert all(worker._members[0] == 3 for worker in workers)


@of_the_gradient_itself
def test_who_goes_or_loses_its_memory_does_too(name: str) -> None:
    workers = [MAKERS[name](n) for n in range(3)]

    def gradient(n: int, s: int) -> F32:
        if (n, s) == (1, 3):
            workers[1].forget()
        return normal(n, s)

    found = averages(lambda n: workers[n], ONE, gradient, range(6), 3)
    np.testing.assert_allclose(
        found[0][3], np.mean([normal(n, 3) for n in range(3)], axis=0), atol=1e-6
    )
    members = [worker._members[0] for worker in workers]
    assert members == [3, 3, 3]


# ---------------------------------------------------------------- from others


class With:
    """An exchange in which somebody else gives these bytes."""

    counts = True

    def __init__(self, data: bytes = b"", total: int = 2) -> None:
        self.data, self.count = data, total

    def gather(self, data: bytes) -> list[Given]:
        self.given = data
        return [Given("me", data, True), Given("other", self.data or data, True)]

    def total(self, vector: F32, codec: str = "float32") -> Exchanged:
        return Exchanged(vector * np.float32(self.count), self.count)


def begun() -> EF21:
    worker = EF21(codec="int4")
    worker.begin(ONE, "float32", "me")
    worker.average(normal(0, 0), 0, With())
    return worker


def test_malformed_parts_are_refused_and_change_nothing() -> None:
    exchange, worker = With(), begun()
    worker.average(normal(0, 1), 1, exchange)
    fine, kept = exchange.given, worker._memory.arrays["estimate"].tobytes()
    worker = begun()
    kept = worker._memory.arrays["estimate"].tobytes() + worker.shared[0].tobytes()
    nan = np.float32(np.nan).tobytes()
    for wrong, why in [
        (b"\x01", "no head"),
        (b"\x02" + fine[1:], "no head"),
        (fine[:-1], "bytes"),
        (b"\x00" + fine[1:], "bytes"),
        (fine[:1] + nan + fine[5:], "smoothness of nan"),
        (fine[:1] + np.float32(-1).tobytes() + fine[5:], "smoothness of -1"),
        (fine[:5] + b"\xff" * (len(fine) - 5), "scale|not allowed"),
    ]:
        with pytest.raises(RemoteProtocolError, match=why):
            worker.average(normal(0, 1), 1, With(wrong))
    assert worker._memory.arrays["estimate"].tobytes() + worker.shared[0].tobytes() == kept
    assert worker.average(normal(0, 1), 1, With(fine)) is not None


def test_somebody_who_goes_while_all_begin_anew() -> None:
    """Then weights are those of one too many, and the next step begins anew as well."""
    worker = EF21()
    worker.begin(ONE, "float32", "me")
    worker.average(normal(0, 0), 0, With(total=1))
    assert worker._members[0] == 0
    worker.average(normal(0, 1), 1, With(total=2))
    assert worker._members[0] == 2


def test_numbers_that_cannot_be_are_refused() -> None:
    for wrong in [{"eta": 0.0}, {"eta": 1.5}, {"smoothness": 0.0}, {"smoothness": math.inf}]:
        with pytest.raises(ConfigError, match="EF21"):
            EF21(**wrong)
    for wrong_codec in [EF21(codec="randk"), EControl(codec="ternary"), EControl(eta=2.0)]:
        with pytest.raises(ConfigError):
            wrong_codec.begin(ONE, "float32", "me")
    assert "smoothness" not in str(EF21(smoothness=3.0))  # it may differ between peers
