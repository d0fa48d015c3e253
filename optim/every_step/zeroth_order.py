"""Fine-tune without gradients, with one byte for each sample (Just One Byte, arXiv 2306.10015).

SPSA: of each sample a peer evaluates the loss at two points, and shares the projected gradient::

    z = +-1 for each parameter, from (seed, step, sample, number of the peer)
    rho = (L(w + eps z) - L(w - eps z)) / (2 eps), rounded to a byte (log.py)
    w <- w - lr / sqrt(n) * sum of rho z over all n samples of all peers, in order of (peer, sample)

As in the authors' code the sum is divided by the root of n, so the step of the expectation grows
with it. There z is a Gaussian of torch's, which differs between devices; a byte is 9 bits (a sign
beside a logarithm of 8), and the rounded value is never used: peers step with other values than
they send. Here all step with the byte. They let w drift in perturbing it back and forth, and copy
it every 16 steps; here each point is made from a copy, so w keeps its bits.

A joiner that has the parameters with which the run began replays the log (log.py).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from atoll.collectives.codecs import F32
from atoll.collectives.errors import CodecError, ConfigError, RemoteProtocolError
from atoll.optim.every_step.every_step import CHECK_EVERY
from atoll.optim.every_step.log import (
    LOG_BYTES_DEFAULT,
    SAMPLES_MAX,
    SCALARS,
    EveryStepLog,
    Record,
    ScalarPart,
    to_byte,
)
from atoll.optim.every_step.philox import Stream, sign_bits, signed
from atoll.optim.model_io import ModelVector
from atoll.optim.options import RunOptions, specified, takes
from atoll.optim.run_spec import RunSpec
from atoll.optim.sessions import OperationsSession
from atoll.peer.client.console import say

PIECE_ELEMENTS = 1 << 20  # signs that are made at a time, in about 16 MiB
LR_MAX = 1e30  # it travels as float32
_STEP = struct.Struct("<Hf")  # number, learning rate; then a byte for each sample


class ZerothOrder(EveryStepLog):
    """Fine-tune in steps of ``samples`` evaluations of two points each, on every peer.

    ``lr``: the same on all peers, and may be set at any time (those of the first peer are used);
    the reference fine-tunes with 0.1. The noise of a step grows with the number of parameters and
    falls with that of samples: this is for fine-tuning. ``epsilon`` and ``samples`` may differ
    between peers. ``log_bytes``: how much of the log is kept. ``check_every``: steps between two
    comparisons of all peers' parameters.

    ``seed``: of the signs, the same on all peers. A step sends 12 bytes and one for each sample.
    Memory: a copy of the parameters while it
    evaluates, no gradients. Time: beside the evaluations, the signs of all samples of all peers for
    each parameter. A small rate vanishes in bfloat16 parameters. There are no gradients, so a
    GradScaler has nothing to do here. The first step of a run is its founder's alone: the others
    are given their numbers with it. Buffers of the model are left alone: begin with the same on all
    peers, and let ``loss_fn`` not change them (``eval()``).

    ``help("atoll.optim.options")`` says what the ``options`` mean, which other methods have too,
    ``help("atoll.optim.method")`` what the calls do.
    """

    _wire = ""  # what peers compare beside the seed

    @takes(RunOptions)
    def __init__(
        self,
        model: nn.Module,
        peer: OperationsSession,
        lr: float,
        *,
        epsilon: float = 1e-3,
        samples: int = 30,
        seed: int = 0,
        log_bytes: int = LOG_BYTES_DEFAULT,
        check_every: int = CHECK_EVERY,
        **options: Unpack[RunOptions],
    ) -> None:
        if not (0 < epsilon < math.inf and 0 < samples <= SAMPLES_MAX and 0 <= seed < 2**64):
            raise ConfigError(
                f"epsilon {epsilon}, samples {samples}, seed {seed}",
                fix=f"epsilon is positive, samples 1 to {SAMPLES_MAX}, a seed has 64 bits",
            )
        spec = RunSpec(
            method="zeroth_order",
            sync_every=1,
            schedule=f"{self._wire}seed {seed}",
            codec="float32",
            **specified(options),
        )
        super().__init__(
            ModelVector(model),
            peer,
            spec,
            log_bytes,
            check_every=check_every,
            frozen=options["frozen"],
        )
        self.lr, self.epsilon, self.samples, self._seed = lr, epsilon, samples, seed
        self._tensors = list(
            zip(self._vector.parameters, self.manifest.offsets.values(), strict=True)
        )
        # This peer's place in the last exchange, if it was there: no two have the same one.
        self._number, self._has_number = 0, False
        self._said_rates = False

    @torch.no_grad()
    def step(self, loss_fn: Callable[[], float | Tensor]) -> float:
        """Take a step and return the mean loss of this peer's evaluations.

        ``loss_fn`` is called twice for each sample, and must be the same function both times: one
        batch, no dropout.

        CodecError for a loss of NaN or Inf, before anything has changed; RemoteProtocolError names
        the peer whose bytes are malformed; other errors as for a session's all-gather.
        """
        if not 0 <= self.lr < LR_MAX:
            raise ConfigError(f"lr is {self.lr}", fix=f"a learning rate is in [0, {LR_MAX:g})")
        codes, loss = self._evaluate(loss_fn)
        self.report(loss=loss)
        given = self._gather_step(_STEP.pack(self._number, self.lr) + codes)
        parts = [self._read(name, data) for name, data in given]
        lr = min(parts, key=lambda part: part[0].number)[1] if parts else 0.0
        record = Record.of(lr, (part for part, _ in parts))
        if parts and lr != float(np.float32(self.lr)) and not self._said_rates:
            self._said_rates = True
            say(f"step {self.steps} of the run has lr {lr:g}, not {self.lr:g} as here")
        self._add(record, record.to_bytes())
        self._number, self._has_number = self.present.index(self.peer.peer_name), True
        return loss

    # ------------------------------------------------------------ evaluating

    def _evaluate(self, loss_fn: Callable[[], float | Tensor]) -> tuple[bytes, float]:
        """Return a byte for each sample, and the mean loss.

        The parameters are what they were.
        """
        kept = [p.detach().clone() for p, _ in self._tensors]
        codes, losses = [], []
        try:
            for sample in range(self.samples):
                stream, pair = Stream(self.steps, sample, self._number), []
                for epsilon in (self.epsilon, -self.epsilon):
                    noise = self._for_each(partial(self._sum, [(stream, epsilon)]))
                    for (p, z), values in zip(noise, kept, strict=True):
                        p.copy_(values.float() + z)
                    pair.append(float(loss_fn()))
                losses += pair
                if not math.isfinite(sum(pair)):
                    raise CodecError(
                        f"the losses of a sample at step {self.steps} are {pair}: nothing was sent",
                        fix="lower lr or epsilon, and start this trainer again",
                    )
                codes.append(to_byte((pair[0] - pair[1]) / (2 * self.epsilon)))
        finally:
            for (p, _), values in zip(self._tensors, kept, strict=True):
                p.copy_(values)
        return bytes(codes), sum(losses) / len(losses)

    # ------------------------------------------------------------ stepping

    def _read(self, name: str, data: bytes) -> tuple[ScalarPart, float]:
        """Return what a trainer gave, and its learning rate; RemoteProtocolError if malformed."""
        if not _STEP.size <= len(data) <= _STEP.size + SAMPLES_MAX:
            raise RemoteProtocolError(
                f"what {name} sent at step {self.steps} has {len(data)} bytes"
            )
        number, lr = _STEP.unpack_from(data)
        try:
            part = ScalarPart(number, data[_STEP.size :])
            Record.of(lr, [part])
        except RemoteProtocolError as error:
            raise RemoteProtocolError(
                f"what {name} sent at step {self.steps} is malformed: {error.what}"
            ) from error
        return part, lr

    @torch.no_grad()
    def _apply(self, record: Record) -> None:
        """Apply a step to the parameters.

        All operations are rounded by themselves, so they have one result on any device.
        """
        streams = [
            Stream(self.steps, sample, part.number)
            for part in record.parts
            for sample in range(len(part.codes))
        ]
        found = SCALARS[[code for part in record.parts for code in part.codes]]
        values, factor = self._weighted(found, record.lr)
        scalars = [(s, float(v)) for s, v in zip(streams, values, strict=True) if v]
        for p, total in self._for_each(partial(self._sum, scalars)) if scalars else ():
            p.copy_(p.float() - total * factor)

    def _weighted(self, found: F32, lr: float) -> tuple[F32, float]:
        """Return by what the directions of all samples are multiplied, and then their sum.

        ``found``: the projected gradient of each sample, float32[n], the same on all peers.
        """
        return found, float(np.float32(lr / math.sqrt(max(1, found.size))))

    def _for_each(
        self, make: Callable[[int, int, torch.device], Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter with its part of a vector, float32 of its shape.

        The vector is made in pieces of many small parameters, or of parts of large ones.
        """
        at, piece, end = 0, torch.empty(0), 0
        for p, (lo, hi) in self._tensors:
            parts = [piece[lo - at : hi - at].to(p.device)]
            while end < hi:
                at, end = end, min(end + PIECE_ELEMENTS, self.manifest.elements)
                piece = make(at, end, p.device)
                parts.append(piece[: hi - at])
            yield p, torch.cat(parts).view(p.shape)

    def _sum(
        self, scalars: Sequence[tuple[Stream, float]], lo: int, hi: int, device: torch.device
    ) -> Tensor:
        """Return the sum of all z, each times its value, for elements lo to hi - 1.

        They are added one after the other.
        """
        total = torch.zeros(hi - lo, device=device)
        together = max(1, PIECE_ELEMENTS // (hi - lo))
        for first in range(0, len(scalars), together):
            some = scalars[first : first + together]
            every = sign_bits(self._seed, [stream for stream, _ in some], lo, hi, device)
            for bits, (_, value) in zip(every, some, strict=True):
                total += signed(value, bits)
        return total

    def _forget(self) -> None:
        # Until the next exchange; what it gives to this one does not count.
        self._number, self._has_number = 0, False

    def _is_whole(self) -> bool:
        return super()._is_whole() and self._has_number

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"number": self._number if self._has_number else -1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        number = int(state["number"])
        self._number, self._has_number = max(0, number), number >= 0
