"""Train data-parallel on the mean of all peers' gradients at every step, in full or compressed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.collectives.codecs import F32
from atoll.collectives.errors import CodecError, ConfigError
from atoll.optim.compressors import Compressor, Dense
from atoll.optim.every_step.every_step import CHECK_EVERY, EveryStep
from atoll.optim.every_step.exchange import Exchange
from atoll.optim.every_step.grad_scaling import GradScaling, Scale
from atoll.optim.inner import Inner, inners_of
from atoll.optim.model_io import ModelVector
from atoll.optim.options import BufferOptions, specified, takes
from atoll.optim.run_spec import RunSpec
from atoll.optim.sessions import OperationsSession, check_alone


class GradientAverage(EveryStep):
    """Replace gradients by their mean over all peers before each step of ``inner``.

    The baseline, and a method for fast networks: bytes and waiting are those of every step. All
    peers hold the same parameters and the same inner state after each step. The first step of a run
    is made of the gradients of those whose parameters were the founder's, so begin all with the
    same seed or file: with other parameters they take the founder's and count from the second step
    on.

    ``codec``: of vectors that are summed up; ``compressor``: see ``atoll.optim.compressors``. One
    with a momentum of its own (``DGC``) takes no inner optimizer that has momentum too, which would
    apply it twice: one of whose groups has a ``momentum``, a ``beta1`` or a first of its ``betas``
    other than 0, as SGD and RMSprop may have and Adam, AdamW, NAdam, RAdam, Adamax and Muon do.

    Gradients may be accumulated over several backward passes before a step. With a GradScaler a
    peer whose gradients have overflowed gives nothing and still applies the mean of the others; if
    all have, nobody's parameters move, and the step does not count. ``inner`` may be a sequence:
    then the first of them to step exchanges the gradients of all. ``check_every``: steps between
    two comparisons of all peers' parameters. Clip gradients before a step, or the mean in a step
    pre-hook that is registered after this object is made.

    ``help("atoll.optim.options")`` says what the ``options`` mean, which other methods have too,
    ``help("atoll.optim.method")`` what the calls do.
    """

    @takes(BufferOptions)
    def __init__(
        self,
        model: nn.Module,
        inner: Inner,
        peer: OperationsSession,
        *,
        codec: str = "float32",
        compressor: Compressor | None = None,
        check_every: int = CHECK_EVERY,
        **options: Unpack[BufferOptions],
    ) -> None:
        self._compressor = compressor or Dense()
        vector = ModelVector(model)
        check_alone("GradientAverage", peer, vector.ranks)
        inners = inners_of(inner, vector.parameters)
        if self._compressor.has_momentum:
            _check_momentum(inners, self._compressor)
        spec = RunSpec(
            method="gradient_average",
            sync_every=1,
            schedule=str(compressor or ""),
            codec=codec,
            **specified(options),
        )
        self._compressor.begin(vector.manifest, codec, peer.peer_name)
        self._gradient: F32 = np.empty(vector.manifest.elements, np.float32)
        self._mean: F32 | None = None  # of the last step; nobody had one if it is None
        self._scale = Scale()
        self._to_step: set[int] = set()  # inner optimizers that have not used it yet
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        # What can fail here has been checked before anything is attached.
        super().__init__(
            vector,
            inners,
            peer,
            spec,
            check_every=check_every,
            buffers=options["buffers"],
            frozen=options["frozen"],
        )

    @property
    def trainer_bytes(self) -> float:
        return 4.0 + self._compressor.trainer_bytes  # its own gradient

    def _before_inner(self, inner: Optimizer, args: Any, kwargs: Any) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise ConfigError(
                "step() with a closure: it would make gradients that nobody else has",
                fix="call backward() before step(), and give step() nothing; in Lightning set "
                "self.automatic_optimization = False and step what "
                "self.optimizers(use_pl_optimizer=False) returns, or take DiLoCo",
            )
        scale = self._scaling.take(inner)
        if id(inner) not in self._to_step:
            self._scale = scale
            self._average()
            self._to_step = set(map(id, self._inners))
        if scale.scaled and scale.scale != self._scale.scale:
            raise ConfigError(
                "a GradScaler has unscaled the gradients of one inner optimizer before the step, "
                "and not those of another",
                fix="call scaler.unscale_() with all inner optimizers, or with none",
            )
        self._to_step.remove(id(inner))
        if self._mean is None:
            self._hide_gradients(inner)
        else:
            self._vector.read_gradients(self._mean, _parameters(inner))

    def _after_inner(self, _inner: Optimizer, _args: Any, _kwargs: Any) -> None:
        for p, gradient in self._hidden:
            p.grad = gradient
        self._hidden = []

    def _average(self) -> None:
        gradient, self._mean = self._gradient, None  # that of the last step takes memory
        self._vector.write_gradients(gradient)
        usable = self._scale.undo(gradient)
        if not usable:
            gradient.fill(0)
        elif not np.isfinite(gradient).all():
            raise CodecError(
                f"NaN or Inf in the gradients of step {self.steps}; nothing was sent",
                fix="lower the learning rate, or use a GradScaler, and start this trainer again",
            )

        def work(exchange: Exchange) -> F32 | None:
            if not exchange.counts:
                gradient.fill(0)
            return self._compressor.average(gradient, self.steps, exchange)

        self._mean = self._whole(work, usable)
        self.steps += self._mean is not None

    def _hide_gradients(self, inner: Optimizer) -> None:
        """Remove the gradients that ``inner`` would step with.

        An optimizer leaves parameters alone that have no gradient, and its state of them.
        """
        mine = _parameters(inner)
        self._hidden = [(p, p.grad) for p in mine if p.grad is not None]
        for p in mine:
            p.grad = None

    def _shared(self) -> list[F32]:
        return self._compressor.shared

    def _forget(self) -> None:
        self._compressor.forget()

    def _own(self) -> dict[str, Any]:
        return self._compressor.kept()

    def _restore(self, own: Mapping[str, Any]) -> None:
        self._compressor.restore(own)

    def _hook(self) -> None:
        self._scaling = GradScaling(self._inners)
        before = torch.compiler.disable(self._before_inner)  # type: ignore[no-untyped-call]
        after = torch.compiler.disable(self._after_inner)  # type: ignore[no-untyped-call]
        self._hooks += [inner.register_step_pre_hook(before) for inner in self._inners]
        self._hooks += [inner.register_step_post_hook(after) for inner in self._inners]

    def _unhook(self) -> None:
        super()._unhook()
        self._scaling.close()


def _parameters(inner: Optimizer) -> list[nn.Parameter]:
    return [p for group in inner.param_groups for p in group["params"]]


def _check_momentum(inners: tuple[Optimizer, ...], compressor: Compressor) -> None:
    """Raise ConfigError where momentum would be applied twice, as the class says."""
    for inner in inners:
        for group in inner.param_groups:
            if group.get("momentum") or group.get("beta1") or group.get("betas", (0.0,))[0]:
                name = type(compressor).__name__
                raise ConfigError(
                    f"{name} has momentum, and the inner {type(inner).__name__} has it too",
                    fix=f"give {name} a torch.optim.SGD with momentum=0; with "
                    f"{type(inner).__name__} use another compressor, PowerSGD say",
                )
