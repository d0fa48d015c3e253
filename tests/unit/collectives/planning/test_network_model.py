"""What is known of a network: gaps are filled, what cannot be is unknown, bounds hold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.collectives.planning.network_model import (
    LATENCY_DEFAULT_S,
    PEERS_MAX,
    RATE_DEFAULT_BYTES_PER_S,
    RATE_MAX_BYTES_PER_S,
    RATE_MIN_BYTES_PER_S,
    Network,
    measured,
    sites_by_latency,
    uniform,
)

anything = st.none() | st.floats(allow_nan=True, allow_infinity=True)
pairs = st.dictionaries(st.tuples(st.integers(0, 4), st.integers(0, 4)), st.floats(), max_size=20)


@given(
    up=st.lists(anything, min_size=5, max_size=5),
    down=st.lists(anything, min_size=5, max_size=5),
    pair=pairs,
    latency=pairs,
    loss=pairs,
    site_up=st.dictionaries(st.integers(0, 4), st.floats()),
)
def test_whatever_was_measured_becomes_a_network(
    up: list[float | None],
    down: list[float | None],
    pair: dict[tuple[int, int], float],
    latency: dict[tuple[int, int], float],
    loss: dict[tuple[int, int], float],
    site_up: dict[int, float],
) -> None:
    network = measured(
        5, up=up, down=down, pair=pair, latency_s=latency, loss=loss, site_up=site_up
    )
    assert network.count == 5
    alone = network.alone_bytes_per_s()
    assert np.isfinite(alone).all()
    assert (alone >= RATE_MIN_BYTES_PER_S).all()
    assert (alone <= RATE_MAX_BYTES_PER_S).all()
    assert sorted(p for site in network.members for p in site) == [0, 1, 2, 3, 4]


def test_nothing_measured_gives_the_defaults() -> None:
    network = measured(3)
    assert (network.up == RATE_DEFAULT_BYTES_PER_S).all()
    assert (network.pair == math.inf).all()
    assert network.latency_s[0, 1] == LATENCY_DEFAULT_S
    assert network.latency_s[1, 1] == 0
    assert not network.loss.any()
    assert network.sites == (0, 1, 2)


def test_what_is_unknown_follows_from_what_is_known() -> None:
    network = measured(
        4,
        up=[8e6, None, None, math.nan],
        pair={(1, 0): 2e6, (1, 2): 3e6, (2, 2): 9e9},
        latency_s={(0, 1): 0.010, (1, 2): 0.020, (2, 3): 0.090},
    )
    assert network.up.tolist() == [8e6, 3e6, 5.5e6, 5.5e6]  # seen to carry 3e6; the median
    assert network.down.tolist() == [2e6, 2.5e6, 3e6, 2.5e6]
    assert network.latency_s[1, 0] == 0.010  # as the way back
    assert network.latency_s[0, 3] == 0.020  # the median
    assert network.pair[0, 1] == math.inf
    assert network.alone_bytes_per_s()[1, 2] == 3e6


def test_lines_of_sites_limit_transfers_between_them() -> None:
    network = measured(
        4,
        up=[1e8] * 4,
        down=[1e8] * 4,
        sites=[7, 7, 2, 2],
        site_up={7: 1e6, 2: 4e6},
        site_down={2: 2e6},
    )
    assert network.sites == (1, 1, 0, 0)
    assert network.members == ((2, 3), (0, 1))
    alone = network.alone_bytes_per_s()
    assert (alone[0, 1], alone[0, 2], alone[2, 0]) == (1e8, 1e6, 4e6)


def test_sites_are_chains_of_near_pairs() -> None:
    latency = np.full((5, 5), math.nan)
    latency[0, 3] = latency[3, 0] = latency[3, 4] = latency[4, 3] = 0.0002
    latency[1, 2] = 0.0002  # near one way only: not known to be near
    assert sites_by_latency(latency) == (0, 1, 2, 0, 0)


def test_arrays_cannot_be_written_to() -> None:
    network = uniform(3, 1e6, 0.01)
    with pytest.raises(ValueError, match="read-only"):
        network.up[0] = 1


GOOD: dict[str, Any] = {
    "up": np.full(2, 1e6),
    "down": np.full(2, 1e6),
    "pair": np.full((2, 2), math.inf),
    "latency_s": np.zeros((2, 2)),
    "loss": np.zeros((2, 2)),
    "sites": (0, 1),
    "site_up": np.full(2, math.inf),
    "site_down": np.full(2, math.inf),
}


@pytest.mark.parametrize(
    "change",
    [
        {"up": np.array([1e6, math.nan])},
        {"up": np.array([1e6, math.inf])},
        {"down": np.array([1e6, 0.0])},
        {"down": np.full(2, 1e6, dtype=np.float32)},
        {"pair": np.full((2, 2), math.nan)},
        {"pair": np.full((2, 3), 1e6)},
        {"latency_s": np.full((2, 2), -1.0)},
        {"latency_s": np.full((2, 2), 11.0)},
        {"loss": np.full((2, 2), 0.9)},
        {"sites": (0, 2)},
        {"sites": ()},
        {"site_up": np.array([1e6])},
    ],
    ids=str,
)
def test_impossible_networks_are_refused(change: dict[str, Any]) -> None:
    Network(**{key: np.copy(v) if key != "sites" else v for key, v in GOOD.items()})
    with pytest.raises(ConfigError):
        Network(**{**GOOD, **change})


def test_measurements_must_fit_the_peers() -> None:
    with pytest.raises(ConfigError, match="from 0 to 2"):
        measured(2, pair={(0, 2): 1e6})
    with pytest.raises(ConfigError, match="the links of 1"):
        measured(2, up=[1e6])
    with pytest.raises(ConfigError, match="the sites of 1"):
        measured(2, sites=[0])
    for count in (0, PEERS_MAX + 1):
        with pytest.raises(ConfigError, match=f"1 to {PEERS_MAX} peers"):
            measured(count)
