"""The pace of each stream: no link is asked for more than it has, and all end together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.collectives.planning.network_model import measured, uniform
from atoll.collectives.planning.pacing import (
    LINK_SHARE,
    STRIPE_SLACK,
    TRIAL_EVERY,
    carried_bytes,
    is_trial,
    paces,
    stripe_pace,
)
from atoll.collectives.schedule.routes import Routes, hierarchical, ring, star, tree

MBIT = 125_000.0


def test_a_butterfly_shares_each_link_equally() -> None:
    carried = carried_bytes(star(4), (1.0, 1.0, 1.0, 1.0))
    assert carried.tolist() == [[0 if i == j else 2 for j in range(4)] for i in range(4)]
    rates = paces(uniform(4, 100 * MBIT, 0.025), carried)
    expected = LINK_SHARE * 100 * MBIT / 3
    assert rates[0, 1] == pytest.approx(expected)
    assert rates.diagonal().tolist() == [0.0] * 4


def test_what_owns_nothing_sends_its_parts_only() -> None:
    carried = carried_bytes(star(3), (6.0, 6.0, 0.0))
    assert carried[2].tolist() == [6, 6, 0]
    assert carried[0].tolist() == [0, 12, 6]


def test_a_slow_link_does_not_hold_up_the_others() -> None:
    network = measured(4, up=[100 * MBIT] * 3 + [20 * MBIT], down=[100 * MBIT] * 3 + [20 * MBIT])
    rates = paces(network, carried_bytes(star(4), (1.0, 1.0, 1.0, 0.0)))
    assert rates[3].sum() == pytest.approx(LINK_SHARE * 20 * MBIT)
    assert rates[:, 3].sum() == pytest.approx(LINK_SHARE * 20 * MBIT)
    assert rates[0, 1] > 2 * rates[0, 3]


def test_members_of_a_site_share_its_line() -> None:
    network = measured(
        4, up=[MBIT] * 4, down=[MBIT] * 4, sites=[0, 0, 1, 1], site_up={0: 0.5 * MBIT}
    )
    rates = paces(network, carried_bytes(star(4), (1.0, 1.0, 1.0, 1.0)))
    assert rates[:2, 2:].sum() == pytest.approx(LINK_SHARE * 0.5 * MBIT)
    assert rates[0, 1] == pytest.approx(LINK_SHARE * MBIT / 3)


@given(
    st.sampled_from(["star", "ring", "tree", "sites"]),
    st.integers(2, 9),
    st.data(),
)
def test_no_link_is_asked_for_more_than_it_has(kind: str, count: int, data: st.DataObject) -> None:
    rates_of = st.lists(st.floats(1e4, 1e9), min_size=count, max_size=count)
    network = measured(count, up=data.draw(rates_of), down=data.draw(rates_of))
    shapes: dict[str, Routes] = {
        "star": star(count),
        "ring": ring(list(range(count))),
        "tree": tree(count, 2),
        "sites": hierarchical([p % 2 for p in range(count)]),
    }
    shards = data.draw(st.lists(st.integers(0, 10**9), min_size=count, max_size=count))
    carried = carried_bytes(shapes[kind], tuple(shards))
    rates = paces(network, carried)
    slack = 1 + 1e-9
    assert (rates.sum(axis=1) <= LINK_SHARE * network.up * slack).all()
    assert (rates.sum(axis=0) <= LINK_SHARE * network.down * slack).all()
    assert ((rates > 0) == (carried > 0)).all()


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 shards of 3"):
        carried_bytes(star(3), (1.0, 1.0))
    with pytest.raises(ConfigError, match="flows of 3 peers"):
        paces(uniform(4, MBIT, 0.0), np.ones((3, 3)))


def test_several_streams_get_more_than_their_parts_but_not_much() -> None:
    assert stripe_pace(8e6, 1) == 8e6
    assert stripe_pace(8e6, 4) == STRIPE_SLACK * 2e6
    assert stripe_pace(0.0, 16) == 0.0  # unlimited stays so


def test_some_rounds_are_trials() -> None:
    found = [number for number in range(1, 5 * TRIAL_EVERY + 1) if is_trial(number)]
    assert found == [TRIAL_EVERY * n for n in range(1, 6)]


def test_results_may_be_larger_than_parts() -> None:
    carried = carried_bytes(star(3), (2.0, 1.0, 0.0), result_factor=3.0)
    assert carried.tolist() == [[0, 1 + 6, 6], [2 + 3, 0, 3], [2, 1, 0]]
