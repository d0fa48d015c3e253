"""Clip and blur what leaves a machine: differential privacy for runs of adapters.

Each peer releases, in place of its pseudo-gradient d of a round (2406.02532 and the Gaussian
mechanism of Dwork and Roth 2014; clipped as in DP-SGD, 1607.00133, but once for a round)::

    d' = d min(1, C / |d|) + N(0, (sigma C)^2)        for each of its elements

Nobody but this machine sees d: the run's daemons, a coordinator and the other peers get d', so no
one has to be trusted. The price is that every peer blurs for itself. The mean of n peers has noise
of sigma C / sqrt(n) in each element, beside which a mean of gradients with d parameters has a norm
of C at most: sqrt(d) sigma / sqrt(n) is to be of the order of 1, which is for adapters of some
thousand parameters (LoRA), or for many peers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError
from atoll.optim.inner import Inner
from atoll.optim.methods.diloco import DiLoCo
from atoll.optim.pseudo_gradient import Writer
from atoll.optim.sessions import LeadingRank, TrainerSession

RELEASES = "releases"  # in a saved state: how many there were, by their noise


class PrivateDiLoCo(DiLoCo):
    """Train with DiLoCo, and release no more of this machine's data than a budget allows.

    ``clip``: the largest norm of what a round releases; about what a round's pseudo-gradient has.
    ``noise``: the noise multiplier sigma, at each peer. Both are this peer's own, and need not be
    equal on all. All else is as for ``DiLoCo``, but for ``buffers``, ``replay`` and ``validators``,
    which it does not take, and ranks: it is for one process. Costs 20 bytes of the trainer's host
    memory for each parameter, 16 of them at the end of a round only.

    The guarantee: ``epsilon(delta)`` for one peer's *whole* data against everybody else, where two
    data sets are neighbours if in one of them this peer has none (its rounds release noise alone).
    It is of the releases that this object has counted, which a saved state carries on; a script
    that is started again without it begins at none, and what it released since the last state that
    was saved has to be added. Weights say nothing: each submission weighs 1, and buffers of the
    model stay here. What is not covered: the parameters with which a founder begins the run, so
    begin with public ones; that this peer takes part at all, when, and with how many steps; what
    the script itself tells the run, such as a loss given to ``report``; and attacks on the last
    bits of floating-point noise (Mironov 2012).

    When it helps: for adapters on data that must not be told, with some epsilon below 10 over a few
    dozen rounds. On the convergence bench, with sigma 1, four peers and 0.8M parameters, it gets no
    signal at all, as the formula above says: from 2.1 nats per byte it went to 4.5, data-parallel
    to 1.5.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Inner,
        sync_every: int,
        peer: TrainerSession,
        *,
        clip: float,
        noise: float,
        **options: Any,
    ) -> None:
        if not (0 < clip < math.inf and 0 < noise < math.inf):
            raise ConfigError(
                f"clip {clip}, noise {noise}",
                fix="both are positive: no noise, no promise",
            )
        if options.get("replay") is not None or options.get("validators"):
            raise ConfigError(
                "a private run shows nobody its steps",
                fix="leave replay and validators out",
            )
        if options.setdefault("buffers", False):
            raise ConfigError(
                "buffers of the model would leave this machine as they are",
                fix="leave buffers out, or False on all peers",
            )
        if isinstance(peer.channel, LeadingRank):
            raise ConfigError(
                "a private trainer is one process: with several ranks each would blur for itself",
                fix="train in one process",
            )
        self._clip, self._noise = clip, noise
        self._spent: dict[float, int] = {}  # releases, by their noise
        # Nobody may know the seed.
        self._random = np.random.Generator(np.random.Philox())
        super().__init__(model, inner, sync_every, peer, **options)

    def _begin_work(self) -> None:
        super()._begin_work()
        self._start: F32 = np.zeros(self.manifest.elements, np.float32)
        self._vector.write(self._start)

    def _hand_over(self, write: Writer, weight: float, fragment: int) -> None:
        released = self._released(write)
        super()._hand_over(
            lambda out, lo: np.copyto(out, released[lo : lo + out.size]), 1.0, fragment
        )

    def _released(self, write: Writer) -> F32:
        """Return parameters that lie where this round began, less what may be known of its steps.

        They are drawn once: who saw two drawings of one round would know more.
        """
        released = np.zeros_like(self._start)
        write(released, 0)
        delta = np.subtract(self._start, released, out=released)
        norm = float(np.linalg.norm(delta.astype(np.float64)))
        delta *= np.float32(min(1.0, self._clip / norm) if norm else 1.0)
        delta += self._random.normal(0.0, self._noise * self._clip, delta.size).astype(np.float32)
        self._spent[self._noise] = self._spent.get(self._noise, 0) + 1
        return np.subtract(self._start, delta, out=delta)

    @property
    def trainer_bytes(self) -> float:
        return 20.0  # where the round began; what is released; noise in float64 and in float32

    @property
    def releases(self) -> int:
        """Return how many rounds have been released, with those of the states that were loaded."""
        return sum(self._spent.values())

    def epsilon(self, delta: float) -> float:
        """Return the epsilon that the releases so far have spent, at this delta.

        By Renyi accounting (1702.07476) of Opacus: ConfigError where that is not installed.
        """
        if not 0 < delta < 1:
            raise ConfigError(f"delta is {delta}", fix="it lies in (0, 1), 1e-5 say")
        try:
            from opacus.accountants import RDPAccountant
        except ImportError as error:
            raise ConfigError(
                f"what is spent is computed by Opacus, which is not here: {error}",
                fix="pip install 'atoll[privacy]'",
            ) from error
        if not self.releases:
            return 0.0
        accountant = RDPAccountant()
        accountant.history = [(noise, 1.0, count) for noise, count in self._spent.items()]
        return float(accountant.get_epsilon(delta))

    def _position(self) -> dict[str, Any]:
        return super()._position() | {RELEASES: [list(one) for one in self._spent.items()]}

    def _restore_anywhere(self, position: Mapping[str, Any]) -> None:
        super()._restore_anywhere(position)
        for noise, count in position[RELEASES]:
            self._spent[float(noise)] = self._spent.get(float(noise), 0) + int(count)
