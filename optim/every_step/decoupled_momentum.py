"""Run DeMo: peers send the fastest-moving parts of their momentum at each step (2411.19870).

Here with peers m, rate η, weight decay λ, momentum δ of one's own and its decay β::

    θ <- (1 - η λ) θ;  δ <- β δ + η g
    q <- the topk largest of each tile of DCT(δ);  δ <- δ - inverse DCT(q)
    Q <- mean of each coefficient over those peers that sent it;  θ <- θ - η sign(inverse DCT(Q))

The authors' code adds up with `scatter_reduce`, whose order varies on GPUs, and warns that peers
drift apart. Here each peer's coefficients are added in the order of peers, each place once, and the
inverse is exact (dct.py): all peers have the same signs, whatever they run on. sign(0) is 0.

From Psyche comes ``values="sign"``: one bit for each coefficient. What is taken out of δ then is
the coefficient itself, as there. Psyche's overlap by one step and its look-ahead are not here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.collectives.errors import CodecError, ConfigError, RemoteProtocolError
from atoll.optim.every_step.dct import dct, inverse_dct, inverse_signs, tiles_of, untiled
from atoll.optim.every_step.every_step import CAME_BACK, CHECK_EVERY, EveryStepGather
from atoll.optim.every_step.exchange import check_part
from atoll.optim.every_step.grad_scaling import GradScaling, Scale
from atoll.optim.every_step.tiles import (
    TILE_MAX,
    VALUES,
    Chosen,
    Tiling,
    pack_part,
    part_bytes,
    unpack_part,
)
from atoll.optim.model_io import ModelVector, trainable
from atoll.optim.options import BufferOptions, specified, takes
from atoll.optim.run_spec import RunSpec
from atoll.optim.sessions import OperationsSession
from atoll.peer.client.console import say

MOMENTUM = "momentum"  # in the optimizer's state of a parameter
_RATES = struct.Struct("<dd")  # lr and weight decay of a group of parameters
GROUPS_MAX = 256  # of parameters; each costs 16 bytes at every step
PIECE_ELEMENTS = 1 << 21  # decoded at a time, in about 100 MiB


class DeMo(EveryStepGather, Optimizer):
    """Train with DeMo, which is the optimizer itself, in place of AdamW and the like.

    It is one for learning rate schedulers too.

    ``params``: groups with an ``lr`` and ``weight_decay`` of their own, as other optimizers take
    them; by default all trainable parameters of the model. All peers take the rates of the first
    peer, so a trainer that joins must bring its schedule to step ``steps`` to agree with them, and
    is told if it does not. ``decay``: how much of the momentum stays in a step. ``topk``: how many
    coefficients of each ``tile`` x ``tile`` elements are sent, as ``values``: "bfloat16", "sign" or
    "float32". ``check_every``: steps between two comparisons of all peers' parameters.

    A step sends ``message_bytes`` at most: for each coefficient its place (12 bits in tiles of 64 x
    64) and 16, 1 or 32 bits, so 28 * 32 / 4096 = 0.22 bits for each parameter; a bit for each tile;
    16 bytes for each group. Each peer receives what all others send. ConfigError is raised for a
    message of over 16 MiB, that of some 600 million parameters. What is over 64 KiB, or 512 KiB of
    all together, takes several rounds of the run. The paper's numbers are the defaults; the
    momentum (float32, on the parameters' device) is the only memory.

    All peers have equal parameters, and a momentum of their own, which begins at zero when they
    join. A peer that begins a run with other parameters than the founder's counts from its second
    step on. A small rate vanishes in bfloat16 parameters: keep them in float32, with autocast. With
    a GradScaler a peer whose gradients have overflowed gives nothing, keeps its momentum, and still
    takes the step of the others; if all have, nothing moves, and the step does not count.

    ``help("atoll.optim.options")`` says what the ``options`` mean, which other methods have too,
    ``help("atoll.optim.method")`` what the calls do.
    """

    @takes(BufferOptions)
    def __init__(
        self,
        model: nn.Module,
        peer: OperationsSession,
        params: Iterable[Any] | None = None,
        *,
        lr: float = 4e-4,
        weight_decay: float = 0.0,
        decay: float = 0.999,
        topk: int = 32,
        tile: int = TILE_MAX,
        values: str = "bfloat16",
        check_every: int = CHECK_EVERY,
        **options: Unpack[BufferOptions],
    ) -> None:
        _check_numbers(lr, weight_decay, decay, values)
        named = trainable(model)
        groups = list(params) if params is not None else list(named.values())
        Optimizer.__init__(self, groups, {"lr": lr, "weight_decay": weight_decay})
        self._groups = self._groups_of(named)
        self._names = list(named)
        self._tensors = list(named.values())
        self._tilings = [Tiling.of(p.shape, tile, topk) for p in self._tensors]
        self._decay, self._values = decay, values
        self.message_bytes = len(self.param_groups) * _RATES.size + sum(
            part_bytes(tiling, values) for tiling in self._tilings
        )
        check_part(self.message_bytes)
        spec = RunSpec(
            method="demo",
            sync_every=1,
            schedule=f"tile {tile}, topk {topk}, decay {decay:g}, values {values}",
            codec="float32",
            **specified(options),
        )
        self._said_rates = False
        self._scaling = GradScaling([self])  # this is an optimizer that scalers step
        EveryStepGather.__init__(
            self,
            ModelVector(model),
            (),
            peer,
            spec,
            check_every=check_every,
            buffers=options["buffers"],
            frozen=options["frozen"],
        )
        self._forget()

    def _groups_of(self, named: Mapping[str, nn.Parameter]) -> list[int]:
        """Return the number of each parameter's group, in order of name.

        Raise ConfigError if the groups lack a parameter, hold others than the model's, or are too
        many.
        """
        group = {id(p): i for i, g in enumerate(self.param_groups) for p in g["params"]}
        missing = [name for name, p in named.items() if id(p) not in group]
        if missing or len(group) > len(named):
            why = f"lack {', '.join(missing[:5])}" if missing else "hold what is not the model's"
            raise ConfigError(
                f"the parameters given to DeMo {why}",
                fix="give it all trainable parameters of the model, and freeze what is not trained",
            )
        if len(self.param_groups) > GROUPS_MAX:
            raise ConfigError(f"{len(self.param_groups)} groups of parameters, over {GROUPS_MAX}")
        return [group[id(p)] for p in named.values()]

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Take one step of all peers together; return what ``closure`` returned.

        A parameter without a gradient has one of zeros.

        Raise CodecError for gradients with NaN or Inf, before anything has changed;
        RemoteProtocolError, which names the peer, for malformed bytes; other errors as for a
        session's all-gather.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self.report(loss=loss)
        scale = self._scaling.take(self)
        usable = self._check_gradients(scale)
        given = self._gather_step(self._message(scale) if usable else b"", usable)
        parts = [self._read(name, data) for name, data in given]
        if parts:
            self._compare_rates(given[0][0], parts[0][0])
            for i, p in enumerate(self._tensors):
                if not p.numel():
                    continue
                lr, weight_decay = parts[0][0][self._groups[i]]
                signs = self._signs(i, [chosen[i] for _, chosen in parts])
                _update(p, signs, lr, weight_decay)
            self.steps += 1
        return loss

    # ------------------------------------------------------------ what is sent

    def _message(self, scale: Scale) -> bytes:
        """Return the message of this step, and take what is in it out of the momentum.

        It has the rates of all groups, then the part of each parameter in order of name.
        """
        rates = [_RATES.pack(g["lr"], g["weight_decay"]) for g in self.param_groups]
        return b"".join(rates + [self._part(i, scale) for i in range(len(self._tensors))])

    def _part(self, i: int, scale: Scale) -> bytes:
        p, tiling, momentum = self._tensors[i], self._tilings[i], self._momentum(i)
        momentum.mul_(self._decay)
        if p.grad is not None:
            lr = float(self.param_groups[self._groups[i]]["lr"])
            momentum.add_(_scaled_back(p.grad, scale), alpha=lr)
        if not p.numel():
            return b""
        coefficients = dct(tiles_of(momentum, tiling)).flatten(1)
        places = coefficients.abs().topk(tiling.topk, 1, sorted=False).indices.sort(1).values
        sent = coefficients.gather(1, places)
        if self._values == "bfloat16":
            sent = sent.bfloat16().float()
        taken = torch.zeros_like(coefficients).scatter_(1, places, sent)
        shape = (-1, tiling.height, tiling.width)
        momentum.sub_(untiled(inverse_dct(taken.view(shape)), tiling).view_as(momentum))
        return pack_part(tiling, places.cpu().numpy(), sent.cpu().numpy(), self._values)

    def _momentum(self, i: int) -> Tensor:
        momentum = self.state[self._tensors[i]][MOMENTUM]
        assert isinstance(momentum, Tensor)
        return momentum

    def _forget(self) -> None:
        for p in self._tensors:
            self.state[p][MOMENTUM] = torch.zeros_like(
                p, dtype=torch.float32, memory_format=torch.contiguous_format
            )

    def _check_gradients(self, scale: Scale) -> bool:
        """Return whether the gradients can be used.

        Raise CodecError if they cannot, and there is no GradScaler that will do something about it.
        """
        bad = [
            name
            for name, p in zip(self._names, self._tensors, strict=True)
            if p.grad is not None and not bool(_scaled_back(p.grad, scale).isfinite().all())
        ]
        if bad and not scale.scaled:
            raise CodecError(
                f"NaN or Inf in the gradients of {', '.join(bad[:5])} ({len(bad)} parameters) at "
                f"step {self.steps}: nothing was sent",
                fix="lower the learning rate, clip gradients or use a GradScaler, and start this "
                "trainer again",
            )
        return not bad and not scale.overflowed

    # ------------------------------------------------------------ what has come

    def _read(self, name: str, data: bytes) -> tuple[list[tuple[float, float]], list[Chosen]]:
        """Return the rates of each group, and the coefficients of each parameter, from a message.

        Raise RemoteProtocolError, with the peer's ``name``, if it is malformed.
        """
        try:
            at = len(self.param_groups) * _RATES.size
            if len(data) < at:
                raise CodecError(f"{len(data)} bytes are too few")
            rates = list(_RATES.iter_unpack(data[:at]))
            if not all(0 <= r < float("inf") for pair in rates for r in pair):
                raise CodecError("a learning rate or weight decay is negative or not finite")
            chosen = []
            for tiling in self._tilings:
                part, at = unpack_part(tiling, data, at, self._values)
                chosen.append(part)
            if at != len(data):
                raise CodecError(f"{len(data) - at} bytes too many")
        except CodecError as error:
            raise RemoteProtocolError(
                f"what {name} sent at step {self.steps} is malformed: {error.what}",
                fix="run the same version of atoll on all peers",
            ) from error
        return rates, chosen

    def _signs(self, i: int, parts: Sequence[Chosen]) -> Tensor:
        """Return the signs of the step of parameter i: float32, in its shape, on its device."""
        p, tiling = self._tensors[i], self._tilings[i]
        tiles = torch.zeros(tiling.count, tiling.height, tiling.width, device=p.device)
        step = max(1, PIECE_ELEMENTS // tiling.elements)
        for lo in range(0, tiling.count, step):
            piece = tiles[lo : lo + step]
            begin, end = lo * tiling.elements, lo * tiling.elements + piece.numel()
            total = torch.zeros(piece.numel(), dtype=torch.float64, device=p.device)
            count = torch.zeros_like(total)
            for part in parts:
                within = slice(*np.searchsorted(part.places, (begin, end)))
                places = torch.from_numpy(part.places[within] - begin).to(p.device)
                total[places] += torch.from_numpy(part.values[within]).to(p.device).double()
                count[places] += 1  # no place twice: nothing depends on an order
            piece.copy_(inverse_signs((total / count.clamp_(min=1)).view_as(piece)))
        return untiled(tiles, tiling).view(p.shape)

    def _compare_rates(self, first: str, theirs: Sequence[tuple[float, float]]) -> None:
        mine = [(float(g["lr"]), float(g["weight_decay"])) for g in self.param_groups]
        if mine != list(theirs) and not self._said_rates:
            self._said_rates = True
            say(
                f"at step {self.steps} of the run the learning rates and weight decays here "
                f"are {mine}; those of {first}, {theirs}, are used. Set schedules to that step."
            )

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the momentum of this peer, and the number of steps of the run."""
        return {**Optimizer.state_dict(self), "steps": self.steps}

    def load_state_dict(  # type: ignore[override]
        self, state_dict: dict[str, Any]
    ) -> None:
        """Load what ``state_dict`` gave; raise ConfigError for anything else.

        If others have trained for longer, their parameters and steps are taken at the next step,
        and the momentum is forgotten.
        """
        steps = state_dict.get("steps")
        if type(steps) is not int or steps < 0:
            raise ConfigError("not a state of DeMo", fix="load what DeMo.state_dict() gave")
        Optimizer.load_state_dict(self, state_dict)
        for mine, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, key in zip(mine["params"], saved["params"], strict=True):
                momentum = state_dict["state"][key][MOMENTUM]  # torch rounds it to p's dtype
                self.state[p][MOMENTUM] = momentum.to(p.device, torch.float32, copy=True)
        self.steps, self._is_new, self._is_back = steps, True, True
        self._came_back = CAME_BACK
        self._follow()


def _check_numbers(lr: float, weight_decay: float, decay: float, values: str) -> None:
    if not (lr >= 0 and weight_decay >= 0 and 0 <= decay < 1):
        raise ConfigError(
            f"lr {lr}, weight_decay {weight_decay}, decay {decay}",
            fix="rates are not negative, and decay is in [0, 1)",
        )
    if values not in VALUES:
        raise ConfigError(f"values is {values!r}", fix=f"use one of {', '.join(VALUES)}")


def _scaled_back(gradient: Tensor, scale: Scale) -> Tensor:
    """Return the gradient as it is without a GradScaler, in float32."""
    gradient = gradient.float()
    return gradient * scale.factor if scale.scaled else gradient


def _update(p: Tensor, signs: Tensor, lr: float, weight_decay: float) -> None:
    """Take the step of one parameter in place, with the same bits on any device.

    It is made in float32, or float64, with one rounding for each operation: lr times a sign is
    exact.
    """
    working = p if p.dtype in (torch.float32, torch.float64) else p.float()
    if weight_decay:
        working.mul_(1 - lr * weight_decay)
    working.sub_(signs, alpha=lr)
    if working is not p:
        p.copy_(working)
