"""DiLoCo for an ordinary training loop: the trainer's side of a run (arXiv 2311.08105).

The wrapper hooks the inner optimizer's step, so the loop stays as it was. A life of a round here:

1. ``sync_every`` inner steps move the model's parameters θ_m away from the run's θ.
2. θ_m is written to the daemon's shared memory as float32 and submitted with its weight.
3. The trainer waits. COMMITTED: θ_m is overwritten by the run's new θ, gradients are zeroed.
   MISSED (the round closed before the submission came): θ_m and its weight are kept and the
   next round carries both. RELOAD: the daemon got newer state another way; local work is dropped.

Arithmetic on θ, momentum and the network are the daemon's business (``optim.outer``, ``peer``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from atoll.collectives.errors import CodecError, ConfigError
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.sessions import TrainerSession
from atoll.optim.spec import RunSpec, host_bytes, log_bytes

__all__ = ["DiLoCo"]

STATE_VERSION = 1
# Wrappers put their name into the names of what they wrap: torch.compile, FSDP, checkpointing.
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


class DiLoCo:
    """Trains ``model`` together with the other peers of the run that ``peer`` belongs to.

    The arguments and the model's trainable parameters must equal the run's; the first trainer of a
    run sets them, and IncompatibleRunError lists the differences to any later one. Then the run's
    parameters replace the model's. Use it as a context manager or call ``close()``; either closes
    ``peer`` too.

    ``inner`` may be a sequence (say Muon for matrices, AdamW for the rest) whose last member's
    step completes a local step. Steps that a GradScaler skips and accumulation micro-steps do not
    count. Buffers (BatchNorm statistics and the like) stay local.

    Tuning: raise ``sync_every`` if ``metrics()["waited_s"]`` is a large part of the run's time;
    lower ``outer_lr`` towards 0.4 for two peers, keep 0.7 for eight or many steps per round.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer | Sequence[Optimizer],
        sync_every: int,
        peer: TrainerSession,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        codec: str = "int8",
        round_deadline_s: float = 600.0,
    ) -> None:
        self.peer = peer
        self.spec = RunSpec(
            sync_every=sync_every,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            codec=codec,
            round_deadline_s=round_deadline_s,
        )
        named = _trainable(model)
        self.manifest = Manifest.of(
            Parameter(name, tuple(p.shape), str(p.dtype).removeprefix("torch."))
            for name, p in named.items()
        )
        offsets = self.manifest.offsets
        self._parameters = [(p, *offsets[name]) for name, p in named.items()]
        inners = (inner,) if isinstance(inner, Optimizer) else tuple(inner)
        _check_inner(inners, named.values())

        self._steps = self._tokens = self._rounds = self._missed = 0
        self._waited_s = 0.0
        self._steps_in_round = 0
        self._steps_unsent = self._tokens_unsent = 0  # since the last committed round
        self._swapped = False

        print(
            f"atoll: {self.manifest.elements:,} parameters; the daemon takes at most "
            f"{host_bytes(self.spec, self.manifest) / 2**20:.0f} MiB of host memory for them "
            f"({log_bytes(self.spec, self.manifest) / 2**20:.0f} MiB of it the log of the last "
            "rounds), the device nothing",
            file=sys.stderr,
        )
        peer.attach(self.spec, self.manifest, self._write)
        peer.pull(self._read)
        # torch.compile must not trace the hook; torch leaves this function untyped
        hook = torch.compiler.disable(self._after_step)  # type: ignore[no-untyped-call]
        self._hook = inners[-1].register_step_post_hook(hook)

    def count(self, tokens: int) -> None:
        """Tokens (or samples) behind the coming step: they become the submission's weight.

        All peers of a run should count in one unit, or none should: then each step weighs one.
        """
        if tokens < 0:
            raise ConfigError(f"count({tokens}): a number of tokens is not negative")
        self._tokens += tokens
        self._tokens_unsent += tokens

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """The run's parameters in the model, for evaluation or saving; then the local ones again.

        Evaluate these: a replica in the middle of a round is worse than the run. Costs a second
        copy of the parameters on the device meanwhile.
        """
        if self._swapped:
            raise ConfigError("outer_parameters() inside outer_parameters()")
        local = [p.detach().clone() for p, _, _ in self._parameters]
        epoch = self.peer.epoch
        self._swapped = True
        try:
            self.peer.pull(self._read)
            yield
        finally:
            self._swapped = False
            with torch.no_grad():
                for (p, _, _), values in zip(self._parameters, local, strict=True):
                    p.copy_(values)
        if self.peer.epoch != epoch:  # rounds that the local work stands on were undone meanwhile
            self._take_run()

    def metrics(self) -> dict[str, float]:
        """Totals of this trainer, for any logger."""
        return {
            "round": self.peer.round,
            "rounds": self._rounds,
            "missed": self._missed,
            "steps": self._steps,
            "tokens": self._tokens,
            "waited_s": self._waited_s,
        }

    def state_dict(self) -> dict[str, Any]:
        """This trainer's counters. Save it beside the model's and the inner optimizer's state."""
        return {"version": STATE_VERSION, **self.metrics()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters and take the run's current parameters.

        The run's parameters win over any that were loaded into the model from a file, so a round
        that was under way when the state was saved begins anew.
        """
        expected = self.state_dict().keys()
        if state.get("version") != STATE_VERSION or state.keys() != expected:
            raise ConfigError(
                f"not a DiLoCo state of version {STATE_VERSION}: it has {sorted(state)[:20]}",
                fix="load what DiLoCo.state_dict() gave",
            )
        self._steps, self._tokens = int(state["steps"]), int(state["tokens"])
        self._rounds, self._missed = int(state["rounds"]), int(state["missed"])
        self._waited_s = float(state["waited_s"])
        self._take_run()

    def close(self) -> None:
        """Unhook the inner optimizer and close the session. The model keeps its parameters."""
        self._hook.remove()
        self.peer.close()

    def __enter__(self) -> DiLoCo:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # A fused optimizer skips a step by itself and then still calls its hooks; the GradScaler
        # leaves the reason on it for the time of the step.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and found_inf.item() > 0:
            return
        if self._swapped:
            raise ConfigError(
                "optimizer.step() inside outer_parameters(): the step would be thrown away",
                fix="only evaluate or save inside outer_parameters()",
            )
        self._steps += 1
        self._steps_unsent += 1
        self._steps_in_round += 1
        if self._steps_in_round >= self.spec.sync_every:
            self._sync()
        else:
            self.peer.check()  # an inner phase may be long: a dead daemon is noticed in the middle

    def _sync(self) -> None:
        self._check_finite()
        self.peer.submit(self._write, float(self._tokens_unsent or self._steps_unsent))
        outcome = self.peer.wait()
        self._waited_s += outcome.waited_s
        self._steps_in_round = 0
        if outcome.kind == "missed":
            self._missed += 1
            return
        if outcome.kind == "committed":
            self._rounds += 1
        self._take_run()

    def _take_run(self) -> None:
        """Begin a round from the run's parameters."""
        self.peer.pull(self._read)
        self._steps_in_round = self._steps_unsent = self._tokens_unsent = 0
        for p, _, _ in self._parameters:
            if p.grad is not None:
                p.grad.zero_()  # in place: DDP buckets and CUDA graphs keep views of gradients

    def _write(self, flat: NDArray[np.float32]) -> None:
        """Model -> float32 vector in the manifest's order."""
        for p, lo, hi in self._parameters:
            torch.from_numpy(flat[lo:hi]).view(p.shape).copy_(p.detach())

    def _read(self, flat: NDArray[np.float32]) -> None:
        """Vector -> model, in place, so that ties, views and compiled code stay valid."""
        with torch.no_grad():
            for p, lo, hi in self._parameters:
                # A copy, because the run's memory is read-only, which torch has no word for.
                p.copy_(torch.from_numpy(flat[lo:hi].copy()).view(p.shape))

    def _check_finite(self) -> None:
        bad = [
            name
            for name, (p, _, _) in zip(self.manifest.offsets, self._parameters, strict=True)
            if not bool(p.detach().isfinite().all())
        ]
        if bad:
            raise CodecError(
                f"NaN or Inf in {', '.join(bad[:5])} ({len(bad)} of {len(self._parameters)} "
                f"parameters) after step {self._steps}: round not submitted",
                fix="lower the inner learning rate or clip gradients, and start this trainer again",
            )


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Canonical name -> trainable parameter, in order of name; a tied parameter appears once.

    DDP's ``module.`` is dropped when all names have it, other wrappers' parts wherever they are,
    so that a compiled replica under DDP and a bare one have the same manifest.
    """
    paths = [
        ([part for part in name.split(".") if part not in WRAPPERS], p)
        for name, p in model.named_parameters()
    ]
    while paths and all(path[0] == "module" and len(path) > 1 for path, _ in paths):
        paths = [(path[1:], p) for path, p in paths]
    return dict(sorted((".".join(path), p) for path, p in paths if p.requires_grad))


def _check_inner(inners: Sequence[Optimizer], parameters: Iterable[nn.Parameter]) -> None:
    ours = set(map(id, parameters))
    for inner in inners:
        if not isinstance(inner, Optimizer):
            raise ConfigError(f"inner is a {type(inner).__name__}, not a torch.optim.Optimizer")
        if not any(id(p) in ours for group in inner.param_groups for p in group["params"]):
            raise ConfigError(
                f"the inner {type(inner).__name__} holds no trainable parameter of the model",
                fix="make it from the parameters of the model that is given to DiLoCo",
            )
    if not inners:
        raise ConfigError("no inner optimizer")
