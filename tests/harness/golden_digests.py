"""Make the lines of `tests/golden/digests.txt`: what 20 rounds leave behind, to the bit, of each
method with each codec.

Two workers train the model of harness/golden.py, whose inner steps are rounded alike by every
processor. Codecs, reductions and outer steps are as well: elements are added up in an order that is
laid down, and kernels give the bits of their reference in NumPy. With one thread the digests were
found to be the same without kernels, and without AVX in torch and NumPy. Methods of which that is
not so are in the histories of tests/golden/*.json alone, with a tolerance: those with products of
matrices (DeMo, PowerSGD, Muon), and CO2, in which torch fuses multiplications and additions.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from atoll.collectives.codecs import CODECS
from atoll.collectives.errors import ConfigError
from atoll.optim import (
    AsyncDiLoCo,
    DiLoCo,
    GradientAverage,
    LocalSGD,
    NoLoCo,
    SparseLoCo,
    StreamingDiLoCo,
    Swarm,
)
from atoll.optim.run_spec import STEPPED
from atoll.optim.swarm import SwarmSession
from harness.golden import Model, plain_sgd

__all__ = ["DIGESTS_HEAD", "METHODS", "digest_lines", "digest_of"]

DIGESTS_HEAD = (
    "SHA-256 of what workers have after 20 rounds, and of the run's state where daemons step it:",
    "method, codec, digest. make golden-rewrite writes it anew.",
)
WORKERS = 2
ROUNDS = 20
H = 2  # inner steps of a round

Make = Callable[[Model, Any, SwarmSession, str], Any]


def _rounds(method: Callable[..., Any], **options: Any) -> Make:
    return lambda model, inner, session, codec: method(
        model, inner, H, session, codec=codec, **options
    )


METHODS: dict[str, Make] = {
    "diloco": _rounds(DiLoCo),
    "local_sgd": _rounds(LocalSGD),
    "streaming_diloco": _rounds(StreamingDiLoCo, blocks_per_fragment=2),
    "sparse_loco": _rounds(SparseLoCo),
    "async_diloco": _rounds(AsyncDiLoCo, outer_delay=2),
    "noloco": _rounds(NoLoCo),
    "gradient_average": lambda model, inner, session, codec: GradientAverage(
        model, inner, session, codec=codec
    ),
}


def digest_lines() -> Iterator[str]:
    """Yield a line for every method with every codec that it can be run with."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for method in METHODS:
            for codec in CODECS:
                if found := digest_of(method, codec):
                    yield f"{method} {codec} {found}"
    finally:
        torch.set_num_threads(before)


def digest_of(method: str, codec: str) -> str:
    """Return what a run leaves behind; "" where none can be founded."""
    try:
        return _digest(method, codec)
    except ConfigError:
        return ""


def _digest(method: str, codec: str) -> str:
    swarm = Swarm(WORKERS)
    text = hashlib.sha256()
    for data in swarm.run(partial(_train, METHODS[method], codec)):
        text.update(data)
    if method in STEPPED:
        text.update(swarm.state.theta.data)
        text.update(swarm.state.momentum.data)
    return text.hexdigest()


def _train(make: Make, codec: str, session: SwarmSession) -> bytes:
    model = Model()
    inner = plain_sgd(model)
    outer = make(model, inner, session, codec)
    for step in range(ROUNDS * H):
        for n, (p, target) in enumerate(
            zip(model.parameters(), _targets(session.number, step), strict=True)
        ):
            p.grad = (p.detach() - target) * 2.0 ** -(n % 3)
        for one in inner:
            one.step()
    outer.close()
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


@functools.cache
def _targets(worker: int, step: int) -> list[torch.Tensor]:
    """Return what a worker's parameters are drawn to in this step: as in harness/golden.py, once
    for all methods and codecs."""
    model = Model()
    distances = model.distances(b"batch", worker, step)
    return [p.detach() - d for p, d in zip(model.parameters(), distances, strict=True)]
