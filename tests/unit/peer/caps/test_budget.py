"""A day's budget: probes, then state for others, then a slow rest; never more than there is."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.caps.budget import BYTES_PER_GB, GB_MIN, DayBudget, Step
from atoll.peer.caps.token_bucket import RATE_BYTES_PER_S_MIN

DAY_S = 86_400.0
BUDGETS = st.floats(GB_MIN, 1e5).map(lambda gb: DayBudget(round(gb * BYTES_PER_GB)))


def test_probes_give_way_first_then_state_and_rounds_last() -> None:
    budget = DayBudget(100 * BYTES_PER_GB)
    shares = (0.0, 0.79, 0.8, 0.89, 0.9, 0.94, 0.95, 1.0, 2.0)
    steps = [budget.step(round(share * budget.bytes)) for share in shares]
    first, second, third = Step.NO_PROBES, Step.NO_STATE, Step.SPREAD
    assert steps == [Step.OPEN, Step.OPEN, first, first, second, second, third, third, third]


@given(budget=BUDGETS, share=st.floats(0, 2), left_s=st.floats(0, DAY_S))
def test_only_the_last_step_has_a_rate(budget: DayBudget, share: float, left_s: float) -> None:
    spent = round(share * budget.bytes)
    bytes_per_s = budget.bytes_per_s(spent, left_s)
    assert math.isinf(bytes_per_s) == (budget.step(spent) < Step.SPREAD)
    if not math.isinf(bytes_per_s):
        assert 0 <= bytes_per_s * max(left_s, 1.0) <= max(0, budget.bytes - spent) * (1 + 1e-9)


@given(budget=BUDGETS, begins_s=st.floats(0, DAY_S - 1), step_s=st.floats(1, 3600))
def test_whoever_follows_it_never_spends_more(
    budget: DayBudget, begins_s: float, step_s: float
) -> None:
    """From whatever hour on the last step is, streams have their least rate until midnight."""
    spent, now_s = math.ceil(0.95 * budget.bytes), begins_s
    while now_s < DAY_S - 1:
        took_s = min(step_s, DAY_S - now_s)
        bytes_per_s = budget.bytes_per_s(spent, DAY_S - now_s)
        assert bytes_per_s >= RATE_BYTES_PER_S_MIN
        spent += math.floor(bytes_per_s * took_s)
        now_s += took_s
    assert spent <= budget.bytes
