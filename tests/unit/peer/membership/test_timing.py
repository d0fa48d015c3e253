"""How the limits of the protocol follow the links and the size of the view."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.membership.timing import BEATS_IN_FAILURE, MEMBERS_BEAT_FAST, Timing

USUAL = Timing()


@pytest.mark.parametrize(
    ("srtt_s", "members", "heartbeat_s", "failure_s"),
    [  # the table of docs/guarantees.md
        (0.0, 4, 0.25, 1.2),
        (0.1, 4, 0.25, 1.2),
        (0.3, 4, 0.15, 1.2),
        (0.35, 4, 0.125, 1.2),
        (0.5, 4, 0.125, 1.5),
        (5.0, 4, 0.125, 3.0),
        (0.0, MEMBERS_BEAT_FAST, 0.25, 1.2),
        (0.0, MEMBERS_BEAT_FAST + 1, 0.5, 2.0),
        (0.3, MEMBERS_BEAT_FAST + 1, 0.5, 2.6),
    ],
)
def test_heartbeats_and_the_failure_time(
    srtt_s: float, members: int, heartbeat_s: float, failure_s: float
) -> None:
    paced = USUAL.paced(srtt_s, members)
    assert paced.heartbeat_s == pytest.approx(heartbeat_s)
    assert paced.failure_s == pytest.approx(failure_s)


def test_ballots_wait_for_the_slowest_link() -> None:
    paced = USUAL.paced(0.3)
    assert paced.gather_s == pytest.approx(0.45)
    assert paced.stagger_s == pytest.approx(0.3)
    assert paced.ballot_retry_s == pytest.approx(2.4)
    assert paced.kept_s == pytest.approx(0.6)


@given(st.floats(0, 10), st.integers(1, 1000))
def test_a_live_member_has_its_chances_to_be_heard(srtt_s: float, members: int) -> None:
    paced = USUAL.paced(srtt_s, members)
    assert paced.failure_s >= USUAL.failure_s
    wanted_s = BEATS_IN_FAILURE * paced.heartbeat_s + 2 * srtt_s
    assert paced.failure_s == pytest.approx(wanted_s) or paced.failure_s in (USUAL.failure_s, 3.0)
    assert paced.failure_s >= min(3.0, wanted_s) - 1e-9
