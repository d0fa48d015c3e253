"""Compare Lion by vote with a loop that does it in one place in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness import gradients
from harness.gradients import averages, manifest_of

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim import GradientAverage, Swarm
from atoll.optim.every_step.exchange import Exchanged, Given
from atoll.optim.experimental import MajorityLion

SIZE = 12 * 5
ONE = manifest_of((12, 5))


def normal(n: int, s: int) -> F32:
    return np.random.default_rng((n, s)).standard_normal(SIZE).astype(np.float32)


def reference(workers: int, steps: int, beta1: float = 0.9, beta2: float = 0.99) -> list[Any]:
    """Return the votes as the paper writes them."""
    momenta = np.zeros((workers, SIZE))
    found = []
    for step in range(steps):
        given = np.array([normal(n, step) for n in range(workers)], np.float64)
        signs = np.sign(beta1 * momenta + (1 - beta1) * given)
        momenta = beta2 * momenta + (1 - beta2) * given
        found.append(np.sign(signs.sum(0)))
    return found


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_all_have_the_majority_s_signs(workers: int) -> None:
    found = averages(lambda n: MajorityLion(), ONE, normal, range(12), workers)
    for each in found:
        for step, expected in zip(each, reference(workers, 12), strict=True):
            np.testing.assert_array_equal(step, expected)
    if workers == 4:
        assert any((step == 0).any() for step in found[0]), "a tie moves nothing"


def test_whose_gradient_cannot_be_used_has_no_vote_and_keeps_its_momentum() -> None:
    workers = [MajorityLion() for _ in range(3)]
    found = averages(lambda n: workers[n], ONE, normal, range(2), 3, absent=[(2, 1)])
    alone = averages(lambda n: MajorityLion(), ONE, normal, range(1), 3)
    before = 0.01 * normal(2, 0)  # of the step in which it had a gradient
    np.testing.assert_allclose(workers[2].kept()["momentum"], before, rtol=1e-5)
    np.testing.assert_array_equal(found[0][0], alone[0][0])
    two = [np.sign(0.9 * 0.01 * normal(n, 0) + 0.1 * normal(n, 1)) for n in range(2)]
    np.testing.assert_array_equal(found[0][1], np.sign(two[0] + two[1]))


def test_with_sgd_it_trains_as_lion_does() -> None:
    """Compare with a loop of its own: weight decay moves parameters by lr times itself."""
    lr, decay = 0.01, 0.1

    def train(session: Any) -> torch.Tensor:
        net = gradients.model()
        inner = torch.optim.SGD(net.parameters(), lr=lr, weight_decay=decay)
        with GradientAverage(net, inner, session, compressor=MajorityLion()):
            for step in range(10):
                inner.zero_grad()
                gradients.loss_of(net, session.number, step).backward()
                inner.step()
        return gradients.flat(net)

    net = gradients.model()
    parameters = list(net.parameters())
    momenta = [[torch.zeros_like(p) for p in parameters] for _ in range(3)]
    for step in range(10):
        votes = [torch.zeros_like(p) for p in parameters]
        for worker in range(3):
            given = torch.autograd.grad(gradients.loss_of(net, worker, step), parameters)
            for m, v, g in zip(momenta[worker], votes, given, strict=True):
                v += torch.where(0.9 * m + 0.1 * g > 0, 1.0, -1.0)
                m.mul_(0.99).add_(g, alpha=0.01)
        with torch.no_grad():
            for p, v in zip(parameters, votes, strict=True):
                p -= lr * (v.sign() + decay * p)
    found = Swarm(3).run(train)
    assert all(torch.equal(found[0], other) for other in found)
    assert (found[0] - gradients.flat(net)).abs().max() < 3 * lr  # a vote may turn by a last bit
    assert (found[0] - gradients.flat(net)).abs().mean() < 1e-4


class Liar:
    counts = True

    def gather(self, data: bytes) -> list[Given]:
        return [Given("liar", data + b"!", counts=True)]

    def total(self, vector: F32, codec: str = "float32") -> Exchanged:
        raise AssertionError


def test_ballots_of_another_length_name_their_giver() -> None:
    worker = MajorityLion()
    worker.begin(ONE, "float32", "a")
    with pytest.raises(RemoteProtocolError, match="what liar gave"):
        worker.average(normal(0, 0), 0, Liar())
    assert not worker.kept()["momentum"].any()


def test_betas_are_below_one() -> None:
    with pytest.raises(ConfigError, match="betas"):
        MajorityLion(beta2=1.0)
