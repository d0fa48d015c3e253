"""Choose by L-GreCo each layer's compression, under a budget for the error of all (2210.17357).

Layers differ in how much an error in them hurts, and in what a smaller one costs. Given the error
and the size of each layer under each of its choices, a dynamic program finds the smallest total
size whose total error is at most that of a uniform choice, times ``alpha``::

    E = alpha * sum_l error[l][uniform]       cost[l][c] = max(1, ceil(error[l][c] / (E / D)))
    best[l][b] = min over c of best[l - 1][b - cost[l][c]] + size[l][c],    b <= D + L

As each cost is rounded up, by less than one of D buckets, L more of them make sure that the uniform
choice is always among those that are searched (for ``alpha`` 1): what is found is never larger, and
its error at most E (1 + L / D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import ConfigError
from atoll.optim.run_spec import settings_text

BUCKETS = 10_000  # the paper's D
_NEVER = np.int64(2**62)  # a size that nothing has


@dataclass(frozen=True, kw_only=True)
class LGreCo:
    """Choose anew every ``every`` steps.

    ``alpha``: how much of the uniform choice's error is allowed.
    """

    wire: ClassVar[str] = "LGreCo"
    every: int = 100
    alpha: float = 1.0

    def __str__(self) -> str:
        return settings_text(self.wire, self)

    def __post_init__(self) -> None:
        if self.every < 1 or not 0 < self.alpha <= 100:
            raise ConfigError(f"{self}", fix="every is at least 1, and alpha in (0, 100]")

    def is_due(self, step: int) -> bool:
        return step > 0 and step % self.every == 0

    def choose(
        self,
        errors: NDArray[np.floating],
        sizes: NDArray[np.integer],
        uniform: NDArray[np.integer],
        buckets: int = BUCKETS,
    ) -> NDArray[np.intp]:
        """Return the choice of each layer, intp[layers].

        ``errors``, (layers, choices): infinite where there is no such choice; ``sizes``, likewise,
        in any whole unit; ``uniform``, intp[layers], the choices that give the budget. If nothing
        fits it (``alpha`` below 1) each layer gets the choice of the least error.
        """
        errors = np.where(np.isnan(errors), np.inf, errors).astype(np.float64)
        every = np.arange(len(errors))
        budget = self.alpha * float(errors[every, uniform].sum())
        if not (np.isfinite(budget) and budget > 0):
            # Nothing is lost in any layer, or something cannot be measured: as if nobody asked.
            return np.array(uniform, np.intp)
        with np.errstate(over="ignore"):
            costs = np.maximum(1, np.ceil(errors * (buckets / budget)))
        last = buckets + len(errors)
        best = np.full(last + 1, _NEVER)  # the least size at total cost b exactly
        best[0] = 0
        chosen = np.zeros((len(errors), last + 1), np.int16)
        for layer in every:
            best = _add_layer(best, costs[layer], sizes[layer], chosen[layer])
        left = int(best.argmin())  # the least error among several
        if best[left] >= _NEVER:
            return np.array(errors.argmin(axis=1), np.intp)
        found = np.zeros(len(errors), np.intp)
        for layer in every[::-1]:
            found[layer] = chosen[layer, left]
            left -= int(costs[layer, found[layer]])
        return found


def _add_layer(
    best: NDArray[np.int64],
    costs: NDArray[np.float64],
    sizes: NDArray[np.integer],
    chosen: NDArray[np.int16],
) -> NDArray[np.int64]:
    """Return the table with one more layer; ``chosen`` gets the choice of each entry."""
    longer = np.full_like(best, _NEVER)
    for choice, (cost, size) in enumerate(zip(costs, sizes, strict=True)):
        if cost >= best.size:
            continue
        shift = int(cost)
        tried = best[: best.size - shift] + np.int64(size)
        better = tried < longer[shift:]
        np.copyto(longer[shift:], tried, where=better)
        np.copyto(chosen[shift:], choice, where=better)
    # Sizes have been added to what cannot be.
    return np.minimum(longer, _NEVER)
