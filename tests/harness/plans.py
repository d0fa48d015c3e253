"""Runs to plan, of equal hosts and of others, for tests and the benchmark."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.collectives.planning.network_model import measured
from atoll.peer.plan.model import RunSketch, TrainingHost

__all__ = ["HOSTS", "sketch"]

HOSTS = "abcdefgh"


def sketch(
    mbit: Sequence[float],
    rtt_ms: float,
    step_s: float | Sequence[float],
    parameters: float,
    tokens: float = 0.0,
    price_hour: float = 0.0,
    price_gb: float = 0.0,
    fragments: int = 5,
) -> RunSketch:
    """A run of as many hosts as there are links, each as fast up as down."""
    count = len(mbit)
    steps = [step_s] * count if isinstance(step_s, int | float) else step_s
    network = measured(
        count,
        up=[each * 1e6 / 8 for each in mbit],
        down=[each * 1e6 / 8 for each in mbit],
        latency_s={(i, j): rtt_ms / 2e3 for i in range(count) for j in range(count) if i != j},
        sites=range(count),
    )
    hosts = tuple(
        TrainingHost(name, step, tokens, price_hour, price_gb)
        for name, step in zip(HOSTS, steps, strict=False)
    )
    return RunSketch(hosts, network, int(parameters), fragments)
