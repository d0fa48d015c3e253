"""Test MASHA on a bilinear saddle, against its formula and where compressed descent diverges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.counter_rng import derive_key
from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim import Swarm
from atoll.optim.experimental import Masha

SIDE, PEERS = 8, 3
RANDOM = np.random.default_rng(4)
# Of each peer x^T A y + b x - c y; the mean of A is well conditioned.
MATRICES = [np.eye(SIDE) + 0.3 * RANDOM.standard_normal((SIDE, SIDE)) for _ in range(PEERS)]
OFFSETS = RANDOM.standard_normal((PEERS, 2 * SIDE))
START = RANDOM.standard_normal(2 * SIDE).astype(np.float32)


def operator(number: int) -> Callable[[F32], F32]:
    matrix, offset = MATRICES[number], OFFSETS[number]

    def of(z: F32) -> F32:
        x, y = z[:SIDE].astype(np.float64), z[SIDE:].astype(np.float64)
        return (np.concatenate([matrix @ y, -matrix.T @ x]) + offset).astype(np.float32)

    return of


def mean_operator(z: Any) -> Any:
    return np.mean([operator(number)(z.astype(np.float32)) for number in range(PEERS)], axis=0)


def saddle() -> Any:
    matrix, (first, second) = np.mean(MATRICES, axis=0), np.split(OFFSETS.mean(0), 2)
    return np.concatenate([np.linalg.solve(matrix.T, second), -np.linalg.solve(matrix, first)])


def solved(steps: int, **options: Any) -> list[Masha]:
    def work(session: Any) -> Masha:
        made = Masha(session, START, operator(session.number), **options)
        for _ in range(steps):
            made.step()
        return made

    return Swarm(PEERS).run(work)


def test_without_compression_it_is_the_formula() -> None:
    gamma, tau = 0.2, 0.7
    found = solved(12, gamma=gamma, tau=tau, codec="float32")
    z = START.astype(np.float64)
    w, full = z.copy(), 1
    for step in range(12):
        ahead = tau * z + (1 - tau) * w - gamma * mean_operator(w)
        z = ahead - gamma * (mean_operator(ahead) - mean_operator(w))
        if derive_key(b"atoll masha coin", 0, step) / 2**64 >= tau:
            w, full = z.copy(), full + 1
    np.testing.assert_allclose(found[0].point, z, atol=1e-4)
    assert found[0].full_exchanges == full > 1


@pytest.mark.parametrize("codec", ["ternary", "int4_shift", "randk"])
def test_all_have_the_same_bits(codec: str) -> None:
    found = solved(10, gamma=0.05, tau=0.8, codec=codec)
    assert len({made.point.tobytes() for made in found}) == 1


def descent(steps: int, gamma: float) -> float:
    """Return the distance of plain descent with the same codec."""
    codec, z = get_codec("ternary"), START.astype(np.float64)
    data, part = np.empty(codec.encoded_bytes(z.size), np.uint8), np.empty(z.size, np.float32)
    for step in range(steps):
        total = np.zeros_like(z)
        for number in range(PEERS):
            key = derive_key(b"descent", step, number)
            codec.encode(operator(number)(z.astype(np.float32)), data, key)
            codec.decode(data, part)
            total += part
        z = z - gamma * total / PEERS
    return float(np.linalg.norm(z - saddle()))


def test_it_converges_linearly_where_compressed_descent_diverges() -> None:
    begun = float(np.linalg.norm(START - saddle()))
    after = [
        float(np.linalg.norm(solved(n, gamma=0.2, tau=0.75, codec="ternary")[0].point - saddle()))
        for n in (300, 600)
    ]
    assert after[0] < 0.1 * begun
    assert after[1] < 0.1 * after[0]
    assert descent(600, 0.2) > 1e6 * begun


@pytest.mark.parametrize(
    "change", [lambda data: data + b"!", lambda data: b"?" + data[1:]], ids=["length", "settings"]
)
def test_what_does_not_fit_names_its_giver(change: Callable[[bytes], bytes]) -> None:
    class Liar:
        peer_name = "a"

        def all_reduce(self, values: F32, op: str, codec: str) -> Any:
            return type("Found", (), {"value": values})

        def all_gather(self, data: bytes) -> list[tuple[str, bytes]]:
            return [("liar", change(data))]

    made = Masha(Liar(), START, operator(0), gamma=0.1, tau=0.5)  # type: ignore[arg-type]
    with pytest.raises(RemoteProtocolError, match="what liar gave"):
        made.step()


@pytest.mark.parametrize("options", [{"gamma": 0.0}, {"tau": 1.0}, {"codec": "topk"}])
def test_what_would_not_converge_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        solved(0, **{"gamma": 0.1, "tau": 0.5, **options})
