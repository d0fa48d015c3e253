"""Compare HD-PiSSA with adapters that torch differentiates and steps by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness import gradients
from harness.gradients import averages, manifest_of
from torch import nn

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim import GradientAverage, Swarm
from atoll.optim.every_step.exchange import Exchanged, Given
from atoll.optim.experimental import HDPiSSA
from atoll.optim.model_io import ModelVector

RANK, PARTS, LR = 2, 3, 0.01


def split(weight: torch.Tensor, part: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Return B and A of a part, by another library than the one under test."""
    u, s, vt = np.linalg.svd(weight.numpy().astype(np.float64), full_matrices=False)
    mine = slice(part * RANK, (part + 1) * RANK)
    root = np.diag(np.sqrt(s[mine]))
    pair = u[:, mine] @ root, root @ vt[mine]
    b, a = (nn.Parameter(torch.from_numpy(x.copy())) for x in pair)
    return b, a


def reference(steps: int) -> torch.Tensor:
    """Return the parameters by autograd through (W + B A - B0 A0) and torch's Adam, in float64."""
    net = gradients.model().double()
    matrices = [p for p in net.parameters() if p.ndim == 2]
    peers = []
    for part in range(PARTS):
        pairs = [split(p.detach(), part) for p in matrices]
        flat = [x for pair in pairs for x in pair]
        peers.append((pairs, torch.optim.Adam(flat, lr=LR)))
    for step in range(steps):
        moves = [torch.zeros_like(p) for p in matrices]
        for worker, (pairs, adam) in enumerate(peers):
            begun = [(b.detach().clone(), a.detach().clone()) for b, a in pairs]
            places = iter(pairs)

            def adapted(
                module: nn.Module, args: Any, out: torch.Tensor, places: Any = places
            ) -> torch.Tensor:
                b, a = next(places)
                return out + args[0] @ (b @ a - (b @ a).detach()).T

            linears = [m for m in net if isinstance(m, nn.Linear)]
            hooks = [m.register_forward_hook(adapted) for m in linears]
            adam.zero_grad()
            random = torch.Generator().manual_seed(1000 * worker + step)
            x = torch.randn(8, gradients.INPUTS, generator=random).double()
            (net(x) - x[:, : gradients.OUTPUTS].sin()).square().mean().backward()
            adam.step()
            for hook in hooks:
                hook.remove()
            with torch.no_grad():
                for move, (b, a), (b0, a0) in zip(moves, pairs, begun, strict=True):
                    move += (b - b0) @ a0 + b0 @ (a - a0)
                    b.copy_(b0)
                    a.copy_(a0)
        with torch.no_grad():
            for p, move in zip(matrices, moves, strict=True):
                p += move
    return gradients.flat(net)


def train(session: Any, steps: int, part: int, **options: Any) -> torch.Tensor:
    net = gradients.model()
    inner = torch.optim.SGD(net.parameters(), lr=LR)
    pissa = HDPiSSA(model=net, part=part, parts=PARTS, rank=RANK, **options)
    with GradientAverage(net, inner, session, compressor=pissa):
        for step in range(steps):
            inner.zero_grad()
            gradients.loss_of(net, session.number, step).backward()
            inner.step()
    return gradients.flat(net)


def test_it_is_adapters_that_autograd_differentiates() -> None:
    found = Swarm(PARTS).run(lambda session: train(session, 12, session.number))
    assert all(torch.equal(found[0], other) for other in found)
    np.testing.assert_allclose(found[0].numpy(), reference(12).numpy(), atol=2e-5)


def moves(
    parts: int, workers: int, weight: F32, part_of: Any = None, codec: str = "float32"
) -> list[F32]:
    """Return the first step of one matrix; its worker's gradients differ."""
    net = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    with torch.no_grad():
        net[0].weight.copy_(torch.from_numpy(weight))
    manifest = manifest_of(weight.shape)

    def make(number: int) -> HDPiSSA:
        part = part_of(number) if part_of else number
        return HDPiSSA(model=net, part=part, parts=parts, rank=1)

    def normal(n: int, s: int) -> F32:
        return np.random.default_rng((n, s)).standard_normal(weight.size).astype(np.float32)

    found = averages(make, manifest, normal, range(1), workers, codec)
    return [each[0].reshape(weight.shape) for each in found]


def test_peers_with_other_directions_move_more_of_them() -> None:
    """Count singular values: two directions of each peer, against two of all together."""
    weight = np.random.default_rng(1).standard_normal((12, 12)).astype(np.float32)
    apart, alike = (np.linalg.svd(moves(4, 4, weight, part)[0])[1] for part in (None, lambda n: 0))
    assert (apart > 1e-4).sum() == 8
    assert (alike > 1e-4).sum() == 2


def test_of_several_with_one_part_the_mean_is_taken_and_a_part_of_nobody_rests() -> None:
    weight = np.random.default_rng(2).standard_normal((6, 8)).astype(np.float32)
    both = moves(3, 2, weight, lambda n: 1)[0]
    u, _, vt = np.linalg.svd(weight)
    inside = u[:, 1:2] @ u[:, 1:2].T @ both + both @ vt[1:2].T @ vt[1:2]
    inside -= u[:, 1:2] @ u[:, 1:2].T @ both @ vt[1:2].T @ vt[1:2]
    np.testing.assert_allclose(both, inside, atol=1e-5)
    (one,) = moves(3, 1, weight, lambda n: 1)
    assert 0 < np.abs(both).max() < 1.01 * np.abs(one).max()


def test_a_newcomer_is_given_the_directions_of_the_run() -> None:
    """Begin one worker with other parameters: its own directions would be wrong ones."""

    def work(session: Any) -> F32:
        net = gradients.model(seed=session.number)
        inner = torch.optim.SGD(net.parameters(), lr=LR)
        pissa = HDPiSSA(model=net, part=session.number, parts=2, rank=1)
        with GradientAverage(net, inner, session, compressor=pissa):
            for step in range(3):
                inner.zero_grad()
                gradients.loss_of(net, session.number, step).backward()
                inner.step()
        return pissa.shared[0].copy()

    first, second = Swarm(2).run(work)
    assert first.tobytes() == second.tobytes()


def test_what_is_kept_comes_back() -> None:
    net = gradients.model()
    made, again = (HDPiSSA(model=net, part=0, parts=2) for _ in range(2))
    for one in (made, again):
        one.begin(ModelVector(net).manifest, "float32", "a")
    made._moments += 1
    made._taken = 3
    again.restore({name: np.copy(value) for name, value in made.kept().items()})
    assert again.kept()["taken"] == 3
    np.testing.assert_array_equal(again.kept()["moments"], made.kept()["moments"])
    again.forget()
    assert again.kept()["taken"] == 0
    assert not again.kept()["moments"].any()


class Liar:
    """Stand in for an exchange in which one gives ``data``."""

    counts = True

    def __init__(self, change: Any) -> None:
        self._change = change

    def gather(self, data: bytes) -> list[Given]:
        return [Given("liar", self._change(data), counts=True)]

    def total(self, vector: F32, codec: str = "float32") -> Exchanged:
        raise AssertionError


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1], lambda data: b"\2\0" + data[2:]], ids=["short", "part"]
)
def test_what_cannot_be_read_names_its_giver_and_changes_nothing(change: Any) -> None:
    net = gradients.model()
    made = HDPiSSA(model=net, part=0, parts=2)
    made.begin(ModelVector(net).manifest, "float32", "a")
    with pytest.raises(RemoteProtocolError, match="what liar gave"):
        made.average(np.ones(ModelVector(net).manifest.elements, np.float32), 0, Liar(change))
    assert made.kept()["taken"] == 0


def test_a_coarse_codec_counts_no_peers() -> None:
    """Let four share a part in four bits: their mean is near that of float32."""
    weight = np.random.default_rng(3).standard_normal((8, 8)).astype(np.float32)
    exact, coarse = (moves(2, 4, weight, lambda n: 0, codec)[0] for codec in ("float32", "int4"))
    assert np.abs(exact - coarse).max() < 0.2 * np.abs(exact).max()


@pytest.mark.parametrize("options", [{"part": 2}, {"rank": 0}, {"beta1": 1.0}])
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a part from 0"):
        HDPiSSA(model=gradients.model(), **{"part": 0, "parts": 2, **options})


def test_more_parts_than_directions_are_refused() -> None:
    made = HDPiSSA(model=nn.Linear(3, 3), part=0, parts=4)
    with pytest.raises(ConfigError, match="as many rows and columns"):
        made.begin(manifest_of((3, 3)), "float32", "a")
