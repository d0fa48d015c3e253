"""What the methods with local steps have in common: hooks, counters, evaluation, saved state.

A method is a class of its own in a short file. It says what its peers must agree on (a ``RunSpec``)
and what happens when a local step is complete (``_step_done``); ``_submit`` and ``_outcome`` are
the two halves of a round, ``_take_run`` begins anew from the run's parameters.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from atoll.collectives.errors import CodecError, ConfigError
from atoll.optim.model_vector import ModelVector
from atoll.optim.sessions import TrainerSession
from atoll.optim.spec import RunSpec, host_bytes, log_bytes
from atoll.peer.session import Outcome

__all__ = ["Inner", "Method", "check_inner"]

STATE_VERSION = 1
Inner: TypeAlias = Optimizer | Sequence[Optimizer]


class Method(ABC):
    """Trains ``model`` together with the other peers of the run that ``peer`` belongs to.

    The method, its numbers and the model's trainable parameters must equal the run's; the first
    trainer of a run sets them, and IncompatibleRunError lists the differences to any later one.
    Then the run's parameters replace the model's. Use it as a context manager or call ``close()``;
    either closes ``peer`` too.

    ``inner`` may be a sequence (say Muon for matrices, AdamW for the rest) whose last member's
    step completes a local step. Steps that a GradScaler skips and accumulation micro-steps do not
    count. Buffers (BatchNorm statistics and the like) stay local.
    """

    def __init__(self, model: nn.Module, inner: Inner, peer: TrainerSession, spec: RunSpec) -> None:
        self.peer, self.spec = peer, spec
        self._vector = ModelVector(model)
        self.manifest = self._vector.manifest
        self._inners = (inner,) if isinstance(inner, Optimizer) else tuple(inner)
        check_inner(self._inners, self._vector.parameters)

        self._steps = self._tokens = self._rounds = self._missed = 0
        self._waited_s = 0.0
        self._steps_unsent = self._tokens_unsent = 0  # since the last committed round
        self._swapped = False

        print(
            f"atoll: {self.manifest.elements:,} parameters; the daemon takes at most "
            f"{host_bytes(self.spec, self.manifest) / 2**20:.0f} MiB of host memory for them "
            f"({log_bytes(self.spec, self.manifest) / 2**20:.0f} MiB of it the log of the last "
            "rounds), the device nothing",
            file=sys.stderr,
        )
        peer.attach(self.spec, self.manifest, self._vector.write)
        peer.pull(self._vector.read)
        # torch.compile must not trace the hook; torch leaves this function untyped
        hook = torch.compiler.disable(self._after_step)  # type: ignore[no-untyped-call]
        self._hook = self._inners[-1].register_step_post_hook(hook)

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
        epoch = self.peer.epoch
        self._swapped = True
        try:
            with self._vector.put_back():
                self.peer.pull(self._vector.read)
                yield
        finally:
            self._swapped = False
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
            name = type(self).__name__
            raise ConfigError(
                f"not a {name} state of version {STATE_VERSION}: it has {sorted(state)[:20]}",
                fix=f"load what {name}.state_dict() gave",
            )
        self._steps, self._tokens = int(state["steps"]), int(state["tokens"])
        self._rounds, self._missed = int(state["rounds"]), int(state["missed"])
        self._waited_s = float(state["waited_s"])
        self._take_run()

    def close(self) -> None:
        """Unhook the inner optimizer and close the session. The model keeps its parameters."""
        self._hook.remove()
        self.peer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ for the methods

    @abstractmethod
    def _step_done(self) -> None:
        """A local step is complete; ``_steps`` counts it."""

    def _submit(self) -> None:
        """The parameters as they are now; CodecError if a round cannot carry them."""
        bad = self._vector.not_finite()
        if bad:
            raise CodecError(
                f"NaN or Inf in {', '.join(bad[:5])} ({len(bad)} of {len(self._vector.parameters)} "
                f"parameters) after step {self._steps}: round not submitted",
                fix="lower the inner learning rate or clip gradients, and start this trainer again",
            )
        self.peer.submit(self._vector.write, float(self._tokens_unsent or self._steps_unsent))

    def _outcome(self) -> Outcome:
        """Wait for what became of it."""
        outcome = self.peer.wait()
        self._waited_s += outcome.waited_s
        self._rounds += outcome.kind == "committed"
        self._missed += outcome.kind == "missed"
        return outcome

    def _take_run(self) -> None:
        """Begin a round from the run's parameters."""
        self.peer.pull(self._vector.read)
        self._steps_unsent = self._tokens_unsent = 0
        self._vector.zero_gradients()

    # ------------------------------------------------------------ inside

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
        self._step_done()


def check_inner(inners: Sequence[Optimizer], parameters: Iterable[nn.Parameter]) -> None:
    """ConfigError for what does not train any of ``parameters``."""
    ours = set(map(id, parameters))
    for inner in inners:
        if not isinstance(inner, Optimizer):
            raise ConfigError(f"inner is a {type(inner).__name__}, not a torch.optim.Optimizer")
        if not any(id(p) in ours for group in inner.param_groups for p in group["params"]):
            raise ConfigError(
                f"the inner {type(inner).__name__} holds no trainable parameter of the model",
                fix="make it from the parameters of the model that is given to the method",
            )
    if not inners:
        raise ConfigError("no inner optimizer")
