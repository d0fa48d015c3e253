"""PowerSGD: against torch's hook, against linear algebra, and what is kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness.gradients import averages, manifest_of
from harness.oracles import oracle

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError
from atoll.optim import LGreCo, PowerSGD
from atoll.optim.compressors.orthogonal import orthonormal, product, random_matrix
from atoll.optim.compressors.power_sgd import rank_errors
from atoll.optim.manifest import Manifest, Parameter

SHAPE = (16, 24)
ONE = manifest_of(SHAPE)


def normal(*key: int, size: int = 16 * 24) -> F32:
    return np.random.default_rng(key).standard_normal(size).astype(np.float32)


# ---------------------------------------------------------------- torch's hook


class Started(PowerSGD):
    """With the first Q of torch's hook."""

    def _allocate(self, manifest: Manifest) -> None:
        super()._allocate(manifest)
        (q,) = self._qs
        seed = np.random.RandomState(0).randint(1_000_000_000)
        gaussian = torch.randn(1, q.shape[1], q.shape[0], generator=torch.manual_seed(seed))
        q[:] = gaussian[0].T.numpy()


def test_it_is_the_hook_of_torch() -> None:
    """Two ranks, six steps of which the first two are not compressed, errors fed back."""
    found = oracle("powersgd")
    rows, columns = found["shape"]

    def gradient(rank: int, step: int) -> F32:
        random = torch.Generator().manual_seed(1000 * rank + step)
        return torch.randn(rows, columns, generator=random).flatten().numpy()

    made = averages(
        lambda worker: Started(rank=found["rank"], start=found["start"]),
        manifest_of((rows, columns)),
        gradient,
        range(len(found["steps"])),
        found["world"],
    )
    for mine in made:
        for value, expected in zip(mine, found["steps"], strict=True):
            np.testing.assert_allclose(value.reshape(rows, columns), expected, atol=2e-6)


# ---------------------------------------------------------------- linear algebra


@pytest.mark.parametrize("shape", [(30, 5), (5, 5), (200, 1), (7, 3)])
def test_columns_become_orthonormal(shape: tuple[int, int]) -> None:
    matrix = normal(1, size=shape[0] * shape[1]).reshape(shape)
    basis = orthonormal(matrix)
    np.testing.assert_allclose(basis.T @ basis, np.eye(shape[1]), atol=1e-6)
    np.testing.assert_allclose(basis @ (basis.T @ matrix), matrix, atol=1e-5)  # the same span


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_columns_that_are_nearly_parallel_or_nothing(scale: float) -> None:
    first = normal(2, size=40)
    matrix = np.stack([first, first * (1 + 1e-6), np.zeros(40), first, normal(3, size=40)], axis=1)
    basis = orthonormal((matrix * scale).astype(np.float32))
    np.testing.assert_allclose(basis.T @ basis, np.eye(5), atol=1e-6)
    np.testing.assert_allclose(basis[:, 0], first / np.linalg.norm(first), atol=1e-6)
    zeros = orthonormal(np.zeros((6, 6), np.float32))
    np.testing.assert_allclose(zeros.T @ zeros, np.eye(6), atol=1e-6)


def test_a_product_is_rounded_step_by_step() -> None:
    left, right = random_matrix(9, 3, b"left"), random_matrix(5, 3, b"right")
    expected = np.zeros((9, 5), np.float32)
    for k in range(3):
        for i in range(9):
            for j in range(5):
                step = np.float32(left[i, k] * right[j, k])
                expected[i, j] = np.float32(expected[i, j] + step) if k else step
    assert product(left, right).tobytes() == expected.tobytes()


def test_errors_of_ranks_are_those_of_singular_values() -> None:
    decaying = np.diag(0.5 ** np.arange(20)).astype(np.float32)
    left, right = orthonormal(random_matrix(30, 20, b"l")), orthonormal(random_matrix(25, 20, b"r"))
    matrix = product(left @ decaying, right)
    values = np.linalg.svd(matrix, compute_uv=False)
    exact = [np.sqrt(np.square(values[rank:]).sum()) for rank in range(1, 7)]
    np.testing.assert_allclose(rank_errors(matrix, 6), exact, rtol=1e-3)
    assert rank_errors(np.zeros((4, 3), np.float32), 3).tolist() == [0, 0, 0]


# ---------------------------------------------------------------- what comes of it


def test_a_mean_of_low_rank_comes_out_exactly() -> None:
    """After one step that turns Q towards it. What is left is rounding."""
    thin = normal(5, size=16 * 2).reshape(16, 2) @ normal(6, size=2 * 24).reshape(2, 24)
    given = [thin + noise for noise in (normal(7).reshape(SHAPE), -normal(7).reshape(SHAPE))]
    found = averages(
        lambda worker: PowerSGD(rank=2, start=0, min_rate=1),
        ONE,
        lambda worker, step: given[worker].reshape(-1),
        range(2),
    )
    for mean in found[0]:
        np.testing.assert_allclose(mean, thin.reshape(-1), atol=1e-4)


def test_over_many_steps_nothing_is_lost() -> None:
    """The sum of what was applied and of the mean error is that of the mean gradients."""
    workers = [PowerSGD(rank=1, start=0) for _ in range(3)]
    steps = range(40)
    found = averages(lambda n: workers[n], ONE, lambda n, s: normal(n, s), steps, 3)
    assert all(a.tobytes() == b.tobytes() == c.tobytes() for a, b, c in zip(*found, strict=True))
    came = np.mean([[normal(n, s) for s in steps] for n in range(3)], axis=0).sum(axis=0)
    kept = np.mean([worker._errors[0].reshape(-1) for worker in workers], axis=0)
    np.testing.assert_allclose(np.sum(found[0], axis=0) + kept, came, atol=1e-4)


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
def test_what_a_codec_loses_is_kept_too(codec: str) -> None:
    workers = [PowerSGD(rank=1, start=0) for _ in range(2)]
    steps = range(30)
    found = averages(lambda n: workers[n], ONE, lambda n, s: normal(n, s), steps, codec=codec)
    came = np.mean([[normal(n, s) for s in steps] for n in range(2)], axis=0).sum(axis=0)
    kept = np.mean([worker._errors[0].reshape(-1) for worker in workers], axis=0)
    np.testing.assert_allclose(np.sum(found[0], axis=0) + kept, came, atol=1e-4)


def test_small_layers_and_vectors_travel_whole() -> None:
    manifest = Manifest.of(
        [
            Parameter("bias", (50,)),
            Parameter("kernel", (20, 3, 3, 3)),  # 20 x 27: 188 for 540 at rank 4
            Parameter("narrow", (50, 4)),  # 216 for 200
            Parameter("scale", ()),
            Parameter("zero", (0, 4)),
        ]
    )
    sizes = manifest.elements
    found = averages(
        lambda worker: PowerSGD(rank=4, start=0),
        manifest,
        lambda n, s: normal(n, s, size=sizes),
        [0],
    )
    mean = (normal(0, 0, size=sizes) + normal(1, 0, size=sizes)) / 2
    exact = np.isclose(found[0][0], mean, atol=1e-6)
    for name, (lo, hi) in manifest.offsets.items():
        assert exact[lo:hi].all() == (name != "kernel"), name
    lo, hi = manifest.offsets["kernel"]
    assert np.linalg.matrix_rank(found[0][0][lo:hi].reshape(20, 27), tol=1e-4) == 4


def test_nothing_is_lost_before_the_start() -> None:
    found = averages(lambda n: PowerSGD(start=2), ONE, lambda n, s: normal(n, s), range(3))
    for step in range(2):
        mean = (normal(0, step) + normal(1, step)) / 2
        np.testing.assert_allclose(found[0][step], mean, atol=1e-6)
    assert np.linalg.matrix_rank(found[0][2].reshape(SHAPE), tol=1e-4) == 1


def test_a_gradient_of_zeros_does_not_end_it() -> None:
    """With Q = 0 nothing would ever be seen again."""
    found = averages(
        lambda n: PowerSGD(rank=2, start=0), ONE, lambda n, s: normal(n, s) * (s != 0), range(8)
    )
    assert not found[0][0].any()
    assert all(np.linalg.norm(mean) > 1 for mean in found[0][1:])


def test_who_has_nothing_to_give_keeps_its_error() -> None:
    workers = [PowerSGD(rank=1, start=0) for _ in range(2)]
    kept: list[F32] = []

    def gradient(n: int, s: int) -> F32:
        if n == 1:
            kept.append(workers[1]._errors[0].copy())
        return normal(n, s)

    found = averages(lambda n: workers[n], ONE, gradient, range(3), absent=[(1, 1)])
    assert kept[1].any()
    np.testing.assert_array_equal(kept[2], kept[1])
    assert found[0][1].tobytes() == found[1][1].tobytes()
    nobody = averages(
        lambda n: PowerSGD(start=0), ONE, lambda n, s: normal(n, s), [0], absent=[(0, 0), (1, 0)]
    )
    assert nobody == [[None], [None]]


# ---------------------------------------------------------------- ranks


def test_ranks_go_to_the_layers_that_need_them() -> None:
    """Two layers of one shape: of the first the gradient has rank 1, of the second full rank."""
    manifest = manifest_of((40, 40), (40, 40))
    workers = [PowerSGD(rank=4, start=0, choice=LGreCo(every=3)) for _ in range(2)]

    def gradient(n: int, s: int) -> F32:
        flat = np.outer(normal(1, size=40), normal(s, size=40)).reshape(-1)
        return np.concatenate([flat, normal(n, s, size=1600)]).astype(np.float32)

    found = averages(lambda n: workers[n], manifest, gradient, range(8))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*found, strict=True))
    for worker in workers:
        assert worker._ranks[0] < 4 <= worker._ranks[1]
        assert worker._ranks.sum() <= 8
    ranks = [np.linalg.matrix_rank(found[0][s][1600:].reshape(40, 40), tol=1e-4) for s in (2, 3)]
    assert ranks == [4, workers[0]._ranks[1]]


def test_ranks_from_a_donor_are_brought_into_range() -> None:
    worker = PowerSGD(rank=2, start=0, choice=LGreCo())
    worker.begin(ONE, "float32", "me")
    for given, taken in [(np.nan, 1), (-5, 1), (3, 3), (1e30, 4)]:
        worker._ranks[:] = given
        assert worker._ranks_now() == [taken]


def test_numbers_that_cannot_be_are_refused() -> None:
    for numbers in [{"rank": 0}, {"rank": 1000}, {"start": -1}, {"min_rate": 0.5}]:
        with pytest.raises(ConfigError, match="PowerSGD"):
            PowerSGD(**numbers)
    used = PowerSGD()
    used.begin(ONE, "float32", "me")
    with pytest.raises(ConfigError, match="another model"):
        used.begin(ONE, "float32", "me")
