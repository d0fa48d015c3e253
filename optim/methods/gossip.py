"""Compute NoLoCo's groups and outer steps, and decide when they are stable (2506.10911).

Each peer has parameters φ_i and a momentum δ_i of its own. θ_i is what becomes of φ_i in the local
steps, G the peer's group of this outer step, itself among them. Theory::

    Δ_i = θ_i - φ_i                                          new minus old: here it is an ascent
    δ_i <- α δ_i + β mean_G(Δ_j) - γ (φ_i - mean_G(φ_j))
    φ_i <- φ_i + δ_i

The paper's equation 2 has the opposite sign before β, with which its equation 1 would diverge; the
authors' code is as above. Summed over a group the last term is zero: it moves no mean, it draws the
replicas together. With one group of all it is DiLoCo with heavy ball, whatever γ is.

How far the replicas are apart stays bounded in mean square, for many peers, if and only if::

    0 < γ < 2 (1 - α²) / (1 + α (2 / n - 1))                 n = 2: γ < 2 (1 - α²)

(The paper's equation 74 asks for α < γ < sqrt(2 + α²), which allows what diverges, and refuses
what does not.) Steps without a partner count as groups of one: the more of them, the nearer the
bound comes to ``2 (1 - α)``; below that no failure makes replicas drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from atoll.collectives.codecs import F32
from atoll.collectives.counter_rng import derive_key, random_words
from atoll.collectives.errors import ConfigError
from atoll.optim.manifest import Manifest
from atoll.optim.pseudo_gradient import pseudo_gradient


def groups(
    members: int, size: int, step: int, outbound: Collection[int] = ()
) -> list[tuple[int, ...]]:
    """Return a partition of ``range(members)`` into groups of ``size``, each in ascending order.

    It is drawn anew for each ``step``, from nothing but these numbers. What is left over is a
    smaller group, perhaps somebody alone: so nobody ever sends more, or waits for more, than
    ``size`` says, and a peer that is alone has a step as after the loss of a partner.

    No two of the ``outbound`` are in one group: they cannot exchange anything. As many as there are
    groups with somebody else to fill them get a group, drawn anew; the others are alone.
    """
    words = np.empty(members, np.uint32)
    random_words(derive_key(b"atoll-gossip-groups", step), 0, words)
    drawn = sorted(range(members), key=lambda member: (int(words[member]), member))
    apart = [member for member in drawn if member in outbound] if size > 1 else []
    others = [member for member in drawn if member not in apart]
    count = min(len(apart), len(others), -(-members // size))
    mixed: list[list[int]] = [[member] for member in apart[:count]]
    for place in range(count * (size - 1)):  # one to each, then a second one to each, ...
        if others:
            mixed[place % count].append(others.pop(0))
    rest = [others[lo : lo + size] for lo in range(0, len(others), size)]
    alone = [[member] for member in apart[count:]]
    return [tuple(sorted(group)) for group in (*mixed, *rest, *alone)]


def group_of(
    me: str, names: Sequence[str], size: int, step: int, outbound: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the group of ``me`` in the order of ``names``; ``outbound``: see :func:`groups`.

    A peer that is none of these is alone.
    """
    if me not in names:
        return (me,)
    apart = {place for place, name in enumerate(names) if name in outbound}
    mine = next(g for g in groups(len(names), size, step, apart) if names.index(me) in g)
    return tuple(names[member] for member in mine)


def gossip_bound(momentum: float, size: int) -> float:
    """Return what γ must stay below, for α ``momentum`` and groups of ``size``."""
    return 2 * (1 - momentum**2) / (1 + momentum * (2 / size - 1))


def always_stable(momentum: float, gossip: float) -> bool:
    """Return whether replicas stay together however many steps go without a partner."""
    return gossip < gossip_bound(momentum, 1)


def check_stable(momentum: float, gossip: float, size: int) -> None:
    """Raise ConfigError for a γ with which the replicas would drift apart.

    In groups of one it means nothing, and any is allowed.
    """
    bound = gossip_bound(momentum, size)
    if size > 1 and not 0 < gossip < bound:
        raise ConfigError(
            f"gossip={gossip:g} with outer_momentum={momentum:g} in groups of {size}: the replicas "
            f"would drift apart without bound; it must lie between 0 and {bound:.4g}, which is "
            "2 (1 - α²) / (1 + α (2 / n - 1))",
            fix=f"set gossip to {min(0.7, bound / 2):.2g}, or lower outer_momentum",
        )


def local_change(manifest: Manifest, phi: F32, theta: F32) -> None:
    """Turn ``theta`` into Δ = θ - φ in place, both float32[elements].

    φ counts as the dtypes of the model have rounded it: a trainer that took no step gives exactly
    zero.
    """
    grid = manifest.grid
    opposite: F32 = np.empty(grid.chunk_elements, np.float32)
    for chunk in range(grid.count):
        lo, hi = grid.bounds(chunk)
        part = opposite[: hi - lo]
        pseudo_gradient(phi[lo:hi], theta[lo:hi], part, manifest, lo, hi)
        np.negative(part, out=theta[lo:hi])


class GossipState:
    """Hold φ and δ of one peer, float32[elements] each, and scratch of that size."""

    def __init__(self, elements: int, *, momentum: float, lr: float, gossip: float) -> None:
        self.phi: F32 = np.zeros(elements, np.float32)
        self.momentum: F32 = np.zeros_like(self.phi)
        self.scratch: F32 = np.zeros_like(self.phi)
        self._alpha, self._beta, self._gamma = map(np.float32, (momentum, lr, gossip))

    def step(
        self, deltas: Iterable[F32], phis: Iterable[F32] = (), own: Callable[[], F32] | None = None
    ) -> float:
        """Take the outer step with Δ and φ of a group, in the order of its members.

        The peer's own are among them. Each array is read before the next is asked for. ``own``:
        this peer's φ as it is among ``phis``, as a codec has left it: then the differences of a
        group still sum to zero, and where they agree there is none. Without it there is no group.
        Return the standard deviation between replicas, as far as the group shows it; 0 without one.
        """
        mean, spread = self.scratch, 0.0
        _mean_of(deltas, mean)
        np.multiply(mean, self._beta, out=mean)
        np.multiply(self.momentum, self._alpha, out=self.momentum)
        np.add(self.momentum, mean, out=self.momentum)
        if own is not None:
            count = _mean_of(phis, mean)
            np.subtract(own(), mean, out=mean)
            if count > 1:
                squares = float(np.linalg.norm(mean)) ** 2 * count / (count - 1)
                spread = math.sqrt(squares / mean.size)
            np.multiply(mean, self._gamma, out=mean)
            np.subtract(self.momentum, mean, out=self.momentum)
        np.add(self.phi, self.momentum, out=self.phi)
        return spread


def _mean_of(parts: Iterable[F32], out: F32) -> int:
    """Write the mean of ``parts``, added in their order, to ``out``; return their number.

    Raise ConfigError without any.
    """
    count = 0
    for part in parts:
        if count:
            np.add(out, part, out=out)
        else:
            np.copyto(out, part)
        count += 1
    if not count:
        raise ConfigError("a mean of nothing")
    np.divide(out, np.float32(count), out=out)
    return count
