"""Choose the outer learning rate by the number of peers that are in the mean of a round.

Scaling laws for DiLoCo (arXiv 2503.09799) found the best rates for 1, 2, 4 and 8 peers, whatever
the size of the model, at about 30 local steps per round. Between them this interpolates linearly in
log2 of the number, and beyond their ends the rate is constant. It is also the whole correction for
peers that leave: of M pseudo-gradients that are nearly orthogonal the mean is about 1/sqrt(M) long,
so with fewer of them steps become longer, and a smaller rate takes some of that back.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import Literal, TypeAlias

from atoll.collectives.errors import ConfigError

OuterRate: TypeAlias = float | Literal["by_peers"]  # as people give it to a method
BEST = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}
# C libraries may differ in the last bit of a logarithm, and all peers need the same rate.
DIGITS = 6


@cache
def outer_rate(peers: int) -> float:
    """Return the best outer learning rate for a mean of so many peers, 1 or more."""
    last = max(BEST)
    if peers >= last:
        return BEST[last]
    for (low, rate), (high, rate_above) in pairwise(BEST.items()):
        if peers < high:
            part = math.log2(peers / low) / math.log2(high / low)
            return round(rate + (rate_above - rate) * part, DIGITS)
    raise AssertionError(f"{peers} peers")


def factor_of(rate: OuterRate) -> tuple[float, bool]:
    """Return what a RunSpec says of a rate: a number, and whether it scales ``outer_rate``.

    ConfigError for a text other than "by_peers".
    """
    if isinstance(rate, str) and rate != "by_peers":
        raise ConfigError(f"outer_lr is {rate!r}", fix='give it a number, or "by_peers"')
    return (1.0, True) if isinstance(rate, str) else (rate, False)
