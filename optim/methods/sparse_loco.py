"""Train by SparseLoCo: one element of 64 in two bits, with error feedback (arXiv 2508.15706)."""

from __future__ import annotations

from typing import Unpack

from torch import nn

from atoll.optim.inner import Inner
from atoll.optim.methods.synchronous import SynchronousMethod
from atoll.optim.options import SpeedOptions, specified, takes
from atoll.optim.replay.recorder import Replay
from atoll.optim.run_spec import RunSpec
from atoll.optim.sessions import TrainerSession


class SparseLoCo(SynchronousMethod):
    """Train in rounds that send little of each pseudo-gradient, and keep the rest for later.

    After ``sync_every`` local steps each peer r sends little of its pseudo-gradient, and keeps what
    it has left out::

        a = decay e_r + (θ - θ_r)    q_r = codec(a)    e_r = a - q_r    θ = θ - outer_lr AGG(q)

    ``help("atoll.optim.options")`` says what the ``options`` mean, which other methods have too
    (``replay`` as for DiLoCo), ``help("atoll.optim.method")`` what the calls do.

    There is no outer momentum: error feedback takes its place.
    ``aggregate``: "senders" averages each element over the peers that sent it, as the authors'
    code does; "all" over all peers, as the paper says. Peers seldom send the same elements, so
    with R peers a step of "all" is up to R times smaller, and ``outer_lr`` 1 belongs to "senders".
    The authors' code applies its rate twice, in e and in the step: its 0.8 is 0.64 here.

    "topk" keeps the 64 largest of 4096 *consecutive* elements of all parameters end to end, in the
    order of their names, not of tiles of 64 x 64; its four values are of one chunk (262,144
    elements in large models), not of one tensor. Parts of it have 0.22 bits per element; each peer
    receives those of all others, so this is for some dozens of peers. Of more than 128 the results
    are sent as float32. Any codec will do: "int4" sends everything in 4 bits.

    e_r is float32, in this peer's daemon, and is forgotten when that is started again or loads the
    run's state. A round that goes on without this peer leaves it alone, and θ_r too.
    """

    @takes(SpeedOptions)
    def __init__(
        self,
        model: nn.Module,
        inner: Inner,
        sync_every: int,
        peer: TrainerSession,
        *,
        outer_lr: float = 1.0,
        decay: float = 0.95,
        aggregate: str = "senders",
        codec: str = "topk",
        replay: Replay | None = None,
        **options: Unpack[SpeedOptions],
    ) -> None:
        spec = RunSpec(
            method="sparse_loco",
            sync_every=sync_every,
            outer="sgd",
            outer_lr=outer_lr,
            outer_momentum=0.0,
            codec=codec,
            aggregate=aggregate,
            error_feedback=decay,
            **specified(options),
        )
        super().__init__(model, inner, peer, spec, options, replay)
