"""Apply the outer optimizer to the averaged pseudo-gradient of a round.

Pure arithmetic on flat chunks. Each daemon runs it on the same bytes and must get the same bits,
so each operation is a separate, rounded ufunc in the arrays' own dtype and in a fixed order:
nothing here can be fused into a multiply-add or be computed in a wider type in between. Where there
are native kernels they do the same, bit for bit.

The first rounds of a run may be warm ones, each of which gives it the mean of the peers
(``RunSpec.warm_rounds``). The outer learning rate may follow from the number of peers that are in
the mean of a round (``outer_rate``).
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.chunks import ChunkGrid, EncodedLayout, encoded_layout
from atoll.collectives.codecs import F32, U8, Decoder, get_codec
from atoll.collectives.errors import CodecError, ConfigError
from atoll.collectives.native import KERNELS, Rule
from atoll.optim.run_spec import MOMENTUM_CODECS, RunSpec

Floats: TypeAlias = NDArray[np.float32] | NDArray[np.float64]
OuterRate: TypeAlias = float | Literal["by_peers"]  # as people give it to a method
# Scaling laws for DiLoCo (arXiv 2503.09799) found these best rates, whatever the size of the model,
# at about 30 local steps per round. Between them the rate is interpolated linearly in log2 of the
# number of peers, and beyond their ends it is constant. It is also the whole correction for peers
# that leave: of M pseudo-gradients that are nearly orthogonal the mean is about 1/sqrt(M) long, so
# with fewer of them steps become longer, and a smaller rate takes some of that back.
BEST = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}
# C libraries may differ in the last bit of a logarithm, and all peers need the same rate.
DIGITS = 6


class OuterStep:
    """Apply a committed round of a run to one chunk of its state.

    The result is the same wherever this is done (commits, replays, checkpoints, swarms). One
    instance per thread, because it has scratch for ``chunk_elements``.

    The momentum is kept as ``spec.momentum_codec`` encodes it (``momentum_layout``). Where that
    takes a byte for each value, it is decoded for the step and encoded again after it, block by
    block with a scale for each, as 8-bit optimizers do (Dettmers et al., arXiv 2110.02861).
    """

    def __init__(self, spec: RunSpec, chunk_elements: int) -> None:
        self._rule = cast(Rule, spec.outer)  # which a RunSpec has checked
        self._lr, self._mu, self._clip = spec.outer_lr, spec.outer_momentum, spec.outer_clip
        self._by_peers = spec.outer_lr_by_peers
        self._delay, self._fragments = spec.outer_delay, spec.fragments
        self._is_warm = spec.is_warm
        self._delta = np.empty(chunk_elements, np.float32)
        self._scratch = np.empty(chunk_elements, np.float32)
        self._packing = get_codec(spec.momentum_codec)
        self._in_place = spec.momentum_codec == MOMENTUM_CODECS[0]
        self._unpacked = np.empty(0 if self._in_place else chunk_elements, np.float32)

    def __call__(
        self,
        codec: Decoder,
        encoded: U8,
        theta: F32,
        kept: U8,
        *,
        round_number: int,
        contributors: int,
    ) -> None:
        """Apply a round's pseudo-gradient to a chunk in its place.

        ``encoded`` in ``codec`` is the chunk's pseudo-gradient of that round, the mean of those of
        its ``contributors``; ``theta`` are its parameters, and ``kept`` is its momentum as it is
        kept; float32 is aligned.

        CodecError for malformed bytes; then nothing is written.
        """
        delta = self._delta[: theta.size]
        codec.decode(encoded, delta)
        if self._in_place:
            self._move(theta, kept.view(np.float32), delta, round_number, contributors)
            return
        momentum = self._unpacked[: theta.size]
        self._packing.decode(kept, momentum)
        self._move(theta, momentum, delta, round_number, contributors)
        try:
            self._packing.encode(momentum, kept)
        except CodecError:  # it is beyond float32: a run that has come to this is lost, but equal
            np.nan_to_num(momentum, copy=False)
            self._packing.encode(momentum, kept)

    def begin(self, kept: U8, count: int) -> None:
        """Write a momentum of zero for ``count`` elements."""
        zeros = self._delta[:count]
        zeros.fill(0.0)
        self._packing.encode(zeros, kept)

    def _move(
        self, theta: F32, momentum: F32, delta: F32, round_number: int, contributors: int
    ) -> None:
        lr = self._lr * outer_rate(contributors) if self._by_peers else self._lr
        rule = self._rule
        if self._is_warm(round_number):
            rule, lr = "sgd", 1.0  # the mean of the peers; there is no momentum yet
        elif self._delay > 1:
            delayed_step(
                theta,
                momentum,
                delta,
                lr=lr,
                mu=self._mu,
                delay=self._delay,
                place=self._place(round_number),
                out_theta=theta,
                out_momentum=momentum,
                scratch=self._scratch[: theta.size],
            )
            return
        outer_step(
            rule,
            theta,
            momentum,
            delta,
            lr=lr,
            mu=self._mu,
            clip=self._clip,
            out_theta=theta,
            out_momentum=momentum,
            scratch=self._scratch[: theta.size],
        )

    def _place(self, round_number: int) -> int:
        """Return a round's place, from 0, among the ``outer_delay`` that make up a step.

        It depends on the round's number alone, so that joiners and replays agree; round 1 is INIT,
        and fragments take turns from 2 on.
        """
        return (round_number - 2) // self._fragments % self._delay


def momentum_layout(spec: RunSpec, grid: ChunkGrid) -> EncodedLayout:
    """Return where the momentum of each chunk lies among the bytes in which a run keeps it."""
    return encoded_layout(grid, get_codec(spec.momentum_codec))


def outer_step(
    rule: Rule,
    theta: Floats,
    momentum: Floats,
    delta: Floats,
    *,
    lr: float,
    mu: float,
    clip: float = 0.0,
    out_theta: Floats,
    out_momentum: Floats,
    scratch: Floats,
) -> None:
    """Take one outer step against the pseudo-gradient ``delta`` (old minus new).

    The new parameters and momentum are written to ``out_*``::

        nesterov    b' = mu b + delta    theta' = theta - lr (delta + mu b')   DiLoCo, 2311.08105
        heavy_ball  b' = mu b + delta    theta' = theta - lr b'                SlowMo, CO2, NoLoCo
        sgd         b' = b               theta' = theta - lr delta             local SGD, SparseLoCo

    ``nesterov`` is ``torch.optim.SGD(lr, momentum=mu, nesterov=True)`` with ``delta`` as gradient;
    from ``b = 0`` its first step is ``lr (1 + mu) delta``. With ``sgd`` and ``lr = 1`` the peers'
    mean takes the place of ``theta``. With a positive ``clip`` every element of b' is brought into
    [-clip, clip] before it is used (CO2, 2401.16265; its code drops the clipped values).

    All arrays are flat, of one length and one dtype (float32 in a run, float64 in tests). Nothing
    is allocated. ``out_*`` may be the inputs themselves or other buffers; ``scratch`` must overlap
    nothing.
    """
    if KERNELS is not None and not clip:
        KERNELS.outer_step(rule, theta, momentum, delta, lr, mu, out_theta, out_momentum)
        return
    mu_, lr_ = theta.dtype.type(mu), theta.dtype.type(lr)
    step = delta
    if rule == "sgd":
        np.copyto(out_momentum, momentum)
    else:
        np.multiply(momentum, mu_, out=out_momentum)
        np.add(out_momentum, delta, out=out_momentum)
        if clip:
            limit = theta.dtype.type(clip)
            np.clip(out_momentum, -limit, limit, out=out_momentum)
        step = out_momentum
    if rule == "nesterov":
        np.multiply(out_momentum, mu_, out=scratch)
        np.add(scratch, delta, out=scratch)
        step = scratch
    np.multiply(step, lr_, out=scratch)
    np.subtract(theta, scratch, out=out_theta)


def delayed_step(
    theta: Floats,
    momentum: Floats,
    delta: Floats,
    *,
    lr: float,
    mu: float,
    delay: int,
    place: int,
    out_theta: Floats,
    out_momentum: Floats,
    scratch: Floats,
) -> None:
    """Apply one of the pseudo-gradients that make up a step of delayed Nesterov.

    In delayed Nesterov (Async Local-SGD, 2401.09135, with c = 0) N = ``delay`` pseudo-gradients,
    each applied when it arrives, make up one step of "nesterov" on their mean. ``place`` 0 is the
    first of them, N - 1 the last::

        first:   b' = mu b + delta / N       others:  b' = b + delta / N
        last:    theta' = theta - lr (delta / N + mu b')
        others:  theta' = theta - lr delta / N

    So after the last one b is the paper's ``mu m + (sum of delta) / N``, and before it what is
    known of that: theta and b are enough to go on from in the middle. Together they move theta by
    ``lr (mean delta + mu b')``, as one step of "nesterov" does.

    Arrays are those of ``outer_step``, and so is what they may overlap.
    """
    count, mu_, lr_ = (theta.dtype.type(value) for value in (delay, mu, lr))
    np.divide(delta, count, out=scratch)
    if place == 0:
        np.multiply(momentum, mu_, out=out_momentum)
        momentum = out_momentum
    np.add(momentum, scratch, out=out_momentum)
    np.multiply(scratch, lr_, out=scratch)
    np.subtract(theta, scratch, out=out_theta)
    if place == delay - 1:
        np.multiply(out_momentum, mu_, out=scratch)
        np.multiply(scratch, lr_, out=scratch)
        np.subtract(out_theta, scratch, out=out_theta)


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
